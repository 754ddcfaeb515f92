"""Which chunks were first stored just before and just after others, whatever segments they are in.

Rule: computed from views alone, of live chunks alone; a view that can have no nearer chunk is not compared.
"""

from __future__ import annotations

import numpy as np

from memd.store.log.columns import Rows, UInts
from memd.store.views import SegmentView


class NeighbourSearch:
    """The nearest smaller and larger origin_ids found so far for some origin_ids, and their places."""

    def __init__(self, origins: UInts) -> None:
        self._origins = origins
        self._lower = np.zeros(len(origins), dtype=np.uint64)
        self._upper = np.full(len(origins), np.iinfo(np.uint64).max, dtype=np.uint64)
        self._before: list[tuple[int, int] | None] = [None] * len(origins)
        self._after: list[tuple[int, int] | None] = [None] * len(origins)

    def to_compare(self, view: SegmentView, done: Rows) -> Rows:
        """Return the positions for which the view may have a nearer chunk."""
        known, _ = view.chronology
        if not len(known):
            return np.empty(0, dtype=np.intp)
        wanted = (known[-1] > self._lower) & (known[0] < self._upper)
        wanted[done] = False
        return np.flatnonzero(wanted)

    def update(self, segment_id: int, view: SegmentView, positions: Rows) -> None:
        """Compare the view's chunks for these positions."""
        known, rows = view.chronology
        origins = self._origins[positions]
        starts, stops = known.searchsorted(origins, "left").tolist(), known.searchsorted(origins, "right").tolist()
        for i, start, stop in zip(positions.tolist(), starts, stops, strict=True):
            if start > 0 and (self._before[i] is None or known[start - 1] > self._lower[i]):
                self._lower[i], self._before[i] = known[start - 1], (segment_id, int(rows[start - 1]))
            if stop < len(known) and (self._after[i] is None or known[stop] < self._upper[i]):
                self._upper[i], self._after[i] = known[stop], (segment_id, int(rows[stop]))

    def pairs(self) -> list[tuple[tuple[int, int] | None, tuple[int, int] | None]]:
        """Return (before, after) in the order of the origin_ids."""
        return list(zip(self._before, self._after, strict=True))
