"""The threads that take turns on the interpreter, held on one core as long as nobody else wants it.

One of them runs at a time. Left to itself the system gives each a core of its own, so that each turn wakes a core that
sleeps and moves what the last one had in its cache: eight clients cost a quarter more processor so (bench/NOTES.md,
2026-11-26).

Rule: the model's threads and all others stay free, and so do child processes: what a held thread starts inherits its
core, and is let go at the next look. Whoever sets the cores of the process from outside (taskset, a cpuset) is obeyed.
Where others take part of the core and none is freer, nothing is held for a while. Linux only: elsewhere a thread cannot
be told where to run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")

TAKING_TURNS = ("memd-search", "memd-cut", "memd-write")
"""Beside the event loop's thread; the beginnings of their names."""
LOOK_SECONDS, IDLE_LOOK_SECONDS = 1.0, 5.0
IDLE_SHARE = 0.05
"""Of a core: a process that uses less is not looked after."""
OTHERS_MAX = 0.25
"""Of the core that is held: what other processes may take of it. One that could not leave it took half of the
throughput."""
APART_SECONDS = 30.0
"""For so long nothing is held after others wanted the core, or after it could not be done."""

_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)
"""Of a line of /proc/stat: user, nice, system, irq, softirq, and steal, the work of other virtual machines."""
_UTIME, _STIME, _CORE = 11, 12, 36
"""Fields of a thread's `stat` behind its name, see proc(5)."""


def core_to_hold(others: Mapping[int, float], held: int | None) -> int | None:
    """Return the core for the threads; None if others take much of each.

    Args:
        others: by core the share that other processes take.
        held: the core that the threads are on now.
    """
    if held is not None and others.get(held, 1.0) <= OTHERS_MAX:
        return held
    freest = min(others, key=others.__getitem__)
    return freest if others[freest] <= OTHERS_MAX else None


class OthersUsage:
    """The share of each core that other processes take."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._at = 0.0
        self._busy: dict[int, int] = {}
        self._used: dict[str, int] = {}

    def since_last(self, now: float) -> dict[int, float]:
        """Return the share of each core that others took since this was asked last; nothing the first time.

        What a thread of this process used is counted at the core where it was last.

        Raises:
            OSError, ValueError, IndexError: the system has no /proc, or not as Linux does.
        """
        lines = [line.split() for line in (self._proc / "stat").read_text().splitlines()]
        cores = [line for line in lines if line[0].startswith("cpu") and line[0] != "cpu"]
        busy = {int(line[0][3:]): sum(int(line[one]) for one in _BUSY_FIELDS) for line in cores}
        used: dict[str, int] = {}
        own: Counter[int] = Counter()
        for thread in (self._proc / "self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                used[thread.name] = int(fields[_UTIME]) + int(fields[_STIME])
                own[int(fields[_CORE])] += used[thread.name] - self._used.get(thread.name, 0)
        ticks = (now - self._at) * os.sysconf("SC_CLK_TCK")
        others = {one: (busy[one] - self._busy[one] - own[one]) / ticks for one in busy if one in self._busy}
        self._at, self._busy, self._used = now, busy, used
        return others


class OneCore:
    """The threads of this process that take turns. Create it in the event loop's thread."""

    def __init__(self, others: OthersUsage | None = None) -> None:
        self.held: int | None = None
        """The core that they are on alone."""
        self._loop_thread = threading.get_native_id()
        self._allowed = os.sched_getaffinity(0)
        self._others = others or OthersUsage()
        self._apart_until = 0.0

    async def tend(self) -> None:
        """Look each second while memd works, until cancelled; then nothing is held."""
        used, seconds = 0.0, LOOK_SECONDS
        try:
            while True:
                await asyncio.sleep(seconds)
                before, used = used, time.process_time()
                is_at_work = used - before >= IDLE_SHARE * seconds
                seconds = LOOK_SECONDS if is_at_work else IDLE_LOOK_SECONDS
                if is_at_work:
                    self.look(time.monotonic())
        finally:
            with suppress(OSError):
                self._hold(None)

    def look(self, now: float) -> None:
        """Hold the threads, move them, or let them go."""
        try:
            present = os.sched_getaffinity(self._loop_thread)
            if present != (self._allowed if self.held is None else {self.held}):
                self._allowed = present  # somebody else wants it so
                self._hold(None)
            others = self._others.since_last(now)
            known = {core: others[core] for core in self._allowed if core in others}
            is_wanted = now >= self._apart_until and len(known) > 1
            core = core_to_hold(known, self.held) if is_wanted else None
            self._hold(core)
            if is_wanted and core is None:
                self._apart_until = now + APART_SECONDS
        except (OSError, ValueError, IndexError) as error:
            log.debug("memd's threads are not held on one core", extra={"error": error})
            self._apart_until = now + APART_SECONDS
            with suppress(OSError):
                self._hold(None)

    def _hold(self, core: int | None) -> None:
        """Put the threads on a core; None: on all that are allowed. So is put who inherited the core.

        Raises:
            OSError: the system does not let the event loop's thread be put there.
        """
        former, wanted = {self.held} - {None}, self._allowed if core is None else {core}
        if core is None and not former:
            return
        os.sched_setaffinity(self._loop_thread, wanted)
        self.held = core
        ours = {one.native_id for one in threading.enumerate() if one.name.startswith(TAKING_TURNS)}
        ours.add(self._loop_thread)
        for thread in (*_threads("self"), *(thread for child in _children() for thread in _threads(child))):
            with suppress(OSError):  # it has ended
                if thread in ours:
                    os.sched_setaffinity(thread, wanted)
                elif os.sched_getaffinity(thread) in ({core}, former):
                    os.sched_setaffinity(thread, self._allowed)


@contextmanager
def on_one_core(tasks: Tasks, *, is_wanted: bool) -> Iterator[None]:
    """Have the threads of the process held while the block runs, where the system can. Called in the event loop."""
    if not (is_wanted and sys.platform == "linux"):
        yield
        return
    tending = tasks.spawn(OneCore().tend(), "one core")
    try:
        yield
    finally:
        tending.cancel()


def _threads(process: str) -> list[int]:
    """The ids of a process' threads."""
    with suppress(OSError):
        return [int(one.name) for one in Path(f"/proc/{process}/task").iterdir()]
    return []


def _children() -> Iterator[str]:
    """The processes that threads of this one started."""
    for thread in _threads("self"):
        with suppress(OSError):  # not every kernel tells
            yield from Path(f"/proc/self/task/{thread}/children").read_text().split()
