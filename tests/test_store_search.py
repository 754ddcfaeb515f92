"""A compact index, where nearly nothing of it is wanted; what a search finds is the matter of `test_store_model`."""

from __future__ import annotations

import numpy as np

from memd.store.index.vectors import CompactIndex
from memd.store.log.columns import Floats


def clustered(count: int, dimension: int, seed: int = 3) -> Floats:
    """Unit vectors around forty centres."""
    chosen = np.random.default_rng(seed)
    centres = chosen.normal(size=(40, dimension))
    vectors = (centres[chosen.integers(0, 40, count)] + 0.7 * chosen.normal(size=(count, dimension))).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def compact(vectors: Floats, size: int) -> CompactIndex:
    """A compact index whose labels are the odd numbers below `size`."""
    labels = np.arange(1, size, 2)
    return CompactIndex.build(vectors[::3], [(labels, vectors)], count=len(labels), size=size)


def test_a_compact_index_of_which_nearly_nothing_is_wanted_finds_the_rest() -> None:
    vectors = clustered(20_000, 96)
    index, query = compact(vectors, 40_000), vectors[:1]
    dead = np.ones(40_000, dtype=np.bool_)
    assert index.search(query, 32, index.without(dead)).tolist() == []
    dead[[5, 6, 20_001, 39_999]] = False
    assert sorted(index.search(query, 32, index.without(dead)).tolist()) == [5, 20_001, 39_999]
