"""Vectors without what all chunks of a topic have in common: who talks there, and what about, says nothing.

Rule: a function of the log alone, so that the same question finds the same: the common part is the mean of entries
spread evenly over the first 2^n of the topic, and computed again when there are twice as many.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from memd.entries import Vector
from memd.store.snapshot import Place, Snapshot

SAMPLE_ENTRIES_MAX = 256
SAMPLE_ENTRIES_MIN = 4
FEW_ENTRIES = 25
"""The mean of a topic with so many entries counts half: of a few chunks it is mostly those chunks themselves."""
TOPICS_MAX = 1_024


class CommonParts:
    """The common parts of the topics asked last; any thread may use it."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int, int, str], Vector] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, snapshot: Snapshot, dimension: int, fingerprint: str) -> Vector:
        """The part that a model's vectors of a topic have in common, shape (dimension,); zeros if there are too few."""
        count = snapshot.extent.entries
        if count < SAMPLE_ENTRIES_MIN:
            return np.zeros(dimension, np.float32)
        size = 1 << (count.bit_length() - 1)
        first = next(view.rows[0] for view in snapshot.views.values() if len(view.rows))
        key = snapshot.topic_id, int(first["canonical_id"]), size, fingerprint
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        found = _mean(snapshot, _spread(snapshot, size), dimension, fingerprint)
        with self._lock:
            self._known[key] = found
            while len(self._known) > TOPICS_MAX:
                self._known.popitem(last=False)
        return found


def apart(vectors: NDArray[np.float32], common: Vector) -> NDArray[np.float32]:
    """Unit vectors (n, dimension) without the common part, of length 1 again; rows of zeros stay zeros."""
    without = vectors - common
    without[~vectors.any(axis=1)] = 0
    lengths = np.sqrt(np.add.reduce(without * without, axis=1, keepdims=True))  # norm() copies once more
    without /= np.maximum(lengths, np.float32(1e-9))
    return without


def _spread(snapshot: Snapshot, size: int) -> list[Place]:
    """Places spread evenly over the first `size` entries, oldest first."""
    wanted = iter(range(0, size, max(1, size // SAMPLE_ENTRIES_MAX)))
    places, first, position = [], 0, next(wanted, None)
    for segment_id, view in snapshot.views.items():
        while position is not None and position < first + len(view.rows):
            places.append((segment_id, position - first))
            position = next(wanted, None)
        first += len(view.rows)
    return places


def _mean(snapshot: Snapshot, places: list[Place], dimension: int, fingerprint: str) -> Vector:
    same = [one for one in places if snapshot.views[one[0]].segment.header.fingerprint == fingerprint]
    entries = snapshot.read_many(same).values()
    vectors = [entry.embedding for entry in entries if len(entry.embedding) == dimension]
    if len(vectors) < SAMPLE_ENTRIES_MIN:
        return np.zeros(dimension, np.float32)
    share = len(vectors) / (len(vectors) + FEW_ENTRIES)
    return np.asarray(np.mean(vectors, axis=0) * share, dtype=np.float32)
