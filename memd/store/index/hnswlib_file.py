"""An index file of hnswlib, from which single vectors are read.

hnswlib returns its vectors as lists of Python numbers, 15 µs each; reading them from the file takes 2 µs and no memory.
Rule: a vector counts only if its label stands beside it; a vector that is not at the expected offset is left out, and
the caller gets it in a slower way.

The file is what `HierarchicalNSW::saveIndex` of hnswlib 0.8 writes (hnswalg.h), little-endian:

    0   offset of level 0 u64, elements at most u64, elements u64, bytes per element u64,
        offset of the label u64, offset of the vector u64, highest level i32, entry point u32,
        maxM u64, maxM0 u64, M u64, mult f64, ef_construction u64
    96  per element, in the order in which they were added: links, vector f32 × dimension, label u64
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memd.errors import StoreError
from memd.store.files import Files
from memd.store.log.columns import Floats, Rows

_HEAD = struct.Struct("<6QiI3QdQ")
_LABEL_BYTES = 8


class _ElementLayout(NamedTuple):
    elements: int
    element_bytes: int
    vector_at: int
    """Offset of the first element's vector in the file."""


class HnswlibFile:
    """One index file, which never changes. Any thread may read."""

    def __init__(self, files: Files, path: Path, *, dimension: int, labels: Rows) -> None:
        """`labels`: of all vectors in the file, ascending: the order in which an index is built."""
        self._files = files
        self._path = path
        self._dimension = dimension
        self._labels = labels.astype(np.uint32)
        self._layout: _ElementLayout | None = None

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def memory_bytes(self) -> int:
        """Size of the labels, which are all that is held."""
        return self._labels.nbytes

    def read(self, labels: Rows) -> tuple[Rows, Floats]:
        """Return the labels that were found, in the order given, and their vectors, shape (n, dimension)."""
        places = self._labels.searchsorted(labels.astype(np.uint32))
        is_held = places < len(self._labels)
        is_held[is_held] = self._labels[places[is_held]] == labels[is_held]
        labels, places = labels[is_held], places[is_held]
        vectors: Floats = np.empty((0, self._dimension), dtype=np.float32)
        if not len(labels):
            return labels, vectors
        try:
            layout = self._layout = self._layout or self._read_layout()
            length = 4 * self._dimension + _LABEL_BYTES
            offsets = layout.vector_at + places * layout.element_bytes
            pieces = self._files.read_pieces(self._path, offsets.tolist(), length) if layout.elements else []
        except StoreError:
            pieces = []
        if len(pieces) != len(labels) or any(len(piece) != length for piece in pieces):
            return labels[:0], vectors
        rows = np.frombuffer(b"".join(pieces), dtype=[("vector", "<f4", (self._dimension,)), ("label", "<u8")])
        is_right = rows["label"] == labels
        return labels[is_right], np.ascontiguousarray(rows["vector"][is_right], dtype=np.float32)

    def _read_layout(self) -> _ElementLayout:
        """Read the head of the file; no elements if it is not the format above."""
        head = self._files.read_at(self._path, 0, _HEAD.size)
        if len(head) < _HEAD.size:
            return _ElementLayout(0, 0, 0)
        level_0, _, elements, element_bytes, label_at, vector_at, *_ = _HEAD.unpack(head)
        is_known = level_0 == 0 and label_at == vector_at + 4 * self._dimension == element_bytes - _LABEL_BYTES
        return _ElementLayout(elements if is_known else 0, element_bytes, _HEAD.size + vector_at)
