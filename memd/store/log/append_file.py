"""A file that is appended to: all of a write, or none of it.

Rule: after a write or sync that failed, the file is cut back to its previous end and the cut is synced, so that data
left in the page cache by a failed fsync is dropped, not trusted. Nothing else is appended until that has succeeded.
"""

from __future__ import annotations

from pathlib import Path

from memd.errors import FileReplaced, StoreWriteFailed
from memd.store.files import Appender, Files


class AppendFile:
    """An append-only file that is known to be intact up to `end`. For one thread."""

    def __init__(self, files: Files, path: Path, end: int) -> None:
        """The file that the path names now; another one that it may name later is left alone."""
        self._files = files
        self._path = path
        self._identity = files.identity(path)
        self._appender: Appender | None = None
        self.end = end

    def append(self, data: bytes, *, sync: bool) -> None:
        """Append `data`; with `sync`, durably.

        Raises:
            StoreWriteFailed: nothing was appended; the file is cut back now or before the next append.
        """
        appender = self._open()
        try:
            appender.write(data)
            if sync:
                appender.sync()
        except StoreWriteFailed:
            self._cut_back(appender)
            raise
        self.end += len(data)

    def sync(self) -> None:
        """Make everything appended durable."""
        if self._appender is not None:
            self._appender.sync()

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        if self._appender is not None:
            self._appender.close()
            self._appender = None

    def _open(self) -> Appender:
        if self._appender is not None:
            return self._appender
        if self._files.identity(self._path) != self._identity:
            raise FileReplaced(str(self._path))
        size = self._files.size(self._path)
        if size is None or size < self.end:
            raise StoreWriteFailed(
                f"{self._path}: is shorter than it was ({size or 0} of {self.end} bytes): something else changed it; "
                "nothing more is appended, restart memd"
            )
        appender = self._files.append_to(self._path)
        if size > self.end:
            try:
                appender.truncate(self.end)
                appender.sync()
            except StoreWriteFailed:
                appender.close()
                raise
        self._appender = appender
        return appender

    def _cut_back(self, appender: Appender) -> None:
        try:
            appender.truncate(self.end)
            appender.sync()
        except StoreWriteFailed:
            # The first error is the one to report. The next append cuts the file before it writes.
            self.close()
