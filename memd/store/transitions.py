"""From one snapshot of a topic to the next: what an append, a seal or a merge changes, and what it leaves shared.

Rule: a transition makes new views and never changes old ones, with the two exceptions that snapshots are built for:
rows behind the ones a snapshot knows are added to a growing segment, and an index is told what has gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from memd.entries import Entry, Status
from memd.store.files import Files
from memd.store.index.sealed_index import SealedIndex
from memd.store.index.superseded import Bits, Directory, superseded
from memd.store.index.vectors import Rows
from memd.store.log.format import Span
from memd.store.log.segment import Growing, Sealed, Vouched
from memd.store.snapshot import IndexView, SearchTimes, Snapshot, View


class IndexFile(msgspec.Struct, frozen=True, kw_only=True):
    """An index on disk that is to be searched."""

    path: Path
    segment_ids: tuple[int, ...]
    """Ascending."""
    vouched: Vouched
    left_out: Rows
    """Labels of plain chunks that it does not hold, ascending."""


def first_snapshot(
    files: Files, topic_id: str, segments: Mapping[int, Growing | Sealed], index_files: Sequence[IndexFile]
) -> Snapshot:
    """The topic as its files say: what is superseded is worked out over all columns at once."""
    rows = [segment.rows for segment in segments.values()]
    bits = superseded(np.concatenate(rows)) if rows else np.empty(0, dtype=np.bool_)
    views: dict[int, View] = {}
    for segment_id, segment in segments.items():
        gone, bits = bits[: len(segment.rows)], bits[len(segment.rows) :]
        views[segment_id] = _view(segment, gone)
    indexes = []
    for file in index_files:
        covered = [segment for number in file.segment_ids if isinstance(segment := segments[number], Sealed)]
        gone = gone_labels(views, file.segment_ids)
        index = SealedIndex(files, file.path, covered, file.vouched, gone=gone, left_out=file.left_out)
        indexes.append(IndexView(index, gone))
    return Snapshot(topic_id, views, directory_of(segments.values()), _in_order(indexes), SearchTimes())


def after_append(
    before: Snapshot, active: Growing, entries: Sequence[Entry], spans: Sequence[Span], fresh: Collection[bytes]
) -> Snapshot:
    """With the new entries as rows of `active`, and without the older entries of their chunks.

    `fresh`: uuids that the topic did not know.
    """
    views = dict(before.views)
    known = len(views[active.segment_id].gone) if active.segment_id in views else 0
    gone = np.zeros(known + len(entries), dtype=np.bool_)
    if known:
        gone[:known] = views[active.segment_id].gone
    overridden: dict[int, list[int]] = {}
    for row, entry in zip(active.extend(entries, spans), entries, strict=True):
        gone[row] = entry.status is Status.DEPRECATED or row != active.rows_of(entry.uuid)[-1]
        if entry.uuid not in fresh:
            gone[list(active.rows_of(entry.uuid)[:-1])] = True
            for segment_id, older in before.places(entry.uuid):
                overridden.setdefault(segment_id, []).append(older)
    overridden.pop(active.segment_id, None)
    for segment_id, rows in overridden.items():
        bits = views[segment_id].gone.copy()
        bits[rows] = True
        views[segment_id] = _view(views[segment_id].segment, bits)
        for view in before.indexes:
            if segment_id in view.index.segment_ids:
                view.index.mark(segment_id, np.array(rows, dtype=np.intp))
    views[active.segment_id] = _view(active, gone)
    indexes = [IndexView(view.index, view.index.gone) for view in before.indexes]
    return Snapshot(before.topic_id, dict(sorted(views.items())), before.directory, indexes, before.times)


def after_seal(before: Snapshot, sealed: Sealed, directory: Directory, index: SealedIndex | None) -> Snapshot:
    """With a sealed segment in place of the growing one, and the directory over all sealed ones."""
    gone = before.views[sealed.segment_id].gone
    views = {**before.views, sealed.segment_id: _view(sealed, gone)}
    indexes = before.indexes
    if index is not None:
        index.mark(sealed.segment_id, np.flatnonzero(gone))
        indexes = _in_order([*indexes, IndexView(index, index.gone)])
    return Snapshot(before.topic_id, views, directory, indexes, before.times)


def after_merge(before: Snapshot, index: SealedIndex) -> Snapshot:
    """With one index in place of those over the same segments."""
    for segment_id in index.segment_ids:
        index.mark(segment_id, np.flatnonzero(before.views[segment_id].gone))
    kept = [view for view in before.indexes if not set(view.index.segment_ids) <= set(index.segment_ids)]
    indexes = _in_order([*kept, IndexView(index, index.gone)])
    return Snapshot(before.topic_id, before.views, before.directory, indexes, before.times)


def gone_labels(views: Mapping[int, View], segment_ids: Sequence[int]) -> Bits:
    """What does not count in these segments, by the labels of an index over them."""
    return np.concatenate([views[segment_id].gone for segment_id in segment_ids])


def directory_of(segments: Iterable[Growing | Sealed]) -> Directory:
    """The directory over the sealed ones among `segments`, which are in order."""
    sealed = [segment for segment in segments if isinstance(segment, Sealed)]
    return Directory([(segment.segment_id, segment.rows, segment.digests) for segment in sealed])


def _view(segment: Growing | Sealed, gone: Bits) -> View:
    if isinstance(segment, Growing):
        matrix = segment.matrix[: len(gone)] if segment.searchable else None
        return View(segment=segment, rows=segment.rows[: len(gone)], gone=gone, matrix=matrix)
    return View(segment=segment, rows=segment.rows, gone=gone, matrix=None)


def _in_order(indexes: Sequence[IndexView]) -> tuple[IndexView, ...]:
    return tuple(sorted(indexes, key=lambda view: view.index.segment_ids))
