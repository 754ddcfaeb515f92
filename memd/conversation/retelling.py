"""Conversations as the shortest journal that rebuilds them: what one has in common with another is told once.

Rule: a branch refers to a conversation that was told before it, by ranges; only texts that stand in none of those are
written out. The events set every field themselves, so nothing depends on the state that the other one is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from memd.conversation import aligning
from memd.conversation.aligning import Run
from memd.conversation.conversation import Buffered, Conversation, Rewriting, is_instruction
from memd.conversation.events import (
    Abandoned,
    Appended,
    Arrived,
    Branched,
    BufferEvent,
    Departed,
    Lowered,
    Marked,
    Opened,
    Placed,
)
from memd.conversation.index import ConversationIndex


def retold(conversations: Iterable[Conversation]) -> Iterator[BufferEvent]:
    """The events that rebuild these conversations, in their order."""
    told = ConversationIndex()
    for one in conversations:
        contents = [item.content_digest for item in one.messages]
        like = told.likeliest(contents, None)[:1]
        blocks = list(one.blocks.items())
        if like:
            way = _way(one, like[0], aligning.aligned(contents, told.contents(like[0])))
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
        if one.former_lines:  # they came and left
            yield Departed(one.id, [], one.former_lines)
            yield Departed(one.id, list(one.former_lines), {})
        if one.abandoned:
            yield Abandoned(one.id, one.dropped_from)
        yield from (Arrived(one.id, key, at) for key, at in one.arrivals.items())
        yield from (Placed(one.id, digest, block) for digest, block in blocks)
        told.note(one)


def _way(one: Conversation, parent: Conversation, found: list[Run]) -> Rewriting:
    runs = [part for run in found for part in _equal_parts(one, parent, run)]
    added = [
        msgspec.structs.replace(one.messages[position], digest=b"")
        for ours, _ in aligning.gaps(runs, len(one), len(parent))
        for position in ours
    ]
    places = {one.messages[start + i].digest: (place + i, start + i) for start, place, n in runs for i in range(n)}
    blocks: list[tuple[int, int]] = []
    for digest, block in one.blocks.items():  # as many as the parent has too, for their order stays
        place, position = places.get(digest, (-1, -1))
        if place < 0 or parent.blocks.get(parent.messages[place].digest) != block:
            break
        blocks.append((place, position))
    return Rewriting(runs, added, [], one.stored, one.left_out, blocks, _departed(one), one.lines, sorted(one.lost))


def _departed(one: Conversation) -> list[int]:
    """The positions of messages that left one by one."""
    instructions = (position for position in range(one.left_out) if is_instruction(one.messages[position].message))
    return [*(position for position in instructions if position not in one.kept), *sorted(one.gone)]


def _equal_parts(one: Conversation, parent: Conversation, run: Run) -> Iterator[Run]:
    """The parts of a run that can be taken over as they are: with the same text, if any is needed, and identity."""
    start, place, length = run
    begun = 0
    for i in range(length):
        if not _same(one.messages[start + i], parent.messages[place + i], is_settled=start + i < one.settled):
            if i > begun:
                yield start + begun, place + begun, i - begun
            begun = i + 1
    if length > begun:
        yield start + begun, place + begun, length - begun


def _same(item: Buffered, other: Buffered, *, is_settled: bool) -> bool:
    """Whether a message can be taken over. `is_settled`: its text goes by the marks."""
    if item is other:
        return True
    texts = item.message == other.message or (is_settled and item.message is None)
    return texts and (item.identity, item.tokens, item.is_repeat) == (other.identity, other.tokens, other.is_repeat)
