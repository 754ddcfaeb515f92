"""The index from a uuid, a text or a message digest to the entries in the sealed segments of a topic; and public ids,
the short names under which clients and models speak of chunks.

Rule: the index is immutable, sorted columns only: it holds no Python object per chunk. A chunk's public id is a prefix
of its uuid's hex digits and never changes. When it is assigned, no other chunk of the topic begins with the same
digits; only an adopted chunk keeps the id it was shown under, unless that is taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from memd.entries import PUBLIC_ID_DIGITS_MIN, Draft
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
        """Whether a message is stored whose digest begins with these 8 bytes."""
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


UUID_BITS = 128
UUID_DIGITS = UUID_BITS // 4


class PublicIds:
    """All uuids of a topic, of which new ones get public ids. For one thread."""

    def __init__(self, uuid_index: UuidIndex, others: Iterable[bytes], public_id_of: Callable[[bytes], str]) -> None:
        """Take the uuids of the topic.

        Args:
            uuid_index: of the sealed segments.
            others: the uuids of the other segments.
            public_id_of: returns the public id of a chunk that the topic has.
        """
        self._uuid_index = uuid_index
        self._others = sorted(set(others))
        self._public_id_of = public_id_of

    def assign(self, drafts: Sequence[Draft], new: dict[bytes, str]) -> list[str]:
        """Return the public id of each draft, and add to `new` those of chunks that the topic does not have yet."""
        neighbours = self._uuid_index.nearest([draft.uuid for draft in drafts])
        return [self._assign(draft, near, new) for draft, near in zip(drafts, neighbours, strict=True)]

    def note(self, uuids: Iterable[bytes]) -> None:
        """Note chunks that the topic got with the ids that they had."""
        known = set(self._others)
        for uuid in uuids:
            if uuid not in known:
                insort(self._others, uuid)

    def discard(self, uuids: Iterable[bytes]) -> None:
        """Forget the new uuids of an append that failed."""
        failed = set(uuids)
        self._others = [uuid for uuid in self._others if uuid not in failed]

    def _assign(self, draft: Draft, neighbours: Sequence[bytes], new: dict[bytes, str]) -> str:
        if draft.uuid in new:
            return new[draft.uuid]
        at = bisect_left(self._others, draft.uuid)
        if draft.uuid in neighbours or self._others[at : at + 1] == [draft.uuid]:
            return self._public_id_of(draft.uuid)
        shown = draft.public_id
        assert shown is None or draft.uuid.hex().startswith(shown), "a public id is a prefix of the uuid"
        taken = {new.get(other) or self._public_id_of(other) for other in self._with_prefix(shown)} if shown else set()
        if not shown or shown in taken:
            shown = _unique_prefix(draft.uuid, [*self._others[max(0, at - 1) : at + 1], *neighbours])
        new[draft.uuid] = shown
        insort(self._others, draft.uuid)
        return shown

    def _with_prefix(self, digits: str) -> list[bytes]:
        """The uuids that begin with these digits."""
        even = digits[: len(digits) - len(digits) % 2]
        uuids = self._uuid_index.uuids_with_prefix(digits)
        for other in self._others[bisect_left(self._others, bytes.fromhex(even)) :]:
            if not other.hex().startswith(even):
                break
            if other.hex().startswith(digits):
                uuids.append(other)
        return uuids


def _unique_prefix(uuid: bytes, neighbours: Sequence[bytes]) -> str:
    """The shortest prefix of a new uuid, at least PUBLIC_ID_DIGITS_MIN digits, that no other uuid begins with.

    `neighbours` are those just before and after it in hex order.
    """
    number = int.from_bytes(uuid, "big")
    # Two uuids share the leading hex digits before the highest bit in which they differ.
    differing = min([number ^ int.from_bytes(other, "big") for other in neighbours], default=1 << UUID_BITS)
    shared = UUID_DIGITS - (differing.bit_length() + 3) // 4
    return uuid.hex()[: max(PUBLIC_ID_DIGITS_MIN, shared + 1)]
