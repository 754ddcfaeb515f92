"""Merged indexes: one index over several sealed segments, so that a search asks few of them however long the log is.

Rule: derived, like the index of a segment, which stays on disk: a merged index can be removed at any time. Two files,
written in this order: merged_NNNN_MMMM.hnsw, and a .meta that vouches for it and says which segments it covers.

    .meta:  | header (magic "memd.idx", segment: the first one covered) | one record: `MergedMeta` as MessagePack |

Tiers: an index over about 8^t segments is of tier t. As soon as eight neighbours are of one tier they are merged into
one of the next, so that n segments are searched through at most 7 × (1 + log8 n) indexes and each chunk is indexed
1 + log8 n times in its life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from memd.entries import Status
from memd.errors import StoreError
from memd.store.files import Files, replace
from memd.store.index.sealed_index import SealedIndex
from memd.store.index.sealing import write_index
from memd.store.index.superseded import Bits
from memd.store.index.vectors import Floats, Rows, VectorIndex
from memd.store.layout import TopicLayout
from memd.store.log.format import HEADER_BYTES, MAGIC_META, decode_header, encode_header, encode_record, payload_at
from memd.store.log.segment import Sealed, Vouched
from memd.store.transitions import IndexFile

TIER_WIDTH = 8
BATCH_VECTORS = 64
"""Between batches of this many the merge stands back for queries: 20 to 50 ms of work."""


class MergedMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the `.meta` of a merged index says."""

    segment_ids: tuple[int, ...]
    """Ascending; labels count their rows through from the first."""
    counts: tuple[int, ...]
    """Rows of each."""
    bin_crcs: tuple[int, ...]
    """Of the .bin of each when it was sealed."""
    built_at: int
    """Microseconds since the epoch."""
    hnsw_bytes: int
    hnsw_crc: int
    left_out: bytes
    """u32 labels of plain chunks that the index does not hold: gone before, or unreadable; ascending."""

    @property
    def vouched(self) -> Vouched:
        """What the .hnsw has to be."""
        return Vouched(self.hnsw_bytes, self.hnsw_crc)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MergedMeta)


def due_merge(sizes: Sequence[int], *, over_budget: bool) -> range | None:
    """Which neighbours of the indexes over `sizes` segments each, oldest first, are to be merged now.

    `over_budget`: a search through all of them takes too long, so fewer than TIER_WIDTH are worth merging too.
    """
    tiers = [_tier(size) for size in sizes]
    runs = sorted(_runs(tiers), key=lambda run: (tiers[run.start], run.start))
    for run in runs:
        if len(run) >= TIER_WIDTH:
            return run[:TIER_WIDTH]
    return max(runs, key=len) if over_budget and any(len(run) > 1 for run in runs) else None


def write_merged(
    files: Files,
    layout: TopicLayout,
    segments: Sequence[Sealed],
    gone: Bits,
    *,
    built_at: int,
    stand_back: Callable[[], None],
) -> SealedIndex:
    """Build and write the index over `segments` without what is `gone` (per label). Very slow.

    `stand_back` is called between batches and returns when nobody is waiting.

    Raises:
        StoreWriteFailed: at most a temporary file or an .hnsw that no .meta vouches for is left behind.
    """
    plain = np.concatenate([_plain(segment) for segment in segments])
    index, held = _build(segments, plain & ~gone, stand_back)
    left_out = np.setdiff1d(np.flatnonzero(plain), held, assume_unique=True)
    first, last = segments[0].segment_id, segments[-1].segment_id
    path = layout.merged_hnsw(first, last)
    files.remove(layout.merged_meta(first, last))  # of an earlier index of that name: it must not vouch for this one
    vouched = write_index(files, path, index)
    meta = MergedMeta(
        segment_ids=tuple(segment.segment_id for segment in segments),
        counts=tuple(len(segment.rows) for segment in segments),
        bin_crcs=tuple(segment.bin_crc for segment in segments),
        built_at=built_at,
        hnsw_bytes=vouched.bytes,
        hnsw_crc=vouched.crc,
        left_out=left_out.astype("<u4").tobytes(),
    )
    header = encode_header(msgspec.structs.replace(segments[0].header, magic=MAGIC_META))
    replace(files, layout.merged_meta(first, last), header + encode_record(_encoder.encode(meta)))
    merged = SealedIndex(files, path, segments, vouched, gone=gone, left_out=left_out)
    merged.use(index)
    return merged


def _build(segments: Sequence[Sealed], wanted: Bits, stand_back: Callable[[], None]) -> tuple[VectorIndex, Rows]:
    """An index over the readable ones of the labels `wanted`, and which these are."""
    held: list[Rows] = [np.empty(0, dtype=np.intp)]

    def batches() -> Iterator[tuple[Rows, Floats]]:
        start = 0
        for segment in segments:
            rows = np.flatnonzero(wanted[start : start + len(segment.rows)])
            for at in range(0, len(rows), BATCH_VECTORS):
                stand_back()
                found, matrix, _ = segment.vectors(rows[at : at + BATCH_VECTORS])
                held.append(found + start)
                yield found + start, matrix
            start += len(segment.rows)

    dimension, count = segments[0].header.dimension, int(np.count_nonzero(wanted))
    index = VectorIndex.build_from(batches(), dimension=dimension, count=count, size=len(wanted))
    return index, np.concatenate(held)


def read_merged(files: Files, layout: TopicLayout, first: int, last: int) -> MergedMeta | None:
    """What a merged index says about itself; None if that cannot be read."""
    path = layout.merged_meta(first, last)
    try:
        data = files.read(path)
        decode_header(data, magic=MAGIC_META, name=str(path))
        payload = payload_at(data, HEADER_BYTES)
        return _decoder.decode(payload) if payload is not None else None
    except (StoreError, msgspec.MsgspecError):
        return None


def chosen_merges(
    files: Files, layout: TopicLayout, segments: Mapping[int, Sealed]
) -> tuple[list[IndexFile], list[Path]]:
    """The merged indexes to search, none of whose segments is in two of them, and the files that are good for nothing.

    `segments` are those that can be searched, by number.
    """
    chosen: list[IndexFile] = []
    useless: list[Path] = []
    taken: set[int] = set()
    for first, last in sorted(layout.merges(files), key=lambda pair: pair[0] - pair[1]):  # the widest first
        meta = read_merged(files, layout, first, last)
        if meta is None or not _fits(files, layout, (first, last), meta, segments) or taken & set(meta.segment_ids):
            useless += [layout.merged_meta(first, last), layout.merged_hnsw(first, last)]
            continue
        taken |= set(meta.segment_ids)
        chosen.append(
            IndexFile(
                path=layout.merged_hnsw(first, last),
                segment_ids=meta.segment_ids,
                vouched=meta.vouched,
                left_out=np.frombuffer(meta.left_out, dtype="<u4").astype(np.intp),
            )
        )
    return chosen, useless


def own_index_file(layout: TopicLayout, segment: Sealed) -> IndexFile:
    """The index that covers this segment alone."""
    return IndexFile(
        path=layout.hnsw(segment.segment_id),
        segment_ids=(segment.segment_id,),
        vouched=segment.vouched,
        left_out=np.empty(0, dtype=np.intp),
    )


def remove_merged(files: Files, layout: TopicLayout, segment_ids: Sequence[int]) -> None:
    """Remove a merged index that is not used any more. What a crash leaves of it, the next start removes."""
    first, last = segment_ids[0], segment_ids[-1]
    files.remove(layout.merged_meta(first, last))
    files.remove(layout.merged_hnsw(first, last))


def _fits(
    files: Files, layout: TopicLayout, name: tuple[int, int], meta: MergedMeta, segments: Mapping[int, Sealed]
) -> bool:
    """Whether a merged index is about exactly these segments. The checksum of the .hnsw waits until it is loaded."""
    ids = meta.segment_ids
    if len(ids) < 2 or (ids[0], ids[-1]) != name or any(number not in segments for number in ids):
        return False
    covered = [segments[number] for number in ids]
    left_out = np.frombuffer(meta.left_out, dtype="<u4")
    return (
        meta.counts == tuple(len(segment.rows) for segment in covered)
        and meta.bin_crcs == tuple(segment.bin_crc for segment in covered)
        and (not len(left_out) or int(left_out.max()) < sum(meta.counts))
        and files.size(layout.merged_hnsw(*name)) == meta.hnsw_bytes
    )


def _plain(segment: Sealed) -> Bits:
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
