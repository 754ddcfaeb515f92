"""Drafts and stores for the tests of the store: small vectors, a clock that counts, uuids from a seed."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memd.entries import Draft, Entry, Status
from memd.recall.columns import ChunkSource, sources_of
from memd.store.claim import Claim
from memd.store.disk import LocalDisk
from memd.store.layout import TopicLayout
from memd.store.log.columns import uuid_bytes
from memd.store.log.journal import Journal
from memd.store.snapshot import Place, Snapshot
from memd.store.store import CanonicalClock, ModelId, Store, StoreShared, TopicLog
from memd.store.tools.export import export

DIMENSION = 8
FINGERPRINT = "0123456789abcdef0123456789abcdef"
DATA_DIR = Path("/memory")
DISK = LocalDisk()


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
    now_us: Callable[[], int] | None = None,
) -> Store:
    """`now_us`: of its clock; one that counts, unless given."""
    return Store(
        data_dir,
        StoreShared(
            model=ModelId(dimension, fingerprint),
            segment_entries_max=segment_entries_max,
            files=files or LocalDisk(),
            clock=CanonicalClock(now_us or counting_clock()),
        ),
    )


def open_journal(path: Path, files: LocalDisk) -> tuple[Journal, list[bytes]]:
    """The journal of a topic that nobody else has open, and its payloads."""
    return Journal.open(Claim(files, TopicLayout(path.parent.parent, path.parent.name)))


class Hit(NamedTuple):
    """A live chunk that a search found."""

    score: float
    cosine: float
    canonical_id: int
    uuid: bytes
    place: Place


def search(snapshot: Snapshot, queries: NDArray[np.float32], k: int) -> list[Hit]:
    """The best live chunks by score, found as recall finds them; of equal scores the later first."""
    hits = dict[Place, Hit]()
    found = [(source, source.nearest(queries, k)) for source in sources_of(snapshot)]  # loads them
    for source, lists in found:
        for labels in (one[source.counts[one]] for one in lists):
            segments, rows = source.places(labels)
            places = list(zip(segments.tolist(), rows.tolist(), strict=True))
            columns = [source.column(name, labels).tolist() for name in ("uuid_high", "uuid_low", "canonical_id")]
            cosines = _cosines(snapshot, source, labels, places, queries)
            factors = source.multipliers(labels).tolist()
            for place, cosine, factor, *halves, canonical_id in zip(places, cosines, factors, *columns, strict=True):
                hits[place] = Hit(max(0.0, cosine) * factor, cosine, canonical_id, uuid_bytes(*halves), place)
    return sorted(hits.values(), key=lambda hit: (-round(hit.score, 6), -hit.canonical_id))[:k]


def _cosines(
    snapshot: Snapshot, source: ChunkSource, labels: NDArray[np.intp], places: list[Place], queries: NDArray[np.float32]
) -> list[float]:
    """As the index has them, else as the log has them: an index that is damaged is not in memory."""
    is_held = all(view.index.is_loaded for view in snapshot.indexes)
    vectors = source.vectors(labels) if is_held else np.zeros((len(labels), queries.shape[1]), np.float32)
    found = (vectors @ queries.T).max(axis=1, initial=-1).astype(np.float64)
    for at in np.flatnonzero(~vectors.any(axis=1)).tolist():
        read = [snapshot.cosines_at(query, [places[at]]).get(places[at], -1.0) for query in queries]
        found[at] = max(read, default=-1.0)
    listed: list[float] = np.round(found, 6).tolist()
    return listed


def live_contents(topic: TopicLog) -> list[str]:
    """The contents of all live chunks, oldest entry first."""
    snapshot = topic.snapshot()
    hits = search(snapshot, unit_vector("any", DIMENSION)[None], 1_000_000)
    return [snapshot.read(hit.place).content for hit in sorted(hits, key=lambda hit: hit.canonical_id)]


def contents(folder: Path = DATA_DIR, files: LocalDisk = DISK, *, live_only: bool = False) -> list[str]:
    """The contents of all entries of a folder, in the order of their ids."""
    return [entry["content"] for entry in export(folder, files, topic_id=None, live_only=live_only)]


def two_segments(files: Any) -> Any:
    """A disk with two sealed segments of five chunks, two chunks in active.bin, one append each."""
    store = open_store(files, segment_entries_max=5)
    for number in range(12):
        store.topic("talk").append([draft(number)])
    store.close()
    return files
