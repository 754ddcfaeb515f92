"""A disk that is full when a test says so.

Rule: everything else about it is the real disk.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from memd.errors import DiskFull
from memd.store.disk import Appender, LocalDisk


class FullDisk(LocalDisk):
    """The real disk, until `full` is set: from then on nothing can be written."""

    full = False

    def append_to(self, path: Path) -> Appender:
        return _Appender(super().append_to(path), self, path)

    def create(self, path: Path) -> Appender:
        self.check(path)
        return _Appender(super().create(path), self, path)

    def try_writing(self, directory: Path, data: bytes) -> None:
        self.check(directory)
        super().try_writing(directory, data)

    def check(self, path: Path) -> None:
        if self.full:
            raise DiskFull(f"{path}: the disk is full; free some space") from OSError(
                errno.ENOSPC, os.strerror(errno.ENOSPC)
            )


class _Appender:
    def __init__(self, real: Appender, disk: FullDisk, path: Path) -> None:
        self._real, self._disk, self._path = real, disk, path
        self.sync, self.close = real.sync, real.close

    def write(self, data: bytes) -> None:
        if self._disk.full:
            self._real.write(data[: len(data) // 2])  # a full disk takes what still fits
        self._disk.check(self._path)
        self._real.write(data)
