"""Requests go before background work that needs the same processor.

Rule: background work gives way between small steps, so a request never waits for more than one such step; and where
requests leave it no gap it goes on all the same, with a share of the time (`WAITS_MAX`), so that everything is stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAITS_MAX = 3.0
"""How many times as long as its last step took a background work waits at most: under a load without gaps a quarter
of the time is its own."""
WAIT_SECONDS_MAX = 1.0


class Priority:
    """Counts the requests that hold it. Thread-safe."""

    def __init__(self) -> None:
        self._released = threading.Condition()
        self._holders = 0
        self.is_paused = False
        """No background work is to begin; what is under way goes on to its end."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the priority while the block runs; background work waits."""
        with self._released:
            self._holders += 1
        try:
            yield
        finally:
            with self._released:
                self._holders -= 1
                self._released.notify_all()

    def for_background(self) -> Background:
        """Return what one background work gives way with."""
        return Background(self)

    def wait(self, seconds: float) -> None:
        """Wait until no request holds it, at most so long. Never called on the event loop."""
        with self._released:
            self._released.wait_for(lambda: self._holders == 0, seconds)


class Background:
    """One work that gives way, in one thread at a time."""

    def __init__(self, priority: Priority) -> None:
        self._priority = priority
        self._resumed_at = time.monotonic()

    def give_way(self) -> None:
        """Wait while requests are being answered; called between two steps."""
        worked = time.monotonic() - self._resumed_at
        self._priority.wait(min(WAIT_SECONDS_MAX, WAITS_MAX * worked))
        self._resumed_at = time.monotonic()
