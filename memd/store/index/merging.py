"""Merged indexes: one index over several sealed segments, so that a search asks few of them however long the log is.

Rule: a merged index is derived and can be removed at any time: the index of each segment stays on disk. Two files are
written in this order: merged_NNNN_MMMM.ivf, then the .meta that vouches for it and names the segments it covers.

An index is merged with all newer ones as soon as they cover more than a `RATIO`th of its segments. So n segments are
searched through at most 1 + log5 n indexes, and each chunk is indexed about 2 log5 n times in its life: 60 µs each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from memd.entries import Status
from memd.store.claim import Claim
from memd.store.files import only_whole, write_beside
from memd.store.index.compact import CompactIndex, sample_size
from memd.store.index.meta import IndexFile, MergedMeta, encode_meta
from memd.store.index.sealed_index import SealedIndex
from memd.store.index.sealing import write_index
from memd.store.layout import TopicLayout
from memd.store.log.columns import Bits, Floats, Rows
from memd.store.log.segment import SealedSegment

RATIO = 4
_RATIO_OVER_BUDGET = 64
BATCH_VECTORS = 500
"""Vectors between two pauses for queries: 20 to 50 ms of work."""


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
    written, checksum = write_index(files, path, index)
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
