"""Columns of chunks beside their vectors: word postings, token counts, and the chunks that answers had been shown.

Rule: computed when a chunk is stored and kept in its record (`Entry.terms`), so that a question reads columns and no
text. A term is the CRC-32 of a word's stem. Two words collide once in 200,000, which may change an order but loses no
chunk. Both kinds of columns answer the same two questions: which rows have a term, and its impact in each, which is
BM25 with the chunk's length but without the term's rarity, because rarity depends on the whole topic.

    Entry.terms:  | format u8 | length u16: terms with repetition | term u32 … | times u8 … |
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, reduce
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.assets import near_words_path
from memd.entries import Entry
from memd.store.lexical.analyzer import LANGUAGE_MARK, STEMMERS, analyze, analyze_query, in_languages

FORMAT = 1
"""Increase when `analyze` changes its terms: stored ones are then recomputed in the background."""
K1, B = 1.2, 0.5
"""BM25's parameters (Robertson and Zaragoza, 2009). B is lower than the usual 0.75: a chunk has at most 300 tokens, and
the one line of a tool result that answers a question is no worse for its neighbours. A sealed segment keeps the values
it was sealed with."""
TOKENS_MAX, LENGTH_MAX = 65_535, 65_535

Keys = NDArray[np.uint32]
"""Terms."""
Floats = NDArray[np.float32]
Rows = NDArray[np.intp]
Values = TypeVar("Values", bound=np.generic)


def grown(array: NDArray[Values]) -> NDArray[Values]:
    """Return the array with twice the rows. The new rows are lazily allocated zeros, because half of a column is empty
    just after it has grown."""
    larger = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


@lru_cache(maxsize=8192)
def key_of(term: str) -> int:
    """Return the key of a term."""
    return zlib.crc32(term.encode("utf-8", "surrogatepass"))


Stream = tuple[str, str | None, bytes]


def stream_of(entry: Entry) -> Stream:
    """Return the stream of text that a chunk was cut from: its kind and source; each note is a stream of its own.

    Neighbours never cross streams. All live conversations of a topic form one stream, because the log does not say
    which conversation an append belongs to.
    """
    note = entry.part.hash if entry.kind == "note" and entry.part is not UNSET else b""
    return entry.kind, entry.source, note


LANGUAGE_KEYS = {key_of(LANGUAGE_MARK + language): language for language in STEMMERS}


class ChunkTerms(NamedTuple):
    """The distinct terms of one chunk."""

    keys: Keys
    times: NDArray[np.uint8]
    length: int
    """Number of terms with repetition."""

    @classmethod
    def of(cls, text: str) -> ChunkTerms:
        """Analyze a text; about 0.1 ms for a chunk."""
        found = analyze(text)
        counts = Counter(map(key_of, found))
        times = np.minimum(np.fromiter(counts.values(), np.intp, len(counts)), 255).astype(np.uint8)
        return cls(np.fromiter(counts, np.uint32, len(counts)), times, min(len(found), LENGTH_MAX))

    @classmethod
    def of_record(cls, entry: Entry) -> ChunkTerms | None:
        """Decode the terms of an entry; None if it has none, or in another format."""
        data = entry.terms
        if data is UNSET or len(data) < 3 or data[0] != FORMAT or (len(data) - 3) % 5:
            return None
        count = (len(data) - 3) // 5
        keys = np.frombuffer(data, "<u4", count, 3)
        return cls(keys, np.frombuffer(data, np.uint8, count, 3 + 4 * count), int.from_bytes(data[1:3], "little"))

    def encoded(self) -> bytes:
        """Encode them for a record."""
        head = bytes([FORMAT]) + self.length.to_bytes(2, "little")
        return head + self.keys.astype("<u4").tobytes() + self.times.tobytes()


@lru_cache(maxsize=1024)
def encoded_terms(text: str) -> bytes:
    """Return the encoded terms of a text. Cached, so that the pending chunks of a long turn (some hundred) are analyzed
    only once."""
    return ChunkTerms.of(text).encoded()


_asked = lru_cache(maxsize=64)(analyze_query)


@lru_cache(maxsize=64)
def query_keys(text: str, languages: frozenset[str]) -> Keys:
    """Return the distinct terms of a question, stemmed as English and as each of these languages."""
    known = _asked(text)
    if not languages:
        return np.fromiter(map(key_of, known), np.uint32, len(known))
    return np.array(sorted({*map(key_of, (*known, *in_languages(text, languages)))}), np.uint32)


@lru_cache(maxsize=64)
def identifier_keys(text: str) -> Keys:
    """Return the terms of a question that are identifiers: names in code, versions, error codes, hashes."""
    found = [key_of(term) for term, is_exact in _asked(text).items() if is_exact]
    return np.array(found, np.uint32)


@cache
def _near_words() -> tuple[Keys, Keys, Floats]:
    with np.load(near_words_path()) as table:
        return table["terms"], table["near"], table["likeness"].astype(np.float32) / 255


def near_terms(keys: Keys) -> tuple[Keys, Floats]:
    """Return the terms of English words that mean nearly the same as these, (n, 3), and their likeness, 0 to 1; 0 where
    there is none. bench/near_words.py makes the table."""
    terms, near, likeness = _near_words()
    place = np.minimum(terms.searchsorted(keys), len(terms) - 1)
    return near[place], likeness[place] * (terms[place] == keys)[:, None]


def rarity(having: NDArray[np.intp], chunks: int) -> Floats:
    """Return the inverse document frequency of terms that occur in `having` of a topic's chunks; 0 if in none."""
    found = np.log(1 + np.maximum(chunks - having + 0.5, 0.5) / (having + 0.5))
    return np.where(having > 0, found, 0.0).astype(np.float32)


class Postings(NamedTuple):
    """Occurrences of some terms: parallel columns with one element per row and term."""

    rows: NDArray[np.uint32]
    impacts: Floats
    """BM25 without the term's rarity."""
    terms: Rows
    """Position of the term among those asked for."""
    left_out: list[int]
    """Positions of the terms that were skipped as too common."""

    @classmethod
    def joined(cls, found: Sequence[tuple[int, NDArray[np.uint32], NDArray[Any]]], left_out: list[int]) -> Postings:
        """Join (term position, rows, impacts) of several terms."""
        if not found:
            return cls(np.empty(0, np.uint32), np.empty(0, np.float32), np.empty(0, np.intp), left_out)
        terms, rows, impacts = zip(*found, strict=True)
        return cls(
            np.concatenate(rows), np.concatenate(impacts), np.repeat(terms, [len(one) for one in rows]), left_out
        )


class WordScores:
    """BM25 scores of the rows with any of the terms, for each part of a question."""

    def __init__(self, postings: Postings, weights: Floats, count: int) -> None:
        """`weights`: of each term in each part, (p, k); `count`: total number of rows."""
        self._has = np.zeros(count, np.bool_)
        self._has[postings.rows] = True
        self.rows: Rows = self._has.nonzero()[0]
        """The u rows with any of the terms, ascending."""
        self._place = np.empty(count, np.int32)
        self._place[self.rows] = np.arange(len(self.rows), dtype=np.int32)
        at = self._place[postings.rows]
        counted = [np.bincount(at, one[postings.terms] * postings.impacts, len(self.rows)) for one in weights]
        self.scores: Floats = (K1 + 1) * np.array(counted, np.float32)
        """(p, u)"""

    def at(self, rows: Rows) -> Floats:
        """Return the scores of some rows, (m, p)."""
        found = np.zeros((len(rows), len(self.scores)), np.float32)
        has = self._has[rows]
        found[has] = self.scores[:, self._place[rows[has]]].T
        return found


class GrowingColumns:
    """Columns of a growing segment. One thread adds rows; others read rows below a count that a snapshot published."""

    def __init__(self) -> None:
        self.count = 0
        self._postings: dict[int, bytearray] = {}
        """For each term, `row << 8 | times` as u32 for each row that has it; read with `copied`. There may be 100,000
        of these, and unlike arrays the garbage collector does not traverse bytearrays."""
        self._lengths = np.zeros(64, np.uint16)
        self._tokens = np.zeros(64, np.uint16)
        self._follows = np.zeros(64, np.bool_)
        self._stream: Stream | None = None
        """Stream of the last row."""
        self._shown_starts = np.zeros(65, np.uint32)
        self._shown = np.zeros(64, np.uint64)
        self.languages: frozenset[str] = frozenset()
        self.is_whole = True
        """Whether every record has its terms; those of an old version have none, or in another format."""
        self._sum: NDArray[np.float64] = np.zeros(1)
        self._summed = 0
        self.mean_sum: NDArray[np.float64] | None = None
        """Sum of the first `mean_count` vectors, a power of two, so that it rarely changes."""
        self.mean_count = 0
        self._length_sum = 0

    def extend(self, entries: Iterable[Entry | None]) -> None:
        """Add a row for each entry; None for an unreadable one."""
        added: list[tuple[int, ChunkTerms]] = []
        for entry in entries:
            row = self.count
            if row == len(self._lengths):  # readers keep the old arrays
                self._lengths, self._tokens = grown(self._lengths), grown(self._tokens)
                self._follows, self._shown_starts = grown(self._follows), grown(self._shown_starts)
            if entry is None:
                self._stream, self._shown_starts[row + 1], self.count = None, self._shown_starts[row], row + 1
                continue
            if (terms := ChunkTerms.of_record(entry)) is not None:
                added.append((row, terms))
            elif entry.content:
                self.is_whole = False
            self._tokens[row] = 0 if entry.line_tokens is UNSET else min(entry.line_tokens, TOKENS_MAX)
            # A later entry of a chunk (a correction) is not where its text was said, so it has no neighbours.
            stream = stream_of(entry) if entry.content and entry.origin_id == entry.canonical_id else None
            self._follows[row] = stream is not None and stream == self._stream
            self._stream = stream
            shown = () if entry.shown is UNSET else [int.from_bytes(uuid[:8], "big") for uuid in entry.shown]
            start, end = int(self._shown_starts[row]), int(self._shown_starts[row]) + len(shown)
            while end > len(self._shown):
                self._shown = grown(self._shown)
            self._shown[start:end], self._shown_starts[row + 1] = shown, end
            if entry.vector:
                self._sum = self._sum + entry.embedding
                self._summed += 1
                if self._summed & (self._summed - 1) == 0:
                    self.mean_sum, self.mean_count = self._sum, self._summed
            self.count = row + 1
        self._add_terms(added)

    def rows_with(self, keys: Keys) -> Rows:
        """Return the rows that have all of these terms."""
        return _in_all([copied(self._postings.get(key, _NONE)) >> np.uint32(8) for key in keys.tolist()])

    def has(self, row: int, keys: Keys) -> NDArray[np.bool_]:
        """Return whether a row has each of these terms."""
        found = [copied(self._postings.get(key, _NONE)) >> 8 for key in keys.tolist()]
        return np.array([bool((rows == row).any()) for rows in found], np.bool_)

    @property
    def tokens(self) -> NDArray[np.uint16]:
        """Raw tokens of each row's line; 0 if not counted yet."""
        return self._tokens[: self.count]

    @property
    def follows(self) -> NDArray[np.bool_]:
        """Whether each row continues the text of the row before it."""
        return self._follows[: self.count]

    @property
    def memory_bytes(self) -> int:
        """Approximate."""
        return 150 * len(self._postings) + 4 * 60 * self.count + 16 * self.count

    def having(self, keys: Keys) -> NDArray[np.intp]:
        """Return how many rows have each of these terms."""
        postings = self._postings
        return np.array([len(postings.get(key, b"")) // 4 for key in keys.tolist()], np.intp)

    def postings(self, keys: Keys, count: int, _: int) -> Postings:
        """Return the occurrences of these terms in the first `count` rows."""
        found = enumerate(map(self._postings.get, keys.tolist()))
        packed = [(term, copied(one)) for term, one in found if one is not None]
        if not packed:
            return Postings.joined((), [])
        every = np.concatenate([one for _, one in packed])
        rows, times = (every >> 8).astype(np.uint32), (every & 255).astype(np.float32)
        terms = np.repeat([term for term, _ in packed], [len(one) for _, one in packed])
        if not (known := rows < count).all():  # also one that is being added
            rows, times, terms = rows[known], times[known], terms[known]
        norm = K1 * (1 - B) + K1 * B * self.count / max(1, self._length_sum) * self._lengths[rows]
        return Postings(rows, times / (times + norm.astype(np.float32)), terms, [])

    def sealed(self) -> SealedColumns:
        """Return an immutable copy."""
        keys = np.fromiter(self._postings, np.uint32, len(self._postings))
        counts = np.fromiter(map(len, self._postings.values()), np.intp, len(keys)) // 4
        packed = np.frombuffer(b"".join(self._postings.values()), np.uint32)
        rows, times = (packed >> 8).astype(np.uint32), (packed & 255).astype(np.float32)
        end = int(self._shown_starts[self.count])
        return SealedColumns(
            *_postings(np.repeat(keys, counts), rows, times, self._lengths[: self.count].astype(np.float32)),
            self.tokens.copy(),
            self.follows.copy(),
            self._shown_starts[: self.count + 1].copy(),
            self._shown[:end].copy(),
            self._length_sum,
            self._sum,
            self._summed,
        )

    def shown(self, rows: Rows) -> tuple[Rows, NDArray[np.uint64]]:
        """Return the chunks that these rows had been shown: position in `rows`, and first half of the uuid, of each."""
        return _slices(self._shown, self._shown_starts, rows)

    def _add_terms(self, added: Sequence[tuple[int, ChunkTerms]]) -> None:
        """Add the terms of some rows, ascending. Grouped by term, because the cost is per term and not per row."""
        for row, terms in added:
            self._lengths[row] = max(1, terms.length)
            self._length_sum += terms.length
        counts = [len(terms.keys) for _, terms in added]
        if not sum(counts):
            return
        rows = np.repeat(np.array([row for row, _ in added], np.uint32), counts)
        keys, times = (
            np.concatenate(parts) for parts in zip(*((one.keys, one.times) for _, one in added), strict=True)
        )
        terms_once, starts, rows, times = _sorted(keys, rows, times)
        packed, bounds = (rows << np.uint32(8) | times).tobytes(), (4 * starts.astype(np.intp)).tolist()
        for key, start, end in zip(terms_once.tolist(), bounds, bounds[1:], strict=False):
            if (found := self._postings.get(key)) is None:
                found = self._postings[key] = bytearray()
                if key in LANGUAGE_KEYS:
                    self.languages |= {LANGUAGE_KEYS[key]}
            found += packed[start:end]


FEW_ROWS = 20


def main_language(columns: GrowingColumns) -> str | None:
    """Return the language of most rows, as `German`; None if that is English, or there are few rows."""
    found = dict(
        zip(LANGUAGE_KEYS.values(), columns.having(np.array([*LANGUAGE_KEYS], np.uint32)).tolist(), strict=True)
    )
    if columns.count < FEW_ROWS or 2 * sum(found.values()) <= columns.count:
        return None
    return STEMMERS[max(found, key=lambda one: found[one])].capitalize()


class SealedColumns(msgspec.Struct, frozen=True, eq=False):
    """Immutable columns of one or more sealed segments, concatenated."""

    terms: Keys
    """Distinct, ascending."""
    starts: NDArray[np.uint32]
    """Start of each term's postings, and the end of the last."""
    rows: NDArray[np.uint32]
    """Row of each posting, ascending within a term."""
    impacts: NDArray[np.uint8]
    """Impact of each posting, in 255ths of the maximum."""
    tokens: NDArray[np.uint16]
    follows: NDArray[np.bool_]
    shown_starts: NDArray[np.uint32]
    shown_uuids: NDArray[np.uint64]
    length_sum: int
    mean_sum: NDArray[np.float64]
    mean_count: int

    @classmethod
    def of(cls, entries: Iterable[Entry | None]) -> SealedColumns:
        """Compute the columns of these entries; None for an unreadable one."""
        growing = GrowingColumns()
        growing.extend(entries)
        return growing.sealed()

    @classmethod
    def joined(cls, parts: Sequence[SealedColumns]) -> SealedColumns:
        """Concatenate several; their impacts stay as they were."""
        firsts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        keys = np.concatenate([np.repeat(part.terms, part.starts[1:] - part.starts[:-1]) for part in parts])
        rows = np.concatenate([part.rows + np.uint32(first) for part, first in zip(parts, firsts, strict=False)])
        ends = np.cumsum([0, *(len(part.shown_uuids) for part in parts)])
        starts = [part.shown_starts[:-1] + np.uint32(end) for part, end in zip(parts, ends, strict=False)]
        return cls(
            *_sorted(keys, rows, np.concatenate([part.impacts for part in parts])),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.follows for part in parts]),
            np.concatenate([*starts, ends[-1:].astype(np.uint32)]),
            np.concatenate([part.shown_uuids for part in parts]),
            sum(part.length_sum for part in parts),
            sum((part.mean_sum for part in parts), np.zeros(1)),
            sum(part.mean_count for part in parts),
        )

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """Size of all columns."""
        return sum(one.nbytes for one in msgspec.structs.astuple(self) if isinstance(one, np.ndarray))

    @property
    def languages(self) -> frozenset[str]:
        """Languages of the rows that are not stemmed as English."""
        marks = np.array(list(LANGUAGE_KEYS), np.uint32)
        return frozenset(LANGUAGE_KEYS[key] for key in marks[self.having(marks) > 0].tolist())

    def having(self, keys: Keys) -> NDArray[np.intp]:
        """Return how many rows have each of these terms."""
        first, end = self._ranges(keys)
        return end - first

    def rows_with(self, keys: Keys) -> Rows:
        """Return the rows that have all of these terms."""
        return _in_all([self.rows[first:end] for first, end in zip(*self._ranges(keys), strict=True)])

    def postings(self, keys: Keys, _: int, postings_max: int) -> Postings:
        """Return the occurrences of these terms, rarest first, without the terms that would exceed `postings_max`."""
        first, end = self._ranges(keys)
        found: list[tuple[int, NDArray[np.uint32], NDArray[np.uint8]]] = []
        left, left_out = postings_max, list[int]()
        for term in (end - first).argsort(kind="stable").tolist():
            start, stop = int(first[term]), int(end[term])
            left -= stop - start
            if left < 0 and found:
                left_out.append(term)
            elif start < stop:
                found.append((term, self.rows[start:stop], self.impacts[start:stop]))
        joined = Postings.joined(found, left_out)
        return joined._replace(impacts=joined.impacts.astype(np.float32) / np.float32(255))

    def words_at(self, rows: Rows, keys: Keys, weights: Floats) -> Floats:
        """Return BM25 of some rows for each part, (m, p). `weights`: of each term in each part, (p, k)."""
        scores = np.zeros((len(rows), len(weights)), np.float32)
        for start, stop, weight in zip(*(one.tolist() for one in self._ranges(keys)), weights.T, strict=True):
            if start < stop:
                having = self.rows[start:stop]
                at = np.minimum(having.searchsorted(rows.astype(np.uint32)), stop - start - 1)
                has = having[at] == rows
                scores[has] += ((K1 + 1) / 255) * self.impacts[start + at[has], None] * weight
        return scores

    def has(self, row: int, keys: Keys) -> NDArray[np.bool_]:
        """See `GrowingColumns.has`."""
        ranges = zip(*(one.tolist() for one in self._ranges(keys)), strict=True)
        return np.array([bool((self.rows[start:stop] == row).any()) for start, stop in ranges], np.bool_)

    def shown(self, rows: Rows) -> tuple[Rows, NDArray[np.uint64]]:
        """See `GrowingColumns.shown`."""
        return _slices(self.shown_uuids, self.shown_starts, rows)

    def _ranges(self, keys: Keys) -> tuple[Rows, Rows]:
        """Return where the postings of each term begin and end."""
        if not len(self.terms):
            nothing = np.zeros(len(keys), np.intp)
            return nothing, nothing
        at = np.minimum(self.terms.searchsorted(keys), len(self.terms) - 1)
        first = self.starts[at].astype(np.intp)
        return first, np.where(self.terms[at] == keys, self.starts[at + 1].astype(np.intp), first)


_NONE = bytearray()


def copied(packed: bytearray) -> NDArray[np.uint32]:
    """Copy numbers from a buffer that another thread may append to. A bytearray cannot grow while numpy has a view of
    it, and numpy releases the GIL while copying; `bytes` does not."""
    return np.frombuffer(bytes(packed), np.uint32)


def _in_all(found: Sequence[NDArray[np.uint32]]) -> Rows:
    """Return the rows common to all of these lists; none if there is no list."""
    return reduce(np.intersect1d, found).astype(np.intp) if found else np.empty(0, np.intp)


def _postings(
    keys: Keys, rows: NDArray[np.uint32], times: Floats, lengths: Floats
) -> tuple[Keys, NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint8]]:
    """Group postings by term and compute their impacts; `lengths`: of each row."""
    mean = max(1.0, float(lengths.sum()) / max(1, int(np.count_nonzero(lengths))))
    impact = times / (times + K1 * (1 - B + B / mean * lengths[rows]))
    return _sorted(keys, rows, np.maximum(1, np.round(255 * impact)).astype(np.uint8))


def _sorted(
    keys: Keys, rows: NDArray[np.uint32], impacts: NDArray[np.uint8]
) -> tuple[Keys, NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint8]]:
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    firsts = np.flatnonzero(np.append(True, ascending[1:] != ascending[:-1]))[: len(keys)]
    return ascending[firsts], np.append(firsts, len(keys)).astype(np.uint32), rows[order], impacts[order]


def _slices(values: NDArray[np.uint64], starts: NDArray[np.uint32], rows: Rows) -> tuple[Rows, NDArray[np.uint64]]:
    first = starts[rows].astype(np.intp)
    counts = starts[rows + 1].astype(np.intp) - first
    if not (total := int(counts.sum())):
        return np.empty(0, np.intp), np.empty(0, np.uint64)
    owner = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, values[first[owner] + within]
