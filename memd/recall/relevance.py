"""Relevance of the candidates to each part of a question, in columns.

Rule: only array operations, the same for every chunk wherever it is stored. For each part:

    own       = (1 - w) (meaning / best meaning) ^ 1.5 + w (words / best words)
    relevance = (1 - f) own + f likeness to the five best + a share of the neighbours' relevance

scaled to the best raw cosine, so that thresholds are cosines. The score is relevance times the multiplier of
corrections, and a chunk's score is that for its best part. With all weights at 0 it is max(0, cosine) × multiplier.
Figures: bench/NOTES.md.
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
from memd.store.log.columns import role_bits, uuid_bytes

CLEAR, CLEAR_SHARE, CLEAR_WORDS = 0.6, 0.2, 0.015
"""Something stored is about a part without doubt, and the model need not read it, if CLEAR is reached by the nearest
cosine of the table's vector, CLEAR_WORDS of the best BM25, and CLEAR_SHARE of the share of the part's words that one
chunk has. For ranking the table's vector is as good; what it cannot tell is that nothing stored is about a part."""
SILENT_BELOW, QUOTED = 0.39, 0.15
"""Nothing stored is about a part if its nearest cosine by the model is below SILENT_BELOW. A chunk with all words of
the part adds QUOTED to that cosine, because one vector cannot hold a long list of things and its words can. This loses
0.5 % of 383 true questions (0.8 by the cosine alone); 95 % of 200 questions about nothing stored are silent."""
MANY_CHUNKS, FEWER = 300, 0.05
"""With many chunks, one is near by chance. So the threshold is lower by FEWER for each factor of ten below MANY_CHUNKS.
One threshold for all sizes loses 13 % of true questions with one chunk stored, and 7 % with five."""
UNREAD_BELOW, UNREAD_SHARE = 0.55, 0.1
"""The bundled model places texts in languages that it cannot read near each other. For a part in one, meaning
is evidence from UNREAD_BELOW on; below it a chunk must have this share of the part's words, weighted by rarity."""
STEP_WEIGHT = 0.25
"""Weight of the model's latest step beside the user's question. Calls resemble each other, and would crowd out what the
user asked for. Of 154 facts needed, blocks of 975 tokens show 119; 117 with weight 0.5, 104 without the step."""
MODEL_SHARE = 0.6
"""A chunk in which only the model speaks gets this share of its score: a long answer becomes many chunks near the
question, and people mostly ask for what they said. In twenty long chats 1,000 tokens have 47 % of the users' and 23 %
of the model's messages that are needed; 32 and 28 with a share of 1. Talk between people is found as before."""
OWN_WORDS_SHARE, OWN_WORDS_LISTED = 0.3, 64
"""When the model asks in mid-turn, the best chunks in which mostly the model used the question's words get this share
of their score: it repeats what it is looking for, and that is as near to the question as the answer. Of 689 facts that
agents needed, blocks show 561; 499 if the rule counts length instead of the question's words."""
TABLE_COSINE, BOTH_TABLES = 0.85, 0.7
"""TABLE_COSINE: cosine between the table's and the model's vector of one text, by which a pending chunk's cosine to the
model's vector of a part comes out too low. BOTH_TABLES: ratio of centred cosines, stored to pending, when the part's
vector is the table's too."""
SECOND_SHARE = 0.2
"""Share of a chunk's second best score that is added to its score for a part. Of two near copies that answer one part
equally well, the one that also answers another part then goes first. Of 20 facts that two agents needed late in a turn
their prompts had 19; 16 without this, though talk is found as well."""
ECHOES_MAX = 16
"""Limit on chains of answers that were shown answers."""
MEANING_POWER = 1.5
FEEDBACK_CHUNKS = 5
SHORT_TOKENS = 80
"""A longer chunk contains its own context, so its neighbours count less."""
LENGTH_POWER = 0.1
"""Of two equally good chunks the shorter goes first, because it leaves more of the budget."""
LISTED = 256
"""Limit on chunks that are shown or listed."""
ECHO_SHARE, CORRECTED_SHARE = 0.9, 0.5
"""An answer scores at most ECHO_SHARE of the best chunk its prompt had shown. CORRECTED_SHARE applies if one of those
chunks was superseded since."""
RETOLD_SHARE = 0.7
"""An answer is an echo only if a chunk it was shown reaches this share of the answer's own score. Nearly every answer
was shown something, and treating all as echoes hid what was said beside the question (measured: 2 of 13 identifiers and
1 of 5 pieces of code; with 0.5, 15 of a soak's 591 facts)."""
COPY_COSINE, COMPARED = 0.99, 48
"""A chunk with this cosine to a better one goes last; only the best COMPARED are compared."""
MODEL_BITS = role_bits(("assistant",))
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
        """The final score."""
        relevance = self.meaning + self.words + self.feedback + self.neighbours
        return relevance * self.multiplier * self.echo * self.time


class Field:
    """All m candidates of all topics and sources, concatenated, for a question of p parts."""

    def __init__(
        self,
        topics: Sequence[TopicColumns],
        weights: Sequence[float],
        vectors: Floats,
        scale: tuple[float, float],
    ) -> None:
        """
        Args:
            weights: of the parts, (p,).
            vectors: of the parts, (p, dimension); a row of zeros means unknown.
            scale: see `Embedder.scale`.
        """
        self._topics, self._scale = topics, scale
        self._sources = [(topic, source) for topic in topics for source in topic.sources]
        telling: Floats = np.max([topic.telling for topic in topics], axis=0)
        self._weights = np.array(weights, np.float32) * telling / telling.max()
        self.is_named = np.any([topic.terms.is_named for topic in topics], axis=0)
        """See `Terms`; sufficient evidence by itself."""
        few = sum(int(source.competes.sum()) for _, source in self._sources)
        self._silent_below = SILENT_BELOW - FEWER * math.log10(MANY_CHUNKS / min(max(1, few), MANY_CHUNKS))
        self._asked, self._is_read = vectors.copy(), np.zeros(len(vectors), np.bool_)
        self._find()

    def read_again(self, numbers: Sequence[int], vectors: Floats) -> None:
        """Replace the vectors of some parts by the model's. Candidates are searched again only for parts that had no
        vector before."""
        was_known = self._asked[list(numbers)].any(axis=1).all()
        self._asked[list(numbers)], self._is_read[list(numbers)] = vectors, True
        if was_known:
            self._place()
        else:
            self._find()

    def _find(self) -> None:
        for name in ("uuids", "said_at", "is_models"):
            self.__dict__.pop(name, None)
        self._entries: dict[int, Entry | None] = {}
        """Entries read so far, by row; None if unreadable."""
        known, dimension = self._asked[self._asked.any(axis=1)], self._asked.shape[1]
        labels = [source.found(topic.terms, known) for topic, source in self._sources]
        lengths = list(map(len, labels))
        self._slices = list(zip(self._sources, labels, itertools.accumulate(lengths, initial=0), strict=False))
        """For each source: the labels of its candidates, and the row of the first one."""
        self._vectors: Floats = self._joined(lambda one, labels: one.vectors_of(labels, dimension))
        """(m, dimension); zeros if a chunk has none."""
        self.words: Floats = np.concatenate([one.words(topic.terms, some) for (topic, one), some, _ in self._slices])
        """BM25, (m, p)."""
        self.counts: Bits = self._joined(lambda one, labels: one.counts[labels])
        self.competes: Bits = self._joined(lambda one, labels: one.competes[labels])
        """Rows that may be shown. Chunks visible in the prompt do not compete, but still support their neighbours."""
        self.multiplier: Floats = self._joined(lambda one, labels: one.multipliers(labels))
        self.tokens: Rows = self._joined(lambda one, labels: one.tokens(labels, dimension))
        """Raw tokens of each chunk's line, (m,)."""
        self._follows: Bits = self._joined(lambda one, labels: one.follows(labels))
        none = np.zeros(dimension, np.float32)
        means = [topic.mean for topic, _ in self._sources]
        self._means: Floats = np.array([none if one is None or len(one) != dimension else one for one in means])
        """Mean vector of each source's topic, (s, dimension)."""
        self._owner = np.repeat(np.arange(len(labels)), lengths)
        """Index of each chunk's source, (m,)."""
        vectors, self._mean_sizes = self._vectors, np.vecdot(self._means, self._means)
        self._amid: Floats = (vectors @ self._means.T)[np.arange(len(vectors)), self._owner]
        """Dot product of each chunk's vector with its topic's mean."""
        self._apart = _inverse(np.vecdot(vectors, vectors), self._amid, self._mean_sizes[self._owner])
        """1 / |v - μ| of each chunk; see `_place`."""
        self._place()
        if len(self._topics) > 1:
            self._leave_to_own()

    def _place(self) -> None:
        """Compute raw and centred cosines of all chunks to all parts, (m, p). Centring removes what all chunks of a
        topic have in common.

        The centred cosine is (v - μ)(q - μ) / |v - μ| / |q - μ|, which needs only dot products of the vectors v, q and
        the mean μ.
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
        """Return for each part whether something stored is about it by the table's vector and by words, (p,)."""
        words = (self.words * self.competes[:, None]).max(axis=0, initial=0)
        told = (self.raw * self.competes[:, None]).max(axis=0, initial=0) + CLEAR_WORDS * words
        for part in ((told < CLEAR) & (told >= CLEAR - CLEAR_SHARE) & (words > 0)).nonzero()[0].tolist():
            told[part] += CLEAR_SHARE * self._worded(part)
        return np.asarray((told >= CLEAR) & self._asked.any(axis=1), np.bool_)

    def speaking(self, judged: Collection[int], readers: Mapping[int, int], unread: Collection[int] = ()) -> Bits:
        """Return for each part whether it may contribute, (p,): something stored is near, or the part is not judged.

        Args:
            judged: parts that must not contribute if nothing stored is near.
            readers: maps a part to the one judged in its place: a clause to its sentence.
            unread: judged parts in a language that the model cannot read.
        """
        near = self._near >= self._silent_below
        for part in unread:
            if near[part] and self._near[part] < UNREAD_BELOW and not self.is_named[part]:
                near[part] = self._worded(part) >= UNREAD_SHARE
        is_far = np.zeros(len(near), np.bool_)
        is_far[list(judged)] = True
        is_far &= ~near
        return near | ~is_far[[readers.get(part, part) for part in range(len(near))]]

    def scores(self, settings: RetrievalSettings, speaking: Bits) -> Scores:
        """Score all chunks for the parts that may contribute; see `speaking`."""
        if is_silent := not speaking.any():
            speaking = ~speaking  # score all parts, so that candidates can be listed with the reason
        return Scores(self._shares(settings), self.raw, self.multiplier, speaking, is_silent=is_silent)

    @cached_property
    def _near(self) -> Floats:
        """Nearness of the nearest chunk to each part, on the scale of cosines: by meaning, or by words if meaning is
        far."""
        nearest = (self.raw * self.competes[:, None]).max(axis=0, initial=0)
        words = self.words * self.competes[:, None]
        for part in ((nearest < SILENT_BELOW) & words.any(axis=0)).nonzero()[0].tolist():
            topic, source, label = self._best_by_words(part)
            if self.is_named[part] or topic.names(part, source, label):
                nearest[part] = SILENT_BELOW
            else:
                nearest[part] += QUOTED * topic.share(part, source, label)
        return np.asarray(nearest, np.float32)

    def _worded(self, part: int) -> float:
        """Return the share of a part's words that the best chunk by words has; see `TopicColumns.share`."""
        topic, source, label = self._best_by_words(part)
        return topic.share(part, source, label)

    def _best_by_words(self, part: int) -> tuple[TopicColumns, ChunkSource, int]:
        """Return the competing chunk that is best for a part by its words."""
        row = int((self.words[:, part] * self.competes).argmax())
        (topic, source), labels, start = self._slices[self._owner[row]]
        return topic, source, int(labels[row - start])

    def _shares(self, settings: RetrievalSettings) -> Floats:
        """Return what meaning, words, feedback and neighbours contribute to each chunk's score, (4, m, p)."""
        shares = np.zeros((4, *self.raw.shape), np.float32)
        competes, lexical = self.competes[:, None], settings.lexical_weight
        if not (settings.lexical_weight or settings.feedback_weight or settings.neighbour_weight):
            shares[0] = np.maximum(self.raw, 0) * competes
            return shares
        best_meaning = (self.centred * competes).max(axis=0, initial=0)
        best_words = (self.words * competes).max(axis=0, initial=0)
        counts = self.counts[:, None]
        # A chunk that the prompt shows supports its neighbours, and no more than the best of those that compete.
        near, has = np.minimum(self.centred, best_meaning), np.minimum(self.words, best_words)
        meant = (1 - lexical) * (near / np.maximum(best_meaning, 1e-6)) ** MEANING_POWER * counts
        said = has * (lexical / np.maximum(best_words, 1e-6)) * counts
        own = meant + said
        weight = settings.feedback_weight
        like = self._likeness(own) * weight
        kept = (1 - weight) * own + like
        before, behind = self._beside()
        padded = np.concatenate([kept, np.zeros_like(kept[:1])])
        beside = padded[before] + padded[behind]
        beside *= (settings.neighbour_weight * np.minimum(1, SHORT_TOKENS / self.tokens))[:, None]
        most = ((kept + beside) * competes).max(axis=0, initial=0)
        scale = self._weights * np.where(best_meaning > 0, self._near, 1.0) / np.maximum(most, 1e-9)
        for place, some in enumerate(((1 - weight) * meant, (1 - weight) * said, like, beside)):
            np.multiply(some, scale * competes, out=shares[place])
        return shares

    def _likeness(self, own: Floats) -> Floats:
        """Return the likeness of all chunks to the score-weighted mean of the best ones, scaled to the best `own`."""
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
        """Return the rows of each chunk's neighbours before and behind it; m if there is none."""
        none = len(self._follows)
        rows = np.arange(none)
        behind = np.append(self._follows[1:], False) & np.append(self.counts[1:], False)
        before = self._follows & np.concatenate([[False], self.counts[:-1]])
        return np.where(before, rows - 1, none), np.where(behind, rows + 1, none)

    def shown_to(self, rows: Rows) -> tuple[Rows, NDArray[np.uint64]]:
        """Return the chunks that answers had been shown: position in `rows`, and first half of the uuid, of each."""
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
        """Look up chunks by the first halves of their uuids: whether a correction in any of the topics took each one
        out, and its replacement: the chunk itself if still live, 0 if it was removed without one."""
        gone, new = np.concatenate([topic.snapshot.taken_out for topic in self._topics], axis=1)
        if not len(gone):
            return np.zeros(len(uuids), np.bool_), uuids
        order = gone.argsort(kind="stable")
        found, is_gone = uuids.copy(), np.isin(uuids, gone)
        for _ in range(ECHOES_MAX):  # a replacement may have been corrected too
            if not (again := np.isin(found, gone)).any():
                break
            found[again] = new[order[np.searchsorted(gone, found[again], "right", sorter=order) - 1]]
        return is_gone, found

    def said_within(self, times: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        """Return whether each chunk was said within one of these times, (m,)."""
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
        """Time each chunk was said, in microseconds since the epoch, (m,)."""
        return self._column("said_at")

    @cached_property
    def is_models(self) -> Bits:
        """Whether only the model speaks in each chunk, (m,)."""
        return np.asarray(self._column("role_bits") == MODEL_BITS, np.bool_)

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
        """Return whether each chunk nearly repeats a better one; `rows`: best first."""
        vectors = self._vectors[rows]
        return np.asarray(np.tril(vectors @ vectors.T >= COPY_COSINE, -1).any(axis=1), np.bool_)

    def _joined(self, column: Callable[[ChunkSource, Rows], NDArray[Any]]) -> NDArray[Any]:
        """Concatenate a column over all sources."""
        return np.concatenate([column(source, labels) for (_, source), labels, _ in self._slices])

    def _leave_to_own(self) -> None:
        """Let the own topic's state count for chunks that several topics have (a correction adopted them)."""
        own = self._topics[0]
        for (topic, source), labels, start in self._slices:
            if topic is own:
                continue
            halves = (source.column(name, labels).tolist() for name in ("uuid_high", "uuid_low"))
            uuids = [uuid_bytes(high, low) for high, low in zip(*halves, strict=True)]
            if known := own.snapshot.known(uuids):
                self.competes[[start + place for place, uuid in enumerate(uuids) if uuid in known]] = False


def _inverse(sizes: Floats, products: Floats, mean_sizes: Floats) -> Floats:
    """Return 1 / |v - μ| from v², vμ and μ²; 0 for a zero vector."""
    return np.where(sizes > 0, 1 / np.sqrt(np.maximum(sizes - 2 * products + mean_sizes, 1e-6)), np.float32(0))


class Scores:
    """Each chunk's best score over the parts of a question, and its components."""

    def __init__(self, shares: Floats, cosines: Floats, multiplier: Floats, speaking: Bits, *, is_silent: bool) -> None:
        """
        Args:
            shares: contributions of meaning, words, feedback and neighbours, (4, m, p).
            cosines: raw cosines, (m, p).
            multiplier: of corrections, (m,).
            speaking: parts that may contribute, (p,). The others only tell apart chunks that are as good for these.
            is_silent: nothing stored is about any part.
        """
        self.is_silent = is_silent
        relevance = np.maximum(shares.sum(axis=0), 0)
        rows, part = np.arange(len(multiplier)), (relevance * speaking).argmax(axis=1)
        self._parts = shares[:, rows, part] * speaking[part], cosines[rows, part] * speaking[part]
        every = relevance * multiplier[:, None]
        self._of_parts = scored = every * speaking
        if scored.shape[1] > 1:
            self._of_parts = scored + SECOND_SHARE * np.minimum(scored, np.partition(every, -2, axis=1)[:, -2:-1])
        self.score: Floats = scored.max(axis=1)
        """Relevance times multiplier; echoes and times are applied later."""
        self._multiplier, self._lifted = multiplier, np.maximum(multiplier, 1)
        self._factor = np.ones((2, len(multiplier)), np.float32)
        """Factors of echoes and of times, (2, m)."""

    def favour(self, then: NDArray[np.bool_], factor: float, *, is_alone: bool) -> None:
        """Raise chunks said at the time that the question names. If the question is only about that time, they all
        count as matches."""
        self._factor[1, then] = factor
        if is_alone:
            top = (self.score / self._lifted).max(initial=0.0) * self._lifted[then]
            self.score[then] = np.maximum(self.score[then], top)
            self._of_parts[then] = np.maximum(self._of_parts[then], top[:, None])
            self.is_silent = self.is_silent and not then.any()
        self.score[then] *= factor

    def weigh_model(self, field: Field) -> None:
        """Rank chunks in which only the model speaks below those of people, tools and documents."""
        self._factor[0, field.is_models] = MODEL_SHARE
        self.score[field.is_models] *= MODEL_SHARE

    def weigh_echoes(self, field: Field) -> None:
        """Rank an answer below the chunks its prompt had shown, and far below the replacement of a corrected one. If a
        shown chunk was removed without replacement, the answer is weakened.

        A shown chunk may itself be an answer, so this repeats until no score changes.
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
        self._factor[0, rows] *= factor
        self.score[rows] *= factor

    def weigh_own_words(self, field: Field, parts: Sequence[str]) -> None:
        """When the model asks, rank its own statements about the parts below those of users and tools."""
        asked = {word for word in _WORD.findall(" ".join(parts).lower()) if not is_stopword(word)}
        rows = _best(self.score, OWN_WORDS_LISTED)
        own = [row for row, entry in field.entries(rows).items() if _is_models(entry, asked)]
        self._factor[0, own] *= OWN_WORDS_SHARE
        self.score[own] *= OWN_WORDS_SHARE

    def order(self, field: Field, *, everything: bool) -> Rows:
        """Return the best chunks in the order in which they fill the budget. Parts take turns, the shorter of two
        equally good chunks goes first, and near copies of better chunks go last. `everything`: include chunks without
        any score."""
        rows = _best(np.where(field.counts, self.score + 1e-9, 0) if everything else self.score, LISTED)
        length = field.tokens[rows] ** LENGTH_POWER
        best_first = np.argsort(-self.score[rows] / length, kind="stable")
        rows, length = rows[best_first], length[best_first]
        rows = rows[self._turns(rows, length).argsort(kind="stable")]
        waits = np.zeros(len(rows), np.bool_)
        waits[:COMPARED] = field.alike(rows[:COMPARED])
        return np.concatenate([rows[~waits], rows[waits]])

    def _turns(self, rows: Rows, length: Floats) -> Floats:
        """Return each chunk's turn: its rank for the part that serves it earliest. A part's share of turns is
        proportional to the score of its best chunk, before echoes and the model's own words are weighed.

        Without turns, an earlier question with the words of every part would be first for all of them, and many chunks
        about one part would precede the only one about another.
        """
        scored = self._of_parts[rows] * (self._factor[:, rows].prod(axis=0) / length)[:, None]
        places = (-scored).argsort(axis=0, kind="stable").argsort(axis=0, kind="stable") + 1
        waits = places / np.maximum((self._of_parts[rows] / length[:, None]).max(axis=0, initial=0), 1e-9)
        return np.asarray(np.where(scored > 0, waits, np.inf).min(axis=1), np.float32)

    def strong(self, rows: Rows, settings: RetrievalSettings) -> NDArray[np.bool_]:
        """Return whether chunks are worth showing: good matches, and chunks near by their raw cosine although others
        outweigh them. Helpful ranks a chunk higher among matches but makes it match no other question. Unhelpful is
        weighed cubed, so that the third one hides a perfect match."""
        multiplier = self._multiplier[rows]
        scored = np.minimum(self.score[rows], multiplier)  # a matching time does not undo Unhelpful
        weight = np.minimum(multiplier**2, 1 / multiplier)
        near = self._parts[1][rows] * self._factor[0, rows] * multiplier
        is_near = near * weight >= max(settings.min_score, SILENT_BELOW)
        return np.asarray((scored * weight >= settings.min_score) | is_near, np.bool_)

    def parts(self, rows: Rows) -> list[Parts]:
        """Return the components of the scores of these chunks."""
        shares, cosine = self._parts
        columns = np.stack([*shares[:, rows], self._multiplier[rows], *self._factor[:, rows], cosine[rows]], axis=1)
        return list(itertools.starmap(Parts, columns.astype(np.float64).round(PARTS_DIGITS).tolist()))


def _is_models(entry: Entry, asked: set[str]) -> bool:
    """Return whether the model uses more of these words in a chunk than the other speakers, or as many in more text."""
    if entry.speakers is UNSET:
        return entry.roles == ("assistant",)
    said = ["", ""]
    for one, text in entry.stretches:  # an Update's replacement has no speakers
        said[one.role == "assistant"] += text + " "
    others, models = ((len(asked.intersection(_WORD.findall(text.lower()))), len(text)) for text in said)
    return models > others


def _best(score: Floats, count: int) -> Rows:
    """Return the positions of the highest scores above 0, best first; of equal ones the later first."""
    rows = np.argpartition(-score, count)[:count] if len(score) > count else np.arange(len(score))
    rows = rows[score[rows] > 0]
    return rows[np.lexsort((-rows, -score[rows]))]
