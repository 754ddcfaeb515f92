"""Lexical queries: which chunks of a topic contain a query's terms, scored by BM25.

Rule: a query answers as of one moment, from any thread. tantivy keeps the postings and finds candidates; its BM25 has
fixed textbook parameters, so scores are computed here from the terms that the index stores with each chunk. Chunks
that are not indexed yet are scored one by one, so that no query waits for a commit.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tantivy
from numpy.typing import NDArray

from memd.errors import CorruptFile, StoreWriteFailed
from memd.store.lexical.analyzer import LANGUAGE_MARK, analyze_query, in_languages
from memd.store.lexical.languages import STEMMERS
from memd.store.lexical.matching import JoinedTexts
from memd.store.lexical.terms import NO_TERMS, ChunkTerms, IndexTermsCache, TermsTable

K1 = 0.9
B = 0.4
"""Of BM25; measured better on conversations than the textbook's 1.2 and 0.75."""
EXACT_WEIGHT = 3
"""A rare identifier counts as much as this many words; its parts count besides."""
CHUNKS_MIN = 100
"""A smaller topic is taken for one of so many chunks: in three chunks, a word that none of them has would weigh five
times as much as a name that one has, and no chunk would cover half of a question."""
CLAUSES_CHARACTERS_MAX = 8_000
QUERY_TERMS_MAX = 64
"""Of a long query (a stack trace, pasted code) only the rarest terms count that some chunk has."""
TERMS_LOOKED_FOR_MAX = 500
"""Of a longer query (a pasted log) no term is looked for in chunks that are not indexed, but all that these have are
counted: 30,000 terms in 500 chunks would take seconds and a table of 120 MB."""
CLAUSE_MARGIN = 3.0
"""A clause counts by itself if its idf mass exceeds the logarithm of the number of chunks by this: were words spread by
chance, one topic in twenty would have a chunk with all of them."""
SLACK = 2
"""Candidates per result: tantivy orders them by other parameters, and some are dead."""
TERM_COUNTS_MAX = 50_000
"""Terms whose number of chunks is kept, from one update of the index to the next: where chunks were removed, tantivy
has to read all chunks of a term to count them (half a millisecond for a common one of 30,000 chunks)."""
EVERY_TEXT = "\0"
"""A term of every text, that no text can have: it tells how many tantivy counts that were removed."""
_CLAUSE_END = re.compile(r"[.!?;:,؟؛،۔।]\s|\n|[。！？、，]")

SCHEMA = (
    tantivy.SchemaBuilder()
    .add_unsigned_field("canonical_id", indexed=True, fast=True)
    .add_text_field("uuid", tokenizer_name="raw", index_option="basic")
    .add_text_field("terms", stored=True, tokenizer_name="terms", index_option="freq")
    .add_text_field("entities", tokenizer_name="raw", index_option="basic")
    .add_bytes_field("names", stored=True)
    .build()
)


class LexicalHit(msgspec.Struct, frozen=True, gc=False):
    """How well a chunk's terms match those of a query."""

    canonical_id: int
    score: float
    """BM25; comparable within one query."""
    coverage: float
    """The share of the query's idf mass that the chunk has, or of one clause's where that is more, 0 to 1: comparable
    between queries, long ones too."""
    is_exact: bool
    """Whether the chunk has a rare identifier of the query as a whole."""


class _QueryTerm(NamedTuple):
    name: str
    idf: float
    weight: float
    """In a score: a handful of common words must not outweigh a name."""
    is_exact: bool
    has_chunks: bool
    others: tuple[str, ...] = ()
    """The same word under the stems of other languages; a chunk has it under one of them."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return self.name, *self.others


class Postings:
    """The index at one moment, and how many of its chunks have which term. Any thread may use it."""

    def __init__(self, searcher: tantivy.Searcher, counts: Mapping[str, int] | None = None) -> None:
        """`counts`: what is known of this moment."""
        self.searcher = searcher
        self.chunks: int = searcher.num_docs
        self._counts = dict(counts or {})
        with native("lexical"):
            self._has_removed = searcher.doc_freq("terms", EVERY_TEXT) != self.chunks
            having = (one for one in STEMMERS if searcher.doc_freq("terms", LANGUAGE_MARK + one))
            self.languages = frozenset(having)
            """Those of the chunks."""

    def having(self, name: str) -> int:
        """Return how many chunks have a term; see TERM_COUNTS_MAX."""
        known = self._counts.get(name)
        if known is not None:
            return known
        with native("lexical"):
            found: int = self.searcher.doc_freq("terms", name)
            if found and self._has_removed:  # they are in that number until tantivy merges their files
                found = self.searcher.search(_with_term(name), limit=1, count=True).count  # type: ignore[attr-defined]  # it has it
        if len(self._counts) < TERM_COUNTS_MAX:
            self._counts[name] = found
        return found

    def names(self) -> dict[int, list[str]]:
        """Return the names in each chunk that has any, by canonical_id. Reads all chunks, 20 µs each."""
        return _documents(self.searcher, tantivy.Query.all_query(), self.chunks)

    def naming(self, keys: Iterable[str], limit: int) -> dict[str, dict[int, list[str]]]:
        """Return at most `limit` chunks that have each of these names (`entities.key_of`), with all their names."""
        queries = {key: tantivy.Query.term_query(SCHEMA, "entities", key, index_option="basic") for key in keys}
        return {key: _documents(self.searcher, query, limit) for key, query in queries.items()}

    def counts_after(self, added: Iterable[ChunkTerms], removed: Iterable[ChunkTerms]) -> dict[str, int]:
        """Return what is known of the terms once these chunks came and went."""
        counts = dict(self._counts)
        for change, chunks in ((1, added), (-1, removed)):
            for terms in chunks:
                for name in counts.keys() & terms.text.split():
                    counts[name] += change
        return counts


class LexicalQuery:
    """A query on the index as it was at one moment. Any thread may use it."""

    def __init__(
        self,
        postings: Postings | None,
        text: str,
        *,
        mean_terms: float,
        terms_cache: IndexTermsCache,
        fresh: TermsTable,
        stale: TermsTable = NO_TERMS,
    ) -> None:
        """Use `LexicalIndex.lexical_query`.

        Args:
            postings: of the index; None if nothing is indexed.
            mean_terms: mean number of terms of all live chunks.
            fresh: the terms of the chunks that are not indexed yet.
            stale: those of the indexed entries that later ones, not indexed yet, supersede.
        """
        self._postings = postings
        self._mean_terms = mean_terms
        self._terms_cache = terms_cache
        self._fresh, self._stale = fresh, stale
        self._count = len(fresh.chunks) - len(stale.chunks) + (0 if postings is None else postings.chunks)
        (forms, empty), known = in_languages(text, self._languages()), analyze_query(text).items()
        having = self._having(dict.fromkeys([*dict(known), *itertools.chain.from_iterable(forms.values())]))
        weighed = [self._weigh(name, is_exact, forms.get(name, ()), having) for name, is_exact in known]
        weighed = [term for term in weighed if term.has_chunks or term.name not in empty]  # else in another sense
        weighed.sort(key=lambda term: -term.weight)
        self._mass = sum(sorted(term.idf for term in weighed[:QUERY_TERMS_MAX]))  # sorted: sums depend on no order
        if len(weighed) > QUERY_TERMS_MAX:  # else the words of a long question that nobody said take all places
            weighed = [term for term in weighed if term.has_chunks]
        self._terms = sorted(weighed[:QUERY_TERMS_MAX])
        self._clauses = self._clause_masses(text)
        self._hits: dict[int, LexicalHit] = {}  # a wider search finds the same chunks again
        self._found: dict[tuple[int, ...] | None, tuple[int, dict[int, tantivy.DocAddress]]] = {}
        """The index's best, best first, by among which, with how many were looked for."""

    def best(
        self,
        k: int,
        wanted: Callable[[Sequence[int]], Container[int]] = lambda canonical_ids: canonical_ids,
        among: Sequence[int] | None = None,
        unwanted: int = 0,
    ) -> list[LexicalHit]:
        """Return the best `k` chunks by score; ties by canonical_id.

        Args:
            wanted: returns those of some chunks that may be among them; of each by itself.
            among: the canonical_ids of all indexed chunks that may be, where these are few.
            unwanted: how many may not be and match well; changes nothing but the time.

        Raises:
            CorruptFile: the index cannot be read.
        """
        if not self._terms or k < 1:
            return []
        hits = {hit.canonical_id: hit for hit in self._best_indexed(k, wanted, among, unwanted)}
        hits |= {hit.canonical_id: hit for hit in self._best_fresh(k, wanted)}
        return sorted(hits.values(), key=lambda hit: (-hit.score, hit.canonical_id))[:k]

    def hits_of(self, canonical_ids: Sequence[int]) -> dict[int, LexicalHit]:
        """Return hits for these chunks; those without a term of the query, or unknown here, are absent.

        Raises:
            CorruptFile: the index cannot be read.
        """
        if not self._terms or not canonical_ids:
            return {}
        fresh = [one for one in canonical_ids if one in self._fresh.chunks]
        canonical_ids = [one for one in canonical_ids if one not in self._fresh.chunks]
        known = self._terms_cache.get_many(canonical_ids)  # a chunk's terms never change
        rest = [one for one in canonical_ids if one not in known]
        if self._postings is not None and rest:
            addresses = _addresses(self._postings.searcher, _any_of(rest), len(rest))
            known |= _terms_at(self._postings.searcher, addresses, self._terms_cache)
        hits = [*self._hits_for(known), *self._fresh_hits(fresh)]
        return {hit.canonical_id: hit for hit in hits if hit.score > 0}

    def _best_indexed(
        self, k: int, wanted: Callable[[Sequence[int]], Container[int]], among: Sequence[int] | None, unwanted: int
    ) -> list[LexicalHit]:
        if self._postings is None or (among is not None and not among):
            return []
        limit, found, kept = k * SLACK, dict[int, tantivy.DocAddress](), wanted([])
        while True:
            if limit > len(found):  # as many at once as it is likely to take: a search finds what a smaller one finds
                found = self._indexed(limit * SLACK ** math.ceil(math.log(1 + unwanted / limit, SLACK)), among)
                kept = wanted(list(found))
            first = itertools.islice(found.items(), limit)
            places = {canonical_id: address for canonical_id, address in first if canonical_id in kept}
            if len(places) >= k or len(found) < limit:
                return self._hits_for(_terms_at(self._postings.searcher, places, self._terms_cache))
            limit *= SLACK

    def _indexed(self, limit: int, among: Sequence[int] | None) -> dict[int, tantivy.DocAddress]:
        key = None if among is None else tuple(among)
        looked_for, found = self._found.get(key, (0, dict[int, tantivy.DocAddress]()))
        if looked_for < limit and self._postings is not None:
            found = _addresses(self._postings.searcher, self._any_term(among), limit)
            self._found[key] = limit, found
        return found if len(found) <= limit else dict(itertools.islice(found.items(), limit))

    def _any_term(self, among: Sequence[int] | None) -> tantivy.Query:
        clauses = [
            (tantivy.Occur.Should, tantivy.Query.boost_query(_with_term(name), term.weight / term.idf))
            for term in self._terms
            for name in term.names
        ]
        query = tantivy.Query.boolean_query(clauses)
        if among is None:
            return query
        return tantivy.Query.boolean_query([(tantivy.Occur.Must, query), (tantivy.Occur.Must, _any_of(among))])

    def _languages(self) -> list[str]:
        indexed = frozenset() if self._postings is None else self._postings.languages
        return sorted(self._fresh.languages | indexed)

    def _weigh(self, name: str, is_exact: bool, forms: Sequence[str], having_each: Mapping[str, int]) -> _QueryTerm:
        count, having = self._count, having_each[name]
        others = {form: found for form in forms if (found := having_each[form])}
        having += sum(others.values())
        rare = max(1, min(count // 2, max(3, count // 100)))
        idf = math.log1p((max(count, having, CHUNKS_MIN) - having + 0.5) / (having + 0.5))
        counts_as_exact = is_exact and having <= rare
        weight = idf * (EXACT_WEIGHT if counts_as_exact else 1)
        return _QueryTerm(name, idf, weight, counts_as_exact, having > 0, tuple(others))

    def _having(self, names: Iterable[str]) -> dict[str, int]:
        """How many chunks have each of these terms."""
        having = {name: 0 if self._postings is None else self._postings.having(name) for name in names}
        for sign, table in ((1, self._fresh), (-1, self._stale)):
            if len(having) > TERMS_LOOKED_FOR_MAX:
                counts = Counter(name for terms in table.chunks.values() for name in set(terms.text.split()))
                having |= {name: count + sign * counts[name] for name, count in having.items()}
                continue
            found = table.texts.frequencies([[name] for name in having]) > 0
            for name, count in zip(having, np.count_nonzero(found, axis=1).tolist(), strict=True):
                having[name] += sign * count
        return having

    def _clause_masses(self, text: str) -> list[tuple[list[bool], float]]:
        """Of each clause of a longer query which of the terms it has, and their idf mass."""
        clauses = [part for part in _CLAUSE_END.split(text[:CLAUSES_CHARACTERS_MAX]) if part.strip()]
        if len(clauses) < 2:
            return []
        names = (analyze_query(part) for part in clauses)
        terms = [[term.name in found for term in self._terms] for found in names]
        least = math.log(max(self._count, CHUNKS_MIN)) + CLAUSE_MARGIN
        masses = ((has, sum(term.idf for term, is_in in zip(self._terms, has, strict=True) if is_in)) for has in terms)
        return [(has, mass) for has, mass in masses if least <= mass < self._mass]

    def _hits_for(self, chunks: Mapping[int, ChunkTerms]) -> list[LexicalHit]:
        """The hits of chunks, by canonical_id, in their order."""
        new = {canonical_id: terms for canonical_id, terms in chunks.items() if canonical_id not in self._hits}
        if new:
            texts = JoinedTexts.of([terms.text for terms in new.values()])
            columns = self._matched(texts, np.array([terms.length for terms in new.values()]))
            self._hits.update(zip(new, _hits(new, columns), strict=True))
        return [self._hits[canonical_id] for canonical_id in chunks]

    def _best_fresh(self, k: int, wanted: Callable[[Sequence[int]], Container[int]]) -> list[LexicalHit]:
        """The best `k` of the chunks that are not indexed; only these become hits: there may be thousands."""
        limit = k * SLACK
        while True:
            first = self._fresh_ranked[:limit]
            kept = wanted(first)
            best = [one for one in first if one in kept]
            if len(best) >= k or limit >= len(self._fresh_ranked):
                return self._fresh_hits(best[:k])
            limit *= SLACK

    def _fresh_hits(self, canonical_ids: Sequence[int]) -> list[LexicalHit]:
        rows = [self._fresh.rows[one] for one in canonical_ids]
        return _hits(canonical_ids, [column[rows] for column in self._fresh_columns])

    @cached_property
    def _fresh_ranked(self) -> list[int]:
        """The canonical_ids of those that have a term of the query, best first."""
        score, ids = self._fresh_columns[0], np.fromiter(self._fresh.chunks, np.int64)
        having = np.flatnonzero(score > 0)
        ranked: list[int] = ids[having[np.lexsort((ids[having], -score[having]))]].tolist()
        return ranked

    @cached_property
    def _fresh_columns(self) -> list[NDArray[Any]]:
        return self._matched(self._fresh.texts, self._fresh.lengths)

    def _matched(self, texts: JoinedTexts, lengths: NDArray[np.intp]) -> list[NDArray[Any]]:
        """Score, coverage and exactness of chunks, as `LexicalHit` has them; BM25 with a row for each term."""
        frequency = texts.frequencies([term.names for term in self._terms])
        is_in = frequency > 0
        slowdown = K1 * (1 - B + B * lengths / self._mean_terms)
        score, covered, has_exact = np.zeros(len(lengths)), np.zeros(len(lengths)), np.zeros(len(lengths), np.bool_)
        for row, term in enumerate(self._terms):  # one by one: sums depend on no order
            score += term.weight * frequency[row] * (K1 + 1) / (frequency[row] + slowdown)
            covered += term.idf * is_in[row]
            if term.is_exact:
                has_exact |= is_in[row]
        coverage = covered / self._mass if self._mass else covered
        for has, mass in self._clauses:
            part = np.zeros(len(lengths))
            for row in itertools.compress(range(len(has)), has):
                part += self._terms[row].idf * is_in[row]
            coverage = np.maximum(coverage, part / mass)
        return [score, np.minimum(1.0, coverage), has_exact]


def _hits(canonical_ids: Iterable[int], columns: Sequence[NDArray[Any]]) -> list[LexicalHit]:
    values = (column.tolist() for column in columns)
    return [LexicalHit(one, *told) for one, *told in zip(canonical_ids, *values, strict=True)]


def indexed_terms(
    postings: Postings | None, canonical_ids: Sequence[int], cache: IndexTermsCache
) -> dict[int, ChunkTerms]:
    """Return the terms of those of some entries that are in the index.

    Raises:
        CorruptFile: the index cannot be read.
    """
    if postings is None or not canonical_ids:
        return {}
    addresses = _addresses(postings.searcher, _any_of(canonical_ids), len(canonical_ids))
    return _terms_at(postings.searcher, addresses, cache)


def _addresses(searcher: tantivy.Searcher, query: tantivy.Query, limit: int) -> dict[int, tantivy.DocAddress]:
    """Canonical_id → address of what a query finds, best first by tantivy's own measure."""
    with native("lexical"):
        addresses = [address for _, address in searcher.search(query, limit=limit, count=False).hits]
        ids = map(int, searcher.fast_field_values("canonical_id", addresses))  # type: ignore[arg-type]  # u64
        return dict(zip(ids, addresses, strict=True))


def _terms_at(
    searcher: tantivy.Searcher, addresses: Mapping[int, tantivy.DocAddress], cache: IndexTermsCache
) -> dict[int, ChunkTerms]:
    """Canonical_id → terms of chunks by their addresses."""
    known = cache.get_many(addresses)
    with native("lexical"):
        for canonical_id, address in addresses.items():
            if canonical_id not in known:
                terms = known[canonical_id] = ChunkTerms.stored(searcher.doc(address)["terms"][0])
                cache.put(canonical_id, terms)
    return {canonical_id: known[canonical_id] for canonical_id in addresses}


def _documents(searcher: tantivy.Searcher, query: tantivy.Query, limit: int) -> dict[int, list[str]]:
    with native("lexical"):
        addresses = [address for _, address in searcher.search(query, limit=max(1, limit), count=False).hits]
        ids = map(int, searcher.fast_field_values("canonical_id", addresses))  # type: ignore[arg-type]  # u64
        names = (bytes(searcher.doc(address)["names"][0]).decode() for address in addresses)
        return {one: told.split("\n") for one, told in zip(ids, names, strict=True) if told}


@contextmanager
def native(name: str, *, writing: bool = False) -> Iterator[None]:
    """Raise tantivy's errors as ours; its PanicException is no Exception and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError | OSError | RuntimeError) and type(error).__name__ != "PanicException":
            raise
        kind = StoreWriteFailed if writing else CorruptFile
        raise kind(f"{name}: the lexical index cannot be used ({error}); it is rebuilt from the log") from error


def _any_of(canonical_ids: Iterable[int]) -> tantivy.Query:
    """The chunks with these ids: each looked up, for `term_set_query` goes through the dictionary in 0.3 ms."""
    ids = (tantivy.Query.term_query(SCHEMA, "canonical_id", one) for one in canonical_ids)
    return tantivy.Query.boolean_query([(tantivy.Occur.Should, query) for query in ids])


def _with_term(name: str) -> tantivy.Query:
    return tantivy.Query.term_query(SCHEMA, "terms", name, index_option="freq")
