"""The objects of a backup in a bucket, and what they say of the files of the data directory at each time.

Rule: pure but for reading. A round object is complete in itself, and is never changed but for text that was erased from
its pieces. A generation is read from a full round on, without a gap: where a listing lacks a round, that is an error
and never an older state. Whoever wants to know a time gets what the last round up to it says.

    memd-backup.json                                  whose backup this is
    owner.json                                        the generation that writes at present
    rounds/GENERATION/NUMBER-TIME.full                what the bucket has of every file at a time
    rounds/GENERATION/NUMBER-TIME.tail                what has changed since the round before
    files/TOPIC/NAME.GENERATION-COUNT                 a file by itself: a full segment, or what is large

A round object; its header is a MessagePack map, compressed with zlib:

    | pieces of files | header       | length of the header | CRC32 of the header | magic   |
    | any             | length bytes | u32                  | u32                 | 8 bytes |
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import Literal

import msgspec

from memd.errors import CorruptFile, NotOurBucket, ObjectMissing
from memd.store.bucket.objects import Bucket

IDENTITY_KEY = "memd-backup.json"
OWNER_KEY = "owner.json"
ROUNDS = "rounds/"
FILES = "files/"
_MAGIC = b"memd.rnd"
_TRAILER = struct.Struct("<II8s")
_NAME = re.compile(r"rounds/(\d{8}-[0-9a-f]{8})/(\d{10})-(\d{16})\.(full|tail)")

READERS = 8
"""Requests at once: what a bucket answers in 20 ms each is then read at 400 a second."""
_GUESS_BYTES = 4096
"""Headers of most rounds are shorter, so one request is enough."""


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file: where they are in the bucket."""

    key: str
    """Of the object; empty in a round: this one."""
    offset: int
    length: int


class KnownFile(msgspec.Struct, frozen=True, array_like=True):
    """A file as the bucket has it."""

    size: int
    crc: int
    """CRC32 of all of it."""
    changed_at: int
    """When it was last changed, by its file system: by this, and the size, a start knows it again."""
    extents: tuple[Stretch, ...]


class FileChange(msgspec.Struct, frozen=True, array_like=True):
    """The change of a file since the round before."""

    folder: str
    name: str
    kind: Literal["new", "grown", "gone"]
    file: KnownFile | None = None
    """Of a grown one only what was added has extents here."""


class RoundHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The contents of a round object beside its pieces."""

    at: int
    """The time up to which it has everything, in microseconds since the epoch."""
    is_whole: bool
    """Whether what was there when the generation began is in the bucket."""
    changes: tuple[FileChange, ...] = ()
    topics: dict[str, bytes] | None = None
    """Of a full one: by folder, its files; see `Catalog`."""
    stated_anew: tuple[str, ...] = ()
    """Folders of which text was erased: all their files are told here, and what earlier rounds tell of them is void."""
    erasures: tuple[int, ...] = ()
    """Erasures that are done in the bucket, by their ids; of a full round all that are known."""


class Identity(msgspec.Struct, frozen=True):
    """Whose backup it is."""

    format: int
    directory: str
    key_id: str | None
    """Of the key that wraps those of topics; None: it is plain text."""


def read_identity(stored: bytes | None, bucket: Bucket) -> Identity:
    """Return whose backup it is.

    Raises:
        NotOurBucket: it is none of memd's, or of a newer one.
    """
    try:
        identity = msgspec.json.decode(stored or b"", type=Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        identity = None
    if identity is None or identity.format != 1:
        raise NotOurBucket(f"{bucket.url}: has no backup that this memd can read; correct the address, or update memd")
    return identity


class Owner(msgspec.Struct, frozen=True):
    """The generation that writes."""

    generation: str

    @property
    def number(self) -> int:
        """Of the generation, which its name begins with."""
        return int(self.generation.partition("-")[0])


class RoundName(msgspec.Struct, frozen=True, order=True):
    """A round object as its key tells of it; sorted as they were written."""

    generation: str
    """Its number in eight digits, and something random."""
    number: int
    at: int
    is_full: bool
    size: int = 0
    """Of the whole object, in bytes."""

    @property
    def key(self) -> str:
        """Its key."""
        return f"{ROUNDS}{self.generation}/{self.number:010d}-{self.at:016d}.{'full' if self.is_full else 'tail'}"


def encode_round(header: RoundHeader, pieces: Iterable[bytes] = ()) -> bytes:
    """Return a round object."""
    packed = zlib.compress(_encoder.encode(header), 1)
    return b"".join((*pieces, packed, _TRAILER.pack(len(packed), zlib.crc32(packed), _MAGIC)))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RoundHeader)
_files_decoder = msgspec.msgpack.Decoder(dict[str, KnownFile])


class Catalog:
    """By folder, the files that a bucket has. A folder is kept packed: there may be a hundred thousand."""

    def __init__(self) -> None:
        self.topics: dict[str, bytes] = {}
        self.erasures: set[int] = set()

    def files(self, folder: str) -> dict[str, KnownFile]:
        """The files of a folder by their names in it."""
        packed = self.topics.get(folder)
        return {} if packed is None else _files_decoder.decode(packed)

    def apply(self, header: RoundHeader, key: str) -> None:
        """Take over what a round says; `key` is its own."""
        if header.topics is not None:
            self.topics = dict(header.topics)
            self.erasures = set()
        self.erasures.update(header.erasures)
        for folder in header.stated_anew:
            self.topics.pop(folder, None)
        for folder, changes in groupby(sorted(header.changes, key=lambda one: one.folder), lambda one: one.folder):
            files = self.files(folder)
            for change in changes:
                before = files.pop(change.name, None)
                if change.file is not None:
                    kept = before.extents if before is not None and change.kind == "grown" else ()
                    added = (Stretch(one.key or key, one.offset, one.length) for one in change.file.extents)
                    files[change.name] = msgspec.structs.replace(change.file, extents=(*kept, *added))
            self.put(folder, files)

    def put(self, folder: str, files: dict[str, KnownFile]) -> None:
        """Take these for the files of a folder."""
        if files:
            self.topics[folder] = _encoder.encode(files)
        else:
            self.topics.pop(folder, None)

    def extents(self) -> Iterator[tuple[str, str, Stretch]]:
        """All places in the bucket that are in use: folder, name, extent."""
        for folder in list(self.topics):
            for name, file in self.files(folder).items():
                yield from ((folder, name, extent) for extent in file.extents)


class Rounds:
    """All rounds in a bucket, as a listing has them."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        found = ((_NAME.fullmatch(one.key), one.size) for one in bucket.listed(ROUNDS))
        self.every = sorted(
            RoundName(name[1], int(name[2]), int(name[3]), name[4] == "full", size) for name, size in found if name
        )
        self.names = list({(one.generation, one.number): one for one in self.every}.values())
        """Those that count: of two with one number the later, as of the other one only the answer was lost."""
        self.moments: list[RoundName] = []
        """Those that can be restored, in the order of time: a full one of their generation precedes them."""
        for one in self.names:
            if one.is_full or (self.moments and self.moments[-1].generation == one.generation):
                self.moments.append(one)

    def headers(self, names: Sequence[RoundName]) -> Iterator[tuple[RoundName, RoundHeader]]:
        """Read the headers of some rounds, in their order."""
        with ThreadPoolExecutor(READERS, thread_name_prefix="memd-bucket") as readers:
            for at in range(0, len(names), 10 * READERS):
                part = names[at : at + 10 * READERS]
                yield from zip(part, readers.map(self._header, part), strict=True)

    def _header(self, name: RoundName) -> RoundHeader:
        said, needed = f"{self._bucket.url}/{name.key}", _GUESS_BYTES
        while True:
            end = self._bucket.read(name.key, max(0, name.size - needed), name.size)
            if len(end) < _TRAILER.size or not end.endswith(_MAGIC):
                raise CorruptFile(f"{said}: is no part of a backup of memd")
            length, crc, _ = _TRAILER.unpack(end[-_TRAILER.size :])
            if needed >= length + _TRAILER.size or needed >= name.size:
                break
            needed = length + _TRAILER.size
        packed = end[-_TRAILER.size - length : -_TRAILER.size]
        if len(packed) != length or zlib.crc32(packed) != crc:
            raise CorruptFile(f"{said}: is damaged; restore to a time before or after it (--until)")
        return _decoder.decode(zlib.decompress(packed))

    def catalog(self, last: RoundName) -> tuple[Catalog, bool]:
        """Return the files as they were after a round, and whether the bucket had everything then.

        Raises:
            ObjectMissing: the listing has a gap.
        """
        own = [name for name in self.names if name.generation == last.generation and name.number <= last.number]
        own = own[max(position for position, name in enumerate(own) if name.is_full) :]
        for one, following in pairwise(own):
            if following.number != one.number + 1:
                raise ObjectMissing(
                    f"{self._bucket.url}: round {one.number + 1} of generation {one.generation} is missing: the "
                    "server does not list everything yet, or something else than memd has removed it; try again, or "
                    "give an earlier --until"
                )
        catalog, is_whole = Catalog(), False
        for name, header in self.headers(own):
            catalog.apply(header, name.key)
            is_whole = header.is_whole
        return catalog, is_whole
