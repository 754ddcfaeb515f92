"""Captures replies of Ollama's `/api/chat` (https://docs.ollama.com/api/chat, /api/streaming).

Rule: as in `wire/capture.py`. What is no line of Ollama's is read as a chunk of chat completions: that is what
llama-server answers at this path (tools/server/server.cpp).
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from memd.wire.capture import Reply, Usage, count_of, error_text
from memd.wire.chat import capture as chat
from memd.wire.chat.capture import ChatCapture, assistant_message
from memd.wire.lenient_json import decode_or_none, text_or_empty
from memd.wire.ollama.message import parse_message
from memd.wire.sse import SseEvent


class _Line(msgspec.Struct):
    """The members of a stream's line, or of a whole answer, that memd reads."""

    message: Raw
    done: Any = None
    done_reason: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None
    error: Any = None

    @property
    def usage(self) -> Usage | None:
        prompt_tokens = count_of(self.prompt_eval_count)
        return None if prompt_tokens is None else Usage(prompt_tokens, count_of(self.eval_count))


_line_decoder = msgspec.json.Decoder(_Line)
_delta_decoder = msgspec.json.Decoder(dict[str, Any])


class OllamaCapture(ChatCapture):
    """Captures a stream of lines; each call comes whole, in one line."""

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in a line that has a message."""
        line = decode_or_none(_line_decoder, event.data)
        if line is None:
            return super().take(event)
        self.usage = line.usage or self.usage
        self.error = self.error or error_text(line.error)
        if line.done is True:
            self.done = True
            self.finish_reason = text_or_empty(line.done_reason) or self.finish_reason
        delta = decode_or_none(_delta_decoder, line.message)
        if delta is None:
            return False
        calls = delta.pop("tool_calls", None)
        self._take_delta(delta)
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                self._take_call({**call, "id": "", "index": len(self._calls)})
        return True

    def take_run(self, lines: bytes) -> bool:
        """See `Capture.take_run`: there are no runs of lines."""
        return False


def parse_reply(body: bytes) -> Reply:
    """See `Api.parse_reply`."""
    answer = decode_or_none(_line_decoder, body)
    if answer is None:
        return chat.parse_reply(body)
    return Reply(
        assistant_message(answer.message, parse_message),
        answer.usage,
        text_or_empty(answer.done_reason) or None,
        error_text(answer.error),
    )
