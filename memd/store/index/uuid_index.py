"""The index from a uuid, a text or a message digest to the entries in the sealed segments of a topic.

Rule: immutable, and sorted columns only: nothing here holds a Python object per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memd.store.log.columns import Records, UInts, uuid_bytes, uuid_halves


class UuidIndex:
    """Sorted columns over all sealed entries of a topic: uuid → place, text hash → place, digests.

    Takes 32 bytes per entry for the uuid and its place, 16 for the text and 8 for each digest.
    """

    def __init__(self, segments: Sequence[tuple[int, Records, UInts]] = ()) -> None:
        """`segments`: (segment id, rows, first words of the digests) of each, in order."""
        rows = [records for _, records, _ in segments]
        high = _joined([records["uuid_high"] for records in rows], np.uint64)
        order = np.argsort(high, kind="stable")
        self._high: UInts = high[order]
        self._low: UInts = _joined([records["uuid_low"] for records in rows], np.uint64)[order]
        # A place as one number: the segment id in the upper 32 bits, the row in the lower.
        places = _joined(
            [(segment_id << 32) + np.arange(len(records), dtype=np.uint64) for segment_id, records, _ in segments],
            np.uint64,
        )
        self._places: UInts = places[order]
        texts = _joined([records["text_hash"] for records in rows], np.uint64)
        order = np.argsort(texts, kind="stable")
        self._texts: UInts = texts[order]
        self._text_places: UInts = places[order]
        self._digests: UInts = np.unique(_joined([digests for _, _, digests in segments], np.uint64))

    @property
    def memory_bytes(self) -> int:
        """Size of the columns."""
        columns = (self._high, self._low, self._places, self._texts, self._text_places, self._digests)
        return sum(column.nbytes for column in columns)

    def places(self, uuid: bytes) -> list[tuple[int, int]]:
        """Return (segment id, row) of every entry of the chunk, oldest segment first."""
        high, low = uuid_halves(uuid)
        return [_place(self._places[i]) for i in _equal(self._high, high) if self._low[i] == low]

    def alike(self, uuids: Sequence[bytes]) -> set[bytes]:
        """Return those of some uuids of which half is an entry's: one look for all, as each by itself takes 8 µs."""
        high = np.frombuffer(b"".join(uuids), dtype=">u8")[::2].astype(np.uint64)
        found = self._high.searchsorted(high, "left") < self._high.searchsorted(high, "right")
        return {uuids[row] for row in np.flatnonzero(found).tolist()}

    def places_of_text(self, text_hash: int) -> list[tuple[int, int]]:
        """Return (segment id, row) of every entry whose content has this hash."""
        return [_place(self._text_places[i]) for i in _equal(self._texts, np.uint64(text_hash))]

    def has_digest(self, digest: int) -> bool:
        """Whether any entry came from a message whose digest begins with these 8 bytes."""
        return len(_equal(self._digests, np.uint64(digest))) > 0

    def nearest(self, uuids: Sequence[bytes]) -> list[list[bytes]]:
        """Return for each uuid its neighbours in hex order, itself included: no other shares a longer prefix."""
        high = np.frombuffer(b"".join(uuids), dtype=">u8")[::2].astype(np.uint64)
        starts = np.maximum(self._high.searchsorted(high, "left") - 1, 0).tolist()
        stops = np.minimum(self._high.searchsorted(high, "right") + 1, len(self._high)).tolist()
        return [
            list(map(uuid_bytes, self._high[start:stop].tolist(), self._low[start:stop].tolist()))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def uuids_with_prefix(self, digits: str) -> list[bytes]:
        """Return all uuids that begin with these hex digits (4 to 32), one per entry."""
        head = digits[:16]
        first = np.uint64(int(head.ljust(16, "0"), 16))
        last = np.uint64(int(head.ljust(16, "f"), 16))
        start = int(np.searchsorted(self._high, first, side="left"))
        stop = int(np.searchsorted(self._high, last, side="right"))
        uuids = [uuid_bytes(self._high[i], self._low[i]) for i in range(start, stop)]
        return [uuid for uuid in uuids if uuid.hex().startswith(digits)]


def _joined(parts: Sequence[NDArray[np.uint64]], dtype: type[np.uint64]) -> UInts:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _equal(column: UInts, value: np.uint64) -> range:
    return range(int(column.searchsorted(value, "left")), int(column.searchsorted(value, "right")))


def _place(packed: np.uint64) -> tuple[int, int]:
    return int(packed) >> 32, int(packed) & 0xFFFFFFFF
