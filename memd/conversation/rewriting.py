"""A history that its client rewrote, as a branch of the conversation that it was.

Rule: nothing that the conversation knows is lost on the way: a message that the rewritten history still has keeps its
identity in the log, its text here and its block, and what was left out of the prompt stays left out. One that stands
pruned in the place of an earlier one (a tool result that became "[cleared]", an answer without its thoughts) counts as
that one, and is not stored a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from memd.conversation.aligning import Run, gaps
from memd.conversation.conversation import Buffered, Conversation, Rewriting
from memd.messages import RESULT_ROLES, Message


def rewriting_to(
    parent: Conversation,
    runs: Sequence[Run],
    messages: Sequence[Message],
    content_digests: Sequence[bytes],
    tokens: Sequence[int],
    stored_as: Sequence[bytes] = (),
) -> Rewriting:
    """The way from `parent` to the history of a request that has these runs in common with it; the lists are parallel.

    `stored_as`: see `Buffered`.
    """
    nothing = [b""] * len(messages)
    items = list(map(Buffered, nothing, content_digests, tokens, messages, stored_as or nothing))
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
    gone = _gone(parent, places, items, left_out)
    lines = {
        start + i: parent.lines[place + i]
        for start, place, length in kept
        for i in range(length if parent.lines else 0)
        if place + i in parent.lines and start + i >= left_out and start + i not in gone
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
    """The positions of messages that had left the parent's prompt one by one; results go with their calls."""
    found = [position for position, place in places.items() if position < left_out and place in parent.owed]
    if not parent.gone:
        return found
    calls: dict[str, bool] = {}
    for position in range(left_out, len(items)):
        message = items[position].message
        is_gone = places.get(position) in parent.gone
        if message is not None and message.role in RESULT_ROLES:
            is_gone = calls.get(message.tool_call_id, is_gone)
        elif message is not None:
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
