"""Chunks that are not in the log yet: text that was said and waits for its embedding.

Rule: a pending chunk has the uuid and the public id that it keeps in the log, so it can be shown and named in a
correction at once. Until the model has read it, it is found by its words and by the question table's vector of it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.entries import Draft, Entry
from memd.store.lexical.postings import ChunkTerms, SealedColumns, stream_of
from memd.store.log.columns import Records, digest_word, joined_records, rows_from
from memd.store.log.format import Span

RUNS_JOINED = 64
"""In a group of them, on average."""
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


class SaidColumns(NamedTuple):
    """The messages that n chunks came from, in columns."""

    words: NDArray[np.uint64]
    """Their `digest_word`s."""
    chunks: NDArray[np.intp]
    """The chunk of each of these, ascending."""
    counts: NDArray[np.intp]
    """The number of each chunk's, (n,)."""

    @classmethod
    def of(cls, digests: Sequence[Sequence[bytes]]) -> SaidColumns:
        """Those of chunks with these digests of messages."""
        words = np.array([digest_word(digest) for some in digests for digest in some], np.uint64)
        counts = np.array([len(some) for some in digests], np.intp)
        return cls(words, np.repeat(np.arange(len(digests)), counts), counts)

    @classmethod
    def joined(cls, parts: Sequence[SaidColumns]) -> SaidColumns:
        """Those of several, one after the other."""
        counts = np.concatenate([part.counts for part in parts])
        return cls(np.concatenate([part.words for part in parts]), np.repeat(np.arange(len(counts)), counts), counts)

    def all_in(self, words: Collection[int]) -> NDArray[np.bool_]:
        """Whether all messages of a chunk, which has some, are among these, (n,)."""
        if not words:
            return np.zeros(len(self.counts), np.bool_)
        is_in = np.isin(self.words, np.array([*words], np.uint64))
        having = np.bincount(self.chunks[is_in], minlength=len(self.counts))
        return np.asarray((having == self.counts) & (having > 0), np.bool_)


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
            joined.said = SaidColumns.joined([run.said for run in filled])
            joined.uuids = frozenset().union(*(run.uuids for run in filled))
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
    def said(self) -> SaidColumns:
        """The messages that they came from."""
        return SaidColumns.of([chunk.draft.digests for chunk in self])

    @cached_property
    def ends_group(self) -> bool:
        """See `JoinedRuns`; not of an empty one."""
        return self[-1].entry.uuid[0] % RUNS_JOINED == 0

    @property
    def columns_bytes(self) -> int:
        """Memory of the columns, once they were made; approximate."""
        made = self.columns.memory_bytes + self.matrix.nbytes if "columns" in self.__dict__ else 0
        return made + (_ARRAYS_BYTES if made else 0)


class JoinedRuns:
    """Runs as one, of which only the groups are joined anew that have changed: under load thousands of runs wait, and
    with each request one comes and some go.

    A run ends its group if the uuid of its last chunk says so, so groups stay as they are while others come and go. Any
    thread may use it.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], tuple[Sequence[PendingRun], PendingRun]] = {}
        """By the identities of the runs, which are kept so that no others have these."""

    @property
    def memory_bytes(self) -> int:
        """Memory of what was joined, beside that of the runs; approximate."""
        return sum(one.columns_bytes for runs, one in self._groups.copy().values() if len(runs) > 1)

    def of(self, runs: Sequence[PendingRun]) -> PendingRun:
        """All chunks of these, which are not empty."""
        groups: list[list[PendingRun]] = [[]]
        for run in runs:
            groups[-1].append(run)
            if run.ends_group:
                groups.append([])
        known, self._groups = self._groups, {}
        found = [self._one(group, known) for group in groups if group]
        return self._one(found, known) if found else PendingRun()

    def _one(
        self, runs: Sequence[PendingRun], known: dict[tuple[int, ...], tuple[Sequence[PendingRun], PendingRun]]
    ) -> PendingRun:
        key = tuple(map(id, runs))
        _, one = self._groups[key] = known.get(key) or (runs, PendingRun.joined(runs))
        return one


class UnstoredText:
    """The text of a topic that was said and is not in its log, as of one moment; there is none."""

    is_partial = False
    """Some of it was left out of its chunks, because it was not cut yet."""

    def __bool__(self) -> bool:
        """Whether there is any; known at once."""
        return False

    def has_others_than(self, digests: Collection[bytes]) -> bool:
        """Whether there is text of other messages than these; known at once."""
        return False

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> PendingRun:
        """Its chunks. Called in a thread: text may be cut first.

        Args:
            but: digests of messages; what has no other messages is left out, and need not be cut.
            until: a `time.monotonic()` after which nothing more is cut: what was not cut by then is left out.
        """
        return PendingRun()


NOTHING_UNSTORED = UnstoredText()
