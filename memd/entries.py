"""What memd remembers: the entry of the log, its identity, its status and its utility.

Rule: pure values; nothing here reads a clock, a random source or a file by itself. A *chunk* is a piece of remembered
conversation with one uuid; an *entry* is one record of the log about a chunk. A chunk has one entry when it is created
and one more for every correction; the entry with the highest `canonical_id` is the chunk's present state.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.errors import BadTopicId

Vector = NDArray[np.float32]
"""A unit vector of the embedding model, shape `(dimension,)`, float32."""

TOPIC_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
TOPIC_ID_RULE = "use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit"
DEFAULT_TOPIC_ID = "default"

PUBLIC_ID_DIGITS_MIN = 4
UTILITY_RATIO = 1.5
UTILITY_STEPS_MIN = -4  # 1.5 ** -4 = 0.198: below the default min_score even for a perfect match, so invisible
UTILITY_STEPS_MAX = 10  # 1.5 ** 10 = 57.7


class Status(enum.IntEnum):
    """The state that an entry gives its chunk; stored as the integer."""

    ACTIVE = 0
    DEPRECATED = 1


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that is not in the log yet: the store gives it its `canonical_id` and, for a new chunk, a public id."""

    uuid: bytes
    """16 random bytes; the same for every entry of one chunk."""
    content: str
    vector: bytes
    """Little-endian float32, 4 × dimension bytes; empty for a Deprecated entry."""
    status: Status = Status.ACTIVE
    utility_steps: int = 0
    created_at: int
    """Microseconds since the epoch at which the *chunk* was first written; copied by corrections."""
    roles: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = ()
    """The 16-byte digests of the messages whose text is (partly) in `content`, in order."""
    kind: str = "turn"
    source: str | None = None
    supersedes: tuple[bytes, ...] = ()
    """The uuids that the Update which created this chunk replaced."""
    action: str | None = None
    reason: str | None = None
    public_id: str | None = None
    """None for a new chunk; for another entry of a known chunk the id that it already has."""
    origin_id: int | None = None
    """None for a new chunk (its own canonical_id); else the canonical_id of the chunk's first entry."""
    unknown: dict[str, Any] = {}
    """Fields that a newer version wrote and this one does not know: carried along unchanged."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the log. See `Draft` for the fields that both share."""

    uuid: bytes
    public_id: str
    canonical_id: int
    vector: bytes
    content: str
    status: Status
    origin_id: int
    utility_steps: int
    created_at: int
    roles: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = ()
    kind: str = "turn"
    source: str | None = None
    supersedes: tuple[bytes, ...] = ()
    action: str | None = None
    reason: str | None = None
    group_left: int = 0
    """How many records of the same append follow this one: recovery drops a group that is not whole."""
    unknown: dict[str, Any] = {}

    def as_draft(self) -> Draft:
        """The same once more: the next entry of its chunk, to be changed."""
        return Draft(**{name: getattr(self, name) for name in Draft.__struct_fields__})

    @property
    def embedding(self) -> Vector:
        """The vector as a read-only array of shape `(dimension,)`; `(0,)` for a Deprecated entry."""
        return np.frombuffer(self.vector, dtype="<f4")

    @property
    def multiplier(self) -> float:
        """The utility multiplier, `UTILITY_RATIO ** utility_steps`."""
        return utility_multiplier(self.utility_steps)


Action = Literal["Update", "Helpful", "Unhelpful"]


class Correction(msgspec.Struct, frozen=True):
    """What a caller says about chunks that it was shown."""

    chunk_ids: tuple[str, ...]
    action: Action
    reason: str
    """Kept for audit, never interpreted."""
    content: str | None = None
    """Update only: becomes one new chunk that takes the place of those named."""


def utility_multiplier(steps: int) -> float:
    """The factor on a chunk's score after `steps` net Helpful corrections (negative: Unhelpful)."""
    return float(UTILITY_RATIO**steps)


def clamp_utility_steps(steps: int) -> int:
    """`steps` within the bounds beyond which further praise or blame changes nothing."""
    return max(UTILITY_STEPS_MIN, min(UTILITY_STEPS_MAX, steps))


def checked_topic_id(topic_id: str) -> str:
    """`topic_id` itself if it is a legal topic name.

    Raises:
        BadTopicId: anything else; the pattern leaves no way to name a path outside the data directory.
    """
    if TOPIC_ID_PATTERN.fullmatch(topic_id) is None:
        raise BadTopicId(f"topic_id {topic_id[:140]!r} is not a topic name: {TOPIC_ID_RULE}")
    return topic_id


class CanonicalClock:
    """Gives out canonical ids: strictly increasing across the daemon, and the time of the entry in microseconds.

    Not thread-safe: only the one writer of a store draws from it.
    """

    def __init__(self, now_us: Callable[[], int], last: int = 0) -> None:
        self._now_us = now_us
        self.last = last

    def next(self) -> int:
        """`max(previous + 1, now in microseconds)`; fits a JavaScript number until the year 2255."""
        self.last = max(self.last + 1, self._now_us())
        return self.last

    def saw(self, canonical_id: int) -> None:
        """Raise the floor to an id that is already on disk."""
        self.last = max(self.last, canonical_id)
