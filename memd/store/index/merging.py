"""Merged indexes: one index over several sealed segments, so that a search asks few of them however long the log is.

Rule: a merged index is derived and can be removed at any time: the index of each segment stays on disk. Two files are
written in this order: merged_NNNN_MMMM.hnsw, then the .meta that vouches for it and names the segments it covers.

Tiers: an index over about 8^t segments is of tier t. As soon as eight neighbours are of one tier they are merged into
one of the next. So n segments are searched through at most 7 × (1 + log8 n) indexes, and each chunk is indexed
1 + log8 n times in its life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from memd.entries import Status
from memd.store.files import only_whole, write_beside
from memd.store.index.meta import IndexFile, MergedMeta, encode_meta
from memd.store.index.sealed_index import SealedIndex
from memd.store.index.sealing import write_index
from memd.store.index.vectors import VectorIndex
from memd.store.layout import TopicLayout
from memd.store.log.columns import Bits, Floats, Rows
from memd.store.log.segment import SealedSegment
from memd.store.shelf import Claim

TIER_WIDTH = 8
BATCH_VECTORS = 64
"""Vectors between two pauses for queries: 20 to 50 ms of work."""


def due_merge(sizes: Sequence[int], *, over_budget: bool) -> range | None:
    """Return the positions of the neighbouring indexes that should be merged now; None if no merge is due.

    Args:
        sizes: how many segments each index covers, oldest first.
        over_budget: searching all of them takes too long, so fewer than TIER_WIDTH are worth merging too.
    """
    tiers = [_tier(size) for size in sizes]
    runs = sorted(_runs(tiers), key=lambda run: (tiers[run.start], run.start))
    for run in runs:
        if len(run) >= TIER_WIDTH:
            return run[:TIER_WIDTH]
    return max(runs, key=len) if over_budget and any(len(run) > 1 for run in runs) else None


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
        StoreWriteFailed: at most an .hnsw that no .meta vouches for is left behind.
    """
    plain = np.concatenate([_plain(segment) for segment in segments])
    index, held = _build(segments, plain & ~dead, give_way)
    left_out = np.setdiff1d(np.flatnonzero(plain), held, assume_unique=True)
    segment_ids = tuple(segment.segment_id for segment in segments)
    first, last = segment_ids[0], segment_ids[-1]
    files, (meta_path, path, _) = claim.files, claim.layout.merged(first, last)
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
    merged.use(index)
    return merged


def merged_files(layout: TopicLayout, indexes: Iterable[SealedIndex]) -> list[Path]:
    """Return the files of those of these indexes that are over several segments."""
    spans = [(one.segment_ids[0], one.segment_ids[-1]) for one in indexes if len(one.segment_ids) > 1]
    return [path for span in spans for path in layout.merged(*span)]


def _build(segments: Sequence[SealedSegment], wanted: Bits, give_way: Callable[[], None]) -> tuple[VectorIndex, Rows]:
    """Index the readable ones of the labels `wanted`; returns the index and these labels."""
    held: list[Rows] = [np.empty(0, dtype=np.intp)]

    def batches() -> Iterator[tuple[Rows, Floats]]:
        start = 0
        for segment in segments:
            rows = np.flatnonzero(wanted[start : start + len(segment.rows)])
            for at in range(0, len(rows), BATCH_VECTORS):
                give_way()
                found, matrix, _ = segment.vectors(rows[at : at + BATCH_VECTORS])
                held.append(found + start)
                yield found + start, matrix
            start += len(segment.rows)

    dimension, count = segments[0].header.dimension, int(np.count_nonzero(wanted))
    index = VectorIndex.build_from(batches(), dimension=dimension, count=count, size=len(wanted))
    return index, np.concatenate(held)


def _plain(segment: SealedSegment) -> Bits:
    rows = segment.rows
    return np.asarray((rows["status"] == Status.ACTIVE) & (rows["utility_steps"] == 0), dtype=np.bool_)


def _tier(size: int) -> int:
    tier = 0
    while size >= TIER_WIDTH:
        size //= TIER_WIDTH
        tier += 1
    return tier


def _runs(tiers: Sequence[int]) -> Iterator[range]:
    start = 0
    for position in range(1, len(tiers) + 1):
        if position == len(tiers) or tiers[position] != tiers[start]:
            yield range(start, position)
            start = position
