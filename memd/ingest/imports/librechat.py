"""LibreChat's export of a conversation as JSON, flat or nested.

    {"conversationId", "title", "recursive", "messages" or "messagesTree": [{"messageId", "parentMessageId",
     "isCreatedByUser", "text", "content": [{"type": "text", "text"}, {"type": "tool_call", "tool_call": {"name",
     "args", "output"}}], "createdAt", "files": [{"filename"}], "children": [...]}]}

As its own importer reads it (`importLibreChatConvo` in api/server/utils/import/importers.js, and __data__ beside it).
A parent of zeros is none. An export does not say which branch was shown: it is taken for that of the last message.

Rule: pure. Thoughts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Answer, Node, Thread, named, said, thread_of, with_attachments
from memd.messages import Message
from memd.wire.lenient_json import UNREADABLE, text_or_empty


class _LibreMessage(msgspec.Struct, rename="camel"):
    message_id: str = ""
    parent_message_id: str | None = None
    is_created_by_user: bool = False
    text: Any = None
    content: Any = None
    created_at: Any = None
    files: list[Any] | None = None
    children: list[Raw] | None = None


class _LibreExport(msgspec.Struct, rename="camel"):
    messages: list[Raw] | None = None
    messages_tree: list[Raw] | None = None
    conversation_id: Any = None


_decoder = msgspec.json.Decoder(_LibreExport)
_message_decoder = msgspec.json.Decoder(_LibreMessage)


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a conversation of LibreChat."""
    return "conversationId" in members and not members.keys().isdisjoint({"messages", "messagesTree"})


def thread(item: bytes, dating: Dating) -> Thread:
    """Read a conversation.

    Raises:
        BadImport, UNREADABLE: it is none, or has no text.
    """
    decoded = _decoder.decode(item)
    problems: list[str] = []
    nodes = [
        Node(message.message_id or str(place), parent, _messages(message, dating))
        for place, (message, parent) in enumerate(_flat(decoded.messages_tree or decoded.messages or (), problems))
    ]
    return thread_of("librechat", text_or_empty(decoded.conversation_id), nodes, problems=problems)


def _flat(listed: Sequence[Raw], problems: list[str]) -> Iterator[tuple[_LibreMessage, str | None]]:
    """Each message with the id of its parent; nested ones behind that."""
    waiting: list[tuple[Raw, str | None]] = [(raw, None) for raw in reversed(listed)]
    place = 0
    while waiting:
        raw, parent = waiting.pop()
        place += 1
        try:
            message = _message_decoder.decode(raw)
        except UNREADABLE as error:
            problems.append(f"message {place:,} cannot be read: {error}")
            continue
        yield message, message.parent_message_id if parent is None else parent
        waiting += [(child, message.message_id) for child in reversed(message.children or ())]


def _messages(message: _LibreMessage, dating: Dating) -> list[Message]:
    at = dating.first_time([message.created_at])
    files = [named("file", one.get("filename")) for one in message.files or () if isinstance(one, dict)]
    if message.is_created_by_user:
        return said("user", with_attachments(text_or_empty(message.text), files), at)
    answer = Answer(at)
    for part in message.content if isinstance(message.content, list) else ():
        if isinstance(part, dict):
            _add(answer, part)
    return answer.messages() or said("assistant", text_or_empty(message.text), at)


def _add(answer: Answer, part: dict[str, Any]) -> None:
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        answer.say(text_or_empty(text.get("value") if isinstance(text, dict) else text))
    elif kind == "tool_call" and isinstance(call := part.get("tool_call"), dict):
        args, call_id = call.get("args"), text_or_empty(call.get("id"))
        arguments = args if isinstance(args, str) else msgspec.json.encode(args).decode()
        answer.call(text_or_empty(call.get("name")), arguments, call_id)
        answer.result(text_or_empty(call.get("output")), call_id)
    elif kind == "image_file":
        answer.say(named("image"))
