"""The relevance of a chunk to a question, fused from its meaning, its words and its neighbours, in cosine units.

Rule: computed from values alone; with both weights 0 it is exactly max(0, cosine) x multiplier. Words and neighbours
change the order and may raise a chunk up to the best cosine of the question, never beyond it, so that
`retrieval.min_score` keeps its meaning; only a chunk with nearly all words of the question may score above any cosine.

With w the lexical weight, scaled down to nothing where the best chunk has little of the question's words:

    relevance = (1 - w) max(0, cosine) + w lexical/best lexical x scale
    scale     = max(best cosine, coverage of the best chunk / 2)

A chunk that contains a rare identifier of the question, or nearly all words of one of its clauses, is not averaged: a
low cosine means nothing for a name. A share of the relevance of its two chronological neighbours is added, and all is
scaled down so that the best value stays as it was. A chunk that is not embedded yet, and each where the question could
not be embedded, has no cosine; its words count for both.

Where vectors apart are given (see `standing`), the cosine of the formula is that between them: all chunks of a topic
are alike in something (who talks, what about), and that says nothing. Then all is computed once more, with the question
moved towards the best chunks (Rocchio's feedback): what answers a part of it is often like what answers another.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

COVERAGE_FULL = 0.25
"""Words have their full weight if the best chunk has at least this share of the question's idf mass. Below it, matches
are chance, and the weight falls to 0."""
COVERED = 0.9
"""A chunk with at least this share of the question's words, or of one clause's, is not averaged either: each part of a
long question may be answered by another chunk."""
WORD_BY_WORD = 0.5
"""The relevance, in cosine units, of a chunk with all words of the question, where no cosine is higher."""
CROSSING_POWER, CROSSING_COVERAGE_FULL = 1.5, 0.5
"""Beside a model that finds across languages words count less: to this power their weight (0.46 for 0.6, and 1 stays
1), and all of it only from this coverage on. Measured on long talks and on facts in eight languages; see
bench/NOTES.md."""
MEANING_ALONE = 0.6
"""A cosine without any words is this much evidence: other words for the same thing reach 0.4, chance hardly does."""
FEEDBACK_CHUNKS = 4
FEEDBACK_SHARE = 16
"""The question is moved towards the best 4 chunks; towards fewer where there are fewer than 16 times as many
candidates: among a handful the best few are nearly all."""


class Evidence(NamedTuple):
    """The evidence for n chunks: a column each, shape (n,)."""

    cosine: Values
    """NaN: it is not embedded yet, or the question is not."""
    multiplier: Values
    lexical: Values
    """BM25, 0 or more."""
    coverage: Values
    """The share of the question's idf mass that it contains, 0 to 1."""
    is_exact: NDArray[np.bool_]
    """Whether it contains a rare identifier of the question."""
    beside: NDArray[np.intp]
    """Pairs of rows, shape (m, 2): a chunk, and one that was said just before or after it."""

    @property
    def weight(self) -> Values:
        """How much speaks for each at all, from 0 to 1, comparable between questions: the mean of cosine and coverage.

        A cosine that is high enough does without words, a rare identifier without anything else, and praise counts for
        a chunk whose evidence is thin.
        """
        cosine = np.where(np.isnan(self.cosine), self.coverage * WORD_BY_WORD, np.fmax(self.cosine, 0.0))
        weight = np.maximum((cosine + self.coverage) / 2, MEANING_ALONE * cosine) * np.maximum(1.0, self.multiplier)
        return np.where(self.is_exact, 1.0, weight)

    @property
    def words_alone(self) -> Values:
        """See `Parts.words_alone`; a rare identifier says enough."""
        worth = np.where(self.is_exact, WORD_BY_WORD, self.coverage * WORD_BY_WORD)
        return np.where(np.isnan(self.cosine), worth, 0.0)

    @classmethod
    def joined(cls, parts: Sequence[Evidence]) -> Evidence:
        """Of several topics' chunks, one after the other."""
        firsts = itertools.accumulate((len(one.cosine) for one in parts), initial=0)
        return cls(
            cosine=np.concatenate([one.cosine for one in parts]),
            multiplier=np.concatenate([one.multiplier for one in parts]),
            lexical=np.concatenate([one.lexical for one in parts]),
            coverage=np.concatenate([one.coverage for one in parts]),
            is_exact=np.concatenate([one.is_exact for one in parts]),
            beside=np.concatenate([one.beside + first for one, first in zip(parts, firsts, strict=False)]),
        )


class Standing(msgspec.Struct, frozen=True):
    """How chunks stand to a question without what all of their topic have in common; one row for each evidence."""

    cosine: Values
    """NaN where it is not known."""
    vectors: NDArray[np.float32]
    """Unit vectors, shape (n, dimension); zeros where it is not known."""

    def __len__(self) -> int:
        return len(self.cosine)

    @classmethod
    def joined(cls, parts: Sequence[Standing]) -> Standing | None:
        """Of several topics' chunks, one after the other; None of none."""
        if not parts:
            return None
        return cls(np.concatenate([one.cosine for one in parts]), np.concatenate([one.vectors for one in parts]))


class Parts(msgspec.Struct, frozen=True, gc=False):
    """A score and its parts; `cosine`, `lexical` and `neighbours` add up to the relevance."""

    similarity: float
    """The cosine itself, 0 where it is not known; `cosine` is the share of it that counts."""
    cosine: float
    lexical: float
    neighbours: float
    multiplier: float
    words_alone: float = 0.0
    """The worth of the words, by themselves, of a chunk without a cosine; 0 for any other."""
    echo: float = 1.0
    """The share that is left of the score of a chunk that only repeats others (see `echoes`)."""
    time: float = 1.0
    """The factor on the score of a chunk that was said when the question says (see `times`)."""
    evidence: float = 1.0
    """See `Evidence.weight`."""
    coverage: float = 0.0
    """See `Evidence.coverage`."""

    @property
    def relevance(self) -> float:
        """The score without what corrections made of the chunk."""
        return (self.cosine + self.lexical + self.neighbours) * self.echo * self.time

    @property
    def score(self) -> float:
        """relevance x multiplier x echo x time: the order."""
        return (self.cosine + self.lexical + self.neighbours) * self.multiplier * self.echo * self.time

    @property
    def strength(self) -> float:
        """The value compared with `retrieval.min_score`: the score, or the score by meaning alone where that is higher.

        Words only reorder: a chunk that passes by meaning alone is not dropped because other chunks have the words.
        Measured (bench/recall.py): 3 points more of what a question needs in 2,000 tokens, 6 in 4,000.
        """
        words = self.words_alone * self.multiplier * self.echo
        return max(self.score, self.similarity * self.multiplier * self.echo, words)


def fuse(
    evidence: Evidence,
    *,
    lexical_weight: float,
    neighbour_weight: float,
    standing: Standing | None = None,
    feedback_weight: float = 0.0,
    crosses_languages: bool = False,
) -> list[Parts]:
    """The score of each chunk, in the order given; weights from 0 to 1.

    Args:
        standing: None: the cosines themselves count.
        feedback_weight: how far the question is moved towards the best chunks; 0: not at all.
        crosses_languages: see `Embedder.finds_across_languages`.
    """
    plain = evidence.cosine
    if not len(plain):
        return []
    full = COVERAGE_FULL
    if crosses_languages:
        lexical_weight, full = lexical_weight**CROSSING_POWER, CROSSING_COVERAGE_FULL
    fusing = _Fusing(evidence, lexical_weight, neighbour_weight, full)
    cosine = plain if standing is None else np.where(np.isnan(standing.cosine), plain, standing.cosine)
    shares = fusing.shares(cosine)
    if standing is not None:
        if feedback_weight:
            cosine = _moved(standing, cosine, shares.sum(axis=0), feedback_weight)
            shares = fusing.shares(cosine)
        shares *= _best(plain) / _best(cosine) if _best(cosine) else 1.0  # in units of the plain cosine again
    similarity = np.where(np.isnan(plain), 0.0, plain)
    columns = similarity, *shares, evidence.multiplier, evidence.words_alone, evidence.weight, evidence.coverage
    return [
        Parts(like, meaning, words, more, multiplier, alone, evidence=weight, coverage=covered)
        for like, meaning, words, more, multiplier, alone, weight, covered in np.stack(columns, axis=1).tolist()
    ]


def own_scores(evidence: Evidence, lexical_weight: float) -> Values:
    """The score of each chunk without what its neighbours add."""
    if not len(evidence.cosine):
        return evidence.cosine
    relevance: Values = _Fusing(evidence, lexical_weight, 0.0).shares(evidence.cosine).sum(axis=0)
    return relevance * evidence.multiplier


def _best(cosine: Values) -> float:
    return float(np.fmax(cosine, 0.0).max())


def _moved(standing: Standing, cosine: Values, relevance: Values, weight: float) -> Values:
    """The cosines to the question after it was moved towards the mean of the best chunks."""
    known: NDArray[np.bool_] = np.any(standing.vectors, axis=1)
    count = min(FEEDBACK_CHUNKS, int(np.count_nonzero(known)) // FEEDBACK_SHARE)
    best = np.argsort(-np.where(known, relevance, -1.0), kind="stable")[:count]
    best = best[known[best] & (relevance[best] > 0)]
    if not len(best):
        return cosine
    mean = standing.vectors[best].mean(axis=0)
    length = np.sqrt(1 + 2 * weight * float(cosine[best].mean()) + weight * weight * float(mean @ mean))
    return np.where(known, (cosine + weight * (standing.vectors @ mean)) / length, cosine)


class _Fusing:
    """The columns of some evidence, to be fused with one cosine or another."""

    def __init__(
        self, evidence: Evidence, lexical_weight: float, neighbour_weight: float, full: float = COVERAGE_FULL
    ) -> None:
        self._lexical, self._coverage = evidence.lexical, evidence.coverage
        self._is_exact, self._beside = evidence.is_exact, evidence.beside
        self._neighbour_weight = neighbour_weight
        best, covered = float(self._lexical.max()), float(self._coverage.max())
        self._weight = lexical_weight * min(1.0, covered / full) if best >= sys.float_info.min else 0.0

    def shares(self, cosine: Values) -> Values:
        """The shares of meaning, words and neighbours in the relevance; shape (3, n)."""
        weight = self._weight
        meaning = np.fmax(cosine, 0.0)
        words = np.zeros_like(meaning)
        is_wordy = np.isnan(cosine)
        if weight:
            scale = max(float(meaning.max()), float(self._coverage.max()) * WORD_BY_WORD)
            words = self._lexical * (scale / float(self._lexical.max()))
            covered = self._coverage >= COVERED
            words = np.where(covered, np.maximum(words, self._coverage * WORD_BY_WORD), words)
            is_wordy |= covered & (words > (1 - weight) * meaning + weight * words)
            is_wordy |= self._is_exact & (words > meaning)
        shares = np.stack([np.where(is_wordy, 0.0, (1 - weight) * meaning), np.where(is_wordy, words, weight * words)])
        own = shares.sum(axis=0)
        added = np.zeros_like(own)
        if self._neighbour_weight and len(self._beside):
            added = self._neighbour_weight * np.bincount(
                self._beside[:, 0], weights=own[self._beside[:, 1]], minlength=len(own)
            )
        highest = float((own + added).max())
        shrunk = float(own.max()) / highest if highest and self._neighbour_weight else 1.0
        return np.stack([*shares, added]) * shrunk
