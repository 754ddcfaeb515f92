"""A turn: the life of one request to a model, from its arrival until the reply is in the buffer.

Rule: memory fails open. If memory fails, `X-Memory-Status` says so and the request goes on without it. The client gets
only the upstream's errors and those for its own mistakes. Each step takes the frozen values that earlier steps
returned; the conversation itself lives in the topic's buffer, which only grows.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress

import aiohttp
import msgspec
from aiohttp import web

from memd.access import error_response
from memd.conversation import compaction
from memd.conversation.conversation import Conversation
from memd.embedding.priority import Priority
from memd.errors import BadTopicId, MemdError
from memd.ingest.topic import Inquiry, Topic
from memd.ingest.topics import Topics
from memd.proxy.memory import (
    CorrectionResult,
    Corrector,
    Memory,
    Prepared,
    RoomMaker,
    SettledPrompt,
    forget_blocks,
    without_blocks,
)
from memd.proxy.prompt import Received, Receiver
from memd.proxy.reading import BAD_MEMORY_IN, BAD_TOPIC, Asked, Plain
from memd.proxy.relay import BROKEN, NO_REPLY, ModelRelay, interim_to, read_beginning, relay
from memd.proxy.remember import Answered, Rememberer
from memd.proxy.upstream.client import REFUSALS
from memd.proxy.upstream.connection import Interim
from memd.proxy.upstream.pool import NO_ANSWER, UpstreamPool
from memd.proxy.upstream.windows import ModelWindow, may_be_for_memory, refusal_for_length
from memd.telemetry.metrics import RequestRecord, record_of
from memd.telemetry.tasks import Tasks
from memd.wire.reply import Reply
from memd.wire.sideband import memory_headers

log = logging.getLogger("memd")


INQUIRY = web.RequestKey("inquiry", Inquiry)
"""The look at the cluster's shared log that began when the request arrived."""


class Offered(msgspec.Struct, frozen=True):
    """One attempt: the prompt sent to the upstream, and its answer."""

    shown: SettledPrompt
    has_memory: bool
    """True if the prompt contained its memory blocks."""
    answer: aiohttp.ClientResponse
    read: bytes = b""
    """The beginning of the answer's body, already read."""
    error: bytes = b""
    """The error body received instead of a reply; empty if there is none."""


class TurnRunner(msgspec.Struct, frozen=True):
    """Runs turns. Each step is a module beside this one."""

    receiver: Receiver
    corrector: Corrector
    room_maker: RoomMaker
    memory: Memory
    rememberer: Rememberer
    topics: Topics
    pool: UpstreamPool
    capture_bytes_max: int
    priority: Priority
    """Held while a prompt is prepared; background storing and indexing pause meanwhile."""
    tasks: Tasks

    async def answer(self, client: web.Request, asked: Asked) -> web.StreamResponse:
        """Answer one request: the whole life of a turn.

        Find its conversation → apply its corrections → make room, recall and inject → forward, stream back and capture
        → put the reply into the buffer.
        """
        record = record_of(client)
        inquiry = self.topics.ask(self.receiver.read_by(asked), client.get(INQUIRY))
        with ExitStack() as holding:
            holding.enter_context(self.rememberer.receipts.awaited(asked.turn_id))
            try:
                if asked.mode == "readonly" and await self.topics.existing(asked.topic_id, inquiry) is None:
                    return await self.without_memory(client, asked.without_memory("none"))  # no trace
                if asked.mode == "full":
                    await self.rememberer.archiver.room()
                topic = await self.topics.get(asked.topic_id, inquiry)
                received = await self._received(asked, topic, inquiry, holding)
                record.end_step("receive")
                corrected = await self.corrector.correct(received)
                record.end_step("correct")
                with self.priority.held():  # not earlier: a correction may wait until something is stored
                    prepared = await self._prepare(received, corrected, record)
            except Exception as error:
                return await self._answer_after(error, client, asked)
            forwarding = Forwarding(self, received, corrected, prepared)
            try:
                return await forwarding.run(client, record)
            finally:  # also after a cancellation: the turn is remembered in the background
                received.assignment.release()
                turn = received, forwarding.prepared, forwarding.answered
                _note(record, *turn)
                remembering = self.rememberer.remember(*turn, record.spans_ms, holding.pop_all())
                self.tasks.spawn(remembering, "remember")

    async def without_memory(self, client: web.Request, plain: Plain) -> web.StreamResponse:
        """Forward a request without memory."""
        record, headers, on_interim = record_of(client), plain.headers, interim_to(client)
        record.mode, record.status = plain.mode, plain.status
        extra = memory_headers(status=plain.status, turn_id=plain.turn_id, mode=plain.mode, problem=plain.problem)
        if plain.is_refused:
            headers = headers.copy()
            headers["Accept-Encoding"] = "identity"
        with self.pool.assign(plain.hints) as assignment:
            status = None
            try:
                async with await assignment.send("POST", plain.target, headers, plain.body, on_interim) as answer:
                    record.server, status = assignment.shown, answer.status
                    if not plain.is_refused or status != 200:
                        return await relay(client, answer, extra)
                    telling = ModelRelay(plain.api, client, answer, self.capture_bytes_max, plain.streams)
                    return await telling.run(plain.memory_out, extra)
            finally:
                if plain.receipt is not None:
                    receipt = msgspec.structs.replace(plain.receipt, http_status=status)
                    self.tasks.spawn(self.rememberer.receipts.keep(receipt), "receipt")

    async def prepare_again(self, received: Received, corrected: CorrectionResult) -> Prepared | None:
        """Prepare a shorter prompt after a refusal; None if nothing more of it may leave."""
        tokens = received.prompt.tokens()
        try:
            prepared = await self._prepare(received, corrected)
        except Exception as error:
            self._log_failure(received.asked, error)
            return None
        return prepared if received.prompt.tokens() < tokens else None

    async def _received(self, asked: Asked, topic: Topic, inquiry: Inquiry | None, holding: ExitStack) -> Received:
        """Find the conversation. `holding` collects what must be released once the turn is remembered."""
        holding.enter_context(topic.used())
        topic.used_by = asked.who.author
        with self.priority.held():
            received = await self.receiver.receive(asked, topic, inquiry)
        holding.callback(received.assignment.release)
        holding.enter_context(topic.buffer.awaited(received.prompt.conversation))
        return received

    async def _answer_after(self, error: Exception, client: web.Request, asked: Asked) -> web.StreamResponse:
        """Answer without memory. An illegal topic is an error if it is in the path; elsewhere only memory is lost."""
        if not isinstance(error, BadTopicId):
            self._log_failure(asked, error)
            return await self.without_memory(client, asked.without_memory("degraded:store"))
        if asked.topic_from == "path":
            return error_response(400, f"memd: {error}", "invalid_request_error", asked.api)
        status = BAD_MEMORY_IN if asked.topic_from == "memory_in" else BAD_TOPIC
        return await self.without_memory(client, asked.without_memory(status, str(error)))

    async def _prepare(
        self, received: Received, corrected: CorrectionResult, record: RequestRecord | None = None
    ) -> Prepared:
        """Make room, then recall, because messages that leave the prompt now can be recalled into it."""
        conversation = received.prompt.conversation
        before = compaction.left_of(conversation)
        room = await self.room_maker.make_room(received)
        left = compaction.left_of(conversation).since(before)
        if left.tokens:
            log.info("left the prompt", extra={**received.log_fields(), **msgspec.structs.asdict(left)})
        if record is not None:
            record.end_step("room")
        recalled = await self.memory.recall(received, room)
        shown = self.memory.settle(received, corrected, recalled)
        if record is not None:
            record.end_step("recall")
        saving = self.tasks.spawn(self.rememberer.save_asked(received.topic), "journal")
        return Prepared(room, recalled, shown, left.tokens, saving)

    def _log_failure(self, asked: Asked, error: Exception) -> None:
        fields = {"turn": asked.turn_id, "topic": asked.topic_id, "error": error}
        if isinstance(error, MemdError):
            log.error("the request goes on without memory", extra=fields)
            return
        # A bug in memory must not cost the user an answer: log it with a traceback and go on without memory.
        log.error("memory failed unexpectedly, the request goes on without it", extra=fields, exc_info=error)
        self.pool.metrics.errors.add("memory")


class Forwarding(msgspec.Struct, eq=False):
    """One request on its way to the upstream and back. `answered` is valid at any time."""

    turns: TurnRunner
    received: Received
    corrected: CorrectionResult
    prepared: Prepared
    window: ModelWindow = ModelWindow()
    """The window of the server that got the prompt last, as known before sending."""
    answers: ExitStack = msgspec.field(default_factory=ExitStack)
    """Closes all answers in the end; an open one would keep its connection."""
    offered: Offered | None = None
    relayed: ModelRelay | None = None
    kept: Conversation | None = None
    """The conversation, if the reply is already in it."""

    @property
    def answered(self) -> Answered:
        """The outcome so far."""
        offered = self.offered
        return Answered(
            shown=self.prepared.shown if offered is None else offered.shown,
            has_memory=offered is not None and offered.has_memory,
            reply=NO_REPLY if self.relayed is None else self.relayed.reply,
            http_status=None if offered is None else offered.answer.status,
            kept=self.kept,
        )

    async def run(self, client: web.Request, record: RequestRecord) -> web.StreamResponse:
        """Forward the prompt and relay the answer. Raises aiohttp.ClientError, TimeoutError: no answer came."""
        received = self.received
        with self.answers:
            accepted = list[Offered]()
            on_interim = interim_to(client)

            async def offer() -> aiohttp.ClientResponse:
                accepted.append(await self._accepted(on_interim))
                return accepted[-1].answer

            answer = await received.assignment.taken(offer, self._fit_again)
            offered = self.offered = next(one for one in accepted if one.answer is answer)
            shown = await self.turns.rememberer.as_saved(received, offered.shown, self.prepared.saving)
            if shown is not offered.shown:
                offered = self.offered = msgspec.structs.replace(offered, shown=shown)
            record.server = received.assignment.shown
            bytes_max, request = self.turns.capture_bytes_max, received.request
            self.relayed = ModelRelay(received.asked.api, client, answer, bytes_max, request.stream, offered.read)
            keep = self._keep if self.turns.rememberer.is_promised(received) else None
            out = offered.shown.memory_out(received) if answer.status == 200 else None
            try:
                return await self.relayed.run(out, offered.shown.headers(received, self.prepared.recalled), keep)
            finally:
                self.answers.close()
                if record.outcome == BROKEN:
                    received.assignment.failed(aiohttp.ClientPayloadError("it broke off in mid-answer"))
                with suppress(asyncio.CancelledError):  # the client has its whole answer and may leave at any time
                    await self.relayed.read_on()
                reply = self.relayed.reply
                record.usage = reply.usage
                self._note_outcome(offered, reply)

    def _note_outcome(self, offered: Offered, reply: Reply) -> None:
        """Learn from the outcome: the size of an accepted prompt, or a refusal for length late in a stream."""
        if offered.answer.status != 200:
            return
        if reply.error is None:
            if reply.message is not None and reply.usage is not None:
                self.received.assignment.server.windows.accepted(self.received.request.model, reply.usage.prompt_tokens)
        elif not offered.error and (reply.message is None or not (reply.message.text or reply.message.tool_calls)):
            self._learned(msgspec.structs.replace(offered, error=reply.error.encode()))

    async def _keep(self, reply: Reply) -> None:
        """Keep the reply before the client has all of it, behind the question. Called only if both are promised
        (`is_promised`); no other answer waits for a disk."""
        try:
            self.kept = self.turns.rememberer.keep_reply(self.received, self.answered.shown, reply)
            await self.turns.rememberer.save(self.received)
        except Exception:  # a bug here must not cost the user the end of an answer
            log.exception("a reply is not in the journal yet", extra=self.received.log_fields())

    async def _fit_again(self) -> None:
        """Shorten the prompt if the server it goes to now has a smaller window."""
        received, former = self.received, self.window.tokens
        now = (await received.assignment.server.window(received.request.model, received.asked.credentials)).tokens
        if now is not None and (former is None or now < former):
            await self._shortened()

    async def _shortened(self) -> bool:
        """Prepare a shorter prompt; False if nothing more of it may leave."""
        shorter = await self.turns.prepare_again(self.received, self.corrected)
        if shorter is not None:
            freed_tokens = self.prepared.freed_tokens + shorter.freed_tokens
            self.prepared = msgspec.structs.replace(shorter, freed_tokens=freed_tokens)
        return shorter is not None

    async def _accepted(self, on_interim: Interim) -> Offered:
        """Send the prompt; if it is refused as too long, send a shorter one once.

        Return the first refusal if nothing may leave, or if the shorter prompt is refused too or gets no answer.
        """
        self.window = self.received.assignment.server.windows.of(self.received.request.model)
        first = await self._offer(on_interim)
        if not self._learned(first):
            return first
        is_shorter = await self._shortened()
        self._log_refusal(first, "sent again, shorter" if is_shorter else "nothing more may leave")
        if not is_shorter:
            return first
        try:
            second = await self._offer(on_interim)
        except NO_ANSWER as error:
            self._log_unanswered(first, error)
            return first
        if self._learned(second):
            self._log_refusal(second, "passed on to the client")
            second.answer.close()
            return first
        first.answer.close()
        return second

    def _learned(self, offered: Offered) -> bool:
        """Return whether the answer is a credible refusal for length; if so, the server's window is updated."""
        refusal = refusal_for_length(offered.error)
        if refusal is None:
            return False
        believed = self.turns.room_maker.learn(self.received, refusal)
        if not believed:
            self._log_refusal(offered, "not believed: the prompt is too short for that")
        return believed

    def _log_refusal(self, offered: Offered, then: str) -> None:
        window = self.received.assignment.server.windows.of(self.received.request.model).tokens
        fields = {"turn": self.received.asked.turn_id, "window": window, "http_status": offered.answer.status}
        log.warning("the upstream refused a prompt as too long", extra={**fields, "then": then})

    async def _offer(self, on_interim: Interim) -> Offered:
        """Send the prompt; if it is refused because of its memory, send it again without."""
        asked, shown = self.received.asked, self.prepared.shown
        offered = await self._attempt(shown, on_interim)
        if not (shown.chunks and offered.answer.status in REFUSALS and may_be_for_memory(offered.error)):
            return offered
        fields = {"turn": asked.turn_id, "http_status": offered.answer.status}
        log.warning("the upstream refused a prompt with memory", extra=fields)
        try:
            without = await self._attempt(without_blocks(shown), on_interim, with_memory=False)
        except NO_ANSWER as error:
            self._log_unanswered(offered, error)
            return offered
        offered.answer.close()
        if without.answer.status not in REFUSALS:  # otherwise memory was not the cause
            forget_blocks(self.received)
        return without

    async def _attempt(self, shown: SettledPrompt, on_interim: Interim, *, with_memory: bool = True) -> Offered:
        asked = self.received.asked
        as_came, body = asked.sent(self.received.prompt.body(with_memory=with_memory))
        headers = as_came.copy()
        headers["Accept-Encoding"] = "identity"  # a stream that is compressed all the same gets no `memory_out`
        answer = await self.received.assignment.ask("POST", asked.target, headers, body, on_interim)
        self.answers.callback(answer.close)
        beginning = await read_beginning(answer)
        broken = answer.content.exception()
        if isinstance(broken, aiohttp.ClientError) and not (
            answer.status in REFUSALS or self.received.assignment.is_last
        ):
            self.received.assignment.failed(broken)
            raise broken  # nothing of it has reached the client
        return Offered(shown, with_memory, answer, *beginning)

    def _log_unanswered(self, refused: Offered, error: BaseException) -> None:
        reason = self.received.assignment.server.reason_of(error)
        fields = {"turn": self.received.asked.turn_id, "http_status": refused.answer.status, "error": reason}
        log.warning("a refused prompt was sent again and not answered: its refusal is passed on", extra=fields)


def _note(record: RequestRecord, received: Received, prepared: Prepared, answered: Answered) -> None:
    asked, prompt, shown = received.asked, received.prompt, answered.shown
    record.mode, record.status = asked.mode, shown.status
    record.asked = "" if asked.who.author else next(prompt.user_texts(), "")
    is_written = received.topic.write_trouble is None
    record.stored = received.is_traced and is_written and not shown.status.startswith("degraded")
    found = prepared.recalled.retrieved
    record.candidates = found.worth_showing if found is not None and found.topic_ids else None
    record.spans_ms.update(prepared.recalled.spans_ms)
    record.injected, record.injected_tokens = len(shown.chunks), shown.block_tokens
    record.left_out, record.replaced = prompt.left_out(), prompt.replaced()
