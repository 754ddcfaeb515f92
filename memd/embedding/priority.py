"""Requests go before background work that needs the same processor, and so do other programs.

Rule: background work goes in small steps and gives way between them: to requests, which it waits for, and to whatever
else wants the processor, for as long as that kept it waiting. Under a load without gaps it goes on all the same, with a
share of the time, so that everything is stored, and beside everybody once too much waits or somebody waits for it
(`Priority.is_urgent`). Between two steps it also hears that the daemon ends.

The threads keep the usual class, or nearly. One that the system runs only when nobody else wants to (SCHED_IDLE), or
seldom (nice 19), holds the interpreter while it waits to be run, and everybody waits with it: beside two programs that
take two cores, an event loop stood still for up to 690 and 305 ms, and for 156 by a first form of this rule (77 without
any such thread).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

WAITS_MAX = 10.0
"""How many times as long as its last step took a background work waits for requests at most: under a load without gaps
an eleventh of the time is its own."""
QUIET_SECONDS = 0.03
"""A request that comes this soon behind another one finds nothing at work: a step that begins in the gap between two of
them would keep the second one waiting."""
DELAYS = 4.0
"""How many times as long as it waited to be run in its last step a background work rests: beside programs that take all
cores it takes about a tenth of one."""
WAIT_SECONDS_MAX = 1.0
NICENESS = 5
"""Of threads that work on indexes in steps of their own length: lower, and far from never."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Priority:
    """Counts the requests that hold it. Thread-safe."""

    def __init__(self, *, is_awaited: bool = False) -> None:
        """`is_awaited`: somebody waits for all of the work, as for that of a command."""
        self._awaiting = int(is_awaited)
        self.is_pressed = False
        """So much waits to be done that it takes too much memory: then the work gives way to nobody."""
        self._released = threading.Condition()
        self._holders = 0
        self._released_at = -QUIET_SECONDS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the priority while the block runs; background work waits."""
        with self._released:
            self._holders += 1
        try:
            yield
        finally:
            with self._released:
                self._holders -= 1
                self._released_at = time.monotonic()
                self._released.notify_all()

    @asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """While the block runs somebody waits for background work, which then gives way to nobody."""
        with self._released:
            self._awaiting += 1
            self._released.notify_all()
        try:
            yield
        finally:
            with self._released:
                self._awaiting -= 1

    @property
    def is_urgent(self) -> bool:
        """Whether background work gives way to nobody."""
        return self.is_pressed or self._awaiting > 0

    def for_background(self, given_up: Callable[[], Exception] | None = None) -> Background:
        """Return what one background work gives way with; see `Background`."""
        return Background(self, given_up or GivenUp)

    def wait(self, seconds: float) -> None:
        """Wait until no request has held it for a moment, at most so long. Never called on the event loop."""
        until = time.monotonic() + seconds
        with self._released:
            while not self.is_urgent and (left := until - time.monotonic()) > 0:
                quiet = self._released_at + QUIET_SECONDS - time.monotonic()
                if not self._holders and quiet <= 0:
                    break
                self._released.wait(left if self._holders else min(left, quiet))


class GivenUp(Exception):
    """Work that may take minutes is given up, because the daemon ends."""


class Background:
    """One work that gives way, in any threads, until it is given up."""

    def __init__(self, priority: Priority, given_up: Callable[[], Exception]) -> None:
        """`given_up`: the error with which it then ends."""
        self._priority = priority
        self._given_up = given_up
        self.has_ended = False
        self._resumed_at = time.monotonic()
        self._thread = threading.local()

    def end(self) -> None:
        """Give it up at its next step; it begins nothing any more."""
        self.has_ended = True

    def go_on(self) -> None:
        """Raise the error of work that was given up, if it was."""
        if self.has_ended:
            raise self._given_up()

    def give_way(self) -> None:
        """Wait while requests are being answered, or others want the processor; called between two steps. See
        `go_on`."""
        self.go_on()
        if self._priority.is_urgent:
            return
        worked, delayed = time.monotonic() - self._resumed_at, _delayed_seconds()
        delay = delayed - getattr(self._thread, "delayed", delayed)
        if rest := min(WAIT_SECONDS_MAX, DELAYS * delay):
            time.sleep(rest)
        self._priority.wait(min(WAIT_SECONDS_MAX, WAITS_MAX * worked))
        self._resumed_at, self._thread.delayed = time.monotonic(), _delayed_seconds()


def yield_to_others() -> None:
    """Give the calling thread less of the processor than others get; the initializer of an executor."""
    with suppress(OSError):  # a thread has a priority of its own on Linux alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _delayed_seconds() -> float:
    """How long this thread could run and was not run, since it was started; 0 where the system does not say."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
