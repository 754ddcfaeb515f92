"""Opening a topic: from its files to its segments in memory, in whatever state a crash left them.

Rule: opening twice in a row changes nothing the second time. Only derived files are rebuilt, only temporary ones
removed, only a torn tail of `active.bin` moved. Of sealed segments only the columns are read. A full segment whose
columns are missing, damaged or an older memd's is sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from memd.errors import CorruptFile, ForeignFile, ShortLogFile, StoreError, StoreWriteFailed
from memd.store.claim import Claim
from memd.store.disk import LocalDisk, Wiper
from memd.store.index.sealed_index import (
    SealedIndex,
    choose_merged,
    has_meta,
    read_segment_meta,
    seal,
    sealed_segment,
)
from memd.store.layout import TopicLayout, check_topic
from memd.store.log import recovery
from memd.store.log.format import (
    HEADER_BYTES,
    Header,
    ModelId,
    decode_entry,
    payload_of,
    scan_records,
)
from memd.store.log.segment import GrowingSegment, SealedSegment, new_header, read_header

_TAIL_BYTES = 64 << 10
"""Read from the end of a log file to find its last entry: about twenty entries."""


class OpenedTopic(msgspec.Struct, kw_only=True):
    """A topic as read from disk."""

    segments: dict[int, GrowingSegment | SealedSegment] = {}
    """By number, ascending; the active one included."""
    indexes: list[SealedIndex] = []
    """Those to search: together they cover each searchable sealed segment once."""
    active: GrowingSegment | None = None
    """None until something is appended."""
    findings: list[recovery.Finding] = []
    missing: list[Path] = []
    """Full segments that are not there, or are another topic's."""


def open_topic(claim: Claim, model: ModelId) -> OpenedTopic:
    """Read a topic's files and repair what a crash left. Raises ForeignFile: `active.bin` has a newer format, is not
    memd's or is another topic's; StoreError: a file cannot be read, or a torn tail cannot be moved."""
    files, layout = claim.files, claim.layout
    recovery.remove_temporaries(files, layout.directory)
    recovery.remove_temporaries(files, layout.segments)
    with suppress(StoreError):  # an older memd's, which had vectors and words in other files
        claim.remove(layout.segments / one for one in files.names(layout.segments) if one.endswith(".hnsw"))
        if files.is_directory(layout.lexical):
            Wiper(files).wipe_folder(layout.lexical)
    header = read_header(files, layout.active)
    missing = layout.missing_segment_ids(files, None if header is None else header.segment_id)
    opened = OpenedTopic()
    opened.missing = [layout.bin(segment_id) for segment_id in missing]
    opened.findings += map(recovery.missing_segment, opened.missing)
    for segment_id in layout.segment_ids(files):
        _open_full(claim, model, segment_id, opened)
    if files.size(layout.active) is not None:
        _open_active(claim, model, opened)
    _open_merged(claim, opened)
    return opened


def highest_id_on_disk(files: LocalDisk, layout: TopicLayout, dimension: int) -> int:
    """Return the highest canonical_id of a topic, reading as little as possible. Unreadable files count as empty."""
    highest = _highest_in(files, layout.active, dimension)
    for segment_id in reversed(layout.segment_ids(files)):
        with suppress(StoreError):
            return max(highest, read_segment_meta(files, layout, segment_id)[1].canonical_id_range[1])
        highest = max(highest, _highest_in(files, layout.bin(segment_id), dimension))
    return highest


def _highest_in(files: LocalDisk, path: Path, dimension: int) -> int:
    """That of a log file: of its last entry, where its end is intact; 0 if it cannot be read."""
    with suppress(StoreError):
        if (size := files.size(path) or 0) >= 2 * _TAIL_BYTES:
            tail = files.read_at(path, size - _TAIL_BYTES, _TAIL_BYTES)
            scanned = scan_records(tail, start=0)
            if scanned.end == len(tail) and len(scanned.gaps) <= 1 and len(scanned.spans) > 1:
                return decode_entry(payload_of(tail, scanned.spans[-1]), dimension=None).canonical_id
        log_file = recovery.read_log_file(files.read(path), name=str(path), dimension=dimension)
        return max((entry.canonical_id for entry in log_file.entries), default=0)
    return 0


def _open_full(claim: Claim, model: ModelId, segment_id: int, opened: OpenedTopic) -> None:
    """Open a full segment by its derived files, or by its log if they are missing or damaged."""
    files, layout, lost = claim.files, claim.layout, list[tuple[int, int]]()
    path = layout.bin(segment_id)
    try:
        if has_meta(files, layout, segment_id):
            header, meta = read_segment_meta(files, layout, segment_id)
            if _is_left_out(files, layout, header, path, opened):
                return
            opened.segments[segment_id] = segment = sealed_segment(files, layout, header, meta)
            if model.wrote(header):
                opened.indexes.append(SealedIndex(files, layout, [segment]))
            cut = [f"bytes {start} to {end} cannot be read; see `memd verify`" for start, end in meta.gaps]
            opened.findings += [recovery.Finding("damaged", str(path), one) for one in cut]
            return
    except ShortLogFile as error:
        opened.findings.append(recovery.Finding("damaged", str(path), str(error)))
        lost = [error.gap]
    except StoreError as error:
        opened.findings.append(recovery.Finding("derived", str(path), f"its index is rebuilt from the log: {error}"))
    open_by_log(claim, model, segment_id, opened, lost)


def _is_left_out(files: LocalDisk, layout: TopicLayout, header: Header | None, path: Path, opened: OpenedTopic) -> bool:
    """Whether a full segment is another topic's; notes it."""
    try:
        check_topic(files, layout.directory, header, path)
    except ForeignFile as error:
        opened.findings.append(recovery.Finding("foreign", str(path), f"it is left out: {error}"))
        opened.missing.append(path)
        return True
    return False


def _open_merged(claim: Claim, opened: OpenedTopic) -> None:
    """Replace indexes by the merged ones that cover them; remove the merged indexes that are useless."""
    files, layout = claim.files, claim.layout
    own = {index.segment_ids[0]: index for index in opened.indexes}
    merged, useless = choose_merged(files, layout, {number: index.segments[0] for number, index in own.items()})
    claim.remove(useless)
    for meta in merged:
        segments = [own.pop(number).segments[0] for number in meta.segment_ids]
        own[meta.segment_ids[0]] = SealedIndex(files, layout, segments, checksum=meta.checksum)
    opened.indexes = list(own.values())


def open_by_log(
    claim: Claim, model: ModelId, segment_id: int, opened: OpenedTopic, lost: Sequence[tuple[int, int]] = ()
) -> None:
    """Read a full segment from its log, and seal it if its columns can be written; `lost` is missing at its end."""
    files, layout = claim.files, claim.layout
    path = layout.bin(segment_id)
    try:
        log_file = recovery.read_log_file(files.read(path), name=str(path), dimension=model.dimension)
    except ForeignFile as error:
        opened.findings.append(recovery.Finding("foreign", str(path), f"it is left out: {error}"))
        return
    if _is_left_out(files, layout, log_file.header, path, opened):
        return
    opened.findings += recovery.find_damage(log_file, is_last=False)
    header = log_file.header or new_header(layout, model, segment_id)
    if header.segment_id != segment_id:
        opened.findings.append(
            recovery.Finding("damaged", str(path), f"its header says that it is segment {header.segment_id}")
        )
    header = msgspec.structs.replace(header, segment_id=segment_id)
    segment = GrowingSegment(files, [path], header, searchable=model.wrote(header))
    _fill(segment, log_file, len(log_file.entries), opened)
    if log_file.has_tail and log_file.read_end < log_file.size:
        segment.gaps.append((log_file.read_end, log_file.size))
    segment.gaps += lost
    with suppress(StoreWriteFailed):
        opened.segments[segment_id], indexes = seal(claim, segment)
        opened.indexes += indexes


def _open_active(claim: Claim, model: ModelId, opened: OpenedTopic) -> None:
    files, layout = claim.files, claim.layout
    path, data = layout.active, files.read(layout.active)
    log_file = recovery.read_log_file(data, name=str(path), dimension=model.dimension)
    header = log_file.header
    check_topic(files, layout.directory, header, path)
    if len(data) < HEADER_BYTES or not data.strip(b"\0"):
        opened.findings.append(recovery.set_aside(files, path, data))
        return
    if header is None and not log_file.entries:
        raise CorruptFile(
            f"{path}: nothing in it can be read; if it is not memd's, move it away, else restore it from a backup"
        )
    segment_id = max(header.segment_id if header else 0, layout.next_segment_id(files))
    torn = []
    if log_file.has_tail and header is not None:
        torn = [recovery.cut_torn_tail(files, path, data, log_file.whole_end)]
    if header is None or (log_file.whole_count and not model.wrote(header)):
        # Nothing is appended after a header that does not describe it.
        claim.rotate(segment_id)
        open_by_log(claim, model, segment_id, opened)
        opened.findings += torn
        return
    opened.findings += [*recovery.find_damage(log_file, is_last=True), *torn]
    if not model.wrote(header):
        return  # empty: the next append replaces it with a file of this model
    header = msgspec.structs.replace(header, segment_id=segment_id)
    opened.active = GrowingSegment(files, [path, layout.bin(segment_id)], header, searchable=True)
    _fill(opened.active, log_file, log_file.whole_count, opened)
    claim.resume("log", log_file.whole_end)


def _fill(segment: GrowingSegment, log_file: recovery.LogFile, count: int, opened: OpenedTopic) -> None:
    """Add the first `count` entries of a file to an empty segment; the messages of an append with a gap do not count
    as stored."""
    is_complete = recovery.in_complete_appends(log_file)[:count]
    segment.extend(
        [
            entry if complete else msgspec.structs.replace(entry, digests=())
            for entry, complete in zip(log_file.entries[:count], is_complete, strict=True)
        ],
        log_file.spans[:count],
    )
    opened.segments[segment.segment_id] = segment
    segment.gaps = list(log_file.gaps)
