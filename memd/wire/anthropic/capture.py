"""The model's reply through Anthropic's API, read on the side of the answer that the client gets.

Rule: as in `capture.py`: the captured `Message` has the content digest of the client's echo, capturing never raises and
never keeps more than `bytes_max`. What the events leave behind is a message of that API again, parsed as an echo is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.wire.anthropic.message import parse_message
from memd.wire.capture import CAPTURE_BYTES_MAX, Reply, Room, Usage
from memd.wire.chat.message import UNREADABLE
from memd.wire.sse import EVENT_BYTES_MAX, SseParser

_BLOCK_BYTES = 256  # charged per content block, so that a stream of empty ones is bounded too
_PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class _Answer(msgspec.Struct):
    """A whole answer, or what a stream's events are put together to."""

    role: Any = None
    content: Any = None
    stop_reason: Any = None
    usage: Any = None
    error: Any = None


class _Event(msgspec.Struct):
    type: Any = None
    index: Any = 0
    message: Any = None
    content_block: Any = None
    delta: Any = None
    usage: Any = None
    error: Any = None


_answer_decoder = msgspec.json.Decoder(_Answer)
_event_decoder = msgspec.json.Decoder(_Event)


class _Kept:
    """A content block in the making."""

    def __init__(self, block: dict[str, Any]) -> None:
        self.block = block
        """As it began, without what grows."""
        self.text = bytearray()
        """Of a text block its text, of a tool call its input."""


class AnthropicCapture:
    """Assembles the reply out of the events of one stream, fed in any pieces."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.truncated = False
        self._parser = SseParser(event_bytes_max)
        self._room = Room(bytes_max)
        self._started = False
        self._stopped = False
        self._stop_reason: str | None = None
        self._error: str | None = None
        self._counts: dict[str, int] = {}
        self._blocks: dict[int, _Kept] = {}

    @property
    def finished(self) -> bool:
        """The reply came to its end."""
        return self._error is None and (self._stopped or self._stop_reason is not None)

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of the stream."""
        for event in self._parser.feed(data):
            try:
                self._take(_event_decoder.decode(event.data))
            except UNREADABLE:
                continue
        self.truncated = self._room.exceeded or self._parser.skipped > 0

    def reply(self, interrupted: bool = False) -> Reply:
        """All that is known so far; `interrupted` marks a reply that did not come to its end."""
        message = None
        if self._started or self._blocks:
            message = _message([_grown(self._blocks[index]) for index in sorted(self._blocks)])
        if message is not None and not self.finished and not _says_something(message):
            message = None
        if message is not None and interrupted:
            message = msgspec.structs.replace(message, interrupted=True)
        return Reply(message, _usage(self._counts), self._stop_reason, self._error)

    def _take(self, event: _Event) -> None:
        if event.type == "message_start" and isinstance(event.message, dict):
            self._started = True
            self._count(event.message.get("usage"))
        elif event.type == "content_block_start" and isinstance(event.content_block, dict):
            self._begin(event.index, event.content_block)
        elif event.type == "content_block_delta" and isinstance(event.delta, dict):
            self._grow(event.index, event.delta)
        elif event.type == "message_delta" and isinstance(event.delta, dict):
            self._stop_reason = _text(event.delta.get("stop_reason")) or self._stop_reason
            self._count(event.usage)
        elif event.type == "message_stop":
            self._stopped = True
        self._error = self._error or _error_text(event.error)

    def _begin(self, index: Any, block: dict[str, Any]) -> None:
        kind = _text(block.get("type"))
        if not isinstance(index, int) or index in self._blocks or kind in ("thinking", "redacted_thinking"):
            return
        kept = _Kept({**block, "type": kind})
        if kind == "text":
            kept.block = {"type": kind}
            size = 0
        else:
            size = len(msgspec.json.encode(kept.block))
        if self._room.take(_BLOCK_BYTES + size):
            self._blocks[index] = kept
            kept.text += self._room.cut(_text(block.get("text")) if kind == "text" else "")

    def _grow(self, index: Any, delta: dict[str, Any]) -> None:
        member = {"text_delta": "text", "input_json_delta": "partial_json"}.get(_text(delta.get("type")), "")
        piece = _text(delta.get(member))
        if not piece or not isinstance(index, int):
            return
        if index not in self._blocks and member == "text":
            self._begin(index, {"type": "text"})  # a server that does not say when a block begins
        if index in self._blocks:
            self._blocks[index].text += self._room.cut(piece)

    def _count(self, usage: Any) -> None:
        self._counts.update(_counts(usage))


def reply_of(body: bytes) -> Reply:
    """The outcome of an exchange that was not streamed; a body that is no such answer gives an empty `Reply`."""
    try:
        answer = _answer_decoder.decode(body)
    except UNREADABLE:
        return Reply(message=None)
    message = _message(answer.content) if isinstance(answer.content, list) else None
    return Reply(message, _usage(_counts(answer.usage)), _text(answer.stop_reason) or None, _error_text(answer.error))


def _message(content: list[Any]) -> Message | None:
    try:
        return parse_message(msgspec.json.encode({"role": "assistant", "content": content}))
    except (BadRequestBody, *UNREADABLE):
        return None


def _grown(kept: _Kept) -> dict[str, Any]:
    """The block as the client has it now. A call's input is left as text: it may not be whole."""
    if kept.block["type"] == "text":
        return {**kept.block, "text": kept.text.decode()}
    return {**kept.block, "input": kept.text.decode()} if kept.text else kept.block


def _says_something(message: Message) -> bool:
    return bool(message.text or message.tool_calls or message.attachments)


def _counts(usage: Any) -> dict[str, int]:
    """The token counts that a `usage` states."""
    if not isinstance(usage, dict):
        return {}
    return {
        name: usage[name]
        for name in (*_PROMPT_COUNTS, "output_tokens")
        if isinstance(usage.get(name), int) and not isinstance(usage[name], bool) and usage[name] >= 0
    }


def _usage(counts: dict[str, int]) -> Usage | None:
    """`input_tokens` are those of the prompt that had to be read; those that the cache had are apart."""
    if "input_tokens" not in counts:
        return None
    prompt_tokens = sum(counts.get(name, 0) for name in _PROMPT_COUNTS)
    return Usage(prompt_tokens, counts.get("output_tokens"), counts.get("cache_read_input_tokens"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _error_text(error: Any) -> str | None:
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else str(error)[:1000]
