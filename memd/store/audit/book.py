"""The files of the audit: a file a month, appended to by every process that does something.

Rule: who appends holds the audit's own lock for that moment and looks first whether another process has appended, so a
command may write beside a running daemon. What was appended is on disk when `append` returns. A line that a killed
process did not finish is taken out by the next one, which says so in a line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from memd.errors import StoreError, StoreLocked
from memd.store.audit.chain import LINE_BYTES_MAX, Act, Checked, Head, KnownHead, check, encoded, head_from, head_of
from memd.store.disk import LocalDisk
from memd.store.files import Files, replace_file
from memd.store.layout import AuditLayout

LOCK_SECONDS_MAX = 10.0
"""How long one process waits for another's append."""
LOCK_RETRY_SECONDS = 0.05


class AuditBook:
    """The audit of one data directory, for one process. Any thread."""

    def __init__(self, files: LocalDisk, data_dir: Path, keep_months: int = 0) -> None:
        """`keep_months`: the files that are kept, a month each; 0: all."""
        self._files = files
        self._layout = AuditLayout(data_dir)
        self._keep_months = keep_months
        self._mutex = threading.Lock()
        self._head: Head | None = None
        """Of the file `_name` with `_size` bytes; None: to be read."""
        self._name, self._size = "", 0

    def is_begun(self) -> bool:
        """Whether there is an audit."""
        return self._layout.names(self._files) != []

    def append(self, acts: Sequence[Act]) -> Head:
        """Append acts in this order, durably; return the head that the last one makes.

        Raises:
            StoreError: none of them was written.
        """
        with self._mutex, self._locked():
            try:
                return self._append(acts)
            except StoreError:
                self._head = None
                raise

    def keep_head(self) -> Head:
        """Note the present head in a file of its own, so that the loss of the end is seen; return it.

        Raises:
            StoreError: it was not noted.
        """
        with self._mutex, self._locked():
            head = self._caught_up()
            if head.n:
                replace_file(self._files, self._layout.head, str(head).encode())
            return head

    def _append(self, acts: Sequence[Act]) -> Head:
        head = self._caught_up()
        month = f"{datetime.fromtimestamp(acts[-1].at / 1e6, UTC):%Y-%m}"
        name = max(self._layout.month_name(month), self._name)  # a clock that was set back opens no older file
        if name != self._name:
            head = self._begin_file(name, head, acts[0].at)
        return self._write(head, acts)

    def _write(self, head: Head, acts: Sequence[Act]) -> Head:
        lines = []
        for act in acts:
            line, head = encoded(act, head)
            lines.append(line)
        data = b"".join(lines)
        appender = self._files.append_to(self._layout.folder / self._name)
        try:
            appender.write(data)
            appender.sync()
        except StoreError:
            with suppress(StoreError):  # else it is done when the file is read again
                appender.truncate(self._size)
            raise
        finally:
            appender.close()
        self._size += len(data)
        self._head = head
        return head

    def _begin_file(self, name: str, head: Head, at: int) -> Head:
        folder = self._layout.folder
        self._files.make_directory(folder)
        self._files.sync_directory(folder.parent)
        self._files.create(folder / name).close()
        self._files.sync_directory(folder)
        self._name, self._size = name, 0
        head = self._write(head, [Act(at=at, act="file", who="memd", previous=head.hash)])
        return self._without_old_files(head, at)

    def _without_old_files(self, head: Head, at: int) -> Head:
        """Remove the files that are older than they have to be; a line before says so."""
        names = self._layout.names(self._files)
        old = names[: -self._keep_months] if self._keep_months else []  # by number: a clock may be wrong for a moment
        if not old:
            return head
        following = self._files.read_at(self._layout.folder / names[len(old)], 0, LINE_BYTES_MAX).split(b"\n")[0]
        kept = head_of(following)
        if kept is not None:
            removed = Act(at=at, act="removed", who="memd", count=len(old), upto=kept.n - 1)
            head = self._write(head, [removed])
            for name in old:
                self._files.remove(self._layout.folder / name)
        return head

    def _caught_up(self) -> Head:
        """The head, after whatever other processes appended."""
        name = (self._layout.names(self._files) or [""])[-1]
        size = (self._files.size(self._layout.folder / name) or 0) if name else 0
        if self._head is not None and (name, size) == (self._name, self._size):
            return self._head
        known, self._head = self._head or self._noted_head(), None
        self._name, self._size = name, size
        torn, head = self._end_of(name, size) if name else (0, Head())
        if head.n < known.n:  # the end is gone: its numbers stay free, so that the gap shows
            head = known
        if torn:
            self._cut(torn)
            recovered = Act(at=_now(), act="recovered", who="memd", count=torn)
            head = self._write(head, [recovered])
        self._head = head
        return head

    def _end_of(self, name: str, size: int) -> tuple[int, Head]:
        """Bytes behind the last line break, and the head that the last line makes; an older file's if this has none."""
        names = [one for one in self._layout.names(self._files) if one <= name]
        torn = 0
        for one in reversed(names):
            path = self._layout.folder / one
            length = size if one == name else self._files.size(path) or 0
            start = max(0, length - 2 * LINE_BYTES_MAX)
            *lines, tail = self._files.read_at(path, start, length - start).split(b"\n")
            if one == name:
                torn = len(tail)
            for line in reversed(lines):
                if (head := head_of(line)) is not None:
                    return torn, head
        return torn, Head()

    def _cut(self, torn: int) -> None:
        appender = self._files.append_to(self._layout.folder / self._name)
        try:
            appender.truncate(self._size - torn)
            appender.sync()
        finally:
            appender.close()
        self._size -= torn

    def _noted_head(self) -> Head:
        return noted_head(self._files, self._layout) or Head()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._files.make_directory(self._layout.folder)
        until = time.monotonic() + LOCK_SECONDS_MAX
        while True:
            try:
                lock = self._files.lock(self._layout.lock)
                break
            except StoreLocked:
                if time.monotonic() > until:
                    raise
                time.sleep(LOCK_RETRY_SECONDS)
        try:
            yield
        finally:
            lock.release()


def noted_head(files: Files, layout: AuditLayout) -> Head | None:
    """The head in the file beside the months; None if there is none, or it cannot be read."""
    try:
        return head_from(files.read(layout.head).decode())
    except (StoreError, ValueError):
        return None


def read_book(
    files: Files, data_dir: Path, wanted: Callable[[Act], bool], known: Sequence[KnownHead] = ()
) -> Checked | None:
    """Read and check the audit of a data directory or a backup; None if it has none. Needs no lock.

    Raises:
        StoreError: a file cannot be read.
    """
    layout = AuditLayout(data_dir)
    noted = noted_head(files, layout)  # before the files, which may grow meanwhile
    names = layout.names(files)
    if not names and noted is None and not known:
        return None
    heads = [*known, *([KnownHead(noted, str(layout.head))] if noted is not None else [])]
    return check(((name, files.read(layout.folder / name)) for name in names), wanted, heads)


def _now() -> int:
    return time.time_ns() // 1000
