"""Lenient reading of JSON that others wrote.

Rule: a member of the wrong type counts as absent; only bytes that are not readable JSON raise, and nothing but
`UNREADABLE`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Raw

UNREADABLE = (ValueError, RecursionError)
"""What decoding untrusted JSON may raise: msgspec's and Unicode errors are ValueErrors; deep nesting is the other."""

Decoded = TypeVar("Decoded")
_string_decoder = msgspec.json.Decoder(str)


def decode_or_none(decoder: msgspec.json.Decoder[Decoded], data: Raw | bytes) -> Decoded | None:
    """`data` decoded; None if it is unreadable or of another type."""
    try:
        return decoder.decode(data)
    except UNREADABLE:
        return None


def lenient_text(raw: Raw) -> str:
    """A JSON string's text; empty for an absent or null member; any other value as its JSON text.

    Raises:
        UNREADABLE: the string is not valid Unicode.
    """
    encoded = bytes(raw)
    if encoded.startswith(b'"'):
        return _string_decoder.decode(encoded)
    return "" if encoded == b"null" else encoded.decode()


def text_or_empty(value: Any) -> str:
    """A decoded value if it is a string, else the empty string."""
    return value if isinstance(value, str) else ""


def is_string(raw: Raw | bytes) -> bool:
    """Whether the JSON value `raw` is a string."""
    return bytes(memoryview(raw)[:1]) == b'"'


def is_list(raw: Raw | bytes) -> bool:
    """Whether the JSON value `raw` is a list."""
    return bytes(memoryview(raw)[:1]) == b"["


def is_object(raw: Raw | bytes) -> bool:
    """Whether the JSON value `raw` is an object."""
    return bytes(memoryview(raw)[:1]) == b"{"
