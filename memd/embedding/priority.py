"""Lets requests go before background work that needs the same processor.

Rule: background work asks between small steps; a request never waits for more than one such step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RightOfWay:
    """Counts the requests that are being worked for. Any thread."""

    def __init__(self) -> None:
        self._nobody = threading.Condition()
        self._requests = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While the block runs, background work stands back."""
        with self._nobody:
            self._requests += 1
        try:
            yield
        finally:
            with self._nobody:
                self._requests -= 1
                self._nobody.notify_all()

    def give(self) -> None:
        """Wait until there is no request. Called by background work, never on the event loop."""
        with self._nobody:
            self._nobody.wait_for(lambda: self._requests == 0)
