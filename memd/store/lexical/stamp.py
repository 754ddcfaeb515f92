"""The folder of a lexical index on disk, and the stamp that vouches for its files.

Rule: the stamp is written last. Files that it does not vouch for are never opened, because tantivy trusts the files
that it maps into memory. For the same reason their sizes are looked at again before each query and update: whoever cuts
such a file short under a running daemon (a restore over it, say) would end it with SIGBUS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from memd.errors import StoreError
from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.files import TEMPORARY_SUFFIX, FileChecksum, Files, checksum_of, replace_file
from memd.store.log.extent import LogExtent

FORMAT = 10
"""Raise it when the terms of a text or the fields change: indexes of another format are rebuilt."""
_READERS_SECONDS_MAX, _GLANCES_SECONDS = 10.0, 0.02
"""How long files are not overwritten because queries that began before still read them, and how often that is looked
at."""
STAMP_NAME = "stamp.json"
_MANAGED_NAME = ".managed.json"
"""tantivy's list of files to clean up. It changes before a commit does, and one that was interrupted (a kill, a full
disk) leaves the index as it was."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a lexical index."""

    format: int = FORMAT
    upto: int = 0
    """The canonical_id of the last entry that was indexed."""
    entries: int = 0
    """Entries of the log up to there, of whatever status."""
    texts: int = 0
    """Live ones."""
    terms: int = 0
    """Their terms; with `texts` this gives the mean length for BM25."""
    files: Mapping[str, FileChecksum] = {}
    """tantivy's files by name."""

    @property
    def extent(self) -> LogExtent:
        """Of the log, as far as it was indexed."""
        return LogExtent(self.upto, self.entries)


def read_stamp(files: Files, folder: Path) -> Stamp | None:
    """Read the stamp of the index in a folder; None if there is no readable one."""
    try:
        return msgspec.json.decode(files.read(folder / STAMP_NAME), type=Stamp)
    except (StoreError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


class StampedFolder:
    """The folder of one index. For one thread."""

    def __init__(self, files: LocalDisk, path: Path) -> None:
        self.path = path
        self.stamp_path = path / STAMP_NAME
        self._files = files
        self._mapped: tuple[Stamp, list[tuple[Path, int]]] = (Stamp(), [])
        """A stamp, and its files that are mapped into memory with their sizes."""

    def native_path(self) -> str | None:
        """Return the folder, created if necessary, for tantivy; None if the index has to be kept in memory."""
        return self._files.native_directory(self.path)

    def confirm_lock(self) -> None:
        """Raise StoreError unless the folder is still this process's: tantivy does not ask before it writes."""
        self._files.confirm_lock()

    def read(self) -> Stamp | None:
        """Read the stamp; None if there is no readable one."""
        return read_stamp(self._files, self.path)

    def matches(self, stamp: Stamp) -> bool:
        """Whether the files are those that the stamp vouches for. Reads them all."""
        try:
            checksums = self._checksums({})
        except StoreError:
            return False
        # Files that the stamp does not list are no part of the index: an update was interrupted.
        return bool(stamp.files) and {name: checksums.get(name) for name in stamp.files} == stamp.files

    def is_cut_short(self, stamp: Stamp) -> bool:
        """Whether a file is shorter than the stamp says. One that was removed is not: its contents stay mapped."""
        mapped = self._mapped
        if mapped[0] is not stamp:  # a query looks at all of them: their paths are made once
            names = [name for name in stamp.files if not name.endswith(".json")]  # tantivy maps none of those
            mapped = self._mapped = stamp, [(self.path / name, stamp.files[name].bytes) for name in names]
        sizes = ((self._files.size(path), expected) for path, expected in mapped[1])
        return any(size is not None and size < expected for size, expected in sizes)

    def write(self, stamp: Stamp, known: Mapping[str, FileChecksum]) -> Stamp:
        """Write the stamp, durably, with the checksums of the files as they are now; returns it with these.

        Files in `known`, the stamp before, are not read again: tantivy's files never change, but for the .json ones.

        Raises:
            StoreError: a file cannot be read or written.
        """
        stamp = msgspec.structs.replace(stamp, files=self._checksums(known))
        if stamp.files:
            replace_file(self._files, self.stamp_path, msgspec.json.encode(stamp))
        return stamp

    def clear(self) -> None:
        """Remove all files, the stamp first."""
        for name in sorted(self._files.names(self.path), key=lambda name: name != STAMP_NAME):
            self._files.remove(self.path / name)

    def wipe(self, wiper: Wiper, is_read: Callable[[], bool]) -> None:
        """Wipe all files, the stamp first.

        Args:
            is_read: whether somebody still has them mapped into memory, whom zeros there would mislead.
        """
        wiper.wipe(self.stamp_path)
        until = time.monotonic() + _READERS_SECONDS_MAX
        while is_read() and time.monotonic() < until:
            time.sleep(_GLANCES_SECONDS)
        for name in self._files.names(self.path):
            if is_read():
                wiper.left.append(self.path / name)
                self._files.remove(self.path / name)
            else:
                wiper.wipe(self.path / name)

    def _checksums(self, known: Mapping[str, FileChecksum]) -> dict[str, FileChecksum]:
        checksums: dict[str, FileChecksum] = {}
        for name in self._files.names(self.path):
            size = self._files.size(self.path / name)
            if name.endswith((".lock", TEMPORARY_SUFFIX)) or name in (STAMP_NAME, _MANAGED_NAME) or size is None:
                continue
            is_known = name in known and not name.endswith(".json") and known[name].bytes == size
            checksums[name] = known[name] if is_known else checksum_of(self._files, self.path / name, size)
        return checksums
