"""The events of a hot buffer: every change to it, as a value, and the payloads of `hot.log`.

Rule: one event is one complete change; replaying all events rebuilds the buffer. Fields are only ever added, with
defaults, so that journals of earlier versions stay readable.

The shortest journal that rebuilds conversations writes shared messages once: a branch refers by ranges to a
conversation written before it. Each branch's events set every field, so they do not depend on that conversation's
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from memd.conversation.conversation import Buffered, Conversation, Line, Rewriting, Run, TurnKey, is_instruction
from memd.conversation.matching import ConversationIndex, aligned, gaps, parts
from memd.messages import Block, BlockChunk, Message
from memd.notes import Note

ARRIVALS_KEPT = 16
"""Limit on recent requests remembered per conversation; a client retries fewer at once."""


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
    """Start of the answer that was regenerated."""


class Marked(msgspec.Struct, frozen=True, tag="marked", omit_defaults=True):
    """The two marks of a conversation advanced."""

    conversation: str
    stored: int
    left_out: int
    instructions: list[int] = []
    """Positions of instructions before `left_out` that were stored."""
    repeats: list[int] = []
    """Positions of messages whose text the log already had from elsewhere."""


class Departed(msgspec.Struct, frozen=True, tag="departed"):
    """Messages left the prompt one by one, and lines replaced others."""

    conversation: str
    positions: list[int]
    lines: dict[int, Line]


class Lowered(msgspec.Struct, frozen=True, tag="lowered"):
    """The two marks were moved back, because the log lacks messages they covered."""

    conversation: str
    stored: int
    left_out: int
    lost: list[int] = []
    """Positions of messages that are neither in the log nor here."""


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """The client sent lost messages again, by position."""

    conversation: str
    messages: dict[int, Message]


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """Messages that had left the prompt are in it again, because they fit."""

    conversation: str
    left_out: int
    messages: dict[int, Message]
    """Texts that had been dropped here, by position."""


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A request arrived for the first time."""

    conversation: str
    key: TurnKey
    at: float
    head: int = 0
    """See `TopicLog.head`: what the request has appended is above it."""


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """A block was placed before the user message with this digest."""

    conversation: str
    digest: bytes
    block: Block


class PlacedBefore(msgspec.Struct, frozen=True, tag="placed before"):
    """Blocks that were in prompts, to recognize a client's echo of one."""

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
    """Messages and chunks were erased; their texts are dropped here."""

    digests: list[bytes]
    """Digests by which the log knew the messages."""
    uuids: list[bytes]
    """The chunks' uuids; blocks that show one leave the prompt."""


class Injected(msgspec.Struct, frozen=True, tag="injected", omit_defaults=True):
    """The chunks that one turn showed to the model."""

    chunks: list[BlockChunk]
    author: str = ""
    """The principal who asked; empty for the owner."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """A conversation was dropped from the buffer."""

    conversation: str


ConversationEvent = Appended | Abandoned | Marked | Departed | Lowered | Heard | Returned | Arrived | Placed | Removed
"""Events that change only one conversation."""


def apply(event: ConversationEvent, one: Conversation) -> None:
    """Apply one of a conversation's own events."""
    is_added = isinstance(event, Appended | Arrived | Placed) and one.dropped_from is None
    one.changes += not (is_added or (isinstance(event, Marked) and not event.repeats))
    if isinstance(event, Appended):
        one.messages += event.messages
        one.used_at = event.at
        one.abandoned, one.dropped_from = False, None
    elif isinstance(event, Abandoned):
        one.abandoned, one.dropped_from = True, event.dropped_from
    elif isinstance(event, Marked):
        one.mark_stored(min(event.stored, len(one)), event.instructions, event.repeats)
        one.mark_left_out(min(event.left_out, len(one)))
    elif isinstance(event, Departed):
        one.mark_gone(event.positions, event.lines)
    elif isinstance(event, Lowered):
        one.mark_lost(event.stored, event.left_out, event.lost)
    elif isinstance(event, Returned):
        one.mark_returned(event.left_out, event.messages)
    elif isinstance(event, Heard):
        one.mark_heard(event.messages)
    elif isinstance(event, Arrived):
        one.arrivals.pop(event.key, None)
        one.arrivals[event.key] = event.at, event.head
        while len(one.arrivals) > ARRIVALS_KEPT:
            del one.arrivals[next(iter(one.arrivals))]
    elif isinstance(event, Placed):
        one.blocks[event.digest] = event.block
    else:
        for digest in event.digests:
            one.blocks.pop(digest, None)


OfAll = Injected | PlacedBefore | Noted | NoteStored | Forgotten
"""Events that belong to no conversation."""
Branching = Forked | Branched

BufferEvent = Opened | Branching | ConversationEvent | Closed | OfAll

encode_event = msgspec.msgpack.Encoder().encode
"""Encodes an event as the journal's payload."""
decode_event = msgspec.msgpack.Decoder[BufferEvent](BufferEvent).decode
"""Decodes a payload; raises msgspec.DecodeError."""


def retold(conversations: Iterable[Conversation]) -> Iterator[BufferEvent]:
    """Yield the events that rebuild these conversations, in order."""
    told = ConversationIndex()
    for one in conversations:
        contents = [item.content_digest for item in one.messages]
        like = told.likeliest(contents, None)[:1]
        blocks = list(one.blocks.items())
        if like:
            way = _way(one, like[0], aligned(contents, told.contents(like[0])))
            yield Branched(one.id, like[0].id, way, one.used_at, one.session)
            blocks = blocks[len(way.blocks) :]
        else:
            yield Opened(one.id, one.session, one.used_at)
            yield Appended(one.id, list(one.messages), one.used_at)
            yield Marked(one.id, one.stored, one.left_out)
            if one.lost:
                yield Lowered(one.id, one.stored, one.left_out, sorted(one.lost))
            if (departed := _departed(one)) or one.lines:
                yield Departed(one.id, departed, one.lines)
        if one.former_lines:  # add and remove them
            yield Departed(one.id, [], one.former_lines)
            yield Departed(one.id, list(one.former_lines), {})
        if one.abandoned:
            yield Abandoned(one.id, one.dropped_from)
        yield from (Arrived(one.id, key, *first) for key, first in one.arrivals.items())
        yield from (Placed(one.id, digest, block) for digest, block in blocks)
        told.note(one)


def _way(one: Conversation, parent: Conversation, found: list[Run]) -> Rewriting:
    runs = [
        *parts(found, lambda at, place: _same(one.messages[at], parent.messages[place], is_settled=at < one.settled))
    ]
    added = [
        msgspec.structs.replace(one.messages[position], digest=b"")
        for ours, _ in gaps(runs, len(one), len(parent))
        for position in ours
    ]
    places = {one.messages[start + i].digest: (place + i, start + i) for start, place, n in runs for i in range(n)}
    blocks: list[tuple[int, int]] = []
    for digest, block in one.blocks.items():  # only as long a beginning as the parent has too, so that the order stays
        place, position = places.get(digest, (-1, -1))
        if place < 0 or parent.blocks.get(parent.messages[place].digest) != block:
            break
        blocks.append((place, position))
    return Rewriting(runs, added, [], one.stored, one.left_out, blocks, _departed(one), one.lines, sorted(one.lost))


def _departed(one: Conversation) -> list[int]:
    """Return the positions of messages that left one by one."""
    instructions = (position for position in range(one.left_out) if is_instruction(one.messages[position].message))
    return [*(position for position in instructions if position not in one.kept), *sorted(one.gone)]


def _same(item: Buffered, other: Buffered, *, is_settled: bool) -> bool:
    """Return whether a message can be taken over. `is_settled`: its text is dropped according to the marks."""
    if item is other:
        return True
    texts = item.message == other.message or (is_settled and item.message is None)
    marks = ((one.identity, one.tokens, one.is_repeat, one.is_erased) for one in (item, other))
    return texts and len({*marks}) == 1
