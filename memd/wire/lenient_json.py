"""Lenient decoding of untrusted JSON.

Rule: a member of the wrong type counts as absent; only unreadable bytes raise, and only `UNREADABLE`.

Half an emoji must not lose a request: JavaScript leaves a lone surrogate where it cuts a string, and programs insert
bytes of other encodings. For reading, each such place becomes a *stand-in*, one of the last 2,048 private characters of
Unicode, which nobody uses. In parsed text a stand-in is U+FFFD; in forwarded bytes it is turned back:

    \\ud83d   ->  \\udbfe\\udc3d    an escaped lone surrogate U+D800 + k: the escape of U+10F800 + k
    b"\\xe9"  ->  U+10FCE9         a byte that is no UTF-8: the character U+10FC00 + the byte, in UTF-8
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody

UNREADABLE = (ValueError, RecursionError)
"""Errors of decoding untrusted JSON: ValueError covers msgspec and Unicode, the other is deep nesting."""

Decoded = TypeVar("Decoded")
TEXT, LIST, OBJECT = msgspec.json.Decoder(str), msgspec.json.Decoder(list[Raw]), msgspec.json.Decoder(dict[str, Raw])
"""Decoders of a string, and of a list or an object whose elements keep their bytes."""
MEMBERS, ANYTHING = msgspec.json.Decoder(dict[str, Any]), msgspec.json.Decoder(Any)
"""Decoders of a whole object, and of any value."""

_REPLACEMENT = "\ufffd"
_SURROGATES, _STAND_INS, _BYTES = 0xD800, 0x10F800, 0x10FC00
_HALF = 0x400  # surrogates: as many high ones as low ones
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""Matches any escape, so that an escaped backslash is not taken for the start of one. Group 1: a lone surrogate."""
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # as `surrogateescape` decodes it
_STAND_IN = re.compile(rb"\\(?:u(dbf[ef])\\u(d[c-f][0-9a-f]{2})|.)|(\xf4\x8f[\xb2\xb3][\x80-\xbf])", re.DOTALL)
_TAKEN = re.compile(rb"\\u[dD][bB][fF][e-fE-F]|\xf4\x8f[\xa0-\xbf]")
_IN_TEXT = re.compile("([\U0010f800-\U0010fbff])([\U0010fc00-\U0010ffff])|[\U0010f800-\U0010ffff]")


def read_mended(read: Callable[[Any], Decoded], data: Raw | bytes) -> Decoded:
    """Apply `read` to JSON text, with stand-ins if it fails without. Raises what `read` raises."""
    try:
        return read(data)
    except (BadRequestBody, *UNREADABLE):
        if (readable := with_stand_ins(bytes(data))) == data:
            raise
    return read(Raw(readable))


def decode_or_none(decoder: msgspec.json.Decoder[Decoded], data: Raw | bytes) -> Decoded | None:
    """Decode `data`, with stand-ins if needed; None if it is unreadable or of another type."""
    try:
        return read_mended(decoder.decode, data)
    except UNREADABLE:
        return None


def with_stand_ins(data: bytes) -> bytes:
    """Return JSON text with stand-ins for non-Unicode; unchanged if there is none, or if stand-ins occur already."""
    if _TAKEN.search(data):
        return data
    data = _ESCAPE.sub(lambda found: found[0] if found[1] is None else _escaped(int(found[1], 16)), data)
    try:
        data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="surrogateescape")
        data = _NO_UTF8.sub(lambda found: chr(ord(found[0]) - _SURROGATES + _STAND_INS), text).encode()
    return data.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, which model servers skip too


def without_stand_ins(data: bytes) -> bytes:
    """Return JSON text with the original bytes in place of stand-ins."""
    return _STAND_IN.sub(_original, data)


def without_surrogates(data: bytes) -> bytes:
    """Return JSON text that is not forwarded, with U+FFFD in place of non-Unicode."""
    data = data.decode(errors="replace").encode()
    if b"\\ud" not in data and b"\\uD" not in data and b"\xf4\x8f" not in data:
        return data
    return _STAND_IN.sub(lambda found: found[0] if found[1] is found[3] else b"\\ufffd", with_stand_ins(data))


def mended(text: str) -> str:
    """Return decoded text with U+FFFD in place of stand-ins; two halves of a surrogate pair become one character."""
    return text if text.isascii() else _IN_TEXT.sub(_mended, text)


def _escaped(surrogate: int) -> bytes:
    high, low = divmod(surrogate - _SURROGATES, _HALF)
    return b"\\u%04x\\u%04x" % (0xDBFE + high, 0xDC00 + low)


def _original(found: re.Match[bytes]) -> bytes:
    if found[1] is not None:
        return b"\\u%04x" % (_SURROGATES + (int(found[1], 16) - 0xDBFE) * _HALF + int(found[2], 16) - 0xDC00)
    return found[0] if found[3] is None else bytes([ord(found[3].decode()) - _BYTES])


def _mended(found: re.Match[str]) -> str:
    if found[1] is None:
        return _REPLACEMENT
    return chr(0x10000 + (ord(found[1]) - _STAND_INS) * _HALF + ord(found[2]) - _STAND_INS - _HALF)


def lenient_text(raw: Raw) -> str:
    """Return the text of a JSON string; empty for an absent or null member; the JSON text of any other value. Raises
    UNREADABLE: the string is not valid Unicode."""
    encoded = bytes(raw)
    text = TEXT.decode(encoded) if encoded.startswith(b'"') else encoded.decode()
    if encoded == b"null":
        return ""
    return mended(text) if b"\\udbf" in encoded or b"\xf4\x8f" in encoded else text


def text_or_empty(value: Any) -> str:
    """Return a decoded value if it is a string, else the empty string."""
    return value if isinstance(value, str) else ""


def with_content(raw: Raw | bytes, text: str, member: str = "content") -> Raw:
    """Set `member` of the JSON object `raw` to `text`; all else keeps its bytes."""
    return Raw(msgspec.json.encode(OBJECT.decode(raw) | {member: text}))


def is_string(raw: Raw | bytes) -> bool:
    """Return whether the JSON value `raw` is a string."""
    return bytes(memoryview(raw)[:1]) == b'"'


def is_list(raw: Raw | bytes) -> bool:
    """Return whether the JSON value `raw` is a list."""
    return bytes(memoryview(raw)[:1]) == b"["


def is_object(raw: Raw | bytes) -> bool:
    """Return whether the JSON value `raw` is an object."""
    return bytes(memoryview(raw)[:1]) == b"{"
