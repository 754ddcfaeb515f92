"""A topic at one point in time: what readers search and look entries up in.

Rule: nothing that is reachable from a snapshot changes what the snapshot answers. A later append or seal makes new
views and shares what it did not touch. The one thing shared that does change is the marks in an index: what was
marked after this snapshot was taken is read from disk and scanned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.chunks import Entry
from memd.store.segment import Growing, Sealed
from memd.store.superseded import Bits, Directory, Records, uuid_bytes
from memd.store.vectors import Floats, Rows, best_rows, cosines, multipliers, scores_of


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class View:
    """One segment at one point in time; the arrays are never written to."""

    segment: Growing | Sealed
    rows: Records
    gone: Bits
    """Superseded or Deprecated, per row."""
    matrix: Floats | None
    """Of a growing segment, per row; None where there is an index, or where another model's vectors are not
    comparable."""
    marked: Bits | None
    """The marks of the index when this view was made."""

    @property
    def live_count(self) -> int:
        """How many rows count."""
        return len(self.gone) - int(np.count_nonzero(self.gone))

    def search(self, queries: Floats, k: int) -> tuple[Rows, NDArray[np.float64]]:
        """Rows among which the best `k` live ones by score are, and their cosines."""
        if self.matrix is not None:
            return self._scanned(queries, k)
        if isinstance(self.segment, Sealed) and self.segment.index is not None:
            return self._looked_up(self.segment, queries, k)
        return np.empty(0, dtype=np.intp), np.empty(0)

    def _scanned(self, queries: Floats, k: int) -> tuple[Rows, NDArray[np.float64]]:
        assert self.matrix is not None
        live = np.flatnonzero(~self.gone)
        cosine = cosines(self.matrix, queries)[live]
        best = best_rows(scores_of(cosine, multipliers(self.rows["utility_steps"][live])), k)
        return live[best], cosine[best]

    def _looked_up(self, segment: Sealed, queries: Floats, k: int) -> tuple[Rows, NDArray[np.float64]]:
        assert segment.index is not None
        rows, cosine = segment.index.search(queries, k)
        rest, matrix = segment.adjusted, segment.adjusted_matrix
        marked = segment.index.marked
        if marked is not self.marked:
            late, vectors, _ = segment.vectors(np.flatnonzero(marked & ~self.gone & segment.plain))
            rest, matrix = np.concatenate([rest, late]), np.concatenate([matrix, vectors])
            known = ~marked[rows]  # a row may be found and be marked a moment later
            rows, cosine = rows[known], cosine[known]
        if len(rest):
            rows, cosine = np.concatenate([rows, rest]), np.concatenate([cosine, cosines(matrix, queries)])
        live = ~self.gone[rows]
        return rows[live], cosine[live]


class Snapshot:
    """An immutable point-in-time view of one topic; any thread may use it, for as long as it likes."""

    def __init__(self, topic_id: str, views: Mapping[int, View], directory: Directory) -> None:
        self.topic_id = topic_id
        self.views = views
        """By segment id, oldest first."""
        self.directory = directory
        """Of the sealed segments among them."""
        self._live_count: int | None = None

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
        parts = [(view, *view.search(queries, k)) for view in self.views.values()]
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return []
        columns = np.concatenate([view.rows[rows] for view, rows, _ in parts])
        places = [(view.segment.segment_id, row) for view, rows, _ in parts for row in rows.tolist()]
        cosine = np.concatenate([found for _, _, found in parts])
        multiplier = multipliers(columns["utility_steps"])
        score = scores_of(cosine, multiplier)
        order = np.lexsort((columns["canonical_id"], -score))[:k]
        return [
            Hit(
                uuid=uuid_bytes(columns[i]["uuid_high"], columns[i]["uuid_low"]),
                canonical_id=int(columns[i]["canonical_id"]),
                cosine=float(cosine[i]),
                multiplier=float(multiplier[i]),
                score=float(score[i]),
                segment=places[i][0],
                row=places[i][1],
            )
            for i in order.tolist()
        ]

    def knows(self, uuid: bytes) -> bool:
        """Whether the topic has any entry of that chunk, live or not."""
        return next(self.places(uuid), None) is not None

    def find(self, uuid: bytes) -> Entry | None:
        """The present state of the chunk, Deprecated ones too; None if the topic does not know it. Reads the disk.

        Raises:
            StoreError: the entry cannot be read (CorruptFile if its bytes are damaged).
        """
        place = max(self.places(uuid), key=self._canonical_id, default=None)
        return None if place is None else self._read(*place)

    def entry(self, hit: Hit) -> Entry:
        """The entry of a hit of this snapshot, read from disk and checked.

        Raises:
            StoreError: the entry cannot be read (CorruptFile if its bytes are damaged).
        """
        return self._read(hit.segment, hit.row)

    def places(self, uuid: bytes) -> Iterator[tuple[int, int]]:
        """(segment id, row) of every entry of the chunk."""
        yield from self.directory.places(uuid)
        for segment_id, view in self.views.items():
            if isinstance(view.segment, Growing):
                yield from ((segment_id, row) for row in view.segment.rows_of(uuid) if row < len(view.rows))

    def live_places_of_text(self, key: int) -> Iterator[tuple[int, int]]:
        """(segment id, row) of the live entries whose content may have this `text_hash`."""
        for segment_id, row in self.directory.places_of_text(key):
            if not self.views[segment_id].gone[row]:
                yield segment_id, row
        for segment_id, view in self.views.items():
            if isinstance(view.segment, Growing):
                rows = view.segment.rows_of_text(key)
                yield from ((segment_id, row) for row in rows if row < len(view.rows) and not view.gone[row])

    def has_digest(self, word: int) -> bool:
        """Whether an entry came from a message with this `digest_word`; may be ahead of the snapshot by one append."""
        growing = (view.segment for view in self.views.values() if isinstance(view.segment, Growing))
        return self.directory.has_digest(word) or any(segment.has_digest(word) for segment in growing)

    def _canonical_id(self, place: tuple[int, int]) -> int:
        return int(self.views[place[0]].rows[place[1]]["canonical_id"])

    def _read(self, segment_id: int, row: int) -> Entry:
        view = self.views[segment_id]
        return view.segment.read(view.rows[row])
