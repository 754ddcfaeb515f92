"""memd's store beside others: search, durable appends, merging, opening, bytes.

Backs these claims: search over 100,000 chunks at most 1 ms and over 1,000,000 at most 3 ms (median, recall@32 at
least 0.99); a durable append of 20 chunks at most twice the bare write and fsync of the same bytes; at most 1.3 times
the raw vectors in memory at 1,000,000; a topic answers soon after a start. All on the same vectors (see vectors.py) in
one run: on a shared machine only ratios mean anything.

    python bench/store.py [--sizes 5000,100000] [--others none] [--keep FOLDER] [--json FILE]

The two default sizes take some minutes; 1000000 takes about half an hour and 8 GB of disk, and three times that with
others. chromadb, lancedb, sqlite-vec and qdrant-client are compared where they are installed (`pip install
'.[bench]'`). With `--keep`, memd's store of each size stays in FOLDER/size, for bench/overhead.py;
its appends then count tokens too.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET
from prose import texts
from rich.console import Console
from rich.table import Table
from vector_stores import NumpyExact, VectorStore, installed
from vectors import embedded, mixed

from memd.assets import ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.loading import load_embedder
from memd.entries import Draft
from memd.recall.block import line_of
from memd.recall.columns import sources_of
from memd.settings.model import EmbeddingSettings
from memd.store.log.columns import Floats
from memd.store.snapshot import Place
from memd.store.store import ModelId, Store, StoreShared, TopicLog

BASE_SENTENCES = 4000
SEGMENT_ENTRIES = 5000
GROUP = 20
K = 32
QUERIES = 200
TOPIC = "default"
DIMENSION = 384

Figures = dict[str, float]
Result = TypeVar("Result")


def opened(folder: Path, fingerprint: str, counter: TokenCounter | None = None) -> Store:
    """The store under test; with `counter` it counts the tokens of each chunk, as in the daemon."""
    return Store(
        folder,
        StoreShared(
            model=ModelId(DIMENSION, fingerprint),
            segment_entries_max=SEGMENT_ENTRIES,
            line_tokens=lambda entry: UNSET if counter is None else counter.count(line_of(entry)),
        ),
    )


def drafts(vectors: Floats, chosen: np.random.Generator) -> list[Draft]:
    """A chunk for each vector; what it says has nothing to do with the vector."""
    return [
        Draft(
            uuid=uuid.uuid4().bytes,
            content=f"user: {text}",
            vector=vector.astype("<f4").tobytes(),
            created_at=1,
            roles=("user",),
            digests=(uuid.uuid4().bytes,),
        )
        for vector, text in zip(vectors, texts(len(vectors), chosen), strict=True)
    ]


def settle(log: TopicLog) -> Figures:
    """Merge whatever is due; the seconds that it took."""
    started = time.perf_counter()
    while due := log.due_merge():
        log.merge(due)
    return {"merge_seconds": time.perf_counter() - started}


def filled(
    folder: Path, fingerprint: str, vectors: Floats, chosen: np.random.Generator, counter: TokenCounter | None
) -> tuple[Store, Figures]:
    """A store with all vectors, sealed and merged."""
    store = opened(folder, fingerprint, counter)
    log = store.topic(TOPIC)
    spent = {"append_seconds": 0.0, "merge_seconds": 0.0}
    for start in range(0, len(vectors), SEGMENT_ENTRIES):
        for group in np.array_split(vectors[start : start + SEGMENT_ENTRIES], 20):
            made = drafts(group, chosen)
            began = time.perf_counter()
            log.append(made)
            spent["append_seconds"] += time.perf_counter() - began
        for name, seconds in settle(log).items():
            spent[name] += seconds
    return store, spent


# -- what is measured ---------------------------------------------------------------------------------------------


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Milliseconds that it takes, and what it gives."""
    started = time.perf_counter()
    result = work()
    return (time.perf_counter() - started) * 1000, result


def searched(search: Callable[[Floats], Sequence[int]], queries: Floats, truth: list[set[int]]) -> Figures:
    """Times and recall of a search."""
    for query in queries[:5]:  # indexes are loaded, caches are warm
        search(query)
    times, right = [], 0
    for query, wanted in zip(queries, truth, strict=True):
        took, found = timed(partial(search, query))
        times.append(took)
        right += len(wanted & set(found))
    return {
        "p50_ms": float(np.percentile(times, 50)),
        "p95_ms": float(np.percentile(times, 95)),
        "recall": right / sum(map(len, truth)),
    }


def nearest(log: TopicLog, query: Floats, k: int) -> list[Place]:
    """The places of the best `k` chunks, found as recall finds them; `query`: (dimension,)."""
    snapshot, found, cosines = log.snapshot(), list[Place](), list[float]()
    for source in sources_of(snapshot):
        for labels in source.nearest(query[None], k):
            segments, rows = source.places(labels)
            found += zip(segments.tolist(), rows.tolist(), strict=True)
            cosines += (source.vectors(labels) @ query).tolist()
    best = np.argsort(-np.array(cosines))[:k]
    return [found[place] for place in best.tolist()]


def appended(log: TopicLog, folder: Path, chosen: np.random.Generator, base: Floats) -> Figures:
    """A durable append of GROUP chunks beside the bare write and fsync of the same bytes, in turns."""
    path = log.hot_path.with_name("active.bin")
    descriptor = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    ours, bare = [], []
    for _ in range(100):
        made = drafts(mixed(base, GROUP, chosen), chosen)
        before = path.stat().st_size if path.exists() else 0
        ours.append(timed(partial(log.append, made))[0])
        data = os.urandom(max(1, path.stat().st_size - before))
        bare.append(timed(partial(_write_durably, descriptor, data))[0])
    os.close(descriptor)
    return {
        "append_p50_ms": float(np.median(ours)),
        "bare_p50_ms": float(np.median(bare)),
        "append_ratio": float(np.median(ours) / np.median(bare)),
    }


def _write_durably(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data)
    os.fsync(descriptor)


def reopened(folder: Path, fingerprint: str) -> Figures:
    """Opening in a fresh process: until appends are possible, until the first result, and the memory it takes."""
    command = [sys.executable, __file__, "--open", str(folder), fingerprint]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def open_and_report(folder: Path, fingerprint: str) -> None:
    """The fresh process's part."""
    before = _resident_bytes()
    started = time.perf_counter()
    store = opened(folder, fingerprint)
    ready = time.perf_counter()
    log = store.topic(TOPIC)
    columns = time.perf_counter()
    log.snapshot().read(nearest(log, np.ones(DIMENSION, dtype=np.float32) / np.float32(DIMENSION**0.5), K)[0])
    first = time.perf_counter()
    figures = {
        "store_ready_seconds": ready - started,
        "topic_open_seconds": columns - started,
        "first_result_seconds": first - started,
        "resident_bytes": _resident_bytes() - before,
    }
    print(json.dumps(figures))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def bytes_below(folder: Path) -> int:
    """On disk."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- the run ------------------------------------------------------------------------------------------------------


def measure(size: int, base: Floats, fingerprint: str, others: bool, keep: Path | None) -> dict[str, Figures]:
    """Everything at one size; a row per store. memd's own, as it was filled, stays below `keep`."""
    chosen = np.random.default_rng(size)
    counter = None if keep is None else TokenCounter(cl100k_base(ranks_bytes()))
    vectors, queries = mixed(base, size, chosen), mixed(base, QUERIES, chosen)
    rows: dict[str, Figures] = {}
    with _folder() as folder:
        exact = NumpyExact(folder, DIMENSION)
        exact.add(vectors)
        truth = [set(exact.search(query, K)) for query in queries]
        store, spent = filled(folder / "memd", fingerprint, vectors, chosen, counter)
        log = store.topic(TOPIC)
        numbers = {hit_id: number for number, hit_id in enumerate(_ids(log))}

        def search(query: Floats) -> list[int]:
            views = log.snapshot().views
            return [numbers[views[segment].canonical_ids.item(row)] for segment, row in nearest(log, query, K)]

        rows["memd"] = searched(search, queries, truth)
        rows["memd"] |= {f"{name}_per_1000": 1000 * seconds / size for name, seconds in spent.items()}
        rows["memd"] |= {"indexes": log.stats().indexes, "disk_bytes_per_chunk": bytes_below(folder / "memd") / size}
        store.close()
        if keep is not None:
            shutil.copytree(folder / "memd", keep / str(size))
        rows["memd"] |= (again := reopened(folder / "memd", fingerprint))
        rows["memd"]["memory_per_raw"] = again["resident_bytes"] / (size * DIMENSION * 4)
        store = opened(folder / "memd", fingerprint)
        rows["memd"] |= appended(store.topic(TOPIC), folder, chosen, base)
        store.close()
        _progress(f"{size:,} in memd: search {rows['memd']['p50_ms']:.2f} ms")
    for name, kind in installed(size) if others else [("numpy exact", NumpyExact)]:
        with _folder() as folder:
            rows[name] = _other(kind(folder / "other", DIMENSION), folder, vectors, queries, truth, base)
            _progress(f"{size:,} in {name}: search {rows[name]['p50_ms']:.2f} ms")
    return rows


def _progress(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _other(
    store: VectorStore, folder: Path, vectors: Floats, queries: Floats, truth: list[set[int]], base: Floats
) -> Figures:
    for start in range(0, len(vectors), SEGMENT_ENTRIES):
        store.add(vectors[start : start + SEGMENT_ENTRIES])
    figures = searched(lambda query: store.search(query, K), queries, truth)
    figures["disk_bytes_per_chunk"] = bytes_below(folder) / len(vectors)
    extra = [mixed(base, GROUP, np.random.default_rng(number)) for number in range(20)]
    figures["append_p50_ms"] = float(np.median([timed(partial(store.add, group))[0] for group in extra]))
    return figures


def _ids(log: TopicLog) -> list[int]:
    """The canonical ids of all entries, oldest first."""
    columns = [view.rows["canonical_id"] for view in log.snapshot().views.values()]
    return [int(number) for number in np.concatenate(columns)]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="memd-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(size: int, rows: dict[str, Figures]) -> None:
    """Print the tables of one size."""
    table = Table(title=f"{size:,} chunks of {DIMENSION} dimensions, the best {K}")
    table.add_column("store", no_wrap=True)
    for column in ("search p50", "p95", "recall", "append of 20", "disk per chunk"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        durable = "" if name not in ("numpy exact", "hnswlib alone") else " (memory)"
        table.add_row(
            name,
            f"{row['p50_ms']:.2f} ms",
            f"{row['p95_ms']:.2f} ms",
            f"{row['recall']:.4f}",
            f"{row['append_p50_ms']:.2f} ms{durable}",
            f"{row['disk_bytes_per_chunk']:,.0f} B",
        )
    ours = Table(title="memd alone", show_header=False)
    for what, said in _alone(rows["memd"]).items():
        ours.add_row(what, said)
    console = Console(width=120)
    console.print(table)
    console.print(ours)


def _alone(row: Figures) -> dict[str, str]:
    steps = [f"{row[f'{name}_seconds_per_1000'] * 1000:.0f} ms" for name in ("append", "merge")]
    opening = [f"{row[name]:.3f} s" for name in ("store_ready_seconds", "topic_open_seconds", "first_result_seconds")]
    return {
        "append of 20, durable": f"{row['append_ratio']:.1f} × the bare write and fsync ({row['bare_p50_ms']:.2f} ms)",
        "indexes asked": f"{row['indexes']:.0f}",
        "append, merge of 1,000": ", ".join(steps),
        "store open, topic open, first result": ", ".join(opening),
        "memory": f"{row['memory_per_raw']:.2f} × the raw vectors, {row['resident_bytes'] / 1e6:,.0f} MB",
    }


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="5000,100000", help="comma-separated numbers of chunks")
    parser.add_argument("--others", choices=["all", "none"], default="all", help="whether to measure other stores")
    parser.add_argument("--keep", type=Path, help="an existing folder in which memd's stores stay")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--open", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.open is not None:
        open_and_report(Path(asked.open[0]), asked.open[1])
        return
    embedder = load_embedder(EmbeddingSettings())
    base = embedded(embedder, BASE_SENTENCES)
    figures: dict[str, Any] = {}
    for size in map(int, asked.sizes.split(",")):
        figures[str(size)] = measure(size, base, embedder.fingerprint, asked.others == "all", asked.keep)
        report(size, figures[str(size)])
        if asked.json is not None:  # after each size: the last one takes an hour
            asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
