"""The two files that are derived from a full segment: `.hnsw`, its vector index, and `.meta`, its columns.

Rule: both can be removed at any time and come back from the `.bin`. `.meta` is written last and vouches for the other
two by size and checksum; without a valid one the segment counts as not sealed.

    .meta:  | header (magic "memd.idx", else that of the .bin) | one record |

The record's payload is a MessagePack map: the fields of `Meta`. `rows` is an array of `segment.ROW` (56 bytes per
entry, in the order of the file), `digests` one of u64 (the first 8 bytes of every message digest, each once).
"""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import numpy as np

from memd.entries import Status
from memd.errors import CorruptFile, ForeignFile, StoreError, StoreWriteFailed
from memd.store.files import TEMPORARY_SUFFIX, Files, replace
from memd.store.index.sealed_index import check_file, checksum_of
from memd.store.index.vectors import VectorIndex
from memd.store.layout import TopicLayout
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    MAGIC_META,
    Header,
    decode_header,
    encode_header,
    encode_record,
    payload_at,
)
from memd.store.log.segment import ROW, Growing, Sealed, Vouched


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What `.meta` says; sizes in bytes, times in microseconds since the epoch."""

    segment_id: int
    chunk_count: int
    canonical_id_range: tuple[int, int]
    """Lowest and highest; (0, 0) without entries."""
    sealed_at: int
    bin_bytes: int
    bin_crc: int
    hnsw_bytes: int
    hnsw_crc: int
    gaps: tuple[tuple[int, int], ...]
    """(start, end) of what could not be read in the .bin."""
    rows: bytes
    digests: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Meta)


def write_sealed(
    files: Files, layout: TopicLayout, segment: Growing, gaps: list[tuple[int, int]], *, sealed_at: int
) -> tuple[Sealed, VectorIndex]:
    """Build and write both files of a full segment. Slow; releases the GIL for most of it.

    Raises:
        StoreWriteFailed: at most a temporary file or an .hnsw that no .meta vouches for is left behind.
        StoreError: the .bin cannot be read.
    """
    segment_id, rows = segment.segment_id, segment.rows
    index = VectorIndex.build(segment.matrix, np.flatnonzero(rows["status"] == Status.ACTIVE))
    vouched = write_index(files, layout.hnsw(segment_id), index)
    log = files.read(layout.bin(segment_id))
    digests = segment.digests
    ids = rows["canonical_id"]
    meta = Meta(
        segment_id=segment_id,
        chunk_count=len(rows),
        canonical_id_range=(int(ids.min()), int(ids.max())) if len(ids) else (0, 0),
        sealed_at=sealed_at,
        bin_bytes=len(log),
        bin_crc=zlib.crc32(log),
        hnsw_bytes=vouched.bytes,
        hnsw_crc=vouched.crc,
        gaps=tuple(gaps),
        rows=rows.tobytes(),
        digests=digests.tobytes(),
    )
    header = encode_header(msgspec.structs.replace(segment.header, magic=MAGIC_META))
    replace(files, layout.meta(segment_id), header + encode_record(_encoder.encode(meta)))
    return sealed_from(files, layout, segment.header, meta), index


def write_index(files: Files, path: Path, index: VectorIndex) -> Vouched:
    """Write an index to `path`, durably; after a crash the file is whole or not there.

    Raises:
        StoreWriteFailed: at most a temporary file is left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    expected_bytes = index.save(files, temporary)
    saved_bytes = files.size(temporary) or 0
    if saved_bytes != expected_bytes:  # the native writer does not notice a full disk
        files.remove(temporary)
        raise StoreWriteFailed(
            f"{path}: only {saved_bytes} of {expected_bytes} bytes could be written; free some space, it is tried again"
        )
    vouched = Vouched(saved_bytes, checksum_of(files, temporary, saved_bytes))
    files.rename(temporary, path)
    files.sync_directory(path.parent)
    return vouched


def read_meta(files: Files, layout: TopicLayout, segment_id: int) -> tuple[Header, Meta]:
    """The `.meta` of a segment, if it fits the size and header of the `.bin` beside it.

    Raises:
        CorruptFile: it is damaged or does not fit.
        ForeignFile: it is of a newer format.
        StoreError: it cannot be read.
    """
    path = layout.meta(segment_id)
    data = files.read(path)
    header = decode_header(data, magic=MAGIC_META, name=str(path))
    payload = payload_at(data, HEADER_BYTES)
    if payload is None:
        raise CorruptFile(f"{path}: does not match its checksum")
    try:
        meta = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise CorruptFile(f"{path}: is not what it should be ({error})") from error
    log = layout.bin(segment_id)
    log_header = decode_header(files.read_at(log, 0, HEADER_BYTES), magic=MAGIC_LOG, name=str(log))
    fits = (
        meta.segment_id == segment_id == header.segment_id
        and msgspec.structs.replace(header, magic=MAGIC_LOG) == log_header
        and meta.bin_bytes == files.size(log)
        and len(meta.rows) == meta.chunk_count * ROW.itemsize
    )
    if not fits:
        raise CorruptFile(f"{path}: describes another file than {log.name}")
    return log_header, meta


def sealed_from(files: Files, layout: TopicLayout, header: Header, meta: Meta) -> Sealed:
    """The segment as `.meta` describes it, without its index."""
    rows = np.frombuffer(meta.rows, dtype=ROW)
    digests = np.frombuffer(meta.digests, dtype=np.uint64)
    vouched = Vouched(meta.hnsw_bytes, meta.hnsw_crc)
    path = layout.bin(meta.segment_id)
    return Sealed(files, path, header, rows, digests, bin_crc=meta.bin_crc, vouched=vouched)


def check_index(files: Files, layout: TopicLayout, meta: Meta) -> None:
    """Raises CorruptFile unless the `.hnsw` is the very file that `meta` vouches for."""
    check_file(files, layout.hnsw(meta.segment_id), Vouched(meta.hnsw_bytes, meta.hnsw_crc))


def highest_canonical_id(files: Files, layout: TopicLayout, segment_id: int) -> int | None:
    """From `.meta` alone; None where that does not tell."""
    try:
        return read_meta(files, layout, segment_id)[1].canonical_id_range[1]
    except (CorruptFile, ForeignFile, StoreError):
        return None
