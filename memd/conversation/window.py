"""The model's window: the token budgets of one request, and what has to leave the prompt to keep to them.

Rule: a decision from numbers alone, in the model's own (drifted) tokens. In the window `W`, beside the reply `R`, the
system prompt and tools `S` and the injection budget `I`, history may take `W - R - S - I` (the hard threshold).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memd.conversation.conversation import Conversation

WINDOW_UNKNOWN_HARD_TOKENS = 4_000
SOFT_EIGHTHS = 7
"""The soft threshold is 7/8 of the hard one."""
REPLY_SHARE = 8
"""A reply of unknown length is given an eighth of the window."""
REPLY_SHARE_MAX = 2
"""A client that asks for more than half the window as reply means "as much as possible": half is kept for it."""
INJECTION_SHARE_MAX = 4
"""The injection budget and the sticky budget get at most a quarter of the window each."""

Auto = Literal["auto"]


class Thresholds(msgspec.Struct, frozen=True):
    """Token budgets of one request, all in the model's own (drifted) tokens."""

    injection: int
    sticky: int
    soft: int
    hard: int


def injection_budget(injection_tokens: int, window: int | None) -> int:
    """The tokens that a turn's block may take: those configured, of a known window at most a quarter."""
    return injection_tokens if window is None else min(injection_tokens, window // INJECTION_SHARE_MAX)


def thresholds(
    *,
    window: int | None,
    max_tokens: int | None,
    standing_tokens: int,
    soft: int | Auto,
    hard: int | Auto,
    injection_tokens: int,
    sticky_tokens: int,
) -> Thresholds:
    """The budgets for one request.

    Args:
        window: the model's context per slot in tokens; None if the upstream does not tell.
        max_tokens: the reply's limit from the request; None or not positive if it has none.
        standing_tokens: the leading system messages and the tool definitions.
        soft, hard: the configured thresholds; of a known window none is higher than what it leaves.
        injection_tokens, sticky_tokens: the configured budgets of a turn's block and of earlier turns' blocks.
    """
    injection = injection_budget(injection_tokens, window)
    if window is None:
        sticky = sticky_tokens
        hard_tokens = WINDOW_UNKNOWN_HARD_TOKENS if hard == "auto" else hard
    else:
        asked = max_tokens if max_tokens is not None and max_tokens > 0 else window // REPLY_SHARE
        reply = min(asked, window // REPLY_SHARE_MAX)
        sticky = min(sticky_tokens, window // INJECTION_SHARE_MAX)
        room = max(0, window - reply - injection - standing_tokens)
        hard_tokens = room if hard == "auto" else min(hard, room)
    soft_tokens = hard_tokens * SOFT_EIGHTHS // 8 if soft == "auto" else soft
    return Thresholds(injection=injection, sticky=sticky, soft=min(soft_tokens, hard_tokens), hard=hard_tokens)


def sticky_overflow(conversation: Conversation, *, budget_tokens: int, current: bytes | None) -> list[bytes]:
    """The digests of the earlier turns' blocks, if together they exceed the budget: then all of them leave at once.

    Taking only the oldest would make the model read everything behind it anew, and again on every later turn; so the
    prompt changes rarely, and what is still needed is recalled again. (Measured by bench/kv.py, 30 turns of a full
    budget: 2.9 times what is new when the oldest left, see bench/NOTES.md.)
    """
    kept = [
        (buffered.digest, conversation.blocks[buffered.digest].tokens)
        for buffered in conversation.messages[conversation.left_out :]
        if buffered.digest in conversation.blocks and buffered.digest != current
    ]
    if sum(tokens for _, tokens in kept) <= budget_tokens:
        return []
    return [digest for digest, _ in kept]
