"""The local disk: operations that only a local file system has.

Rule: with syscalls.py and directory_lock.py it is the only code of the store that touches one; no other module opens,
names or removes a file by itself. Every call either happens or raises one of the declared errors, which names the file
and the remedy. Modules that need a lock, a hard link, the free space or a path for a native library take a `LocalDisk`;
all others take `Files` and could work on a remote store. The counterpart for tests, with power cuts and full disks, is
tests/support/crash_files.py.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from memd.errors import FileReplaced, StoreWriteFailed
from memd.store import descriptors, directory_lock
from memd.store.descriptors import KeptOpen
from memd.store.directory_lock import DirectoryLock, Lock, lock_alone
from memd.store.files import Appender, FileChecksum, Files, check_file
from memd.store.syscalls import (
    DIRECTORY_MODE,
    WRITE_REMEDY,
    close_descriptor,
    open_descriptor,
    opened,
    reading,
    sync_descriptor,
    writing,
)

# Another file system; one without hard links; no more links to this file; a sandbox or kernel that does not allow it.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_APPENDING = os.O_WRONLY | os.O_APPEND
_PIECE_BYTES = 1 << 20
# A directory of autofs, squashfs, 9p or some FUSE: there is nothing to sync, or the file system does it by itself.
_NOTHING_TO_SYNC = {errno.EINVAL, errno.EBADF}


class Room(msgspec.Struct, frozen=True):
    """How much a file system still takes from this user."""

    bytes: int | None
    files: int | None
    """None, as of bytes: it does not count them."""
    is_read_only: bool


class LocalDisk(Files, Protocol):
    """`Files` on a disk of this machine. Reads raise StoreError, writes StoreWriteFailed (DiskFull if it is full)."""

    def changed_at(self, path: Path) -> int:
        """When a file was last changed, in nanoseconds, by the file system's clock; 0 where there is none."""

    def wipe(self, path: Path) -> bool:
        """Overwrite a file as far as the disk lets one, and remove it; False if its bytes may still be somewhere.

        They are where the file has another name (a backup's hard link), whose owner keeps it as it is.
        """

    def replace_wiping(self, new: Path, path: Path) -> bool:
        """Give `new` the name `path`, durably, then overwrite the file that had it; see `wipe`."""

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory if it exists."""

    def save_native(self, path: Path, save: Callable[[str], None]) -> None:
        """Let a native library write a file by its path, then make the contents (not the name) durable."""

    def load_native(self, path: Path, expected: FileChecksum, load: Callable[[str], None]) -> None:
        """Let a native library read a file by its path; raises CorruptFile before, unless it is the one expected."""

    def lock(self, path: Path) -> Lock:
        """Lock the file `path`, created if necessary; raises StoreLocked, naming the holder, if another process did.

        Until it is released, all that changes something confirms it first.
        """

    def confirm_lock(self) -> None:
        """Make sure that the locks which were taken still keep others out: see `Lock.confirm`."""

    def is_locked(self, path: Path) -> bool:
        """Whether any process holds the lock."""

    def room(self, directory: Path) -> Room:
        """How much can still be written to the file system of a directory."""

    def try_writing(self, directory: Path, data: bytes) -> None:
        """Write and lock an unnamed file, drop it and sync the directory: raises whatever a start there would raise."""

    def encrypts(self, path: Path) -> bool:
        """Whether what is written to a file reaches the disk encrypted."""

    def may_write(self, path: Path) -> bool:
        """Whether permissions let this process write a file, or create files in a directory."""


class DiskFiles:
    """The real file system."""

    def __init__(self, kept_open_max: int | None = None) -> None:
        """`kept_open_max`: appended files that keep a descriptor; None: what the limit of this process allows."""
        self._kept_open = KeptOpen(kept_open_max or descriptors.kept_open_max(descriptors.limit()))
        self._locks: list[DirectoryLock] = []

    def _note(self, path: Path) -> None:
        """Called after a file was made, replaced, cut or removed. Counterpart: memd/store/bucket/noting_disk.py."""

    def _note_growth(self, path: Path, end: int) -> None:
        """Called after a whole write to a file, which ends there now."""

    def size(self, path: Path) -> int | None:
        """See Files."""
        with reading(path):
            try:
                return path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def identity(self, path: Path) -> Hashable | None:
        """See Files."""
        with reading(path):
            try:
                return _identity(path.stat())
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, directory: Path) -> list[str]:
        """See Files."""
        with reading(directory):
            try:
                return sorted(entry.name for entry in directory.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def is_directory(self, path: Path) -> bool:
        """See Files."""
        return path.is_dir()

    def read(self, path: Path) -> bytes:
        """See Files."""
        with (
            reading(path),
            open_descriptor(path, os.O_RDONLY) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
        ):
            return file.read()

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """See Files."""
        with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
            return _pread_all(descriptor, offset, length)

    def read_pieces(self, path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """See Files."""
        with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
            return [_pread_all(descriptor, offset, length) for offset, length in pieces]

    def damage_of(self, path: Path) -> str | None:
        """See Files."""
        return None

    def create(self, path: Path) -> Appender:
        """See Files."""
        self.confirm_lock()
        appender = self._appender(path, os.O_CREAT | os.O_TRUNC)
        self._note(path)
        return appender

    def append_to(self, path: Path) -> Appender:
        """See Files."""
        return self._appender(path, 0)

    def _appender(self, path: Path, flags: int) -> _DiskAppender:
        return _DiskAppender(path, flags, self._kept_open, self.confirm_lock, self._note, self._note_growth)

    def make_directory(self, path: Path) -> None:
        """See Files."""
        if not path.is_dir():
            self.confirm_lock()
            with writing(path):
                path.mkdir(DIRECTORY_MODE, exist_ok=True)
        elif all(below.name.startswith(".") for below in path.iterdir()):
            with suppress(OSError):  # another user's; `memd check` tells it
                path.chmod(DIRECTORY_MODE)

    def rename(self, old: Path, new: Path) -> None:
        """See Files."""
        self.confirm_lock()
        with writing(new):
            old.replace(new)
        self._note(old)
        self._note(new)

    def link(self, old: Path, new: Path) -> bool:
        """See LocalDisk."""
        self.confirm_lock()
        with writing(new):
            try:
                new.hardlink_to(old)
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                return False
        self._note(new)
        return True

    def changed_at(self, path: Path) -> int:
        """See LocalDisk."""
        with reading(path):
            try:
                return path.stat().st_mtime_ns
            except (FileNotFoundError, NotADirectoryError):
                return 0

    def remove(self, path: Path) -> None:
        """See Files."""
        if os.path.lexists(path):  # else a read-only disk would refuse even that
            self.confirm_lock()
            with writing(path):
                path.unlink(missing_ok=True)
            self._note(path)

    def wipe(self, path: Path) -> bool:
        """See LocalDisk."""
        if not os.path.lexists(path):
            return True
        self.confirm_lock()
        with writing(path), open_descriptor(path, os.O_WRONLY) as descriptor:
            is_gone = os.fstat(descriptor).st_nlink == 1 and _overwritten(descriptor)
            path.unlink(missing_ok=True)
        self._note(path)
        return is_gone

    def replace_wiping(self, new: Path, path: Path) -> bool:
        """See LocalDisk."""
        self.confirm_lock()
        with writing(path), open_descriptor(path, os.O_WRONLY) as descriptor:
            new.replace(path)
            self.sync_directory(path.parent)  # before: a power cut must not bring an overwritten file back
            is_gone = os.fstat(descriptor).st_nlink == 0 and _overwritten(descriptor)
        self._note(path)
        return is_gone

    def remove_directory(self, path: Path) -> None:
        """See LocalDisk."""
        if path.is_dir():
            self.confirm_lock()
            with writing(path):
                path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """See Files."""
        with writing(path):
            try:
                with open_descriptor(path, os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
            except PermissionError:
                pass  # a parent of the data directory that memd may enter but not list is not memd's to sync
            except OSError as error:
                if error.errno not in _NOTHING_TO_SYNC:
                    raise

    def save_native(self, path: Path, save: Callable[[str], None]) -> None:
        """See LocalDisk."""
        self.confirm_lock()
        with writing(path):
            try:
                save(str(path))
            except RuntimeError as error:  # pybind11 turns C++ exceptions into this
                raise StoreWriteFailed(f"{path}: the index could not be written ({error}); {WRITE_REMEDY}") from error
            with open_descriptor(path, os.O_RDONLY) as descriptor:
                sync_descriptor(descriptor)
        self._note(path)

    def load_native(self, path: Path, expected: FileChecksum, load: Callable[[str], None]) -> None:
        """See LocalDisk."""
        check_file(self, path, expected)
        with reading(path):
            load(str(path))

    def lock(self, path: Path) -> Lock:
        """See LocalDisk."""
        lock = DirectoryLock(path)
        self._locks = [*(one for one in self._locks if one.is_held), lock]
        return lock

    def confirm_lock(self) -> None:
        """See LocalDisk."""
        for lock in self._locks:
            if lock.is_held:
                lock.confirm()

    def is_locked(self, path: Path) -> bool:
        """See LocalDisk."""
        return directory_lock.is_locked(path)

    def room(self, directory: Path) -> Room:
        """See LocalDisk."""
        with reading(directory):
            found = os.statvfs(directory)
        size = found.f_bavail * found.f_frsize if found.f_blocks else None
        return Room(size, found.f_favail if found.f_files else None, bool(found.f_flag & os.ST_RDONLY))

    def try_writing(self, directory: Path, data: bytes) -> None:
        """See LocalDisk."""
        with writing(directory), tempfile.TemporaryFile(prefix="memd-", dir=directory) as file:
            file.write(data)
            file.flush()
            sync_descriptor(file.fileno())
            lock_alone(file.fileno(), directory)
        self.sync_directory(directory)

    def encrypts(self, path: Path) -> bool:
        """See LocalDisk."""
        return False

    def may_write(self, path: Path) -> bool:
        """See LocalDisk."""
        return os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)


class _DiskAppender:
    """Gives its descriptor back where others are used more (`descriptors.KeptOpen`), and gets it again when needed."""

    def __init__(
        self,
        path: Path,
        flags: int,
        kept_open: KeptOpen,
        confirm_lock: Callable[[], None],
        note: Callable[[Path], None],
        note_growth: Callable[[Path, int], None],
    ) -> None:
        self._path = path
        self._confirm_lock, self._note, self._note_growth = confirm_lock, note, note_growth
        self._kept_open = kept_open
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_unsynced = False
        self._sync_error: OSError | None = None
        with writing(path):
            self._descriptor: int | None = opened(path, flags | _APPENDING)
            found = os.fstat(self._descriptor)
            self._identity, self._end = _identity(found), found.st_size
        kept_open.used(self)

    def write(self, data: bytes) -> None:
        """See Appender."""
        rest = memoryview(data)
        self._confirm_lock()
        with self._opened() as descriptor:
            self._is_unsynced = True
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        self._end += len(data)
        self._note_growth(self._path, self._end)

    def sync(self) -> None:
        """See Appender."""
        with self._opened() as descriptor:
            sync_descriptor(descriptor)
            self._is_unsynced = False

    def truncate(self, size: int) -> None:
        """See Appender."""
        self._confirm_lock()
        with self._opened() as descriptor:
            self._is_unsynced = True
            os.ftruncate(descriptor, size)
        self._end = size
        self._note(self._path)

    def close(self) -> None:
        """See Appender."""
        self._kept_open.forget(self)
        with self._lock:
            self._is_closed = True
            self._close()

    def suspend(self) -> None:
        """See Suspendable. What was written is synced first: no other descriptor could vouch for it later."""
        with self._lock:
            if self._is_unsynced and self._descriptor is not None:
                try:
                    sync_descriptor(self._descriptor)
                    self._is_unsynced = False
                except OSError as error:  # it is told only once, and the owner has to know it
                    self._sync_error = error
            self._close()

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with self._lock, writing(self._path):
            if self._is_closed:
                raise StoreWriteFailed(f"{self._path}: the file was closed before this write; open the store again")
            if self._sync_error is not None:
                error, self._sync_error = self._sync_error, None
                raise error
            if self._descriptor is None:
                self._descriptor = opened(self._path, _APPENDING)
                if _identity(os.fstat(self._descriptor)) != self._identity:
                    self._close()
                    raise FileReplaced(str(self._path))
            yield self._descriptor
            self._check_place()  # afterwards: what is acknowledged is in the file that the path names
        self._kept_open.used(self)

    def _check_place(self) -> None:
        """Raise FileReplaced unless the path still names this file: an unlinked one takes writes, and loses them."""
        try:
            named = _identity(self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            named = None
        if named != self._identity:
            raise FileReplaced(str(self._path))

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            close_descriptor(descriptor)


def _overwritten(descriptor: int) -> bool:
    """Overwrite a file with zeros, in place where the file system works so; False if that failed."""
    try:
        size, at = os.fstat(descriptor).st_size, 0
        while at < size:
            at += os.pwrite(descriptor, bytes(min(_PIECE_BYTES, size - at)), at)
        sync_descriptor(descriptor)
    except OSError:  # it is removed all the same
        return False
    return True


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


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
