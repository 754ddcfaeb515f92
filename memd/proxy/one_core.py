"""The threads that take turns on the interpreter, held on one core as long as nobody else wants it.

One of them runs at a time. Left to itself the system gives each a core of its own, so that each turn wakes a core that
sleeps and moves what the last one had in its cache: on one core eight clients get an eighth more answers a second
(bench/NOTES.md, 2026-11-26).

Rule: the model's threads and all others stay free, and so do child processes: what a held thread starts inherits its
core, and is let go at the next look. Whoever sets the cores of the process from outside (taskset, a cpuset) is obeyed.
Where others take part of the core and none is freer, nothing is held for a while, and nothing while memd is idle. Linux
only: elsewhere a thread cannot be told where to run.
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
LOOK_SECONDS = 1.0
IDLE_SHARE = 0.05
"""Of a core: a process that uses less is not looked after."""
OTHERS_MAX = 0.25
"""Of the core that is held: what other processes may take of it. One that could not leave it took half of the
throughput."""
APART_SECONDS = 30.0
"""For so long nothing is held after others wanted the core, or after it could not be done."""

ALL_CORES = range(4096)
"""The system takes those of them that there are."""
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

    def forget(self) -> None:
        """Begin anew: what they took meanwhile does not count."""
        self._busy = {}

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
        self._others = others or OthersUsage()
        self._apart_until = 0.0
        self._inherited: set[int] = set()
        """Cores that other threads may have from a held one."""
        self._ended = threading.Event()
        self._never_held = threading.Thread(target=self._ended.wait, name="memd-cores", daemon=True)
        self._never_held.start()

    async def tend(self) -> None:
        """Look each second while memd works, and let go while it does not, until cancelled."""
        used = 0.0
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                before, used = used, time.process_time()
                if used - before >= IDLE_SHARE * LOOK_SECONDS:
                    self.look(time.monotonic())
                else:
                    self._others.forget()
                    self.let_go()
        finally:
            self.let_go()
            self._ended.set()

    def look(self, now: float) -> None:
        """Hold the threads, move them, or let them go."""
        try:
            allowed, others = self._allowed(), self._others.since_last(now)
            known = {core: others[core] for core in allowed if core in others}
            core = None
            if now >= self._apart_until and len(known) > 1 and not self._is_put_elsewhere(allowed):
                core = core_to_hold(known, self.held)
                self._apart_until = now if core is not None else now + APART_SECONDS
            self._hold(core, allowed)
        except (OSError, ValueError, IndexError) as error:
            log.debug("memd's threads are not held on one core", extra={"error": error})
            self._apart_until = now + APART_SECONDS
            self.let_go()

    def let_go(self) -> None:
        """Hold nothing; where the system does not let that be done now, the next look tries again."""
        with suppress(OSError):
            self._hold(None, self._allowed())

    def _allowed(self) -> set[int]:
        """The cores of the process, whoever set them: where a held thread may be does not tell."""
        return os.sched_getaffinity(self._never_held.native_id or 0)

    def _is_put_elsewhere(self, allowed: set[int]) -> bool:
        """Whether somebody has set the cores of the event loop's thread alone."""
        return os.sched_getaffinity(self._loop_thread) not in (allowed, {self.held})

    def _hold(self, core: int | None, allowed: set[int]) -> None:
        """Put the threads on a core; None: on all that are allowed. There all others are put that inherited a core.

        Raises:
            OSError: the system does not tell the threads, or does not let them be put there.
        """
        if core is None and not self._inherited:
            return
        threads, names = _threads("self"), {one.native_id: one.name for one in threading.enumerate()}
        if not self._is_put_elsewhere(allowed):
            _put(self._loop_thread, core, allowed)
        self.held = core
        self._inherited |= set() if core is None else {core}
        ours = {one for one in threads if names.get(one, "").startswith(TAKING_TURNS)}
        late = [one for one in threads if one not in ours and one != self._loop_thread and self._has_inherited(one)]
        children = [one for parent in (self._loop_thread, *ours, *late) for one in _children(parent)]
        late += [one for child in children for one in _threads(child) if self._has_inherited(one)]
        for thread in (*ours, *late):
            with suppress(ProcessLookupError):  # it has ended
                _put(thread, core if thread in ours else None, allowed)
        if core is None and not late:
            self._inherited.clear()

    def _has_inherited(self, thread: int) -> bool:
        try:
            [core, *others] = os.sched_getaffinity(thread)
        except ProcessLookupError:
            return False
        return not others and core in self._inherited


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


def _put(thread: int, core: int | None, allowed: set[int]) -> None:
    """Put a thread on a core; None: on all that are allowed. Where that is all that the cpuset has, no limit is set, so
    that the thread also has what the cpuset gets later."""
    os.sched_setaffinity(thread, ALL_CORES if core is None else {core})
    if core is None and os.sched_getaffinity(thread) != allowed:
        os.sched_setaffinity(thread, allowed)


def _threads(process: str) -> list[int]:
    """The ids of a process' threads; none of one that has ended."""
    try:
        return [int(one.name) for one in Path(f"/proc/{process}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _children(thread: int) -> list[str]:
    """The processes that a thread started; none where the kernel does not tell."""
    try:
        return Path(f"/proc/self/task/{thread}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
