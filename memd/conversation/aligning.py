"""Which messages of a rewritten history are messages of a conversation: runs of equal contents, in the same order.

Rule: linear in the messages, whatever they say. Contents that occur once on either side are anchors (a patience diff);
of anchors that cross each other the longest ascending chain stays, and each grows over its equal neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

Run = tuple[int, int, int]
"""Messages that both have: where they begin in the history, where in the conversation, how many they are."""


def common_length(ours: Sequence[bytes], theirs: Sequence[bytes], one: int = 0, other: int = 0) -> int:
    """The number of equal contents from `one` in ours and `other` in theirs on.

    Slices are compared, which is quick, of doubling and then of halving length.
    """
    end = min(len(ours) - one, len(theirs) - other)
    known, step = 0, 4
    while step:
        step = min(step, end - known)
        if ours[one + known : one + known + step] == theirs[other + known : other + known + step]:
            known += step
            step *= 2
        else:
            end, step = known + step - 1, step // 2
    return known


def aligned(history: Sequence[bytes], conversation: Sequence[bytes]) -> list[Run]:
    """The runs that a history shares with a conversation, both given by their content digests; ascending in both."""
    history, conversation = list(history), list(conversation)
    head = common_length(history, conversation)
    runs: list[Run] = [(0, 0, head)] if head else []
    ours, theirs = head, head
    for one, other in (*_anchors(history, conversation, head), (len(history), len(conversation))):
        if one < ours or other < theirs:
            continue  # an earlier anchor has grown over it
        # Backwards as far as the run before, then forwards.
        while one > ours and other > theirs and history[one - 1] == conversation[other - 1]:
            one, other = one - 1, other - 1
        length = common_length(history, conversation, one, other)
        if length:
            runs.append((one, other, length))
        ours, theirs = one + length, other + length
    return _joined(runs)


def total(runs: Sequence[Run]) -> int:
    """The number of messages in runs."""
    return sum(length for _, _, length in runs)


def gaps(runs: Sequence[Run], history: int, conversation: int) -> list[tuple[range, range]]:
    """The gaps between runs, in a history and in a conversation of these lengths, where either side has something."""
    found = []
    ours = theirs = 0
    for one, other, length in (*runs, (history, conversation, 0)):
        if one > ours or other > theirs:
            found.append((range(ours, one), range(theirs, other)))
        ours, theirs = one + length, other + length
    return found


def _anchors(history: Sequence[bytes], conversation: Sequence[bytes], start: int) -> list[tuple[int, int]]:
    """The places of contents that both have once from `start` on, without those that cross: ascending pairs."""
    ours, theirs = _once(history, start), _once(conversation, start)
    shared = ours.keys() & theirs.keys()
    pairs = [(ours[content], theirs[content]) for content in history[start:] if content in shared]
    places = [place for _, place in pairs]
    return pairs if places == sorted(places) else _ascending(pairs)


def _once(contents: Sequence[bytes], start: int) -> dict[bytes, int]:
    """The places of the contents that occur once from `start` on."""
    places = dict(zip(contents[start:], range(start, len(contents)), strict=True))
    if len(places) < len(contents) - start:
        for content, count in Counter(contents[start:]).items():
            if count > 1:
                del places[content]
    return places


def _ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest chain of pairs, given in the order of the first, that ascends in the second too."""
    tops: list[int] = []  # the least second value with which a chain of each length ends
    ends: list[int] = []  # the pair that it belongs to
    before: list[int] = []
    for number, (_, place) in enumerate(pairs):
        length = bisect_left(tops, place)
        before.append(ends[length - 1] if length else -1)
        tops[length : length + 1] = [place]
        ends[length : length + 1] = [number]
    chain: list[tuple[int, int]] = []
    number = ends[-1] if ends else -1
    while number >= 0:
        chain.append(pairs[number])
        number = before[number]
    return chain[::-1]


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Runs of which none begins where the one before it ends on both sides."""
    joined: list[Run] = []
    for one, other, length in runs:
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (one, other):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + length)
        else:
            joined.append((one, other, length))
    return joined
