"""The codec of encrypted files: plain bytes ⇄ frames that are encrypted one by one.

Rule: never opens a file. Every frame can be opened by itself with the topic's key, so damage costs its own frame alone;
bytes that cannot be opened read as zeros, which are no record, and so they are recovered from like any other damage.

    | header, 80 bytes (see log/format.py; flags 1, `topic` is the id of the key) | frame | frame | ...

    0       4        8        20-8     20     36      48                48+length  64+length  68+length
    | magic | length | number | start  | salt | nonce | ciphertext      | tag      | length   |
    | 4     | u32    | u32    | u64    | 16   | 12    | length bytes    | 16       | u32      |

    number   of the frame, from 0; one that is missing, was moved or repeated is noticed
    start    the plain offset of its first byte: what was in a frame that is lost reads as zeros
    salt     drawn for each file, the same in all its frames, so that none can be moved to another file; HKDF-SHA256
             makes the file's key of it and the topic's key
    nonce    drawn for each frame, so that what is written again where something was cut off shares no nonce with it
    length   once more at the end, so that the size of a file is found without reading it

All before the nonce is associated data. Random nonces are good for 2^32 frames (64 TiB) of one file.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from memd.store.log.format import HEADER_BYTES

KEY_BYTES, KEY_ID_BYTES, SALT_BYTES, NONCE_BYTES = 32, 8, 16, 12
PIECE_BYTES = 16 << 10
"""Plain bytes of a frame at most: what is read, and what damage costs, at the least. Opened in 6 µs."""
_MAGIC = b"\x8fmd\xe5"
_HEAD = struct.Struct("<4sIIQ16s12s")
_BOUND_BYTES = 36
_LENGTH = struct.Struct("<I")
FRAME_OVERHEAD = _HEAD.size + 16 + _LENGTH.size
FRAME_BYTES_MAX = PIECE_BYTES + FRAME_OVERHEAD
_FIRST_READ_BYTES, _READ_BYTES = 32 << 10, 1 << 20
_CIPHERS_KEPT = 1024
_MEMO_FRAMES = 8
Random = Callable[[int], bytes]
ReadAt = Callable[[int, int], bytes]
"""(offset, length) → bytes of the encrypted file."""


def derived(secret: bytes, salt: bytes, purpose: bytes, length: int = KEY_BYTES) -> bytes:
    """Derive a key for one purpose (HKDF-SHA256, RFC 5869)."""
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=b"memd " + purpose).derive(secret)


class DataKey:
    """A key under which files are encrypted. Any thread may use it."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: KEY_BYTES random bytes."""
        assert len(secret) == KEY_BYTES, "a key of AES-256"
        self.secret = secret
        self.id = derived(secret, b"", b"key id", KEY_ID_BYTES)
        """Tells keys apart; says nothing of the key."""
        self.cipher = lru_cache(_CIPHERS_KEPT)(lambda salt: AESGCM(derived(secret, salt, b"file")))


class Frame(NamedTuple):
    """The head of one frame, as it stands there."""

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
        """Of the whole frame."""
        return self.length + FRAME_OVERHEAD


def encrypt(key: DataKey, salt: bytes, data: bytes, *, start: int, number: int, random: Random) -> tuple[bytes, int]:
    """Encrypt `data` as frames from the plain offset `start` on.

    Returns:
        The frames, and the number after the last one's.
    """
    cipher, view, parts = key.cipher(salt), memoryview(data), []
    places = range(0, len(data), PIECE_BYTES)
    nonces = random(NONCE_BYTES * len(places))
    for count, at in enumerate(places):
        piece = view[at : at + PIECE_BYTES]
        nonce = nonces[NONCE_BYTES * count : NONCE_BYTES * (count + 1)]
        head = _HEAD.pack(_MAGIC, len(piece), number + count, start + at, salt, nonce)
        parts += [head, cipher.encrypt(nonce, piece, head[:_BOUND_BYTES]), _LENGTH.pack(len(piece))]
    return b"".join(parts), number + len(places)


def frame_at(data: bytes, at: int, base: int = 0) -> Frame | None:
    """Return the frame that begins at `data[at]`, whose place is `base` + `at`; None if there is no whole one."""
    if at < 0 or at + FRAME_OVERHEAD > len(data):
        return None
    magic, length, number, start, salt, _ = _HEAD.unpack_from(data, at)
    end = at + length + FRAME_OVERHEAD
    if magic != _MAGIC or not 0 < length <= PIECE_BYTES or end > len(data):
        return None
    is_whole = data[end - _LENGTH.size : end] == _LENGTH.pack(length)
    return Frame(base + at, length, number, start, salt) if is_whole else None


def opened(key: DataKey, data: bytes, at: int, length: int) -> bytes | None:
    """Return the contents of the frame at `data[at]`; None if it is not as this key has written it."""
    _, _, _, _, salt, nonce = _HEAD.unpack_from(data, at)
    body = at + _HEAD.size
    try:
        return key.cipher(salt).decrypt(nonce, data[body : body + length + 16], data[at : at + _BOUND_BYTES])
    except InvalidTag:
        return None


class FrameTable:
    """The frames of a file, found from its beginning as far as somebody asked, and what is in them. Any thread."""

    def __init__(self, key: DataKey, read_at: ReadAt) -> None:
        self.key = key
        self.place = HEADER_BYTES
        """Just after the last frame that was found, in the encrypted file."""
        self.end = 0
        """The plain offset up to there."""
        self.number = 0
        """Of the next frame."""
        self.salt: bytes | None = None
        """Of the file; None: no frame of it is known."""
        self._read_at = read_at
        self._lock = threading.Lock()
        self._frames: list[Frame] = []

    def size(self, raw_size: int) -> int:
        """Return the plain size of a file of so many encrypted bytes."""
        with self._lock:
            if self.place != raw_size and (frame := self._last_frame(raw_size)) is not None:
                return frame.end
            self.cover(raw_size)
            return self.end + self._tail_of(raw_size)

    def read(self, raw_size: int, pieces: Sequence[tuple[int, int]]) -> tuple[list[bytes], bool]:
        """Read (offset, length) pieces, and say whether all of their frames could be opened."""
        memo: dict[int, bytes] = {}
        found, all_opened = [], True
        for offset, length in pieces:
            with self._lock:
                self.cover(raw_size, offset + length)
                end = self.end + (self._tail_of(raw_size) if self.end < offset + length else 0)
                length = max(0, min(offset + length, end) - offset)
                frames = self.overlapping(offset, offset + length)
            plain, is_whole = self._piece(frames, offset, length, memo)
            found.append(plain)
            all_opened = all_opened and is_whole
        return found, all_opened

    def _piece(self, frames: list[Frame], offset: int, length: int, memo: dict[int, bytes]) -> tuple[bytes, bool]:
        """The plain bytes of a piece, and whether its frames could be opened; `memo` has frames that were just read."""
        plain, all_opened = bytearray(length), True
        if not frames:
            return bytes(plain), True
        first = frames[0].place
        if offset + length <= frames[0].end and first in memo:
            low = offset - frames[0].start
            return memo[first][low : low + length], True
        data = self._read_at(first, frames[-1].place + frames[-1].bytes - first)
        for frame in frames:
            at = frame.place - first
            contents = opened(self.key, data, at, frame.length) if frame_at(data, at, first) == frame else None
            if contents is None:
                all_opened = False
                continue
            memo[frame.place] = contents
            low, high = max(frame.start, offset), min(frame.end, offset + length)
            plain[low - offset : high - offset] = contents[low - frame.start : high - frame.start]
        if len(memo) > _MEMO_FRAMES:
            memo.clear()
        return bytes(plain), all_opened

    def _last_frame(self, raw_size: int) -> Frame | None:
        """The frame with which the file ends, found by its end alone; None unless it is whole."""
        length = max(0, min(FRAME_BYTES_MAX, raw_size - HEADER_BYTES))
        data = self._read_at(raw_size - length, length)
        if len(data) < FRAME_OVERHEAD:
            return None
        [inside] = _LENGTH.unpack_from(data, len(data) - _LENGTH.size)
        frame = frame_at(data, len(data) - inside - FRAME_OVERHEAD)
        return None if frame is None or opened(self.key, data, frame.place, frame.length) is None else frame

    def _tail_of(self, raw_size: int) -> int:
        """How many zeros stand for what is behind the last frame: an interrupted write, or damage."""
        return raw_size - self.place if raw_size >= self.place else raw_size

    def cover(self, size: int, upto: int | None = None) -> None:
        """Find the frames of a file of `size` encrypted bytes, all of them or those up to a plain offset."""
        while self.place < size and (upto is None or self.end < upto):
            wanted = _READ_BYTES if self._frames else _FIRST_READ_BYTES
            data = self._read_at(self.place, min(wanted, size - self.place))
            if not self._follow(data) and not self._search(self._read_at(self.place, size - self.place)):
                break

    def overlapping(self, start: int, end: int) -> list[Frame]:
        """Return the frames that have plain bytes from `start` to before `end`."""
        first = bisect_right(self._frames, start, key=lambda frame: frame.end)
        return self._frames[first : bisect_left(self._frames, end, key=lambda frame: frame.start)]

    def upto(self, end: int) -> FrameTable | None:
        """Return the table of the frames up to a plain offset; None if that is none at which a frame ends."""
        kept = FrameTable(self.key, self._read_at)
        for frame in self.overlapping(0, end):
            kept._add(frame)
        return kept if kept.end == end else None

    def _follow(self, data: bytes) -> bool:
        """Take frames from the beginning of `data` as long as each continues the one before; whether there was one."""
        at, base, found = 0, self.place, False
        while (frame := frame_at(data, at, base)) is not None and frame.number == self.number:
            is_plain = frame.start == self.end and frame.salt == self.salt
            if not is_plain and not self._is_of_file(frame, data, at):
                break  # only a frame that is known to be of this file begins it, or leaves out bytes
            self._add(frame)
            at, found = at + frame.bytes, True
        return found

    def _search(self, data: bytes) -> bool:
        """Take the first whole frame somewhere in `data`, the rest of the file; False: there is none."""
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
        return fits and opened(self.key, data, at, frame.length) is not None

    def _add(self, frame: Frame) -> None:
        self._frames.append(frame)
        self.end, self.number, self.salt = frame.end, frame.number + 1, frame.salt
        self.place = frame.place + frame.bytes
