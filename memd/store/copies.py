"""Chunks that say exactly the same.

Rule: a pure question to a snapshot; columns find the candidates, and their entries are read to be sure.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memd.entries import ChunkState, Draft, Entry
from memd.errors import StoreError
from memd.store.log.columns import may_be_wanted, text_hash
from memd.store.snapshot import Place, Snapshot
from memd.wanted import Wanted

SINCE_MAX = 256
"""Chunks that are compared with a copy at most, the newest of those that came after it: in a segment with an index,
their vectors are read from disk."""


def live_copy(snapshot: Snapshot, draft: Draft) -> Entry | None:
    """Return the newest of `live_copies`; None if there is none. A note is a copy of its author's alone: of others' he
    need not know, nor have theirs stand for his."""
    copies = live_copies(snapshot, draft)
    return next((one for one in copies if draft.kind != "note" or one.author == draft.author), None)


def live_copies(snapshot: Snapshot, chunk: ChunkState) -> Iterator[Entry]:
    """Yield the live chunks of a chunk's kind that have exactly its text, said by the same roles, those that came last
    first. Those of a note or document are also of its source. An entry that cannot be read does not count."""
    is_sourced = chunk.kind != "turn"  # what was said is the same wherever it was imported from
    wanted = (chunk.kind, is_sourced and chunk.source, chunk.displayed)
    for text in dict.fromkeys((chunk.content, chunk.displayed)):  # entries without `speakers` have the shown text
        found = snapshot.live_places_of_text(text_hash(text))
        for place in sorted(found, key=lambda place: _origin(snapshot, place), reverse=True):
            try:
                entry = snapshot.read(place)
            except StoreError:
                continue
            if (entry.kind, is_sourced and entry.source, entry.displayed) == wanted:
                yield entry


def alike_since(snapshot: Snapshot, copy: Entry, cosine: float) -> list[Entry] | None:
    """Return the live chunks of a copy's kind that came after it and whose vectors are this near to its, of the newest
    `SINCE_MAX`, newest first; None if another model embedded the copy."""
    own = snapshot.place(copy.canonical_id)
    if own is None or (own[0] not in snapshot.indexed_segments and snapshot.views[own[0]].matrix is None):
        return None
    places: list[Place] = []
    for segment_id, rows in reversed(list(snapshot.rows_after(copy.origin_id))):
        view = snapshot.views[segment_id]
        records, dead = view.rows[rows.start :], view.dead[rows.start :]
        is_since = (records["origin_id"] > copy.origin_id) & may_be_wanted(records, Wanted(kinds=(copy.kind,)))
        newest = np.flatnonzero(is_since & ~dead)[::-1][: SINCE_MAX - len(places)]
        places += [(segment_id, rows.start + row) for row in newest.tolist()]
    near = {one for one, hit in snapshot.hits_at(copy.embedding[None], places).items() if hit.cosine >= cosine}
    entries = snapshot.read_many(near)
    return [entries[one] for one in places if one in entries]


def _origin(snapshot: Snapshot, place: Place) -> int:
    """The id with which the chunk of an entry began."""
    return int(snapshot.views[place[0]].rows[place[1]]["origin_id"])
