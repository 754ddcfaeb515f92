"""Vector search: the exact scan of a matrix, for the growing segment and each single sealed one, and the compact index
of many segments, in numpy alone.

Rule: an index is searched only when it is complete, and its file never changes after it was built; callers exclude dead
rows. A damaged file cannot crash anything, and yet it is read only after its checksum was verified. Vectors are unit
vectors, so the inner product is the cosine. Cosines are rounded to COSINE_DECIMALS: a scan and an index add up the same
product in different order, and equal vectors must tie in either.

The compact index is an inverted file (IVF) of short heads and int8 residuals. A vector x of length 1 is stored as its
head h = B x, float32, where the rows of B are the principal axes of a sample, and the residual x - Bᵀh, in int8 with
one scale. So x·q = h·(B q) + scale (codes·q) to about 1e-4. The heads are sorted into lists by their nearest centroid
(k-means). A search multiplies the heads of the nearest lists with that of the query, and reads the residuals of the
best ones only. Residuals of heads: Jégou et al., "Product quantization for nearest neighbor search", 2011, where the
codes are finer, and slower to read without native code.

    merged_NNNN_MMMM.ivf:  | magic "memd.ivf" | dimension u32 | head u32 | lists u32 | count u32 |, then the arrays
    of `_Arrays` in their order, each padded to 64 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import UTILITY_STEPS_LIMIT, multiplier_of
from memd.errors import CorruptFile
from memd.store.disk import FileChecksum, LocalDisk
from memd.store.log.columns import Bits, Floats, Rows

COSINE_DECIMALS = 6
SCANNED_ROWS = 512
"""Rows of a matrix per product: 0.8 MB with 384 dimensions, which fits a core's cache."""

HEAD = 64
"""Dimension of a head."""
_SAMPLE_MIN, _SAMPLED_PER_LIST = 20_000, 8
_ROUNDS = 8
"""Rounds of k-means; more do not help."""
_LISTS_MAX = 8_192
_PER_LIST_MIN = 64
_SCANNED_MIN, _SCANNED_ROOT = 8_000, 14
"""Heads that a search reads: at least the first, or the second times the square root of their number."""
_COMPARED_MIN, _COMPARED_ROOT = 400, 1
"""Residuals that a search reads, of the best heads: likewise, and at least three per wanted result."""
_BATCH = 10_000
_MAGIC = b"memd.ivf"
_SIZES = struct.Struct("<8sIIII")
_ALIGNED = 64
_PIECE_BYTES = 4 << 20


_MULTIPLIERS = np.array([multiplier_of(steps) for steps in range(-UTILITY_STEPS_LIMIT, UTILITY_STEPS_LIMIT + 1)])


def multipliers(steps: NDArray[np.int8]) -> NDArray[np.float64]:
    """Return the utility multiplier of each step count."""
    return _MULTIPLIERS[steps.astype(np.intp) + UTILITY_STEPS_LIMIT]


def cosines(matrix: Floats, queries: Floats) -> NDArray[np.float64]:
    """Return for each row of `matrix` (n, dimension) its best cosine over `queries` (q, dimension); shape (n,)."""
    return np.asarray(np.round(products(matrix, queries).astype(np.float64), COSINE_DECIMALS).max(axis=0))


def products(matrix: Floats, queries: Floats) -> Floats:
    """Return the product of each row of `matrix` (n, dimension) with each query (q, dimension), shape (q, n).

    Single queries are four times as fast as one product with so few columns, and in pieces the matrix is read from
    memory once for all queries.
    """
    found = np.empty((len(queries), len(matrix)), np.float32)
    for start in range(0, len(matrix), SCANNED_ROWS):
        piece = matrix[start : start + SCANNED_ROWS]
        for query, row in zip(queries, found, strict=True):
            piece.dot(query, out=row[start : start + SCANNED_ROWS])
    return found


def best_rows(scores: NDArray[np.float64], k: int) -> Rows:
    """Return the positions of the `k` highest scores, in no particular order; the later ones in a tie."""
    if len(scores) <= k:
        return np.arange(len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    return np.concatenate([above, np.flatnonzero(scores == least)[len(above) - k :]])


def sample_size(count: int) -> int:
    """Return the number of vectors, of `count`, from which axes and centroids should be found."""
    return min(count, max(_SAMPLE_MIN, _SAMPLED_PER_LIST * _list_count(count)))


class _Arrays(msgspec.Struct):
    axes: Floats
    """(head, dimension)"""
    centroids: Floats
    """(lists, head)"""
    starts: NDArray[np.uint32]
    """Start of each list, and the end of the last."""
    labels: NDArray[np.uint32]
    """By position."""
    scales: Floats
    """By position; zero for a vector without a residual."""
    heads: Floats
    """(count, head)"""
    codes: NDArray[np.int8]
    """(count, dimension)"""


class VisibleLists(NamedTuple):
    """The part of a compact index that a search reads."""

    is_hidden: Bits
    """Excluded positions."""
    counts: Rows
    """Number of visible vectors in each list."""


class CompactIndex:
    """A complete index, its arrays in memory or mapped. Labels are numbers below `size`; some may be absent."""

    def __init__(self, arrays: _Arrays, size: int) -> None:
        self._arrays = arrays
        self._starts = arrays.starts.tolist()
        count = len(arrays.labels)
        self._positions = np.full(size, count, dtype=np.uint32)  # `count`: not in the index
        self._positions[arrays.labels] = np.arange(count, dtype=np.uint32)
        self._lengths: Rows = arrays.starts[1:].astype(np.intp) - arrays.starts[:-1]

    @classmethod
    def build(cls, sample: Floats, batches: Iterable[tuple[Rows, Floats]], *, count: int, size: int) -> CompactIndex:
        """Index at most `count` vectors, given as (labels, vectors (n, dimension)); `sample` is a subset of them."""
        dimension = sample.shape[1]
        sample = sample if len(sample) else np.zeros((1, dimension), np.float32)  # all chunks are adjusted
        _, principal = np.linalg.eigh(sample.T @ sample)
        axes = np.ascontiguousarray(principal[:, ::-1][:, : min(HEAD, dimension)].T, dtype=np.float32)
        centroids = _centroids(sample @ axes.T, _list_count(count))
        labels, lists = np.empty(count, dtype=np.uint32), np.empty(count, dtype=np.uint16)
        scales, heads = np.empty(count, dtype=np.float32), np.empty((count, len(axes)), dtype=np.float32)
        codes, end = np.empty((count, dimension), dtype=np.int8), 0
        for found, vectors in batches:
            at = slice(end, end := end + len(found))
            labels[at], heads[at] = found, vectors @ axes.T
            residuals = vectors - heads[at] @ axes
            scales[at] = np.abs(residuals).max(axis=1, initial=0.0) / 127
            codes[at] = np.rint(residuals / np.maximum(scales[at], 1e-12)[:, None])
            lists[at] = np.argmax(heads[at] @ centroids.T, axis=1)
        order = np.argsort(lists[:end], kind="stable")
        starts = lists[order].searchsorted(np.arange(len(centroids) + 1)).astype(np.uint32)
        arrays = _Arrays(axes, centroids, starts, labels[order], scales[order], heads[order], codes[order])
        return cls(arrays, size)

    @classmethod
    def load(cls, files: LocalDisk, path: Path, checksum: FileChecksum, *, size: int) -> CompactIndex:
        """Map an index that has this checksum. Raises CorruptFile: the file has changed since it was written, or has
        labels not below `size`."""
        data = files.map(path, checksum)
        try:
            arrays = _arrays_in(data)
        except (ValueError, struct.error) as error:
            raise CorruptFile(f"{path}: the index cannot be read ({error}); it is rebuilt from the log") from error
        if arrays.labels.max(initial=0) >= max(1, size):
            raise CorruptFile(f"{path}: the index belongs to other entries; it is rebuilt from the log")
        return cls(arrays, size)

    @property
    def memory_bytes(self) -> int:
        """Approximate size in memory, as if the whole file were resident."""
        return sum(array.nbytes for array in (*msgspec.structs.astuple(self._arrays), self._positions))

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of its file."""
        axes, centroids = self._arrays.axes, self._arrays.centroids
        sizes = axes.shape[1], len(axes), len(centroids), len(self._arrays.labels)
        yield _SIZES.pack(_MAGIC, *sizes).ljust(_ALIGNED, b"\0")
        for array in msgspec.structs.astuple(self._arrays):
            data = array.reshape(-1).view(np.uint8).data
            yield from (bytes(data[start : start + _PIECE_BYTES]) for start in range(0, len(data), _PIECE_BYTES))
            yield bytes(_padded(array.nbytes) - array.nbytes)

    def without(self, dead: Bits) -> VisibleLists:
        """Return the part of it without these labels (a bit for each)."""
        is_hidden = dead[self._arrays.labels]
        before = np.concatenate([[0], np.cumsum(~is_hidden)])[self._arrays.starts]
        return VisibleLists(is_hidden, before[1:] - before[:-1])

    @property
    def held(self) -> Bits:
        """Whether each label is in the index."""
        return np.asarray(self._positions < len(self._arrays.labels))

    def search(self, queries: Floats, k: int, shown: VisibleLists) -> Rows:
        """Return the best labels of a part by cosine, at most k per query, each once."""
        found = [self._nearest_to(query, k, shown) for query in queries]
        return np.unique(self._arrays.labels[np.concatenate(found)].astype(np.intp))

    def stored(self, rows: Rows) -> Floats:
        """Return the vectors of these labels to about 1e-4, shape (n, dimension); zeros for absent ones."""
        found: Floats = np.zeros((len(rows), self._arrays.axes.shape[1]), dtype=np.float32)
        at = self._positions[rows]
        known = np.flatnonzero(at < len(self._arrays.labels))
        at = at[known]
        residuals = self._arrays.scales[at, None] * self._arrays.codes[at]
        found[known] = self._arrays.heads[at] @ self._arrays.axes + residuals
        return found

    def _nearest_to(self, query: Floats, k: int, part: VisibleLists) -> Rows:
        """Return the positions of the best `k`."""
        arrays, starts = self._arrays, self._starts
        head = arrays.axes @ query
        nearest = np.argsort(-(arrays.centroids @ head))
        root = len(part.is_hidden) ** 0.5
        compared = max(_COMPARED_MIN, int(_COMPARED_ROOT * root), 3 * k)
        scanned = max(_SCANNED_MIN, int(_SCANNED_ROOT * root), 4 * compared)
        enough = int(part.counts[nearest].cumsum().searchsorted(scanned)) + 1
        chosen = nearest[:enough]
        firsts, lengths = arrays.starts[chosen].astype(np.intp), self._lengths[chosen]
        at = np.arange(lengths.sum()) + np.repeat(firsts - lengths.cumsum() + lengths, lengths)
        about = np.concatenate([arrays.heads[starts[one] : starts[one + 1]] @ head for one in chosen.tolist()])
        shown = np.flatnonzero(~part.is_hidden[at])
        shown = shown[best_rows(about[shown], compared)]
        at = at[shown]
        cosine = about[shown] + arrays.scales[at] * (arrays.codes[at].astype(np.float32) @ query)
        return np.asarray(at[best_rows(cosine, k)], np.intp)


def _arrays_in(mapped: memoryview) -> _Arrays:
    data = np.frombuffer(mapped, dtype=np.uint8)
    magic, dimension, head, lists, count = _SIZES.unpack(data[: _SIZES.size].tobytes())
    if magic != _MAGIC:
        raise ValueError("it is none")
    arrays, start = [], _ALIGNED
    kinds = ("<f4", "<f4", "<u4", "<u4", "<f4", "<f4", "<i1")
    shapes = ((head, dimension), (lists, head), (lists + 1,), (count,), (count,), (count, head), (count, dimension))
    for kind, shape in zip(kinds, shapes, strict=True):
        size = math.prod(shape) * np.dtype(kind).itemsize
        arrays.append(np.asarray(data[start : start + size]).view(kind).reshape(shape))
        start += _padded(size)
    return _Arrays(*arrays)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _list_count(count: int) -> int:
    return max(1, min(_LISTS_MAX, count // _PER_LIST_MIN, int(3 * count**0.5)))


def _centroids(heads: Floats, count: int) -> Floats:
    """Return centroids by spherical k-means from evenly spaced heads, so that the same vectors give the same lists."""
    centroids: Floats = heads[np.linspace(0, len(heads) - 1, min(count, len(heads))).astype(np.intp)]
    for _ in range(_ROUNDS):
        batches = range(0, len(heads), _BATCH)
        lists = np.concatenate([np.argmax(heads[at : at + _BATCH] @ centroids.T, axis=1) for at in batches])
        order = np.argsort(lists, kind="stable")
        filled, starts = np.unique(lists[order], return_index=True)
        sums = np.add.reduceat(heads[order], starts, axis=0)
        centroids = centroids.copy()
        centroids[filled] = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return centroids
