"""The topics that were moved between a folder and a cluster, noted in the folder.

Rule: a note tells what a topic was on both sides when it had been moved and compared. So a move that is run again does
not touch what is used on the other side by then, and one that goes back may write over a journal that nobody has
written since. Without the notes topics are compared, and nothing is lost.

    {"topic": "garden", "cluster": "…", "heads": {…}, "folder": {…}}
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import msgspec

from memd.store.files import FileChecksum, Files, checksum_of, replace_file
from memd.store.layout import MOVING_NAME, TopicLayout
from memd.store.log.append_file import AppendFile
from memd.store.log.segment import read_header
from memd.store.shelf import Heads, Position

_NOTES_NAME = "moved.jsonl"


class FolderState(msgspec.Struct, frozen=True):
    """Tells whether somebody has written to a topic's folder."""

    log: Position
    hot: FileChecksum | None
    full: str
    """A digest of which files the full segments are."""


class MovedTopic(msgspec.Struct, frozen=True):
    """A topic as it was on both sides when it had been moved."""

    topic: str
    cluster: str
    """Which one it was moved to, or from."""
    heads: Heads | None
    """There; None: only what is forbidden."""
    folder: FolderState | None
    """None: it was removed from the cluster then, so that it can be moved there again."""


class MovedTopics:
    """The notes of a folder. A damaged one counts as none."""

    def __init__(self, files: Files, data_dir: Path) -> None:
        """`files` that do not encrypt: there are names of topics in it, as in the folder, and no text."""
        self._notes: dict[tuple[str, str], MovedTopic] = {}
        path = data_dir / MOVING_NAME / _NOTES_NAME
        if files.size(path) is not None:
            for line in files.read(path).splitlines():
                with suppress(msgspec.MsgspecError):
                    note = msgspec.json.decode(line, type=MovedTopic)
                    self._notes[note.topic, note.cluster] = note
        replace_file(files, path, b"".join(map(_line, self._notes.values())))
        self._file = AppendFile(files, path, files.size(path) or 0)

    def of(self, topic_id: str, cluster: str) -> MovedTopic | None:
        """The note of a topic and a cluster."""
        return self._notes.get((topic_id, cluster))

    def add(self, note: MovedTopic) -> None:
        """Keep a note, durably."""
        self._notes[note.topic, note.cluster] = note
        self._file.append(_line(note), sync=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(note: MovedTopic) -> bytes:
    return msgspec.json.encode(note) + b"\n"


def folder_state(files: Files, layout: TopicLayout) -> FolderState:
    """Return what a topic's folder is now."""
    header, hot = read_header(files, layout.active), files.size(layout.hot)
    number = header.segment_id if header is not None else layout.next_segment_id(files)
    end = files.size(layout.active) or 0
    full = [(one, files.identity(layout.bin(one))) for one in layout.segment_ids(files)]
    digest = hashlib.blake2b(repr(full).encode(), digest_size=16).hexdigest()
    return FolderState(Position(number, end), None if hot is None else checksum_of(files, layout.hot, hot), digest)
