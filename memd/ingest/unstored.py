"""The text of a topic's buffer that is not in the log yet, cut into chunks before it is embedded.

Rule: a chunk that is shown while it is pending is the one that is stored: same text, same uuid, same public id. So
whatever is stored of a conversation is cut here, part by part (`compaction.part_starts`), and cut once. The parts are
listed on the event loop, which owns the buffer; the cutting is done in threads.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial

import msgspec
from msgspec import UNSET, UnsetType

from memd.conversation import compaction
from memd.conversation.conversation import Buffered, Conversation
from memd.conversation.hot_buffer import HotBuffer
from memd.embedding.local import table_of
from memd.entries import Draft, Entry
from memd.ingest.pipeline import Cutter, may_return, under_new_uuid, unstored_runs
from memd.messages import Message
from memd.notes import Note
from memd.store.erasure import named_in
from memd.store.log.segment import ROWS_AT_ONCE, PendingChunk, PendingSegment, PendingView, UnstoredText
from memd.store.store import TopicLog

Key = tuple[bytes, ...]
"""See `unstored.Part.key`."""
_NOTES = "notes", ""


_CHUNK_BYTES = 1_900
"""Of a pending chunk beside its text and its columns, its terms included (measured with tracemalloc)."""
_LONG_CHARACTERS = 200_000
"""A part with more takes seconds, and is cut in the background alone: searches neither cut it nor wait for it."""
_OTHER_THREAD_SECONDS = 0.03
"""A search waits so long for another thread that cuts a short part, which takes a few milliseconds of a core."""
BATCH_CHARACTERS = 8_000
"""Text that is embedded and appended at once: about a second's work."""
_CHARACTERS_MIN = 50
"""A shorter text takes the embedding model as long as one of so many."""
_IDS_LEFT_MAX = 256
"""Ids that are reserved for what is not to be stored any more, 200 bytes each."""
_REST_SECONDS = 0.001
"""Between two times that the lock is taken: without a rest it is taken again before whoever waits for it wakes."""
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

    @cached_property
    def said(self) -> frozenset[bytes]:
        """The digests of those of its messages that have a text here."""
        return frozenset(digest for digest, message in self.messages if message is not None)


Parts = tuple[Part, ...]
"""They follow each other in a conversation."""


class CutPart(msgspec.Struct, frozen=True):
    """A part in chunks."""

    part: Part
    chunks: tuple[PendingChunk, ...]
    digests: tuple[bytes, ...]
    """Of all messages that are remembered with it, those included whose text the log has already."""
    drafts: tuple[Draft, ...] = ()
    """Of the chunks, and in their midst what the log has and may be stored again nevertheless: that is known only when
    all that was said before is stored."""
    done: set[bytes] = msgspec.field(default_factory=set)
    """The uuids of those drafts that a former batch has seen to."""


class Batch(msgspec.Struct, frozen=True):
    """Chunks that are embedded and appended at once: those of some parts, of a long one as many as a step takes."""

    drafts: list[Draft]
    complete: int
    """So many of the parts, from the first on, have no chunk left then."""
    is_last: bool
    """All of them have none left."""
    digests: dict[bytes, None]
    """Of the messages and notes that the log has whole then."""
    cut: list[CutPart]

    def done(self) -> None:
        """Note that it was appended, as far as the log did not have it."""
        appended = {draft.uuid for draft in self.drafts}
        for part in self.cut:
            part.done.update(appended.intersection(draft.uuid for draft in part.drafts))


def each_part(
    conversation: Conversation,
    *,
    begin: int | None = None,
    closing: bool = False,
    is_elsewhere: Callable[[Buffered], bool] = lambda _: False,
) -> Iterator[Part]:
    """Yield the parts from `stored` on that are complete. What has left the prompt is complete, whatever follows: it
    must be found at once. `begin`: where a part begins: those before it are left out. `closing`: what is left behind
    them is a part too, although it may go on. `is_elsewhere`: whether another conversation sees to a message."""
    start = conversation.stored if begin is None else begin
    items = conversation.messages[start : conversation.wanted_end]
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


def note_part(note_id: bytes, note: Note) -> Part:
    """A note that is not in the log."""
    return Part((), 0, note=(note_id, note))


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


class PartCutter:
    """Cuts the parts of one topic, and has the chunks of those that wait in the columns that questions look into.
    Thread-safe.

    Nothing here looks at all of them where a few change: there may be tens of thousands.
    """

    def __init__(self, log: TopicLog, cutter: Cutter) -> None:
        self._log = log
        self._cutter = cutter
        self._begun: dict[Key, threading.Event] = {}
        """The short parts that threads cut just now."""
        self._long_lock = threading.Lock()
        """Held while a long part is cut, beside which short ones are."""
        self._listing: deque[tuple[Sequence[Part], Sequence[Part]]] = deque()
        """Parts that wait no more and parts that wait from now on: the event loop says so and waits for no lock."""
        self._table_lock = threading.Lock()
        """Held while what follows is changed, for 10 ms at most: every search wants it."""
        self._known: dict[Key, CutPart] = {}
        self._chunks = self._characters = 0
        """Of those."""
        self._having: dict[bytes, dict[Key, None]] = {}
        """By the digest of a message: the parts that have it, or came from it."""
        self._listed: dict[Key, int] = {}
        """The parts that wait, and how many branches have each."""
        self._uncut: dict[Key, Part] = {}
        """Of those that wait the ones that are not cut."""
        self._spare: OrderedDict[Key, None] = OrderedDict()
        """Parts that were cut and do not wait."""
        self._stale: set[Key] = set()
        """Of these the ones of which something is stored: kept for what a prompt has shown of them, and cut anew where
        they are asked for."""
        table = table_of(log.fingerprint)
        self._segment = PendingSegment() if table is None else PendingSegment(table.dimension, table.vectors)
        """The chunks of all that wait and are cut."""
        self._coming: dict[Key, tuple[PendingChunk, ...]] = {}
        """Of parts that wait and come into it just now: the chunks that are in it."""
        self._knows_shown = False
        """All that waited at the start was cut: what was shown before it is known by its text since."""
        self._stored_meanwhile: dict[int, set[bytes]] = {}
        """For each part that is being cut, by anything: the digests of what is appended meanwhile."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def memory_bytes(self) -> int:
        """Memory of the chunks that are pending; approximate."""
        own = self._chunks * _CHUNK_BYTES + self._characters
        return own + (self._segment.memory_bytes if self._chunks else 0)

    def note_waiting(self, gone: Sequence[Part], new: Sequence[Part]) -> None:
        """Note that some parts of a buffer wait no more and others from now on; of a part that several branches have,
        each says so."""
        self._listing.append((gone, new))

    def waiting(self, but: Collection[bytes] = (), until: float | None = None) -> tuple[PendingView, bool]:
        """The chunks of the parts that wait, and whether all are cut that have others than these messages; for `until`
        see `cut`.

        What was said last comes first: after a start hundreds of conversations may wait, and there may be no time for
        all of them.
        """
        with self._table_lock:
            self._take_listing()
            lacking = [part for part in self._uncut.values() if part.note is not None or not part.said.issubset(but)]
        cut = self.cut(reversed(lacking), until)
        with self._table_lock:
            return self._segment.view(), len(cut) == len(lacking)

    def cut_waiting(self, step: Callable[[], None] = lambda: None, *, notes_alone: bool = False) -> None:
        """Cut those that wait; for `step` see `cut`."""
        with self._table_lock:
            self._take_listing()
            lacking = [part for part in self._uncut.values() if part.note is not None or not notes_alone]
        self.cut(lacking, step=step)

    def part_with(self, uuid: bytes) -> Part | None:
        """The part that waits and has the chunk with this uuid; None if it is not pending. Slow; called in a thread."""
        looks = (self.waiting(until=until)[0].find(uuid) for until in (0.0, None))
        if (chunk := next(filter(None, looks), None)) is None:
            return None
        section = chunk.draft.part
        digests = chunk.draft.digests if section is UNSET else (section.hash,)
        for key in [key for digest in digests for key in self._with(digest)]:
            cut = self._known.get(key)
            if key in self._listed and cut is not None and any(one.draft.uuid == uuid for one in cut.chunks):
                return cut.part
        return None

    def cut(
        self, parts: Iterable[Part], until: float | None = None, step: Callable[[], None] = lambda: None
    ) -> list[CutPart]:
        """The parts in chunks. Slow where they were not cut before: 0.2 to 0.4 s per megabyte, and as much again to
        find their words. `until`: a `time.monotonic()` after which no part is begun: those that were not cut by then
        are left out, and long ones that were not cut before. `step`: called between two pieces of a long part; it may
        wait, or raise what ends the cutting."""
        cut = [self._cut(part, until, step) for part in parts]
        return [part for part in cut if part is not None]

    def cut_as_shown(
        self, part: Part, is_shown: Callable[[bytes], bool], step: Callable[[], None] = lambda: None
    ) -> list[CutPart]:
        """A part in chunks, as it is to be stored. `is_shown`: whether a prompt has shown the chunk with this uuid.

        Where two branches share the beginning of a part and go on differently, each cuts its own. What a prompt has
        shown of one of them is stored as it was shown, whichever branch is stored first: the longest shown of its
        beginning, or of it with what follows in a branch, and the rest of it. Of what an attempt has stored in part the
        rest is stored, whatever else was shown.
        """
        if part.note is not None or part.instructions or not part.said:
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

    def note_stored(self, drafts: Sequence[Draft | Entry]) -> None:
        """Drop the parts of which these, which were just appended to the log, are a part or a branch's: what is left
        of them is cut anew. Called in the writer thread, before anybody is told of the append."""
        stored = {digest for draft in drafts for digest in draft.completed}
        for meanwhile in self._stored_meanwhile.copy().values():
            meanwhile |= stored
        with self._table_lock:
            self._take_listing()
            for key in {key for digest in stored for key in self._with(digest)}:
                if key in self._listed or stored.issuperset(self._known[key].digests):
                    self._drop(key)
                else:
                    self._stale.add(key)

    def drop(self, digests: Collection[bytes]) -> None:
        """Drop the parts that came from these messages, or name one of these calls (`call_digest`); what is left of
        them is cut anew."""
        naming = [
            key for key, cut in self._known.copy().items() if any(named_in(one.draft, digests) for one in cut.chunks)
        ]
        self._forget([*naming, *(key for digest in digests for key in self._with(digest))])

    def ids_of(self, digest: bytes) -> tuple[str, ...]:
        """The public ids of the pending chunks that came from a message, as it was cut last."""
        cut = (part for key in reversed(self._with(digest)) if (part := self._known.get(key)) is not None)
        found = ([one.entry.public_id for one in part.chunks if digest in one.draft.digests] for part in cut)
        return tuple(next(filter(None, found), ()))

    def _with(self, digest: bytes) -> list[Key]:
        """The keys of the parts with this message, in the order in which they were cut."""
        return [*self._having.get(digest, {}).copy()]

    def _take_listing(self) -> None:
        """Take over the parts that `note_waiting` noted; with the lock."""
        while self._listing:
            gone, new = self._listing.popleft()
            for part in new:
                branches = self._listed.get(part.key, 0)
                self._wait(part, is_listed=branches > 0)
                self._listed[part.key] = branches + 1
            for part in gone:
                if (branches := self._listed.pop(part.key)) > 1:
                    self._listed[part.key] = branches - 1
                elif self._uncut.pop(part.key, None) is None:
                    self._segment = self._segment.release(self._known[part.key].chunks)
                    self._set_aside(part.key)
                else:
                    self._segment = self._segment.release(self._coming.pop(part.key, ()))

    def _wait(self, part: Part, *, is_listed: bool) -> None:
        """Have a part wait, as it is now: text of it may have been erased since it was listed or cut."""
        cut = self._known.get(part.key)
        if cut is not None and (
            cut.part.messages != part.messages
            or part.key in self._stale
            or (not is_listed and self._segment.lacking(cut.chunks) > ROWS_AT_ONCE)  # not with the lock
        ):
            self._drop(part.key)
            cut = None
        if cut is None:
            if self._uncut.get(part.key, part).messages != part.messages:
                self._segment = self._segment.release(self._coming.pop(part.key, ()))
            self._uncut[part.key] = part
        elif not is_listed:
            self._segment.hold(cut.chunks)
            self._spare.pop(part.key, None)

    def _set_aside(self, key: Key) -> None:
        """Keep a part that does not wait a little longer: a fork or a retry may."""
        self._spare[key] = None
        if len(self._spare) > _SPARE_PARTS:
            self._drop(next(iter(self._spare)))

    def _keep(self, part: Part, cut: CutPart) -> None:
        """Take over what was cut. If it waits, its chunks come into the segment some at a time, so that whoever wants
        the lock waits for some of them and not for all."""
        while not self._keep_more(part, cut):
            time.sleep(_REST_SECONDS)

    def _keep_more(self, part: Part, cut: CutPart) -> bool:
        """Take over more of what was cut; True if there is no more to do."""
        key = part.key
        with self._table_lock:
            self._take_listing()
            waiting = self._uncut.get(key)
            if waiting is None and self._fresh(key) is not None:
                return True  # another thread has cut it, too
            if waiting is not None:
                if waiting.messages != part.messages:
                    return True  # text of it was erased meanwhile
                held = self._coming.pop(key, ())
                some = cut.chunks[len(held) : len(held) + ROWS_AT_ONCE]
                self._segment.hold(some)
                if len(held) + len(some) < len(cut.chunks):
                    self._coming[key] = held + some
                    return False
                del self._uncut[key]
            self._count(self._known.get(key), -1)
            self._known[key] = cut
            self._count(cut, 1)
            self._stale.discard(key)
            for digest in {*key, *cut.digests} - {b""}:
                self._having.setdefault(digest, {})[key] = None
            if waiting is None:
                self._set_aside(key)
            return True

    def _renew_segment(self) -> None:
        """Make the segment anew if most of its rows are nobody's, some rows at a time."""
        with self._table_lock:
            old = new = self._segment
            steps = old.renewals() if old.is_mostly_dead else iter(())
        while True:
            with self._table_lock:
                if self._segment is not old:
                    return  # nothing waits any more
                if (more := next(steps, None)) is None:
                    self._segment = new
                    return
                new = more
            time.sleep(_REST_SECONDS)

    def _let_ids_go(self) -> None:
        """Let go of ids that are reserved for chunks which no part has any more: of answers that were made anew."""
        with self._table_lock:
            self._take_listing()
            is_known = not (self._uncut or self._stored_meanwhile)  # whose ids are those of which part
            if not is_known or self._log.reserved_count <= self._chunks + _IDS_LEFT_MAX:
                return
            self._log.reserve_only({one.draft.uuid for part in self._known.values() for one in part.chunks})

    def _forget(self, keys: Iterable[Key]) -> None:
        with self._table_lock:
            self._take_listing()
            for key in keys:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        """Drop the chunks of a part; if it waits still, it is cut anew when it is asked for. With the lock."""
        if (cut := self._known.pop(key, None)) is None:
            return
        self._count(cut, -1)
        for digest in {*key, *cut.digests}:
            having = self._having.get(digest, {})
            having.pop(key, None)
            if not having:
                self._having.pop(digest, None)
        if key in self._listed:
            self._segment = self._segment.release(cut.chunks)
            self._uncut[key] = cut.part
        self._spare.pop(key, None)
        self._stale.discard(key)

    def _count(self, cut: CutPart | None, times: int) -> None:
        if cut is not None:
            self._chunks += times * len(cut.chunks)
            self._characters += times * sum(len(one.draft.content) for one in cut.chunks)

    def _cut(self, part: Part, until: float | None, step: Callable[[], None]) -> CutPart | None:
        if (known := self._fresh(part.key)) is not None:
            return known
        if until is not None and (part.is_long or time.monotonic() >= until):
            return None
        if part.is_long:
            with self._long_lock:
                return self._fresh(part.key) or self._cut_anew(part, step)
        if (begun := self._begun.get(part.key)) is not None:
            # Not for long: it may be a thread that all others go before, and on a busy machine it has no core.
            begun.wait(None if until is None else _OTHER_THREAD_SECONDS)
            if (known := self._fresh(part.key)) is not None:
                return known
        ended = self._begun[part.key] = threading.Event()
        try:
            # Without the step: a search that waits for a short one is not to wait for other requests, too.
            return self._cut_anew(part, lambda: None)
        finally:
            self._begun.pop(part.key, None)
            ended.set()

    def _fresh(self, key: Key) -> CutPart | None:
        return None if key in self._stale else self._known.get(key)

    def _cut_anew(self, part: Part, step: Callable[[], None]) -> CutPart:
        meanwhile = set[bytes]()
        self._stored_meanwhile[id(meanwhile)] = meanwhile
        try:
            cut = self._new(part, step)
            self._keep(part, cut)
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
        parts: Sequence[Part],
        is_shown: Callable[[bytes], bool],
        named: Collection[bytes] = (),
        step: Callable[[], None] = lambda: None,
    ) -> Batch:
        """The next chunks of these parts that are to be stored, at least one if there is one.

        A part that has more than a step's takes further batches. What is said behind it does not wait for those: of the
        short parts there, each batch has as many chunks again. What is stored of a part stays as it was cut, too
        (`is_shown`). `named`: the uuids of chunks that go before all others; then none of the others are in the batch.
        """
        self._renew_segment()
        self._let_ids_go()
        knows, batch, cut = self._log.snapshot().knows, list[Draft](), list[CutPart]()
        digests: dict[bytes, None] = {}
        complete, room = 0, BATCH_CHARACTERS
        if not self._knows_shown:
            self.cut_waiting(step)
            self._knows_shown = True
        with self._table_lock:
            waiting = self._segment.view()
        for place, part in enumerate(parts):
            if complete < place and (part.characters > BATCH_CHARACTERS or not self._is_lacking(part)):
                continue
            pieces = self.cut_as_shown(part, lambda uuid: is_shown(uuid) or knows(uuid), step)
            own = (draft for one in pieces for draft in one.drafts if draft.uuid not in one.done)
            drafts = {one.uuid: one for one in (_as_shown(draft, waiting, is_shown) for draft in own)}
            known = self._log.snapshot().known([*drafts]) | {draft.uuid for draft in batch}
            left = [draft for uuid, draft in drafts.items() if uuid not in known]
            sizes = [*itertools.accumulate((max(len(draft.content), _CHARACTERS_MIN) for draft in left), initial=0)]
            fitting = bisect.bisect_right(sizes, room) - 1
            if named:
                some = [draft for draft in left if draft.uuid in named]
            elif fitting < len(left) and (batch or room <= 0):
                break
            else:
                some = left[: max(fitting, 1)]
            batch, cut, room = batch + some, cut + pieces, room - sizes[len(some)]
            if len(some) == len(left):
                digests |= dict.fromkeys(digest for one in pieces for digest in one.digests)
                complete += complete == place
            else:
                room = BATCH_CHARACTERS
        return Batch(batch, complete, complete == len(parts), digests, cut)

    def _is_lacking(self, part: Part) -> bool:
        """Whether the log does not have all of a part that is to be stored."""
        if part.note is not None:
            return not self._log.has_digest(part.note[0])
        stored_kind = partial(compaction.is_stored_kind, instructions=part.instructions)
        return any(stored_kind(said) and not self._log.has_digest(digest) for digest, said in part.messages)

    def _new(self, part: Part, step: Callable[[], None]) -> CutPart:
        if part.note is not None:
            return self._new_note(part, *part.note, step)
        runs = unstored_runs(self._log, part.messages, self._cutter.redactor, instructions=part.instructions)
        cut = [under_new_uuid(self._log, draft) for draft in self._cutter.in_steps(step).cut(self._log.topic_id, runs)]
        has_copy = [self._log.has_live_copy(draft) for draft in cut]
        new = [draft for draft, is_copy in zip(cut, has_copy, strict=True) if not is_copy]
        asked = zip(cut, has_copy, may_return(cut), strict=True)
        drafts = tuple(draft for draft, is_copy, may in asked if may or not is_copy)
        digests = (utterance.digest for run in runs for utterance in run if utterance.digest is not None)
        return CutPart(part, self._pending(new, step), tuple(digests), drafts)

    def _new_note(self, part: Part, note_id: bytes, note: Note, step: Callable[[], None]) -> CutPart:
        """A note in the chunks that are to be stored. What an interrupted attempt has stored of it may be corrected
        since, and is not stored again."""
        knows, has_copy = self._log.snapshot().knows, self._log.has_live_copy
        cut = () if self._log.has_digest(note_id) else self.drafts_of(note_id, note, step)
        drafts = [draft for draft in cut if not knows(draft.uuid) and (draft.digests or not has_copy(draft))]
        return CutPart(part, self._pending(drafts, step), (note_id,), tuple(drafts))

    def _pending(self, drafts: Sequence[Draft], step: Callable[[], None]) -> tuple[PendingChunk, ...]:
        def pending() -> Iterator[PendingChunk]:
            for draft, entry in zip(drafts, self._log.reserve(drafts), strict=True):
                step()
                yield PendingChunk(draft, self._log.counted(entry))

        return tuple(pending())


def _as_shown(draft: Draft, waiting: PendingView, is_shown: Callable[[bytes], bool]) -> Draft:
    """The draft; where a prompt has shown a chunk of another conversation that says the same and waits, under the uuid
    of that one: what several conversations say at once is stored once."""
    if draft.kind != "turn" or is_shown(draft.uuid):
        return draft
    said = draft.roles, draft.displayed, draft.author
    others = (one.draft for one in waiting.with_text(draft.content))
    same = (one.uuid for one in others if is_shown(one.uuid) and (one.roles, one.displayed, one.author) == said)
    return next((msgspec.structs.replace(draft, uuid=uuid) for uuid in same), draft)


class ListedParts:
    """All parts of a buffer that wait to be stored. A request asks for all of them, so only those of conversations that
    have changed are listed anew, and behind the last of them where one has grown: listing takes 20 µs a turn."""

    def __init__(self, buffer: HotBuffer, told: Callable[[Sequence[Part], Sequence[Part]], None]) -> None:
        """`told`: see `PartCutter.note_waiting`."""
        self._buffer = buffer
        self._told = told
        self._said: dict[str, tuple[int, tuple[int, bool], list[Part]]] = {}
        """By conversation: `changes`, length and whether an answer was awaited at that time, and the parts."""
        self._alone: dict[str | bytes, list[Part]] = {}
        """The instructions that each conversation owes, and each note."""
        self.characters = 0
        """Of the texts of all, as of the last `refresh`; what several branches have counts for each."""
        self._touched: list[str | bytes] = [*buffer.notes, *(one.id for one in buffer.conversations())]

    def refresh(self) -> bool:
        """Bring them up to date; whether any part waits."""
        touched, self._touched = self._touched + self._buffer.take_touched(), []
        for name in dict.fromkeys(touched):  # the one used last comes last
            if isinstance(name, bytes):
                note = self._buffer.notes.get(name)
                self._change(name, [] if note is None else [note_part(name, note)])
                continue
            one = self._buffer.of_id(name)
            self._change(name, [] if one is None else owed_parts(one))
            if one is not None:
                self.of(one)
            elif name in self._said:
                self._tell(self._said.pop(name)[2], [])
        return bool(self._said or self._alone)

    def of(self, conversation: Conversation) -> Sequence[Part]:
        """Its parts as of now, without those owed."""
        changes, end, parts = self._said.get(conversation.id, (-1, (0, False), []))
        now = len(conversation), conversation.awaiting > 0
        if changes == conversation.changes:  # without what was stored since
            left = bisect.bisect_right(parts, conversation.stored, key=lambda part: part.end)
            self._tell(parts[:left], [])
            del parts[:left]
        if changes != conversation.changes or not parts or parts[0].begin < conversation.stored:
            new = [*each_part(conversation)] if conversation.stored < conversation.wanted_end else []
            self._tell(parts, new)
            parts = new
        elif end != now:  # the last one may go on
            new = [*each_part(conversation, begin=parts[-1].begin)]
            self._tell(parts[-1:], new)
            parts[-1:] = new
        if parts:
            self._said[conversation.id] = conversation.changes, now, parts
        else:
            self._said.pop(conversation.id, None)
        return parts

    def before(self, conversation: Conversation, upto: int) -> Iterator[Part]:
        """Those of its parts that end at or before a position; and where that is the end, what is behind them, although
        it may go on."""
        end = conversation.stored
        for part in self.of(conversation):
            if part.end > upto:
                return
            end = part.end
            yield part
        if upto >= conversation.wanted_end:
            yield from each_part(conversation, begin=end, closing=True)

    def _change(self, whose: str | bytes, parts: list[Part]) -> None:
        self._tell(self._alone.pop(whose, []), parts)
        if parts:
            self._alone[whose] = parts

    def _tell(self, before: Sequence[Part], now: Sequence[Part]) -> None:
        """Say which of them were not among those before, and the other way round."""
        old, new = ({part.key: part for part in some} for some in (before, now))
        gone = [part for key, part in old.items() if new.get(key) != part]
        come = [part for key, part in new.items() if old.get(key) != part]
        if gone or come:
            self._told(gone, come)
            self.characters += sum(part.characters for part in come) - sum(part.characters for part in gone)


class BufferedText(UnstoredText):
    """All that a buffer has and the log has not, as it is now; see `UnstoredText`."""

    def __init__(self, cutter: PartCutter, *, is_any: bool) -> None:
        self._cutter = cutter
        self._is_any = is_any

    def __bool__(self) -> bool:
        return self._is_any

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> PendingView:
        """See `UnstoredText.chunks`."""
        view, is_whole = self._cutter.waiting(but, until)
        self.is_partial |= not is_whole
        return view
