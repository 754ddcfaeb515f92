"""Items of the responses API: parsing them into `Message`s and encoding `Message`s as items.

Rule: an item is translated into a chat message as llama.cpp does it, and that is parsed by `chat/message.py`: so it has
the digest of the same message sent through chat completions. Any JSON object becomes some message; only unreadable
bytes raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.normal_form import canonical_arguments
from memd.wire.chat.elements import joined_answer
from memd.wire.chat.message import parse_message
from memd.wire.lenient_json import UNREADABLE, is_list, is_object, is_string, lenient_text

_ASSISTANT = "assistant"
_WITHOUT_CONTENT = frozenset({"reasoning", "item_reference"})
"""Items that memd ignores: reasoning is never hashed or stored, and a reference cannot be looked up."""


class _ItemMembers(msgspec.Struct):
    """The members of an item that memd reads; an absent one is empty."""

    type: Raw = Raw()
    role: Raw = Raw()
    content: Raw = Raw()
    name: Raw = Raw()
    call_id: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()
    output: Raw = Raw()


class _ImagePart(msgspec.Struct):
    type: Any = None
    image_url: Any = None
    detail: Any = None


_item_decoder = msgspec.json.Decoder(_ItemMembers)
_items_decoder = msgspec.json.Decoder(list[Raw])
_image_decoder = msgspec.json.Decoder(_ImagePart)


def is_of_assistant(raw: Raw | bytes) -> bool:
    """Tell whether the item `raw` is part of an assistant message: its text, its calls, its reasoning.

    Raises:
        BadRequestBody: not a JSON object.
    """
    item, kind = _decoded(raw)
    if kind == "message":
        return lenient_text(item.role) == _ASSISTANT
    return not kind.endswith("_output")


def grouped(items: Iterable[Raw]) -> list[Raw]:
    """Join the items of each message, their JSON texts separated by commas: the assistant's between two others.

    Raises:
        BadRequestBody: one is not a JSON object.
    """
    groups: list[list[bytes]] = []
    follows_assistant = False
    for raw in items:
        of_assistant = is_of_assistant(raw)
        if of_assistant and follows_assistant:
            groups[-1].append(bytes(raw))
        else:
            groups.append([bytes(raw)])
        follows_assistant = of_assistant
    return [Raw(b",".join(group)) for group in groups]


def parse_items(raw: Raw | bytes) -> Message:
    """Parse the items of one message, `raw` being their JSON texts joined by commas, or the string of a user.

    Raises:
        BadRequestBody: not JSON objects, or text in them is not valid Unicode.
    """
    if is_string(raw):
        return parse_message(_encoded({"role": "user", "content": Raw(raw)}))
    try:
        items = _items_decoder.decode(b"[%b]" % bytes(raw))
    except UNREADABLE as error:
        raise BadRequestBody(f"an item cannot be read: {error}") from error
    return joined_answer([parse_item(item) for item in items])


def parse_item(raw: Raw | bytes) -> Message:
    """Parse one item into a message.

    Raises:
        BadRequestBody: not a JSON object, or text in it is not valid Unicode.
    """
    item, kind = _decoded(raw)
    try:
        return parse_message(_encoded(_as_chat(item, kind, bytes(raw))))
    except UNREADABLE as error:
        raise BadRequestBody(f"an item cannot be read: {error}") from error


def encode_items(message: Message) -> Raw:
    """Encode `message` as items, their JSON texts joined by commas, without attachments; the text has `[image]`."""
    return Raw(b",".join(_encoded(item) for item in _items_of(message)))


def block_item(text: str) -> Raw:
    """Encode a block as a developer message of its own."""
    return Raw(_encoded({"type": "message", "role": "developer", "content": text}))


def item_of_string(raw: Raw) -> Raw:
    """Return the item that an `input` of a single string stands for."""
    return Raw(_encoded({"type": "message", "role": "user", "content": raw}))


def _decoded(raw: Raw | bytes) -> tuple[_ItemMembers, str]:
    """Decode an item; return it and its type, which messages may leave out."""
    try:
        item = _item_decoder.decode(raw)
        return item, lenient_text(item.type) or "message"
    except UNREADABLE as error:
        raise BadRequestBody(f"an item cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def _as_chat(item: _ItemMembers, kind: str, encoded: bytes) -> dict[str, Any]:
    """Translate an item into a chat message."""
    if kind == "message":
        return {"role": _or_null(item.role), "content": _content(item.content), "name": _or_null(item.name)}
    if kind.endswith("_output"):
        return {"role": "tool", "content": _content(item.output), "tool_call_id": _or_null(item.call_id)}
    if kind in _WITHOUT_CONTENT:
        return {"role": _ASSISTANT}
    name = _or_null(item.name)
    if kind == "function_call":
        call: dict[str, Any] = {"function": {"name": name, "arguments": _or_null(item.arguments)}}
    elif kind == "custom_tool_call":
        call = {"custom": {"name": name, "input": _or_null(item.input)}}
    else:  # of a vendor's own tools: one part, whatever the order of its members
        return {"role": _ASSISTANT, "content": [Raw(canonical_arguments(encoded.decode()).encode())]}
    return {"role": _ASSISTANT, "tool_calls": [{"id": _or_null(item.call_id), **call}]}


def _content(raw: Raw) -> Any:
    """Translate a message's content: images as in chat completions."""
    if not is_list(raw):
        return _or_null(raw)
    return [_part(part) for part in _items_decoder.decode(raw)]


def _part(raw: Raw) -> Any:
    """Translate a content part; an image gets the digest that it has through chat completions from most clients."""
    if not is_object(raw):
        return raw
    image = _image_decoder.decode(raw)
    if image.type != "input_image" or not isinstance(image.image_url, str):
        return raw
    url: dict[str, Any] = {"url": image.image_url}
    if image.detail not in (None, "auto"):  # the default, which chat clients omit and responses clients must write
        url["detail"] = image.detail
    return {"type": "image_url", "image_url": url}


def _items_of(message: Message) -> Iterable[dict[str, Any]]:
    if message.role == "tool":
        yield {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.text}
        return
    if message.role != _ASSISTANT:
        yield {"type": "message", "role": message.role, "content": message.text}
        return
    if message.text or not message.tool_calls:
        part = {"type": "output_text", "text": message.text, "annotations": []}
        yield {"type": "message", "role": _ASSISTANT, "content": [part]}
    for call in message.tool_calls:
        yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _or_null(raw: Raw) -> Raw | None:
    return raw if bytes(raw) else None


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)
