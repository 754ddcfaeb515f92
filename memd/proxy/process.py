"""The daemon's process: the signals that end it, and its memory over months.

Rule: the first signal lets the daemon finish, a second Ctrl-C ends it at once; nothing is lost by that but replies in
flight, for what was said is in the journal, as after `kill -9`. malloc keeps little that is freed and is tuned only
where that works (glibc), never against the environment: whoever sets `MALLOC_…` variables has reasons. The garbage
collector scans little.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import platform
import signal
import sys
from collections.abc import Callable

from memd.embedding.loading import give_back_memory

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

ARENAS_MAX = 2
"""By default glibc has eight arenas per core. Blocks allocated in one thread of the daemon are freed in others, and
each arena keeps holes; bench/NOTES.md has the growth with and without this limit."""
KEPT_BYTES_MAX = 1 << 20
"""A larger block goes back to the system when it is freed. glibc starts with this threshold and raises it up to 32 MB
once a large block was freed; setting it stops that. A request of 200 KB is copied a dozen times:
with 128 KB here each request took 800 page faults and 2 ms of the kernel's time (bench/NOTES.md, 2026-11-25)."""


def keep_small() -> None:
    """Bound malloc's arenas and the freed memory that it keeps. Call it before other threads start."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUN")) for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_ARENA_MAX, ARENAS_MAX)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES_MAX)


def starting() -> None:
    """Switch the garbage collector off during the start: nearly everything that is allocated then stays."""
    gc.disable()


def started() -> None:
    """Switch the garbage collector on, for objects that are allocated from now on.

    A pass over the 120,000 objects of the libraries takes 45 to 70 ms, in which a request waits; one over later objects
    takes 1.5 ms: what is held by the thousand (entries, messages, terms) has no cycles and says `gc=False`, else it
    took as long again (bench/NOTES.md, 2026-11-22 and 2026-11-23).
    """
    give_back_memory()
    gc.freeze()
    gc.enable()


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
