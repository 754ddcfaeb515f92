"""Search against a plain computation over all live chunks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from crash_files import CrashFiles
from drafts import adjusted, deprecated, draft, open_store, seal_all, search, unit_vector
from effort import scaled
from numpy.typing import NDArray

from memd.entries import Draft, Entry, multiplier_of
from memd.store.index.vectors import CompactIndex
from memd.store.log.columns import Floats
from memd.store.store import TopicLog

DIMENSION = 32
COUNT = 600


def populated(segment_entries_max: int) -> tuple[TopicLog, dict[bytes, Entry]]:
    """A topic with corrections of every kind, and its live entries."""
    store = open_store(CrashFiles(), segment_entries_max=segment_entries_max, dimension=DIMENSION)
    topic = store.topic("talk")
    state: dict[bytes, Entry] = {}
    rng = np.random.default_rng(5)
    for start in range(0, COUNT, 20):
        group = [draft(number, dimension=DIMENSION) for number in range(start, start + 20)]
        known = list(state.values())
        chosen = rng.choice(len(known), size=4, replace=False).tolist() if known else []
        group += [adjusted(known[i], int(rng.integers(-4, 11))) for i in chosen[:3]]
        group += [deprecated(known[i]) for i in chosen[3:]]
        for entry in topic.append(group):
            state[entry.uuid] = entry
        state = {uuid: entry for uuid, entry in state.items() if entry.vector}
        if start % 3:
            seal_all(topic)
    return topic, state


def expected(state: dict[bytes, Entry], queries: NDArray[np.float32], k: int) -> list[tuple[float, int]]:
    """(score, canonical_id) of the best, computed one by one."""
    scored = []
    for entry in state.values():
        cosine = max(float(np.dot(query.astype(np.float64), entry.embedding.astype(np.float64))) for query in queries)
        scored.append((max(0.0, cosine) * multiplier_of(entry.utility_steps), entry.canonical_id))
    return sorted(scored, key=lambda pair: (-pair[0], -pair[1]))[:k]


@pytest.mark.parametrize("segment_entries_max", [100_000, 100])
@pytest.mark.parametrize("query_count", [1, 3])
@pytest.mark.parametrize("k", [1, 10, 250])
def test_a_search_finds_the_best_live_chunks_by_score(segment_entries_max: int, query_count: int, k: int) -> None:
    topic, state = populated(segment_entries_max)
    for number in range(scaled(15)):
        queries = np.stack([unit_vector(f"q {number} {i}", DIMENSION) for i in range(query_count)])
        hits = search(topic.snapshot(), queries, k)
        wanted = expected(state, queries, k)
        assert [hit.score for hit in hits] == pytest.approx([score for score, _ in wanted], abs=1e-4)
        # Near-equal neighbours may change places by rounding, a chunk that is clearly in must be in.
        sure = {canonical_id for score, canonical_id in wanted if score > wanted[-1][0] + 1e-4}
        assert sure <= {hit.canonical_id for hit in hits}
        assert len({hit.uuid for hit in hits}) == len(hits)


def test_equal_scores_come_newest_first_wherever_the_chunks_lie() -> None:
    topic = open_store(CrashFiles(), segment_entries_max=4).topic("talk")
    same = unit_vector("same").tobytes()
    entries = []
    for number in range(6):
        entries += topic.append([_with_vector(f"{number} {i}", same) for i in range(2)])
        if number == 3:
            seal_all(topic)
    hits = search(topic.snapshot(), unit_vector("same")[None], 100)
    assert [hit.canonical_id for hit in hits] == [entry.canonical_id for entry in reversed(entries)]


def test_a_praised_chunk_surfaces_by_score_from_a_sealed_segment() -> None:
    topic = open_store(CrashFiles(), segment_entries_max=300, dimension=DIMENSION).topic("talk")
    entries = topic.append([draft(number, dimension=DIMENSION) for number in range(299)])
    query = unit_vector("query", DIMENSION)
    weak = min((entry for entry in entries if query @ entry.embedding > 0.05), key=lambda e: float(query @ e.embedding))
    topic.append([adjusted(weak, 10)])
    seal_all(topic)
    assert topic.unsealed() == []
    assert search(topic.snapshot(), query[None], 1)[0].uuid == weak.uuid


def test_no_query_and_no_topic_contents_give_no_hits() -> None:
    topic = open_store(CrashFiles()).topic("talk")
    assert search(topic.snapshot(), unit_vector("q")[None], 5) == []
    topic.append([draft("one")])
    assert search(topic.snapshot(), np.empty((0, 8), dtype=np.float32), 5) == []


def _with_vector(name: str | int, vector: bytes) -> Draft:
    return msgspec.structs.replace(draft(name), vector=vector)


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
