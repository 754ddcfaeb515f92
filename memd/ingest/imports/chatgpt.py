"""ChatGPT's export: `conversations.json`, an array of conversations, each a tree.

    {"conversation_id", "title", "create_time", "current_node",
     "mapping": {ID: {"parent": ID, "message": {"author": {"role", "name"}, "create_time", "recipient",
                 "content": {"content_type", "parts" or "text"}, "metadata"}}}}

The shape is not documented by OpenAI; it is as LibreChat's importer (api/server/utils/import/importers.js and the files
in __data__, among them chatgpt-modern-export.json) and Open WebUI's (`convertOpenAIMessages` in src/lib/utils/index.ts)
read it, and as mitkury/chatgpt-export-parser describes it. A large account gets several files
(`conversations-000.json`).

Rule: pure. Thoughts, hidden messages and the marks of citations are left out; words for a tool are a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Node, Thread, named, thread_of, with_attachments
from memd.messages import Message, ToolCall
from memd.wire.lenient_json import UNREADABLE, text_or_empty

_THOUGHTS = frozenset({"thoughts", "reasoning_recap", "user_editable_context", "model_editable_context"})
_CITATIONS = re.compile("\ue200[^\ue201]{0,400}\ue201|【\\d+[†:][^】]{0,200}】")
_KINDS = {"image_asset_pointer": "image", "audio_asset_pointer": "audio"}


class _GptContent(msgspec.Struct):
    content_type: str = "text"
    parts: list[Any] | None = None
    text: Any = None
    result: Any = None
    name: Any = None


class _GptAuthor(msgspec.Struct):
    role: str = ""
    name: Any = None


class _GptMessage(msgspec.Struct):
    author: _GptAuthor
    content: _GptContent
    create_time: Any = None
    recipient: Any = None
    metadata: dict[str, Any] | None = None


class _GptNode(msgspec.Struct):
    parent: str | None = None
    message: Raw = Raw(b"null")


class _GptConversation(msgspec.Struct):
    mapping: dict[str, Raw]
    id: Any = None
    conversation_id: Any = None
    create_time: Any = None
    current_node: Any = None


_decoder = msgspec.json.Decoder(_GptConversation)
_node_decoder = msgspec.json.Decoder(_GptNode)
_message_decoder = msgspec.json.Decoder(_GptMessage | None)


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a conversation of ChatGPT."""
    return "mapping" in members or {"title", "create_time", "default_model_slug"} <= members.keys()


def thread(item: bytes, dating: Dating) -> Thread:
    """Read a conversation.

    Raises:
        BadImport, UNREADABLE: it is none, or has no text.
    """
    decoded = _decoder.decode(item)
    nodes, problems = [], []
    for name, raw in decoded.mapping.items():
        parent = None
        messages: list[Message] = []
        try:
            node = _node_decoder.decode(raw)
            parent = node.parent
            messages = _messages(_message_decoder.decode(node.message), dating)
        except UNREADABLE as error:
            problems.append(f"message {name[:60]!r} cannot be read: {error}")
        nodes.append(Node(name, parent, messages))
    own_id = text_or_empty(decoded.conversation_id) or text_or_empty(decoded.id)
    leaf = text_or_empty(decoded.current_node) or None
    begun = dating.first_time([decoded.create_time])
    return thread_of("chatgpt", own_id, nodes, leaf, begun=begun, problems=problems)


def _messages(message: _GptMessage | None, dating: Dating) -> list[Message]:
    if message is None or message.author.role == "system" or message.content.content_type in _THOUGHTS:
        return []
    metadata = message.metadata or {}
    if metadata.get("is_visually_hidden_from_conversation"):
        return []
    files = metadata.get("attachments")
    attached = (
        [named("file", one.get("name")) for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    )
    text = with_attachments(_text(message.content), attached).strip()
    if not text:
        return []
    at = dating.first_time([message.create_time])
    role, recipient = message.author.role, text_or_empty(message.recipient)
    said_at = UNSET if at is None else at
    if role == "assistant" and recipient not in ("", "all"):
        return [Message(role, "", (ToolCall("", recipient, text),), said_at=said_at)]
    name = text_or_empty(message.author.name) if role == "tool" else ""
    return [Message(role, text, name=name, said_at=said_at)]


def _text(content: _GptContent) -> str:
    if content.parts is None:
        return text_or_empty(content.text) or text_or_empty(content.result)
    return _CITATIONS.sub("", "\n".join(part for part in map(_part, content.parts) if part))


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return text_or_empty(part)
    if text := text_or_empty(part.get("text")):  # what was spoken, written down
        return text
    return named(_KINDS.get(text_or_empty(part.get("content_type")), "file"))
