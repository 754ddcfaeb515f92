"""The transitions from one snapshot of a topic to the next: after opening, an append, a seal, a merge.

Rule: a transition makes new views and never changes old ones, with the two exceptions that snapshots are built for:
a growing segment gains rows after those that older snapshots have, and rows of an index are marked as dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from memd.entries import Entry, Status
from memd.settings.model import UtilitySettings
from memd.store.disk import LocalDisk
from memd.store.index.meta import IndexFile
from memd.store.index.sealed_index import SealedIndex
from memd.store.index.uuid_index import UuidIndex
from memd.store.log.columns import Bits, superseded
from memd.store.log.format import Span
from memd.store.log.segment import GrowingSegment, SealedSegment
from memd.store.snapshot import SearchTimes, Snapshot
from memd.store.views import IndexView, SegmentView


def first_snapshot(
    files: LocalDisk,
    topic_id: str,
    segments: Mapping[int, GrowingSegment | SealedSegment],
    index_files: Sequence[IndexFile],
    utility: UtilitySettings,
) -> Snapshot:
    """Return the snapshot of a topic just opened: what is superseded is computed over all columns at once."""
    rows = [segment.rows for segment in segments.values()]
    bits = superseded(np.concatenate(rows)) if rows else np.empty(0, dtype=np.bool_)
    views: dict[int, SegmentView] = {}
    for segment_id, segment in segments.items():
        dead, bits = bits[: len(segment.rows)], bits[len(segment.rows) :]
        views[segment_id] = _view(segment, dead)
    indexes = []
    for file in index_files:
        covered = [segment for number in file.segment_ids if isinstance(segment := segments[number], SealedSegment)]
        dead = dead_labels(views, file.segment_ids)
        indexes.append(IndexView(SealedIndex(files, file, covered, dead=dead), dead))
    return Snapshot(topic_id, views, uuid_index_of(segments.values()), _in_order(indexes), SearchTimes(), utility)


def after_append(
    before: Snapshot, active: GrowingSegment, entries: Sequence[Entry], spans: Sequence[Span], fresh: Collection[bytes]
) -> Snapshot:
    """Return the snapshot with the new entries as rows of `active`; older entries of their chunks are dead.

    `fresh` are the uuids that the topic did not have before.
    """
    views = dict(before.views)
    known = len(views[active.segment_id].dead) if active.segment_id in views else 0
    dead = np.zeros(known + len(entries), dtype=np.bool_)
    if known:
        dead[:known] = views[active.segment_id].dead
    overridden: dict[int, list[int]] = {}
    for row, entry in zip(active.extend(entries, spans), entries, strict=True):
        dead[row] = entry.status is Status.DEPRECATED or row != active.rows_of(entry.uuid)[-1]
        if entry.uuid not in fresh:
            dead[list(active.rows_of(entry.uuid)[:-1])] = True
            for segment_id, older in before.places(entry.uuid):
                overridden.setdefault(segment_id, []).append(older)
    overridden.pop(active.segment_id, None)
    for segment_id, rows in overridden.items():
        bits = views[segment_id].dead.copy()
        bits[rows] = True
        views[segment_id] = _view(views[segment_id].segment, bits)
        for view in before.indexes:
            if segment_id in view.index.segment_ids:
                view.index.mark(segment_id, np.array(rows, dtype=np.intp))
    views[active.segment_id] = _view(active, dead)
    indexes = [IndexView(view.index, view.index.dead) for view in before.indexes]
    return Snapshot(
        before.topic_id, dict(sorted(views.items())), before.uuid_index, indexes, before.times, before.utility
    )


def after_seal(before: Snapshot, sealed: SealedSegment, uuid_index: UuidIndex, index: SealedIndex | None) -> Snapshot:
    """Return the snapshot with a sealed segment in place of the growing one; `uuid_index` covers all sealed ones."""
    dead = before.views[sealed.segment_id].dead
    views = {**before.views, sealed.segment_id: _view(sealed, dead)}
    indexes = before.indexes
    if index is not None:
        index.mark(sealed.segment_id, np.flatnonzero(dead))
        indexes = _in_order([*indexes, IndexView(index, index.dead)])
    return Snapshot(before.topic_id, views, uuid_index, indexes, before.times, before.utility)


def after_merge(before: Snapshot, index: SealedIndex) -> Snapshot:
    """Return the snapshot with one index in place of those over the same segments."""
    for segment_id in index.segment_ids:
        index.mark(segment_id, np.flatnonzero(before.views[segment_id].dead))
    kept = [view for view in before.indexes if not set(view.index.segment_ids) <= set(index.segment_ids)]
    indexes = _in_order([*kept, IndexView(index, index.dead)])
    return Snapshot(before.topic_id, before.views, before.uuid_index, indexes, before.times, before.utility)


def after_erasure(
    before: Snapshot,
    segments: Mapping[int, GrowingSegment],
    uuid_index: UuidIndex,
    indexes: Sequence[SealedIndex],
) -> Snapshot:
    """Return the snapshot with segments that were read again in place of those of the same numbers.

    Args:
        uuid_index: over all segments that are still sealed.
        indexes: take the place of the merged ones that covered one of these segments, for the others in them.
    """
    views = dict(before.views)
    for number, segment in segments.items():
        dead = before.views[number].dead
        assert segment.count == len(dead), "an erased record keeps its place"
        views[number] = _view(segment, dead | (segment.rows["status"] == Status.DEPRECATED))
    kept = [view for view in before.indexes if not segments.keys() & set(view.index.segment_ids)]
    for index in indexes:
        for segment_id in index.segment_ids:
            index.mark(segment_id, np.flatnonzero(views[segment_id].dead))
    added = [IndexView(index, index.dead) for index in indexes]
    return Snapshot(before.topic_id, views, uuid_index, _in_order([*kept, *added]), before.times, before.utility)


def dead_labels(views: Mapping[int, SegmentView], segment_ids: Sequence[int]) -> Bits:
    """Return the dead rows of these segments, by the labels of an index over them."""
    return np.concatenate([views[segment_id].dead for segment_id in segment_ids])


def uuid_index_of(segments: Iterable[GrowingSegment | SealedSegment]) -> UuidIndex:
    """Return the index over the sealed ones among `segments`, which are in order."""
    sealed = [segment for segment in segments if isinstance(segment, SealedSegment)]
    return UuidIndex([(segment.segment_id, segment.rows, segment.digests) for segment in sealed])


def _view(segment: GrowingSegment | SealedSegment, dead: Bits) -> SegmentView:
    if isinstance(segment, GrowingSegment):
        matrix = segment.matrix[: len(dead)] if segment.searchable else None
        return SegmentView(segment=segment, rows=segment.rows[: len(dead)], dead=dead, matrix=matrix)
    return SegmentView(segment=segment, rows=segment.rows, dead=dead, matrix=None)


def _in_order(indexes: Sequence[IndexView]) -> tuple[IndexView, ...]:
    return tuple(sorted(indexes, key=lambda view: view.index.segment_ids))
