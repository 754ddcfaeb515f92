"""The trouble with a disk: it is full, has no room for another file, is read-only, or writing to it fails.

Rule: looking decides nothing and changes nothing but a nameless file that tests writing, which is written only where
there is doubt. A disk is full before the last byte is written, so that what is under way can still be put in order; and
it is in trouble until it has some more room than that, so that nobody goes to and fro.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from memd.errors import DiskFull, ReadOnlyDisk, StoreError
from memd.store.disk import LocalDisk, Room
from memd.wording import sized

log = logging.getLogger("memd")

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
        """For a person."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


class DiskTrouble(Trouble, frozen=True, kw_only=True):
    """The trouble with a disk."""

    kind: Kind


def disk_trouble(directory: Path, room: Room, *, was: bool = False) -> DiskTrouble | None:
    """Return the trouble with the disk of a directory, by the room that it has.

    Args:
        was: it was in trouble until now.
    """
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
        """Look at the disk, and say once in the log that it is in trouble, and that it is not any more.

        Args:
            is_doubtful: something could not be written.
        """
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
