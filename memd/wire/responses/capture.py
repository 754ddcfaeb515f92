"""The model's reply in the responses API, read on the side of the answer that the client gets.

Rule: as in `capture.py`. An item is read from what it is when it is done; what its deltas said counts only if it never
is: then the stream broke off. Servers name an item by its place, its id or, in llama.cpp, its call's id alone.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message, ToolCall
from memd.wire.capture import CAPTURE_BYTES_MAX, Reply, Room, Usage, count_of, error_text
from memd.wire.chat.message import UNREADABLE, joined_text
from memd.wire.responses.items import merged, parse_item
from memd.wire.sse import EVENT_BYTES_MAX, SseEvent, SseParser

CONCLUSIONS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""The types of the event that ends a stream and holds the whole response."""

_TEXT_DELTAS = frozenset(
    f"response.{what}.delta" for what in ("output_text", "function_call_arguments", "custom_tool_call_input")
)
_ITEM_BYTES = 256  # charged per item, so that a stream of empty ones is bounded too


class _Event(msgspec.Struct):
    """The members of an event that memd reads."""

    type: Any = None
    delta: Any = None
    item: Raw = Raw()
    item_id: Any = None
    output_index: Any = None
    response: Raw = Raw()
    error: Any = None
    message: Any = None


class _Item(msgspec.Struct):
    type: Any = None
    id: Any = None
    call_id: Any = None
    name: Any = None


class _Response(msgspec.Struct):
    status: Any = None
    output: Raw = Raw()
    usage: Any = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(_Event)
_item_decoder = msgspec.json.Decoder(_Item)
_response_decoder = msgspec.json.Decoder(_Response)
_items_decoder = msgspec.json.Decoder(list[Raw])


class _Growing:
    """An item that is not done yet, or the message that it became."""

    def __init__(self) -> None:
        self.calls = False
        self.call_id = ""
        self.name = ""
        self.text = bytearray()
        """What is said, or the arguments of the call."""
        self.refusal = bytearray()
        self.done: Message | None = None

    def message(self) -> Message:
        """The item so far."""
        if self.done is not None:
            return self.done
        text = self.text.decode()
        if self.calls:
            return Message("assistant", "", (ToolCall(self.call_id, self.name, text),))
        return Message("assistant", joined_text(text, self.refusal.decode()))


class ResponsesCapture:
    """Assembles the reply out of a stream of events, fed in any pieces."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.usage: Usage | None = None
        self.status: str | None = None
        """Of the whole response, once it has come to its end: `completed`, `incomplete`, `failed`."""
        self.error: str | None = None
        self.truncated = False
        self._parser = SseParser(event_bytes_max)
        self._room = Room(bytes_max)
        self._items: dict[int | str, _Growing] = {}
        self._last: _Growing | None = None

    @property
    def finished(self) -> bool:
        """The reply came to its end, be it that of its bound."""
        return self.error is None and self.status is not None

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of the stream."""
        for event in self._parser.feed(data):
            self._take_event(event)
        self.truncated = self._room.exceeded or self._parser.skipped > 0

    def reply(self, interrupted: bool = False) -> Reply:
        """All that is known so far."""
        return Reply(self._message(interrupted), self.usage, self.status, self.error)

    def _message(self, interrupted: bool) -> Message | None:
        messages = [item.message() for item in self._items.values()]
        if not messages:
            return None
        message = merged(messages)
        if not (message.text or message.tool_calls or self.finished):
            return None
        return msgspec.structs.replace(message, role="assistant", interrupted=interrupted)

    def _take_event(self, sse: SseEvent) -> None:
        try:
            event = _event_decoder.decode(sse.data)
        except UNREADABLE:
            return
        kind = _text(event.type)
        if kind == "error" or sse.name == b"error":
            self.error = self.error or error_text(event.error or event.message or "error")
        elif kind in CONCLUSIONS:
            self._conclude(event)
        elif kind == "response.output_item.added":
            self._open(event)
        elif kind == "response.output_item.done":
            self._close(self._open(event), event.item)
        elif isinstance(event.delta, str):
            self._lengthen(event)
        else:
            self.error = self.error or error_text(event.error)

    def _open(self, event: _Event) -> _Growing | None:
        """The item that an event is about, new if it was not known; None beyond the bound on what is kept."""
        try:
            head = _item_decoder.decode(event.item)
        except UNREADABLE:
            return None
        key = _key(event.output_index, event.item_id, head.id, head.call_id)
        if key is None:
            key = len(self._items)
        item = self._items.get(key)
        if item is None:
            if not self._room.take(_ITEM_BYTES):
                return None
            item = self._items[key] = _Growing()
            item.calls = _text(head.type).endswith("_call")
            item.call_id = self._room.cut(_text(head.call_id)).decode()
            item.name = self._room.cut(_text(head.name)).decode()
        self._last = item
        return item

    def _lengthen(self, event: _Event) -> None:
        key = _key(event.output_index, event.item_id)
        item = self._last if key is None else self._items.get(key)
        if item is None or item.done is not None:
            return
        if event.type in _TEXT_DELTAS:
            item.text += self._room.cut(event.delta)
        elif event.type == "response.refusal.delta":
            item.refusal += self._room.cut(event.delta)

    def _close(self, item: _Growing | None, raw: Raw) -> None:
        """Keep what the item is instead of what was said of it, if there is room."""
        message = _parsed(raw)
        if item is None or message is None or item.done is not None:
            return
        size = len(message.text.encode()) + sum(len(call.arguments.encode()) for call in message.tool_calls)
        if not self._room.exceeded and self._room.take(size - len(item.text) - len(item.refusal)):
            item.done = message
            item.text.clear()
            item.refusal.clear()

    def _conclude(self, event: _Event) -> None:
        self.status = event.type.rpartition(".")[2]
        response = _response_of(event.response) or _Response()
        self.usage = _usage(response) or self.usage
        self.error = self.error or _failure(response, self.status)
        if not self._items:  # a server that sends nothing but the whole
            for place, raw in enumerate(_items_of(response)):
                self._close(self._open(_Event(item=raw, output_index=place)), raw)


def capture_json(body: bytes) -> Reply:
    """The outcome of an exchange that was not streamed; a body that is no such answer gives an empty `Reply`."""
    response = _response_of(body)
    if response is None:
        return Reply(message=None)
    messages = [message for raw in _items_of(response) if (message := _parsed(raw)) is not None]
    message = msgspec.structs.replace(merged(messages), role="assistant") if messages else None
    status = _text(response.status) or None
    return Reply(message, _usage(response), status, _failure(response, status))


def _key(output_index: Any, *ids: Any) -> int | str | None:
    """What names an item throughout a stream: its place, or the first id that there is."""
    if isinstance(output_index, int):
        return output_index
    return next((one for one in ids if isinstance(one, str) and one), None)


def _parsed(raw: Raw) -> Message | None:
    try:
        return parse_item(raw)
    except BadRequestBody:
        return None


def _response_of(data: Raw | bytes) -> _Response | None:
    try:
        return _response_decoder.decode(data)
    except UNREADABLE:
        return None


def _items_of(response: _Response) -> list[Raw]:
    try:
        return _items_decoder.decode(response.output)
    except UNREADABLE:
        return []


def _usage(response: _Response) -> Usage | None:
    usage = response.usage if isinstance(response.usage, dict) else {}
    details = usage.get("input_tokens_details")
    cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else None
    prompt_tokens = count_of(usage.get("input_tokens"))
    return None if prompt_tokens is None else Usage(prompt_tokens, count_of(usage.get("output_tokens")), cached)


def _failure(response: _Response, status: str | None) -> str | None:
    """The text of a response's error; every one that failed has some."""
    return error_text(response.error) or ("the response failed" if status == "failed" else None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
