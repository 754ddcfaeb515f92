"""The shelf that is the data directory itself: its folders are the truth, and nothing else is asked.

Rule: a topic needs no lease, because the directory has one daemon at a time, which its lock sees to. What an
interrupted write leaves is mended by whoever opens the topic (opening.py, journal.py), before it resumes a stream.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from weakref import WeakValueDictionary

from memd.errors import Fenced
from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.files import only_whole, put_in_place
from memd.store.layout import TopicLayout, has_files, topic_names_in
from memd.store.log.append_file import AppendFile
from memd.store.log.segment import read_header, rotate
from memd.store.shelf import Claim, Heads, Position, Stream


class LocalClaim:
    """A claim to a topic whose folder is the truth. See Claim."""

    renewed_at = math.inf

    def __init__(self, files: LocalDisk, layout: TopicLayout, epoch: int) -> None:
        self.files = files
        self.layout = layout
        self.epoch = epoch
        self.since = 1
        self.id_floor = 0
        self.id_turn: int | None = None
        self._ends: dict[Stream, AppendFile] = {}
        self._is_released = False

    @property
    def is_over(self) -> bool:
        """See Claim."""
        return self._is_released

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

    def release(self, *, unfinished: bool = False) -> None:
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

    def claim(self, topic_id: str, *, gone: str = "") -> LocalClaim:
        """See Shelf."""
        earlier = self._claims.get(topic_id)
        if earlier is not None:
            earlier.release()
        layout = TopicLayout(self._data_dir, topic_id)
        for directory in (layout.directory, layout.segments):
            self._files.make_directory(directory)
        claim = self._claims[topic_id] = LocalClaim(self._files, layout, 1 if earlier is None else earlier.epoch + 1)
        return claim

    def renew(self, claims: Collection[Claim]) -> list[Claim]:
        """See Shelf."""
        return [one for one in claims if self._claims.get(one.layout.topic_id) is not one]

    def forget(self, topic_id: str, *, erasure: int = 0, id_floor: int = 0, forbidden: bytes = b"") -> list[str]:
        """See Shelf."""
        return self.sweep(topic_id)

    def sweep(self, topic_id: str) -> list[str]:
        """See Shelf."""
        return []

    def heads(self, topic_ids: Collection[str]) -> dict[str, Heads]:
        """See Shelf."""
        layouts = [TopicLayout(self._data_dir, topic_id) for topic_id in topic_ids]
        return {one.topic_id: self._heads(one) for one in layouts if has_files(self._files, one.directory)}

    def _heads(self, layout: TopicLayout) -> Heads:
        files, claim = self._files, self._claims.get(layout.topic_id)
        header = read_header(files, layout.active)
        return Heads(
            epoch=0 if claim is None else claim.epoch,
            log=Position(
                header.segment_id if header else layout.next_segment_id(files), files.size(layout.active) or 0
            ),
            hot=Position(0, files.size(layout.hot) or 0),
        )

    def read(self, topic_id: str, stream: Stream, after: Position) -> bytes:
        """See Shelf."""
        layout = TopicLayout(self._data_dir, topic_id)
        if stream == "hot":
            return self._contents(layout.hot)[after.end :]
        data = self._contents(layout.active)  # first: it may be rotated at this moment
        header = read_header(self._files, layout.active)
        if header is None or header.segment_id != after.number:
            data = self._contents(layout.bin(after.number))
        return data[after.end :]

    def _contents(self, path: Path) -> bytes:
        return b"" if self._files.size(path) is None else self._files.read(path)

    def topics(self, after: str, limit: int) -> list[str]:
        """See Shelf."""
        names = (name for name in topic_names_in(self._files, self._data_dir) if name > after)
        return list(islice((name for name in names if has_files(self._files, self._data_dir / name)), limit))

    def unfinished(self, limit: int) -> list[str]:
        """See Shelf. Here recent.py knows."""
        return []
