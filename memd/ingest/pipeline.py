"""From text to drafts that can be appended: what conversations, `memd import` and other sources have in common.

Rule: synchronous, and appends nothing. What a topic has already is left out here: messages by their digests, chunks by
their exact text, and of chunks that have the same words within one batch all but the first. Drafts come out redacted.

Words decide. Vectors alone make no two texts one: "the port is 8081" and "the port is 8082", rows of a table, and a
file that was read again after one number of it had changed are as near to each other (cosine above 0.995) as many a
text is to itself in other white space.

What was said before is stored once, unless something else has come in its place since: "deploy on Monday", "no, on
Tuesday", "on Monday after all" are three chunks, or memory would take for the newest what was taken back.
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
"""From here on, as the bundled model measures it, two texts may be about the same thing."""
AGAIN_CHARACTERS_MIN = 12
"""Shorter texts ("ok", "thanks") say nothing that could be out of date."""
AGAIN_CHUNKS_MAX = 4
"""A message of more chunks is a file or a page: read again and again, it would fill the log."""

_MARK = re.compile(r"(?<=[\w)\]}\"'”’])[.,;:!…]++(?!\S)")
"""Marks behind a word that change nothing of what is said; a question mark does."""


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
        """The same, for a text of megabytes: `step` is called before each piece, and may wait or end it."""
        return Cutter(self._chunking, self.counter, self.redactor, step)

    def _split(self, run: Sequence[Utterance], **fields: Any) -> Iterator[Draft]:
        """The chunks of a run, redacted; they have these fields, and are of now."""
        now_us = time.time_ns() // 1000
        for chunk in split(run, settings=self._chunking, tokenizer=self.counter, step=self._step):
            draft = msgspec.structs.replace(chunk, uuid=uuid.uuid4().bytes, created_at=now_us, **fields)
            yield self.redactor.draft(draft)

    def cut(
        self,
        topic_id: str,
        runs: Sequence[Sequence[Utterance]],
        *,
        kind: str = "turn",
        source: str | None = None,
        title: str = "",
    ) -> list[Draft]:
        """Cut and redact; a chunk never crosses two runs. The same messages make the same chunks, uuids and all."""
        part, drafts = Section(b"", heading=(title,)) if title else UNSET, []
        for run in runs:
            places: Counter[bytes] = Counter()
            for draft in self._split(run, kind=kind, source=source, part=part):
                if draft.digests:
                    first = draft.digests[0]
                    place, places[first] = places[first], places[first] + 1
                    draft = msgspec.structs.replace(draft, uuid=_derived_uuid(topic_id, first, place, draft))
                drafts.append(draft)
        return drafts

    def cut_note(self, topic_id: str, note_id: bytes, note: Note) -> list[Draft]:
        """Cut and redact a note; the same one makes the same chunks. The last of them has its id among its digests:
        where the log knows that, it has all of the note.
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
                author=note.author or UNSET,
            )
            for number, draft in enumerate(drafts)
        ]

    def cut_document(
        self, document: GivenDocument, step: Callable[[], None] = lambda: None, author: str = ""
    ) -> list[Draft]:
        """Cut and redact a document of a principal's, section by section; `step` is called before each, and may end
        it."""
        hash_, root = bytes.fromhex(document.hash), bytes.fromhex(document.root)
        drafts: list[Draft] = []
        for section in document.sections:
            step()
            if section.text.strip():
                part = Section(hash_, 0, 1, section.heading, section.page, section.sheet, root)
                fields = {"kind": "document", "source": document.source, "part": part, "author": author or UNSET}
                drafts += self._split([Utterance(self.redactor.text(section.text))], **fields)
        for number, draft in enumerate(drafts):
            assert isinstance(draft.part, Section)
            part = msgspec.structs.replace(draft.part, number=number, of=len(drafts))
            drafts[number] = msgspec.structs.replace(draft, part=part)
        return drafts


class Drafter:
    """Makes drafts with one embedding model and one set of settings. Use it in one thread at a time."""

    def __init__(
        self,
        cutter: Cutter,
        dedupe_cosine: float,
        embed_many: EmbedMany,
        same_cosine: Callable[[float], float] = float,
    ) -> None:
        """`embed_many`, `same_cosine`: `Embedder`'s, or a caller's version of them."""
        self.cutter = cutter
        self._dedupe_cosine = dedupe_cosine
        self.embed_many = embed_many
        self._same_cosine = same_cosine

    def drafts(
        self,
        topic: TopicLog,
        runs: Sequence[Sequence[Utterance]],
        *,
        kind: str = "turn",
        source: str | None = None,
        title: str = "",
        is_apart: bool = False,
    ) -> list[Draft]:
        """Cut, redact and embed one batch, of messages or of text without a speaker; a chunk never crosses two runs.

        Chunks of another kind or source are no duplicates, in the batch or in the topic, whatever they say. `is_apart`:
        nothing is a duplicate. Raises EmbeddingError: the model failed on a text.
        """
        digests = [message.digest for run in runs for message in run if message.digest is not None]
        cut = self.cutter.cut(topic.topic_id, runs, kind=kind, source=source, title=title)
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
        """Embed one batch, but for what repeats the topic's chunks or earlier ones of the batch (see `standing_for`).
        Raises EmbeddingError: the model failed on a text.

        Args:
            digests: of the messages that the log has whole with this batch.
            is_shown: whether a prompt has shown the chunk with this uuid: then it is kept, for it may be corrected.
            is_new: whether the message with this digest is said now, and not a client's history sent again.
        """
        batch = self._batch(topic, drafts, is_shown, is_new)
        vectors = self._vectors(batch)
        cosines = map(self._same_cosine, (self._dedupe_cosine, ALIKE_COSINE))
        standing = standing_for(batch, vectors, *cosines)
        known: dict[int, dict[bytes, None]] = {}
        for one, stored in zip(batch, standing, strict=True):
            if stored is not None:
                # A chunk that repeats an earlier one is not stored, but its messages are known by the one that is.
                known.setdefault(stored, {}).update(dict.fromkeys(one.draft.digests))
        made = [
            msgspec.structs.replace(
                batch[index].draft, vector=vectors[index].astype("<f4").tobytes(), digests=tuple(known[index])
            )
            for index in known
        ]
        return _completing(made, digests)

    def _batch(
        self,
        topic: TopicLog,
        drafts: Sequence[Draft],
        is_shown: Callable[[bytes], bool],
        is_new: Callable[[bytes], bool],
    ) -> list[BatchDraft]:
        """Those of a batch's chunks that the topic does not have, and those that may be stored again."""
        snapshot, alike = topic.snapshot(), self._same_cosine(ALIKE_COSINE)
        batch = []
        for draft, may in zip(drafts, may_return(drafts), strict=True):
            if is_shown(draft.uuid):
                batch.append(BatchDraft(draft, is_kept=True))
                continue
            if topic.forbidden.has_text(draft.content):
                continue
            if (copy := live_copy(snapshot, draft)) is None:
                batch.append(BatchDraft(draft, may_return=may))
            elif may and (all(map(is_new, draft.digests)) or draft.said_at == copy.said_at != UNSET):
                # What one request brought is stored in batches: a history that nobody knew is new in all its length.
                since = alike_since(snapshot, copy, alike)
                # Nobody knows whether an import that tells no times says it before or after those.
                is_dated = draft.source is None or draft.said_at is not UNSET
                if since is not None:
                    batch.append(BatchDraft(draft, may_return=may, copy=copy, since=since if is_dated else ()))
        return batch

    def _vectors(self, batch: Sequence[BatchDraft]) -> NDArray[np.float32]:
        """Their vectors, shape `(n, dimension)`: those of copies are known, and no text is embedded twice."""
        known = {one.copy.embedded_text: one.copy.embedding for one in batch if one.copy is not None}
        texts = [text for text in dict.fromkeys(one.draft.embedded_text for one in batch) if text not in known]
        known.update(zip(texts, self.embed_many(texts) if texts else (), strict=True))
        return np.array([known[one.draft.embedded_text] for one in batch], dtype=np.float32)


def _completing(drafts: Sequence[Draft], digests: Sequence[bytes]) -> list[Draft]:
    """The drafts, as they say which of these messages the log has whole then: each of its own, and the last one also of
    those of which nothing is stored now, because their text is in the log.

    Otherwise those alone would be cut into other chunks the next time, and be stored.
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
    """16-byte BLAKE2b of the topic, the digest of the first message in the chunk, the chunk's place in it, the text."""
    head = b"%s\0%s%d\0" % (topic_id.encode(), first_digest, place)
    return hashlib.blake2b(head + draft.content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def under_new_uuid(topic: TopicLog, draft: Draft) -> Draft:
    """The draft, under another uuid if its own is of a chunk that was erased: that one does not come back."""
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
    """The messages that are to be remembered and are not yet, redacted, in runs of neighbours; none crosses two parts.

    A question in the log is remembered again in front of an answer that is not: without it nobody finds the answer. It
    is then of the one whose request was answered. One that was corrected is not. No run has messages of two authors.

    Args:
        messages: consecutive messages of one conversation, each with its chained digest; None stands for one that is in
            the log and out of the prompt.
        instructions: system and developer messages are to be remembered too; they are once they have left the prompt.
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
        # Some clients give no ids, or one to several calls: nobody knows whose result it is.
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
    """A chunk of a batch, and what the topic has of it."""

    draft: Draft
    is_kept: bool = False
    """It is stored whatever else there is."""
    may_return: bool = False
    copy: Entry | None = None
    """The topic's newest chunk with the same text."""
    since: Sequence[Entry] = ()
    """The topic's chunks that came after the copy and are alike (`ALIKE_COSINE`)."""


def words_of(text: str) -> str:
    """The words of a text in their order, as texts are compared: the same for two that differ in white space, in marks
    behind words, and in capitals that open words. Numbers, identifiers, paths, signs and questions stay what they are.
    """
    words = _MARK.sub("", text).split()
    return " ".join(word.lower() if word.isalpha() and word[1:].islower() else word for word in words)


def may_return(drafts: Sequence[Draft]) -> list[bool]:
    """For each chunk of a batch whether it may be stored again: not what is short, no part of something long, and of
    notes and documents nothing."""
    counts = Counter(digest for draft in drafts for digest in draft.digests)
    return [
        draft.kind == "turn"
        and len(draft.content) >= AGAIN_CHARACTERS_MIN
        and 0 < max((counts[digest] for digest in draft.digests), default=0) <= AGAIN_CHUNKS_MAX
        for draft in drafts
    ]


def is_outdated(copy: ChunkState, again: ChunkState, since: Iterable[ChunkState], to_come: Container[str] = ()) -> bool:
    """Whether a text that is said again is to be stored again: another has come in the place of its copy.

    That is one that is alike, was said between the two in the same stream (kind and source) and by another message than
    they were. It must not be said again itself behind this: who sends "Monday" and "Tuesday" again, in this order,
    changes nothing. `since`: what is alike and came after the copy. `to_come`: the words (see `words_of`) of what
    follows.
    """
    digests, words = {*copy.digests, *again.digests}, words_of(again.embedded_text)
    between = (
        words_of(one.embedded_text)
        for one in since
        if (one.kind, one.source) == (again.kind, again.source)
        and copy.said <= one.said <= again.said
        and digests.isdisjoint(one.digests)
    )
    return any(other != words and other not in to_come for other in between)


def standing_for(
    batch: Sequence[BatchDraft], vectors: NDArray[np.float32], same_cosine: float, alike_cosine: float
) -> list[int | None]:
    """For each of a batch's chunks the index of the one that is stored for it: its own, or that of an earlier one with
    the same words; None where the topic's copy stands for it.

    Args:
        vectors: unit vectors, shape `(n, dimension)`.
        same_cosine: from which similarity on the same words are the same text; the very same text always is.
        alike_cosine: `ALIKE_COSINE` by this model.
    """
    texts = [one.draft.embedded_text for one in batch]
    words = [words_of(text) for text in texts]
    to_come = Counter(words)
    stored: list[int] = []
    with_words = defaultdict[str, list[int]](list)
    standing: list[int | None] = []
    for index, one in enumerate(batch):
        to_come[words[index]] -= 1
        like = reversed(with_words[words[index]])
        same = (i for i in like if texts[i] == texts[index] or vectors[i] @ vectors[index] >= same_cosine)
        first = next(same, None)
        copy, since = (one.copy, one.since) if first is None else (batch[first].draft, ())
        is_new = copy is None or one.is_kept
        if copy is not None and one.may_return and not is_new:
            behind = [i for i in stored if first is None or i > first]
            alike = [batch[i].draft for i in behind if vectors[i] @ vectors[index] >= alike_cosine]
            is_new = is_outdated(copy, one.draft, [*since, *alike], {word for word in to_come if to_come[word]})
        if is_new:
            stored.append(index)
            with_words[words[index]].append(index)
        standing.append(index if is_new else first)
    return standing
