"""The cost of encryption at rest: the same store in plain text and encrypted, in turns.

Backs these claims: an append takes at most 1.3 times as long, a search (vectors, words, and the texts of what was
found) at most half a millisecond more, and opening a topic until all its vectors can be searched at most 1.5 times as
long. The words of an encrypted topic are indexed anew at a start, in the background: that is a line of its own.

Both stores get the same chunks, group by group in turns, so that what else the machine does meets both.

    python bench/encryption.py [--chunks 20000] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from prose import texts
from rich.console import Console
from rich.table import Table
from store import BASE_SENTENCES, DIMENSION, GROUP, SEGMENT_ENTRIES, K, drafts
from vectors import embedded, mixed

from memd.embedding.loading import load_embedder
from memd.recall.columns import sources_of
from memd.settings.model import Config, EmbeddingSettings, EncryptionSettings
from memd.store.encryption.disk import disk_of
from memd.store.log.columns import Floats
from memd.store.store import ModelId, Store, StoreShared, TopicLog

TOPIC = "default"
QUERIES = 200
SHOWN = 10
"""Texts that are read after a search: what a block holds."""
KINDS = ("plain", "encrypted")
Figures = dict[str, dict[str, float]]
Spent = dict[str, dict[str, list[float]]]
"""Seconds by what and kind."""


def opened(folder: Path, kind: str, key: Path) -> Store:
    """The store of that kind."""
    settings = EncryptionSettings(key_file=str(key) if kind == "encrypted" else "")
    files = disk_of(Config(data_dir=folder / kind, encryption=settings), creating=True)
    return Store(
        folder / kind, StoreShared(model=ModelId(DIMENSION, "bench"), segment_entries_max=SEGMENT_ENTRIES, files=files)
    )


def seconds(work: Callable[[], object]) -> float:
    """What it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def filled(
    logs: dict[str, TopicLog], vectors: Floats, chosen: np.random.Generator
) -> dict[str, dict[str, list[float]]]:
    """Append all to both, group by group, and index; seconds by what and kind."""
    spent: Spent = {what: {kind: [] for kind in KINDS} for what in ("append", "index words")}
    made = drafts(vectors, chosen)
    for number, start in enumerate(range(0, len(made), GROUP)):
        group = made[start : start + GROUP]
        for kind in KINDS if number % 2 else KINDS[::-1]:
            spent["append"][kind].append(seconds(partial(logs[kind].append, group)))
    for kind in KINDS:
        spent["index words"][kind].append(seconds(logs[kind].complete_words))
    return spent


def searched(log: TopicLog, query: Floats) -> None:
    """A search by meaning, and the texts of what it found."""
    snapshot = log.snapshot()
    for source in sources_of(snapshot):
        for labels in source.nearest(query[None], K):
            segments, rows = source.places(labels[:SHOWN])
            snapshot.read_many(zip(segments.tolist(), rows.tolist(), strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = np.random.default_rng(1)
    base = embedded(load_embedder(EmbeddingSettings()), BASE_SENTENCES)
    vectors, queries = mixed(base, given.chunks, chosen), mixed(base, QUERIES, chosen)
    asked = texts(QUERIES, chosen)
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        folder, key = Path(name).absolute(), Path(name) / "key"
        key.touch(0o600)
        key.write_bytes(bytes(range(32)))
        stores = {kind: opened(folder, kind, key) for kind in KINDS}
        spent = filled({kind: stores[kind].topic(TOPIC) for kind in KINDS}, vectors, chosen)
        for what in ("search", "search words", "open", "open and search once"):
            spent[what] = {kind: [] for kind in KINDS}
        for number, (query, text) in enumerate(zip(queries, asked, strict=True)):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                log = stores[kind].topic(TOPIC)
                spent["search"][kind].append(seconds(partial(searched, log, query)))
                spent["search words"][kind].append(seconds(partial(log.snapshot().places_with, text)))
        for store in stores.values():
            store.close()
        for number in range(2 * given.rounds):
            kind = KINDS[number % 2]
            began = time.perf_counter()
            store = opened(folder, kind, key)
            store.topic(TOPIC).load()
            spent["open"][kind].append(time.perf_counter() - began)
            searched(store.topic(TOPIC), queries[0])
            spent["open and search once"][kind].append(time.perf_counter() - began)
            if number < 2:
                spent.setdefault("words after a start", {})[kind] = [seconds(store.topic(TOPIC).complete_words)]
            store.close()
    show(spent, given.chunks, given.json)


def show(spent: Spent, chunks: int, file: Path | None) -> None:
    """Print the medians, and write them."""
    table = Table(title=f"{chunks:,} chunks, medians in ms")
    for column in ("", *KINDS, "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    figures: Figures = {}
    for what, kinds in spent.items():
        plain, encrypted = (1000 * statistics.median(kinds[kind]) for kind in KINDS)
        figures[what] = {"plain_ms": plain, "encrypted_ms": encrypted, "ratio": encrypted / plain}
        table.add_row(what, f"{plain:,.2f}", f"{encrypted:,.2f}", f"{encrypted / plain:.2f}")
    Console().print(table)
    if file is not None:
        file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
