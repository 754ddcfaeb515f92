"""Days as people and models read them: in this machine's time zone, with the weekday, in English and ISO 8601.

Rule: pure except for the time zone. Any number maps to a day: clocks and imports give arbitrary times.
"""

from __future__ import annotations

from datetime import date
from functools import lru_cache

_SECONDS_MAX = 253_402_128_000
"""The last but one day of the year 9999, which is valid in every time zone."""
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def day_of(at_us: int) -> date:
    """Return the day of a time in microseconds since the epoch."""
    return date.fromtimestamp(min(max(at_us, 0) // 1_000_000, _SECONDS_MAX))


def day_words(at_us: int) -> str:
    """Return the day of a time in microseconds since the epoch as `Tuesday 2026-11-03`."""
    return _words(day_of(at_us))


@lru_cache(maxsize=4096)
def _words(day: date) -> str:
    return f"{_WEEKDAYS[day.weekday()]} {day.isoformat()}"
