"""`POST /v1/responses`: parses its body, and encodes it again with the least possible change.

Rule: consecutive items of the assistant (reasoning, text, calls) are one message, as in llama.cpp; its element of
`raw_messages` is their JSON texts joined by commas. An `input` that is a string is the only element, and stays a string
until a block has to be placed beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Raw

from memd.messages import Message
from memd.wire.api import Placement
from memd.wire.capture import Reply
from memd.wire.chat.api import CHAT
from memd.wire.chat.message import with_content, with_text_in_front
from memd.wire.lenient_json import is_string
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
from memd.wire.responses.capture import ResponsesCapture, parse_reply
from memd.wire.responses.items import block_item, encode_items, grouped, item_of_string, parse_items
from memd.wire.sideband import MemoryOut

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
