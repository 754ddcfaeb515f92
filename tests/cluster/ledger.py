"""What clients of a cluster have said and were promised, and who kept which promise when.

Rule: the ledger knows only what was answered. A fact counts as acknowledged if its request was answered whole, with
200, without saying that it could not be stored; of everything else nobody knows whether it happened, so both are right.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Fact:
    """One thing that was said, with words that nothing else has in it."""

    key: str
    topic: str
    words: set[str]
    """Any of these is right; more than one only where an Update was interrupted."""
    parts: int = 1
    """Of how many pieces it is made, each with a name of its own: they are stored together or not at all."""
    acknowledged: bool = False
    chunk_ids: list[str] = field(default_factory=list)
    steps: int = 0
    """Helpful corrections that were acknowledged."""
    steps_in_doubt: int = 0
    is_updated: bool = False
    conversation: str = ""
    """In which it was said; none for a note."""
    answers: list[str] = field(default_factory=list)
    """X-Memory-Status of each time it was said in a chat; empty where nobody answered."""

    @property
    def names(self) -> list[str]:
        """What has to be found, each once."""
        return [self.key] if self.parts == 1 else [f"{self.key}/{part}" for part in range(self.parts)]


class Kept(NamedTuple):
    """A promise: who made it, about which topic, when it was asked for and when it was given."""

    daemon: int
    topic: str
    asked: float
    answered: float


class Answered(NamedTuple):
    """A request that a daemon answered to which nothing had been done itself."""

    seconds: float
    asked: float
    request: str

    @property
    def answered(self) -> float:
        return self.asked + self.seconds


class Refused(NamedTuple):
    """A request that was not answered with 200, by a daemon to which nothing had been done itself."""

    when: float
    daemon: int
    request: str
    what: str


class Ledger:
    """What all clients know. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.facts: dict[str, Fact] = {}
        self.kept: list[Kept] = []
        self.refused: list[Refused] = []
        self.counts: Counter[str] = Counter()
        self.answered: list[Answered] = []

    def add(self, fact: Fact) -> None:
        """Note a fact before it is said for the first time."""
        with self._lock:
            self.facts[fact.key] = fact

    def promise(self, daemon: int, topic: str, asked: float) -> None:
        """Note that something was acknowledged."""
        with self._lock:
            self.kept.append(Kept(daemon, topic, asked, time.monotonic()))

    def refuse(self, daemon: int, request: str, what: str) -> None:
        """Note a request that failed."""
        with self._lock:
            self.refused.append(Refused(time.monotonic(), daemon, request, what))

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def took(self, asked: float, request: str) -> None:
        """Note an answer of now."""
        with self._lock:
            self.answered.append(Answered(time.monotonic() - asked, asked, request))

    def longest(self, begin: float, end: float) -> Answered:
        """The longest of the answers that came in this time."""
        with self._lock:
            return max((one for one in self.answered if begin <= one.answered < end), default=Answered(0.0, begin, ""))

    def acknowledged(self) -> int:
        """How many facts are."""
        with self._lock:
            return sum(fact.acknowledged for fact in self.facts.values())

    def first_kept(self, topic: str, after: float, *, by: set[int]) -> float | None:
        """When the first promise about a topic was given by one of these daemons that was asked for after a moment."""
        with self._lock:
            times = [
                one.answered for one in self.kept if one.topic == topic and one.asked >= after and one.daemon in by
            ]
        return min(times, default=None)
