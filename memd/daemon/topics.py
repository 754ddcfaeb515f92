"""The topics in use: each one's log, hot buffer and journal, opened once and kept together.

Rule: the buffer is touched on the event loop only; the log and the journal are written in the one writer thread only.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from memd.chunks import checked_topic_id
from memd.config import Config
from memd.context.buffer_events import decode_event, encode_event
from memd.context.hot_buffer import HotBuffer
from memd.errors import StoreError
from memd.store.journal import Journal
from memd.store.log import Store, TopicLog

log = logging.getLogger("memd")
Result = TypeVar("Result")


class Topic:
    """One topic while the daemon runs. `trouble` is the last write error, None once a write has succeeded again."""

    def __init__(self, log_: TopicLog, buffer: HotBuffer, journal: Journal, writer: ThreadPoolExecutor) -> None:
        self.id = log_.topic_id
        self.log = log_
        self.buffer = buffer
        self.trouble: StoreError | None = None
        self.storing = asyncio.Lock()
        """Held while messages are stored: branches share messages, and each must see what the other has stored."""
        self._journal = journal
        self._journal_behind = False  # events were lost to a failed write: only a rewrite brings the file up to date
        self._journal_unsynced = False
        self._writer = writer

    async def write(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the writer thread; remembers whether the disk takes writes.

        Raises:
            StoreError: whatever `work` raised.
        """
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._writer, work)
        except StoreError as error:
            if self.trouble is None:
                log.error("topic %s: %s", self.id, error)
            self.trouble = error
            raise
        if self.trouble is not None:
            log.info("topic %s: writing works again", self.id)
        self.trouble = None
        return result

    async def save(self, *, sync: bool = False) -> None:
        """Journal what changed in the buffer. A failure is remembered and made good by the next save that succeeds."""
        events = self.buffer.take_unsaved()
        if not events and not (self._journal_behind or (sync and self._journal_unsynced)):
            return
        if self._journal_behind:
            await self.rewrite_journal()
            return
        payloads = [encode_event(event) for event in events]
        self._journal_unsynced = not sync

        def append() -> None:
            if payloads:
                self._journal.append(payloads)
            if sync:
                self._journal.sync()

        try:
            await self.write(append)
        except StoreError:
            self._journal_behind = True

    async def rewrite_journal(self) -> None:
        """Replace `hot.log` by the shortest journal of the present buffer, durably."""
        self.buffer.take_unsaved()  # contained in what is written now
        payloads = [encode_event(event) for event in self.buffer.as_events()]
        self._journal_unsynced = False
        try:
            await self.write(lambda: self._journal.rewrite(payloads))
            self._journal_behind = False
        except StoreError:
            self._journal_behind = True

    def close(self) -> None:
        """Close the journal's file, in the writer thread."""
        self._journal.close()


class Topics:
    """Opens topics on first use."""

    def __init__(self, store: Store, config: Config, writer: ThreadPoolExecutor) -> None:
        self._store = store
        self._config = config
        self._writer = writer
        self._open: dict[str, Topic] = {}
        self._opening: dict[str, asyncio.Future[Topic]] = {}

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
            opening.add_done_callback(lambda _: self._opening.pop(topic_id, None))
        topic = await asyncio.shield(opening)
        return self._open.setdefault(topic_id, topic)

    async def existing(self, topic_id: str) -> Topic | None:
        """The topic if it is open or on disk; nothing is created."""
        if topic_id not in self._open:
            loop = asyncio.get_running_loop()
            if topic_id not in await loop.run_in_executor(None, self._store.topic_ids):
                return None
        return await self.get(topic_id)

    def _read(self, topic_id: str) -> Topic:
        log_ = self._store.topic(topic_id)
        journal, payloads = Journal.open(log_.hot_path, self._store.files)
        buffer = HotBuffer(lambda: uuid.uuid4().hex[:12], self._config.corrections.window_turns)
        events = []
        for payload in payloads:
            try:
                events.append(decode_event(payload))
            except msgspec.DecodeError as error:
                log.warning("topic %s: a record of hot.log is of another version and was left out: %s", topic_id, error)
        buffer.replay(events)
        for finding in journal.findings:
            log.warning("%s", finding)
        return Topic(log_, buffer, journal, self._writer)
