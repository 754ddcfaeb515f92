"""The shelf that is the data directory itself: its folders are the truth, and nothing else is asked.

Rule: a topic needs no lease, because the directory has one daemon at a time, which its lock sees to. What an
interrupted write leaves is mended by whoever opens the topic (opening.py, journal.py), before it resumes a stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from memd.errors import Fenced
from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.files import only_whole, put_in_place
from memd.store.layout import TopicLayout
from memd.store.log.append_file import AppendFile
from memd.store.log.segment import rotate
from memd.store.shelf import Stream


class LocalClaim:
    """A claim to a topic whose folder is the truth. See Claim."""

    def __init__(self, files: LocalDisk, layout: TopicLayout) -> None:
        self.files = files
        self.layout = layout
        self._ends: dict[Stream, AppendFile] = {}
        self._is_released = False

    def resume(self, stream: Stream, at: int) -> None:
        """See Claim."""
        self.check()
        self._ends[stream] = AppendFile(self.files, self._path(stream), at)

    def append(self, stream: Stream, at: int, data: bytes, *, sync: bool = True) -> None:
        """See Claim."""
        file = self._ends.get(stream)
        if file is None or file.end != at:
            self.check()
            found = "is not open" if file is None else f"ends at {file.end}, not at {at}"
            raise Fenced(f"{self._path(stream)}: {found}: something else writes it; nothing is appended, restart memd")
        file.append(data, sync=sync)

    def sync(self, stream: Stream) -> None:
        """See Claim."""
        self.check()
        if file := self._ends.get(stream):
            file.sync()

    def roll(self, stream: Stream, temporary: Path, wiper: Wiper | None = None) -> None:
        """See Claim."""
        path = self._path(stream)
        if file := self._ends.get(stream):
            file.close()
        self.publish({path: temporary}, wiper=wiper)
        self.resume(stream, self.files.size(path) or 0)

    def rotate(self, segment_id: int) -> None:
        """See Claim."""
        self.check()
        if file := self._ends.get("log"):
            file.close()
        rotate(self.files, self.layout, segment_id)
        self._ends.pop("log", None)

    def publish(self, written: Mapping[Path, Path], trims: Iterable[Path] = (), wiper: Wiper | None = None) -> None:
        """See Claim."""
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
        """See Claim."""
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


class LocalShelf:
    """The topics of a data directory. See Shelf."""

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        """Whoever lets it write holds the directory's lock."""
        self._files = files
        self._data_dir = data_dir
        self._claims: WeakValueDictionary[str, LocalClaim] = WeakValueDictionary()
        """Those that somebody has."""

    def claim(self, topic_id: str) -> LocalClaim:
        """See Shelf."""
        earlier = self._claims.get(topic_id)
        if earlier is not None:
            earlier.release()
        layout = TopicLayout(self._data_dir, topic_id)
        for directory in (layout.directory, layout.segments):
            self._files.make_directory(directory)
        claim = self._claims[topic_id] = LocalClaim(self._files, layout)
        return claim
