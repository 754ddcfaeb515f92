"""Time that goes on evenly, whatever is done to the clock of the machine.

Rule: whatever is compared with a time of before is dated here; the machine's own clock dates what people read and gives
the log its ids.
"""

from __future__ import annotations

import time

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


def pause_before_retry(failures: int, first_seconds: float, most_seconds: float) -> float:
    """Return the pause after so many failures in a row: doubled after each, up to `most_seconds`."""
    return min(most_seconds, first_seconds * 2.0 ** min(failures - 1, 64))


def shown_time(steady: float) -> float:
    """Seconds since the epoch, by the machine's clock as it is now, at which `steady_now` was that."""
    return time.time() - (steady_now() - steady)
