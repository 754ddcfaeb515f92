"""The relevance of the chunks that compete to each part of a question, in columns.

Rule: array operations alone, the same for every chunk wherever it lies. For each part:

    own       = (1 - w) (meaning over its best) ^ 1.5 + w words over their best
    relevance = (1 - f) own + f likeness to the five best, and a share of what the neighbours have of that

scaled to the best raw cosine, so that thresholds are cosines; times the multiplier of corrections it is the score. Of a
chunk the best part counts. With all weights at 0 the score is max(0, cosine) × multiplier. Figures: bench/NOTES.md.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.entries import Entry
from memd.recall.columns import ChunkSource, TopicColumns
from memd.recall.explained import PARTS_DIGITS
from memd.settings.model import RetrievalSettings
from memd.store.lexical.analyzer import is_stopword
from memd.store.log.columns import uuid_bytes

CLEAR_COSINE, CLEAR_WORDS, CLEAR_SHARED, CLEAR_BEST = 0.5, 0.01, 2, 10
"""The table's answer stands where its meaning and the words share so many of their ten best chunks and something is
near: two witnesses. Else the model reads the part."""
SILENT_BELOW, QUOTED = 0.39, 0.15
"""Where the model read a part, nothing stored is about it if the nearest cosine, and so much more where one chunk has
all of its words, is below that: of a long list of things the model has one vector, and the words know each of them. Of
383 true questions 0.5 % are lost so (0.8 by the cosine alone), of 200 about nothing stored 95 % are silent."""
MANY_CHUNKS, FEWER = 300, 0.05
"""Of many chunks one is near by chance: for each tenth of so many the threshold is so much lower. With one threshold
for all 13 % of true questions are lost where one chunk is stored, 7 % where five are."""
STEP_WEIGHT = 0.25
"""Of the step that the model is at, beside the question: what it calls is like every other call, and would fill the
block before what the user asked for. Of 154 facts needed blocks of 975 tokens show 119; 117 with 0.5, 104 without."""
OWN_WORDS_SHARE, OWN_WORDS_LISTED = 0.3, 64
"""Of the best chunks, those that have the question's words mostly from the model, where it asks in mid-turn: it says
again and again what it looks for, as near to the question as the answer is. Of 689 facts that agents needed, blocks
show 561 so, 499 where chunks count that are mostly the model's by their length."""
TABLE_COSINE, BOTH_TABLES = 0.85, 0.7
"""Of a text's vector by the table to the model's: cosines of what waits come out so much lower to the model's vector of
a part. To the table's they are as they should be, but without the topic's mean what is stored has only so much."""
TABLE_WORDS_MORE = 0.05
"""Words weigh more beside the table's meaning than beside the model's."""
SECOND_SHARE = 0.2
"""Of a chunk's second best score, beside its score for a part: of two that answer one part as well, as near copies do,
the one that has another part too goes first."""
ECHOES_MAX = 16
"""The longest chain of answers to answers that is followed."""
MEANING_POWER = 1.5
FEEDBACK_CHUNKS = 5
SHORT_TOKENS = 80
"""A longer chunk tells its context itself: its neighbours count less."""
LENGTH_POWER = 0.1
"""Of two chunks that are as good the shorter one goes first: what it leaves of the budget finds more."""
LISTED = 256
"""The best chunks that may be shown or listed."""
ECHO_SHARE, CORRECTED_SHARE = 0.9, 0.5
"""An answer's most, as a share of the best chunk that its prompt had shown; and its share where one was superseded."""
RETOLD_SHARE = 0.7
"""Where nothing that it was shown has so much of an answer's score, the answer has it for what it says itself: nearly
every answer was shown something, and holding each against all of that hid what was told beside it (measured: of 13
identifiers 2, of 5 pieces of code 1; with 0.5 of the 591 facts of a soak, told beside questions that were like the one
asked, 15)."""
COPY_COSINE, COMPARED = 0.99, 48
"""A chunk this near to a better one waits until all others are in; so many of the best are compared."""
_WORD = re.compile(r"[^\W_]+")

Floats = NDArray[np.float32]
Bits = NDArray[np.bool_]
Rows = NDArray[np.intp]


class Parts(msgspec.Struct, frozen=True, gc=False):
    """A score and its parts, on the scale of cosines."""

    meaning: float
    words: float
    feedback: float
    neighbours: float
    multiplier: float = 1.0
    """Of corrections."""
    echo: float = 1.0
    """See `ScoredChunk.echo`."""
    time: float = 1.0
    """Above 1 where it was said when the question says."""
    cosine: float = 0.0
    """To the nearest part of the question, as the model or its table makes it."""

    @property
    def score(self) -> float:
        """The number that chunks are ordered by."""
        relevance = self.meaning + self.words + self.feedback + self.neighbours
        return relevance * self.multiplier * self.echo * self.time


class Field:
    """All chunks that compete, of all topics and sources one after the other: m chunks, p parts."""

    def __init__(
        self,
        topics: Sequence[TopicColumns],
        weights: Sequence[float],
        vectors: Floats,
        scale: tuple[float, float],
    ) -> None:
        """
        Args:
            weights: of the parts that the topics are asked by, (p,).
            vectors: of the parts, (p, dimension); a row of zeros: unknown.
            scale: see `Embedder.scale`.
        """
        self._topics, self._scale = topics, scale
        self._sources = [(topic, source) for topic in topics for source in topic.sources]
        telling: Floats = np.max([topic.telling for topic in topics], axis=0)
        self._weights = np.array(weights, np.float32) * telling / telling.max()
        self.is_named = np.any([topic.terms.is_named for topic in topics], axis=0)
        """Whether a part has an identifier that some chunk has: a witness by itself."""
        few = sum(int(source.competes.sum()) for _, source in self._sources)
        self._silent_below = SILENT_BELOW - FEWER * math.log10(MANY_CHUNKS / min(max(1, few), MANY_CHUNKS))
        self._asked, self._is_read = vectors.copy(), np.zeros(len(vectors), np.bool_)
        self._find()

    def read_again(self, numbers: Sequence[int], vectors: Floats) -> None:
        """Take the model's vectors of some parts; those for which the table had one find nothing else by them."""
        was_known = self._asked[list(numbers)].any(axis=1).all()
        self._asked[list(numbers)], self._is_read[list(numbers)] = vectors, True
        if was_known:
            self._place()
        else:
            self._find()

    def _find(self) -> None:
        for name in ("uuids", "said_at"):
            self.__dict__.pop(name, None)
        self._entries: dict[int, Entry | None] = {}
        """Those that were read; None: it cannot be."""
        known, dimension = self._asked[self._asked.any(axis=1)], self._asked.shape[1]
        labels = [source.found(topic.terms, known) for topic, source in self._sources]
        lengths = list(map(len, labels))
        self._slices = list(zip(self._sources, labels, itertools.accumulate(lengths, initial=0), strict=False))
        """The chunks of each source: their labels in it, and where they begin here."""
        self._vectors: Floats = self._joined(lambda one, labels: one.vectors_of(labels, dimension))
        """Zeros where there is none."""
        self.words: Floats = np.concatenate([one.words(topic.terms, some) for (topic, one), some, _ in self._slices])
        """BM25, (m, p)."""
        self.counts: Bits = self._joined(lambda one, labels: one.counts[labels])
        self.competes: Bits = self._joined(lambda one, labels: one.competes[labels])
        """Others only speak for their neighbours: what is visible in the prompt; or for nobody: what does not count."""
        self.multiplier: Floats = self._joined(lambda one, labels: one.multipliers(labels))
        self.tokens: Rows = self._joined(lambda one, labels: one.tokens(labels, dimension))
        """Raw tokens of each chunk's line."""
        self._follows: Bits = self._joined(lambda one, labels: one.follows(labels))
        none = np.zeros(dimension, np.float32)
        means = [topic.mean for topic, _ in self._sources]
        self._means: Floats = np.array([none if one is None or len(one) != dimension else one for one in means])
        """Of each source's topic, (s, dimension)."""
        self._owner = np.repeat(np.arange(len(labels)), lengths)
        """The source of each chunk."""
        vectors, self._mean_sizes = self._vectors, np.vecdot(self._means, self._means)
        self._amid: Floats = (vectors @ self._means.T)[np.arange(len(vectors)), self._owner]
        """The product of each chunk's vector with its topic's mean."""
        self._apart = _inverse(np.vecdot(vectors, vectors), self._amid, self._mean_sizes[self._owner])
        """1 / |v - μ| of each chunk; see `_place`."""
        self._place()
        if len(self._topics) > 1:
            self._leave_to_own()

    def _place(self) -> None:
        """The cosines of all chunks to all parts, as they are and without the topic's mean, (m, p): who talks there,
        and what about, says nothing about one of its chunks.

        Of vectors v and q and a mean μ the second is (v - μ)(q - μ) / |v - μ| / |q - μ|, so that of all these vectors
        only the products are needed.
        """
        self.__dict__.pop("_near", None)
        asked, (slope, offset) = self._asked, self._scale
        self.raw = self._vectors @ asked.T
        amid = asked @ self._means.T
        parts_apart = _inverse(np.vecdot(asked, asked)[:, None], amid, self._mean_sizes)
        apart = self.raw - self._amid[:, None] + (self._mean_sizes - amid).T[self._owner]
        self.centred: Floats = apart * self._apart[:, None] * parts_apart.T[self._owner]
        is_pending = [source.is_pending for _, source in self._sources]
        if any(is_pending):
            waiting = np.array(is_pending)[self._owner]
            self.raw[waiting] = np.minimum(self.raw[waiting] / np.where(self._is_read, TABLE_COSINE, 1), 1)
            centred = self.centred[waiting] * np.where(self._is_read, 1 / TABLE_COSINE, BOTH_TABLES)
            self.centred[waiting] = np.minimum(centred, 1)
        if self._scale != (1.0, 0.0):
            self.raw = np.where(asked.any(axis=1), np.minimum(self.raw * slope + offset, 1), 0)
        np.maximum(self.centred, 0, out=self.centred)

    def is_clear(self) -> NDArray[np.bool_]:
        """Whether words and the table's meaning, two witnesses, agree on each part, and something is near, (p,)."""
        words, meaning = self.words * self.competes[:, None], self.centred * self.competes[:, None]
        if len(words) <= CLEAR_BEST:
            near, said = meaning > -1, words > 0
        else:
            at = len(words) - CLEAR_BEST
            near = meaning >= np.partition(meaning, at, axis=0)[at]
            said = (words >= np.partition(words, at, axis=0)[at]) & (words > 0)
        shared = np.count_nonzero(near & said, axis=0)
        nearest = (self.raw * self.competes[:, None]).max(axis=0, initial=0)
        near_enough = nearest + CLEAR_WORDS * words.max(axis=0, initial=0) >= CLEAR_COSINE
        known = self._asked.any(axis=1)  # without a vector words are the only witness
        return np.asarray((shared >= CLEAR_SHARED) & near_enough & known, np.bool_)

    def speaking(self, judged: Collection[int], readers: Mapping[int, int]) -> Bits:
        """Whether each part brings anything, (p,): where something is near it, or it is not judged.

        Args:
            judged: the parts that bring nothing where nothing stored is near.
            readers: of a part, the one that is judged for it (of a clause its sentence, which may be far as a whole).
        """
        near = self._near >= self._silent_below
        is_far = np.zeros(len(near), np.bool_)
        is_far[list(judged)] = True
        is_far &= ~near
        return near | ~is_far[[readers.get(part, part) for part in range(len(near))]]

    def scores(self, settings: RetrievalSettings, read: Collection[int], speaking: Bits) -> Scores:
        """Score all chunks; `read`: the parts whose vectors are the model's."""
        near = self._near
        is_read = np.zeros(len(near), np.bool_)
        is_read[list(read)] = True
        if is_silent := not speaking.any():
            speaking = ~speaking  # all, so that they can be listed with the reason
        more = np.where(is_read, 0.0, TABLE_WORDS_MORE) if settings.lexical_weight else np.zeros(len(near))
        lexical = np.minimum(1.0, settings.lexical_weight + more).astype(np.float32)
        shares = self._shares(settings, lexical, near) * speaking
        return Scores(shares, self.raw * speaking, self.multiplier, is_silent=is_silent)

    @cached_property
    def _near(self) -> Floats:
        """How near anything stored is to each part, on the scale of cosines: by meaning; where that is far by words."""
        nearest = (self.raw * self.competes[:, None]).max(axis=0, initial=0)
        words = self.words * self.competes[:, None]
        for part in ((nearest < SILENT_BELOW) & words.any(axis=0)).nonzero()[0].tolist():
            row = int(words[:, part].argmax())
            (topic, source), labels, start = self._slices[self._owner[row]]
            at = part, source, int(labels[row - start])
            if self.is_named[part] or topic.names(*at):
                nearest[part] = SILENT_BELOW
            else:
                nearest[part] += QUOTED * topic.share(*at)
        return np.asarray(nearest, np.float32)

    def _shares(self, settings: RetrievalSettings, lexical: Floats, nearest: Floats) -> Floats:
        """The shares of meaning, words, feedback and neighbours in each chunk's score for each part, (4, m, p)."""
        shares = np.zeros((4, *self.raw.shape), np.float32)
        competes = self.competes[:, None]
        if not (settings.lexical_weight or settings.feedback_weight or settings.neighbour_weight):
            shares[0] = np.maximum(self.raw, 0) * competes
            return shares
        best_meaning = (self.centred * competes).max(axis=0, initial=0)
        best_words = (self.words * competes).max(axis=0, initial=0)
        counts = self.counts[:, None]
        meant = (1 - lexical) * (self.centred / np.maximum(best_meaning, 1e-6)) ** MEANING_POWER * counts
        said = self.words * (lexical / np.maximum(best_words, 1e-6)) * counts
        own = meant + said
        weight = settings.feedback_weight
        like = self._likeness(own) * weight
        kept = (1 - weight) * own + like
        before, behind = self._beside()
        padded = np.concatenate([kept, np.zeros_like(kept[:1])])
        beside = padded[before] + padded[behind]
        beside *= (settings.neighbour_weight * np.minimum(1, SHORT_TOKENS / self.tokens))[:, None]
        most = ((kept + beside) * competes).max(axis=0, initial=0)
        scale = self._weights * np.where(best_meaning > 0, nearest, 1.0) / np.maximum(most, 1e-9)
        for place, some in enumerate(((1 - weight) * meant, (1 - weight) * said, like, beside)):
            np.multiply(some, scale * competes, out=shares[place])
        return shares

    def _likeness(self, own: Floats) -> Floats:
        """The likeness of chunks to the mean of the best ones for a part, weighed by their scores, on their scale."""
        offered = own * (self.multiplier * self.competes)[:, None]
        best = (-offered).argpartition(min(FEEDBACK_CHUNKS, len(own)) - 1, axis=0)[:FEEDBACK_CHUNKS]
        weights = np.take_along_axis(own, best, axis=0) * (np.take_along_axis(offered, best, axis=0) > 0)
        most = weights.max(axis=0, initial=0)
        weights = weights / np.maximum(weights.sum(axis=0), 1e-9)
        centred = (self._vectors[best] - self._means[self._owner[best]]) * (self._apart[best] * weights)[..., None]
        middle = centred.sum(axis=0)
        like = (self._vectors @ middle.T - (self._means @ middle.T)[self._owner]) * self._apart[:, None]
        np.maximum(like, 0, out=like)
        return np.asarray(like * (most / np.maximum(like.max(axis=0, initial=0), 1e-6)), np.float32)

    def _beside(self) -> tuple[Rows, Rows]:
        """The neighbours of all chunks, before and behind them; m: there is none."""
        none = len(self._follows)
        rows = np.arange(none)
        behind = np.append(self._follows[1:], False) & np.append(self.counts[1:], False)
        before = self._follows & np.concatenate([[False], self.counts[:-1]])
        return np.where(before, rows - 1, none), np.where(behind, rows + 1, none)

    def shown_to(self, rows: Rows) -> tuple[Rows, NDArray[np.uint64]]:
        """The chunks that answers had been shown: the position in `rows` and the first half of the uuid, of each."""
        owners, uuids = [np.empty(0, np.intp)], [np.empty(0, np.uint64)]
        order = np.argsort(rows)
        ascending = rows[order]
        for (_, source), labels, start in self._slices:
            first, last = np.searchsorted(ascending, (start, start + len(labels)))
            if (columns := source.columns) is not None and first < last:
                owner, shown = columns.shown(labels[ascending[first:last] - start])
                owners.append(order[first + owner])
                uuids.append(shown)
        return np.concatenate(owners), np.concatenate(uuids)

    def in_place_of(self, uuids: NDArray[np.uint64]) -> tuple[Bits, NDArray[np.uint64]]:
        """Whether a correction has taken these out, in any of the topics, by the first halves of their uuids; and what
        stands in the place of each, itself where it was not taken out, 0 where nothing does."""
        gone, new = np.concatenate([topic.snapshot.taken_out for topic in self._topics], axis=1)
        if not len(gone):
            return np.zeros(len(uuids), np.bool_), uuids
        order = gone.argsort(kind="stable")
        found, is_gone = uuids.copy(), np.isin(uuids, gone)
        for _ in range(ECHOES_MAX):  # what took a place may have been corrected itself
            if not (again := np.isin(found, gone)).any():
                break
            found[again] = new[order[np.searchsorted(gone, found[again], "right", sorter=order) - 1]]
        return is_gone, found

    def said_within(self, times: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        """Whether each chunk was said at one of these times."""
        found = np.zeros(len(self.tokens), np.bool_)
        for begin, until in times:
            found |= (self.said_at >= max(0, begin)) & (self.said_at < max(0, until))
        return found

    @cached_property
    def uuids(self) -> NDArray[np.uint64]:
        """The first half of each chunk's uuid, (m,)."""
        return self._column("uuid_high")

    @cached_property
    def said_at(self) -> NDArray[np.uint64]:
        """When each was said, in microseconds since the epoch, (m,)."""
        return self._column("said_at")

    def _column(self, name: str) -> NDArray[np.uint64]:
        return self._joined(lambda one, labels: one.column(name, labels))

    def entries(self, rows: Rows) -> dict[int, Entry]:
        """Read chunks, each once; see `TopicColumns.entries`."""
        known = self._entries
        unread = np.array([row for row in rows.tolist() if row not in known], np.intp)
        owner = self._owner[unread]
        for number in sorted(set(owner.tolist())):
            (topic, source), labels, start = self._slices[number]
            own = unread[owner == number]
            known.update(zip(own.tolist(), topic.entries(source.places(labels[own - start])).values(), strict=True))
        return {row: entry for row in rows.tolist() if (entry := known[row]) is not None}

    def topics_of(self, rows: Rows) -> list[str]:
        """The topic of each chunk."""
        return [self._sources[number][0].topic_id for number in self._owner[rows].tolist()]

    def alike(self, rows: Rows) -> Bits:
        """Whether a chunk is nearly the same as a better one; `rows`: best first."""
        vectors = self._vectors[rows]
        return np.asarray(np.tril(vectors @ vectors.T >= COPY_COSINE, -1).any(axis=1), np.bool_)

    def _joined(self, column: Callable[[ChunkSource, Rows], NDArray[Any]]) -> NDArray[Any]:
        """A column of all chunks."""
        return np.concatenate([column(source, labels) for (_, source), labels, _ in self._slices])

    def _leave_to_own(self) -> None:
        """Of a chunk that several topics have, as a correction adopted it, the own topic's state counts."""
        own = self._topics[0]
        for (topic, source), labels, start in self._slices:
            if topic is own:
                continue
            halves = (source.column(name, labels).tolist() for name in ("uuid_high", "uuid_low"))
            uuids = [uuid_bytes(high, low) for high, low in zip(*halves, strict=True)]
            if known := own.snapshot.known(uuids):
                self.competes[[start + place for place, uuid in enumerate(uuids) if uuid in known]] = False


def _inverse(sizes: Floats, products: Floats, mean_sizes: Floats) -> Floats:
    """1 / |v - μ| by the sizes v², the products vμ and the sizes μ²; 0 where there is no vector."""
    return np.where(sizes > 0, 1 / np.sqrt(np.maximum(sizes - 2 * products + mean_sizes, 1e-6)), np.float32(0))


class Scores:
    """The best score of each chunk over the parts of a question, and what it is made of."""

    def __init__(self, shares: Floats, cosines: Floats, multiplier: Floats, *, is_silent: bool) -> None:
        """
        Args:
            shares: of meaning, words, feedback and neighbours, of each chunk for each part, (4, m, p).
            cosines: (m, p).
            multiplier: of corrections, (m,).
            is_silent: nothing stored is about any part.
        """
        self.is_silent = is_silent
        relevance = np.maximum(shares.sum(axis=0), 0)
        rows, part = np.arange(len(multiplier)), relevance.argmax(axis=1)
        self._parts = shares[:, rows, part], cosines[rows, part]
        self._of_parts = scored = relevance * multiplier[:, None]
        if scored.shape[1] > 1:
            self._of_parts = scored + SECOND_SHARE * np.minimum(scored, np.partition(scored, -2, axis=1)[:, -2:-1])
        self.score: Floats = scored.max(axis=1)
        """With the multiplier, before echoes and times."""
        self._multiplier, self._lifted = multiplier, np.maximum(multiplier, 1)
        self._factor = np.ones((2, len(multiplier)), np.float32)
        """Of echoes and of times."""

    def favour(self, then: NDArray[np.bool_], factor: float, *, is_alone: bool) -> None:
        """Raise what was said when the question says; where it asks for nothing but a time, that alone counts."""
        self._factor[1, then] = factor
        if is_alone:
            top = (self.score / self._lifted).max(initial=0.0) * self._lifted[then]
            self.score[then] = np.maximum(self.score[then], top)
            self._of_parts[then] = np.maximum(self._of_parts[then], top[:, None])
            self.is_silent = self.is_silent and not then.any()
        self.score[then] *= factor

    def weigh_echoes(self, field: Field) -> None:
        """An answer stands behind what its prompt had shown, and far behind what has taken the place of that since.
        Where that was taken out for nothing, the answer is weak by itself.

        What it was shown was perhaps an answer itself: once more, until each is held against what is left of those.
        """
        rows = _best(self.score, LISTED)
        owner, shown = field.shown_to(rows)
        if not len(owner):
            return
        share, score = np.ones(len(rows), np.float32), self.score[rows]
        is_gone, shown = field.in_place_of(shown)
        share[owner[is_gone & (shown == 0)]] = CORRECTED_SHARE
        uuids = field.uuids[rows]
        order = uuids.argsort()
        source = order[np.minimum(np.searchsorted(uuids, shown, sorter=order), len(rows) - 1)]
        is_here = (uuids[source] == shown) & (source != owner)
        owner, source, is_gone = owner[is_here], source[is_here], is_gone[is_here]
        share[owner[is_gone & (score[source] >= RETOLD_SHARE * score[owner])]] = CORRECTED_SHARE
        left = score * share
        for _ in range(ECHOES_MAX):
            before, most = left, np.zeros(len(rows), np.float32)
            np.maximum.at(most, owner, before[source])
            left = np.where(most >= RETOLD_SHARE * score, np.minimum(score, ECHO_SHARE * most), score) * share
            if (left == before).all():
                break
        factor = left / score
        self._factor[0, rows] = factor
        self.score[rows] *= factor

    def weigh_own_words(self, field: Field, parts: Sequence[str]) -> None:
        """Where the model asks, what it says itself of the parts stands behind what users and tools say."""
        asked = {word for word in _WORD.findall(" ".join(parts).lower()) if not is_stopword(word)}
        rows = _best(self.score, OWN_WORDS_LISTED)
        own = [row for row, entry in field.entries(rows).items() if _is_models(entry, asked)]
        self._factor[0, own] *= OWN_WORDS_SHARE
        self.score[own] *= OWN_WORDS_SHARE

    def order(self, field: Field, *, everything: bool) -> Rows:
        """The best chunks in the order in which they are to fill the budget: the parts take turns, a shorter one of two
        that are as good goes first, and one that is nearly the same as a better one waits until all others are in. With
        `everything` also those that nothing speaks for."""
        rows = _best(np.where(field.counts, self.score + 1e-9, 0) if everything else self.score, LISTED)
        length = field.tokens[rows] ** LENGTH_POWER
        best_first = np.argsort(-self.score[rows] / length, kind="stable")
        rows, length = rows[best_first], length[best_first]
        rows = rows[self._turns(rows, length).argsort(kind="stable")]
        waits = np.zeros(len(rows), np.bool_)
        waits[:COMPARED] = field.alike(rows[:COMPARED])
        return np.concatenate([rows[~waits], rows[waits]])

    def _turns(self, rows: Rows, length: Floats) -> Floats:
        """The turn of each chunk: its place among the best for a part, where that comes first. A part has turns in
        proportion to the score of its best chunk, before echoes and the model's own words are weighed.

        A chunk that has words of every part, as what was asked before has, is the best for each of them; and what many
        chunks say of one part is scored above the only chunk that tells the other.
        """
        scored = self._of_parts[rows] * (self._factor[:, rows].prod(axis=0) / length)[:, None]
        places = (-scored).argsort(axis=0, kind="stable").argsort(axis=0, kind="stable") + 1
        waits = places / np.maximum((self._of_parts[rows] / length[:, None]).max(axis=0, initial=0), 1e-9)
        return np.asarray(np.where(scored > 0, waits, np.inf).min(axis=1), np.float32)

    def strong(self, rows: Rows, settings: RetrievalSettings) -> NDArray[np.bool_]:
        """Whether chunks are worth showing: those that match well, and what is near by itself though others outweigh
        it. Helpful raises a chunk among others, and brings it to no other question; Unhelpful counts three times, so
        that the third hides a perfect match."""
        multiplier = self._multiplier[rows]
        scored = np.minimum(self.score[rows], multiplier)  # no time undoes Unhelpful
        weight = np.minimum(multiplier**2, 1 / multiplier)
        near = self._parts[1][rows] * self._factor[0, rows] * multiplier
        is_near = near * weight >= max(settings.min_score, SILENT_BELOW)
        return np.asarray((scored * weight >= settings.min_score) | is_near, np.bool_)

    def parts(self, rows: Rows) -> list[Parts]:
        """The scores of chunks, explained."""
        shares, cosine = self._parts
        columns = np.stack([*shares[:, rows], self._multiplier[rows], *self._factor[:, rows], cosine[rows]], axis=1)
        return list(itertools.starmap(Parts, columns.astype(np.float64).round(PARTS_DIGITS).tolist()))


def _is_models(entry: Entry, asked: set[str]) -> bool:
    """Whether the model says more of these words in a chunk than the others in it; where it says as many, more text."""
    if entry.speakers is UNSET:
        return entry.roles == ("assistant",)
    said = ["", ""]
    for one, text in entry.stretches:  # what took the place of others has no speakers
        said[one.role == "assistant"] += text + " "
    others, models = ((len(asked.intersection(_WORD.findall(text.lower()))), len(text)) for text in said)
    return models > others


def _best(score: Floats, count: int) -> Rows:
    """The positions of the highest scores above 0, best first; of equal ones the later first."""
    rows = np.argpartition(-score, count)[:count] if len(score) > count else np.arange(len(score))
    rows = rows[score[rows] > 0]
    return rows[np.lexsort((-rows, -score[rows]))]
