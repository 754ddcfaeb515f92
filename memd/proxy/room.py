"""Room in the model's window: what a prompt may take, and what leaves it until it fits.

Rule: only what is durable may leave. A prompt that still does not fit is sent without memory.
"""

from __future__ import annotations

import math

import msgspec

from memd.conversation import compaction, window
from memd.conversation.conversation import Counted
from memd.conversation.tokens import TokenCounter
from memd.ingest.archiver import Archiver
from memd.proxy.receive import Received
from memd.proxy.upstream.client import Upstream
from memd.settings.model import BufferSettings, InjectionSettings

HARD_ROUNDS_MAX = 4
"""Compactions before one request: each halves the prompt or takes all that may be taken."""
INSTRUCTIONS_SHARE_MAX = 8
"""Instructions in mid-conversation stay, as long as together they take no more than an eighth of the window."""
COUNT_MARGIN = 1.15
"""If what is only estimated, so much larger, would exceed the threshold, the upstream counts the prompt (50 ms for
6,000 tokens with llama.cpp on 2 cores)."""
COUNT_MARGIN_UNKNOWN = 6.0
"""The same while nothing is known of the model's tokenizer: one of bytes has six tokens where ours has one."""


class PromptRoom(msgspec.Struct, frozen=True):
    """The token budgets of a request, and whether its prompt keeps to them."""

    thresholds: window.Thresholds
    """In the model's tokens."""
    fits: bool
    """False: no more may leave, and there is no room for memory."""


class RoomMaker:
    """Makes room before recall, so that what has just left the prompt can be recalled into it."""

    def __init__(
        self,
        buffer: BufferSettings,
        injection: InjectionSettings,
        upstream: Upstream,
        counter: TokenCounter,
        archiver: Archiver,
    ) -> None:
        self._buffer = buffer
        self._injection = injection
        self._upstream = upstream
        self._counter = counter
        self._archiver = archiver

    async def make_room(self, received: Received) -> PromptRoom:
        """Let the oldest turns leave until the prompt fits, and earlier blocks when they exceed the sticky budget.

        Raises:
            MemdError: what leaves could not be written.
        """
        facts = await self._upstream.refresh(wait=False)
        drift, request, prompt = self._counter.drift, received.request, received.prompt
        limits = window.thresholds(
            window=facts.window,
            max_tokens=request.max_tokens,
            standing_tokens=drift.drifted(request.model, prompt.standing_tokens),
            soft=self._buffer.soft_tokens,
            hard=self._buffer.hard_tokens,
            injection_tokens=self._injection.budget_tokens,
            sticky_tokens=self._injection.sticky_tokens,
        )
        await self._limit_instructions(received, facts.window)
        fits = await self._fit(received, limits)
        if not fits:
            remove_blocks(received, list(prompt.conversation.blocks))
        sticky = int(limits.sticky / drift.factor(request.model))
        overflow = window.sticky_overflow(prompt.conversation, budget_tokens=sticky, current=prompt.turn_digest)
        remove_blocks(received, overflow)
        return PromptRoom(limits, fits)

    async def _fit(self, received: Received, limits: window.Thresholds) -> bool:
        """Compact until the history takes no more than the hard threshold; False if that cannot be reached.

        What the upstream would refuse even without memory loses the results of the open turn's last units too.
        """
        used = await self._used_tokens(received, limits.hard)
        for _ in range(HARD_ROUNDS_MAX):
            if used <= limits.hard:
                return True
            if not await self._take_oldest(received, used - limits.hard):
                break
            used = await self._used_tokens(received, limits.hard)
        if used > limits.hard + limits.injection and await self._take_oldest(received, used - limits.hard, forced=True):
            used = await self._used_tokens(received, limits.hard)
        return used <= limits.hard

    async def _limit_instructions(self, received: Received, window_tokens: int | None) -> None:
        """Let the oldest instructions in mid-conversation leave where together they take too much of the window."""
        if window_tokens is None or not received.is_traced:
            return
        share = window_tokens // INSTRUCTIONS_SHARE_MAX
        raw = int(share / self._counter.drift.factor(received.request.model))
        surplus = compaction.surplus_instructions(received.prompt.conversation, raw)
        if surplus:
            await self._archiver.let_instructions_go(received.topic, received.prompt.conversation, surplus)

    async def _used_tokens(self, received: Received, hard: int) -> int:
        """Model tokens of the buffer's part of the prompt: estimated, near the limit counted by the upstream."""
        drift, model, prompt = self._counter.drift, received.request.model, received.prompt
        standing, raw = drift.drifted(model, prompt.standing_tokens), prompt.tokens()
        estimate, uncounted = _estimate(prompt.conversation.counted, model, raw, drift.factor(model))
        margin = COUNT_MARGIN if drift.is_known(model) else COUNT_MARGIN_UNKNOWN
        doubt = uncounted * (margin - 1)
        if estimate + doubt <= hard + standing or (drift.is_known(model) and estimate - doubt > hard + standing):
            return estimate - standing
        asked, body = received.asked, prompt.body(self._upstream.placement)
        exact = await self._upstream.count_tokens(asked.api.count_path, body, asked.credentials)
        if exact is None:
            return estimate - standing
        if not prompt.has_attachments:
            drift.observe(model, raw, exact)
            prompt.conversation.counted = Counted(model, raw, exact)
        return exact - drift.drifted(model, prompt.standing_tokens)

    async def _take_oldest(self, received: Received, excess: int, *, forced: bool = False) -> bool:
        """Compact so that at least `excess` model tokens leave; False if nothing may leave."""
        conversation = received.prompt.conversation
        raw = int(excess / self._counter.drift.factor(received.request.model)) + 1
        if received.is_traced:
            return await self._archiver.compact(received.topic, conversation, raw, forced=forced)
        # A detached copy, for which nothing may be written: only what is in the log already may leave.
        return self._archiver.compact_copy(received.topic, conversation, raw)


def _estimate(counted: Counted | None, model: str, raw_tokens: int, factor: float) -> tuple[int, int]:
    """The model's tokens of a prompt of `raw_tokens`, and how many of them are estimated rather than counted."""
    known = counted if counted is not None and counted.model == model else Counted(model, 0, 0)
    change = raw_tokens - known.raw_tokens
    return math.ceil(known.prompt_tokens + change * factor), math.ceil(abs(change) * factor)


def remove_blocks(received: Received, digests: list[bytes]) -> None:
    """Take the blocks in front of these user messages out of the prompt."""
    conversation = received.prompt.conversation
    if received.is_traced:
        received.topic.buffer.remove_blocks(conversation, digests)
        return
    for digest in digests:
        conversation.blocks.pop(digest, None)
