"""Where a conversation may be cut when its oldest turns leave the prompt, and how much leaves.

Rule: a cut is only made in front of a user message that opens a turn, never between a tool call and its results, and
never inside the open turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memd.conversation.conversation import Conversation
from memd.messages import LEADING_ROLES, Message

RESULT_ROLES = frozenset({"tool", "function"})


def cut_positions(conversation: Conversation) -> list[int]:
    """Where the visible part may be cut, ascending: the positions of user messages that open a turn, the last included.

    The message at a cut stays in the prompt, everything before it may leave. The start of the visible part is no cut.
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
    """The cut before which the oldest part leaves; None when nothing may leave.

    At least `fraction` of the visible tokens and at least `excess_tokens` (raw) leave where the turn boundaries allow
    it, else everything before the open turn.
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
    """The end of the last finished turn, up to which a conversation can be stored while it goes on.

    That is the conversation's end if its last message is an assistant's without tool calls, else the start of the open
    turn.
    """
    if conversation.left_out == len(conversation):
        return len(conversation)
    last = conversation.messages[-1].message
    if last is not None and last.role == "assistant" and not last.tool_calls:
        return len(conversation)
    return max(cut_positions(conversation), default=conversation.left_out)


def is_stored_kind(message: Message) -> bool:
    """Whether a message is stored at all: empty ones and instructions in mid-conversation are not."""
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
