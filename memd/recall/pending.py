"""The chunks of a topic that wait to be stored, as one question finds them.

Rule: they have words and neighbours only. No question looks at each of them, unless it asks for some alone: what it
looks for is kept with them (see `PendingRun`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from memd.entries import Entry
from memd.recall.times import Span
from memd.store.lexical.terms import TermsTable
from memd.store.pending import PendingChunk, PendingRun
from memd.store.snapshot import Place
from memd.store.store import Hit, Snapshot
from memd.wanted import EVERYTHING, Wanted

PENDING_SEGMENT = -1
"""In the places of chunks that are not stored yet; the row is their canonical_id."""


class Pending:
    """The chunks of a topic that are not in its log yet, each with a place that no stored one has."""

    def __init__(self, told: Sequence[PendingRun]) -> None:
        self._told = told
        self._chunks: dict[int, PendingChunk] = {}
        for run in told:
            self._chunks.update(run.by_id)
        self.terms = [run.terms for run in told if run]

    def __len__(self) -> int:
        return len(self._chunks)

    def keep(self, wanted: Wanted, snapshot: Snapshot) -> None:
        """Leave out chunks that are not wanted, and those that the log has meanwhile."""
        stored = snapshot.known([uuid for run in self._told for uuid in run.uuids])
        if not stored and wanted == EVERYTHING:
            return
        entries = ((canonical_id, chunk.entry) for canonical_id, chunk in self._chunks.items())
        kept = [one for one, entry in entries if entry.uuid not in stored and wanted.admits_entry(entry)]
        self._chunks = {one: self._chunks[one] for one in kept}
        self.terms = [TermsTable.of({one: chunk.terms for one, chunk in self._chunks.items()})]

    def places(self, canonical_ids: Iterable[int]) -> dict[int, Place]:
        """The places of those of some chunks that are pending."""
        return {one: (PENDING_SEGMENT, one) for one in canonical_ids if one in self._chunks}

    def entry(self, row: int) -> Entry:
        """The chunk in the form of an entry."""
        return self._chunks[row].entry

    def last(self, count: int) -> list[Place]:
        """The chunks that were said last, oldest first."""
        return [(PENDING_SEGMENT, one) for one in list(self._chunks)[-count:]]

    def said_in(self, span: Span) -> list[Place]:
        """The chunks that were said in that time, oldest first."""
        begin, end = span
        said = ((one, chunk.entry.said) for one, chunk in self._chunks.items())
        return [(PENDING_SEGMENT, one) for one, at in said if begin <= at < end]

    def beside(self, row: int) -> list[Place]:
        """The chunks said just before and after, as far as they are pending too."""
        run = next(run for run in self._told if row in run.by_id)
        ids = list(run.by_id)
        at = ids.index(row)
        return list(self.places([*ids[max(0, at - 1) : at], *ids[at + 1 : at + 2]]).values())

    def hits(self, places: Iterable[Place]) -> dict[Place, Hit]:
        """Hits without a cosine."""
        entries = {place: self.entry(place[1]) for place in places}
        return {
            place: Hit(entry.uuid, entry.canonical_id, math.nan, 1.0, 0.0, *place) for place, entry in entries.items()
        }
