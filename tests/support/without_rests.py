"""Background work that does not rest for other programs: here those are other tests, and each waits for such work.

Rule: what memd does beside programs that take all cores is the matter of the tests that set `DELAYS` back.
"""

from __future__ import annotations

from memd.embedding import priority

DELAYS = priority.DELAYS
"""As users have it: background work that has waited to be run rests so many times as long."""


def go_on_at_once() -> None:
    """In this process, and in those that are forked from it."""
    priority.DELAYS = 0.0
