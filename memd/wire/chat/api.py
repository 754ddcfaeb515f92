"""`POST /v1/chat/completions`: parses its body, and encodes it again with the least possible change.

Rule: one message is one element of `messages`, or several that are one answer (see `elements.py`): then its element of
`raw_messages` is their JSON texts joined by commas. It keeps its bytes unless a block is merged into it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec import Raw

from memd.messages import Message
from memd.wire.api import Placement
from memd.wire.capture import Reply
from memd.wire.chat.capture import ChatCapture, parse_reply
from memd.wire.chat.elements import are_apart, elements_of, grouped, parse_elements
from memd.wire.chat.message import encode_message, with_content, with_text_in_front
from memd.wire.message_cache import MessageCache
from memd.wire.reply_stream import ReplyStream
from memd.wire.request import (
    NOTHING_REPLACED,
    Insertion,
    ModelRequest,
    elements_behind,
    encode_body,
    request_from,
    texts_by_position,
    top_level,
)
from memd.wire.sideband import MemoryOut


class ChatApi:
    """OpenAI's chat completions; see `Api`."""

    name = "chat"
    path = "/chat/completions"
    count_path = "/v1/chat/completions/input_tokens"
    stream_type = "text/event-stream"
    block_role = "developer"
    """The role of a block that is a message of its own."""

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object with a list `messages` of objects, not nested too deeply, in valid Unicode."""
        members = top_level(body)
        known, new = elements_behind(members, "messages", parse_elements, cache)
        raw_messages = [*known.raws, *new]
        is_apart = are_apart([*known.raws[-1:], *new])
        return request_from(
            body,
            members,
            list_name="messages",
            raw_messages=raw_messages if is_apart else grouped(raw_messages),
            parse=parse_elements,
            cache=cache,
            bounds=("max_completion_tokens", "max_tokens", "n_predict"),
            standing=("tools", "functions"),
            known=known if is_apart else None,
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
        """See `Api.encode`. 'separate': a message of its own, of `block_role`. 'merged': in front of the content."""
        if request.original is not None and not leave_out and not insertions and not replaced:
            return request.original
        left_out, raws = frozenset(leave_out), request.raw_messages
        texts = texts_by_position(request, insertions)
        messages: list[Raw] = []
        begin = 0
        for position in sorted({*left_out, *texts, *replaced}):
            messages += raws[begin:position]
            begin = position + 1
            if position in left_out:
                continue
            blocks, raw = texts.get(position, []), raws[position]
            if blocks and placement == "merged":
                first, *others = elements_of(raw)
                messages += [with_text_in_front(first, "\n\n".join(blocks)), *others]
                continue
            messages += [Raw(msgspec.json.encode({"role": self.block_role, "content": text})) for text in blocks]
            messages.append(with_content(raw, replaced[position]) if position in replaced else raw)
        messages += raws[begin:]
        return encode_body(request, "messages", messages)

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`."""
        return Raw(encode_message(message))

    def in_front(self, raw: Raw, text: str) -> Raw:
        """See `Api.in_front`."""
        return with_text_in_front(raw, text)

    def continues(self, message: Message, previous: Message | None) -> bool:
        """See `Api.continues`: never, each message is an element of its own."""
        return False

    def new_stream(self, bytes_max: int, out: MemoryOut | None) -> ReplyStream:
        """See `Api.new_stream`."""
        return ReplyStream(ChatCapture(bytes_max), out)

    def parse_reply(self, body: bytes) -> Reply:
        """See `Api.parse_reply`."""
        return parse_reply(body)

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """See `Api.error_body`: OpenAI's shape."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


CHAT = ChatApi()
