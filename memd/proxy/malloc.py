"""The heap of a process that runs for months: the C library's is kept small, and Python's is looked through in pieces.

Rule: the C library is told only where it is known to listen (glibc), and never against the environment: whoever has
set `MALLOC_…` variables has reasons.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

ARENAS_MAX = 2
"""By default glibc has eight arenas per core. The daemon's threads pass what they made on to other threads, which free
it, and each arena keeps the holes; bench/NOTES.md has the growth with and without this."""
KEPT_BYTES_MAX = 131_072
"""What is larger is given back to the system when it is freed. glibc starts with this value and by itself raises it up
to 32 MB once a large block has been freed; setting it stops that."""


def keep_small() -> None:
    """Bound the heap's arenas and what it keeps of freed memory; before other threads are started."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUN")) for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_ARENA_MAX, ARENAS_MAX)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES_MAX)


def starting() -> None:
    """Look for no garbage while the daemon starts: nearly all that is made then stays."""
    gc.disable()


def started() -> None:
    """Look for garbage from now on, and only among what is made from now on.

    A pass over the 120,000 objects of the libraries takes 45 to 70 ms, for which a request may have to wait; one over
    what came later takes 3 (bench/NOTES.md, 2026-11-22).
    """
    gc.freeze()
    gc.enable()
