"""Reading and appending to one encrypted file, by plain offsets.

Rule: what cannot be opened reads as zeros, never as other bytes. A file in which nothing can be opened, though there is
something, is refused unless its header names the key: with the wrong one, all that follows would take it for lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import msgspec

from memd.errors import CorruptFile, ForeignFile
from memd.store.encryption.frames import (
    FRAME_BYTES_MAX,
    FRAME_OVERHEAD,
    SALT_BYTES,
    DataKey,
    FrameTable,
    Random,
    encrypt,
    frame_at,
    last_frame,
    opened,
    opened_into,
)
from memd.store.files import Appender, Files
from memd.store.log.format import (
    FLAG_ENCRYPTED,
    HEADER_BYTES,
    MAGIC_ENCRYPTED,
    MAGIC_JOURNAL,
    MAGIC_LOG,
    MAGIC_META,
    Header,
    decode_any_header,
    encode_header,
)

_OWN_KINDS = (MAGIC_LOG, MAGIC_JOURNAL, MAGIC_META)
_MEMO_FRAMES = 8
_FRAMES_AT_ONCE = 64
_END_BYTES = 96 << 10
"""Read from the end of a file whose end is asked for: as much as the search for the last entry of a log needs."""


class EncryptedFile(msgspec.Struct):
    """An encrypted file as it was when its frames were looked for."""

    path: Path
    key: DataKey
    identity: Hashable
    table: FrameTable

    def size(self, files: Files, raw_size: int) -> int:
        """Return its plain size where it has `raw_size` encrypted bytes; see `tail_of` for what follows its frames."""
        with self.table.lock:
            if self.table.place != raw_size and (end := self._end_of(files, raw_size)) is not None:
                return end
            self._cover(files, raw_size, None)
            return self.table.end + tail_of(self.table, raw_size)

    def read(self, files: Files, raw_size: int, pieces: Sequence[tuple[int, int]]) -> tuple[list[bytes], bool]:
        """Read (offset, length) pieces, and say whether all of their frames could be opened."""
        memo: dict[int, bytes] = {}
        found, all_opened = [], True
        for offset, length in pieces:
            if len(pieces) == 1 and self.table.end <= offset and (last := self._from_end(files, raw_size, offset)):
                return [last[:length]], True
            with self.table.lock:
                self._cover(files, raw_size, offset + length)
                end = self.table.end + (tail_of(self.table, raw_size) if self.table.end < offset + length else 0)
            plain, is_whole = self._piece(files, offset, max(0, min(offset + length, end) - offset), memo)
            found.append(plain)
            all_opened = all_opened and is_whole
        return found, all_opened

    def read_covered(self, files: Files, pieces: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Read pieces whose frames are known, without looking at the file's size; None if any is not as it was."""
        memo: dict[int, bytes] = {}
        found = []
        if self.table.end < max((offset + length for offset, length in pieces), default=0):
            return None
        for offset, length in pieces:
            plain, is_whole = self._piece(files, offset, length, memo)
            if not is_whole:
                return None
            found.append(plain)
        return found

    def _piece(self, files: Files, offset: int, length: int, memo: dict[int, bytes]) -> tuple[bytes, bool]:
        """The plain bytes of a piece, and whether its frames could be opened; `memo` has frames that were just read."""
        with self.table.lock:
            frames = self.table.overlapping(offset, offset + length)
        if frames and frames[0][0] <= offset and offset + length <= frames[0][1] and frames[0][2] in memo:
            low = offset - frames[0][0]
            return memo[frames[0][2]][low : low + length], True
        plain, all_opened = bytearray(length), True
        if not frames:
            return bytes(plain), True
        first = frames[0][2]
        data = files.read_at(self.path, first, frames[-1][2] + frames[-1][3] + FRAME_OVERHEAD - first)
        for start, end, place, _ in frames:
            frame = frame_at(data, place - first)
            is_same = frame is not None and (frame.start, frame.salt) == (start, self.table.salt)
            contents = opened(self.key, data, place - first, frame.length) if frame and is_same else None
            if contents is None:
                all_opened = False
                continue
            memo[place] = contents
            low, high = max(start, offset), min(end, offset + length)
            plain[low - offset : high - offset] = contents[low - start : high - start]
        if len(memo) > _MEMO_FRAMES:
            memo.clear()
        return bytes(plain), all_opened

    def read_into(self, files: Files, raw_size: int, target: memoryview) -> bool:
        """Read the whole file into `target`; False: it is longer or shorter, or cannot be read as it was written."""
        with self.table.lock:
            self._cover(files, raw_size, None)
            frames = self.table.overlapping(0, self.table.end)
            is_whole = self.table.place == raw_size and self.table.end == len(target)
        done = 0
        for at in range(0, len(frames) if is_whole else 0, _FRAMES_AT_ONCE):
            some = frames[at : at + _FRAMES_AT_ONCE]
            first, last = some[0][2], some[-1][2] + some[-1][3] + FRAME_OVERHEAD
            data = files.read_at(self.path, first, last - first)
            for start, end, place, length in some:
                frame = frame_at(data, place - first)
                if frame is None or (frame.start, frame.length, frame.salt) != (start, length, self.table.salt):
                    return False
                if start != done or not opened_into(self.key, data, place - first, length, target[start:end]):
                    return False
                done = end
        return is_whole

    def _from_end(self, files: Files, raw_size: int, offset: int) -> bytes | None:
        """The plain bytes from `offset` to the end, if they are few and whole, without looking for all frames before.

        None: they are not, and all frames have to be found.
        """
        length = min(_END_BYTES, raw_size - HEADER_BYTES)
        data = files.read_at(self.path, raw_size - length, length) if length > 0 else b""
        parts: list[bytes] = []
        stop = None
        while (frame := last_frame(data)) is not None and (stop is None or frame.start + frame.length == stop):
            contents = opened(self.key, data, frame.place, frame.length)
            if contents is None:
                return None
            parts.append(contents)
            if frame.start <= offset:
                return b"".join(reversed(parts))[offset - frame.start :]
            data, stop = data[: frame.place], frame.start
        return None

    def _cover(self, files: Files, raw_size: int, upto: int | None) -> None:
        self.table.cover(lambda offset, length: files.read_at(self.path, offset, length), raw_size, upto)

    def _end_of(self, files: Files, raw_size: int) -> int | None:
        """The plain offset of the end, by the last frame alone; None if there is no whole one at the end."""
        length = min(FRAME_BYTES_MAX, raw_size - HEADER_BYTES)
        data = files.read_at(self.path, raw_size - length, length) if length > 0 else b""
        frame = last_frame(data)
        if frame is None or opened(self.key, data, frame.place, frame.length) is None:
            return None
        return frame.start + frame.length


def tail_of(table: FrameTable, raw_size: int) -> int:
    """Return how many zeros stand for what is behind the last frame: an interrupted write, or damage."""
    return raw_size - table.place if raw_size >= table.place else raw_size


def read_whole(key: DataKey, data: bytes, path: Path) -> bytes:
    """Return the plain bytes of a whole encrypted file.

    Raises:
        CorruptFile: it has frames, not one of them can be opened, and no header says that this is their key.
        ForeignFile: see `check_header`.
    """
    table, is_its_key = FrameTable(key), check_header(data, key, path)
    table.cover(lambda offset, length: data[offset : offset + length], len(data))
    if not is_its_key and table.salt is None and frame_at(data, HEADER_BYTES) is not None:
        raise CorruptFile(
            f"{path}: nothing in it can be decrypted: it is damaged or another topic's; put the file back, out of a "
            "backup if need be, or move it away and go on without what it holds"
        )
    plain = bytearray(table.end + tail_of(table, len(data)))
    for start, end, place, length in table.overlapping(0, table.end):
        contents = opened(key, data, place, length)
        if contents is not None:
            plain[start:end] = contents[: end - start]
    return bytes(plain)


def check_header(data: bytes, key: DataKey, path: Path) -> bool:
    """Whether a file begins with an intact header of an encrypted file.

    Raises:
        ForeignFile: it is not encrypted, though its neighbours are, or under another key.
    """
    header = decode_any_header(data)
    if header is None:
        return False
    if not header.flags & FLAG_ENCRYPTED:
        raise ForeignFile(
            f"{path}: is not encrypted, but its data directory is; move it away, or put the encrypted file back"
        )
    if header.topic != key.id:
        raise ForeignFile(
            f"{path}: was encrypted with another key than the topic.key beside it: put back the file or the key that "
            "belong together, out of a backup if need be"
        )
    return True


class EncryptedAppender:
    """See Appender. For one thread."""

    def __init__(
        self,
        inner: Appender,
        key: DataKey,
        table: FrameTable | None,
        random: Random,
        cut_within_frame: Callable[[int], tuple[Appender, FrameTable]] | None = None,
    ) -> None:
        """Append to a file that is there, with the `table` of its frames, or to a new one (None).

        `cut_within_frame` replaces the file by its beginning, where that ends within a frame.
        """
        self._inner, self._key, self._random, self._cut_within_frame = inner, key, random, cut_within_frame
        self._use(table)

    def _use(self, table: FrameTable | None) -> None:
        self._table: FrameTable | None = table
        self._salt = (table and table.salt) or self._random(SALT_BYTES)
        self._at = (table.end, table.place, table.number) if table else (0, 0, 0)
        """The end of the file: its plain offset, its encrypted one, and the number of the next frame."""
        self._before = self._at
        """The end before the last write."""

    def write(self, data: bytes) -> None:
        """See Appender."""
        end, place, number = self._at
        frames, number = encrypt(self._key, self._salt, data, start=end, number=number, random=self._random)
        header = b"" if place or not data else header_of(self._key, data)
        self._table = None  # it has not what is written now
        self._inner.write(header + frames)
        self._before = self._at
        self._at = (end + len(data), place + len(header) + len(frames), number)

    def sync(self) -> None:
        """See Appender."""
        self._inner.sync()

    def truncate(self, size: int) -> None:
        """See Appender. What was there may be cut anywhere as long as nothing was written, then only the last write."""
        known = next((at for at in (self._at, self._before) if at[0] == size), None)
        if known is not None:
            self._inner.truncate(known[1])
            self._at = self._before = known
            return
        assert self._table is not None and self._cut_within_frame is not None, "what was read is cut before it grows"
        kept = self._table.upto(size)
        if kept is not None:
            self._inner.truncate(kept.place)
            self._use(kept)
            return
        self._inner.close()
        self._inner, table = self._cut_within_frame(size)
        self._use(table)

    def close(self) -> None:
        """See Appender."""
        self._inner.close()


def header_of(key: DataKey, data: bytes) -> bytes:
    """Return the header of an encrypted file whose plain bytes begin with `data`."""
    magic = next((kind for kind in _OWN_KINDS if data.startswith(kind)), MAGIC_ENCRYPTED)
    return encode_header(
        Header(magic=magic, dimension=0, flags=FLAG_ENCRYPTED, segment_id=0, fingerprint="", topic=key.id)
    )
