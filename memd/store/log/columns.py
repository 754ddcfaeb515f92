"""The columns of entries: what is kept of each entry in memory and in `.meta`, and which entries no longer count.

Rule: pure; nothing here reads a file or holds a Python object per entry. Of all entries of one uuid only the one with
the highest canonical_id counts, and none if that one is Deprecated. This is computed from the columns at every start
and never stored.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.entries import Entry, Status
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
        ("public_digits", "u1"),  # the public id is that long a prefix of the uuid's hex digits
        ("is_ahead", "u1"),  # 1: of the clock, so that the time of the entry is in the record
    ]
)
"""One entry's columns, 56 bytes."""

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
    """Hash a text to find entries with the same content; whoever finds one compares the contents."""
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
    """Return the columns of entries that lie at `spans`."""
    return np.array(list(map(_row, entries, spans)), dtype=ROW)


def superseded(records: Records) -> Bits:
    """Return a bit per row of a topic, in any order: True where the entry is Deprecated or its uuid has a newer one."""
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


def _row(entry: Entry, span: Span) -> tuple[int, ...]:
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
    )
