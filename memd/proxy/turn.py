"""A turn: the life of one request to a model, from its arrival to the reply in the buffer.

Rule: memory fails open. Whatever goes wrong with memory is told in `X-Memory-Status` and the request goes on without;
only the upstream's own answers and the client's own mistakes reach the client. Each step takes the frozen values that
the steps before it returned; the conversation itself lives in the topic's buffer, which only grows.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import aiohttp
from aiohttp import web

from memd.errors import MemdError
from memd.ingest.topics import Topics
from memd.proxy.correct import Corrector
from memd.proxy.memory import Memory, Recalled, SettledPrompt, forget
from memd.proxy.reading import Asked, Plain
from memd.proxy.receive import Received, Receiver
from memd.proxy.relay import NO_REPLY, ModelRelay, relay
from memd.proxy.remember import Answered, Rememberer
from memd.proxy.room import RoomMaker
from memd.proxy.upstream.client import REFUSALS, Upstream
from memd.telemetry.metrics import Metrics
from memd.telemetry.request_log import RequestRecord, record_of
from memd.telemetry.tasks import Tasks
from memd.wire.api import Placement
from memd.wire.sideband import memory_headers

log = logging.getLogger("memd")


class TurnRunner:
    """Runs the steps of turns in order; each step is a module beside this one."""

    def __init__(
        self,
        topics: Topics,
        receiver: Receiver,
        corrector: Corrector,
        room_maker: RoomMaker,
        memory: Memory,
        forwarder: Forwarder,
        rememberer: Rememberer,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._topics = topics
        self._receiver = receiver
        self._corrector = corrector
        self._room_maker = room_maker
        self._memory = memory
        self._forwarder = forwarder
        self._rememberer = rememberer
        self._metrics = metrics
        self._tasks = tasks

    async def answer(self, client: web.Request, asked: Asked) -> web.StreamResponse:
        """Answer one request: the whole life of a turn."""
        record = record_of(client)
        with ExitStack() as holding:
            try:
                if asked.mode == "readonly" and await self._topics.existing(asked.topic_id) is None:
                    return await self._forwarder.without_memory(client, asked.without_memory("none"))  # no trace
                topic = await self._topics.get(asked.topic_id)
                holding.enter_context(topic.used())
                received = await self._receiver.receive(asked, topic)
                record.end_step("receive")
                corrected = await self._corrector.correct(received)
                record.end_step("correct")
                # Room comes before recall: what leaves the prompt now can be recalled into it.
                room = await self._room_maker.make_room(received)
                record.end_step("room")
                recalled = await self._memory.recall(received, room)
                shown = self._memory.settle(received, corrected, recalled)
                record.end_step("recall")
                self._tasks.spawn(topic.save(), "journal")
            except Exception as error:
                self._log_failure(asked, error)
                return await self._forwarder.without_memory(client, asked.without_memory("degraded:store"))
            forwarding = Forwarding(self._forwarder, received, recalled, shown)
            try:
                return await forwarding.run(client, record)
            finally:  # also after a cancellation: what was said is remembered, without keeping anybody waiting
                answered, spans_ms = forwarding.answered, record.spans_ms
                work = self._rememberer.remember(received, room, recalled, answered, spans_ms, holding.pop_all())
                self._tasks.spawn(work, "remember")

    def _log_failure(self, asked: Asked, error: Exception) -> None:
        fields = {"topic": asked.topic_id, "error": error}
        if isinstance(error, MemdError):
            log.error("the request goes on without memory", extra=fields)
            return
        # A bug in memory must not cost the user an answer: say it loudly and go on without.
        log.error("memory failed unexpectedly, the request goes on without it", extra=fields, exc_info=error)
        self._metrics.errors.add("memory")


class Forwarder:
    """Sends requests to the upstream and relays the answers."""

    def __init__(self, upstream: Upstream, capture_bytes_max: int) -> None:
        self.upstream = upstream
        self.capture_bytes_max = capture_bytes_max

    async def without_memory(self, client: web.Request, plain: Plain) -> web.StreamResponse:
        """Forward a request that memory has no part in."""
        record_of(client).note_status(plain.turn_id, plain.mode, plain.status)
        extra = memory_headers(status=plain.status, turn_id=plain.turn_id, mode=plain.mode)
        async with await self.upstream.send("POST", plain.target, plain.headers, plain.body) as answer:
            return await relay(client, answer, extra)


class Forwarding:
    """One request on its way to the upstream and back. `answered` may be asked at any time."""

    def __init__(self, forwarder: Forwarder, received: Received, recalled: Recalled, shown: SettledPrompt) -> None:
        self._upstream = forwarder.upstream
        self._capture_bytes_max = forwarder.capture_bytes_max
        self._received = received
        self._recalled = recalled
        self._shown = shown
        self._placement: Placement | None = None
        self._http_status: int | None = None
        self._relay: ModelRelay | None = None

    @property
    def answered(self) -> Answered:
        """The outcome so far."""
        return Answered(
            shown=self._shown,
            placement=self._placement,
            reply=NO_REPLY if self._relay is None else self._relay.reply,
            http_status=self._http_status,
        )

    async def run(self, client: web.Request, record: RequestRecord) -> web.StreamResponse:
        """Forward the prompt, and relay the answer to its end.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer came.
        """
        received, recalled = self._received, self._recalled
        self._note(record)
        async with self._accepted() as answer:
            self._note(record)
            self._http_status = answer.status
            self._relay = ModelRelay(received.asked.api, client, answer, self._capture_bytes_max)
            out = self._shown.memory_out(received) if answer.status == 200 else None
            try:
                return await self._relay.run(out, self._shown.headers(received, recalled))
            finally:
                record.usage = self._relay.reply.usage

    @asynccontextmanager
    async def _accepted(self) -> AsyncIterator[aiohttp.ClientResponse]:
        """The upstream's answer; a prompt that it refuses is offered again with memory merged, then without memory."""
        asked, prompt = self._received.asked, self._received.prompt
        headers = asked.headers.copy()
        headers["Accept-Encoding"] = "identity"  # a compressed answer could not be read
        preferred = self._upstream.placement
        attempts: list[Placement | None] = [preferred]
        if self._shown.chunks:
            attempts = [preferred, None] if preferred == "merged" else [preferred, "merged", None]
        refused_bodies: list[bytes] = []
        for placement in attempts:
            body = prompt.body(placement)
            if body in refused_bodies and placement is not None:  # an API may know one placement only
                continue
            self._placement = placement
            answer = await self._upstream.send("POST", asked.target, headers, body)
            refused = answer.status in REFUSALS
            if refused and placement is not attempts[-1]:
                fields = {"turn": asked.turn_id, "placement": placement, "http_status": answer.status}
                log.warning("the upstream refused a prompt with memory", extra=fields)
                answer.close()
                refused_bodies.append(body)
                continue
            if placement is None and not refused:  # else it was not memory that the upstream did not like
                self._shown = forget(self._received, self._shown)
            async with answer:
                yield answer
            return

    def _note(self, record: RequestRecord) -> None:
        record.note_status(self._received.asked.turn_id, self._received.asked.mode, self._shown.status)
        record.note_recall(self._recalled.candidate_count, self._recalled.spans_ms)
        record.note_injection(len(self._shown.chunks), self._shown.block_tokens)
