"""Messages of Anthropic's API: splitting an element into pieces, parsing a piece, and joining pieces again.

Rule: a message is translated into a chat message as llama.cpp does it, so that a conversation has the same digests
through every API. A piece has the blocks of one `Message`; joining all pieces of an element gives that element, block
by block.

    element  {"role": "user", "content": [tool_result a, tool_result b, text, image]}
    pieces        tool: [tool_result a]    tool: [tool_result b]    user: [text, image]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.wire.chat import message
from memd.wire.chat.message import with_content, with_text_in_front
from memd.wire.lenient_json import UNREADABLE, decode_or_none, is_list, is_object

_PLACES = "memd_places"  # member of a piece: the places of its blocks in the element; never forwarded
_TOOL_RESULT = b'"tool_result"'
_UNHASHED_TYPES = frozenset({b'"thinking"', b'"redacted_thinking"'})


class _ContentBlock(msgspec.Struct):
    """The members of a content block that memd reads; an absent one is empty."""

    type: Raw = Raw()
    text: Raw = Raw()
    source: Raw = Raw()
    id: Raw = Raw()
    name: Raw = Raw()
    input: Raw = Raw()
    tool_use_id: Raw = Raw()
    content: Raw = Raw()


class _ImageSource(msgspec.Struct):
    type: str
    media_type: str = "image/jpeg"  # as in llama.cpp
    data: str = ""
    url: str = ""


_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_list_decoder = msgspec.json.Decoder(list[Raw])
_places_decoder = msgspec.json.Decoder(list[int])
_block_decoder = msgspec.json.Decoder(_ContentBlock)
_source_decoder = msgspec.json.Decoder(_ImageSource)


def parse_message(raw: Raw | bytes) -> Message:
    """Parse one piece into a message without reasoning.

    Raises:
        BadRequestBody: not a JSON object, or text in it is not valid Unicode.
    """
    try:
        members = _object_decoder.decode(raw)
        if not is_list(members.get("content", Raw())):
            return message.parse_message(raw)
        translated = _translated(members.get("role"), _list_decoder.decode(members["content"]))
        return message.parse_message(msgspec.json.encode(translated))
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def pieces_of(element: Raw) -> list[Raw]:
    """Split a user message into its tool results, one by one, and the rest; any other message stays whole.

    Raises:
        BadRequestBody: it is unreadable.
    """
    if _TOOL_RESULT not in bytes(element):
        return [element]
    try:
        members = _object_decoder.decode(element)
        if bytes(members.get("role", b"")) != b'"user"' or not is_list(members.get("content", Raw())):
            return [element]
        blocks = _list_decoder.decode(members["content"])
        results = [place for place, block in enumerate(blocks) if bytes(_block(block).type) == _TOOL_RESULT]
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}") from error
    others = sorted(set(range(len(blocks))).difference(results))
    runs = [[place] for place in results] + ([others] if others else [])
    if len(runs) < 2:
        return [element]
    return [
        Raw(msgspec.json.encode({**members, "content": [blocks[place] for place in run], _PLACES: run})) for run in runs
    ]


def joined(pieces: Sequence[Raw], texts: Sequence[str]) -> Raw:
    """Join the pieces of one element that are to be shown.

    Args:
        texts: the text to put in front of each piece's blocks; empty for none.
    """
    placed: list[tuple[int, Raw]] = []
    element: dict[str, Raw] = {}
    for piece, text in zip(pieces, texts, strict=True):
        members = _object_decoder.decode(with_text_in_front(piece, text) if text else piece)
        blocks = _list_decoder.decode(members["content"])
        known = members.pop(_PLACES, None)
        places = list(range(len(placed), len(placed) + len(blocks))) if known is None else _places_decoder.decode(known)
        places = places[:1] * (len(blocks) - len(places)) + places  # for a block added in front
        placed += zip(places, blocks, strict=True)
        element = element or members
    placed.sort(key=lambda block: block[0])
    element["content"] = Raw(msgspec.json.encode([block for _, block in placed]))
    return Raw(msgspec.json.encode(element))


def with_result(piece: Raw, text: str) -> Raw:
    """Put `text` in place of the content of the tool result that a piece consists of."""
    members = _object_decoder.decode(piece)
    blocks = [with_content(block, text) for block in _list_decoder.decode(members["content"])]
    return Raw(msgspec.json.encode(members | {"content": blocks}))


def encode_message(message: Message) -> Raw:
    """Encode `message` as an element of its own, without attachments; the text has `[image]` for each."""
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.text}
        return Raw(msgspec.json.encode({"role": "user", "content": [result]}))
    content: str | list[dict[str, Any]] = message.text
    if message.tool_calls:
        content = [{"type": "text", "text": message.text}] if message.text else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in message.tool_calls
        ]
    return Raw(msgspec.json.encode({"role": message.role, "content": content}))


def _block(raw: Raw) -> _ContentBlock:
    """Decode a content block; one that is no object has no members."""
    return _block_decoder.decode(raw) if is_object(raw) else _ContentBlock()


def _input(arguments: str) -> Raw:
    """Return arguments as the object that `input` must be; other text, which a model may write, as a member of one."""
    try:
        _object_decoder.decode(arguments.strip() or "{}")
    except UNREADABLE:
        return Raw(msgspec.json.encode({"arguments": arguments}))
    return Raw((arguments.strip() or "{}").encode())


def _translated(role: Raw | None, blocks: list[Raw]) -> dict[str, Any]:
    """Translate a piece into a chat message."""
    message: dict[str, Any] = {"role": role if role is not None else "", "content": []}
    calls: list[Any] = []
    for raw in blocks:
        block = _block(raw)
        kind = bytes(block.type)
        if kind == _TOOL_RESULT:
            return {"role": "tool", **_present(tool_call_id=block.tool_use_id, content=_result(block.content))}
        if kind == b'"tool_use"':
            function = _present(name=block.name, arguments=block.input)
            calls.append({**_present(id=block.id), "function": function})
        elif kind not in _UNHASHED_TYPES:
            message["content"].append(_part(raw, block))
    return {**message, "tool_calls": calls}


def _result(content: Raw) -> Any:
    """Translate a tool's result into the content of a chat message."""
    return [_part(raw, _block(raw)) for raw in _list_decoder.decode(content)] if is_list(content) else content


def _part(raw: Raw, block: _ContentBlock) -> Any:
    """Translate a block into a content part, without `cache_control`, which clients move from turn to turn."""
    kind = bytes(block.type)
    if kind == b'"text"':
        return {"type": "text", **_present(text=block.text)}
    if kind == b'"image"' and (url := _image_url(block.source)):
        return {"type": "image_url", "image_url": {"url": url}}
    if not kind:
        return raw
    members = _object_decoder.decode(raw)
    members.pop("cache_control", None)
    return members


def _image_url(source: Raw) -> str:
    """Return the URL of an image as in the chat API; empty for an unknown kind of source."""
    image = decode_or_none(_source_decoder, source)
    if image is None:
        return ""
    return f"data:{image.media_type};base64,{image.data}" if image.type == "base64" else image.url


def _present(**members: Any) -> dict[str, Any]:
    """Leave out the members that are absent in the original: their empty bytes are no JSON."""
    return {name: value for name, value in members.items() if not isinstance(value, Raw) or bytes(value)}
