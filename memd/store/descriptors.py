"""Descriptors: how many a process may have, who gets them, and which appended files keep theirs between two writes.

Rule: the number of topics takes no descriptors. Files that are appended to keep theirs while they are among those used
last; connections get the other half of what there is; a reserve stays for all that is opened for a moment.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections import OrderedDict
from typing import Protocol

RESERVED = 64
"""For the process itself, which has about thirty, and for files that are read, written whole or indexed."""
KEPT_MIN, KEPT_MAX = 8, 1024
"""Appended files that stay open. To open one again takes some microseconds."""
PER_CONNECTION = 2
"""The client's, and the upstream's of the request that it waits for."""
CONNECTIONS_MIN = 8
_RAISED_MAX = 1 << 18
"""More is never used; some systems call a limit of a billion what has none."""
_ACCEPTED_MAX = 10_240
"""macOS takes no higher limit from a process, whatever it says that the hard one is."""
REMEDY = "allow more: `ulimit -n 4096` in the shell that starts memd, LimitNOFILE in a systemd unit"


def limit() -> int:
    """Return how many descriptors this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _RAISED_MAX if soft == resource.RLIM_INFINITY else min(soft, _RAISED_MAX)


def hard_limit() -> int:
    """Return how many descriptors this process may have once it has raised its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, _RAISED_MAX)


def raise_limit() -> int:
    """Raise the soft limit as far as the hard one allows, and return what it is now. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = hard_limit()
    for wanted in (highest, min(highest, _ACCEPTED_MAX)):
        if soft == resource.RLIM_INFINITY or wanted <= soft:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        except (ValueError, OSError):
            continue
    return limit()


def kept_open_max(descriptors: int) -> int:
    """Return how many appended files may stay open where there are so many descriptors."""
    return max(KEPT_MIN, min(KEPT_MAX, (descriptors - RESERVED) // 4))


def connections_max(descriptors: int) -> int:
    """Return for how many connections there is room beside the files."""
    return max(CONNECTIONS_MIN, (descriptors - RESERVED - kept_open_max(descriptors)) // PER_CONNECTION)


def told(error: OSError, remedy: str) -> str:
    """Return the reason of an error of the system and the remedy; where descriptors have run out, those of that."""
    reason = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"({reason}: the limit of this process is {limit()}); {REMEDY}"
    return f"({reason}); {remedy}"


class Suspendable(Protocol):
    """An open file that can give its descriptor back and get it again when it needs it."""

    def suspend(self) -> None:
        """Give the descriptor back."""


class KeptOpen:
    """The files that keep their descriptors, least recently used first. Any thread may use it."""

    def __init__(self, files_max: int) -> None:
        self._files_max = files_max
        self._files: OrderedDict[Suspendable, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def used(self, file: Suspendable) -> None:
        """Note that a file was used just now; suspend those beyond the limit. The caller holds no lock of a file."""
        with self._lock:
            self._files[file] = None
            self._files.move_to_end(file)
            surplus = [self._files.popitem(last=False)[0] for _ in range(len(self._files) - self._files_max)]
        for one in surplus:
            one.suspend()

    def forget(self, file: Suspendable) -> None:
        """Note that a file was closed."""
        with self._lock:
            self._files.pop(file, None)
