"""A log file in memory: the growing kind, scanned exactly, and the sealed kind, searched by an index.

Rule: a segment only ever gains rows, and only the growing kind; a row's columns and vector never change. Whether a
row still counts is not known here but in the views of a snapshot. Row numbers follow the order of the file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry, Status
from memd.errors import CorruptFile, StoreError
from memd.store.files import Files
from memd.store.index.superseded import Records, UInts
from memd.store.index.vectors import Floats, Rows
from memd.store.log.format import FRAME_BYTES, Header, Span, decode_entry, payload_at

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
        ("reserved", "V1"),
    ]
)
"""One entry's columns, 56 bytes: what is kept of it in memory and in `.meta`."""

_UUID_HALVES = struct.Struct(">QQ")  # see `superseded.uuid_words`
_CAPACITY_MIN = 64
_TABLE_BYTES = 500
"""Of an entry in the three tables of a growing segment, about."""


def text_hash(content: str) -> int:
    """What finds entries of the same content; equal hashes are confirmed by reading."""
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")


def digest_word(digest: bytes) -> int:
    """The part of a message digest that is kept in memory."""
    return int.from_bytes(digest[:8], "little")


def rows_from(entries: Sequence[Entry], spans: Sequence[Span]) -> Records:
    """The columns of entries that lie at `spans`."""
    return np.array(list(map(_row, entries, spans)), dtype=ROW)


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
        b"",
    )


def read_entry(files: Files, paths: Sequence[Path], record: np.void, *, dimension: int | None) -> Entry:
    """The entry of one `ROW`, read from the first of `paths` that has it, and checked.

    A file is renamed when its segment is full, perhaps right now: that is why there are several.

    Raises:
        CorruptFile: the bytes are not that entry any more.
        StoreError: the file cannot be read.
    """
    offset, length = int(record["offset"]), int(record["length"])
    problem: StoreError = CorruptFile(
        f"{paths[0]}: entry {record['canonical_id']} at offset {offset} cannot be read; "
        "`memd verify` says what else is damaged"
    )
    for path in paths:
        try:
            payload = payload_at(files.read_at(path, offset, FRAME_BYTES + length), 0)
            entry = decode_entry(payload, dimension=dimension) if payload is not None else None
        except StoreError as error:
            problem = error if files.size(path) is not None else problem
            continue
        if entry is not None and entry.canonical_id == int(record["canonical_id"]):
            return entry
    raise problem


class Vouched(msgspec.Struct, frozen=True):
    """What a file must be before a native loader may see it."""

    bytes: int
    crc: int


class Segment:
    """What both kinds have in common: a file, its header and the columns of its entries."""

    def __init__(self, files: Files, paths: Sequence[Path], header: Header) -> None:
        self._files = files
        self._paths = tuple(paths)
        self.header = header
        self.segment_id = header.segment_id

    def read(self, record: np.void) -> Entry:
        """The entry of one `ROW`; see `read_entry`."""
        return read_entry(self._files, self._paths, record, dimension=self.header.dimension)


class Growing(Segment):
    """The segment that is appended to, or a full one whose index is not built yet.

    One thread adds; others may look rows up that they know to be there: rows below a count that was published.
    """

    def __init__(self, files: Files, paths: Sequence[Path], header: Header, *, searchable: bool) -> None:
        super().__init__(files, paths, header)
        self.searchable = searchable
        self.count = 0
        self._rows = np.zeros(_CAPACITY_MIN, dtype=ROW)
        self._matrix = np.zeros((_CAPACITY_MIN, header.dimension), dtype=np.float32)
        self._by_uuid: dict[bytes, tuple[int, ...]] = {}
        self._by_text: dict[int, tuple[int, ...]] = {}
        self._digests: dict[int, None] = {}  # in the order of rows

    def extend(self, entries: Sequence[Entry], spans: Sequence[Span]) -> range:
        """Append a row for each entry and return their numbers."""
        added = range(self.count, self.count + len(entries))
        while added.stop > len(self._rows):  # readers keep the old arrays
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
        rows = rows_from(entries, spans)
        self._rows[added.start : added.stop] = rows
        vectors = np.frombuffer(b"".join(entry.vector for entry in entries), dtype="<f4")
        is_active = rows["status"] == Status.ACTIVE
        self._matrix[added.start : added.stop][is_active] = vectors.reshape(-1, self.header.dimension)
        for row, entry, key in zip(added, entries, rows["text_hash"].tolist(), strict=True):
            self._by_uuid[entry.uuid] = (*self._by_uuid.get(entry.uuid, ()), row)
            self._by_text[key] = (*self._by_text.get(key, ()), row)
            for digest in entry.digests:
                self._digests[digest_word(digest)] = None
        self.count = added.stop
        return added

    @property
    def memory_bytes(self) -> int:
        """What the segment takes, about: columns, vectors and the tables over them."""
        return self._rows.nbytes + self._matrix.nbytes + _TABLE_BYTES * self.count

    @property
    def rows(self) -> Records:
        """The columns so far; rows of it never change."""
        return self._rows[: self.count]

    @property
    def matrix(self) -> Floats:
        """The vectors so far, zeros for Deprecated entries, shape (count, dimension)."""
        return self._matrix[: self.count]

    @property
    def digests(self) -> UInts:
        """The first words of all message digests."""
        return np.fromiter(self._digests, dtype=np.uint64, count=len(self._digests))

    @property
    def uuids(self) -> list[bytes]:
        """Every uuid once."""
        return list(self._by_uuid)

    def rows_of(self, uuid: bytes) -> tuple[int, ...]:
        """The rows of a chunk's entries, oldest first."""
        return self._by_uuid.get(uuid, ())

    def rows_of_text(self, key: int) -> tuple[int, ...]:
        """The rows whose content may have this `text_hash`."""
        return self._by_text.get(key, ())

    def has_digest(self, word: int) -> bool:
        """Whether an entry came from a message with this `digest_word`."""
        return word in self._digests

    def rotated_to(self, path: Path) -> None:
        """The file was renamed; readers that were about to open the old name find it under the new one."""
        self._paths = (path, *self._paths)


class Sealed(Segment):
    """A full segment that has an index: columns in memory, contents and vectors on disk."""

    def __init__(
        self, files: Files, path: Path, header: Header, rows: Records, digests: UInts, *, bin_crc: int, vouched: Vouched
    ) -> None:
        super().__init__(files, [path], header)
        self.rows = rows
        self.digests = digests
        self.bin_crc = bin_crc
        """Of the whole file when it was sealed."""
        self.vouched = vouched
        """What its own index file has to be."""

    @property
    def memory_bytes(self) -> int:
        """What the columns take."""
        return self.rows.nbytes + self.digests.nbytes

    def vectors(self, rows: Rows) -> tuple[Rows, Floats, list[StoreError]]:
        """The readable ones of `rows`, their vectors from disk (n, dimension), and what went wrong with the others."""
        found, vectors, problems = [], [], []
        for row in rows.tolist():
            try:
                vectors.append(self.read(self.rows[row]).embedding)
                found.append(row)
            except StoreError as error:
                problems.append(error)
        matrix: NDArray[np.float32] = np.array(vectors, dtype=np.float32).reshape(len(found), self.header.dimension)
        return np.array(found, dtype=np.intp), matrix, problems
