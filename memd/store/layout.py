"""Where everything lies in the data directory.

Rule: the only place that knows file names. A reader beside a running daemon opens `active.bin` first and lists the
segments afterwards: then a rotation in between shows the same segment twice, never not at all.
"""

from __future__ import annotations

import re
from pathlib import Path

from memd.entries import TOPIC_ID_PATTERN, checked_topic_id
from memd.errors import BadTopicId
from memd.store.files import TEMPORARY_SUFFIX, Files

LOCK_NAME = "memd.lock"
ADDRESS_NAME = "memd.url"
"""Where the daemon that holds the lock listens, for commands; who reads it asks there whether that is still true."""
RECEIPTS_NAME = "memd.receipts"
RECEIPTS_OLD_NAME = "memd.receipts.old"
_OWN_NAMES = {LOCK_NAME, ADDRESS_NAME, ADDRESS_NAME + TEMPORARY_SUFFIX, RECEIPTS_NAME, RECEIPTS_OLD_NAME}
_SEGMENT = re.compile(r"seg_(\d{4,9})\.bin")
_MERGED = re.compile(r"merged_(\d{4,9})_(\d{4,9})\.(?:hnsw|meta)")


class TopicLayout:
    """The files of one topic."""

    def __init__(self, data_dir: Path, topic_id: str) -> None:
        if topic_id in _OWN_NAMES:
            raise BadTopicId(f"topic_id {topic_id!r} is the name of a file of memd; choose another")
        self.topic_id = checked_topic_id(topic_id)
        self.data_dir = data_dir
        self.directory = data_dir / topic_id
        self.segments = self.directory / "segments"
        self.active = self.directory / "active.bin"
        self.hot = self.directory / "hot.log"
        self.lexical = self.directory / "lexical"
        """The lexical index: derived, and a folder of which only lexical.py knows the files."""

    def bin(self, segment_id: int) -> Path:
        """The log of a full segment."""
        return self.segments / f"seg_{segment_id:04d}.bin"

    def meta(self, segment_id: int) -> Path:
        """Its columns."""
        return self.bin(segment_id).with_suffix(".meta")

    def hnsw(self, segment_id: int) -> Path:
        """Its vector index."""
        return self.bin(segment_id).with_suffix(".hnsw")

    def merged_hnsw(self, first: int, last: int) -> Path:
        """The vector index over the segments from `first` to `last`."""
        return self.segments / f"merged_{first:04d}_{last:04d}.hnsw"

    def merged_meta(self, first: int, last: int) -> Path:
        """What vouches for it."""
        return self.merged_hnsw(first, last).with_suffix(".meta")

    def merges(self, files: Files) -> list[tuple[int, int]]:
        """(first, last) of every merged index of which a file is on disk, sorted."""
        found = (_MERGED.fullmatch(name) for name in files.names(self.segments))
        return sorted({(int(match[1]), int(match[2])) for match in found if match is not None})

    def segment_ids(self, files: Files) -> list[int]:
        """The numbers of the full segments on disk, ascending."""
        found = (_SEGMENT.fullmatch(name) for name in files.names(self.segments))
        return sorted(int(match[1]) for match in found if match is not None)


def segments_before(files: Files, layout: TopicLayout, active: bytes | None, segment_id: int | None) -> list[int]:
    """The full segments on disk now that are not in `active`, an `active.bin` read before, which says it is
    `segment_id`.

    Beside a running daemon that file may have got its place among the segments since.
    """
    numbers = layout.segment_ids(files)
    if active and segment_id in numbers and files.read(layout.bin(segment_id)).startswith(active):
        return [number for number in numbers if number < segment_id]
    return numbers


def topic_ids_in(files: Files, data_dir: Path) -> list[str]:
    """The topics that have a directory, sorted."""
    return [
        name
        for name in files.names(data_dir)
        if TOPIC_ID_PATTERN.fullmatch(name) is not None and files.is_directory(data_dir / name)
    ]


ADDRESS_NAME = "memd.url"
"""Where the daemon that holds the lock listens, for commands; whoever reads it asks there whether that is true."""
