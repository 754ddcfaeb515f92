"""A clock that runs steadily even if the machine's clock is set, and back-off for retries.

Rule: times compared with earlier times come from here. The machine's own clock dates what people read and gives the log
its ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Includes time in which the machine slept; Linux has a separate clock for that.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _ticks() -> float:
    return time.clock_gettime(_CLOCK)


_BEGUN = time.time() - _ticks()


def steady_now() -> float:
    """Seconds since the epoch by the machine's clock at process start, advancing steadily since.

    Times of an earlier process may lie ahead if the clock was set back in between.
    """
    return _BEGUN + _ticks()


class Retries:
    """Back-off for failed tasks: the pause doubles with each consecutive failure."""

    def __init__(self, first_seconds: float, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`first_seconds`, `most_seconds`: shortest and longest pause; `clock`: returns seconds."""
        self._first_seconds, self._most_seconds, self._clock = first_seconds, most_seconds, clock
        self._failures: dict[str, tuple[int, float]] = {}

    @property
    def waiting(self) -> set[str]:
        """Names of the tasks that must not be retried yet."""
        return set(filter(self.is_early, [*self._failures]))

    def is_early(self, name: str) -> bool:
        """Return whether it is too early to retry a task."""
        return self._clock() < self._failures.get(name, (0, 0.0))[1]

    def failed(self, name: str) -> float:
        """Record a failure; return the seconds until the next attempt."""
        failures = self._failures.get(name, (0, 0.0))[0] + 1
        pause = min(self._most_seconds, self._first_seconds * 2.0 ** min(failures - 1, 64))
        self._failures[name] = failures, self._clock() + pause
        return pause

    def succeeded(self, name: str) -> None:
        """Record a success: the next failure counts as the first again."""
        self._failures.pop(name, None)


def shown_time(steady: float) -> float:
    """Convert a `steady_now` time to seconds since the epoch by the machine's present clock."""
    return time.time() - (steady_now() - steady)
