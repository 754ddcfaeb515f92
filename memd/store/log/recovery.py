"""A log file as it is found on disk: which entries it holds whole, and what is to be done about the rest.

Rule: only a tail is ever cut off a log file, only of the file that is written to, and only after its bytes are safe
in a `.torn` file. A tail is what no readable record follows. Anything else that cannot be read is corruption: it is
reported and stays where it is, and the readable rest is served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from memd.entries import Entry
from memd.errors import CorruptFile
from memd.store.files import TEMPORARY_SUFFIX, Files, replace
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    Header,
    Span,
    decode_entry,
    decode_header,
    payload_at,
    scan,
    topic_tag,
)

TORN_SUFFIX = ".torn"

Kind = Literal["torn", "damaged", "derived", "foreign", "notice"]
"""torn: an interrupted write was set aside. damaged: part of the log cannot be read. derived: an index is rebuilt
from the log. foreign: another model's, topic's or version's file. notice: nothing is wrong."""


class Finding(msgspec.Struct, frozen=True):
    """Something that a person should know about a file."""

    kind: Kind
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class LogFile(msgspec.Struct, frozen=True, kw_only=True):
    """The readable contents of one log file."""

    name: str
    header: Header | None
    """None if the header is damaged; the records behind it may still be readable."""
    entries: list[Entry]
    spans: list[Span]
    """Parallel to `entries`."""
    gaps: list[tuple[int, int]]
    """(start, end) of bytes that cannot be read although a readable record follows."""
    broken_groups: list[int]
    """Offsets of records behind which, without a gap, the rest of their append is missing."""
    whole_count: int
    """How many entries lie before an append that is not whole at the end of the file."""
    whole_end: int
    """The offset behind them."""
    size: int

    @property
    def has_tail(self) -> bool:
        """Whether bytes lie behind the last whole append."""
        return self.whole_end < self.size


def read_log_file(data: bytes, *, name: str, dimension: int | None) -> LogFile:
    """Decode a log file. `dimension` is what vectors are checked against where the header is damaged, if known.

    Raises:
        ForeignFile: an intact header that says this is not for this version of memd to read.
    """
    try:
        header: Header | None = decode_header(data, magic=MAGIC_LOG, name=name)
    except CorruptFile:
        header = None
    found = scan(data)
    entries, spans, gaps = [], [], list(found.gaps)
    for span in found.spans:
        payload = payload_at(data, span.offset)
        assert payload is not None
        try:
            entries.append(decode_entry(payload, dimension=header.dimension if header else dimension))
            spans.append(span)
        except CorruptFile:
            gaps.append((span.offset, span.end))
    whole_count = _whole_count(entries, spans)
    # Without a readable header the file is left alone entirely: what follows is corruption, never a tail.
    whole_end = spans[whole_count - 1].end if whole_count else HEADER_BYTES
    # A record that passes its checksum but is no entry was written so, not torn: it and what precedes it stay.
    bad_end = max((end for _, end in gaps), default=0)
    if bad_end > whole_end:
        whole_count, whole_end = len(entries), max(bad_end, spans[-1].end if spans else 0)
    return LogFile(
        name=name,
        header=header,
        entries=entries,
        spans=spans,
        gaps=sorted(gaps),
        broken_groups=_broken_groups(entries, spans, whole_count),
        whole_count=whole_count,
        whole_end=min(whole_end, len(data)),
        size=len(data),
    )


def damage(log_file: LogFile, *, topic_id: str, is_last: bool) -> list[Finding]:
    """What in this file is lost or in the wrong place. The tail of the last file is not: an interrupted write left
    it."""
    name, header = log_file.name, log_file.header
    findings = []
    if header is None:
        findings.append(Finding("damaged", name, f"the header (bytes 0 to {HEADER_BYTES}) is damaged"))
    elif header.topic != topic_tag(topic_id):
        findings.append(
            Finding("foreign", name, f"was written for another topic than {topic_id}; it is read all the same")
        )
    lost = [(start, f"bytes {start} to {end} cannot be read") for start, end in log_file.gaps]
    lost += [(offset, f"the rest of the append at offset {offset} is missing") for offset in log_file.broken_groups]
    if log_file.has_tail and not is_last:
        start = log_file.whole_end
        lost.append((start, f"bytes {start} to {log_file.size} at its end are not a whole append"))
    return findings + [
        Finding("damaged", name, f"{what}; {_neighbours(log_file, offset)}") for offset, what in sorted(lost)
    ]


def set_tail_aside(files: Files, path: Path, data: bytes, whole_end: int) -> Finding:
    """Move the bytes from `whole_end` on into a new `.torn` file beside `path`, then cut them off `path`, durably.

    A crash in between leaves the tail in both places, and the next call does not copy it again.

    Raises:
        StoreWriteFailed: `path` is unchanged, or changed exactly as intended.
    """
    tail = data[whole_end:]
    torn = keep_aside(files, path, tail)
    appender = files.append_to(path)
    try:
        appender.truncate(whole_end)
        appender.sync()
    finally:
        appender.close()
    return Finding(
        "torn",
        str(path),
        f"an interrupted write of {len(tail)} bytes at offset {whole_end} was moved to {torn.name}; nothing that was "
        "acknowledged is affected",
    )


def keep_aside(files: Files, path: Path, data: bytes) -> Path:
    """Store `data` in the first free `.torn` name beside `path`, unless an earlier one holds exactly that."""
    number = 1
    while True:
        suffix = TORN_SUFFIX if number == 1 else f"{TORN_SUFFIX}.{number}"
        torn = path.with_name(path.name + suffix)
        size = files.size(torn)
        if size is None:
            replace(files, torn, data)
            return torn
        if size == len(data) and files.read(torn) == data:
            return torn
        number += 1


def remove_temporaries(files: Files, directory: Path) -> None:
    """Remove what a crash left half-written; nothing refers to it."""
    for name in files.names(directory):
        if name.endswith(TEMPORARY_SUFFIX):
            files.remove(directory / name)


def _whole_count(entries: list[Entry], spans: list[Span]) -> int:
    """How many entries remain without the append that the file ends in the middle of."""
    count = len(entries)
    if not count or entries[-1].group_left == 0:
        return count
    first = count - 1
    while (
        first > 0
        and entries[first - 1].group_left == entries[first].group_left + 1
        and spans[first - 1].end == spans[first].offset
    ):
        first -= 1
    return first


def _broken_groups(entries: list[Entry], spans: list[Span], whole_count: int) -> list[int]:
    return [
        spans[i].offset
        for i in range(whole_count - 1)
        if entries[i].group_left
        and entries[i + 1].group_left != entries[i].group_left - 1
        and spans[i].end == spans[i + 1].offset
    ]


def in_whole_appends(log_file: LogFile) -> list[bool]:
    """For each entry whether everything of its append can be read.

    Where something of an append is lost, its messages must not count as stored: a part of their text is gone, and the
    client that still has it will send it again. An append right behind a gap may have begun inside the gap.
    """
    gap_ends = {end for _, end in log_file.gaps}
    whole: list[bool] = []
    start, complete = 0, True
    for position, (entry, span) in enumerate(zip(log_file.entries, log_file.spans, strict=True)):
        follows = position > start and log_file.entries[position - 1].group_left == entry.group_left + 1
        if span.offset in gap_ends or (position > start and not follows):
            whole += [False] * (position - start)  # what was open is not continued here
            start, complete = position, span.offset not in gap_ends
        if entry.group_left == 0:
            whole += [complete] * (position + 1 - start)
            start, complete = position + 1, True
    return whole + [False] * (len(log_file.entries) - start)


def _neighbours(log_file: LogFile, offset: int) -> str:
    """Between which entries something is lost: all that can be said about what it was."""
    before = [entry for entry, span in zip(log_file.entries, log_file.spans, strict=True) if span.end <= offset]
    after = [entry for entry, span in zip(log_file.entries, log_file.spans, strict=True) if span.offset > offset]
    first = f"entry {before[-1].canonical_id}" if before else "the start of the file"
    last = f"entry {after[0].canonical_id}" if after else "the end of the file"
    return f"what was stored between {first} and {last} is lost"
