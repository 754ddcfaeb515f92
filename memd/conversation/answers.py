"""An answer that is given anew or in parts: what of a conversation it takes the place of, and what it goes on with.

Rule: pure; the hot buffer decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import msgspec
from msgspec import UNSET

from memd.conversation.conversation import Conversation
from memd.messages import Message


def answer_start(conversation: Conversation, position: int) -> int | None:
    """Where the answer behind `position` begins that is dropped once the model has answered anew: behind the results of
    its calls, which nobody says again. None if there is no answer, or if somebody spoke after it."""
    tail = [None if item.message is None else item.message.role for item in conversation.messages[position:]]
    if tail[:1] != ["assistant"] or None in tail or "user" in tail:
        return None
    start = max((place + 1 for place, role in enumerate(tail) if role != "assistant"), default=0)
    return position + start if start < len(tail) else None


def is_sent_in_parts(conversation: Conversation, position: int, messages: Sequence[Message]) -> bool:
    """Whether these messages, with which a client goes on at `position`, have all that the answer there says.

    Some clients send each of an answer's calls with its result behind it, as a message of its own.
    """
    if len(conversation) != position + 1 or (answer := conversation.messages[position].message) is None:
        return False
    parts = [one for one in takewhile(lambda one: not one.opens_turn, messages) if one.role == answer.role]
    told = Counter(call.form for part in parts for call in part.tool_calls)
    is_said = not answer.said.strip() or any(part.said.strip() == answer.said.strip() for part in parts)
    return is_said and Counter(call.form for call in answer.tool_calls) <= told and not answer.attachments


def prefill(conversation: Conversation, position: int, message: Message) -> Message | None:
    """The beginning of an answer that a request ended with: a prefill, or an answer that is to be continued.

    llama.cpp goes on from a last message of the assistant's; Open WebUI's and LibreChat's "continue" send it so.
    """
    last = conversation.messages[position - 1].message if position else None
    if last is None or last.role != "assistant" or last.tool_calls or message.role != "assistant":
        return None
    return last


def joined(beginning: Message, message: Message) -> Message:
    """An answer with its beginning; some servers repeat that one themselves."""
    if message.text.startswith(beginning.text):
        return message
    said = beginning.said + message.said if beginning.said + message.said != beginning.text + message.text else UNSET
    return msgspec.structs.replace(message, text=beginning.text + message.text, own_words=said)
