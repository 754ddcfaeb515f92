"""Drafts and stores for the tests of the store: small vectors, a clock that counts, uuids from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memd.entries import Draft, Entry, Status
from memd.store.claim import Claim
from memd.store.disk import LocalDisk
from memd.store.layout import TopicLayout
from memd.store.log.journal import Journal
from memd.store.store import Store, TopicLog

DIMENSION = 8
FINGERPRINT = "0123456789abcdef0123456789abcdef"
DATA_DIR = Path("/memory")


def uuid_of(name: str | int) -> bytes:
    """The same 16 bytes for the same name."""
    return hashlib.blake2b(f"uuid {name}".encode(), digest_size=16).digest()


def digest_of(name: str | int) -> bytes:
    return hashlib.blake2b(f"digest {name}".encode(), digest_size=16).digest()


def unit_vector(name: str | int, dimension: int = DIMENSION) -> NDArray[np.float32]:
    """The same direction for the same name, shape (dimension,)."""
    seed = int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "big")
    vector = np.random.default_rng(seed).normal(size=dimension).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def draft(name: str | int, *, dimension: int = DIMENSION, public_id: str | None = None) -> Draft:
    """A new chunk."""
    return Draft(
        uuid=uuid_of(name),
        content=f"user: chunk {name}",
        vector=unit_vector(name, dimension).tobytes(),
        created_at=1_700_000_000_000_000,
        roles=("user",),
        digests=(digest_of(name),),
        public_id=public_id,
    )


def adjusted(entry: Entry, steps: int) -> Draft:
    """A correction that gives the chunk of `entry` this many utility steps."""
    return Draft(
        uuid=entry.uuid,
        content=entry.content,
        vector=entry.vector,
        utility_steps=steps,
        created_at=entry.created_at,
        roles=entry.roles,
        digests=entry.digests,
        action="Helpful" if steps > entry.utility_steps else "Unhelpful",
        reason="test",
        public_id=entry.public_id,
        origin_id=entry.origin_id,
    )


def deprecated(entry: Entry) -> Draft:
    """A correction that takes the chunk of `entry` out."""
    return Draft(
        uuid=entry.uuid,
        content="",
        vector=b"",
        status=Status.DEPRECATED,
        created_at=entry.created_at,
        action="Update",
        reason="test",
        public_id=entry.public_id,
        origin_id=entry.origin_id,
    )


def counting_clock(start: int = 1_700_000_000_000_000) -> Callable[[], int]:
    """Microseconds that go on by a thousand at each look."""
    now = start

    def tick() -> int:
        nonlocal now
        now += 1000
        return now

    return tick


def open_store(
    files: LocalDisk | None = None,
    data_dir: Path = DATA_DIR,
    *,
    segment_entries_max: int = 1000,
    dimension: int = DIMENSION,
    fingerprint: str = FINGERPRINT,
) -> Store:
    return Store.open(
        data_dir,
        dimension=dimension,
        fingerprint=fingerprint,
        segment_entries_max=segment_entries_max,
        files=files,
        now_us=counting_clock(),
    )


def open_journal(path: Path, files: LocalDisk) -> tuple[Journal, list[bytes]]:
    """The journal of a topic that nobody else has open, and its payloads."""
    return Journal.open(Claim(files, TopicLayout(path.parent.parent, path.parent.name)))


def live_contents(topic: TopicLog) -> list[str]:
    """The contents of all live chunks, oldest entry first."""
    snapshot = topic.snapshot()
    hits = snapshot.search(unit_vector("any", DIMENSION)[None], 1_000_000)
    return [snapshot.entry(hit).content for hit in sorted(hits, key=lambda hit: hit.canonical_id)]


def seal_all(topic: TopicLog) -> None:
    for segment_id in topic.unsealed():
        topic.seal(segment_id)


def search_ids(topic: TopicLog, queries: Sequence[NDArray[np.float32]], k: int) -> list[int]:
    return [hit.canonical_id for hit in topic.snapshot().search(np.stack(queries), k)]
