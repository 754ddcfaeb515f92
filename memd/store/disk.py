"""The disk: calls of the system, whose errors become those of the store; files of this machine, and what the store does
with them, which is read, append, write anew and rename; and the trouble with it: it is full, has no room for another
file, is read-only, or writing to it fails.

Rule: it is the only code of the store that touches a disk; no other module opens, names or removes a file by itself.
Every call either happens or raises one of the declared errors, which names the file and the remedy. A file or a name is
durable only after `sync` of the file and `sync_directory` of its directory; `replace_file` does all of it in the right
order. An encrypted disk is one over another (encryption/disk.py); that of the tests, with power cuts and full
disks, is tests/support/crash_files.py.

The number of topics takes no descriptors: a file that is appended to has one until it is synced. Connections get the
other half of what there is; a reserve stays for all that is opened for a moment.

A data directory has one daemon at a time, for as long as its lock file keeps its place. The lock is flock's, on the
file that the path names. It ends with the process, and a file that was removed or replaced keeps nobody out; so it is
looked at again before each write.

Looking for trouble decides nothing and changes nothing but a nameless file that tests writing, which is written only
where there is doubt. A disk is full before the last byte is written, so that what is under way can still be put in
order; and it is in trouble until it has some more room than that, so that nobody goes to and fro.
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
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from memd.errors import CorruptFile, DiskFull, FileReplaced, ReadOnlyDisk, StoreError, StoreLocked, StoreWriteFailed
from memd.wording import sized

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
"""Nobody but the user may read what was said. For native libraries, which know no modes, `memd` sets its umask."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves data in the drive's cache
WRITE_REMEDY = "check that the disk is healthy, mounted writable and that memd may write there"
_READ_REMEDY = "check the disk and the permissions"

RESERVED = 64
"""For the process itself, which has about thirty, and for files that are read, written whole or indexed."""
APPENDED_MIN, APPENDED_MAX = 8, 1024
"""Appended files that have a descriptor until they are synced. To open one again takes some microseconds."""
PER_CONNECTION = 2
"""The client's, and the upstream's of the request that it waits for."""
CONNECTIONS_MIN = 8
_RAISED_MAX = 1 << 18
"""More is never used; some systems call a limit of a billion what has none."""
_ACCEPTED_MAX = 10_240
"""macOS takes no higher limit from a process, whatever it says that the hard one is."""
DESCRIPTORS_REMEDY = "allow more: `ulimit -n 4096` in the shell that starts memd, LimitNOFILE in a systemd unit"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise what fails within as StoreWriteFailed (DiskFull, ReadOnlyDisk)."""
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
    """Raise what fails within as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be read {_told(error, _READ_REMEDY)}") from error


def opened(path: Path, flags: int) -> int:
    """Open a file or a directory; who waits for the other end of a pipe, or reads a device, would never come back.
    Raises StoreError: it is something else."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        return descriptor
    close_descriptor(descriptor)
    raise StoreError(f"{path}: is no file but a pipe or a device; remove it, and put the file back if you have it")


@contextmanager
def open_descriptor(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a file, for as long as the block runs; see `opened`."""
    descriptor = opened(path, flags)
    try:
        yield descriptor
    finally:
        close_descriptor(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor, whatever the system says about it."""
    with suppress(OSError):  # it is closed all the same, and what matters was synced before
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Make the contents of a file durable, through the drive's own cache."""
    if _F_FULLFSYNC is not None:
        fcntl.fcntl(descriptor, _F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def read_private(path: Path, length: int) -> tuple[bytes, int]:
    """Return the first bytes of a file and its permissions: both of the same file, whatever the path names later."""
    with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
        return os.pread(descriptor, length, 0), stat.S_IMODE(os.fstat(descriptor).st_mode)


def create_private(path: Path, data: bytes) -> None:
    """Write a new file durably that nobody but the user may read; raises StoreWriteFailed if there is one."""
    with writing(path), open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        os.write(descriptor, data)
        sync_descriptor(descriptor)


def descriptors_limit() -> int:
    """Return how many descriptors this process may have now."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def descriptors_hard_limit() -> int:
    """Return how many descriptors this process may have once it has raised its limit."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _bounded(limit: int) -> int:
    return _RAISED_MAX if limit == resource.RLIM_INFINITY else min(limit, _RAISED_MAX)


def raise_descriptors_limit() -> int:
    """Raise the soft limit as far as the hard one allows, and return what it is now. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (_bounded(hard), min(_bounded(hard), _ACCEPTED_MAX)):
        if soft != resource.RLIM_INFINITY and wanted > descriptors_limit():
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptors_limit()


def appended_max(descriptors: int) -> int:
    """Return how many appended files may be open where there are so many descriptors."""
    return max(APPENDED_MIN, min(APPENDED_MAX, (descriptors - RESERVED) // 4))


def connections_room(descriptors: int) -> int:
    """Return for how many connections there is room beside the files."""
    return max(CONNECTIONS_MIN, (descriptors - RESERVED - appended_max(descriptors)) // PER_CONNECTION)


def _told(error: OSError, remedy: str) -> str:
    """Return the reason of an error of the system and the remedy; where descriptors have run out, those of that."""
    reason = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"({reason}: the limit of this process is {descriptors_limit()}); {DESCRIPTORS_REMEDY}"
    return f"({reason}); {remedy}"


# Another file system; one without hard links; no more links to this file; a sandbox or kernel that does not allow it.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_APPENDING = os.O_WRONLY | os.O_APPEND
_APPENDING_LOCKS = 64
"""Of so many files at once, one a lock, nobody waits for another's write or sync."""
_ZEROS_BYTES = 1 << 20
# A directory of autofs, squashfs, 9p or some FUSE: there is nothing to sync, or the file system does it by itself.
_NOTHING_TO_SYNC = {errno.EINVAL, errno.EBADF}

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file until it is complete; after a crash such a file may be removed."""
_PIECE_BYTES = 8 << 20

LOCK_TRIES, LOCK_RETRY_SECONDS = 5, 0.02
"""Whoever asks `is_locked` holds the lock too, for an instant."""


class Room(msgspec.Struct, frozen=True):
    """How much a file system still takes from this user."""

    bytes: int | None
    files: int | None
    """None, as of bytes: it does not count them."""
    is_read_only: bool


class FileChecksum(msgspec.Struct, frozen=True):
    """Size and CRC32 that a file has, or must have."""

    bytes: int
    crc: int


class LocalDisk:
    """The real file system. Reads raise StoreError, writes StoreWriteFailed (DiskFull if it is full)."""

    def __init__(self, unsynced_max: int | None = None) -> None:
        """`unsynced_max`: files that have a descriptor; None: what the limit of this process allows."""
        self.unsynced_max = unsynced_max or appended_max(descriptors_limit())
        self._unsynced: dict[Path, int] = {}
        """The descriptors of files, each from a write until that is synced."""
        self._appending_locks = [threading.Lock() for _ in range(_APPENDING_LOCKS)]
        self._locks: list[Lock] = []

    def note(self, path: Path) -> None:
        """Called after a file was appended to, made, replaced, cut or removed; see bucket/writing.py."""

    def size(self, path: Path) -> int | None:
        """Size of a file in bytes; None if there is no such file."""
        found = _stat(path)
        return None if found is None else found.st_size

    def identity(self, path: Path) -> Hashable | None:
        """Tell a file from any other that its path may name later; None if there is no such file."""
        found = _stat(path)
        return None if found is None else _identity(found)

    def names(self, directory: Path) -> list[str]:
        """Names of the entries of a directory, sorted; empty if there is no such directory."""
        with reading(directory):
            try:
                return sorted(entry.name for entry in directory.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def is_directory(self, path: Path) -> bool:
        """Whether `path` is a directory."""
        return path.is_dir()

    def read(self, path: Path) -> bytes:
        """Read the whole file, as one that has its name at one moment."""
        with (
            reading(path),
            open_descriptor(path, os.O_RDONLY) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
        ):
            return file.read()

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """Read at most `length` bytes from `offset`; fewer at the end of the file."""
        return self.read_pieces(path, [(offset, length)])[0]

    def read_pieces(self, path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Like `read_at`, for many (offset, length) of one file."""
        with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
            return [_pread_all(descriptor, offset, length) for offset, length in pieces]

    def damage_of(self, path: Path) -> str | None:
        """Tell the damage of a file that cannot be seen in what is read of it; None: there is none."""
        return None

    def create(self, path: Path) -> None:
        """Make a new empty file; an existing one is emptied."""
        self.confirm_lock()
        self.close(path)
        with self._appending_lock(path), writing(path):
            self._unsynced[path] = opened(path, _APPENDING | os.O_CREAT | os.O_TRUNC)
        self.note(path)

    def append(self, path: Path, data: bytes, identity: Hashable | None = None) -> None:
        """Write all of `data` at the end of a file; after an error, part of it may be there. Where too many files wait
        to be synced, this one is at once, so that the number of topics takes no descriptors. `identity`: of the file
        that is meant; None: whatever has the name. Raises FileReplaced: it is another one."""
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
        with self._appending(path) as descriptor:  # the one that wrote: a later one could not vouch for all of it
            sync_descriptor(descriptor)
            close_descriptor(self._unsynced.pop(path))

    def close(self, path: Path) -> None:
        """Let go of a file that was appended to, without syncing it."""
        with self._appending_lock(path):
            if (descriptor := self._unsynced.pop(path, None)) is not None:
                close_descriptor(descriptor)

    def cut(self, path: Path, size: int) -> None:
        """Cut a file to its first `size` bytes, durably; after an error, it may be cut all the same."""
        self.confirm_lock()
        with writing(path), open_descriptor(path, os.O_WRONLY) as descriptor:
            os.ftruncate(descriptor, size)
            self.note(path)
            sync_descriptor(descriptor)

    def _appending_lock(self, path: Path) -> threading.Lock:
        return self._appending_locks[hash(path) % _APPENDING_LOCKS]

    @contextmanager
    def _appending(self, path: Path, identity: Hashable | None = None) -> Iterator[int]:
        """A descriptor to append with. Raises FileReplaced unless the path names the file before and afterwards: an
        unlinked one takes writes, and loses them."""
        with self._appending_lock(path), writing(path):
            named = self.identity(path)
            if named is None or named != (identity or named):
                raise FileReplaced(str(path))
            if (descriptor := self._unsynced.get(path)) is None:
                descriptor = self._unsynced[path] = opened(path, _APPENDING)
            if _identity(os.fstat(descriptor)) != named:
                raise FileReplaced(str(path))
            yield descriptor
            if self.identity(path) != named:  # what is acknowledged is in the file that the path names
                raise FileReplaced(str(path))

    def make_directory(self, path: Path) -> None:
        """Create a directory unless it exists; an empty one becomes its user's alone. Its parent must exist."""
        if not path.is_dir():
            self.confirm_lock()
            with writing(path):
                path.mkdir(DIRECTORY_MODE, exist_ok=True)
        elif all(below.name.startswith(".") for below in path.iterdir()):
            with suppress(OSError):  # another user's; `memd check` tells it
                path.chmod(DIRECTORY_MODE)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically, replacing `new`."""
        self.confirm_lock()
        with writing(new):
            old.replace(new)
        self.note(old)
        self.note(new)

    def link(self, old: Path, new: Path) -> bool:
        """Give a file a second name, not durably; False where the two places cannot share a file."""
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
        """When a file was last changed, in nanoseconds, by the file system's clock; 0 where there is none."""
        found = _stat(path)
        return 0 if found is None else found.st_mtime_ns

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""
        if os.path.lexists(path):  # else a read-only disk would refuse even that
            self.confirm_lock()
            with writing(path):
                path.unlink(missing_ok=True)
            self.note(path)

    def wipe(self, path: Path) -> bool:
        """Remove a file durably, then overwrite it as far as the disk lets one; False if its bytes may still be
        somewhere. The name goes first: whatever interrupts this, nobody finds half a file under it.

        They are where the file has another name (a backup's hard link), whose owner keeps it as it is.
        """
        return not os.path.lexists(path) or self._wiped(path, partial(path.unlink, missing_ok=True))

    def replace_wiping(self, new: Path, path: Path) -> bool:
        """Give `new` the name `path`, durably, then overwrite the file that had it; see `wipe`."""
        return self._wiped(path, partial(new.replace, path))

    def _wiped(self, path: Path, take_name: Callable[[], object]) -> bool:
        self.confirm_lock()
        with writing(path), open_descriptor(path, os.O_WRONLY) as descriptor:
            take_name()
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
        """Return the bytes of a file, for reading, in memory that they share with others if the disk has them as they
        are; raises CorruptFile unless it is the one expected."""
        check_file(self, path, expected)
        with reading(path), open_descriptor(path, os.O_RDONLY) as descriptor:
            return memoryview(mmap.mmap(descriptor, expected.bytes, access=mmap.ACCESS_READ))

    def lock(self, path: Path) -> Lock:
        """Lock the file `path`, created if necessary; raises StoreLocked, naming the holder, if another process did.

        Until it is released, all that changes something confirms it first.
        """
        lock = Lock(path)
        self._locks = [*(one for one in self._locks if one.is_held), lock]
        return lock

    def confirm_lock(self) -> None:
        """Make sure that the locks which were taken still keep others out: see `Lock.confirm`."""
        for lock in self._locks:
            if lock.is_held:
                lock.confirm()

    def is_locked(self, path: Path) -> bool:
        """Whether any process holds the lock."""
        with suppress(OSError), open_descriptor(path, os.O_RDONLY) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def room(self, directory: Path) -> Room:
        """How much can still be written to the file system of a directory."""
        with reading(directory):
            found = os.statvfs(directory)
        size = found.f_bavail * found.f_frsize if found.f_blocks else None
        return Room(size, found.f_favail if found.f_files else None, bool(found.f_flag & os.ST_RDONLY))

    def try_writing(self, directory: Path, data: bytes) -> None:
        """Write and lock an unnamed file, drop it and sync the directory: raises whatever a start there would raise."""
        with writing(directory), tempfile.TemporaryFile(prefix="memd-", dir=directory) as file:
            file.write(data)
            file.flush()
            sync_descriptor(file.fileno())
            lock_alone(file.fileno(), directory)
        self.sync_directory(directory)

    def encrypts(self, path: Path) -> bool:
        """Whether what is written to a file reaches the disk encrypted."""
        return False

    def may_write(self, path: Path) -> bool:
        """Whether permissions let this process write a file, or create files in a directory."""
        return os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)


def _overwritten(descriptor: int) -> bool:
    """Overwrite a file with zeros, in place where the file system works so; False if that failed."""
    try:
        size, at = os.fstat(descriptor).st_size, 0
        while at < size:
            at += os.pwrite(descriptor, bytes(min(_ZEROS_BYTES, size - at)), at)
        sync_descriptor(descriptor)
    except OSError:  # it is removed all the same
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
        """Whether it was not released; others may have it all the same, see `confirm`."""
        self._descriptor = self._locked(os.O_CREAT)

    def confirm(self) -> None:
        """Make sure that the lock still keeps others out; raises StoreLocked if it does not any more.

        Whoever removes the lock file lets another process in. It is made anew, if nobody else has done so.
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
        """It is held already."""

    def __exit__(self, *failed: object) -> None:
        self.release()

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


def _sign(descriptor: int) -> None:
    """Write into the lock file who holds it, where that can be written."""
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}, started {started}\n".encode(), 0)


def make_folder(files: LocalDisk, path: Path) -> None:
    """Make a directory and its missing parents, durably."""
    for folder in reversed([path, *path.parents]):
        if not files.is_directory(folder):
            files.make_directory(folder)
            files.sync_directory(folder.parent)


def is_empty_or_begun(files: LocalDisk, folder: Path, marker: str) -> bool:
    """Whether a folder has nothing in it, or has the marker that is written there first, perhaps not whole yet."""
    names = {*files.names(folder)}
    return marker in names or names <= {marker + TEMPORARY_SUFFIX}


def replace_file(
    files: LocalDisk,
    path: Path,
    data: bytes | Iterable[bytes],
    wiper: Wiper | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> FileChecksum:
    """Replace the whole file durably: after a crash it is the old or the new one, never part of one.

    Args:
        wiper: overwrites the old one.
        confirm: called once all is written, before it gets its name; it raises what prevents that.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with only_whole(files, temporary):
        written = write_pieces(files, temporary, [data] if isinstance(data, bytes) else data)
        confirm()
    put_in_place(files, temporary, path, wiper)
    return written


def write_pieces(files: LocalDisk, path: Path, pieces: Iterable[bytes]) -> FileChecksum:
    """Write a new file, whose contents are durable then and whose name is not; return its size and checksum."""
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
    """Give a temporary file its name, durably; it is gone afterwards, also after an error. `wiper` overwrites the file
    that had the name."""
    with only_whole(files, temporary):
        if wiper is None:
            files.rename(temporary, path)
        elif not files.replace_wiping(temporary, path):
            wiper.left.append(path)
    if wiper is None:
        files.sync_directory(path.parent)


@contextmanager
def only_whole(files: LocalDisk, *temporaries: Path) -> Iterator[None]:
    """Remove temporary files that could not be finished: on a full disk their room is what all others lack."""
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
    """Removes and overwrites files, as far as the disk lets one; whatever could not be overwritten is noted.

    A file that a backup shares (a hard link) is never overwritten: the backup's owner decides about it.
    """

    def __init__(self, files: LocalDisk) -> None:
        self.files = files
        self.left: list[Path] = []
        """Files that were removed or replaced, and not overwritten."""

    def wipe(self, path: Path) -> None:
        """Remove and overwrite a file, if it exists. Raises StoreWriteFailed: it cannot be removed."""
        if not self.files.wipe(path):
            self.left.append(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the contents of a file durably, and overwrite what it was. Raises StoreWriteFailed: it is as it was
        (DiskFull if the disk is full)."""
        replace_file(self.files, path, data, self)

    def wipe_folder(self, folder: Path) -> None:
        """Wipe all that is in a folder, and remove it. Doing it again goes on where it ended."""
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
"""So many times that ends a trouble."""
_EFFECT = "what is said waits in memory until it can be written, but in a new topic; in a cluster others write it"
_PROBE = bytes(64 << 10)

Kind = Literal["full", "inodes", "read-only", "errors"]
KINDS: tuple[Kind, ...] = ("full", "inodes", "read-only", "errors")


class Trouble(msgspec.Struct, frozen=True):
    """Something that is wrong with a daemon."""

    what: str
    since: int
    """Microseconds since the epoch; 0: not known."""
    remedy: str
    """The way to end it."""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


class DiskTrouble(Trouble, frozen=True, kw_only=True):
    """The trouble with a disk."""

    kind: Kind


def disk_trouble(directory: Path, room: Room, *, was: bool = False) -> DiskTrouble | None:
    """Return the trouble with the disk of a directory, by the room that it has. `was`: it was in trouble until now."""
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
    """Return the trouble with the disk of a directory that shows when something is written there."""
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
    """Knows the trouble with the disk of a data directory. `look` in one thread at a time."""

    def __init__(
        self, files: LocalDisk, directory: Path, now_us: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        self._files = files
        self._directory = directory
        self._now_us = now_us
        self.trouble: DiskTrouble | None = None
        """As of the last look."""

    def look(self, *, is_doubtful: bool) -> None:
        """Look at the disk, and say once in the log that it is in trouble, and that it is not any more. `is_doubtful`:
        something could not be written."""
        before, found = self.trouble, None
        try:
            found = disk_trouble(self._directory, self._files.room(self._directory), was=before is not None)
        except StoreError:
            is_doubtful = True  # the directory is gone, or the disk does not answer
        if found is None and (is_doubtful or before is not None):
            found = trouble_by_writing(self._directory, self._files)
        if found is None:
            if before is not None:
                log.info("the disk can be written again", extra={"data_dir": self._directory})
            self.trouble = None
            return
        since = self._now_us() if before is None else before.since
        self.trouble = msgspec.structs.replace(found, since=since)
        if before is None:
            log.error(f"the disk is in trouble; {_EFFECT}", extra={"error": found})


def _found(kind: Kind, what: str, remedy: str) -> DiskTrouble:
    return DiskTrouble(kind=kind, what=what, since=0, remedy=remedy)
