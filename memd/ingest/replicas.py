"""The topics that other daemons have, opened here to be read.

Rule: nothing is claimed and nothing written. Before a topic is given out it is brought up to date with all that the
cluster has acknowledged; where that fails or takes too long, it is given out as it was, and that is said. Text that is
not in its log yet is found too: its buffer is replayed from the journal. What its owner has erased goes from here, from
memory at the next look and from the disk behind it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from memd.conversation.events import BufferEvent
from memd.conversation.hot_buffer import HotBuffer
from memd.errors import StoreError, TopicHeld
from memd.ingest.buffered import ListedParts
from memd.ingest.journaled import events_in, replayed
from memd.ingest.pieces import Count
from memd.ingest.pipeline import Cutter
from memd.ingest.readable import Readable
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.topic import Topic
from memd.ingest.topics import OPEN_MAX, Topics
from memd.ingest.unstored import PartCutter
from memd.settings.model import Config
from memd.store.cluster.replica import ReadShelf, Refreshed, Replica, replicas_in
from memd.store.log.journal import Journal
from memd.store.parts import StoreShared
from memd.store.shelf import Heads
from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")
Result = TypeVar("Result")

REFRESH_SHARE = 0.25
"""Of `retrieval.timeout_ms`: how long a request waits for topics to be brought up to date; for those that have to be
opened first all of it."""
LOOK_SECONDS = 30.0
"""How often it is looked whether something has changed in topics that nobody asks for."""
_PAGE = 1_000


class ReplicaTopic(Topic):
    """A topic that another daemon has. Its buffer says what is not stored yet, and takes nothing."""

    is_writable = False

    def __init__(
        self, refreshed: Refreshed, buffer: HotBuffer, writer: Executor, redactor: Redactor, cutter: Cutter
    ) -> None:
        """`writer`: never used."""
        log_ = refreshed.log
        super().__init__(log_, buffer, Journal(log_.claim, 0, []), writer, redactor, cutter, before_write=lambda: None)
        self._cutting = cutter

    async def _write(self, file: str, work: Callable[[], Result]) -> Result:
        raise StoreError(f"topic {self.id}: another daemon writes its {file}, here it is only read; write there")

    def take_in(self, refreshed: Refreshed, events: Sequence[BufferEvent], buffer: HotBuffer | None) -> None:
        """Take in what is new. On the event loop.

        Args:
            buffer: in place of the present one, which else goes on with the events.
        """
        if refreshed.log is not self.log:
            self.log = refreshed.log
            self.cutter = PartCutter(self.log, self._cutting)
            self.log.unstored = self.unstored
        if buffer is None:
            self.buffer.replay(events)
        else:
            self.buffer, self.listed_parts = buffer, ListedParts()
        self.cutter.note_stored(refreshed.entries)


class _News(NamedTuple):
    """The outcome of a refresh, decoded."""

    refreshed: Refreshed
    events: Sequence[BufferEvent]
    buffer: HotBuffer | None


class _Followed:
    """A topic of another daemon that was read here."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.lock = asyncio.Lock()
        """Held while it is brought up to date."""
        self.topic: ReplicaTopic | None = None


class Replicas:
    """Reads topics that other daemons have. See TopicReader. On the event loop."""

    def __init__(
        self,
        shelf: ReadShelf,
        shared: StoreShared,
        config: Config,
        redactor: Redactor,
        count: Count,
        tasks: Tasks,
        look_after: Callable[[Topic], None],
        forget: Callable[[], None],
    ) -> None:
        """
        Args:
            look_after: sees to the indexes of a topic, in the background.
            forget: drops what is remembered of entries that were read: the text of some was erased.
        """
        self._shelf = shelf
        self._shared = shared
        self._config = config
        self._redactor = redactor
        self._cutter = Cutter(config.chunking, count, redactor)
        self._tasks = tasks
        self._look_after = look_after
        self._forget = forget
        self._followed: dict[str, _Followed] = {}
        self.seconds_max = config.retrieval.timeout_ms / 1000
        """How long a request waits for memory."""
        self._asks = ThreadPoolExecutor(2, "memd-heads")
        self._fetches = ThreadPoolExecutor(2, "memd-replica")
        self.late: asyncio.Future[dict[str, Heads]] | None = None
        """A question that the database has not answered in time."""
        self.trouble: StoreError | None = None
        self._looked_at = time.monotonic()

    @property
    def count(self) -> int:
        """How many are in memory."""
        return sum(one.topic is not None for one in self._followed.values())

    @property
    def is_waiting(self) -> bool:
        """Whether the database is silent."""
        return self.late is not None and not self.late.done()

    async def readable(self, topic_ids: Sequence[str], own: Topics) -> Readable:
        """See `Topics.readable`; what is open here is given out as it is."""
        found: dict[str, Topic] = {}
        for topic_id in topic_ids:
            if own.is_open(topic_id):
                try:
                    found[topic_id] = await own.get(topic_id)
                except TopicHeld:  # it was taken a moment ago
                    continue
        others = [topic_id for topic_id in topic_ids if topic_id not in found]
        is_away = own.claims is not None and own.claims.trouble is not None
        is_fresh = not others or (not is_away and await self._up_to_date(others))
        for topic_id in others:
            followed = self._followed.get(topic_id)
            if followed is not None and followed.topic is not None:
                found[topic_id] = followed.topic
                with followed.topic.used():  # from now on it is idle
                    pass
        return Readable(tuple(found[topic_id] for topic_id in topic_ids if topic_id in found), is_fresh)

    async def tend(self) -> None:
        """Let go of topics that were not read for long, and look whether something was erased in the others."""
        await self._let_idle_go()
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            await self.look()

    async def look(self, topic_ids: Sequence[str] | None = None) -> None:
        """See to it that no replica has what its owner has erased, also where nobody asks for it.

        Args:
            topic_ids: those to look at; None: all.
        """
        loop, files, data_dir = asyncio.get_running_loop(), self._shared.files, self._config.data_dir
        names = topic_ids
        if names is None:
            names = await loop.run_in_executor(None, replicas_in, files, data_dir)
        try:
            for start in range(0, len(names), _PAGE):
                page = names[start : start + _PAGE]
                heads = await loop.run_in_executor(self._asks, self._shelf.heads, page)
                for name in page:
                    await self._look_at(name, heads.get(name))
        except StoreError as error:
            self._note(error)

    def close(self) -> None:
        """End the threads."""
        self._asks.shutdown(wait=False, cancel_futures=True)
        self._fetches.shutdown(wait=True, cancel_futures=True)

    # -- private ------------------------------------------------------------------------------------------------

    async def _up_to_date(self, topic_ids: Sequence[str]) -> bool:
        """Bring topics up to date in the time that a request has; whether that was done."""
        if self.is_waiting:
            return False  # not each request waits for that
        asked = asyncio.get_running_loop().run_in_executor(self._asks, self._shelf.heads, topic_ids)
        refreshing = self._tasks.spawn(self._refresh(topic_ids, asked), "replicas")
        known = (self._followed.get(topic_id) for topic_id in topic_ids)
        are_open = all(one is not None and one.topic is not None for one in known)
        seconds = self.seconds_max * (REFRESH_SHARE if are_open else 1)
        await asyncio.wait([refreshing], timeout=seconds)
        if refreshing.done():
            return not refreshing.cancelled() and refreshing.exception() is None and refreshing.result()
        if not asked.done():
            self.late = asked
        self._note(StoreError(f"bringing topics up to date takes longer than {seconds:g} s; it goes on"))
        return False

    async def _refresh(self, topic_ids: Collection[str], asked: asyncio.Future[dict[str, Heads]]) -> bool:
        """Bring topics up to date with the answer of the database; whether that was done with all."""
        try:
            heads = await asked
            await asyncio.gather(*(self._bring(topic_id, heads.get(topic_id)) for topic_id in topic_ids))
        except StoreError as error:
            self._note(error)
            return False
        if self.trouble is not None:
            self.trouble = None
            log.info("topics of other daemons are up to date again")
        return True

    async def _bring(self, topic_id: str, heads: Heads | None) -> None:
        followed = self._followed.get(topic_id)
        if followed is None:
            if heads is None:
                return
            replica = Replica(self._shelf, self._shared, self._config.data_dir, topic_id)
            followed = self._followed[topic_id] = _Followed(replica)
        async with followed.lock:
            if self._followed.get(topic_id) is not followed:
                await self._bring(topic_id, heads)  # it was let go meanwhile
            elif heads is None:  # it was erased
                self._forget()
                await self._end(topic_id, followed, followed.replica.remove)
            elif not followed.replica.is_current(heads):
                news = await self._fetching(self._news, topic_id, followed.replica, heads)
                if news is not None:
                    self._take_in(followed, news)

    def _news(self, topic_id: str, replica: Replica, heads: Heads) -> _News | None:
        refreshed = replica.refresh(heads)
        if refreshed is None:
            return None
        events, _ = events_in(refreshed.payloads, topic_id, self._redactor)
        window_turns = self._config.corrections.window_turns
        return _News(refreshed, events, replayed(events, window_turns) if refreshed.is_new_journal else None)

    def _take_in(self, followed: _Followed, news: _News) -> None:
        refreshed, before = news.refreshed, followed.topic
        if before is None:
            assert news.buffer is not None, "all of the journal"
            parts = self._fetches, self._redactor, self._cutter
            followed.topic = ReplicaTopic(refreshed, news.buffer, *parts)
        else:
            before.take_in(refreshed, news.events, news.buffer)
        if refreshed.has_erased:
            self._forget()
        if not refreshed.entries:  # files may have been replaced
            self._tasks.spawn(self._sweep(followed), "replica")
        assert followed.topic is not None, "just made"
        self._look_after(followed.topic)

    async def _sweep(self, followed: _Followed) -> None:
        try:
            await self._fetching(followed.replica.sweep)
        except StoreError as error:
            self._note(error)

    async def _end(self, topic_id: str, followed: _Followed, work: Callable[[], None]) -> None:
        """Do the last of a replica, while its lock is held: who waits for that begins another one."""
        try:
            await self._fetching(work)
        finally:
            del self._followed[topic_id]

    async def _let_idle_go(self) -> None:
        settings = self._config.store
        open_now = [(name, one, one.topic) for name, one in self._followed.items() if one.topic is not None]
        memory_bytes = sum(topic.log.stats().memory_bytes for _, _, topic in open_now)
        for topic_id, followed, topic in sorted(open_now, key=lambda one: -one[2].idle_seconds):
            over = memory_bytes > settings.memory_bytes_max or len(self._followed) > OPEN_MAX
            if topic.idle_seconds > 0 and (over or topic.idle_seconds >= settings.topic_idle_seconds):
                memory_bytes -= topic.log.stats().memory_bytes
                async with followed.lock:
                    if self._followed.get(topic_id) is followed:
                        await self._end(topic_id, followed, followed.replica.let_go)

    async def _look_at(self, topic_id: str, heads: Heads | None) -> None:
        if topic_id in self._followed:
            await self._bring(topic_id, heads)
            return
        replica = Replica(self._shelf, self._shared, self._config.data_dir, topic_id)
        followed = self._followed[topic_id] = _Followed(replica)
        async with followed.lock:
            is_equal = heads is not None and await self._fetching(replica.is_equal_to, heads)
            await self._end(topic_id, followed, replica.let_go if is_equal else replica.remove)

    async def _fetching(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Do slow work in a thread; it is finished whoever waits for it."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._fetches, work, *arguments))

    def _note(self, error: StoreError) -> None:
        if self.trouble is None:
            log.warning("topics of other daemons cannot be brought up to date", extra={"error": error})
        self.trouble = error
