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

from memd.conversation.conversation import Conversation
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

RESULT_ROLES = frozenset({"tool", "function"})

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


def cut_positions(conversation: Conversation) -> list[int]:
    """Where the visible part may be cut, in order: positions of user messages that open a turn, the last one included.

    The position itself stays in the prompt; everything before it may go. The beginning of the visible part is no cut.
    """
    start = conversation.left_out
    called_at: dict[str, int] = {}  # by call id; models use an id again in later turns, so the latest call counts
    cuts: list[int] = []
    for position, item in enumerate(conversation.messages[start:], start):
        message = item.message
        if message is None:
            continue
        if message.role == "user" and position > start:
            cuts.append(position)
        if message.role in RESULT_ROLES and message.tool_call_id in called_at:
            while cuts and cuts[-1] > called_at[message.tool_call_id]:
                cuts.pop()  # somebody spoke between a call and this result of it
        called_at.update((call.id, position) for call in message.tool_calls)
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

    That is its end if the last message is an assistant's that calls no tool, else the start of the open turn.
    """
    if conversation.left_out == len(conversation):
        return len(conversation)
    last = conversation.messages[-1].message
    if last is not None and last.role == "assistant" and not last.tool_calls:
        return len(conversation)
    return max(cut_positions(conversation), default=conversation.left_out)


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
    is_first = np.ones(len(vectors), dtype=bool)
    for index, vector in enumerate(vectors):  # row by row: n × n cosines of a long history would be gigabytes
        same = np.flatnonzero((vectors[:index] @ vector >= cosine) & is_first[:index])
        is_first[index] = same.size == 0
        firsts.append(index if same.size == 0 else int(same[0]))
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
