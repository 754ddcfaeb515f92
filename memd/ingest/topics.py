"""The open topics: each one's log, hot buffer and journal, opened once and kept together.

Rule: only the event loop touches the buffer; only one thread at a time writes a topic's log and journal. That is one
writer thread for all topics, and in a cluster, where a topic may wait for others' machines, a lane for each (lanes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar
from weakref import WeakSet

import msgspec

from memd import __version__
from memd.conversation.hot_buffer import HotBuffer
from memd.conversation.merging import rebased
from memd.entries import checked_topic_id
from memd.errors import Rewritten, StoreError, StoreWriteFailed, TopicHeld, TopicLost
from memd.ingest.claims import ROUNDS_PER_LEASE, ClaimTender
from memd.ingest.erasing.shown import erased_in
from memd.ingest.journaled import events_in, replayed
from memd.ingest.lanes import TopicLanes
from memd.ingest.pieces import Count
from memd.ingest.pipeline import Cutter
from memd.ingest.readable import Readable, TopicReader
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.shared_topic import OpenedHot, SharedTopic, asking, local_hot, opened_hot
from memd.ingest.standing_aside import StandingAside
from memd.ingest.topic import Topic
from memd.settings.model import Config
from memd.store.disk_trouble import DiskWatch
from memd.store.log.journal import Journal, read_journal
from memd.store.shared.shared_topic import SharedTopicLog
from memd.store.shelf import Claim
from memd.store.store import Store, TopicLog
from memd.telemetry.tasks import Tasks

__all__ = ["Topic", "Topics"]

log = logging.getLogger("memd")
Result = TypeVar("Result")

OPEN_MAX = 256
"""Topics that stay open between two requests."""
ADOPTED_AT_ONCE = 8
_ADOPTING = "adopting topics"


def _reopening(topic_id: str) -> str:
    return f"reopening {topic_id}"


class Topics:
    """Opens topics on first use."""

    def __init__(
        self,
        store: Store,
        config: Config,
        writer: Executor,
        redactor: Redactor,
        count: Count,
        claims: ClaimTender | None = None,
    ) -> None:
        """
        Args:
            count: raw tokens of a text; called from several threads.
            claims: renews the claims to the topics; None where they are this daemon's alone.
        """
        self._cutter = Cutter(config.chunking, count, redactor)
        self._store = store
        self._redactor = redactor
        self._config = config
        self._writer = writer
        self._open: dict[str, Topic] = {}
        self._opening: dict[str, asyncio.Future[Topic]] = {}
        self.claims = claims
        """None where there are none to be renewed."""
        self._lanes = None if claims is None else TopicLanes()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._slow: WeakSet[asyncio.Task[None]] = WeakSet()
        self._rounds = 0
        self._is_opening_in_trouble = False
        self.disk = DiskWatch(store.files, store.data_dir)
        self._is_closing = False
        self.aside: StandingAside | None = None
        """None outside of a cluster."""
        self.replicas: TopicReader | None = None
        """Of the topics that other daemons have; None where there are none."""

    def start(self, tasks: Tasks) -> None:
        """Begin to renew claims, on the event loop; nothing where there are none."""
        if self.claims is not None:
            self.claims.start(partial(self._note_round, tasks))

    async def wake(self) -> Topic | None:
        """Open the topics that have work: unstored turns, unsealed segments, chunks of another embedding model, or a
        journal that must be redacted.

        Returns the most recently used topic, opened as well, because it is the most likely one to be asked for next.
        In a cluster only requests, and what somebody has left unfinished, open topics.
        """
        if self.claims is not None:
            return None
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
            over |= topic.is_adopted and topic.is_on_disk and not topic.log.unsealed()
            if topic.idle_seconds > 0 and (over or topic.idle_seconds >= settings.topic_idle_seconds):
                memory_bytes -= topic.log.stats().memory_bytes if await self._let_go(topic) else 0
        if self.replicas is not None:
            await self.replicas.tend()

    async def let_others_have(self) -> None:
        """In a cluster: close the topics that nobody uses now, if others are to have them."""
        for topic in self.opened():
            is_due = topic.idle_seconds > 0 and self.aside is not None and self.aside.may_let_go(topic.id)
            if is_due and self.aside is not None and await self._let_go(topic, anyway=True):
                self.aside.note_let_go(topic.id)

    async def close(self) -> None:
        """Journal all buffers, and in a cluster let others have the topics."""
        if self.claims is None or self._lanes is None:
            for topic in self.opened():
                await topic.rewrite_journal()
            return
        loop, self._is_closing = asyncio.get_running_loop(), True
        await asyncio.gather(*map(self._close, self.opened()))
        self._open = {}
        await loop.run_in_executor(None, self.claims.stop, self.claims.wait_seconds)
        await loop.run_in_executor(None, self._lanes.close)

    async def close_unused(self) -> None:
        """In a cluster, let others have the topics that nobody holds: this daemon ends, and answers to the last."""

        async def close(topic: Topic) -> None:
            if topic.idle_seconds and self._open.get(topic.id) is topic:
                del self._open[topic.id]
                with contextlib.suppress(StoreError):  # whoever opens it finds what is kept
                    await self._close(topic)

        if self.claims is not None:
            self._is_closing = True
            await asyncio.gather(*map(close, self.opened()))

    async def _close(self, topic: Topic) -> None:
        if topic.log.claim.is_over:
            await self._reopen(topic)
        await topic.rewrite_journal()
        released = partial(self._store.close_topic, topic.id, unfinished=not topic.is_on_disk)
        await asyncio.get_running_loop().run_in_executor(topic.writer, released)

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
        return await asyncio.get_running_loop().run_in_executor(self._writer_of(topic_id), ended)

    def opened(self) -> list[Topic]:
        """The topics that are open now."""
        return list(self._open.values())

    async def get(self, topic_id: str, gone: str = "") -> Topic:
        """The topic, opened or created. Concurrent callers share one opening.

        Args:
            gone: the URL of a daemon of the cluster that is known to be gone: from it the topic is taken at once.

        Raises:
            BadTopicId: not a topic name.
            TopicHeld: another daemon has it.
            TopicLost: another one took it while it was opened.
            StoreError: its files cannot be read or created, or not in the time that a request has.
        """
        topic = self._open.get(topic_id)
        if topic is not None and not self._is_sure(topic):
            topic = await self._made_sure(topic)
        if topic is not None:
            await topic.follow()
            return topic
        if self.claims is None:
            return await asyncio.shield(self._opening_of(topic_id))
        try:
            topic = await self._claimed(topic_id, gone)
        except TopicHeld as error:
            if not gone or error.url != gone:
                raise
            topic = await self._claimed(topic_id, gone)  # whose opening was waited for did not know
        await self.check(topic)  # its lease may have passed meanwhile
        return topic

    async def check(self, topic: Topic) -> None:
        """Make sure, after something was read from a topic, that no other daemon has written to it before that.

        Raises:
            TopicLost: one may have.
        """
        if topic.is_writable and not self._is_sure(topic) and await self._made_sure(topic) is not topic:
            raise TopicLost(f"topic {topic.id}: another daemon has taken it meanwhile; try again")

    def _is_sure(self, topic: Topic) -> bool:
        """Whether a topic is open, and no other daemon's."""
        if self.claims is None:
            return True
        return self._open.get(topic.id) is topic and self.claims.is_current(topic.log.claim)

    async def _made_sure(self, topic: Topic) -> Topic | None:
        """The topic of this name that is open once it is known whose it is; as it was, where nobody can say."""
        assert self.claims is not None, "in a cluster"
        if not await self.claims.renewed(topic.log.claim):
            reopening = self._under_way.get(_reopening(topic.id))
            if reopening is not None and reopening not in self._slow:
                await asyncio.wait([reopening], timeout=self.claims.wait_seconds)
                if not reopening.done():
                    self._slow.add(reopening)  # others do not wait for it
        return self._open.get(topic.id)

    async def _claimed(self, topic_id: str, gone: str) -> Topic:
        assert self.claims is not None, "in a cluster"
        try:
            return await asyncio.wait_for(asyncio.shield(self._opening_of(topic_id, gone)), self.claims.wait_seconds)
        except TimeoutError:
            raise StoreError(
                f"topic {topic_id}: the cluster has not handed it over yet; it goes on in the background"
            ) from None

    def _opening_of(self, topic_id: str, gone: str = "") -> asyncio.Future[Topic]:
        checked_topic_id(topic_id)
        opening = self._opening.get(topic_id)
        if opening is None:
            loop = asyncio.get_running_loop()
            if self._store.kept is not None:
                opening = loop.run_in_executor(asking, self._read_shared, topic_id)
            else:
                opening = loop.run_in_executor(writer := self._writer_of(topic_id), self._read, topic_id, writer, gone)
            self._opening[topic_id] = opening
            opening.add_done_callback(partial(self._opened, topic_id))
        return opening

    def _writer_of(self, topic_id: str) -> Executor:
        return self._writer if self._lanes is None else self._lanes.of(topic_id)

    async def existing(self, topic_id: str) -> Topic | None:
        """The topic if it is open or on disk, else None; nothing is created. Raises as `get`."""
        if topic_id not in self._open:
            thread = None if self._lanes is None else self._lanes.of(topic_id)
            asked = asyncio.get_running_loop().run_in_executor(thread, self._store.has_topic, topic_id)
            try:
                if not await asyncio.wait_for(asked, None if self.claims is None else self.claims.wait_seconds):
                    return None
            except TimeoutError:
                raise StoreError(f"topic {topic_id}: the cluster does not say whether it exists") from None
        return await self.get(topic_id)

    @property
    def has_failed_to_write(self) -> bool:
        """Whether something could not be written lately, in an open topic or to open one."""
        return self._is_opening_in_trouble or any(topic.write_trouble is not None for topic in self.opened())

    def is_open(self, topic_id: str) -> bool:
        """Whether the topic is open here."""
        return topic_id in self._open

    async def readable(self, topic_ids: Sequence[str]) -> Readable:
        """Those of these topics that there are, only to be read: in a cluster nothing is claimed for it.

        Raises:
            StoreError: one cannot be opened.
        """
        if self.replicas is not None:
            return await self.replicas.readable(topic_ids, self)
        found = [await self.existing(topic_id) for topic_id in topic_ids]
        return Readable(tuple(topic for topic in found if topic is not None), is_fresh=True)

    # -- in a cluster ---------------------------------------------------------------------------------------------

    def _note_round(self, tasks: Tasks, lost: Collection[Claim], is_renewed: bool) -> None:
        """After each renewal of the claims."""
        self._under_way = {name: task for name, task in self._under_way.items() if not task.done()}
        gone = {id(claim) for claim in lost}
        for topic in self.opened():
            claim, work = topic.log.claim, _reopening(topic.id)
            if id(claim) in gone and not claim.is_over:
                self._drop(topic)
            elif claim.is_over and is_renewed and not self._is_closing and work not in self._under_way:
                self._under_way[work] = tasks.spawn(self._reopen(topic), work)
        if self._is_closing:
            return
        self._rounds += is_renewed
        if is_renewed and self._rounds % ROUNDS_PER_LEASE == 0 and _ADOPTING not in self._under_way:
            self._under_way[_ADOPTING] = tasks.spawn(self._adopt(), _ADOPTING)

    async def _adopt(self) -> None:
        """Open topics that nobody has, and in which work was left; they are let go as soon as it is done."""
        with contextlib.suppress(StoreError):
            for topic_id in await asyncio.to_thread(self._store.unfinished, ADOPTED_AT_ONCE):
                if topic_id not in self._open:
                    with contextlib.suppress(StoreError):  # another daemon was faster, or nobody can have it
                        (await self.get(topic_id)).is_adopted = True

    def _drop(self, topic: Topic) -> None:
        """Close a topic that is another daemon's. Who holds it can write nothing any more."""
        if self._open.get(topic.id) is topic:
            log.warning("another daemon has taken a topic", extra={"topic": topic.id})
            del self._open[topic.id]
            topic.writer.submit(self._store.close_topic, topic.id)

    async def _reopen(self, topic: Topic) -> None:
        """Claim a topic again whose claim is over, in place if nobody has had it since."""
        before = topic.log.claim

        def reopened() -> tuple[TopicLog, Journal]:
            log_ = self._store.reopen(topic.id)
            return log_, Journal.open(log_.claim)[0]

        with topic.held():
            try:
                log_, journal = await asyncio.get_running_loop().run_in_executor(topic.writer, reopened)
            except TopicHeld:
                self._drop(topic)
                return
            except StoreError as error:  # after the next round it is tried again
                log.warning("a topic cannot be opened again yet", extra={"topic": topic.id, "error": error})
                return
            if log_.claim.since <= before.epoch:
                await topic.reopened(log_, journal, self._cutter)
                log.info("a topic was opened again", extra={"topic": topic.id})
            elif self._open.get(topic.id) is topic:
                del self._open[topic.id]  # the next request reads the buffer from the journal
                await self.get(topic.id)

    def _opened(self, topic_id: str, opening: asyncio.Future[Topic]) -> None:
        """Before its callers go on: one that comes between must not open it again, with a buffer of its own."""
        del self._opening[topic_id]
        if opening.cancelled():
            return
        error = opening.exception()
        self._is_opening_in_trouble = isinstance(error, StoreWriteFailed)
        if error is None:
            self._open[topic_id] = opening.result()

    async def _let_go(self, topic: Topic, *, anyway: bool = False) -> bool:
        """Close a topic, unless that would lose something (but with `anyway`) or somebody has used it meanwhile."""
        used_at = topic.idle_seconds
        await topic.save(sync=True)
        is_on_disk = topic.is_on_disk
        if not (is_on_disk or anyway) or topic.idle_seconds < used_at or self._open.get(topic.id) is not topic:
            return False
        del self._open[topic.id]

        # In the thread in which topics are read, so that the next `get` comes after it.
        closed = partial(self._store.close_topic, topic.id, unfinished=not is_on_disk)
        closing = asyncio.get_running_loop().run_in_executor(topic.writer, closed)
        if self._lanes is None:  # else a bucket takes a part in it, for which no other topic waits
            await closing
        log.info("a topic is let go from memory", extra={"topic": topic.id})
        return True

    def _read(self, topic_id: str, writer: Executor, gone: str) -> Topic:
        if self.aside is not None:
            self.aside.check(topic_id)
        log_ = self._store.topic(topic_id, gone)
        journal, payloads = Journal.open(log_.claim)
        buffer, is_as_kept = self._buffer_of(topic_id, payloads)
        if erased := erased_in(buffer, self._store.ledger):
            buffer.forget((), erased)
            is_as_kept = False
        if has_lost := log_.has_lost_entries(journal):
            buffer.lower_marks(log_.has_digest)
        for finding in log_.findings:
            log.warning("found in the log", extra={"topic": topic_id, "finding": finding})
        return Topic(
            log_,
            buffer,
            journal,
            writer,
            self._redactor,
            self._cutter,
            before_write=self._store.before_write,
            journal_behind=has_lost or not is_as_kept,
            claims=self.claims,
        )

    def _read_shared(self, topic_id: str) -> Topic:
        """Open a topic that other daemons have too, with what they have appended."""
        turns = self._config.corrections.window_turns
        log_, journal, payloads, hot = self._read_copy(topic_id)
        buffer = hot.kept
        if hot.own:  # the buffer as it was here, and then as it is there with what waits here
            buffer = replayed(events_in(payloads, topic_id, self._redactor)[0], turns)
            if log_.is_current:
                rebased(buffer, hot.kept, None, hot.own)
            else:
                buffer.leave_unsaved(hot.own)
        if erased := erased_in(buffer, self._store.ledger):
            buffer.forget((), erased)
        if log_.is_current and log_.has_lost_entries(journal):
            buffer.lower_marks(log_.has_digest)
        for finding in log_.findings:
            log.warning("found in the log", extra={"topic": topic_id, "finding": finding})
        made = log_, buffer, journal, self._writer, self._redactor, self._cutter
        topic = SharedTopic(*made, before_write=self._store.before_write)
        topic.shares(hot, turns, self._renewed)
        return topic

    def _read_copy(self, topic_id: str) -> tuple[SharedTopicLog, Journal, list[bytes], OpenedHot]:
        """Read a copy, brought up to date; read anew where it counts no more, with what waits in its journal."""
        turns, waiting = self._config.corrections.window_turns, list[bytes]()
        while True:
            log_ = self._store.topic(topic_id)
            assert isinstance(log_, SharedTopicLog), "of a log that is shared"
            journal, payloads = Journal.open(log_.claim)
            payloads += waiting
            journal.unmarked += len(waiting)
            try:
                return log_, journal, payloads, opened_hot(log_, journal, payloads, turns)
            except Rewritten:
                waiting = payloads[len(payloads) - journal.unmarked :] if journal.mark is not None else []
                self._store.drop_copy(topic_id)
            except StoreError as error:
                log.warning("a topic is read from its copy", extra={"topic": topic_id, "error": error})
                return log_, journal, payloads, local_hot(journal, payloads, turns)

    async def _renewed(self, topic: Topic) -> tuple[SharedTopicLog, Journal, OpenedHot, Cutter]:
        def renewed() -> tuple[SharedTopicLog, Journal, OpenedHot]:
            self._store.drop_copy(topic.id)
            log_, journal, _, hot = self._read_copy(topic.id)
            return log_, journal, hot

        return (*await asyncio.get_running_loop().run_in_executor(asking, renewed), self._cutter)

    def naming(self, name: str, opened: Collection[str]) -> list[str]:
        """Return the other topics in whose journal the name of a topic stands: they may have shown what it has. Slow.

        Args:
            opened: the topics that are open. In a cluster no others are looked at; each is when it is opened.
        """
        known = self._store.topic_ids() if self.claims is None else opened
        return [one for one in known if one != name and self._stands_in(name.encode(), one)]

    def _stands_in(self, name: bytes, topic_id: str) -> bool:
        payloads = read_journal(self._store.journal_of(topic_id), self._store.files)
        return any(name in payload for payload in payloads)

    def _last_use_and_work(self, topic_id: str) -> tuple[float | None, bool]:
        """When the topic was last used, by its journal, and whether there is work to do in it."""
        payloads = read_journal(self._store.journal_of(topic_id), self._store.files)
        buffer, is_as_kept = self._buffer_of(topic_id, payloads)
        used_at = max((conversation.used_at for conversation in buffer.conversations()), default=None)
        has_stored_work = self._store.has_unsealed(topic_id) or self._store.has_other_model(topic_id)
        return used_at, has_stored_work or buffer.unstored_count > 0 or not is_as_kept

    def _buffer_of(self, topic_id: str, payloads: Sequence[bytes]) -> tuple[HotBuffer, bool]:
        """Replay a journal; also say whether it may stay as it is, which it may not with something to redact in it."""
        events, is_as_kept = events_in(payloads, topic_id, self._redactor)
        return replayed(events, self._config.corrections.window_turns), is_as_kept
