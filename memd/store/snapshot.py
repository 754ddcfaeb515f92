"""A topic at one point in time, for searching and looking up entries; the snapshots after opening, an append, a seal,
a merge or an erasure; the order of its log; exact copies of a chunk; and choices: snapshots limited to wanted chunks or
to an earlier time.

Rule: a snapshot never changes its answers. A later append, seal or merge makes new views and shares the untouched ones;
the arrays of a view are never written to. Entries are read only if their columns do not suffice.

In the snapshot of a choice only wanted chunks are live, so a search never has to skip unwanted ones. Columns may leave
a match open (see `may_be_wanted`); after reading an entry, check it against the choice again. The log keeps every
entry, so the live chunks of an earlier time are computed from the columns. Their vectors are read from the log and
scanned, so a search of the past is exact and slow. It uses today's word frequencies.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import ChunkState, Draft, Entry, Status, WallTime
from memd.errors import StoreError
from memd.selection import EVERYTHING, Selection, is_within
from memd.store.index.sealed_index import Scanned, SealedIndex
from memd.store.index.vectors import VisibleLists, cosines
from memd.store.lexical.postings import main_language, query_keys
from memd.store.log.columns import (
    ROW,
    Bits,
    Floats,
    Rows,
    UInts,
    UuidIndex,
    hex_range,
    may_be_wanted,
    superseded,
    text_hash,
    uuid_bytes,
    uuid_halves,
)
from memd.store.log.format import Span
from memd.store.log.recovery import LogExtent
from memd.store.log.segment import NOTHING_UNSTORED, GrowingSegment, SealedSegment, SegmentView, UnstoredText

if TYPE_CHECKING:
    from memd.store.topic import TopicLog

SINCE_MAX = 256
"""Limit on the chunks compared with a copy, the newest after it. In a segment with an index, their vectors are read
from disk."""


@dataclasses.dataclass(frozen=True, eq=False)
class IndexView:
    """One index at one point in time."""

    index: SealedIndex
    dead: Bits
    """Superseded or Deprecated chunks, per label; in a choice, all unwanted ones."""
    is_past: bool = False
    """Whether it is a view of the past, whose vectors are read from the log and scanned: exact and slow."""

    def nearest(self, queries: Floats, k: int) -> Rows:
        """Return labels that include the best `k` live ones for each query by score."""
        return self.index.nearest(queries, k, self.dead, *self._searched)

    def vectors(self, labels: Rows) -> Floats:
        """Return the vectors of live labels, (n, dimension), `labels` ascending; see `SealedIndex.vectors_of`."""
        return self.index.vectors_of(labels, *self._searched)

    @functools.cached_property
    def _searched(self) -> tuple[Scanned, VisibleLists | None]:
        if not self.is_past:
            with suppress(StoreError):  # the topic replaces a damaged index; readers that still hold it use the log
                return self.index.searched(self.dead)
        return self.index.read_vectors(self.dead)[0], None


Place = tuple[int, int]
"""(segment id, row)"""


class Snapshot:
    """An immutable point-in-time view of one topic. Any thread may use it, without a time limit."""

    def __init__(
        self, topic_id: str, views: Mapping[int, SegmentView], uuid_index: UuidIndex, indexes: Sequence[IndexView]
    ) -> None:
        self.topic_id = topic_id
        self.views = views
        """By segment id, oldest first."""
        self.indexes = tuple(indexes)
        """Indexes over the sealed segments, oldest first."""
        self.uuid_index = uuid_index
        """Index over the sealed segments."""
        self.growing = [(view.segment, view) for view in views.values() if isinstance(view.segment, GrowingSegment)]
        """The segments that are not sealed, and their views."""

    @functools.cached_property
    def live_count(self) -> int:
        """The number of live chunks."""
        return sum(view.live_count for view in self.views.values())

    @property
    def fan_out_ms(self) -> float | None:
        """Milliseconds to search all indexes, summed over their latest searches; None before the first."""
        known = [view.index.search_ms for view in self.indexes if view.index.search_ms is not None]
        return sum(known) if known else None

    @property
    def extent(self) -> LogExtent:
        """The last canonical_id of the log and its number of entries."""
        filled = [view.rows for view in self.views.values() if len(view.rows)]
        return LogExtent(int(filled[-1][-1]["canonical_id"]) if filled else 0, sum(map(len, filled)))

    def rows_after(self, canonical_id: int) -> Iterator[tuple[int, range]]:
        """Yield (segment id, rows) of the entries after this one: ids ascend within a file and from file to file."""
        for segment_id, view in self.views.items():
            if len(view.rows) and int(view.rows[-1]["canonical_id"]) > canonical_id:
                column = view.rows["canonical_id"]
                yield segment_id, range(int(column.searchsorted(canonical_id, "right")), len(view.rows))

    def count_upto(self, canonical_id: int) -> int:
        """Return the number of entries up to this one, of whatever status."""
        after = sum(len(rows) for _, rows in self.rows_after(canonical_id))
        return sum(len(view.rows) for view in self.views.values()) - after

    def live_places(self, canonical_ids: Sequence[int]) -> dict[int, Place]:
        """Return the places of the live ones among these entries."""
        return {one: place for one, place in self._places_of(canonical_ids).items() if self.is_live(place)}

    def place(self, canonical_id: int) -> Place | None:
        """Return the place of the entry with this id, live or not; None if there is none."""
        return self._places_of([canonical_id]).get(canonical_id)

    def _places_of(self, canonical_ids: Sequence[int]) -> dict[int, Place]:
        wanted, (segment_ids, lasts) = np.sort(np.array(canonical_ids, dtype=np.uint64)), self._filled
        starts = [0, *wanted.searchsorted(lasts, "right").tolist()]
        found: dict[int, Place] = {}
        for segment_id, start, stop in zip(segment_ids, starts, starts[1:], strict=False):
            if start < stop:
                own, ids = wanted[start:stop], self.views[segment_id].canonical_ids
                rows = ids.searchsorted(own)
                pairs = zip(own.tolist(), rows.tolist(), (ids[rows] == own).tolist(), strict=True)
                found.update((one, (segment_id, row)) for one, row, is_there in pairs if is_there)
        return found

    def latest_places(self, before: int | None = None) -> Iterator[Place]:
        """Yield the places of all entries with a canonical_id below `before` (None for all), newest first."""
        for segment_id, view in reversed(list(self.views.items())):
            end = len(view.rows) if before is None else bisect.bisect_left(view.rows["canonical_id"], before)
            yield from ((segment_id, row) for row in reversed(range(end)))

    def named(self, digits: str) -> dict[bytes, bool]:
        """Return the chunks whose uuid begins with these digits (see `entries.digits_of_id`), and for each whether the
        digits are its public id. Reads no entry."""
        low, high = hex_range(digits)
        found = self.uuid_index.uuids_with_prefix(digits)
        for rows in (view.rows for _, view in self.growing):
            rows = rows[(rows["uuid_high"] >= low) & (rows["uuid_high"] <= high)]
            found |= set(map(uuid_bytes, rows["uuid_high"].tolist(), rows["uuid_low"].tolist()))
        known = (uuid for uuid in found if uuid.hex().startswith(digits) and self.knows(uuid))
        return {uuid: self.public_digits(uuid) == len(digits) for uuid in known}

    def public_digits(self, uuid: bytes) -> int:
        """Return the number of digits in the public id of a chunk that the topic has."""
        segment_id, row = self.places(uuid)[0]
        return int(self.views[segment_id].rows[row]["public_digits"])

    def nearest(self, uuids: Sequence[bytes]) -> list[list[bytes]]:
        """Return for each uuid some of the topic's, itself included: no other shares a longer prefix with it."""
        found = self.uuid_index.nearest(uuids)
        for rows in (view.rows for _, view in self.growing if len(view.rows)):
            high = np.ascontiguousarray(rows["uuid_high"])
            for uuid, near in zip(uuids, found, strict=True):
                away = high ^ uuid_halves(uuid)[0]
                nearest = rows[away == away.min()]
                near += map(uuid_bytes, nearest["uuid_high"].tolist(), nearest["uuid_low"].tolist())
        return found

    def read(self, place: Place) -> Entry:
        """Read the entry at a place from disk. Raises StoreError: it cannot be read (CorruptFile if its bytes are
        damaged)."""
        view = self.views[place[0]]
        return view.segment.read(view.rows[place[1]])

    def read_many(self, places: Iterable[Place]) -> dict[Place, Entry]:
        """Read the entries at many places at once. Unreadable ones are absent; `read` raises the reason."""
        found: dict[Place, Entry] = {}
        for segment_id, rows in _by_segment(places).items():
            view = self.views[segment_id]
            entries = view.segment.read_many(view.rows[rows])
            found.update(((segment_id, row), one) for row, one in zip(rows, entries, strict=True) if one is not None)
        return found

    @property
    def main_language(self) -> str | None:
        """See `main_language`; judged by the chunks appended last."""
        return next((found for segment, _ in self.growing if (found := main_language(segment.columns))), None)

    def has_same_files(self, now: Snapshot) -> bool:
        """Return whether every segment is still the same in a later snapshot: neither sealed nor rewritten."""
        return self is now or all(
            number in now.views and now.views[number].segment is view.segment for number, view in self.views.items()
        )

    def is_live(self, place: Place) -> bool:
        """Return whether the entry at a place is live."""
        return not self.views[place[0]].dead[place[1]]

    @functools.cached_property
    def has_erased(self) -> bool:
        """Whether the text of any chunk was erased."""
        return any(view.has_erased for view in self.views.values())

    def was_erased(self, uuid: bytes) -> bool:
        """Return whether the text of a chunk was erased."""
        return self.has_erased and any(self.views[number].rows[row]["is_erased"] for number, row in self.places(uuid))

    @functools.cached_property
    def indexed_segments(self) -> frozenset[int]:
        """The segments covered by an index, so that their vectors need not be in memory."""
        return frozenset(number for view in self.indexes for number in view.index.segment_ids if number in self.views)

    def cosines_at(self, query: Floats, places: Iterable[Place]) -> dict[Place, float]:
        """Return the cosine of each of these entries to a unit vector, (dimension,). Entries that another model
        embedded or that cannot be read are absent."""
        found: dict[Place, float] = {}
        for segment_id, rows in _by_segment(places).items():
            some = [(segment_id, row) for row in rows]
            if segment_id in self.indexed_segments:
                vectors = {place: one.embedding for place, one in self.read_many(some).items() if one.vector}
            elif (matrix := self.views[segment_id].matrix) is not None:
                vectors = {place: matrix[place[1]] for place in some}
            else:
                continue
            if vectors:
                near = cosines(np.stack([*vectors.values()]), query[None])
                found.update(zip(vectors, near.tolist(), strict=True))
        return found

    def column(self, name: str, segment_ids: Rows, rows: Rows) -> NDArray[Any]:
        """Return a column of the entries at these places."""
        held = set(segment_ids.tolist())
        if len(held) == 1:
            return np.asarray(self.views[held.pop()].rows[name][rows])
        found = np.empty(len(rows), ROW[name])
        for segment_id in held:
            own = segment_ids == segment_id
            found[own] = self.views[segment_id].rows[name][rows[own]]
        return found

    @functools.cached_property
    def taken_out(self) -> UInts:
        """`SegmentView.taken_out` of all segments, without chunks that an undo made live again."""
        views = self.views.values()
        gone = np.concatenate([np.empty((2, 0), np.uint64), *(view.taken_out for view in views)], axis=1)
        live = np.concatenate([np.empty(0, np.uint64), *(view.changed for view in views)])
        return gone[:, ~np.isin(gone[0], live)]

    def neighbours(self, place: Place) -> tuple[Place | None, Place | None]:
        """Return the live chunks stored just before and just after a chunk, by origin_id."""
        origin = int(self.views[place[0]].rows[place[1]]["origin_id"])
        before: tuple[int, Place] | None = None
        after: tuple[int, Place] | None = None
        for segment_id, view in self.views.items():
            origins, rows = view.chronology
            start, stop = origins.searchsorted(origin, "left"), origins.searchsorted(origin, "right")
            if start > 0:
                before = max(before or (0, place), (int(origins[start - 1]), (segment_id, int(rows[start - 1]))))
            if stop < len(origins):
                found = int(origins[stop]), (segment_id, int(rows[stop]))
                after = found if after is None else min(after, found)
        return before[1] if before else None, after[1] if after else None

    def knows(self, uuid: bytes) -> bool:
        """Return whether the topic has an entry of the chunk, live or not."""
        return bool(self.places(uuid))

    def known(self, uuids: Sequence[bytes]) -> set[bytes]:
        """Return the uuids among these that the topic has an entry of, live or not."""
        sealed = self.uuid_index.alike(uuids)
        growing = (segment.known(uuids) for segment, _ in self.growing)
        return set(filter(self.knows, sealed.union(*growing)))

    def places_with(self, text: str) -> list[Place]:
        """Return the places of the live chunks that have all words of a text, as far as their words are known."""
        found: list[Place] = []
        for segment, view in self.growing:
            rows = segment.columns.rows_with(query_keys(text, segment.columns.languages))
            found += [(segment.segment_id, row) for row in rows.tolist() if row < len(view.rows) and not view.dead[row]]
        for one in self.indexes:
            if (columns := one.index.columns) is not None:
                labels = columns.rows_with(query_keys(text, columns.languages))
                segments, rows = one.index.places_of(labels[~one.dead[labels]])
                found += zip(segments.tolist(), rows.tolist(), strict=True)
        return found

    def find(self, uuid: bytes) -> Entry | None:
        """Read the newest entry of the chunk, also a Deprecated one; None if the topic has none. Raises StoreError: the
        entry cannot be read (CorruptFile if its bytes are damaged)."""
        place = self._newest_place(uuid)
        return None if place is None else self.read(place)

    def fingerprint_of(self, uuid: bytes) -> str | None:
        """Return the fingerprint of the model that embedded the newest entry; None if the topic has none."""
        place = self._newest_place(uuid)
        return None if place is None else self.views[place[0]].segment.header.fingerprint

    def history(self, uuid: bytes) -> list[Entry]:
        """Read every entry of the chunk, oldest first. Raises StoreError: an entry cannot be read."""
        return [self.read(place) for place in sorted(self.places(uuid), key=self.canonical_id)]

    def places(self, uuid: bytes) -> list[Place]:
        """Return the place of every entry of the chunk."""
        found = self.uuid_index.places(uuid)
        found += ((segment.segment_id, row) for segment, _ in self.growing for row in segment.rows_of(uuid))
        return list(filter(self._has, found))

    def places_of_text(self, text: str) -> list[Place]:
        """Return the places of the entries with exactly this content, live or not, and perhaps of others, the latest
        chunk's first."""
        found = self.uuid_index.places_of_text(key := text_hash(text))
        found += ((segment.segment_id, row) for segment, _ in self.growing for row in segment.rows_of_text(key))
        origins = [(int(self.views[one[0]].rows[one[1]]["origin_id"]), one) for one in filter(self._has, found)]
        return [place for _, place in sorted(origins, reverse=True)]

    def entries_from(self, source: str) -> Iterator[Entry]:
        """Yield the live entries of the chunks from `source`, oldest first. Raises StoreError: an entry cannot be
        read."""
        for segment_id, view in self.views.items():
            rows = np.flatnonzero(~view.dead & may_be_wanted(view.rows, Selection(sources=(source,))))
            entries = (self.read((segment_id, row)) for row in rows.tolist())
            yield from (entry for entry in entries if entry.source == source)

    def taken_out_of(self, source: str) -> frozenset[bytes]:
        """Return the chunks with a Deprecated entry from `source`, and perhaps from others with the same hash."""
        found = set[bytes]()
        for view in self.views.values():
            gone = view.rows["status"] == Status.DEPRECATED
            rows = view.rows[gone & may_be_wanted(view.rows, Selection(sources=(source,)))]
            found.update(map(uuid_bytes, rows["uuid_high"].tolist(), rows["uuid_low"].tolist()))
        return frozenset(found)

    def uuid_at(self, place: Place) -> bytes:
        """Return the chunk of the entry at a place."""
        row = self.views[place[0]].rows[place[1]]
        return uuid_bytes(row["uuid_high"], row["uuid_low"])

    def has_digest(self, word: int) -> bool:
        """Return whether a message with this `digest_word` is stored; may include the append after the snapshot."""
        return self.uuid_index.has_digest(word) or any(segment.has_digest(word) for segment, _ in self.growing)

    def is_taken_out(self, word: int) -> bool:
        """Return whether all chunks of a message with this `digest_word` are dead; False for sealed segments."""
        found = [(view.dead, row) for segment, view in self.growing for row in segment.rows_of_digest(word)]
        return bool(found) and all(row < len(dead) and dead[row] for dead, row in found)

    @functools.cached_property
    def _filled(self) -> tuple[list[int], UInts]:
        """The numbers of the segments that have entries, and the last canonical_id of each, ascending."""
        filled = {number: view.rows["canonical_id"][-1] for number, view in self.views.items() if len(view.rows)}
        return list(filled), np.array(list(filled.values()), dtype=np.uint64)

    def _has(self, place: Place) -> bool:
        """Return whether a row of a segment, which may have later ones, is in this snapshot."""
        return place[1] < len(self.views[place[0]].dead)

    def _newest_place(self, uuid: bytes) -> Place | None:
        return max(self.places(uuid), key=self.canonical_id, default=None)

    def canonical_id(self, place: Place) -> int:
        """Return the canonical_id of the entry at a place."""
        return int(self.views[place[0]].rows[place[1]]["canonical_id"])


def _by_segment(places: Iterable[Place]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for segment_id, row in places:
        found.setdefault(segment_id, []).append(row)
    return found


def first_snapshot(
    topic_id: str, segments: Mapping[int, GrowingSegment | SealedSegment], indexes: Iterable[SealedIndex]
) -> Snapshot:
    """Return the snapshot of a topic just opened. Superseded entries are computed over all columns at once."""
    views = _views_of(segments, {number: len(segment.rows) for number, segment in segments.items()})
    return Snapshot(topic_id, views, uuid_index_of(segments.values()), [_view_of(one, views) for one in indexes])


def after_append(
    before: Snapshot, active: GrowingSegment, entries: Sequence[Entry], spans: Sequence[Span], fresh: Collection[bytes]
) -> Snapshot:
    """Return the snapshot with the new entries as rows of `active`; older entries of their chunks are dead.

    `fresh` are the uuids that the topic did not have before.
    """
    views, known, older = dict(before.views), before.views.get(active.segment_id), dict[int, list[int]]()
    dead = np.append(known.dead if known is not None else np.empty(0, np.bool_), np.zeros(len(entries), np.bool_))
    active.extend(entries, spans)
    for entry in entries:
        rows = active.rows_of(entry.uuid)
        dead[list(rows)] = True
        dead[rows[-1]] = entry.status is Status.DEPRECATED
        for segment_id, row in () if entry.uuid in fresh else before.places(entry.uuid):
            older.setdefault(segment_id, []).append(row)
    for segment_id in older.keys() - {active.segment_id}:
        bits = views[segment_id].dead.copy()
        bits[older[segment_id]] = True
        views[segment_id] = SegmentView(views[segment_id].segment, bits)
    views[active.segment_id] = SegmentView(active, dead)
    indexes = [
        view if older.keys().isdisjoint(view.index.segment_ids) else _view_of(view.index, views)
        for view in before.indexes
    ]
    return Snapshot(before.topic_id, dict(sorted(views.items())), before.uuid_index, indexes)


def after_indexing(
    before: Snapshot,
    indexes: Sequence[SealedIndex],
    segments: Mapping[int, GrowingSegment | SealedSegment],
    uuid_index: UuidIndex | None = None,
) -> Snapshot:
    """Return the snapshot with these indexes in place of those over the same segments. `segments`: replace those of the
    same number, because they were sealed or rewritten by an erasure. `uuid_index`: over all sealed segments; None if
    these are unchanged."""
    views = dict(before.views)
    for number, segment in segments.items():
        former = before.views[number]  # a record keeps its place, also an erased one, as long as it can be read
        dead = np.isin(segment.rows["offset"], former.rows["offset"][former.dead])
        views[number] = SegmentView(segment, dead | (segment.rows["status"] == Status.DEPRECATED))
    covered = {*segments, *(number for index in indexes for number in index.segment_ids)}
    kept = [view for view in before.indexes if covered.isdisjoint(view.index.segment_ids)]
    added = [_view_of(index, views) for index in indexes]
    in_order = sorted([*kept, *added], key=lambda view: view.index.segment_ids)
    return Snapshot(before.topic_id, views, uuid_index or before.uuid_index, in_order)


def uuid_index_of(segments: Iterable[GrowingSegment | SealedSegment]) -> UuidIndex:
    """Return the index over the sealed ones among `segments`, which are in order."""
    sealed = [segment for segment in segments if isinstance(segment, SealedSegment)]
    return UuidIndex([(segment.segment_id, segment.rows, segment.digests) for segment in sealed])


def _views_of(
    segments: Mapping[int, GrowingSegment | SealedSegment], counts: Mapping[int, int]
) -> dict[int, SegmentView]:
    """Return views of the first rows of each segment. Superseded entries are computed over all columns at once."""
    dead = superseded(np.concatenate([np.empty(0, ROW), *(segments[one].rows[:end] for one, end in counts.items())]))
    each = np.split(dead, np.cumsum(list(counts.values())))
    return {number: SegmentView(segments[number], bits) for number, bits in zip(counts, each, strict=False)}


def _view_of(index: SealedIndex, views: Mapping[int, SegmentView], *, is_past: bool = False) -> IndexView:
    """Return the view of an index. Rows beyond the views of its segments, if these are of the past, are dead."""
    dead = np.ones(len(index), dtype=np.bool_)
    for number, start in zip(index.segment_ids, index.starts, strict=True):
        dead[start : start + len(views[number].dead)] = views[number].dead
    return IndexView(index, dead, is_past)


def beside(snapshot: Snapshot, place: Place, step: int) -> Place | None:
    """Return the place of the next entry of the log (`step` 1) or the previous one (-1); None at its ends."""
    segment_id, row = place[0], place[1] + step
    if 0 <= row < len(snapshot.views[segment_id].rows):
        return segment_id, row
    numbers = [number for number, view in snapshot.views.items() if len(view.rows)]
    at = bisect.bisect_left(numbers, segment_id) + step
    if not 0 <= at < len(numbers):
        return None
    return numbers[at], 0 if step > 0 else len(snapshot.views[numbers[at]].rows) - 1


def next_active(snapshot: Snapshot, place: Place) -> Place | None:
    """Return the place of the first Active entry after this one; None if there is none."""
    for segment_id, view in snapshot.views.items():
        if segment_id >= place[0]:
            first = place[1] + 1 if segment_id == place[0] else 0
            found = np.flatnonzero(view.rows["status"][first:] != Status.DEPRECATED)
            if len(found):
                return segment_id, first + int(found[0])
    return None


def replacement_of(snapshot: Snapshot, place: Place, chunk_uuid: bytes) -> bytes | None:
    """Return the chunk that replaced this one in the Update whose entry is at `place`.

    Its entry follows those of all chunks that the Update replaced. An import keeps this order, but not the groups.
    Raises StoreError: an entry cannot be read.
    """
    entry = snapshot.read(place)
    if entry.action != "Update" or entry.status is Status.ACTIVE:
        return None
    behind = next_active(snapshot, place)
    if behind is None:
        return None
    other = snapshot.read(behind)
    return other.uuid if chunk_uuid in other.supersedes and is_made_at(snapshot, behind, other) else None


def is_made_at(snapshot: Snapshot, place: Place, entry: Entry) -> bool:
    """Return True if this entry created its chunk: the first one or, after an import, the one after replaced chunks."""
    # `origin_id` cannot tell: an imported chunk, or one adopted from another topic, keeps that of its source.
    if entry.canonical_id == min(map(snapshot.canonical_id, snapshot.places(entry.uuid))):
        return True
    before = beside(snapshot, place, -1)
    if entry.action != "Update" or before is None:
        return False
    other = snapshot.read(before)
    return other.status is not Status.ACTIVE and other.uuid in entry.supersedes


def asked_by(snapshot: Snapshot, uuids: Iterable[bytes], mark: bytes, after: int = 0) -> list[Entry]:
    """Return the group of entries appended by the request with this mark (`ChunkState.asked_by`) after this
    canonical_id; empty if the request changed none of these chunks. Raises StoreError: an entry cannot be read."""
    entries = (entry for uuid in uuids for entry in snapshot.history(uuid))
    one = next((entry for entry in entries if entry.asked_by == mark and entry.canonical_id > after), None)
    group = list[Entry]()
    place = None if one is None else snapshot.place(one.canonical_id)
    while place and (before := beside(snapshot, place, -1)) and snapshot.read(before).asked_by == mark:
        place = before
    while place and (entry := snapshot.read(place)).asked_by == mark:
        group.append(entry)
        place = beside(snapshot, place, 1)
    return group


def id_upto(snapshot: Snapshot, moment: int) -> int:
    """Return the last canonical_id stored when the clock last showed a time; an id is returned unchanged. Raises
    StoreError: an entry cannot be read."""
    if isinstance(moment, WallTime):
        for segment_id, view in reversed(list(snapshot.views.items())):
            after = int(view.rows["canonical_id"].searchsorted(moment, "right"))
            for row in reversed(after + np.flatnonzero(view.rows["is_ahead"][after:])):
                if snapshot.read((segment_id, int(row))).at <= moment:
                    return int(view.rows[row]["canonical_id"])
    return int(moment)


def id_before(snapshot: Snapshot, moment: int) -> int:
    """Return the canonical_id below which everything was stored before a time; an id is returned unchanged. See
    `id_upto`."""
    return id_upto(snapshot, WallTime(moment - 1)) + 1 if isinstance(moment, WallTime) else int(moment)


def live_copy(snapshot: Snapshot, draft: Draft) -> Entry | None:
    """Return the newest of `live_copies`; None if there is none. A note is a copy only of its author's notes: the
    author may not see those of others. The same holds for a turn of an export, because its importer may remove it."""
    copies = live_copies(snapshot, draft)
    is_said = draft.kind != "note"
    return next((one for one in copies if one.author == draft.author or (is_said and one.digests)), None)


def live_copies(snapshot: Snapshot, chunk: ChunkState) -> Iterator[Entry]:
    """Yield the live chunks of a chunk's kind with exactly its text, said by the same roles, newest first; for a note
    or document only those of its source. Unreadable entries are skipped."""
    is_sourced = chunk.kind != "turn"  # what was said is the same wherever it was imported from
    displayed = chunk.without_calls().displayed
    wanted = (chunk.kind, is_sourced and chunk.source, displayed)
    for text in dict.fromkeys((chunk.content, displayed)):  # entries without `speakers` have the shown text
        for place in filter(snapshot.is_live, snapshot.places_of_text(text)):
            try:
                entry = snapshot.read(place)
            except StoreError:
                continue
            if (entry.kind, is_sourced and entry.source, entry.without_calls().displayed) == wanted:
                yield entry


def answered_anew(snapshot: Snapshot, chunk: ChunkState) -> Iterator[Entry]:
    """Yield the live chunks that open with the same question, asked at the same moment, and have another answer. A
    question with a regenerated answer is stored again, so that it is found with each. The same words at another time
    are another question."""
    asked = _asked(chunk)
    if not asked or not chunk.digests:
        return
    for place in snapshot.places_with(asked):
        try:
            entry = snapshot.read(place)
        except StoreError:
            continue
        is_asked = _asked(entry) == asked and entry.digests[:1] == chunk.digests[:1] and entry.said == chunk.said
        if is_asked and entry.uuid != chunk.uuid and entry.author == chunk.author:
            yield entry


def _asked(chunk: ChunkState) -> str:
    """Return the question, or its beginning, of a chunk that has a question and its answer; else empty."""
    said = chunk.stretches
    if [one.role for one, _ in said] != ["user", "assistant"] or said[0][0].continues:
        return ""
    return chunk.content[: said[1][0].offset]


def alike_since(snapshot: Snapshot, copy: Entry, cosine: float) -> list[Entry] | None:
    """Return the live chunks of a copy's kind stored after it with at least this cosine to it, newest first, from the
    newest `SINCE_MAX`; None if another model embedded the copy."""
    own = snapshot.place(copy.canonical_id)
    if own is None or (own[0] not in snapshot.indexed_segments and snapshot.views[own[0]].matrix is None):
        return None
    places: list[Place] = []
    for segment_id, rows in reversed(list(snapshot.rows_after(copy.origin_id))):
        view = snapshot.views[segment_id]
        records, dead = view.rows[rows.start :], view.dead[rows.start :]
        is_since = (records["origin_id"] > copy.origin_id) & may_be_wanted(records, Selection(kinds=(copy.kind,)))
        newest = np.flatnonzero(is_since & ~dead)[::-1][: SINCE_MAX - len(places)]
        places += [(segment_id, rows.start + row) for row in newest.tolist()]
    near = [one for one, nearness in snapshot.cosines_at(copy.embedding, places).items() if nearness >= cosine]
    entries = snapshot.read_many(near)
    return [entries[one] for one in places if one in entries]


# Choices

READ_AT_ONCE = 1_000


def chosen(snapshot: Snapshot, wanted: Selection) -> Snapshot:
    """Return the snapshot in which only wanted chunks are live, for searching.

    Reads only columns, unless words, tags or authors are wanted: then also the contents of rows that pass all else.
    """
    if wanted == EVERYTHING:
        return snapshot
    perhaps = with_sources(snapshot, wanted)
    views = {
        number: dataclasses.replace(view, dead=~_wanted_rows(snapshot, number, view, wanted, perhaps))
        for number, view in snapshot.views.items()
    }
    indexes = [_view_of(view.index, views, is_past=view.is_past) for view in snapshot.indexes]
    return Snapshot(snapshot.topic_id, views, snapshot.uuid_index, indexes)


def live_ids(snapshot: Snapshot) -> list[int]:
    """Return the canonical_ids of the live entries."""
    return [one for view in snapshot.views.values() for one in view.rows["canonical_id"][~view.dead].tolist()]


def newest_by_source(snapshot: Snapshot, kind: str) -> Iterator[tuple[Entry, int]]:
    """Yield the newest live entry of each source of a kind, with its number of live chunks; only one of two sources
    with the same hash in the columns. Raises StoreError: an entry cannot be read."""
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


def with_sources(snapshot: Snapshot, wanted: Selection) -> Selection:
    """Return the choice with all sources of the topic that are below the named ones: columns contain only their
    hashes."""
    if not wanted.sources:
        return wanted
    places: dict[int, Place] = {}
    for number, view in snapshot.views.items():
        rows = np.flatnonzero(view.rows["is_erased"] == 0)
        hashes, first = np.unique(view.rows["source_hash"][rows], return_index=True)
        places |= zip(hashes.tolist(), ((number, row) for row in rows[first].tolist()), strict=True)
    known = (entry.source for entry in snapshot.read_many(places.values()).values())
    below = (one for one in known if one is not None and any(is_within(one, name) for name in wanted.sources))
    return msgspec.structs.replace(wanted, sources=(*wanted.sources, *below))


def _wanted_rows(snapshot: Snapshot, number: int, view: SegmentView, wanted: Selection, perhaps: Selection) -> Bits:
    bits: Bits = ~view.dead & may_be_wanted(view.rows, perhaps)
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
    """A topic in the past, for recall."""

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
    views = _views_of({number: view.segment for number, view in snapshot.views.items()}, counts)
    indexes = [_view_of(view.index, views, is_past=True) for view in snapshot.indexes]
    return Snapshot(snapshot.topic_id, views, snapshot.uuid_index, indexes)
