"""Readings of a whole data directory: verification, which reads every byte and reports what was checked and what is
wrong; and disk usage: topics, entries, bytes.

Rule: writes nothing, needs no lock and works beside a running daemon. While a daemon serves, an incomplete append at
the end of the newest file is being written and is not damage. Findings about derived files say that they are rebuilt;
`.torn` files are mentioned and are no failure.

Disk usage counts sealed segments from their `.meta`. Only the rest of the log is read, and only again if a file has
changed: the page requests all topics at every view.
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from memd.entries import Erased
from memd.errors import CorruptFile, ForeignFile, ShortLogFile, StoreError
from memd.store.audit import read_book
from memd.store.disk import LocalDisk, check_file
from memd.store.erasure import Log, begun, finding_of, read_erasures, read_forbidden, returned
from memd.store.index.sealed_index import has_meta, read_merged_meta, read_segment_meta
from memd.store.layout import (
    AuditLayout,
    TopicLayout,
    check_topic,
    erasures_dir,
    is_derived,
    key_damage,
    segments_before,
    topic_ids_in,
)
from memd.store.log import recovery
from memd.store.log.columns import ROW, Records, rows_from, superseded
from memd.store.log.format import MAGIC_JOURNAL, decode_header, long_payload, scan_records
from memd.store.log.journal import records_of
from memd.store.log.segment import SegmentMeta
from memd.store.tools.backup import missing_topics
from memd.store.tools.export import log_columns
from memd.wording import counted, day_and_time

_WRONG = {"damaged", "derived", "foreign", "returned", "unfinished"}


class VerifyCounts(msgspec.Struct):
    """Numbers of things read."""

    topics: int = 0
    files: int = 0
    records: int = 0
    bytes: int = 0


class VerifyReport(msgspec.Struct):
    """The outcome of `verify`."""

    lines: list[str]
    """For a person: the findings, then a summary."""
    counts: VerifyCounts
    damaged: list[recovery.Finding]
    """Findings about files that are lost, misplaced or must be rebuilt."""
    ok: bool


def verify(data_dir: Path, files: LocalDisk, *, is_served: bool = False) -> VerifyReport:
    """Check headers, every record's checksum and contents, groups, order of canonical ids, indexes and journals.
    `is_served`: a daemon holds the directory and may be writing to it. Raises StoreError: the directory itself cannot
    be read; unreadable files are findings."""
    check = _Verification(files, data_dir, is_served=is_served)
    for topic_id in topic_ids_in(files, data_dir):
        check.topic(TopicLayout(data_dir, topic_id))
    check.erasures()
    check.findings += missing_topics(data_dir, files)
    counts = check.counts
    wrong = [finding for finding in check.findings if finding.kind in _WRONG]
    summary = (
        f"checked {counted(counts.topics, 'topic')}: {counted(counts.files, 'file')}, "
        f"{counted(counts.records, 'record')}, {counted(counts.bytes, 'byte')}; "
        + (counted(len(wrong), "finding") if wrong else "all whole")
    )
    return VerifyReport(lines=[*map(str, check.findings), summary], counts=counts, damaged=wrong, ok=not wrong)


def with_audit(report: VerifyReport, data_dir: Path, files: LocalDisk) -> VerifyReport:
    """Return the report with the findings about the audit, if there is one. Raises StoreError: its files cannot be
    read."""
    kept = read_book(files, data_dir, lambda _: False)
    if kept is None:
        return report
    folder = str(AuditLayout(data_dir).folder)
    wrong = [recovery.Finding("damaged", folder, one) for one in kept.findings]
    told = [recovery.Finding("notice", folder, one) for one in kept.notices]
    state = recovery.Finding("notice", folder, f"{counted(kept.head.n, 'line')}, {'NOT ' if wrong else ''}whole")
    lines = [*report.lines[:-1], *map(str, (*wrong, *told, state)), report.lines[-1]]
    return msgspec.structs.replace(report, lines=lines, damaged=[*report.damaged, *wrong], ok=report.ok and not wrong)


class _Verification:
    def __init__(self, files: LocalDisk, data_dir: Path, *, is_served: bool) -> None:
        self._files = files
        self._erasures_dir = erasures_dir(data_dir)
        self._is_served = is_served
        self.counts = VerifyCounts()
        self.findings: list[recovery.Finding] = []
        self._ids: set[int] = set()
        """The canonical_ids of a topic's entries, as read."""
        self._last_id = 0
        """The highest of those in the files so far."""
        self._metas: dict[int, SegmentMeta] = {}
        """Those of its full segments that can be read."""
        self._logs: list[Log] = []
        """Their columns, if something was erased in the topic."""
        self._marks: Counter[tuple[int, str]] = Counter()
        """Number of erased entries in all topics, by time and author of the erasure."""
        erasures, problems = read_erasures(files, self._erasures_dir)
        self._erasures = begun(erasures)
        self.findings += problems

    def erasures(self) -> None:
        """Report each erasure, with its time and author."""
        self.findings += (finding_of(one, self._erasures_dir) for one in self._erasures)
        known = {one.at for one in self._erasures}
        for (at, by), count in self._marks.items():
            if at not in known:
                message = f"{counted(count, 'entry')} erased on {day_and_time(at)} by {by or 'somebody'}"
                self._add_finding("notice", self._erasures_dir.parent, message)

    def topic(self, layout: TopicLayout) -> None:
        self.counts.topics += 1
        if damage := key_damage(self._files, layout):
            self._add_finding("damaged", layout.key, damage)
            return
        # Before the log is read: a running daemon may append to both meanwhile, and to the log first.
        journal = self._read(layout.hot) if self._files.size(layout.hot) is not None else None
        self._ids, self._last_id, self._metas, self._logs = set(), 0, {}, []
        active = self._read(layout.active) if self._files.size(layout.active) is not None else None
        active_file = self._decoded(layout, layout.active, active) if active is not None else None
        header = active_file.header if active_file is not None else None
        numbers = segments_before(self._files, layout, active, header.segment_id if header is not None else None)
        missing = layout.missing_segment_ids(self._files, None if header is None else header.segment_id)
        self.findings += (recovery.missing_segment(layout.bin(number)) for number in missing)
        for number in numbers:
            self._segment(layout, number)
        if active_file is not None:
            self._log_file(layout.active, active_file, is_last=True)
        self._merged(layout)
        try:
            if read_forbidden(self._files, layout):
                self._count_file(layout.forbidden)
        except StoreError as error:
            self._add_finding("damaged", layout.forbidden, str(error))
        self.findings += returned(self._erasures, layout, self._logs)
        if journal is not None and self._journal(layout.hot, journal):
            extent = records_of(journal).extent
            self.findings += recovery.ahead_of_log(
                layout.hot, extent, lambda upto: sum(one <= upto for one in self._ids)
            )
        for directory in (layout.directory, layout.segments):
            for name in self._files.names(directory):
                if damage := self._files.damage_of(directory / name):
                    self._add_finding("damaged", directory / name, damage)
        for path in recovery.torn_files(self._files, (layout.directory, layout.segments)):
            size = self._files.size(path)
            self._add_finding("notice", path, f"holds {size} bytes of an interrupted write that was moved here")

    def _segment(self, layout: TopicLayout, number: int) -> None:
        path, columns = layout.bin(number), layout.meta(number)
        data = self._read(path)
        log_file = self._decoded(layout, path, data) if data is not None else None
        if data is None or log_file is None:
            return
        if log_file.header is not None and log_file.header.segment_id != number:
            self._add_finding("damaged", path, f"its header says that it is segment {log_file.header.segment_id}")
        self._log_file(path, log_file, is_last=False)
        if not has_meta(self._files, layout, number):
            if not self._is_served:
                self._add_finding("notice", path, "has no index yet; the next start of memd builds it")
            return
        try:
            _, meta = read_segment_meta(self._files, layout, number)
            self._metas[number] = meta
            self._count_file(columns)
            for start, end in meta.gaps:
                if end > len(data):
                    self._add_finding("damaged", path, f"bytes {start} to {end} were cut off; what they held is lost")
            rows = rows_from(log_file.entries, log_file.spans)
            if meta.bin_crc != zlib.crc32(data) or meta.rows != rows.tobytes():
                was = f"does not agree with {path.name}, which was changed since, and no start notices it"
                self._add_finding("derived", columns, f"{was}: end memd and remove this file; it is made anew")
            self._words(layout, number, number)
        except ForeignFile as error:
            self._add_finding("foreign", columns, str(error))
        except ShortLogFile as error:
            self._add_finding("damaged", path, str(error))
        except StoreError as error:
            self._add_finding("derived", columns, f"is rebuilt from the log at the next start: {error}")

    def _words(self, layout: TopicLayout, first: int, last: int) -> None:
        path = layout.words(first, last)
        if self._files.size(path) is None:
            return
        if not long_payload(self._files.read(path)):
            wider = [one for one in layout.merges(self._files) if one[0] <= first and last <= one[1]]
            is_read = wider in ([], [(first, last)])
            when = "from the log" if is_read else "when it is needed: what is searched is of a merged index"
            self._add_finding("derived" if is_read else "notice", path, f"does not match its checksum; rebuilt {when}")
        self._count_file(path)

    def _merged(self, layout: TopicLayout) -> None:
        """Check that each merged index is the file that its `.meta` vouches for and covers segments that exist."""
        for first, last in layout.merges(self._files):
            path = layout.merged_index(first, last)
            if path.with_suffix(".hnsw").name in self._files.names(layout.segments):
                continue  # an older memd's, which the next start removes
            meta = read_merged_meta(self._files, layout, first, last)
            try:
                if meta is None:
                    raise CorruptFile(f"{layout.merged_meta(first, last)}: is missing or cannot be read")
                covered = [self._metas[number].bin_crc for number in meta.segment_ids if number in self._metas]
                if (meta.segment_ids[0], meta.segment_ids[-1]) != (first, last) or covered != list(meta.bin_crcs):
                    raise CorruptFile(f"{path}: covers other segments than those beside it")
                check_file(self._files, path, meta.checksum)
                self._count_file(path)
                self._words(layout, first, last)
            except StoreError as error:
                if not self._is_served:  # a running daemon may be writing or removing it
                    self._add_finding("derived", path, f"is left out at the next start: {error}")

    def _log_file(self, path: Path, log_file: recovery.LogFile, *, is_last: bool) -> None:
        self.findings += recovery.find_damage(log_file, is_last=is_last)
        if is_last and log_file.has_tail:
            tail = f"{log_file.size - log_file.whole_end} bytes at offset {log_file.whole_end}"
            if self._is_served:
                self._add_finding("notice", path, f"{tail} are being written")
            else:
                self._add_finding(
                    "torn", path, f"{tail} are an interrupted write; the next start of memd moves them to a .torn file"
                )
        for entry, span in zip(log_file.entries, log_file.spans, strict=True):
            if entry.canonical_id <= self._last_id:
                self._add_finding(
                    "damaged", path, f"entry {entry.canonical_id} at offset {span.offset} is out of order"
                )
            self._last_id = max(self._last_id, entry.canonical_id)

    def _journal(self, path: Path, data: bytes) -> bool:
        """Check a journal; False if it is not this topic's."""
        try:
            check_topic(self._files, path.parent, decode_header(data, magic=MAGIC_JOURNAL, name=str(path)), path)
        except CorruptFile as error:
            self._add_finding("damaged", path, str(error))
        except ForeignFile as error:
            self._add_finding("foreign", path, str(error))
            return False
        found = scan_records(data)
        self.counts.records += len(found.spans)
        for start, end in found.gaps:
            self._add_finding(
                "damaged", path, f"bytes {start} to {end} cannot be read; unstored turns in them are lost"
            )
        if found.end < len(data) and not self._is_served:
            self._add_finding(
                "torn", path, f"{len(data) - found.end} bytes at offset {found.end} are an interrupted write"
            )
        return True

    def _decoded(self, layout: TopicLayout, path: Path, data: bytes) -> recovery.LogFile | None:
        try:
            log_file = recovery.read_log_file(data, name=str(path), dimension=None)
            check_topic(self._files, layout.directory, log_file.header, path)
        except ForeignFile as error:
            self._add_finding("foreign", path, str(error))
            return None
        self.counts.records += len(log_file.entries)
        self._ids.update(entry.canonical_id for entry in log_file.entries)
        erased = (entry.erased for entry in log_file.entries if isinstance(entry.erased, Erased))
        self._marks.update((one.at, one.by) for one in erased)
        if any(one.topic_id == layout.topic_id for one in self._erasures):
            tag = None if log_file.header is None else log_file.header.topic
            self._logs.append((tag, rows_from(log_file.entries, log_file.spans)))
        return log_file

    def _read(self, path: Path) -> bytes | None:
        try:
            data = self._files.read(path)
        except StoreError as error:
            # A running daemon may have just renamed or replaced it; then it is read under its other name.
            if self._files.size(path) is not None or not self._is_served:
                self._add_finding("damaged", path, str(error))
            return None
        self.counts.files += 1
        self.counts.bytes += len(data)
        return data

    def _count_file(self, path: Path) -> None:
        self.counts.files += 1
        self.counts.bytes += self._files.size(path) or 0

    def _add_finding(self, kind: recovery.Kind, path: Path, message: str) -> None:
        self.findings.append(recovery.Finding(kind, str(path), message.removeprefix(f"{path}: ")))  # as errors begin


class TopicDiskUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One topic on disk."""

    topic_id: str
    chunks: int
    """Number of live chunks."""
    entries: int
    segments: int
    """Number of full segments."""
    log_bytes: int
    """The log and the journal: all that a backup needs."""
    derived_bytes: int
    """Indexes and columns, which can be rebuilt."""
    chunks_by_model: dict[str, int]
    """Live chunks by the fingerprint of the embedding model, without files whose header is damaged."""
    trouble: str = ""
    """Why the log cannot be read, so that nothing of it is counted; empty if it can."""

    def chunks_of_others(self, fingerprint: str) -> int:
        """Return the number of live chunks that a model with another fingerprint embedded."""
        return sum(count for model, count in self.chunks_by_model.items() if model != fingerprint)


def disk_usage(data_dir: Path, files: LocalDisk) -> list[TopicDiskUsage]:
    """Return the usage of all topics, sorted by name. Raises StoreError: the directory cannot be read."""
    return [_topic(files, TopicLayout(data_dir, topic_id)) for topic_id in topic_ids_in(files, data_dir)]


Stamps = dict[Path, tuple[int, int]]
"""Size and time of the last change of each log file."""
_known: WeakKeyDictionary[LocalDisk, dict[Path, tuple[Stamps, TopicDiskUsage]]] = WeakKeyDictionary()
"""The last counts, by the folder of a topic."""


def _topic(files: LocalDisk, layout: TopicLayout) -> TopicDiskUsage:
    log_bytes = derived_bytes = 0
    stamps: Stamps = {}
    for directory in (layout.directory, layout.segments):
        for path in (directory / name for name in files.names(directory)):
            if files.is_directory(path):
                continue
            size = files.size(path) or 0
            if is_derived(path.name):
                derived_bytes += size
            else:
                log_bytes += size
            if path.suffix == ".bin":
                stamps[path] = size, files.changed_at(path)
    known = _known.setdefault(files, {})
    if (counted := known.get(layout.directory)) is None or counted[0] != stamps:
        counted = known[layout.directory] = stamps, _counted(files, layout)
    return msgspec.structs.replace(counted[1], log_bytes=log_bytes, derived_bytes=derived_bytes)


def _counted(files: LocalDisk, layout: TopicLayout) -> TopicDiskUsage:
    found, trouble = [], ""
    try:
        found = list(log_columns(files, layout))
    except StoreError as error:
        trouble = str(error)
    records: Records = np.concatenate([np.empty(0, ROW), *(rows for *_, rows in found)])
    live, by_model, end = ~superseded(records), Counter[str](), 0
    for _, header, rows in found:
        count = int(np.count_nonzero(live[end : (end := end + len(rows))]))
        if header is not None and count:
            by_model[header.fingerprint] += count
    return TopicDiskUsage(
        topic_id=layout.topic_id,
        chunks=int(np.count_nonzero(live)),
        entries=len(records),
        segments=sum(paths[0] != layout.active for paths, _, _ in found),
        log_bytes=0,
        derived_bytes=0,
        chunks_by_model=dict(by_model),
        trouble=trouble,
    )
