"""The codec of encrypted files: plain bytes ⇄ frames that are encrypted one by one.

Rule: never opens a file. The topic's key opens every frame independently, so damage costs only its own frame.
Undecryptable bytes read as zeros, which are no record, so recovery is the same as from other damage.

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
"""

from __future__ import annotations

import secrets
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

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
