"""Reading topics of a cluster, also those that other daemons have, as whoever wants to read sees it.

Rule: nothing is claimed for it, and nothing written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from memd.errors import StoreError
from memd.ingest.topic import Topic

if TYPE_CHECKING:
    from memd.ingest.topics import Topics


class Readable(NamedTuple):
    """Topics to be read."""

    topics: tuple[Topic, ...]
    is_fresh: bool
    """They are all there, with all that was acknowledged before they were asked for."""


class TopicReader(Protocol):
    """Opens topics of a cluster to be read, also those that other daemons have."""

    trouble: StoreError | None
    """Why they cannot be brought up to date now."""

    @property
    def count(self) -> int:
        """How many topics of others are in memory."""

    async def readable(self, topic_ids: Sequence[str], own: Topics) -> Readable:
        """See `Topics.readable`."""

    async def tend(self) -> None:
        """Let go of what is not read any more."""

    async def look(self, topic_ids: Sequence[str]) -> None:
        """See to it that nothing is left here of what was erased in these topics."""
