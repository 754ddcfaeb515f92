"""Ollama's `POST /api/chat`: parses its body, and encodes it again with the least possible change.

Rule: as in `wire/chat/api.py`, which it follows in all that is not named here.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from memd.messages import Message
from memd.wire.capture import Reply
from memd.wire.chat.api import ChatApi
from memd.wire.lenient_json import decode_or_none
from memd.wire.message_cache import MessageCache
from memd.wire.ollama.capture import OllamaCapture, parse_reply
from memd.wire.ollama.lines import LineParser
from memd.wire.ollama.message import encode_message, parse_message
from memd.wire.reply_stream import ReplyStream
from memd.wire.request import ModelRequest, elements_behind, request_from, top_level
from memd.wire.sideband import MemoryOut

_options_decoder = msgspec.json.Decoder(dict[str, Raw])
_count_decoder = msgspec.json.Decoder(int)
_NOTHING = Raw(b"{}")


class OllamaApi(ChatApi):
    """Ollama's own chat; see `Api`."""

    name = "ollama"
    path = "/api/chat"
    stream_type = "application/x-ndjson"
    block_role = "system"

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object with a list `messages` of objects, not nested too deeply, in valid Unicode."""
        members = top_level(body)
        known, new = elements_behind(members, "messages", parse_message, cache)
        request = request_from(
            body,
            members,
            list_name="messages",
            raw_messages=[*known.raws, *new],
            parse=parse_message,
            cache=cache,
            bounds=(),
            standing=("tools", "format"),
            known=known,
        )
        options = decode_or_none(_options_decoder, request.fields.get("options", _NOTHING)) or {}
        return msgspec.structs.replace(
            request,
            stream=bytes(request.fields.get("stream", b"true")) != b"false",
            max_tokens=_count(options, "num_predict"),
            window=_count(options, "num_ctx") or None,
        )

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`."""
        return Raw(encode_message(message))

    def new_stream(self, bytes_max: int, out: MemoryOut | None) -> ReplyStream:
        """See `Api.new_stream`."""
        return ReplyStream(OllamaCapture(bytes_max), out, parser=LineParser())

    def parse_reply(self, body: bytes) -> Reply:
        """See `Api.parse_reply`."""
        return parse_reply(body)

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """See `Api.error_body`: Ollama's shape."""
        return msgspec.json.encode({"error": message})


def _count(options: dict[str, Raw], name: str) -> int | None:
    """An option that is a number of tokens; None if it is absent or names no bound (-1, -2)."""
    count = decode_or_none(_count_decoder, options.get(name, Raw(b"null")))
    return count if count is not None and count >= 0 else None


OLLAMA = OllamaApi()
