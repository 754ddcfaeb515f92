"""What a chunk has to do with a question, from its meaning, its words and its neighbours: one value in cosine units.

Rule: from values alone, and with both weights 0 exactly max(0, cosine) x multiplier. Words and neighbours change the
order and may carry a chunk up to the best cosine of the question, never beyond, so that `retrieval.min_score` keeps its
meaning; only where nearly all that a question asks for is in a chunk word by word may it count more than any cosine.

With w the lexical weight, scaled down to nothing where the best chunk has little of the question's words:

    relevance = (1 - w) max(0, cosine) + w lexical/best lexical x scale
    scale     = max(best cosine, coverage of the best chunk / 2)

A chunk with a rare identifier of the question is spared the mean: a low cosine says nothing about a name.
To that a share of the two chronological neighbours' relevance is added, and all is scaled back so that the best value
stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

COVERAGE_FULL = 0.25
"""The share of the question's idf mass in its best chunk from which words count with their whole weight; below it they
are chance, and their weight falls to 0."""
WORD_BY_WORD = 0.5
"""What a chunk with all the words of the question is worth in cosine units, where no cosine is higher."""


class Evidence(msgspec.Struct, frozen=True):
    """What is known about one chunk."""

    cosine: float
    multiplier: float = 1.0
    lexical: float = 0.0
    """BM25, 0 or more."""
    coverage: float = 0.0
    """The share of the question's idf mass that it has, 0 to 1."""
    is_exact: bool = False
    """Whether it has a rare identifier of the question."""
    neighbours: tuple[int, ...] = ()
    """Positions, among all evidence, of the chunks said just before and after."""


class Parts(msgspec.Struct, frozen=True):
    """A score and what it is made of; `cosine`, `lexical` and `neighbours` add up to the relevance."""

    similarity: float
    """The cosine itself, of which `cosine` is the share that counts."""
    cosine: float
    lexical: float
    neighbours: float
    multiplier: float

    @property
    def score(self) -> float:
        """relevance x multiplier: the order."""
        return (self.cosine + self.lexical + self.neighbours) * self.multiplier

    @property
    def strength(self) -> float:
        """What `retrieval.min_score` is held against: the score, or what meaning alone would give where that is more.

        Words reorder; a chunk that its meaning alone would have brought in is not lost because others have the words.
        Measured (bench/quality.py): 3 points more of what a question needs in 2,000 tokens, 6 in 4,000.
        """
        return max(self.score, self.similarity * self.multiplier)


def fuse(evidence: Sequence[Evidence], *, lexical_weight: float, neighbour_weight: float) -> list[Parts]:
    """The score of each chunk, in the order given; weights from 0 to 1."""
    best_cosine = max((max(0.0, one.cosine) for one in evidence), default=0.0)
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
        Parts(one.cosine, cosine * shrunk, lexical * shrunk, more * shrunk, one.multiplier)
        for (cosine, lexical), more, one in zip(own, added, evidence, strict=True)
    ]


def _own(one: Evidence, weight: float, unit: float) -> tuple[float, float]:
    """The shares of meaning and of words, without neighbours."""
    cosine, lexical = max(0.0, one.cosine), one.lexical * unit
    if one.is_exact and weight and lexical > cosine:
        return 0.0, lexical
    return (1 - weight) * cosine, weight * lexical
