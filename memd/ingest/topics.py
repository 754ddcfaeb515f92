"""The open topics: each one's log, hot buffer and journal, opened once and kept together.

Rule: only the event loop touches the buffer; one writer thread writes the logs and journals of all topics. In a cluster
the thread that queries the shared log applies what others have appended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager
from functools import lru_cache, partial
from typing import TypeVar

import msgspec

from memd import __version__
from memd.embedding.loading import BUNDLED, give_back_memory
from memd.entries import checked_topic_id
from memd.errors import Refused, Rewritten, StoreError, StoreWriteFailed
from memd.ingest.pipeline import Cutter
from memd.ingest.topic import Inquiry, Renewed, SharedTopic, Topic, ask, asking, erased_in, events_in, replayed
from memd.principals import surplus
from memd.settings.model import Config
from memd.store.disk import DiskWatch
from memd.store.layout import RIGHTS_BOOKS
from memd.store.log.journal import Journal, read_journal
from memd.store.shared.postgres import Row
from memd.store.shared.shared_topic import SharedTopicLog
from memd.store.store import Store
from memd.wording import not_english

__all__ = ["Topic", "Topics"]

log = logging.getLogger("memd")
Result = TypeVar("Result")

LOOK_SECONDS = 5.0
"""Interval of checks of the disk."""
OPENED_AT_ONCE = 8
"""Most topics of a search that wait for the thread that opens them: other requests need it too."""
OPEN_MAX = 256
"""Most topics that stay open between requests."""


class Topics:
    """Opens topics on first use."""

    def __init__(self, store: Store, config: Config, writer: Executor, cutter: Cutter) -> None:
        self._cutter = cutter
        self._store = store
        self._config = config
        self._writer = writer
        self._open: dict[str, Topic] = {}
        self._opening: dict[str, asyncio.Future[Topic]] = {}
        self._is_opening_in_trouble = False
        self.refused: Refused = {}
        """Topics that could not be read at the last attempt to open them, with the reasons."""
        self.waiting: dict[str, int] = {}
        """Numbers of unstored messages in topics that are not opened yet, or cannot be opened."""
        self.has_lost = False
        """True if a message could not be written before the end."""
        self.disk = DiskWatch(store.files, store.data_dir)

    async def wake(self) -> Topic | None:
        """Open the topics that have work: unstored turns, unsealed segments, chunks of another embedding model, or a
        journal that must be redacted.

        Return the most recently used topic, opened as well, because it is the most likely one to be requested next.
        """
        loop = asyncio.get_running_loop()
        used_last: tuple[float, str] | None = None
        at_rest, state = [], self._state
        for topic_id in await loop.run_in_executor(None, self._store.to_look_at, state):
            try:
                used_at, waiting, has_work = await loop.run_in_executor(None, self._last_use_and_work, topic_id)
                if used_at is not None:
                    used_last = max(used_last or (used_at, topic_id), (used_at, topic_id))
                self.waiting |= {topic_id: waiting} if waiting else {}
                if has_work:
                    await self.get(topic_id)
                    self.waiting.pop(topic_id, None)
                else:
                    at_rest.append(topic_id)
            except StoreError as error:
                self._refuse(topic_id, error)
        topic = None if used_last is None else await self.get(used_last[1])
        await loop.run_in_executor(None, self._store.note_at_rest, at_rest, state)
        return topic

    @property
    def _state(self) -> str:
        """Identifies the rules of redaction: after a change each journal has to be checked."""
        return f"{__version__} {msgspec.json.encode(self._config.ingest).decode()}"

    async def let_idle_go(self) -> None:
        """Close topics that have been idle for long, or earlier if they are too many or take too much memory; return
        their memory to the system."""
        if await self._let_some_go():  # a separate function, whose locals refer to the topics
            await asyncio.to_thread(gc.collect)  # a topic and its log form a cycle
            await asyncio.to_thread(give_back_memory)

    async def _let_some_go(self) -> bool:
        settings, gone = self._config.store, []
        # Topics that cannot be closed now come last: they are in use, or have unstored messages.
        topics = sorted(self._open.values(), key=lambda one: (one.buffer.has_unstored, -one.idle_seconds))
        sized = ((one.used_by, one.log.stats().memory_bytes) for one in topics)
        too_big = surplus(sized, settings.memory_bytes_max)
        too_many = surplus(((one.used_by, 1) for one in topics), OPEN_MAX)
        reasons = {topics[one.place].id: one.why(settings.memory_bytes_max, "bytes of open topics") for one in too_big}
        reasons |= {topics[one.place].id: one.why(OPEN_MAX, "open topics") for one in too_many}
        for topic in topics:
            is_over = topic.id in reasons or topic.idle_seconds >= settings.topic_idle_seconds
            if is_over and topic.idle_seconds > 0:
                gone.append(await self._let_go(topic, reasons.get(topic.id, "it was idle")))
        return any(gone)

    async def close(self) -> None:
        """Journal all buffers, and log what is lost because it cannot be written."""
        for topic in self.opened():
            await topic.rewrite_journal()
            if lost := topic.unwritten:
                self.has_lost = True
                fields = {"topic": topic.id, "messages_max": lost, "error": topic.write_trouble}
                log.error("what was said last is lost with the end of memd: it could not be written", extra=fields)

    async def end(self, topic_id: str, put_aside: Callable[[], Result]) -> Result:
        """Close a topic for good and put its folder aside; the next `get` creates a new one.

        Holders of the topic keep it, but cannot write any more. Raises StoreError: the folder is unchanged.
        """
        topic = self._open.pop(topic_id, None)
        self.refused.pop(topic_id, None)

        def ended() -> Result:
            if topic is not None:
                topic.end()
            return put_aside()

        # In the thread that reads and writes topics, so that nothing happens in between.
        return await asyncio.get_running_loop().run_in_executor(self._writer, ended)

    def opened(self) -> list[Topic]:
        """Return the topics that are open now."""
        return list(self._open.values())

    def ask(self, topic_ids: Iterable[str], asked: Inquiry | None = None) -> Inquiry | None:
        """In a cluster, query the ends of the open ones of these topics, and of the books of rights, in one query.
        `asked`: an earlier query, returned if it covers all of these."""
        if self._store.kept is None:
            return None
        known = (*self._config.retrieval.global_topics, *topic_ids)
        names = {*RIGHTS_BOOKS, *(one for one in known if one in self._open)}
        return asked if asked is not None and names <= asked.topics else ask(self._store.kept, names)

    async def get(self, topic_id: str, inquiry: Inquiry | None = None) -> Topic:
        """Return the topic, opened or created, up to date with other daemons. Concurrent callers share one opening.
        `inquiry`: see `Topic.follow`. Raises BadTopicId: not a topic name; StoreError: its files cannot be read or
        created."""
        topic = self._open.get(topic_id)
        if topic is None:
            return await asyncio.shield(self._opening_of(topic_id))
        await topic.follow(inquiry)
        return topic

    def _opening_of(self, topic_id: str) -> asyncio.Future[Topic]:
        checked_topic_id(topic_id)
        opening = self._opening.get(topic_id)
        if opening is None:
            thread = self._writer if self._store.kept is None else asking
            opening = asyncio.get_running_loop().run_in_executor(thread, self._read, topic_id)
            self._opening[topic_id] = opening
            opening.add_done_callback(partial(self._opened, topic_id))
        return opening

    async def existing(self, topic_id: str, inquiry: Inquiry | None = None) -> Topic | None:
        """Return the topic if it exists, else None; nothing is created. For the errors see `get`."""
        if topic_id not in self._open:
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(None, self._store.has_topic, topic_id):
                return None
        return await self.get(topic_id, inquiry)

    @property
    def has_failed_to_write(self) -> bool:
        """True if the last write failed in an open topic, or when opening one."""
        return self._is_opening_in_trouble or any(topic.write_trouble is not None for topic in self.opened())

    def is_open(self, topic_id: str) -> bool:
        """Return True if the topic is open here."""
        return topic_id in self._open

    async def readable(
        self, topic_ids: Sequence[str], inquiry: Inquiry | None = None, refused: Refused | None = None
    ) -> list[Topic]:
        """Return the existing ones of these topics, for reading. `inquiry`: see `Topic.follow`. `refused`: receives the
        topics that cannot be opened; if None, such a topic raises StoreError."""
        opening = (self.existing(topic_id, inquiry) for topic_id in topic_ids)
        found = []
        for topic_id, topic in zip(topic_ids, await asyncio.gather(*opening, return_exceptions=True), strict=True):
            if isinstance(topic, StoreError) and refused is not None:
                refused[topic_id] = topic
            elif isinstance(topic, BaseException):
                raise topic
            elif topic is not None:
                found.append(topic)
        return found

    @asynccontextmanager
    async def held(
        self, topic_ids: Sequence[str], inquiry: Inquiry | None = None, refused: Refused | None = None
    ) -> AsyncIterator[list[Topic]]:
        """Keep the existing ones of these topics open while the block runs; for the arguments see `readable`."""
        found: list[Topic] = []
        with ExitStack() as held:
            for start in range(0, len(topic_ids), OPENED_AT_ONCE):
                some = await self.readable(topic_ids[start : start + OPENED_AT_ONCE], inquiry, refused)
                for topic in some:
                    held.enter_context(topic.held())
                found += some
            yield found

    def _opened(self, topic_id: str, opening: asyncio.Future[Topic]) -> None:
        """Register an opened topic before its callers continue, so that no other caller opens it again."""
        del self._opening[topic_id]
        if opening.cancelled():
            return
        error = opening.exception()
        self._is_opening_in_trouble = isinstance(error, StoreWriteFailed)
        if error is None:
            self._open[topic_id] = opening.result()
            self.refused.pop(topic_id, None)
        elif isinstance(error, StoreError) and not self._is_opening_in_trouble:
            self._refuse(topic_id, error)

    def _refuse(self, topic_id: str, error: StoreError) -> None:
        if topic_id not in self.refused:
            log.error("a topic cannot be opened", extra={"topic": topic_id, "error": error})
        self.refused[topic_id] = error

    async def _let_go(self, topic: Topic, why: str) -> bool:
        """Close a topic and return True, unless that would lose something or it was used meanwhile."""
        used_at = topic.idle_seconds
        await topic.save(sync=True)
        if not topic.is_on_disk or topic.idle_seconds < used_at or self._open.get(topic.id) is not topic:
            return False
        del self._open[topic.id]

        # In the thread that reads topics, so that the next `get` follows it.
        await asyncio.get_running_loop().run_in_executor(topic.writer, self._store.close_topic, topic.id)
        log.info("a topic is let go from memory", extra={"topic": topic.id, "reason": why})
        return True

    def _read(self, topic_id: str) -> Topic:
        """Open a topic; a shared one up to date with other daemons."""
        log_ = self._store.topic(topic_id)
        journal, payloads = Journal.open(log_.claim)
        events, is_as_kept = events_in(payloads, topic_id, self._cutter.redactor)
        buffer = replayed(events, are_others=self._store.kept is not None)
        if has_lost := self._store.kept is None and log_.has_lost_entries(journal):
            buffer.lower_marks(log_.has_digest)
        for finding in log_.findings:
            log.warning("found in the log", extra={"topic": topic_id, "finding": finding})
        if self._config.embedding.model == BUNDLED and (language := log_.snapshot().main_language) is not None:
            _tell_of(language)
        topic = (Topic if self._store.kept is None else SharedTopic)(
            log_, buffer, journal, self._writer, self._cutter, self._store.before_write
        )
        topic.journal_behind = has_lost or not is_as_kept
        if isinstance(topic, SharedTopic) and self._store.kept is not None:
            waiting = journal.unmarked if journal.mark is not None else 0 if topic.log.head else len(payloads)
            topic.shares(payloads[len(payloads) - waiting :], self._renewed, self._store.kept)
        if erased := erased_in(buffer, self._store.ledger):
            topic.forget_shown(erased)
        return topic

    def _renewed(self, topic_id: str) -> Renewed:
        """Read a topic anew whose copy is invalid."""
        while True:
            self._store.drop_copy(topic_id)
            log_ = self._store.topic(topic_id)
            assert isinstance(log_, SharedTopicLog), "of a log that is shared"
            journal, _ = Journal.open(log_.claim)
            rows: list[Row] = []
            try:
                rows = log_.catch_up(0)
            except Rewritten:
                continue
            except StoreError as error:
                log.warning("a topic is read from its copy", extra={"topic": topic_id, "error": error})
            return Renewed(log_, journal, rows)

    def naming(self, name: str, opened: Collection[str]) -> list[str]:
        """Return the other topics whose journals contain a topic's name: they may have shown its chunks. Slow.
        `opened`: the open topics. In a cluster only these are checked; others are when they are opened."""
        known = opened if self._store.kept is not None else self._store.topic_ids()
        journals = ((one, self._store.journal_of(one)) for one in known if one != name)
        return [
            one for one, path in journals if any(name.encode() in it for it in read_journal(path, self._store.files))
        ]

    async def tend_disk(self) -> None:
        """Check the disk periodically, until cancelled; a hanging disk blocks only one thread."""
        while True:
            await asyncio.to_thread(self.disk.look, is_doubtful=self.has_failed_to_write)
            await asyncio.sleep(LOOK_SECONDS)

    def _last_use_and_work(self, topic_id: str) -> tuple[float | None, int, bool]:
        """Return from a topic's journal the time of its last use, the number of unstored messages, and True if it has
        work."""
        payloads = read_journal(self._store.journal_of(topic_id), self._store.files)
        events, is_as_kept = events_in(payloads, topic_id, self._cutter.redactor)
        buffer = replayed(events)
        used_at = max((conversation.used_at for conversation in buffer.conversations()), default=None)
        has_stored_work = self._store.has_work(topic_id)
        waiting = buffer.unstored_count
        return used_at, waiting, has_stored_work or waiting > 0 or not is_as_kept


@lru_cache
def _tell_of(language: str) -> None:
    """Log once per language that the bundled model does not know it."""
    log.warning("; ".join(not_english(language)))
