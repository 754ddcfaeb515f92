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
        """Note that a part with these chunks waits no more. Returns the segment to go on with: another one where most
        rows of this one are nobody's."""
        self._holders[[self.rows_of(chunk.entry.uuid)[0] for chunk in chunks]] -= 1
        left = np.flatnonzero(self._holders[: self.count])
        if 2 * len(left) > self.count or (self.count < ROWS_MIN and len(left)):
            return self
        new = PendingSegment(self.header.dimension)
        for row, holders in zip(left.tolist(), self._holders[left].tolist(), strict=True):
            new.hold([self._chunks[row]], holders)
        return new

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
