"""Notes: text that somebody stores directly, without a chat.

Rule: pure. A note that cannot be stored as it was meant is refused. The error names the member and does not quote its
value, because it may be logged.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from memd.errors import BadNote
from memd.messages import with_line_feeds
from memd.selection import since

CHARACTERS_MAX = 1_000_000
"""Limit for a note's content, the length of a book. It is cut into chunks like any other text."""
NOTES_MAX = 100
"""Limit for one request."""
TITLE_CHARACTERS_MAX = 200
SOURCE_CHARACTERS_MAX = 1_000
TAGS_MAX = 32
TAG_CHARACTERS_MAX = 64
_SURROGATE = re.compile("[\ud800-\udfff]")  # never part of valid Unicode text
_LATEST_US = 4_102_444_800_000_000
"""The year 2100."""
AHEAD_US_MAX = 24 * 3600 * 1_000_000
"""The furthest that `said_at` may lie ahead of now: clocks and time zones differ by less."""
_MICROSECONDS_MIN = 100_000_000_000_000
"""The smallest number read as microseconds; a smaller one is in seconds or milliseconds, and would mean 1970."""


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A validated note."""

    content: str
    title: str = ""
    tags: tuple[str, ...] = ()
    said_at: int | UnsetType = UNSET
    """Microseconds since the epoch; UNSET: the time at which it is received."""
    source: str | None = None
    author: str = ""
    """The principal who wrote it; empty for the owner. Never taken from the client."""
    dated: bool = False
    """`said_at` was given."""


class GivenNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A note as clients write it; null is the same as absent."""

    content: Annotated[str, Meta(description="The fact or decision, in words that can stand alone.")]
    title: Annotated[str | None, Meta(description="What it is about; it is found by this too.")] = None
    tags: Annotated[tuple[str, ...] | None, Meta(description="Tags, by which searches can be narrowed.")] = None
    said_at: Annotated[
        str | int | None, Meta(description="When it was said: ISO 8601, or microseconds since the epoch. Default: now.")
    ] = None
    source: Annotated[str | None, Meta(description="Where it comes from: a URL, a path, a name.")] = None

    def checked(self, field: str = "") -> Note:
        """Return the validated note. `field`: prefix of member names in errors (`notes[2].`). Raises BadNote: it cannot
        be stored."""
        if not self.content.strip():
            raise BadNote(f"{field}content is empty; there is nothing to remember")
        if len(self.content) > CHARACTERS_MAX:
            size = f"{len(self.content):,} characters, and a note at most {CHARACTERS_MAX:,}"
            raise BadNote(f"{field}content has {size}; cut it up")
        if "\0" in self.content or _SURROGATE.search(self.content):
            raise BadNote(f"{field}content is no text: it has bytes of something else in it")
        tags = tuple(dict.fromkeys(_line(tag, TAG_CHARACTERS_MAX, f"{field}tags") for tag in self.tags or ()))
        if len(tags) > TAGS_MAX:
            raise BadNote(f"{field}tags has {len(tags)} tags; give {TAGS_MAX} at most")
        if not all(tags):
            raise BadNote(f"{field}tags has an empty tag; leave it out")
        return Note(
            with_line_feeds(self.content).strip("\n"),
            _line(self.title or "", TITLE_CHARACTERS_MAX, f"{field}title"),
            tags,
            UNSET if self.said_at is None else _time(self.said_at, f"{field}said_at"),
            _line(self.source or "", SOURCE_CHARACTERS_MAX, f"{field}source") or None,
            dated=self.said_at is not None,
        )


def checked_notes(given: tuple[GivenNote, ...], field: str = "notes") -> tuple[Note, ...]:
    """Return the validated notes of one request. Raises BadNote: one cannot be stored, or there are too many."""
    if len(given) > NOTES_MAX:
        raise BadNote(f"{field} has {len(given)} notes; send {NOTES_MAX} at most in one request")
    return tuple(note.checked(f"{field}[{position}].") for position, note in enumerate(given))


def check_not_ahead(note: Note, now_us: int, field: str = "") -> None:
    """Refuse a note from the future. `field`: as in `GivenNote.checked`. Raises BadNote: `said_at` is more than a day
    after `now_us`, in microseconds since the epoch."""
    if note.said_at is not UNSET and note.said_at > now_us + AHEAD_US_MAX:
        raise BadNote(f"{field}said_at is more than a day ahead; leave it out for now")


def _line(text: str, characters_max: int, field: str) -> str:
    text = text.strip()
    if len(text) > characters_max:
        raise BadNote(f"{field} has {len(text):,} characters; give {characters_max:,} at most")
    if not text.isprintable():
        raise BadNote(f"{field} is not one line of text")
    return text


def _time(given: str | int, field: str) -> int:
    if isinstance(given, int) and given < _MICROSECONDS_MIN:
        raise BadNote(f"{field} is no number of microseconds since 1970; write it like 2026-11-20T14:30")
    try:
        at = int(since(str(given)))
    except ValueError:
        raise BadNote(f"{field} is no time; write it like 2026-11-20T14:30") from None
    if not 0 <= at < _LATEST_US:
        raise BadNote(f"{field} is not between 1970 and 2100")
    return at
