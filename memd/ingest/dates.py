"""The times that exported conversations give their messages.

Rule: pure. Programs name and write times in many ways; what cannot be read, or cannot be a time at which somebody wrote
to a machine, is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

_NAMES = ("said_at", "timestamp", "created_at", "createdAt", "create_time", "date", "time")
"""The members that are looked at, the best first."""
_EARLIEST_US, _LATEST_US = 315_532_800_000_000, 4_102_444_800_000_000
"""1980 and 2100: between them, and the scale of a number says whether it is seconds or a fraction of them. One before
them is a counter, or that of a machine without a clock."""
_SCALES_US = (1e6, 1e3, 1, 1e-3)
"""Microseconds to one second, millisecond, microsecond, nanosecond."""
_SECONDS_MAX = 1e11
_DATE_DIGITS = len("20251103")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Dating:
    """Reads the times of an export, and counts those that cannot be."""

    def __init__(self, latest_us: int = _LATEST_US) -> None:
        """`latest_us`: no message is from later than this; microseconds since the epoch."""
        self._latest_us = min(latest_us, _LATEST_US)
        self.refused = 0
        """Messages and conversations whose time was no time, in the future or before 1980."""

    def told_time(self, value: msgspec.Raw | bytes) -> int | None:
        """The time in microseconds since the epoch that an object of JSON gives for itself; None if it gives none."""
        try:
            members = _decoder.decode(value)
        except msgspec.MsgspecError:  # no object
            return None
        return self.first_time(msgspec.json.decode(members[name]) for name in _NAMES if name in members)

    def first_time(self, values: Iterable[Any]) -> int | None:
        """The first of some values of JSON that is a time, in microseconds since the epoch; None if none is."""
        named = [one for one in values if one not in (None, "")]
        times = map(_microseconds, named)
        found = next((at for at in times if at is not None and _EARLIEST_US < at <= self._latest_us), None)
        self.refused += found is None and bool(named)
        return found


def _microseconds(value: Any) -> int | None:
    try:
        if isinstance(value, str):
            is_number = len(value) > _DATE_DIGITS and value.replace(".", "", 1).isdecimal()
            return _scaled(float(value)) if is_number else round(_of_text(value) * 1e6)
        return _scaled(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError, OSError):  # no time; not a number; beyond what this machine's clock can say
        return None


def _scaled(number: float) -> int:
    place = next((place for place in range(len(_SCALES_US)) if number < _SECONDS_MAX * 1000**place), 0)
    return round(number * _SCALES_US[place])


def _of_text(text: str) -> float:
    """Seconds since the epoch of an ISO 8601 time; one without a zone is this machine's."""
    return datetime.fromisoformat(text.strip()).timestamp()
