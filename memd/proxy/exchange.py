"""One request's life, from the client's bytes to the reply in the buffer.

Rule: memory fails open. Whatever goes wrong with memory is said in `X-Memory-Status` and the request goes on without;
only the upstream's own answers and the client's own mistakes reach the client.

    receive → corrections → make room → recall → inject → forward and relay → remember the reply
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
import uuid
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
from multidict import CIMultiDict

from memd.admin.receipts import Receipt
from memd.conversation import compaction
from memd.conversation.conversation import TurnKey
from memd.conversation.hot_buffer import Arrival
from memd.entries import Correction
from memd.errors import DiskFull, EmbeddingError, MemdError
from memd.ingest.topics import Topic
from memd.messages import NO_BLOCK, Block, BlockChunk, leading_count
from memd.proxy.prompt import Prompt, with_live_turns
from memd.proxy.service import Daemon
from memd.recall import block, corrections, ranking
from memd.recall.explained import scored_chunks
from memd.recall.retrieve import Budget, Filters
from memd.store.store import Snapshot
from memd.telemetry.logging import Content
from memd.telemetry.request_log import Turn
from memd.wire.capture import Reply
from memd.wire.request import Api, ModelRequest, Placement
from memd.wire.sideband import InjectedChunk, MemoryOut, Signal, memory_headers

log = logging.getLogger("memd")

Mode = Literal["full", "readonly", "off"]

HARD_ROUNDS_MAX = 4
"""Compactions before one request: each halves the prompt or takes all that may be taken."""
COUNTED_AT_ONCE_CHARACTERS = 20_000
"""Text that is counted without a thread: about a millisecond, hardly more than a thread's turn takes."""
COUNT_MARGIN = 1.15
"""Near the hard threshold, by this factor, the upstream is asked for the exact count."""
COUNT_MARGIN_UNKNOWN = 6.0
"""The same while nothing is known of the model's tokenizer: one of bytes has six tokens where ours has one."""
FOLLOW_UP_TOKENS = 12
"""A question below this is looked for together with the user's messages before it, until they have as many ..."""
FOLLOW_UP_TURNS = 3
"""... or are as many as this."""
THIN_SESSION = "history: daemon"
"""The session of a client that leaves its history to memd and names none: one conversation per topic."""


class Exchange:
    """The state of one request while it is under way; the steps are called in the order of the module's picture."""

    def __init__(
        self,
        daemon: Daemon,
        api: Api,
        request: ModelRequest,
        *,
        topic: Topic,
        mode: Mode,
        session: str | None,
        thin: bool,
        headers: CIMultiDict[str],
    ) -> None:
        self.turn_id = new_turn_id()
        self.receipt = Receipt(
            turn_id=self.turn_id,
            at=time.time_ns() // 1000,
            topic_id=topic.id,
            api=api.path,
            mode=mode,
            model=request.model,
            corrections=tuple(request.memory_in.corrections) if request.memory_in is not None else (),
        )
        self.status = "none"
        self.signals: list[Signal] = []
        self.injected: list[BlockChunk] = []
        """All chunks that blocks put into this prompt, kept ones and new ones; known after `inject`."""
        self._daemon = daemon
        self._config = daemon.config
        self._counter = daemon.counter
        self._api = api
        self._request = request
        self.topic = topic
        self._mode = mode
        self._session = session or (THIN_SESSION if thin else None)
        self._thin = thin
        self._headers = headers
        self._spans_ms: dict[str, float] = {}
        self._arrival: Arrival | None = None
        self._made: Prompt | None = None
        self._thresholds: compaction.Thresholds | None = None
        self._related: list[Topic] = []
        self._repeated = False
        self._request_key: Hashable = None
        self._fresh_turn = False
        self._without_block = False
        self._forwarded_tokens = 0
        self._candidates: int | None = None

    # -- the steps ----------------------------------------------------------------------------------------------

    async def receive(self) -> None:
        """Find the conversation, note what is new, and decide whether this is a new turn or one seen before."""
        request, buffer, now = self._request, self.topic.buffer, time.time()
        lead = leading_count(request.messages)
        counts = await self._count_messages()
        new = request.messages[lead:], request.digests[lead:], counts[lead:]
        if self._mode == "full":
            arrival = buffer.receive(*new, session=self._session, now=now, thin=self._thin)
        else:
            arrival = buffer.glance(*new, session=self._session, thin=self._thin)
        self._arrival = arrival
        if self._thin:
            request, arrival = with_live_turns(self._api, request, arrival, lead)
        standing_tokens = sum(counts[:lead]) + self._counter.count(request.standing_text)
        prompt = self._made = Prompt(self._api, request, arrival, lead, standing_tokens)
        if self._mode == "full":
            key = TurnKey(prompt.last_digest, self._memory_in_digest())
            freeze_seconds = self._config.injection.freeze_seconds
            self._repeated = buffer.is_retry(prompt.conversation, key, now, freeze_seconds)
            self._request_key = self.topic.id, prompt.conversation.id, key
            if not self._repeated:
                self._daemon.outcomes.expect(self._request_key)
        self._fresh_turn = not self._repeated and not prompt.is_step
        for topic_id in self._related_ids():
            topic = await self._daemon.topics.existing(topic_id)
            if topic is not None:
                self._related.append(topic)
        self.receipt.is_step, self.receipt.is_retry = prompt.is_step, self._repeated
        self.receipt.related = tuple(topic.id for topic in self._related)
        if arrival.opened and self._mode == "full":
            await self._daemon.archiver.hand_over(self.topic, prompt.conversation)

    async def correct(self) -> None:
        """Apply the request's corrections, durably; ids that cannot be corrected become signals."""
        memory_in = self._request.memory_in
        outcomes, request = self._daemon.outcomes, self._request_key
        if memory_in is None or not memory_in.corrections or not outcomes.expects(request):
            return  # one that is not expected came before memd was restarted, or changes nothing in its mode
        failed: tuple[str, ...] = ()
        try:
            asked = memory_in.corrections
            failed = await outcomes.of(request, lambda: self._corrected(asked))
        except MemdError as error:
            log.error("corrections were not applied", extra=self._fields(error))
            self._degrade(error)
            failed = tuple(chunk_id for correction in memory_in.corrections for chunk_id in correction.chunk_ids)
        self.signals += [Signal(type="correction_failed", chunk_id=chunk_id) for chunk_id in failed]
        self._daemon.metrics.corrected(() if self._repeated else asked, len(failed))

    async def make_room(self) -> None:
        """Let the oldest turns leave the prompt if it would not fit the model's window otherwise."""
        facts = await self._daemon.upstream.refresh(wait=False)
        drift = self._counter.drift
        model = self._request.model
        limits = self._thresholds = compaction.thresholds(
            window=facts.window,
            max_tokens=self._request.max_tokens,
            standing_tokens=drift.drifted(model, self._prompt.standing_tokens),
            soft=self._config.buffer.soft_tokens,
            hard=self._config.buffer.hard_tokens,
            injection_tokens=self._config.injection.budget_tokens,
            sticky_tokens=self._config.injection.sticky_tokens,
        )
        for _ in range(HARD_ROUNDS_MAX):
            used = await self._used_tokens(limits.hard)
            if used <= limits.hard:
                break
            if not await self._take_oldest(used - limits.hard):
                self._give_way()
                break
        budget, prompt = int(limits.sticky / drift.factor(model)), self._prompt
        overflow = compaction.sticky_overflow(prompt.conversation, budget_tokens=budget, current=prompt.turn_digest)
        self._remove_blocks(overflow)

    async def recall(self) -> None:
        """Compute this turn's block, once: steps and retries of the turn show the same one again."""
        conversation, turn = self._prompt.conversation, self._prompt.turn_digest
        if turn is None or not self._fresh_turn or self._without_block or self._limits.injection <= 0:
            return
        if turn in conversation.blocks:  # recalled afresh: its former block shows nothing any more
            self._remove_blocks([turn])
        try:
            block = await self._recalled_block()
        except TimeoutError:
            self._degrade_to("timeout")
            return
        except MemdError as error:
            log.error("recall failed, the request goes on without memory", extra=self._fields(error))
            self._degrade(error)
            return
        if self._mode == "full":
            self.topic.buffer.place(conversation, turn, block)
        else:
            conversation.blocks[turn] = block

    def inject(self) -> None:
        """Settle what the response says about memory; from here on the prompt does not change any more."""
        chunks = self.injected = self._prompt.chunks()
        if self.status == "none" and chunks:
            self.status = "injected"
        if self.topic.trouble is not None and self._mode == "full":
            self._degrade(self.topic.trouble)
        if self._fresh_turn and chunks and self._mode == "full":
            self.topic.buffer.injected(chunks)
        self._forwarded_tokens = self._prompt.tokens()

    def body(self, placement: Placement | None) -> bytes:
        """The body to forward; `placement` None leaves all memory out."""
        self.receipt.placement = placement
        return self._prompt.body(placement)

    def headers(self) -> list[tuple[str, str]]:
        """Memory's response headers."""
        return memory_headers(
            status=self.status,
            mode=self._mode,
            injected_ids=[chunk.shown_id for chunk in self.injected],
            turn_id=self.turn_id,
            timings_ms=self._spans_ms,
        )

    def note(self, turn: Turn) -> None:
        """What memory did, for the log and the metrics; after `inject`."""
        turn.settle(self.turn_id, self._mode, self.status)
        turn.recalled(self._candidates, self._spans_ms)
        turn.shown(len(self.injected), self._prompt.block_tokens())

    def memory_out(self) -> MemoryOut | None:
        """What goes into the response body: nothing unless the request carried a MemoryIn."""
        if self._request.memory_in is None:
            return None
        chunks = (InjectedChunk(id=c.shown_id, topic_id=c.topic_id, canonical_id=c.origin_id) for c in self.injected)
        return MemoryOut(injected_chunks=tuple(chunks), signals=tuple(self.signals))

    def forget_memory(self) -> None:
        """The upstream took the request only without memory: say so and keep no block."""
        self._remove_blocks(list(self._prompt.conversation.blocks))
        self.injected = []
        self._degrade_to("template")

    def finished_receipt(self, reply: Reply, http_status: int | None, spans_ms: Mapping[str, float]) -> Receipt:
        """All that is known of the turn when it is over."""
        receipt, prompt, drifted = self.receipt, self._prompt, self._drifted
        block = prompt.conversation.blocks.get(prompt.turn_digest) if prompt.turn_digest is not None else None
        if block is not None and block.text and self.injected:
            receipt.block, receipt.block_tokens = block.text, drifted(block.tokens)
        receipt.status, receipt.http_status = self.status, http_status
        receipt.asked = next(prompt.user_texts(), "")
        receipt.shown = tuple(chunk.shown_id for chunk in self.injected)
        receipt.memory_tokens = drifted(prompt.block_tokens()) if self.injected else 0
        receipt.forwarded_tokens = drifted(self._forwarded_tokens)
        receipt.left_out = prompt.conversation.left_out
        receipt.signals = tuple(msgspec.to_builtins(signal) for signal in self.signals)
        memory_ms = sum(spans_ms.get(step, 0.0) for step in ("receive", "correct", "room", "recall"))
        receipt.timings_ms = {name: round(value, 3) for name, value in {**spans_ms, "memory": memory_ms}.items()}
        if reply.usage is not None:
            receipt.prompt_tokens, receipt.cached_tokens = reply.usage.prompt_tokens, reply.usage.cached_tokens
            receipt.completion_tokens = reply.usage.completion_tokens
        receipt.interrupted = reply.message is not None and reply.message.interrupted
        receipt.error = reply.error
        return receipt

    async def remember(self, reply: Reply) -> None:
        """Take the reply into the buffer, learn the tokenizer's drift, and compact later if the buffer is full."""
        prompt, drift, model = self._prompt, self._counter.drift, self._request.model
        if reply.usage is not None and self._forwarded_tokens and not prompt.has_attachments:
            drift.observe(model, self._forwarded_tokens, reply.usage.prompt_tokens)
        if self._mode != "full" or self._arrival is None:
            return
        conversation = prompt.conversation
        if reply.message is not None and self.topic.buffer.is_open(conversation):
            tokens = self._counter.message(reply.message, reply.message.content_digest)
            conversation = self.topic.buffer.reply(self._arrival, reply.message, tokens, time.time())
        await self.topic.save(sync=self._config.buffer.journal_fsync == "always")
        visible = conversation.tokens_between(conversation.left_out, len(conversation))
        if drift.drifted(model, visible + prompt.block_tokens()) > self._limits.soft:
            self._daemon.archiver.compact_later(self.topic, conversation)

    # -- what the steps are made of -----------------------------------------------------------------------------

    @property
    def _prompt(self) -> Prompt:
        assert self._made is not None, "receive() comes first"
        return self._made

    @property
    def _limits(self) -> compaction.Thresholds:
        assert self._thresholds is not None, "make_room() comes first"
        return self._thresholds

    def _drifted(self, raw_tokens: int) -> int:
        return self._counter.drift.drifted(self._request.model, raw_tokens)

    async def _count_messages(self) -> list[int]:
        messages, digests = self._request.messages, self._request.digests
        known = self._counter.known(messages, digests)

        def counted() -> list[int]:
            return [
                self._counter.message(message, digest) if count is None else count
                for message, digest, count in zip(messages, digests, known, strict=True)
            ]

        fresh = sum(len(message.text) for message, count in zip(messages, known, strict=True) if count is None)
        if fresh <= COUNTED_AT_ONCE_CHARACTERS:
            return counted()
        return await asyncio.get_running_loop().run_in_executor(None, counted)

    async def _corrected(self, asked: Sequence[Correction]) -> tuple[str, ...]:
        """Apply the corrections; returns the ids for which it could not be done."""

        async def snapshot_of(topic_id: str) -> Snapshot | None:
            topic = await self._daemon.topics.existing(topic_id)
            return None if topic is None else topic.log.snapshot()

        applied = await corrections.correct_shown(
            asked,
            own=self.topic.log.snapshot(),
            resolve=self.topic.buffer.resolve,
            snapshot_of=snapshot_of,
            encoder=self._daemon.encoder,
            append=partial(self._daemon.archiver.append_corrections, self.topic),
        )
        return applied.failed

    def _memory_in_digest(self) -> bytes:
        memory_in = self._request.memory_in
        return hashlib.blake2b(msgspec.msgpack.encode(memory_in), digest_size=16).digest()

    def _related_ids(self) -> list[str]:
        memory_in = self._request.memory_in
        ids = [] if memory_in is None else memory_in.related_topic_ids
        return [topic_id for topic_id in dict.fromkeys(ids) if topic_id != self.topic.id]

    async def _used_tokens(self, hard: int) -> int:
        """What the buffer part of the prompt takes, in the model's tokens: estimated, and near the limit asked for."""
        drift, model = self._counter.drift, self._request.model
        prompt = self._prompt
        standing = drift.drifted(model, prompt.standing_tokens)
        estimate = drift.drifted(model, prompt.tokens()) - standing
        margin = COUNT_MARGIN if drift.is_known(model) else COUNT_MARGIN_UNKNOWN
        if estimate * margin <= hard:
            return estimate
        placement = self._daemon.upstream.placement
        exact = await self._daemon.upstream.count_tokens(self._api.count_path, prompt.body(placement), self._headers)
        if exact is None:
            return estimate
        if not prompt.has_attachments:
            drift.observe(model, prompt.tokens(), exact)
        return exact - drift.drifted(model, prompt.standing_tokens)

    async def _take_oldest(self, excess: int) -> bool:
        """Compact so that at least `excess` tokens of the model leave; False if nothing may leave."""
        conversation = self._prompt.conversation
        raw = int(excess / self._counter.drift.factor(self._request.model)) + 1
        if self._mode == "full":
            return await self._daemon.archiver.compact(self.topic, conversation, raw)
        # A detached copy, for which nothing may be stored: only what is in the log already may leave.
        cuts = (place for place in compaction.cut_positions(conversation) if place <= conversation.stored)
        cut = max(cuts, default=0)
        conversation.mark_left_out(cut)
        return cut > 0

    def _give_way(self) -> None:
        """Nothing may leave and it still does not fit: memory is the first to go without."""
        self._without_block = True
        self._remove_blocks(list(self._prompt.conversation.blocks))

    def _remove_blocks(self, digests: list[bytes]) -> None:
        if self._mode == "full":
            self.topic.buffer.remove_blocks(self._prompt.conversation, digests)
        else:
            for digest in digests:
                self._prompt.conversation.blocks.pop(digest, None)

    async def _recalled_block(self) -> Block:
        question = self._question()
        if not question.strip():
            return NO_BLOCK
        self.receipt.question, self.receipt.budget_tokens = question, self._limits.injection
        drift, seconds = self._counter.drift.factor(self._request.model), self._config.retrieval.timeout_ms / 1000
        earlier = self._prompt.chunks()
        retrieved = await self._daemon.retriever.retrieve(
            question,
            [self.topic.log, *(topic.log for topic in self._related)],
            Budget(self._limits.injection, drift, seconds),
            Filters(visible_digests=self._prompt.visible_digests(), shown_uuids={chunk.uuid for chunk in earlier}),
        )
        self._candidates = len(retrieved.candidates)
        self._spans_ms.update(embed=retrieved.embed_ms, search=retrieved.search_ms, inject=retrieved.fill_ms)
        self.receipt.candidates = scored_chunks(retrieved)
        fill_ratio = round(retrieved.fill_ratio, 3)
        if retrieved.fill_ratio > 1:
            self.signals.append(Signal(type="context_overflow", fill_ratio=fill_ratio))
        elif retrieved.fill_ratio >= ranking.PRESSURE_FROM:
            self.signals.append(Signal(type="context_pressure", fill_ratio=fill_ratio))
        shown = block.render(
            retrieved.shown,
            own_topic_id=self.topic.id,
            header=self._config.injection.header,
            taken={chunk.shown_id for chunk in earlier},
            tokens=retrieved.raw_tokens,
        )
        log.debug("recalled", extra={**self._fields(), "question": Content(question), "block": Content(shown.text)})
        return shown

    def _question(self) -> str:
        """What the user asks; a short follow-up ("yes, do that") says little without what was said before it."""
        texts: list[str] = []
        for text in itertools.islice(self._prompt.user_texts(), FOLLOW_UP_TURNS):
            texts.insert(0, text)
            if self._counter.count(" ".join(texts)) >= FOLLOW_UP_TOKENS:
                break
        return "\n".join(texts)

    def _fields(self, error: MemdError | None = None) -> dict[str, object]:
        """What a line of the log says of the request."""
        return {"turn": self.turn_id, "topic": self.topic.id, "error": error}

    def _degrade(self, error: MemdError) -> None:
        if isinstance(error, DiskFull):
            self._degrade_to("disk-full")
        elif isinstance(error, EmbeddingError):
            self._degrade_to("embedding")
        else:
            self._degrade_to("store")

    def _degrade_to(self, reason: str) -> None:
        self.status = f"degraded:{reason}"


def new_turn_id() -> str:
    """An id for one request, for `X-Memory-Turn`."""
    return uuid.uuid4().hex[:16]
