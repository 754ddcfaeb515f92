"""Open WebUI's exported chats: an array of chats, each a tree.

    {"id", "title", "created_at", "chat": {"history": {"currentId", "messages": {ID: {"parentId", "role", "content",
     "timestamp", "files": [{"type", "name"}], "output": [items of the responses API]}}}}}

As Open WebUI's source has it (`convertOpenAIChats` and `processDetails` in src/lib/utils/index.ts write and read it); a
chat by itself is what stands in `chat`. What a model thinks and the calls of tools stand in its answer as `<details>`,
and in newer versions in `output`, too.

Rule: pure. Thoughts are left out; calls are taken from `output`, and else from the attributes of `<details>`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadImport
from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Answer, Node, Thread, named, said, straight, thread_of, with_attachments
from memd.messages import Message
from memd.wire.lenient_json import UNREADABLE, text_or_empty

_DETAILS = re.compile(r'<details type="(\w{1,40})"([^>]{0,200000})>(?:(?!<details).)*?</details>', re.DOTALL)
_ATTRIBUTE = re.compile(r'(\w{1,40})="([^"]*)"')


class _WebuiHistory(msgspec.Struct, rename="camel"):
    messages: dict[str, Raw]
    current_id: Any = None


class _WebuiChat(msgspec.Struct):
    history: _WebuiHistory | None = None
    messages: list[Raw] | None = None
    timestamp: Any = None


class _WebuiExport(msgspec.Struct):
    chat: _WebuiChat
    id: Any = None
    created_at: Any = None


class _WebuiMessage(msgspec.Struct, rename="camel"):
    role: str = ""
    content: Any = None
    parent_id: str | None = None
    timestamp: Any = None
    files: list[Any] | None = None
    output: list[Any] | None = None


_decoder = msgspec.json.Decoder(_WebuiExport)
_chat_decoder = msgspec.json.Decoder(_WebuiChat)
_message_decoder = msgspec.json.Decoder(_WebuiMessage)
_members_decoder = msgspec.json.Decoder(dict[str, Raw])


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a chat of Open WebUI, or what stands in one."""
    inner = bytes(members.get("chat", b"") or members.get("history", b""))
    return inner[:1] == b"{"


def thread(item: bytes, dating: Dating) -> Thread:
    """Read a chat.

    Raises:
        BadImport, UNREADABLE: it is none, or has no text.
    """
    has_frame = "chat" in _members_decoder.decode(item)
    decoded = _decoder.decode(item) if has_frame else _WebuiExport(_chat_decoder.decode(item))
    chat, problems = decoded.chat, list[str]()
    if chat.history is not None:
        nodes = []
        for name, raw in chat.history.messages.items():
            message = _decoded(raw, name, problems)
            nodes.append(Node(name, message.parent_id, _messages(message, dating)))
        leaf = text_or_empty(chat.history.current_id) or None
    elif chat.messages is not None:
        decoded_all = [_decoded(raw, str(place), problems) for place, raw in enumerate(chat.messages, 1)]
        nodes, leaf = straight(one for message in decoded_all for one in _messages(message, dating)), None
    else:
        raise BadImport("it has no messages")
    own_id = text_or_empty(decoded.id) or (nodes[0].id if chat.history is not None and nodes else "")
    begun = dating.first_time([decoded.created_at, chat.timestamp])
    return thread_of("open-webui", own_id, nodes, leaf, begun=begun, problems=problems)


def _decoded(raw: Raw, name: str, problems: list[str]) -> _WebuiMessage:
    try:
        return _message_decoder.decode(raw)
    except UNREADABLE as error:
        problems.append(f"message {name[:60]!r} cannot be read: {error}")
        return _WebuiMessage()


def _messages(message: _WebuiMessage, dating: Dating) -> list[Message]:
    at = dating.first_time([message.timestamp])
    text = text_or_empty(message.content)
    if message.role != "assistant":
        files = [one for one in message.files or () if isinstance(one, dict)]
        attached = [named("image" if one.get("type") == "image" else "file", one.get("name")) for one in files]
        return said(message.role, with_attachments(text, attached), at) if message.role else []
    answer = Answer(at)
    if any(isinstance(one, dict) and one.get("type") == "function_call" for one in message.output or ()):
        for one in message.output or ():
            if isinstance(one, dict):
                _add_output(answer, one)
    else:
        _add_text(answer, text)
    return answer.messages()


def _add_output(answer: Answer, item: dict[str, Any]) -> None:
    kind, call_id = item.get("type"), text_or_empty(item.get("call_id"))
    if kind == "message":
        answer.say(_joined(item.get("content")))
    elif kind == "function_call":
        answer.call(text_or_empty(item.get("name")), text_or_empty(item.get("arguments")), call_id)
    elif kind == "function_call_output":
        answer.result(_joined(item.get("output")), call_id)


def _joined(parts: Any) -> str:
    if not isinstance(parts, list):
        return text_or_empty(parts)
    return "\n".join(text_or_empty(part.get("text")) for part in parts if isinstance(part, dict))


def _add_text(answer: Answer, text: str) -> None:
    done = 0
    for found in _DETAILS.finditer(text):
        answer.say(text[done : found.start()].strip())
        done = found.end()
        if found[1] == "tool_calls":
            told = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(found[2])}
            if "name" in told:
                answer.call(told["name"], _unquoted(told.get("arguments", "")), told.get("id", ""))
                answer.result(_unquoted(told.get("result", "")), told.get("id", ""))
    answer.say(text[done:].strip())


def _unquoted(text: str) -> str:
    """The string in a JSON text, as these attributes have it; any other text as it is."""
    try:
        value = msgspec.json.decode(text)
    except UNREADABLE:
        return text
    return value if isinstance(value, str) else text
