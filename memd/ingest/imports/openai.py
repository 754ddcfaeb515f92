"""Messages as OpenAI's chat completions API has them, the form in which most programs pass conversations on.

    [{"role", "content"}, ...]                     a conversation: a file, or a line of JSON Lines
    {"messages": [...], "create_time", "id"}       the same with a name and a time
    {"role", "content"}                            a message on each line: the file is one conversation

https://platform.openai.com/docs/api-reference/chat/create has the messages; the times in them are memd's to find (see
`dates`).

Rule: pure. Messages are read as they are from a client, so that a conversation that went through memd is known again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadImport, BadRequestBody
from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Thread, straight, thread_of
from memd.messages import Message
from memd.wire.chat.message import parse_message
from memd.wire.lenient_json import UNREADABLE, text_or_empty


class _NamedMessages(msgspec.Struct):
    messages: list[Raw]
    id: Any = None
    conversation_id: Any = None


_decoder = msgspec.json.Decoder(_NamedMessages)
_head_decoder = msgspec.json.Decoder(dict[str, Raw])


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members has a conversation in it."""
    return "messages" in members


def is_message(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a message."""
    return "role" in members and "payload" not in members


def thread(item: bytes, dating: Dating) -> Thread:
    """Read a conversation in an object.

    Raises:
        BadImport, UNREADABLE: it is none, or has no text.
    """
    decoded = _decoder.decode(item)
    own_id = text_or_empty(decoded.id) or text_or_empty(decoded.conversation_id)
    return thread_of_messages(decoded.messages, dating, own_id, dating.told_time(item))


def thread_of_messages(
    listed: Sequence[Raw | bytes], dating: Dating, own_id: str = "", begun: int | None = None
) -> Thread:
    """Read a conversation.

    Raises:
        BadImport: it has no text.
    """
    messages: list[Message] = []
    problems: list[str] = []
    for place, raw in enumerate(listed, 1):
        try:
            message = parse_message(raw)
            if not message.role:
                raise BadImport("it has no role")
        except (*UNREADABLE, BadRequestBody, BadImport) as error:
            problems.append(f"message {place:,} is left out: {error}")
            continue
        at = dating.told_time(bytes(raw))
        messages.append(message if at is None else msgspec.structs.replace(message, said_at=at))
    if not messages:
        raise BadImport(problems[0] if problems else "it has no messages")
    return thread_of("openai", own_id, straight(messages), begun=begun, problems=problems)
