"""Sealing a full segment: building its vector index (`.hnsw`) and writing its columns (`.meta`).

Rule: both files are derived from the `.bin` and can be removed at any time. The `.meta` is written last and vouches for
the other two by size and checksum; without a valid one the segment counts as not sealed.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from memd.entries import Status
from memd.errors import StoreWriteFailed
from memd.store.disk import LocalDisk
from memd.store.files import TEMPORARY_SUFFIX, FileChecksum, checksum_of, only_whole
from memd.store.index.meta import SegmentMeta, sealed_segment, write_meta
from memd.store.index.vectors import VectorIndex
from memd.store.layout import TopicLayout
from memd.store.log.segment import GrowingSegment, SealedSegment


def write_sealed(
    files: LocalDisk, layout: TopicLayout, segment: GrowingSegment, gaps: list[tuple[int, int]], *, sealed_at: int
) -> tuple[SealedSegment, VectorIndex]:
    """Build the index of a full segment and write both files. Slow; releases the GIL for most of it.

    Raises:
        StoreWriteFailed: at most an .hnsw that no .meta vouches for is left behind.
        StoreError: the .bin cannot be read.
    """
    segment_id, rows = segment.segment_id, segment.rows
    index = VectorIndex.build(segment.matrix, np.flatnonzero(rows["status"] == Status.ACTIVE))
    checksum = write_index(files, layout.hnsw(segment_id), index)
    log = files.read(layout.bin(segment_id))
    ids = rows["canonical_id"]
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
    write_meta(files, layout.meta(segment_id), segment.header, meta)
    return sealed_segment(files, layout, segment.header, meta), index


def write_index(files: LocalDisk, path: Path, index: VectorIndex) -> FileChecksum:
    """Write an index durably; after a crash the file is whole or absent.

    Raises:
        StoreWriteFailed: nothing is left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with only_whole(files, temporary):
        expected_bytes = index.save(files, temporary)
        saved_bytes = files.size(temporary) or 0
        if saved_bytes != expected_bytes:  # hnswlib does not notice a full disk
            raise StoreWriteFailed(
                f"{path}: only {saved_bytes} of {expected_bytes} bytes could be written; free some space, it is tried"
                " again"
            )
        checksum = checksum_of(files, temporary, saved_bytes)
        files.rename(temporary, path)
    files.sync_directory(path.parent)
    return checksum
