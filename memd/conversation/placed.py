"""The blocks that stood in a topic's prompts, by their digests.

Rule: this is what tells memd's own block, which a client sends back, from text that only looks like one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from memd.conversation.events import PlacedBefore
from memd.messages import block_digest

PLACED_KEPT = 1024
"""Blocks that a topic remembers, 16 bytes each: a client that echoes them sends those of its whole history."""


class PlacedBlocks:
    """The latest blocks of one topic."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, text: str) -> bool:
        return block_digest(text) in self._digests

    def note(self, digests: Iterable[bytes]) -> None:
        """Remember blocks; beyond `PLACED_KEPT` the oldest are forgotten."""
        self._digests.update((digest, None) for digest in digests)
        while len(self._digests) > PLACED_KEPT:
            self._digests.popitem(last=False)

    def as_events(self) -> list[PlacedBefore]:
        """The journal that rebuilds it."""
        return [PlacedBefore(list(self._digests))] if self._digests else []
