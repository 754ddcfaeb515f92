"""The terms of chunks: of one as a text, of many in columns, and of those that were read last.

Rule: what a chunk's terms are never changes, so what is made of them is made once and kept.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.caching import ByteCache
from memd.store.lexical.analyzer import LANGUAGE_MARK
from memd.store.lexical.matching import JoinedTexts

TERMS_CACHE_BYTES_MAX = 32 * 1024 * 1024
"""The terms of about 30,000 chunks."""
_LANGUAGE_SPACED = f" {LANGUAGE_MARK}"
_ENTRY_BYTES = 300
"""Of the key and table entry of one chunk (measured with tracemalloc)."""


class ChunkTerms(msgspec.Struct, frozen=True, gc=False):
    """The terms of one chunk as one text: a query looks for a few of them (see matching.py), and makes no table."""

    text: str
    """All terms in order, each between two spaces of its own."""
    length: int
    """The number of terms."""

    @classmethod
    def of(cls, names: Sequence[str]) -> ChunkTerms:
        """Return the terms of a chunk, given in order."""
        return cls(f" {'  '.join(names)} ", len(names))

    @classmethod
    def stored(cls, text: str) -> ChunkTerms:
        """Return the terms of a chunk as the index stores them."""
        return cls(text, text.count("  ") + 1)

    @property
    def language(self) -> str | None:
        """The chunk's language, if it is none that has English stems."""
        return self.text[2:].partition(" ")[0] if self.text.startswith(_LANGUAGE_SPACED) else None


class TermsCache(ByteCache[tuple[int, int], ChunkTerms]):
    """The terms of the chunks that were read last, for all indexes of a store: queries often find the same chunks."""

    def __init__(self) -> None:
        super().__init__(TERMS_CACHE_BYTES_MAX)
        self._numbers = itertools.count()

    def for_index(self) -> IndexTermsCache:
        """Return the part of the cache for a new index; the entries of an old one age out."""
        return IndexTermsCache(self, next(self._numbers))


class IndexTermsCache(NamedTuple):
    """The part of the cache that belongs to one index."""

    cache: TermsCache
    number: int

    def get_many(self, canonical_ids: Iterable[int]) -> dict[int, ChunkTerms]:
        """Return the terms of those chunks that are cached."""
        keys = ((self.number, one) for one in canonical_ids)
        return {one: terms for (_, one), terms in self.cache.get_many(keys).items()}

    def put(self, canonical_id: int, terms: ChunkTerms) -> None:
        """Cache the terms of a chunk; the oldest entries make room, as to note each use takes longer than to read."""
        self.cache.put((self.number, canonical_id), terms, _ENTRY_BYTES + sys.getsizeof(terms.text))


class TermsTable:
    """The terms of some chunks in columns: what is looked through where no index answers."""

    def __init__(
        self, chunks: Mapping[int, ChunkTerms], texts: JoinedTexts, lengths: NDArray[np.intp], languages: frozenset[str]
    ) -> None:
        """Use `of` or `joined`."""
        self.chunks = chunks
        """By canonical_id, in the order of the columns."""
        self.texts = texts
        self.lengths = lengths
        """The number of terms of each, shape (n,)."""
        self.languages = languages
        """Those that the chunks tell."""

    @classmethod
    def of(cls, chunks: Mapping[int, ChunkTerms]) -> TermsTable:
        """Return the table of these chunks."""
        lengths = np.array([terms.length for terms in chunks.values()], np.intp)
        languages = frozenset(one for terms in chunks.values() if (one := terms.language) is not None)
        return cls(chunks, JoinedTexts.of([terms.text for terms in chunks.values()]), lengths, languages)

    @classmethod
    def joined(cls, tables: Sequence[TermsTable]) -> TermsTable:
        """Return all of them, at least one, as one, without a look at each chunk; none may be in two."""
        chunks: dict[int, ChunkTerms] = {}
        for table in tables:
            chunks.update(table.chunks)
        texts, languages = JoinedTexts.joined([one.texts for one in tables]), (one.languages for one in tables)
        lengths = np.concatenate([one.lengths for one in tables])
        return cls(chunks, texts, lengths, frozenset().union(*languages))

    @cached_property
    def rows(self) -> dict[int, int]:
        """The place of each chunk in the columns, by canonical_id."""
        return dict(zip(self.chunks, range(len(self.chunks)), strict=True))

    @property
    def length(self) -> int:
        """The number of terms of all."""
        return int(self.lengths.sum())


NO_TERMS = TermsTable.of({})
