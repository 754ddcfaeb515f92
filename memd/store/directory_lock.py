"""The lock of a data directory: one daemon writes there at a time, for as long as the lock file keeps its place.

Rule: the lock is flock's, on the file that the path names. It ends with the process, and a file that was removed or
replaced keeps nobody out; so it is looked at again before each write.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from memd.errors import ReadOnlyDisk, StoreError, StoreLocked, StoreWriteFailed
from memd.store.syscalls import FILE_MODE, close_descriptor, open_descriptor, reading, writing

LOCK_TRIES, LOCK_RETRY_SECONDS = 5, 0.02
"""Whoever asks `is_locked` holds the lock too, for an instant."""


class Lock(Protocol):
    """A held lock. It ends with the process."""

    def confirm(self) -> None:
        """Make sure that the lock still keeps others out; raises StoreLocked if it does not any more.

        Whoever removes the lock file lets another process in. It is made anew, if nobody else has done so.
        """

    def release(self) -> None:
        """Release the lock."""


class DirectoryLock:
    """The lock on a file of the local disk. See `LocalDisk.lock`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._renewing = threading.Lock()
        self.is_held = True
        """Whether it was not released; others may have it all the same, see `confirm`."""
        self._descriptor = self._locked(os.O_CREAT)

    def confirm(self) -> None:
        """See Lock."""
        with self._renewing:
            if self._descriptor is not None and self._names(self._descriptor):
                return
            try:
                descriptor = self._locked(os.O_CREAT | os.O_EXCL)
            except StoreWriteFailed as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
                raise StoreLocked(
                    f"{self._path}: was replaced while memd ran, so another memd may use the directory now; this one "
                    "writes nothing more, restart it"
                ) from None
            self._close()
            self._descriptor = descriptor

    def release(self) -> None:
        """See Lock."""
        self.is_held = False
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            close_descriptor(descriptor)

    def _locked(self, flags: int) -> int | None:
        """A descriptor that holds the lock; None on a read-only disk without a lock file: there nobody writes."""
        while True:
            try:
                with writing(self._path):
                    descriptor = os.open(self._path, flags | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
            except ReadOnlyDisk:
                if flags & os.O_EXCL:
                    raise
                if not self._path.exists():
                    return None
                with reading(self._path):
                    descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                lock_alone(descriptor, self._path)
                if self._names(descriptor):  # else it was removed between the two steps
                    _sign(descriptor)
                    return descriptor
            except BaseException:
                close_descriptor(descriptor)
                raise
            close_descriptor(descriptor)

    def _names(self, descriptor: int) -> bool:
        """Whether the path is still the name of this file."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        return False


def lock_alone(descriptor: int, path: Path) -> None:
    """Lock a file, or raise StoreLocked, naming the holder (StoreError where nothing can be locked)."""
    try:
        _try_locking(descriptor)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "process unknown"
        raise StoreLocked(
            f"{path.parent} is in use by another memd ({holder}); stop that one, or choose another data_dir"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be locked ({error.strerror}); put data_dir on a file system that supports flock"
        ) from error


def _sign(descriptor: int) -> None:
    """Write into the lock file who holds it, where that can be written."""
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}, started {started}\n".encode(), 0)


def is_locked(path: Path) -> bool:
    """Whether any process holds the lock."""
    with suppress(OSError), open_descriptor(path, os.O_RDONLY) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _try_locking(descriptor: int) -> None:
    """Lock a file, or raise BlockingIOError."""
    for _ in range(LOCK_TRIES - 1):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_RETRY_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
