"""A topic at one point in time: what readers search and look entries up in.

Rule: nothing that is reachable from a snapshot changes what the snapshot answers. A later append, seal or merge makes
new views and shares what it did not touch. The one thing shared that does change is the marks in an index: what was
marked after this snapshot was taken is read from disk and scanned.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry
from memd.errors import StoreError
from memd.store.index.sealed_index import Found, SealedIndex
from memd.store.index.superseded import Bits, Directory, Records, UInts, uuid_bytes
from memd.store.index.vectors import Floats, Rows, best_rows, cosines, multipliers, scores_of
from memd.store.log.segment import Growing, Sealed

_SCANNED_MIN = 1000
"""Vectors of a scan below which its time says nothing about the rate."""
_WEIGHT = 0.1
"""Of the latest search in the smoothed times."""


Place = tuple[int, int]
"""(segment id, row)"""


class Hit(msgspec.Struct, frozen=True):
    """One live chunk that a search found."""

    uuid: bytes
    canonical_id: int
    cosine: float
    """The best over the queries, -1 to 1."""
    multiplier: float
    score: float
    """max(0, cosine) x multiplier."""
    segment: int
    row: int


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """One segment at one point in time; the arrays are never written to."""

    segment: Growing | Sealed
    rows: Records
    gone: Bits
    """Superseded or Deprecated, per row."""
    matrix: Floats | None
    """Of a growing segment, per row; None where there is an index, or where another model's vectors are not
    comparable."""

    @property
    def live_count(self) -> int:
        """How many rows count."""
        return len(self.gone) - int(np.count_nonzero(self.gone))

    @functools.cached_property
    def chronology(self) -> tuple[UInts, Rows]:
        """The live rows in the order in which they were first said: their origin_ids, ascending, and their numbers."""
        live = np.flatnonzero(~self.gone)
        origins = self.rows["origin_id"][live].astype(np.uint64)
        order = np.argsort(origins, kind="stable")
        return origins[order], live[order]

    def scan(self, queries: Floats, k: int) -> Found:
        """The best `k` live rows by score."""
        assert self.matrix is not None, "only a growing segment is scanned"
        live = np.flatnonzero(~self.gone)
        cosine, multiplier = cosines(self.matrix, queries)[live], multipliers(self.rows["utility_steps"][live])
        best = best_rows(scores_of(cosine, multiplier), k)
        return Found(np.full(len(best), self.segment.segment_id), live[best], cosine[best], multiplier[best])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IndexView:
    """One index at one point in time."""

    index: SealedIndex
    gone: Bits
    """What did not count then, per label."""

    def search(self, queries: Floats, k: int) -> list[Found]:
        """Chunks among which the best `k` live ones by score are."""
        try:
            return self.index.search(queries, k, self.gone)
        except StoreError:  # the topic replaces this index; for who still holds it, the log has everything
            return self.index.scan(queries, k, self.gone)


class _Nearest:
    """For some origin_ids the nearest smaller and larger ones found so far, and where they lie."""

    def __init__(self, origins: UInts) -> None:
        self._origins = origins
        self._lower = np.zeros(len(origins), dtype=np.uint64)
        self._upper = np.full(len(origins), np.iinfo(np.uint64).max, dtype=np.uint64)
        self._before: list[Place | None] = [None] * len(origins)
        self._after: list[Place | None] = [None] * len(origins)

    def worth_a_look(self, view: View, looked_at: Rows) -> Rows:
        """The positions for which the view may have something nearer."""
        known, _ = view.chronology
        if not len(known):
            return np.empty(0, dtype=np.intp)
        wanted = (known[-1] > self._lower) & (known[0] < self._upper)
        wanted[looked_at] = False
        return np.flatnonzero(wanted)

    def look(self, segment_id: int, view: View, positions: Rows) -> None:
        """Take in what the view has for these positions."""
        known, rows = view.chronology
        origins = self._origins[positions]
        starts, stops = known.searchsorted(origins, "left").tolist(), known.searchsorted(origins, "right").tolist()
        for i, start, stop in zip(positions.tolist(), starts, stops, strict=True):
            if start > 0 and (self._before[i] is None or known[start - 1] > self._lower[i]):
                self._lower[i], self._before[i] = known[start - 1], (segment_id, int(rows[start - 1]))
            if stop < len(known) and (self._after[i] is None or known[stop] < self._upper[i]):
                self._upper[i], self._after[i] = known[stop], (segment_id, int(rows[stop]))

    def pairs(self) -> list[tuple[Place | None, Place | None]]:
        """Before and after, in the order of the origins."""
        return list(zip(self._before, self._after, strict=True))


class SearchTimes:
    """How fast the searches of a topic are, smoothed over the latest ones; None before the first."""

    def __init__(self) -> None:
        self.fan_out_ms: float | None = None
        """Of asking all indexes."""
        self.scanned_per_second: float | None = None
        """Vectors compared one by one, in the segments that have no index."""

    def observe(self, scanned: int, scan_seconds: float, fan_out_seconds: float | None) -> None:
        """Take in one search. Threads may overwrite each other's: it is a gauge."""
        if scanned >= _SCANNED_MIN:
            self.scanned_per_second = _smoothed(self.scanned_per_second, scanned / scan_seconds)
        if fan_out_seconds is not None:
            self.fan_out_ms = _smoothed(self.fan_out_ms, fan_out_seconds * 1000)


class Snapshot:
    """An immutable point-in-time view of one topic; any thread may use it, for as long as it likes."""

    def __init__(
        self,
        topic_id: str,
        views: Mapping[int, View],
        directory: Directory,
        indexes: Sequence[IndexView],
        times: SearchTimes,
    ) -> None:
        self.topic_id = topic_id
        self.views = views
        """By segment id, oldest first."""
        self.indexes = tuple(indexes)
        """What finds the chunks of sealed segments, oldest first."""
        self.directory = directory
        """Of the sealed segments among them."""
        self.times = times
        """Shared by all snapshots of the topic."""
        self._growing = [(view.segment, view) for view in views.values() if isinstance(view.segment, Growing)]
        self._live_count: int | None = None
        self._last_ids: list[tuple[int, int]] | None = None
        self._searched: dict[int, IndexView | View] | None = None

    @property
    def live_count(self) -> int:
        """How many chunks count now."""
        if self._live_count is None:
            self._live_count = sum(view.live_count for view in self.views.values())
        return self._live_count

    def search(self, queries: Floats, k: int) -> list[Hit]:
        """The best `k` live chunks by score, best first; of equal scores the older canonical_id first.

        `queries` is float32 of shape (q, dimension), unit vectors; a chunk's cosine is the best over them. Exact, but
        for chunks with multiplier 1 in sealed segments, where HNSW finds them (recall@50 above 0.99) and where chunks
        with a cosine below zero tie in no particular order.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if k < 1 or not len(queries):
            return []
        started = time.perf_counter()
        growing = [view for _, view in self._growing if view.matrix is not None]
        found = [view.scan(queries, k) for view in growing]
        scanned = time.perf_counter()
        all_loaded = all(view.index.is_loaded for view in self.indexes)
        found += [part for view in self.indexes for part in view.search(queries, k)]
        fan_out_seconds = time.perf_counter() - scanned if self.indexes and all_loaded else None
        self.times.observe(sum(len(view.rows) for view in growing), scanned - started, fan_out_seconds)
        return self._ranked(found, k)

    def live_place(self, canonical_id: int) -> Place | None:
        """Where the entry with this id lies; None if there is none, or it does not count any more."""
        place = self.place(canonical_id)
        return None if place is None or self.views[place[0]].gone[place[1]] else place

    def place(self, canonical_id: int) -> Place | None:
        """Where the entry with this id lies, whether it counts or not; None if there is none."""
        if self._last_ids is None:
            filled = (view for view in self.views.values() if len(view.rows))
            self._last_ids = [(int(view.rows[-1]["canonical_id"]), view.segment.segment_id) for view in filled]
        position = bisect.bisect_left(self._last_ids, (canonical_id, 0))
        if position == len(self._last_ids):
            return None
        segment_id = self._last_ids[position][1]
        column = self.views[segment_id].rows["canonical_id"]
        row = bisect.bisect_left(column, canonical_id)  # searchsorted would copy the column
        return (segment_id, row) if int(column[row]) == canonical_id else None

    def latest_places(self, before: int | None = None) -> Iterator[Place]:
        """Where all entries lie, newest first; those with a smaller canonical_id than `before`."""
        for segment_id, view in reversed(list(self.views.items())):
            end = len(view.rows) if before is None else bisect.bisect_left(view.rows["canonical_id"], before)
            yield from ((segment_id, row) for row in reversed(range(end)))

    def uuids_with_prefix(self, digits: str) -> list[bytes]:
        """The chunks whose uuid begins with these hex digits, 1 to 32, in no particular order."""
        low, high = int(digits.ljust(32, "0"), 16) >> 64, int(digits.ljust(32, "f"), 16) >> 64
        found = set()
        for view in self.views.values():
            column = view.rows["uuid_high"]
            for row in np.flatnonzero((column >= np.uint64(low)) & (column <= np.uint64(high))).tolist():
                found.add(uuid_bytes(view.rows[row]["uuid_high"], view.rows[row]["uuid_low"]))
        return [uuid for uuid in found if uuid.hex().startswith(digits)]

    def read(self, place: Place) -> Entry:
        """The entry at a place, from disk.

        Raises:
            StoreError: it cannot be read (CorruptFile if its bytes are damaged).
        """
        return self._read(*place)

    def is_live(self, place: Place) -> bool:
        """Whether the entry at a place counts."""
        return not self.views[place[0]].gone[place[1]]

    def hits_at(self, queries: Floats, places: Sequence[Place]) -> dict[Place, Hit]:
        """The entries at these places as a search would find them, with their true cosines.

        Absent: what was embedded with another model, or cannot be read.
        """
        places = list(dict.fromkeys(places))
        if not places:
            return {}
        cosine = self._cosines_at(np.ascontiguousarray(queries, dtype=np.float32), np.array(places, dtype=np.intp))
        steps = [self.views[segment_id].rows["utility_steps"][row] for segment_id, row in places]
        multiplier = multipliers(np.array(steps, dtype=np.int8))
        score = scores_of(cosine, multiplier)
        return {
            places[i]: self._hit(*places[i], float(cosine[i]), float(multiplier[i]), float(score[i]))
            for i in np.flatnonzero(~np.isnan(cosine)).tolist()
        }

    def neighbours(self, places: Sequence[Place]) -> list[tuple[Place | None, Place | None]]:
        """For each place the live chunks that were said just before and just after it, by origin_id."""
        origins = np.array([self.views[s].rows[row]["origin_id"] for s, row in places], dtype=np.uint64)
        nearest = _Nearest(origins)
        own: dict[int, list[int]] = {}
        for position, (segment_id, _) in enumerate(places):
            own.setdefault(segment_id, []).append(position)
        for segment_id, positions in own.items():
            nearest.look(segment_id, self.views[segment_id], np.array(positions))
        for segment_id, view in self.views.items():  # a correction stands far from where its chunk was first said
            positions_left = nearest.worth_a_look(view, np.array(own.get(segment_id, []), dtype=np.intp))
            if len(positions_left):
                nearest.look(segment_id, view, positions_left)
        return nearest.pairs()

    def knows(self, uuid: bytes) -> bool:
        """Whether the topic has any entry of that chunk, live or not."""
        return next(self.places(uuid), None) is not None

    def find(self, uuid: bytes) -> Entry | None:
        """The present state of the chunk, Deprecated ones too; None if the topic does not know it. Reads the disk.

        Raises:
            StoreError: the entry cannot be read (CorruptFile if its bytes are damaged).
        """
        place = self._newest_place(uuid)
        return None if place is None else self._read(*place)

    def fingerprint_of(self, uuid: bytes) -> str | None:
        """The embedding model that the present entry's vector comes from; None if the topic does not know the chunk."""
        place = self._newest_place(uuid)
        return None if place is None else self.views[place[0]].segment.header.fingerprint

    def history(self, uuid: bytes) -> list[Entry]:
        """Every entry of the chunk, oldest first. Reads the disk.

        Raises:
            StoreError: an entry cannot be read.
        """
        return [self._read(*place) for place in sorted(self.places(uuid), key=self._canonical_id)]

    def entry(self, hit: Hit) -> Entry:
        """The entry of a hit of this snapshot, read from disk and checked.

        Raises:
            StoreError: the entry cannot be read (CorruptFile if its bytes are damaged).
        """
        return self._read(hit.segment, hit.row)

    def places(self, uuid: bytes) -> Iterator[tuple[int, int]]:
        """(segment id, row) of every entry of the chunk."""
        for segment_id, row in self.directory.places(uuid):  # it covers whole segments; a view of the past may not
            if row < len(self.views[segment_id].rows):
                yield segment_id, row
        for segment, view in self._growing:
            yield from ((segment.segment_id, row) for row in segment.rows_of(uuid) if row < len(view.rows))

    def live_places_of_text(self, key: int) -> Iterator[tuple[int, int]]:
        """(segment id, row) of the live entries whose content may have this `text_hash`."""
        for segment_id, row in self.directory.places_of_text(key):
            if not self.views[segment_id].gone[row]:
                yield segment_id, row
        for segment, view in self._growing:
            rows = (row for row in segment.rows_of_text(key) if row < len(view.rows) and not view.gone[row])
            yield from ((segment.segment_id, row) for row in rows)

    def has_digest(self, word: int) -> bool:
        """Whether an entry came from a message with this `digest_word`; may be ahead of the snapshot by one append."""
        return self.directory.has_digest(word) or any(segment.has_digest(word) for segment, _ in self._growing)

    def _ranked(self, found: Sequence[Found], k: int) -> list[Hit]:
        if not found:
            return []
        segment_ids = np.concatenate([part.segment_ids for part in found])
        rows = np.concatenate([part.rows for part in found])
        cosine = np.concatenate([part.cosine for part in found])
        multiplier = np.concatenate([part.multiplier for part in found])
        score = scores_of(cosine, multiplier)
        hits = []
        for i in _contenders(score, k).tolist():
            place = int(segment_ids[i]), int(rows[i])
            hits.append(self._hit(*place, float(cosine[i]), float(multiplier[i]), float(score[i])))
        return sorted(hits, key=lambda hit: (-hit.score, hit.canonical_id))[:k]

    def _hit(self, segment_id: int, row: int, cosine: float, multiplier: float, score: float) -> Hit:
        record = self.views[segment_id].rows[row]
        return Hit(
            uuid=uuid_bytes(record["uuid_high"], record["uuid_low"]),
            canonical_id=int(record["canonical_id"]),
            cosine=cosine,
            multiplier=multiplier,
            score=score,
            segment=segment_id,
            row=row,
        )

    def _cosines_at(self, queries: Floats, places: Rows) -> NDArray[np.float64]:
        """The best cosine of each place (segment id, row), shape (n, 2); NaN where it is not known."""
        segment_ids, rows = places.T
        found = np.full(len(places), np.nan)
        own: dict[IndexView | View, list[int]] = {}
        for position, segment_id in enumerate(segment_ids.tolist()):
            own.setdefault(self._searched_by(segment_id), []).append(position)
        for searched, positions in own.items():
            if isinstance(searched, IndexView):
                found[positions] = searched.index.cosines_of(segment_ids[positions], rows[positions], queries)
            elif searched.matrix is not None:
                found[positions] = cosines(searched.matrix[rows[positions]], queries)
        return found

    def _searched_by(self, segment_id: int) -> IndexView | View:
        """What a search finds the chunks of a segment by: an index, or the view of the segment itself."""
        if self._searched is None:
            of_index = {number: view for view in self.indexes for number in view.index.segment_ids}
            self._searched = {number: of_index.get(number, view) for number, view in self.views.items()}
        return self._searched[segment_id]

    def _newest_place(self, uuid: bytes) -> tuple[int, int] | None:
        return max(self.places(uuid), key=self._canonical_id, default=None)

    def _canonical_id(self, place: tuple[int, int]) -> int:
        return int(self.views[place[0]].rows[place[1]]["canonical_id"])

    def _read(self, segment_id: int, row: int) -> Entry:
        view = self.views[segment_id]
        return view.segment.read(view.rows[row])


def _contenders(score: NDArray[np.float64], k: int) -> Rows:
    """The positions of the `k` highest scores, and of all that equal the least of them."""
    if len(score) <= k:
        return np.arange(len(score))
    return np.flatnonzero(score >= np.partition(score, len(score) - k)[len(score) - k])


def _smoothed(before: float | None, latest: float) -> float:
    return latest if before is None else before + _WEIGHT * (latest - before)
