"""Lenient decoding of untrusted JSON.

Rule: a member of the wrong type counts as absent; only unreadable bytes raise, and only `UNREADABLE`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Raw

UNREADABLE = (ValueError, RecursionError)
"""The errors of decoding untrusted JSON: msgspec's and Unicode errors are ValueErrors; deep nesting is the other."""

Decoded = TypeVar("Decoded")
_string_decoder = msgspec.json.Decoder(str)


def decode_or_none(decoder: msgspec.json.Decoder[Decoded], data: Raw | bytes) -> Decoded | None:
    """Decode `data`; None if it is unreadable or of another type."""
    try:
        return decoder.decode(data)
    except UNREADABLE:
        return None


def lenient_text(raw: Raw) -> str:
    """Return the text of a JSON string; empty for an absent or null member; the JSON text of any other value.

    Raises:
        UNREADABLE: the string is not valid Unicode.
    """
    encoded = bytes(raw)
    if encoded.startswith(b'"'):
        return _string_decoder.decode(encoded)
    return "" if encoded == b"null" else encoded.decode()


def text_or_empty(value: Any) -> str:
    """Return a decoded value if it is a string, else the empty string."""
    return value if isinstance(value, str) else ""


def is_string(raw: Raw | bytes) -> bool:
    """Tell whether the JSON value `raw` is a string."""
    return bytes(memoryview(raw)[:1]) == b'"'


def is_list(raw: Raw | bytes) -> bool:
    """Tell whether the JSON value `raw` is a list."""
    return bytes(memoryview(raw)[:1]) == b"["


def is_object(raw: Raw | bytes) -> bool:
    """Tell whether the JSON value `raw` is an object."""
    return bytes(memoryview(raw)[:1]) == b"{"
