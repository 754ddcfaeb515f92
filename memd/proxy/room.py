"""Room in the model's window: what a prompt may take, and what leaves it until it fits.

Rule: only what is durable may leave. A prompt that still does not fit is sent without memory.
"""

from __future__ import annotations

import msgspec

from memd.conversation import compaction, window
from memd.conversation.tokens import TokenCounter
from memd.ingest.archiver import Archiver
from memd.proxy.receive import Received
from memd.proxy.upstream.client import Upstream
from memd.settings.model import BufferSettings, InjectionSettings

HARD_ROUNDS_MAX = 4
"""Compactions before one request: each halves the prompt or takes all that may be taken."""
COUNT_MARGIN = 1.15
"""An estimate this close to the hard threshold is checked with the upstream's exact count."""
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
        fits = await self._fit(received, limits.hard)
        if not fits:
            remove_blocks(received, list(prompt.conversation.blocks))
        sticky = int(limits.sticky / drift.factor(request.model))
        overflow = window.sticky_overflow(prompt.conversation, budget_tokens=sticky, current=prompt.turn_digest)
        remove_blocks(received, overflow)
        return PromptRoom(limits, fits)

    async def _fit(self, received: Received, hard: int) -> bool:
        """Compact until the prompt takes no more than `hard` tokens; False if that cannot be reached."""
        for _ in range(HARD_ROUNDS_MAX):
            used = await self._used_tokens(received, hard)
            if used <= hard:
                return True
            if not await self._take_oldest(received, used - hard):
                return False
        return await self._used_tokens(received, hard) <= hard

    async def _used_tokens(self, received: Received, hard: int) -> int:
        """Model tokens of the buffer's part of the prompt: estimated, near the limit counted by the upstream."""
        drift, model, prompt = self._counter.drift, received.request.model, received.prompt
        standing = drift.drifted(model, prompt.standing_tokens)
        estimate = drift.drifted(model, prompt.tokens()) - standing
        margin = COUNT_MARGIN if drift.is_known(model) else COUNT_MARGIN_UNKNOWN
        if estimate * margin <= hard:
            return estimate
        asked, body = received.asked, prompt.body(self._upstream.placement)
        exact = await self._upstream.count_tokens(asked.api.count_path, body, asked.credentials)
        if exact is None:
            return estimate
        if not prompt.has_attachments:
            drift.observe(model, prompt.tokens(), exact)
        return exact - drift.drifted(model, prompt.standing_tokens)

    async def _take_oldest(self, received: Received, excess: int) -> bool:
        """Compact so that at least `excess` model tokens leave; False if nothing may leave."""
        conversation = received.prompt.conversation
        raw = int(excess / self._counter.drift.factor(received.request.model)) + 1
        if received.is_traced:
            return await self._archiver.compact(received.topic, conversation, raw)
        # A detached copy, for which nothing may be stored: only what is in the log already may leave.
        cuts = (place for place in compaction.cut_positions(conversation) if place <= conversation.stored)
        cut = max(cuts, default=0)
        conversation.mark_left_out(cut)
        return cut > 0


def remove_blocks(received: Received, digests: list[bytes]) -> None:
    """Take the blocks in front of these user messages out of the prompt."""
    conversation = received.prompt.conversation
    if received.is_traced:
        received.topic.buffer.remove_blocks(conversation, digests)
        return
    for digest in digests:
        conversation.blocks.pop(digest, None)
