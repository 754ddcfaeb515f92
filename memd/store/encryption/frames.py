"""The codec of encrypted files: plain bytes ⇄ frames that are encrypted one by one; and the keys: the master key, 32
bytes that the owner keeps in a file, a variable or on standard input, a directory's `memd.key`, and each topic's
`topic.key`.

Rule: the topic's key opens every frame independently, so damage costs only its own frame. Undecryptable bytes read as
zeros, which are no record, so recovery is the same as from other damage. The master key never appears in a message; a
file that others can read is refused before its contents are used. A key file is replaced as a whole, durably, and a key
is on the disk before anything that it encrypts. Errors distinguish a damaged key file, a wrong key and another
directory's key.

    | header, 80 bytes (see log/format.py; flags 1, `topic` is the id of the key) | frame | frame | ...

    0       4        8        20-8     20     36      48                48+length  64+length  68+length
    | magic | length | number | start  | salt | nonce | ciphertext      | tag      | length   |
    | 4     | u32    | u32    | u64    | 16   | 12    | length bytes    | 16       | u32      |

    number   of the frame, from 0, to detect a missing, moved or repeated frame
    start    the plain offset of its first byte: the bytes of a lost frame read as zeros
    salt     random for each file, the same in all its frames, so that none can be moved to another file; HKDF-SHA256
             derives the file's key from it and the topic's key
    nonce    random for each frame, so that bytes rewritten after a cut share no nonce with the old ones
    length   repeated at the end, so that the size of a file is found without reading it

All bytes before the nonce are associated data. Random nonces are good for 2^32 frames (64 TiB) of one file.

`memd.key` and `topic.key` are JSON with a CRC32 over their other members. The master key wraps the directory's key
(with HKDF over the directory's random id), and that wraps the topics' keys, all with AES-256-GCM and random nonces. So
`memd encrypt rekey` replaces one file, and destroying a `topic.key` destroys all that it encrypts.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import struct
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import msgspec

from memd.errors import DamagedKey, WrongKey
from memd.store.disk import LocalDisk, create_private, read_private, replace_file
from memd.store.log.format import HEADER_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES, KEY_ID_BYTES, SALT_BYTES, NONCE_BYTES = 32, 8, 16, 12
PIECE_BYTES = 16 << 10
"""Limit on plain bytes per frame: the minimum that is read, and that damage costs. Decrypted in 6 µs."""
_MAGIC = b"\x8fmd\xe5"
_HEAD = struct.Struct("<4sIIQ16s")
_LENGTH = struct.Struct("<I")
_SEAL_BYTES = NONCE_BYTES + 16
"""Bytes added by sealing: nonce and tag."""
FRAME_OVERHEAD = _HEAD.size + _SEAL_BYTES + _LENGTH.size
FRAME_BYTES_MAX = PIECE_BYTES + FRAME_OVERHEAD
_FIRST_READ_BYTES, _READ_BYTES = 32 << 10, 1 << 20
_CIPHERS_KEPT = 1024
ReadPieces = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""(offset, length) pairs → bytes of the encrypted file for each."""


def derived(secret: bytes, salt: bytes, purpose: bytes, length: int = KEY_BYTES) -> bytes:
    """Derive a key for one purpose (HKDF-SHA256, RFC 5869)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=b"memd " + purpose).derive(secret)


class DataKey:
    """A key that seals files and other keys. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: KEY_BYTES random bytes."""
        assert len(secret) == KEY_BYTES, "a key of AES-256"
        self.secret = secret
        self.id = derived(secret, b"", b"key id", KEY_ID_BYTES)
        """Distinguishes keys; reveals nothing of the key."""
        self._cipher = lru_cache(_CIPHERS_KEPT)(lambda salt: _cipher(derived(secret, salt, b"file")))

    def seal(self, data: bytes | memoryview, salt: bytes, bound: bytes) -> bytes:
        """Encrypt with the key derived from this one and `salt`: a nonce, ciphertext and tag. `bound`: associated data
        of its place, required to open it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher(salt).encrypt(nonce, data, bound)

    def opened(self, sealed: bytes, salt: bytes, bound: bytes) -> bytes | None:
        """Return the sealed data; None unless this key sealed it for this place."""
        from cryptography.exceptions import InvalidTag

        with suppress(InvalidTag, ValueError):
            return self._cipher(salt).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound)
        return None


def _cipher(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


class Frame(NamedTuple):
    """The head of one frame."""

    place: int
    """Offset in the encrypted file."""
    length: int
    number: int
    start: int
    salt: bytes

    @property
    def end(self) -> int:
        """The plain offset just after it."""
        return self.start + self.length

    @property
    def bytes(self) -> int:
        """Size of the whole frame."""
        return self.length + FRAME_OVERHEAD


def frames_of(data: bytes, key: DataKey, salt: bytes, *, start: int, number: int) -> list[bytes]:
    """Encrypt `data` as frames from the plain offset `start` on; `number` is that of the first."""
    view, frames = memoryview(data), list[bytes]()
    for at in range(0, len(data), PIECE_BYTES):
        piece = view[at : at + PIECE_BYTES]
        head = _HEAD.pack(_MAGIC, len(piece), number + len(frames), start + at, salt)
        frames.append(head + key.seal(piece, salt, head) + _LENGTH.pack(len(piece)))
    return frames


def frame_at(data: bytes, at: int, base: int = 0) -> Frame | None:
    """Return the frame that begins at `data[at]`, whose place is `base` + `at`; None unless it is complete."""
    if at < 0 or at + FRAME_OVERHEAD > len(data):
        return None
    magic, length, number, start, salt = _HEAD.unpack_from(data, at)
    end = at + length + FRAME_OVERHEAD
    if magic != _MAGIC or not 0 < length <= PIECE_BYTES or end > len(data):
        return None
    is_whole = data[end - _LENGTH.size : end] == _LENGTH.pack(length)
    return Frame(base + at, length, number, start, salt) if is_whole else None


def opened(key: DataKey, data: bytes, at: int, frame: Frame) -> bytes | None:
    """Return the contents of a frame at `data[at]`; None unless this key wrote it."""
    body = at + _HEAD.size
    return key.opened(data[body : body + _SEAL_BYTES + frame.length], frame.salt, data[at:body])


class FrameTable:
    """The frames of a file, read from its beginning as far as requested, and their contents. Thread-safe."""

    def __init__(self, key: DataKey, read_pieces: ReadPieces) -> None:
        self.key = key
        self.place = HEADER_BYTES
        """Offset in the encrypted file just after the last known frame."""
        self.end = 0
        """The corresponding plain offset."""
        self.number = 0
        """Number of the next frame."""
        self.salt: bytes | None = None
        """The file's salt; None until a frame is known."""
        self._read_pieces = read_pieces
        self._lock = threading.RLock()
        self._frames: list[Frame] = []

    def size(self, raw_size: int) -> int:
        """Return the plain size of a file with this encrypted size."""
        with self._lock:
            if self.place != raw_size and (frame := self._last_frame(raw_size)) is not None:
                return frame.end
            self.cover(raw_size)
            return self.end + self._tail_of(raw_size)

    def read(self, raw_size: int, pieces: Sequence[tuple[int, int]]) -> tuple[list[bytes], bool]:
        """Read (offset, length) pieces. Return them, and whether all of their frames could be decrypted."""
        wanted: list[tuple[int, int, list[Frame]]] = []
        with self._lock:
            for offset, length in pieces:
                self.cover(raw_size, offset + length)
                end = self.end + (self._tail_of(raw_size) if self.end < offset + length else 0)
                length = max(0, min(offset + length, end) - offset)
                wanted.append((offset, length, self.overlapping(offset, offset + length)))
        frames = list(dict.fromkeys(frame for *_, some in wanted for frame in some))
        found = zip(frames, self._read_pieces([(frame.place, frame.bytes) for frame in frames]), strict=True)
        contents = {
            frame: opened(self.key, data, 0, frame) if frame_at(data, 0, frame.place) == frame else None
            for frame, data in found
        }
        return [_joined(*one, contents) for one in wanted], None not in contents.values()

    def _last_frame(self, raw_size: int) -> Frame | None:
        """Return the last frame of a file, found from its end alone; None unless it is complete."""
        length = max(0, min(FRAME_BYTES_MAX, raw_size - HEADER_BYTES))
        [data] = self._read_pieces([(raw_size - length, length)])
        if len(data) < FRAME_OVERHEAD:
            return None
        [inside] = _LENGTH.unpack_from(data, len(data) - _LENGTH.size)
        frame = frame_at(data, len(data) - inside - FRAME_OVERHEAD)
        return None if frame is None or opened(self.key, data, frame.place, frame) is None else frame

    def _tail_of(self, raw_size: int) -> int:
        """Return the number of zeros that replace the bytes after the last frame: an interrupted write, or damage."""
        return raw_size - self.place if raw_size >= self.place else raw_size

    def cover(self, size: int, upto: int | None = None) -> None:
        """Find the frames of a file of `size` encrypted bytes, all of them or those up to a plain offset."""
        with self._lock:
            while self.place < size and (upto is None or self.end < upto):
                wanted = _READ_BYTES if self._frames else _FIRST_READ_BYTES
                [data] = self._read_pieces([(self.place, min(wanted, size - self.place))])
                if not self._follow(data) and not self._search(*self._read_pieces([(self.place, size - self.place)])):
                    break

    def following(self, data: bytes) -> bytes:
        """Encrypt data to write after the frames; the table includes it after the next `cover`."""
        salt = self.salt or secrets.token_bytes(SALT_BYTES)
        return b"".join(frames_of(data, self.key, salt, start=self.end, number=self.number))

    def overlapping(self, start: int, end: int) -> list[Frame]:
        """Return the frames that have plain bytes from `start` to before `end`."""
        first = bisect_right(self._frames, start, key=lambda frame: frame.end)
        return self._frames[first : bisect_left(self._frames, end, key=lambda frame: frame.start)]

    def upto(self, end: int) -> FrameTable | None:
        """Return the table of the frames up to a plain offset; None if no frame ends there."""
        kept = FrameTable(self.key, self._read_pieces)
        for frame in self.overlapping(0, end):
            kept._add(frame)
        return kept if kept.end == end else None

    def _follow(self, data: bytes) -> bool:
        """Add frames from the beginning of `data` while each continues the one before. Return whether there was one."""
        at, base, found = 0, self.place, False
        while (frame := frame_at(data, at, base)) is not None and frame.number == self.number:
            is_plain = frame.start == self.end and frame.salt == self.salt
            if not is_plain and not self._is_of_file(frame, data, at):
                break  # only an authenticated frame of this file may be the first, or leave out bytes
            self._add(frame)
            at, found = at + frame.bytes, True
        return found

    def _search(self, data: bytes) -> bool:
        """Add the first complete frame in `data`, the rest of the file. Return whether there is one."""
        at = data.find(_MAGIC)
        while at >= 0:
            frame = frame_at(data, at, self.place)
            if frame and frame.number >= self.number and self._is_of_file(frame, data, at):
                self._add(frame)
                return True
            at = data.find(_MAGIC, at + 1)
        return False

    def _is_of_file(self, frame: Frame, data: bytes, at: int) -> bool:
        fits = frame.start >= self.end and (self.salt is None or frame.salt == self.salt)
        return fits and opened(self.key, data, at, frame) is not None

    def _add(self, frame: Frame) -> None:
        self._frames.append(frame)
        self.end, self.number, self.salt = frame.end, frame.number + 1, frame.salt
        self.place = frame.place + frame.bytes


def _joined(offset: int, length: int, frames: Sequence[Frame], contents: Mapping[Frame, bytes | None]) -> bytes:
    """Return the plain bytes of a piece, with zeros for undecryptable frames."""
    plain = bytearray(length)
    for frame in frames:
        if (data := contents[frame]) is not None:
            low, high = max(frame.start, offset), min(frame.end, offset + length)
            plain[low - offset : high - offset] = data[low - frame.start : high - frame.start]
    return bytes(plain)


_FILE_BYTES_MAX = 4096
OTHERS = 0o077
"""Permissions of all but the owner."""
_FORM = "32 bytes: as they are, as 64 hexadecimal digits or in base64 (`memd encrypt key FILE` makes one)"


class MasterKey:
    """The key that wraps the keys of data directories."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 bytes."""
        self._secret = secret
        self.id = derived(secret, b"", b"master id", 8).hex()
        """Distinguishes master keys; reveals nothing of the key."""

    def wrapping(self, directory: bytes) -> DataKey:
        """Return the key that wraps those of one data directory."""
        return DataKey(derived(self._secret, directory, b"wrapping"))

    def key_file(
        self, directory: str, key: DataKey, state: State = "whole", former: DataKey | None = None
    ) -> DirectoryKeyFile:
        """Return the `memd.key` of a directory with these keys."""
        by = self.wrapping(bytes.fromhex(directory))
        return DirectoryKeyFile(
            directory=directory,
            master=self.id,
            state=state,
            key_id=key.id.hex(),
            key=_wrapped(by, key, directory),
            former="" if former is None else _wrapped(by, former, directory),
        )

    def opened(self, path: Path, found: DirectoryKeyFile) -> tuple[DataKey, DataKey | None]:
        """Open the directory's key, and the former one during a renewal. Raises WrongKey: this is not the directory's
        master key."""
        if found.master != self.id:
            raise WrongKey(
                f"{path.parent}: was encrypted with the key {found.master}, the one that was given is {self.id}: "
                "another directory's, or one from before a `memd encrypt rekey`; give the right key"
            )
        by = self.wrapping(bytes.fromhex(found.directory))
        former = _unwrapped(by, found.former, found.directory, path) if found.former else None
        return _unwrapped(by, found.key, found.directory, path), former

    @classmethod
    def parsed(cls, data: bytes, where: str) -> MasterKey:
        """Read a key; errors call its place `where`. Raises WrongKey: it is not one."""
        text = data.strip()
        secret = data if len(data) == KEY_BYTES else _decoded(text)
        if secret is None or len(secret) != KEY_BYTES:
            raise WrongKey(f"{where}: holds no key: it must be {_FORM}")
        return cls(secret)

    @classmethod
    def in_file(cls, path: Path) -> MasterKey:
        """Read the key in a file. Raises WrongKey: it has none, or others than its owner may read it; StoreError: it
        cannot be read."""
        data, mode = read_private(path, _FILE_BYTES_MAX)
        if mode & OTHERS:
            raise WrongKey(f"{path}: others may read this key (mode {mode:04o}); chmod 600 {path}")
        return cls.parsed(data, str(path))


def new_key_file(path: Path) -> MasterKey:
    """Make a key and write it, in base64, to a new file that only its owner may read. Raises StoreWriteFailed: the file
    exists, or cannot be written."""
    secret = secrets.token_bytes(KEY_BYTES)
    create_private(path, base64.b64encode(secret) + b"\n")
    return MasterKey(secret)


def _decoded(text: bytes) -> bytes | None:
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text.decode("ascii"))
        return base64.b64decode(text.replace(b"-", b"+").replace(b"_", b"/"), validate=True)
    except (ValueError, binascii.Error):
        return None


_FORMAT = 1
State = Literal["whole", "encrypting", "decrypting", "renewing"]
"""whole: no command is pending. The others: a command was begun and must be finished before memd serves."""


class DirectoryKeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """`memd.key`."""

    format: int = _FORMAT
    directory: str
    """A random id, 32 hex digits; a copy of the directory has the same."""
    master: str
    """The id of the master key."""
    state: State = "whole"
    key_id: str
    key: str
    """The directory's key, wrapped by the master key."""
    former: str = ""
    """The previous key, during a renewal."""
    crc: int = 0


class TopicKeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """`topic.key`."""

    format: int = _FORMAT
    directory: str
    by: str
    """The id of the directory's key that wraps it."""
    key: str
    crc: int = 0


AnyKeyFile = TypeVar("AnyKeyFile", DirectoryKeyFile, TopicKeyFile)


def read_key_file(files: LocalDisk, path: Path, kind: type[AnyKeyFile]) -> AnyKeyFile:
    """Read a key file without opening its key. Raises DamagedKey, or WrongKey: it is of a newer
    format."""
    if files.size(path) is None:
        raise DamagedKey(
            f"{path}: is missing; without it nothing that it encrypts can be read: put it back, out of a backup if "
            "need be (where the topic was erased, its key is gone for good: remove its folder)"
        )
    try:
        found = msgspec.json.decode(files.read(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    if found is None or found.crc != _crc(found):
        raise DamagedKey(f"{path}: is damaged; put it back, out of a backup")
    if found.format > _FORMAT:
        raise WrongKey(f"{path}: is of format {found.format}, this memd reads up to {_FORMAT}; use a newer memd")
    return found


def write_key_file(files: LocalDisk, path: Path, contents: AnyKeyFile) -> None:
    """Write a key file durably."""
    replace_file(files, path, msgspec.json.encode(msgspec.structs.replace(contents, crc=_crc(contents))) + b"\n")


def new_key() -> DataKey:
    """Return a new random key."""
    return DataKey(secrets.token_bytes(KEY_BYTES))


def write_topic_key(files: LocalDisk, path: Path, directory: str, by: DataKey) -> DataKey:
    """Make a random key for a topic and write its `topic.key`, durably."""
    key = new_key()
    wrapped = _wrapped(by, key, directory)
    write_key_file(files, path, TopicKeyFile(directory=directory, by=by.id.hex(), key=wrapped))
    return key


def read_topic_key(files: LocalDisk, path: Path, directory: str, by: DataKey) -> DataKey:
    """Open the key of a topic. Raises WrongKey: there is none, or it is another directory's."""
    found = read_key_file(files, path, TopicKeyFile)
    if found.directory != directory or found.by != by.id.hex():
        raise WrongKey(
            f"{path}: belongs to another data directory, or is from before a `memd encrypt rekey --data`; put back the "
            "one that was here"
        )
    return _unwrapped(by, found.key, directory, path)


_SALT = b"keys"


def _wrapped(by: DataKey, key: DataKey, directory: str) -> str:
    return base64.b64encode(by.seal(key.secret, _SALT, _bound(directory))).decode()


def _unwrapped(by: DataKey, text: str, directory: str, path: Path) -> DataKey:
    with suppress(binascii.Error):
        if (secret := by.opened(base64.b64decode(text, validate=True), _SALT, _bound(directory))) is not None:
            return DataKey(secret)
    raise DamagedKey(f"{path}: its key cannot be opened: it was changed; put it back, out of a backup")


def _bound(directory: str) -> bytes:
    return b"memd key of " + directory.encode()


def _crc(contents: AnyKeyFile) -> int:
    return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(contents, crc=0)))
