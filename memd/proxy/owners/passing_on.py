"""Passing a request on to the daemon that has its topic, and answering it here once that one is gone.

Rule: whole and unread, one hop, in the client's name: the owner reads, counts, stores and audits the
request as if it had come there. A request never fails for it: a daemon whose port is closed loses its topic at once,
one that is silent when its lease is over, and where neither helps the request goes on without memory. What has reached
the client is never repeated; an owner that dies in mid-answer is like a model server that does.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp
import msgspec
from aiohttp import web

from memd.errors import StoreError, TopicHeld, TopicLost
from memd.ingest.topics import Topics
from memd.principals import Principals
from memd.proxy.owners.all_daemons import AllDaemons
from memd.proxy.owners.daemon_client import DaemonClient, StrangerAnswered
from memd.proxy.owners.hop import OWNER_HEADER, HopMarks
from memd.proxy.owners.silence import SilenceWatch, Waiting
from memd.proxy.passing import BrokenAnswer
from memd.proxy.relay import break_off, interim_to, relay
from memd.proxy.upstream.connection import reason_of
from memd.proxy.upstream.pool import NO_ANSWER
from memd.settings.model import Config
from memd.telemetry.metrics import Metrics
from memd.telemetry.request_log import CLIENT_GONE, has_record, keep_record, record_of
from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")

OWNERS_MAX = 65_536
"""Topics of other daemons whose owner is remembered: 10 MB."""
TRUSTED_SECONDS = 30.0
"""An owner that was remembered longer ago is looked up again, so that a topic which was let go can move here."""
TOPICS_LOST_MAX = 2
"""So often a chat is answered from a topic that another daemon takes at that moment."""
TRIES_A_LEASE, TRY_SECONDS_MAX = 8, 0.25

Answer = Callable[[], Awaitable[web.StreamResponse]]


class Gone(msgspec.Struct, frozen=True):
    """The daemon that was thought to have a topic gave no answer."""

    reason: str
    is_port_closed: bool = False
    is_hopeless: bool = False
    """It has the topic and keeps it, and cannot be reached."""
    is_strange: bool = False
    """Somebody else answers there."""


class ShelfAway(StoreError):
    """A topic cannot be claimed, because its shelf does not answer."""


class Owners(AllDaemons):
    """The other daemons of a cluster, by the topics that they have. Create it inside a running event loop."""

    def __init__(
        self,
        topics: Topics,
        config: Config,
        marks: HopMarks,
        principals: Principals,
        tasks: Tasks,
        metrics: Metrics,
        others: Callable[[], list[str]],
    ) -> None:
        """`others`: the URLs of the other daemons; called in a thread."""
        super().__init__(DaemonClient(config, marks, principals), marks, tasks, others)
        self._topics = topics
        self._lease_seconds = config.store.lease_seconds
        self._metrics = metrics
        self._watch = SilenceWatch(topics, self._lease_seconds, self.client.is_there, tasks)
        self._known: OrderedDict[str, tuple[str, float]] = OrderedDict()

    async def close(self) -> None:
        """Close all connections."""
        await self.client.close()

    async def answer(
        self, request: web.Request, body: bytes, topic_id: str, here: Answer, without_memory: Answer
    ) -> web.StreamResponse:
        """Answer a chat: here, or through the daemon that has its topic.

        Args:
            here: raises TopicHeld, before it has done anything, where another daemon has the topic, and TopicLost where
                it has taken it meanwhile.
            without_memory: answers here where nobody can be reached who has it.
        """
        for _ in range(TOPICS_LOST_MAX):
            with suppress(TopicLost):
                return await self._answer(request, body, topic_id, here, without_memory)
        return await without_memory()

    async def _answer(
        self, request: web.Request, body: bytes, topic_id: str, here: Answer, without_memory: Answer
    ) -> web.StreamResponse:
        if self.marks.is_hop(request):
            return await self.answer_hop(request, here)
        held = await self._known_owner(topic_id)
        if held is None:
            try:
                return await here()
            except TopicHeld as error:
                held = error
        return await self.pass_on(request, body, held, here, without_memory)

    async def answer_hop(self, request: web.Request, here: Answer) -> web.StreamResponse:
        """Answer a request that another daemon passed on; it goes no further."""
        if not self.marks.admits(request):
            log.warning("a request of another cluster was refused", extra={"remote": request.remote})
            return self.marks.misdirected(request)
        try:
            return await here()
        except TopicHeld:
            return self.marks.misdirected(request)

    async def pass_on(
        self, request: web.Request, body: bytes, held: TopicHeld, here: Answer, otherwise: Answer
    ) -> web.StreamResponse:
        """Answer a request whose topic another daemon has; see `answer`."""
        if self.marks.is_hop(request):
            return self.marks.misdirected(request)
        until = time.monotonic() + 2 * self._lease_seconds
        while True:
            if self._watch.is_given_up(held.url):
                return await otherwise()
            outcome = await self._by_owner(request, body, held)
            if isinstance(outcome, web.StreamResponse):
                return outcome
            self._known.pop(held.topic_id, None)
            if outcome.is_hopeless:
                return await otherwise()
            is_late = time.monotonic() >= until
            try:
                await self._take(held, outcome, is_late=is_late)
                return await here()
            except TopicHeld as error:
                if is_late or (outcome.is_strange and error.url == held.url):
                    self._log(held, "gives no answer and is not gone", outcome.reason)
                    self._watch.give_up(held.url)
                    return await otherwise()
                if error.url == held.url:
                    await asyncio.sleep(min(TRY_SECONDS_MAX, self._lease_seconds / TRIES_A_LEASE))
                held = error
            except ShelfAway:
                return await otherwise()

    async def pass_on_own_route(
        self, request: web.Request, body: bytes, held: TopicHeld, here: Answer
    ) -> web.StreamResponse:
        """Answer a request to one of memd's own routes, see `pass_on`.

        Raises:
            StoreError: nobody can be reached who has the topic.
        """

        async def refused() -> web.StreamResponse:
            raise StoreError(f"topic {held.topic_id}: {held.url} has it and does not answer; try again in a moment")

        return await self.pass_on(request, body, held, here, refused)

    def is_given_up(self, url: str) -> bool:
        """See SilenceWatch."""
        return self._watch.is_given_up(url)

    # -- private ------------------------------------------------------------------------------------------------

    async def _take(self, held: TopicHeld, outcome: Gone, *, is_late: bool) -> None:
        """Have a topic here from now on.

        A daemon that ends in good order has told the others before it closed its port. Its topics are waited for: what
        it still answers is stored by it.

        Raises:
            TopicHeld: another daemon has it.
            ShelfAway: that cannot be known.
        """
        try:
            is_gone = outcome.is_port_closed and (is_late or held.url in await self.present())
            await self._topics.get(held.topic_id, gone=held.url if is_gone else "")
        except (TopicHeld, TopicLost):
            raise
        except StoreError as error:
            self._log(held, "is gone, and nobody can be asked for its topic", str(error))
            raise ShelfAway from error
        if outcome.reason:
            self._metrics.taken_over.add("refused" if outcome.is_port_closed else "silent")
            self._log(held, "is gone, and its topic was taken over", outcome.reason)

    def _log(self, held: TopicHeld, what: str, reason: str) -> None:
        fields = {"topic": held.topic_id, "url": held.url, "reason": reason}
        log.warning(f"the daemon that had a topic {what}", extra=fields)

    async def _known_owner(self, topic_id: str) -> TopicHeld | None:
        """Whoever had a topic last, unless it is this daemon or nobody; where the shelf is away, as it was."""
        known = self._known.get(topic_id)
        if known is None:
            return None
        url, noted_at = known
        if self._topics.is_open(topic_id) or self._watch.is_given_up(url):
            del self._known[topic_id]
            return None
        if time.monotonic() - noted_at > TRUSTED_SECONDS:
            try:
                await self._topics.get(topic_id)
                self._known.pop(topic_id, None)
                return None
            except TopicHeld as error:
                self._note(error)
                return error
            except StoreError:
                pass
        return TopicHeld(topic_id, url)

    def _note(self, held: TopicHeld) -> None:
        self._known[held.topic_id] = held.url, time.monotonic()
        self._known.move_to_end(held.topic_id)
        if len(self._known) > OWNERS_MAX:
            self._known.popitem(last=False)

    async def _by_owner(self, request: web.Request, body: bytes, held: TopicHeld) -> web.StreamResponse | Gone:
        """Give a request to the daemon that has its topic, and relay the answer to its end."""
        if "://" not in held.url:  # it was let go in this moment
            return Gone("")
        record = record_of(request) if has_record(request) else keep_record(request)
        waiting = None
        try:
            async with asyncio.timeout(None) as patience:
                waiting = Waiting(held, patience)
                with self._watch.over(waiting):
                    return await self._relayed(request, body, waiting)
        except NO_ANSWER as error:
            is_silent, is_hopeless = patience.expired(), waiting is not None and waiting.is_hopeless
            reason = "it says nothing" if is_silent else reason_of(error, self.client.header_bytes_max)
            if record.owner:
                break_off(request, BrokenAnswer(f"{held.url}: {reason}"))
                return web.Response(status=CLIENT_GONE)  # nobody reads it
            return Gone(reason, _is_port_closed(error), is_hopeless, isinstance(error, StrangerAnswered))

    async def _relayed(self, request: web.Request, body: bytes, waiting: Waiting) -> web.StreamResponse | Gone:
        held = waiting.held
        answer = await self.client.send(request, held.url, body, interim_to(request))
        waiting.answer = answer
        async with answer:
            if self.marks.is_misdirected(answer.status, answer.headers):
                return Gone("")
            known = self._known.get(held.topic_id)
            if known is None or known[0] != held.url:
                self._note(held)
            record_of(request).owner = held.url
            return await relay(request, answer, [(OWNER_HEADER, held.url)])


def _is_port_closed(error: BaseException) -> bool:
    """Whether nobody listens there: whoever did has ended."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED
