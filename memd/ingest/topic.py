"""One open topic: its log, hot buffer and journal; also a topic shared by several daemons.

Rule: only the event loop touches the buffer; only the `writer` thread writes log and journal. An unreadable record of
the journal is skipped; secrets that the settings now name are redacted. Prompts have everything that clients send; the
journal does not have the text of forbidden messages.

In a cluster, buffer and log follow the shared log. Each request first reads the events that other daemons have
appended. New messages and their block are in the shared log before the answer begins. While the database is
unreachable they wait in the local journal. If an append's outcome is unknown, the rows tell it: an event found among
them was appended.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from memd.caching import Latest
from memd.clock import steady_now
from memd.conversation.conversation import Buffered
from memd.conversation.events import (
    Appended,
    BufferEvent,
    Forgotten,
    Marked,
    Noted,
    NoteStored,
    Placed,
    Removed,
    decode_event,
    encode_event,
)
from memd.conversation.hot_buffer import HotBuffer, clashing, rebased
from memd.entries import Draft, Entry
from memd.errors import Behind, Fenced, ForeignFile, InDoubt, MadeAnew, Rewritten, StoreError
from memd.ingest.pipeline import Cutter
from memd.ingest.redaction import Redactor
from memd.ingest.unstored import BufferedText, ListedParts, PartCutter
from memd.messages import Message, rebuilt
from memd.store.disk import LocalDisk, Wiper
from memd.store.erasure import Erasure, ForbiddenText
from memd.store.log.format import encode_record
from memd.store.log.journal import Journal, SharedMark, read_journal, records_of
from memd.store.shared.postgres import News, Row, SharedLog
from memd.store.shared.shared_topic import SharedTopicLog
from memd.store.snapshot import Snapshot
from memd.store.store import TopicLog

log = logging.getLogger("memd")
Result = TypeVar("Result")

Ended = dict[str, News]
"""News by topic, without rows."""
CHUNK_IDS_MAX = 4_096
"""Messages whose chunk ids are kept in memory: enough for several long tool loops."""


class Inquiry(NamedTuple):
    """A query to the shared log for the ends of topics."""

    topics: frozenset[str]
    answer: asyncio.Future[Ended]


class Topic:
    """One topic while the daemon runs."""

    trouble_since = 0
    """Start of `write_trouble`, in microseconds since the epoch."""

    def __init__(
        self,
        log_: TopicLog,
        buffer: HotBuffer,
        journal: Journal,
        writer: Executor,
        cutter: Cutter,
        before_write: Callable[[], None],
    ) -> None:
        """Use `Topics.get`. `writer`: the topic's writer thread. `before_write`: called there before each write to the
        log or the journal."""
        self.id = log_.topic_id
        self.buffer = buffer
        self._cutter, self._redactor = cutter, cutter.redactor
        self._open(log_, journal)
        self._troubles: dict[str, StoreError] = {}
        self.storing = asyncio.Lock()
        """Held while messages are stored: branches share messages, and each must see those that another has stored."""
        self._turn_to_store = asyncio.Lock()
        self.noting = asyncio.Lock()
        """Held while a note is taken: the second of two equal notes must see the first."""
        self.undecided: set[bytes] = set()
        """The note that is being taken, until what other daemons have said makes it worth another look."""
        self.correcting = asyncio.Lock()
        """Held while chunks are corrected: the second of two corrections of a chunk must see the first."""
        self.chunk_ids: Latest[bytes, tuple[str, ...]] = Latest(CHUNK_IDS_MAX)
        """Public ids of the chunks of recently stored messages, by the message's digest."""
        self.being_stored: frozenset[bytes] = frozenset()
        """Digests of the messages in the current append: the ids of their chunks are not final yet."""
        self.journal_behind = False
        """True if the journal's file differs from the buffer: only a rewrite brings it up to date."""
        self._journal_unsynced = False
        self._has_ended = False
        """True after the topic was erased: its folder is gone, or belongs to another topic."""
        self.writer = writer
        """Executor in which the topic is opened, written and closed."""
        self._before_write = before_write
        self._holders, self._used_at = 0, time.monotonic()
        self.used_by = ""
        """The last principal to use it, as in `Principal.author`."""

    def _open(self, log_: TopicLog, journal: Journal) -> None:
        """Use this log and this journal from now on."""
        self.log, self._journal = log_, journal
        self.cutter = PartCutter(log_, self._cutter)
        self.listed_parts = ListedParts(self.buffer, self.cutter.note_waiting)
        log_.unstored = self.unstored

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the topic open while the block runs, without counting as a use of it."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the topic open while the block runs, and for its idle time from then on."""
        try:
            with self.held():
                yield
        finally:
            self._used_at = time.monotonic()

    @asynccontextmanager
    async def storing_in_turn(self) -> AsyncIterator[None]:
        """Hold `storing` for a background step. Only one background step at a time queues for it, so that a request,
        which takes `storing` directly, waits for one step at most."""
        async with self._turn_to_store, self.storing:
            yield

    @property
    def idle_seconds(self) -> float:
        """Seconds since its last use; 0 while somebody holds it."""
        return 0.0 if self._holders else time.monotonic() - self._used_at

    @property
    def is_on_disk(self) -> bool:
        """True if the topic can be closed without loss."""
        return not self.journal_behind and not self._journal_unsynced and not self.buffer.has_unstored

    @property
    def unwritten(self) -> int:
        """Number of messages and notes that may be in memory only."""
        return self.buffer.unstored_count if self.journal_behind else 0

    @property
    def risk(self) -> str:
        """The risk to messages that cannot be stored now, in words."""
        return "what is said now is lost if memd ends before that works" if self.journal_behind else "nothing is lost"

    @property
    def buffer_bytes(self) -> int:
        """Memory of the open conversations, without the texts of their messages, and of the pending chunks."""
        return self.buffer.memory_bytes + self.cutter.memory_bytes

    def unstored(self) -> BufferedText:
        """Return the pending text as of now; every search of the topic's log calls this."""
        return BufferedText(self.cutter, is_any=self.listed_parts.refresh())

    def ids_of(self, digest: bytes) -> tuple[str, ...]:
        """Return the public ids of a message's chunks, recently stored or pending."""
        return self.chunk_ids.get(digest) or (() if digest in self.being_stored else self.cutter.ids_of(digest))

    @property
    def write_trouble(self) -> StoreError | None:
        """The last error of a write to the log or the journal, until a write to the same file succeeds."""
        return next(iter(self._troubles.values()), None)

    @property
    def is_fresh(self) -> bool:
        """True if it has everything that other daemons have acknowledged."""
        return True

    async def append(self, drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        """Append to the log, in the writer thread; see `TopicLog.append`."""
        log_ = self.log

        def append() -> list[Entry]:
            entries = log_.append(drafts, made_at)
            self.cutter.note_stored(drafts)
            return entries

        return await self._write("log", append)

    async def append_once(self, drafts: Sequence[Draft], log_: TopicLog, made_at: int | None = None) -> list[Entry]:
        """Append the drafts of one request; all have its mark (`ChunkState.asked_by`). `log_`: the log in which the
        mark was not found. Raises InDoubt: the outcome is not known yet; StoreError: nothing was written."""
        if log_ is not self.log:
            raise Fenced(f"topic {self.id}: it was opened anew meanwhile; nothing was stored, send it again")
        return await self.append(drafts, made_at)

    async def _write(self, file: str, work: Callable[[], Result]) -> Result:
        """Run `work`, a write to the log or the journal, in the writer thread, and keep its error (`write_trouble`)."""

        def write() -> Result:
            if self._has_ended:
                raise StoreError(f"topic {self.id} was erased: what was under way in it is not stored")
            self._before_write()
            return work()

        try:
            result = await asyncio.get_running_loop().run_in_executor(self.writer, write)
        except (MadeAnew, Rewritten):
            raise  # no trouble: another daemon was faster
        except StoreError as error:
            if file not in self._troubles:
                log.error("writing failed", extra={"topic": self.id, "error": error})
            self._note(error, file)
            raise
        if self._note(None, file):
            log.info("writing works again", extra={"topic": self.id, "file": file})
        return result

    def _note(self, error: StoreError | None, file: str) -> bool:
        """Set or clear a file's error; return True if it had one."""
        had_none, was_wrong = not self._troubles, self._troubles.pop(file, None) is not None
        if error is not None:
            self.trouble_since = time.time_ns() // 1000 if had_none else self.trouble_since
            self._troubles[file] = error
        return was_wrong

    async def follow(self, inquiry: Inquiry | None = None) -> None:
        """Read what other daemons have appended, in a cluster. `inquiry`: a query about this topic that was begun after
        the request arrived."""

    def is_others(self, name: str | bytes) -> bool:
        """Return True if another daemon received this conversation or note last, and will store it."""
        return False

    async def exchange_news(self) -> None:
        """In a cluster, tell at times which answers are awaited here, so that no other daemon stores their questions,
        and read what others tell. Called each second."""

    async def save(self, *, sync: bool = False) -> None:
        """Journal the buffer's changes. After a failure rewrite the journal, now and in each save until that works."""
        events = self.buffer.take_unsaved()
        if not events and not (self.journal_behind or (sync and self._journal_unsynced)):
            return
        if self.journal_behind:
            await self.rewrite_journal()
            return
        self._journal_unsynced = not sync

        def append() -> None:
            if events:
                self._journal.append(self._payloads(events), self.log.snapshot().extent)
            if sync:
                self._journal.sync()

        try:
            await self._write("journal", append)
        except StoreError:
            self.journal_behind = True
            await self.rewrite_journal()

    async def make_durable(self) -> bool:
        """Force the whole buffer to disk, in the journal; return False if that failed (the disk is full, …).

        Unlike `save` it also waits for concurrent writes: after True no crash can lose any message so far.
        """
        self._journal_unsynced = True  # even during another sync, whose end must be awaited
        await self.save(sync=True)
        return not self.journal_behind

    async def withdraw(self, note_id: bytes) -> bool:
        """Drop a note that could not be made durable; return False if it is durable by now. Called with `storing`, so
        that it is not being stored."""
        if is_waiting := note_id in self.buffer.notes:
            self.buffer.record(NoteStored(note_id))
        return is_waiting

    async def rewrite_journal(self) -> None:
        """Replace `hot.log` by the shortest journal of the present buffer, durably, if it is long or behind."""
        if not (self.journal_behind or self._journal.is_long):
            await self.save(sync=True)
            return
        with suppress(StoreError):  # it stays behind
            await self._rewrite()

    async def _rewrite(self, wiper: Wiper | None = None) -> None:
        self.buffer.take_unsaved()  # the whole buffer is written, and these events with it
        retell = self.buffer.retelling()
        self._journal_unsynced = False

        def rewrite() -> None:
            self._journal.rewrite(self._payloads(retell()), self.log.snapshot().extent, wiper)

        try:
            await self._write("journal", rewrite)
        except BaseException:
            self.journal_behind = True
            raise
        self.journal_behind = False

    async def forget(
        self, digests: Collection[bytes], uuids: Collection[bytes], wiper: Wiper, blocks: Collection[bytes] = ()
    ) -> None:
        """Drop the text of erased messages, and the blocks that show these chunks, here and in `hot.log`, and overwrite
        the old file. `blocks`: further blocks, by the digest of the message after each. Raises StoreError: the journal
        cannot be written, or the old file may still exist."""
        self._drop(digests, uuids, blocks)
        await self._rewrite(wiper)

    def forget_shown(self, uuids: Collection[bytes]) -> None:
        """Drop the blocks that show these chunks; the next write of the journal rewrites it without them."""
        self.buffer.record(Forgotten([], list(uuids)))
        self.journal_behind = True

    def _drop(self, digests: Collection[bytes], uuids: Collection[bytes], blocks: Collection[bytes]) -> None:
        self.buffer.record(Forgotten(list(digests), list(uuids)))
        for conversation in self.buffer.conversations() if blocks else ():
            self.buffer.remove_blocks(conversation, [*blocks])
        for digest in digests:
            self.chunk_ids.pop(digest, None)

    def note_chunks(self, entries: Sequence[Entry]) -> None:
        """Add entries to `chunk_ids`."""
        for entry in entries:
            for digest in entry.digests:
                self.chunk_ids[digest] = (*self.chunk_ids.get(digest, ()), entry.public_id)

    def end(self) -> None:
        """Refuse all further writes: the topic is erased. Called in the writer thread."""
        self._has_ended = True

    def _payloads(self, events: Sequence[BufferEvent]) -> list[bytes]:
        """Redact and encode events, in the writer thread; events are immutable."""
        if forbidden := self.log.forbidden:
            events = [without_forbidden(event, forbidden) for event in events]
        snapshot = self.log.snapshot()
        return [encode_event(self._redactor.kept(without_erased(event, snapshot))) for event in events]


def events_in(payloads: Sequence[bytes], topic_id: str, redactor: Redactor) -> tuple[list[BufferEvent], bool]:
    """Return the redacted events of a journal, and True if nothing had to be redacted."""
    events = known_events(payloads, topic_id)
    kept = [redactor.kept(event) for event in events]
    return kept, kept == events


def replayed(events: Sequence[BufferEvent], *, are_others: bool = False) -> HotBuffer:
    """Return the buffer after these events. `are_others`: some are other daemons'."""
    buffer = HotBuffer(lambda: uuid.uuid4().hex[:12])
    buffer.replay(heard_now(events) if are_others else events)
    return buffer


def waiting_in(path: Path, files: LocalDisk) -> int:
    """Count the messages and notes of a journal that are not stored yet. Raises StoreError: it cannot be read."""
    try:
        return replayed(known_events(read_journal(path, files))).unstored_count
    except ForeignFile:
        return 0  # nothing of it is stored in this topic; a daemon and `memd verify` report it


def known_events(payloads: Iterable[bytes], topic_id: str = "") -> list[BufferEvent]:
    """Decode records, without those unknown to this version, which are logged if a topic is given."""
    events = []
    for payload in payloads:
        try:
            events.append(decode_event(payload))
        except msgspec.DecodeError as error:
            if topic_id:
                told = {"topic": topic_id, "error": error}
                log.warning("a record of hot.log is of another version and was left out", extra=told)
    return events


def heard_now(events: Iterable[BufferEvent]) -> list[BufferEvent]:
    """Return events that may be of other daemons, as of now: what rests, and what came again, is decided by the clock
    here, and theirs may differ."""
    now = steady_now()
    return [msgspec.structs.replace(event, at=now) if hasattr(event, "at") else event for event in events]


def without_forbidden(event: BufferEvent, forbidden: ForbiddenText) -> BufferEvent:
    """Return the event without the text of forbidden messages."""

    def kept(value: Any, _: str) -> Any:
        if isinstance(value, Message):
            return value.erased if forbidden.has_message(b"", value) else value
        if not isinstance(value, Buffered) or value.message is None:
            return None
        is_forbidden = forbidden.has_message(value.identity, value.message)
        return msgspec.structs.replace(value, message=value.message.erased) if is_forbidden else value

    return cast("BufferEvent", rebuilt(event, kept))


def without_erased(event: BufferEvent, snapshot: Snapshot) -> BufferEvent:
    """Return the event; a block that shows a chunk erased since becomes its removal."""
    if isinstance(event, Placed) and any(snapshot.was_erased(chunk.uuid) for chunk in event.block.chunks):
        return Removed(event.conversation, [event.digest])
    return event


def erased_in(buffer: HotBuffer, erasures: Iterable[Erasure]) -> frozenset[bytes]:
    """Return the uuids of chunks in a topic's memory blocks that were erased in their topic of origin."""
    blocks = (block for conversation in buffer.conversations() for block in conversation.blocks.values())
    shown = {chunk for block in blocks for chunk in block.chunks}
    return frozenset(
        chunk.uuid
        for one in erasures
        for chunk in shown
        if chunk.topic_id == one.topic_id
        # A topic of the same name that was begun later has higher ids.
        and (chunk.origin_id <= max(one.id, one.highest_id) if one.kind == "topic" else chunk.uuid in one.chunk_uuids)
    )


# A topic shared by several daemons

_NOTHING = b"\xc0"
"""The only record in the base of an empty buffer: no event."""
BASE_BYTES_MIN = 64 << 10
"""Rows longer than this, and than twice their base, are replaced by a new base: the whole buffer."""
OTHERS_SECONDS = 30.0
"""After this time without news this daemon stores messages that another daemon received: that one may have died."""
NEWS_SECONDS = 10.0
"""See `Topic.exchange_news`."""
_TRIES = 20
asking = ThreadPoolExecutor(8, "memd-shared")
"""Threads that wait for the database."""


def ask(kept: SharedLog, topics: Iterable[str]) -> Inquiry:
    """Query the shared log for the ends of topics, in one round trip. Called on the event loop."""
    names = frozenset(topics)
    answer = asyncio.get_running_loop().run_in_executor(asking, kept.ends, names)
    answer.add_done_callback(lambda one: one.cancelled() or one.exception())  # else asyncio logs it
    return Inquiry(names, answer)


class Renewed(msgspec.Struct, frozen=True):
    """A topic read anew because its local copy was invalid."""

    log: SharedTopicLog
    journal: Journal
    rows: list[Row]
    """All rows of the buffer; empty if the database was unreachable."""


Renew = Callable[[str], Renewed]


class SharedTopic(Topic):
    """See Topic. Used on the event loop."""

    log: SharedTopicLog

    def shares(self, waiting: Sequence[bytes], renew: Renew, kept: SharedLog) -> None:
        """Begin to follow the shared log; called once, in the thread that opens the topic. This brings the buffer to
        the state of the rows; while the database is unreachable it keeps the journal's. `waiting`: the journal's
        events not known to be in the shared log. `renew`: reads a topic anew if its copy is invalid."""
        self._marked = self._journal.mark or SharedMark(0, 0)
        """The last mark in the local journal."""
        self._head = self._marked.head
        self._rows_bytes = self._base_bytes = 0
        self._pending = [(event, payload) for payload in waiting for event in known_events([payload])]
        """This daemon's events not known to be in the shared log, with their payloads."""
        self._journaled = len(self._pending)
        """Number of those already in the local journal."""
        self._turn = asyncio.Lock()
        """Held while rows of the buffer are read or appended."""
        self._others: dict[str | bytes, float] = {}
        """Conversations and notes that another daemon received last, with the time of its last news of them."""
        self._news_at = 0.0
        self._renew, self._kept = renew, kept
        try:
            rows = self.log.catch_up(self._head)
            if not self._takes(rows):
                rows = self.log.catch_up(0) if self._head else rows
                self._rebase(rows, _buffer_of(rows))
            self.journal_behind |= bool(rows)
            # Who received what may be long gone, but who awaits an answer tells it again (see `exchange_news`).
            open_ones = (one.id for one in self.buffer.conversations() if not one.is_answered)
            self._others = dict.fromkeys(open_ones, time.monotonic())
        except Rewritten:
            self._go_on(renewed := renew(self.id), _buffer_of(renewed.rows))
        except StoreError as error:
            log.warning("a topic is read from its copy", extra={"topic": self.id, "error": error})

    # -- for requests -------------------------------------------------------------------------------------------

    async def follow(self, inquiry: Inquiry | None = None) -> None:
        """See Topic; while the database is unreachable the copy stays as it is."""
        if inquiry is None or self.id not in inquiry.topics:
            inquiry = ask(self._kept, [self.id])
        try:
            ends = await asyncio.shield(inquiry.answer)
            async with self._turn:
                if not self.log.has_all(ends[self.id], self._head):
                    await self._catch_up()
        except Rewritten:
            async with self._turn:
                await self._renewed()
        except StoreError as error:
            self.log.is_current = False
            self._note(error, "shared")
            return
        if not self._pending:  # else the database can be read but not written: its disk is full
            self._follows_again()

    def is_others(self, name: str | bytes) -> bool:
        """See Topic."""
        return time.monotonic() - self._others.get(name, -OTHERS_SECONDS) < OTHERS_SECONDS

    @property
    def is_fresh(self) -> bool:
        """See Topic."""
        return self.log.is_current

    @property
    def unwritten(self) -> int:
        """See Topic."""
        return super().unwritten if self._pending or self.buffer.unsaved else 0

    @property
    def is_on_disk(self) -> bool:
        """See Topic: the shared log has everything."""
        return not self._pending and not self.buffer.has_unstored

    async def exchange_news(self) -> None:
        """See Topic."""
        if self.buffer.has_unstored and (now := time.monotonic()) - self._news_at >= NEWS_SECONDS:
            self._news_at, old = now, steady_now() - NEWS_SECONDS
            await self.follow()
            self._others = {name: told_at for name, told_at in self._others.items() if self.is_others(name)}
            for one in self.buffer.conversations():
                if one.awaiting and one.used_at < old and not self.is_others(one.id):
                    self.buffer.mark(one)  # advances nothing: any version reads it

    async def append(self, drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        """See Topic. Also raises MadeAnew if the copy for which the drafts were made is invalid."""
        try:
            return await super().append(drafts, made_at)
        except (Fenced, Rewritten) as error:
            await self.follow()
            raise MadeAnew(f"topic {self.id}: it was read anew meanwhile; what is to be stored is made anew") from error

    async def append_once(self, drafts: Sequence[Draft], log_: TopicLog, made_at: int | None = None) -> list[Entry]:
        """See Topic. Also raises MadeAnew if the database's answer was lost and its rows, by which the caller can tell
        the outcome, were read since."""
        if self._pending and (trouble := self._troubles.get("shared")) is not None:
            raise trouble  # the request's arrival must be there before, by which other daemons know a retry
        try:
            return await self.append(drafts, made_at)
        except InDoubt as error:
            await self.follow()
            if not self.is_fresh:
                raise
            raise MadeAnew(f"topic {self.id}: it is looked up whether that was stored") from error

    async def save(self, *, sync: bool = False) -> None:
        """Append the buffer's changes to the shared log, or to the journal if that fails."""
        async with self._turn:
            await self._saved(sync=sync)

    async def make_durable(self) -> bool:
        """See Topic."""
        await self.save(sync=True)
        return not self.journal_behind or not self._pending

    async def withdraw(self, note_id: bytes) -> bool:
        """See Topic. No event tells of it: a note that is in a row all the same is read there, as others' are."""
        async with self._turn:
            return await self._taken_out({note_id})

    async def rewrite_journal(self) -> None:
        """Replace the rows of the buffer by one base if they are long."""
        async with self._turn:
            is_long = self._rows_bytes > max(BASE_BYTES_MIN, 2 * self._base_bytes)
            await self._saved(sync=True, base=is_long)

    async def forget(
        self, digests: Collection[bytes], uuids: Collection[bytes], wiper: Wiper, blocks: Collection[bytes] = ()
    ) -> None:
        """See Topic: in the rows too."""
        await self.follow()
        async with self._turn:
            self._drop(digests, uuids, blocks)
            await self._send(base=True)
            while self.buffer.unsaved:  # events recorded meanwhile
                await self._send()
            await self._rewrite_copy(wiper)

    # -- private ------------------------------------------------------------------------------------------------

    async def _saved(self, *, sync: bool = False, base: bool = False) -> None:
        try:
            try:
                await self._send(base=base)
            except Rewritten:
                await self._renewed()
                await self._send()
        except StoreError as error:
            self._note(error, "shared")
            await self._wait_in_journal(sync=sync)
        else:
            if not self.buffer.unsaved and not self._pending:
                self._follows_again()
            if sync and (self.journal_behind or self._marked != self._mark()):
                await self._rewrite_copy()  # else the next start has to read the topic anew

    async def _send(self, *, base: bool = False) -> None:
        """Append the pending events, and then with `base` the whole buffer. The base contains nothing else, so that a
        daemon with all rows before it need not read it."""
        for _ in range(_TRIES):
            await self._take_unsaved()
            if self._pending:
                if not await self._appended(b"".join(encode_record(payload) for _, payload in self._pending)):
                    await self._catch_up()
                    continue
                fresh, self._pending, self._journaled = self._pending[self._journaled :], [], 0
                await self._copy([payload for _, payload in fresh])
            if not base:
                return
            if self.buffer.unsaved:
                continue
            retell = self.buffer.retelling()
            told = await self._in_writer(lambda retell=retell: self._payloads(retell()))  # type: ignore[misc]
            data = b"".join(map(encode_record, told or [_NOTHING]))
            if await self._appended(data, base=True):
                self._rows_bytes = self._base_bytes = len(data)
                await self._rewrite_copy()
                return
            await self._catch_up()
        raise Behind(f"topic {self.id}: other daemons are told so much at this moment that it waits")

    async def _take_unsaved(self) -> None:
        """Move the buffer's unsaved events to `_pending`."""
        events = self.buffer.take_unsaved()
        for event in events:
            if isinstance(event, Appended) and event.messages:
                self._others.pop(event.conversation, None)  # this daemon stores it now
        try:
            encoded = await self._in_writer(partial(self._payloads, events)) if events else []
        except BaseException:  # also a client's disconnection: other requests rely on these events
            self.buffer.leave_unsaved(events)
            raise
        self._pending += zip(events, encoded, strict=True)

    async def _appended(self, data: bytes, *, base: bool = False) -> bool:
        if not await _asked(partial(self.log.append_hot, self._head, data, base=base)):
            return False
        self._head += 1
        self._rows_bytes += len(data)
        return True

    async def _catch_up(self) -> None:
        rows = await _asked(partial(self.log.catch_up, self._head))
        await self._reconsider(rows)
        if not self._takes(rows):
            rows = await _asked(partial(self.log.catch_up, 0)) if self._head else rows
            self._rebase(rows, await _asked(partial(_buffer_of, rows)))
        elif rows and self._pending:
            self.journal_behind = True  # its order differs from the rows'
        elif rows:
            await self._copy(_payloads_of(rows[1:] if rows[0].is_base else rows))

    async def _reconsider(self, rows: Sequence[Row]) -> None:
        """Take out the note that is being taken, unless it is in these rows: they may have the same from elsewhere."""
        if self.undecided:
            await self._taken_out(self.undecided, set(_payloads_of(rows)))
            self.undecided.clear()

    async def _taken_out(self, notes: Collection[bytes], but: Collection[bytes] = ()) -> bool:
        """Drop notes that are not known to be in the shared log; return False if none was. `but`: payloads that are."""
        await self._take_unsaved()
        gone = [
            isinstance(event, Noted) and event.id in notes and payload not in but for event, payload in self._pending
        ]
        if any(gone):
            self._journaled -= sum(gone[: self._journaled])
            self._pending = [one for one, is_gone in zip(self._pending, gone, strict=True) if not is_gone]
            self.buffer.replay([NoteStored(note_id) for note_id in notes])
            self.journal_behind = True
        return any(gone)

    def _takes(self, rows: Sequence[Row]) -> bool:
        """Apply newer rows to the buffer; return False if it has to be read as a whole."""
        theirs = self._theirs(rows)
        if theirs is None or clashing(theirs, self._own()):
            return False
        self.buffer.replay(theirs)
        self._head = rows[-1].last if rows else self._head
        self._rows_bytes += sum(len(row.data) for row in rows)
        return True

    def _theirs(self, rows: Sequence[Row]) -> list[BufferEvent] | None:
        """Return other daemons' events in newer rows; None if rows between are gone that the buffer does not have."""
        if rows and (rows[0].last > self._head + 1 or (rows[0].is_base and not self._head)):
            return None
        payloads = _payloads_of(row for row in rows if not row.is_base)
        own = self._settled(rows)
        theirs = heard_now(known_events(payload for payload in payloads if payload not in own))
        now = time.monotonic()
        for event in theirs:
            if isinstance(event, Appended) and event.messages:
                self._others[event.conversation] = now
            elif isinstance(event, Marked):
                one = self.buffer.of_id(event.conversation)
                if one is not None and one.stored == event.stored < one.wanted_end:  # see `exchange_news`
                    self._others[event.conversation] = now
            elif isinstance(event, Noted):
                self._others[event.id] = now
        return theirs

    def _settled(self, rows: Sequence[Row]) -> set[bytes]:
        """Drop pending events found in these rows: the answer to their append was lost. Return all that were
        pending."""
        found = set(_payloads_of(rows))
        own = {payload for _, payload in self._pending}
        if own & found:
            self._pending = [one for one in self._pending if one[1] not in found]
            self.journal_behind, self._journaled = True, 0
        return own

    def _rebase(self, rows: Sequence[Row], kept: HotBuffer, *, is_known: bool = True) -> None:
        """Rebuild the buffer from all rows, with this daemon's own events after them. `kept`: the buffer of the rows.
        `is_known`: the present buffer has the rows up to `_head`."""
        theirs = self._theirs([row for row in rows if row.last > self._head]) if is_known else None
        if theirs is None:  # who received what is new in a base is not told
            mine = {one.id: len(one) for one in self.buffer.conversations()}
            grown = (one.id for one in kept.conversations() if len(one) > mine.get(one.id, 0))
            self._others |= dict.fromkeys([*grown, *(kept.notes.keys() - self.buffer.notes)], time.monotonic())
        self._settled(rows)
        rebased(self.buffer, kept, theirs, self._own())
        self._pending, self._journaled = [], 0
        self._head = rows[-1].last if rows else self._head
        self._rows_bytes = self._base_bytes = sum(len(row.data) for row in rows)
        self.journal_behind = True

    async def _renewed(self) -> None:
        renewed = await _asked(partial(self._renew, self.id))
        await self._reconsider(renewed.rows)
        self._go_on(renewed, await _asked(partial(_buffer_of, renewed.rows)))

    def _go_on(self, renewed: Renewed, kept: HotBuffer) -> None:
        """Use a copy that was read anew, without erased chunks. `kept`: the buffer of its rows."""
        self._open(renewed.log, renewed.journal)
        self._head = 0
        self._rebase(renewed.rows, kept, is_known=False)
        snapshot = self.log.snapshot()
        blocks = [block for one in self.buffer.conversations() for block in one.blocks.values()]
        shown = {chunk.uuid for block in blocks for chunk in block.chunks}
        if erased := {uuid for uuid in shown | self.buffer.injected_uuids() if snapshot.was_erased(uuid)}:
            self.forget_shown(erased)
        log.info("a topic was read anew: something in it was erased", extra={"topic": self.id})

    def _open(self, log_: TopicLog, journal: Journal) -> None:
        super()._open(log_, journal)
        self.log.noticed = self.cutter.note_stored  # text that other daemons have stored is not cut again

    def _mark(self) -> SharedMark:
        return SharedMark(self.log.generation, self._head)

    def _own(self) -> list[BufferEvent]:
        return [*(event for event, _ in self._pending), *self.buffer.unsaved]

    def _follows_again(self) -> None:
        if self._note(None, "shared"):
            log.info("the shared log is followed again", extra={"topic": self.id})

    # -- the local copy of the buffer -----------------------------------------------------------------------------

    async def _copy(self, payloads: Sequence[bytes]) -> None:
        """Also write events of the shared log into the local journal. After a failure they are read anew."""
        if self.journal_behind:
            await self._rewrite_copy()
            return
        mark = self._mark()
        try:
            await self._in_writer(lambda: self._journal.append(payloads, self.log.snapshot().extent, mark))
            self._marked = mark
        except StoreError:
            self.journal_behind = True

    async def _rewrite_copy(self, wiper: Wiper | None = None) -> None:
        self.journal_behind = True
        if self._pending or self.buffer.unsaved:
            return  # pending events are recognised by their position after the mark
        retell, mark = self.buffer.retelling(), self._mark()

        def rewrite() -> None:
            self._journal.rewrite(self._payloads(retell()), self.log.snapshot().extent, wiper, mark)

        try:
            await self._in_writer(rewrite)
            self.journal_behind, self._marked = False, mark
        except StoreError:
            if wiper is not None:
                raise

    async def _wait_in_journal(self, *, sync: bool) -> None:
        """Write events that cannot be appended now to the journal, where they survive a crash."""
        await self._take_unsaved()
        waiting = [payload for _, payload in self._pending[self._journaled :]]

        def write() -> None:
            if waiting:
                self._journal.append(waiting, self.log.snapshot().extent)
            if sync:
                self._journal.sync()

        try:
            await self._write("journal", write)
            self._journaled += len(waiting)
        except StoreError:
            self.journal_behind = True

    async def _in_writer(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.writer, work)


async def _asked(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(asking, work)


def _payloads_of(rows: Iterable[Row]) -> list[bytes]:
    return [payload for row in rows for payload in records_of(row.data, 0).payloads]


def _buffer_of(rows: Iterable[Row]) -> HotBuffer:
    return replayed(known_events(_payloads_of(rows)), are_others=True)
