"""Chunks that are not in the log yet: text that was said and waits for its embedding.

Rule: a pending chunk has the uuid and the public id that it keeps in the log, so it can be shown and named in a
correction at once. Until the model has read it, it is found by its words and by the question table's vector of it: what
waits is a segment like one of the log, without a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import Draft, Entry
from memd.store.disk import LocalDisk
from memd.store.lexical.postings import GrowingColumns
from memd.store.log.format import MAGIC_LOG, Header, Span
from memd.store.log.segment import GrowingSegment
from memd.store.snapshot import SegmentView

PENDING_SEGMENT = -1
"""In the places of chunks that are not stored yet."""
ROWS_MIN = 64
"""A segment of fewer is not made anew, however many of its chunks are gone."""
ROWS_AT_ONCE = 64
"""Rows that are added under a lock, in 10 ms at most: a message of megabytes has thousands."""


class PendingChunk(msgspec.Struct, frozen=True):
    """A chunk before it is stored."""

    draft: Draft
    """To be stored, without its vector."""
    entry: Entry
    """How it is shown meanwhile; its ids in time are those of the moment at which it was cut."""
    vector: NDArray[np.float32]
    """The question table's of its text, (dimension,), so that it is found by meaning at once; (0,) without a table."""


class PendingView(msgspec.Struct, frozen=True):
    """The chunks of a topic that wait, at one moment."""

    segment: SegmentView
    columns: GrowingColumns
    """Of the segment."""
    chunks: list[PendingChunk]
    """By row; those beyond the view's rows came later, and those that are dead there wait no more."""

    def __len__(self) -> int:
        return self.segment.live_count

    def __iter__(self) -> Iterator[PendingChunk]:
        return iter(self.by_row().values())

    def by_row(self) -> dict[int, PendingChunk]:
        """Those that wait."""
        return {row: self.chunks[row] for row in np.flatnonzero(~self.segment.dead).tolist()}


class PendingSegment(GrowingSegment):
    """The chunks that wait, a row for each, whichever conversations have it. Whoever changes it holds a lock."""

    def __init__(self, dimension: int) -> None:
        """`dimension`: of the table's vectors; 0 without a table."""
        header = Header(
            magic=MAGIC_LOG, dimension=dimension, segment_id=PENDING_SEGMENT, fingerprint="", topic=bytes(8)
        )
        super().__init__(LocalDisk(), (), header, searchable=True)
        self._chunks: list[PendingChunk] = []
        self._holders = np.zeros(ROWS_MIN, np.int32)
        """How many parts have each chunk."""

    def hold(self, chunks: Iterable[PendingChunk], holders: int = 1) -> None:
        """Note that a part has these chunks, or that so many have them."""
        chunks = list(chunks)
        new = {one.entry.uuid: one for one in chunks if not self.rows_of(one.entry.uuid)}
        entries = [msgspec.structs.replace(one.entry, vector=one.vector.tobytes()) for one in new.values()]
        self._chunks += new.values()  # before the rows, which tell readers how many there are
        self.extend(entries, [_NOWHERE] * len(entries))
        while len(self._holders) < self.count:
            self._holders = np.concatenate([self._holders, np.zeros_like(self._holders)])
        self._holders[[self.rows_of(one.entry.uuid)[0] for one in chunks]] += holders

    def release(self, chunks: Iterable[PendingChunk]) -> PendingSegment:
        """Note that a part with these chunks waits no more. Returns the segment to go on with: another one where no row
        of this one is somebody's."""
        self._holders[[self.rows_of(chunk.entry.uuid)[0] for chunk in chunks]] -= 1
        return self if self._holders[: self.count].any() else PendingSegment(self.header.dimension)

    def lacking(self, chunks: Iterable[PendingChunk]) -> int:
        """How many of these chunks have no row."""
        return sum(not self.rows_of(chunk.entry.uuid) for chunk in chunks)

    @property
    def is_mostly_dead(self) -> bool:
        """Whether it is to be made anew, because most of its rows are nobody's."""
        return self.count >= ROWS_MIN and bool(2 * np.count_nonzero(self._holders[: self.count]) <= self.count)

    def renewals(self) -> Iterator[PendingSegment]:
        """Make another one of the rows that are somebody's, some at a step: yields it, after the last step in the state
        of this one, which may change between two steps."""
        new, copied = PendingSegment(self.header.dimension), list[int]()
        while True:
            left = self._holders[: self.count] > 0
            left[copied] = False
            if not (rows := np.flatnonzero(left)[:ROWS_AT_ONCE].tolist()):
                break
            new.hold([self._chunks[row] for row in rows])
            copied += rows
            yield new
        new._holders[: new.count] = self._holders[copied]

    def view(self) -> PendingView:
        """The chunks that wait now."""
        dead = self._holders[: self.count] == 0
        return PendingView(SegmentView(self, self.rows, dead, self.matrix), self.columns, self._chunks)


_NOWHERE = Span(0, 0)
NOTHING_PENDING = PendingSegment(0).view()


class UnstoredText:
    """The text of a topic that was said and is not in its log, as of one moment; there is none."""

    is_partial = False
    """Some of it was left out of its chunks, because it was not cut yet."""

    def __bool__(self) -> bool:
        """Whether there is any; known at once."""
        return False

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> PendingView:
        """Its chunks. Called in a thread: text may be cut first.

        Args:
            but: digests of messages; what has no other messages need not be cut.
            until: a `time.monotonic()` after which nothing more is cut: what was not cut by then is left out.
        """
        return NOTHING_PENDING


NOTHING_UNSTORED = UnstoredText()
