"""Vector search: the exact scan of a matrix, as it is of the growing segment and of each sealed one by itself.

Rule: an index is searched only when it is complete, and its file never changes after it was built; rows that must no
longer be found are marked in the loaded index alone. The file of a segment has hnswlib's format, in which older
versions of memd wrote a graph too. Vectors are unit vectors, so the inner product is the cosine.
Cosines are rounded to COSINE_DECIMALS: a scan and an index add up the same product in different order, and equal
vectors must tie wherever they lie.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memd.errors import CorruptFile
from memd.settings.model import UTILITY_STEPS_LIMIT, UtilitySettings
from memd.store.disk import LocalDisk
from memd.store.files import FileChecksum
from memd.store.log.columns import Bits, Floats, Rows
from memd.store.syscalls import map_native, write_native

HNSW_M = 16
HNSW_EF_CONSTRUCTION = 200
HNSW_HEADER_BYTES = 96
_HNSW_OFFSETS = struct.Struct("<6Q")
"""Of level 0, 0; places and elements; bytes of an element; of its label and its vector in it."""
_HNSW_TUNING = struct.Struct("<iIQQQdQ")
"""Highest level, its element, links on it, on level 0, on others; the mean level, and ef_construction."""
COSINE_DECIMALS = 6
SCANNED_ROWS = 512
"""Of a matrix at once: 0.8 MB of 384 dimensions, which a core keeps at hand."""


def multipliers(steps: NDArray[np.int8], utility: UtilitySettings) -> NDArray[np.float64]:
    """Return the utility multiplier of each step count."""
    return _multiplier_table(utility)[steps.astype(np.intp) + UTILITY_STEPS_LIMIT]


def cosines(matrix: Floats, queries: Floats) -> NDArray[np.float64]:
    """Return for each row of `matrix` (n, dimension) its best cosine over `queries` (q, dimension); shape (n,).

    A further column of `queries` is added to each of its cosines, which then end at 1: see `Embedder.embed_query`.
    """
    queries, added = parted(queries, matrix.shape[1])
    found = products(matrix, queries)
    return rounded((found if added is None else np.minimum(found + added[:, None], 1.0)).max(axis=0))


def products(matrix: Floats, queries: Floats) -> Floats:
    """Return the product of each row of `matrix` (n, dimension) with each query (q, dimension), shape (q, n).

    One query at a time is four times as fast as one product with so few columns, and piece by piece the matrix comes
    from memory once for all of them.
    """
    found = np.empty((len(queries), len(matrix)), np.float32)
    for start in range(0, len(matrix), SCANNED_ROWS):
        piece = matrix[start : start + SCANNED_ROWS]
        for query, row in zip(queries, found, strict=True):
            np.dot(piece, query, out=row[start : start + SCANNED_ROWS])
    return found


def parted(queries: Floats, dimension: int) -> tuple[Floats, Floats | None]:
    """The queries, and what is added to the cosines of each; None: nothing."""
    if queries.shape[1] == dimension:
        return queries, None
    return np.ascontiguousarray(queries[:, :dimension]), queries[:, dimension]


def scores_of(cosine: NDArray[np.float64], multiplier: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return max(0, cosine) x multiplier, by which chunks are ranked."""
    return np.asarray(np.maximum(cosine, 0.0) * multiplier, dtype=np.float64)


def best_rows(scores: NDArray[np.float64], k: int) -> Rows:
    """Return the positions of the `k` highest scores, in no particular order; of equal scores the later ones."""
    if len(scores) <= k:
        return np.arange(len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    return np.concatenate([above, np.flatnonzero(scores == least)[len(above) - k :]])


class VectorIndex:
    """The vectors of one segment in memory, scanned exactly: at 5,000 as fast as HNSW, and built in no time.

    Its labels are numbers below the matrix's length, not necessarily all of them. `search` may run in any thread;
    `mark` in one thread at a time.
    """

    def __init__(self, matrix: Floats, labels: Rows) -> None:
        """`matrix` (rows, dimension) is kept, not copied; `labels` are those of its rows that are indexed."""
        self.matrix = matrix
        self._labels = labels
        self._marked: Bits = np.ones(len(matrix), dtype=np.bool_)  # or not indexed; replaced, never changed
        self._marked[labels] = False

    @classmethod
    def load(
        cls, files: LocalDisk, path: Path, checksum: FileChecksum, *, dimension: int, size: int, labels: Rows
    ) -> VectorIndex:
        """Load an index that has this checksum.

        Raises:
            CorruptFile: the file is not as it was written, or no index over exactly `labels`.
        """
        mapped: list[memoryview] = []
        files.load_native(path, checksum, lambda name: mapped.append(map_native(name)))
        data = mapped[0]
        try:
            _, _, count, length, label_at, vector_at = _HNSW_OFFSETS.unpack_from(data)
            records = np.frombuffer(
                data, _hnsw_record(dimension, length, label_at, vector_at), count, HNSW_HEADER_BYTES
            )
        except (struct.error, ValueError) as error:
            raise CorruptFile(f"{path}: the index cannot be loaded ({error}); it is rebuilt from the log") from error
        if not np.array_equal(np.sort(records["label"]), labels):
            raise CorruptFile(f"{path}: the index belongs to other entries; it is rebuilt from the log")
        matrix: Floats = np.zeros((size, dimension), dtype=np.float32)
        matrix[records["label"]] = records["vector"]
        return cls(matrix, labels)

    @property
    def memory_bytes(self) -> int:
        """Size in memory."""
        return self.matrix.nbytes + self._marked.nbytes

    def save(self, files: LocalDisk, path: Path) -> int:
        """Write the index to `path` durably; returns the size in bytes that the file must have."""
        data = _hnsw_file(self.matrix[self._labels], self._labels)
        files.save_native(path, lambda name: write_native(name, [data]))
        return len(data)

    def mark(self, rows: Rows) -> None:
        """Keep `rows` out of all searches from now on."""
        marked = self._marked.copy()
        marked[rows] = True
        self._marked = marked

    def search(self, queries: Floats, k: int) -> tuple[Rows, NDArray[np.float64]]:
        """Return the best `k` unmarked rows by their best cosine over the queries, and these."""
        return self._best(queries, k, ~self._marked)

    def search_among(self, queries: Floats, k: int, wanted: Bits) -> tuple[Rows, NDArray[np.float64]]:
        """The same among the rows `wanted` (a bit for each)."""
        return self._best(queries, k, wanted & ~self._marked)

    def stored(self, rows: Rows) -> Floats:
        """Return the vectors of these rows, shape (n, dimension); zeros for one that is not indexed."""
        found: Floats = self.matrix[rows]
        return found

    def _best(self, queries: Floats, k: int, wanted: Bits) -> tuple[Rows, NDArray[np.float64]]:
        rows = np.flatnonzero(wanted)
        if 2 * len(rows) < len(self.matrix):
            cosine = cosines(self.matrix[rows], queries)
        else:
            cosine = cosines(self.matrix, queries)[rows]
        best = best_rows(cosine, k)
        return rows[best], cosine[best]


def _hnsw_record(dimension: int, length: int, label_at: int, vector_at: int) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": ["vector", "label"],
            "formats": [("<f4", (dimension,)), "<u8"],
            "offsets": [vector_at, label_at],
            "itemsize": length,
        }
    )


def _hnsw_file(vectors: Floats, labels: Rows) -> bytes:
    """The file that hnswlib 0.8 would write, but for the links: none is followed (hnswalg.h, saveIndex)."""
    count, dimension = vectors.shape
    vector_at = 4 + 8 * HNSW_M
    label_at = vector_at + 4 * dimension
    records = np.zeros(count, dtype=_hnsw_record(dimension, label_at + 8, label_at, vector_at))
    records["vector"], records["label"] = vectors, labels
    offsets = _HNSW_OFFSETS.pack(0, max(1, count), count, label_at + 8, label_at, vector_at)
    top, entry = (0, 0) if count else (-1, 0xFFFFFFFF)
    tuning = _HNSW_TUNING.pack(top, entry, HNSW_M, 2 * HNSW_M, HNSW_M, 1 / math.log(HNSW_M), HNSW_EF_CONSTRUCTION)
    return offsets + tuning + records.tobytes() + bytes(4 * count)


def rounded(products: Floats) -> NDArray[np.float64]:
    """Return cosines as they are compared."""
    return np.asarray(np.round(products.astype(np.float64), COSINE_DECIMALS), dtype=np.float64)


@lru_cache(maxsize=8)
def _multiplier_table(utility: UtilitySettings) -> NDArray[np.float64]:
    return np.array([utility.multiplier(steps) for steps in range(-UTILITY_STEPS_LIMIT, UTILITY_STEPS_LIMIT + 1)])
