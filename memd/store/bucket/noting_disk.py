"""The real disk, on which every change in a data directory is noted for its backup.

Rule: it does what its parent does, and notes it afterwards (see changes.py). It costs a write one entry in a table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memd.store.bucket.changes import ChangedFiles
from memd.store.disk import DiskFiles
from memd.store.files import Appender


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
