"""Which entries of a topic no longer count, and where the entries of a chunk lie.

Rule: of all entries of one uuid only the one with the highest canonical_id counts, and none if that one is Deprecated.
Computed from the columns at every start, never stored. Nothing here holds a Python object per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memd.entries import Status

UInts = NDArray[np.uint64]
Bits = NDArray[np.bool_]
Records = NDArray[np.void]
"""A structured array of `segment.ROW`."""


def uuid_words(uuid: bytes) -> tuple[np.uint64, np.uint64]:
    """A uuid as two numbers, in whose order uuids sort as their hex digits do."""
    return np.uint64(int.from_bytes(uuid[:8], "big")), np.uint64(int.from_bytes(uuid[8:], "big"))


def uuid_bytes(high: int, low: int) -> bytes:
    """The reverse of `uuid_words`."""
    return int(high).to_bytes(8, "big") + int(low).to_bytes(8, "big")


def superseded(records: Records) -> Bits:
    """For all rows of a topic, in any order: True where a newer entry of the uuid exists or the entry is Deprecated."""
    if not len(records):
        return np.empty(0, dtype=np.bool_)
    order = np.lexsort((records["canonical_id"], records["uuid_low"], records["uuid_high"]))
    high, low = records["uuid_high"][order], records["uuid_low"][order]
    newest_first = np.empty(len(order), dtype=np.bool_)
    newest_first[-1] = False
    newest_first[:-1] = (high[:-1] == high[1:]) & (low[:-1] == low[1:])
    bits = np.empty(len(order), dtype=np.bool_)
    bits[order] = newest_first
    return np.asarray(bits | (records["status"] == Status.DEPRECATED), dtype=np.bool_)


class Directory:
    """Sorted columns over the entries of all sealed segments of a topic: uuid, text and digest → place. Immutable.

    Per entry: 32 bytes for the uuid and place, 16 for the text, 8 per digest.
    """

    def __init__(self, segments: Sequence[tuple[int, Records, UInts]] = ()) -> None:
        """`segments`: segment id, rows and digests (see `segment.Rows`) of each, in order."""
        rows = [records for _, records, _ in segments]
        high = _joined([records["uuid_high"] for records in rows], np.uint64)
        order = np.argsort(high, kind="stable")
        self._high: UInts = high[order]
        self._low: UInts = _joined([records["uuid_low"] for records in rows], np.uint64)[order]
        # A place as one number: segment id above, row below.
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
        """What the columns take."""
        columns = (self._high, self._low, self._places, self._texts, self._text_places, self._digests)
        return sum(column.nbytes for column in columns)

    def places(self, uuid: bytes) -> list[tuple[int, int]]:
        """(segment id, row) of every entry of the chunk, oldest segment first."""
        high, low = uuid_words(uuid)
        return [_place(self._places[i]) for i in _equal(self._high, high) if self._low[i] == low]

    def places_of_text(self, text_hash: int) -> list[tuple[int, int]]:
        """(segment id, row) of every entry whose content may have this hash."""
        return [_place(self._text_places[i]) for i in _equal(self._texts, np.uint64(text_hash))]

    def has_digest(self, digest: int) -> bool:
        """Whether any entry came from a message whose digest begins with these 8 bytes."""
        return len(_equal(self._digests, np.uint64(digest))) > 0

    def nearest(self, uuids: Sequence[bytes]) -> list[list[bytes]]:
        """For each uuid those nearest to it in hex order: no other in the directory shares a longer prefix with it."""
        high = np.frombuffer(b"".join(uuids), dtype=">u8")[::2].astype(np.uint64)
        starts = np.maximum(self._high.searchsorted(high, "left") - 1, 0).tolist()
        stops = np.minimum(self._high.searchsorted(high, "right") + 1, len(self._high)).tolist()
        return [
            list(map(uuid_bytes, self._high[start:stop].tolist(), self._low[start:stop].tolist()))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def uuids_with_prefix(self, digits: str) -> list[bytes]:
        """All uuids that begin with these hex digits (4 to 32), with repetition."""
        head = digits[:16]
        first = np.uint64(int(head.ljust(16, "0"), 16))
        last = np.uint64(int(head.ljust(16, "f"), 16))
        start = int(np.searchsorted(self._high, first, side="left"))
        stop = int(np.searchsorted(self._high, last, side="right"))
        found = [uuid_bytes(self._high[i], self._low[i]) for i in range(start, stop)]
        return [uuid for uuid in found if uuid.hex().startswith(digits)]


def _joined(parts: Sequence[NDArray[np.uint64]], dtype: type[np.uint64]) -> UInts:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _equal(column: UInts, value: np.uint64) -> range:
    return range(int(column.searchsorted(value, "left")), int(column.searchsorted(value, "right")))


def _place(packed: np.uint64) -> tuple[int, int]:
    return int(packed) >> 32, int(packed) & 0xFFFFFFFF
