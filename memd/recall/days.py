"""Days as people and models read them: in this machine's time zone, with the weekday, in English and ISO 8601.

Rule: pure but for the time zone. Any number is some day: a clock or an import may have said anything.
"""

from __future__ import annotations

from datetime import date
from functools import lru_cache

_SECONDS_MAX = 253_402_128_000
"""The last but one day of the year 9999, so that every time zone can say it."""
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def day_of(at_us: int) -> date:
    """The day of a time in microseconds since the epoch."""
    return date.fromtimestamp(min(max(at_us, 0) // 1_000_000, _SECONDS_MAX))


def day_words(at_us: int) -> str:
    """`Tuesday 2026-11-03`: the day of a time in microseconds since the epoch."""
    return _words(day_of(at_us))


@lru_cache(maxsize=4096)
def _words(day: date) -> str:
    return f"{_WEEKDAYS[day.weekday()]} {day.isoformat()}"
