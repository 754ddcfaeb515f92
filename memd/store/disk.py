"""The disk: system calls, whose errors become those of the store; local files, which the store reads, appends to,
rewrites and renames; and trouble: the disk is full, has no room for another file, is read-only, or writes fail.

Rule: only this module of the store touches a disk; no other one opens, names or removes a file by itself. Every call
either succeeds or raises one of the declared errors, which names the file and the remedy. A file or a name is durable
only after `sync` of the file and `sync_directory` of its directory; `replace_file` does all of it in the right order.
An encrypted disk wraps another (encryption/disk.py); that of the tests, with power cuts and full disks, is
tests/support/crash_files.py.

Descriptors do not depend on the number of topics: an appended file has one until it is synced. Connections get the
other half of the descriptors; a reserve is left for files opened briefly.

A data directory has one daemon at a time, as long as its lock file stays in place. The lock is flock's, on the file at
that path. It ends with the process, and a removed or replaced file excludes nobody; so it is checked before each write.

The check for trouble only writes a nameless test file, and only in doubt. A disk counts as full before the last byte is
written, so that work in progress can still be completed. Trouble ends only with some more room than that, so that it
does not flap.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import resource
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from memd.errors import CorruptFile, DiskFull, FileReplaced, ReadOnlyDisk, StoreError, StoreLocked, StoreWriteFailed
from memd.wording import sized

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
"""Only the user may read stored text. For native libraries, which set no modes, `memd` sets its umask."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves data in the drive's cache
WRITE_REMEDY = "check that the disk is healthy, mounted writable and that memd may write there"
_READ_REMEDY = "check the disk and the permissions"

RESERVED = 64
"""Descriptors for the process itself, which has about thirty, and for files that are read, written whole or indexed."""
APPENDED_MIN, APPENDED_MAX = 8, 1024
"""Limits on appended files that keep a descriptor until they are synced. Reopening one takes some microseconds."""
PER_CONNECTION = 2
"""The client's, and the upstream's for its request."""
CONNECTIONS_MIN = 8
_RAISED_MAX = 1 << 18
"""More is never used; some systems report a limit of a billion for unlimited."""
_ACCEPTED_MAX = 10_240
"""macOS accepts no higher limit from a process, whatever the hard limit says."""
DESCRIPTORS_REMEDY = "allow more: `ulimit -n 4096` in the shell that starts memd, LimitNOFILE in a systemd unit"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError within into StoreWriteFailed (DiskFull, ReadOnlyDisk)."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(f"{path}: the disk is full; free some space") from error
        if error.errno == errno.EROFS:
            raise ReadOnlyDisk(f"{path}: the disk is read-only; mount it writable") from error
        raise StoreWriteFailed(f"{path}: cannot be written {_told(error, WRITE_REMEDY)}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError within into StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be read {_told(error, _READ_REMEDY)}") from error


def opened(path: Path, flags: int) -> int:
    """Open a file or a directory. Anything else, such as a pipe or a device, might block forever. Raises StoreError: it
    is something else."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        return descriptor
    close_descriptor(descriptor)
    raise StoreError(f"{path}: is no file but a pipe or a device; remove it, and put the file back if you have it")


@contextmanager
def open_descriptor(path: Path, flags: int) -> Iterator[int]:
    """Open a descriptor of a file for the block; see `opened`."""
    descriptor = opened(path, flags)
    try:
        yield descriptor
    finally:
        close_descriptor(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor, ignoring errors."""
    with suppress(OSError):  # it is closed anyway, and was synced before if that matters
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Make the contents of a file durable, through the drive's own cache."""
    if _F_FULLFSYNC is not None:
        fcntl.fcntl(descriptor, _F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def read_private(path: Path, length: int) -> tuple[bytes, int]:
    """Return the first bytes of a file and its permissions, both of the same file despite a replacement."""
    with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
        return os.pread(descriptor, length, 0), stat.S_IMODE(os.fstat(descriptor).st_mode)


def create_private(path: Path, data: bytes) -> None:
    """Write a new file durably that only the user may read. Raises StoreWriteFailed: it exists, or the write failed."""
    with writing(path), open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        os.write(descriptor, data)
        sync_descriptor(descriptor)


def descriptors_limit(*, raised: bool = False) -> int:
    """Return the limit on this process's descriptors: the current one, or that after this process has raised it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[raised]
    return _RAISED_MAX if limit == resource.RLIM_INFINITY else min(limit, _RAISED_MAX)


def raise_descriptors_limit() -> int:
    """Raise the soft limit as far as the hard one allows, and return the new limit. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (descriptors_limit(raised=True), min(descriptors_limit(raised=True), _ACCEPTED_MAX)):
        if soft != resource.RLIM_INFINITY and wanted > descriptors_limit():
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptors_limit()


def appended_max(descriptors: int) -> int:
    """Return the limit on open appended files for a limit on descriptors."""
    return max(APPENDED_MIN, min(APPENDED_MAX, (descriptors - RESERVED) // 4))


def connections_room(descriptors: int) -> int:
    """Return the number of connections for which descriptors are left besides the files."""
    return max(CONNECTIONS_MIN, (descriptors - RESERVED - appended_max(descriptors)) // PER_CONNECTION)


def _told(error: OSError, remedy: str) -> str:
    """Return the reason of a system error and a remedy; if descriptors have run out, the remedy for that."""
    reason = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"({reason}: the limit of this process is {descriptors_limit()}); {DESCRIPTORS_REMEDY}"
    return f"({reason}); {remedy}"


# Another file system; one without hard links; no more links to this file; a sandbox or kernel that does not allow it.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_APPENDING = os.O_WRONLY | os.O_APPEND
_APPENDING_LOCKS = 64
"""Locks that files share by hash; with so many files at once, few wait for another's write or sync."""
_ZEROS_BYTES = 1 << 20
# A directory of autofs, squashfs, 9p or some FUSE: there is nothing to sync, or the file system does it by itself.
_NOTHING_TO_SYNC = {errno.EINVAL, errno.EBADF}

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of a file's name until it is complete; after a crash such a file may be removed."""
_PIECE_BYTES = 8 << 20

LOCK_TRIES, LOCK_RETRY_SECONDS = 5, 0.02
"""A caller of `is_locked` holds the lock too, briefly, so locking is retried."""


class Room(msgspec.Struct, frozen=True):
    """The room left for this user on a file system."""

    bytes: int | None
    files: int | None
    """None, for bytes too, if the file system does not count them."""
    is_read_only: bool


class FileChecksum(msgspec.Struct, frozen=True):
    """The size and CRC32 of a file."""

    bytes: int
    crc: int


class LocalDisk:
    """The real file system. Reads raise StoreError, writes StoreWriteFailed (DiskFull if it is full)."""

    def __init__(self, unsynced_max: int | None = None) -> None:
        """`unsynced_max`: limit on files that keep a descriptor; None derives it from the limit of this process."""
        self.unsynced_max = unsynced_max or appended_max(descriptors_limit())
        self._unsynced: dict[Path, int] = {}
        """The descriptors of files with unsynced writes."""
        self._appending_locks = [threading.Lock() for _ in range(_APPENDING_LOCKS)]
        self._locks: list[Lock] = []

    def note(self, path: Path) -> None:
        """Called after a file was appended to, created, replaced, cut or removed; see bucket/writing.py."""

    def size(self, path: Path) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        found = _stat(path)
        return None if found is None else found.st_size

    def identity(self, path: Path) -> Hashable | None:
        """Return a key that distinguishes a file from any other at its path later; None if there is no such file."""
        found = _stat(path)
        return None if found is None else _identity(found)

    def names(self, directory: Path) -> list[str]:
        """Return the names of the entries of a directory, sorted; empty if there is no such directory."""
        with reading(directory):
            try:
                return sorted(entry.name for entry in directory.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def is_directory(self, path: Path) -> bool:
        """Return whether `path` is a directory."""
        return path.is_dir()

    def read(self, path: Path) -> bytes:
        """Read the whole file; all bytes come from the same file, even if its name is replaced meanwhile."""
        with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
            return _pread_all(descriptor, 0, os.fstat(descriptor).st_size)

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """Read at most `length` bytes from `offset`; fewer at the end of the file."""
        return self.read_pieces(path, [(offset, length)])[0]

    def read_pieces(self, path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Like `read_at`, for many (offset, length) of one file."""
        with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
            return [_pread_all(descriptor, offset, length) for offset, length in pieces]

    def damage_of(self, path: Path) -> str | None:
        """Return a description of damage to a file that its readable bytes do not show; None if there is none."""
        return None

    def create(self, path: Path) -> None:
        """Make a new empty file; an existing one is emptied."""
        self.confirm_lock()
        self.close(path)
        with self._appending_lock(path), writing(path):
            self._unsynced[path] = opened(path, _APPENDING | os.O_CREAT | os.O_TRUNC)
        self.note(path)

    def append(self, path: Path, data: bytes, identity: Hashable | None = None) -> None:
        """Write all of `data` at the end of a file; after an error, part of it may be there. If too many files are
        unsynced, this one is synced at once, so that descriptors do not depend on the number of topics. `identity`: of
        the file to append to; None for the one at the path. Raises FileReplaced: it is another one."""
        rest = memoryview(data)
        self.confirm_lock()
        with self._appending(path, identity) as descriptor:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        self.note(path)
        if len(self._unsynced) > self.unsynced_max:
            self.sync(path)

    def sync(self, path: Path) -> None:
        """Make the contents of a file durable."""
        with self._appending(path) as descriptor:  # the descriptor that wrote: a new one could not vouch for all of it
            sync_descriptor(descriptor)
            close_descriptor(self._unsynced.pop(path))

    def close(self, path: Path) -> None:
        """Close a file that was appended to, without syncing it."""
        with self._appending_lock(path):
            if (descriptor := self._unsynced.pop(path, None)) is not None:
                close_descriptor(descriptor)

    def cut(self, path: Path, size: int) -> None:
        """Cut a file to its first `size` bytes, durably; after an error, it may be cut anyway."""
        self.confirm_lock()
        with writing(path), open_descriptor(path, os.O_WRONLY) as descriptor:
            os.ftruncate(descriptor, size)
            self.note(path)
            sync_descriptor(descriptor)

    def _appending_lock(self, path: Path) -> threading.Lock:
        return self._appending_locks[hash(path) % _APPENDING_LOCKS]

    @contextmanager
    def _appending(self, path: Path, identity: Hashable | None = None) -> Iterator[int]:
        """Yield a descriptor for appending. Raises FileReplaced unless the path names the same file before and
        afterwards: an unlinked file accepts writes, and loses them."""
        with self._appending_lock(path), writing(path):
            named = self.identity(path)
            if named is None or named != (identity or named):
                raise FileReplaced(str(path))
            if (descriptor := self._unsynced.get(path)) is None:
                descriptor = self._unsynced[path] = opened(path, _APPENDING)
            if _identity(os.fstat(descriptor)) != named:
                raise FileReplaced(str(path))
            yield descriptor
            if self.identity(path) != named:  # acknowledged data must be in the file at the path
                raise FileReplaced(str(path))

    def make_directory(self, path: Path) -> None:
        """Create a directory unless it exists; an empty one becomes private to its user. Its parent must exist."""
        if not path.is_dir():
            self.confirm_lock()
            with writing(path):
                path.mkdir(DIRECTORY_MODE, exist_ok=True)
        elif all(below.name.startswith(".") for below in path.iterdir()):
            with suppress(OSError):  # another user's; `memd check` reports it
                path.chmod(DIRECTORY_MODE)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically, replacing `new`."""
        self.confirm_lock()
        with writing(new):
            old.replace(new)
        self.note(old)
        self.note(new)

    def link(self, old: Path, new: Path) -> bool:
        """Give a file a second name, not durably; False if the two places cannot share a file."""
        self.confirm_lock()
        with writing(new):
            try:
                new.hardlink_to(old)
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                return False
        self.note(new)
        return True

    def changed_at(self, path: Path) -> int:
        """Return a file's time of last change, in ns by the file system's clock; 0 if there is no such file."""
        found = _stat(path)
        return 0 if found is None else found.st_mtime_ns

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""
        if os.path.lexists(path):  # else a read-only disk would refuse even that
            self.confirm_lock()
            with writing(path):
                path.unlink(missing_ok=True)
            self.note(path)

    def wipe(self, path: Path, by: Path | None = None) -> bool:
        """Remove a file durably, or rename `by` to it, then overwrite it as far as the disk allows; False if its bytes
        may remain somewhere. The name goes first, so that an interruption leaves no half file under it.

        Bytes remain if the file has another name (a backup's hard link), whose owner keeps it as it is.
        """
        if by is None and not os.path.lexists(path):
            return True
        self.confirm_lock()
        with writing(path), open_descriptor(path, os.O_WRONLY) as descriptor:
            path.unlink(missing_ok=True) if by is None else by.replace(path)
            self.sync_directory(path.parent)  # before: a power cut must not bring an overwritten file back
            is_gone = os.fstat(descriptor).st_nlink == 0 and _overwritten(descriptor)
        self.note(path)
        return is_gone

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory if it exists."""
        if path.is_dir():
            self.confirm_lock()
            with writing(path):
                path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with writing(path):
            try:
                with open_descriptor(path, os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
            except PermissionError:
                pass  # a parent of the data directory that memd may enter but not list is not memd's to sync
            except OSError as error:
                if error.errno not in _NOTHING_TO_SYNC:
                    raise

    def map(self, path: Path, expected: FileChecksum) -> memoryview:
        """Return the bytes of a file, read-only; memory-mapped unless the disk has to decode them. Raises CorruptFile:
        it is not the one expected."""
        check_file(self, path, expected)
        with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
            return memoryview(mmap.mmap(descriptor, expected.bytes, access=mmap.ACCESS_READ))

    def lock(self, path: Path) -> Lock:
        """Lock the file `path`, created if necessary. Raises StoreLocked, naming the holder: another process holds it.

        Until it is released, every change confirms it first.
        """
        lock = Lock(path)
        self._locks = [*(one for one in self._locks if one.is_held), lock]
        return lock

    def confirm_lock(self) -> None:
        """Make sure that the held locks still exclude others; see `Lock.confirm`."""
        for lock in self._locks:
            if lock.is_held:
                lock.confirm()

    def is_locked(self, path: Path) -> bool:
        """Return whether any process holds the lock."""
        with suppress(OSError), open_descriptor(path, os.O_RDONLY) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def room(self, directory: Path) -> Room:
        """Return the room left on the file system of a directory."""
        with reading(directory):
            found = os.statvfs(directory)
        size = found.f_bavail * found.f_frsize if found.f_blocks else None
        return Room(size, found.f_favail if found.f_files else None, bool(found.f_flag & os.ST_RDONLY))

    def try_writing(self, directory: Path, data: bytes) -> None:
        """Write and lock an unnamed file, drop it and sync the directory. Raises any error of a start there."""
        with writing(directory), tempfile.TemporaryFile(prefix="memd-", dir=directory) as file:
            file.write(data)
            file.flush()
            sync_descriptor(file.fileno())
            lock_alone(file.fileno(), directory)
        self.sync_directory(directory)

    def encrypts(self, path: Path) -> bool:
        """Return whether data written to a file reaches the disk encrypted."""
        return False

    def may_write(self, path: Path) -> bool:
        """Return whether permissions let this process write a file, or create files in a directory."""
        return os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)


def _overwritten(descriptor: int) -> bool:
    """Overwrite a file with zeros, in place if the file system works so; False if that failed."""
    try:
        size, at = os.fstat(descriptor).st_size, 0
        while at < size:
            at += os.pwrite(descriptor, bytes(min(_ZEROS_BYTES, size - at)), at)
        sync_descriptor(descriptor)
    except OSError:  # it is removed anyway
        return False
    return True


def _stat(path: Path) -> os.stat_result | None:
    with reading(path), suppress(FileNotFoundError, NotADirectoryError):
        return path.stat()
    return None


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


class Lock:
    """A held lock on a file; see `LocalDisk.lock`. It ends with the process, or with the block that it is used for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._renewing = threading.Lock()
        self.is_held = True
        """Whether it was not released. Others may still have taken it, see `confirm`."""
        self._descriptor = self._locked(os.O_CREAT)

    def confirm(self) -> None:
        """Make sure that the lock still excludes others. Raises StoreLocked: it does not any more.

        A removed lock file lets another process in. It is created again, unless another process has done so.
        """
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
        """Release the lock."""
        self.is_held = False
        self._close()

    def __enter__(self) -> None:
        """Do nothing: it is held already."""

    def __exit__(self, *failed: object) -> None:
        self.release()

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            close_descriptor(descriptor)

    def _locked(self, flags: int) -> int | None:
        """Return a descriptor that holds the lock; None on a read-only disk without a lock file."""
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
                    with suppress(OSError):  # a lock file that is not writable does not name its holder
                        os.ftruncate(descriptor, 0)
                        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
                        os.pwrite(descriptor, f"pid {os.getpid()}, started {started}\n".encode(), 0)
                    return descriptor
            except BaseException:
                close_descriptor(descriptor)
                raise
            close_descriptor(descriptor)

    def _names(self, descriptor: int) -> bool:
        """Return whether the path still names this file."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        return False


def lock_alone(descriptor: int, path: Path) -> None:
    """Lock a file. Raises StoreLocked, naming the holder: another has it; StoreError: files cannot be locked."""
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if left:
                time.sleep(LOCK_RETRY_SECONDS)
                continue
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "process unknown"
            raise StoreLocked(
                f"{path.parent} is in use by another memd ({holder}); stop that one, or choose another data_dir"
            ) from None
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be locked ({error.strerror}); put data_dir on a file system that supports flock"
            ) from error


def make_folder(files: LocalDisk, path: Path) -> None:
    """Make a directory and its missing parents, durably."""
    for folder in reversed([path, *path.parents]):
        if not files.is_directory(folder):
            files.make_directory(folder)
            files.sync_directory(folder.parent)


def is_empty_or_begun(files: LocalDisk, folder: Path, marker: str) -> bool:
    """Return whether a folder is empty, or has only the marker that is written there first, perhaps incomplete."""
    names = {*files.names(folder)}
    return marker in names or names <= {marker + TEMPORARY_SUFFIX}


def replace_file(
    files: LocalDisk,
    path: Path,
    data: bytes | Iterable[bytes],
    wiper: Wiper | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> FileChecksum:
    """Replace the whole file durably: after a crash it is the old or the new one, never part of one. `wiper`:
    overwrites the old file; `confirm`: called after writing and before renaming, raises an error to prevent that."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with only_whole(files, temporary):
        written = write_pieces(files, temporary, [data] if isinstance(data, bytes) else data)
        confirm()
    put_in_place(files, temporary, path, wiper)
    return written


def write_pieces(files: LocalDisk, path: Path, pieces: Iterable[bytes]) -> FileChecksum:
    """Write a new file with durable contents, but no durable name; return its size and checksum."""
    size = crc = 0
    files.create(path)
    try:
        for piece in pieces:
            files.append(path, piece)
            size, crc = size + len(piece), zlib.crc32(piece, crc)
        files.sync(path)
    finally:
        files.close(path)
    return FileChecksum(size, crc)


def put_in_place(files: LocalDisk, temporary: Path, path: Path, wiper: Wiper | None = None) -> None:
    """Rename a temporary file to `path`, durably; it is gone afterwards, also after an error. `wiper` overwrites the
    replaced file, if there is one."""
    if files.size(path) is None:
        wiper = None
    with only_whole(files, temporary):
        if wiper is None:
            files.rename(temporary, path)
        elif not files.wipe(path, by=temporary):
            wiper.left.append(path)
    if wiper is None:
        files.sync_directory(path.parent)


@contextmanager
def only_whole(files: LocalDisk, *temporaries: Path) -> Iterator[None]:
    """Remove unfinished temporary files after an error: on a full disk others need their room."""
    try:
        yield
    except StoreError:
        with suppress(StoreError):
            for temporary in temporaries:
                files.remove(temporary)
        raise


def pieces_of(files: LocalDisk, path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Read a file, or a part of it, in pieces: an index may not fit in free memory."""
    while piece := files.read_at(path, start, _PIECE_BYTES if end is None else min(_PIECE_BYTES, end - start)):
        yield piece
        start += len(piece)


def checksum_of(files: LocalDisk, path: Path, size: int) -> FileChecksum:
    """Compute the checksum of the first `size` bytes of a file."""
    crc = 0
    for piece in pieces_of(files, path, 0, size):
        crc = zlib.crc32(piece, crc)
    return FileChecksum(size, crc)


def check_file(files: LocalDisk, path: Path, expected: FileChecksum) -> None:
    """Raise CorruptFile unless the file has the expected size and checksum."""
    if files.size(path) != expected.bytes or checksum_of(files, path, expected.bytes) != expected:
        raise CorruptFile(f"{path}: is missing or does not match its checksum")


class Wiper:
    """Removes and overwrites files, as far as the disk allows; files that could not be overwritten are listed.

    A file that a backup shares (a hard link) is never overwritten: the backup's owner decides about it.
    """

    def __init__(self, files: LocalDisk) -> None:
        self.files = files
        self.left: list[Path] = []
        """Files that were removed or replaced, but not overwritten."""

    def wipe(self, path: Path) -> None:
        """Remove and overwrite a file, if it exists. Raises StoreWriteFailed: it cannot be removed."""
        if not self.files.wipe(path):
            self.left.append(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the contents of a file durably, and overwrite the old ones. Raises StoreWriteFailed: nothing changed
        (DiskFull if the disk is full)."""
        replace_file(self.files, path, data, self)

    def wipe_folder(self, folder: Path) -> None:
        """Wipe everything in a folder, and remove it. Resumable."""
        for name in self.files.names(folder):
            path = folder / name
            if self.files.is_directory(path):
                self.wipe_folder(path)
            else:
                self.wipe(path)
        self.files.remove_directory(folder)


log = logging.getLogger("memd")

# Trouble

RESERVE_BYTES, RESERVE_FILES = 16 << 20, 64
"""A disk with less room is full: an append may have megabytes, a topic some twenty files."""
_ENOUGH = 2
"""Multiple of the reserve at which trouble ends."""
_EFFECT = "what is said waits in memory until it can be written, but in a new topic; in a cluster others write it"
_PROBE = bytes(64 << 10)

Kind = Literal["full", "inodes", "read-only", "errors"]
KINDS: tuple[Kind, ...] = ("full", "inodes", "read-only", "errors")


class Trouble(msgspec.Struct, frozen=True):
    """A problem of a daemon."""

    what: str
    since: int
    """Microseconds since the epoch; 0 if unknown."""
    remedy: str
    """The way to end it."""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


class DiskTrouble(Trouble, frozen=True, kw_only=True):
    """A problem of a disk."""

    kind: Kind


def disk_trouble(directory: Path, room: Room, *, was: bool = False) -> DiskTrouble | None:
    """Return the trouble with the disk of a directory, judged by its room. `was`: it was in trouble before."""
    least = _ENOUGH if was else 1
    if room.is_read_only:
        return _found("read-only", f"{directory}: the disk is read-only", "mount it writable")
    if room.bytes is not None and room.bytes < RESERVE_BYTES * least:
        said = f"{directory}: the disk is full, {sized(room.bytes)} are free"
        return _found("full", said, "free some space")
    if room.files is not None and room.files < RESERVE_FILES * least:
        said = f"{directory}: the disk is full, it takes {room.files:,} files more (its inodes are used up)"
        return _found("inodes", said, "remove some files")
    return None


def trouble_by_writing(directory: Path, files: LocalDisk) -> DiskTrouble | None:
    """Return the trouble with the disk of a directory, found by a test write."""
    try:
        files.try_writing(directory, _PROBE)
    except StoreError as error:
        said, _, remedy = str(error).rpartition("; ")
        kind: Kind = "errors"
        if isinstance(error, DiskFull):
            kind = "full"
        elif isinstance(error, ReadOnlyDisk):
            kind = "read-only"
        return _found(kind, said, remedy)
    return None


class DiskWatch:
    """The current trouble with the disk of a data directory. Call `look` in one thread at a time."""

    def __init__(
        self, files: LocalDisk, directory: Path, now_us: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        self._files = files
        self._directory = directory
        self._now_us = now_us
        self.trouble: DiskTrouble | None = None
        """As of the last check."""

    def look(self, *, is_doubtful: bool) -> None:
        """Check the disk; log once that trouble has begun, and once that it has ended. `is_doubtful`: a write has
        failed."""
        before, found = self.trouble, None
        try:
            found = disk_trouble(self._directory, self._files.room(self._directory), was=before is not None)
        except StoreError:
            is_doubtful = True  # the directory is gone, or the disk does not answer
        if found is None and (is_doubtful or before is not None):
            found = trouble_by_writing(self._directory, self._files)
        if found is not None:
            found = msgspec.structs.replace(found, since=self._now_us() if before is None else before.since)
        if found is not None and before is None:
            log.error(f"the disk is in trouble; {_EFFECT}", extra={"error": found})
        elif found is None and before is not None:
            log.info("the disk can be written again", extra={"data_dir": self._directory})
        self.trouble = found


def _found(kind: Kind, what: str, remedy: str) -> DiskTrouble:
    return DiskTrouble(kind=kind, what=what, since=0, remedy=remedy)
