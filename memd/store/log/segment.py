"""A log file in memory: growing, scanned exactly, or sealed, searched by an index; and the pending chunks: said, but
not in the log until they are embedded.

Rule: only a growing segment gains rows, and a row's columns and vector never change. Whether a row is live is not a
property of the segment but of a view of it at one point in time. Row numbers follow the order of the file.

A pending chunk already has its final uuid and public id, so it can be shown and named in a correction at once. Until
the model embeds it, it is found by its words and by its vector from the question table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET

from memd.caching import ByteCache
from memd.entries import Draft, Entry, Status
from memd.errors import CorruptFile, ErasedMeanwhile, StoreError
from memd.store.claim import Claim
from memd.store.disk import LocalDisk
from memd.store.layout import TopicLayout
from memd.store.lexical.postings import GrowingColumns, copied, grown
from memd.store.log.columns import ROW, Bits, Floats, Records, Rows, UInts, digest_word, rows_from, text_hash
from memd.store.log.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    MAGIC_LOG,
    Header,
    ModelId,
    Span,
    decode_entry,
    decode_header,
    encode_header,
    payload_at,
    topic_tag,
    vector_key,
)

_CAPACITY_MIN = 4
"""Rows for which there is room at first: many topics have a few, and a search over all of them opens each."""
_TABLE_BYTES = 750
"""Approximate bytes per entry in the tables of a growing segment."""


_READ_BYTES = 1_000
"""Bytes of a cached entry besides its vector and content (measured with tracemalloc)."""
SAME_APPEND_US = 1_000_000
"""An Update appends the replacements of chunks and their Deprecated entries together, microseconds apart."""
ENTRIES_READ: ByteCache[tuple[int, int], Entry] = ByteCache(8 * 1024 * 1024)
"""Entries read last, by segment and canonical_id: successive questions show mostly the same entries."""
_numbers = itertools.count()
_NO_ROWS = bytearray()


def read_entry(files: LocalDisk, paths: Sequence[Path], record: np.void, *, dimension: int | None) -> Entry:
    """Read and check the entry of one `ROW` from the first of `paths` that has it.

    There are several because a file is renamed when its segment is full, perhaps at this moment. Raises CorruptFile:
    the bytes are no longer that entry; StoreError: the file cannot be read.
    """
    offset, length = int(record["offset"]), int(record["length"])
    problem: StoreError = CorruptFile(
        f"{paths[0]}: entry {record['canonical_id']} at offset {offset} cannot be read; "
        "`memd verify` says what else is damaged"
    )
    for path in paths:
        try:
            data = files.read_at(path, offset, FRAME_BYTES + length)
            entry = _decoded(data, int(record["canonical_id"]), dimension)
        except StoreError as error:
            problem = error if files.size(path) is not None else problem
            continue
        if entry is not None and entry.erased is not UNSET and not record["is_erased"]:
            problem = ErasedMeanwhile(f"{path}: the text of entry {entry.canonical_id} was erased a moment ago")
        elif entry is not None:
            return entry
    raise problem


def _decoded(record: bytes, canonical_id: int, dimension: int | None) -> Entry | None:
    """Return the entry of a record; None if it has another id. Raises CorruptFile if it is no entry."""
    payload = payload_at(record, 0)
    entry = decode_entry(payload, dimension=dimension) if payload is not None else None
    return entry if entry is not None and entry.canonical_id == canonical_id else None


class LogSegment:
    """The shared part of both kinds of segment: a file and its header."""

    def __init__(self, files: LocalDisk, paths: Sequence[Path], header: Header) -> None:
        self._files = files
        self._paths = tuple(paths)
        self.header = header
        self.segment_id = header.segment_id
        self._number = next(_numbers)
        self.is_told = False
        """Whether an unreadable entry was logged already; once is enough."""

    def read(self, record: np.void) -> Entry:
        """Read the entry of one `ROW`; see `read_entry`."""
        return read_entry(self._files, self._paths, record, dimension=self.header.dimension)

    def read_many(self, records: Records) -> list[Entry | None]:
        """Read the entries of many rows at once; None for a row that needs `read`, which tries all paths and raises."""
        keys = [(self._number, one) for one in records["canonical_id"].tolist()]
        known = ENTRIES_READ.get_many(keys)
        found: list[Entry | None] = [known.get(key) for key in keys]
        missing = [place for place, one in enumerate(found) if one is None]
        if not missing:
            return found
        places = records["offset"][missing].tolist(), (records["length"][missing] + FRAME_BYTES).tolist()
        try:
            data = self._files.read_pieces(self._paths[0], list(zip(*places, strict=True)))
        except StoreError:
            return found
        for place, record, is_erased in zip(missing, data, records["is_erased"][missing].tolist(), strict=True):
            try:
                entry = _decoded(record, keys[place][1], self.header.dimension)
            except StoreError:
                continue
            if entry is not None and (is_erased or entry.erased is UNSET):
                found[place] = entry
                size = _READ_BYTES + len(entry.vector) + sys.getsizeof(entry.content)
                ENTRIES_READ.put(keys[place], entry, size)
        return found


class GrowingSegment(LogSegment):
    """The active segment, or a full one whose index is not built yet.

    One thread adds rows. Other threads read rows below a count that a snapshot has published.
    """

    def __init__(self, files: LocalDisk, paths: Sequence[Path], header: Header, *, searchable: bool) -> None:
        super().__init__(files, paths, header)
        self.searchable = searchable
        self.gaps: list[tuple[int, int]] = []
        """Unreadable ranges of the file."""
        self.count = 0
        self._rows = np.zeros(_CAPACITY_MIN, dtype=ROW)
        self._matrix = np.zeros((_CAPACITY_MIN, header.dimension), dtype=np.float32)
        self._by_uuid: dict[bytes, tuple[int, ...]] = {}
        self._by_text = defaultdict[int, bytearray](bytearray)
        self._digests = defaultdict[int, bytearray](bytearray)
        """The rows with a given text, or with text of a given message, 32 bits each: thousands may share one."""
        self._completed: dict[int, None] = {}
        self._said: list[tuple[int, ...]] = []
        self.columns = GrowingColumns()
        """Words, tokens and neighbours of its rows."""

    def extend(self, entries: Sequence[Entry], spans: Sequence[Span]) -> None:
        """Append a row for each entry."""
        added = range(self.count, self.count + len(entries))
        while added.stop > len(self._rows):  # readers keep the old arrays
            self._rows, self._matrix = grown(self._rows), grown(self._matrix)
        rows = rows_from(entries, spans)
        self._rows[added.start : added.stop] = rows
        vectors = np.frombuffer(b"".join(entry.vector for entry in entries), dtype="<f4")
        is_active = rows["status"] == Status.ACTIVE
        self._matrix[added.start : added.stop][is_active] = vectors.reshape(
            np.count_nonzero(is_active), self.header.dimension
        )
        for row, entry, key in zip(added, entries, rows["text_hash"].tolist(), strict=True):
            self._by_uuid[entry.uuid] = (*self._by_uuid.get(entry.uuid, ()), row)
            self._by_text[key] += row.to_bytes(4, sys.byteorder)
            self._said.append(tuple(dict.fromkeys(map(digest_word, entry.digests))))
            for word in self._said[-1]:
                self._digests[word] += row.to_bytes(4, sys.byteorder)
            self._completed.update(dict.fromkeys(map(digest_word, entry.completed)))
        self.columns.extend(entries)
        self.count = added.stop

    @property
    def memory_bytes(self) -> int:
        """Approximate size of the columns, the vectors and the tables over them."""
        return self._rows.nbytes + self._matrix.nbytes + _TABLE_BYTES * self.count + self.columns.memory_bytes

    @property
    def rows(self) -> Records:
        """The columns so far; a row never changes."""
        return self._rows[: self.count]

    @property
    def matrix(self) -> Floats:
        """The vectors so far, shape (count, dimension); zeros for Deprecated entries."""
        return self._matrix[: self.count]

    @property
    def digests(self) -> UInts:
        """The first word of the digest of every message that it completes, each once."""
        return np.fromiter(self._completed, dtype=np.uint64, count=len(self._completed))

    def rows_of(self, uuid: bytes) -> tuple[int, ...]:
        """Return the rows of a chunk's entries, oldest first."""
        return self._by_uuid.get(uuid, ())

    def known(self, uuids: Iterable[bytes]) -> list[bytes]:
        """Return the uuids among these that have an entry."""
        return [uuid for uuid in uuids if uuid in self._by_uuid]

    def rows_of_text(self, key: int) -> list[int]:
        """Return the rows whose content has this `text_hash`."""
        rows: list[int] = copied(self._by_text.get(key, _NO_ROWS)).tolist()
        return rows

    def has_digest(self, word: int) -> bool:
        """Return whether it completes a message with this `digest_word`."""
        return word in self._completed

    def rows_of_digest(self, word: int) -> list[int]:
        """Return the rows that have text of a message with this `digest_word`."""
        rows: list[int] = copied(self._digests.get(word, _NO_ROWS)).tolist()
        return rows

    def rows_of_messages(self, words: frozenset[int]) -> list[int]:
        """Return the rows whose text comes from messages, all of them with these `digest_word`s."""
        rows = {row for word in words for row in self.rows_of_digest(word)}
        return [row for row in rows if words.issuperset(self._said[row])]

    def rotated_to(self, path: Path) -> None:
        """Note that the file was renamed; readers that still try the old name fall back to the new one."""
        self._paths = (path, *self._paths)


class SegmentMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The `.meta` of one segment; sizes in bytes, times in microseconds since the epoch."""

    segment_id: int
    chunk_count: int
    canonical_id_range: tuple[int, int]
    """Lowest and highest; (0, 0) without entries."""
    sealed_at: int
    bin_bytes: int
    bin_crc: int
    gaps: tuple[tuple[int, int], ...]
    """(start, end) of the unreadable bytes of the .bin."""
    rows: bytes
    digests: bytes

    @property
    def columns(self) -> Records:
        """The `rows`."""
        return np.frombuffer(self.rows, dtype=ROW)


class SealedSegment(LogSegment):
    """A full segment whose columns are in a `.meta` and in memory; contents and vectors are on disk."""

    def __init__(self, files: LocalDisk, layout: TopicLayout, header: Header, meta: SegmentMeta) -> None:
        super().__init__(files, [layout.bin(meta.segment_id)], header)
        self.rows = meta.columns
        self.digests: UInts = np.frombuffer(meta.digests, dtype=np.uint64)
        self.bin_crc = meta.bin_crc
        """CRC32 of the whole file when it was sealed."""

    @property
    def memory_bytes(self) -> int:
        """Size of the columns."""
        return self.rows.nbytes + self.digests.nbytes

    def matrix(self) -> tuple[Floats, list[StoreError]]:
        """Read the vectors of all rows, (n, dimension), with zeros for missing and unreadable ones, and the errors of
        the latter. Raises StoreError: the file cannot be read."""
        matrix: Floats = np.zeros((len(self.rows), self.header.dimension), dtype=np.float32)
        active = np.flatnonzero(self.rows["status"] == Status.ACTIVE)
        data, key = self._files.read(self._paths[0]), vector_key(self.header.dimension)
        starts, lengths = self.rows["offset"][active].tolist(), self.rows["length"][active].tolist()
        places = [data.find(key, start, start + length) for start, length in zip(starts, lengths, strict=True)]
        if zlib.crc32(data) != self.bin_crc or -1 in places:  # each record by itself
            found, vectors, problems = self.vectors(active)
            matrix[found] = vectors
            return matrix, problems
        for row, place in zip(active.tolist(), places, strict=True):
            matrix[row] = np.frombuffer(data, "<f4", self.header.dimension, place + len(key))
        return matrix, []

    def vectors(self, rows: Rows) -> tuple[Rows, Floats, list[StoreError]]:
        """Return the readable rows among these, their vectors (n, dimension), and the errors of the others."""
        found, vectors, problems = [], [], []
        for row, entry in zip(rows.tolist(), self.read_many(self.rows[rows]), strict=True):
            try:
                vectors.append((entry or self.read(self.rows[row])).embedding)
                found.append(row)
            except StoreError as error:
                problems.append(error)
        matrix: Floats = np.array(vectors, dtype=np.float32).reshape(len(found), self.header.dimension)
        return np.array(found, dtype=np.intp), matrix, problems


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentView:
    """The first rows of one segment at one point in time; the arrays are never written to."""

    segment: GrowingSegment | SealedSegment
    dead: Bits
    """Superseded or Deprecated, per row."""

    @functools.cached_property
    def rows(self) -> Records:
        """The columns."""
        return self.segment.rows[: len(self.dead)]

    @functools.cached_property
    def matrix(self) -> Floats | None:
        """Vectors of a growing segment, per row; None if there is an index, or if another model wrote the vectors."""
        segment = self.segment
        if isinstance(segment, GrowingSegment) and segment.searchable:
            return segment.matrix[: len(self.dead)]
        return None

    @property
    def live_count(self) -> int:
        """The number of live rows."""
        return len(self.dead) - int(np.count_nonzero(self.dead))

    @functools.cached_property
    def has_erased(self) -> bool:
        """Whether the text of any row was erased."""
        return bool(self.rows["is_erased"].any())

    @functools.cached_property
    def canonical_ids(self) -> UInts:
        """The rows' canonical_ids, ascending; a contiguous copy, which is quick to search."""
        return np.ascontiguousarray(self.rows["canonical_id"], dtype=np.uint64)

    @functools.cached_property
    def taken_out(self) -> UInts:
        """First halves of the uuids of chunks with a Deprecated entry, and of the replacement of each, (2, n): the
        chunk stored after it within `SAME_APPEND_US`; 0 if none. Erased chunks are not included."""
        rows, ids = self.rows, self.canonical_ids.astype(np.int64)
        gone = np.flatnonzero((rows["status"] == Status.DEPRECATED) & (rows["is_erased"] == 0))
        other = np.append(np.flatnonzero(rows["status"] != Status.DEPRECATED), 0)
        behind = other[other[:-1].searchsorted(gone)]
        is_of_it = (behind > gone) & (ids[behind] - ids[gone] < SAME_APPEND_US)
        uuids = rows["uuid_high"]
        return np.stack([uuids[gone], np.where(is_of_it, uuids[behind], 0)]).astype(np.uint64)

    @functools.cached_property
    def changed(self) -> UInts:
        """First halves of the uuids of live chunks that were changed or restored since they were stored, (n,)."""
        rows = self.rows
        is_changed = ~self.dead & (rows["canonical_id"] != rows["origin_id"])
        return np.ascontiguousarray(rows["uuid_high"][is_changed], dtype=np.uint64)

    @functools.cached_property
    def chronology(self) -> tuple[UInts, Rows]:
        """The live rows in the order in which their chunks were first stored: ascending origin_ids, and the rows."""
        live = np.flatnonzero(~self.dead)
        origins = self.rows["origin_id"][live].astype(np.uint64)
        order = np.argsort(origins, kind="stable")
        return origins[order], live[order]


def read_header(files: LocalDisk, path: Path) -> Header | None:
    """Read the header of a log file; None if there is no such file or the header cannot be read."""
    try:
        return decode_header(files.read_at(path, 0, HEADER_BYTES), magic=MAGIC_LOG, name=str(path))
    except StoreError:
        return None


def new_header(layout: TopicLayout, model: ModelId, segment_id: int) -> Header:
    """Return the header of a log file of this topic that `model` writes."""
    return Header(
        magic=MAGIC_LOG,
        dimension=model.dimension,
        segment_id=segment_id,
        fingerprint=model.fingerprint,
        topic=topic_tag(layout.topic_id),
    )


def create_active(claim: Claim, model: ModelId, segment_id: int, *, searchable: bool) -> GrowingSegment:
    """Create a new, empty, durable `active.bin`. `searchable`: this model's vectors are searched now."""
    files, layout = claim.files, claim.layout
    header = new_header(layout, model, segment_id)
    claim.roll("log", encode_header(header))
    files.sync_directory(layout.data_dir)  # the topic's own directory may be new
    return GrowingSegment(files, [layout.active, layout.bin(segment_id)], header, searchable=searchable)


# Pending chunks

PENDING_SEGMENT = -1
"""The segment id in places of pending chunks."""
ROWS_MIN = 64
"""A smaller segment is not rebuilt, however many of its chunks are gone."""
ROWS_AT_ONCE = 16
"""Rows added under one lock, in 5 ms: a message of megabytes has thousands."""


class PendingChunk(msgspec.Struct, frozen=True):
    """A chunk that is not stored yet."""

    draft: Draft
    """The draft to store, without its vector."""
    entry: Entry
    """The entry shown meanwhile; its ids in time are those of the moment it was cut."""


@dataclasses.dataclass(frozen=True, eq=False)
class PendingView(SegmentView):
    """The pending chunks of a topic, at one moment; dead rows are no longer pending."""

    segment: PendingSegment
    chunks: list[PendingChunk]
    """By row. Rows beyond the view's were added later."""

    def __len__(self) -> int:
        return self.live_count

    def __iter__(self) -> Iterator[PendingChunk]:
        return iter(self.by_row().values())

    def by_row(self) -> dict[int, PendingChunk]:
        """The pending chunks by row."""
        return {row: self.chunks[row] for row in np.flatnonzero(~self.dead).tolist()}

    def find(self, uuid: bytes) -> PendingChunk | None:
        """Return the pending chunk with this uuid; None if there is none."""
        return next(self._waiting(self.segment.rows_of(uuid)), None)

    def with_text(self, text: str) -> Iterator[PendingChunk]:
        """Yield the pending chunks that have exactly this text."""
        found = self._waiting(self.segment.rows_of_text(text_hash(text)))
        return (one for one in found if one.draft.content == text)

    def _waiting(self, rows: Iterable[int]) -> Iterator[PendingChunk]:
        return (self.chunks[row] for row in rows if row < len(self.dead) and not self.dead[row])


_NO_DISK = LocalDisk(1)
"""Of segments without a file."""


class PendingSegment(GrowingSegment):
    """The pending chunks, one row each, even if several conversations have it. A writer holds a lock."""

    def __init__(
        self,
        dimension: int = 0,
        vectors_of: Callable[[Sequence[str]], Floats] = lambda texts: np.zeros((len(texts), 0), np.float32),
    ) -> None:
        """`vectors_of`: returns the question table's vectors of texts, (n, dimension), so that they are found by
        meaning at once; (n, 0) without a table."""
        header = Header(
            magic=MAGIC_LOG, dimension=dimension, segment_id=PENDING_SEGMENT, fingerprint="", topic=bytes(8)
        )
        super().__init__(_NO_DISK, (), header, searchable=True)
        self._vectors_of = vectors_of
        self._chunks: list[PendingChunk] = []
        self._holders = np.zeros(ROWS_MIN, np.int32)
        """The number of parts that have each chunk."""
        self._live = 0
        """The number of rows that some part has."""

    def hold(self, chunks: Iterable[PendingChunk], vectors: Floats | None = None) -> None:
        """Note that a part has these chunks. `vectors`: theirs, if known, and all chunks are new here."""
        chunks = list(chunks)
        new = {one.entry.uuid: one for one in chunks if not self.rows_of(one.entry.uuid)}
        if vectors is None:
            vectors = self._vectors_of([one.draft.embedded_text for one in new.values()])
        entries = [
            msgspec.structs.replace(one.entry, vector=vector.tobytes())
            for one, vector in zip(new.values(), vectors, strict=True)
        ]
        self._chunks += new.values()  # before the rows, which tell readers how many there are
        self.extend(entries, [_NOWHERE] * len(entries))
        while len(self._holders) < self.count:
            self._holders = grown(self._holders)
        rows = [self.rows_of(one.entry.uuid)[0] for one in chunks]
        self._live += int(np.count_nonzero(self._holders[rows] == 0))
        self._holders[rows] += 1

    def release(self, chunks: Iterable[PendingChunk]) -> PendingSegment:
        """Note that a part with these chunks is no longer pending. Return the segment to use from now on: an empty one
        if no part has a row of this one."""
        rows = [self.rows_of(chunk.entry.uuid)[0] for chunk in chunks]
        self._holders[rows] -= 1
        self._live -= int(np.count_nonzero(self._holders[rows] == 0))
        return self if self._live else self._empty()

    def _empty(self) -> PendingSegment:
        return PendingSegment(self.header.dimension, self._vectors_of)

    def lacking(self, chunks: Iterable[PendingChunk]) -> int:
        """Return the number of these chunks that have no row."""
        return sum(not self.rows_of(chunk.entry.uuid) for chunk in chunks)

    @property
    def is_mostly_dead(self) -> bool:
        """Whether it should be rebuilt, because no part has most of its rows."""
        return self.count >= ROWS_MIN and 2 * self._live <= self.count

    def renewals(self) -> Iterator[PendingSegment]:
        """Rebuild it from the rows that parts have, in small steps. Yields the new segment, which matches this one
        after the last step; this one may change between steps."""
        new, copied = self._empty(), list[int]()
        while True:
            left = self._holders[: self.count] > 0
            left[copied] = False
            if not (rows := np.flatnonzero(left)[:ROWS_AT_ONCE].tolist()):
                break
            new.hold([self._chunks[row] for row in rows], self._matrix[rows])
            copied += rows
            yield new
        new._holders[: new.count] = self._holders[copied]
        new._live = int(np.count_nonzero(new._holders))

    def view(self) -> PendingView:
        """Return the chunks pending now."""
        dead = self._holders[: self.count] == 0
        return PendingView(self, dead, self._chunks)


_NOWHERE = Span(0, 0)
NOTHING_PENDING = PendingSegment().view()


class UnstoredText:
    """The text of a topic that is not in its log yet, as of one moment. This base class has none."""

    is_partial = False
    """Whether some of it is missing from its chunks, because it was not cut yet."""

    def __bool__(self) -> bool:
        """Return whether there is any, without blocking."""
        return False

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> PendingView:
        """Return its chunks. Called in a thread, because text may be cut first. `but`: digests of messages; text with
        no other messages need not be cut. `until`: a `time.monotonic()` at which cutting ends; text not cut by then is
        left out."""
        return NOTHING_PENDING


NOTHING_UNSTORED = UnstoredText()
