"""Principals: who may do what in which topics, how tokens identify them, and fair eviction when a store is full.

Rule: pure, and denies by default: access needs a right and a matching topic pattern. Tokens are known by their SHA-256
only, so that neither the settings nor a memory dump reveals one. Nothing here checks that a topic exists, so a refusal
cannot reveal it. Eviction repeatedly removes the oldest item of the principal who holds the most: one may use all free
room, but never displaces principals who hold less.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec

from memd.errors import Forbidden

Right = Literal["read", "write", "correct", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)
_DO = {**{right: right for right in RIGHTS}, "admin": "administer (admin)"}
"""Completes the sentence "it has no right to …"."""
TOKEN_HEADER = "X-Memory-Token"  # noqa: S105  # a header's name
SECRET_PREFIX = "memd_"  # noqa: S105  # the prefix of every secret
"""Prefix of the secrets that `memd token` makes, so that people and secret scanners recognize them."""
EVERY_TOPIC = "*"
OWNER_NAME = "owner"
"""Reserved: no token may have this name. Means `auth.token`, or anyone if no token is configured."""


class Principal(msgspec.Struct, frozen=True):
    """The holder of a token: a name, rights, and the topics in which the rights hold."""

    name: str
    topics: tuple[str, ...]
    """Patterns of topic names; `*` matches any characters, or none."""
    rights: frozenset[Right]
    via: str = ""
    """Origin of the request if memd itself asks in the principal's name."""

    def may(self, right: Right, topic_id: str) -> bool:
        """Return whether it has the right in this topic, which need not exist."""
        return right in self.rights and is_among(topic_id, self.topics)

    def check(self, right: Right, topic_id: str) -> None:
        """Check the right in a topic, which need not exist. Raises Forbidden: it lacks the right there."""
        if not self.may(right, topic_id):
            message = f"the token {self.name!r} has no right to {_DO[right]} in the topic {topic_id[:140]!r}"
            where = f", only in {', '.join(self.topics)}" if right in self.rights else ""
            raise Forbidden(message + where, topic_id)

    def check_somewhere(self, right: Right) -> None:
        """Check the right in any topic. Raises Forbidden: it has the right nowhere."""
        if right not in self.rights:
            may = ", ".join(_DO[one] for one in sorted(self.rights))
            raise Forbidden(f"the token {self.name!r} has no right to {_DO[right]}; it may {may}")

    def check_everywhere(self, right: Right) -> None:
        """Check the right in every topic. Raises Forbidden: it lacks the right, or has it only in some."""
        self.check_somewhere(right)
        if not self.may_everywhere(right):
            needed = f"this needs the right to {_DO[right]} in every topic"
            raise Forbidden(f"{needed}; the token {self.name!r} has it in some")

    def may_everywhere(self, right: Right) -> bool:
        """Return whether it has the right in every topic, as required for actions on the whole daemon."""
        return right in self.rights and EVERY_TOPIC in self.topics

    def narrowed(self, rights: Iterable[Right], topics: tuple[str, ...]) -> Principal:
        """Return a copy with at most these rights, limited to topics of these patterns; no patterns: all of its topics.

        If two patterns overlap and neither contains the other, both are dropped, so topics in the overlap are lost.
        """
        own, left = self.topics, self.rights & frozenset(rights)
        if topics:
            own = (*(one for one in topics if is_among(one, own)), *(one for one in own if is_among(one, topics)))
        return Principal(self.name, tuple(dict.fromkeys(own)), left, self.via)

    @property
    def author(self) -> str:
        """The name recorded in entries, receipts and events; empty for the owner."""
        return "" if self.name == OWNER_NAME else self.name


OWNER = Principal(OWNER_NAME, (EVERY_TOPIC,), frozenset(RIGHTS))


class Principals:
    """The principals by the SHA-256 of their tokens; can be replaced while requests are served.

    Without any token it is open: everyone is the owner. Once it has had tokens it never becomes open again, so that a
    lost list does not grant access.
    """

    def __init__(self, known: Mapping[bytes, Principal] | None = None) -> None:
        self._known = dict(known or {})
        self._lent: dict[bytes, Principal] = {}
        self.is_open = not self._known

    def exchange(self, known: Mapping[bytes, Principal]) -> None:
        """Replace all principals; the next request with a removed token is refused."""
        self._known = dict(known)
        self.is_open = self.is_open and not known

    @property
    def names(self) -> list[str]:
        """Sorted names of the principals who have a token, without the owner."""
        return sorted(one.name for one in self._known.values() if one != OWNER)

    def lend(self, secret: str, principal: Principal) -> None:
        """Accept one of memd's own secrets for this principal; `exchange` does not remove it."""
        self._lent[digest_of(secret)] = principal

    def known(self, digest: str) -> Principal | None:
        """Return the principal whose token has this SHA-256, in hexadecimal digits; None if there is none.

        If no token is required, every digest means the owner, so that no token counts as revoked.
        """
        return OWNER if self.is_open else self._known.get(bytes.fromhex(digest))

    def find(self, secret: str) -> Principal | None:
        """Return the principal with this token; None if there is none.

        Its timing depends on the digest, which nobody can choose, and reveals nothing about the secret.
        """
        digest = digest_of(secret)
        return self._known.get(digest) or self._lent.get(digest)


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 of a token as sent in a header."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def overlapping(patterns: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two of these patterns that can match the same name; None if there are none."""
    seen: list[str] = []
    for pattern in patterns:
        for other in seen:
            if _meet(pattern, other):
                return other, pattern
        seen.append(pattern)
    return None


@lru_cache(maxsize=4_096)
def is_among(topic_id: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name fits one of these patterns, whose only sign is `*`; `fnmatch` takes linear time for it."""
    return "/" not in topic_id and any(fnmatchcase(topic_id, pattern) for pattern in patterns)


def _meet(one: str, other: str) -> bool:
    if "*" not in one or "*" not in other:
        return fnmatchcase(one, other) or fnmatchcase(other, one)
    (head, tail), (other_head, other_tail) = (
        (pattern.partition("*")[0], pattern.rpartition("*")[2]) for pattern in (one, other)
    )
    return (head.startswith(other_head) or other_head.startswith(head)) and (
        tail.endswith(other_tail) or other_tail.endswith(tail)
    )


Thing = TypeVar("Thing")


class Leaving(NamedTuple):
    """One item to evict."""

    place: int
    """Its position among the stored items."""
    author: str
    had: int
    """Total of its owner before the eviction, in the unit of the sizes."""

    def why(self, room: int, things: str) -> str:
        """Return the reason, for people; `things`: the plural noun of the items."""
        whose = self.author or OWNER_NAME
        return f"there is room for {room:,} {things}, and {whose} had the most of them: {self.had:,}"


def surplus(held: Iterable[tuple[str, int]], room: int) -> list[Leaving]:
    """Return the items to evict so that the rest fits, in eviction order. `held`: the author (`Principal.author`) and
    size of each, oldest first. `room`: in the unit of the sizes."""
    places, had = defaultdict[str, deque[tuple[int, int]]](deque), defaultdict[str, int](int)
    for place, (author, size) in enumerate(held):
        places[author].append((place, size))
        had[author] += size
    over = sum(had.values()) - room
    leaving: list[Leaving] = []
    while over > 0 and places:
        author = min(places, key=lambda one: (-had[one], places[one][0]))
        place, size = places[author].popleft()
        leaving.append(Leaving(place, author, had[author]))
        had[author] -= size
        over -= size
        if not places[author]:
            del places[author]
    return leaving


def by_turns(things: Iterable[tuple[str, Thing]]) -> Sequence[Thing]:
    """Interleave things, given with their `author`, so that principals take turns; each keeps its order."""
    had, turns = Counter[str](), list[tuple[int, Thing]]()
    for author, thing in things:
        turns.append((had[author], thing))
        had[author] += 1
    return [thing for _, thing in sorted(turns, key=itemgetter(0))]
