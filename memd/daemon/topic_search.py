"""One topic's part of a recall: its candidates by meaning and by words, with all evidence for each.

Rule: every candidate gets the same evidence whichever side found it: its true cosine, its lexical score and its
neighbours, which are candidates too.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from memd.config import Retrieval
from memd.context.fusion import Evidence
from memd.errors import StoreError
from memd.store.log import Hit, Snapshot
from memd.store.snapshot import Place
from memd.store.words import LexicalHit, Question

log = logging.getLogger("memd")

LEXICAL_ROUNDS = 64
"""How many times `retrieval.top_k` chunks are looked at for their words, where what is found is in the prompt already:
common words are in nearly every chunk, and no score ends that list."""


class TopicSearch:
    """A question to one topic as it was when it was asked."""

    def __init__(self, snapshot: Snapshot, queries: NDArray[np.float32], words: Question | None) -> None:
        """`words`: the same question to the lexical index; None: by meaning only."""
        self.snapshot = snapshot
        self.is_exhausted = False
        """Whether a larger `k` finds nothing more."""
        self._queries = queries
        self._words = words

    def evidence(self, k: int, settings: Retrieval, *, first: int) -> tuple[list[Hit], list[Evidence]]:
        """The best `k` by meaning, the best `k` by words, and their neighbours where those count.

        `first`: the position of this topic's first chunk among the evidence of all topics.
        """
        dense = self.snapshot.search(self._queries, k)
        hits = {(hit.segment, hit.row): hit for hit in dense}
        lexical = self._best_by_words(k)
        is_enough = len(lexical) < k or k >= LEXICAL_ROUNDS * settings.top_k
        self.is_exhausted = (len(dense) < k or dense[-1].score < settings.min_score) and is_enough
        wanted = [place for one in lexical if (place := self.snapshot.live_place(one.canonical_id)) is not None]
        hits |= self.snapshot.hits_at(self._queries, [place for place in wanted if place not in hits])
        beside: dict[Place, tuple[Place, ...]] = {}
        if settings.neighbour_weight:
            beside = self._beside(hits)
            new = [one for pair in beside.values() for one in pair if one not in hits]
            new_hits = self.snapshot.hits_at(self._queries, new)
            hits |= new_hits
            beside |= self._beside(new_hits)
        return list(hits.values()), self._evidence(hits, lexical, beside, first)

    def _beside(self, hits: dict[Place, Hit]) -> dict[Place, tuple[Place, ...]]:
        pairs = self.snapshot.neighbours(list(hits))
        return {place: tuple(one for one in pair if one is not None) for place, pair in zip(hits, pairs, strict=True)}

    def _best_by_words(self, k: int) -> list[LexicalHit]:
        if self._words is None:
            return []
        try:
            return self._words.best(k, lambda canonical_id: self.snapshot.live_place(canonical_id) is not None)
        except StoreError as error:
            log.error("searched without its words", extra={"topic": self.snapshot.topic_id, "error": error})
            self._words = None
            return []

    def _evidence(
        self,
        hits: dict[Place, Hit],
        lexical: list[LexicalHit],
        beside: dict[Place, tuple[Place, ...]],
        first: int,
    ) -> list[Evidence]:
        words = {one.canonical_id: one for one in lexical}
        rest = [hit.canonical_id for hit in hits.values() if hit.canonical_id not in words]
        if self._words is not None:
            words |= self._words.about(rest)
        position = {place: first + number for number, place in enumerate(hits)}
        nothing = LexicalHit(0, 0.0, 0.0, False)
        evidence = []
        for place, hit in hits.items():
            one = words.get(hit.canonical_id, nothing)
            evidence.append(
                Evidence(
                    cosine=hit.cosine,
                    multiplier=hit.multiplier,
                    lexical=one.score,
                    coverage=one.coverage,
                    is_exact=one.is_exact,
                    neighbours=tuple(position[other] for other in beside.get(place, ()) if other in position),
                )
            )
        return evidence
