"""One message of the chat-completions API: parsing and encoding it, and putting text in front of its content.

Rule: any JSON object becomes some `Message`, however odd its members; only unreadable JSON raises. `capture.py` makes
the same `Message` of a reply as this module of the client's echo of it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import DIGEST_BYTES, Message, ToolCall
from memd.wire.lenient_json import UNREADABLE, is_list, is_object, is_string, lenient_text

_WHITE_SPACE = b" \t\n\r"
_BLOCK_GAP = "\n\n"  # between a block and the content that it is merged into

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_UNHASHED_TYPES = frozenset({"reasoning", "thinking", "redacted_thinking"})
_IMAGE_TYPES = frozenset({"image_url", "image", "input_image"})
_AUDIO_TYPES = frozenset({"input_audio", "audio", "audio_url"})


class _MessageMembers(msgspec.Struct):
    """The members of a message that memd reads; an absent one is empty."""

    role: Raw = Raw()
    content: Raw = Raw()
    refusal: Raw = Raw()
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()
    tool_call_id: Raw = Raw()
    name: Raw = Raw()


class _ContentPart(msgspec.Struct):
    type: Raw = Raw()
    text: Raw = Raw()
    refusal: Raw = Raw()


class _CallMembers(msgspec.Struct):
    id: Raw = Raw()
    function: Raw = Raw()
    custom: Raw = Raw()


class _FunctionMembers(msgspec.Struct):
    name: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()


_members_decoder = msgspec.json.Decoder(_MessageMembers)
_part_decoder = msgspec.json.Decoder(_ContentPart)
_call_decoder = msgspec.json.Decoder(_CallMembers)
_function_decoder = msgspec.json.Decoder(_FunctionMembers)
_list_decoder = msgspec.json.Decoder(list[Raw])
_object_decoder = msgspec.json.Decoder(dict[str, Raw])


def parse_message(raw: Raw | bytes) -> Message:
    """Parse the JSON object `raw` into a message without reasoning.

    Raises:
        BadRequestBody: not a JSON object, or text in it is not valid Unicode (llama.cpp refuses such a body too).
    """
    try:
        members = _members_decoder.decode(raw)
        text, attachments = _content(bytes(members.content))
        return Message(
            role=lenient_text(members.role),
            text=joined_text(text, lenient_text(members.refusal)),
            tool_calls=_tool_calls(members),
            tool_call_id=lenient_text(members.tool_call_id),
            name=lenient_text(members.name),
            attachments=attachments,
        )
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def joined_text(content: str, refusal: str) -> str:
    """Join the content of a message and its refusal to its text."""
    return "\n".join(text for text in (content, refusal) if text)


def encode_message(message: Message) -> bytes:
    """Encode `message` as a JSON object, without its attachments; the text has `[image]` for each."""
    members: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        members["content"] = message.text or None
        members["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        members["tool_call_id"] = message.tool_call_id
    if message.name:
        members["name"] = message.name
    return msgspec.json.encode(members)


def with_text_in_front(raw: Raw | bytes, text: str, *, part_type: str = "text") -> Raw:
    """Put `text` and an empty line in front of the content of the message `raw`; all else keeps its bytes and order.

    String content is lengthened, a list of parts gets a first part of `part_type`, null or absent content becomes
    `text`. Content of another type, which no upstream accepts, stays as it is.
    """
    members = _object_decoder.decode(raw)
    content = bytes(members.get("content", b"null"))
    if is_string(content):
        opened = msgspec.json.encode(text + _BLOCK_GAP)
        members["content"] = Raw(opened[:-1] + content[1:])
    elif is_list(content):
        part = msgspec.json.encode({"type": part_type, "text": text + _BLOCK_GAP})
        comma = b"" if content[1:].lstrip(_WHITE_SPACE).startswith(b"]") else b","
        members["content"] = Raw(b"[" + part + comma + content[1:])
    elif content == b"null":
        members["content"] = Raw(msgspec.json.encode(text))
    return Raw(msgspec.json.encode(members))


def with_content(raw: Raw | bytes, text: str, member: str = "content") -> Raw:
    """Put `text` in place of the content (or another `member`) of the message `raw`; all else keeps its bytes."""
    return Raw(msgspec.json.encode(_object_decoder.decode(raw) | {member: text}))


def _content(content: bytes) -> tuple[str, tuple[bytes, ...]]:
    """Return the text of a message's content and the digests of its parts that are not text."""
    if not is_list(content):
        return lenient_text(Raw(content)), ()
    texts: list[str] = []
    attachments: list[bytes] = []
    for raw in _list_decoder.decode(content):
        text, digest = _part(raw)
        if digest is not None:
            attachments.append(digest)
        if text is not None:
            texts.append(text)
    return "\n".join(texts), tuple(attachments)


def _part(raw: Raw) -> tuple[str | None, bytes | None]:
    """Return a content part's text (None: it does not count) and, unless it is text, its digest."""
    encoded = bytes(raw)
    if is_string(encoded):
        return lenient_text(raw), None
    kind = ""
    if is_object(encoded):
        part = _part_decoder.decode(encoded)
        kind = lenient_text(part.type)
        if kind in _TEXT_TYPES or (not kind and bytes(part.text)):
            return lenient_text(part.text), None
        if kind == "refusal":
            return lenient_text(part.refusal), None
        if kind in _UNHASHED_TYPES:
            return None, None
    label = "[image]" if kind in _IMAGE_TYPES else "[audio]" if kind in _AUDIO_TYPES else "[file]"
    return label, hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _tool_calls(members: _MessageMembers) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    if is_list(members.tool_calls):
        calls += [_tool_call(bytes(raw)) for raw in _list_decoder.decode(members.tool_calls)]
    if is_object(members.function_call):
        calls.append(_function("", bytes(members.function_call)))
    return tuple(calls)


def _tool_call(encoded: bytes) -> ToolCall:
    if not is_object(encoded):
        return ToolCall(id="", name="", arguments=encoded.decode())
    call = _call_decoder.decode(encoded)
    return _function(lenient_text(call.id), bytes(call.function) or bytes(call.custom))


def _function(call_id: str, encoded: bytes) -> ToolCall:
    if not is_object(encoded):
        return ToolCall(id=call_id, name="", arguments=encoded.decode())
    function = _function_decoder.decode(encoded)
    arguments = function.arguments if bytes(function.arguments) else function.input
    return ToolCall(id=call_id, name=lenient_text(function.name), arguments=lenient_text(arguments))
