"""A history as a branch of a conversation that it has messages in common with: one that its client rewrote, and the
conversations of a journal.

Rule: nothing that a conversation knows is lost on the way to a rewritten history: a message that it still has keeps its
identity in the log, its text here and its block, and what was left out of the prompt stays left out. One that stands
pruned in the place of an earlier one (a tool result that became "[cleared]", an answer without its thoughts) counts as
that one, and is not stored a second time.

In the shortest journal that rebuilds conversations, what one has in common with another is told once: a branch refers
to a conversation that was told before it, by ranges. The events set every field themselves, so nothing depends on the
state that the other one is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from memd.conversation import matching
from memd.conversation.conversation import (
    Buffered,
    Conversation,
    History,
    Rewriting,
    Run,
    is_answer,
    is_instruction,
)
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
from memd.conversation.matching import ConversationIndex, gaps
from memd.messages import RESULT_ROLES, Message


def rewriting_to(
    parent: Conversation, runs: Sequence[Run], history: History, stored_as: Sequence[bytes] = ()
) -> Rewriting:
    """The way from `parent` to the history of a request that has these runs in common with it. `stored_as`: see
    `Buffered`."""
    nothing = [b""] * len(history)
    items = list(map(Buffered, nothing, history.contents, history.tokens, history.messages, stored_as or nothing))
    places = _places(parent, runs, items)
    left_out = _left_out(parent, places, items)
    kept = list(_with_texts(parent, runs, left_out))
    added: list[Buffered] = []
    same: list[tuple[int, int]] = []
    for ours, _ in gaps(kept, len(items), len(parent)):
        for position in ours:
            item, place = items[position], places.get(position)
            if place is not None:
                same.append((position, place))
                if parent.messages[place].message is not None:
                    item = msgspec.structs.replace(item, message=None)
            added.append(item)
    blocks = [
        (place, position)
        for position, place in places.items()
        if parent.blocks and position >= left_out and parent.messages[place].digest in parent.blocks
    ]
    stored = next((p for p in range(len(items)) if places.get(p, len(parent)) >= parent.stored), len(items))
    # What the model has not answered yet is in the prompt, though it may say what has left it before.
    answered = next((p for p in range(len(items) - 1, -1, -1) if is_answer(items[p].message)), 0)
    gone = [position for position in _gone(parent, places, items, left_out) if position <= answered]
    lines = {
        start + i: parent.lines[place + i]
        for start, place, length in kept
        for i in range(length if parent.lines else 0)
        if place + i in parent.lines and left_out <= start + i <= answered and start + i not in gone
    }
    return Rewriting(kept, added, same, stored, left_out, blocks, gone, lines)


def _places(parent: Conversation, runs: Sequence[Run], items: Sequence[Buffered]) -> dict[int, int]:
    """For each message of the history that the parent has, whole or unpruned, its place there; ascending."""
    places = {start + i: place + i for start, place, length in runs for i in range(length)}
    pruned = {
        position: place
        for ours, theirs in gaps(runs, len(items), len(parent))
        if len(ours) == len(theirs)
        for position, place in zip(ours, theirs, strict=True)
        if _is_pruned(items[position].message, parent.messages[place].message)
    }
    start, place, length = runs[-1]
    if start + length < len(items):
        shortened = shortened_answer(parent, place + length, items[start + length].message)
        pruned |= {} if shortened is None else {start + length: shortened}
    return dict(sorted((places | pruned).items())) if pruned else places


def shortened_answer(parent: Conversation, start: int, message: Message | None) -> int | None:
    """The place of an answer, in the turn that is under way at `start`, of which a client kept this beginning.

    It stopped the answer, or cuts old ones short; it may have left out the calls before it.
    """
    for place in range(start, len(parent)):
        former = parent.messages[place].message
        if former is None or message is None or former.opens_turn:
            return None
        if _is_pruned(message, former) and former.said.strip().startswith(message.said.strip()):
            return place if message.role == "assistant" else None
    return None


def _is_pruned(message: Message | None, former: Message | None) -> bool:
    """Whether a message is what a client left of a former one in the same place."""
    if message is None or former is None or message.role != former.role:
        return False
    if message.attachments or [one.form for one in message.tool_calls] != [one.form for one in former.tool_calls]:
        return False
    if message.role == "assistant" and message.said == former.said:
        return True  # the client gave the answer its agent's name: LangGraph does
    if len(message.said) >= len(former.said):
        return False
    if message.role in RESULT_ROLES:
        return message.tool_call_id == former.tool_call_id
    return bool(message.said.strip()) and message.said.strip() in former.said


def _gone(parent: Conversation, places: dict[int, int], items: Sequence[Buffered], left_out: int) -> list[int]:
    """The positions of messages that had left the parent's prompt one by one; a unit goes as a whole."""
    found = [position for position, place in places.items() if position < left_out and place in parent.owed]
    if not parent.gone:
        return found
    calls: dict[str, bool] = {}
    is_unit_gone = False
    for position in range(left_out, len(items)):
        message = items[position].message
        is_gone = places.get(position) in parent.gone
        if message is not None and message.role in RESULT_ROLES:
            is_gone = calls.get(message.tool_call_id, is_gone)
        elif message is not None:
            if is_answer(message) or message.opens_turn:
                is_unit_gone = is_gone
            elif not is_instruction(message):
                is_gone = is_unit_gone
            calls.update((call.id, is_gone) for call in message.tool_calls)
        if is_gone:
            found.append(position)
    return found


def _left_out(parent: Conversation, places: dict[int, int], items: Sequence[Buffered]) -> int:
    """The mark of what is out of the prompt: behind the last message that is out of the parent's.

    It stands before a user message, as everywhere, and never behind the one that opened the turn. A history most of
    which the parent did not have stays visible.
    """
    if not parent.left_out:
        return 0
    out = [position for position, place in places.items() if place < parent.left_out]
    if not out or 2 * len(out) < out[-1]:
        return 0
    users = [position for position, item in enumerate(items) if item.message is not None and item.message.opens_turn]
    return next((position for position in users if position > out[-1]), users[-1] if users else 0)


def _with_texts(parent: Conversation, runs: Sequence[Run], left_out: int) -> Iterator[Run]:
    """The runs without messages that come back into the prompt and have no text in the parent any more."""
    for start, place, length in runs:
        begun = start
        for position in range(max(start, left_out), start + length):
            if parent.messages[place + position - start].message is None:
                if position > begun:
                    yield begun, place + begun - start, position - begun
                begun = position + 1
        if start + length > begun:
            yield begun, place + begun - start, start + length - begun


def retold(conversations: Iterable[Conversation]) -> Iterator[BufferEvent]:
    """The events that rebuild these conversations, in their order."""
    told = ConversationIndex()
    for one in conversations:
        contents = [item.content_digest for item in one.messages]
        like = told.likeliest(contents, None)[:1]
        blocks = list(one.blocks.items())
        if like:
            way = _way(one, like[0], matching.aligned(contents, told.contents(like[0])))
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
        for ours, _ in matching.gaps(runs, len(one), len(parent))
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
    marks = ((one.identity, one.tokens, one.is_repeat, one.is_erased) for one in (item, other))
    return texts and len({*marks}) == 1
