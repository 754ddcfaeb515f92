"""Deadlines of connections: a server that is frozen, or a network that swallows what is sent, does not say so.

Rule: a statement ends. When its time is up, its connection is shut down from outside, and whoever waits for the answer
sees that it was lost. (The server's own limits help only while that can say something.)
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LOOK_SECONDS = 0.2


class ConnectionDeadlines:
    """Shuts connections down whose time is up. For any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: dict[int, tuple[float, Any]] = {}
        """By number: when the time of a connection is up."""
        self._number = 0
        self._has_thread = False

    @contextmanager
    def within(self, connection: Any, seconds: float) -> Iterator[None]:
        """Let a connection be used for so long at most while the block runs."""
        with self._changed:
            number = self._number = self._number + 1
            self._ends[number] = time.monotonic() + seconds, connection
            if not self._has_thread:
                threading.Thread(target=self._look, name="memd-deadlines", daemon=True).start()
                self._has_thread = True
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._ends.pop(number, None)

    def _look(self) -> None:
        while True:
            with self._changed:
                if not self._ends and not self._changed.wait(60.0) and not self._ends:
                    self._has_thread = False
                    return
                now = time.monotonic()
                for number, (end, connection) in list(self._ends.items()):
                    if end < now:
                        del self._ends[number]
                        _shut_down(connection)
            time.sleep(_LOOK_SECONDS)


def _shut_down(connection: Any) -> None:
    with suppress(Exception), socket.fromfd(connection.pgconn.socket, socket.AF_UNIX, socket.SOCK_STREAM) as same:
        same.shutdown(socket.SHUT_RDWR)
