"""One open topic: its log, hot buffer and journal.

Rule: only the event loop touches the buffer; log and journal are written in `writer` alone. A record of the journal
that this version cannot read costs that record, and secrets that the settings name by now are left out. Prompts have
all that clients send; the journal does not have the text of messages that are never to be stored again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from memd.caching import Latest
from memd.conversation.conversation import Buffered
from memd.conversation.events import BufferEvent, Forgotten, Placed, Removed, decode_event, encode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.entries import Draft, Entry
from memd.errors import Fenced, ForeignFile, MadeAnew, Rewritten, StoreError
from memd.ingest.pipeline import Cutter
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.unstored import BufferedText, ListedParts, PartCutter, unstored_messages
from memd.messages import Message, rebuilt
from memd.store.disk import LocalDisk, Wiper
from memd.store.erasure import Erasure, ForbiddenText, was_erased
from memd.store.log.journal import Journal, read_journal
from memd.store.shared.seam import News
from memd.store.snapshot import Snapshot
from memd.store.store import TopicLog

log = logging.getLogger("memd")
Result = TypeVar("Result")

Ended = Mapping[str, News]
"""By topic; without rows."""
CHUNK_IDS_MAX = 4_096
"""Messages whose chunks' ids are kept in memory: those of some long tool loops."""


class Inquiry(NamedTuple):
    """A look at the shared log: where these topics end."""

    topics: set[str]
    answer: asyncio.Future[Ended]


class Topic:
    """One topic while the daemon runs."""

    trouble_since = 0
    """When `write_trouble` began, in microseconds since the epoch."""

    def __init__(
        self,
        log_: TopicLog,
        buffer: HotBuffer,
        journal: Journal,
        writer: Executor,
        redactor: Redactor,
        cutter: Cutter,
        *,
        before_write: Callable[[], None],
        journal_behind: bool = False,
    ) -> None:
        """Use `Topics.get`.

        Args:
            writer: in which the topic is written.
            before_write: called there, before each write to the log or the journal.
            journal_behind: the journal's file differs from the buffer and must be rewritten.
        """
        self.id = log_.topic_id
        self.log = log_
        self.buffer = buffer
        self._troubles: dict[str, StoreError] = {}
        self.storing = asyncio.Lock()
        """Held while messages are stored: branches share messages, and each must see what the other has stored."""
        self._turn_to_store = asyncio.Lock()
        self.noting = asyncio.Lock()
        """Held while a note is taken: of two equal ones the second must see the first."""
        self.correcting = asyncio.Lock()
        """Held while chunks are corrected: of two corrections of one the second must see the first."""
        self.chunk_ids: Latest[bytes, tuple[str, ...]] = Latest(CHUNK_IDS_MAX)
        """The public ids of the chunks that came from each of the messages stored last, by the message's digest."""
        self.being_stored: frozenset[bytes] = frozenset()
        """Digests of the messages of an append that is under way: which of their chunks stay is not known yet."""
        self.cutter = PartCutter(log_, cutter)
        self.listed_parts = ListedParts(buffer, self.cutter.note_waiting)
        log_.unstored = self.unstored
        self._journal = journal
        self._redactor = redactor
        self._journal_behind = journal_behind
        """Events were lost to a failed write: only a rewrite brings the file up to date."""
        self._journal_unsynced = False
        self._has_ended = False
        """Its folder is another topic's now, or nobody's."""
        self.writer = writer
        """The thread, or what stands for one, in which it is opened, written and closed."""
        self._before_write = before_write
        self._holders, self._used_at = 0, time.monotonic()
        self.used_by = ""
        """The principal who used it last, as in `Principal.author`."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the topic open while the block runs."""
        try:
            with self.held():
                yield
        finally:
            self._used_at = time.monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the topic open while the block runs, without counting as a use of it."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1

    @asynccontextmanager
    async def storing_in_turn(self) -> AsyncIterator[None]:
        """Hold `storing` for a step in the background. Of such works one at a time waits for it, so that a request,
        which takes `storing` itself, waits for one step at most, and not for dozens in a row."""
        async with self._turn_to_store, self.storing:
            yield

    @property
    def idle_seconds(self) -> float:
        """Seconds since its last use; 0 while somebody holds it."""
        return 0.0 if self._holders else time.monotonic() - self._used_at

    @property
    def is_on_disk(self) -> bool:
        """Whether the topic can be closed without losing anything."""
        return not self._journal_behind and not self._journal_unsynced and not self.buffer.unstored_count

    @property
    def risk(self) -> str:
        """The danger to what was said and cannot be stored now."""
        return "what is said now is lost if memd ends before that works" if self._journal_behind else "nothing is lost"

    @property
    def buffer_bytes(self) -> int:
        """Memory of the open conversations, beside the texts of their messages, and of the chunks that are pending."""
        return self.buffer.memory_bytes + self.cutter.memory_bytes

    def unstored(self) -> BufferedText:
        """All that was said and is not in the log, as of now: every search of the topic's log asks for it."""
        return BufferedText(self.cutter, self.listed_parts.all())

    def ids_of(self, digest: bytes) -> tuple[str, ...]:
        """The public ids of the chunks that came from a message: of those stored lately, or of pending ones."""
        return self.chunk_ids.get(digest) or (() if digest in self.being_stored else self.cutter.ids_of(digest))

    @property
    def write_trouble(self) -> StoreError | None:
        """The last error of a write to the log or the journal, until one to the same file succeeds again."""
        return next(iter(self._troubles.values()), None)

    @property
    def is_fresh(self) -> bool:
        """Whether it has all that other daemons have acknowledged."""
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
        """Append what a request asks for, of whose entries all have its mark (`ChunkState.asked_by`).

        Args:
            log_: the topic's, in which nothing has the mark.

        Raises:
            InDoubt: nobody knows yet whether they are written.
            StoreError: nothing was written.
        """
        if log_ is not self.log:
            raise Fenced(f"topic {self.id}: it was opened anew meanwhile; nothing was stored, send it again")
        return await self.append(drafts, made_at)

    async def _write(self, file: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which writes to the log or the journal, in the writer thread, and keep its error as `trouble`."""

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
            if not self._troubles:
                self.trouble_since = time.time_ns() // 1000
            if file not in self._troubles:
                log.error("writing failed", extra={"topic": self.id, "error": error})
            self._troubles[file] = error
            raise
        if self._troubles.pop(file, None) is not None:
            log.info("writing works again", extra={"topic": self.id, "file": file})
        return result

    async def follow(self, inquiry: Inquiry | None = None) -> None:
        """Take in what other daemons have appended until now, where there are others. `inquiry`: one about this topic,
        asked after the request came for which this is done."""

    def is_others(self, name: str | bytes) -> bool:
        """Whether another daemon was told this conversation or note last, and sees to it."""
        return False

    async def before_storing(self) -> None:
        """Hear what other daemons have stored, where there are others, before what they were told is stored here."""

    async def save(self, *, sync: bool = False) -> None:
        """Journal the buffer's changes. After a failure the journal is rewritten, at once and by the next saves."""
        events = self.buffer.take_unsaved()
        if not events and not (self._journal_behind or (sync and self._journal_unsynced)):
            return
        if self._journal_behind:
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
            self._journal_behind = True
            await self.rewrite_journal()

    async def make_durable(self) -> bool:
        """Force all that the buffer has to disk, in the journal; False if that failed (the disk is full, …).

        Unlike `save` it also waits for what others are writing: True means that no crash can lose what is said so far.
        """
        self._journal_unsynced = True  # also where a sync is under way, whose end must be waited for
        await self.save(sync=True)
        return not self._journal_behind

    async def rewrite_journal(self) -> None:
        """Replace `hot.log` by the shortest journal of the present buffer, durably."""
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
            self._journal_behind = True
            raise
        self._journal_behind = False

    async def forget(
        self, digests: Collection[bytes], uuids: Collection[bytes], wiper: Wiper, blocks: Collection[bytes] = ()
    ) -> None:
        """Drop the text of erased messages, and the blocks that show one of these chunks, here and in `hot.log`, and
        overwrite what that was.

        Args:
            blocks: further blocks, by the digests of the messages before which they stand.

        Raises:
            StoreError: the journal cannot be written, or what it was may still be there.
        """
        self._drop(digests, uuids, blocks)
        await self._rewrite(wiper)

    def forget_shown(self, uuids: Collection[bytes]) -> None:
        """Drop the blocks that show one of these chunks; the next write of the journal leaves none of it there."""
        self.buffer.record(Forgotten([], list(uuids)))
        self._journal_behind = True

    def _drop(self, digests: Collection[bytes], uuids: Collection[bytes], blocks: Collection[bytes]) -> None:
        self.buffer.record(Forgotten(list(digests), list(uuids)))
        for conversation in self.buffer.conversations() if blocks else ():
            self.buffer.remove_blocks(conversation, [*blocks])
        for digest in digests:
            self.chunk_ids.pop(digest, None)

    def note_chunks(self, entries: Sequence[Entry]) -> None:
        """Note which chunks came from which messages, for `chunk_ids`."""
        for entry in entries:
            for digest in entry.digests:
                self.chunk_ids[digest] = (*self.chunk_ids.get(digest, ()), entry.public_id)

    def end(self) -> None:
        """Write nothing any more, in the writer thread: the topic is erased."""
        self._has_ended = True

    def _payloads(self, events: Sequence[BufferEvent]) -> list[bytes]:
        """Redact and encode events, in the writer thread; events are immutable."""
        if forbidden := self.log.forbidden:
            events = [without_forbidden(event, forbidden) for event in events]
        snapshot = self.log.snapshot()
        return [encode_event(self._redactor.event(without_erased(event, snapshot))) for event in events]


def events_in(payloads: Sequence[bytes], topic_id: str, redactor: Redactor) -> tuple[list[BufferEvent], bool]:
    """Decode the records of a journal; also say whether they may stay as they are: nothing has to be redacted."""
    events = []
    for payload in payloads:
        try:
            events.append(decode_event(payload))
        except msgspec.DecodeError as error:
            fields = {"topic": topic_id, "error": error}
            log.warning("a record of hot.log is of another version and was left out", extra=fields)
    kept = [redactor.event(event) for event in events]
    return kept, kept == events


def replayed(events: Sequence[BufferEvent]) -> HotBuffer:
    """The buffer after these events."""
    buffer = HotBuffer(lambda: uuid.uuid4().hex[:12])
    buffer.replay(events)
    return buffer


def waiting_in(path: Path, files: LocalDisk) -> int:
    """How many messages and notes of a journal are in no log yet. It is only read. Raises StoreError: it cannot be
    read."""
    try:
        return unstored_messages(replayed(known_events(read_journal(path, files))))
    except ForeignFile:
        return 0  # nothing of it is stored in this topic; a daemon and `memd verify` say so


def known_events(payloads: Iterable[bytes]) -> list[BufferEvent]:
    """The events of records; those that this version does not know are left out."""
    events = []
    for payload in payloads:
        with suppress(msgspec.DecodeError):
            events.append(decode_event(payload))
    return events


def without_forbidden(event: BufferEvent, forbidden: ForbiddenText) -> BufferEvent:
    """The event without the text of forbidden messages."""

    def kept(value: Any, _: str) -> Any:
        if isinstance(value, Message):
            return value.erased if forbidden.has_message(b"", value) else value
        if not isinstance(value, Buffered) or value.message is None:
            return None
        is_forbidden = forbidden.has_message(value.identity, value.message)
        return msgspec.structs.replace(value, message=value.message.erased) if is_forbidden else value

    return cast("BufferEvent", rebuilt(event, kept))


def without_erased(event: BufferEvent, snapshot: Snapshot) -> BufferEvent:
    """The event; a block that shows what was erased since it was made is none."""
    if isinstance(event, Placed) and any(was_erased(snapshot, chunk.uuid) for chunk in event.block.chunks):
        return Removed(event.conversation, [event.digest])
    return event


def erased_in(buffer: HotBuffer, erasures: Iterable[Erasure]) -> frozenset[bytes]:
    """Return the uuids of the chunks in a topic's memory blocks that were erased where they came from."""
    blocks = (block for conversation in buffer.conversations() for block in conversation.blocks.values())
    shown = {chunk for block in blocks for chunk in block.chunks}
    if not shown:
        return frozenset()
    return frozenset(
        chunk.uuid
        for one in erasures
        for chunk in shown
        if chunk.topic_id == one.topic_id
        # A topic of the same name that was begun later has higher ids.
        and (chunk.origin_id <= max(one.id, one.highest_id) if one.kind == "topic" else chunk.uuid in one.chunk_uuids)
    )
