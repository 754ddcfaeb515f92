"""The real disk, on which every change in a data directory is noted, so that a backup looks at what has changed alone.

Rule: a change is noted after it was made. Who takes a note and reads the file then has the change, or the note of one
that came later. A file that only grew is known up to the end of a whole write, so that no append is read in halves.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path

import msgspec

from memd.store.disk import DiskFiles
from memd.store.files import TEMPORARY_SUFFIX
from memd.store.layout import AUDIT_NAME, ERASURES_NAME, KEY_NAME, topic_of

_PLACES_KEPT = 4096
_OF_THE_DIRECTORY = (KEY_NAME, f"{AUDIT_NAME}/", f"{ERASURES_NAME}/")


class FileNote(msgspec.Struct, frozen=True):
    """How a file has changed since it was last looked at."""

    is_replaced: bool
    """Whether more has changed than that it grew."""
    end: int
    """Its size after the last whole write; 0 where it is gone."""


class ChangedFiles:
    """The notes, by folder (a topic's; "" for the data directory's own files) and name in it. For any thread."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._notes: dict[str, dict[str, FileNote]] = {}
        self.place_of = lru_cache(_PLACES_KEPT)(self._place_of)
        """The folder and the name of a file; None: nothing that is ever backed up."""

    def _place_of(self, path: Path) -> tuple[str, str] | None:
        if path.name.endswith(TEMPORARY_SUFFIX) or not path.is_relative_to(self._data_dir):
            return None
        name = path.relative_to(self._data_dir).as_posix()
        if topic_id := topic_of(name):
            return topic_id, name[len(topic_id) + 1 :]
        return ("", name) if name.startswith(_OF_THE_DIRECTORY) else None

    def grew(self, folder: str, name: str, end: int) -> None:
        """Note that a file was appended to."""
        with self._lock:
            notes = self._notes.setdefault(folder, {})
            before = notes.get(name)
            notes[name] = FileNote(before is not None and before.is_replaced, end)

    def replaced(self, folder: str, name: str, end: int) -> None:
        """Note that a file is another one now, was cut, or is gone."""
        with self._lock:
            self._notes.setdefault(folder, {})[name] = FileNote(True, end)

    def folders(self) -> list[str]:
        """The folders in which something has changed."""
        with self._lock:
            return list(self._notes)

    def take(self, folder: str) -> dict[str, FileNote]:
        """Return the notes of a folder, and forget them."""
        with self._lock:
            return self._notes.pop(folder, {})

    def give_back(self, folder: str, taken: dict[str, FileNote]) -> None:
        """Note again what could not be backed up."""
        with self._lock:
            self._notes[folder] = merged(taken, self._notes.get(folder, {}))

    def __bool__(self) -> bool:
        return bool(self._notes)


def merged(earlier: dict[str, FileNote], later: dict[str, FileNote]) -> dict[str, FileNote]:
    """Return the notes of both times as one."""
    both = earlier | later
    for name in earlier.keys() & later.keys():
        both[name] = FileNote(earlier[name].is_replaced or later[name].is_replaced, later[name].end)
    return both


class NotingDisk(DiskFiles):
    """The real file system; what is changed in a data directory is noted."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__()
        self.changed = ChangedFiles(data_dir)

    def _note(self, path: Path) -> None:
        if (place := self.changed.place_of(path)) is not None:
            self.changed.replaced(*place, self.size(path) or 0)

    def _note_growth(self, path: Path, end: int) -> None:
        if (place := self.changed.place_of(path)) is not None:
            self.changed.grew(*place, end)
