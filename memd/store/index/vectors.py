"""Vector search: the exact scan of a matrix, and the HNSW index of sealed segments.

Rule: an index is searched only when it is complete, and its file never changes after it was built; rows that must no
longer be found are marked in the loaded index alone. Vectors are unit vectors, so the inner product is the cosine.
Cosines are rounded to COSINE_DECIMALS: a scan and an index add up the same product in different order, and equal
vectors must tie wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import hnswlib
import numpy as np
from numpy.typing import NDArray

from memd.errors import CorruptFile
from memd.settings.model import UTILITY_STEPS_LIMIT, UtilitySettings
from memd.store.disk import LocalDisk
from memd.store.files import FileChecksum
from memd.store.log.columns import Bits, Floats, Rows

HNSW_M = 16
HNSW_EF_CONSTRUCTION = 200
HNSW_EF = 64
"""Measured on 20 segments of 5,000 × 384, k = 32: recall 0.9995 in 5.3 ms, against 1.000 in 11 ms at 200. Every segment
returns k of its own, so finding the best k of all takes far less effort than one large index needs. Where k is larger,
hnswlib looks at k."""
COMPARED_MAX = 100
"""Of a choice: reading a vector out of an index takes 20 µs, asking whether a row is wanted 0.7 µs, and where one of a
hundred is, as many are asked as there are (measured, hnswlib 0.8)."""
HNSW_OVERHEAD_BYTES = 100
"""Memory per vector beyond the size of the file: locks, label table, pointers."""
HNSW_SEED = 100  # fixed, so that the same log gives the same index
COSINE_DECIMALS = 6


def multipliers(steps: NDArray[np.int8], utility: UtilitySettings) -> NDArray[np.float64]:
    """Return the utility multiplier of each step count."""
    return _multiplier_table(utility)[steps.astype(np.intp) + UTILITY_STEPS_LIMIT]


def cosines(matrix: Floats, queries: Floats) -> NDArray[np.float64]:
    """Return for each row of `matrix` (n, dimension) its best cosine over `queries` (q, dimension); shape (n,).

    A further column of `queries` is added to each of its cosines, which then end at 1: see `Embedder.embed_query`.
    """
    queries, added = _parted(queries, matrix.shape[1])
    products = matrix @ queries[0] if len(queries) == 1 else matrix @ queries.T
    if added is not None:
        products = np.minimum(products + added, 1.0)
    return _rounded(products if products.ndim == 1 else products.max(axis=1))


def _parted(queries: Floats, dimension: int) -> tuple[Floats, Floats | None]:
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
    """A complete HNSW index in memory. Its labels are numbers below `size`, not necessarily all of them.

    `search` may run in any thread; `mark` in one thread at a time.
    """

    def __init__(self, index: hnswlib.Index, size: int, labels: Rows) -> None:
        self._index = index
        self._index.set_num_threads(1)
        self._index.set_ef(HNSW_EF)
        self._marked: Bits = np.ones(size, dtype=np.bool_)  # or not in the index; replaced, never changed
        self._marked[labels] = False

    @classmethod
    def build(cls, matrix: Floats, labels: Rows) -> VectorIndex:
        """Index the rows `labels` of `matrix` (rows, dimension). Slow; releases the GIL."""
        batches = [(labels, matrix[labels])]
        return cls.build_from(batches, dimension=matrix.shape[1], count=len(labels), size=len(matrix))

    @classmethod
    def build_from(
        cls, batches: Iterable[tuple[Rows, Floats]], *, dimension: int, count: int, size: int
    ) -> VectorIndex:
        """Index at most `count` vectors, given as (labels, vectors (n, dimension)). Slow; releases the GIL."""
        index = hnswlib.Index(space="ip", dim=dimension)
        index.init_index(max(1, count), M=HNSW_M, ef_construction=HNSW_EF_CONSTRUCTION, random_seed=HNSW_SEED)
        indexed = [np.empty(0, dtype=np.intp)]
        for labels, vectors in batches:
            if len(labels):
                index.add_items(vectors, labels, num_threads=1)
                indexed.append(labels)
        return cls(index, size, np.concatenate(indexed))

    @classmethod
    def load(
        cls, files: LocalDisk, path: Path, checksum: FileChecksum, *, dimension: int, size: int, labels: Rows
    ) -> VectorIndex:
        """Load an index that has this checksum: hnswlib trusts the file and can crash on damage.

        Raises:
            CorruptFile: the file is not as it was written, or no index over exactly `labels`.
        """
        index = hnswlib.Index(space="ip", dim=dimension)
        try:
            files.load_native(path, checksum, lambda name: index.load_index(name, max_elements=max(1, len(labels))))
        except RuntimeError as error:
            raise CorruptFile(f"{path}: the index cannot be loaded ({error}); it is rebuilt from the log") from error
        if not np.array_equal(np.sort(np.array(index.get_ids_list(), dtype=np.intp)), labels):
            raise CorruptFile(f"{path}: the index belongs to other entries; it is rebuilt from the log")
        return cls(index, size, labels)

    @property
    def memory_bytes(self) -> int:
        """Approximate size in memory."""
        return int(self._index.index_file_size()) + HNSW_OVERHEAD_BYTES * int(self._index.get_max_elements())

    def save(self, files: LocalDisk, path: Path) -> int:
        """Write the index to `path` durably; returns the size in bytes that the file must have."""
        save: Callable[[str], None] = self._index.save_index
        files.save_native(path, save)
        return int(self._index.index_file_size())

    def mark(self, rows: Rows) -> None:
        """Keep `rows` out of all searches from now on."""
        marked = self._marked.copy()
        fresh = np.unique(rows[~marked[rows]])  # one append may supersede a row twice
        marked[fresh] = True
        self._marked = marked
        for row in fresh.tolist():
            self._index.mark_deleted(row)

    def search(self, queries: Floats, k: int) -> tuple[Rows, NDArray[np.float64]]:
        """Return the best unmarked rows by cosine, at most k per query, each once, and their best cosines."""
        available = len(self._marked) - int(np.count_nonzero(self._marked))
        k = min(k, available)
        if k == 0:
            return np.empty(0, dtype=np.intp), np.empty(0)
        try:
            return self._nearest(queries, k)
        except RuntimeError:  # fewer than k were reached: marked rows cut the graph, or a row was marked just now
            return self._scan(queries)

    def search_among(self, queries: Floats, k: int, wanted: Bits) -> tuple[Rows, NDArray[np.float64]]:
        """The same among the rows `wanted` (a bit for each), of which more than `k` may be returned."""
        rows = np.flatnonzero(wanted & ~self._marked)
        if len(rows) > max(k, COMPARED_MAX):
            try:
                return self._nearest(queries, k, filter=wanted.tobytes().__getitem__)
            except RuntimeError:  # as in `search`
                pass
        rows, vectors = self.vectors(rows)
        return rows, cosines(vectors, queries) if len(rows) else np.empty(0)

    def vectors(self, rows: Rows) -> tuple[Rows, Floats]:
        """Return those of `rows` that are indexed and not marked, and their vectors, shape (n, dimension)."""
        try:
            found = self._index.get_items(rows, return_type="numpy") if len(rows) else []
        except RuntimeError:  # one of them is missing; hnswlib does not say which
            known = [row for row in rows.tolist() if self._has(row)]
            rows = np.array(known, dtype=np.intp)
            found = self._index.get_items(rows, return_type="numpy") if known else []
        return rows, np.asarray(found, dtype=np.float32).reshape(len(rows), self._index.dim)

    def stored(self, rows: Rows) -> Floats:
        """Return the vectors of these rows, shape (n, dimension); zeros for one that is not indexed, or is marked."""
        found: Floats = np.zeros((len(rows), self._index.dim), dtype=np.float32)
        known, vectors = self.vectors(rows)
        found[np.isin(rows, known)] = vectors
        return found

    def _nearest(self, queries: Floats, k: int, **among: Callable[[int], object]) -> tuple[Rows, NDArray[np.float64]]:
        plain, added = _parted(queries, self._index.dim)
        labels, distances = self._index.knn_query(plain, k=k, num_threads=1, **among)
        if added is not None:
            distances = np.maximum(distances - added[:, None], 0.0)
        if len(queries) == 1:
            return labels[0].astype(np.intp), _rounded(1.0 - distances[0])
        rows, places = np.unique(labels.ravel().astype(np.intp), return_inverse=True)
        best = np.full(len(rows), -1.0)
        np.maximum.at(best, places, _rounded(1.0 - distances.ravel()))
        return rows, best

    def _has(self, row: int) -> bool:
        try:
            self._index.get_items([row], return_type="numpy")
        except RuntimeError:
            return False
        return True

    def _scan(self, queries: Floats) -> tuple[Rows, NDArray[np.float64]]:
        rows, vectors = self.vectors(np.flatnonzero(~self._marked))
        return rows, cosines(vectors, queries) if len(rows) else np.empty(0)


def _rounded(products: Floats) -> NDArray[np.float64]:
    return np.asarray(np.round(products.astype(np.float64), COSINE_DECIMALS), dtype=np.float64)


@lru_cache(maxsize=8)
def _multiplier_table(utility: UtilitySettings) -> NDArray[np.float64]:
    return np.array([utility.multiplier(steps) for steps in range(-UTILITY_STEPS_LIMIT, UTILITY_STEPS_LIMIT + 1)])
