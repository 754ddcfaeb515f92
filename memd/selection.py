"""A caller's selection of chunks, by time, speaker, author, kind, source and words; and the parsing of times.

Rule: pure, except that a time without a zone is in this machine's zone. Unreadable input is refused; it never selects
everything.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime, timedelta

import msgspec
from msgspec import UNSET

from memd.entries import KINDS, Entry, Moment, WallTime

_ID = re.compile(r"[0-9]{1,19}")
_TIME_ID = re.compile(r"[0-9]{16,19}")
"""A canonical_id given as a time. Shorter numbers are dates (20261120) or mistakes (seconds, a year)."""
_DATE = re.compile(r"[0-9-]+")


class Since(Moment):
    """The start of a period; a date means its first moment."""


class Until(Moment):
    """The end of a period; a date means its end."""


class Selection(msgspec.Struct, frozen=True, omit_defaults=True):
    """The chunks that a caller selects; an empty field admits all."""

    since: int | None = None
    """Start (inclusive) and end (exclusive) of the time said, in microseconds since the epoch."""
    until: int | None = None
    roles: tuple[str, ...] = ()
    """Speakers, of whom the chunk has at least one."""
    kinds: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Sources; a chunk is from one of them or from below it, see `is_within`."""
    tags: tuple[str, ...] = ()
    """Tags, of which the chunk has at least one."""
    contains: str = ""
    """Substring of the chunk's text, ignoring case."""
    authors: tuple[str, ...] = ()
    """Principals, one of whom is the chunk's author; the empty name selects chunks without an author."""

    def __post_init__(self) -> None:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("`from` is not before `to`, so nothing can be between them")
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ValueError(f"there is no kind {unknown[0]!r:.40}; give {', '.join(KINDS)}")

    @property
    def reads_entries(self) -> bool:
        """True if columns do not suffice to select, so that entries must be read."""
        return bool(self.contains or self.tags or self.authors)

    def admits_entry(self, entry: Entry) -> bool:
        """Return whether the entry's chunk is selected."""
        if self == EVERYTHING:
            return True
        tags = () if entry.tags is UNSET else entry.tags
        text, author = entry.displayed, entry.author or ""
        return self.admits(entry.said, entry.roles, entry.kind, entry.source, tags, text, author)

    def admits(
        self,
        said: int,
        roles: Collection[str],
        kind: str,
        source: str | None,
        tags: Collection[str],
        text: str,
        author: str = "",
    ) -> bool:
        """Return whether a chunk with these values is selected."""
        return (
            (self.since is None or self.since <= said)
            and (self.until is None or said < self.until)
            and (not self.roles or any(role in roles for role in self.roles))
            and (not self.kinds or kind in self.kinds)
            and (not self.sources or any(is_within(source, one) for one in self.sources))
            and (not self.tags or any(tag in tags for tag in self.tags))
            and (not self.authors or author in self.authors)
            and (not self.contains or self.contains.casefold() in text.casefold())
        )


EVERYTHING = Selection()


def is_within(source: str | None, name: str) -> bool:
    """Return whether a source has this name or lies below it, as a file in a folder or a conversation of a program."""
    name = name.rstrip("/")
    return source is not None and (source == name or source.startswith((f"{name}/", f"{name}:")))


def moment(text: str) -> Moment:
    """Return the canonical_id or time that a text means. `text`: a canonical_id, or an ISO 8601 date (its end) or time,
    in this machine's time zone if it has none. Raises ValueError: it is neither."""
    return Moment(text) if _ID.fullmatch(text) else _time(text, days=1)


def since(text: str) -> Since:
    """Like `moment`, but for times of `said_at`: a date means its beginning."""
    return Since(text if _TIME_ID.fullmatch(text) else _time(text))


def until(text: str) -> Until:
    """Like `since`, but a date means its end."""
    return Until(text if _TIME_ID.fullmatch(text) else _time(text, days=1))


def _time(text: str, days: int = 0) -> WallTime:
    try:
        then = datetime.fromisoformat(text) + timedelta(days=days if _DATE.fullmatch(text) else 0)
        return WallTime(then.timestamp() * 1e6)
    except (ValueError, OverflowError):  # OverflowError: the end of the year 9999
        how = "write it like 2026-11-20 or 2026-11-20T14:30"
        raise ValueError(f"{text[:60]!r} is no time; {how}") from None
