"""ShareGPT's shape, in which data for training is passed on: an array or JSON Lines of conversations.

    {"id", "conversations": [{"from": "human", "value"}, {"from": "gpt", "value"}]}

The roles are those of FastChat and LLaMA-Factory (data/README.md: `human`, `gpt`, `observation`, `function_call`,
`system`).

Rule: pure. Who speaks under a name that nobody knows is named, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from memd.errors import BadImport
from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Thread, straight, thread_of
from memd.messages import Message, ToolCall
from memd.wire.lenient_json import UNREADABLE, text_or_empty

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **dict.fromkeys(("system", "function_call"), ""),
}


class _ShareGptLine(msgspec.Struct, rename={"speaker": "from"}):
    speaker: str
    value: Any = None


class _ShareGptConversation(msgspec.Struct):
    conversations: list[Raw]
    id: Any = None


class _ShareGptCall(msgspec.Struct):
    name: str
    arguments: Raw = Raw(b"{}")


_decoder = msgspec.json.Decoder(_ShareGptConversation)
_said_decoder = msgspec.json.Decoder(_ShareGptLine)
_call_decoder = msgspec.json.Decoder(_ShareGptCall)


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a conversation in ShareGPT's shape."""
    return "conversations" in members and b'"from"' in bytes(members["conversations"])[:100_000]


def thread(item: bytes, dating: Dating) -> Thread:
    """Read a conversation.

    Raises:
        BadImport, UNREADABLE: it is none, or has no text.
    """
    decoded = _decoder.decode(item)
    begun, messages, problems = dating.told_time(item), [], []
    for place, raw in enumerate(decoded.conversations, 1):
        try:
            message = _message(_said_decoder.decode(raw))
        except (*UNREADABLE, BadImport) as error:
            problems.append(f"message {place:,} cannot be read: {error}")
            continue
        at = dating.told_time(raw)
        if message is not None:
            messages.append(msgspec.structs.replace(message, said_at=UNSET if at is None else at))
    return thread_of("sharegpt", text_or_empty(decoded.id), straight(messages), begun=begun, problems=problems)


def _message(one: _ShareGptLine) -> Message | None:
    value = text_or_empty(one.value)
    if one.speaker not in _ROLES:
        raise BadImport(f"nobody knows who {one.speaker[:60]!r} is")
    if one.speaker == "system" or not value.strip():
        return None
    if one.speaker == "function_call":
        call = _call_decoder.decode(value)
        return Message("assistant", "", (ToolCall("", call.name, bytes(call.arguments).decode()),))
    return Message(_ROLES[one.speaker], value)
