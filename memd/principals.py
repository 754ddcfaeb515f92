"""Principals: who may do what with which topics, by which token each is known, and who makes room where it is full.

Rule: pure, and closed by default: what no right and no pattern allows is refused. A token is known by its SHA-256
alone, so that neither the settings nor a memory dump of the table shows one. Whether a topic exists is never asked
here: a refusal cannot tell. Of whoever has the most in a full place the oldest goes, again and again, until the rest
fits: so one may have all the room as long as nobody else wants it, and never throws out those who have less.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec

from memd.errors import Forbidden

Right = Literal["read", "write", "correct", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)
_DO = {**{right: right for right in RIGHTS}, "admin": "administer (admin)"}
"""In a sentence: it has no right to …"""
TOKEN_HEADER = "X-Memory-Token"  # noqa: S105  # a header's name
SECRET_PREFIX = "memd_"  # noqa: S105  # what all begin with
"""Of each secret that `memd token` makes, so that people and scanners of secrets know one."""
EVERY_TOPIC = "*"
OWNER_NAME = "owner"
"""No token's name: it stands for `auth.token`, and for everybody where there is no token at all."""


class Principal(msgspec.Struct, frozen=True):
    """Somebody who shows a token: a name, rights, and the topics in which they hold."""

    name: str
    topics: tuple[str, ...]
    """Patterns of topic names, in which `*` stands for any characters, also none."""
    rights: frozenset[Right]
    via: str = ""
    """Whence it asks, where memd asks itself in its name."""

    def may(self, right: Right, topic_id: str) -> bool:
        """Whether it has the right in this topic, be there such a topic or not."""
        return right in self.rights and _is_among(topic_id, self.topics)

    def check(self, right: Right, topic_id: str) -> None:
        """Make sure of the right in a topic. Raises Forbidden: it has none there, be there such a topic or not."""
        if not self.may(right, topic_id):
            message = f"the token {self.name!r} has no right to {_DO[right]} in the topic {topic_id[:140]!r}"
            where = f", only in {', '.join(self.topics)}" if right in self.rights else ""
            raise Forbidden(message + where, topic_id)

    def check_somewhere(self, right: Right) -> None:
        """Make sure of the right in some topics. Raises Forbidden: it has none anywhere."""
        if right not in self.rights:
            may = ", ".join(_DO[one] for one in sorted(self.rights))
            raise Forbidden(f"the token {self.name!r} has no right to {_DO[right]}; it may {may}")

    def check_everywhere(self, right: Right) -> None:
        """Make sure of the right in every topic. Raises Forbidden: it has none, or in some topics only."""
        self.check_somewhere(right)
        if not self.may_everywhere(right):
            needed = f"this needs the right to {_DO[right]} in every topic"
            raise Forbidden(f"{needed}; the token {self.name!r} has it in some")

    def may_everywhere(self, right: Right) -> bool:
        """Whether it has the right in every topic, which what concerns the whole daemon asks for."""
        return right in self.rights and EVERY_TOPIC in self.topics

    def narrowed(self, rights: Iterable[Right], topics: tuple[str, ...]) -> Principal:
        """The same one with at most these rights, in at most the topics of these patterns; none: in all of its own.

        Where two patterns overlap and neither has all names of the other, neither stays: such topics are left out.
        """
        own, left = self.topics, self.rights & frozenset(rights)
        if topics:
            own = (*(one for one in topics if _is_among(one, own)), *(one for one in own if _is_among(one, topics)))
        return Principal(self.name, tuple(dict.fromkeys(own)), left, self.via)

    @property
    def author(self) -> str:
        """The name under which entries, receipts and events have it; empty for the owner, who is not named there."""
        return "" if self.name == OWNER_NAME else self.name


OWNER = Principal(OWNER_NAME, (EVERY_TOPIC,), frozenset(RIGHTS))


class Principals:
    """The principals by the SHA-256 of their tokens; can be exchanged while requests are answered.

    One that knows no token is open: everybody is the owner. Once it has had tokens it never becomes open again: a list
    that got lost must not open what was closed.
    """

    def __init__(self, known: Mapping[bytes, Principal] | None = None) -> None:
        self._known = dict(known or {})
        self._lent: dict[bytes, Principal] = {}
        self.is_open = not self._known

    def exchange(self, known: Mapping[bytes, Principal]) -> None:
        """Know these from now on, and no others; the next request of a token that is gone is refused."""
        self._known = dict(known)
        self.is_open = self.is_open and not known

    @property
    def names(self) -> list[str]:
        """The names of those who have a token besides the owner, sorted."""
        return sorted(one.name for one in self._known.values() if one != OWNER)

    def lend(self, secret: str, principal: Principal) -> None:
        """Take a secret of memd's own for this principal from now on, whatever is exchanged meanwhile."""
        self._lent[digest_of(secret)] = principal

    def known(self, digest: str) -> Principal | None:
        """The principal whose token has this SHA-256, in hexadecimal digits; None if nobody's has.

        Where no token is needed, none can be looked up, and so none counts as taken back.
        """
        return OWNER if self.is_open else self._known.get(bytes.fromhex(digest))

    def find(self, secret: str) -> Principal | None:
        """The principal whose token this is; None if it is nobody's.

        The time it takes tells about the digest, of which nobody can choose a part, and nothing about the secret.
        """
        digest = digest_of(secret)
        return self._known.get(digest) or self._lent.get(digest)


def digest_of(secret: str) -> bytes:
    """SHA-256 of a token as it is shown in a header."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def overlapping(patterns: Iterable[str]) -> tuple[str, str] | None:
    """The first two of these patterns that some topic's name would match both; None if there are none."""
    seen: list[str] = []
    for pattern in patterns:
        for other in seen:
            if _meet(pattern, other):
                return other, pattern
        seen.append(pattern)
    return None


@lru_cache(maxsize=4_096)
def _is_among(topic_id: str, patterns: tuple[str, ...]) -> bool:
    return any(_fits(topic_id, pattern) for pattern in patterns)


def _fits(topic_id: str, pattern: str) -> bool:
    """Whether a name fits a pattern; in time that grows with both lengths alone, as clients choose names and a person
    who lets a program in chooses patterns. A regular expression would try every way to share the name among the stars.
    """
    first, *parts = pattern.split("*")
    if not parts:
        return topic_id == pattern
    last = parts.pop()
    place, end = len(first), len(topic_id) - len(last)
    if place > end or "/" in topic_id or not (topic_id.startswith(first) and topic_id.endswith(last)):
        return False
    for part in parts:  # where one stands first leaves most to the others
        found = topic_id.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


@lru_cache(maxsize=65_536)
def _meet(one: str, other: str) -> bool:
    if not one or not other:
        return not (one + other).strip("*")
    if one[0] == "*":
        return _meet(one[1:], other) or _meet(one, other[1:])
    if other[0] == "*":
        return _meet(other, one)
    return one[0] == other[0] and _meet(one[1:], other[1:])


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


def surplus(held: Iterable[tuple[str, int]], room: int) -> list[Leaving]:
    """Return what has to go so that the rest fits into the room, in the order in which it goes. `held`: as `Held` has
    it, oldest first. `room`: in the unit of `Held.size`."""
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
