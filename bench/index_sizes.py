"""The compact index over much: search, recall, memory, building and loading at 100,000, a million and ten million.

Backs these claims: over ten million vectors a search takes at most 3 ms, finds at least 0.98 of the 50 nearest, and an
index takes at most 1 KB of memory a vector. The vectors are mixtures of embedded sentences (see vectors.py); a query is
one more of them, or such a sentence itself. Times are processor time of the thread, as on a shared machine the clock
tells what others do.

    python bench/index_sizes.py [--sizes 100000,1000000] [--folder FOLDER] [--json FILE]

Ten million take about half an hour, 12 GB of memory while the index is built, and 8 GB of disk.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from vectors import NOISE, Floats, embedded

from memd.embedding.loading import load_embedder
from memd.settings.model import EmbeddingSettings
from memd.store.disk import LocalDisk, write_pieces
from memd.store.index.vectors import CompactIndex, sample_size
from memd.store.log.columns import Rows

BASE_SENTENCES = 2500
BATCH = 10_000
POOL = 200_000
QUERIES = 100
K = 50


class Vectors:
    """Mixtures of two sentences each, with noise from a pool: drawing it anew takes longer than indexing a vector."""

    def __init__(self, base: Floats) -> None:
        self._base = base
        self._pool = NOISE * np.random.default_rng(1).standard_normal((POOL, base.shape[1]), dtype=np.float32)

    def batches(self, count: int, step: int = 1) -> Iterator[tuple[Rows, Floats]]:
        """The vectors of that size, every `step`th batch of them; the same each time."""
        for start in range(0, count, step * BATCH):
            size = min(BATCH, count - start)
            yield np.arange(start, start + size), self.some(size, start)

    def some(self, size: int, seed: int) -> Floats:
        """Unit vectors, shape (size, dimension)."""
        chosen = np.random.default_rng(seed)
        one, other = chosen.integers(0, len(self._base), (2, size))
        weight = chosen.random((size, 1), dtype=np.float32)
        vectors = weight * self._base[one] + (1 - weight) * self._base[other]
        vectors += self._pool[chosen.integers(0, POOL, size)]
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)

    def nearest(self, count: int, queries: Floats) -> Rows:
        """The labels of the K nearest of each query, by an exact scan; shape (queries, K)."""
        best, scores = np.empty((len(queries), 0), dtype=np.intp), np.empty((len(queries), 0), dtype=np.float32)
        for labels, vectors in self.batches(count):
            scores = np.concatenate([scores, queries @ vectors.T], axis=1)
            best = np.concatenate([best, np.broadcast_to(labels, (len(queries), len(labels)))], axis=1)
            kept = np.argpartition(-scores, K, axis=1)[:, :K]
            best, scores = np.take_along_axis(best, kept, axis=1), np.take_along_axis(scores, kept, axis=1)
        return best


def measure(base: Floats, count: int, folder: Path) -> dict[str, float]:
    """Build, write, load and search an index of that many vectors."""
    made = Vectors(base)
    step = 1 + count // (20 * BATCH)  # twenty batches are enough to sample
    sample = np.concatenate(
        [vectors[:: max(1, count // step // sample_size(count))] for _, vectors in made.batches(count, step)]
    )
    started = time.thread_time()
    index = CompactIndex.build(sample, made.batches(count), count=count, size=count)
    figures = {"building, making vectors: µs each": 1e6 * (time.thread_time() - started) / count}
    files, path = LocalDisk(), folder / f"{count}.ivf"
    checksum = write_pieces(files, path, index.pieces())
    del index
    before, started = _resident(), time.perf_counter()
    index = CompactIndex.load(files, path, checksum, size=count)
    shown = index.without(np.zeros(count, dtype=np.bool_))
    figures["load s"] = time.perf_counter() - started
    queries = np.concatenate([made.some(QUERIES, 7), base[:QUERIES]])
    right = made.nearest(count, queries)
    for name, first in (("a further one", 0), ("a sentence", QUERIES)):
        times, clock, recall = [], [], 0.0
        for warm in (False, True):  # what is mapped is read the first time
            for number in range(first, first + QUERIES):
                start, cpu = time.perf_counter(), time.thread_time()
                found = index.search(queries[number : number + 1], K, shown)
                if warm:
                    times.append(1000 * (time.thread_time() - cpu))
                    clock.append(1000 * (time.perf_counter() - start))
                    recall += len(np.intersect1d(found, right[number])) / K / QUERIES
        figures[f"{name}: recall@{K}"] = recall
        figures[f"{name}: ms p50"] = float(np.median(times))
        figures[f"{name}: ms p99"] = float(np.quantile(times, 0.99))
        figures[f"{name}: ms p50 by the clock"] = float(np.median(clock))
    figures["resident bytes a vector"] = (_resident() - before) / count
    figures["bytes a vector, all of it"] = index.memory_bytes / count
    started = time.thread_time()
    for _ in range(20):
        index.stored(np.random.default_rng(1).integers(0, count, 300))
    figures["300 vectors ms"] = 1000 * (time.thread_time() - started) / 20
    path.unlink()
    return figures


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100000,1000000")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    base = embedded(load_embedder(EmbeddingSettings()), BASE_SENTENCES)
    figures = {}
    for size in map(int, asked.sizes.split(",")):
        figures[size] = measure(base, size, asked.folder)
        print(
            f"{size:,}", *(f"  {name:32} {value:10.3f}" for name, value in figures[size].items()), sep="\n", flush=True
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
