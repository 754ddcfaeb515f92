"""Memory of a turn: recalls its block once, and settles what the prompt shows and the response reports.

Rule: memory fails open. An error of recall becomes the request's status, and the request goes on without a block. If
only the embedding failed, the block shows chunks found by words.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from memd.conversation.events import Injected, Placed
from memd.conversation.tokens import TokenCounter
from memd.errors import MemdError
from memd.ingest.redaction import Redactor
from memd.messages import NO_BLOCK, Block, BlockChunk, stored_text
from memd.proxy.correct import CorrectionResult, degraded
from memd.proxy.prompt import Prompt
from memd.proxy.receive import Received
from memd.proxy.room import PromptRoom, remove_blocks
from memd.recall import block
from memd.recall.retrieve import Budget, Filters, Retrieved, Retriever
from memd.settings.model import InjectionSettings
from memd.telemetry.logging import Content
from memd.wire.sideband import InjectedChunk, MemoryOut, NoteOut, Signal, memory_headers

log = logging.getLogger("memd")


STEP_CHARACTERS = 400
"""Limit for the model's latest step in the question of a turn that recalls anew."""


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """The recall of a turn; the defaults describe a request that needs none."""

    retrieved: Retrieved | None = None
    """The result, without topics if the search failed; None if nothing was asked."""
    step: str = ""
    """See `Filters.step`."""
    trouble: str | None = None
    """The status to report if recall failed or could not search by meaning."""

    @property
    def spans_ms(self) -> dict[str, float]:
        """The time that its steps took; empty if nothing was searched."""
        found = self.retrieved
        if found is None or not found.topic_ids:
            return {}
        return {"embed": found.embed_ms, "search": found.search_ms, "inject": found.fill_ms}


class SettledPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The memory in a prompt, and what the response reports about it."""

    status: str
    chunks: tuple[BlockChunk, ...]
    """All chunks in this prompt's blocks, earlier and new ones."""
    signals: tuple[Signal, ...]
    notes: tuple[NoteOut, ...]
    block_tokens: int
    """Raw tokens of the blocks."""
    prompt_tokens: int
    """Raw tokens of the whole prompt."""
    attachments: int
    """Number of images in it."""
    problem: str = ""
    """Why the request's `memory_in` had no effect."""

    def headers(self, received: Received, recalled: Recalled) -> list[tuple[str, str]]:
        """Return memory's response headers."""
        return memory_headers(
            status=self.status,
            mode=received.asked.mode,
            injected_ids=[chunk.shown_id for chunk in self.chunks],
            turn_id=received.asked.turn_id,
            timings_ms=recalled.spans_ms,
            problem=self.problem,
        )

    def memory_out(self, received: Received) -> MemoryOut | None:
        """Return the MemoryOut of the response's body; None unless the request carried a MemoryIn."""
        if received.request.memory_in is None:
            return None
        chunks = (InjectedChunk(id=c.shown_id, topic_id=c.topic_id, canonical_id=c.origin_id) for c in self.chunks)
        return MemoryOut(injected_chunks=tuple(chunks), signals=self.signals, notes=self.notes)


class Prepared(msgspec.Struct, frozen=True):
    """A prompt ready to be forwarded."""

    room: PromptRoom
    recalled: Recalled
    shown: SettledPrompt
    freed_tokens: int
    """Raw tokens that left the prompt to make room."""
    saving: asyncio.Task[bool]
    """Writes the question and its block to the journal."""


class Memory(msgspec.Struct, frozen=True):
    """Recalls a turn's block and settles the prompt."""

    settings: InjectionSettings
    timeout_seconds: float
    """Limit on the time that a request waits for recall."""
    retriever: Retriever
    counter: TokenCounter
    redactor: Redactor

    async def recall(self, received: Received, room: PromptRoom) -> Recalled:
        """Compute this turn's block unless it has one; steps and retries of a turn show the same block again."""
        prompt, turn = received.prompt, received.prompt.turn_digest
        if turn is None or room.block <= 0 or received.request.goes_on_with:
            return Recalled()  # `goes_on_with`: the upstream would keep the block, and those of all later turns
        if prompt.has_block and not received.needs_block:
            return Recalled()
        if prompt.has_block:  # asked again much later
            remove_blocks(received, [turn])
        drift = self.counter.drift.factor(received.request.model)
        budget = Budget(room.thresholds.injection, drift, room.block, self.timeout_seconds)
        question = next(iter(prompt.user_texts()), "").strip()
        asked = Recalled(retrieved=Retrieved(question=question, topic_ids=(), budget=budget), step=_step(prompt))
        try:
            recalled, placed = await self._retrieved(received, asked, question, budget)
        except TimeoutError:
            return msgspec.structs.replace(asked, trouble="degraded:timeout")
        except MemdError as error:
            log.error("recall failed, the request goes on without memory", extra=received.log_fields(error))
            return msgspec.structs.replace(asked, trouble=degraded(error))
        if room.is_short and placed.chunks and recalled.retrieved is not None and recalled.retrieved.fill_ratio > 1:
            placed = msgspec.structs.replace(placed, is_short=True)
        if not prompt.has_block:  # else the same request came at the same moment: both show one block
            received.record(Placed(prompt.conversation.id, turn, placed))
        return recalled

    def settle(self, received: Received, corrected: CorrectionResult, recalled: Recalled) -> SettledPrompt:
        """Settle what the prompt shows; afterwards only `forget_blocks` and `without_blocks` change it."""
        topic, prompt = received.topic, received.prompt
        chunks = tuple(prompt.chunks())
        found = "injected" if chunks else "degraded:store" if topic.log.is_incomplete else "none"
        stale = None if received.is_fresh else "degraded:store"
        status = recalled.trouble or corrected.trouble or stale or found
        if topic.write_trouble is not None and received.is_traced:
            status = degraded(topic.write_trouble)
        has_recalled = received.needs_block or recalled.retrieved is not None
        if has_recalled and chunks and received.is_traced:
            topic.buffer.record(Injected(list(chunks), received.asked.who.author))
        failed = (Signal(type="correction_failed", chunk_id=chunk_id) for chunk_id in corrected.failed_ids)
        taken_out = (Signal(type="taken_out", chunk_id=chunk_id) for chunk_id in corrected.taken_out)
        return SettledPrompt(
            status=status,
            chunks=chunks,
            signals=(*failed, *taken_out, *self._pressure(recalled.retrieved)),
            notes=corrected.notes,
            block_tokens=prompt.block_tokens(),
            prompt_tokens=prompt.tokens(),
            attachments=prompt.attachments(),
            problem=corrected.problem,
        )

    def _pressure(self, retrieved: Retrieved | None) -> tuple[Signal, ...]:
        fill_ratio = 0.0 if retrieved is None else retrieved.fill_ratio
        if fill_ratio > 1:
            return (Signal(type="context_overflow", fill_ratio=round(fill_ratio, 3)),)
        if fill_ratio >= self.settings.pressure_ratio:
            return (Signal(type="context_pressure", fill_ratio=round(fill_ratio, 3)),)
        return ()

    async def _retrieved(
        self, received: Received, asked: Recalled, question: str, budget: Budget
    ) -> tuple[Recalled, Block]:
        """Retrieve for the question. The block shows chunks up to the budget, in the model's tokens."""
        if not (question or asked.step):
            return Recalled(), NO_BLOCK
        earlier = received.prompt.chunks()
        retrieved = await self.retriever.retrieve(
            question,
            [topic.log for topic in (received.topic, *received.related)],
            budget,
            Filters(
                visible_digests=received.prompt.visible_digests() | received.replaced,
                shown_uuids={chunk.uuid for chunk in earlier},
                wanted=received.request.wanted,
                step=asked.step,
            ),
        )
        placed = block.render(
            [(one.entry, one.topic_id) for one in retrieved.shown],
            own_topic_id=received.topic.id,
            header=retrieved.header,
            taken={chunk.shown_id for chunk in earlier},
            tokens=retrieved.raw_tokens,
            reader=self.redactor.identifier(received.asked.who.author),
        )
        if placed.chunks and (reader := received.asked.who.author):  # the owner's chunks were counted without a name
            placed = msgspec.structs.replace(placed, tokens=self.counter.count(placed.text), reader=reader)
        fields = {**received.log_fields(), "question": Content(question), "block": Content(placed.text)}
        log.debug("recalled", extra=fields)
        trouble = None if retrieved.trouble is None else degraded(retrieved.trouble)
        return Recalled(retrieved=retrieved, step=asked.step, trouble=trouble), placed


def _step(prompt: Prompt) -> str:
    """Return the model's latest step, whose words or calls show what a turn that recalls anew needs."""
    step = prompt.latest_step()
    if step is None:
        return ""
    shortened = msgspec.structs.replace(step, tool_calls=step.tool_calls[:STEP_CHARACTERS])  # there may be thousands
    return (step.said.strip() or stored_text(shortened))[:STEP_CHARACTERS]


def forget_blocks(received: Received) -> None:
    """Remove all blocks for good, because the upstream accepted the prompt only without them.

    The turn keeps an empty block, so that its later steps and retries are not refused again.
    """
    prompt = received.prompt
    remove_blocks(received, list(prompt.conversation.blocks))
    if prompt.turn_digest is not None:
        received.record(Placed(prompt.conversation.id, prompt.turn_digest, NO_BLOCK))


def without_blocks(shown: SettledPrompt) -> SettledPrompt:
    """Return the prompt without its blocks, which the upstream refused."""
    tokens = shown.prompt_tokens - shown.block_tokens
    return msgspec.structs.replace(shown, chunks=(), block_tokens=0, prompt_tokens=tokens, status="degraded:template")
