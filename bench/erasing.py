"""The time that erasing takes, and for how long it holds up an append: `python bench/erasing.py [--entries 100000]`.

One chunk of a sealed segment of 5,000 entries, one of the file that is appended to, and a whole topic. While chunks are
erased another thread appends all the time; the longest of its appends is told.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from memd.entries import Draft, Erased
from memd.store.disk import Wiper
from memd.store.erasure import Erasure, ForbiddenText
from memd.store.store import ModelId, Store, StoreShared, TopicLog

DIMENSION, SEGMENT = 384, 5_000
TEXT = "user: The harbour office keeps number {} in the blue ledger beside the barometer, as everybody knows. " * 6


def drafts(first: int, count: int) -> list[Draft]:
    """New chunks of 600 characters with random vectors."""
    vectors = np.random.default_rng(first).normal(size=(count, DIMENSION)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        Draft(
            uuid=hashlib.blake2b(b"%d" % number, digest_size=16).digest(),
            content=TEXT.format(*[number] * 6),
            vector=vectors[number - first].tobytes(),
            created_at=1_700_000_000_000_000,
            roles=("user",),
            digests=(hashlib.blake2b(b"m%d" % number, digest_size=16).digest(),),
        )
        for number in range(first, first + count)
    ]


def measured(topic: TopicLog, store: Store, number: int, free: int) -> tuple[float, float]:
    """Seconds to erase a chunk, and of the longest append meanwhile."""
    longest, done = 0.0, threading.Event()

    def append() -> None:
        nonlocal longest
        at = free
        while not done.is_set():
            [draft] = drafts(at, 1)
            started = time.perf_counter()
            topic.append([draft])
            longest, at = max(longest, time.perf_counter() - started), at + 1
            time.sleep(0.002)

    thread = threading.Thread(target=append)
    thread.start()
    uuid = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
    started = time.perf_counter()
    topic.erase({uuid}, Erased(at=1, by="bench"), Wiper(store.files))
    seconds = time.perf_counter() - started
    done.set()
    thread.join()
    return seconds, longest


def main() -> None:
    """Fill a topic, then erase."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=100_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memd-erasing-") as folder:
        store = Store(Path(folder), StoreShared(model=ModelId(DIMENSION, "0" * 32), segment_entries_max=SEGMENT))
        topic = store.topic("bench")
        for first in range(0, asked.entries, 500):
            topic.append(drafts(first, 500))
        topic.append(drafts(asked.entries, SEGMENT // 2))
        for name, number in (("a sealed segment", 7), ("the growing one", asked.entries + 7)):
            seconds, longest = measured(topic, store, number, 10_000_000 + number * 1_000)
            print(f"a chunk of {name}: {seconds * 1e3:.0f} ms, the longest append meanwhile {longest * 1e3:.0f} ms")
        erasure = Erasure(id=store.clock.next(), kind="topic", topic_id="bench", at=1, by="bench", chunks=asked.entries)
        store.ledger.write(erasure)
        started, wiper = time.perf_counter(), Wiper(store.files)
        store.retire("bench")
        moved = store.put_topic_aside(erasure, ForbiddenText())
        aside = time.perf_counter() - started
        store.wipe_aside(moved, wiper)
        print(
            f"a topic of {asked.entries:,}: gone after {aside * 1e3:.0f} ms, overwritten after "
            f"{time.perf_counter() - started:.1f} s"
        )


if __name__ == "__main__":
    main()
