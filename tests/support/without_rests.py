"""What keeps tests waiting and changes nothing that they see: background work that rests, and disks that are synced.

Rule: what memd does beside programs that take all cores is the matter of the tests that set `DELAYS` back. A process
that is killed loses nothing that it has written, synced or not; a power cut is played by `crash_files`, and the disk's
own errors are those of `SYNC`.
"""

from __future__ import annotations

import os

from memd.embedding import priority

DELAYS = priority.DELAYS
"""As users have it: background work that has waited to be run rests so many times as long."""
SYNC = os.fsync
"""The system's: with a thousand tests' files in its queue a disk takes longer than all that they do."""


def go_on_at_once() -> None:
    """In this process, and in those that are forked from it."""
    priority.DELAYS = 0.0
    os.fsync = os.fstat  # type: ignore[assignment]  # which knows too what no descriptor is
