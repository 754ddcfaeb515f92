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
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

COVERAGE_FULL = 0.25
"""Words have their full weight if the best chunk has at least this share of the question's idf mass. Below it, matches
are chance, and the weight falls to 0."""
COVERED = 0.9
"""A chunk with at least this share of the question's words, or of one clause's, is not averaged either: each part of a
long question may be answered by another chunk."""
WORD_BY_WORD = 0.5
"""The relevance, in cosine units, of a chunk with all words of the question, where no cosine is higher."""


class Evidence(msgspec.Struct, frozen=True):
    """The evidence for one chunk."""

    cosine: float | None
    """None: it is not embedded yet, or the question is not."""
    multiplier: float = 1.0
    lexical: float = 0.0
    """BM25, 0 or more."""
    coverage: float = 0.0
    """The share of the question's idf mass that it contains, 0 to 1."""
    is_exact: bool = False
    """Whether it contains a rare identifier of the question."""
    neighbours: tuple[int, ...] = ()
    """Positions, among all evidence, of the chunks said just before and after."""


class Parts(msgspec.Struct, frozen=True):
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

    @property
    def score(self) -> float:
        """relevance x multiplier x echo x time: the order."""
        return (self.cosine + self.lexical + self.neighbours) * self.multiplier * self.echo * self.time

    @property
    def strength(self) -> float:
        """The value compared with `retrieval.min_score`: the score, or the score by meaning alone where that is higher.

        Words only reorder: a chunk that passes by meaning alone is not dropped because other chunks have the words.
        Measured (bench/quality.py): 3 points more of what a question needs in 2,000 tokens, 6 in 4,000.
        """
        words = self.words_alone * self.multiplier * self.echo
        return max(self.score, self.similarity * self.multiplier * self.echo, words)


def fuse(evidence: Sequence[Evidence], *, lexical_weight: float, neighbour_weight: float) -> list[Parts]:
    """The score of each chunk, in the order given; weights from 0 to 1."""
    best_cosine = max((max(0.0, one.cosine or 0.0) for one in evidence), default=0.0)
    best_lexical = max((one.lexical for one in evidence), default=0.0)
    coverage = max((one.coverage for one in evidence), default=0.0)
    weight = lexical_weight * min(1.0, coverage / COVERAGE_FULL) if best_lexical > 0 else 0.0
    scale = max(best_cosine, coverage * WORD_BY_WORD)
    own = [_own(one, weight, scale / best_lexical if weight else 0.0) for one in evidence]
    relevance = [cosine + lexical for cosine, lexical in own]
    added = [neighbour_weight * sum(relevance[i] for i in one.neighbours) for one in evidence]
    highest = max((one + more for one, more in zip(relevance, added, strict=True)), default=0.0)
    shrunk = max(relevance, default=0.0) / highest if highest and neighbour_weight else 1.0
    return [
        Parts(one.cosine or 0.0, cosine * shrunk, lexical * shrunk, more * shrunk, one.multiplier, _words_alone(one))
        for (cosine, lexical), more, one in zip(own, added, evidence, strict=True)
    ]


def _words_alone(one: Evidence) -> float:
    if one.cosine is not None:
        return 0.0
    return WORD_BY_WORD if one.is_exact else one.coverage * WORD_BY_WORD  # a rare identifier says enough


def _own(one: Evidence, weight: float, unit: float) -> tuple[float, float]:
    """The shares of meaning and of words, without neighbours."""
    cosine, lexical = max(0.0, one.cosine or 0.0), one.lexical * unit
    if weight and one.coverage >= COVERED:
        lexical = max(lexical, one.coverage * WORD_BY_WORD)
        if lexical > (1 - weight) * cosine + weight * lexical:
            return 0.0, lexical
    if one.cosine is None or (one.is_exact and weight and lexical > cosine):
        return 0.0, lexical
    return (1 - weight) * cosine, weight * lexical
