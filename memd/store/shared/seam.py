"""The seam between a daemon and the log that it shares with others: rows, asked for and appended.

Rule: a stream grows at its end, by whoever knows where that is: `append` names the head that it follows, and does
nothing where another row has come meanwhile. So it may be repeated where an answer was lost: `since` tells whether the
row is in. No call may be made on an event loop.

    stream  a row is
    log     a group of entries, as a log file of its own; numbered by the highest canonical_id in it
    hot     events of the hot buffer, numbered 1, 2, …; a base is the whole buffer, and replaces the rows before it
    kept    a small file beside the log that is replaced as a whole; a base each
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import msgspec

from memd.store.layout import BOOK_NAMES

Stream = Literal["log", "hot", "kept"]
STREAMS: tuple[Stream, ...] = ("hot", "kept", "log")
_PAGE_TOPICS = 10_000
PAGE_ROWS = 256
"""Of one stream in one answer: 10 MB of a log in which each group has 20 chunks."""


class Row(msgspec.Struct, frozen=True):
    """A row of a stream."""

    stream: Stream
    last: int
    data: bytes
    is_base: bool = False
    """It replaces all before it."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a topic behind those that somebody knows."""

    generation: int = 0
    """Another one after rows were rewritten: then nothing counts that was read before. 0: there is no such topic."""
    heads: Mapping[Stream, int] = {}
    """The last row of each stream."""
    rows: tuple[Row, ...] = ()
    """Ascending in each stream; of a long one the first."""

    def of(self, stream: Stream) -> list[Row]:
        """The rows of one stream."""
        return [row for row in self.rows if row.stream == stream]


class SharedLog(Protocol):
    """The keeper of the rows. For any thread. All calls raise StoreError where it cannot be asked."""

    place: str
    """For people."""

    @property
    def cluster(self) -> str:
        """Tells it from all others; empty before `connect`."""

    @property
    def trouble(self) -> str:
        """Why it cannot be asked now, in a sentence with the remedy; empty: it can."""

    @property
    def trouble_seconds(self) -> float:
        """For how long that is so."""

    def connect(self) -> None:
        """Make what is missing there, and check its version. Raises StoreError: it cannot be used (StoreWriteFailed:
        that may pass)."""

    def ends(self, topic_ids: Collection[str]) -> dict[str, News]:
        """Where all streams of some topics end, in one round trip: news without rows."""

    def since(self, topic_id: str, after: Mapping[Stream, int], limit: int = PAGE_ROWS) -> News:
        """Return the first rows of some streams behind those that are known, each by its number."""

    def append(
        self, topic_id: str, stream: Stream, after: int, last: int, data: bytes, *, generation: int, base: bool = False
    ) -> bool:
        """Append one row durably, if the stream ends at `after` and the topic is of this generation; else return False.

        Args:
            last: the row's number, above `after`.
            generation: 0 where the topic is new: it is made.
            base: it replaces all rows before it, which are gone.

        Raises:
            InDoubt: the answer was lost; `since` tells.
            StoreWriteFailed: it is not stored (DiskFull where the database's disk is full).
        """

    def rewrite(self, topic_id: str, generation: int, rows: Mapping[tuple[Stream, int], bytes] | None) -> int:
        """Replace rows by others, or remove all of a topic (None), and begin its next generation, in one step.

        Ids never go back: a removed topic keeps its heads.

        Returns:
            The generation that was begun; 0 where it is of another one by now, and nothing was done.
        """

    def topics(self, after: str, limit: int) -> list[str]:
        """Return the names of the first topics behind a name that have a row, sorted."""

    def close(self) -> None:
        """Let go of it."""


def topics_in(kept: SharedLog) -> list[str]:
    """All topics of a shared log but its books."""
    found = page = kept.topics("", _PAGE_TOPICS)
    while len(page) == _PAGE_TOPICS:
        found += (page := kept.topics(page[-1], _PAGE_TOPICS))
    return [name for name in found if name not in BOOK_NAMES]
