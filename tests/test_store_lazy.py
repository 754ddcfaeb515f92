"""A start and a first search read only what they need; a closed topic comes back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import DATA_DIR, adjusted, draft, live_contents, open_store, seal_all, search, unit_vector

from memd.errors import StoreError
from memd.store.disk import LocalDisk
from memd.store.index.sealed_index import SealedIndex
from memd.store.log.columns import Bits
from memd.store.log.format import HEADER_BYTES, scan_records
from memd.store.store import CanonicalClock, ModelId, Store, StoreShared
from memd.store.tools.disk_usage import disk_usage

TOPIC = DATA_DIR / "talk"
ACTIVE = TOPIC / "active.bin"


def filled(segments: int, rest: int, *, size: int = 10) -> CrashFiles:
    """That many sealed segments, and `rest` chunks in active.bin, whose contents are long."""
    files = CrashFiles()
    store = open_store(files, segment_entries_max=size)
    for number in range(segments * size + rest):
        long = msgspec.structs.replace(draft(number), content=f"user: chunk {number} {'long ' * 400}")
        store.topic("talk").append([long])
        seal_all(store.topic("talk"))
    store.close()
    files.bytes_read.clear()
    return files


def reopened(files: LocalDisk, *, earliest: int = 1) -> Store:
    """With a clock that stands still long before anything was written."""
    return Store(
        DATA_DIR,
        StoreShared(
            model=ModelId(8, "f" * 32), segment_entries_max=10, files=files, clock=CanonicalClock(lambda: earliest)
        ),
    )


def test_a_start_reads_the_ends_of_the_logs_and_a_topic_only_columns() -> None:
    files = filled(4, 8)
    store = open_store(files, segment_entries_max=10)
    read = dict(files.bytes_read)
    assert set(read) == {"active.bin", "seg_0004.bin", "seg_0004.meta"}
    assert read["seg_0004.bin"] == HEADER_BYTES
    files.bytes_read.clear()
    topic = store.topic("talk")
    assert topic.stats().indexes_loaded == 0
    read = dict(files.bytes_read)
    assert {read[f"seg_000{number}.bin"] for number in range(1, 5)} == {HEADER_BYTES}
    files.bytes_read.clear()
    hits = search(topic.snapshot(), unit_vector("q")[None], 3)
    assert topic.is_loaded and topic.stats().indexes_loaded == 4
    logs = [DATA_DIR / "talk" / "segments" / f"seg_000{number}.bin" for number in range(1, 5)]
    assert [files.bytes_read[path.name] for path in logs] == [files.size(path) for path in logs], (
        "once, for the vectors"
    )
    files.bytes_read.clear()
    topic.snapshot().read(hits[0].place)
    assert 0 < sum(bytes_ for name, bytes_ in files.bytes_read.items() if name.endswith(".bin")) < 3000


@pytest.mark.parametrize("damage", ["none", "torn", "flipped", "garbage"])
def test_the_end_of_a_large_log_tells_the_highest_id_and_where_it_is_damaged_all_of_it(damage: str) -> None:
    files = filled(0, 9)
    store = open_store(files, segment_entries_max=10_000)
    long = [msgspec.structs.replace(draft(f"more {n}"), content=f"{n} {'long ' * 400}") for n in range(120)]
    *_, last_but_one, last = [store.topic("talk").append([one])[0].canonical_id for one in long]
    store.close()
    data = files.read(ACTIVE)
    if damage == "torn":
        files.put(ACTIVE, data[:-7])
    elif damage == "flipped":
        files.flip(ACTIVE, scan_records(data).spans[-1].offset - 30)
    elif damage == "garbage":
        files.put(ACTIVE, data + b"garbage")
    files.bytes_read.clear()
    store = reopened(files)
    assert damage != "none" or files.bytes_read["active.bin"] == 64 << 10 < len(data)
    [new] = store.topic("other").append([draft("new")])
    assert new.canonical_id == (last_but_one if damage == "torn" else last) + 1


def test_two_threads_that_find_the_same_index_damaged_drop_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = filled(3, 5)
    store = open_store(files, segment_entries_max=10)
    store.topic("talk").merge((1, 2, 3))
    store.close()
    files.flip(DATA_DIR / "talk" / "segments" / "merged_0001_0003.ivf", 50)
    topic = open_store(files, segment_entries_max=10).topic("talk")
    load, both_failed = SealedIndex.load, threading.Barrier(2, timeout=60)

    def load_together(index: SealedIndex, dead: Bits) -> list[StoreError]:
        try:
            return load(index, dead)
        except StoreError:
            both_failed.wait()
            raise

    monkeypatch.setattr(SealedIndex, "load", load_together)
    with ThreadPoolExecutor(2) as threads:
        for loaded in [threads.submit(topic.load) for _ in range(2)]:
            loaded.result()
    assert [finding.kind for finding in topic.findings] == ["derived"]
    assert topic.is_loaded and len(topic.snapshot().indexes) == 3
    assert len(live_contents(topic)) == 35


def test_topics_are_counted_again_only_where_something_was_stored() -> None:
    files = filled(2, 3)
    store = open_store(files, segment_entries_max=10)
    store.topic("other").append([draft("other")])
    assert [(one.topic_id, one.chunks, one.segments) for one in disk_usage(DATA_DIR, files)] == [
        ("other", 1, 0),
        ("talk", 23, 2),
    ]
    files.bytes_read.clear()
    assert [one.chunks for one in disk_usage(DATA_DIR, files)] == [1, 23] and not files.bytes_read
    (last,) = store.topic("talk").append([draft("more")])
    store.topic("talk").append([adjusted(last, 2)])
    files.bytes_read.clear()
    assert [(one.chunks, one.entries) for one in disk_usage(DATA_DIR, files)] == [(1, 1), (24, 25)]
    assert "active.bin" in files.bytes_read
