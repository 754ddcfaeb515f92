"""A log file as found on disk: its intact entries, and how damage is handled.

Rule: only a tail is ever cut off, only from the active file, and only after its bytes are safe in a `.torn` file. A
tail is unreadable bytes with no readable record after them. Other unreadable bytes are corruption: they are reported
and stay in place, and the readable rest is served.

A log only grows, so it never has fewer entries up to a canonical_id than at an earlier time. The journal relies on
entries of the log, so it keeps the log's extent, and a log that has lost entries is noticed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from memd.entries import Entry
from memd.errors import CorruptFile
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, replace_file
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    Header,
    Span,
    decode_entry,
    decode_header,
    payload_of,
    scan_records,
)

TORN_SUFFIX = ".torn"
TORN_KEPT = 8
"""Number of interrupted writes kept beside one file: they are for people; memd reads none of them."""
_TORN = re.compile(r"\.torn(?:\.(\d+))?$")

Kind = Literal["torn", "damaged", "derived", "foreign", "returned", "unfinished", "notice"]
"""torn: an interrupted write was moved to a `.torn` file. damaged: part of the log cannot be read. derived: an index is
rebuilt from the log. foreign: a file of another model, topic or version. returned: erased text is stored again.
unfinished: a pending erasure. notice: nothing is wrong."""


class Finding(msgspec.Struct, frozen=True):
    """A fact about a file that its owner should know."""

    kind: Kind
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class LogFile(msgspec.Struct, frozen=True, kw_only=True):
    """The readable contents of one log file."""

    name: str
    header: Header | None
    """None if the header is damaged; the records after it may still be readable."""
    entries: list[Entry]
    spans: list[Span]
    """Parallel to `entries`."""
    gaps: list[tuple[int, int]]
    """(start, end) of unreadable bytes before a readable record."""
    appends: list[range]
    """The rows of each append, as far as they can be read."""
    whole_count: int
    """Entries before an incomplete append at the end of the file."""
    whole_end: int
    """The offset just after these entries."""
    size: int

    @property
    def has_tail(self) -> bool:
        """Whether bytes follow the last complete append."""
        return self.whole_end < self.size

    @property
    def read_end(self) -> int:
        """The offset after the last readable record and after all gaps."""
        return max([HEADER_BYTES, *(one.end for one in self.spans[-1:]), *(end for _, end in self.gaps)])


def read_log_file(data: bytes, *, name: str, dimension: int | None) -> LogFile:
    """Decode a log file. If its header is damaged, vectors are checked against `dimension`, if known. Raises
    ForeignFile: an intact header shows that this version of memd cannot read the file."""
    try:
        header: Header | None = decode_header(data, magic=MAGIC_LOG, name=name)
    except CorruptFile:
        header = None
    found = scan_records(data)
    entries, spans, gaps = [], [], list(found.gaps)
    for span in found.spans:
        try:
            entries.append(decode_entry(payload_of(data, span), dimension=header.dimension if header else dimension))
            spans.append(span)
        except CorruptFile:
            gaps.append((span.offset, span.end))
    appends = _appends(entries, spans)
    whole_count = appends[-1].start if entries and entries[-1].group_left else len(entries)
    whole_end = spans[whole_count - 1].end if whole_count else HEADER_BYTES
    # A record with a valid checksum that is no entry was not torn: it stays, and all before it.
    bad_end = max((end for _, end in gaps), default=0)
    if bad_end > whole_end:
        whole_count, whole_end = len(entries), max(bad_end, spans[-1].end if spans else 0)
    return LogFile(
        name=name,
        header=header,
        entries=entries,
        spans=spans,
        gaps=sorted(gaps),
        appends=appends,
        whole_count=whole_count,
        whole_end=min(whole_end, len(data)),
        size=len(data),
    )


def find_damage(log_file: LogFile, *, is_last: bool) -> list[Finding]:
    """Report losses. The tail of the last file is not one: an interrupted write left it."""
    name, header = log_file.name, log_file.header
    findings = []
    if header is None:
        findings.append(Finding("damaged", name, f"the header (bytes 0 to {HEADER_BYTES}) is damaged"))
    lost = [(start, f"bytes {start} to {end} cannot be read") for start, end in log_file.gaps]
    lost += [(offset, f"the rest of the append at offset {offset} is missing") for offset in broken_appends(log_file)]
    if log_file.has_tail and not is_last:
        start, size = log_file.read_end, log_file.size
        ended = f"bytes {start} to {size} at its end are not a whole append"
        lost.append((start, ended if start < size else "the rest of the last append is missing"))
    return findings + [
        Finding("damaged", name, f"{what}; {_neighbours(log_file, offset)}") for offset, what in sorted(lost)
    ]


def missing_segment(path: Path) -> Finding:
    """Return the finding that a full segment is missing."""
    return Finding(
        "damaged",
        str(path),
        "is missing: what it held is not found any more. Stop memd and put the file back, out of a backup if need be; "
        "without it memd goes on with the rest",
    )


def cut_torn_tail(files: LocalDisk, path: Path, data: bytes, whole_end: int) -> Finding:
    """Copy the bytes from `whole_end` on to a new `.torn` file beside `path`, then cut them off `path`, durably.

    A crash in between leaves the tail in both places; the next call does not copy it again. Raises StoreWriteFailed:
    `path` is unchanged, or changed exactly as intended.
    """
    tail = data[whole_end:]
    torn = save_torn_copy(files, path, tail)
    files.cut(path, whole_end)
    return Finding(
        "torn", str(path), f"an interrupted write of {len(tail)} bytes at offset {whole_end} was moved to {torn.name}"
    )


def set_aside(files: LocalDisk, path: Path, data: bytes) -> Finding:
    """Move a log file without any readable log to a `.torn` file, durably; the next append begins a new one.

    Some file systems leave such a file after a power cut: its length is written, its contents are not.
    """
    moved = f" It was moved to {save_torn_copy(files, path, data, is_whole_file=True).name}." if data else ""
    files.remove(path)
    files.sync_directory(path.parent)
    return Finding("damaged", str(path), f"has no header and no entry: {len(data)} bytes, lost or empty.{moved}")


def save_torn_copy(files: LocalDisk, path: Path, data: bytes, *, is_whole_file: bool = False) -> Path:
    """Save `data` under a new `.torn` name beside `path`, unless an earlier one has the same contents.

    The last `TORN_KEPT` of one file stay. `is_whole_file`: the file holds exactly this and is about to be replaced. It
    is renamed if possible, because `data` of an encrypted file has zeros at undecryptable places.
    """
    ends = {torn: _TORN.search(torn.name) for torn in torn_files(files, [path.parent])}
    earlier = {int(end[1] or 1): torn for torn, end in ends.items() if end and torn.name[: end.start()] == path.name}
    for torn in earlier.values():
        if files.size(torn) == len(data) and files.read(torn) == data:
            return torn
    for old in sorted(earlier)[: max(0, len(earlier) + 1 - TORN_KEPT)]:
        files.remove(earlier[old])
    number = max(earlier, default=0) + 1
    torn = path.with_name(path.name + (TORN_SUFFIX if number == 1 else f"{TORN_SUFFIX}.{number}"))
    if is_whole_file and files.link(path, torn):
        files.sync_directory(path.parent)
    else:
        replace_file(files, torn, data)
    return torn


def torn_files(files: LocalDisk, directories: Iterable[Path]) -> list[Path]:
    """Return the `.torn` files in some directories: bytes that memd moved aside when it repaired a file."""
    return [directory / name for directory in directories for name in files.names(directory) if _TORN.search(name)]


def remove_temporaries(files: LocalDisk, directory: Path) -> None:
    """Remove the temporary files that a crash left; nothing refers to them."""
    for name in files.names(directory):
        if name.endswith(TEMPORARY_SUFFIX):
            files.remove(directory / name)


def _appends(entries: list[Entry], spans: list[Span]) -> list[range]:
    """Return the rows of each append: adjacent records whose `group_left` falls by one."""
    found, start = [], 0
    for at, entry in enumerate(entries, start=1):
        left = entry.group_left
        goes_on = at < len(entries) and left and entries[at].group_left == left - 1
        if not (goes_on and spans[at - 1].end == spans[at].offset):
            found.append(range(start, at))
            start = at
    return found


def broken_appends(log_file: LogFile) -> list[int]:
    """Return the offsets of records after which the rest of their append is missing, without a gap."""
    ends = [(append.stop, log_file.spans[append.stop - 1]) for append in log_file.appends]
    return [
        last.offset
        for stop, last in ends
        if stop < log_file.whole_count and log_file.entries[stop - 1].group_left
        if last.end == log_file.spans[stop].offset
    ]


def in_complete_appends(log_file: LogFile) -> list[bool]:
    """Return for each entry whether its whole append can be read.

    If part of an append is lost, its messages must not count as stored: the client that still has the text will send
    it again. An append that directly follows a gap may have begun inside the gap.
    """
    gap_ends = {end for _, end in log_file.gaps}
    whole: list[bool] = []
    for append in log_file.appends:
        has_begin = log_file.spans[append.start].offset not in gap_ends
        whole += [has_begin and not log_file.entries[append.stop - 1].group_left] * len(append)
    return whole


def _neighbours(log_file: LogFile, offset: int) -> str:
    """Describe a loss by the entries before and after it."""
    entries, spans = log_file.entries, log_file.spans
    before = bisect_right(spans, offset, key=lambda span: span.end)
    after = bisect_right(spans, offset, key=lambda span: span.offset)
    first = f"entry {entries[before - 1].canonical_id}" if before else "the start of the file"
    last = f"entry {entries[after].canonical_id}" if after < len(entries) else "the end of the file"
    return (
        f"what was stored between {first} and {last} is lost, unless a backup has the file: stop memd and put it back"
    )


class LogExtent(msgspec.Struct, frozen=True, tag="log"):
    """The extent of a topic's log at one time."""

    upto: int
    """The canonical_id of its last entry; 0 if it had none."""
    entries: int
    """The number of entries, of whatever status."""


def ahead_of_log(path: Path, extent: LogExtent | None, count_upto: Callable[[int], int]) -> list[Finding]:
    """Return a finding if the log lacks entries that it had when the file at `path` was written, else none. `extent`:
    of the log at that time, None if the file has none; `count_upto`: returns the number of entries up to a canonical_id
    that the log has now."""
    missing = 0 if extent is None else extent.entries - count_upto(extent.upto)
    if extent is None or missing <= 0:
        return []
    are = "are" if missing > 1 else "is"
    message = (
        f"was written when the log had {extent.entries:,} entries; {missing:,} of them {are} missing now. The log is "
        "older than this file (a copy made while memd ran, a restored backup), or lost a part. "
        "If you have the newer log, stop memd and put it back; else what clients still send is stored again"
    )
    return [Finding("damaged", str(path), message)]
