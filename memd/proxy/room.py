"""Room in the model's window: the token budgets of a prompt, and the order in which parts leave until it fits.

Rule: only durable messages may leave, and memory blocks leave before history does (`conversation/compaction.py` has the
order). A prompt that still does not fit is sent without memory.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import msgspec

from memd.conversation import compaction
from memd.conversation.conversation import Conversation, Counted
from memd.conversation.events import Removed, Returned
from memd.conversation.tokens import ATTACHMENT_TOKENS, Drift, TokenCounter
from memd.ingest.archiver import Archiver
from memd.proxy.receive import Received
from memd.proxy.upstream.windows import LengthRefusal, ModelWindow, Sent
from memd.settings.model import BufferSettings, InjectionSettings

HARD_ROUNDS_MAX = 4
"""Limit on compactions before one request; each halves the prompt or takes everything that may leave."""
INSTRUCTIONS_SHARE_MAX = 8
"""Instructions in mid-conversation stay while together they take at most an eighth of the window."""
BLOCK_SHARE = 8
"""Once history has left for lack of room, a block takes at most an eighth of the room, because it is read anew each
time that compaction moves the prompt (bench/NOTES.md)."""
THREE_CHUNKS_TOKENS, THREE_CHUNKS_SHARE = 896, 2
"""A block may still take room for three of the longest chunks, in raw tokens, up to half of the room."""
SHORT_SHARE = 2 / 3
"""A block with a smaller share of its limit is recalled again once results are shortened to lines. Otherwise an agent's
turn beside one long unread result kept a quarter of a block, and missed facts it needed."""
COUNT_MARGIN = 1.15
"""The upstream counts the prompt (50 ms for 6,000 tokens with llama.cpp on 2 cores) if the estimated part, multiplied
by this, could exceed the threshold."""
COUNT_MARGIN_UNKNOWN = 6.0
"""The same for a model with an unknown tokenizer: a byte tokenizer has six tokens for one of ours."""

COUNT_DOUBT = 2.0
"""An estimate with a known tokenizer is wrong by at most this factor, for any text."""


class PromptRoom(msgspec.Struct, frozen=True):
    """The token budgets of a request, and whether its prompt keeps within them."""

    thresholds: compaction.Thresholds
    """In the model's tokens."""
    block: int
    """Limit for this turn's block; 0 if there is no room for it."""
    is_short: bool
    """The block gets less than `SHORT_SHARE` of its limit, because unread messages may not leave."""


class RoomMaker(msgspec.Struct, frozen=True):
    """Makes room before recall, so that what has just left the prompt can be recalled into it."""

    buffer: BufferSettings
    injection: InjectionSettings
    counter: TokenCounter
    archiver: Archiver
    left_out: WeakKeyDictionary[Conversation, int] = msgspec.field(default_factory=WeakKeyDictionary)
    """Each conversation's compaction mark when its prompt was last made."""

    async def make_room(self, received: Received) -> PromptRoom:
        """Remove earlier blocks and the oldest turns until the prompt fits. May be called again for a request. Raises
        MemdError: the messages that leave could not be written."""
        conversation = received.prompt.conversation
        window = await received.assignment.server.window(received.request.model, received.asked.credentials)
        limits = self._limits(received, window)
        await self._used_tokens(received, limits, limits.hard)  # may count what system prompt and tools really take
        limits = self._limits(received, window)
        self._bring_back(received, limits)
        await self._limit_instructions(received, limits.window)
        is_short = await self._let_blocks_leave(received, limits)
        # A step whose turn has its block may use all the room; if messages leave, there is room for a new block.
        has_block = received.prompt.has_block and not received.needs_block
        reserved = 0 if has_block else max(0, limits.injection_min - self._current_tokens(received))
        if is_short:  # all that follows is read anew anyway, so more leaves at once
            await self._fit(received, limits, limits.room // 2)
        await self._fit(received, limits, limits.room - reserved)
        used = await self._used_tokens(received, limits, limits.room)
        if used > limits.room:
            remove_blocks(received, list(conversation.blocks))
            used = await self._used_tokens(received, limits, limits.room)
        self.left_out[conversation] = conversation.left_out
        free = limits.room - used + (self._current_tokens(received) if received.needs_block else 0)
        most = limits.injection
        if conversation.left_out_count() or conversation.lines:
            three = self.counter.drift.drifted(received.request.model, THREE_CHUNKS_TOKENS)
            most = min(most, max(limits.room // BLOCK_SHARE, min(three, limits.room // THREE_CHUNKS_SHARE)))
        return PromptRoom(limits, max(0, min(most, free)), free < SHORT_SHARE * most)

    def learn(self, received: Received, refusal: LengthRefusal) -> bool:
        """Learn from the upstream's refusal of the present prompt, so that `make_room` can run again. False if the
        refusal is not credible (`KnownWindows.refused`)."""
        drift, request, prompt = self.counter.drift, received.request, received.prompt
        raw = prompt.tokens()
        doubt = COUNT_DOUBT if drift.is_known(request.model) else COUNT_MARGIN_UNKNOWN
        attachments = prompt.attachments()
        sent = Sent(self._estimate(received)[0], max(0, request.max_tokens or 0), math.inf if attachments else doubt)
        if not received.assignment.server.windows.refused(request.model, refusal, sent):
            return False
        least = 1 + (refusal.window or 0) - (sent.reply_tokens if refusal.counts_reply else 0)
        if refusal.prompt_tokens is not None:
            counted = Counted(request.model, raw, refusal.prompt_tokens, attachments)
            count(drift, prompt.conversation, counted)
        elif sent.tokens < least:  # the refusal gives no count, so assume the least
            prompt.conversation.counted = Counted(request.model, raw, least, attachments)
        return True

    def _limits(self, received: Received, known: ModelWindow) -> compaction.Thresholds:
        request = received.request
        return compaction.thresholds(
            self.buffer,
            self.injection,
            window=request.window or known.tokens,
            counts_reply=known.counts_reply,
            max_tokens=request.max_tokens,
            standing_tokens=self._standing_tokens(received),
        )

    async def _let_blocks_leave(self, received: Received, limits: compaction.Thresholds) -> bool:
        """Remove the blocks of earlier turns if their room is needed or the prompt's beginning has changed anyway.
        Return True if lack of room was the only reason."""
        prompt, conversation = received.prompt, received.prompt.conversation
        shown = ((conversation.messages[at].digest, block.tokens) for at, block in prompt.blocks())
        earlier = {digest: tokens for digest, tokens in shown if digest != prompt.turn_digest}
        if not earlier:
            return False
        moved = conversation.left_out > self.left_out.get(conversation, conversation.left_out)
        tokens = self.counter.drift.drifted(received.request.model, sum(earlier.values()))
        current = self._current_tokens(received)
        text = await self._used_tokens(received, limits, limits.room) - tokens - current
        if not moved and compaction.keeps_earlier_blocks(limits, text=text, earlier=tokens, current=current):
            return False
        remove_blocks(received, list(earlier))
        return not moved and tokens <= limits.sticky

    def _standing_tokens(self, received: Received) -> int:
        """Return model tokens of system prompt and tools: from the last count of this prompt, else estimated."""
        prompt, model = received.prompt, received.request.model
        counted = prompt.conversation.counted
        if counted is None or counted.model != model or counted.raw_tokens <= 0 or counted.attachments:
            return self.counter.drift.drifted(model, prompt.standing_tokens)
        return math.ceil(prompt.standing_tokens * counted.prompt_tokens / counted.raw_tokens)

    def _current_tokens(self, received: Received) -> int:
        """Return model tokens of the block that this turn already has."""
        prompt = received.prompt
        block = prompt.turn_block
        return 0 if block is None else self.counter.drift.drifted(received.request.model, block.tokens)

    def _bring_back(self, received: Received, limits: compaction.Thresholds) -> None:
        """Show messages again that another branch left out, all or as many as compaction allows. Only where a client
        goes back: otherwise the prompt's beginning would move whenever it rewrites something."""
        prompt, factor = received.prompt, self.counter.drift.factor(received.request.model)
        position = prompt.return_position(whole_max=limits.soft / factor, part_max=limits.hard / 2 / factor)
        if position is None:
            return
        received.record(Returned(prompt.conversation.id, position, prompt.texts_from(position)))

    async def _fit(self, received: Received, limits: compaction.Thresholds, hard: int) -> None:
        """Compact until the prompt takes at most `hard`, if possible. A prompt larger than the room, which the upstream
        would refuse, may also lose parts of the open turn's last unit."""
        used = await self._used_tokens(received, limits, hard)
        coming = 0 if self._current_tokens(received) or not received.prompt.has_results else limits.injection
        kept = max(limits.hard // 2, min(hard, limits.hard, limits.room - coming))
        for _ in range(HARD_ROUNDS_MAX):
            if used <= hard:
                return
            if not await self._take_oldest(received, used - kept):
                break
            used = await self._used_tokens(received, limits, hard)
        if used > limits.room:
            await self._take_oldest(received, used - limits.room, forced=True)

    async def _limit_instructions(self, received: Received, window_tokens: int | None) -> None:
        """Remove the oldest instructions in mid-conversation if together they take too much of the window."""
        if window_tokens is None or not received.is_traced:
            return
        share = window_tokens // INSTRUCTIONS_SHARE_MAX
        raw = int(share / self.counter.drift.factor(received.request.model))
        surplus = compaction.surplus_instructions(received.prompt.conversation, raw)
        if surplus:
            await self.archiver.let_instructions_go(received.topic, received.prompt.conversation, surplus)

    async def _used_tokens(self, received: Received, limits: compaction.Thresholds, hard: int) -> int:
        """Return model tokens of the prompt's buffered part: estimated, or near `hard` counted by the upstream."""
        drift, model, prompt = self.counter.drift, received.request.model, received.prompt
        standing = limits.standing
        estimate, uncounted = self._estimate(received)
        margin = COUNT_MARGIN if drift.is_known(model) else COUNT_MARGIN_UNKNOWN
        doubt = uncounted * (margin - 1)
        if estimate + doubt <= hard + standing or (drift.is_known(model) and estimate - doubt > hard + standing):
            return estimate - standing
        asked, server = received.asked, received.assignment.server
        exact = await server.count_tokens(asked.api.count_path, prompt.body, asked.credentials)
        if exact is None:
            return estimate - standing
        count(drift, prompt.conversation, Counted(model, prompt.tokens(), exact, prompt.attachments()))
        return exact - standing

    def _estimate(self, received: Received) -> tuple[int, int]:
        """Return the prompt's model tokens, and how many of them are estimated rather than counted."""
        prompt, model = received.prompt, received.request.model
        now = Counted(model, prompt.tokens(), 0, prompt.attachments())
        return _estimate(prompt.conversation.counted, now, self.counter.drift.factor(model))

    async def _take_oldest(self, received: Received, excess: int, *, forced: bool = False) -> bool:
        """Compact so that at least `excess` model tokens leave; False if nothing may leave."""
        conversation = received.prompt.conversation
        per_raw = self.counter.drift.factor(received.request.model)
        if received.prompt.attachments():  # memd counts the same for each image
            per_raw = max(per_raw, self._estimate(received)[0] / max(1, received.prompt.tokens()))
        raw = int(excess / per_raw) + 1
        if received.is_traced:
            return await self.archiver.compact(received.topic, conversation, raw, forced=forced)
        # Nothing may be written for a detached copy, so only messages already in the log may leave.
        return self.archiver.compact_copy(received.topic, conversation, raw)


def _estimate(counted: Counted | None, now: Counted, factor: float) -> tuple[int, int]:
    """Return the model tokens of the prompt `now`, and how many of them are estimated rather than counted.

    Args:
        counted: the last count; tokens beyond its text are attributed to its images in equal parts.
        factor: model tokens per raw token of text.
    """
    known = counted if counted is not None and counted.model == now.model else Counted(now.model, 0, 0)
    image = ATTACHMENT_TOKENS * factor
    if known.attachments:
        image = max(1.0, (known.prompt_tokens - _text_tokens(known) * factor) / known.attachments)
    text = (_text_tokens(now) - _text_tokens(known)) * factor
    images = (now.attachments - known.attachments) * image
    return math.ceil(known.prompt_tokens + text + images), math.ceil(abs(text) + abs(images))


def _text_tokens(counted: Counted) -> int:
    return counted.raw_tokens - ATTACHMENT_TOKENS * counted.attachments


def count(drift: Drift, conversation: Conversation, counted: Counted) -> None:
    """Record a model's own count of a conversation's prompt; with images it does not show how text is counted."""
    if not counted.attachments:
        drift.observe(counted.model, counted.raw_tokens, counted.prompt_tokens)
    conversation.counted = counted


def remove_blocks(received: Received, digests: list[bytes]) -> None:
    """Remove the blocks in front of these user messages from the prompt."""
    conversation = received.prompt.conversation
    if present := [digest for digest in digests if digest in conversation.blocks]:
        received.record(Removed(conversation.id, present))
