"""The parts of a snapshot: a segment, and an index, at one point in time.

Rule: the arrays of a view are never written to; what is derived from them is kept once it was asked for.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from memd.entries import Status
from memd.errors import StoreError
from memd.settings.model import UtilitySettings
from memd.store.index.sealed_index import Candidates, SealedIndex
from memd.store.index.vectors import best_rows, cosines, multipliers, scores_of
from memd.store.log.columns import Bits, Floats, Records, Rows, UInts, uuid_bytes
from memd.store.log.segment import GrowingSegment, SealedSegment


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentView:
    """One segment at one point in time; the arrays are never written to."""

    segment: GrowingSegment | SealedSegment
    rows: Records
    dead: Bits
    """Superseded or Deprecated, per row."""
    matrix: Floats | None
    """Vectors of a growing segment, per row; None if there is an index, or if another model wrote the vectors."""

    @property
    def live_count(self) -> int:
        """The number of rows that count."""
        return len(self.dead) - int(np.count_nonzero(self.dead))

    @functools.cached_property
    def canonical_ids(self) -> UInts:
        """Of the rows, ascending; a copy, in which searching is quick."""
        return np.ascontiguousarray(self.rows["canonical_id"], dtype=np.uint64)

    @functools.cached_property
    def deprecated(self) -> frozenset[bytes]:
        """The uuids of the chunks that have a Deprecated entry here; one that was erased was not taken out."""
        rows = self.rows[(self.rows["status"] == Status.DEPRECATED) & (self.rows["is_erased"] == 0)]
        return frozenset(uuid_bytes(row["uuid_high"], row["uuid_low"]) for row in rows)

    @functools.cached_property
    def taken_out(self) -> UInts:
        """The first halves of the uuids in `deprecated`."""
        gone = (self.rows["status"] == Status.DEPRECATED) & (self.rows["is_erased"] == 0)
        return np.ascontiguousarray(self.rows["uuid_high"][gone], dtype=np.uint64)

    @functools.cached_property
    def chronology(self) -> tuple[UInts, Rows]:
        """The live rows in the order in which their chunks were first stored: ascending origin_ids, and the rows."""
        live = np.flatnonzero(~self.dead)
        origins = self.rows["origin_id"][live].astype(np.uint64)
        order = np.argsort(origins, kind="stable")
        return origins[order], live[order]

    def cosines(self, queries: Floats) -> NDArray[np.float64]:
        """Return the best cosine of each row over some queries; see `vectors.cosines`."""
        assert self.matrix is not None, "only a growing segment is scanned"
        return cosines(self.matrix, queries)

    def best(self, cosine: NDArray[np.float64], k: int, utility: UtilitySettings) -> Candidates:
        """Return the best `k` live rows by score, given the cosine of each row."""
        live = np.flatnonzero(~self.dead)
        cosine, multiplier = cosine[live], multipliers(self.rows["utility_steps"][live], utility)
        best = best_rows(scores_of(cosine, multiplier), k)
        return Candidates(np.full(len(best), self.segment.segment_id), live[best], cosine[best], multiplier[best])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IndexView:
    """One index at one point in time."""

    index: SealedIndex
    dead: Bits
    """Superseded or Deprecated, per label."""
    is_choice: bool = False
    """Whether others count too, which are marked dead here because they are not wanted."""

    def search(self, queries: Floats, k: int, utility: UtilitySettings) -> list[Candidates]:
        """Return chunks that include the best `k` live ones by score."""
        try:
            return self.index.search(queries, k, self.dead, utility, is_choice=self.is_choice)
        except StoreError:  # the topic replaces a damaged index; readers that still hold it use the log
            return self.index.scan(queries, k, self.dead, utility)
