"""A question to the words of a topic: which chunks have them, and how much that says (BM25).

Rule: answers as of one moment, from any thread. tantivy keeps the postings and finds candidates; its BM25 has fixed
textbook parameters, so the candidates' scores are computed here from the terms that are stored with each chunk. Chunks
that the index has not taken in yet are looked at one by one, so that no question waits for a commit.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import tantivy

from memd.errors import CorruptFile, StoreWriteFailed
from memd.store.lexical.analyzer import query_terms

K1 = 0.9
B = 0.4
"""BM25; measured better on conversations than the textbook's 1.2 and 0.75."""
EXACT_WEIGHT = 3
"""As many words a rare identifier counts for; it is found by its parts besides."""
QUERY_TERMS_MAX = 64
"""Of a long question (a stack trace, pasted code) the rarest terms count."""
SLACK = 2
"""Candidates that are asked for per result: the order by tantivy's parameters differs from ours, and some are gone."""
KNOWN_WORDS_BYTES_MAX = 32 * 1024 * 1024
"""Of words that are kept in memory: about 30,000 chunks."""
_ENTRY_BYTES = 300
"""Of the key and the places of one chunk (measured with tracemalloc)."""

SCHEMA = (
    tantivy.SchemaBuilder()
    .add_unsigned_field("canonical_id", indexed=True, fast=True)
    .add_text_field("uuid", tokenizer_name="raw", index_option="basic")
    .add_text_field("terms", stored=True, tokenizer_name="terms", index_option="freq")
    .build()
)


class LexicalHit(msgspec.Struct, frozen=True):
    """What the words of a chunk have to do with those of a question."""

    canonical_id: int
    score: float
    """BM25; comparable within one question."""
    coverage: float
    """The share of the question's idf mass that the chunk has, 0 to 1: comparable between questions."""
    is_exact: bool
    """Whether the chunk has a rare identifier of the question as a whole."""


class _Term(NamedTuple):
    name: str
    spaced: str
    idf: float
    weight: float
    """What it counts in a score: no handful of common words outweighs a name."""
    is_exact: bool


class Words(NamedTuple):
    """The words of one chunk, as they are stored: one text, because a question looks for a handful of them and a table
    of all takes longer to make than to look for those.
    """

    text: str
    """All terms in order, each between two spaces of its own."""
    length: int
    """How many terms."""

    @classmethod
    def of(cls, names: Sequence[str]) -> Words:
        """The words of a chunk, given its terms."""
        return cls(f" {'  '.join(names)} ", len(names))

    @classmethod
    def stored(cls, text: str) -> Words:
        """The words of a chunk that were stored as `text`."""
        return cls(text, text.count("  ") + 1)

    def count(self, spaced: str) -> int:
        """How often the chunk has a term, given with a space before and after."""
        return self.text.count(spaced)


class KnownWords:
    """The words of the chunks that were looked at last, in all indexes of a store: what one question finds, the next
    one often finds again.
    """

    def __init__(self) -> None:
        self.bytes_held = 0
        self._known: dict[tuple[int, int], tuple[Words, int]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def of_one_index(self) -> KnownOfIndex:
        """A part that belongs to one index; of an index that is no more, it fades out."""
        return KnownOfIndex(self, next(self._numbers))

    def get(self, key: tuple[int, int]) -> Words | None:
        """The words of a chunk, if they are known."""
        known = self._known.get(key)
        return None if known is None else known[0]

    def keep(self, key: tuple[int, int], words: Words) -> None:
        """Know them from now on."""
        held = _ENTRY_BYTES + sys.getsizeof(words.text)
        with self._lock:
            if key in self._known:
                return
            self._known[key] = words, held
            self.bytes_held += held
            while self.bytes_held > KNOWN_WORDS_BYTES_MAX:
                _, dropped = self._known.pop(next(iter(self._known)))
                self.bytes_held -= dropped


class KnownOfIndex(NamedTuple):
    """What is known of one index."""

    known: KnownWords
    number: int

    def get(self, canonical_id: int) -> Words | None:
        """The words of a chunk, if they are known."""
        return self.known.get((self.number, canonical_id))

    def keep(self, canonical_id: int, words: Words) -> None:
        """Know them from now on."""
        self.known.keep((self.number, canonical_id), words)


class Question:
    """A question to the index as it was at one moment; any thread."""

    def __init__(
        self,
        searcher: tantivy.Searcher | None,
        text: str,
        *,
        mean_terms: float,
        known_words: KnownOfIndex,
        fresh: Mapping[int, Words],
    ) -> None:
        """Use `LexicalIndex.ask`.

        Args:
            searcher: the index; None: there is nothing in it.
            mean_terms: of the chunks in the index and of the fresh ones.
            fresh: canonical_id → words of the chunks that the index has not taken in.
        """
        self._searcher = searcher
        self._mean_terms = mean_terms
        self._known_words = known_words
        self._fresh = fresh
        weighed = [self._weighed(name, is_exact) for name, is_exact in query_terms(text).items()]
        weighed.sort(key=lambda term: -term.weight)
        self._terms = sorted(weighed[:QUERY_TERMS_MAX])  # sorted: sums do not depend on the question's order
        self._mass = sum(term.idf for term in self._terms)

    def best(self, k: int, counts: Callable[[int], bool] = lambda canonical_id: True) -> list[LexicalHit]:
        """The best `k` by score, ties by canonical_id, of those that `counts` says yes to.

        Raises:
            CorruptFile: the index cannot be read.
        """
        if not self._terms or k < 1:
            return []
        hits = {hit.canonical_id: hit for hit in self._best_indexed(k, counts)}
        hits |= {hit.canonical_id: hit for hit in self._fresh_hits(self._fresh) if counts(hit.canonical_id)}
        return sorted(hits.values(), key=lambda hit: (-hit.score, hit.canonical_id))[:k]

    def about(self, canonical_ids: Sequence[int]) -> dict[int, LexicalHit]:
        """The evidence for these chunks; those without any, or not in the index, are absent.

        Raises:
            CorruptFile: the index cannot be read.
        """
        if not self._terms or not canonical_ids:
            return {}
        hits, rest = [], []
        for one in canonical_ids:
            words = self._fresh.get(one) or self._known_words.get(one)  # of one chunk they never change
            if words is None:
                rest.append(one)
            elif (hit := self._hit(one, words)).score > 0:
                hits.append(hit)
        if self._searcher is not None and rest:
            query = tantivy.Query.term_set_query(SCHEMA, "canonical_id", rest)
            hits += [hit for hit in self._found(self._searcher, query, len(rest)) if hit.score > 0]
        return {hit.canonical_id: hit for hit in hits}

    def _best_indexed(self, k: int, counts: Callable[[int], bool]) -> list[LexicalHit]:
        if self._searcher is None:
            return []
        wanted = [
            (tantivy.Occur.Should, tantivy.Query.boost_query(_with_term(term.name), term.weight / term.idf))
            for term in self._terms
        ]
        query, limit = tantivy.Query.boolean_query(wanted), k * SLACK
        while True:
            found = self._found(self._searcher, query, limit)
            hits = [hit for hit in found if counts(hit.canonical_id)]
            if len(hits) >= k or len(found) < limit:
                return hits
            limit *= SLACK

    def _fresh_hits(self, canonical_ids: Iterable[int]) -> list[LexicalHit]:
        hits = (self._hit(one, self._fresh[one]) for one in canonical_ids)
        return [hit for hit in hits if hit.score > 0]

    def _weighed(self, name: str, is_exact: bool) -> _Term:
        spaced = f" {name} "
        count, having = len(self._fresh), sum(words.count(spaced) > 0 for words in self._fresh.values())
        if self._searcher is not None:
            with native("lexical"):
                count, having = count + self._searcher.num_docs, having + self._searcher.doc_freq("terms", name)
        rare = max(1, min(count // 2, max(3, count // 100)))
        idf = math.log1p((max(count, having) - having + 0.5) / (having + 0.5))
        counts_as_exact = is_exact and having <= rare
        return _Term(name, spaced, idf, idf * (EXACT_WEIGHT if counts_as_exact else 1), counts_as_exact)

    def _found(self, searcher: tantivy.Searcher, query: tantivy.Query, limit: int) -> list[LexicalHit]:
        with native("lexical"):
            addresses = [address for _, address in searcher.search(query, limit=limit, count=False).hits]
            ids = map(int, searcher.fast_field_values("canonical_id", addresses))  # type: ignore[arg-type]  # u64
            return [self._hit(one, self._words(searcher, one, at)) for one, at in zip(ids, addresses, strict=True)]

    def _words(self, searcher: tantivy.Searcher, canonical_id: int, address: tantivy.DocAddress) -> Words:
        words = self._known_words.get(canonical_id)
        if words is None:
            words = Words.stored(searcher.doc(address)["terms"][0])
            self._known_words.keep(canonical_id, words)
        return words

    def _hit(self, canonical_id: int, words: Words) -> LexicalHit:
        slowdown = K1 * (1 - B + B * words.length / self._mean_terms)
        score = covered = 0.0
        has_exact = False
        for _, spaced, idf, weight, is_exact in self._terms:
            frequency = words.count(spaced)
            if frequency:
                score += weight * frequency * (K1 + 1) / (frequency + slowdown)
                covered += idf
                has_exact = has_exact or is_exact
        return LexicalHit(canonical_id, score, min(1.0, covered / self._mass) if self._mass else 0.0, has_exact)


@contextmanager
def native(name: str, *, writing: bool = False) -> Iterator[None]:
    """What tantivy raises, as one of ours; its PanicException is no Exception and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError | OSError | RuntimeError) and type(error).__name__ != "PanicException":
            raise
        kind = StoreWriteFailed if writing else CorruptFile
        raise kind(f"{name}: the lexical index cannot be used ({error}); it is built anew from the log") from error


def _with_term(name: str) -> tantivy.Query:
    return tantivy.Query.term_query(SCHEMA, "terms", name, index_option="freq")
