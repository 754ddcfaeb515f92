"""From the files of a topic to its segments in memory, whatever state a crash left them in.

Rule: opening twice in a row changes nothing the second time. Only derived files are ever rebuilt, only temporary ones
removed, only a torn tail of `active.bin` moved. Of sealed segments only the columns are read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from memd.entries import Entry
from memd.errors import CorruptFile, ForeignFile, StoreError
from memd.store.files import Files, replace
from memd.store.index.merging import chosen_merges, own_index_file
from memd.store.index.sealing import highest_canonical_id, read_meta, sealed_from
from memd.store.layout import TopicLayout
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    Header,
    decode_entry,
    decode_header,
    encode_header,
    payload_at,
    scan,
    topic_tag,
)
from memd.store.log.recovery import (
    Finding,
    LogFile,
    damage,
    in_whole_appends,
    read_log_file,
    remove_temporaries,
    set_tail_aside,
)
from memd.store.log.segment import Growing, Sealed
from memd.store.transitions import IndexFile

_TAIL_BYTES = 64 << 10
"""How much of the end of a log file is read to learn what came last: some twenty entries."""


class Model(msgspec.Struct, frozen=True):
    """The embedding model whose vectors are written and searched now."""

    dimension: int
    fingerprint: str

    def wrote(self, header: Header) -> bool:
        """Whether a file's vectors can be compared with this model's."""
        return header.dimension == self.dimension and header.fingerprint == self.fingerprint


class Opened(msgspec.Struct, kw_only=True):
    """What `open_topic` found."""

    segments: dict[int, Growing | Sealed]
    """By number, ascending; the active one included."""
    index_files: list[IndexFile]
    """Which together cover each sealed segment that can be searched once."""
    gaps: dict[int, list[tuple[int, int]]]
    """Unreadable ranges of the segments that are not sealed."""
    active: Growing | None
    """None until something is appended."""
    active_end: int
    findings: list[Finding]


def open_topic(files: Files, layout: TopicLayout, model: Model) -> Opened:
    """Read a topic's files and put in order what a crash left.

    Raises:
        ForeignFile: `active.bin` is of a newer format, or not memd's.
        StoreError: a file cannot be read, or a torn tail not be set aside.
    """
    remove_temporaries(files, layout.directory)
    remove_temporaries(files, layout.segments)
    opened = Opened(segments={}, index_files=[], gaps={}, active=None, active_end=0, findings=[])
    for segment_id in layout.segment_ids(files):
        if not _open_sealed(files, layout, model, segment_id, opened):
            _open_unsealed(files, layout, model, segment_id, opened)
    if files.size(layout.active) is not None:
        _open_active(files, layout, model, opened)
    _open_merged(files, layout, opened)
    return opened


def reread_segment(files: Files, layout: TopicLayout, model: Model, segment_id: int) -> Opened:
    """One full segment from its log alone, because its index turned out to be damaged.

    Raises:
        StoreError: the log cannot be read.
    """
    opened = Opened(segments={}, index_files=[], gaps={}, active=None, active_end=0, findings=[])
    _open_unsealed(files, layout, model, segment_id, opened)
    return opened


def header_of(files: Files, path: Path) -> Header | None:
    """What a log file says about itself; None if there is no such file or it cannot be read."""
    try:
        return decode_header(files.read_at(path, 0, HEADER_BYTES), magic=MAGIC_LOG, name=str(path))
    except StoreError:
        return None


def create_active(files: Files, layout: TopicLayout, model: Model, segment_id: int) -> Growing:
    """A new, empty, durable `active.bin`."""
    header = Header(
        magic=MAGIC_LOG,
        dimension=model.dimension,
        segment_id=segment_id,
        fingerprint=model.fingerprint,
        topic=topic_tag(layout.topic_id),
    )
    replace(files, layout.active, encode_header(header))
    files.sync_directory(layout.data_dir)  # the topic's own directory may be new
    return Growing(files, [layout.active, layout.bin(segment_id)], header, searchable=True)


def rotate(files: Files, layout: TopicLayout, segment_id: int) -> None:
    """Give a full `active.bin` its place among the segments."""
    files.make_directory(layout.segments)
    files.rename(layout.active, layout.bin(segment_id))
    files.sync_directory(layout.segments)
    files.sync_directory(layout.directory)


def highest_id_on_disk(files: Files, layout: TopicLayout, dimension: int) -> int:
    """The highest canonical_id of a topic, reading as little as possible. Unreadable files count as empty."""
    highest = _highest_in(files, layout.active, dimension)
    for segment_id in reversed(layout.segment_ids(files)):
        found = highest_canonical_id(files, layout, segment_id)
        if found is not None:
            return max(highest, found)
        highest = max(highest, _highest_in(files, layout.bin(segment_id), dimension))
    return highest


def _highest_in(files: Files, path: Path, dimension: int) -> int:
    try:
        last = _last_entry(files, path)
        if last is not None:
            return last.canonical_id
        log_file = read_log_file(files.read(path), name=str(path), dimension=dimension)
    except StoreError:
        return 0
    return max((entry.canonical_id for entry in log_file.entries), default=0)


def _last_entry(files: Files, path: Path) -> Entry | None:
    """The last entry of a log file, found from its end; None unless whole records follow one another up to there.

    Raises:
        StoreError: the file cannot be read, or the last record is no entry.
    """
    size = files.size(path)
    if size is None or size < 2 * _TAIL_BYTES:
        return None
    data = files.read_at(path, size - _TAIL_BYTES, _TAIL_BYTES)
    found = scan(data, start=0)
    if not found.spans or found.end != len(data) or len(found.gaps) > 1 or len(found.spans) < 2:
        return None
    payload = payload_at(data, found.spans[-1].offset)
    assert payload is not None, "scanned just now"
    return decode_entry(payload, dimension=None)


def _open_sealed(files: Files, layout: TopicLayout, model: Model, segment_id: int, opened: Opened) -> bool:
    """Open a segment from its derived files; False if they are missing or damaged."""
    if files.size(layout.meta(segment_id)) is None:
        return False
    name = str(layout.bin(segment_id))
    try:
        header, meta = read_meta(files, layout, segment_id)
        segment = sealed_from(files, layout, header, meta)
        if model.wrote(header):
            if files.size(layout.hnsw(segment_id)) != meta.hnsw_bytes:  # its checksum waits until it is loaded
                raise CorruptFile(f"{layout.hnsw(segment_id)}: is missing or not as long as it was")
            opened.index_files.append(own_index_file(layout, segment))
    except StoreError as error:
        opened.findings.append(Finding("derived", name, f"its index is rebuilt from the log: {error}"))
        return False
    for start, end in meta.gaps:
        opened.findings.append(Finding("damaged", name, f"bytes {start} to {end} cannot be read; see `memd verify`"))
    opened.segments[segment_id] = segment
    return True


def _open_merged(files: Files, layout: TopicLayout, opened: Opened) -> None:
    """Search merged indexes in place of what they cover; remove those that something larger covers."""
    own = {file.segment_ids[0]: file for file in opened.index_files}
    searchable = {number: s for number, s in opened.segments.items() if number in own and isinstance(s, Sealed)}
    merged, useless = chosen_merges(files, layout, searchable)
    for path in useless:
        files.remove(path)
    covered = {number for file in merged for number in file.segment_ids}
    opened.index_files = [*merged, *(file for number, file in own.items() if number not in covered)]


def _open_unsealed(files: Files, layout: TopicLayout, model: Model, segment_id: int, opened: Opened) -> None:
    path = layout.bin(segment_id)
    try:
        log_file = read_log_file(files.read(path), name=str(path), dimension=model.dimension)
    except ForeignFile as error:
        opened.findings.append(Finding("foreign", str(path), f"it is left out: {error}"))
        return
    opened.findings += damage(log_file, topic_id=layout.topic_id, is_last=False)
    header = log_file.header or _assumed_header(layout, model, segment_id)
    if header.segment_id != segment_id:
        opened.findings.append(Finding("damaged", str(path), f"says that it is segment {header.segment_id}"))
    header = msgspec.structs.replace(header, segment_id=segment_id)
    segment = Growing(files, [path], header, searchable=model.wrote(header))
    _fill(segment, log_file, len(log_file.entries), opened)
    if log_file.has_tail:
        opened.gaps[segment_id] = [*log_file.gaps, (log_file.whole_end, log_file.size)]


def _open_active(files: Files, layout: TopicLayout, model: Model, opened: Opened) -> None:
    path, data = layout.active, files.read(layout.active)
    log_file = read_log_file(data, name=str(path), dimension=model.dimension)
    header = log_file.header
    if header is None and not log_file.entries:
        raise CorruptFile(
            f"{path}: nothing in it can be read; if it is not memd's, move it away, else restore it from a backup"
        )
    findings = damage(log_file, topic_id=layout.topic_id, is_last=header is not None)
    count = len(log_file.entries)
    if log_file.has_tail and header is not None:
        findings.append(set_tail_aside(files, path, data, log_file.whole_end))
        count = log_file.whole_count
    opened.findings += findings
    segment_id = max([header.segment_id if header else 0, *(number + 1 for number in layout.segment_ids(files)), 1])
    taken = msgspec.structs.replace(header or _assumed_header(layout, model, segment_id), segment_id=segment_id)
    if header is not None and count == 0 and not model.wrote(header):
        return  # nothing in it: the next append replaces it by one of this model
    segment = Growing(files, [path, layout.bin(segment_id)], taken, searchable=model.wrote(taken))
    _fill(segment, log_file, count, opened)
    if header is None or not model.wrote(header):
        # Never append behind a header that does not describe what is appended.
        rotate(files, layout, segment_id)
        segment.rotated_to(layout.bin(segment_id))
        return
    opened.active, opened.active_end = segment, log_file.whole_end


def _fill(segment: Growing, log_file: LogFile, count: int, opened: Opened) -> None:
    vouched = in_whole_appends(log_file)[:count]
    segment.extend(
        [
            entry if whole else msgspec.structs.replace(entry, digests=())
            for entry, whole in zip(log_file.entries[:count], vouched, strict=True)
        ],
        log_file.spans[:count],
    )
    opened.segments[segment.segment_id] = segment
    opened.gaps[segment.segment_id] = log_file.gaps


def _assumed_header(layout: TopicLayout, model: Model, segment_id: int) -> Header:
    """What a damaged header most likely said."""
    return Header(
        magic=MAGIC_LOG,
        dimension=model.dimension,
        segment_id=segment_id,
        fingerprint=model.fingerprint,
        topic=topic_tag(layout.topic_id),
    )
