"""Two daemons that write into the buffer of one topic at the same time end with the same conversations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from memd.conversation.events import BufferEvent
from memd.conversation.hot_buffer import HotBuffer, clashing, rebased
from memd.messages import Message

_names = itertools.count(1)


def made(events: Sequence[BufferEvent] = ()) -> HotBuffer:
    buffer = HotBuffer(lambda: f"c{next(_names)}", 64)
    buffer.replay(events)
    return buffer


def told(buffer: HotBuffer, *texts: str) -> None:
    """A client's whole history: user and assistant in turns."""
    messages = [Message(role="user" if i % 2 == 0 else "assistant", text=text) for i, text in enumerate(texts)]
    buffer.receive(messages, [one.content_digest for one in messages], [1] * len(messages), session=None, now=1.0)


def said(buffer: HotBuffer) -> list[list[str]]:
    return sorted(
        [item.message.text for item in one.messages if item.message is not None] for one in buffer.conversations()
    )


def test_what_both_were_told_is_there_once() -> None:
    told(common := made(), "one", "two", "three")
    begun = common.take_unsaved()
    ours, theirs = made(begun), made(begun)
    told(ours, "one", "two", "three", "four", "five")
    told(theirs, "one", "two", "three", "four")
    their_events = theirs.take_unsaved()
    own = ours.take_unsaved()
    assert clashing(their_events, own)

    rebased(ours, made([*begun, *their_events]), their_events, own)

    assert said(ours) == [["one", "two", "three", "four", "five"]]
    after = made([*begun, *their_events, *ours.take_unsaved()])
    assert said(after) == said(ours)


def test_where_both_went_on_differently_both_are_kept() -> None:
    told(common := made(), "one", "two", "three")
    begun = common.take_unsaved()
    ours, theirs = made(begun), made(begun)
    told(ours, "one", "two", "three", "four", "this way")
    told(theirs, "one", "two", "three", "four", "that way")
    their_events, own = theirs.take_unsaved(), ours.take_unsaved()

    rebased(ours, made([*begun, *their_events]), their_events, own)

    assert {texts[-1] for texts in said(ours)} == {"this way", "that way"}
    assert said(made([*begun, *their_events, *ours.take_unsaved()])) == said(ours)


def test_where_nobody_knows_what_came_in_between_nothing_is_lost_or_there_twice() -> None:
    told(common := made(), "one", "two", "three")
    begun = common.take_unsaved()
    ours, theirs = made(begun), made(begun)
    told(ours, "one", "two", "three", "four", "five")
    told(ours, "alone", "here", "only")
    told(theirs, "one", "two", "three", "four", "five", "six", "seven")
    told(theirs, "elsewhere", "and", "there")
    own = ours.take_unsaved()
    kept = made(theirs.retelling()())

    rebased(ours, kept, None, own)

    assert said(ours) == sorted(
        [
            ["one", "two", "three", "four", "five", "six", "seven"],
            ["alone", "here", "only"],
            ["elsewhere", "and", "there"],
        ]
    )
