"""The order of a topic's log: what lies beside an entry, and up to where it was stored at a time.

Rule: pure questions to a snapshot; entries are read only where their columns do not tell.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from memd.entries import Entry, Status, WallTime
from memd.store.snapshot import Place, Snapshot


def beside(snapshot: Snapshot, place: Place, step: int) -> Place | None:
    """Return the place of the next entry of the log (`step` 1) or of the one before (-1); None at its ends."""
    segment_id, row = place[0], place[1] + step
    if 0 <= row < len(snapshot.views[segment_id].rows):
        return segment_id, row
    numbers = [number for number, view in snapshot.views.items() if len(view.rows)]
    at = bisect.bisect_left(numbers, segment_id) + step
    if not 0 <= at < len(numbers):
        return None
    return numbers[at], 0 if step > 0 else len(snapshot.views[numbers[at]].rows) - 1


def next_active(snapshot: Snapshot, place: Place) -> Place | None:
    """Return the place of the first entry behind this one that takes no chunk out; None if there is none."""
    for segment_id, view in snapshot.views.items():
        if segment_id >= place[0]:
            first = place[1] + 1 if segment_id == place[0] else 0
            found = np.flatnonzero(view.rows["status"][first:] != Status.DEPRECATED)
            if len(found):
                return segment_id, first + int(found[0])
    return None


def asked_by(snapshot: Snapshot, uuids: Iterable[bytes], mark: bytes) -> list[Entry]:
    """Return the group of entries that a request with this mark (`ChunkState.asked_by`) has appended, if it changed one
    of these chunks; empty if it did not.

    Raises:
        StoreError: an entry cannot be read.
    """
    own = (entry for uuid in uuids for entry in snapshot.history(uuid) if entry.asked_by == mark)
    one = next(own, None)
    place = None if one is None else snapshot.place(one.canonical_id)
    group: list[Entry] = []
    for step in (-1, 1):
        at = place if step == -1 or place is None else beside(snapshot, place, step)
        while at is not None and (entry := snapshot.read(at)).asked_by == mark:
            group.insert(0 if step == -1 else len(group), entry)
            at = beside(snapshot, at, step)
    return group


def id_upto(snapshot: Snapshot, moment: int) -> int:
    """Return the canonical_id up to which the topic was stored when the clock last showed a time; an id is itself.

    Raises:
        StoreError: an entry cannot be read.
    """
    if isinstance(moment, WallTime):
        for segment_id, view in reversed(list(snapshot.views.items())):
            after = int(view.rows["canonical_id"].searchsorted(moment, "right"))
            for row in reversed(after + np.flatnonzero(view.rows["is_ahead"][after:])):
                if snapshot.read((segment_id, int(row))).at <= moment:
                    return int(view.rows[row]["canonical_id"])
    return int(moment)


def id_before(snapshot: Snapshot, moment: int) -> int:
    """Return the canonical_id before which all is that was stored before a time; an id is itself. See `id_upto`."""
    return id_upto(snapshot, WallTime(moment - 1)) + 1 if isinstance(moment, WallTime) else int(moment)
