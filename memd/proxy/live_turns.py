"""The history of a thin client: the buffered turns that memd puts in front of what the client sends.

Rule: memd wrote this prompt, so it is valid for a strict chat template whatever happened before: failed requests,
stopped tool loops, two requests at once. What was said stays as it is in the conversation; only the prompt is mended.
The client's own new messages are its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from memd.conversation.conversation import Conversation
from memd.conversation.hot_buffer import Arrival
from memd.messages import RESULT_ROLES, Message
from memd.wire.api import Api
from memd.wire.request import ModelRequest

UNANSWERED = Message("assistant", "[no answer]")
"""Stands between results that the model did not come to answer and the user's next words."""
_GONE = Message("user", "")
"""The place of a message that has left the prompt, and leaves this one too."""


class Mended(msgspec.Struct, frozen=True):
    """The differences between the visible messages and those in the prompt, by position in the conversation."""

    joined: dict[int, str] = {}
    """Unanswered messages of a user before this one, whose own messages are not in the prompt: their text in front."""
    hidden: frozenset[int] = frozenset()
    """Not in the prompt: calls without all their results, and results without their calls."""
    covered: frozenset[int] = frozenset()
    """Not in the prompt as messages of their own, but as part of a later one (`joined`)."""
    bare: frozenset[int] = frozenset()
    """In the prompt without their calls, which have no results."""
    unanswered: tuple[int, ...] = ()
    """In front of these stands `UNANSWERED`; ascending."""

    def shift(self, position: int) -> int:
        """The number of messages that were put in before the message at this position."""
        return bisect_right(self.unanswered, position)


_NOTHING_MENDED = Mended()


class LiveTurns(msgspec.Struct, frozen=True):
    """A request with its history, which a client sends itself unless it is a thin one."""

    request: ModelRequest
    arrival: Arrival
    mended: Mended = _NOTHING_MENDED


def with_live_turns(api: Api, request: ModelRequest, arrival: Arrival, lead: int) -> LiveTurns:
    """Put the visible turns of the buffer in front of the request of a thin client, which sends only new messages."""
    conversation = arrival.conversation
    start = min(conversation.kept, default=conversation.left_out)
    live = conversation.messages[start : arrival.offset]
    messages = [_GONE if item.message is None else item.message for item in live] + request.messages[lead:]
    mended = _mended(conversation, range(start, arrival.offset), messages)
    raws = list(map(api.encode_message, messages[: len(live)])) + request.raw_messages[lead:]
    digests = [item.content_digest for item in live] + request.digests[lead:]
    continues = [*_continues(api, messages[: len(live)]), *request.continues[lead:]]
    history: list[tuple[bytes, Message, bytes, bool]] = []
    for position, (raw, message, digest, same) in enumerate(
        zip(raws, messages, digests, continues, strict=True), start
    ):
        if position in mended.bare:
            raw = api.encode_message(msgspec.structs.replace(message, tool_calls=()))
        if position in mended.joined:
            raw = api.in_front(raw, mended.joined[position])
        if position in mended.unanswered:
            history.append((api.encode_message(UNANSWERED), UNANSWERED, UNANSWERED.content_digest, False))
        history.append((raw, message, digest, same))
    completed = msgspec.structs.replace(
        request,
        original=None,
        raw_messages=[*request.raw_messages[:lead], *(msgspec.Raw(raw) for raw, _, _, _ in history)],
        messages=[*request.messages[:lead], *(message for _, message, _, _ in history)],
        digests=[*request.digests[:lead], *(digest for _, _, digest, _ in history)],
        continues=[*request.continues[:lead], *(same for _, _, _, same in history)],
    )
    return LiveTurns(completed, msgspec.structs.replace(arrival, offset=start), mended)


def _continues(api: Api, messages: Sequence[Message]) -> Iterable[bool]:
    return map(api.continues, messages, [None, *messages])


def _mended(conversation: Conversation, live: range, messages: Sequence[Message]) -> Mended:
    """Mend the live part of a history: `messages` from the position `live.start` on, the client's new ones included."""
    shown = [
        (position, message)
        for position, message in enumerate(messages, live.start)
        if position >= live.stop or conversation.is_visible(position)
    ]
    hidden, bare = _broken_calls(shown, live.stop)
    joined: dict[int, str] = {}
    covered: set[int] = set()
    unanswered: list[int] = []
    before: tuple[int, Message] | None = None
    for position, message in shown:
        if position in hidden:
            continue
        if before is not None and message.role == "user" and before[0] < live.stop:
            if before[1].role == "user":
                covered.add(before[0])
                joined[position] = "\n\n".join(filter(None, (joined.pop(before[0], ""), before[1].text)))
            elif before[1].role in RESULT_ROLES:
                unanswered.append(position)
        before = position, message
    return Mended(joined, frozenset(hidden), frozenset(covered), frozenset(bare), tuple(unanswered))


def _broken_calls(shown: Sequence[tuple[int, Message]], live_end: int) -> tuple[set[int], set[int]]:
    """The positions of what a strict template refuses: messages to leave out, and messages to show without calls.

    Calls at the very end may still get their results.
    """
    hidden: set[int] = set()
    bare: set[int] = set()
    at = 0
    while at < len(shown):
        position, message = shown[at]
        end = at + 1
        while end < len(shown) and shown[end][1].role in RESULT_ROLES:
            end += 1
        called = {call.id for call in message.tool_calls}
        results = shown[at + (message.role not in RESULT_ROLES) : end]
        missing = called - {result.tool_call_id for _, result in results}
        if missing and position < live_end and end < len(shown):
            (bare if message.text.strip() else hidden).add(position)
            called = set()
        hidden.update(place for place, one in results if place < live_end and one.tool_call_id not in called)
        at = end
    return hidden, bare
