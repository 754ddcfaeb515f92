"""OpenAI's Responses, `POST /v1/responses`: requests to messages and back, and replies.

Rule: an item is translated into a chat message as in llama.cpp and parsed by `wire/chat.py`, so that it has the same
digest as through chat completions. Any JSON object becomes some message; only unreadable bytes raise.

Consecutive items of the assistant (reasoning, text, calls) are one message, as in llama.cpp; its element of
`raw_messages` is their JSON texts joined by commas. An `input` that is a string is the only element, and stays a string
until a block must be placed beside it. A reply's item is taken from its `done` event; its deltas count only if that
event is missing because the stream broke off. Servers identify an item by its place, its id or, in llama.cpp, only by
its call's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message, ToolCall, canonical_arguments
from memd.wire.api import Api, MessageCache, ModelRequest, objects_in, top_level
from memd.wire.chat import content_of, parsed_or_none, with_text_in_front
from memd.wire.lenient_json import (
    LIST,
    UNREADABLE,
    decode_or_none,
    is_list,
    is_object,
    is_string,
    lenient_text,
    text_or_empty,
)
from memd.wire.reply import CAPTURE_BYTES_MAX, Capture, ReplyPart, SseEvent, error_text, joined_answer, usage_of

_ASSISTANT = "assistant"
_WITHOUT_CONTENT = frozenset({"reasoning", "item_reference"})
"""Ignored items: reasoning is never hashed or stored, and a reference cannot be looked up."""


class _ItemMembers(msgspec.Struct, frozen=True):
    """The members of an item that memd reads; absent ones are empty."""

    type: Raw = Raw()
    role: Raw = Raw()
    content: Raw = Raw()
    name: Raw = Raw()
    call_id: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()
    output: Raw = Raw()


class _ImagePart(msgspec.Struct, frozen=True):
    type: Any = None
    image_url: Any = None
    detail: Any = None


_item_decoder = msgspec.json.Decoder(_ItemMembers)
_image_decoder = msgspec.json.Decoder(_ImagePart)


def grouped(items: Iterable[Raw]) -> list[Raw]:
    """Join consecutive items of the assistant, their JSON texts separated by commas; others stay alone. Raises
    BadRequestBody: one is not a JSON object."""
    groups: list[list[bytes]] = []
    follows_assistant = False
    for raw in items:
        item, kind = _decoded(raw)  # an answer's text, its calls, its reasoning
        of_assistant = lenient_text(item.role) == _ASSISTANT if kind == "message" else not kind.endswith("_output")
        if of_assistant and follows_assistant:
            groups[-1].append(bytes(raw))
        else:
            groups.append([bytes(raw)])
        follows_assistant = of_assistant
    return [Raw(b",".join(group)) for group in groups]


def parse_items(raw: Raw | bytes) -> Message:
    """Parse the items of one message; `raw` is their JSON texts joined by commas, or a user's string. Raises
    BadRequestBody: not JSON objects, or not valid Unicode."""
    if is_string(raw):
        return parse_item(_items(Raw(raw)))
    try:
        items = LIST.decode(b"[%b]" % bytes(raw))
    except UNREADABLE as error:
        raise BadRequestBody(f"an item cannot be read: {error}") from error
    return joined_answer([parse_item(item) for item in items])


def parse_item(raw: Raw | bytes) -> Message:
    """Parse one item into a message. Raises BadRequestBody: not a JSON object, or not valid Unicode."""
    item, kind = _decoded(raw)
    try:
        return _translated(item, kind, bytes(raw))
    except UNREADABLE as error:
        raise BadRequestBody(f"an item cannot be read: {error}") from error


def _items(raw: Raw) -> Raw:
    """Return the items of a message, with an `input` string made into an item."""
    return Raw(msgspec.json.encode({"type": "message", "role": "user", "content": raw})) if is_string(raw) else raw


def _decoded(raw: Raw | bytes) -> tuple[_ItemMembers, str]:
    """Decode an item; return it and its type, which messages may omit."""
    try:
        item = _item_decoder.decode(raw)
        return item, lenient_text(item.type) or "message"
    except UNREADABLE as error:
        raise BadRequestBody(f"an item cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def _translated(item: _ItemMembers, kind: str, encoded: bytes) -> Message:
    name, call_id = lenient_text(item.name), lenient_text(item.call_id)
    if kind == "message":
        text, attachments = _content(item.content)
        return Message(lenient_text(item.role), text, name=name, attachments=attachments)
    if kind.endswith("_output"):
        text, attachments = _content(item.output)
        return Message("tool", text, tool_call_id=call_id, attachments=attachments)
    if kind in _WITHOUT_CONTENT:
        return Message(_ASSISTANT, "")
    if kind in ("function_call", "custom_tool_call"):
        said = item.arguments if kind == "function_call" else item.input
        return Message(_ASSISTANT, "", (ToolCall(call_id, name, lenient_text(said)),))
    # A vendor's own tools: one part, regardless of the order of its members.
    text, attachments = content_of([Raw(canonical_arguments(encoded.decode()).encode())])
    return Message(_ASSISTANT, text, attachments=attachments)


def _content(raw: Raw) -> tuple[str, tuple[bytes, ...]]:
    """Return the text of a message's content and the digests of the rest, images as in chat completions."""
    return content_of(map(_part, LIST.decode(raw))) if is_list(raw) else (lenient_text(raw), ())


def _part(raw: Raw) -> Raw:
    """Translate a content part; an image gets the digest that it has in chat completions of most clients."""
    image = _image_decoder.decode(raw) if is_object(raw) else _ImagePart()
    if image.type != "input_image" or not isinstance(image.image_url, str):
        return raw
    url: dict[str, Any] = {"url": image.image_url}
    if image.detail not in (None, "auto"):  # the default: chat clients omit it, responses clients must write it
        url["detail"] = image.detail
    return Raw(msgspec.json.encode({"type": "image_url", "image_url": url}))


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


CONCLUSIONS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Types of events that end a stream and contain the whole response."""

_DELTAS = frozenset(
    f"response.{what}.delta" for what in ("output_text", "refusal", "function_call_arguments", "custom_tool_call_input")
)


class _ResponsesEvent(msgspec.Struct, frozen=True):
    """The members of an event that memd reads."""

    type: Any = None
    delta: Any = None
    item: Raw = Raw()
    item_id: Any = None
    output_index: Any = None
    response: Raw = Raw()
    error: Any = None
    message: Any = None


class _ItemHead(msgspec.Struct, frozen=True):
    type: Any = None
    id: Any = None
    call_id: Any = None
    name: Any = None


class _Response(msgspec.Struct, frozen=True):
    status: Any = None
    output: Raw = Raw()
    usage: Any = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(_ResponsesEvent)
_item_head_decoder = msgspec.json.Decoder(_ItemHead)
_response_decoder = msgspec.json.Decoder(_Response)


class ResponsesCapture(Capture):
    """Captures the reply in one stream; a reply that reached its token limit is finished too."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        super().__init__(bytes_max)
        self._last: ReplyPart | None = None

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in the event that ends the stream, which clients keep."""
        decoded = decode_or_none(_event_decoder, event.data)
        if decoded is None:
            return False
        kind = text_or_empty(decoded.type)
        if kind == "error" or event.name == b"error":
            self.error = self.error or error_text(decoded.error or decoded.message or "error")
        elif kind in CONCLUSIONS:
            response = decode_or_none(_response_decoder, decoded.response) or _Response()
            self._conclude(response, kind.rpartition(".")[2])  # `completed`, `incomplete` or `failed`
        elif kind == "response.output_item.added":
            self._open(decoded)
        elif kind == "response.output_item.done":
            self._close(self._open(decoded), decoded.item)
        elif isinstance(decoded.delta, str):
            key = _key(decoded.output_index, decoded.item_id)
            item = self._last if key is None else self._parts.get(key)
            if kind in _DELTAS and item is not None and item.whole is None:
                self._append(item.text, decoded.delta)
        else:
            self.error = self.error or error_text(decoded.error)
        return kind in CONCLUSIONS

    def _open(self, event: _ResponsesEvent) -> ReplyPart | None:
        """Return the item of an event, creating it if unknown; None if the limit is reached."""
        head = decode_or_none(_item_head_decoder, event.item)
        if head is None:
            return None
        key = _key(event.output_index, event.item_id, head.id, head.call_id)
        is_call = text_or_empty(head.type).endswith("_call")
        item = self._part(len(self._parts) if key is None else key, is_call=is_call)
        if item is not None:
            self._last = item
            self._name(item, text_or_empty(head.call_id), text_or_empty(head.name))
        return item

    def _close(self, item: ReplyPart | None, raw: Raw) -> None:
        """Replace an item's deltas by the complete item, if the limit allows it."""
        message = parsed_or_none(raw, parse_item)
        if item is None or message is None or item.whole is not None:
            return
        size = len(message.text.encode()) + sum(len(call.arguments.encode()) for call in message.tool_calls)
        if not self.truncated and self._spend(size - len(item.text)):
            item.whole = message
            item.text.clear()

    def take_whole(self, body: bytes) -> None:
        """See `Capture.take_whole`."""
        if (response := decode_or_none(_response_decoder, body)) is not None:
            self._conclude(response, text_or_empty(response.status))

    def _conclude(self, response: _Response, status: str) -> None:
        """Take a whole response; its items only if none came separately."""
        self.finish_reason = status or None
        self.usage = usage_of(response.usage, "input_tokens", "output_tokens") or self.usage
        failure = "the response failed" if status == "failed" else None  # a failed one always has an error
        self.error = self.error or error_text(response.error) or failure
        output = [] if self._parts else decode_or_none(LIST, response.output) or []
        for place, raw in enumerate(output):
            self._close(self._open(_ResponsesEvent(item=raw, output_index=place)), raw)


def _key(output_index: Any, *ids: Any) -> int | str | None:
    """Return the key of an item within a stream: its place, else its first id."""
    if isinstance(output_index, int):
        return output_index
    return next((one for one in ids if isinstance(one, str) and one), None)


_HELD_ELSEWHERE = ("previous_response_id", "conversation")
"""Members that refer to a conversation stored by the upstream, so that `input` is only a part of it."""


class ResponsesApi(Api):
    """OpenAI's responses; see `Api`."""

    name = "responses"
    path = "/responses"
    count_path = "/v1/responses/input_tokens"
    list_name = "input"
    result_member = "output"
    bounds = ("max_output_tokens",)
    standing = ("instructions", "tools")
    instructions = "instructions"
    parse_one = staticmethod(parse_items)
    capture = ResponsesCapture

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object whose `input` is a string or a list of objects."""
        members = top_level(body)
        is_text = is_string(members.get("input", Raw()))
        names = (name for name in _HELD_ELSEWHERE if bytes(members.get(name, b"null")) not in (b"null", b'""'))
        goes_on_with = next((f"{name} {bytes(members[name]).decode(errors='replace')}" for name in names), "")
        raw_messages = [members["input"]] if is_text else grouped(objects_in(members, "input"))
        return self.request(body, members, raw_messages, cache, goes_on_with=goes_on_with)

    def elements(
        self, request: ModelRequest, left_out: frozenset[int], replaced: Mapping[int, str], blocks: Mapping[int, str]
    ) -> list[Raw]:
        """See `Api.elements`; an `input` string stays one if nothing stands beside it."""
        raws = request.raw_messages
        if len(raws) == 1 and is_string(raws[0]) and not left_out and not blocks:
            return raws
        raws = list(map(_items, raws))  # a string may follow turns that memd has added
        return super().elements(msgspec.structs.replace(request, raw_messages=raws), left_out, replaced, blocks)

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`: as items, their JSON texts joined by commas."""
        return Raw(b",".join(msgspec.json.encode(item) for item in _items_of(message)))

    def in_front(self, raw: Raw, text: str) -> Raw:
        """See `Api.in_front`."""
        return with_text_in_front(_items(raw), text, part_type="input_text")


RESPONSES = ResponsesApi()
