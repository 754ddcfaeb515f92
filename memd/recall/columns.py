"""The candidates that a topic has for one question, in columns.

Rule: a few array operations per source, no loop over chunks. A *source* is a growing segment, an index over sealed
segments, or the pending chunks. Each contributes its nearest chunks by meaning and by words, and their neighbours.
Callers of this module do not see where a chunk is stored.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry
from memd.errors import ErasedMeanwhile, StoreError
from memd.recall.question import is_marked
from memd.recall.times import Span
from memd.selection import EVERYTHING, Selection
from memd.store.index.vectors import multipliers, products
from memd.store.lexical.analyzer import is_single_word, is_stopword
from memd.store.lexical.postings import (
    GrowingColumns,
    Keys,
    SealedColumns,
    WordScores,
    identifier_keys,
    near_terms,
    query_keys,
    rarity,
)
from memd.store.log.columns import digest_word, may_be_wanted
from memd.store.log.segment import PENDING_SEGMENT, GrowingSegment, PendingView, SegmentView, UnstoredText
from memd.store.snapshot import IndexView, Place, Snapshot, chosen

log = logging.getLogger("memd")

FOUND_MAX = 48
"""A part of the question finds so many chunks of a source by meaning, and as many by words; neighbours are added."""
POSTINGS_MAX = 60_000
"""Postings scored per question and source, rarest terms first. More common terms find no chunks by themselves, but
count for chunks found otherwise."""
IDENTIFIER_WEIGHT = 3
"""A whole identifier weighs as much as so many words; its parts count as well."""
NEAR_WEIGHT = 0.7
"""Weight of a word that means nearly the same as one that no chunk has, times their likeness."""
FEW_CHUNKS = 25
"""With so many chunks a topic's mean vector counts half: the mean of a few chunks mostly is those chunks."""
TELLING_WORDS, TELLING_MIN = 2, 0.25
"""The weight of a part without a question mark follows the rarity of its words, from TELLING_MIN up to 1 with
TELLING_WORDS of the rarest. So the first clause of "when all is done, report the code of the crane" weighs little."""
RARE_PAIR = 1.6
"""Two words are evidence if they are together as rare as so many words that one chunk has each: "tax adviser"."""
TOKEN_BYTES = 3
"""Bytes of a record per token of its line, to estimate the tokens of chunks in an old log that does not count them."""

_WORD = re.compile(r"[^\W\d_]+")
_SIGNS = " ?!.#:"
_AMID = re.compile(r"(?<=[^\W\d_] )[^\W\d_]+|(?<=[,;] )[^\W\d_]+")
"""Words that do not begin a sentence."""

Floats = NDArray[np.float32]
Bits = NDArray[np.bool_]
Rows = NDArray[np.intp]


class Searchable(Protocol):
    """A topic that can be searched: a live log, or a topic as of an earlier time."""

    @property
    def topic_id(self) -> str:
        """The topic's id."""

    def snapshot(self) -> Snapshot:
        """Return its content as of now."""

    def unstored(self) -> UnstoredText:
        """Return the text that is not in its log yet. Called on the event loop."""


class Terms(NamedTuple):
    """The k distinct terms of the p parts of a question, as a topic has them, with near ones of those no chunk has."""

    keys: Keys
    """(k,)"""
    rarity: Floats
    """Inverse document frequency, (k,); highest for a term that no chunk has."""
    asks: Bits
    """Which part has which term, (p, k)."""
    words: Bits
    """The same without what is a term in another language of the topic alone: one for each word, (p, k)."""
    weights: Floats
    """Weight of each term in each part, (p, k); 0 if neither it nor a near one is asked, or no chunk has it."""
    is_named: Bits
    """Parts that point to chunks by words alone, (p,): with an identifier (letters with digits or signs) that some
    chunk has, or of one word that a single chunk has."""


class WordCounts:
    """How many chunks of all topics that a question searches have each term: a word that is rare among all of them is
    rare in a topic of one chunk, too. Sources whose words are not computed yet do not count."""

    def __init__(self, columns: Sequence[GrowingColumns | SealedColumns]) -> None:
        self._columns = columns
        self._known: dict[bytes, Rows] = {}
        self.total = sum(one.count for one in columns)
        """The number of chunks."""

    def having(self, keys: Keys) -> Rows:
        """Return how many chunks have each term, (k,)."""
        if (known := self._known.get(asked := keys.tobytes())) is None:
            known = sum((one.having(keys) for one in self._columns), np.zeros(len(keys), np.intp))
            self._known[asked] = known
        return known


class ChunkSource:
    """Chunks stored in one place. Each has a label below n = `len(counts)`."""

    def __init__(self, columns: GrowingColumns | SealedColumns | None, counts: Bits, then: Sequence[Bits]) -> None:
        """
        Args:
            columns: None if its words have not been computed yet.
            counts: live chunks within the caller's selection, (n,).
            then: the same, limited to one time, for each time that the question names.
        """
        self.columns = columns
        self.counts = self.competes = counts
        self._then = then
        self._words: WordScores | None = None
        self._common: list[int] = []
        """Numbers of the terms too common to find chunks; see POSTINGS_MAX."""

    @cached_property
    def _choices(self) -> list[Bits]:
        """The competing chunks: all of them, and those of each time that the question names."""
        return [self.competes, *(self.competes & bits for bits in self._then)]

    @property
    def matrix(self) -> Floats | None:
        """All vectors, (n, dimension); None if only an index can be searched."""
        raise NotImplementedError

    @property
    def is_pending(self) -> bool:
        """Whether its vectors come from the table, because the model has not embedded the chunks yet."""
        return False

    def places(self, labels: Rows) -> tuple[Rows, Rows]:
        """Return the segments and rows of chunks."""
        raise NotImplementedError

    def column(self, name: str, labels: Rows) -> NDArray[Any]:
        """Return a column of the log for some chunks."""
        raise NotImplementedError

    def multipliers(self, labels: Rows | slice) -> Floats:
        """Return the multipliers from corrections."""
        raise NotImplementedError

    def vectors(self, labels: Rows) -> Floats:
        """Return the unit vectors of chunks, in the dimension of the model that wrote them."""
        return np.zeros((len(labels), 0), np.float32) if self.matrix is None else self.matrix[labels]

    def vectors_of(self, labels: Rows, dimension: int) -> Floats:
        """Return the unit vectors of chunks, (m, dimension); zeros if there is none, or only another model's."""
        found = self.vectors(labels)
        return found if found.shape[1] == dimension else np.zeros((len(labels), dimension), np.float32)

    def tokens(self, labels: Rows, dimension: int) -> Rows:
        """Return the raw tokens of each chunk's line; for an old log without counts, estimated from the record's
        size."""
        known = np.zeros(len(labels), np.intp) if self.columns is None else self.columns.tokens[labels].astype(np.intp)
        if known.all():
            return known
        lengths = self.column("length", labels).astype(np.intp) - 4 * dimension
        return np.where(known > 0, known, np.maximum(1, lengths // TOKEN_BYTES))

    def found(self, terms: Terms, vectors: Floats) -> Rows:
        """Return the chunks found by words or by vectors of parts, (p, dimension), and their neighbours, ascending."""
        some = [*self.worded(terms), *self.nearest(vectors)]
        return self.beside(np.concatenate(some)) if some else np.empty(0, np.intp)

    def nearest(self, vectors: Floats, most: int = FOUND_MAX) -> list[Rows]:
        """Return the `most` labels nearest to each vector, overall and for each named time. A small source may return
        dead ones too. Multipliers of corrections count, so that unhelpful chunks do not displace others."""
        if (matrix := self.matrix) is None or matrix.shape[1] != vectors.shape[1]:
            return []
        weighed = products(matrix, vectors) * self.multipliers(slice(None))
        found = itertools.product(weighed, self._choices)
        return [_best(np.where(bits, cosine, -np.inf), most) for cosine, bits in found]

    def worded(self, terms: Terms) -> list[Rows]:
        """Return the labels found by words; multipliers of corrections count."""
        if self.columns is None or not len(terms.keys):
            return []
        postings = self.columns.postings(terms.keys, len(self.counts), POSTINGS_MAX)
        words = self._words = WordScores(postings, terms.weights, len(self.counts))
        self._common = postings.left_out
        weighed = words.scores * self.multipliers(words.rows)
        found = []
        for score, bits in itertools.product(weighed, [one[words.rows] for one in self._choices]):
            best = _best(kept := np.where(bits, score, 0), FOUND_MAX)
            found.append(words.rows[best[kept[best] > 0]])
        return found

    def words(self, terms: Terms, labels: Rows) -> Floats:
        """Return BM25 of chunks for each part, (m, p); 0 for chunks without any of the terms."""
        if self._words is None:
            return np.zeros((len(labels), len(terms.weights)), np.float32)
        found = self._words.at(labels)
        if self._common and isinstance(self.columns, SealedColumns):
            found += self.columns.words_at(labels, terms.keys[self._common], terms.weights[:, self._common])
        return found

    def beside(self, labels: Rows) -> Rows:
        """Return these chunks and those stored just before and behind each, without dead ones, ascending."""
        found = np.zeros(len(self.counts) + 2, np.bool_)
        found[labels] = found[labels + 1] = found[labels + 2] = True
        return (found[1:-1] & self.counts).nonzero()[0]

    def follows(self, labels: Rows) -> Bits:
        """Return for each of these chunks, ascending, whether it continues the one before it in the list."""
        if self.columns is None:
            return np.zeros(len(labels), np.bool_)
        found: Bits = self.columns.follows[labels]
        found[1:] &= labels[1:] == labels[:-1] + 1
        found[:1] = False
        return found


class GrowingSource(ChunkSource):
    """A segment that still grows, or has no index yet."""

    def __init__(self, view: SegmentView, then: Sequence[SegmentView], visible: frozenset[int]) -> None:
        """`visible`: `digest_word`s of the messages in the prompt; chunks made only of these do not compete."""
        segment = view.segment
        assert isinstance(segment, GrowingSegment), "one that is scanned"
        super().__init__(segment.columns, ~view.dead, [~one.dead for one in then])
        self._view = view
        count = len(view.rows)
        if rows := [row for row in segment.rows_of_messages(visible) if row < count] if visible else []:
            self.competes = self.counts.copy()
            self.competes[rows] = False

    @property
    def matrix(self) -> Floats | None:
        """See `ChunkSource`; None if another model wrote the vectors."""
        return self._view.matrix

    def places(self, labels: Rows) -> tuple[Rows, Rows]:
        """See `ChunkSource`."""
        return np.full(len(labels), self._view.segment.segment_id), labels

    def column(self, name: str, labels: Rows) -> NDArray[Any]:
        """See `ChunkSource`."""
        return self._view.rows[name][labels]

    def multipliers(self, labels: Rows | slice) -> Floats:
        """See `ChunkSource`."""
        return multipliers(self._view.rows["utility_steps"][labels]).astype(np.float32)


class PendingSource(GrowingSource):
    """The pending chunks. Some may have been stored meanwhile and are in the log too; these are dropped from results,
    which is cheaper than checking all pending chunks."""

    def __init__(
        self,
        pending: PendingView,
        wanted: Selection,
        times: Sequence[Selection],
        visible: frozenset[int],
        snapshot: Snapshot,
    ) -> None:
        """`times`: those that the question names."""
        view: SegmentView = pending
        if wanted != EVERYTHING:
            dead = view.dead | ~may_be_wanted(view.rows, wanted)
            for row in np.flatnonzero(~dead).tolist():
                dead[row] = not wanted.admits_entry(pending.chunks[row].entry)
            view = dataclasses.replace(view, dead=dead)
        then = [dataclasses.replace(view, dead=view.dead | ~may_be_wanted(view.rows, one)) for one in times]
        super().__init__(view, then, visible)
        self._chunks, self._snapshot = pending.chunks, snapshot

    @property
    def is_pending(self) -> bool:
        """See `ChunkSource`."""
        return True

    def beside(self, labels: Rows) -> Rows:
        """See `ChunkSource`."""
        found = super().beside(labels)
        uuids = [self._chunks[row].entry.uuid for row in found.tolist()]
        known = self._snapshot.known(uuids)
        return found[[uuid not in known for uuid in uuids]]


class IndexSource(ChunkSource):
    """An index over sealed segments."""

    def __init__(self, view: IndexView, then: Sequence[IndexView], snapshot: Snapshot) -> None:
        super().__init__(view.index.columns, ~view.dead, [~one.dead for one in then])
        self._snapshot = snapshot
        self._views = [view, *then]
        self._index = view.index

    @property
    def matrix(self) -> Floats | None:
        """See `ChunkSource`; None if it is too large to be scanned."""
        return self._index.matrix

    def nearest(self, vectors: Floats, most: int = FOUND_MAX) -> list[Rows]:
        """See `ChunkSource`."""
        if self.matrix is not None or not len(vectors):
            return super().nearest(vectors, most)
        return [view.nearest(vectors, most) for view in self._views]

    def vectors(self, labels: Rows) -> Floats:
        """See `ChunkSource`."""
        return self._views[0].vectors(labels) if self.matrix is None else self.matrix[labels]

    def places(self, labels: Rows) -> tuple[Rows, Rows]:
        """See `ChunkSource`."""
        return self._index.places_of(labels)

    def column(self, name: str, labels: Rows) -> NDArray[Any]:
        """See `ChunkSource`."""
        return self._snapshot.column(name, *self.places(labels))

    def multipliers(self, labels: Rows | slice) -> Floats:
        """See `ChunkSource`."""
        return self._index.multipliers[labels]


def sources_of(
    now: Snapshot, then: Sequence[Snapshot] = (), visible: frozenset[int] = frozenset()
) -> list[ChunkSource]:
    """Return the sources of a topic's log. `then`: its chunks of each named time; `visible`: see `GrowingSource`."""
    growing: list[ChunkSource] = [
        GrowingSource(view, [one.views[number] for one in then], visible)
        for number, view in now.views.items()
        if isinstance(view.segment, GrowingSegment) and len(view.rows)
    ]
    return growing + [
        IndexSource(view, [one.indexes[place] for one in then], now) for place, view in enumerate(now.indexes)
    ]


class TopicColumns:
    """One topic, searched for one question."""

    def __init__(
        self,
        topic: Searchable,
        parts: Sequence[str],
        pending: PendingView,
        wanted: Selection,
        visible_digests: Collection[bytes],
        spans: Sequence[Span],
    ) -> None:
        """
        Args:
            parts: of the question.
            pending: its chunks that are not in the log yet.
            wanted: the caller's selection.
            visible_digests: messages in the prompt; chunks made only of these do not compete.
            spans: times that the question names; the best chunks of each are always candidates.
        """
        self.snapshot = topic.snapshot()
        self.topic_id = self.snapshot.topic_id
        self._parts = parts
        now = chosen(self.snapshot, wanted)
        times = [Selection(since=since, until=until) for since, until in spans]
        then = [chosen(now, one) for one in times]
        visible = frozenset(map(digest_word, visible_digests))
        self.pending = pending
        self.sources = sources_of(now, then, visible)
        if self.pending:
            self.sources.append(PendingSource(pending, wanted, times, visible, self.snapshot))
        self.columns = [one.columns for one in self.sources if one.columns is not None]
        self.word_counts = self._own_counts = WordCounts(self.columns)
        """For rarity; where several topics are searched, of all of them."""

    @cached_property
    def mean(self) -> Floats | None:
        """The topic's mean vector, shortened if the topic has few chunks; None without chunks. Vectors of another model
        are excluded (a sealed segment of those has no index)."""
        means = [
            (one.columns.mean_sum, one.columns.mean_count)
            for one in self.sources
            if one.columns is not None
            and one.columns.mean_sum is not None
            and one.columns.mean_count
            and not (isinstance(one, GrowingSource) and one.matrix is None)
        ]
        count = sum(count for _, count in means)
        return (np.sum([one for one, _ in means], axis=0) / (count + FEW_CHUNKS)).astype(np.float32) if count else None

    @cached_property
    def terms(self) -> Terms:
        """See `Terms`."""
        languages = frozenset().union(*(one.languages for one in self.columns))
        asked = [query_keys(part, languages).tolist() for part in self._parts]
        exact = [identifier_keys(part).tolist() for part in self._parts]
        keys = np.array(list(dict.fromkeys(itertools.chain(*asked))), np.uint32)
        none = keys[self._own_counts.having(keys) == 0]
        near, likeness = near_terms(none)
        keys = np.concatenate([keys, np.setdiff1d(near[likeness > 0], keys)]) if len(none) else keys
        places = {key: place for place, key in enumerate(keys.tolist())}
        asks = np.zeros((len(asked), len(places)), np.bool_)
        is_exact, words, weight = asks.copy(), asks.copy(), np.zeros(asks.shape, np.float32)
        for part, some in enumerate(asked):
            asks[part, [places[key] for key in some]] = True
            words[part, [places[key] for key in query_keys(self._parts[part], frozenset()).tolist()]] = True
            is_exact[part, [places[key] for key in exact[part]]] = True
        for key, others, alike in zip(none.tolist(), near.tolist(), likeness.tolist(), strict=True):
            for other, like in zip(others, alike, strict=True):
                if like:
                    weight[asks[:, places[key]], places[other]] = NEAR_WEIGHT * like
        weight[asks], weight[is_exact] = 1, IDENTIFIER_WEIGHT
        having = self._own_counts.having(keys)
        rare = rarity(np.maximum(self.word_counts.having(keys), 1), self.word_counts.total)
        is_word = np.fromiter(map(is_single_word, self._parts), np.bool_)
        is_alone = is_word & (asks & (having == 1)).any(axis=1)
        is_named = np.asarray((is_exact & (having > 0)).any(axis=1) | is_alone, np.bool_)
        return Terms(keys, rare, asks, words, weight * rare * (having > 0), is_named)

    @cached_property
    def telling(self) -> Floats:
        """Weight of each part by the rarity of its words, (p,), at most 1; 1 for a part with a question mark."""
        told = self.terms.asks @ self.terms.rarity / (TELLING_WORDS * self.terms.rarity.max(initial=1e-6))
        marked = np.fromiter(map(is_marked, self._parts), np.bool_, len(self._parts))
        return np.where(marked, 1, told.clip(TELLING_MIN, 1)).astype(np.float32)

    def share(self, part: int, source: ChunkSource, label: int) -> float:
        """Return the share of a part's words, by rarity, that a chunk has; 0 if the part has less than three words, and
        not two rare ones: of small talk ("good luck", "no problem") some chunk has the words."""
        if source.columns is None:
            return 0.0
        terms, words = self.terms, self.terms.words[part]
        asked = terms.asks[part].nonzero()[0]
        found = asked[source.columns.has(label, terms.keys[asked])]
        whole = terms.rarity[words].sum()
        rarest = rarity(np.ones(1, np.intp), self.word_counts.total)[0]
        is_telling = words.sum() > 2 or whole >= RARE_PAIR * rarest
        return min(1.0, float(terms.rarity[found].sum() / whole)) if is_telling else 0.0

    def names(self, part: int, source: ChunkSource, label: int) -> bool:
        """Return whether a chunk has a word of the part as a name (capitalised within a sentence), or the number that
        the part consists of."""
        if self._parts[part].strip(_SIGNS).isdecimal():
            asked = self.terms.keys[self.terms.asks[part]]
            return source.columns is not None and bool(source.columns.has(label, asked).any())
        [entry] = self.entries(source.places(np.array([label]))).values()
        known = {word.lower() for word in _WORD.findall(self._parts[part])}
        names = () if entry is None else (name for name in _AMID.findall(entry.content) if name[0].isupper())
        return any(name in known and not is_stopword(name) for name in map(str.lower, names))

    def entries(self, places: tuple[Rows, Rows]) -> dict[Place, Entry | None]:
        """Read the chunks at these segments and rows. None for chunks erased meanwhile, and for unreadable ones, of
        which one a file is logged."""
        every = list(zip(*(one.tolist() for one in places), strict=True))
        read: dict[Place, Entry | None] = {
            place: self.pending.chunks[place[1]].entry for place in every if place[0] == PENDING_SEGMENT
        }
        read |= self.snapshot.read_many(stored := [place for place in every if place not in read])
        for place in stored:
            if place not in read:
                try:
                    read[place] = self.snapshot.read(place)
                except ErasedMeanwhile:
                    read[place] = None
                except StoreError as error:
                    read[place] = None
                    segment = self.snapshot.views[place[0]].segment
                    if not segment.is_told:
                        told = {"topic": self.topic_id, "error": error}
                        log.error("chunks of a file cannot be recalled; run `memd verify`", extra=told)
                    segment.is_told = True
        return {place: read[place] for place in every}


def _best(score: Floats, count: int) -> Rows:
    """Return the positions of the highest scores, unordered."""
    if len(score) <= count:
        return np.arange(len(score))
    return score.argpartition(len(score) - count)[len(score) - count :]
