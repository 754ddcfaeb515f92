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
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry
from memd.recall.columns import Pool, TopicColumns
from memd.settings.model import RetrievalSettings, UtilitySettings
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
STEP_WEIGHT = 0.5
"""Of the step that the model is at, beside the question: what it calls is like every other call, and would fill the
block before what the user asked for."""
TABLE_WORDS_MORE = 0.05
"""Words weigh more beside the table's meaning than beside the model's."""
MEANING_POWER = 1.5
FEEDBACK_CHUNKS = 5
SHORT_TOKENS = 80
"""A longer chunk tells its context itself: its neighbours count less."""
CONSIDERED = 96
"""The chunks of a part that feedback and neighbours are computed for."""
LENGTH_POWER = 0.1
"""Of two chunks that are as good the shorter one goes first: what it leaves of the budget finds more."""
LISTED = 256
"""The best chunks that may be shown or listed."""
ECHO_SHARE, CORRECTED_SHARE = 0.9, 0.5
"""An answer's most, as a share of the best chunk that its prompt had shown; and its share where one was superseded."""
RETOLD_SHARE = 0.5
"""Where nothing that it was shown has so much of an answer's score, the answer has it for what it says itself: nearly
every answer was shown something, and holding each against all of that hid what was told beside it (measured: of 13
identifiers 2, of 5 pieces of code 1)."""
COPY_COSINE, COMPARED = 0.99, 48
"""A chunk this near to a better one waits until all others are in; so many of the best are compared."""

Floats = NDArray[np.float32]
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
    """The share that is left of an answer that was shown what it says."""
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
    """All chunks that compete, of all topics and sources one after the other: n chunks, p parts."""

    def __init__(
        self,
        topics: Sequence[TopicColumns],
        weights: Sequence[float],
        vectors: Floats,
        utility: UtilitySettings,
        scale: tuple[float, float],
    ) -> None:
        """`weights`: of the parts that the topics are asked by; `scale`: see `Embedder.scale`."""
        self._topics, self._weights, self._utility, self._scale = topics, weights, utility, scale
        self.vectors = vectors
        self.is_named = np.any([topic.named for topic in topics], axis=0)
        """Whether a part has an identifier that some chunk has: a witness by itself."""
        found = [(topic, source) for topic in topics for source in topic.sources(vectors, utility)]
        self._owners = [topic for topic, _ in found]
        sources = self._sources = [source for _, source in found]
        self._starts = np.cumsum([0, *(len(source.row) for source in sources)])
        self.raw, self.centred = _stacked(sources, "raw"), np.maximum(_stacked(sources, "centred"), 0)
        if scale != (1.0, 0.0):
            self.raw = np.where(vectors.any(axis=1), np.minimum(self.raw * scale[0] + scale[1], 1), 0)
        self.words = _stacked(sources, "words")
        self.competes, self.counts = _stacked(sources, "competes"), _stacked(sources, "counts")
        self.multiplier, self.tokens = _stacked(sources, "multiplier"), _stacked(sources, "tokens")
        few = min(max(1, int(np.count_nonzero(self.competes))), MANY_CHUNKS)
        self._silent_below = SILENT_BELOW - FEWER * math.log10(MANY_CHUNKS / few)
        self._follows = _stacked(sources, "follows")
        self._follows[self._starts[:-1][self._starts[:-1] < len(self._follows)]] = False
        if len(topics) > 1:
            self._leave_to_own()

    def with_vectors(self, numbers: Sequence[int], vectors: Floats) -> Field:
        """The same with other vectors of some parts; what an index finds for them competes too."""
        replaced = self.vectors.copy()
        replaced[list(numbers)] = vectors
        return Field(self._topics, self._weights, replaced, self._utility, self._scale)

    def is_clear(self, part: int) -> bool:
        """Whether words and the table's meaning, two witnesses, agree, and something is near."""
        words, meaning = (
            np.where(self.competes, self.words[:, part], 0),
            np.where(self.competes, self.centred[:, part], 0),
        )
        count = min(CLEAR_BEST, len(words) - 1)
        near = np.argpartition(-meaning, count)[:count]
        said = np.argpartition(-words, count)[:count]
        if len(np.intersect1d(near, said[words[said] > 0], assume_unique=True)) < CLEAR_SHARED:
            return False
        nearest = float(np.where(self.competes, self.raw[:, part], 0).max())
        return nearest + CLEAR_WORDS * float(words.max()) >= CLEAR_COSINE

    def scores(self, settings: RetrievalSettings, read: Collection[int], *, is_ever_silent: bool) -> Scores:
        """Score all chunks. `read`: the parts whose vectors are the model's."""
        near = [self._near(part) for part in range(len(self._weights))]
        speaking = [
            part for part, one in enumerate(near) if not is_ever_silent or part not in read or one >= self._silent_below
        ]
        scores = Scores(len(self.tokens), is_silent=not speaking)
        for part in speaking or range(len(near)):  # all, so that they can be listed with the reason
            more = 0.0 if part in read or not settings.lexical_weight else TABLE_WORDS_MORE
            self._score(part, scores, settings, min(1.0, settings.lexical_weight + more), near[part])
        return scores

    def _near(self, part: int) -> float:
        """How near anything stored is to a part, on the scale of cosines: by meaning; where that is far by words."""
        nearest = float(np.where(self.competes, self.raw[:, part], 0).max(initial=0.0))
        words = np.where(self.competes, self.words[:, part], 0)
        if nearest >= SILENT_BELOW or not words.any():
            return nearest
        row = int(words.argmax())
        [(owner, source, start)] = [one[:3] for one in self._slices() if one[2] <= row < one[3]]
        if self.is_named[part] or owner.names(part, source, row - start):
            return SILENT_BELOW
        return nearest + QUOTED * owner.share(part, source, row - start)

    def _score(self, part: int, scores: Scores, settings: RetrievalSettings, lexical: float, nearest: float) -> None:
        raw, competes = self.raw[:, part], self.competes
        if not (settings.lexical_weight or settings.feedback_weight or settings.neighbour_weight):
            rows = _best(np.where(competes, raw, 0), LISTED)  # cosine and multiplier, and nothing else
            scores.offer(rows, raw[rows], 0, 0, 0, raw[rows], self.multiplier[rows])
            return
        meaning = self.centred[:, part]
        words = self.words[:, part]
        best_meaning = float(meaning[competes].max(initial=0.0))
        best_words = float(words[competes].max(initial=0.0))
        if not best_meaning and not best_words:
            return
        meant = (1 - lexical) * (meaning / max(best_meaning, 1e-6)) ** MEANING_POWER
        said = words * (lexical / max(best_words, 1e-6))
        own = np.where(self.counts, meant + said, 0)
        offered = np.where(competes, own * self.multiplier, 0)
        rows = _best(offered, CONSIDERED)
        rows = np.unique(np.concatenate([rows, *self._beside(rows[: CONSIDERED // 4])]))
        rows = rows[rows >= 0]
        like, weight = self._fed_back(rows, own, offered), settings.feedback_weight
        kept = (1 - weight) * own
        kept[rows] += weight * like
        before, behind = self._beside(rows)
        beside = np.where(before >= 0, kept[before], 0) + np.where(behind >= 0, kept[behind], 0)
        beside = beside * (settings.neighbour_weight * np.minimum(1, SHORT_TOKENS / self.tokens[rows]))
        rows, beside, like = rows[free := competes[rows]], beside[free], like[free]
        most = float((kept[rows] + beside).max(initial=0.0))
        scale = self._weights[part] * (nearest if best_meaning else 1.0) / max(most, 1e-9)
        shares = (1 - weight) * scale
        scores.offer(
            rows,
            shares * meant[rows],
            shares * said[rows],
            weight * scale * like,
            scale * beside,
            raw[rows],
            self.multiplier[rows],
        )

    def _fed_back(self, rows: Rows, own: Floats, offered: Floats) -> Floats:
        """The likeness of chunks to the mean of the best ones, weighed by their scores, on their scale."""
        best = rows[_best(offered[rows], FEEDBACK_CHUNKS)]
        vectors = self._centred_vectors(rows)
        at = np.searchsorted(rows, best)
        weights = own[best] / max(float(own[best].sum()), 1e-9)
        like = np.maximum(vectors @ (weights @ vectors[at]), 0)
        scale = np.float32(float(own[best].max(initial=0.0)) / max(float(like.max(initial=0.0)), 1e-6))
        return np.asarray(like * scale, np.float32)

    def _centred_vectors(self, rows: Rows) -> Floats:
        found: list[Floats] = []
        for owner, source, start, end in self._slices():
            first, last = np.searchsorted(rows, (start, end))
            vectors = source.vectors[rows[first:last] - start]
            mean = owner.mean
            if mean is None or not vectors.shape[1] or len(mean) != vectors.shape[1]:
                found.append(
                    vectors if vectors.shape[1] else np.zeros((last - first, self.vectors.shape[1]), np.float32)
                )
                continue
            apart = vectors - mean
            found.append(apart / np.maximum(np.linalg.norm(apart, axis=1, keepdims=True), 1e-6))
        return np.concatenate(found)

    def _beside(self, rows: Rows) -> tuple[Rows, Rows]:
        """The neighbours of chunks, before and behind them; -1: there is none."""
        before = np.where(self._follows[rows], rows - 1, -1)
        behind = np.minimum(rows + 1, len(self._follows) - 1)
        behind = np.where((behind > rows) & self._follows[behind], behind, -1)
        before = np.where((before >= 0) & self.counts[before], before, -1)
        return before, np.where((behind >= 0) & self.counts[behind], behind, -1)

    def shown_to(self, rows: Rows) -> tuple[Rows, NDArray[np.uint64]]:
        """The chunks that answers had been shown: the position in `rows` and the first half of the uuid, of each."""
        owners, uuids = [np.empty(0, np.intp)], [np.empty(0, np.uint64)]
        order = np.argsort(rows)
        ascending = rows[order]
        for _, source, start, end in self._slices():
            first, last = np.searchsorted(ascending, (start, end))
            if source.columns is not None and first < last:
                owner, shown = source.columns.shown(source.labels[ascending[first:last] - start])
                owners.append(order[first + owner])
                uuids.append(shown)
        return np.concatenate(owners), np.concatenate(uuids)

    def superseded(self) -> NDArray[np.uint64]:
        """The first halves of the uuids that a correction has taken out, in any of the topics."""
        return np.concatenate([topic.snapshot.taken_out for topic in self._topics])

    def said_within(self, times: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        """Whether each chunk was said at one of these times."""
        found = np.zeros(len(self.tokens), np.bool_)
        for owner, source, start, end in self._slices():
            said = owner.records(source.segment, source.row)["said_at"]
            for begin, until in times:
                found[start:end] |= (said >= max(0, begin)) & (said < max(0, until))
        return found

    def records(self, rows: Rows) -> NDArray[np.void]:
        """The log's columns of some chunks."""
        parts: list[tuple[Rows, NDArray[np.void]]] = []
        for owner, source, start, end in self._slices():
            own = np.flatnonzero((rows >= start) & (rows < end))
            if len(own):
                at = rows[own] - start
                parts.append((own, owner.records(source.segment[at], source.row[at])))
        if len(parts) == 1:
            return parts[0][1]
        dtype = (
            parts[0][1].dtype if parts else np.dtype([("uuid_high", "<u8"), ("uuid_low", "<u8"), ("said_at", "<u8")])
        )
        found = np.empty(len(rows), dtype)
        for own, records in parts:
            found[own] = records
        return found

    def entries(self, rows: Rows) -> dict[int, Entry]:
        """Read chunks; see `TopicColumns.entries`."""
        found: dict[int, Entry] = {}
        for owner, source, start, end in self._slices():
            own = rows[(rows >= start) & (rows < end)]
            if len(own):
                at = own - start
                places = list(zip(source.segment[at].tolist(), source.row[at].tolist(), strict=True))
                read = owner.entries(places)
                found.update(
                    (row, read[place]) for row, place in zip(own.tolist(), places, strict=True) if place in read
                )
        return found

    def topics_of(self, rows: Rows) -> list[str]:
        """The topic of each chunk."""
        names = [owner.topic_id for owner in self._owners]
        return [names[place] for place in (np.searchsorted(self._starts, rows, "right") - 1).tolist()]

    def alike(self, rows: Rows) -> NDArray[np.bool_]:
        """Whether a chunk is nearly the same as a better one; `rows`: best first."""
        order = np.argsort(rows)
        vectors = np.empty((len(rows), self.vectors.shape[1]), np.float32)
        at = 0
        for _, source, start, end in self._slices():
            first, last = np.searchsorted(rows[order], (start, end))
            own = source.vectors[rows[order][first:last] - start]
            vectors[order[first:last]] = own if own.shape[1] else 0
            at = last
        assert at == len(rows), "each row is of one source"
        return np.asarray(np.tril(vectors @ vectors.T >= COPY_COSINE, -1).any(axis=1), np.bool_)

    def _slices(self) -> zip[tuple[TopicColumns, Pool, int, int]]:
        starts = self._starts.tolist()
        return zip(self._owners, self._sources, starts, starts[1:], strict=False)

    def _leave_to_own(self) -> None:
        """Of a chunk that several topics have, as a correction adopted it, the own topic's state counts."""
        own = self._topics[0].snapshot
        for owner, source, start, _ in self._slices():
            if owner.snapshot is own:
                continue
            records = owner.records(source.segment, source.row)
            pairs = zip(records["uuid_high"].tolist(), records["uuid_low"].tolist(), strict=True)
            uuids = [uuid_bytes(high, low) for high, low in pairs]
            if known := own.known(uuids):
                rows = [start + place for place, uuid in enumerate(uuids) if uuid in known]
                self.competes = self.competes.copy()
                self.competes[rows] = False


class Scores:
    """The best score of each chunk over the parts of a question, and what it is made of."""

    def __init__(self, chunks: int, *, is_silent: bool) -> None:
        """`is_silent`: nothing stored is about any part."""
        self.is_silent = is_silent
        self.score = np.zeros(chunks, np.float32)
        """With the multiplier, before echoes and times."""
        self._shares = np.zeros((chunks, 5), np.float32)
        """Of meaning, words, feedback, neighbours; and the cosine."""
        self._share = np.zeros(chunks, np.float32)
        """The score over that of the part's best: the largest share over the parts."""
        self._near = np.zeros(chunks, np.float32)
        """The best cosine times the multiplier: a chunk that is near is not weak, though others match better."""
        self._factor = np.ones((chunks, 2), np.float32)
        """Of echoes and of times."""

    def offer(
        self,
        rows: Rows,
        meaning: Floats,
        words: Floats | int,
        feedback: Floats | int,
        neighbours: Floats | int,
        cosine: Floats,
        multiplier: Floats,
    ) -> None:
        """Take the scores of chunks for one part; of each chunk the best part counts."""
        score = np.maximum(meaning + words + feedback + neighbours, 0) * multiplier
        share = score / max(float((score / multiplier).max(initial=0.0)), 1e-9)
        self._share[rows] = np.maximum(self._share[rows], share)
        self._near[rows] = np.maximum(self._near[rows], cosine * multiplier)
        better = score > self.score[rows]
        rows, self.score[rows[better]] = rows, score[better]
        kept = rows[better]
        for column, value in enumerate((meaning, words, feedback, neighbours, cosine)):
            self._shares[kept, column] = value[better] if isinstance(value, np.ndarray) else value

    def favour(self, then: NDArray[np.bool_], factor: float, *, is_alone: bool) -> None:
        """Raise what was said when the question says; where it asks for nothing but a time, that alone counts."""
        self._factor[then, 1] = factor
        if is_alone:
            self.score[then] = np.maximum(self.score[then], self.score.max(initial=0.0))
            self.is_silent = self.is_silent and not then.any()
        self.score[then] *= factor
        self._share[then] = 1.0

    def weigh_echoes(self, field: Field) -> None:
        """An answer stands behind what its prompt had shown, and far behind where some of that was superseded since.

        What it was shown was perhaps an answer itself: from the oldest on, so that each is held against what is left.
        """
        rows = _best(self.score, LISTED)
        owner, shown = field.shown_to(rows)
        if not len(owner):
            return
        records = field.records(rows)
        place_of = dict(zip(records["uuid_high"].tolist(), range(len(rows)), strict=True))
        was_superseded = np.isin(shown, field.superseded())
        sources: dict[int, list[int]] = {}
        for place, high in zip(owner.tolist(), shown.tolist(), strict=True):
            sources.setdefault(place, []).append(place_of.get(high, place))
        left = self.score[rows].tolist()
        corrected = set(owner[was_superseded].tolist())
        for place in np.argsort(records["origin_id"], kind="stable").tolist():
            if place in sources:
                most = max((left[one] for one in sources[place] if one != place), default=0.0)
                if most >= RETOLD_SHARE * left[place]:
                    left[place] = min(left[place], ECHO_SHARE * most)
                left[place] *= CORRECTED_SHARE if place in corrected else 1
        factor = np.array(left, np.float32) / self.score[rows]
        self._factor[rows, 0] = factor
        self._share[rows] *= factor
        self._near[rows] *= factor
        self.score[rows] *= factor

    def order(self, field: Field, *, everything: bool) -> Rows:
        """The best chunks in the order in which they are to fill the budget: a shorter one of two that are as good goes
        first, and one that is nearly the same as a better one waits until all others are in. With `everything` also
        those that nothing speaks for."""
        rows = _best(np.where(field.counts, self.score + 1e-9, 0) if everything else self.score, LISTED)
        rows = rows[np.argsort(-self.score[rows] / field.tokens[rows] ** LENGTH_POWER, kind="stable")]
        waits = np.zeros(len(rows), np.bool_)
        waits[:COMPARED] = field.alike(rows[:COMPARED])
        return np.concatenate([rows[~waits], rows[waits]])

    def strong(self, rows: Rows, multiplier: Floats, settings: RetrievalSettings) -> NDArray[np.bool_]:
        """Whether chunks are worth showing: near or matching well by themselves, and beside the best for their part."""
        lifted = np.maximum(multiplier, 1)  # Helpful raises a chunk among others, and brings it to no other question
        best = np.maximum(self.score[rows], self._near[rows]) / lifted
        return np.asarray((best >= settings.min_score) & (self._share[rows] >= settings.min_share), np.bool_)

    def parts(self, rows: Rows, multiplier: Floats) -> list[Parts]:
        """The scores of chunks, explained."""
        columns = np.column_stack([self._shares[rows, :4], multiplier, self._factor[rows], self._shares[rows, 4]])
        return list(itertools.starmap(Parts, columns.tolist()))


def _stacked(sources: Sequence[Pool], name: str) -> Any:
    arrays = [getattr(source, name) for source in sources]
    return np.concatenate(arrays)


def _best(score: Floats, count: int) -> Rows:
    """The positions of the highest scores above 0, best first; of equal ones the later first."""
    rows = np.argpartition(-score, count)[:count] if len(score) > count else np.arange(len(score))
    rows = rows[score[rows] > 0]
    return rows[np.lexsort((-rows, -score[rows]))]
