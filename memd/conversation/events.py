"""The events of a hot buffer: every change to it, as a value, and the payloads of `hot.log`.

Rule: one event is one whole change; replaying all events rebuilds the buffer. Fields are only ever added, with
defaults, so that the journal of an earlier version can be read.
"""

from __future__ import annotations

import msgspec

from memd.conversation.conversation import Buffered, Line, Rewriting, TurnKey
from memd.messages import Block, BlockChunk, Message
from memd.notes import Note


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


class Branched(msgspec.Struct, frozen=True, tag="branched", omit_defaults=True):
    """A new conversation begins with a history that its client rewrote."""

    conversation: str
    parent: str
    rewriting: Rewriting
    at: float
    session: str | None = None


class Abandoned(msgspec.Struct, frozen=True, omit_defaults=True, tag="abandoned"):
    """The client continued from an earlier point of this conversation. A later append revives it."""

    conversation: str
    dropped_from: int | None = None
    """Where the answer begins that was given anew."""


class Marked(msgspec.Struct, frozen=True, tag="marked", omit_defaults=True):
    """The two marks of a conversation advanced."""

    conversation: str
    stored: int
    left_out: int
    instructions: list[int] = []
    """Positions of instructions before `left_out` that were stored."""
    repeats: list[int] = []
    """Positions of messages whose text the log had already, from elsewhere."""


class Departed(msgspec.Struct, frozen=True, tag="departed"):
    """Messages left the prompt one by one, and lines took the place of others."""

    conversation: str
    positions: list[int]
    lines: dict[int, Line]


class Lowered(msgspec.Struct, frozen=True, tag="lowered"):
    """The two marks were moved back, because the log does not have what they vouched for."""

    conversation: str
    stored: int
    left_out: int
    lost: list[int] = []
    """Positions of messages that are neither in the log nor here."""


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """The client sent again what was lost: messages by position."""

    conversation: str
    messages: dict[int, Message]


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """Messages that had left the prompt are in it again, because they fit."""

    conversation: str
    left_out: int
    messages: dict[int, Message]
    """By position: the texts that were not here any more."""


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A request arrived for the first time."""

    conversation: str
    key: TurnKey
    at: float


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """A block was placed before the user message with this digest."""

    conversation: str
    digest: bytes
    block: Block


class PlacedBefore(msgspec.Struct, frozen=True, tag="placed before"):
    """Blocks that stood in prompts, so that a client's echo of one is known from what only looks like one."""

    blocks: list[bytes]
    """`block_digest` of each, oldest first."""


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """The blocks before these user messages left the prompt."""

    conversation: str
    digests: list[bytes]


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """A note was taken; it is in the log only after `NoteStored`."""

    id: bytes
    """16 random bytes."""
    note: Note


class NoteStored(msgspec.Struct, frozen=True, tag="note stored"):
    """A note is in the log, or was withdrawn."""

    id: bytes


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """Messages and chunks were erased: no text of them stays here."""

    digests: list[bytes]
    """By which the log knew the messages."""
    uuids: list[bytes]
    """Of the chunks: blocks that show one leave the prompt."""


class Injected(msgspec.Struct, frozen=True, tag="injected", omit_defaults=True):
    """The chunks that one turn showed to the model."""

    chunks: list[BlockChunk]
    author: str = ""
    """The principal who asked; empty for the owner."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """A conversation was dropped from the buffer."""

    conversation: str


ConversationEvent = Appended | Abandoned | Marked | Departed | Lowered | Heard | Returned | Arrived | Placed | Removed
"""The events of one conversation that leave the others alone."""

BufferEvent = (
    Opened | Forked | Branched | ConversationEvent | Injected | PlacedBefore | Closed | Noted | NoteStored | Forgotten
)

encode_event = msgspec.msgpack.Encoder().encode
"""The journal's payload for an event."""
decode_event = msgspec.msgpack.Decoder[BufferEvent](BufferEvent).decode
"""The event of a payload; raises msgspec.DecodeError: it is none."""
