"""JSON values out of bytes that arrive in blocks: the elements of an array, the lines of JSON Lines.

Rule: pure, and bounded: no more is held than one value and one block, whatever the bytes are. Where a value begins and
ends is found by counting brackets outside strings, so that a value that cannot be read does not hide those behind it;
17 MB a second, for which the model then takes an hour.
Nothing is decoded here but what tells the two layouts apart.
ijson 3.6 was tried and does neither: it ends at the first value that is broken, and holds a string however long it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
from msgspec import Raw

from memd.wire.lenient_json import LIST, UNREADABLE, is_list

ITEM_BYTES_MAX = 64 << 20
"""Of one value. The longest conversations of years have some ten megabytes."""
HEAD_BYTES = 1 << 20
"""Of a file's beginning, which tells its layout: a first line that is longer is taken for a whole document."""
_BOM = b"\xef\xbb\xbf"
_SIGN = re.compile(rb'["\[\]{},]')
_STRING = re.compile(rb'(?:[^"\\]|\\.)*+("?)', re.DOTALL)
"""The rest of a string, and whether its end is there."""
_lines_decoder = msgspec.json.Decoder(Raw)


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
        return LIST.decode(line)
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
    """The values of one JSON text, or of several one behind the other; of an array its elements are the values."""
    held, at, done = bytearray(), 0, 0  # what is not dropped yet, how far it is read, and how much was dropped before
    start = begun = count = arrays = depth = 0
    in_array = in_string = is_long = False

    def ended(end: int) -> Iterator[Item]:
        nonlocal count, is_long
        place, size = f"element {count + 1:,} (byte {begun:,})", end - start
        if is_long or size > bytes_max:
            yield Item(place, problem=_too_long(bytes_max))
        elif value := bytes(held[start:end]).strip():
            yield Item(place, value, arrays if in_array else None)
        else:
            return  # an empty array, or a comma too many
        count, is_long = count + 1, False

    for block in blocks:
        held += block
        while at < len(held):
            found = (_STRING.match if in_string else _SIGN.search)(held, at)
            at = found.end() if found else len(held)
            if in_string or found is None:
                if found is None or not found[1]:
                    break
                in_string = False
                continue
            sign = found[0]
            if sign == b'"':
                in_string = True
            elif sign in b"[{":
                depth += 1
                if depth == 1:
                    in_array = sign == b"["
                    arrays += in_array
                    start = found.start() + in_array
                    begun = done + start
            elif sign in b"]}":
                depth -= 1
                if depth < 0:
                    yield Item(f"byte {done + at - 1:,}", problem="a bracket closes that was never opened")
                    return
                if depth == 0:
                    yield from ended(at - in_array)
                    start = at
            elif in_array and depth == 1:
                yield from ended(at - 1)
                start, begun = at, done + at
        is_long = is_long or (depth > 0 and len(held) - start > bytes_max)
        kept = at if is_long or not depth else start
        del held[:kept]
        at, done, start = at - kept, done + kept, 0
    if depth or in_string:
        reason = "the file ends in the middle of it: it was cut off, and only what stands before it is taken"
        yield Item(f"element {count + 1:,} (byte {begun:,})", problem=reason)


def closed(text: bytes) -> bytes:
    """The first object of a JSON text that was cut off, as far as its members go, with its brackets closed."""
    text = text[text.find(b"{") :]
    at = end = 0
    opened = closing = b""  # the brackets that end what is open: here, and at the end of what is whole
    while found := _SIGN.search(text, at):
        sign, at = found[0], found.end()
        if sign == b'"':
            rest = _STRING.match(text, at)
            if rest is None or not rest[1]:
                break
            at = rest.end()
        elif sign == b",":
            end, closing = found.start(), opened
        elif sign in b"[{":
            opened = (b"}" if sign == b"{" else b"]") + opened
            end, closing = at, opened
        elif not (opened := opened[1:]):
            return text[:at]
    return text[:end] + closing


def _too_long(bytes_max: int) -> str:
    return f"it has more than {bytes_max:,} bytes and is left out"
