"""Claude's export: `conversations.json`, an array (or JSON Lines) of conversations.

    {"uuid", "name", "created_at", "chat_messages": [{"uuid", "sender": "human" or "assistant", "created_at", "text",
     "content": [{"type": "text", "text"}, {"type": "tool_use", "name", "input"}, {"type": "tool_result", "content"}],
     "attachments": [{"file_name"}], "files": [{"file_name"}], "parent_message_uuid"}]}

The shape is not documented by Anthropic; it is as portable-ai-memory.org/providers/anthropic and
whychose.com/seo/claude-conversation-export-format describe it. Where messages name their parents (an unused one is
00000000-0000-4000-8000-000000000000) they are a tree, whose shown branch ends at `current_leaf_message_uuid`.

Rule: pure. Thoughts are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Answer, Node, Thread, named, said, thread_of, with_attachments
from memd.messages import Message
from memd.wire.lenient_json import UNREADABLE, text_or_empty


class _ClaudeMessage(msgspec.Struct):
    uuid: str = ""
    sender: str = ""
    text: Any = None
    content: list[Any] | None = None
    created_at: Any = None
    attachments: list[Any] | None = None
    files: list[Any] | None = None
    parent_message_uuid: str | None = None


class _ClaudeConversation(msgspec.Struct):
    chat_messages: list[Raw]
    uuid: Any = None
    created_at: Any = None
    current_leaf_message_uuid: Any = None


_decoder = msgspec.json.Decoder(_ClaudeConversation)
_message_decoder = msgspec.json.Decoder(_ClaudeMessage)


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a conversation of Claude."""
    return "chat_messages" in members


def thread(item: bytes, dating: Dating) -> Thread:
    """Read a conversation.

    Raises:
        BadImport, UNREADABLE: it is none, or has no text.
    """
    decoded = _decoder.decode(item)
    nodes, problems = [], []
    before = None
    for place, raw in enumerate(decoded.chat_messages, 1):
        try:
            message = _message_decoder.decode(raw)
        except UNREADABLE as error:
            problems.append(f"message {place:,} cannot be read: {error}")
            continue
        own_id = message.uuid or str(place)
        parent = before if message.parent_message_uuid is None else message.parent_message_uuid
        nodes.append(Node(own_id, parent, _messages(message, dating)))
        before = own_id
    leaf = text_or_empty(decoded.current_leaf_message_uuid) or None
    begun = dating.first_time([decoded.created_at])
    return thread_of("claude", text_or_empty(decoded.uuid), nodes, leaf, begun=begun, problems=problems)


def _messages(message: _ClaudeMessage, dating: Dating) -> list[Message]:
    at = dating.first_time([message.created_at])
    attached = [
        named("file", one.get("file_name"))
        for one in [*(message.attachments or ()), *(message.files or ())]
        if isinstance(one, dict)
    ]
    blocks = [block for block in message.content or () if isinstance(block, dict)]
    if message.sender != "assistant":
        texts = [text_or_empty(block.get("text")) for block in blocks if block.get("type") == "text"]
        text = "\n".join(text for text in texts if text) or text_or_empty(message.text)
        return said("user", with_attachments(text, dict.fromkeys(attached)), at)
    answer = Answer(at)
    for block in blocks:
        _add(answer, block)
    return answer.messages() or said("assistant", text_or_empty(message.text), at)


def _add(answer: Answer, block: dict[str, Any]) -> None:
    kind, call_id = block.get("type"), text_or_empty(block.get("id"))
    if kind == "text":
        answer.say(text_or_empty(block.get("text")))
    elif kind == "tool_use":
        answer.call(text_or_empty(block.get("name")), msgspec.json.encode(block.get("input")).decode(), call_id)
    elif kind == "tool_result":
        content = block.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [text_or_empty(part.get("text")) or named("file") for part in parts if isinstance(part, dict)]
        answer.result("\n".join(texts), text_or_empty(block.get("tool_use_id")), text_or_empty(block.get("name")))
