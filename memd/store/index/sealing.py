"""Sealing a full segment: building its vector index (`.hnsw`) and writing its columns (`.meta`).

Rule: both files are derived from the `.bin` and can be removed at any time. The `.meta` is written last and vouches for
the other two by size and checksum; without a valid one the segment counts as not sealed.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from memd.entries import Status
from memd.errors import CorruptFile, StoreWriteFailed
from memd.store.claim import Claim
from memd.store.disk import LocalDisk
from memd.store.files import TEMPORARY_SUFFIX, FileChecksum, checksum_of, only_whole, write_beside
from memd.store.index.compact import CompactIndex
from memd.store.index.meta import SegmentMeta, encode_meta, sealed_segment
from memd.store.index.vectors import VectorIndex
from memd.store.log.columns import as_version_1, rows_from
from memd.store.log.format import Header
from memd.store.log.recovery import read_log_file
from memd.store.log.segment import GrowingSegment, SealedSegment


def write_sealed(
    claim: Claim, segment: GrowingSegment, gaps: list[tuple[int, int]], *, sealed_at: int
) -> tuple[SealedSegment, VectorIndex]:
    """Write the index of a full segment and publish both files.

    Raises:
        StoreWriteFailed: at most an .hnsw that no .meta vouches for is left behind.
        StoreError: the .bin cannot be read.
    """
    files, layout = claim.files, claim.layout
    segment_id, rows, ids = segment.segment_id, segment.rows, segment.rows["canonical_id"]
    index = VectorIndex(segment.matrix, np.flatnonzero(rows["status"] == Status.ACTIVE))
    path = layout.bin(segment_id)
    log = files.read(path)
    written, checksum = write_index(files, layout.hnsw(segment_id), index)
    meta = SegmentMeta(
        segment_id=segment_id,
        chunk_count=len(rows),
        canonical_id_range=(int(ids.min()), int(ids.max())) if len(ids) else (0, 0),
        sealed_at=sealed_at,
        bin_bytes=len(log),
        bin_crc=zlib.crc32(log),
        hnsw_bytes=checksum.bytes,
        hnsw_crc=checksum.crc,
        gaps=tuple(gaps),
        rows=rows.tobytes(),
        digests=segment.digests.tobytes(),
    )
    with only_whole(files, written):
        described = write_beside(files, layout.meta(segment_id), encode_meta(segment.header, meta))
    claim.publish({path: path, layout.hnsw(segment_id): written, layout.meta(segment_id): described})
    return sealed_segment(files, layout, segment.header, meta), index


def with_all_columns(claim: Claim, header: Header, meta: SegmentMeta) -> SegmentMeta:
    """Return the `.meta` of version 1 as one of today, published unless the disk refuses. Reads the whole .bin.

    Raises:
        CorruptFile: the .bin is not as it was when it was sealed.
        StoreError: it cannot be read.
    """
    path, vouching = claim.layout.bin(meta.segment_id), claim.layout.meta(meta.segment_id)
    log_file = read_log_file(claim.files.read(path), name=str(path), dimension=None)
    rows = rows_from(log_file.entries, log_file.spans)
    if as_version_1(rows).tobytes() != meta.rows:
        raise CorruptFile(f"{path}: was changed since its index was built")
    meta = msgspec.structs.replace(meta, rows=rows.tobytes())
    with suppress(StoreWriteFailed):  # then every start reads the .bin again
        claim.publish({vouching: write_beside(claim.files, vouching, encode_meta(header, meta))})
    return meta


def write_index(files: LocalDisk, path: Path, index: VectorIndex | CompactIndex) -> tuple[Path, FileChecksum]:
    """Write an index to a temporary file beside `path`, whose contents are durable then; return that, and its checksum.

    Raises:
        StoreWriteFailed: nothing is left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with only_whole(files, temporary):
        expected_bytes = index.save(files, temporary)
        saved_bytes = files.size(temporary) or 0
        if saved_bytes != expected_bytes:  # not every library notices a full disk
            raise StoreWriteFailed(
                f"{path}: only {saved_bytes} of {expected_bytes} bytes could be written; free some space, it is tried"
                " again"
            )
        return temporary, checksum_of(files, temporary, saved_bytes)
