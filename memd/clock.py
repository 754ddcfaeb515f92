"""Time that goes on evenly, whatever is done to the clock of the machine.

Rule: whatever is compared with a time of before is dated here; the machine's own clock dates what people read and gives
the log its ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# It counts the time in which the machine slept, too. Linux has a clock of its own for that.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _ticks() -> float:
    return time.clock_gettime(_CLOCK)


_BEGUN = time.time() - _ticks()


def steady_now() -> float:
    """Seconds since the epoch by the machine's clock when this process began, and evenly from then on.

    Times of a former process may be ahead, where the clock was set back in between.
    """
    return _BEGUN + _ticks()


class Retries:
    """Works that have failed, and when each is tried again: the pause doubles with each failure in a row."""

    def __init__(self, first_seconds: float, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`first_seconds`, `most_seconds`: the pauses; `clock`: seconds."""
        self._first_seconds, self._most_seconds, self._clock = first_seconds, most_seconds, clock
        self._failures: dict[str, tuple[int, float]] = {}

    @property
    def waiting(self) -> set[str]:
        """The works that it is too early to try again."""
        return set(filter(self.is_early, [*self._failures]))

    def is_early(self, name: str) -> bool:
        """Whether it is too early to try a work again."""
        return self._clock() < self._failures.get(name, (0, 0.0))[1]

    def failed(self, name: str) -> float:
        """Note that an attempt failed; return the seconds until the next one."""
        failures = self._failures.get(name, (0, 0.0))[0] + 1
        pause = min(self._most_seconds, self._first_seconds * 2.0 ** min(failures - 1, 64))
        self._failures[name] = failures, self._clock() + pause
        return pause

    def succeeded(self, name: str) -> None:
        """Note that an attempt succeeded: the next failure is the first again."""
        self._failures.pop(name, None)


def shown_time(steady: float) -> float:
    """Seconds since the epoch, by the machine's clock as it is now, at which `steady_now` was that."""
    return time.time() - (steady_now() - steady)
