"""Requests, and other programs, take precedence over background work that needs the same processor.

Rule: background work runs in small steps and gives way between them: it waits for requests, and rests in proportion to
the time it waited for the processor. Under constant load it still gets a share of the time, so that everything is
stored. It gives way to nobody once too much is pending or somebody waits for it (`Priority.is_urgent`). Between steps
it also notices that the daemon ends.

The threads keep (nearly) the usual priority. A thread that the system runs only when idle (SCHED_IDLE) or rarely (nice
19) holds the interpreter's lock while it waits to run, and blocks all others. Beside two programs that took two cores,
an event loop stood still for up to 690 and 305 ms that way, and for 156 with a first form of this rule (77 without such
a thread).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

WAITS_MAX = 10.0
"""Background work waits for requests at most so many times as long as its last step: under constant load it gets an
eleventh of the time."""
QUIET_SECONDS = 0.03
"""Background work pauses for so long after a request, because the next request may follow soon and would wait for a
step."""
DELAYS = 4.0
"""Background work rests so many times as long as its last step waited for the processor: beside programs that take all
cores it takes about a tenth of one."""
WAIT_SECONDS_MAX = 1.0
NICENESS = 5
"""Niceness of indexing threads, which set the length of their steps: lower priority, but far from starving."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Priority:
    """Counts the requests that hold it. Thread-safe."""

    def __init__(self, *, is_awaited: bool = False) -> None:
        """`is_awaited`: somebody waits for all of the work, such as a command."""
        self._awaiting = int(is_awaited)
        self.is_pressed = False
        """So much is pending that it takes too much memory; the work then gives way to nobody."""
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
        """Mark background work as awaited while the block runs; it then gives way to nobody."""
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
        """True if background work gives way to nobody."""
        return self.is_pressed or self._awaiting > 0

    def for_background(self, given_up: Callable[[], Exception] | None = None) -> Background:
        """Return the object with which one background work gives way."""
        return Background(self, given_up or GivenUp)

    def wait(self, seconds: float) -> None:
        """Wait until no request has held the priority for a moment, at most so long. Never called on the event loop."""
        until = time.monotonic() + seconds
        with self._released:
            while not self.is_urgent and (left := until - time.monotonic()) > 0:
                quiet = self._released_at + QUIET_SECONDS - time.monotonic()
                if not self._holders and quiet <= 0:
                    break
                self._released.wait(left if self._holders else min(left, quiet))


class GivenUp(Exception):
    """Long work is aborted because the daemon ends."""


class Background:
    """One background work that gives way, in any threads, until it is aborted."""

    def __init__(self, priority: Priority, given_up: Callable[[], Exception]) -> None:
        """`given_up`: returns the error to raise when aborted."""
        self._priority = priority
        self._given_up = given_up
        self.has_ended = False
        self._resumed_at = time.monotonic()
        self._thread = threading.local()

    def end(self) -> None:
        """Abort it at its next step."""
        self.has_ended = True

    def go_on(self) -> None:
        """Raise the error if the work was aborted."""
        if self.has_ended:
            raise self._given_up()

    def give_way(self) -> None:
        """Wait while requests are being answered or others need the processor; called between two steps. Raises as
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
    """Lower the calling thread's priority; the initializer of an executor."""
    with suppress(OSError):  # only Linux has priorities per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _delayed_seconds() -> float:
    """Return how long this thread has been runnable without running; 0 if the system does not tell."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
