"""The continuous backup to a bucket: what it adds to an append, what it sends and asks, how fast it is restored.

Backs these claims: an append is acknowledged at most 1.05 times later (the median, in turns, while rounds are written
all the time), an idle round asks nothing, and a round costs what has changed, not what there is.

The bucket is in the memory of this process, so no network is in the figures. The costs are calculated from the bytes
and requests that were measured, with the prices of Amazon S3 in its first region.

    python bench/backup.py [--chunks 10000] [--topics 5000] [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import json
import secrets
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from obstore.store import MemoryStore
from rich.console import Console
from rich.table import Table
from store import DIMENSION, GROUP, SEGMENT_ENTRIES, drafts

from memd.entries import Draft
from memd.store.bucket.objects import Bucket
from memd.store.bucket.restoring import restore
from memd.store.bucket.writing import BucketWriter, NotingDisk
from memd.store.disk import LocalDisk
from memd.store.store import ModelId, Store, StoreShared

KINDS = ("without", "with a backup")
Figures = dict[str, float]
WRITE, READ, GB_MONTH = 5e-6, 0.4e-6, 0.023
DAYS = 30
LOADS = {"one person": (200, 300), "a team of twenty": (10_000, 4_000), "agents day and night": (100_000, 8_640)}
"""Chunks and rounds with changes, a day."""


def random_drafts(count: int, chosen: np.random.Generator) -> list[Draft]:
    """Chunks with vectors of no meaning: none is searched here."""
    vectors = chosen.normal(size=(count, DIMENSION)).astype(np.float32)
    return drafts(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), chosen)


def opened(folder: Path, files: LocalDisk) -> Store:
    """A store on that disk."""
    return Store(
        folder, StoreShared(model=ModelId(DIMENSION, "bench"), segment_entries_max=SEGMENT_ENTRIES, files=files)
    )


def writer_of(folder: Path, disk: NotingDisk) -> BucketWriter:
    """A backup into memory."""
    bucket = Bucket(MemoryStore(), "memory")
    return BucketWriter(bucket, disk, folder, 7, lambda: time.time_ns() // 1000, secrets.token_bytes)


def written(writer: BucketWriter) -> float:
    """Write all; the processor's seconds of this thread."""
    began = time.thread_time()
    if not writer.is_begun:
        writer.begin()
    while not writer.round():
        pass
    writer.tidy()
    return time.thread_time() - began


def appends(folder: Path, chunks: int, chosen: np.random.Generator) -> tuple[Figures, BucketWriter]:
    """Append in turns to a store without and one with a backup, whose rounds follow one another."""
    disk = NotingDisk(folder / "backed")
    stores = {KINDS[0]: opened(folder / "plain", LocalDisk()), KINDS[1]: opened(folder / "backed", disk)}
    logs = {kind: store.topic("default") for kind, store in stores.items()}
    writer, done, rounds = writer_of(folder / "backed", disk), threading.Event(), [0.0, 0.0]
    written(writer)
    first = writer.bucket.bytes_sent

    def back_up() -> None:
        while not done.is_set():
            asked = writer.bucket.requests
            rounds[1] += written(writer)
            rounds[0] += writer.bucket.requests > asked
            done.wait(0.1)

    thread = threading.Thread(target=back_up)
    thread.start()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    made = random_drafts(chunks, chosen)
    for number, start in enumerate(range(0, chunks, GROUP)):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            began = time.perf_counter()
            logs[kind].append(made[start : start + GROUP])
            seconds[kind].append(time.perf_counter() - began)
    done.set()
    thread.join()
    tail = writer.bucket.bytes_sent - first
    before = writer.bucket.bytes_sent
    written(writer)
    medians = {kind: 1000 * statistics.median(seconds[kind]) for kind in KINDS}
    asked = writer.bucket.requests
    for _ in range(100):
        written(writer)
    for store in stores.values():
        store.close()
    return {
        **{f"append {kind}, ms": value for kind, value in medians.items()},
        "append, ratio": medians[KINDS[1]] / medians[KINDS[0]],
        "rounds with changes": rounds[0],
        "processor a round, ms": 1000 * rounds[1] / max(1, rounds[0]),
        "bytes sent a chunk": (tail + writer.bucket.bytes_sent - before) / chunks,
        "requests of 100 idle rounds": float(writer.bucket.requests - asked),
    }, writer


def restored(folder: Path, writer: BucketWriter) -> Figures:
    """Restore what was written."""
    began = time.perf_counter()
    report = restore(writer.bucket, folder / "restored", LocalDisk())
    return {"restored, MB a second": report.bytes / 1e6 / (time.perf_counter() - began), "MB": report.bytes / 1e6}


def many_topics(folder: Path, topics: int, chosen: np.random.Generator) -> Figures:
    """A round in a directory of many topics, of which one has changed; and a start that finds all as it was."""
    disk = NotingDisk(folder / "many")
    store, made = opened(folder / "many", disk), random_drafts(8, chosen)
    for number in range(topics):
        store.topic(f"topic-{number}").append(made[:1])
        store.close_topic(f"topic-{number}")
    writer = writer_of(folder / "many", disk)
    first = written(writer)
    rounds, sent = [], writer.bucket.bytes_sent
    for one in made[1:]:
        store.topic("topic-1").append([one])
        rounds.append(written(writer))
    store.close()
    bytes_a_round = (writer.bucket.bytes_sent - sent) / len(rounds)
    again = BucketWriter(
        writer.bucket,
        NotingDisk(folder / "many"),
        folder / "many",
        7,
        lambda: time.time_ns() // 1000,
        secrets.token_bytes,
    )
    return {
        "first backup, processor ms a topic": 1000 * first / topics,
        f"a round with one of {topics:,} topics changed, processor ms": 1000 * statistics.median(rounds),
        "its bytes": bytes_a_round,
        "a start that compares, processor ms a topic": 1000 * written(again) / topics,
    }


def costs(bytes_a_chunk: float, chunk_bytes: float) -> Table:
    """What S3 takes in a month of each load, and keeps after a year."""
    table = Table(title="calculated for Amazon S3")
    for column in ("load", "writes", "sent a month", "kept after a year", "dollars a month then"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for name, (chunks, rounds) in LOADS.items():
        writes = DAYS * (rounds + 3 * chunks / SEGMENT_ENTRIES + 1)
        kept = (365 * chunks * chunk_bytes + 7 * chunks * bytes_a_chunk) / 1e9
        dollars = writes * WRITE + DAYS * rounds * READ + kept * GB_MONTH
        sent = DAYS * chunks * bytes_a_chunk
        table.add_row(name, f"{writes:,.0f}", f"{sent / 1e9:.2f} GB", f"{kept:.1f} GB", f"{dollars:.2f}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--topics", type=int, default=5_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        folder = Path(name).absolute()
        figures, writer = appends(folder, given.chunks, chosen)
        figures |= restored(folder, writer)
        figures |= many_topics(folder, given.topics, chosen)
    table = Table(title=f"{given.chunks:,} chunks")
    table.add_column("")
    table.add_column("", justify="right")
    for what, value in figures.items():
        table.add_row(what, f"{value:,.2f}")
    Console().print(table, costs(figures["bytes sent a chunk"], 1e6 * figures["MB"] / given.chunks))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
