"""The whole log as plain values, for people and other programs.

Rule: writes nothing, needs no lock and works beside a running daemon: it exports what was acknowledged when it began.
The places of all entries are gathered first, then the entries are read one by one in order, so that memory does not
grow with the contents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from memd.entries import Entry
from memd.errors import StoreError, UnknownTopic
from memd.store.files import Files
from memd.store.layout import TopicLayout, check_topic, segments_before, topic_ids_in
from memd.store.log.columns import ROW, Bits, Records, UInts, rows_from, superseded, uuid_halves
from memd.store.log.recovery import LogFile, read_log_file
from memd.store.log.segment import read_entry
from memd.store.tools.export_line import as_line
from memd.wording import no_topic

Wants = Callable[[str], bool]
"""Whether a topic is wanted."""


def export(
    data_dir: Path,
    files: Files,
    *,
    topic_id: str | None,
    live_only: bool,
    is_wanted: Wants = lambda topic_id: True,
    tells_others: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield every readable entry of one topic or of all, by canonical_id; `live_only` leaves out dead entries.

    The members of a dict are those of `export_line.as_line`.

    Args:
        is_wanted: where no topic is named, only those are exported of which it says so.
        tells_others: also the ids, in `shown`, of chunks that no topic has which is exported.

    Raises:
        BadTopicId: not a topic name.
        UnknownTopic: there is no such topic.
        StoreError: a file cannot be read.
    """
    for name, entry, live in exported_entries(
        data_dir, files, topic_id=topic_id, live_only=live_only, is_wanted=is_wanted, tells_others=tells_others
    ):
        yield as_line(entry, name, live=live)


def exported_topics(
    data_dir: Path, files: Files, topic_id: str | None, is_wanted: Wants = lambda topic_id: True
) -> list[str]:
    """The topics to export: this one, or all that are wanted.

    Raises:
        BadTopicId: not a topic name.
        UnknownTopic: there is no such topic.
    """
    topic_ids = topic_ids_in(files, data_dir)
    if topic_id is None:
        return [one for one in topic_ids if is_wanted(one)]
    if topic_id not in topic_ids:
        TopicLayout(data_dir, topic_id)  # raises BadTopicId if it is not a topic name
        raise UnknownTopic(no_topic(topic_id))
    return [topic_id]


def exported_entries(
    data_dir: Path,
    files: Files,
    *,
    topic_id: str | None,
    live_only: bool,
    is_wanted: Wants = lambda topic_id: True,
    tells_others: bool = True,
) -> Iterator[tuple[str, Entry, bool]]:
    """Yield every readable entry, with its topic and whether it is live; see `export`.

    Raises:
        BadTopicId: not a topic name.
        UnknownTopic: there is no such topic.
        StoreError: a file cannot be read.
    """
    names = exported_topics(data_dir, files, topic_id, is_wanted)
    topics = [_TopicEntries(files, TopicLayout(data_dir, name)) for name in names]
    ids = np.concatenate([topic.rows["canonical_id"] for topic in topics] or [np.empty(0, dtype=np.uint64)])
    owners = np.repeat(np.arange(len(topics)), [len(topic.rows) for topic in topics])
    known = None if tells_others else np.unique(np.concatenate([topic.rows["uuid_high"] for topic in topics] or [ids]))
    starts = np.cumsum([0, *(len(topic.rows) for topic in topics)])
    for position in np.argsort(ids, kind="stable").tolist():
        topic = topics[int(owners[position])]
        row = position - int(starts[int(owners[position])])
        live = not bool(topic.dead[row])
        if live or not live_only:
            yield topic.topic_id, _without_others(topic.read(row), known), live


def _without_others(entry: Entry, known: UInts | None) -> Entry:
    """An entry that names in `shown` the known chunks alone, by the first halves of their uuids; None: any."""
    if known is None or entry.shown is UNSET:
        return entry
    is_known = np.isin(np.array([uuid_halves(one)[0] for one in entry.shown], dtype=np.uint64), known)
    shown = tuple(uuid for uuid, stays in zip(entry.shown, is_known.tolist(), strict=True) if stays)
    return msgspec.structs.replace(entry, shown=shown)


class _TopicEntries:
    """The places of one topic's entries, and which of them count."""

    def __init__(self, files: Files, layout: TopicLayout) -> None:
        self.topic_id = layout.topic_id
        self._files = files
        self._paths: list[list[Path]] = []
        self._ends: list[int] = []
        rows = [np.empty(0, dtype=ROW)]
        for paths, found in _log_files(files, layout):
            self._paths.append(paths)
            rows.append(found)
            self._ends.append(sum(map(len, rows)))
        self.rows: Records = np.concatenate(rows)
        self.dead: Bits = superseded(self.rows)

    def read(self, row: int) -> Entry:
        """Read the entry of one row from disk."""
        return read_entry(self._files, self._paths[bisect_right(self._ends, row)], self.rows[row], dimension=None)


def _log_files(files: Files, layout: TopicLayout) -> Iterator[tuple[list[Path], Records]]:
    """The log files of a topic, each with the other name it may get, and their columns; oldest first."""
    data = active_bytes(files, layout)
    active = read_log_file(data, name=str(layout.active), dimension=None) if data is not None else None
    number = active.header.segment_id if active is not None and active.header is not None else None
    check_topic(files, layout.directory, active.header if active is not None else None, layout.active)
    for path in map(layout.bin, segments_before(files, layout, data, number)):
        log_file = read_log_file(files.read(path), name=str(path), dimension=None)
        check_topic(files, layout.directory, log_file.header, path)
        yield [path], rows_of(log_file, len(log_file.entries))
    if active is not None:
        paths = [layout.active] if number is None else [layout.active, layout.bin(number)]
        yield paths, rows_of(active, active.whole_count)


def active_bytes(files: Files, layout: TopicLayout) -> bytes | None:
    """Read the `active.bin` of a topic; None if there is none at the moment.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return files.read(layout.active)
    except StoreError:
        if files.size(layout.active) is None:  # just rotated, or nothing was ever appended
            return None
        return files.read(layout.active)  # created between the two looks, or damaged


def rows_of(log_file: LogFile, count: int) -> Records:
    """Return the columns of the first `count` entries of a log file."""
    return rows_from(log_file.entries[:count], log_file.spans[:count])
