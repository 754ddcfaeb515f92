"""The clock that gives the entries of all topics their ids.

Rule: ids ascend, whatever the clock of the machine does and however many threads ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from memd.entries import CanonicalClock


class SharedClock:
    """The clock of a store. Any thread may use it."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self.now_us = now_us
        self._clock = CanonicalClock(now_us)
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return the id of the next entry of any topic; strictly increasing."""
        with self._lock:
            return self._clock.next()

    def next_and_now(self) -> tuple[int, int]:
        """Return the id of the next entry, and the time in microseconds."""
        with self._lock:
            return self._clock.next_and_now()

    @property
    def last(self) -> int:
        """The highest id so far."""
        with self._lock:
            return self._clock.last

    def observe(self, canonical_id: int) -> None:
        """Keep later ids above this one."""
        with self._lock:
            self._clock.saw(canonical_id)
