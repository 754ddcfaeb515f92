"""A choice among a topic's chunks, made before they are searched: those that are wanted, or those of an earlier time.

Rule: in the snapshot of a choice other chunks do not count, so that no search of it has to look further for those that
are wanted. It says "perhaps" where columns cannot tell (see `may_be_wanted`): who reads an entry asks the choice again.
The log keeps every entry, so what counted at an earlier time is computed from the columns; the vectors of then are read
from the log and scanned, so a search of the past is exact and slow. Words are as rare as they are today.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from memd.entries import Entry
from memd.selection import EVERYTHING, Selection
from memd.store.index.sealed_index import SealedIndex
from memd.store.log.columns import Bits, Floats, Rows, may_be_wanted, superseded
from memd.store.log.segment import NOTHING_UNSTORED, UnstoredText
from memd.store.snapshot import IndexView, Place, SegmentView, Snapshot, id_upto
from memd.store.topic import TopicLog

READ_AT_ONCE = 1_000


def chosen(snapshot: Snapshot, wanted: Selection) -> Snapshot:
    """Return the snapshot in which only wanted chunks count, for searching it.

    Reads columns alone, unless words, tags or authors are wanted: then the contents too of what the rest admits.
    """
    if wanted == EVERYTHING:
        return snapshot
    views = {
        number: dataclasses.replace(view, dead=~_wanted_rows(snapshot, number, view, wanted))
        for number, view in snapshot.views.items()
    }
    indexes = [IndexView(view.index, _dead_in(view.index, views)) for view in snapshot.indexes]
    return Snapshot(snapshot.topic_id, views, snapshot.uuid_index, indexes)


def live_ids(snapshot: Snapshot) -> list[int]:
    """Return the canonical_ids of the entries that count."""
    return [one for view in snapshot.views.values() for one in view.rows["canonical_id"][~view.dead].tolist()]


def newest_by_source(snapshot: Snapshot, kind: str) -> Iterator[tuple[Entry, int]]:
    """Yield the newest live entry of each source of a kind, with the number of its live chunks; of two sources with
    one hash in the columns only one.

    Raises:
        StoreError: an entry cannot be read.
    """
    newest: dict[int, tuple[int, Place]] = {}
    counts: Counter[int] = Counter()
    for number, view in snapshot.views.items():
        rows = np.flatnonzero(~view.dead & may_be_wanted(view.rows, Selection(kinds=(kind,))))
        columns = (view.rows[name][rows].tolist() for name in ("source_hash", "canonical_id"))
        for row, source, canonical_id in zip(rows.tolist(), *columns, strict=True):
            counts[source] += 1
            newest[source] = max(newest.get(source, (0, (0, 0))), (canonical_id, (number, row)))
    found = [(place, counts[source]) for source, (_, place) in newest.items()]
    for start in range(0, len(found), READ_AT_ONCE):
        entries = snapshot.read_many(place for place, _ in found[start : start + READ_AT_ONCE])
        for place, count in found[start : start + READ_AT_ONCE]:
            yield entries.get(place) or snapshot.read(place), count


def _wanted_rows(snapshot: Snapshot, number: int, view: SegmentView, wanted: Selection) -> Bits:
    bits: Bits = ~view.dead & may_be_wanted(view.rows, wanted)
    if wanted.reads_entries:
        rows = np.flatnonzero(bits)
        for start in range(0, len(rows), READ_AT_ONCE):
            places = [(number, row) for row in rows[start : start + READ_AT_ONCE].tolist()]
            entries = snapshot.read_many(places)
            bits[[row for _, row in places]] = [
                place in entries and wanted.admits_entry(entries[place]) for place in places
            ]
    return bits


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
    indexes = [_ScannedIndexView(view.index, _dead_in(view.index, views)) for view in snapshot.indexes]
    return Snapshot(snapshot.topic_id, views, snapshot.uuid_index, indexes)


def _dead_in(index: SealedIndex, views: Mapping[int, SegmentView]) -> Bits:
    """The dead rows of views by the labels of an index, which has more where the views are of the past."""
    dead = np.ones(len(index), dtype=np.bool_)
    for number, start in zip(index.segment_ids, index.starts, strict=True):
        dead[start : start + len(views[number].dead)] = views[number].dead
    return dead


class _ScannedIndexView(IndexView):
    """A view that scans a segment or the log: a merged index lacks entries that were superseded later."""

    def nearest(self, queries: Floats, k: int) -> Rows:
        """See `IndexView.nearest`."""
        return self.index.scan(queries, k, self.dead)

    def vectors(self, labels: Rows) -> Floats:
        """See `IndexView.vectors`; zeros for one that cannot be read."""
        known, vectors, _ = self.index.read_vectors(labels)
        found = np.zeros((len(labels), vectors.shape[1]), np.float32)
        found[labels.searchsorted(known)] = vectors
        return found
