"""The latest receipts on disk, in two files: when the newer one is full, it replaces the older one.

Rule: receipts explain what memory did and are no part of it: they are written without fsync, damaged ones are skipped,
and a write that fails loses only the receipt. One JSON object per line, newest last. If several people's receipts
fill the files, the author with the most loses the oldest ones (`memd.principals`); the older file gets the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from memd.errors import StoreError
from memd.principals import surplus
from memd.store.claim import AppendFile
from memd.store.disk import LocalDisk, Wiper, replace_file
from memd.store.layout import RECEIPTS_NAME, RECEIPTS_OLD_NAME

log = logging.getLogger("memd")


class _Authored(msgspec.Struct):
    """A receipt's author."""

    author: str = ""


_authored_decoder = msgspec.json.Decoder(_Authored)


def rewrite_receipts(data_dir: Path, change: Callable[[bytes], bytes], wiper: Wiper) -> None:
    """See `ReceiptRing.rewrite`; also for receipts kept under earlier settings. Unchanged files are left alone."""
    for path in (data_dir / RECEIPTS_NAME, data_dir / RECEIPTS_OLD_NAME):
        if wiper.files.size(path) is not None:
            data = wiper.files.read(path)
            changed = b"\n".join(change(line) if line else line for line in data.split(b"\n"))  # empty ones are skipped
            if changed != data:
                wiper.replace(path, changed)


class ReceiptRing:
    """The two files of receipts. Any thread may read; one writes."""

    def __init__(self, files: LocalDisk, data_dir: Path, bytes_max: int, redaction: str = "") -> None:
        """Open the ring. `bytes_max`: of both files together; `redaction`: identifies the redaction settings, empty if
        redaction is off. Files written under other ones are removed; an unreadable one stays, without an error. Raises
        StoreError: a file cannot be removed."""
        self._files = files
        self._newer, self._older = data_dir / RECEIPTS_NAME, data_dir / RECEIPTS_OLD_NAME
        self._bytes_max = bytes_max
        self._first_line = f'{{"redaction":"{redaction}"}}\n'.encode() if redaction else b""
        for path in (self._newer, self._older):
            if self._is_of_other_settings(path):
                files.remove(path)
        self._file: AppendFile | None = None
        """The newer file."""
        self._lock = threading.Lock()

    def _is_of_other_settings(self, path: Path) -> bool:
        try:
            has_file = self._files.size(path) is not None
            return has_file and self._files.read_at(path, 0, len(self._first_line)) != self._first_line
        except StoreError as error:
            log.error("receipts cannot be read", extra={"error": error})
            return False

    def append(self, line: bytes) -> None:
        """Store a receipt: one line of JSON, without the line break. Raises StoreError: it was not written; later ones
        may be."""
        with self._lock:
            try:
                self._file_for(len(line) + 1).append(line + b"\n", sync=False)
            except StoreError:
                self._close()
                raise

    def lines(self) -> list[bytes]:
        """Return all receipts, newest first; a crash may have torn the last line of a file."""
        with self._lock:
            return receipt_lines(self._files, self._newer.parent)

    def rewrite(self, change: Callable[[bytes], bytes], wiper: Wiper) -> None:
        """Replace every line by the result of `change`, and overwrite the old files. Raises StoreError: a file could
        not be read or written, and is unchanged."""
        with self._lock:
            self._close()
            rewrite_receipts(self._newer.parent, change, wiper)

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        with self._lock:
            self._close()

    def _file_for(self, more: int) -> AppendFile:
        if self._file is None and (size := self._files.size(self._newer)) is not None:
            self._file = AppendFile(self._files, self._newer, size)
            # Ends half a line that a crash may have left; readers skip empty lines.
            self._file.append(b"\n", sync=False)
        end = 0 if self._file is None else self._file.end
        if end > len(self._first_line) and end + more > self._bytes_max // 2:
            self._close()
            self._make_room()
        if self._file is None:
            self._files.create(self._newer)
            self._file = AppendFile(self._files, self._newer, 0)
            self._file.append(self._first_line, sync=False)
        return self._file

    def _make_room(self) -> None:
        """Replace the older file by the newer one and the receipts of the older one that are kept."""
        lines = list(dict.fromkeys(reversed(receipt_lines(self._files, self._newer.parent))))  # oldest first
        kept = [line for line in lines if line and line + b"\n" != self._first_line]
        held = [(_author_of(line), len(line) + 1) for line in kept]
        if len({author for author, _ in held}) <= 1:
            self._files.rename(self._newer, self._older)
            return
        leaving = {one.place: one for one in surplus(held, self._bytes_max // 2)}
        left = b"\n".join(line for place, line in enumerate(kept) if place not in leaving)
        replace_file(self._files, self._older, self._first_line + left + b"\n")
        self._files.remove(self._newer)
        most = max(leaving.values(), key=lambda one: one.had, default=None)
        if most is not None:
            why = most.why(self._bytes_max // 2, "bytes of older receipts")
            log.info("receipts are dropped", extra={"receipts": len(leaving), "reason": why})

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def receipt_lines(files: LocalDisk, data_dir: Path) -> list[bytes]:
    """Return the receipts of a data directory, newest first; a crash may have torn the last line of a file. Raises
    StoreError: a file cannot be read."""
    paths = (data_dir / RECEIPTS_NAME, data_dir / RECEIPTS_OLD_NAME)
    data = [files.read(path) for path in paths if files.size(path) is not None]
    return [line for part in data for line in reversed(part.splitlines())]


def _author_of(line: bytes) -> str:
    try:
        return _authored_decoder.decode(line).author
    except msgspec.DecodeError:  # torn
        return ""
