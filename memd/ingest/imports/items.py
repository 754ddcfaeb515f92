"""JSON values out of bytes that arrive in blocks: the elements of an array, the lines of JSON Lines.

Rule: pure, and bounded: no more is held than one value and one block, whatever the bytes are. Where a value begins and
ends is found by counting brackets outside strings, so that a value that cannot be read does not hide those behind it.
Nothing is decoded here but what tells the two layouts apart.
ijson 3.6 was tried and does neither: it ends at the first value that is broken, and holds a string however long it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from memd.wire.lenient_json import UNREADABLE, is_list

ITEM_BYTES_MAX = 64 << 20
"""Of one value. The longest conversations of years have some ten megabytes."""
HEAD_BYTES = 1 << 20
"""Of a file's beginning, which tells its layout: a first line that is longer is taken for a whole document."""
_BOM = b"\xef\xbb\xbf"
_OPENING, _CLOSING, _COMMA, _QUOTE, _BACKSLASH = b"[{", b"]}", ord(","), ord('"'), ord("\\")
_CHANGES = np.zeros(256, np.int8)
_CHANGES[list(_OPENING)], _CHANGES[list(_CLOSING)] = 1, -1
_MATTERS = _CHANGES != 0
_MATTERS[_COMMA] = True
_lines_decoder = msgspec.json.Decoder(Raw)
_list_decoder = msgspec.json.Decoder(list[Raw])


class Item(msgspec.Struct, frozen=True):
    """One value, or the reason why there is none."""

    place: str
    """Where it stands, for people: `line 3`, `element 3 (byte 1,024)`."""
    data: bytes = b""
    """JSON text; empty where it cannot be had."""
    array: int | None = None
    """The number of the array that it is an element of; None where it stands by itself."""
    problem: str = ""


def items(blocks: Iterable[bytes], bytes_max: int = ITEM_BYTES_MAX) -> Iterator[Item]:
    """Yield the values of a file. An array's elements are values of their own."""
    incoming = iter(blocks)
    head = b""
    for block in incoming:
        head += block
        if len(head) >= HEAD_BYTES or b"\n" in head.lstrip():
            break
    head = head.removeprefix(_BOM)
    rest = chain([head], incoming)
    return _values(rest, bytes_max) if _is_document(head) else _lines(rest, bytes_max)


def _is_document(head: bytes) -> bool:
    """Whether a file is one JSON text over several lines, by its beginning; else each line is one."""
    first = head.lstrip().partition(b"\n")[0]
    try:
        _lines_decoder.decode(first)
    except UNREADABLE:
        return first[:1] in (b"[", b"{")
    return False


def _lines(blocks: Iterable[bytes], bytes_max: int) -> Iterator[Item]:
    for number, line in enumerate(bounded_lines(blocks, bytes_max), 1):
        place = f"line {number:,}"
        if len(line) > bytes_max:
            yield Item(place, problem=_too_long(bytes_max))
        elif not line.strip():
            continue
        elif is_list(line.lstrip()) and (elements := _elements(line)) is not None:
            for position, raw in enumerate(elements, 1):
                yield Item(f"{place}, element {position:,}", bytes(raw), number)
        else:
            yield Item(place, line.strip())


def _elements(line: bytes) -> list[Raw] | None:
    try:
        return _list_decoder.decode(line)
    except UNREADABLE:
        return None


def bounded_lines(blocks: Iterable[bytes], bytes_max: int) -> Iterator[bytes]:
    """Yield lines; of one that is too long only so much that this can be seen."""
    held = bytearray()
    for block in blocks:
        *ended, begun = block.split(b"\n")
        for part in ended:
            held += part[: bytes_max + 1 - len(held)]
            yield bytes(held)
            held = bytearray()
        held += begun[: bytes_max + 1 - len(held)]
    yield bytes(held)


def _values(blocks: Iterable[bytes], bytes_max: int) -> Iterator[Item]:
    cutter = _Cutter(bytes_max)
    for block in blocks:
        yield from cutter.feed(block)
        if cutter.is_lost:
            return
    yield from cutter.end()


def _too_long(bytes_max: int) -> str:
    return f"it has more than {bytes_max:,} bytes and is left out"


class _Cutter:
    """Cuts one JSON text, or several one behind the other, into values."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._depth = 0
        self._in_string = False
        self._backslashes = 0  # at the end of the last block
        self._base = 0  # 1 within an array, whose elements are the values
        self._arrays = 0
        self._count = 0
        self._done = 0  # bytes of the blocks before
        self._start = 0  # of the value that has begun
        self._held = bytearray()
        self.is_lost = False
        """The rest cannot be told apart any more."""

    def feed(self, block: bytes) -> Iterator[Item]:
        """Take the next bytes; yield the values that end in them."""
        at, depths = self._brackets(np.frombuffer(block, np.uint8))
        data = np.frombuffer(block, np.uint8)[at]
        before = np.concatenate([[self._depth], depths[:-1]]) if len(at) else depths
        turns = np.flatnonzero((depths <= 1) & (before <= 1) | (depths <= 0))
        taken = 0
        for place in turns.tolist():
            position, sign, depth = int(at[place]), data[place : place + 1].tobytes(), int(depths[place])
            if depth < 0:
                yield Item(f"byte {self._done + position:,}", problem="a bracket closes that was never opened")
                self.is_lost = True
                return
            if before[place] == 0 and depth == 1:  # a text begins
                self._base = 1 if sign == b"[" else 0
                self._arrays += self._base
                self._held.clear()
                taken = position + self._base
                self._start = self._done + taken
            elif self._base and depth == 1 and sign == b",":
                yield from self._ended(block[taken:position])
                taken = position + 1
                self._start = self._done + taken
            elif depth == 0 and sign != b",":
                end = position if self._base else position + 1
                yield from self._ended(block[taken:end])
                taken = end + self._base
        self._hold(block[taken:])
        self._depth = int(depths[-1]) if len(at) else self._depth
        self._done += len(block)

    def end(self) -> Iterator[Item]:
        """Yield what has begun and not ended."""
        if self._depth or self._in_string:
            reason = "the file ends in the middle of it: it was cut off; what stands before it is imported"
            yield Item(self._place(), problem=reason)

    def _brackets(self, data: NDArray[np.uint8]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """The positions of brackets and commas outside strings, and the depth behind each."""
        quotes = np.flatnonzero(data == _QUOTE)
        slashes = data == _BACKSLASH
        if self._backslashes or slashes.any():
            places = np.arange(len(data))
            last = np.maximum.accumulate(np.where(slashes, -1 - self._backslashes, places))
            run = np.where(quotes > 0, quotes - 1 - last[quotes - 1], self._backslashes)
            quotes = quotes[run % 2 == 0]
            self._backslashes = int(len(data) - 1 - last[-1]) % 2
        at = np.flatnonzero(_MATTERS[data])
        at = at[(np.searchsorted(quotes, at) + self._in_string) % 2 == 0]
        self._in_string ^= bool(len(quotes) % 2)
        return at, self._depth + np.cumsum(_CHANGES[data[at]], dtype=np.int64)

    def _hold(self, part: bytes) -> None:
        if self._depth or self._held or part.strip():
            self._held += part[: self._bytes_max + 1 - len(self._held)]

    def _ended(self, part: bytes) -> Iterator[Item]:
        self._hold(part)
        value = bytes(self._held)
        self._held = bytearray()
        if not value.strip():
            return  # an empty array, or a comma too many
        if len(value) > self._bytes_max:
            yield Item(self._place(), problem=_too_long(self._bytes_max))
        else:
            yield Item(self._place(), value.strip(), self._arrays if self._base else None)
        self._count += 1

    def _place(self) -> str:
        return f"element {self._count + 1:,} (byte {self._start:,})"
