"""Chunks that say exactly the same.

Rule: a pure question to a snapshot; columns find the candidates, and their entries are read to be sure.
"""

from __future__ import annotations

from memd.entries import Draft, Entry
from memd.errors import StoreError
from memd.store.log.columns import text_hash
from memd.store.snapshot import Snapshot


def live_copy(snapshot: Snapshot, draft: Draft) -> Entry | None:
    """Return the live chunk of the draft's kind that has exactly its text, said by the same roles; None if there is
    none. That of a note or document is also of its source. An entry that cannot be read does not count."""
    is_sourced = draft.kind != "turn"  # what was said is the same wherever it was imported from
    wanted = (draft.kind, is_sourced and draft.source, draft.displayed)
    for text in dict.fromkeys((draft.content, draft.displayed)):  # entries without `speakers` have the shown text
        for place in snapshot.live_places_of_text(text_hash(text)):
            try:
                entry = snapshot.read(place)
            except StoreError:
                continue
            if (entry.kind, is_sourced and entry.source, entry.displayed) == wanted:
                return entry
    return None
