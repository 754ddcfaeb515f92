"""A vector index over sealed segments: a file until its first search, in memory from then on.

Rule: an index covers one segment (seg_NNNN.hnsw) or several neighbouring ones (merged_NNNN_MMMM.hnsw). Its labels are
the rows of its segments counted through from the first. It finds the plain chunks; live ones that it does not hold
(adjusted, or unreadable when it was built) are *extras* and scanned, so that a search over it misses nothing.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import Status
from memd.errors import CorruptFile, StoreError
from memd.store.files import Files
from memd.store.index.hnswlib_file import StoredVectors
from memd.store.index.superseded import Bits
from memd.store.index.vectors import Floats, Rows, VectorIndex, best_rows, cosines, multipliers, scores_of
from memd.store.log.segment import Sealed, Vouched

_PIECE_BYTES = 8 << 20


class Found(msgspec.Struct, frozen=True):
    """Chunks that a search found in one place, in no particular order."""

    segment_ids: Rows
    rows: Rows
    cosine: NDArray[np.float64]
    multiplier: NDArray[np.float64]


class _InMemory(msgspec.Struct, frozen=True):
    index: VectorIndex
    stored: StoredVectors
    extras: Rows
    """Labels, ascending."""
    extra_matrix: Floats
    extra_multipliers: NDArray[np.float64]


class SealedIndex:
    """One index and what it says nothing about. Any thread may search; appending marks what is gone."""

    def __init__(
        self,
        files: Files,
        path: Path,
        segments: Sequence[Sealed],
        vouched: Vouched,
        *,
        gone: Bits,
        left_out: Rows | None = None,
    ) -> None:
        """`gone`: labels that do not count any more. `left_out`: plain ones that the file does not hold."""
        self.path = path
        self.segments = tuple(segments)
        self.segment_ids = tuple(segment.segment_id for segment in segments)
        self.vouched = vouched
        self._files = files
        self._numbers = np.array(self.segment_ids, dtype=np.intp)
        self._starts = np.cumsum([0, *(len(segment.rows) for segment in segments)])
        self.left_out = np.empty(0, dtype=np.intp) if left_out is None else left_out
        self._gone = gone
        self._lock = threading.Lock()  # marking, and the moment an index comes into memory
        self._loading = threading.Lock()
        self._in_memory: _InMemory | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def gone(self) -> Bits:
        """Labels that do not count in the newest state; replaced, never changed."""
        return self._gone

    @property
    def is_loaded(self) -> bool:
        """Whether a search can begin at once."""
        return self._in_memory is not None

    @property
    def memory_bytes(self) -> int:
        """What the index takes in memory, about."""
        loaded = self._in_memory
        if loaded is None:
            return len(self)
        return 2 * len(self) + loaded.index.memory_bytes + loaded.stored.memory_bytes + loaded.extra_matrix.nbytes

    def column(self, name: str) -> NDArray[np.generic]:
        """A column of `segment.ROW`, per label."""
        return np.concatenate([segment.rows[name] for segment in self.segments])

    def mark(self, segment_id: int, rows: Rows) -> None:
        """These rows do not count any more."""
        if len(rows):
            labels = rows + int(self._starts[self.segment_ids.index(segment_id)])
            with self._lock:
                gone = self._gone.copy()
                gone[labels] = True
                self._gone = gone  # before the index: a search that misses a row must be able to see that it is gone
                if self._in_memory is not None:
                    self._in_memory.index.mark(labels)

    def load(self) -> list[StoreError]:
        """Bring the index into memory unless it is there. Returns what of the extras could not be read.

        Raises:
            CorruptFile: the file is not what it was when it was written.
            StoreError: it cannot be read.
        """
        with self._loading:
            if self._in_memory is not None:
                return []
            check_file(self._files, self.path, self.vouched)
            return self._take(
                VectorIndex.load(
                    self._files, self.path, dimension=self._dimension, size=len(self), labels=np.flatnonzero(self._held)
                ),
                self._read_vectors,
            )

    def use(self, index: VectorIndex, matrix: Floats | None = None) -> None:
        """Take the index that was just built, with `matrix` (labels, dimension) for the extras, if given."""
        with self._loading:
            self._take(index, self._read_vectors if matrix is None else lambda labels: (labels, matrix[labels], []))

    def search(self, queries: Floats, k: int, gone: Bits) -> list[Found]:
        """Chunks among which the best `k` by score are, of those that counted when `gone` was `self.gone`.

        Raises:
            StoreError: the index cannot be loaded.
        """
        if not self.is_loaded:
            self.load()
        loaded = self._in_memory
        assert loaded is not None, "what is loaded stays loaded"
        labels, cosine = loaded.index.search(queries, k)
        scanned, matrix, multiplier = loaded.extras, loaded.extra_matrix, loaded.extra_multipliers
        now = self._gone
        if now is not gone:  # what has gone since still counts here
            late = np.setdiff1d(np.flatnonzero(now & ~gone & self._is_active), scanned, assume_unique=True)
            late, vectors, _ = self._read_vectors(late)
            scanned, matrix = np.concatenate([scanned, late]), np.concatenate([matrix, vectors])
            multiplier = np.concatenate([multiplier, self._multipliers(late)])
        counted = ~now[labels] & ~gone[labels]  # a label may be found and be marked a moment later
        plain = self._found(labels[counted], cosine[counted], np.ones(int(np.count_nonzero(counted))))
        if not len(scanned):
            return [plain]
        return [plain, self._found(*_scanned(scanned, matrix, multiplier, queries, k, gone))]

    def scan(self, queries: Floats, k: int, gone: Bits) -> list[Found]:
        """The same without the index, from the log alone: slow, for an index that cannot be loaded."""
        labels, matrix, _ = self._read_vectors(np.flatnonzero(self._is_active & ~gone))
        return [self._found(*_scanned(labels, matrix, self._multipliers(labels), queries, k, gone))]

    def cosines_of(self, segment_ids: Rows, rows: Rows, queries: Floats) -> NDArray[np.float64]:
        """The best cosine over `queries` of each row of its segment, shape (rows,); NaN where it cannot be read."""
        labels = rows + self._starts[self._numbers.searchsorted(segment_ids)]
        found = np.full(len(labels), np.nan)

        def know(known: Rows, vectors: Floats) -> None:
            if len(known) == len(labels) and (known == labels).all():  # nearly always
                found[:] = cosines(vectors, queries)
            elif len(known):
                order = known.argsort()
                own = np.isin(labels, known)
                found[own] = cosines(vectors, queries)[order[known[order].searchsorted(labels[own])]]

        loaded = self._in_memory
        if loaded is not None:
            if len(loaded.extras):
                extra = labels[np.isin(labels, loaded.extras)]
                know(extra, loaded.extra_matrix[loaded.extras.searchsorted(extra)])
            know(*loaded.stored.read(labels[np.isnan(found)]))
            if np.isnan(found).any():
                know(*loaded.index.vectors(labels[np.isnan(found)]))
        left = labels[np.isnan(found)]
        if len(left):
            read, matrix, _ = self._read_vectors(left)
            know(read, matrix)
        return found

    @property
    def _dimension(self) -> int:
        return self.segments[0].header.dimension

    @property
    def _is_active(self) -> Bits:
        return np.asarray(self.column("status") == Status.ACTIVE, dtype=np.bool_)

    @property
    def _held(self) -> Bits:
        """The labels in the file: all Active ones in a segment's own, the plain ones in a merged one."""
        held = self._is_active
        if len(self.segments) > 1:
            held &= np.asarray(self.column("utility_steps") == 0, dtype=np.bool_)
        held[self.left_out] = False
        return held

    def _take(
        self, index: VectorIndex, vectors_of: Callable[[Rows], tuple[Rows, Floats, list[StoreError]]]
    ) -> list[StoreError]:
        adjusted = np.asarray(self.column("utility_steps") != 0, dtype=np.bool_)
        extra = self._is_active & ~self._gone & (adjusted | ~self._held)
        extras, matrix, problems = vectors_of(np.flatnonzero(extra))
        held = np.flatnonzero(self._held)
        stored = StoredVectors(self._files, self.path, dimension=self._dimension, labels=held)
        with self._lock:
            index.mark(np.flatnonzero(self._gone | adjusted))
            self._in_memory = _InMemory(index, stored, extras, matrix, self._multipliers(extras))
        return problems

    def _read_vectors(self, labels: Rows) -> tuple[Rows, Floats, list[StoreError]]:
        """The readable ones of `labels`, their vectors (n, dimension), and what went wrong with the others."""
        found, vectors, problems = [np.empty(0, dtype=np.intp)], [np.empty((0, self._dimension), np.float32)], []
        for position, segment in enumerate(self.segments):
            start, end = self._starts[position : position + 2].tolist()
            rows, matrix, errors = segment.vectors(labels[(labels >= start) & (labels < end)] - start)
            found.append(rows + start)
            vectors.append(matrix)
            problems += errors
        return np.concatenate(found), np.concatenate(vectors), problems

    def _multipliers(self, labels: Rows) -> NDArray[np.float64]:
        return multipliers(self.column("utility_steps")[labels].astype(np.int8))

    def _found(self, labels: Rows, cosine: NDArray[np.float64], multiplier: NDArray[np.float64]) -> Found:
        positions = self._starts.searchsorted(labels, side="right") - 1
        return Found(self._numbers[positions], labels - self._starts[positions], cosine, multiplier)


def _scanned(
    labels: Rows, matrix: Floats, multiplier: NDArray[np.float64], queries: Floats, k: int, gone: Bits
) -> tuple[Rows, NDArray[np.float64], NDArray[np.float64]]:
    live = ~gone[labels]
    labels, cosine, multiplier = labels[live], cosines(matrix, queries)[live], multiplier[live]
    best = best_rows(scores_of(cosine, multiplier), k)
    return labels[best], cosine[best], multiplier[best]


def check_file(files: Files, path: Path, vouched: Vouched) -> None:
    """Raises CorruptFile unless the file is the very one that was vouched for."""
    if files.size(path) != vouched.bytes or checksum_of(files, path, vouched.bytes) != vouched.crc:
        raise CorruptFile(f"{path}: is missing or does not match its checksum")


def checksum_of(files: Files, path: Path, size: int) -> int:
    """The CRC32 of the first `size` bytes of a file, in pieces: an index may be larger than what memory has left."""
    crc = 0
    for offset in range(0, size, _PIECE_BYTES):
        crc = zlib.crc32(files.read_at(path, offset, min(_PIECE_BYTES, size - offset)), crc)
    return crc
