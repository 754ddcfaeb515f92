"""The model's window: the token budgets of one request, and what gives way so that the prompt keeps to them.

Rule: decisions from numbers alone, in the model's own (drifted) tokens; those that change the beginning of the prompt
are rare, because the model reads everything behind a change anew.

In the window `W`, beside system prompt and tools `S`, there is the reply `R`, this turn's block `I`, the blocks of
earlier turns `K` and the history. Where they do not fit together, they give way in this order:

    R   to min(max_tokens, max(512, W/16)), unless the upstream counts `max_tokens` against the window
    K   to nothing, all blocks at once
    I   to W/16
    history: its oldest part leaves
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memd.conversation.conversation import Conversation

UNLIMITED = 1 << 60
"""The thresholds as long as no window is known: then nothing leaves the prompt."""
SOFT_EIGHTHS = 7
"""The soft threshold is 7/8 of the hard one."""
REPLY_SHARE = 8
"""A reply of unknown length is given an eighth of the window."""
REPLY_SHARE_MAX = 2
"""A client that asks for more than half the window as reply means "as much as possible": half is kept for it."""
REPLY_TOKENS_MIN = 512
INJECTION_SHARE_MAX = 4
"""The injection budget gets at most a quarter of the window."""
SHRUNK_SHARE = 16
"""The reply and the injection budget shrink to a sixteenth of the window before history leaves."""

Auto = Literal["auto"]


class Thresholds(msgspec.Struct, frozen=True):
    """Token budgets of one request, all in the model's own (drifted) tokens."""

    injection: int
    """The most that this turn's block may take."""
    sticky: int
    """The most that the blocks of earlier turns may take together."""
    soft: int
    """History above this is compacted in the background."""
    hard: int
    """History above this leaves before the request is forwarded."""
    room: int
    """For history and all blocks together: the window without system prompt and tools, and the shrunk reply."""
    standing: int
    """The tokens of system prompt and tools."""
    window: int | None = None
    """None: not known."""

    @property
    def injection_min(self) -> int:
        """The part of the room that history may not have: it is this turn's block's."""
        return self.room - self.hard


def injection_budget(injection_tokens: int, window: int | None) -> int:
    """The tokens that a turn's block may take: those configured, of a known window at most a quarter."""
    return injection_tokens if window is None else min(injection_tokens, window // INJECTION_SHARE_MAX)


def thresholds(
    *,
    window: int | None,
    counts_reply: bool,
    max_tokens: int | None,
    standing_tokens: int,
    soft: int | Auto,
    hard: int | Auto,
    injection_tokens: int,
    sticky_tokens: int,
) -> Thresholds:
    """The budgets for one request.

    Args:
        window: the model's context per slot in tokens; None if it is not known.
        counts_reply: the upstream refuses a request whose prompt and `max_tokens` together exceed the window.
        max_tokens: the reply's limit from the request; None or not positive if it has none.
        standing_tokens: the leading system messages and the tool definitions.
        soft, hard: the configured thresholds, upper bounds of what the window leaves.
        injection_tokens, sticky_tokens: the configured budgets of a turn's block and of earlier turns' blocks.
    """
    injection = injection_budget(injection_tokens, window)
    kept = injection if window is None else min(injection, window // SHRUNK_SHARE)
    room = UNLIMITED
    if window is not None:
        asked = max_tokens if max_tokens is not None and max_tokens > 0 else None
        room = max(0, window - _reply(window, asked, standing_tokens, counts_reply) - standing_tokens)
    if hard != "auto":
        room = min(room, hard + kept)
    hard_tokens = max(0, room - kept)
    soft_tokens = hard_tokens * SOFT_EIGHTHS // 8 if soft == "auto" else min(soft, hard_tokens)
    return Thresholds(injection, sticky_tokens, soft_tokens, hard_tokens, room, standing_tokens, window)


def _reply(window: int, asked: int | None, standing_tokens: int, counts_reply: bool) -> int:
    """The tokens that are kept for the reply where the window is short of room."""
    if counts_reply and asked is not None and asked + standing_tokens + window // SHRUNK_SHARE <= window:
        return asked  # with less kept for it the request would be refused; where even this is too much, it is anyway
    wanted = min(window // REPLY_SHARE if asked is None else asked, window // REPLY_SHARE_MAX)
    return min(wanted, max(REPLY_TOKENS_MIN, window // SHRUNK_SHARE))


def keeps_earlier_blocks(limits: Thresholds, *, text: int, earlier: int, current: int) -> bool:
    """Whether the blocks of earlier turns may stay; if not, all of them leave at once.

    They leave when they exceed their own budget, or when the rest needs their room. To let this turn's block shrink a
    little first costs less than a change of the prompt's beginning on every turn of a window that is nearly full (what
    it may shrink to, at most half, is kept for it; simulated at 8k over eight shapes of conversations: 28 to 98 changes
    in 200 turns instead of 74 to 140, read over new 1.06 to 1.52 instead of 1.06 to 1.85).

    Args:
        text: tokens of the visible history.
        earlier: tokens of the blocks of earlier turns.
        current: tokens of the block that this turn has already; 0 if it has none yet.
    """
    return earlier <= limits.sticky and beyond_room(limits, text=text, earlier=earlier, current=current) <= 0


def beyond_room(limits: Thresholds, *, text: int, earlier: int, current: int) -> int:
    """The tokens beyond the room where earlier blocks stay and this turn's has what it may shrink to."""
    wanted = min(limits.injection // 2, limits.injection_min)
    return text + earlier + max(current, wanted) - limits.room


def earlier_blocks(conversation: Conversation, current: bytes | None) -> dict[bytes, int]:
    """The raw tokens of the visible blocks of earlier turns, by the digest of the message that each stands before.

    Args:
        current: the digest of the message that opened the present turn.
    """
    if not any(block.tokens and digest != current for digest, block in conversation.blocks.items()):
        return {}  # without a look at thousands of messages
    start, messages, blocks = conversation.left_out, conversation.messages, conversation.blocks
    with_block = [place for place in range(start, len(messages)) if messages[place].digest in blocks]
    visible = (messages[place].digest for place in with_block if conversation.is_visible(place))
    return {digest: tokens for digest in visible if digest != current and (tokens := blocks[digest].tokens)}
