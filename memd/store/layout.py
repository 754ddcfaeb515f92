"""The names of all files in the data directory.

Rule: no other module builds a file name. A reader beside a running daemon opens `active.bin` first and lists the
segments afterwards: then it may see a segment twice if the daemon rotates in between, but never misses one.
"""

from __future__ import annotations

import re
from pathlib import Path

from memd.entries import TOPIC_ID_PATTERN, checked_topic_id
from memd.errors import BadTopicId, ForeignFile
from memd.store.files import TEMPORARY_SUFFIX, Files
from memd.store.log.format import Header, topic_tag

LOCK_NAME = "memd.lock"
ADDRESS_NAME = "memd.url"
"""The URL of the daemon that holds the lock, for commands; after a crash it may be stale, so whoever is there has to
prove that it has the secret."""
SECRET_NAME = "memd.secret"  # noqa: S105  # the name of a file
"""The secret with which the daemon that holds the lock proves itself to commands."""
RECEIPTS_NAME = "memd.receipts"
RECEIPTS_OLD_NAME = "memd.receipts.old"
MODELS_NAME = "memd.models"
"""Embedding models that were added, and what was measured of models: derived, so neither backed up nor verified."""
FORMER_NAMES = "former_names"
"""Beside `active.bin`: the names that the topic had before, one on each line. People write it, memd reads it."""
_REPLACED = (ADDRESS_NAME, SECRET_NAME)
_OWN_NAMES = {
    *(LOCK_NAME, RECEIPTS_NAME, RECEIPTS_OLD_NAME, MODELS_NAME, *_REPLACED),
    *(name + TEMPORARY_SUFFIX for name in _REPLACED),
}
_SEGMENTS = "segments"
_SEGMENT = re.compile(r"seg_(\d{4,9})\.(bin|hnsw|meta)")
_MERGED = re.compile(r"merged_(\d{4,9})_(\d{4,9})\.(?:hnsw|meta)")


def models_dir(data_dir: Path) -> Path:
    """The folder of embedding models; it need not be there."""
    return data_dir / MODELS_NAME


class TopicLayout:
    """The files of one topic."""

    def __init__(self, data_dir: Path, topic_id: str) -> None:
        if topic_id in _OWN_NAMES:
            raise BadTopicId(f"topic_id {topic_id!r} is the name of one of memd's files; choose another")
        self.topic_id = checked_topic_id(topic_id)
        self.data_dir = data_dir
        self.directory = data_dir / topic_id
        self.segments = self.directory / _SEGMENTS
        self.active = self.directory / "active.bin"
        self.hot = self.directory / "hot.log"
        self.former_names = self.directory / FORMER_NAMES
        self.lexical = self.directory / "lexical"
        """The folder of the lexical index; only lexical/ knows the files in it."""

    def bin(self, segment_id: int) -> Path:
        """Return the log of a full segment."""
        return self.segments / f"seg_{segment_id:04d}.bin"

    def meta(self, segment_id: int) -> Path:
        """Return the columns of a full segment."""
        return self.bin(segment_id).with_suffix(".meta")

    def hnsw(self, segment_id: int) -> Path:
        """Return the vector index of a full segment."""
        return self.bin(segment_id).with_suffix(".hnsw")

    def merged_hnsw(self, first: int, last: int) -> Path:
        """Return the merged vector index over the segments from `first` to `last`."""
        return self.segments / f"merged_{first:04d}_{last:04d}.hnsw"

    def merged_meta(self, first: int, last: int) -> Path:
        """Return the `.meta` of a merged index."""
        return self.merged_hnsw(first, last).with_suffix(".meta")

    def merges(self, files: Files) -> list[tuple[int, int]]:
        """Return (first, last) of every merged index that has a file on disk, sorted."""
        found = (_MERGED.fullmatch(name) for name in files.names(self.segments))
        return sorted({(int(match[1]), int(match[2])) for match in found if match is not None})

    def segment_ids(self, files: Files) -> list[int]:
        """Return the numbers of the full segments on disk, ascending."""
        found = (_SEGMENT.fullmatch(name) for name in files.names(self.segments))
        return sorted(int(match[1]) for match in found if match is not None and match[2] == "bin")

    def next_segment_id(self, files: Files) -> int:
        """Return the first number that no file has, though it be only an index whose segment is missing."""
        found = (_SEGMENT.fullmatch(name) for name in files.names(self.segments))
        numbers = [int(match[1]) for match in found if match is not None]
        return max([0, *numbers, *(last for _, last in self.merges(files))]) + 1

    def missing_segment_ids(self, files: Files, active_id: int | None) -> list[int]:
        """Return the numbers of full segments that must have been there and are not, ascending.

        `active_id`: the number in the header of `active.bin`; None if there is none.
        """
        following = max(self.next_segment_id(files), active_id or 0)
        return sorted(set(range(1, following)) - set(self.segment_ids(files)) - {active_id})


def segments_before(files: Files, layout: TopicLayout, active: bytes | None, segment_id: int | None) -> list[int]:
    """Return the full segments on disk that an `active.bin` read before does not contain.

    Beside a running daemon, that file may have been rotated into one of the segments since.

    Args:
        active: the contents of that `active.bin`; None if there was none.
        segment_id: the number in its header; None if there is none.
    """
    numbers = layout.segment_ids(files)
    if active and segment_id in numbers and files.read(layout.bin(segment_id)).startswith(active):
        return [number for number in numbers if number < segment_id]
    return numbers


def check_topic(files: Files, directory: Path, header: Header | None, path: Path) -> None:
    """Make sure that a file in a topic's directory belongs to the topic. One whose header is damaged may.

    A directory that was renamed on purpose has a file with the names that it had before, so that its files are known.

    Raises:
        ForeignFile: it is another topic's.
    """
    former = directory / FORMER_NAMES
    names = files.read(former).decode("utf-8-sig", "replace").split() if files.size(former) is not None else []
    if header is None or header.topic in map(topic_tag, [directory.name, *names]):
        return
    owner = next((name for name in topic_ids_in(files, directory.parent) if topic_tag(name) == header.topic), None)
    of = f"the topic {owner!r}" if owner else "another topic"
    raise ForeignFile(
        f"{path}: belongs to {of}, not to {directory.name!r}: move it back. If you have renamed the topic's folder on "
        f"purpose, write its former name into a file {former}; then all of its files are read"
    )


def check_new_name(files: Files, data_dir: Path, topic_id: str) -> None:
    """Make sure that a topic may get this name, if it does not exist yet.

    Where a file system takes names that differ only in case for the same, as on macOS and Windows, two such topics
    would share a folder. So no store may have both, wherever it is: it may be moved.

    Raises:
        BadTopicId: a topic, or a file of memd's, has a name that differs from it only in case.
    """
    names = files.names(data_dir)
    if topic_id in names:
        return
    folded = topic_id.casefold()
    taken = next((name for name in (*names, *sorted(_OWN_NAMES)) if name.casefold() == folded), None)
    if taken is not None:
        raise BadTopicId(f"topic_id {topic_id!r} differs only in case from {taken!r}, which is there; use that name")


def topic_ids_in(files: Files, data_dir: Path) -> list[str]:
    """Return the topics that have a file, sorted: a full disk may have left a directory and no more."""
    named = (name for name in files.names(data_dir) if TOPIC_ID_PATTERN.fullmatch(name) and name not in _OWN_NAMES)
    return [name for name in named if _has_files(files, data_dir / name)]


def _has_files(files: Files, directory: Path) -> bool:
    names = files.names(directory)
    return names != [] and (names != [_SEGMENTS] or files.names(directory / _SEGMENTS) != [])
