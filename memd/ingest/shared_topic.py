"""A topic that several daemons have: its buffer and its log follow the shared log, and what is said here goes there.

Rule: before a request looks at the topic, what others have appended is taken in. What is said is in the shared log
before the answer begins; where nobody can be asked it waits in the journal here, and goes there when somebody answers.
In doubt the rows are looked at: an event that is among them is in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import UNSET

from memd.conversation.events import Appended, BufferEvent, Noted
from memd.conversation.hot_buffer import HotBuffer, clashing, rebased
from memd.entries import Draft, Entry
from memd.errors import Behind, Fenced, InDoubt, MadeAnew, Rewritten, StoreError
from memd.ingest.pipeline import Cutter
from memd.ingest.topic import Ended, Inquiry, Topic, known_events, replayed
from memd.ingest.unstored import ListedParts, PartCutter
from memd.store.disk import Wiper
from memd.store.erasure import was_erased
from memd.store.log.format import encode_record
from memd.store.log.journal import Journal, SharedMark, payloads_in
from memd.store.shared.seam import Row, SharedLog
from memd.store.shared.shared_topic import SharedTopicLog
from memd.store.snapshot import asked_by
from memd.store.topic import TopicLog

log = logging.getLogger("memd")
Result = TypeVar("Result")

_NOTHING = b"\xc0"
"""The one record of a base of an empty buffer: no event."""
BASE_BYTES_MIN = 64 << 10
"""Of events, from which on the buffer as a whole takes their place, if it is at most half as long."""
OTHERS_SECONDS = 30.0
"""After so long what another daemon was told is stored by this one: it may have died."""
_TRIES = 20
asking = ThreadPoolExecutor(8, "memd-shared")
"""Waits for the database."""


class Ends:
    """Asks where the streams of topics end: in one round trip for all who ask in the same moment. Of the event loop."""

    def __init__(self, kept: SharedLog) -> None:
        self._kept = kept
        self._next: Inquiry | None = None

    def ask(self, topics: Iterable[str]) -> Inquiry:
        """An inquiry about these topics and others, which is on its way in a moment."""
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = Inquiry(set(), loop.create_future())
            self._next.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # heard
            loop.call_soon(self._send)
        self._next.topics.update(topics)
        return self._next

    def _send(self) -> None:
        inquiry, self._next = self._next, None
        assert inquiry is not None, "it was asked"
        asked = asyncio.get_running_loop().run_in_executor(asking, self._kept.ends, inquiry.topics)
        asked.add_done_callback(partial(_answered, inquiry.answer))


class Renewed(msgspec.Struct, frozen=True):
    """A topic that was read anew, because its copy counted no more."""

    log: SharedTopicLog
    journal: Journal
    cutter: Cutter
    rows: list[Row]
    """Of the buffer, all; none where nobody could be asked."""


Renew = Callable[[str], Renewed]


class SharedTopic(Topic):
    """See Topic. Of the event loop."""

    log: SharedTopicLog

    def shares(self, waiting: Sequence[bytes], renew: Renew, ends: Ends) -> None:
        """Begin to follow the shared log; called once, in the thread that opens the topic. The buffer is then as the
        rows tell it, and where nobody can be asked as the journal does.

        Args:
            waiting: the events in the journal that are not known to be in the shared log.
            ends: asks where its streams end.
            renew: reads the topic of this id anew where its copy counts no more.
        """
        self._marked = self._journal.mark or SharedMark(0, 0)
        """The last mark in the journal here."""
        self._head = self._marked.head
        self._rows_bytes = self._base_bytes = 0
        self._pending = [(event, payload) for payload in waiting for event in known_events([payload])]
        """Events of this daemon that are not known to be in the shared log, and their payloads."""
        self._journaled = len(self._pending)
        """How many of those are in the journal here."""
        self._turn = asyncio.Lock()
        """Held while rows of the buffer are asked for or appended."""
        self._others: dict[str | bytes, float] = {}
        """Conversations and notes that another daemon was told last, and when (`time.monotonic`)."""
        self._renew, self._ends = renew, ends
        self._follow_log()
        try:
            rows = self.log.catch_up(self._head)
            if not self._takes(rows):
                rows = self.log.catch_up(0) if self._head else rows
                self._rebase(rows, _buffer_of(rows))
            self._journal_behind |= bool(rows)
            self._others.clear()  # who was told that may be gone long since
        except Rewritten:
            self._go_on(renewed := renew(self.id), _buffer_of(renewed.rows))
        except StoreError as error:
            log.warning("a topic is read from its copy", extra={"topic": self.id, "error": error})

    # -- for requests -------------------------------------------------------------------------------------------

    async def follow(self, inquiry: Inquiry | None = None) -> None:
        """See Topic; where nobody can be asked the copy stays as it is."""
        if inquiry is None or self.id not in inquiry.topics:
            inquiry = self._ends.ask([self.id])
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
            self._note(error)
            return
        if not self._pending:  # else it can be read, and not be written: its disk is full
            self._note(None)

    def is_others(self, name: str | bytes) -> bool:
        """Whether another daemon was told this conversation or note last, and sees to it."""
        return time.monotonic() - self._others.get(name, -OTHERS_SECONDS) < OTHERS_SECONDS

    async def before_storing(self) -> None:
        """See Topic: what another daemon has not stored after so long is looked at anew."""
        old = time.monotonic() - OTHERS_SECONDS
        if due := [name for name, told_at in self._others.items() if told_at < old]:
            await self.follow()
            for name in due:
                if self._others.get(name, 0.0) < old:
                    self._others.pop(name, None)

    @property
    def is_fresh(self) -> bool:
        """See Topic."""
        return self.log.is_current

    @property
    def is_on_disk(self) -> bool:
        """See Topic: nothing waits here that others do not have."""
        return not self._pending and not self.buffer.unstored_count

    async def append(self, drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        """See Topic. Raises MadeAnew, too, where the copy for which they were made counts no more."""
        try:
            return await super().append(drafts, made_at)
        except (Fenced, Rewritten) as error:
            await self.follow()
            raise MadeAnew(f"topic {self.id}: it was read anew meanwhile; what is to be stored is made anew") from error

    async def append_once(self, drafts: Sequence[Draft], log_: TopicLog, made_at: int | None = None) -> list[Entry]:
        """See Topic. Where the answer was lost, the rows tell."""
        try:
            return await self.append(drafts, made_at)
        except InDoubt:
            await self.follow()
            uuids, mark = [draft.uuid for draft in drafts], drafts[0].asked_by
            assert mark is not UNSET, "a request has one"
            if entries := await _asked(lambda: asked_by(self.log.snapshot(), uuids, mark)):
                return entries
            raise

    async def save(self, *, sync: bool = False) -> None:
        """Append the buffer's changes to the shared log; where that fails they wait in the journal."""
        async with self._turn:
            await self._saved(sync=sync)

    async def make_durable(self) -> bool:
        """See Topic."""
        await self.save(sync=True)
        return not self._journal_behind or not self._pending

    async def rewrite_journal(self) -> None:
        """Replace the rows of the buffer by one, if that is worth it."""
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
            while self.buffer.unsaved:  # said meanwhile
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
            self._note(error)
            await self._wait_in_journal(sync=sync)
        else:
            if not self.buffer.unsaved and not self._pending:
                self._note(None)
            if sync and (self._journal_behind or self._marked != self._mark()):
                await self._rewrite_copy()  # else the next start has to read the topic anew

    async def _send(self, *, base: bool = False) -> None:
        """Append what waits, and then with `base` the whole buffer, in which there is nothing else then: who has all
        rows before a base need not read it."""
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
        """Let what was said here since wait to be appended."""
        events = self.buffer.take_unsaved()
        for event in events:
            if isinstance(event, Appended) and event.messages:
                self._others.pop(event.conversation, None)  # this daemon sees to it now
        try:
            encoded = await self._in_writer(partial(self._payloads, events)) if events else []
        except BaseException:  # also where a client has left: others rely on it that these are kept
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
        if not self._takes(rows):
            rows = await _asked(partial(self.log.catch_up, 0)) if self._head else rows
            self._rebase(rows, await _asked(partial(_buffer_of, rows)))
        elif rows and self._pending:
            self._journal_behind = True  # its order is not that of the rows
        elif rows:
            await self._copy(_payloads_of(rows[1:] if rows[0].is_base else rows))

    def _takes(self, rows: Sequence[Row]) -> bool:
        """Bring the buffer to what rows say that come behind those it has; False: it has to be read as a whole."""
        theirs = self._theirs(rows)
        if theirs is None or clashing(theirs, self._own()):
            return False
        self.buffer.replay(theirs)
        self._head = rows[-1].last if rows else self._head
        self._rows_bytes += sum(len(row.data) for row in rows)
        return True

    def _theirs(self, rows: Sequence[Row]) -> list[BufferEvent] | None:
        """The events of others in rows that follow what the buffer has; None: some are gone that it does not have."""
        if rows and (rows[0].last > self._head + 1 or (rows[0].is_base and not self._head)):
            return None
        payloads = _payloads_of(row for row in rows if not row.is_base)
        own = self._settled(rows)
        theirs = known_events(payload for payload in payloads if payload not in own)
        now = time.monotonic()
        for event in theirs:
            if isinstance(event, Appended) and event.messages:
                self._others[event.conversation] = now
            elif isinstance(event, Noted):
                self._others[event.id] = now
        return theirs

    def _settled(self, rows: Sequence[Row]) -> set[bytes]:
        """Strike out what waits and is in these rows: the answer to its append was lost. Return what waited."""
        found = set(_payloads_of(rows))
        own = {payload for _, payload in self._pending}
        if own & found:
            self._pending = [one for one in self._pending if one[1] not in found]
            self._journal_behind, self._journaled = True, 0
        return own

    def _rebase(self, rows: Sequence[Row], kept: HotBuffer, *, is_known: bool = True) -> None:
        """Bring the buffer to all rows, and what is said here alone behind them.

        Args:
            kept: as they tell it.
            is_known: the buffer had what the rows say up to `_head`.
        """
        theirs = self._theirs([row for row in rows if row.last > self._head]) if is_known else None
        self._settled(rows)
        rebased(self.buffer, kept, theirs, self._own())
        self._pending, self._journaled = [], 0
        self._head = rows[-1].last if rows else self._head
        self._rows_bytes = self._base_bytes = sum(len(row.data) for row in rows)
        self._journal_behind = True

    async def _renewed(self) -> None:
        renewed = await _asked(partial(self._renew, self.id))
        self._go_on(renewed, await _asked(partial(_buffer_of, renewed.rows)))

    def _go_on(self, renewed: Renewed, kept: HotBuffer) -> None:
        """Go on with a copy that was read anew, without what was erased; `kept`: as its rows tell the buffer."""
        self.log, self._journal = renewed.log, renewed.journal
        self.cutter = PartCutter(self.log, renewed.cutter)
        self.listed_parts = ListedParts(self.buffer, self.cutter.note_waiting)
        self.log.unstored = self.unstored
        self._follow_log()
        self._head = 0
        self._rebase(renewed.rows, kept, is_known=False)
        snapshot = self.log.snapshot()
        blocks = [block for one in self.buffer.conversations() for block in one.blocks.values()]
        shown = {chunk.uuid for block in blocks for chunk in block.chunks}
        if erased := {uuid for uuid in shown | self.buffer.injected_uuids() if was_erased(snapshot, uuid)}:
            self.forget_shown(erased)
        log.info("a topic was read anew: something in it was erased", extra={"topic": self.id})

    def _follow_log(self) -> None:
        cutter = self.cutter
        self.log.noticed = cutter.note_stored  # what others have stored is not cut again

    def _mark(self) -> SharedMark:
        return SharedMark(self.log.generation, self._head)

    def _own(self) -> list[BufferEvent]:
        return [*(event for event, _ in self._pending), *self.buffer.unsaved]

    def _note(self, error: StoreError | None) -> None:
        if error is None:
            if self._troubles.pop("shared", None) is not None:
                log.info("the shared log is followed again", extra={"topic": self.id})
        else:
            if not self._troubles:
                self.trouble_since = time.time_ns() // 1000
            self._troubles["shared"] = error

    # -- the copy of the buffer in the folder here ----------------------------------------------------------------

    async def _copy(self, payloads: Sequence[bytes]) -> None:
        """Write what is in the shared log into the journal here too. A failure costs no more than reading it anew."""
        if self._journal_behind:
            await self._rewrite_copy()
            return
        mark = self._mark()
        try:
            await self._in_writer(lambda: self._journal.append(payloads, self.log.snapshot().extent, mark))
            self._marked = mark
        except StoreError:
            self._journal_behind = True

    async def _rewrite_copy(self, wiper: Wiper | None = None) -> None:
        self._journal_behind = True
        if self._pending or self.buffer.unsaved:
            return  # what waits is told from the rest by its place behind the mark
        retell, mark = self.buffer.retelling(), self._mark()

        def rewrite() -> None:
            self._journal.rewrite(self._payloads(retell()), self.log.snapshot().extent, wiper, mark)

        try:
            await self._in_writer(rewrite)
            self._journal_behind, self._marked = False, mark
        except StoreError:
            if wiper is not None:
                raise

    async def _wait_in_journal(self, *, sync: bool) -> None:
        """Keep what cannot be appended now where a crash does not take it."""
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
            self._journal_behind = True

    async def _in_writer(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.writer, work)


async def _asked(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(asking, work)


def _answered(answer: asyncio.Future[Ended], asked: asyncio.Future[Ended]) -> None:
    if error := asked.exception():
        answer.set_exception(error)
    else:
        answer.set_result(asked.result())


def _payloads_of(rows: Iterable[Row]) -> list[bytes]:
    return [payload for row in rows for payload in payloads_in(row.data, 0)]


def _buffer_of(rows: Iterable[Row]) -> HotBuffer:
    return replayed(known_events(_payloads_of(rows)))
