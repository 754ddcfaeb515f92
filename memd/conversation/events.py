"""What can happen to a hot buffer, as values: the payloads of `hot.log`.

Rule: an event tells a whole change and nothing else; replaying all of them gives back the buffer. Fields are only ever
added, with defaults, so that a journal of an earlier version can be read.
"""

from __future__ import annotations

import msgspec

from memd.conversation.conversation import Buffered, TurnKey
from memd.messages import Block, BlockChunk


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A conversation begins."""

    conversation: str
    session: str | None
    at: float


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    """Messages were added at a conversation's end."""

    conversation: str
    messages: list[Buffered]
    at: float


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """A new conversation begins with the first `position` messages of another one."""

    conversation: str
    parent: str
    position: int


class Abandoned(msgspec.Struct, frozen=True, tag="abandoned"):
    """The client went on from an earlier point of this conversation; whatever it appends later revives it."""

    conversation: str


class Marked(msgspec.Struct, frozen=True, tag="marked"):
    """The two marks of a conversation moved."""

    conversation: str
    stored: int
    left_out: int


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A request came for the first time."""

    conversation: str
    key: TurnKey
    at: float


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """A block was put in front of the user message with that digest."""

    conversation: str
    digest: bytes
    block: Block


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """The blocks in front of these user messages left the prompt."""

    conversation: str
    digests: list[bytes]


class Injected(msgspec.Struct, frozen=True, tag="injected"):
    """What one turn showed the model."""

    chunks: list[BlockChunk]


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """A conversation is forgotten."""

    conversation: str


Event = Opened | Appended | Forked | Abandoned | Marked | Arrived | Placed | Removed | Injected | Closed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One journal payload."""
    return _encoder.encode(event)


def decode_event(payload: bytes) -> Event:
    """The event of one journal payload; raises `msgspec.DecodeError` for anything else."""
    return _decoder.decode(payload)
