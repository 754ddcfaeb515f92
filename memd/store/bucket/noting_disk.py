"""The real disk, on which every change in a data directory is noted, so that a backup looks at what has changed alone.

Rule: a change is noted after it was made. Who takes a note and reads the file then has the change, or the note of one
that came later. A file that only grew is known up to the end of a whole write, so that no append is read in halves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from memd.store.disk import DiskFiles
from memd.store.files import TEMPORARY_SUFFIX, Appender
from memd.store.layout import AUDIT_NAME, ERASURES_NAME, KEY_NAME, topic_of

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

    def place_of(self, path: Path) -> tuple[str, str] | None:
        """The folder and the name of a file; None: nothing that is ever backed up."""
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

    def create(self, path: Path) -> Appender:
        """See Files."""
        appender = super().create(path)
        self._note(path)
        return self._noting(appender, path, 0)

    def append_to(self, path: Path) -> Appender:
        """See Files."""
        return self._noting(super().append_to(path), path, self.size(path) or 0)

    def rename(self, old: Path, new: Path) -> None:
        """See Files."""
        super().rename(old, new)
        self._note(old)
        self._note(new)

    def link(self, old: Path, new: Path) -> bool:
        """See LocalDisk."""
        is_linked = super().link(old, new)
        self._note(new)
        return is_linked

    def remove(self, path: Path) -> None:
        """See Files."""
        super().remove(path)
        self._note(path)

    def wipe(self, path: Path) -> bool:
        """See LocalDisk."""
        is_gone = super().wipe(path)
        self._note(path)
        return is_gone

    def replace_wiping(self, new: Path, path: Path) -> bool:
        """See LocalDisk."""
        is_gone = super().replace_wiping(new, path)
        self._note(path)
        return is_gone

    def save_native(self, path: Path, save: Callable[[str], None]) -> None:
        """See LocalDisk."""
        super().save_native(path, save)
        self._note(path)

    def _noting(self, appender: Appender, path: Path, end: int) -> Appender:
        place = self.changed.place_of(path)
        return appender if place is None else _NotingAppender(appender, self.changed, place, end)

    def _note(self, path: Path) -> None:
        place = self.changed.place_of(path)
        if place is not None:
            self.changed.replaced(*place, self.size(path) or 0)


class _NotingAppender:
    """Notes each whole write; one that fails is cut back, which is noted too."""

    def __init__(self, inner: Appender, changed: ChangedFiles, place: tuple[str, str], end: int) -> None:
        self._inner, self._changed, self._end = inner, changed, end
        self._folder, self._name = place

    def write(self, data: bytes) -> None:
        """See Appender."""
        self._inner.write(data)
        self._end += len(data)
        self._changed.grew(self._folder, self._name, self._end)

    def sync(self) -> None:
        """See Appender."""
        self._inner.sync()

    def truncate(self, size: int) -> None:
        """See Appender."""
        self._inner.truncate(size)
        self._end = size
        self._changed.replaced(self._folder, self._name, size)

    def close(self) -> None:
        """See Appender."""
        self._inner.close()
