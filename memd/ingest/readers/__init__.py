"""Documents: files read into sections that know their headings, page or sheet.

Rule: a reader is a function of a path that yields `GivenSection`s in order and raises `BadDocument` with the reason.
All but text and short Markdown is read in a process of its own, whose memory and time are limited.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

SOURCE_CHARACTERS_MAX = 1_000
HEADINGS_MAX = 16


class GivenSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stretch of a document that is cut by itself: no chunk crosses two."""

    heading: Annotated[tuple[str, ...], Meta(max_length=HEADINGS_MAX)] = ()
    """The headings above it, the outermost first."""
    text: str = ""
    page: int | None = None
    sheet: str | None = None


class GivenDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file, read."""

    source: Annotated[str, Meta(min_length=1, max_length=SOURCE_CHARACTERS_MAX)]
    """Its path relative to its source's root, behind the root's name."""
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the file."""
    sections: tuple[GivenSection, ...]
    root: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")] = ""
    """Tells folders of one name apart: the first 16 digits of the BLAKE2b of the root's resolved path."""
    renamed_from: str | None = None
    """The source that it was, and is no longer."""


class GivenFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file, unread; in JSON its bytes are base64."""

    name: Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[^/\x00]+$")]
    content: bytes
