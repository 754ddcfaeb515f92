"""Ollama's own API, `POST /api/chat`: requests to messages and back, and replies.

Rule: as in `wire/chat.py`, except for three members of messages: `images` has the attachments, `tool_name` replaces
OpenAI's `tool_call_id`, and a call's arguments are an object. Ollama's clients do not send call ids back, so calls have
none here and are identified by their arguments.

Replies are lines of JSON (https://docs.ollama.com/api/chat, /api/streaming), however the bytes were split; an
unfinished line is limited in size. A line that is not Ollama's is read as a chunk of chat completions, with which
llama-server answers at this path (tools/server/server.cpp).
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from memd.messages import DIGEST_BYTES, Message
from memd.wire import chat
from memd.wire.api import Api, MessageCache, ModelRequest
from memd.wire.chat import ChatApi, ChatCapture
from memd.wire.lenient_json import MEMBERS, OBJECT, decode_or_none, text_or_empty
from memd.wire.reply import SseEvent, SseParser, Usage, count_of, error_text


class _OwnMembers(msgspec.Struct, frozen=True):
    images: list[Raw] | None = None
    tool_name: str | None = None


_own_decoder = msgspec.json.Decoder(_OwnMembers)


def parse_message(raw: Raw | bytes) -> Message:
    """Parse the JSON object `raw` into a message without its thinking. Raises BadRequestBody: not a JSON object, or not
    valid Unicode."""
    message = without_call_ids(chat.parse_message(raw))
    own = decode_or_none(_own_decoder, raw) or _OwnMembers()
    if not own.images and not own.tool_name:
        return message
    digests = [hashlib.blake2b(bytes(image), digest_size=DIGEST_BYTES).digest() for image in own.images or ()]
    return msgspec.structs.replace(
        message,
        text="\n".join([*([message.text] if message.text else ()), *["[image]"] * len(digests)]),
        attachments=(*message.attachments, *digests),
        name=message.name or own.tool_name or "",
    )


def without_call_ids(message: Message) -> Message:
    """Return the message as Ollama's clients send it back."""
    if not any(call.id for call in message.tool_calls):
        return message
    calls = tuple(msgspec.structs.replace(call, id="") for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as the object that Ollama requires, even if the model wrote no object."""
    return decode_or_none(MEMBERS, text.encode()) or ({"arguments": text} if text.strip("{} ") else {})


class _Line(msgspec.Struct, frozen=True):
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


class OllamaCapture(ChatCapture):
    """Captures a stream of lines; each call comes complete, in one line."""

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in a line with a message."""
        line = decode_or_none(_line_decoder, event.data)
        if line is None:
            return super().take(event)
        self.usage = line.usage or self.usage
        self.error = self.error or error_text(line.error)
        if line.done is True:
            self._ended = True
            self.finish_reason = text_or_empty(line.done_reason) or self.finish_reason
        delta = decode_or_none(MEMBERS, line.message)
        if delta is None:
            return False
        calls = delta.pop("tool_calls", None)
        self._take_delta(delta)
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                self._take_call({**call, "id": "", "index": self._next_place})
        return True


_FIELD = b"data:"


class LineParser(SseParser):
    """Parses one event per line; a line beyond the limit is skipped. A leading `data:`, as in server-sent events, is
    removed, because llama-server answers its `/api/chat` that way."""

    def _end_line(self, line: bytes, end: int) -> SseEvent | None:
        text, self._skipping = b"" if self._skipping else line.rstrip(), False
        return SseEvent(text.removeprefix(_FIELD).lstrip(), b"", end - len(line) + len(text)) if text else None


_count_decoder = msgspec.json.Decoder(int)
_NOTHING = Raw(b"{}")


class OllamaApi(ChatApi):
    """Ollama's own chat; see `Api`."""

    name = "ollama"
    path = "/api/chat"
    stream_type = "application/x-ndjson"
    capture = OllamaCapture
    parser = LineParser
    bounds = ()
    standing = ("tools", "format")
    parse_one = staticmethod(parse_message)

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object with a list `messages` of objects, not nested too deeply, in valid Unicode."""
        request = Api.parse(self, body, cache)
        options = decode_or_none(OBJECT, request.fields.get("options", _NOTHING)) or {}
        return msgspec.structs.replace(
            request,
            stream=bytes(request.fields.get("stream", b"true")) != b"false",
            max_tokens=_count(options, "num_predict"),
            window=_count(options, "num_ctx") or None,
        )

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`."""
        members: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.tool_calls:
            members["tool_calls"] = [
                {"function": {"name": call.name, "arguments": _arguments(call.arguments)}}
                for call in message.tool_calls
            ]
        if message.name:
            members["tool_name" if message.role == "tool" else "name"] = message.name
        return Raw(msgspec.json.encode(members))

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """See `Api.error_body`: Ollama's shape."""
        return msgspec.json.encode({"error": message})


def _count(options: dict[str, Raw], name: str) -> int | None:
    """Return a token option; None if it is absent or means no limit (-1, -2)."""
    count = decode_or_none(_count_decoder, options.get(name, Raw(b"null")))
    return count if count is not None and count >= 0 else None


OLLAMA = OllamaApi()
