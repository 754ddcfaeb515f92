"""What leaves the hot buffer, and when: the thresholds of a model's window and the cut through a conversation.

Rule: a cut is only made in front of a user message that opens a turn, never between a tool call and its results, and
never inside the open turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.context.conversation import Conversation, tool_calls_open
from memd.messages import LEADING_ROLES, Message

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

    window: int | None
    reply: int
    """Reserved for the answer; 0 with an unknown window."""
    injection: int
    sticky: int
    soft: int
    hard: int

    @property
    def prompt_max(self) -> int | None:
        """What the whole prompt may take at most: the window less the reply."""
        return None if self.window is None else self.window - self.reply


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
        soft, hard: the configured thresholds.
        injection_tokens, sticky_tokens: the configured budgets of a turn's block and of earlier turns' blocks.
    """
    if window is None:
        reply, injection, sticky = 0, injection_tokens, sticky_tokens
        auto_hard = WINDOW_UNKNOWN_HARD_TOKENS
    else:
        asked = max_tokens if max_tokens is not None and max_tokens > 0 else window // REPLY_SHARE
        reply = min(asked, window // REPLY_SHARE_MAX)
        injection = min(injection_tokens, window // INJECTION_SHARE_MAX)
        sticky = min(sticky_tokens, window // INJECTION_SHARE_MAX)
        auto_hard = max(0, window - reply - injection - standing_tokens)
    hard_tokens = auto_hard if hard == "auto" else hard
    soft_tokens = hard_tokens * SOFT_EIGHTHS // 8 if soft == "auto" else soft
    return Thresholds(window, reply, injection, sticky, min(soft_tokens, hard_tokens), hard_tokens)


def cut_positions(conversation: Conversation) -> list[int]:
    """Where the visible part may be cut, in order: positions of user messages that open a turn, the last one included.

    The position itself stays in the prompt; everything before it may go. The beginning of the visible part is no cut.
    """
    visible = [item.message for item in conversation.messages[conversation.left_out :]]
    answered_at = {message.tool_call_id: i for i, message in enumerate(visible) if message and message.role == "tool"}
    cuts = []
    unit_end = 0  # the furthest result of any call so far: no cut before it
    for index, message in enumerate(visible):
        if message is None:
            continue
        if index > max(0, unit_end) and message.role == "user":
            cuts.append(conversation.left_out + index)
        unit_end = max([unit_end, *(answered_at.get(call.id, 0) for call in message.tool_calls)])
    return cuts


def choose_cut(conversation: Conversation, *, fraction: float, excess_tokens: int = 0) -> int | None:
    """The position up to which the oldest part is taken; None when nothing may be taken.

    At least `fraction` of the visible tokens and at least `excess_tokens` (raw, undrifted) are taken where the turn
    boundaries allow it, else everything before the open turn.
    """
    cuts = cut_positions(conversation)
    if not cuts:
        return None
    start = conversation.left_out
    wanted = max(math.ceil(conversation.tokens_between(start, len(conversation)) * fraction), excess_tokens)
    taken, previous = 0, start
    for cut in cuts:
        taken += conversation.tokens_between(previous, cut)
        previous = cut
        if taken >= wanted:
            return cut
    return cuts[-1]


def finished_end(conversation: Conversation) -> int:
    """Up to where a conversation can be stored while it goes on: its last complete exchange.

    That is its end if the last message is an assistant's without open tool calls, else the start of the open turn.
    """
    visible = [item.message for item in conversation.messages[conversation.left_out :] if item.message is not None]
    if not visible:
        return len(conversation)
    if visible[-1].role == "assistant" and not tool_calls_open(visible):
        return len(conversation)
    opened = conversation.last_user_position()
    return conversation.left_out if opened is None else opened


def is_stored_kind(message: Message) -> bool:
    """Whether a message is remembered at all: empty ones and standing instructions in mid-conversation are not."""
    return message.role not in LEADING_ROLES and bool(message.text.strip() or message.tool_calls)


def distinct(vectors: NDArray[np.float32], cosine: float) -> list[int]:
    """For each of a batch's vectors the index of the first one that says the same: its own, if none before it does.

    Args:
        vectors: unit vectors, shape `(n, dimension)`.
        cosine: from which similarity on two count as the same.
    """
    firsts: list[int] = []
    similarity = vectors @ vectors.T
    for index in range(len(vectors)):
        same = (other for other in range(index) if firsts[other] == other and similarity[index, other] >= cosine)
        firsts.append(next(same, index))
    return firsts


def contiguous(positions: Sequence[int]) -> list[list[int]]:
    """Runs of neighbouring positions: text that did not stand together must not be joined in one chunk."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
