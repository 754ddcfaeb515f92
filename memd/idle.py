"""Threads that work only while nothing else wants the processor.

Rule: what must be done for later is done while nobody waits. Linux schedules such a thread only on a processor that is
idle (`SCHED_IDLE`, see sched(7)); elsewhere it has the lowest priority that a process may give itself.
"""

from __future__ import annotations

import contextlib
import os
import threading

NICENESS = 19


def yield_to_others() -> None:
    """Make the calling thread yield the processor to whatever else wants it; the initializer of an executor."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
            return
    with contextlib.suppress(OSError):  # a thread has a priority of its own on Linux alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
