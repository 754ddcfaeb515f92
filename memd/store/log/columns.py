"""The columns of entries: the fields of each entry kept in memory and in `.meta`, which entries are dead, and the
places of a chunk or text.

Rule: pure; nothing here reads a file or holds a Python object per entry. Of the entries of one uuid, only the one with
the highest canonical_id is live, and none if that one is Deprecated. This is computed from the columns at every start
and never stored.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import struct
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.entries import Entry, Status
from memd.selection import Selection
from memd.store.log.format import Span

ROW = np.dtype(
    [
        ("uuid_high", "<u8"),
        ("uuid_low", "<u8"),
        ("canonical_id", "<u8"),
        ("origin_id", "<u8"),
        ("offset", "<u8"),  # of the record in the .bin
        ("text_hash", "<u8"),  # BLAKE2b-64 of the content
        ("length", "<u4"),  # of the payload
        ("status", "u1"),
        ("utility_steps", "i1"),
        ("public_digits", "u1"),  # length of the public id, a prefix of the uuid's hex digits
        ("is_ahead", "u1"),  # 1: the id is ahead of the clock, so the entry's time is in the record
        ("said_at", "<u8"),  # `Entry.said`
        ("source_hash", "<u4"),  # BLAKE2b-32 of the source; 0 without a source
        ("kind", "u1"),  # its index in `KINDS`
        ("role_bits", "u1"),  # a bit for each of `ROLES` in the entry
        ("is_erased", "u1"),  # 1: its text was erased
        ("reserved", "V1"),  # zeros
    ]
)
"""One entry's columns, 72 bytes."""
KINDS = ("", "turn", "note", "document")
"""The first is used for any other kind."""
ROLES = ("", "user", "assistant", "tool", "system", "developer", "function")

Records = NDArray[np.void]
"""A structured array of `ROW`."""
UInts = NDArray[np.uint64]
Bits = NDArray[np.bool_]
Rows = NDArray[np.intp]
"""Row numbers, or labels of an index."""
Floats = NDArray[np.float32]
"""Vectors, or a matrix of them."""

_UUID_HALVES = struct.Struct(">QQ")


def text_hash(content: str) -> int:
    """Hash a text to find entries with the same content; a caller must compare the contents."""
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")


def digest_word(digest: bytes) -> int:
    """Return the first 8 bytes of a message digest as a number: the part that is kept in memory."""
    return int.from_bytes(digest[:8], "little")


def uuid_halves(uuid: bytes) -> tuple[np.uint64, np.uint64]:
    """Return a uuid as two big-endian numbers, so that uuids sort as their hex digits do."""
    high, low = _UUID_HALVES.unpack(uuid)
    return np.uint64(high), np.uint64(low)


def uuid_bytes(high: int, low: int) -> bytes:
    """Return the uuid with these halves."""
    return _UUID_HALVES.pack(int(high), int(low))


def rows_from(entries: Sequence[Entry], spans: Sequence[Span]) -> Records:
    """Return the columns of entries stored at `spans`."""
    return np.array(list(map(_row, entries, spans)), dtype=ROW)


def may_be_wanted(records: Records, wanted: Selection) -> Bits:
    """Return a bit per row: False if the columns rule out that the chunk is wanted.

    The rest (words, unusual kinds and roles, two sources with one hash) needs the entry itself.
    """
    bits = np.ones(len(records), dtype=np.bool_)
    if wanted.since is not None:
        bits &= records["said_at"] >= max(0, wanted.since)
    if wanted.until is not None:
        bits &= records["said_at"] < max(0, wanted.until)
    if wanted.kinds:
        bits &= np.isin(records["kind"], [_place(KINDS, kind) for kind in wanted.kinds])
    if wanted.tags:
        bits &= records["kind"] == _place(KINDS, "note")  # only notes have tags
    if wanted.roles:
        bits &= (records["role_bits"] & np.uint8(role_bits(wanted.roles))) != 0
    if wanted.sources:
        bits &= np.isin(records["source_hash"], [_source_hash(source) for source in wanted.sources])
    return bits


def superseded(records: Records) -> Bits:
    """Return a bit per row of a topic, in any order: True if the entry is Deprecated or its uuid has a newer one."""
    if not len(records):
        return np.empty(0, dtype=np.bool_)
    order = np.lexsort((records["canonical_id"], records["uuid_low"], records["uuid_high"]))
    high, low = records["uuid_high"][order], records["uuid_low"][order]
    has_newer = np.empty(len(order), dtype=np.bool_)
    has_newer[-1] = False
    has_newer[:-1] = (high[:-1] == high[1:]) & (low[:-1] == low[1:])
    bits = np.empty(len(order), dtype=np.bool_)
    bits[order] = has_newer
    return np.asarray(bits | (records["status"] == Status.DEPRECATED), dtype=np.bool_)


def _row(entry: Entry, span: Span) -> tuple[int | bytes, ...]:
    return (
        *_UUID_HALVES.unpack(entry.uuid),
        entry.canonical_id,
        entry.origin_id,
        span.offset,
        text_hash(entry.content),
        span.length,
        int(entry.status),
        entry.utility_steps,
        len(entry.public_id),
        int(entry.appended_at is not UNSET),
        max(0, entry.said),
        _source_hash(entry.source),
        _place(KINDS, entry.kind),
        role_bits(entry.roles),
        int(entry.erased is not UNSET),
        b"",
    )


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else 0


def role_bits(roles: Iterable[str]) -> int:
    """Return the `role_bits` of an entry with these roles."""
    return functools.reduce(operator.or_, (1 << _place(ROLES, role) for role in roles), 0)


@functools.lru_cache(maxsize=8192)
def _source_hash(source: str | None) -> int:
    """Return the hash of a source, never 0; 0 without a source."""
    if source is None:
        return 0
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=4).digest(), "little") or 1


class UuidIndex:
    """Sorted columns over all sealed entries of a topic: uuid → place, text hash → place, digests.

    Takes 32 bytes per entry for the uuid and its place, 16 for the text and 8 for each digest.
    """

    def __init__(self, segments: Sequence[tuple[int, Records, UInts]] = ()) -> None:
        """`segments`: (segment id, rows, first words of the digests) of each, in order."""
        rows = [records for _, records, _ in segments]
        high = _joined([records["uuid_high"] for records in rows])
        order = np.argsort(high, kind="stable")
        self._high: UInts = high[order]
        self._low: UInts = _joined([records["uuid_low"] for records in rows])[order]
        # A place as one number: the segment id in the upper 32 bits, the row in the lower.
        places = _joined([(number << 32) + np.arange(len(own), dtype=np.uint64) for number, own, _ in segments])
        self._places: UInts = places[order]
        texts = _joined([records["text_hash"] for records in rows])
        order = np.argsort(texts, kind="stable")
        self._texts: UInts = texts[order]
        self._text_places: UInts = places[order]
        digests = np.sort(_joined([digests for _, _, digests in segments]))
        is_first = np.append(True, digests[1:] != digests[:-1])[: len(digests)]  # the first `np.unique` takes 7 ms
        self._digests: UInts = digests[is_first]

    @property
    def memory_bytes(self) -> int:
        """Size of the columns."""
        columns = (self._high, self._low, self._places, self._texts, self._text_places, self._digests)
        return sum(column.nbytes for column in columns)

    def places(self, uuid: bytes) -> list[tuple[int, int]]:
        """Return (segment id, row) of every entry of the chunk, oldest segment first."""
        high, low = uuid_halves(uuid)
        return [_unpacked(self._places[i]) for i in _equal(self._high, high) if self._low[i] == low]

    def alike(self, uuids: Sequence[bytes]) -> set[bytes]:
        """Return the uuids among these whose first half some entry has: one batch, because each alone takes 8 µs."""
        high = np.frombuffer(b"".join(uuids), dtype=">u8")[::2].astype(np.uint64)
        found = self._high.searchsorted(high, "left") < self._high.searchsorted(high, "right")
        return {uuids[row] for row in np.flatnonzero(found).tolist()}

    def places_of_text(self, text_hash: int) -> list[tuple[int, int]]:
        """Return (segment id, row) of every entry whose content has this hash."""
        return [_unpacked(self._text_places[i]) for i in _equal(self._texts, np.uint64(text_hash))]

    def has_digest(self, digest: int) -> bool:
        """Return whether a message is stored whose digest begins with these 8 bytes."""
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

    def uuids_with_prefix(self, digits: str) -> set[bytes]:
        """Return the uuids that begin with these hex digits, compared by their first half."""
        low, high = hex_range(digits)
        rows = slice(self._high.searchsorted(low, "left"), self._high.searchsorted(high, "right"))
        return set(map(uuid_bytes, self._high[rows].tolist(), self._low[rows].tolist()))


def hex_range(digits: str) -> tuple[np.uint64, np.uint64]:
    """Return the lowest and the highest first half of uuids that begin with these hex digits."""
    low, high = (int(digits[:16].ljust(16, filler), 16) for filler in "0f")
    return np.uint64(low), np.uint64(high)


def _joined(parts: Sequence[UInts]) -> UInts:
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _equal(column: UInts, value: np.uint64) -> range:
    return range(int(column.searchsorted(value, "left")), int(column.searchsorted(value, "right")))


def _unpacked(packed: np.uint64) -> tuple[int, int]:
    return int(packed) >> 32, int(packed) & 0xFFFFFFFF
