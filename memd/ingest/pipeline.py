"""Makes drafts of text, ready to append, for conversations, `memd import` and other sources.

Rule: synchronous, and appends nothing. Duplicates are left out here: messages by digest, chunks of the topic by exact
text, and chunks of one batch by their words, except the first. Drafts are redacted.

Words decide what is a duplicate, not vectors alone: "the port is 8081" and "the port is 8082", rows of a table, and a
file before and after a change of one number have a cosine above 0.995, like many a text and its copy in other white
space.

A repeated text is stored once, unless another has replaced it in between: "deploy on Monday", "no, on Tuesday", "on
Monday after all" are three chunks. Otherwise memory would take the withdrawn "Tuesday" for the newest.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.conversation import compaction
from memd.conversation.tokens import TokenCounter
from memd.embedding.embedder import EmbedMany
from memd.entries import ChunkState, Draft, Entry, Section, speaker_name
from memd.ingest.chunking import Utterance, split
from memd.ingest.readers.text import GivenDocument
from memd.ingest.redaction import NO_REDACTION, Redactor
from memd.messages import RESULT_ROLES, Message, stored_text
from memd.notes import Note
from memd.settings.model import ChunkingSettings
from memd.store.snapshot import alike_since, live_copy
from memd.store.store import TopicLog

ALIKE_COSINE = 0.7
"""Least cosine of the bundled model at which two texts may be about the same thing."""
AGAIN_CHARACTERS_MIN = 12
"""Shorter texts ("ok", "thanks") cannot be outdated."""
AGAIN_CHUNKS_MAX = 4
"""A message of more chunks is a file or a page: stored at each reading, it would fill the log."""

_MARK = re.compile(r"(?<=[\w)\]}\"'”’])[.,;:!…]++(?!\S)")
"""Marks after a word that do not change the meaning; a question mark does."""


class Cutter:
    """Cuts text into drafts without vectors. Any thread may use it."""

    def __init__(
        self,
        chunking: ChunkingSettings,
        counter: TokenCounter,
        redactor: Redactor = NO_REDACTION,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self.redactor, self.counter = redactor, counter
        self._chunking, self._step = chunking, step

    def in_steps(self, step: Callable[[], None]) -> Cutter:
        """Return a copy for a text of megabytes: `step` is called before each piece, and may wait, or raise to stop."""
        return Cutter(self._chunking, self.counter, self.redactor, step)

    def _split(self, run: Sequence[Utterance], **fields: Any) -> Iterator[Draft]:
        """Yield the redacted chunks of a run, with these fields, created now."""
        now_us = time.time_ns() // 1000
        for chunk in split(run, settings=self._chunking, tokenizer=self.counter, step=self._step):
            draft = msgspec.structs.replace(chunk, uuid=uuid.uuid4().bytes, created_at=now_us, **fields)
            yield self.redactor.draft(draft)

    def cut(
        self, topic_id: str, runs: Sequence[Sequence[Utterance]], *, source: str | None = None, title: str = ""
    ) -> list[Draft]:
        """Cut and redact; a chunk never crosses runs. The same messages always give the same chunks with the same
        uuids."""
        part, drafts = Section(b"", heading=(title,)) if title else UNSET, []
        for run in runs:
            places: Counter[bytes] = Counter()
            for draft in self._split(run, source=source, part=part):
                if draft.digests:
                    first = draft.digests[0]
                    place, places[first] = places[first], places[first] + 1
                    draft = msgspec.structs.replace(draft, uuid=_derived_uuid(topic_id, first, place, draft))
                drafts.append(draft)
        return drafts

    def cut_note(self, topic_id: str, note_id: bytes, note: Note) -> list[Draft]:
        """Cut and redact a note; the same note always gives the same chunks. The last chunk has the note's id as a
        digest: if the log has that digest, it has the whole note.
        """
        note = self.redactor.kept(note)
        drafts = [*self._split([Utterance(note.content)], kind="note", source=note.source)]
        return [
            msgspec.structs.replace(
                draft,
                uuid=_derived_uuid(topic_id, note_id, number, draft),
                digests=(note_id,) if number == len(drafts) - 1 else (),
                part=Section(note_id, number, len(drafts), (note.title,) if note.title else ()),
                tags=note.tags or UNSET,
                said_at=draft.created_at if note.said_at is UNSET else note.said_at,
                dated=note.dated or UNSET,
                author=note.author or UNSET,
            )
            for number, draft in enumerate(drafts)
        ]

    def cut_document(
        self, document: GivenDocument, step: Callable[[], None] = lambda: None, author: str = ""
    ) -> list[Draft]:
        """Cut and redact a principal's document section by section; `step` is called before each, and may raise to
        stop."""
        hash_, root = bytes.fromhex(document.hash), bytes.fromhex(document.root)
        drafts: list[Draft] = []
        for section in document.sections:
            step()
            if section.text.strip():
                part = Section(hash_, 0, 1, section.heading, section.page, section.sheet, root)
                fields = {"kind": "document", "source": document.source, "part": part, "author": author or UNSET}
                said_at = UNSET if section.said_at is None else section.said_at
                drafts += self._split([Utterance(self.redactor.text(section.text))], said_at=said_at, **fields)
        for number, draft in enumerate(drafts):
            assert isinstance(draft.part, Section)
            part = msgspec.structs.replace(draft.part, number=number, of=len(drafts))
            drafts[number] = msgspec.structs.replace(draft, part=part)
        return drafts


class Drafter:
    """Makes drafts with one embedding model and one set of settings. Use it in one thread at a time."""

    def __init__(
        self, cutter: Cutter, dedupe_cosine: float, embed_many: EmbedMany, same_cosine: Callable[[float], float] = float
    ) -> None:
        """`embed_many`, `same_cosine`: methods of `Embedder`, or wrappers of them."""
        self.cutter = cutter
        self._dedupe_cosine = dedupe_cosine
        self.embed_many = embed_many
        self._same_cosine = same_cosine

    def drafts(
        self,
        topic: TopicLog,
        runs: Sequence[Sequence[Utterance]],
        *,
        source: str | None = None,
        title: str = "",
        is_apart: bool = False,
    ) -> list[Draft]:
        """Cut, redact and embed one batch, of messages or of text without a speaker; a chunk never crosses runs.

        Only chunks of the same source are duplicates. `is_apart`: none are. Raises EmbeddingError: the model
        failed on a text.
        """
        digests = [message.digest for run in runs for message in run if message.digest is not None]
        cut = self.cutter.cut(topic.topic_id, runs, source=source, title=title)
        new = [under_new_uuid(topic, draft) for draft in cut]
        return self.embedded(topic, new, digests, is_shown=lambda uuid: is_apart)

    def embedded(
        self,
        topic: TopicLog,
        drafts: Sequence[Draft],
        digests: Sequence[bytes],
        *,
        is_shown: Callable[[bytes], bool] = lambda uuid: False,
        is_new: Callable[[bytes], bool] = lambda digest: True,
    ) -> list[Draft]:
        """Embed one batch without repetitions of the topic's chunks or of earlier ones in the batch: texts with the
        same words and similar vectors. A chunk gets the digests of those that repeat it. Raises EmbeddingError: the
        model failed on a text.

        Args:
            digests: digests of the messages that are completely in the log after this batch.
            is_shown: tells if a prompt has shown a chunk: then it is kept, because it may be corrected.
            is_new: tells if a message is new, not part of a history that the client sent again.
        """
        batch = self._batch(topic, drafts, is_shown, is_new)
        vectors = self._vectors(batch)
        same, alike = map(self._same_cosine, (self._dedupe_cosine, ALIKE_COSINE))
        texts = [one.draft.embedded_text for one in batch]
        words = [*map(words_of, texts)]
        to_come, with_words = Counter(words), defaultdict[str, list[int]](list)
        stored: dict[int, dict[bytes, None]] = {}
        """The digests of each chunk to be stored, and of those that repeat it."""
        for index, one in enumerate(batch):
            to_come[words[index]] -= 1
            like = reversed(with_words[words[index]])
            repeated = (i for i in like if texts[i] == texts[index] or vectors[i] @ vectors[index] >= same)
            first = next(repeated, None)
            copy, since = (one.copy, one.since) if first is None else (batch[first].draft, ())
            is_stored = copy is None or one.is_kept
            if copy is not None and one.may_return and not is_stored:
                behind = (i for i in stored if first is None or i > first)
                after = [batch[i].draft for i in behind if vectors[i] @ vectors[index] >= alike]
                is_stored = is_outdated(copy, one.draft, [*since, *after], +to_come)
            if is_stored:
                with_words[words[index]].append(index)
                first = index
            if first is not None:
                stored.setdefault(first, {}).update(dict.fromkeys(one.draft.digests))
        made = [
            msgspec.structs.replace(
                batch[index].draft, vector=vectors[index].astype("<f4").tobytes(), digests=tuple(own)
            )
            for index, own in stored.items()
            if not topic.forbidden.has_text(batch[index].draft.content)  # last: the time does not tell it
        ]
        return _completing(made, digests)

    def _batch(
        self,
        topic: TopicLog,
        drafts: Sequence[Draft],
        is_shown: Callable[[bytes], bool],
        is_new: Callable[[bytes], bool],
    ) -> list[BatchDraft]:
        """Return the batch's chunks that the topic does not have, and those that may be stored again."""
        snapshot, alike = topic.snapshot(), self._same_cosine(ALIKE_COSINE)
        batch = []
        for draft, may in zip(drafts, may_return(drafts), strict=True):
            if is_shown(draft.uuid):
                batch.append(BatchDraft(draft, is_kept=True))
                continue
            if (copy := live_copy(snapshot, draft)) is None:
                batch.append(BatchDraft(draft, may_return=may))
            elif may and (all(map(is_new, draft.digests)) or draft.said_at == copy.said_at != UNSET):
                # Messages of one request have equal times: an unknown history, stored in batches, is all new.
                since = alike_since(snapshot, copy, alike)
                # An import without times may be older or newer than those.
                is_dated = draft.source is None or draft.said_at is not UNSET
                if since is not None:
                    batch.append(BatchDraft(draft, may_return=may, copy=copy, since=since if is_dated else ()))
        return batch

    def _vectors(self, batch: Sequence[BatchDraft]) -> NDArray[np.float32]:
        """Return the drafts' vectors, shape `(n, dimension)`; copies' vectors are reused, equal texts embedded once."""
        known = {one.copy.embedded_text: one.copy.embedding for one in batch if one.copy is not None}
        texts = [text for text in dict.fromkeys(one.draft.embedded_text for one in batch) if text not in known]
        known.update(zip(texts, self.embed_many(texts) if texts else (), strict=True))
        return np.array([known[one.draft.embedded_text] for one in batch], dtype=np.float32)


def _completing(drafts: Sequence[Draft], digests: Sequence[bytes]) -> list[Draft]:
    """Return the drafts with the digests that they complete: each its own, and the last one also those of messages
    without a draft here, because their text is already in the log.

    Otherwise such messages would be cut alone into other chunks the next time, and be stored.
    """
    whole = frozenset(digests)
    complete = [tuple(one for one in draft.digests if one in whole) for draft in drafts]
    known = {digest for some in complete for digest in some}
    if complete:
        complete[-1] += tuple(digest for digest in digests if digest not in known)
    return [
        draft if some == draft.digests else msgspec.structs.replace(draft, completes=some)
        for draft, some in zip(drafts, complete, strict=True)
    ]


def _derived_uuid(topic_id: str, first_digest: bytes, place: int, draft: Draft) -> bytes:
    """Return the 16-byte BLAKE2b of topic, digest of the chunk's first message, place of the chunk in it, and text."""
    head = b"%s\0%s%d\0" % (topic_id.encode(), first_digest, place)
    return hashlib.blake2b(head + draft.content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def under_new_uuid(topic: TopicLog, draft: Draft) -> Draft:
    """Return the draft, with a new uuid if its own belongs to an erased chunk, which must not reappear."""
    snapshot = topic.snapshot()
    while snapshot.was_erased(draft.uuid):
        draft = msgspec.structs.replace(draft, uuid=hashlib.blake2b(draft.uuid, digest_size=16).digest())
    return draft


def unstored_runs(
    topic: TopicLog,
    messages: Sequence[tuple[bytes, Message | None]],
    redactor: Redactor = NO_REDACTION,
    *,
    instructions: bool = False,
) -> list[list[Utterance]]:
    """Return the messages yet to be stored, redacted, in runs of neighbours. No run crosses parts or authors.

    A stored question is stored again before an unstored answer, which could not be found without it. Its author is then
    the one whose request was answered. A corrected question is not repeated.

    Args:
        messages: consecutive messages of one conversation with their chained digests; None for a message that is in the
            log and out of the prompt.
        instructions: also store system and developer messages, as is done once they have left the prompt.
    """
    if topic.forbidden:
        has = topic.forbidden.has_message
        messages = [(digest, None if said and has(digest, said) else said) for digest, said in messages]
    wanted = {
        position
        for position, (digest, message) in enumerate(messages)
        if compaction.is_stored_kind(message, instructions=instructions) and not topic.has_digest(digest)
    }
    authors = {position: message.author for position, (_, message) in enumerate(messages) if message is not None}
    for position, ((digest, asked), (_, answer)) in enumerate(itertools.pairwise(messages)):
        if answer is None or answer.role != "assistant" or answer.tool_calls or position + 1 not in wanted:
            continue
        if asked is not None and asked.opens_turn and asked.said.strip() and not topic.is_taken_out(digest):
            wanted.add(position)
            authors[position] = answer.author
    utterances, calls = {}, dict[str, str]()
    for position, (digest, message) in enumerate(messages):
        if message is None or not (position in wanted or message.tool_calls):
            continue
        kept = redactor.kept(message)
        # Some clients give no ids, or the same id to several calls: then a result's call is unknown.
        ids = Counter(call.id for call in kept.tool_calls)
        for call in kept.tool_calls:
            is_named = bool(call.id) and ids[call.id] == 1 and not topic.forbidden.has_text(call.line)
            calls[call.id] = call.line if is_named else ""
        if position not in wanted:
            continue
        shown = () if kept.shown is UNSET else kept.shown
        name = speaker_name(kept.name)
        answered = calls.get(kept.tool_call_id, "") if kept.role in RESULT_ROLES else ""
        told = name, shown, kept.said_at, authors[position], bool(kept.tool_calls), answered
        utterances[position] = Utterance(stored_text(kept), kept.role, digest, *told)
    starts = [*compaction.part_starts(message for _, message in messages)]
    starts += [position for position in utterances if authors.get(position - 1, authors[position]) != authors[position]]
    return [[utterances[position] for position in run] for run in compaction.contiguous(list(utterances), starts)]


class BatchDraft(msgspec.Struct, frozen=True):
    """A chunk of a batch, with the topic's chunks that matter for its deduplication."""

    draft: Draft
    is_kept: bool = False
    """True if it is stored even as a duplicate."""
    may_return: bool = False
    copy: Entry | None = None
    """The topic's newest chunk with the same text."""
    since: Sequence[Entry] = ()
    """The topic's similar chunks (`ALIKE_COSINE`) appended after the copy."""


def words_of(text: str) -> str:
    """Normalise a text for comparison: without differences in white space, marks after words, and initial capitals.
    Numbers, identifiers, paths, signs and question marks are unchanged.
    """
    words = _MARK.sub("", text).split()
    return " ".join(word.lower() if word.isalpha() and word[1:].islower() else word for word in words)


def may_return(drafts: Sequence[Draft]) -> list[bool]:
    """Return for each chunk if it may be stored again: only chunks of turns that are neither short nor part of a long
    message."""
    counts = Counter(digest for draft in drafts for digest in draft.digests)
    return [
        draft.kind == "turn"
        and len(draft.content) >= AGAIN_CHARACTERS_MIN
        and 0 < max((counts[digest] for digest in draft.digests), default=0) <= AGAIN_CHUNKS_MAX
        for draft in drafts
    ]


def is_outdated(copy: ChunkState, again: ChunkState, since: Iterable[ChunkState], to_come: Container[str] = ()) -> bool:
    """Return True if a repeated text must be stored again, because another has replaced its copy.

    The replacement is similar, was said between the two in the same stream (kind and source), and came from another
    message. It must not itself be repeated later: sending "Monday" and "Tuesday" again, in this order, changes nothing.
    Imports are ordered by their dates; what is said here by the log alone, because daemons' clocks may differ. `since`:
    similar chunks after the copy. `to_come`: words (`words_of`) of the chunks that follow.
    """
    digests, words = {*copy.digests, *again.digests}, words_of(again.embedded_text)
    between = (
        words_of(one.embedded_text)
        for one in since
        if (one.kind, one.source) == (again.kind, again.source)
        and (again.source is None or copy.said <= one.said <= again.said)
        and digests.isdisjoint(one.digests)
    )
    return any(other != words and other not in to_come for other in between)
