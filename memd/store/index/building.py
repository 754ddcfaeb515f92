"""Building indexes: sealing a full segment (its `.hnsw` and `.meta`), and merging, so that a search asks few indexes
however long the log is.

Rule: all files are derived from the `.bin` and can be removed at any time. The `.meta` is written last and vouches for
the others by size and checksum; without a valid one the segment counts as not sealed. The index of each segment stays
on disk when it is merged: merged_NNNN_MMMM.ivf is written, then the .meta that vouches for it and names the segments
that it covers.

An index is merged with all newer ones as soon as they cover more than a `RATIO`th of its segments. So n segments are
searched through at most 1 + log5 n indexes, and each chunk is indexed about 2 log5 n times in its life: 60 µs each.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from memd.entries import Status
from memd.errors import CorruptFile, StoreWriteFailed
from memd.store.claim import Claim
from memd.store.disk import TEMPORARY_SUFFIX, FileChecksum, LocalDisk, only_whole, write_beside, write_pieces
from memd.store.index.meta import IndexFile, MergedMeta, SegmentMeta, encode_meta, sealed_segment
from memd.store.index.sealed_index import SealedIndex
from memd.store.index.vectors import CompactIndex, matrix_file, sample_size
from memd.store.layout import TopicLayout
from memd.store.log.columns import Bits, Floats, Rows, as_version_1, rows_from
from memd.store.log.format import Header
from memd.store.log.recovery import read_log_file
from memd.store.log.segment import GrowingSegment, SealedSegment

RATIO = 4
_RATIO_OVER_BUDGET = 64
BATCH_VECTORS = 500
"""Vectors between two pauses for queries: 20 to 50 ms of work."""


def write_sealed(
    claim: Claim, segment: GrowingSegment, gaps: list[tuple[int, int]], *, sealed_at: int
) -> SealedSegment:
    """Write the index of a full segment, which is its matrix, and publish both files.

    Raises:
        StoreWriteFailed: at most an .hnsw that no .meta vouches for is left behind.
        StoreError: the .bin cannot be read.
    """
    files, layout = claim.files, claim.layout
    segment_id, rows, ids = segment.segment_id, segment.rows, segment.rows["canonical_id"]
    labels = np.flatnonzero(rows["status"] == Status.ACTIVE)
    path = layout.bin(segment_id)
    log = files.read(path)
    vectors = matrix_file(segment.matrix[labels], labels)
    written, checksum = write_index(files, layout.hnsw(segment_id), [vectors])
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
    claim.publish({layout.hnsw(segment_id): written, layout.meta(segment_id): described})
    return sealed_segment(files, layout, segment.header, meta)


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


def write_index(files: LocalDisk, path: Path, pieces: Iterable[bytes]) -> tuple[Path, FileChecksum]:
    """Write an index to a temporary file beside `path`, whose contents are durable then; return that, and its checksum.

    Raises:
        StoreWriteFailed: nothing is left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with only_whole(files, temporary):
        return temporary, write_pieces(files, temporary, pieces)


def due_merge(sizes: Sequence[int], *, over_budget: bool) -> range | None:
    """Return the positions of the neighbouring indexes that should be merged now; None if no merge is due.

    Args:
        sizes: how many segments each index covers, oldest first.
        over_budget: searching all of them takes too long, so that larger ones are worth merging too.
    """
    ratio = _RATIO_OVER_BUDGET if over_budget else RATIO
    newer = np.cumsum(sizes[:0:-1])[::-1]  # than each but the last
    due = np.flatnonzero(np.array(sizes[:-1]) < ratio * newer)
    return range(int(due[0]), len(sizes)) if len(due) else None


def write_merged(
    claim: Claim,
    segments: Sequence[SealedSegment],
    dead: Bits,
    *,
    built_at: int,
    give_way: Callable[[], None],
) -> SealedIndex:
    """Build and publish the index over `segments`, without the labels that are `dead`. Very slow.

    `give_way` is called between batches and returns when no query is waiting.

    Raises:
        StoreWriteFailed: at most an .ivf that no .meta vouches for is left behind.
    """
    plain = np.concatenate([_plain(segment) for segment in segments])
    index, held = _build(segments, plain & ~dead, give_way)
    left_out = np.setdiff1d(np.flatnonzero(plain), held, assume_unique=True)
    segment_ids = tuple(segment.segment_id for segment in segments)
    first, last = segment_ids[0], segment_ids[-1]
    files, meta_path, path = claim.files, claim.layout.merged_meta(first, last), claim.layout.merged_index(first, last)
    written, checksum = write_index(files, path, index.pieces())
    meta = MergedMeta(
        segment_ids=segment_ids,
        counts=tuple(len(segment.rows) for segment in segments),
        bin_crcs=tuple(segment.bin_crc for segment in segments),
        built_at=built_at,
        hnsw_bytes=checksum.bytes,
        hnsw_crc=checksum.crc,
        left_out=left_out.astype("<u4").tobytes(),
    )
    with only_whole(files, written):
        described = write_beside(files, meta_path, encode_meta(segments[0].header, meta))
    # An earlier index of this name may have left a `.meta`: it must not vouch for the new file.
    claim.publish({path: written, meta_path: described}, trims=[meta_path])
    file = IndexFile(path=path, segment_ids=segment_ids, checksum=checksum, left_out=left_out)
    merged = SealedIndex(files, file, segments, dead=dead)
    merged.load()  # mapped: what was built is let go
    return merged


def merged_files(layout: TopicLayout, indexes: Iterable[SealedIndex]) -> list[Path]:
    """Return the files of those of these indexes that are over several segments."""
    spans = [(one.segment_ids[0], one.segment_ids[-1]) for one in indexes if len(one.segment_ids) > 1]
    return [path for span in spans for path in layout.merged(*span)]


def _build(segments: Sequence[SealedSegment], wanted: Bits, give_way: Callable[[], None]) -> tuple[CompactIndex, Rows]:
    """Index the readable ones of the labels `wanted`; returns the index and these labels."""
    held: list[Rows] = [np.empty(0, dtype=np.intp)]

    def vectors(labels: Rows) -> Iterator[tuple[Rows, Floats]]:
        start = 0
        for segment in segments:
            rows = labels[(labels >= start) & (labels < start + len(segment.rows))] - start
            for at in range(0, len(rows), BATCH_VECTORS):
                give_way()
                found, matrix, _ = segment.vectors(rows[at : at + BATCH_VECTORS])
                yield found + start, matrix
            start += len(segment.rows)

    def batches() -> Iterator[tuple[Rows, Floats]]:
        for found, matrix in vectors(labels):
            held.append(found)
            yield found, matrix

    labels = np.flatnonzero(wanted)
    chosen = labels[:: max(1, len(labels) // max(1, sample_size(len(labels))))]
    none = np.empty((0, segments[0].header.dimension), dtype=np.float32)
    sample = np.concatenate([none, *(matrix for _, matrix in vectors(chosen))])
    index = CompactIndex.build(sample, batches(), count=len(labels), size=len(wanted))
    return index, np.concatenate(held)


def _plain(segment: SealedSegment) -> Bits:
    rows = segment.rows
    return np.asarray((rows["status"] == Status.ACTIVE) & (rows["utility_steps"] == 0), dtype=np.bool_)
