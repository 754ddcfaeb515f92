"""Anthropic's `POST /v1/messages`: parses its body, and encodes it again with the least possible change.

Rule: a user message with tool results is parsed into several messages (see `message.py`) and encoded as one element
again. A block is always merged into the user message, because the API allows no other role in mid-conversation. The
events of a reply are put together to a message of the API, which is parsed as an echo is (see `wire/capture.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.wire.anthropic.message import encode_message, joined, parse_message, pieces_of, with_result
from memd.wire.api import Placement
from memd.wire.capture import CAPTURE_BYTES_MAX, ByteBudget, Capture, Reply, Usage, error_text
from memd.wire.chat.message import with_text_in_front
from memd.wire.lenient_json import UNREADABLE, decode_or_none, text_or_empty
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
from memd.wire.sideband import MemoryOut
from memd.wire.sse import SseEvent

_BLOCK_BYTES = 256  # charged per content block, so that a stream of empty ones is bounded too
_PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class _AnthropicAnswer(msgspec.Struct):
    """The members of a whole answer that memd reads."""

    role: Any = None
    content: Any = None
    stop_reason: Any = None
    usage: Any = None
    error: Any = None


class _AnthropicEvent(msgspec.Struct):
    type: Any = None
    index: Any = 0
    message: Any = None
    content_block: Any = None
    delta: Any = None
    usage: Any = None
    error: Any = None


_answer_decoder = msgspec.json.Decoder(_AnthropicAnswer)
_event_decoder = msgspec.json.Decoder(_AnthropicEvent)


class _PartialBlock:
    """A content block whose deltas are still coming."""

    def __init__(self, block: dict[str, Any]) -> None:
        self.block = block
        """The block as it began, without the member that the deltas lengthen."""
        self.text = bytearray()
        """The member that the deltas lengthen: the text of a text block, the input of a tool call."""


class AnthropicCapture(Capture):
    """Captures the reply of one stream."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        self._budget = ByteBudget(bytes_max)
        self._started = False
        self._stopped = False
        self._stop_reason: str | None = None
        self._error: str | None = None
        self._counts: dict[str, int] = {}
        self._blocks: dict[int, _PartialBlock] = {}

    @property
    def truncated(self) -> bool:
        """See `Capture.truncated`."""
        return self._budget.exceeded

    @property
    def finished(self) -> bool:
        """See `Capture.finished`."""
        return self._error is None and (self._stopped or self._stop_reason is not None)

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in the first event, `message_start`."""
        decoded = decode_or_none(_event_decoder, event.data)
        if decoded is None:
            return False
        if decoded.type == "message_start" and isinstance(decoded.message, dict):
            self._started = True
            self._count(decoded.message.get("usage"))
        elif decoded.type == "content_block_start" and isinstance(decoded.content_block, dict):
            self._begin(decoded.index, decoded.content_block)
        elif decoded.type == "content_block_delta" and isinstance(decoded.delta, dict):
            self._grow(decoded.index, decoded.delta)
        elif decoded.type == "message_delta" and isinstance(decoded.delta, dict):
            self._stop_reason = text_or_empty(decoded.delta.get("stop_reason")) or self._stop_reason
            self._count(decoded.usage)
        elif decoded.type == "message_stop":
            self._stopped = True
        self._error = self._error or error_text(decoded.error)
        return bool(decoded.type == "message_start")

    def reply(self, interrupted: bool = False) -> Reply:
        """See `Capture.reply`."""
        message = None
        if self._started or self._blocks:
            message = _message([_block_now(self._blocks[index]) for index in sorted(self._blocks)])
        if message is not None and not self.finished and not _has_content(message):
            message = None
        if message is not None and interrupted:
            message = msgspec.structs.replace(message, interrupted=True)
        return Reply(message, _usage(self._counts), self._stop_reason, self._error)

    def _begin(self, index: Any, block: dict[str, Any]) -> None:
        kind = text_or_empty(block.get("type"))
        if not isinstance(index, int) or index in self._blocks or kind in ("thinking", "redacted_thinking"):
            return
        partial = _PartialBlock({**block, "type": kind})
        if kind == "text":
            partial.block = {"type": kind}
            size = 0
        else:
            size = len(msgspec.json.encode(partial.block))
        if self._budget.take(_BLOCK_BYTES + size):
            self._blocks[index] = partial
            partial.text += self._budget.cut(text_or_empty(block.get("text")) if kind == "text" else "")

    def _grow(self, index: Any, delta: dict[str, Any]) -> None:
        member = {"text_delta": "text", "input_json_delta": "partial_json"}.get(text_or_empty(delta.get("type")), "")
        piece = text_or_empty(delta.get(member))
        if not piece or not isinstance(index, int):
            return
        if index not in self._blocks and member == "text":
            self._begin(index, {"type": "text"})  # the server sent no `content_block_start`
        if index in self._blocks:
            self._blocks[index].text += self._budget.cut(piece)

    def _count(self, usage: Any) -> None:
        self._counts.update(_counts(usage))


def parse_reply(body: bytes) -> Reply:
    """See `Api.parse_reply`."""
    answer = decode_or_none(_answer_decoder, body)
    if answer is None:
        return Reply(message=None)
    message = _message(answer.content) if isinstance(answer.content, list) else None
    return Reply(
        message, _usage(_counts(answer.usage)), text_or_empty(answer.stop_reason) or None, error_text(answer.error)
    )


def _message(content: list[Any]) -> Message | None:
    try:
        return parse_message(msgspec.json.encode({"role": "assistant", "content": content}))
    except (BadRequestBody, *UNREADABLE):
        return None


def _block_now(partial: _PartialBlock) -> dict[str, Any]:
    """Return the block as the client has it now. The input of a call stays text, because it may be incomplete."""
    if partial.block["type"] == "text":
        return {**partial.block, "text": partial.text.decode()}
    return {**partial.block, "input": partial.text.decode()} if partial.text else partial.block


def _has_content(message: Message) -> bool:
    return bool(message.text or message.tool_calls or message.attachments)


def _counts(usage: Any) -> dict[str, int]:
    """Return the token counts of a `usage`."""
    if not isinstance(usage, dict):
        return {}
    return {
        name: usage[name]
        for name in (*_PROMPT_COUNTS, "output_tokens")
        if isinstance(usage.get(name), int) and not isinstance(usage[name], bool) and usage[name] >= 0
    }


def _usage(counts: dict[str, int]) -> Usage | None:
    """Sum up the prompt's tokens: `input_tokens` are only those that were not cached."""
    if "input_tokens" not in counts:
        return None
    prompt_tokens = sum(counts.get(name, 0) for name in _PROMPT_COUNTS)
    return Usage(prompt_tokens, counts.get("output_tokens"), counts.get("cache_read_input_tokens"))


_ERROR_TYPES = {413: "request_too_large", 502: "api_error"}


class _Thread(msgspec.Struct):
    type: str = ""
    previous_message_id: str = ""


_thread_decoder = msgspec.json.Decoder(_Thread)


class AnthropicApi:
    """Anthropic's messages; see `Api`."""

    name = "messages"
    path = "/messages"
    count_path = "/v1/messages/count_tokens"
    stream_type = "text/event-stream"

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object with a list `messages` of objects, not nested too deeply, in valid Unicode."""
        members = top_level(body)
        raw_messages: list[Raw] = []
        continues: list[bool] = []
        for element in objects_in(members, "messages"):
            pieces = pieces_of(element)
            raw_messages += pieces
            continues += [number > 0 for number in range(len(pieces))]
        return request_from(
            body,
            members,
            goes_on_with=_thread(members.get("thread")),
            list_name="messages",
            raw_messages=raw_messages,
            continues=continues,
            parse=parse_message,
            cache=cache,
            bounds=("max_tokens",),
            standing=("system", "tools"),
            instructions="system",
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
        """See `Api.encode`. Either placement is in front of the message's own content, behind its tool results."""
        if request.original is not None and not leave_out and not insertions and not replaced:
            return request.original
        left_out = frozenset(leave_out)
        texts = {at: "\n\n".join(blocks) for at, blocks in texts_by_position(request, insertions).items()}
        elements: list[Raw] = []
        for element in _elements(request.continues):
            shown = [position for position in element if position not in left_out]
            raw = [
                with_result(request.raw_messages[position], replaced[position])
                if position in replaced
                else request.raw_messages[position]
                for position in shown
            ]
            if len(element) > 1 and shown:
                elements.append(joined(raw, [texts.get(position, "") for position in shown]))
            elif shown:
                elements.append(with_text_in_front(raw[0], texts[shown[0]]) if shown[0] in texts else raw[0])
        return encode_body(request, "messages", elements)

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`."""
        return encode_message(message)

    def in_front(self, raw: Raw, text: str) -> Raw:
        """See `Api.in_front`."""
        return with_text_in_front(raw, text)

    def continues(self, message: Message, previous: Message | None) -> bool:
        """See `Api.continues`: the results of parallel calls share one user message."""
        return message.role == "tool" and previous is not None and previous.role == "tool"

    def new_stream(self, bytes_max: int, out: MemoryOut | None) -> ReplyStream:
        """See `Api.new_stream`."""
        return ReplyStream(AnthropicCapture(bytes_max), out)

    def parse_reply(self, body: bytes) -> Reply:
        """See `Api.parse_reply`."""
        return parse_reply(body)

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """See `Api.error_body`: Anthropic's shape."""
        error = {"type": _ERROR_TYPES.get(status, kind), "message": message}
        return msgspec.json.encode({"type": "error", "error": error})


def _thread(thread: Raw | None) -> str:
    """The thread that a request goes on with, which the upstream keeps; empty if it has none."""
    typed = None if thread is None else decode_or_none(_thread_decoder, thread)
    return f"thread {typed.previous_message_id}" if typed is not None and typed.type == "continue" else ""


def _elements(continues: Sequence[bool]) -> Iterator[range]:
    """Group the positions of the messages by element of the list."""
    begins = [position for position, same in enumerate(continues) if not same]
    return (range(begin, end) for begin, end in pairwise([*begins, len(continues)]))


ANTHROPIC = AnthropicApi()
