"""The contract of an API that agents speak: the seam behind which one differs from another.

Rule: an API is stateless and pure; `registry.py` lists all of them, and nothing outside an API's own folder asks which
one it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from msgspec import Raw

from memd.messages import Message
from memd.wire.capture import Reply
from memd.wire.message_cache import MessageCache
from memd.wire.reply_stream import ReplyStream
from memd.wire.request import Insertion, ModelRequest
from memd.wire.sideband import MemoryOut

Placement = Literal["separate", "merged"]
"""A block as a message of its own, or in front of the content of the message that it precedes."""


class Api(Protocol):
    """One of the APIs that agents speak. Stateless."""

    name: str
    """For the log and the metrics."""
    path: str
    """How the path of its requests ends."""
    count_path: str
    """Where llama-server counts a request's prompt tokens; the answer has `input_tokens`."""
    stream_type: str
    """The content type of a streamed reply."""

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """`body` as a request.

        Raises:
            BadRequestBody: it is none.
        """

    def encode(
        self,
        request: ModelRequest,
        *,
        leave_out: Collection[int] = (),
        insertions: Sequence[Insertion] = (),
        placement: Placement = "separate",
    ) -> bytes:
        """The body to forward: `request` without the messages at the indices `leave_out`, with `insertions` placed.

        Several insertions at one position keep their order; one before a message that is left out goes with it.
        """

    def encode_message(self, message: Message) -> Raw:
        """A message of ours in the syntax of `raw_messages`; attachments are gone, `[image]` stays in the text."""

    def continues(self, message: Message, previous: Message | None) -> bool:
        """Whether a message of ours has to stand in one element of the list with the one before it."""

    def new_stream(self, bytes_max: int, out: MemoryOut | None) -> ReplyStream:
        """The reader of a streamed reply, which keeps at most `bytes_max` of it and adds `out` to the stream."""

    def parse_reply(self, body: bytes) -> Reply:
        """The outcome of an exchange that was not streamed; a body that is no answer gives an empty `Reply`."""

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """An error in the API's own shape."""
