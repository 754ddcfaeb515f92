"""The right to write the folder of a topic, and appending to a file: all of a write, or none of it.

Rule: reading and searching use the files of a topic's folder. Everything that must survive is written through the
topic's claim and nowhere else. A topic needs no lease, because the directory's lock admits one daemon at a time. The
remains of an interrupted write (`.tmp`, `.torn`) are repaired when the topic is opened, before it resumes a stream.

A topic has two streams that grow at their end: the log's active file and the journal. All its other files are written
as a whole. After a failed write or sync, a stream is cut back to its previous end and the cut is synced, so that data
left in the page cache by a failed fsync is dropped, not trusted. Nothing else is appended until that has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from memd.errors import Fenced, FileReplaced, StoreError, StoreWriteFailed
from memd.store.disk import FileChecksum, LocalDisk, Wiper, replace_file
from memd.store.layout import TopicLayout

Stream = Literal["log", "hot"]
"""log: `active.bin`. hot: `hot.log`."""


class AppendFile:
    """An append-only file, intact up to `end`. For one thread."""

    def __init__(self, files: LocalDisk, path: Path, end: int) -> None:
        """Use the file now at the path; if the path names another one later, that is left alone."""
        self._files, self._path = files, path
        self._identity = files.identity(path)
        self._is_whole, self._is_synced = False, True
        """Whether the file is known to end at `end`; whether all in it is durable."""
        self.end = end

    def append(self, data: bytes, *, sync: bool) -> None:
        """Append `data`; with `sync`, durably. Raises StoreWriteFailed: nothing was appended; the file is cut back now
        or before the next append."""
        self._mend()
        try:
            self._is_synced = False
            self._files.append(self._path, data, self._identity)
            if sync:
                self.sync()
        except StoreWriteFailed:
            self.close()
            with suppress(StoreError):  # report the first error; the next append cuts the file again
                self._mend()
            raise
        self.end += len(data)

    def sync(self) -> None:
        """Make everything appended durable."""
        if not self._is_synced:
            self._files.sync(self._path)
            self._is_synced = True

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        self._files.close(self._path)
        self._is_whole = False

    def _mend(self) -> None:
        if self._is_whole:
            return
        if self._files.identity(self._path) != self._identity:
            raise FileReplaced(str(self._path))
        size = self._files.size(self._path)
        if size is None or size < self.end:
            raise StoreWriteFailed(
                f"{self._path}: is shorter than it was ({size or 0} of {self.end} bytes): something else changed it; "
                "nothing more is appended, restart memd"
            )
        if size > self.end:
            self._files.cut(self._path, self.end)
            self._identity = self._files.identity(self._path)
        self._is_whole = True


class Claim:
    """The right to write one topic. For one thread each stream.

    Every method but `release` raises StoreWriteFailed: Fenced, permanently, after its release.
    """

    def __init__(self, files: LocalDisk, layout: TopicLayout) -> None:
        """Make the topic's folder. The directory's lock must be held, and any earlier claim released."""
        for directory in (layout.directory, layout.segments):
            files.make_directory(directory)
        self.files = files
        self.layout = layout
        self._ends: dict[Stream, AppendFile] = {}
        self._is_released = False

    def resume(self, stream: Stream, at: int) -> None:
        """Continue at the end of a stream that was read, and repaired if an interrupted write had torn it."""
        self.check()
        self._ends[stream] = AppendFile(self.files, self._path(stream), at)

    def append(self, stream: Stream, data: bytes, *, sync: bool = True) -> int:
        """Append to a stream that was resumed or rolled: all of `data`, or nothing. Return its offset. Without `sync`
        it is durable only after the next `sync`, and a crash may lose it."""
        file = self._ends.get(stream)
        if file is None:
            self.check()
            raise Fenced(f"{self._path(stream)}: is not open; nothing is appended, restart memd")
        start = file.end
        file.append(data, sync=sync)
        return start

    def sync(self, stream: Stream) -> None:
        """Make everything appended durable."""
        self.check()
        if file := self._ends.get(stream):
            file.sync()

    def roll(self, stream: Stream, data: bytes, wiper: Wiper | None = None) -> None:
        """Begin a stream, or replace it, durably and in one step. `wiper`: overwrites the old one."""
        if file := self._ends.get(stream):
            file.close()
        self.resume(stream, self.write(self._path(stream), data, wiper).bytes)

    def rotate(self, segment_id: int) -> None:
        """Turn the log's full stream into this segment. The next stream begins with `roll`."""
        self.check()
        if file := self._ends.get("log"):
            file.close()
        file_segment(self.files, self.layout, segment_id)
        self._ends.pop("log", None)

    def write(self, path: Path, data: bytes | Iterable[bytes], wiper: Wiper | None = None) -> FileChecksum:
        """Write a file of the topic, or replace it, durably and in one step. `wiper`: overwrites the old one."""
        return replace_file(self.files, path, data, wiper, self.check)

    def remove(self, paths: Iterable[Path], wiper: Wiper | None = None) -> None:
        """Remove unused files of the topic, in this order. `wiper`: overwrites them."""
        self.check()
        for path in paths:
            self.files.remove(path) if wiper is None else wiper.wipe(path)

    def release(self) -> None:
        """Release the topic; later writes are Fenced. Idempotent."""
        self._is_released = True
        for file in self._ends.values():
            file.close()
        self._ends = {}

    def check(self) -> None:
        """Raise Fenced if it was released."""
        if self._is_released:
            raise Fenced(f"topic {self.layout.topic_id}: was closed, or opened anew since; nothing is written")

    def _path(self, stream: Stream) -> Path:
        return self.layout.active if stream == "log" else self.layout.hot


def file_segment(files: LocalDisk, layout: TopicLayout, segment_id: int) -> None:
    """Move a full `active.bin` to its place among the segments, durably."""
    files.make_directory(layout.segments)
    files.rename(layout.active, layout.bin(segment_id))
    files.sync_directory(layout.segments)
    files.sync_directory(layout.directory)
