"""The cost of keeping topics in PostgreSQL and a bucket: one store on this disk, in a cluster, in an encrypted one.

Backs these claims: a durable append takes at most 2 times as long as on this disk; a claim of a topic whose folder is
here reads none of its sealed files; letting a small topic go, frozen into one object, takes some tens of milliseconds,
and claiming it again not more; a topic of 500 small objects of which nothing is here opens within two seconds, though
the bucket takes 20 ms for each.

PostgreSQL runs beside it and syncs, over a socket: a network adds its round trips (one an append, about five a claim,
about a dozen a release). The bucket is a folder, so that what is measured is memd's part; with the small objects each
read waits as long as a real one takes. All stores get the same chunks; the appends are in turns.

    python bench/cluster_store.py [--groups 300] [--chunks 100000] [--rounds 5] [--latency 20] [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from obstore.store import LocalStore
from rich.console import Console
from rich.table import Table
from store import DIMENSION, SEGMENT_ENTRIES, drafts

from memd.settings.encryption import EncryptionSettings
from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Database
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import disk_for
from memd.store.log.columns import Floats
from memd.store.store import Store

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "support")]  # the server is shared with the tests
import postgres_server  # noqa: E402

KINDS = ("this disk", "cluster", "encrypted")
GROUP = 20
BULK = 1000
SMALL_TOPICS = 50
SMALL_SEGMENTS, SMALL_SEGMENT_ENTRIES = 165, 25
Spent = dict[str, dict[str, list[float]]]
"""Seconds by what and kind."""


class FarBucket(Bucket):
    """A bucket in a folder, each of whose reads waits."""

    seconds = 0.0

    def read(self, key: str, start: int, end: int) -> bytes:
        """See Bucket."""
        time.sleep(self.seconds)
        return super().read(key, start, end)


class Place:
    """Where stores of one kind keep their topics."""

    def __init__(self, kind: str, folder: Path, server: postgres_server.PostgresServer, key: Path) -> None:
        self._kind, self._folder = kind, folder / kind.replace(" ", "_")
        self._settings = EncryptionSettings(key_file=str(key) if kind == "encrypted" else "")
        (bucket := self._folder / "bucket").mkdir(parents=True)
        self.database = None if kind == KINDS[0] else Database(server.database(kind))
        self.bucket = FarBucket(LocalStore(str(bucket)), "file://")

    @contextmanager
    def store(self, name: str, segment_entries: int = SEGMENT_ENTRIES) -> Iterator[Store]:
        """The store of a machine with this name."""
        folder = self._folder / name
        files = disk_for(folder, self._settings, creating=True)
        shelf = None if self.database is None else partial(self._shelf, name)
        store = Store.open(
            folder,
            dimension=DIMENSION,
            fingerprint="bench",
            segment_entries_max=segment_entries,
            files=files,
            shelf=shelf,
        )
        with closing(store):
            yield store

    def _shelf(self, name: str, files: LocalDisk, folder: Path) -> PostgresShelf:
        assert self.database is not None, "of a cluster"
        return PostgresShelf(self.database, self.bucket, files, folder, url=f"http://{name}", lease_seconds=3600)


def seconds(work: Callable[[], object]) -> float:
    """The time that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def vectors(count: int, chosen: np.random.Generator) -> Floats:
    """Directions that mean nothing."""
    found = chosen.standard_normal((count, DIMENSION), dtype=np.float32)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found


def appends(places: dict[str, Place], groups: int, chosen: np.random.Generator, spent: Spent) -> None:
    """Durable appends of 20 chunks, in turns."""
    made = drafts(vectors(groups * GROUP, chosen), chosen)
    with places[KINDS[0]].store("here") as a, places[KINDS[1]].store("here") as b, places[KINDS[2]].store("here") as c:
        logs = {kind: store.topic("appended") for kind, store in zip(KINDS, (a, b, c), strict=True)}
        for number in range(groups):
            group = made[number * GROUP : (number + 1) * GROUP]
            for turn in range(len(KINDS)):
                kind = KINDS[(number + turn) % len(KINDS)]
                spent["append 20 chunks"][kind].append(seconds(partial(logs[kind].append, group)))


def small_topics(place: Place, kind: str, chosen: np.random.Generator, spent: Spent) -> None:
    """Topics of three turns are let go, and claimed again by the same daemon."""
    made = drafts(vectors(SMALL_TOPICS * 3, chosen), chosen)
    with place.store("here") as store:
        for number in range(SMALL_TOPICS):
            log = store.topic(name := f"small-{number}")
            for one in made[number * 3 : number * 3 + 3]:
                log.append([one])
            spent["let a small topic go"][kind].append(seconds(partial(store.close_topic, name)))
        for number in range(SMALL_TOPICS):
            spent["open it again"][kind].append(seconds(partial(store.topic, f"small-{number}")))


def small_segments(
    place: Place, kind: str, rounds: int, latency: float, chosen: np.random.Generator, spent: Spent
) -> None:
    """A topic of many small objects is opened where nothing of it is, from a bucket that takes its time."""
    if place.database is None:
        return
    with place.store("here", SMALL_SEGMENT_ENTRIES) as store:
        log = store.topic("segments")
        for _ in range(SMALL_SEGMENTS):
            log.append(drafts(vectors(SMALL_SEGMENT_ENTRIES, chosen), chosen))
            for segment_id in log.unsealed():
                log.seal(segment_id)
        store.close_topic("segments")
    place.bucket.seconds = latency
    for number in range(rounds):
        with place.store(f"there-{number}", SMALL_SEGMENT_ENTRIES) as store:
            spent["open 500 objects, nothing here"][kind].append(seconds(partial(store.topic, "segments")))
    place.bucket.seconds = 0.0


def large_topic(place: Place, kind: str, chunks: int, rounds: int, chosen: np.random.Generator, spent: Spent) -> None:
    """A topic with many chunks is let go and claimed: where its folder is, and where nothing of it is."""
    with place.store("here") as store:
        log = store.topic("large")
        for start in range(0, chunks, BULK):
            log.append(drafts(vectors(min(BULK, chunks - start), chosen), chosen))
            for segment_id in log.unsealed():
                log.seal(segment_id)
        spent["let a large topic go"][kind].append(seconds(partial(store.close_topic, "large")))
    for number in range(rounds):
        with place.store("here") as store:
            spent["open it, folder here"][kind].append(seconds(partial(store.topic, "large")))
        if place.database is not None:
            with place.store(f"there-{number}") as store:
                spent["open it, nothing here"][kind].append(seconds(partial(store.topic, "large")))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, default=20, help="of a read from the bucket, in ms")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = np.random.default_rng(1)
    whats: tuple[str, ...] = ("append 20 chunks", "let a small topic go", "open it again", "let a large topic go")
    whats += ("open it, folder here", "open it, nothing here", "open 500 objects, nothing here")
    spent: Spent = {what: {kind: [] for kind in KINDS} for what in whats}
    postgres_server.SETTINGS |= {"fsync": "on", "shared_buffers": "128MB"}
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name, postgres_server.running_postgres() as server:
        key = Path(name) / "key"
        key.touch(0o600)
        key.write_bytes(bytes(range(32)))
        places = {kind: Place(kind, Path(name), server, key) for kind in KINDS}
        appends(places, given.groups, chosen, spent)
        for kind, place in places.items():
            small_topics(place, kind, chosen, spent)
            large_topic(place, kind, given.chunks, given.rounds, chosen, spent)
            small_segments(place, kind, given.rounds, given.latency / 1000, chosen, spent)
        for place in places.values():
            if place.database is not None:
                place.database.close()
    show(spent, given.chunks, given.json)


def show(spent: Spent, chunks: int, file: Path | None) -> None:
    """Print the medians, and write them."""
    table = Table(title=f"large: {chunks:,} chunks; medians in ms, and how many times as long as on this disk")
    for column in ("", *KINDS):
        table.add_column(column, justify="left" if not column else "right")
    figures: dict[str, dict[str, float]] = {}
    for what, kinds in spent.items():
        medians = {kind: 1000 * statistics.median(found) for kind, found in kinds.items() if found}
        figures[what] = medians
        here = medians.get(KINDS[0])
        cells = [f"{ms:,.1f}" + (f" ({ms / here:.1f}×)" if here else "") for ms in medians.values()]
        table.add_row(what, *([""] * (len(KINDS) - len(cells))), *cells)
    Console().print(table)
    if file is not None:
        file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
