"""The files of a data directory as a bucket has them, read from its rounds.

Rule: pure but for reading. A generation is read from a full round on, without a gap: where a listing lacks a round,
that is an error and never an older state. Whoever wants to know a time gets what the last round up to it says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import msgspec

from memd.errors import ObjectMissing
from memd.store.bucket.format import (
    ROUNDS,
    TRAILER_BYTES,
    FileChange,
    KnownFile,
    RoundHeader,
    RoundName,
    Stretch,
    decode_header,
    header_bytes,
    pack,
    round_name,
    unpack,
)
from memd.store.bucket.objects import Bucket

READERS = 8
"""Requests at once: what a bucket answers in 20 ms each is then read at 400 a second."""
_GUESS_BYTES = 4096
"""Headers of most rounds are shorter, so one request is enough."""


class Catalog:
    """By folder, the files that a bucket has. A folder is kept packed: there may be a hundred thousand."""

    def __init__(self) -> None:
        self.topics: dict[str, bytes] = {}
        self.erasures: set[int] = set()

    def files(self, folder: str) -> dict[str, KnownFile]:
        """The files of a folder by their names in it."""
        packed = self.topics.get(folder)
        return {} if packed is None else unpack(packed)

    def apply(self, header: RoundHeader, key: str) -> None:
        """Take over what a round says; `key` is its own."""
        if header.topics is not None:
            self.topics = dict(header.topics)
            self.erasures = set()
        self.erasures.update(header.erasures)
        by_folder: dict[str, list[FileChange]] = {}
        for change in header.changes:
            by_folder.setdefault(change.folder, []).append(change)
        for folder in header.stated_anew:
            self.topics.pop(folder, None)
        for folder, changes in by_folder.items():
            files = self.files(folder)
            for change in changes:
                _change(files, change, key)
            self.put(folder, files)

    def put(self, folder: str, files: dict[str, KnownFile]) -> None:
        """Take these for the files of a folder."""
        if files:
            self.topics[folder] = pack(files)
        else:
            self.topics.pop(folder, None)

    def extents(self) -> Iterator[tuple[str, str, Stretch]]:
        """All places in the bucket that are in use: folder, name, extent."""
        for folder in list(self.topics):
            for name, file in self.files(folder).items():
                for extent in file.extents:
                    yield folder, name, extent

    def keys(self) -> set[str]:
        """The objects that are in use."""
        return {extent.key for _, _, extent in self.extents()}


def _change(files: dict[str, KnownFile], change: FileChange, key: str) -> None:
    if change.file is None:
        files.pop(change.name, None)
        return
    added = tuple(Stretch(one.key or key, one.offset, one.length) for one in change.file.extents)
    before = files[change.name].extents if change.kind == "grown" else ()
    files[change.name] = msgspec.structs.replace(change.file, extents=(*before, *added))


class Rounds:
    """All rounds in a bucket, as a listing has them."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        found = (round_name(one.key, one.size) for one in bucket.listed(ROUNDS))
        self.every: list[RoundName] = sorted(one for one in found if one is not None)
        by_number = {(one.generation, one.number): one for one in self.every}
        self.names = list(by_number.values())
        """Those that count: of two with one number the later, as of the other one only the answer was lost."""

    def header(self, name: RoundName) -> RoundHeader:
        """Read the header of a round."""
        said = f"{self._bucket.url}/{name.key}"
        start = max(0, name.size - _GUESS_BYTES)
        end = self._bucket.read(name.key, start, name.size)
        needed = header_bytes(end[-TRAILER_BYTES:], said)
        if needed > len(end):
            end = self._bucket.read(name.key, max(0, name.size - needed), name.size)
        return decode_header(end, said)

    def headers(self, names: Sequence[RoundName]) -> Iterator[tuple[RoundName, RoundHeader]]:
        """Read the headers of many, in their order."""
        with ThreadPoolExecutor(READERS, thread_name_prefix="memd-bucket") as readers:
            for at in range(0, len(names), 10 * READERS):
                part = names[at : at + 10 * READERS]
                yield from zip(part, readers.map(self.header, part), strict=True)

    @property
    def moments(self) -> list[RoundName]:
        """The rounds that can be restored, in the order of time: those that a full one of their generation precedes."""
        begun: set[str] = set()
        found = []
        for name in self.names:
            if name.is_full:
                begun.add(name.generation)
            if name.generation in begun:
                found.append(name)
        return found

    def leading_to(self, last: RoundName) -> list[RoundName]:
        """Return the rounds that tell the state after `last`: a full one, and all from it on.

        Raises:
            ObjectMissing: the listing has a gap.
        """
        own = [name for name in self.names if name.generation == last.generation and name.number <= last.number]
        first = max(position for position, name in enumerate(own) if name.is_full)
        for one, following in pairwise(own[first:]):
            if following.number != one.number + 1:
                raise ObjectMissing(
                    f"{self._bucket.url}: round {one.number + 1} of generation {one.generation} is missing: the "
                    "server does not list everything yet, or something else than memd has removed it; try again, or "
                    "give an earlier --until"
                )
        return own[first:]

    def catalog(self, last: RoundName, see: Callable[[RoundHeader], None] = lambda _: None) -> Catalog:
        """Return the files as they were after a round; `see` gets the headers that were read."""
        catalog = Catalog()
        for name, header in self.headers(self.leading_to(last)):
            catalog.apply(header, name.key)
            see(header)
        return catalog

    def upto(self, at: int) -> RoundName | None:
        """Return the last round that can be restored up to a time: of the generation that was the newest by then."""
        found = [name for name in self.moments if name.at <= at]
        return found[-1] if found else None

    def after(self, name: RoundName) -> list[RoundName]:
        """The rounds after one."""
        return self.names[bisect_right(self.names, name) :]
