"""A topic as it was at an earlier time: the log keeps every entry, so any past state can be searched.

Rule: nothing is changed and nothing written. What counted then is computed from the columns; vectors are read from the
log and scanned, and terms are indexed in memory, so a search of the past is exact and slow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memd.errors import StoreError
from memd.settings.model import UtilitySettings
from memd.store.index.sealed_index import Candidates
from memd.store.lexical.bm25 import LexicalQuery
from memd.store.lexical.index import LexicalIndex
from memd.store.lexical.terms import TermsCache, TermsTable
from memd.store.log.columns import Floats, superseded
from memd.store.order import id_upto
from memd.store.pending import NOTHING_UNSTORED, UnstoredText
from memd.store.snapshot import SearchTimes, Snapshot
from memd.store.topic import TopicLog
from memd.store.views import IndexView, SegmentView

LEXICAL_ENTRIES_MAX = 50_000
"""In a larger topic the past is searched by meaning alone: indexing its terms takes about 0.2 ms an entry."""


class TopicAsOf:
    """A topic as it was, for recall. Slow to make if its terms are indexed."""

    is_loaded = True

    def __init__(self, log: TopicLog, canonical_id: int, *, words: bool) -> None:
        """`canonical_id` is the last entry that counts, or a WallTime; `words` says whether to search by words too."""
        self.topic_id = log.topic_id
        present = log.snapshot()
        self._snapshot = snapshot_as_of(present, id_upto(present, canonical_id))
        entries = sum(len(view.rows) for view in self._snapshot.views.values())
        self._lexical = LexicalIndex(None, TermsCache()) if words and entries <= LEXICAL_ENTRIES_MAX else None
        if self._lexical is not None:
            self._lexical.update(self._snapshot)

    @property
    def has_lexical(self) -> bool:
        """Whether it can be searched by words too."""
        return self._lexical is not None

    def snapshot(self) -> Snapshot:
        """Return the topic as it was."""
        return self._snapshot

    def unstored(self) -> UnstoredText:
        """Return nothing: the past is in the log, or it is unknown."""
        return NOTHING_UNSTORED

    def lexical_query(self, text: str, pending: Sequence[TermsTable] = ()) -> LexicalQuery:
        """Prepare a lexical search for `text` in the topic as it was."""
        if self._lexical is None:
            raise StoreError(f"more than {LEXICAL_ENTRIES_MAX:,} entries: its past can be searched by meaning alone")
        return self._lexical.lexical_query(text, self._snapshot, pending)


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
