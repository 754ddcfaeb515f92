"""A caller's choice of chunks, by time, speaker, author, kind, source and words; and the times that callers name.

Rule: pure but for the time zone of this machine, which a time without one is in. A choice never falls back to
everything: what cannot be read is refused.
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
"""A canonical_id that stands for a time. Shorter numbers are dates (20261120), or a mistake: seconds, a year."""
_DATE = re.compile(r"[0-9-]+")


class Since(Moment):
    """The beginning of what is asked for: of a date its first moment."""


class Until(Moment):
    """The end of it: of a date its last one."""


class Selection(msgspec.Struct, frozen=True, omit_defaults=True):
    """The chunks that a caller wants; an empty field admits all."""

    since: int | None = None
    """Microseconds since the epoch from which on they were said, and before which."""
    until: int | None = None
    roles: tuple[str, ...] = ()
    """Who speaks in them: one of these at least."""
    kinds: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """From one of these, or below it: see `is_within`."""
    tags: tuple[str, ...] = ()
    """One of these at least."""
    contains: str = ""
    """Their text has this, in any case."""
    authors: tuple[str, ...] = ()
    """Whose they are: one of these principals'; the empty one stands for what has no author."""

    def __post_init__(self) -> None:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("`from` is not before `to`, so nothing can be between them")
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ValueError(f"there is no kind {unknown[0]!r:.40}; give {', '.join(KINDS)}")

    @property
    def reads_entries(self) -> bool:
        """Whether columns cannot tell which chunks are wanted, but their entries must be read."""
        return bool(self.contains or self.tags or self.authors)

    def admits_entry(self, entry: Entry) -> bool:
        """Whether the chunk of this entry is wanted."""
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
        """Whether a chunk with these is wanted."""
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
    """Whether a source is the one of this name or below it: a folder has files, a program (`chatgpt`) conversations."""
    name = name.rstrip("/")
    return source is not None and (source == name or source.startswith((f"{name}/", f"{name}:")))


def moment(text: str) -> Moment:
    """Return the canonical_id or the time that a text stands for. `text`: a canonical_id, or an ISO 8601 date (its end
    is meant) or time, in this machine's time zone if it names none. Raises ValueError: it is neither."""
    return Moment(text) if _ID.fullmatch(text) else _time(text, days=1)


def since(text: str) -> Since:
    """The same of a time that something was said at, and of a date the beginning."""
    return Since(text if _TIME_ID.fullmatch(text) else _time(text))


def until(text: str) -> Until:
    """The same, and of a date the end."""
    return Until(text if _TIME_ID.fullmatch(text) else _time(text, days=1))


def _time(text: str, days: int = 0) -> WallTime:
    try:
        then = datetime.fromisoformat(text) + timedelta(days=days if _DATE.fullmatch(text) else 0)
        return WallTime(then.timestamp() * 1e6)
    except (ValueError, OverflowError):  # OverflowError: the end of the year 9999
        how = "write it like 2026-11-20 or 2026-11-20T14:30"
        raise ValueError(f"{text[:60]!r} is no time; {how}") from None
