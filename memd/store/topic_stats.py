"""The figures of a topic, for people.

Rule: pure questions to a snapshot; nothing is read from disk.
"""

from __future__ import annotations

import msgspec

from memd.store.snapshot import Snapshot


class TopicStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one topic."""

    chunks: int
    """Live ones."""
    entries: int
    damage: tuple[str, ...]
    """Sentences: what was found missing or damaged when the topic was opened or loaded."""
    segments: int
    unsealed: int
    indexes: int
    """How many are searched; fewer than sealed segments if some are merged."""
    indexes_loaded: int
    unindexed: int
    """Entries whose words are not in the lexical index yet; of the last 500 every search reads the words itself."""
    memory_bytes: int
    fan_out_ms: float | None
    scanned_per_second: float | None


def stats_of(snapshot: Snapshot, damage: tuple[str, ...], *, unsealed: int, unindexed: int) -> TopicStats:
    """Return the figures of a topic; the arguments are those that its snapshot does not tell."""
    indexes = [view.index for view in snapshot.indexes]
    segments = [view.segment for view in snapshot.views.values()]
    return TopicStats(
        chunks=snapshot.live_count,
        entries=snapshot.extent.entries,
        damage=damage,
        segments=len(segments),
        unsealed=unsealed,
        indexes=len(indexes),
        unindexed=unindexed,
        indexes_loaded=sum(index.is_loaded for index in indexes),
        memory_bytes=sum(part.memory_bytes for part in (*segments, *indexes)) + snapshot.uuid_index.memory_bytes,
        fan_out_ms=snapshot.times.fan_out_ms,
        scanned_per_second=snapshot.times.scanned_per_second,
    )
