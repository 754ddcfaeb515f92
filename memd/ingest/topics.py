"""The open topics: each one's log, hot buffer and journal, opened once and kept together.

Rule: only the event loop touches the buffer; only the one writer thread writes the log and the journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec

from memd import __version__
from memd.conversation.events import BufferEvent, decode_event, encode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.entries import Draft, Entry, checked_topic_id
from memd.errors import StoreError
from memd.ingest.erasing.unforbidden import without_forbidden
from memd.ingest.pieces import Count
from memd.ingest.pipeline import Cutter
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.turns import StoringLock
from memd.ingest.unstored import BufferedText, ListedParts, PartCutter
from memd.settings.model import Config
from memd.store.erasure.wiping import Wiper
from memd.store.log.journal import Journal, read_journal
from memd.store.store import Store, TopicLog

log = logging.getLogger("memd")
Result = TypeVar("Result")

OPEN_MAX = 256
"""Topics that stay open between two requests: each takes a thread, in which tantivy watches its files."""
CHUNK_IDS_MAX = 4_096
"""Messages whose chunks' ids are kept in memory: those of some long tool loops."""


class Topic:
    """One topic while the daemon runs."""

    def __init__(
        self,
        log_: TopicLog,
        buffer: HotBuffer,
        journal: Journal,
        writer: ThreadPoolExecutor,
        redactor: Redactor,
        cutter: Cutter,
        *,
        before_write: Callable[[], None],
        journal_behind: bool = False,
    ) -> None:
        """Use `Topics.get`.

        Args:
            before_write: called in the writer thread, before each write to the log or the journal.
            journal_behind: the journal's file differs from the buffer and must be rewritten.
        """
        self.id = log_.topic_id
        self.log = log_
        self.buffer = buffer
        self._troubles: dict[str, StoreError] = {}
        self.storing = StoringLock()
        """Held while messages are stored: branches share messages, and each must see what the other has stored."""
        self.noting = asyncio.Lock()
        """Held while a note is taken: of two equal ones the second must see the first."""
        self.chunk_ids: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        """The public ids of the chunks that came from each of the messages stored last, by the message's digest."""
        self.being_stored: frozenset[bytes] = frozenset()
        """Digests of the messages of an append that is under way: which of their chunks stay is not known yet."""
        self.cutter = PartCutter(log_, cutter)
        self.listed_parts = ListedParts()
        log_.unstored = self.unstored
        self._journal = journal
        self._redactor = redactor
        self._journal_behind = journal_behind
        """Events were lost to a failed write: only a rewrite brings the file up to date."""
        self._journal_unsynced = False
        self._has_ended = False
        """Its folder is another topic's now, or nobody's."""
        self._writer = writer
        self._before_write = before_write
        self._holders = 0
        self._used_at = time.monotonic()

    def hold(self) -> None:
        """Keep the topic open until `release`."""
        self._holders += 1

    def release(self) -> None:
        """End one `hold`."""
        self._holders -= 1
        self._used_at = time.monotonic()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the topic open while the block runs."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the topic open while the block runs, without counting as a use of it."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1

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
        return BufferedText(self.buffer, self.cutter, self.listed_parts)

    def ids_of(self, digest: bytes) -> tuple[str, ...]:
        """The public ids of the chunks that came from a message: of those stored lately, or of pending ones."""
        return self.chunk_ids.get(digest) or (() if digest in self.being_stored else self.cutter.ids_of(digest))

    @property
    def trouble(self) -> StoreError | None:
        """The last error of a write to the log or the journal, until one to the same file succeeds again."""
        return next(iter(self._troubles.values()), None)

    async def append(self, drafts: Sequence[Draft]) -> list[Entry]:
        """Append to the log, in the writer thread; see `TopicLog.append`."""

        def append() -> list[Entry]:
            entries = self.log.append(drafts)
            self.cutter.note_stored(drafts)
            return entries

        return await self._write("log", append)

    async def _write(self, file: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which writes to the log or the journal, in the writer thread, and keep its error as `trouble`."""

        def write() -> Result:
            if self._has_ended:
                raise StoreError(f"topic {self.id} was erased: what was under way in it is not stored")
            self._before_write()
            return work()

        try:
            result = await asyncio.get_running_loop().run_in_executor(self._writer, write)
        except StoreError as error:
            if file not in self._troubles:
                log.error("writing failed", extra={"topic": self.id, "error": error})
            self._troubles[file] = error
            raise
        if self._troubles.pop(file, None) is not None:
            log.info("writing works again", extra={"topic": self.id, "file": file})
        return result

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
        self.buffer.take_unsaved()  # the whole buffer is written, and these events with it
        events = self.buffer.as_events()
        self._journal_unsynced = False

        def rewrite() -> None:
            self._journal.rewrite(self._payloads(events), self.log.snapshot().extent)

        try:
            await self._write("journal", rewrite)
            self._journal_behind = False
        except StoreError:
            self._journal_behind = True

    async def forget(self, digests: Collection[bytes], uuids: Collection[bytes], wiper: Wiper) -> None:
        """Drop the text of erased messages, and the blocks that show one of these chunks, here and in `hot.log`, and
        overwrite what that was.

        Raises:
            StoreError: the journal cannot be written, or what it was may still be there.
        """
        self.buffer.forget(digests, uuids)
        for digest in digests:
            self.chunk_ids.pop(digest, None)
        self.buffer.take_unsaved()
        events = self.buffer.as_events()

        def rewrite() -> None:
            self._journal.rewrite(self._payloads(events), self.log.snapshot().extent, wiper)

        self._journal_behind = True
        await self._write("journal", rewrite)
        self._journal_behind = self._journal_unsynced = False

    def note_chunks(self, entries: Sequence[Entry]) -> None:
        """Note which chunks came from which messages, for `chunk_ids`."""
        for entry in entries:
            for digest in entry.digests:
                self.chunk_ids[digest] = (*self.chunk_ids.get(digest, ()), entry.public_id)
        while len(self.chunk_ids) > CHUNK_IDS_MAX:
            self.chunk_ids.popitem(last=False)

    def end(self) -> None:
        """Write nothing any more, in the writer thread: the topic is erased."""
        self._has_ended = True

    def _payloads(self, events: Sequence[BufferEvent]) -> list[bytes]:
        """Redact and encode events, in the writer thread; events are immutable."""
        if forbidden := self.log.forbidden:
            events = [without_forbidden(event, forbidden) for event in events]
        return [encode_event(self._redactor.event(event)) for event in events]


class Topics:
    """Opens topics on first use."""

    def __init__(
        self, store: Store, config: Config, writer: ThreadPoolExecutor, redactor: Redactor, count: Count
    ) -> None:
        """`count`: raw tokens of a text; called from several threads."""
        self._cutter = Cutter(config.chunking, count, redactor)
        self._store = store
        self._redactor = redactor
        self._config = config
        self._writer = writer
        self._open: dict[str, Topic] = {}
        self._opening: dict[str, asyncio.Future[Topic]] = {}

    async def wake(self) -> Topic | None:
        """Open the topics that have work: unstored turns, unsealed segments, chunks of another embedding model, or a
        journal that must be redacted.

        Returns the most recently used topic, opened as well, because it is the most likely one to be asked for next.
        """
        loop = asyncio.get_running_loop()
        used_last: tuple[float, str] | None = None
        at_rest, state = [], self._state
        for topic_id in await loop.run_in_executor(None, self._store.to_look_at, state):
            try:
                used_at, has_work = await loop.run_in_executor(None, self._last_use_and_work, topic_id)
                if used_at is not None:
                    used_last = max(used_last or (used_at, topic_id), (used_at, topic_id))
                if has_work:
                    await self.get(topic_id)
                else:
                    at_rest.append(topic_id)
            except StoreError as error:
                log.error("a topic cannot be opened", extra={"topic": topic_id, "error": error})
        topic = None if used_last is None else await self.get(used_last[1])
        await loop.run_in_executor(None, self._store.note_at_rest, at_rest, state)
        return topic

    @property
    def _state(self) -> str:
        """Stands for the rules by which a journal may have to be redacted: after others each has to be looked at."""
        return f"{__version__} {msgspec.json.encode(self._config.ingest).decode()}"

    async def let_idle_go(self) -> None:
        """Close topics that have been idle for long, and sooner while they are too many or take too much memory."""
        settings = self._config.store
        memory_bytes = sum(topic.log.stats().memory_bytes for topic in self._open.values())
        for topic in sorted(self._open.values(), key=lambda topic: -topic.idle_seconds):
            over = memory_bytes > settings.memory_bytes_max or len(self._open) > OPEN_MAX
            if topic.idle_seconds > 0 and (over or topic.idle_seconds >= settings.topic_idle_seconds):
                memory_bytes -= topic.log.stats().memory_bytes if await self._let_go(topic) else 0

    async def close(self) -> None:
        """Journal all buffers."""
        for topic in self.opened():
            await topic.rewrite_journal()

    async def end(self, topic_id: str, put_aside: Callable[[], Result]) -> Result:
        """Close a topic for good and put its folder aside; the next `get` begins another one.

        Who holds the topic keeps it, and can write nothing any more.

        Raises:
            StoreError: the folder is where it was.
        """
        topic = self._open.pop(topic_id, None)

        def ended() -> Result:
            if topic is not None:
                topic.end()
            return put_aside()

        # In the thread in which topics are read and written, so that nothing comes in between.
        return await asyncio.get_running_loop().run_in_executor(self._writer, ended)

    def opened(self) -> list[Topic]:
        """The topics that are open now."""
        return list(self._open.values())

    async def get(self, topic_id: str) -> Topic:
        """The topic, opened or created. Concurrent callers share one opening.

        Raises:
            BadTopicId: not a topic name.
            StoreError: its files cannot be read or created.
        """
        topic = self._open.get(topic_id)
        if topic is not None:
            return topic
        checked_topic_id(topic_id)
        opening = self._opening.get(topic_id)
        if opening is None:
            loop = asyncio.get_running_loop()
            opening = loop.run_in_executor(self._writer, self._read, topic_id)
            self._opening[topic_id] = opening
            opening.add_done_callback(partial(self._opened, topic_id))
        return await asyncio.shield(opening)

    async def existing(self, topic_id: str) -> Topic | None:
        """The topic if it is open or on disk, else None; nothing is created."""
        if topic_id not in self._open:
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(None, self._store.has_topic, topic_id):
                return None
        return await self.get(topic_id)

    def _opened(self, topic_id: str, opening: asyncio.Future[Topic]) -> None:
        """Before its callers go on: one that comes between must not open it again, with a buffer of its own."""
        del self._opening[topic_id]
        if not opening.cancelled() and opening.exception() is None:
            self._open[topic_id] = opening.result()

    async def _let_go(self, topic: Topic) -> bool:
        """Close a topic, unless that would lose something or somebody has used it meanwhile."""
        used_at = topic.idle_seconds
        await topic.save(sync=True)
        if not topic.is_on_disk or topic.idle_seconds < used_at or self._open.get(topic.id) is not topic:
            return False
        del self._open[topic.id]

        # In the thread in which topics are read, so that the next `get` comes after it.
        await asyncio.get_running_loop().run_in_executor(self._writer, self._store.close_topic, topic.id)
        log.info("a topic is let go from memory", extra={"topic": topic.id})
        return True

    def _read(self, topic_id: str) -> Topic:
        log_ = self._store.topic(topic_id)
        journal, payloads = Journal.open(log_.claim)
        buffer, is_as_kept = self._buffer_of(topic_id, payloads)
        if has_lost := log_.has_lost_entries(journal):
            buffer.lower_marks(log_.has_digest)
        for finding in log_.findings:
            log.warning("found in the log", extra={"topic": topic_id, "finding": finding})
        parts = log_, buffer, journal, self._writer, self._redactor, self._cutter
        return Topic(*parts, before_write=self._store.before_write, journal_behind=has_lost or not is_as_kept)

    def _last_use_and_work(self, topic_id: str) -> tuple[float | None, bool]:
        """When the topic was last used, by its journal, and whether there is work to do in it."""
        payloads = read_journal(self._store.journal_of(topic_id), self._store.files)
        buffer, is_as_kept = self._buffer_of(topic_id, payloads)
        used_at = max((conversation.used_at for conversation in buffer.conversations()), default=None)
        has_stored_work = self._store.has_unsealed(topic_id) or self._store.has_other_model(topic_id)
        return used_at, has_stored_work or buffer.unstored_count > 0 or not is_as_kept

    def _buffer_of(self, topic_id: str, payloads: Sequence[bytes]) -> tuple[HotBuffer, bool]:
        """Replay a journal; also say whether it may stay as it is, which it may not with something to redact in it."""
        buffer = HotBuffer(lambda: uuid.uuid4().hex[:12], self._config.corrections.window_turns)
        events = []
        for payload in payloads:
            try:
                events.append(decode_event(payload))
            except msgspec.DecodeError as error:
                fields = {"topic": topic_id, "error": error}
                log.warning("a record of hot.log is of another version and was left out", extra=fields)
        kept = [self._redactor.event(event) for event in events]
        buffer.replay(kept)
        return buffer, kept == events
