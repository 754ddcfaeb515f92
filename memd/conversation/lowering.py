"""Marks that vouch for more than the log has: how far they go back, and what a request tells again of what was lost.

Rule: a message whose text is here is stored again from here; one without is out of the prompt until its client sends it
again, and then it is in the prompt and to be stored like a new one. Nothing that the log has is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memd.conversation import compaction
from memd.conversation.conversation import Conversation
from memd.conversation.matching import Match
from memd.messages import Message


def lowered_marks(conversation: Conversation, is_in_log: Callable[[bytes], bool]) -> tuple[int, int, list[int]]:
    """Return `stored` and `left_out` as far as the log bears them out, and the positions of what only a client has."""
    told: list[int] = []
    untold: list[int] = []
    for position, item in enumerate(conversation.messages[: min(conversation.stored, conversation.wanted_end)]):
        if item.message is None:
            is_vouched_for, lost = position < conversation.settled, untold
        else:
            is_vouched_for, lost = compaction.is_stored_kind(item.message), told
        if is_vouched_for and not is_in_log(item.identity):
            lost.append(position)
    return min([conversation.stored, *told]), min([conversation.left_out, *untold]), untold


def heard_again(found: Match, messages: Sequence[Message]) -> dict[int, Message]:
    """Return, by their positions in the conversation, those messages of a request whose text was lost."""
    conversation = found.conversation
    if conversation is None or not (conversation.gone or conversation.lost):
        return {}
    places = {found.offset + i: i for i in range(found.head, found.known)} | {i: i for i in range(found.head)}
    if found.runs:
        places = {place + i: start + i for start, place, length in found.runs for i in range(length)}
    textless = {position for position in conversation.gone if conversation.messages[position].message is None}
    return {
        position: messages[places[position]] for position in sorted(textless | conversation.lost) if position in places
    }
