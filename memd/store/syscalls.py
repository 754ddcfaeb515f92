"""Calls of the system: their errors become those of the store, their descriptors end, and a process has enough of them.

Rule: an OSError leaves the store as one of the declared errors, which names the file and the remedy. The number of
topics takes no descriptors: a file that is appended to has one until it is synced. Connections get the other half of
what there is; a reserve stays for all that is opened for a moment.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from memd.errors import DiskFull, ReadOnlyDisk, StoreError, StoreWriteFailed

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
