"""Headers as bytes: what one side sent is what the other side gets.

Rule: header values are text only while they are looked at; bytes that are no UTF-8 stay as they are (surrogateescape).
aiohttp writes headers as UTF-8 and drops what is none, so `keep_header_bytes` gives it another writer, for both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from aiohttp import http_writer
from multidict import CIMultiDict

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def keep_header_bytes() -> None:
    """Let this process write headers with the bytes that they were read with."""
    http_writer._serialize_headers = serialized


def serialized(status_line: str, headers: CIMultiDict[str]) -> bytes:
    """A head as bytes.

    Raises:
        ValueError: there is a control character in it, with which a header could end before its end.
    """
    lines = [status_line, *(f"{name}: {value}" for name, value in headers.items())]
    if any(map(_CONTROL.search, lines)):
        raise ValueError("a control character in a header")
    return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape")


def decoded(raw_headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """Headers as text, with their names spelled as on the wire."""
    return ((name.decode("latin-1"), value.decode(errors="surrogateescape")) for name, value in raw_headers)


def printable(text: str) -> str:
    """Text of an answer's head with spaces for control characters (RFC 9110 section 5.5)."""
    return _CONTROL.sub(" ", text)
