"""The files that the store needs: an interface that a local disk has today and a remote store can have later.

Rule: a module that takes `Files` uses nothing but names, bytes, appending, renaming and syncing. A file or a name is
durable only after `sync` of the file and `sync_directory` of its directory; `replace_file` does all of it in the right
order. What only a local disk can do (locks, hard links, free space, paths for native libraries) is in disk.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from memd.errors import CorruptFile, StoreError

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file until it is complete; after a crash such a file may be removed."""

_PIECE_BYTES = 8 << 20


class Appender(Protocol):
    """A file open for appending. Every method but `close` raises StoreWriteFailed (DiskFull if the disk is full)."""

    def write(self, data: bytes) -> None:
        """Write all of `data`; after an error, part of it may be in the file."""

    def sync(self) -> None:
        """Make the contents durable."""

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; not durable before `sync`."""

    def close(self) -> None:
        """Close without syncing; a second call does nothing."""


class Files(Protocol):
    """Names and bytes. Reads raise StoreError, writes StoreWriteFailed (DiskFull if the disk is full)."""

    def size(self, path: Path) -> int | None:
        """Size of a file in bytes; None if there is no such file."""

    def identity(self, path: Path) -> Hashable | None:
        """Tell a file from any other that its path may name later; None if there is no such file."""

    def names(self, directory: Path) -> list[str]:
        """Names of the entries of a directory, sorted; empty if there is no such directory."""

    def is_directory(self, path: Path) -> bool:
        """Whether `path` is a directory."""

    def read(self, path: Path) -> bytes:
        """Read the whole file."""

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """Read at most `length` bytes from `offset`; fewer at the end of the file."""

    def read_pieces(self, path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Like `read_at`, for many (offset, length) of one file."""

    def damage_of(self, path: Path) -> str | None:
        """Tell the damage of a file that cannot be seen in what is read of it; None: there is none."""

    def create(self, path: Path) -> Appender:
        """Open a new empty file; an existing one is emptied."""

    def append_to(self, path: Path) -> Appender:
        """Open an existing file."""

    def make_directory(self, path: Path) -> None:
        """Create a directory unless it exists; an empty one becomes its user's alone. Its parent must exist."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically, replacing `new`."""

    def link(self, old: Path, new: Path) -> bool:
        """Give a file a second name, not durably; False where the two places cannot share a file."""
        return False

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""


class FileChecksum(msgspec.Struct, frozen=True):
    """Size and CRC32 that a file must have before a native library may open it."""

    bytes: int
    crc: int


def replace_file(files: Files, path: Path, data: bytes) -> None:
    """Replace the whole file durably: after a crash it is the old or the new one, never part of one."""
    put_in_place(files, write_beside(files, path, data), path)


def write_beside(files: Files, path: Path, data: bytes) -> Path:
    """Write a temporary file beside `path`, whose contents are durable then, and return it; no part of one is left."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with only_whole(files, temporary):
        write_pieces(files, temporary, [data])
    return temporary


def write_pieces(files: Files, path: Path, pieces: Iterable[bytes]) -> FileChecksum:
    """Write a new file, whose contents are durable then and whose name is not; return its size and checksum."""
    size = crc = 0
    with closing(files.create(path)) as appender:
        for piece in pieces:
            appender.write(piece)
            size, crc = size + len(piece), zlib.crc32(piece, crc)
        appender.sync()
    return FileChecksum(size, crc)


def put_in_place(files: Files, temporary: Path, path: Path) -> None:
    """Give a temporary file its name, durably; it is gone afterwards, also after an error."""
    with only_whole(files, temporary):
        files.rename(temporary, path)
    files.sync_directory(path.parent)


@contextmanager
def only_whole(files: Files, *temporaries: Path) -> Iterator[None]:
    """Remove temporary files that could not be finished: on a full disk their room is what all others lack."""
    try:
        yield
    except StoreError:
        with suppress(StoreError):
            for temporary in temporaries:
                files.remove(temporary)
        raise


def pieces_of(files: Files, path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Read a file, or a part of it, in pieces: an index may not fit in free memory."""
    while piece := files.read_at(path, start, _PIECE_BYTES if end is None else min(_PIECE_BYTES, end - start)):
        yield piece
        start += len(piece)


def checksum_of(files: Files, path: Path, size: int) -> FileChecksum:
    """Compute the checksum of the first `size` bytes of a file."""
    crc = 0
    for piece in pieces_of(files, path, 0, size):
        crc = zlib.crc32(piece, crc)
    return FileChecksum(size, crc)


def check_file(files: Files, path: Path, expected: FileChecksum) -> None:
    """Raise CorruptFile unless the file has the expected size and checksum."""
    if files.size(path) != expected.bytes or checksum_of(files, path, expected.bytes) != expected:
        raise CorruptFile(f"{path}: is missing or does not match its checksum")
