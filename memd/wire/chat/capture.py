"""Captures replies of the chat-completions API.

Rule: as in `wire/capture.py`. `message.py` parses the client's echo into the same `Message` as this module the reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message, ToolCall
from memd.wire.capture import CAPTURE_BYTES_MAX, ByteBudget, Capture, Reply, Usage, count_of, error_text
from memd.wire.chat.message import joined_text, parse_message
from memd.wire.lenient_json import UNREADABLE, decode_or_none, mended, with_stand_ins
from memd.wire.sse import DONE, SseEvent

_CALL_BYTES = 256  # charged per tool call, so that a stream of empty ones is bounded too


class _Choice(msgspec.Struct):
    index: Any = 0
    delta: Any = None
    message: Raw = Raw()
    finish_reason: Any = None


class _ChatAnswer(msgspec.Struct):
    """The members of a stream's chunk, or of a whole answer, that memd reads."""

    choices: list[_Choice] | None = None
    usage: Any = None
    timings: Any = None
    error: Any = None


class _TextDelta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    content: str


class _TextChoice(msgspec.Struct, gc=False):
    delta: _TextDelta
    index: Literal[0] = 0
    finish_reason: None = None


class _TextChunk(msgspec.Struct, gc=False):
    """Nearly every chunk of a stream: a piece of choice 0's text and nothing else that memd reads."""

    choices: tuple[_TextChoice]
    usage: None = None
    timings: None = None
    error: None = None


_answer_decoder = msgspec.json.Decoder(_ChatAnswer)
_text_decoder = msgspec.json.Decoder(_TextChunk)


class _PartialCall:
    """A tool call whose deltas are still coming."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments = bytearray()


class ChatCapture(Capture):
    """Captures choice 0 of a stream of chunks."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False
        """Whether `[DONE]` has come."""
        self._budget = ByteBudget(bytes_max)
        self._role = ""
        self._content = bytearray()
        self._refusal = bytearray()
        self._calls: dict[int, _PartialCall] = {}
        self._function_call: _PartialCall | None = None

    @property
    def truncated(self) -> bool:
        """See `Capture.truncated`."""
        return self._budget.exceeded

    @property
    def finished(self) -> bool:
        """See `Capture.finished`."""
        return self.error is None and (self.done or self.finish_reason is not None)

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in a chunk that has a choice; in others it breaks clients."""
        if event.data.strip() == DONE:
            self.done = True
            return False
        answer = decode_or_none(_answer_decoder, event.data)
        if answer is None:
            return False
        if answer.usage is not None or answer.timings is not None:
            self.usage = _usage(answer) or self.usage
        if answer.error is not None:
            self.error = self.error or error_text(answer.error)
        for choice in answer.choices or ():
            if choice.index == 0:
                if choice.finish_reason is not None:
                    self.finish_reason = _text(choice.finish_reason) or self.finish_reason
                if isinstance(choice.delta, dict):
                    self._take_delta(choice.delta)
        return bool(answer.choices)

    def take_run(self, lines: bytes) -> bool:
        """See `Capture.take_run`: possible if all chunks have text of choice 0 and nothing else."""
        text = _text_of(lines)
        if text is None:
            return False
        self._role = self._role or "assistant"
        self._append(self._content, text)
        return True

    def message(self, interrupted: bool = False) -> Message | None:
        """Return the reply so far; None if nothing of it has come. `interrupted`: see `Capture.reply`."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        if self._function_call is not None:
            calls.append(self._function_call)
        text = mended(joined_text(self._content.decode(), self._refusal.decode()))
        if not text and not calls and not (self.finished and self._role):
            return None
        tool_calls = tuple(ToolCall(call.id, call.name, mended(call.arguments.decode())) for call in calls)
        return Message(role=self._role or "assistant", text=text, tool_calls=tool_calls, interrupted=interrupted)

    def reply(self, interrupted: bool = False) -> Reply:
        """See `Capture.reply`."""
        return Reply(self.message(interrupted), self.usage, self.finish_reason, self.error)

    def _take_delta(self, delta: dict[str, Any]) -> None:
        self._role = self._role or _text(delta.get("role")) or "assistant"
        self._append(self._content, _text(delta.get("content")))
        if len(delta) == 1 and "content" in delta:  # nearly every delta of a stream
            return
        self._append(self._refusal, _text(delta.get("refusal")))
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                self._take_call(call)
        function = delta.get("function_call")
        if isinstance(function, dict):
            if self._function_call is None:
                self._function_call = self._new_call()
            self._take_function(self._function_call, function)

    def _take_call(self, delta: dict[str, Any]) -> None:
        """Capture a tool-call delta; without `index` it belongs to the last call, or with an id begins a new one."""
        index = delta.get("index")
        if not isinstance(index, int):
            index = max(self._calls, default=-1) + (1 if delta.get("id") or not self._calls else 0)
        call = self._calls.get(index)
        if call is None:
            call = self._new_call()
            if call is None:
                return
            self._calls[index] = call
        call.id = call.id or self._budget.cut(_text(delta.get("id"))).decode()
        for member in ("function", "custom"):
            function = delta.get(member)
            if isinstance(function, dict):
                self._take_function(call, function)

    def _take_function(self, call: _PartialCall | None, function: dict[str, Any]) -> None:
        if call is None:
            return
        if not call.name:
            call.name = self._budget.cut(_text(function.get("name"))).decode()
        arguments = function.get("arguments", function.get("input"))
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        self._append(call.arguments, _text(arguments))

    def _new_call(self) -> _PartialCall | None:
        """Begin a tool call; None if the budget is spent."""
        return _PartialCall() if self._budget.take(_CALL_BYTES) else None

    def _append(self, kept: bytearray, piece: str) -> None:
        kept += self._budget.cut(piece)


def parse_reply(body: bytes) -> Reply:
    """See `Api.parse_reply`."""
    answer = decode_or_none(_answer_decoder, body)
    if answer is None:
        return Reply(message=None)
    message: Message | None = None
    finish_reason: str | None = None
    for choice in answer.choices or ():
        if choice.index == 0 and bytes(choice.message):
            message = assistant_message(choice.message)
            finish_reason = _text(choice.finish_reason) or None
            break
    return Reply(message, _usage(answer), finish_reason, error_text(answer.error))


def assistant_message(raw: Raw, parse: Callable[[Raw], Message] = parse_message) -> Message | None:
    """Read the message of a whole answer; None if it is none."""
    message = parsed_or_none(raw, parse)
    if message is None:
        return None
    return message if message.role else msgspec.structs.replace(message, role="assistant")


def parsed_or_none(raw: Raw, parse: Callable[[Raw], Message]) -> Message | None:
    """Read a message or an item of a whole answer, with stand-ins where it needs them; None if it is none."""
    try:
        return parse(raw)
    except BadRequestBody:
        readable = with_stand_ins(bytes(raw))
    try:
        return None if readable == bytes(raw) else parse(Raw(readable))
    except BadRequestBody:
        return None


def _text_of(lines: bytes) -> str | None:
    """Return the text of chunks, one per line; None if one of them has more than text or is no chunk."""
    try:
        pieces = [chunk.choices[0].delta.content for chunk in _text_decoder.decode_lines(lines)]
    except UNREADABLE:
        return None
    return "".join(pieces) if len(pieces) == lines.count(b"\n") + 1 else None  # msgspec lets a line hold several


def _usage(answer: _ChatAnswer) -> Usage | None:
    """Read OpenAI's `usage`, else llama.cpp's `timings`: prompt_n tokens were evaluated, cache_n were cached."""
    usage = answer.usage if isinstance(answer.usage, dict) else {}
    timings = answer.timings if isinstance(answer.timings, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else None
    cache_n, prompt_n = count_of(timings.get("cache_n")), count_of(timings.get("prompt_n"))
    cached = cache_n if cached is None else cached
    prompt_tokens = count_of(usage.get("prompt_tokens"))
    if prompt_tokens is not None:
        return Usage(prompt_tokens, count_of(usage.get("completion_tokens")), cached)
    if prompt_n is not None and cache_n is not None:
        return Usage(prompt_n + cache_n, count_of(timings.get("predicted_n")), cached)
    return None


def _text(value: Any) -> str:
    """Return a string as it is, the joined text parts of a list, or else the empty string."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""
