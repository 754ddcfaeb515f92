"""A topic as it was: the log never forgets, so any earlier moment can be searched.

Rule: nothing is changed and nothing written. What counted then is worked out anew from the columns; vectors are read
from the log and compared one by one, and words are indexed in memory, so a search of the past is exact and slow.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from memd.errors import StoreError
from memd.store.files import DiskFiles
from memd.store.index.sealed_index import Found
from memd.store.index.superseded import superseded
from memd.store.index.vectors import Floats
from memd.store.lexical.bm25 import KnownWords, Question
from memd.store.lexical.index import LexicalIndex
from memd.store.snapshot import IndexView, SearchTimes, Snapshot, View
from memd.store.topic import TopicLog

WORDS_ENTRIES_MAX = 50_000
"""In a larger topic the past is searched by meaning alone: indexing its words takes about 0.2 ms an entry."""


class PastTopic:
    """What recall asks of a topic, as it was. Slow to make where there are words to index."""

    is_loaded = True

    def __init__(self, log: TopicLog, canonical_id: int, *, words: bool) -> None:
        """`canonical_id`: the last entry that counts; `words`: whether they are searched at all."""
        self.topic_id = log.topic_id
        self._snapshot = as_of(log.snapshot(), canonical_id)
        entries = sum(len(view.rows) for view in self._snapshot.views.values())
        self._index = LexicalIndex(DiskFiles(), None, KnownWords()) if words and entries <= WORDS_ENTRIES_MAX else None
        if self._index is not None:
            self._index.update(self._snapshot)

    @property
    def has_words(self) -> bool:
        """Whether it is searched by words too."""
        return self._index is not None

    def snapshot(self) -> Snapshot:
        """The topic then."""
        return self._snapshot

    def ask(self, text: str) -> Question:
        """A question to the words of then."""
        if self._index is None:
            raise StoreError(f"more than {WORDS_ENTRIES_MAX:,} entries: its past is searched by meaning alone")
        return self._index.ask(text, self._snapshot)


def as_of(snapshot: Snapshot, canonical_id: int) -> Snapshot:
    """The topic after the entry with this id, or the last one before it, was appended."""
    counts = {
        number: int(view.rows["canonical_id"].searchsorted(canonical_id, "right"))
        for number, view in snapshot.views.items()
    }
    rows = [snapshot.views[number].rows[:count] for number, count in counts.items()]
    bits = superseded(np.concatenate(rows)) if rows else np.empty(0, dtype=np.bool_)
    views: dict[int, View] = {}
    for number, count in counts.items():
        view, gone, bits = snapshot.views[number], bits[:count], bits[count:]
        matrix = None if view.matrix is None else view.matrix[:count]
        views[number] = View(view.segment, view.rows[:count], gone, matrix)
    indexes = []
    for index in (part.index for part in snapshot.indexes):
        labels = [
            np.concatenate([views[number].gone, np.ones(len(snapshot.views[number].rows) - counts[number], np.bool_)])
            for number in index.segment_ids
        ]
        indexes.append(_Scanned(index, np.concatenate(labels)))
    return Snapshot(snapshot.topic_id, views, snapshot.directory, indexes, SearchTimes())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Scanned(IndexView):
    """An index that is not asked: it leaves out what has been superseded since."""

    def search(self, queries: Floats, k: int) -> list[Found]:
        """See `IndexView.search`."""
        return self.index.scan(queries, k, self.gone)
