"""The file system that loses things, with encryption above it: every test of the store may run on it as it is.

Rule: contents, offsets and sizes are plain ones; `raw` is what a disk would have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crash_files import CrashFiles, Loss
from drafts import DATA_DIR

from memd.store.encryption.disk import EncryptedDisk
from memd.store.encryption.frames import DataKey

DIRECTORY_KEY = DataKey(bytes(range(32)))
_OWN = {"operations", "log", "bytes_read", "cut_after", "fail_at", "bytes_left"}


class EncryptedCrashFiles(EncryptedDisk):
    """`CrashFiles` below an `EncryptedDisk`; makes trouble as they do."""

    raw: CrashFiles
    operations: int
    log: list[str]
    cut_after: int | None
    fail_at: set[int]

    def __init__(self, raw: CrashFiles | None = None) -> None:
        object.__setattr__(self, "raw", raw or CrashFiles())
        super().__init__(self.raw, "00" * 16, DIRECTORY_KEY, DATA_DIR)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            return getattr(self.raw, name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            setattr(self.raw, name, value)
        else:
            super().__setattr__(name, value)

    def after_power_cut(self, loss: Loss) -> EncryptedCrashFiles:
        """See CrashFiles."""
        return EncryptedCrashFiles(self.raw.after_power_cut(loss))

    def contents(self) -> dict[str, bytes]:
        """See CrashFiles; as they are on the disk."""
        return self.raw.contents()

    def flip(self, path: Path, offset: int) -> None:
        """See CrashFiles; `offset` is one of the encrypted file."""
        self.raw.flip(path, offset)

    def put(self, path: Path, data: bytes) -> None:
        """Create a durable file, encrypted if its place is."""
        if not self.encrypts(path):
            self.raw.put(path, data)
            return
        self.raw.put(path, b"")
        self.create(path)
        self.append(path, data)
        self.sync(path)
