"""The objects of a backup in a bucket, and what they say of the files of the data directory.

Rule: pure. A round object is complete in itself, and is never changed but for text that was erased from its pieces.
Read in their order from a full one on, the rounds of a generation tell what each file was at each of their times.

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
from collections.abc import Iterable
from typing import Literal

import msgspec

from memd.errors import CorruptFile

IDENTITY_KEY = "memd-backup.json"
OWNER_KEY = "owner.json"
ROUNDS = "rounds/"
FILES = "files/"
TRAILER_BYTES = 16
_MAGIC = b"memd.rnd"
_TRAILER = struct.Struct("<II8s")
_NAME = re.compile(r"rounds/((\d{8})-[0-9a-f]{8})/(\d{10})-(\d{16})\.(full|tail)")


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
    """Of a full one: by folder, its files; see `pack`."""
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


class Owner(msgspec.Struct, frozen=True):
    """Who writes."""

    generation: str


class RoundName(msgspec.Struct, frozen=True, order=True):
    """A round object as its key tells of it; sorted as they were written."""

    generation_number: int
    generation: str
    number: int
    at: int
    is_full: bool
    size: int = 0
    """Of the whole object, in bytes."""

    @property
    def key(self) -> str:
        """Its key."""
        return f"{ROUNDS}{self.generation}/{self.number:010d}-{self.at:016d}.{'full' if self.is_full else 'tail'}"


def generation_name(number: int, random: bytes) -> str:
    """The name of a generation; `random` has 4 bytes."""
    return f"{number:08d}-{random.hex()}"


def generation_number(generation: str) -> int:
    """Its number."""
    return int(generation.partition("-")[0])


def round_name(key: str, size: int) -> RoundName | None:
    """Return what a key tells; None: it is no round's."""
    found = _NAME.fullmatch(key)
    if found is None:
        return None
    return RoundName(int(found[2]), found[1], int(found[3]), int(found[4]), found[5] == "full", size)


def encode_round(header: RoundHeader, pieces: Iterable[bytes] = ()) -> bytes:
    """Return a round object."""
    packed = zlib.compress(_encoder.encode(header), 1)
    return b"".join((*pieces, packed, _TRAILER.pack(len(packed), zlib.crc32(packed), _MAGIC)))


def header_bytes(trailer: bytes, name: str) -> int:
    """Return how many bytes at the end of a round object are its header and what follows it.

    Raises:
        CorruptFile: these are not the last bytes of a round object.
    """
    if len(trailer) < TRAILER_BYTES or trailer[-8:] != _MAGIC:
        raise CorruptFile(f"{name}: is no part of a backup of memd")
    return int(_TRAILER.unpack(trailer[-TRAILER_BYTES:])[0]) + TRAILER_BYTES


def decode_header(data: bytes, name: str) -> RoundHeader:
    """Return the header of a round object, of which `data` are the last bytes.

    Raises:
        CorruptFile: it is damaged.
    """
    length, crc, _ = _TRAILER.unpack(data[-TRAILER_BYTES:])
    packed = data[-TRAILER_BYTES - length : -TRAILER_BYTES]
    if len(packed) != length or zlib.crc32(packed) != crc:
        raise CorruptFile(f"{name}: is damaged; restore to a time before or after it (--until)")
    return _decoder.decode(zlib.decompress(packed))


def pack(files: dict[str, KnownFile]) -> bytes:
    """The files of a folder, in few bytes: there may be a hundred thousand folders."""
    return _encoder.encode(files)


def unpack(packed: bytes) -> dict[str, KnownFile]:
    """The counterpart."""
    return _files_decoder.decode(packed)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RoundHeader)
_files_decoder = msgspec.msgpack.Decoder(dict[str, KnownFile])
