"""A topic as it was at an earlier time: the log keeps every entry, so any past state can be searched.

Rule: nothing is changed and nothing written. What counted then is computed from the columns, and vectors are read from
the log and scanned, so a search of the past is exact and slow. Words are as rare as they are today.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from memd.settings.model import UtilitySettings
from memd.store.index.sealed_index import Candidates
from memd.store.log.columns import Floats, superseded
from memd.store.order import id_upto
from memd.store.pending import NOTHING_UNSTORED, UnstoredText
from memd.store.snapshot import SearchTimes, Snapshot
from memd.store.topic import TopicLog
from memd.store.views import IndexView, SegmentView


class TopicAsOf:
    """A topic as it was, for recall."""

    is_loaded = True

    def __init__(self, log: TopicLog, canonical_id: int) -> None:
        """`canonical_id` is the last entry that counts, or a WallTime."""
        self.topic_id = log.topic_id
        present = log.snapshot()
        self._snapshot = snapshot_as_of(present, id_upto(present, canonical_id))

    def snapshot(self) -> Snapshot:
        """Return the topic as it was."""
        return self._snapshot

    def unstored(self) -> UnstoredText:
        """Return nothing: the past is in the log, or it is unknown."""
        return NOTHING_UNSTORED


def snapshot_as_of(snapshot: Snapshot, canonical_id: int) -> Snapshot:
    """Return the topic as it was after the last entry up to this id was appended."""
    counts = {
        number: int(view.rows["canonical_id"].searchsorted(canonical_id, "right"))
        for number, view in snapshot.views.items()
    }
    rows = [snapshot.views[number].rows[:count] for number, count in counts.items()]
    bits = superseded(np.concatenate(rows)) if rows else np.empty(0, dtype=np.bool_)
    views: dict[int, SegmentView] = {}
    for number, count in counts.items():
        view, dead, bits = snapshot.views[number], bits[:count], bits[count:]
        matrix = None if view.matrix is None else view.matrix[:count]
        views[number] = SegmentView(view.segment, view.rows[:count], dead, matrix)
    indexes = []
    for index in (part.index for part in snapshot.indexes):
        labels = [
            np.concatenate([views[number].dead, np.ones(len(snapshot.views[number].rows) - counts[number], np.bool_)])
            for number in index.segment_ids
        ]
        indexes.append(_ScannedIndexView(index, np.concatenate(labels)))
    return Snapshot(snapshot.topic_id, views, snapshot.uuid_index, indexes, SearchTimes(), snapshot.utility)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _ScannedIndexView(IndexView):
    """A view that scans the log: the index lacks entries that were superseded later."""

    def search(self, queries: Floats, k: int, utility: UtilitySettings) -> list[Candidates]:
        """See `IndexView.search`."""
        return self.index.scan(queries, k, self.dead, utility)
