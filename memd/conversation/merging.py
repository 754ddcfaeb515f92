"""Two daemons that write into the hot buffer of one topic: what one did while the other's was on its way.

Rule: pure. Events of different conversations, and of one that only one side has gone on with, may be applied in any
order. Where both have gone on with one conversation, the one that was first counts, and what the other said is received
again, as if its client had sent it now: it becomes a branch, or turns out to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memd.conversation.conversation import Conversation
from memd.conversation.events import (
    Appended,
    Branched,
    BufferEvent,
    Closed,
    Forgotten,
    Forked,
    Injected,
    Noted,
    NoteStored,
    Opened,
    PlacedBefore,
)
from memd.conversation.hot_buffer import HotBuffer

_OF_ALL = Injected | PlacedBefore | Noted | NoteStored | Forgotten
"""Events of no conversation."""


def clashing(theirs: Iterable[BufferEvent], own: Iterable[BufferEvent]) -> set[str]:
    """The conversations that both sides have gone on with, or one has closed; and those that own ones began from."""
    their_grown, their_closed, their_subjects = _subjects(theirs)
    grown, closed, subjects = _subjects(own)
    found = (their_grown & grown) | (their_closed & subjects) | (closed & their_subjects)
    for event in own:
        if isinstance(event, Forked | Branched) and event.parent in found:
            found.add(event.conversation)
    return found


def rebased(
    buffer: HotBuffer, kept: HotBuffer, theirs: Sequence[BufferEvent] | None, own: Sequence[BufferEvent]
) -> None:
    """Bring a buffer to what is kept, and what it alone says behind that.

    Its conversations stay the same objects, as requests are under way that have them.

    Args:
        buffer: with all events of its own; `own` are those of them that are not kept. Its unsaved ones are replaced.
        kept: as the rows tell it.
        theirs: the events in the rows that the buffer did not have; None: nobody knows which those were.
    """
    subjects = _subjects(own)[2]
    if theirs is None:
        clash = {name for name in subjects if kept.of_id(name) is not None or buffer.of_id(name) is None}
        begun = {one.conversation: one.parent for one in own if isinstance(one, Forked | Branched)}
        clash |= {name for name, parent in begun.items() if parent in clash or kept.of_id(parent) is None}
    else:
        clash = clashing(theirs, own)
    former = [one.copied() for one in buffer.conversations() if one.id in clash]
    own_alone = {one.id for one in buffer.conversations()} & subjects - clash
    buffer.exchange(kept, except_for=own_alone)
    buffer.take_unsaved()
    left = [event for event in own if isinstance(event, _OF_ALL) or event.conversation not in clash]
    buffer.replay([event for event in left if isinstance(event, _OF_ALL)])
    if theirs is not None:
        buffer.replay([event for event in theirs if not isinstance(event, _OF_ALL) and event.conversation in own_alone])
    buffer.leave_unsaved(left)
    for one in former:
        _received_again(buffer, one)


def _received_again(buffer: HotBuffer, one: Conversation) -> None:
    """Add what a conversation says to the buffer, unless it has it."""
    items = one.messages
    start = next((i + 1 for i in range(len(items) - 1, -1, -1) if items[i].message is None), 0)
    tail = items[start:]
    messages = [item.message for item in tail if item.message is not None]
    if not tail or buffer.holder_of(items[-1].digest) is not None:
        target = buffer.holder_of(items[-1].digest) if items else None
    else:
        digests, tokens = [item.content_digest for item in tail], [item.tokens for item in tail]
        target = buffer.receive(messages, digests, tokens, session=one.session, now=one.used_at).conversation
    if target is not None:
        known = {item.digest for item in target.messages}
        for digest, block in one.blocks.items():
            if digest in known and digest not in target.blocks:
                buffer.place(target, digest, block)
        for key, at in one.arrivals.items():
            if key not in target.arrivals:
                buffer.note_arrival(target, key, at, 0)


def _subjects(events: Iterable[BufferEvent]) -> tuple[set[str], set[str], set[str]]:
    """The conversations that grow, those that are closed, and all."""
    grown, closed, subjects = set(), set(), set()
    for event in events:
        if isinstance(event, _OF_ALL):
            continue
        subjects.add(event.conversation)
        if isinstance(event, Forked | Branched):
            subjects.add(event.parent)
        if isinstance(event, Appended | Opened | Forked | Branched):
            grown.add(event.conversation)
        elif isinstance(event, Closed):
            closed.add(event.conversation)
    return grown, closed, subjects
