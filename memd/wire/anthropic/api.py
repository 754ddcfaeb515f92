"""Anthropic's `POST /v1/messages`: parses its body, and encodes it again with the least possible change.

Rule: a user message with tool results is parsed into several messages (see `message.py`) and encoded as one element
again. A block is always merged into the user message, because the API allows no other role in mid-conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec import Raw

from memd.messages import Message
from memd.wire.anthropic.capture import AnthropicCapture, parse_reply
from memd.wire.anthropic.message import encode_message, joined, parse_message, pieces_of, with_result
from memd.wire.api import Placement
from memd.wire.capture import Reply
from memd.wire.chat.message import with_text_in_front
from memd.wire.lenient_json import decode_or_none
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
