"""Chunks that are not in the log yet: text that was said and waits for its embedding.

Rule: a pending chunk has the uuid and the public id that it keeps in the log, so it can be shown and named in a
correction at once. It has no vector: until it is embedded it is found by its words alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Protocol

import msgspec

from memd.entries import Draft, Entry
from memd.store.lexical.terms import ChunkTerms, TermsTable


class PendingChunk(msgspec.Struct, frozen=True):
    """A chunk before it is stored."""

    draft: Draft
    """To be stored, without its vector."""
    entry: Entry
    """How it is shown meanwhile; its ids in time are those of the moment at which it was cut."""
    terms: ChunkTerms


class PendingRun(tuple[PendingChunk, ...]):
    """Chunks that were said one after the other. What questions look for among them is made once, and not for each."""

    @cached_property
    def uuids(self) -> frozenset[bytes]:
        """Of all of them."""
        return frozenset(chunk.entry.uuid for chunk in self)

    @cached_property
    def by_id(self) -> dict[int, PendingChunk]:
        """By canonical_id, in order."""
        return {chunk.entry.canonical_id: chunk for chunk in self}

    @property
    def joined_bytes(self) -> int:
        """Memory of what was made of them; approximate."""
        return self.terms.texts.memory_bytes if "terms" in self.__dict__ else 0

    @cached_property
    def terms(self) -> TermsTable:
        """Their terms."""
        return TermsTable.of({chunk.entry.canonical_id: chunk.terms for chunk in self})


class UnstoredText(Protocol):
    """The text of a topic that was said and is not in its log, as of one moment."""

    is_partial: bool = False
    """Some of it was left out of its chunks, because it was not cut yet."""

    def __bool__(self) -> bool:
        """Whether there is any; known at once."""

    def has_others_than(self, digests: Collection[bytes]) -> bool:
        """Whether there is text of other messages than these; known at once."""

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> Sequence[PendingRun]:
        """Its chunks, those that were said one after the other together. Called in a thread: text may be cut first.

        Args:
            but: digests of messages; what has no other messages is left out, and need not be cut.
            until: a `time.monotonic()` after which nothing more is cut: what was not cut by then is left out.
        """


class _Nothing(UnstoredText):
    def __bool__(self) -> bool:
        return False

    def has_others_than(self, digests: Collection[bytes]) -> bool:
        return False

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> Sequence[PendingRun]:
        return ()


NOTHING_UNSTORED: UnstoredText = _Nothing()
