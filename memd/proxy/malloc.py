"""Memory of a process that runs for months: malloc keeps little that is freed, the garbage collector scans little.

Rule: malloc is tuned only where that works (glibc), and never against the environment: whoever sets `MALLOC_…`
variables has reasons.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform

from memd.embedding.resident import give_back_memory

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
