"""How far is looked for what a question needs: until enough was found that is worth showing, or nothing more can be.

Rule: what is worth showing is the same whether all else is wanted too or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from memd.recall.echoes import by_itself, missing_sources, shown_to, without_echoes
from memd.recall.ranking import NEAR_IDENTICAL_COSINE, Candidate, Demands, Ranked, Verdict, rank
from memd.recall.scored_hits import ScoredHit, Scoring, read_hits
from memd.recall.times import TimedQuestion
from memd.recall.topic_search import TopicSearch
from memd.recall.versions import newest_versions
from memd.wanted import Wanted

EXPLAINED_TOP_KS = 2
"""Where all else is wanted too, excluded candidates are returned up to `retrieval.top_k` times this many."""
ENDS = {Verdict.SMALL_TALK, Verdict.UNSUPPORTED, Verdict.FAR_BELOW}
"""Where one is reached, worse candidates are not worth looking for."""
_Read = Callable[[Sequence[ScoredHit], Collection[bytes], int], tuple[list[Candidate], int]]
"""See `read_hits`."""


class Looking:
    """A question whose vectors and words are known, to be answered from some topics."""

    def __init__(
        self,
        scoring: Scoring,
        question: TimedQuestion,
        searches: Sequence[TopicSearch],
        demands: Demands,
        visible_digests: Collection[bytes],
        wanted: Wanted,
    ) -> None:
        """`searches`: the request's own topic first. `visible_digests`, `wanted`: see `retrieve.Filters`."""
        self._scoring, self._question, self._searches, self._demands = scoring, question, searches, demands
        self._visible_digests, self._wanted = visible_digests, wanted
        self._same_cosine = scoring.encoder.same_cosine

    def ranked(self, k: int, *, in_turn: bool, relevant_only: bool) -> tuple[list[Ranked], Verdict | None]:
        """The candidates of all topics, best first, and why there is none to show whatever they are.

        Args:
            k: so many are looked at first.
            in_turn: see `retrieve.Filters`.
            relevant_only: without those that are not worth showing.
        """
        settings = self._scoring.settings
        told = partial(by_itself, self._visible_digests, self._question.words if in_turn else None)
        read: _Read = partial(read_hits, self._searches[0], self._wanted, told, self._demands.min_score)
        sources = missing_sources(dict(itertools.chain(*(one.found(k, settings).items() for one in self._searches))))
        for search in self._searches:
            search.include(sources)
        looked = self._looked(read, k, k, {})
        newest = newest_versions(
            self._searches,
            looked.ranked,
            least=self._same_cosine(NEAR_IDENTICAL_COSINE),
            asked=self._question.words,
            visible_digests=self._visible_digests,
            wanted=self._wanted,
        )
        if newest:
            looked = self._looked(read, looked.k, looked.count + len(newest), newest)
        ranked = looked.ranked
        relevant = [one for one in ranked if one.excluded is None]
        silence = Verdict.SMALL_TALK if self._demands.is_small_talk else None
        if not relevant and any(one.excluded is Verdict.UNSUPPORTED for one in ranked):
            silence = silence or Verdict.UNSUPPORTED
        if relevant_only:
            return relevant, silence
        ranked = self._rank(read(looked.hits, (), len(looked.hits))[0], newest)
        listed = EXPLAINED_TOP_KS * self._demands.top_k
        return [one for place, one in enumerate(ranked) if place < listed or one.excluded is None], silence

    def _looked(self, read: _Read, k: int, count: int, newest: Mapping[bytes, bytes]) -> _Looked:
        """Look from `k` and `count` on until there is enough; those of `newest` are read, however they match."""
        hits = self._scoring.hits(self._question, self._searches, k)
        while True:
            strong = [one for one in hits if one.parts.strength >= self._demands.min_score]
            first = [one for one in hits if one.hit.uuid in newest] if newest else []
            first += [one for one in strong if one.hit.uuid not in newest] if newest else strong
            candidates, seen = read(first, self._visible_digests, count)
            ranked = self._rank(candidates, newest)
            relevant = sum(one.excluded is None for one in ranked)
            is_enough = relevant >= self._demands.top_k or relevant == seen
            if is_enough or any(one.excluded in ENDS for one in ranked):
                break
            # Excluded ones took places among the best: look at more of what was found, then further.
            count += max(seen - relevant, count // 2)
            if seen == len(first):
                if all(search.is_exhausted_by(one.hit for one in strong) for search in self._searches):
                    break
                k = count
                hits = self._scoring.hits(self._question, self._searches, k)
        return _Looked(ranked, hits, k, count)

    def _rank(self, candidates: Sequence[Candidate], newest: Mapping[bytes, bytes]) -> list[Ranked]:
        shown = shown_to(candidates)
        superseded = {uuid: old for search in self._searches for uuid, old in search.superseded(shown).items()}
        min_score = self._scoring.settings.min_score
        return rank(
            without_echoes(candidates, self._question.words, superseded, min_score=min_score),
            demands=self._demands,
            visible_digests=self._visible_digests,
            same_cosine=self._same_cosine,
            newest=newest,
        )


class _Looked(msgspec.Struct, frozen=True):
    """The candidates that were looked at, and how far that was."""

    ranked: list[Ranked]
    hits: list[ScoredHit]
    """All that were found, best first."""
    k: int
    """So many were searched for."""
    count: int
    """So many strong ones were to be read."""
