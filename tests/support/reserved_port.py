"""A port that nobody else is given while a test has not begun to listen on it, or has ceased to.

Rule: a number that was free a moment ago is not asked for: another test that runs at the same time may have it by now.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1: connections to it are refused until somebody who is told its number listens on it."""
    with socket.socket() as held:  # it never listens, so others may that set one of these options, as servers do
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        yield port
