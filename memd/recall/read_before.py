"""The entries that questions read: most of those that one question looks at another one has looked at before.

Rule: an entry never changes but by an erasure, which drops all of them; a damaged one is never kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from memd.caching import ByteCache
from memd.entries import Entry
from memd.store.snapshot import Place, Snapshot

BYTES_MAX = 16 * 1024 * 1024
"""About 5,000 entries: those of a common topic."""
_ENTRY_BYTES = 1_000
"""Of an entry beside its vector and content (measured with tracemalloc)."""


class ReadBefore:
    """The entries that were read last for any question; they never change. Any thread may use it."""

    def __init__(self) -> None:
        self._entries: ByteCache[tuple[str, int], Entry] = ByteCache(BYTES_MAX)

    @property
    def bytes_held(self) -> int:
        """Memory held by them."""
        return self._entries.bytes_held

    def forget(self) -> None:
        """Drop all of them: the text of some was erased."""
        self._entries = ByteCache(BYTES_MAX)

    def read(self, snapshot: Snapshot, places: Sequence[Place]) -> dict[Place, Entry]:
        """See `Snapshot.read_many`."""
        keys = {(snapshot.topic_id, one): place for one, place in zip(snapshot.ids_of(places), places, strict=True)}
        found = {keys[key]: entry for key, entry in self._entries.get_many(keys).items()}
        read = snapshot.read_many(place for place in places if place not in found)
        for entry in read.values():
            size = _ENTRY_BYTES + len(entry.vector) + sys.getsizeof(entry.content)
            self._entries.put((snapshot.topic_id, entry.canonical_id), entry, size)
        return found | read
