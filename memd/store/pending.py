"""Chunks that are not in the log yet: text that was said and waits for its embedding.

Rule: a pending chunk has the uuid and the public id that it keeps in the log, so it can be shown and named in a
correction at once. Until the model has read it, it is found by its words and by the question table's vector of it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.entries import Draft, Entry
from memd.store.lexical.postings import ChunkTerms, SealedColumns, stream_of
from memd.store.log.columns import Records, digest_word, joined_records, rows_from
from memd.store.log.format import Span

_ARRAYS_BYTES = 1_500
"""Of the arrays of a run beside what they hold."""


class PendingChunk(msgspec.Struct, frozen=True):
    """A chunk before it is stored."""

    draft: Draft
    """To be stored, without its vector."""
    entry: Entry
    """How it is shown meanwhile; its ids in time are those of the moment at which it was cut."""
    vector: NDArray[np.float32]
    """The question table's of its text, (dimension,), so that it is found by meaning at once; zeros without a table."""


class PendingRun(tuple[PendingChunk, ...]):
    """Chunks that were said one after the other, in columns: what questions look for is made once, and not for each."""

    @classmethod
    def joined(cls, runs: Sequence[PendingRun], *, goes_on: bool = False) -> PendingRun:
        """All of them as one, without a look at each chunk. `goes_on`: each run follows the one before it."""
        filled = [run for run in runs if run]
        if len(filled) == 1:
            return filled[0]
        joined = cls(itertools.chain.from_iterable(filled))
        if filled:
            joined.columns = SealedColumns.joined([run.columns for run in filled])
            if goes_on:
                firsts = np.cumsum([len(run) for run in filled[:-1]])
                joined.columns = msgspec.structs.replace(joined.columns, follows=joined.columns.follows.copy())
                joined.columns.follows[firsts] = True
            joined.matrix = np.concatenate([run.matrix for run in filled])
            joined.records = joined_records([run.records for run in filled])
            joined.words = [words for run in filled for words in run.words]
        return joined

    @cached_property
    def uuids(self) -> frozenset[bytes]:
        """Of all of them."""
        return frozenset(chunk.entry.uuid for chunk in self)

    @cached_property
    def columns(self) -> SealedColumns:
        """Their words, tokens and neighbours."""
        entries = [chunk.entry for chunk in self]
        terms = [None if one.terms is UNSET else ChunkTerms.decoded(one.terms) for one in entries]
        tokens = [1 if one.line_tokens is UNSET else one.line_tokens for one in entries]
        streams = [stream_of(one) for one in entries]
        follows = np.array([False, *itertools.starmap(operator.eq, itertools.pairwise(streams))][: len(self)], np.bool_)
        shown = [() if one.shown is UNSET else one.shown for one in entries]
        return SealedColumns.of(terms, tokens, follows, shown, self.matrix)

    @cached_property
    def matrix(self) -> NDArray[np.float32]:
        """The vectors that the table gives, (n, dimension)."""
        return np.stack([chunk.vector for chunk in self])

    @cached_property
    def records(self) -> Records:
        """The columns that they would have in the log."""
        return rows_from([chunk.entry for chunk in self], [Span(0, 0)] * len(self))

    @cached_property
    def words(self) -> list[frozenset[int]]:
        """Of each, the `digest_word`s of the messages that it came from."""
        return [frozenset(map(digest_word, chunk.draft.digests)) for chunk in self]

    @property
    def columns_bytes(self) -> int:
        """Memory of the columns, once they were made; approximate."""
        made = self.columns.memory_bytes + self.matrix.nbytes if "columns" in self.__dict__ else 0
        return made + (_ARRAYS_BYTES if made else 0)


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
