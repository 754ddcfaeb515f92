"""The only seam between the store and the disk.

Rule: no other module of the store opens, names or removes a file by itself. Everything here either happens or raises
one of the declared errors, which names the file and the remedy. A file or name is durable only after `sync` of the
file and `sync_directory` of its directory; `replace` does all of it in the right order. The counterpart for tests,
with power cuts and full disks, is tests/support/crash_files.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from memd.errors import DiskFull, StoreError, StoreLocked, StoreWriteFailed

TEMPORARY_SUFFIX = ".tmp"
"""What a file is called until it is whole; such a file is left over from a crash and may be removed."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
# Another file system; one without hard links; no more links to this file; a sandbox or kernel that does not allow it.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves data in the drive's cache


class Appender(Protocol):
    """An open file that is written at its end. Every method but `close` raises StoreWriteFailed (DiskFull if so)."""

    def write(self, data: bytes) -> None:
        """Write all of `data`; on an error some of it may be in the file."""

    def sync(self) -> None:
        """Make the contents durable."""

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; not durable before `sync`."""

    def close(self) -> None:
        """Close without syncing; a second call does nothing."""


class Lock(Protocol):
    """A held lock; it dies with the process."""

    def release(self) -> None:
        """Give it up."""


class Files(Protocol):
    """What the store asks of a file system. Reads raise StoreError, writes StoreWriteFailed (DiskFull if so)."""

    def size(self, path: Path) -> int | None:
        """Bytes in a file; None if there is no such file."""

    def names(self, directory: Path) -> list[str]:
        """Names of the entries of a directory, sorted; empty if there is no such directory."""

    def is_directory(self, path: Path) -> bool:
        """Whether `path` is a directory."""

    def read(self, path: Path) -> bytes:
        """The whole file."""

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end of the file."""

    def read_pieces(self, path: Path, offsets: Sequence[int], length: int) -> list[bytes]:
        """The same for many offsets of one file."""

    def create(self, path: Path) -> Appender:
        """A new empty file, open; an existing one is emptied."""

    def append_to(self, path: Path) -> Appender:
        """An existing file, open."""

    def make_directory(self, path: Path) -> None:
        """Create a directory; nothing happens if it exists. Parents must exist."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically, replacing `new`."""

    def link(self, old: Path, new: Path) -> bool:
        """Give a file a second name, not durably; False where the two places cannot share a file."""

    def is_same_file(self, one: Path, other: Path) -> bool:
        """Whether both names stand for the same file; False where there is none."""

    def remove(self, path: Path) -> None:
        """Remove a file; nothing happens if there is none."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def save_native(self, path: Path, save: Callable[[str], None]) -> None:
        """Let a native library write a file by name, then make its contents (not its name) durable."""

    def load_native(self, path: Path, load: Callable[[str], None]) -> None:
        """Let a native library read a file by name."""

    def native_directory(self, path: Path) -> str | None:
        """A folder for a native library that keeps files of its own, made if need be; None: it has to use memory."""

    def lock(self, path: Path) -> Lock:
        """Take the lock that `path` stands for; raises StoreLocked, naming the holder, if another process has it."""

    def is_locked(self, path: Path) -> bool:
        """Whether some process holds the lock."""

    def free_bytes(self, directory: Path) -> int:
        """What may still be written to the file system of a directory."""

    def try_writing(self, directory: Path, data: bytes) -> None:
        """Write a file without a name, durably, and drop it again: raises what a write there would raise."""

    def may_write(self, path: Path) -> bool:
        """Whether permissions let this process write a file, or make files in a directory."""


def replace(files: Files, path: Path, data: bytes) -> None:
    """Put a whole file in place of `path`, durably: after a crash it is the old or the new one, never half of it."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    appender = files.create(temporary)
    try:
        appender.write(data)
        appender.sync()
    finally:
        appender.close()
    files.rename(temporary, path)
    files.sync_directory(path.parent)


class DiskFiles:
    """The real file system."""

    def size(self, path: Path) -> int | None:
        """See Files."""
        with _reading(path):
            try:
                return path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, directory: Path) -> list[str]:
        """See Files."""
        with _reading(directory):
            try:
                return sorted(entry.name for entry in directory.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def is_directory(self, path: Path) -> bool:
        """See Files."""
        return path.is_dir()

    def read(self, path: Path) -> bytes:
        """See Files."""
        with _reading(path):
            return path.read_bytes()

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """See Files."""
        with _reading(path), _open_descriptor(path, os.O_RDONLY) as descriptor:
            return _pread_all(descriptor, offset, length)

    def read_pieces(self, path: Path, offsets: Sequence[int], length: int) -> list[bytes]:
        """See Files."""
        with _reading(path), _open_descriptor(path, os.O_RDONLY) as descriptor:
            return [os.pread(descriptor, length, offset) for offset in offsets]

    def create(self, path: Path) -> Appender:
        """See Files."""
        return _DiskAppender(path, os.O_CREAT | os.O_TRUNC)

    def append_to(self, path: Path) -> Appender:
        """See Files."""
        return _DiskAppender(path, 0)

    def make_directory(self, path: Path) -> None:
        """See Files."""
        with _writing(path):
            path.mkdir(exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """See Files."""
        with _writing(new):
            old.replace(new)

    def link(self, old: Path, new: Path) -> bool:
        """See Files."""
        with _writing(new):
            try:
                new.hardlink_to(old)
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                return False
            return True

    def is_same_file(self, one: Path, other: Path) -> bool:
        """See Files."""
        with _reading(one):
            try:
                return one.samefile(other)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def remove(self, path: Path) -> None:
        """See Files."""
        with _writing(path):
            path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """See Files."""
        with _writing(path):
            try:
                with _open_descriptor(path, os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
            except PermissionError:
                pass  # a directory above the data directory that memd may pass through but not list: not its to sync

    def save_native(self, path: Path, save: Callable[[str], None]) -> None:
        """See Files."""
        with _writing(path):
            try:
                save(str(path))
            except RuntimeError as error:  # what pybind11 makes of a C++ exception
                raise StoreWriteFailed(f"{path}: the index could not be written ({error}); {_WRITE_REMEDY}") from error
            with _open_descriptor(path, os.O_RDONLY) as descriptor:
                _sync(descriptor)

    def load_native(self, path: Path, load: Callable[[str], None]) -> None:
        """See Files."""
        with _reading(path):
            load(str(path))

    def native_directory(self, path: Path) -> str | None:
        """See Files."""
        self.make_directory(path)
        return str(path)

    def lock(self, path: Path) -> Lock:
        """See Files."""
        with _writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "which has not said who it is"
            os.close(descriptor)
            raise StoreLocked(
                f"{path.parent} is in use by another memd ({holder}); stop that one, or choose another data_dir"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise StoreError(
                f"{path}: cannot be locked ({error.strerror}); put data_dir on a file system that supports flock"
            ) from error
        with _writing(path):
            os.ftruncate(descriptor, 0)
            started = time.strftime("%Y-%m-%d %H:%M:%S %z")
            os.pwrite(descriptor, f"pid {os.getpid()}, started {started}\n".encode(), 0)
        return _DiskLock(descriptor)

    def is_locked(self, path: Path) -> bool:
        """See Files."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def free_bytes(self, directory: Path) -> int:
        """See Files."""
        with _reading(directory):
            found = os.statvfs(directory)
            return found.f_bavail * found.f_frsize

    def try_writing(self, directory: Path, data: bytes) -> None:
        """See Files."""
        with _writing(directory), tempfile.TemporaryFile(prefix="memd-", dir=directory) as file:
            file.write(data)
            file.flush()
            _sync(file.fileno())

    def may_write(self, path: Path) -> bool:
        """See Files."""
        return os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)


class _DiskLock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """See Lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _DiskAppender:
    def __init__(self, path: Path, flags: int) -> None:
        self._path = path
        with _writing(path):
            self._descriptor: int | None = os.open(path, flags | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        """See Appender."""
        rest = memoryview(data)
        with _writing(self._path):
            while rest:
                rest = rest[os.write(self._opened, rest) :]

    def sync(self) -> None:
        """See Appender."""
        with _writing(self._path):
            _sync(self._opened)

    def truncate(self, size: int) -> None:
        """See Appender."""
        with _writing(self._path):
            os.ftruncate(self._opened, size)

    def close(self) -> None:
        """See Appender."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    @property
    def _opened(self) -> int:
        if self._descriptor is None:
            raise StoreWriteFailed(f"{self._path}: the file was closed before this write; open the store again")
        return self._descriptor


_WRITE_REMEDY = "check that the disk is healthy, mounted writable and that memd may write there"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(f"{path}: the disk is full; free some space, memd goes on by itself") from error
        raise StoreWriteFailed(f"{path}: cannot be written ({error.strerror or error}); {_WRITE_REMEDY}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read ({error.strerror or error}); check the disk and the permissions"
        ) from error


@contextmanager
def _open_descriptor(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _pread_all(descriptor: int, offset: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.pread(descriptor, length, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def _sync(descriptor: int) -> None:
    if _F_FULLFSYNC is not None:
        fcntl.fcntl(descriptor, _F_FULLFSYNC)
    else:
        os.fsync(descriptor)
