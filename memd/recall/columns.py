"""The columns of a topic in which one question is answered: who competes, and how near each is to each part of it.

Rule: a few array operations a source, no loop over chunks. A *source* is a growing segment, an index over sealed ones,
or what waits to be stored; a source of thousands competes whole, of a larger one what its indexes find. Each has the
same columns afterwards, so nothing behind this module knows where a chunk lies.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry
from memd.errors import StoreError
from memd.recall.times import Span
from memd.settings.model import UtilitySettings
from memd.store.choice import chosen
from memd.store.index.vectors import multipliers
from memd.store.lexical.analyzer import is_stopword
from memd.store.lexical.postings import (
    GrowingColumns,
    Keys,
    SealedColumns,
    identifier_keys,
    query_keys,
    rarity,
)
from memd.store.log.columns import Records, digest_word
from memd.store.log.segment import GrowingSegment
from memd.store.pending import PendingRun, UnstoredText
from memd.store.snapshot import IndexView, Place, SegmentView, Snapshot
from memd.wanted import EVERYTHING, Wanted

log = logging.getLogger("memd")

FOUND_MAX = 48
"""Chunks that an index finds for a part by meaning, and as many by words; their neighbours come with them."""
POSTINGS_MAX = 60_000
"""Of a large source: a word that so many chunks have finds none by itself, but counts for those that others find."""
IDENTIFIER_WEIGHT = 3
"""So many words an identifier counts for as a whole; its parts count besides."""
FEW_CHUNKS = 25
"""The mean vector of so many chunks counts half: of a few it is mostly those chunks themselves."""
PENDING_SEGMENT = -1
"""In the places of chunks that are not stored yet."""
TABLE_COSINE = 0.85
"""Of a text's vector by the table to the model's: cosines of what waits come out so much lower."""
TOKEN_BYTES = 3
"""Of a record beside its vector, for each token of its line, where an old log does not tell how many those are."""

_WORD = re.compile(r"[^\W\d_]+")
_SIGNS = " ?!.#:"
_AMID = re.compile(r"(?<=[^\W\d_] )[^\W\d_]+|(?<=, )[^\W\d_]+")
"""Words in the midst of a sentence."""

Floats = NDArray[np.float32]
Bits = NDArray[np.bool_]
Rows = NDArray[np.intp]


class Searchable(Protocol):
    """A topic that can be searched: a live log, or a topic as of an earlier time."""

    @property
    def topic_id(self) -> str:
        """The topic."""

    def snapshot(self) -> Snapshot:
        """Its present content."""

    def unstored(self) -> UnstoredText:
        """Return the text that was said and is not in its log yet; asked on the event loop."""


class Pool(NamedTuple):
    """The chunks of one source that compete, in columns of the same length n; p parts ask."""

    segment: Rows
    row: Rows
    raw: Floats
    """Cosine to each part, (n, p); 0 where either has no vector."""
    centred: Floats
    """Cosine of both without the topic's mean, (n, p)."""
    words: Floats
    """BM25, (n, p)."""
    competes: Bits
    """Others only speak for their neighbours: what is visible in the prompt; or for nobody: what no longer counts."""
    counts: Bits
    multiplier: Floats
    tokens: Rows
    """Raw tokens of each chunk's line."""
    follows: Bits
    """Whether the chunk goes on where the one in the row before it ended: they are neighbours."""
    vectors: Floats
    """Unit vectors, (n, dimension)."""
    columns: GrowingColumns | SealedColumns | None
    labels: Rows
    """The rows in `columns`."""


class TopicColumns:
    """One topic, for one question."""

    def __init__(
        self,
        topic: Searchable,
        parts: Sequence[str],
        pending: Sequence[PendingRun],
        wanted: Wanted,
        visible_digests: Collection[bytes],
        spans: Sequence[Span],
    ) -> None:
        """
        Args:
            parts: of the question.
            pending: its chunks that are not in the log yet.
            wanted: the chunks that may be shown.
            visible_digests: messages in the prompt; chunks of these alone do not compete.
            spans: times that the question speaks of, whose best chunks compete whatever else there is.
        """
        self.snapshot = topic.snapshot()
        self.topic_id = self.snapshot.topic_id
        self._parts = parts
        self._chosen = chosen(self.snapshot, wanted)
        self._is_choice = wanted != EVERYTHING
        self._then = [chosen(self.snapshot, Wanted(since=since, until=until)) for since, until in spans]
        self._visible = frozenset(map(digest_word, visible_digests))
        chunks = [chunk for run in pending for chunk in run]
        known = self.snapshot.known([chunk.entry.uuid for chunk in chunks]) if chunks else ()
        self.pending = PendingRun.joined(pending) if pending else PendingRun()
        self._pending_counts = np.array(
            [chunk.entry.uuid not in known and wanted.admits_entry(chunk.entry) for chunk in self.pending], np.bool_
        )
        views = self._chosen.views.values()
        self._growing = [view for view in views if isinstance(view.segment, GrowingSegment) and len(view.rows)]
        self._of_others = [
            view.segment.columns
            for view in self._growing
            if isinstance(view.segment, GrowingSegment) and view.matrix is None
        ]
        self._indexes = self._chosen.indexes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that could be found."""
        return not (self._growing or self._indexes or len(self.pending))

    @cached_property
    def _columns(self) -> list[GrowingColumns | SealedColumns]:
        growing = [view.segment.columns for view in self._growing if isinstance(view.segment, GrowingSegment)]
        sealed = [view.index.columns for view in self._indexes if view.index.columns is not None]
        return [*growing, *sealed, *([self.pending.columns] if self.pending else [])]

    @cached_property
    def mean(self) -> Floats | None:
        """The topic's mean vector, weighed by how many chunks it is of; None without any: who talks there, and what
        about, says nothing about one of its chunks. Vectors of another model are no part of it; of a sealed segment
        with such there is no index."""
        means = [
            (one.mean_sum, one.mean_count)
            for one in self._columns
            if one.mean_sum is not None and one.mean_count and one not in self._of_others
        ]
        count = sum(count for _, count in means)
        return (np.sum([one for one, _ in means], axis=0) / (count + FEW_CHUNKS)).astype(np.float32) if count else None

    @cached_property
    def _keys(self) -> list[Keys]:
        """The terms that each part asks this topic for."""
        languages = frozenset().union(*(one.languages for one in self._columns))
        return [query_keys(part, languages) for part in self._parts]

    def _having(self, keys: Keys) -> NDArray[np.intp]:
        """How many chunks have each term; none where an index's words are not made yet."""
        return sum((one.having(keys) for one in self._columns), np.zeros(len(keys), np.intp))

    @cached_property
    def named(self) -> list[bool]:
        """Whether each part has an identifier, in letters and digits or signs, that some chunk has."""
        return [bool(self._having(identifier_keys(part)).any()) for part in self._parts]

    def share(self, part: int, pool: Pool, row: int) -> float:
        """The share of a part's words, by rarity, that a chunk has; 0 where that is a single word."""
        keys = self._keys[part]
        has = np.zeros(len(keys), np.bool_) if pool.columns is None else pool.columns.has(int(pool.labels[row]), keys)
        if np.count_nonzero(has) < 2:
            return 0.0
        rare = rarity(np.maximum(self._having(keys), 1), self._total)
        return float(rare[has].sum() / rare.sum())

    def names(self, part: int, pool: Pool, row: int) -> bool:
        """Whether a chunk has a word of a part as a name, with a capital amid a sentence; or the number that the part
        consists of."""
        if self._parts[part].strip(_SIGNS).isdecimal():
            return pool.columns is not None and bool(pool.columns.has(int(pool.labels[row]), self._keys[part]).any())
        place = int(pool.segment[row]), int(pool.row[row])
        entry = self.entries([place]).get(place)
        words = {word.capitalize() for word in _WORD.findall(self._parts[part]) if not is_stopword(word.lower())}
        return entry is not None and not words.isdisjoint(_AMID.findall(entry.content))

    @cached_property
    def _terms(self) -> list[tuple[Keys, Floats]]:
        """Of each part, the terms that some chunk has, and what they weigh."""
        found = []
        for part, keys in zip(self._parts, self._keys, strict=True):
            rare = rarity(self._having(keys), self._total)
            rare[np.isin(keys, identifier_keys(part))] *= IDENTIFIER_WEIGHT
            found.append((keys[rare > 0], rare[rare > 0]))
        return found

    @cached_property
    def _total(self) -> int:
        return sum(one.count for one in self._columns)

    def sources(self, vectors: Floats, utility: UtilitySettings) -> list[Pool]:
        """The columns of all that compete. `vectors`: of the parts, (p, dimension); rows of zeros: unknown."""
        found = [self._of_growing(view, vectors, utility) for view in self._growing]
        found += [self._of_index(view, place, vectors, utility) for place, view in enumerate(self._indexes)]
        return [*found, self._of_pending(vectors)] if len(self.pending) else found

    def entries(self, places: Sequence[Place]) -> dict[Place, Entry]:
        """Read chunks; those are absent that cannot be read, and the log of the daemon says why."""
        stored = [place for place in places if place[0] != PENDING_SEGMENT]
        read = self.snapshot.read_many(stored) if stored else {}
        for place in [one for one in stored if one not in read]:
            try:
                read[place] = self.snapshot.read(place)
            except StoreError as error:
                told = {"topic": self.topic_id, "error": error}
                log.error("a chunk cannot be recalled; run `memd verify`", extra=told)
        waiting = {place: self.pending[place[1]].entry for place in places if place[0] == PENDING_SEGMENT}
        return {**read, **waiting}

    def records(self, segment: Rows, row: Rows) -> Records:
        """The columns of the log of some chunks."""
        waiting = segment == PENDING_SEGMENT
        if not waiting.any():
            return self.snapshot.records_at(segment, row)
        found = np.empty(len(row), self.pending.records.dtype)
        found[waiting] = self.pending.records[row[waiting]]
        found[~waiting] = self.snapshot.records_at(segment[~waiting], row[~waiting])
        return found

    def _of_growing(
        self,
        view: SegmentView,
        vectors: Floats,
        utility: UtilitySettings,
    ) -> Pool:
        segment, count = view.segment, len(view.rows)
        assert isinstance(segment, GrowingSegment), "one that is scanned"
        counts = ~view.dead
        competes = counts
        if self._visible and (rows := segment.rows_of_messages(self._visible)):
            competes = counts.copy()
            competes[[row for row in rows if row < count]] = False
        matrix = np.zeros((count, 0), np.float32) if view.matrix is None else view.matrix
        steps = view.rows["utility_steps"]
        mean_length = max(1.0, sum(one.length_sum for one in self._columns) / max(1, self._total))
        return Pool(
            np.full(count, segment.segment_id),
            np.arange(count),
            *self._cosines(matrix, vectors, segment.columns),
            np.stack([segment.columns.words(*some, count, mean_length) for some in self._terms], axis=1),
            competes,
            counts,
            multipliers(steps, utility).astype(np.float32) if steps.any() else np.ones(count, np.float32),
            _tokens(segment.columns.tokens[:count], view.rows, matrix.shape[1]),
            segment.columns.follows[:count],
            matrix,
            segment.columns,
            np.arange(count),
        )

    def _of_index(
        self,
        view: IndexView,
        place: int,
        vectors: Floats,
        utility: UtilitySettings,
    ) -> Pool:
        index, columns = view.index, view.index.columns
        labels = self._found(view, place, vectors[vectors.any(axis=1)], utility)
        segment, row = index.places_of(labels)
        matrix = index.vectors_of(labels)
        counts = np.ones(len(labels), np.bool_)
        if columns is None:
            words, follows = np.zeros((len(labels), len(self._parts)), np.float32), ~counts
            tokens = np.zeros(len(labels), np.uint16)
        else:
            words = np.stack([columns.words_at(labels, *some) for some in self._terms], axis=1)
            tokens = columns.tokens[labels]
            follows = columns.follows[labels] & (np.diff(labels, prepend=-2) == 1)
        return Pool(
            segment,
            row,
            *self._cosines(matrix, vectors),
            words,
            counts,
            counts,
            index.multipliers_of(labels, utility),
            tokens.astype(np.intp) if tokens.all() else _tokens(tokens, self.records(segment, row), matrix.shape[1]),
            follows,
            matrix,
            columns,
            labels,
        )

    def _found(
        self,
        view: IndexView,
        place: int,
        queries: Floats,
        utility: UtilitySettings,
    ) -> Rows:
        """The labels that an index finds, by meaning and by words, at any time and at those that are spoken of; and
        their neighbours."""
        index = view.index
        found = [self._worded[place]]
        for one in [view, *(then.indexes[place] for then in self._then)] if len(queries) else ():
            hits = one.search(queries, FOUND_MAX * len(queries), utility)
            found += (index.labels_of(some.segment_ids, some.rows) for some in hits)
        labels = np.unique(np.concatenate(found))
        labels = np.unique(np.concatenate([labels, labels - 1, labels + 1]))
        labels = labels[(labels >= 0) & (labels < len(view.dead))]
        return labels[~view.dead[labels]]

    @cached_property
    def _worded(self) -> list[Rows]:
        """The labels that each index finds by words."""
        return [self._found_by_words(view, place) for place, view in enumerate(self._indexes)]

    def _found_by_words(self, view: IndexView, place: int) -> Rows:
        columns, found = view.index.columns, [np.empty(0, np.intp)]
        if columns is None:
            return found[0]
        dead = [view.dead if self._is_choice else None, *(then.indexes[place].dead for then in self._then)]
        for some, one in itertools.product(self._terms, dead):
            score = columns.words(*some, POSTINGS_MAX)
            kept = score if one is None else np.where(one, 0, score)
            best = np.argpartition(-kept, min(2 * FOUND_MAX, len(kept) - 1))[: 2 * FOUND_MAX]
            found.append(best[kept[best] > 0])
        return np.concatenate(found)

    def _of_pending(self, vectors: Floats) -> Pool:
        pending, count = self.pending, len(self.pending)
        raw, centred = self._cosines(pending.matrix, vectors)
        visible = np.array([bool(words) and words <= self._visible for words in pending.words], np.bool_)
        return Pool(
            np.full(count, PENDING_SEGMENT),
            np.arange(count),
            np.minimum(raw / TABLE_COSINE, 1),
            np.minimum(centred / TABLE_COSINE, 1),
            np.stack([pending.columns.words(*some) for some in self._terms], axis=1),
            self._pending_counts & ~visible,
            self._pending_counts,
            np.ones(count, np.float32),
            pending.columns.tokens.astype(np.intp),
            pending.columns.follows,
            pending.matrix,
            pending.columns,
            np.arange(count),
        )

    def _cosines(self, matrix: Floats, vectors: Floats, columns: GrowingColumns | None = None) -> tuple[Floats, Floats]:
        """The cosines of rows to the parts, as they are and without the topic's mean, (n, p) each."""
        if matrix.shape[1] != vectors.shape[1] or not vectors.size:
            nothing = np.zeros((len(matrix), len(vectors)), np.float32)
            return nothing, nothing
        raw = np.stack([matrix @ vector for vector in vectors], axis=1)  # faster than one product of so few columns
        if (mean := self.mean) is None or len(mean) != matrix.shape[1]:
            return raw, raw
        # |v - m| and v (q - m) from v q and v m: no second matrix is made or kept.
        to_mean = matrix @ mean if columns is None else columns.to_mean(matrix, mean)
        square = float(mean @ mean)
        length = np.sqrt(np.maximum(1 - 2 * to_mean + square, 1e-6))[:, None]
        asked = np.linalg.norm(vectors - mean, axis=1)
        known = vectors.any(axis=1)
        centred = (raw - to_mean[:, None] - vectors @ mean + square) / (length * np.where(known, asked, np.inf))
        return raw, centred.astype(np.float32)


def _tokens(tokens: NDArray[np.uint16], records: Records, dimension: int) -> Rows:
    """Tokens of lines, estimated where an old log does not tell them."""
    found = tokens.astype(np.intp)
    if (unknown := found == 0).any():
        lengths = records["length"][unknown].astype(np.intp) - 4 * dimension
        found[unknown] = np.maximum(1, lengths // TOKEN_BYTES)
    return found
