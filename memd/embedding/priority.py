"""Requests go before background work that needs the same processor.

Rule: background work gives way between small steps; a request never waits for more than one such step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Priority:
    """Counts the requests that hold it. Thread-safe."""

    def __init__(self) -> None:
        self._released = threading.Condition()
        self._holders = 0

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

    def give_way(self) -> None:
        """Wait until no request holds it. Called by background work, never on the event loop."""
        with self._released:
            self._released.wait_for(lambda: self._holders == 0)
