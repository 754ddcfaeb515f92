"""A disk that is full when a test says so.

Rule: everything else about it is the real disk.
"""

import errno
import os
from collections.abc import Hashable
from pathlib import Path

from memd.errors import DiskFull
from memd.store.disk import LocalDisk


class FullDisk(LocalDisk):
    """The real disk, until `full` is set: from then on nothing can be written."""

    full = False

    def create(self, path: Path) -> None:
        self.check(path)
        super().create(path)

    def append(self, path: Path, data: bytes, identity: Hashable | None = None) -> None:
        if self.full:
            super().append(path, data[: len(data) // 2], identity)  # a full disk takes what still fits
        self.check(path)
        super().append(path, data, identity)

    def try_writing(self, directory: Path, data: bytes) -> None:
        self.check(directory)
        super().try_writing(directory, data)

    def check(self, path: Path) -> None:
        if self.full:
            raise DiskFull(f"{path}: the disk is full; free some space") from OSError(
                errno.ENOSPC, os.strerror(errno.ENOSPC)
            )
