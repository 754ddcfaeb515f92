"""Indexes over sealed segments: their files, and how they are built, merged, loaded at the first search, and searched.

Rule: an index covers one segment, whose vectors are read from its log and scanned, or several neighbouring ones
(merged_NNNN_MMMM.ivf). Its labels number the rows of its segments consecutively. A merged one finds the *plain* chunks
(Active, multiplier 1). Live chunks that it lacks or ranks wrongly (adjusted ones, and those unreadable when it was
built) are *extras*: they are scanned, so that no search misses anything.

All files are derived from the `.bin` and can be removed at any time. One is opened only after its checksum was
verified, because a damaged index returns wrong results. A `.meta` vouches for the files of its name and is written
last. Without a valid one a segment counts as unsealed, and a merged index as absent. A `.words` file, all that recall
needs besides vectors, vouches for itself: it lists its segments as they were when it was written, and is rebuilt if
they differ.

    .meta:   | header (magic "memd.idx", else that of the .bin) | one record |
    .words:  | header (magic "memd.idx", of the first segment)  | one record |

The payload of a `.meta` is a MessagePack map with the fields of `SegmentMeta` (seg_NNNN.meta) or `MergedMeta`
(merged_NNNN_MMMM.meta, whose header names the first segment covered). `rows` is an array of `columns.ROW` (72 bytes per
entry, in the order of the file; 56 in version 1), `digests` one of u64 (the first 8 bytes of every message digest, each
once). The payload of a `.words` has the fields of `_Stored`: the columns of `SealedColumns`.

An index is merged with all newer ones once they cover more than a `RATIO`th of its segments. So n segments are searched
through at most 1 + log5 n indexes, and each chunk is indexed about 2 log5 n times in its life, 60 µs each time.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry, Status
from memd.errors import CorruptFile, ShortLogFile, StoreError
from memd.store.claim import Claim
from memd.store.disk import FileChecksum, LocalDisk
from memd.store.index.vectors import CompactIndex, VisibleLists, best_rows, multipliers, products, sample_size
from memd.store.layout import TopicLayout
from memd.store.lexical.postings import FORMAT, SealedColumns
from memd.store.log.columns import ROW, Bits, Floats, Rows
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    MAGIC_META,
    META_VERSION,
    Header,
    decode_any_header,
    decode_header,
    encode_header,
    encode_long,
    encode_record,
    long_payload,
    payload_at,
)
from memd.store.log.segment import GrowingSegment, SealedSegment, SegmentMeta

READ_AT_ONCE = 250
_COLUMNS = {
    "terms": "<u4",
    "starts": "<u4",
    "rows": "<u4",
    "impacts": "u1",
    "tokens": "<u2",
    "follows": "?",
    "shown_starts": "<u4",
    "shown_uuids": "<u8",
    "mean_sum": "<f8",
}


class MergedMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The `.meta` of a merged index."""

    segment_ids: tuple[int, ...]
    """Ascending. Labels number the rows of these segments consecutively."""
    counts: tuple[int, ...]
    """Rows of each segment."""
    bin_crcs: tuple[int, ...]
    """CRC32 of each segment's .bin when it was sealed."""
    built_at: int
    """Microseconds since the epoch."""
    hnsw_bytes: int = 0
    hnsw_crc: int = 0
    """Size and CRC32 of the .ivf."""

    @property
    def checksum(self) -> FileChecksum:
        """Size and CRC32 as one value."""
        return FileChecksum(self.hnsw_bytes, self.hnsw_crc)


AnyMeta = TypeVar("AnyMeta", SegmentMeta, MergedMeta)

_encoder = msgspec.msgpack.Encoder()


def encode_meta(log_header: Header, meta: SegmentMeta | MergedMeta) -> bytes:
    """Encode a `.meta`. `log_header` is that of the (first) segment's .bin."""
    header = encode_header(msgspec.structs.replace(log_header, magic=MAGIC_META, version=META_VERSION))
    return header + encode_record(_encoder.encode(meta))


def has_meta(files: LocalDisk, layout: TopicLayout, segment_id: int) -> bool:
    """Return whether a segment has a `.meta`, even a damaged one. Version 1 lacks columns, and does not count."""
    path = layout.meta(segment_id)
    header = None if files.size(path) is None else decode_any_header(files.read_at(path, 0, HEADER_BYTES))
    return files.size(path) is not None and (header is None or header.version >= META_VERSION)


def read_segment_meta(files: LocalDisk, layout: TopicLayout, segment_id: int) -> tuple[Header, SegmentMeta]:
    """Read a segment's `.meta` and the header of its .bin, if the two fit together. Raises CorruptFile: the `.meta` is
    damaged or does not fit (ShortLogFile if a part of the .bin is missing); ForeignFile: it has a newer format;
    StoreError: it cannot be read."""
    path = layout.meta(segment_id)
    header, meta = _read(files, path, SegmentMeta)
    log = layout.bin(segment_id)
    log_header = decode_header(files.read_at(log, 0, HEADER_BYTES), magic=MAGIC_LOG, name=str(log))
    fits = (
        meta.segment_id == segment_id == header.segment_id
        and msgspec.structs.replace(header, magic=MAGIC_LOG, version=log_header.version) == log_header
        and len(meta.rows) == meta.chunk_count * ROW.itemsize
    )
    log_bytes = files.size(log) or 0
    if fits and log_bytes < meta.bin_bytes:
        raise ShortLogFile(
            f"{log}: has {log_bytes:,} of its {meta.bin_bytes:,} bytes; what the rest held is lost unless a backup has "
            "it: stop memd and put that file back",
            (log_bytes, meta.bin_bytes),
        )
    if not fits or log_bytes != meta.bin_bytes:
        raise CorruptFile(f"{path}: describes another file than {log.name}")
    return log_header, meta


def read_merged_meta(files: LocalDisk, layout: TopicLayout, first: int, last: int) -> MergedMeta | None:
    """Read the `.meta` of a merged index; None if it cannot be read."""
    try:
        return _read(files, layout.merged_meta(first, last), MergedMeta)[1]
    except StoreError:
        return None


def with_merged(claim: Claim, indexes: Iterable[SealedIndex]) -> list[SealedIndex]:
    """Return the indexes to search instead of these over single segments, so that each segment is covered once, oldest
    first. Removes the files of useless merged indexes."""
    files, layout = claim.files, claim.layout
    found = {index.segment_ids[0]: index for index in indexes}
    for first, last in sorted(layout.merges(files), key=lambda pair: pair[0] - pair[1]):  # the widest first
        meta = read_merged_meta(files, layout, first, last)
        single = (found.get(number) for number in ([] if meta is None else meta.segment_ids))
        covered = [one.segments[0] for one in single if one is not None and len(one.segments) == 1]
        if meta is None or not _fits(files, layout, (first, last), meta, covered):
            claim.remove(layout.merged(first, last))
            continue
        found = {number: index for number, index in found.items() if number not in meta.segment_ids}
        found[first] = SealedIndex(files, layout, covered, checksum=meta.checksum)
    return [found[number] for number in sorted(found)]


def _fits(
    files: LocalDisk, layout: TopicLayout, name: tuple[int, int], meta: MergedMeta, covered: Sequence[SealedSegment]
) -> bool:
    """Return whether a merged index covers exactly these segments. Its checksum is verified on loading."""
    ids = tuple(segment.segment_id for segment in covered)
    return (
        len(ids) > 1
        and ids == meta.segment_ids
        and (ids[0], ids[-1]) == name
        and meta.counts == tuple(len(segment.rows) for segment in covered)
        and meta.bin_crcs == tuple(segment.bin_crc for segment in covered)
        and files.size(layout.merged_index(*name)) == meta.hnsw_bytes
    )


def _read(files: LocalDisk, path: Path, kind: type[AnyMeta]) -> tuple[Header, AnyMeta]:
    data = files.read(path)
    header = decode_header(data, magic=MAGIC_META, name=str(path))
    payload = payload_at(data, HEADER_BYTES)
    if payload is None:
        raise CorruptFile(f"{path}: does not match its checksum")
    try:
        return header, msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptFile(f"{path}: is not what it should be ({error})") from error


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    segments: tuple[tuple[int, int, int], ...]
    """Number, row count and CRC-32 of the .bin when sealed, per segment."""
    columns: dict[str, bytes]
    length_sum: int
    mean_count: int


def read_words(files: LocalDisk, layout: TopicLayout, segments: Sequence[SealedSegment]) -> SealedColumns | None:
    """Read the `.words` of these segments; None unless it is intact and matches them."""
    path = layout.words(segments[0].segment_id, segments[-1].segment_id)
    if files.size(path) is None:
        return None
    try:
        data = files.read(path)
        decode_header(data, magic=MAGIC_META, name=str(path))
        payload = long_payload(data)
        stored = None if payload is None else msgspec.msgpack.decode(payload, type=_Stored)
    except (StoreError, msgspec.MsgspecError):
        return None
    if stored is None or stored.format != FORMAT or stored.segments != _identity(segments):
        return None
    columns = {name: np.frombuffer(stored.columns[name], kind) for name, kind in _COLUMNS.items()}
    return SealedColumns(**columns, length_sum=stored.length_sum, mean_count=stored.mean_count)


def columns_from_log(segment: SealedSegment, counted: Callable[[Entry], Entry]) -> SealedColumns:
    """Build the columns of a segment from its records. `counted` adds the fields that old entries lack: slow."""
    starts = range(0, len(segment.rows), READ_AT_ONCE)
    entries = (one for start in starts for one in segment.read_many(segment.rows[start : start + READ_AT_ONCE]))
    return SealedColumns.of(counted(one) if one is not None and one.content else one for one in entries)


def _identity(segments: Sequence[SealedSegment]) -> tuple[tuple[int, int, int], ...]:
    return tuple((one.segment_id, len(one.rows), one.bin_crc) for one in segments)


RATIO = 4
SMOOTHING = 0.1
"""Weight of the latest value in a gauge."""
BATCH_VECTORS = 500
"""Vectors indexed between two pauses for queries: 20 to 50 ms of work."""


class Scanned(NamedTuple):
    """Vectors that a search compares one by one."""

    labels: Rows
    """Ascending."""
    vectors: Floats
    """(n, dimension)"""


class SealedIndex:
    """One index and its extras. Any thread may search."""

    def __init__(
        self,
        files: LocalDisk,
        layout: TopicLayout,
        segments: Sequence[SealedSegment],
        *,
        checksum: FileChecksum | None = None,
        matrix: Floats | None = None,
    ) -> None:
        """`segments`: those covered; `checksum`: of a merged index's file; `matrix`: see `SealedSegment.matrix`, if it
        is in memory already."""
        self.segments = tuple(segments)
        self.segment_ids = tuple(segment.segment_id for segment in segments)
        """Numbers of the covered segments, ascending."""
        first, last = self.segment_ids[0], self.segment_ids[-1]
        self.path = layout.bin(first) if checksum is None else layout.merged_index(first, last)
        """The index's file; for a single segment its log."""
        self._files, self._checksum = files, checksum
        self._numbers = np.array(self.segment_ids, dtype=np.intp)
        self._starts = np.cumsum([0, *(len(segment.rows) for segment in segments)])
        self._loading = threading.Lock()
        """Taken before the lock of a topic's state."""
        self._compact: CompactIndex | None = None
        """None for a single segment, and until it is loaded."""
        self._scanned = None if matrix is None else Scanned(np.arange(len(matrix)), matrix)
        """All rows of a single segment, zeros for those without a readable vector; extras of a merged index. None until
        it is loaded."""
        self.search_ms: float | None = None
        """A gauge: milliseconds per search, smoothed over the latest; None before the first."""
        self.columns: SealedColumns | None = None
        """Words, tokens and neighbours of its rows, by label; None until they are built or read."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def is_loaded(self) -> bool:
        """Whether a search can begin without loading the file."""
        return self._scanned is not None

    @property
    def matrix(self) -> Floats | None:
        """The vectors of all rows by label, zeros for those without a readable one; None if it is not loaded, or has
        too many to be scanned."""
        return self._scanned.vectors if self._scanned is not None and self._compact is None else None

    @property
    def memory_bytes(self) -> int:
        """Approximate size in memory."""
        scanned = 0 if self._scanned is None else self._scanned.vectors.nbytes
        held = [one.memory_bytes for one in (self._compact, self.columns) if one is not None]
        return 2 * len(self) + scanned + sum(held)

    def column(self, name: str) -> NDArray[np.generic]:
        """Return a column of `columns.ROW`, per label."""
        return np.concatenate([segment.rows[name] for segment in self.segments])

    def load(self, dead: Bits) -> list[StoreError]:
        """Load the index, without these dead labels, unless it is loaded. Return the errors of unreadable vectors in
        the log. Raises StoreError: the file of a merged index cannot be read (CorruptFile if it has changed since it
        was written)."""
        with self._loading:
            if self.is_loaded:
                return []
            if self._checksum is None:
                matrix, problems = self.segments[0].matrix()
                self._scanned = Scanned(np.arange(len(self)), matrix)
                return problems
            compact = CompactIndex.load(self._files, self.path, self._checksum, size=len(self))
            extras, problems = self.read_vectors(dead | compact.held)
            self._compact, self._scanned = compact, extras
            return problems

    @property
    def starts(self) -> Rows:
        """The first label of each segment."""
        return self._starts[:-1]

    def places_of(self, labels: Rows) -> tuple[Rows, Rows]:
        """Return the segment ids and the rows of labels."""
        positions = self._starts.searchsorted(labels, side="right") - 1
        return self._numbers[positions], labels - self._starts[positions]

    def searched(self, dead: Bits) -> tuple[Scanned, VisibleLists | None]:
        """Return what a search without these labels reads: vectors to scan, and lists of a merged index. Raises
        StoreError: it cannot be loaded."""
        self.load(dead)
        assert self._scanned is not None, "it was loaded, and stays so"
        return self._scanned, None if self._compact is None else self._compact.without(dead)

    def nearest(self, queries: Floats, k: int, dead: Bits, scanned: Scanned, lists: VisibleLists | None) -> Rows:
        """Return labels that include the best `k` live ones by score for each query, unordered. `scanned`, `lists`: see
        `searched`."""
        started = time.perf_counter()
        live = ~dead[scanned.labels]
        labels = scanned.labels[live]
        weights = self.multipliers[labels]
        scores = (np.maximum(cosines, 0) * weights for cosines in products(scanned.vectors[live], queries))
        found = np.unique(np.concatenate([labels[:0], *(labels[best_rows(one, k)] for one in scores)]))
        if self._compact is not None and lists is not None:
            found = np.concatenate([self._compact.search(queries, k, lists), found])
        latest, before = (time.perf_counter() - started) * 1000, self.search_ms
        self.search_ms = latest if before is None else before + SMOOTHING * (latest - before)
        return found

    def vectors_of(self, labels: Rows, scanned: Scanned, lists: VisibleLists | None) -> Floats:
        """Return the vectors of these labels, shape (n, dimension), without reading the log; zeros if none is in
        memory. Those in a merged index are exact to about 1e-4. `scanned`, `lists`: see `searched`."""
        found: Floats = np.zeros((len(labels), self.segments[0].header.dimension), np.float32)
        if self._compact is not None and lists is not None:
            found = self._compact.stored(labels)
        if len(scanned.labels):
            at = np.minimum(scanned.labels.searchsorted(labels), len(scanned.labels) - 1)
            is_scanned = scanned.labels[at] == labels
            found[is_scanned] = scanned.vectors[at[is_scanned]]
        return found

    def read_vectors(self, but: Bits) -> tuple[Scanned, list[StoreError]]:
        """Read the vectors of all labels without these from the log: slow. Return the readable ones, and the errors of
        the others."""
        wanted = np.flatnonzero((self.column("status") == Status.ACTIVE) & ~but)
        labels, vectors, problems = list[Rows](), list[Floats](), list[StoreError]()
        for segment, start, end in zip(self.segments, self._starts, self._starts[1:], strict=False):
            rows, matrix, errors = segment.vectors(wanted[(wanted >= start) & (wanted < end)] - start)
            labels.append(rows + start)
            vectors.append(matrix)
            problems += errors
        return Scanned(np.concatenate(labels), np.concatenate(vectors)), problems

    @cached_property
    def multipliers(self) -> Floats:
        """The utility multipliers in the log, by label."""
        return multipliers(self.column("utility_steps").astype(np.int8)).astype(np.float32)


def seal(claim: Claim, segment: GrowingSegment) -> tuple[SealedSegment, list[SealedIndex]]:
    """Write the columns of a full segment, and its words if its records have them. Return the segment as read from
    disk, and its index if its vectors are searched. Raises StoreWriteFailed: some of it was not written; StoreError:
    the .bin cannot be read."""
    files, layout = claim.files, claim.layout
    segment_id, rows, ids = segment.segment_id, segment.rows, segment.rows["canonical_id"]
    log = files.read(layout.bin(segment_id))
    meta = SegmentMeta(
        segment_id=segment_id,
        chunk_count=len(rows),
        canonical_id_range=(int(ids.min()), int(ids.max())) if len(ids) else (0, 0),
        sealed_at=int(ids.max(initial=0)),
        bin_bytes=len(log),
        bin_crc=zlib.crc32(log),
        gaps=tuple(segment.gaps),
        rows=rows.tobytes(),
        digests=segment.digests.tobytes(),
    )
    claim.write(layout.meta(segment_id), encode_meta(segment.header, meta))
    sealed = SealedSegment(files, layout, segment.header, meta)
    if not segment.searchable:
        return sealed, []
    index = SealedIndex(files, layout, [sealed], matrix=segment.matrix)
    if segment.columns.is_whole:
        publish_words(claim, index, [segment.columns.sealed()])
    return sealed, [index]


def publish_words(claim: Claim, index: SealedIndex, parts: Sequence[SealedColumns]) -> None:
    """Set the words of an index, and write them. Raises StoreWriteFailed: the next start has to rebuild them."""
    index.columns = columns = parts[0] if len(parts) == 1 else SealedColumns.joined(parts)
    stored = _Stored(
        format=FORMAT,
        segments=_identity(index.segments),
        columns={name: getattr(columns, name).astype(kind).tobytes() for name, kind in _COLUMNS.items()},
        length_sum=columns.length_sum,
        mean_count=columns.mean_count,
    )
    header = msgspec.structs.replace(index.segments[0].header, magic=MAGIC_META, version=META_VERSION)
    path = claim.layout.words(index.segment_ids[0], index.segment_ids[-1])
    claim.write(path, encode_header(header) + encode_long(_encoder.encode(stored)))


def write_merged(
    claim: Claim, segments: Sequence[SealedSegment], dead: Bits, *, built_at: int, give_way: Callable[[], None]
) -> SealedIndex:
    """Build and publish the index over `segments`, without the labels that are `dead`. Very slow.

    `give_way` is called between batches and returns when no query is waiting. Raises StoreWriteFailed: at most an .ivf
    without a .meta that vouches for it is left behind.
    """
    plain = np.concatenate([_plain(segment) for segment in segments])
    index = _build(segments, plain & ~dead, give_way)
    segment_ids = tuple(segment.segment_id for segment in segments)
    first, last = segment_ids[0], segment_ids[-1]
    vouching = claim.layout.merged_meta(first, last)
    claim.remove([vouching])  # one left by an earlier index of this name must not vouch for the new file
    checksum = claim.write(claim.layout.merged_index(first, last), index.pieces())
    meta = MergedMeta(
        segment_ids=segment_ids,
        counts=tuple(len(segment.rows) for segment in segments),
        bin_crcs=tuple(segment.bin_crc for segment in segments),
        built_at=built_at,
        hnsw_bytes=checksum.bytes,
        hnsw_crc=checksum.crc,
    )
    claim.write(vouching, encode_meta(segments[0].header, meta))
    merged = SealedIndex(claim.files, claim.layout, segments, checksum=checksum)
    merged.load(dead)  # mapped; the memory of the building is freed
    return merged


def merged_files(layout: TopicLayout, indexes: Iterable[SealedIndex]) -> list[Path]:
    """Return the files of the indexes among these that cover several segments."""
    spans = [(one.segment_ids[0], one.segment_ids[-1]) for one in indexes if len(one.segment_ids) > 1]
    return [path for span in spans for path in layout.merged(*span)]


def _build(segments: Sequence[SealedSegment], wanted: Bits, give_way: Callable[[], None]) -> CompactIndex:
    """Index the readable labels among `wanted`."""

    def vectors(labels: Rows) -> Iterator[tuple[Rows, Floats]]:
        start = 0
        for segment in segments:
            rows = labels[(labels >= start) & (labels < start + len(segment.rows))] - start
            for at in range(0, len(rows), BATCH_VECTORS):
                give_way()
                found, matrix, _ = segment.vectors(rows[at : at + BATCH_VECTORS])
                yield found + start, matrix
            start += len(segment.rows)

    labels = np.flatnonzero(wanted)
    chosen = labels[:: max(1, len(labels) // max(1, sample_size(len(labels))))]
    none = np.empty((0, segments[0].header.dimension), dtype=np.float32)
    sample = np.concatenate([none, *(matrix for _, matrix in vectors(chosen))])
    return CompactIndex.build(sample, vectors(labels), count=len(labels), size=len(wanted))


def _plain(segment: SealedSegment) -> Bits:
    rows = segment.rows
    return np.asarray((rows["status"] == Status.ACTIVE) & (rows["utility_steps"] == 0), dtype=np.bool_)
