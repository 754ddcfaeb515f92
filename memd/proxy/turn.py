"""A turn: the life of one request to a model, from its arrival to the reply in the buffer.

Rule: memory fails open. Whatever goes wrong with memory is told in `X-Memory-Status` and the request goes on without;
only the upstream's own answers and the client's own mistakes reach the client. Each step takes the frozen values that
the steps before it returned; the conversation itself lives in the topic's buffer, which only grows.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import aiohttp
import msgspec
from aiohttp import web

from memd.conversation import compaction
from memd.conversation.conversation import Conversation
from memd.errors import MemdError
from memd.ingest.topics import Topics
from memd.proxy.correct import CorrectionResult, Corrector
from memd.proxy.memory import Memory, Recalled, SettledPrompt, forget
from memd.proxy.reading import Asked, Plain
from memd.proxy.receive import Received, Receiver
from memd.proxy.relay import NO_REPLY, ModelRelay, read_refusal, relay
from memd.proxy.remember import Answered, Rememberer
from memd.proxy.room import PromptRoom, RoomMaker
from memd.proxy.upstream.client import REFUSALS, Upstream
from memd.proxy.upstream.refusals import LengthRefusal, refusal_for_length
from memd.telemetry.metrics import Metrics
from memd.telemetry.request_log import RequestRecord, record_of
from memd.telemetry.tasks import Tasks
from memd.wire.api import Placement
from memd.wire.capture import Reply
from memd.wire.sideband import memory_headers

log = logging.getLogger("memd")


class Prepared(msgspec.Struct, frozen=True):
    """A prompt that is ready to be forwarded."""

    room: PromptRoom
    recalled: Recalled
    shown: SettledPrompt
    freed_tokens: int
    """Raw tokens that left the prompt for it."""


Learn = Callable[[LengthRefusal], bool]
"""Learns from a refusal of the prompt for its length; False if it is not believed."""
PrepareAgain = Callable[[], Awaitable[Prepared | None]]
"""Prepares the prompt again after that; None if it got no shorter."""


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
                prepared = await self._prepare(received, corrected, record)
                self._tasks.spawn(topic.save(), "journal")
            except Exception as error:
                self._log_failure(asked, error)
                return await self._forwarder.without_memory(client, asked.without_memory("degraded:store"))
            learn = partial(self._room_maker.learn, received)
            again = partial(self._prepare_again, received, corrected)
            forwarding = Forwarding(self._forwarder, self._rememberer, received, prepared, learn, again)
            try:
                return await forwarding.run(client, record)
            finally:  # also after a cancellation: what was said is remembered, without keeping anybody waiting
                room, recalled = forwarding.prepared.room, forwarding.prepared.recalled
                answered, spans_ms = forwarding.answered, record.spans_ms
                work = self._rememberer.remember(received, room, recalled, answered, spans_ms, holding.pop_all())
                self._tasks.spawn(work, "remember")

    async def _prepare(
        self, received: Received, corrected: CorrectionResult, record: RequestRecord | None = None
    ) -> Prepared:
        """Make room, and then recall: what leaves the prompt now can be recalled into it."""
        conversation = received.prompt.conversation
        sizes = compaction.visible_sizes(conversation)
        room = await self._room_maker.make_room(received)
        left = compaction.left_since(sizes, conversation)
        if left:
            log.info("left the prompt", extra={**received.log_fields(), **msgspec.structs.asdict(left)})
        if record is not None:
            record.end_step("room")
        recalled = await self._memory.recall(received, room)
        shown = self._memory.settle(received, corrected, recalled)
        if record is not None:
            record.end_step("recall")
        return Prepared(room, recalled, shown, left.tokens)

    async def _prepare_again(self, received: Received, corrected: CorrectionResult) -> Prepared | None:
        """Make a prompt shorter that was refused; None if nothing more of it may leave."""
        tokens = received.prompt.tokens()
        try:
            prepared = await self._prepare(received, corrected)
        except Exception as error:
            self._log_failure(received.asked, error)
            return None
        return prepared if received.prompt.tokens() < tokens else None

    def _log_failure(self, asked: Asked, error: Exception) -> None:
        fields = {"turn": asked.turn_id, "topic": asked.topic_id, "error": error}
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
        record_of(client).note_status(plain.mode, plain.status)
        extra = memory_headers(status=plain.status, turn_id=plain.turn_id, mode=plain.mode)
        async with await self.upstream.send("POST", plain.target, plain.headers, plain.body) as answer:
            return await relay(client, answer, extra)


class Forwarding:
    """One request on its way to the upstream and back. `answered` may be asked at any time."""

    def __init__(
        self,
        forwarder: Forwarder,
        rememberer: Rememberer,
        received: Received,
        prepared: Prepared,
        learn: Learn,
        prepare_again: PrepareAgain,
    ) -> None:
        self._rememberer = rememberer
        self._kept: Conversation | None = None
        self._upstream = forwarder.upstream
        self._capture_bytes_max = forwarder.capture_bytes_max
        self._received = received
        self.prepared = prepared
        self._learn = learn
        self._prepare_again = prepare_again
        self._placement: Placement | None = None
        self._http_status: int | None = None
        self._relay: ModelRelay | None = None

    @property
    def answered(self) -> Answered:
        """The outcome so far."""
        return Answered(
            shown=self.prepared.shown,
            placement=self._placement,
            reply=NO_REPLY if self._relay is None else self._relay.reply,
            http_status=self._http_status,
            freed_tokens=self.prepared.freed_tokens,
            kept=self._kept,
        )

    async def run(self, client: web.Request, record: RequestRecord) -> web.StreamResponse:
        """Forward the prompt, and relay the answer to its end.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer came.
        """
        received = self._received
        self._note(record)
        async with self._accepted() as (answer, body):
            self._note(record)
            self._http_status = answer.status
            keep = self._keep if self._rememberer.is_promised(received) else None
            self._relay = ModelRelay(received.asked.api, client, answer, self._capture_bytes_max, body, keep)
            shown = self.prepared.shown
            out = shown.memory_out(received) if answer.status == 200 else None
            try:
                return await self._relay.run(out, shown.headers(received, self.prepared.recalled))
            finally:
                record.usage = self._relay.reply.usage
                self._note_accepted(self._relay.reply)

    def _note_accepted(self, reply: Reply) -> None:
        """Remember the size of a prompt that the model took: it tells which refusals to believe."""
        if self._http_status == 200 and reply.message is not None and reply.usage is not None:
            self._upstream.accepted(self._received.request.model, reply.usage.prompt_tokens)

    async def _keep(self, reply: Reply) -> None:
        """Keep a reply before the client has all of it."""
        try:
            self._kept = self._rememberer.keep_reply(self._received, self.prepared.shown, reply)
            await self._rememberer.save(self._received)
        except Exception:  # a bug here must not cost the user the end of an answer
            log.exception("a reply is not in the journal yet", extra=self._received.log_fields())

    @asynccontextmanager
    async def _accepted(self) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes | None]]:
        """The upstream's answer, and its body if that has been read.

        A prompt that is refused as too long is sent once more with what fits, if anything may leave; else the refusal
        is the answer.
        """
        answer, body = await self._offered()
        if self._learned(answer, body):
            shorter = await self._prepare_again()
            self._log_refusal(answer, "nothing more may leave" if shorter is None else "sent again, shorter")
            if shorter is not None:
                freed_tokens = self.prepared.freed_tokens + shorter.freed_tokens
                self.prepared = msgspec.structs.replace(shorter, freed_tokens=freed_tokens)
                second, second_body = await self._offered()
                if self._learned(second, second_body):
                    self._log_refusal(second, "passed on to the client")
                    second.close()
                else:
                    answer.close()
                    answer, body = second, second_body
        async with answer:
            yield answer, body

    def _learned(self, answer: aiohttp.ClientResponse, body: bytes | None) -> bool:
        """Whether the answer is a refusal for length that is believed; then its window is known from now on."""
        refusal = None if body is None else refusal_for_length(body)
        if refusal is None:
            return False
        believed = self._learn(refusal)
        if not believed:
            self._log_refusal(answer, "not believed: the prompt is too short for that")
        return believed

    def _log_refusal(self, answer: aiohttp.ClientResponse, then: str) -> None:
        window = self._upstream.known_window(self._received.request.model).tokens
        fields = {"turn": self._received.asked.turn_id, "window": window, "http_status": answer.status, "then": then}
        log.warning("the upstream refused a prompt as too long", extra=fields)

    async def _offered(self) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Offer the prompt, and where it is refused for its memory, with memory merged and then without memory.

        Returns the answer, and its body if it is a refusal.
        """
        asked, prompt = self._received.asked, self._received.prompt
        headers = asked.headers.copy()
        headers["Accept-Encoding"] = "identity"  # a compressed answer could not be read
        preferred = self._upstream.placement
        attempts: list[Placement | None] = [preferred]
        if self.prepared.shown.chunks:
            attempts = [preferred, None] if preferred == "merged" else [preferred, "merged", None]
        refused_bodies: list[bytes] = []
        while True:
            placement = attempts.pop(0)
            body = prompt.body(placement)
            if body in refused_bodies and placement is not None:  # an API may know one placement only
                continue
            self._placement = placement
            answer = await self._upstream.send("POST", asked.target, headers, body)
            if answer.status not in REFUSALS:
                if placement is None:  # else it was not memory that the upstream did not like
                    self._forget()
                return answer, None
            refusal = await read_refusal(answer)
            if not attempts or (refusal is not None and refusal_for_length(refusal) is not None):
                return answer, refusal
            fields = {"turn": asked.turn_id, "placement": placement, "http_status": answer.status}
            log.warning("the upstream refused a prompt with memory", extra=fields)
            answer.close()
            refused_bodies.append(body)

    def _forget(self) -> None:
        shown = forget(self._received, self.prepared.shown)
        self.prepared = msgspec.structs.replace(self.prepared, shown=shown)

    def _note(self, record: RequestRecord) -> None:
        shown, recalled = self.prepared.shown, self.prepared.recalled
        record.note_status(self._received.asked.mode, shown.status)
        record.note_recall(recalled.candidate_count, recalled.spans_ms)
        record.note_injection(len(shown.chunks), shown.block_tokens)
        record.note_left(self._received.prompt.left_out(), self._received.prompt.replaced())
