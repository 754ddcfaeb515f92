"""How far a log reached when a file beside it was written: so a log that has lost entries since is noticed.

Rule: a log only grows, so it has at least as many entries up to a canonical_id as it had at any earlier time. Whoever
vouches for entries (the journal, the lexical index) keeps the extent of the log beside what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from memd.store.log.recovery import Finding


class LogExtent(msgspec.Struct, frozen=True, tag="log"):
    """The reach of a topic's log at one time."""

    upto: int
    """The canonical_id of its last entry; 0 if it had none."""
    entries: int
    """The number of entries, of whatever status."""


def ahead_of_log(path: Path, extent: LogExtent | None, count_upto: Callable[[int], int]) -> list[Finding]:
    """Return a finding if the log lacks entries that it had when the file at `path` was written, else none.

    Args:
        extent: of the log at that time; None: the file does not say.
        count_upto: returns the number of entries up to a canonical_id that the log has now.
    """
    missing = 0 if extent is None else extent.entries - count_upto(extent.upto)
    if extent is None or missing <= 0:
        return []
    are = "are" if missing > 1 else "is"
    message = (
        f"was written when the log had {extent.entries:,} entries; {missing:,} of them {are} missing now. The log is "
        "older than this file (a copy made while memd ran, a restored backup), or lost a part. "
        "If you have the newer log, stop memd and put it back; else what clients still send is stored again"
    )
    return [Finding("damaged", str(path), message)]
