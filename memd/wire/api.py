"""The contract that each API of a model server implements: chat completions, responses, Anthropic's, Ollama's.

Rule: an API is stateless and pure. Code outside an API's own folder never asks which API it has; `registry.py` lists
them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.wire.capture import Reply
from memd.wire.lenient_json import with_stand_ins
from memd.wire.message_cache import MessageCache
from memd.wire.reply_stream import ReplyStream
from memd.wire.request import NOTHING_REPLACED, Insertion, ModelRequest
from memd.wire.sideband import MemoryOut

Placement = Literal["separate", "merged"]
"""`separate`: a block becomes a message of its own; `merged`: it is put in front of the next message's content."""


class Api(Protocol):
    """One API."""

    name: str
    """As in the log and the metrics."""
    path: str
    """The end of the path of its requests."""
    count_path: str
    """The path at which llama-server counts a request's prompt tokens; its answer has `input_tokens`."""
    stream_type: str
    """The content type of a streamed reply."""

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """Parse a request.

        Raises:
            BadRequestBody: `body` is no request of this API.
        """

    def encode(
        self,
        request: ModelRequest,
        *,
        leave_out: Collection[int] = (),
        replaced: Mapping[int, str] = NOTHING_REPLACED,
        insertions: Sequence[Insertion] = (),
        placement: Placement = "separate",
    ) -> bytes:
        """Encode the body to forward: `request` without the messages at the indices `leave_out`, with `insertions`.

        `replaced`: by the index of a tool's result the text that takes the place of its content; it stays the answer to
        its call. Insertions at one position keep their order. An insertion before a message that is left out is left
        out too.
        """

    def encode_message(self, message: Message) -> Raw:
        """Encode a message in the syntax of `raw_messages`, without attachments; the text has `[image]` for each."""

    def in_front(self, raw: Raw, text: str) -> Raw:
        """Put `text` and an empty line in front of the content of a user's message in the syntax of `raw_messages`."""

    def continues(self, message: Message, previous: Message | None) -> bool:
        """Tell whether a message must share one element of the list with the message before it."""

    def new_stream(self, bytes_max: int, out: MemoryOut | None) -> ReplyStream:
        """Return a reader for a streamed reply that captures at most `bytes_max` of it and adds `out` to the stream."""

    def parse_reply(self, body: bytes) -> Reply:
        """Parse a reply that was not streamed; a body that is none gives an empty `Reply`."""

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """Encode an error in the API's own shape."""


def read_request(api: Api, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
    """Parse a request of `api` as `Api.parse` does, also one whose text is no Unicode at some places.

    Raises:
        BadRequestBody: `body` is no request of this API.
    """
    try:
        return api.parse(body, cache)
    except BadRequestBody:
        readable = with_stand_ins(body)
        if readable == body:
            raise
    request = api.parse(readable, cache)
    original = None if request.original is None else body
    return msgspec.structs.replace(request, original=original, has_stand_ins=True)
