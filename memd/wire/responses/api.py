"""`POST /v1/responses`: parses its body, and encodes it again with the least possible change.

Rule: consecutive items of the assistant (reasoning, text, calls) are one message, as in llama.cpp; its element of
`raw_messages` is their JSON texts joined by commas. An `input` that is a string is the only element, and stays a string
until a block has to be placed beside it. An item of a reply counts as its `done` event has it; its deltas count only
if that event never comes, because the stream broke off. Servers name an item by its place, by its id or, in llama.cpp,
only by its call's id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from memd.messages import Message, ToolCall
from memd.wire.api import Placement
from memd.wire.capture import CAPTURE_BYTES_MAX, ByteBudget, Capture, Reply, Usage, count_of, error_text
from memd.wire.chat.api import CHAT
from memd.wire.chat.capture import parsed_or_none
from memd.wire.chat.elements import joined_answer
from memd.wire.chat.message import joined_text, with_content, with_text_in_front
from memd.wire.lenient_json import decode_or_none, is_string, mended, text_or_empty
from memd.wire.message_cache import MessageCache
from memd.wire.reply_stream import ReplyStream
from memd.wire.request import (
    NOTHING_REPLACED,
    Insertion,
    ModelRequest,
    encode_body,
    objects_in,
    request_from,
    texts_by_position,
    top_level,
)
from memd.wire.responses.items import block_item, encode_items, grouped, item_of_string, parse_item, parse_items
from memd.wire.sideband import MemoryOut
from memd.wire.sse import SseEvent

CONCLUSIONS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""The types of the event that ends a stream and contains the whole response."""

_TEXT_DELTAS = frozenset(
    f"response.{what}.delta" for what in ("output_text", "function_call_arguments", "custom_tool_call_input")
)
_ITEM_BYTES = 256  # charged per item, so that a stream of empty ones is bounded too


class _ResponsesEvent(msgspec.Struct):
    """The members of an event that memd reads."""

    type: Any = None
    delta: Any = None
    item: Raw = Raw()
    item_id: Any = None
    output_index: Any = None
    response: Raw = Raw()
    error: Any = None
    message: Any = None


class _ItemHead(msgspec.Struct):
    type: Any = None
    id: Any = None
    call_id: Any = None
    name: Any = None


class _Response(msgspec.Struct):
    status: Any = None
    output: Raw = Raw()
    usage: Any = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(_ResponsesEvent)
_item_head_decoder = msgspec.json.Decoder(_ItemHead)
_response_decoder = msgspec.json.Decoder(_Response)
_items_decoder = msgspec.json.Decoder(list[Raw])


class _PartialItem:
    """An item whose deltas are still coming, or the message that it became."""

    def __init__(self) -> None:
        self.calls = False
        self.call_id = ""
        self.name = ""
        self.text = bytearray()
        """The text, or the arguments of the call."""
        self.refusal = bytearray()
        self.done: Message | None = None

    def message(self) -> Message:
        """The item so far."""
        if self.done is not None:
            return self.done
        text = mended(self.text.decode())
        if self.calls:
            return Message("assistant", "", (ToolCall(self.call_id, self.name, text),))
        return Message("assistant", joined_text(text, mended(self.refusal.decode())))


class ResponsesCapture(Capture):
    """Captures the reply of one stream."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        self.usage: Usage | None = None
        self.status: str | None = None
        """The final status of the response: `completed`, `incomplete` or `failed`; None before the end."""
        self.error: str | None = None
        self._budget = ByteBudget(bytes_max)
        self._items: dict[int | str, _PartialItem] = {}
        self._last: _PartialItem | None = None

    @property
    def truncated(self) -> bool:
        """See `Capture.truncated`."""
        return self._budget.exceeded

    @property
    def finished(self) -> bool:
        """See `Capture.finished`; a reply that ended at its bound on tokens counts."""
        return self.error is None and self.status is not None

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in the event that ends the stream, which clients keep."""
        decoded = decode_or_none(_event_decoder, event.data)
        if decoded is None:
            return False
        kind = text_or_empty(decoded.type)
        if kind == "error" or event.name == b"error":
            self.error = self.error or error_text(decoded.error or decoded.message or "error")
        elif kind in CONCLUSIONS:
            self._conclude(decoded)
        elif kind == "response.output_item.added":
            self._open(decoded)
        elif kind == "response.output_item.done":
            self._close(self._open(decoded), decoded.item)
        elif isinstance(decoded.delta, str):
            self._lengthen(decoded)
        else:
            self.error = self.error or error_text(decoded.error)
        return kind in CONCLUSIONS

    def reply(self, interrupted: bool = False) -> Reply:
        """See `Capture.reply`."""
        return Reply(self._message(interrupted), self.usage, self.status, self.error)

    def _message(self, interrupted: bool) -> Message | None:
        messages = [item.message() for item in self._items.values()]
        if not messages:
            return None
        message = joined_answer(messages)
        if not (message.text or message.tool_calls or self.finished):
            return None
        return msgspec.structs.replace(message, role="assistant", interrupted=interrupted)

    def _open(self, event: _ResponsesEvent) -> _PartialItem | None:
        """Return the item of an event, a new one if it is not known; None if the budget is spent."""
        head = decode_or_none(_item_head_decoder, event.item)
        if head is None:
            return None
        key = _key(event.output_index, event.item_id, head.id, head.call_id)
        if key is None:
            key = len(self._items)
        item = self._items.get(key)
        if item is None:
            if not self._budget.take(_ITEM_BYTES):
                return None
            item = self._items[key] = _PartialItem()
            item.calls = text_or_empty(head.type).endswith("_call")
            item.call_id = self._budget.cut(text_or_empty(head.call_id)).decode()
            item.name = self._budget.cut(text_or_empty(head.name)).decode()
        self._last = item
        return item

    def _lengthen(self, event: _ResponsesEvent) -> None:
        key = _key(event.output_index, event.item_id)
        item = self._last if key is None else self._items.get(key)
        if item is None or item.done is not None:
            return
        if event.type in _TEXT_DELTAS:
            item.text += self._budget.cut(event.delta)
        elif event.type == "response.refusal.delta":
            item.refusal += self._budget.cut(event.delta)

    def _close(self, item: _PartialItem | None, raw: Raw) -> None:
        """Replace what the deltas of an item gave by the whole item, if the budget allows it."""
        message = parsed_or_none(raw, parse_item)
        if item is None or message is None or item.done is not None:
            return
        size = len(message.text.encode()) + sum(len(call.arguments.encode()) for call in message.tool_calls)
        if not self._budget.exceeded and self._budget.take(size - len(item.text) - len(item.refusal)):
            item.done = message
            item.text.clear()
            item.refusal.clear()

    def _conclude(self, event: _ResponsesEvent) -> None:
        self.status = event.type.rpartition(".")[2]
        response = decode_or_none(_response_decoder, event.response) or _Response()
        self.usage = _usage(response) or self.usage
        self.error = self.error or _failure(response, self.status)
        if not self._items:  # the server sent nothing but the whole response
            for place, raw in enumerate(_items_of(response)):
                self._close(self._open(_ResponsesEvent(item=raw, output_index=place)), raw)


def parse_reply(body: bytes) -> Reply:
    """See `Api.parse_reply`."""
    response = decode_or_none(_response_decoder, body)
    if response is None:
        return Reply(message=None)
    messages = [message for raw in _items_of(response) if (message := parsed_or_none(raw, parse_item)) is not None]
    message = msgspec.structs.replace(joined_answer(messages), role="assistant") if messages else None
    status = text_or_empty(response.status) or None
    return Reply(message, _usage(response), status, _failure(response, status))


def _key(output_index: Any, *ids: Any) -> int | str | None:
    """Return the key of an item throughout a stream: its place, else its first id."""
    if isinstance(output_index, int):
        return output_index
    return next((one for one in ids if isinstance(one, str) and one), None)


def _items_of(response: _Response) -> list[Raw]:
    return decode_or_none(_items_decoder, response.output) or []


def _usage(response: _Response) -> Usage | None:
    usage = response.usage if isinstance(response.usage, dict) else {}
    details = usage.get("input_tokens_details")
    cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else None
    prompt_tokens = count_of(usage.get("input_tokens"))
    return None if prompt_tokens is None else Usage(prompt_tokens, count_of(usage.get("output_tokens")), cached)


def _failure(response: _Response, status: str | None) -> str | None:
    """Return the message of a response's error; a response that failed always has one."""
    return error_text(response.error) or ("the response failed" if status == "failed" else None)


_HELD_ELSEWHERE = ("previous_response_id", "conversation")
"""Members that refer to a conversation stored by the upstream, so that `input` is only a part of it."""


class ResponsesApi:
    """OpenAI's responses; see `Api`."""

    name = "responses"
    path = "/responses"
    count_path = "/v1/responses/input_tokens"
    stream_type = "text/event-stream"

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object whose `input` is a string or a list of objects."""
        members = top_level(body)
        names = (name for name in _HELD_ELSEWHERE if bytes(members.get(name, b"null")) not in (b"null", b'""'))
        goes_on_with = next((f"{name} {bytes(members[name]).decode(errors='replace')}" for name in names), "")
        return request_from(
            body,
            members,
            goes_on_with=goes_on_with,
            list_name="input",
            raw_messages=_raw_messages(members),
            parse=parse_items,
            cache=cache,
            bounds=("max_output_tokens",),
            standing=("instructions", "tools"),
            instructions="instructions",
        )

    def encode(
        self,
        request: ModelRequest,
        *,
        leave_out: Collection[int] = (),
        replaced: Mapping[int, str] = NOTHING_REPLACED,
        insertions: Sequence[Insertion] = (),
        placement: Placement = "separate",
    ) -> bytes:
        """See `Api.encode`. 'separate' makes a developer message; 'merged' puts it in front of a user's content."""
        if request.original is not None and not leave_out and not insertions and not replaced:
            return request.original
        left_out = frozenset(leave_out)
        texts = texts_by_position(request, insertions)
        if len(request.raw_messages) == 1 and not left_out and not texts and is_string(request.raw_messages[0]):
            return encode_body(request, "input", request.raw_messages[0])
        elements: list[Raw] = []
        for position, raw in enumerate(request.raw_messages):
            if position in left_out:
                continue
            items = item_of_string(raw) if is_string(raw) else raw
            blocks = texts.get(position, [])
            if blocks and placement == "merged" and request.messages[position].role == "user":
                elements.append(with_text_in_front(items, "\n\n".join(blocks), part_type="input_text"))
                continue
            elements += [block_item(text) for text in blocks]
            elements.append(with_content(items, replaced[position], "output") if position in replaced else items)
        return encode_body(request, "input", elements)

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`."""
        return encode_items(message)

    def in_front(self, raw: Raw, text: str) -> Raw:
        """See `Api.in_front`."""
        return with_text_in_front(item_of_string(raw) if is_string(raw) else raw, text, part_type="input_text")

    def continues(self, message: Message, previous: Message | None) -> bool:
        """See `Api.continues`: never, no two messages share an item."""
        return False

    def new_stream(self, bytes_max: int, out: MemoryOut | None) -> ReplyStream:
        """See `Api.new_stream`."""
        return ReplyStream(ResponsesCapture(bytes_max), out)

    def parse_reply(self, body: bytes) -> Reply:
        """See `Api.parse_reply`."""
        return parse_reply(body)

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """See `Api.error_body`: OpenAI's shape."""
        return CHAT.error_body(status, message, kind)


def _raw_messages(members: Mapping[str, Raw]) -> list[Raw]:
    """Group the items of `input` by message: those of one assistant message together; a string is a message."""
    if is_string(members.get("input", Raw())):
        return [members["input"]]
    return grouped(objects_in(members, "input"))


RESPONSES = ResponsesApi()
