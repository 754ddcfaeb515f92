"""The parts that all topics of a store share.

Rule: there is one of each in a store.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from memd.entries import Draft, Entry
from memd.settings.model import DEFAULT_UTILITY, UtilitySettings
from memd.store.claim import Shelf
from memd.store.clock import SharedClock
from memd.store.disk import LocalDisk
from memd.store.log.format import ModelId

DraftFilter = Callable[[Draft], Draft]
"""Returns the draft to write in place of a draft: itself, or another one of the same chunk."""


def keep_draft(draft: Draft) -> Draft:
    """Return the draft unchanged."""
    return draft


class StoreShared(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that all topics of a store share."""

    files: LocalDisk
    shelf: Shelf
    model: ModelId
    clock: SharedClock
    segment_entries_max: int
    utility: UtilitySettings = DEFAULT_UTILITY
    draft_filter: DraftFilter = keep_draft
    """Applied to every draft of every topic: there is no other way into the log."""
    line_tokens: Callable[[Entry], int] | None = None
    """Counts `Entry.line_tokens`."""
