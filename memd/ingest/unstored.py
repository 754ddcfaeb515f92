"""The text of a topic's buffer that is not in the log yet, cut into chunks before it is embedded.

Rule: a chunk that is shown while it is pending is the one that is stored: same text, same uuid, same public id. So
whatever is stored of a conversation is cut here, part by part (`compaction.part_starts`), and cut once. The parts are
listed on the event loop, which owns the buffer; the cutting is done in threads.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import operator
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
from msgspec import UnsetType

from memd.conversation import compaction
from memd.conversation.conversation import Buffered, Conversation
from memd.conversation.hot_buffer import HotBuffer
from memd.embedding.table import table_of
from memd.entries import Draft, Entry
from memd.ingest.copies import may_return
from memd.ingest.pipeline import Cutter, under_new_uuid, unstored_runs
from memd.messages import Message
from memd.notes import Note
from memd.store.pending import JoinedRuns, PendingChunk, PendingRun, UnstoredText
from memd.store.store import TopicLog

Key = tuple[bytes, ...]
"""See `unstored.Part.key`."""


_CHUNK_BYTES = 1_900
"""Of a pending chunk beside its text and its columns, its terms included (measured with tracemalloc)."""
_LONG_CHARACTERS = 200_000
"""A part with more takes seconds, and is cut in the background alone: searches neither cut it nor wait for it."""
_READ_AT_ONCE = 64
"""Chunks whose vectors the table makes in one call, between two steps."""
_CHARACTERS_MIN = 50
"""A shorter text takes the embedding model as long as one of so many."""
_SPARE_PARTS = 64
"""Parts that are kept although nobody asks for them now: a fork or a retry may."""


class Part(msgspec.Struct, frozen=True, dict=True):
    """Consecutive messages that are cut together."""

    messages: tuple[tuple[bytes, Message | None], ...]
    """Each with its digest."""
    end: int
    """The position behind them in their conversation."""
    instructions: bool = False
    """It is an instruction that has left the prompt."""
    note: tuple[bytes, Note] | None = None
    """It is a note, with its id, and has no messages."""

    @property
    def begin(self) -> int:
        """The position of the first of them in their conversation."""
        return self.end - len(self.messages)

    @cached_property
    def characters(self) -> int:
        """Of all its texts."""
        texts = (message.text for _, message in self.messages if message is not None)
        return sum(map(len, texts if self.note is None else (self.note[1].content,)))

    @property
    def is_long(self) -> bool:
        """Whether cutting it takes longer than a search has time."""
        return self.characters > _LONG_CHARACTERS

    @cached_property
    def key(self) -> tuple[bytes, ...]:
        """The digests of all that it has: where a history was rewritten, the first and last do not tell the others."""
        if self.note is not None:
            return (self.note[0],)
        return tuple(digest if message is not None else b"" for digest, message in self.messages)

    def has_others_than(self, digests: Collection[bytes]) -> bool:
        """Whether a message of it that has a text here is none of these."""
        return self.note is not None or not self.said.issubset(digests)

    @cached_property
    def said(self) -> frozenset[bytes]:
        """The digests of those of its messages that have a text here."""
        return frozenset(digest for digest, message in self.messages if message is not None)


class PartRun(tuple[Part, ...]):
    """Parts that follow each other in a conversation, as they were listed."""

    cut: tuple[int, Sequence[CutPart], PendingRun] = -1, (), PendingRun()
    """Those of them that were cut when they were joined last, and the chunks of these; in front of them the number of
    `PartCutter.drops` at that time if they were all, else -1."""

    @cached_property
    def keys(self) -> list[tuple[bytes, ...]]:
        """Of each of them."""
        return [part.key for part in self]

    @cached_property
    def spoken(self) -> PartRun:
        """Those that have a text here."""
        return self.without(())

    @cached_property
    def said(self) -> frozenset[bytes]:
        """The digests of all messages that have one."""
        return frozenset().union(*(part.said for part in self))

    def without(self, digests: Collection[bytes]) -> PartRun:
        """Those that have others than these messages."""
        return PartRun(part for part in self if part.has_others_than(digests))


class CutPart(msgspec.Struct, frozen=True):
    """A part in chunks."""

    chunks: PendingRun
    digests: tuple[bytes, ...]
    """Of all messages that are remembered with it, those included whose text the log has already."""
    drafts: tuple[Draft, ...] = ()
    """Of the chunks, and in their midst what the log has and may be stored again nevertheless: that is known only when
    all that was said before is stored."""
    done: set[bytes] = msgspec.field(default_factory=set)
    """The uuids of those drafts that a former batch has seen to."""


class Batch(msgspec.Struct, frozen=True):
    """Chunks that are embedded and appended at once."""

    drafts: list[Draft]
    digests: tuple[bytes, ...]
    """Of the messages and notes that the log has whole then; none where there are others of their chunks."""
    is_last: bool
    is_whole: bool
    """There was none before it, and there is none behind it."""
    cut: list[CutPart]

    def completing(self, drafts: list[Draft]) -> list[Draft]:
        """Those of the drafts that are appended, as they say of which messages the log has all then."""
        return drafts if self.is_whole else [msgspec.structs.replace(one, completes=self.digests) for one in drafts]

    def done(self) -> None:
        """Note that it was appended, as far as the log did not have it."""
        appended = {draft.uuid for draft in self.drafts}
        for part in self.cut:
            part.done.update(appended.intersection(draft.uuid for draft in part.drafts))


def each_part(
    conversation: Conversation,
    upto: int | None = None,
    *,
    begin: int | None = None,
    closing: bool = False,
    is_elsewhere: Callable[[Buffered], bool] = lambda _: False,
) -> Iterator[Part]:
    """Yield the parts from `stored` on that are complete and end at or before `upto`.

    What has left the prompt is complete, whatever follows: it must be found at once.

    Args:
        begin: where a part begins: those before it are left out.
        closing: what is left behind them up to `upto` is a part too, although it may go on.
        is_elsewhere: whether another conversation sees to a message.
    """
    start, end = conversation.stored if begin is None else begin, conversation.wanted_end
    items = conversation.messages[start : end if upto is None else min(upto, end)]
    behind = conversation.messages[start + len(items) : start + len(items) + 1]
    departed = conversation.departed_end - start
    is_whole = closing or departed >= len(items) or (not behind and not compaction.goes_on(conversation))
    starts = compaction.part_starts(item.message for item in itertools.chain(items, behind))
    cuts = heapq.merge(starts, [departed] if 0 < departed < len(items) else ())
    for one, other in itertools.pairwise(itertools.chain(cuts, [len(items)] if is_whole else ())):
        if one < other <= len(items):
            texts = ((item.identity, None if is_elsewhere(item) else item.message) for item in items[one:other])
            yield Part(tuple(texts), start + other)


def owed_parts(conversation: Conversation) -> list[Part]:
    """The instructions that left the prompt, each on its own: its neighbours were stored without it."""
    items = (conversation.messages[position] for position in sorted(conversation.owed))
    return [Part(((item.identity, item.message),), 0, instructions=True) for item in items]


def note_parts(buffer: HotBuffer) -> list[Part]:
    """The notes that are not in the log."""
    return [Part((), 0, note=note) for note in buffer.notes.items()]


def unstored_messages(buffer: HotBuffer) -> int:
    """How many messages and notes are to be stored and are not, each once whatever branches have it."""
    found = set(buffer.notes)
    for one in buffer.conversations():
        owed = (one.messages[position] for position in one.owed)
        rest = (item for item in one.messages[one.stored : one.wanted_end] if compaction.is_stored_kind(item.message))
        found.update(item.identity for item in (*rest, *owed))
    return len(found)


def has_changed(conversation: Conversation, begun: int, batch: Sequence[Part]) -> bool:
    """Whether a text has come into these parts, which begin at `stored`, or before them, since they were listed."""
    listed = [message for part in batch for _, message in part.messages]
    now = [item.message for item in conversation.messages[begun : begun + len(listed)]]
    return conversation.stored < begun or listed != now


def repeated(log: TopicLog, conversation: Conversation, stored: range) -> list[int]:
    """The positions among those stored that the log knows by no digest: all of their batch was in it already."""
    return [
        position
        for position in stored
        if compaction.is_stored_kind(conversation.messages[position].message)
        and not log.has_digest(conversation.messages[position].identity)
    ]


def lacks(log: TopicLog, part: Part) -> bool:
    """Whether the log does not have a message of a part that is to be stored."""
    return any(compaction.is_stored_kind(said) and not log.has_digest(digest) for digest, said in part.messages)


def newly_said(log: TopicLog, messages: Sequence[Buffered]) -> set[bytes]:
    """The digests of those of a conversation's messages that its client says, and does not only send again.

    They stand behind the last one that the log knows: what is before that one was said before it, and where the log
    knows it by no digest, it had the text already (`repeated`). And of all that one request brought they are the last
    turn: what stands before that is history, under new digests where the client has changed its beginning.
    """
    new, asked, told = set[bytes](), set[int | UnsetType](), set[int | UnsetType]()
    for item in reversed(messages):
        if log.has_digest(item.identity):
            break
        if (message := item.message) is None:
            continue
        if message.opens_turn:
            asked.add(message.said_at)
        elif message.said_at in asked:
            told.add(message.said_at)
        if message.said_at not in told:
            new.add(item.identity)
    return new


def first_batch(parts: Iterable[Part], characters_max: int) -> tuple[list[Part], bool]:
    """The first parts, as many as are stored at once, at least one where there is one; and whether others follow."""
    batch: list[Part] = []
    characters = 0
    for part in parts:
        characters += max(part.characters, _CHARACTERS_MIN)
        if batch and characters > characters_max:
            return batch, True
        batch.append(part)
    return batch, False


class PartCutter:
    """Cuts the parts of one topic and keeps them as long as they are pending. Thread-safe.

    Nothing here looks at all of them where a few are stored: there may be tens of thousands.
    """

    def __init__(self, log: TopicLog, cutter: Cutter) -> None:
        self._log = log
        self._cutter = cutter
        self._lock = threading.Lock()
        self._long_lock = threading.Lock()
        """Held while a long part is cut, beside which short ones are."""
        self._known: dict[Key, CutPart] = {}
        self._having: dict[bytes, dict[Key, None]] = {}
        """By the digest of a message: the parts that have it, or came from it."""
        self._table_lock = threading.Lock()
        """Held while these two are changed."""
        self.drops = 0
        """How often parts were dropped: until then what was found here is here."""
        self._stored_meanwhile: dict[int, set[bytes]] = {}
        """For each part that is being cut, by anything: the digests of what is appended meanwhile."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def memory_bytes(self) -> int:
        """Memory of the chunks that are pending; approximate."""
        runs = [part.chunks for part in self._known.copy().values()]
        own = (_CHUNK_BYTES + sys.getsizeof(one.draft.content) + one.vector.nbytes for run in runs for one in run)
        return sum(own) + sum(run.columns_bytes for run in runs)

    def cut(
        self, parts: Iterable[Part], until: float | None = None, step: Callable[[], None] = lambda: None
    ) -> list[CutPart]:
        """The parts in chunks. Slow where they were not cut before: 0.5 s per megabyte of text, and as much again to
        find their words.

        Args:
            until: a `time.monotonic()` after which no part is begun: those that were not cut by then are left out, and
                long ones that were not cut before.
            step: called between two pieces of a long part; it may wait, or raise what ends the cutting.
        """
        cut = [self._cut(part, until, step) for part in parts]
        return [part for part in cut if part is not None]

    def joined(self, parts: PartRun, until: float | None = None) -> tuple[int, Sequence[CutPart], PendingRun]:
        """The parts in chunks, without those that could not be cut in time (see `cut`), and all these chunks, which are
        joined anew only where one was cut anew; as `PartRun.cut`."""
        drops, found = self.drops, parts.cut
        if found[0] != drops:
            cut, run = [part for part in map(self._known.get, parts.keys) if part is not None], found[2]
            if len(cut) < len(parts):
                cut = self.cut(parts, until)
            if cut != found[1]:
                run = PendingRun.joined([one.chunks for one in cut], goes_on=True)
            found = parts.cut = drops if len(cut) == len(parts) else -1, cut, run
        return found

    def cut_as_shown(
        self, parts: Iterable[Part], is_shown: Callable[[bytes], bool], step: Callable[[], None] = lambda: None
    ) -> list[CutPart]:
        """The parts in chunks, as they are to be stored.

        Where two branches share the beginning of a part and go on differently, each cuts its own. What a prompt has
        shown of one of them is stored as it was shown, whichever branch is stored first.

        Args:
            is_shown: whether a prompt has shown the chunk with this uuid.
            step: see `cut`.
        """
        return [cut for part in parts for cut in self._as_shown(part, is_shown, step)]

    def forget_but(self, parts: Sequence[Sequence[Part]]) -> None:
        """Drop what is no longer pending."""
        if len(self._known) > sum(map(len, parts)) + _SPARE_PARTS:
            wanted = {part.key for some in parts for part in some}
            self._forget(self._known.copy().keys() - wanted)

    def note_stored(self, drafts: Sequence[Draft | Entry]) -> None:
        """Drop the parts of which these, which were just appended to the log, are a part or a branch's: what is left
        of them is cut anew. Called in the writer thread, before anybody is told of the append."""
        stored = {digest for draft in drafts for digest in draft.completed}
        for meanwhile in self._stored_meanwhile.copy().values():
            meanwhile |= stored
        self.drop(stored)

    def drop(self, digests: Collection[bytes]) -> None:
        """Drop the parts that came from these messages; what is left of them is cut anew."""
        self._forget([key for digest in digests for key in self._with(digest)])

    def ids_of(self, digest: bytes) -> tuple[str, ...]:
        """The public ids of the pending chunks that came from a message, as it was cut last."""
        cut = (part for key in reversed(self._with(digest)) if (part := self._known.get(key)) is not None)
        found = ([one.entry.public_id for one in part.chunks if digest in one.draft.digests] for part in cut)
        return tuple(next(filter(None, found), ()))

    def _with(self, digest: bytes) -> list[Key]:
        """The keys of the parts with this message, in the order in which they were cut."""
        return [*self._having.get(digest, {}).copy()]

    def _keep(self, key: Key, part: CutPart) -> None:
        with self._table_lock:
            self._known[key] = part
            for digest in {*key, *part.digests} - {b""}:
                self._having.setdefault(digest, {})[key] = None

    def _forget(self, keys: Iterable[Key]) -> None:
        with self._table_lock:
            for key in keys:
                if (part := self._known.pop(key, None)) is None:
                    continue
                self.drops += 1
                for digest in {*key, *part.digests}:
                    having = self._having.get(digest, {})
                    having.pop(key, None)
                    if not having:
                        self._having.pop(digest, None)

    def _as_shown(self, part: Part, is_shown: Callable[[bytes], bool], step: Callable[[], None]) -> list[CutPart]:
        """The part as it is stored: the longest shown of its beginning, or of it with what follows in a branch,
        and the rest of it. Of what an attempt has stored in part the rest is stored, whatever else was shown."""
        if part.note is not None or part.instructions or not part.has_others_than(()):
            return self.cut([part], step=step)
        digests = [digest for digest, _ in part.messages]
        shown = {
            key: cut
            for key in self._with(digests[0])
            if (cut := self._known.get(key)) is not None
            and all(one in (b"", digest) for one, digest in zip(key, digests, strict=False))
            and any(is_shown(chunk.draft.uuid) for chunk in cut.chunks)
        }
        kept = sorted(shown, key=lambda key: (bool(shown[key].done), len(key)))[-1:]
        behind = part.messages[max(map(len, kept), default=0) :]
        rest = [msgspec.structs.replace(part, messages=behind)] if behind else []
        return [*(shown[key] for key in kept), *self.cut(rest, step=step)]

    def _cut(self, part: Part, until: float | None, step: Callable[[], None]) -> CutPart | None:
        if (known := self._known.get(part.key)) is not None:
            return known
        # Part by part, so that a search waits for one that another thread cuts, and not for all of them.
        lock = self._long_lock if part.is_long else self._lock
        if until is not None and part.is_long:
            return None
        if not lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            return None
        try:
            known = self._known.get(part.key)
            if known is None and (until is None or time.monotonic() < until):
                # A search that waits for a short one is not to wait for other requests, too.
                known = self._cut_anew(part, step if part.is_long else lambda: None)
            return known
        finally:
            lock.release()

    def _cut_anew(self, part: Part, step: Callable[[], None]) -> CutPart:
        meanwhile = set[bytes]()
        self._stored_meanwhile[id(meanwhile)] = meanwhile
        try:
            cut = self._new(part, step)
            self._keep(part.key, cut)
        finally:
            del self._stored_meanwhile[id(meanwhile)]
        if not meanwhile.isdisjoint(cut.digests):  # a branch has stored some of it
            self._forget([part.key])
        return cut

    def drafts_of(self, note_id: bytes, note: Note, step: Callable[[], None] = lambda: None) -> list[Draft]:
        """A note in chunks, also those that the log has. For `step` see `cut`."""
        return self._cutter.in_steps(step).cut_note(self._log.topic_id, note_id, note)

    def next_batch(
        self,
        parts: Iterable[Part],
        is_shown: Callable[[bytes], bool],
        characters_max: int,
        named: Collection[bytes] = (),
        step: Callable[[], None] = lambda: None,
    ) -> Batch:
        """The next chunks of these parts that are to be stored, at least one if there is one.

        Args:
            is_shown: see `cut_as_shown`; what is stored of a part stays as it was cut, too.
            named: the uuids of chunks that go before all others; then none of the others are in the batch.
            step: see `cut`.
        """
        knows = self._log.snapshot().knows
        cut = self.cut_as_shown(parts, lambda uuid: is_shown(uuid) or knows(uuid), step)
        drafts = [draft for one in cut for draft in one.drafts if draft.uuid not in one.done]
        known = self._log.snapshot().known([draft.uuid for draft in drafts])
        left = [draft for draft in drafts if draft.uuid not in known]
        if named:
            batch = [draft for draft in left if draft.uuid in named]
        else:
            sizes = itertools.accumulate(max(len(draft.content), _CHARACTERS_MIN) for draft in left)
            batch = left[: max(1, sum(1 for _ in itertools.takewhile(characters_max.__ge__, sizes)))]
        is_last = len(batch) == len(left)
        digests = tuple(digest for one in cut for digest in one.digests) if is_last else ()
        is_whole = len(batch) == sum(len(one.drafts) for one in cut)
        return Batch(batch, digests, is_last, is_whole, cut)

    def _new(self, part: Part, step: Callable[[], None]) -> CutPart:
        if part.note is not None:
            return self._new_note(*part.note, step)
        runs = unstored_runs(self._log, part.messages, self._cutter.redactor, instructions=part.instructions)
        cut = [under_new_uuid(self._log, draft) for draft in self._cutter.in_steps(step).cut(self._log.topic_id, runs)]
        has_copy = [self._log.has_live_copy(draft) for draft in cut]
        new = [draft for draft, is_copy in zip(cut, has_copy, strict=True) if not is_copy]
        asked = zip(cut, has_copy, may_return(cut), strict=True)
        drafts = tuple(draft for draft, is_copy, may in asked if may or not is_copy)
        digests = (utterance.digest for run in runs for utterance in run if utterance.digest is not None)
        return CutPart(self._pending(new, step), tuple(digests), drafts)

    def _new_note(self, note_id: bytes, note: Note, step: Callable[[], None]) -> CutPart:
        """A note in the chunks that are to be stored. What an interrupted attempt has stored of it may be corrected
        since, and is not stored again."""
        knows, has_copy = self._log.snapshot().knows, self._log.has_live_copy
        cut = () if self._log.has_digest(note_id) else self.drafts_of(note_id, note, step)
        drafts = [draft for draft in cut if not knows(draft.uuid) and (draft.digests or not has_copy(draft))]
        return CutPart(self._pending(drafts, step), (note_id,), tuple(drafts))

    def _pending(self, drafts: Sequence[Draft], step: Callable[[], None]) -> PendingRun:
        table = table_of(self._log.fingerprint)

        def pending() -> Iterator[PendingChunk]:
            entries = iter(self._log.reserve(drafts))
            for at in range(0, len(drafts), _READ_AT_ONCE):
                some = drafts[at : at + _READ_AT_ONCE]
                texts = [draft.embedded_text for draft in some]
                vectors = np.zeros((len(some), 0), np.float32) if table is None else table.vectors(texts)
                for draft, vector in zip(some, vectors, strict=True):
                    step()
                    yield PendingChunk(draft, self._log.counted(next(entries)), vector)

        return PendingRun(pending())


class ListedParts:
    """All parts of a buffer that wait to be stored. A request asks for all of them, so only those of conversations that
    have changed are listed anew, and behind the last of them where one has grown: listing takes 20 µs a turn."""

    def __init__(self, buffer: HotBuffer) -> None:
        self._buffer = buffer
        self._listed: dict[str, tuple[int, tuple[int, bool], PartRun]] = {}
        """By conversation: `changes`, length and whether an answer was awaited at that time, and the parts."""
        self._waiting: dict[str, PartRun] = {}
        """Of them those that wait."""
        self._owed: dict[str, PartRun] = {}
        self._notes: dict[bytes, PartRun] = {}
        self.joined = JoinedRuns()

    @property
    def memory_bytes(self) -> int:
        """Memory of the chunks that were joined, beside what they have by themselves; approximate."""
        joined = (parts.spoken.cut for _, _, parts in self._listed.copy().values())
        return self.joined.memory_bytes + sum(run.columns_bytes for _, cut, run in joined if len(cut) > 1)

    def all(self) -> list[PartRun]:
        """Those of each conversation, the instructions that each owes, and the notes, as of now."""
        for name in self._buffer.take_touched():
            one = self._buffer.of_id(name)
            self._note(self._waiting, name, None if one is None or one.stored >= one.wanted_end else self.of(one))
            self._note(self._owed, name, PartRun(owed_parts(one)) if one is not None and one.owed else None)
            if name not in self._waiting:
                self._listed.pop(name, None)
        if self._notes.keys() != self._buffer.notes.keys():
            waiting = zip(self._buffer.notes, note_parts(self._buffer), strict=True)
            self._notes = {key: self._notes.get(key) or PartRun((part,)) for key, part in waiting}
        if not (self._waiting or self._owed or self._notes):
            self.joined = JoinedRuns()  # nobody may ask for long
        return [*self._waiting.values(), *self._owed.values(), *self._notes.values()]

    def of(self, conversation: Conversation) -> PartRun:
        """Its parts as of now, without those owed."""
        changes, end, parts = self._listed.get(conversation.id, (-1, (0, False), PartRun()))
        now = len(conversation), conversation.awaiting > 0
        if changes == conversation.changes:
            left = bisect.bisect_right(parts, conversation.stored, key=lambda part: part.end)
            parts = PartRun(parts[left:]) if left else parts  # without what was stored since
        is_known = changes == conversation.changes and bool(parts) and parts[0].begin >= conversation.stored
        if is_known and end == now:
            pass
        elif is_known and len(parts) > 1:  # the last one may go on
            parts = PartRun((*parts[:-1], *each_part(conversation, begin=parts[-2].end)))
        else:
            parts = PartRun(each_part(conversation))
        self._listed[conversation.id] = conversation.changes, now, parts
        return parts

    @staticmethod
    def _note(table: dict[str, PartRun], name: str, parts: PartRun | None) -> None:
        if parts is not None:
            table[name] = parts
        else:
            table.pop(name, None)


class BufferedText(UnstoredText):
    """All that a buffer has and the log has not, as it is now; see `UnstoredText`."""

    def __init__(self, cutter: PartCutter, listed: ListedParts) -> None:
        self._cutter = cutter
        self._joined = listed.joined
        self._parts = listed.all()

    def __bool__(self) -> bool:
        return any(self._parts)

    def has_others_than(self, digests: Collection[bytes]) -> bool:
        """See `UnstoredText.has_others_than`."""
        return any(part.has_others_than(digests) for parts in self._parts for part in parts)

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> PendingRun:
        """See `UnstoredText.chunks`."""
        self._cutter.forget_but(self._parts)
        found = []
        for parts in self._parts:
            spoken = parts.spoken if parts.said.isdisjoint(but) else parts.without(but)
            _, cut, run = self._cutter.joined(spoken, until)
            self.is_partial |= len(cut) < len(spoken)
            if run:
                found.append(run)
        return self._joined.of(_each_once(found))

    def part_with(self, uuid: bytes) -> Part | None:
        """The part with the chunk with this uuid; None if it is not pending. Called in a thread."""
        for parts in self._parts:
            for part, cut in zip(parts, self._cutter.cut(parts), strict=True):
                if uuid in cut.chunks.uuids:
                    return part
        return None


def _each_once(runs: list[PendingRun]) -> list[PendingRun]:
    """The runs, with a chunk that several have in the first alone: branches share their beginning."""
    if len(frozenset().union(*map(operator.attrgetter("uuids"), runs))) == sum(map(len, runs)):
        return runs
    seen: set[bytes] = set()
    found = []
    for run in runs:
        new: dict[bytes, PendingChunk] = {}
        for chunk in run:
            if chunk.entry.uuid not in seen:
                new.setdefault(chunk.entry.uuid, chunk)
        found.append(run if len(new) == len(run) else PendingRun(new.values()))
        seen |= run.uuids
    return [run for run in found if run]
