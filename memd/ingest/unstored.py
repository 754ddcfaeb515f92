"""Pending text: a topic's buffer as far as it is not in the log, cut into chunks before it is embedded.

Rule: a chunk that is shown while pending is stored unchanged: same text, same uuid, same public id. So all text of a
conversation is cut here, part by part (`compaction.part_starts`), and only once. The event loop, which owns the
buffer, lists the parts; threads cut them.
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


_CHUNK_BYTES = 1_900
"""Memory of a pending chunk with its terms, without its text and columns (measured with tracemalloc)."""
_LONG_CHARACTERS = 200_000
"""Longer parts take seconds and are cut only in the background: searches neither cut them nor wait for them."""
_OTHER_THREAD_SECONDS = 0.03
"""Longest wait of a search for another thread that cuts a short part, which takes a few milliseconds of CPU time."""
BATCH_CHARACTERS = 8_000
"""Text embedded and appended in one batch: about a second's work."""
_CHARACTERS_MIN = 50
"""Shorter texts take the embedding model as long as one of this length."""
_IDS_LEFT_MAX = 256
"""Most reserved ids of chunks that will not be stored any more, 200 bytes each."""
_REST_SECONDS = 0.001
"""Pause between two acquisitions of the lock: without it no other thread would get the lock in between."""
_SPARE_PARTS = 64
"""Cut parts kept although they are not pending: a fork or a retry may need them."""


class Part(msgspec.Struct, frozen=True, dict=True):
    """Consecutive messages that are cut together, or a note."""

    messages: tuple[tuple[bytes, Message | None], ...]
    """Digests and messages; None for a message without text, or that another conversation stores."""
    end: int
    """Position after the last message in the conversation."""
    instructions: bool = False
    """True if the part is an instruction that has left the prompt."""
    note: tuple[bytes, Note] | None = None
    """Id and note, if the part is a note; it has no messages then."""

    @property
    def begin(self) -> int:
        """Position of the first message in the conversation."""
        return self.end - len(self.messages)

    @cached_property
    def characters(self) -> int:
        """Total length of its texts."""
        texts = (message.text for _, message in self.messages if message is not None)
        return sum(map(len, texts if self.note is None else (self.note[1].content,)))

    @property
    def is_long(self) -> bool:
        """True if cutting takes longer than a search may."""
        return self.characters > _LONG_CHARACTERS

    @cached_property
    def key(self) -> tuple[bytes, ...]:
        """All its digests: after a rewrite of the history, the first and last do not identify those between."""
        if self.note is not None:
            return (self.note[0],)
        return tuple(digest if message is not None else b"" for digest, message in self.messages)

    @cached_property
    def said(self) -> frozenset[bytes]:
        """Digests of its messages other than None."""
        return frozenset(digest for digest, message in self.messages if message is not None)


Parts = tuple[Part, ...]
"""Consecutive parts of a conversation."""


class CutPart(msgspec.Struct, frozen=True):
    """A part cut into chunks."""

    part: Part
    chunks: tuple[PendingChunk, ...]
    digests: tuple[bytes, ...]
    """Digests of all its stored messages, including those whose text the log already has."""
    drafts: tuple[Draft, ...] = ()
    """Drafts of the chunks in order, with copies of logged text that may be stored again; that is decided once all
    earlier text is stored."""
    done: set[bytes] = msgspec.field(default_factory=set)
    """Uuids of the drafts that earlier batches appended."""


class Batch(msgspec.Struct, frozen=True):
    """Chunks embedded and appended together: those of several parts, or as many of a long part as a step takes."""

    drafts: list[Draft]
    complete: int
    """Number of leading parts that have no chunk left after this batch."""
    is_last: bool
    """True if no part has a chunk left after this batch."""
    digests: dict[bytes, None]
    """Digests of the messages and notes that are completely in the log after this batch."""
    cut: list[CutPart]

    def done(self) -> None:
        """Mark the batch's drafts as appended."""
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
    """Yield the complete parts from `stored` on. Messages that have left the prompt are complete whatever follows: they
    must be found at once. `begin`: start of the first part to yield, instead of `stored`. `closing`: yield an
    incomplete last part, too. `is_elsewhere`: tells if another conversation stores a message."""
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
    """Return a part for each instruction that left the prompt; its neighbours were stored without it."""
    items = (conversation.messages[position] for position in sorted(conversation.owed))
    return [Part(((item.identity, item.message),), 0, instructions=True) for item in items]


def note_part(note_id: bytes, note: Note) -> Part:
    """Return the part of a note that is not in the log."""
    return Part((), 0, note=(note_id, note))


def has_changed(conversation: Conversation, begun: int, batch: Sequence[Part]) -> bool:
    """Return True if the messages of these parts, which begin at `begun`, or earlier ones changed since the listing."""
    listed = [message for part in batch for _, message in part.messages]
    now = [item.message for item in conversation.messages[begun : begun + len(listed)]]
    return conversation.stored < begun or listed != now


def repeated(log: TopicLog, conversation: Conversation, stored: range) -> list[int]:
    """Return the stored positions without a digest in the log: the log already had the text of their whole batch."""
    return [
        position
        for position in stored
        if compaction.is_stored_kind(conversation.messages[position].message)
        and not log.has_digest(conversation.messages[position].identity)
    ]


def newly_said(log: TopicLog, messages: Sequence[Buffered]) -> set[bytes]:
    """Return the digests of messages that are new, not just sent again by the client.

    New messages follow the last one whose digest is in the log: earlier ones without a digest there repeat a text that
    the log already has (`repeated`). Of the messages that one request brought, only the last turn is new: the rest is
    history, with new digests if the client has changed its beginning.
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
    """Cuts the parts of one topic, and keeps the pending chunks in a searchable segment. Thread-safe.

    Rule: a change of a few parts costs no pass over all of them; there may be tens of thousands.
    """

    def __init__(self, log: TopicLog, cutter: Cutter) -> None:
        self._log = log
        self._cutter = cutter
        self._begun: dict[Key, threading.Event] = {}
        """Parts that are being cut, with an event set at the end."""
        self._listing: deque[tuple[Sequence[Part], Sequence[Part]]] = deque()
        """Queued changes: parts no longer pending, and newly pending ones. The event loop appends without a lock."""
        self._table_lock = threading.Lock()
        """Guards the attributes below. Held for 10 ms at most: every search needs it."""
        self._known: dict[Key, CutPart] = {}
        self._chunks = self._characters = 0
        """Totals of `_known`."""
        self._having: dict[bytes, dict[Key, None]] = {}
        """Keys of the cut parts by the digest of a message that they contain or came from."""
        self._listed: dict[Key, int] = {}
        """Pending parts, with the number of branches that have each."""
        self._uncut: dict[Key, Part] = {}
        """Pending parts that have not been cut yet."""
        self._spare: OrderedDict[Key, None] = OrderedDict()
        """Cut parts that are not pending."""
        self._stale: set[Key] = set()
        """Spare parts that are partly stored: kept because a prompt may have shown them, and cut anew on request."""
        table = table_of(log.fingerprint)
        self._segment = PendingSegment() if table is None else PendingSegment(table.dimension, table.vectors)
        """Chunks of all pending parts that are cut."""
        self._coming: dict[Key, tuple[PendingChunk, ...]] = {}
        """Chunks already in the segment, of pending parts that are entering it in batches."""
        self._stored_meanwhile: dict[int, set[bytes]] = {}
        """For each cutting in progress, by its set's id: digests appended meanwhile."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def memory_bytes(self) -> int:
        """Memory of the chunks that are pending; approximate."""
        own = self._chunks * _CHUNK_BYTES + self._characters
        return own + (self._segment.memory_bytes if self._chunks else 0)

    def note_waiting(self, gone: Sequence[Part], new: Sequence[Part]) -> None:
        """Queue parts that are no longer pending, and newly pending ones. A part of several branches is queued once for
        each."""
        self._listing.append((gone, new))

    def waiting(self, but: Collection[bytes] = (), until: float | None = None) -> tuple[PendingView, bool]:
        """Return the pending chunks, and True if all pending parts are cut, except those with no messages other than
        `but`. For `until` see `cut`.

        The latest parts are cut first: after a start hundreds of conversations may be pending, too many for one search.
        """
        with self._table_lock:
            self._take_listing()
            lacking = [part for part in self._uncut.values() if part.note is not None or not part.said.issubset(but)]
        cut = self.cut(reversed(lacking), until)
        with self._table_lock:
            return self._segment.view(), len(cut) == len(lacking)

    def cut_waiting(self, step: Callable[[], None] = lambda: None, *, notes_alone: bool = False) -> None:
        """Cut the pending parts; for `step` see `cut`."""
        with self._table_lock:
            self._take_listing()
            lacking = [part for part in self._uncut.values() if part.note is not None or not notes_alone]
        self.cut(lacking, step=step)

    def part_with(self, uuid: bytes) -> Part | None:
        """Return the pending part with this chunk; None if the chunk is not pending. Slow; called in a thread."""
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
        """Cut parts into chunks, or return them as cut before. Cutting takes 0.2 to 0.4 s per megabyte, and finding the
        words as much again. `until`: a `time.monotonic()` after which no cutting begins. Parts not cut by then are left
        out, and so are uncut long ones. `step`: called between pieces of a long part; it may wait, or raise to stop."""
        cut = [self._cut(part, until, step) for part in parts]
        return [part for part in cut if part is not None]

    def cut_as_shown(
        self, part: Part, is_shown: Callable[[bytes], bool], step: Callable[[], None] = lambda: None
    ) -> list[CutPart]:
        """Cut a part the way it is stored. `is_shown`: tells if a prompt has shown the chunk with a uuid.

        Branches that share the beginning of a part cut it differently. Chunks that a prompt has shown are stored as
        shown, whichever branch is stored first: this takes the longest shown part with the same beginning, and cuts the
        rest of this one. A part that an earlier attempt stored partly takes precedence over any other shown part.
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
        """Drop the parts that share messages with these just appended drafts; their rest is cut anew. Called in the
        writer thread, before the append is announced."""
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
        """Drop the parts that came from these messages, or name one of these calls (`call_digest`); their rest is cut
        anew."""
        naming = [
            key for key, cut in self._known.copy().items() if any(named_in(one.draft, digests) for one in cut.chunks)
        ]
        self._forget([*naming, *(key for digest in digests for key in self._with(digest))])

    def ids_of(self, digest: bytes) -> tuple[str, ...]:
        """Return the public ids of the pending chunks of a message, from its latest cutting."""
        cut = (part for key in reversed(self._with(digest)) if (part := self._known.get(key)) is not None)
        found = ([one.entry.public_id for one in part.chunks if digest in one.draft.digests] for part in cut)
        return tuple(next(filter(None, found), ()))

    def _with(self, digest: bytes) -> list[Key]:
        """Return the keys of the parts with this message, in the order of cutting."""
        return [*self._having.get(digest, {}).copy()]

    def _take_listing(self) -> None:
        """Apply the changes queued by `note_waiting`. Requires the lock."""
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
        """Make a part pending in its present form: some of its text may have been erased since it was listed or cut."""
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
        """Make a part spare, and drop the oldest spare part if there are too many."""
        self._spare[key] = None
        if len(self._spare) > _SPARE_PARTS:
            self._drop(next(iter(self._spare)))

    def _keep(self, part: Part, cut: CutPart) -> None:
        """Record a cut part. Chunks of a pending part enter the segment in small batches, so that no search waits long
        for the lock."""
        while not self._keep_more(part, cut):
            time.sleep(_REST_SECONDS)

    def _keep_more(self, part: Part, cut: CutPart) -> bool:
        """Record the next batch of a cut part; return True when all is done."""
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
        """Rebuild the segment, some rows at a time, if most of its rows are dead."""
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
        """Release ids reserved for chunks of no part, such as chunks of answers that were regenerated."""
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
        """Drop the chunks of a part; if it is still pending, it is cut anew on request. Requires the lock."""
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
        if (begun := self._begun.get(part.key)) is not None:
            # Not for long: it may be the thread with the lowest priority, which gets no core on a busy machine.
            begun.wait(None if until is None else _OTHER_THREAD_SECONDS)
            if (known := self._fresh(part.key)) is not None:
                return known
        ended = self._begun[part.key] = threading.Event()
        try:
            # A short part without the step: a search that waits for it must not wait for other requests, too.
            return self._cut_anew(part, step if part.is_long else lambda: None)
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
        """Cut a note into chunks, including those in the log. For `step` see `cut`."""
        return self._cutter.in_steps(step).cut_note(self._log.topic_id, note_id, note)

    def next_batch(
        self,
        parts: Sequence[Part],
        is_shown: Callable[[bytes], bool],
        named: Collection[bytes] = (),
        step: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Return the next chunks of these parts to be stored, at least one if any is left.

        A part with more text than BATCH_CHARACTERS takes several batches. Short parts after it do not wait: each batch
        has as much text of theirs again. Chunks that are shown or stored keep their cutting (`is_shown`). `named`:
        uuids of chunks that are stored first; the batch contains no others then.
        """
        self._renew_segment()
        self._let_ids_go()
        knows, batch, cut = self._log.snapshot().knows, list[Draft](), list[CutPart]()
        digests: dict[bytes, None] = {}
        complete, room = 0, BATCH_CHARACTERS
        for place, part in enumerate(parts):
            if complete < place and (part.characters > BATCH_CHARACTERS or not self._is_lacking(part)):
                continue
            if not digests.keys().isdisjoint(part.said):  # a part that was shown goes on into this one
                left_of = ((digest, None if digest in digests else one) for digest, one in part.messages)
                part = msgspec.structs.replace(part, messages=tuple(left_of))
            pieces = self.cut_as_shown(part, lambda uuid: is_shown(uuid) or knows(uuid), step)
            drafts = [draft for one in pieces for draft in one.drafts if draft.uuid not in one.done]
            known = self._log.snapshot().known([draft.uuid for draft in drafts])
            left = [draft for draft in drafts if draft.uuid not in known]
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
        """Return True if a message or note of the part is not completely in the log."""
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
        """Cut a note into the chunks to be stored. Chunks that an interrupted attempt stored are left out: they may
        have been corrected since."""
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


class ListedParts:
    """All pending parts of a buffer. Every request needs all of them, and listing takes 20 µs per turn. So only changed
    conversations are listed anew, and a conversation that has grown only from its last part on."""

    def __init__(self, buffer: HotBuffer, told: Callable[[Sequence[Part], Sequence[Part]], None]) -> None:
        """`told`: see `PartCutter.note_waiting`."""
        self._buffer = buffer
        self._told = told
        self._said: dict[str, tuple[int, tuple[int, bool], list[Part]]] = {}
        """By conversation, as of its listing: `changes`, (length, is an answer awaited), parts."""
        self._alone: dict[str | bytes, list[Part]] = {}
        """Owed instructions by conversation, and notes by id."""
        self.characters = 0
        """Total length of the texts as of the last `refresh`; shared parts count once for each branch."""
        self._touched: list[str | bytes] = [*buffer.notes, *(one.id for one in buffer.conversations())]

    def refresh(self) -> bool:
        """Update the list; return True if any part is pending."""
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
        """Return a conversation's pending parts as of now, without owed instructions."""
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
        """Yield a conversation's parts that end at or before a position. If that is the end, an incomplete last part is
        yielded, too."""
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
        """Report which parts are gone, and which are new."""
        old, new = ({part.key: part for part in some} for some in (before, now))
        gone = [part for key, part in old.items() if new.get(key) != part]
        come = [part for key, part in new.items() if old.get(key) != part]
        if gone or come:
            self._told(gone, come)
            self.characters += sum(part.characters for part in come) - sum(part.characters for part in gone)


class BufferedText(UnstoredText):
    """The text of a buffer that is not in the log, as of now; see `UnstoredText`."""

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
