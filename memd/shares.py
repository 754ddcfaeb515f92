"""Shares: whose things leave a place that is full, and what is told of it.

Rule: pure. Of whoever has the most there the oldest goes, again and again, until the rest fits: so one principal may
have all the room as long as nobody else wants it, and never throws out those who have less. What leaves says why.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from memd.principals import OWNER_NAME

Thing = TypeVar("Thing")


class Held(NamedTuple):
    """One thing in the place."""

    author: str
    """The principal whose it is, as in `Principal.author`: empty for the owner."""
    size: int = 1


class Leaving(NamedTuple):
    """One thing that has to go."""

    place: int
    """Its position among what is held."""
    author: str
    had: int
    """How much its principal had before, in the unit of `Held.size`."""

    def why(self, room: int, things: str) -> str:
        """The reason, for people; `things`: the plural of what is held."""
        whose = self.author or OWNER_NAME
        return f"there is room for {room:,} {things}, and {whose} had the most of them: {self.had:,}"


def surplus(held: Iterable[Held], room: int) -> list[Leaving]:
    """Return what has to go so that the rest fits into the room, in the order in which it goes.

    Args:
        held: oldest first.
        room: in the unit of `Held.size`.
    """
    places, had = defaultdict[str, deque[tuple[int, int]]](deque), defaultdict[str, int](int)
    for place, (author, size) in enumerate(held):
        places[author].append((place, size))
        had[author] += size
    over = sum(had.values()) - room
    leaving: list[Leaving] = []
    if over <= 0:
        return leaving
    most = [(-size, places[author][0][0], author) for author, size in had.items()]
    heapq.heapify(most)
    while over > 0 and most:
        _, place, author = heapq.heappop(most)
        _, size = places[author].popleft()
        leaving.append(Leaving(place, author, had[author]))
        had[author] -= size
        over -= size
        if places[author]:
            heapq.heappush(most, (-had[author], places[author][0][0], author))
    return leaving


def by_turns(things: Iterable[tuple[str, Thing]]) -> Sequence[Thing]:
    """Return things, each with its principal's `author`, so that the principals take turns; of each in their order."""
    waiting = defaultdict[str, deque[Thing]](deque)
    for author, thing in things:
        waiting[author].append(thing)
    ordered = list[Thing]()
    while waiting:
        ordered += [things.popleft() for things in waiting.values()]
        waiting = defaultdict(deque, {author: things for author, things in waiting.items() if things})
    return ordered
