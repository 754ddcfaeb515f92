"""The `.meta` files, each of which vouches for the derived files beside it and says what an index covers; and the
`.words` files, what recall needs of sealed segments beside their vectors.

Rule: derived from the log and never the truth. A `.meta` is written last. Without a valid one, the files it belongs to
count as absent and are rebuilt from the log. Reading one needs no native library. A `.words` file vouches for itself
and names the segments that it is of, as they were when it was written; one that does not fit is made anew.

    .meta:   | header (magic "memd.idx", else that of the .bin) | one record |
    .words:  | header (magic "memd.idx", of the first segment)  | one record |

The payload of a `.meta` is a MessagePack map with the fields of `SegmentMeta` (seg_NNNN.meta) or `MergedMeta`
(merged_NNNN_MMMM.meta, whose header names the first segment covered). `rows` is an array of `columns.ROW` (72 bytes per
entry, in the order of the file; 56 in version 1), `digests` one of u64 (the first 8 bytes of every
message digest, each once). That of a `.words` has the fields of `_Stored`: the columns of `SealedColumns`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from memd.entries import Entry
from memd.errors import CorruptFile, ShortLogFile, StoreError
from memd.store.disk import FileChecksum, LocalDisk
from memd.store.layout import TopicLayout
from memd.store.lexical.postings import FORMAT, SealedColumns
from memd.store.log.columns import ROW, Records, rows_from
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    MAGIC_META,
    META_VERSION,
    Header,
    decode_header,
    encode_header,
    encode_long,
    encode_record,
    long_payload,
    payload_at,
)
from memd.store.log.recovery import read_log_file
from memd.store.log.segment import SealedSegment

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


class MergedMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The `.meta` of a merged index."""

    segment_ids: tuple[int, ...]
    """Ascending. Labels number the rows of these segments consecutively."""
    counts: tuple[int, ...]
    """Rows of each segment."""
    bin_crcs: tuple[int, ...]
    """Of the .bin of each segment when it was sealed."""
    built_at: int
    """Microseconds since the epoch."""
    hnsw_bytes: int = 0
    hnsw_crc: int = 0
    """Size and CRC32 of the .ivf."""

    @property
    def checksum(self) -> FileChecksum:
        """The same as a value."""
        return FileChecksum(self.hnsw_bytes, self.hnsw_crc)


AnyMeta = TypeVar("AnyMeta", SegmentMeta, MergedMeta)

_encoder = msgspec.msgpack.Encoder()
_segment_decoder = msgspec.msgpack.Decoder(SegmentMeta)
_merged_decoder = msgspec.msgpack.Decoder(MergedMeta)


def encode_meta(log_header: Header, meta: SegmentMeta | MergedMeta) -> bytes:
    """Encode a `.meta`. `log_header` is that of the (first) segment's .bin."""
    header = encode_header(msgspec.structs.replace(log_header, magic=MAGIC_META, version=META_VERSION))
    return header + encode_record(_encoder.encode(meta))


def read_segment_meta(files: LocalDisk, layout: TopicLayout, segment_id: int) -> tuple[Header, SegmentMeta]:
    """Read a segment's `.meta` and the header of its .bin, if the two fit together. What one of version 1 lacks is read
    out of the .bin: slow.

    Raises:
        CorruptFile: the `.meta` is damaged or does not fit (ShortLogFile if a part of the .bin is missing).
        ForeignFile: it has a newer format.
        StoreError: it cannot be read.
    """
    path = layout.meta(segment_id)
    header, meta = _read(files, path, _segment_decoder)
    log = layout.bin(segment_id)
    log_header = decode_header(files.read_at(log, 0, HEADER_BYTES), magic=MAGIC_LOG, name=str(log))
    fits = (
        meta.segment_id == segment_id == header.segment_id
        and msgspec.structs.replace(header, magic=MAGIC_LOG, version=log_header.version) == log_header
        and (header.version < META_VERSION or len(meta.rows) == meta.chunk_count * ROW.itemsize)
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
    return log_header, meta if header.version == META_VERSION else _with_all_columns(files, log, meta)


def _with_all_columns(files: LocalDisk, log: Path, meta: SegmentMeta) -> SegmentMeta:
    data = files.read(log)
    if zlib.crc32(data) != meta.bin_crc:
        raise CorruptFile(f"{log}: was changed since its index was built")
    log_file = read_log_file(data, name=str(log), dimension=None)
    return msgspec.structs.replace(meta, rows=rows_from(log_file.entries, log_file.spans).tobytes())


def read_merged_meta(files: LocalDisk, layout: TopicLayout, first: int, last: int) -> MergedMeta | None:
    """Read the `.meta` of a merged index; None if it cannot be read."""
    try:
        return _read(files, layout.merged_meta(first, last), _merged_decoder)[1]
    except StoreError:
        return None


def sealed_segment(files: LocalDisk, layout: TopicLayout, header: Header, meta: SegmentMeta) -> SealedSegment:
    """Return the segment that a `.meta` describes, without its index."""
    digests = np.frombuffer(meta.digests, dtype=np.uint64)
    path = layout.bin(meta.segment_id)
    return SealedSegment(files, path, header, meta.columns, digests, bin_crc=meta.bin_crc)


def choose_merged(
    files: LocalDisk, layout: TopicLayout, segments: Mapping[int, SealedSegment]
) -> tuple[list[MergedMeta], list[Path]]:
    """Choose the merged indexes to search, so that no segment is covered twice.

    Args:
        segments: those that can be searched, by number.

    Returns:
        The chosen indexes, and the files of all others, which are useless.
    """
    chosen: list[MergedMeta] = []
    useless: list[Path] = []
    covered: set[int] = set()
    for first, last in sorted(layout.merges(files), key=lambda pair: pair[0] - pair[1]):  # the widest first
        meta = read_merged_meta(files, layout, first, last)
        if meta is None or not _fits(files, layout, (first, last), meta, segments) or covered & set(meta.segment_ids):
            useless += layout.merged(first, last)
            continue
        covered |= set(meta.segment_ids)
        chosen.append(meta)
    return chosen, useless


def _read(files: LocalDisk, path: Path, decoder: msgspec.msgpack.Decoder[AnyMeta]) -> tuple[Header, AnyMeta]:
    data = files.read(path)
    header = decode_header(data, magic=MAGIC_META, name=str(path))
    payload = payload_at(data, HEADER_BYTES)
    if payload is None:
        raise CorruptFile(f"{path}: does not match its checksum")
    try:
        return header, decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise CorruptFile(f"{path}: is not what it should be ({error})") from error


def _fits(
    files: LocalDisk,
    layout: TopicLayout,
    name: tuple[int, int],
    meta: MergedMeta,
    segments: Mapping[int, SealedSegment],
) -> bool:
    """Whether a merged index covers exactly these segments. Its checksum is verified on loading."""
    ids = meta.segment_ids
    if len(ids) < 2 or (ids[0], ids[-1]) != name or any(number not in segments for number in ids):
        return False
    covered = [segments[number] for number in ids]
    return (
        meta.counts == tuple(len(segment.rows) for segment in covered)
        and meta.bin_crcs == tuple(segment.bin_crc for segment in covered)
        and files.size(layout.merged_index(*name)) == meta.hnsw_bytes
    )


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    segments: tuple[tuple[int, int, int], ...]
    """Of each its number, its rows, and the CRC-32 of its .bin when it was sealed."""
    columns: dict[str, bytes]
    length_sum: int
    mean_count: int


_words_encoder, _words_decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Stored)


def encode_words(segments: Sequence[SealedSegment], columns: SealedColumns) -> bytes:
    """The content of the file of these segments."""
    stored = _Stored(
        format=FORMAT,
        segments=_identity(segments),
        columns={name: getattr(columns, name).astype(kind).tobytes() for name, kind in _COLUMNS.items()},
        length_sum=columns.length_sum,
        mean_count=columns.mean_count,
    )
    header = msgspec.structs.replace(segments[0].header, magic=MAGIC_META, version=META_VERSION)
    return encode_header(header) + encode_long(_words_encoder.encode(stored))


def read_words(files: LocalDisk, path: Path, segments: Sequence[SealedSegment]) -> SealedColumns | None:
    """Read the file of these segments; None if there is none that is whole and theirs."""
    if files.size(path) is None:
        return None
    try:
        data = files.read(path)
        decode_header(data, magic=MAGIC_META, name=str(path))
        payload = long_payload(data)
        stored = None if payload is None else _words_decoder.decode(payload)
    except (StoreError, msgspec.MsgspecError):
        return None
    if stored is None or stored.format != FORMAT or stored.segments != _identity(segments):
        return None
    columns = {name: np.frombuffer(stored.columns[name], kind) for name, kind in _COLUMNS.items()}
    return SealedColumns(**columns, length_sum=stored.length_sum, mean_count=stored.mean_count)


def columns_from_log(segment: SealedSegment, counted: Callable[[Entry], Entry]) -> SealedColumns:
    """Make the columns of a segment from its records. `counted` gives those of an old version what they lack: slow."""
    starts = range(0, len(segment.rows), READ_AT_ONCE)
    entries = (one for start in starts for one in segment.read_many(segment.rows[start : start + READ_AT_ONCE]))
    return SealedColumns.of(counted(one) if one is not None and one.content else one for one in entries)


def _identity(segments: Sequence[SealedSegment]) -> tuple[tuple[int, int, int], ...]:
    return tuple((one.segment_id, len(one.rows), one.bin_crc) for one in segments)
