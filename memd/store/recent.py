"""The topics that a start has to look at: those that were used since each was last known to be at rest.

Rule: a start costs what was used, not what is stored. A topic that is not listed has nothing to do, and no id above the
list's. The list is only a help: where it is missing, torn or does not fit the directory, all topics are looked at.

    memd recent 1 HIGHEST_ID TOPICS STATE        the topics that there were, and what "nothing to do" depends on
    work                                         a topic that was opened since
    +garden                                      one that was created since
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from memd.entries import TOPIC_ID_PATTERN
from memd.errors import StoreError
from memd.store.files import Files, replace_file
from memd.store.layout import RECENT_NAME
from memd.store.locks import LockOrder, OrderedLock
from memd.store.log.append_file import AppendFile

_HEADER = re.compile(r"memd recent 1 (\d{1,19}) (\d{1,9}) ([0-9a-f]{1,64})")
_LINES_SPARE = 1_000
"""Lines of topics at rest that the file may have before it is written anew."""


class Recent(msgspec.Struct, frozen=True):
    """The list as a start finds it."""

    highest_id: int
    state: str
    names: tuple[str, ...]
    """In the order in which they were first used; of those that are at rest the last one is listed too."""


def read_recent(files: Files, data_dir: Path, topics: int) -> Recent | None:
    """Read the list; None if all topics have to be looked at.

    Args:
        topics: how many the directory has. Where it has others than the list knows of, somebody has put them there or
            taken them away.
    """
    path = data_dir / RECENT_NAME
    try:
        if files.size(path) is None:
            return None
        head, *lines, rest = files.read(path).decode("ascii").split("\n")
    except (StoreError, UnicodeDecodeError, ValueError):
        return None
    header = _HEADER.fullmatch(head)
    created = sum(line.startswith("+") for line in lines)
    if header is None or rest or int(header[2]) + created != topics:
        return None
    names = [line.removeprefix("+") for line in lines]
    if not all(TOPIC_ID_PATTERN.fullmatch(name) for name in names):
        return None
    return Recent(int(header[1]), header[3], tuple(dict.fromkeys(names)))


class RecentTopics:
    """Keeps the list while the store is open. For any thread."""

    def __init__(self, files: Files, data_dir: Path, found: Recent | None) -> None:
        """Without `found` there is no list before `write`."""
        self._files = files
        self._path = data_dir / RECENT_NAME
        self._names = dict.fromkeys(found.names if found is not None else ())
        self._state = found.state if found is not None else ""
        self._lines = len(self._names)
        self._last_at_rest: str | None = None
        self._is_synced = True
        self._lock = OrderedLock(LockOrder.RECENT)
        self._file: AppendFile | None = None
        if found is not None:
            self._file = AppendFile(files, self._path, files.size(self._path) or 0)
        else:
            self._give_up()

    def to_look_at(self, state: str) -> tuple[str, ...] | None:
        """The topics in which there may be something to do; None: in any."""
        with self._lock:
            return tuple(self._names) if self._file is not None and self._state == state else None

    def expect(self, topic_ids: Iterable[str]) -> None:
        """Note that these are to be looked at: they stay listed until each is known to be at rest."""
        with self._lock:
            self._names.update(dict.fromkeys(topic_ids))

    def add(self, topic_id: str, *, is_new: bool) -> None:
        """Note that a topic is opened."""
        with self._lock:
            if topic_id == self._last_at_rest:
                self._last_at_rest = None
            if topic_id in self._names and not is_new:
                return
            self._names[topic_id] = None
            if self._file is not None:
                try:
                    self._file.append(f"{'+' if is_new else ''}{topic_id}\n".encode(), sync=False)
                except StoreError:
                    self._give_up()
                else:
                    self._lines += 1
                    self._is_synced = False

    def sync(self) -> None:
        """Make durable what was noted: before anything is written to a topic, and not each time that one is read."""
        if self._is_synced:
            return
        with self._lock:
            self._is_synced = True
            if self._file is not None:
                try:
                    self._file.sync()
                except StoreError:
                    self._give_up()

    def rest(self, topic_id: str) -> bool:
        """Note that a topic is closed with nothing left to do; whether the file should be written anew."""
        with self._lock:
            if self._last_at_rest is not None:
                self._names.pop(self._last_at_rest, None)
            self._last_at_rest = topic_id
            return self._lines > 2 * len(self._names) + _LINES_SPARE

    def write(self, at_rest: Collection[str], *, highest_id: int, topics: int, state: str | None = None) -> None:
        """Write the file anew, without the topics `at_rest`; where that fails there is none."""
        with self._lock:
            self._names = {name: None for name in self._names if name not in at_rest}
            self._state = self._state if state is None else state
            self._close()
            lines = [f"memd recent 1 {highest_id} {topics} {self._state}", *self._names]
            try:
                replace_file(self._files, self._path, "".join(f"{line}\n" for line in lines).encode())
            except StoreError:
                self._give_up()
            else:
                self._file = AppendFile(self._files, self._path, self._files.size(self._path) or 0)
                self._lines, self._is_synced = len(self._names), True

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _give_up(self) -> None:
        """Rather no list than one in which a topic is missing."""
        self._close()
        self._file = None
        with suppress(StoreError):
            self._files.remove(self._path)
