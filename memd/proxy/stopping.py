"""The signals that end the daemon: the first one lets it finish, a second Ctrl-C ends it at once.

Rule: nothing is lost by the second one but replies in flight; what was said is in the journal, as after `kill -9`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

AT_ONCE = (
    "memd: ended at once by a second Ctrl-C. Replies in flight were cut off; what was said before is kept, and the next"
    " start goes on from there.\n"
)
INTERRUPTED = 128 + signal.SIGINT
"""The exit code of shells for a program that Ctrl-C ended."""


class Signals:
    """Receives SIGINT and SIGTERM from now until the process ends; create it in the main thread, in the event loop.

    They are Python's own handlers and not the loop's, which go with the loop: Ctrl-C in the moment after it would be a
    traceback.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """`stop`: called in the loop, once."""
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._receive(number))

    def _receive(self, number: int) -> None:
        if not self._came:
            self._came = True
            if not self._loop.is_closed():  # else it ends already
                self._loop.call_soon_threadsafe(self._stop)
        elif number == signal.SIGINT:
            sys.stderr.flush()
            os.write(2, AT_ONCE.encode())
            os._exit(INTERRUPTED)
