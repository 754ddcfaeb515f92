"""The right to write the folder of a topic, and who has it.

Rule: reading and searching work on the files of a topic's folder. Whatever must survive is written through the topic's
claim and nowhere else. A topic needs no lease, because the directory has one daemon at a time, which its lock sees to.
What an interrupted write leaves (`.tmp`, `.torn`) is mended by whoever opens the topic, before it resumes a stream.

A topic has two streams, which grow at their end: the log's file that is appended to, and the journal. All its other
files are written once, beside their place, and then published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from memd.errors import Fenced
from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.files import only_whole, put_in_place
from memd.store.layout import TopicLayout
from memd.store.log.append_file import AppendFile

Stream = Literal["log", "hot"]
"""log: `active.bin`. hot: `hot.log`."""


class Claim:
    """The right to write one topic. For one thread each stream.

    Every method but `release` raises StoreWriteFailed: Fenced if another claim was granted since, and then for good.
    """

    def __init__(self, files: LocalDisk, layout: TopicLayout) -> None:
        self.files = files
        self.layout = layout
        self._ends: dict[Stream, AppendFile] = {}
        self._is_released = False

    def resume(self, stream: Stream, at: int) -> None:
        """Go on at the end of a stream that was read, and mended where an interrupted write had torn it."""
        self.check()
        self._ends[stream] = AppendFile(self.files, self._path(stream), at)

    def append(self, stream: Stream, at: int, data: bytes, *, sync: bool = True) -> None:
        """Append to a stream that was resumed or rolled: all of `data`, or nothing.

        Args:
            at: where the stream ends, as far as the caller knows; Fenced if that is not so.
            sync: durably; else it is before the next `sync`, and a crash may take it.
        """
        file = self._ends.get(stream)
        if file is None or file.end != at:
            self.check()
            found = "is not open" if file is None else f"ends at {file.end}, not at {at}"
            raise Fenced(f"{self._path(stream)}: {found}: something else writes it; nothing is appended, restart memd")
        file.append(data, sync=sync)

    def sync(self, stream: Stream) -> None:
        """Make everything appended durable."""
        self.check()
        if file := self._ends.get(stream):
            file.sync()

    def roll(self, stream: Stream, temporary: Path, wiper: Wiper | None = None) -> None:
        """Begin a stream, or replace it, with a file that was written beside it: durably, and in one step.

        Args:
            temporary: it is gone afterwards, also after an error.
            wiper: overwrites what the stream was.
        """
        path = self._path(stream)
        if file := self._ends.get(stream):
            file.close()
        self.publish({path: temporary}, wiper=wiper)
        self.resume(stream, self.files.size(path) or 0)

    def rotate(self, segment_id: int) -> None:
        """File the log's stream, which is full, as this segment. The next one begins with `roll`."""
        self.check()
        if file := self._ends.get("log"):
            file.close()
        file_segment(self.files, self.layout, segment_id)
        self._ends.pop("log", None)

    def publish(self, written: Mapping[Path, Path], trims: Iterable[Path] = (), wiper: Wiper | None = None) -> None:
        """Remove files of the topic, then give others their place, durably, in this order.

        Args:
            written: the place of a file → the file that was written beside it, and is gone afterwards, also after an
                error; or the place again of a full segment, which what comes behind it vouches for.
            trims: nobody reads them any more.
            wiper: overwrites what is removed or replaced.
        """
        put = {path: temporary for path, temporary in written.items() if temporary != path}
        with only_whole(self.files, *put.values()):
            self.check()
            for path in trims:
                self.files.remove(path) if wiper is None else wiper.wipe(path)
            for path, temporary in put.items():
                if wiper is None:
                    put_in_place(self.files, temporary, path)
                else:
                    wiper.put_in_place(temporary, path)

    def release(self) -> None:
        """Let go of the topic; later writes are Fenced. A second call does nothing."""
        self._is_released = True
        for file in self._ends.values():
            file.close()
        self._ends = {}

    def check(self) -> None:
        """Raise Fenced unless it is still the claim to its topic."""
        if self._is_released:
            raise Fenced(f"topic {self.layout.topic_id}: was closed, or opened anew since; nothing is written")

    def _path(self, stream: Stream) -> Path:
        return self.layout.active if stream == "log" else self.layout.hot


class Shelf:
    """The topics of a data directory, each with one claim at a time."""

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        """Whoever lets it write holds the directory's lock."""
        self._files = files
        self._data_dir = data_dir
        self._claims: WeakValueDictionary[str, Claim] = WeakValueDictionary()
        """Those that somebody has."""

    def claim(self, topic_id: str) -> Claim:
        """Grant a claim to a topic, whose folder is made; an earlier one ends."""
        earlier = self._claims.get(topic_id)
        if earlier is not None:
            earlier.release()
        layout = TopicLayout(self._data_dir, topic_id)
        for directory in (layout.directory, layout.segments):
            self._files.make_directory(directory)
        claim = self._claims[topic_id] = Claim(self._files, layout)
        return claim


def file_segment(files: LocalDisk, layout: TopicLayout, segment_id: int) -> None:
    """Move a full `active.bin` to its place among the segments, durably."""
    files.make_directory(layout.segments)
    files.rename(layout.active, layout.bin(segment_id))
    files.sync_directory(layout.segments)
    files.sync_directory(layout.directory)
