"""What keeps tests waiting and changes nothing that they see: background work that rests, lists that are looked at once
a second, and disks that are synced.

Rule: what memd does beside programs that take all cores is the matter of the tests that set `DELAYS` back. A process
that is killed loses nothing that it has written, synced or not; a power cut is played by `crash_files`, and the disk's
own errors are those of `SYNC`.
"""

import os

from memd.embedding import priority

DELAYS = priority.DELAYS
"""As users have it: background work that has waited to be run rests so many times as long."""
SYNC = os.fsync
"""The system's: with a thousand tests' files in its queue a disk takes longer than all that they do."""
LOOK_SECONDS = 0.1
"""Between two looks at what others have changed: tokens, and what a cluster erases. Users have one or two."""


def go_on_at_once() -> None:
    """In this process, and in those that are forked from it. Call it after `load_once`."""
    from memd.admin import tokens
    from memd.ingest import erasing
    from memd.proxy import relay

    priority.DELAYS = 0.0
    tokens.LOOK_SECONDS = erasing.LOOK_SECONDS = relay.LOOK_SECONDS = LOOK_SECONDS
    os.fsync = os.fstat  # type: ignore[assignment]  # which knows too what no descriptor is


def sync_again() -> None:
    """Where the calls on a disk are what is tried."""
    os.fsync = SYNC
