"""Captures replies of Anthropic's messages API.

Rule: as in `wire/capture.py`. The events are put together to a message of that API, which is parsed as an echo is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.wire.anthropic.message import parse_message
from memd.wire.capture import CAPTURE_BYTES_MAX, ByteBudget, Capture, Reply, Usage, error_text
from memd.wire.lenient_json import UNREADABLE, decode_or_none, text_or_empty
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
