"""Hits of several topics with their scores, read from disk only as far as they may be shown.

Rule: a damaged entry costs its own chunk and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from memd.embedding.encoder import Encoder
from memd.errors import StoreError
from memd.recall.fusion import Evidence, Parts, Standing, fuse
from memd.recall.ranking import Candidate, is_visible
from memd.recall.standing import CommonParts
from memd.recall.times import TimedQuestion
from memd.recall.topic_search import TopicSearch
from memd.settings.model import RetrievalSettings
from memd.store.store import Hit
from memd.wanted import Wanted

log = logging.getLogger("memd")


class ScoredHit(NamedTuple):
    """A chunk of one topic whose content is not read yet."""

    hit: Hit
    search: TopicSearch
    parts: Parts

    def read(self) -> Candidate | None:
        """The chunk; None if its entry is damaged, which costs this chunk and no other."""
        topic_id = self.search.snapshot.topic_id
        try:
            return Candidate(self.search.read((self.hit.segment, self.hit.row)), topic_id, self.parts)
        except StoreError as error:
            fields = {"topic": topic_id, "error": error}
            log.error("a chunk cannot be recalled; run `memd verify`", extra=fields)
            return None


class Scoring(NamedTuple):
    """The parts of a recall that scores depend on beside the search itself."""

    settings: RetrievalSettings
    commons: CommonParts
    encoder: Encoder

    def hits(self, question: TimedQuestion, searches: Sequence[TopicSearch], k: int) -> list[ScoredHit]:
        """The hits of all topics with their scores, best first, ties to the newer, each chunk once.

        Of a chunk that several topics have (a correction adopted it) the own topic's entry counts, else the newest.
        """
        hits: list[tuple[Hit, TopicSearch]] = []
        evidence: list[Evidence] = []
        standing: list[Standing] = []
        for search in searches:
            found, known = search.evidence(k, self.settings)
            hits += [(hit, search) for hit in found]
            evidence.append(known)
            if found and search.can_stand_apart:
                standing.append(search.standing(found, self.commons, self.encoder.fingerprint))
        parts = fuse(
            Evidence.joined(evidence),
            lexical_weight=self.settings.lexical_weight,
            neighbour_weight=self.settings.neighbour_weight,
            standing=Standing.joined(standing) if sum(map(len, standing)) == len(hits) else None,
            feedback_weight=self.settings.feedback_weight,
            crosses_languages=self.encoder.finds_across_languages(),
        )
        scored = [
            ScoredHit(hit, search, question.favoured(part) if question.spans and search.was_then(hit) else part)
            for (hit, search), part in zip(hits, parts, strict=True)
        ]
        if len(searches) > 1:
            scored.sort(key=lambda one: (one.search is searches[0], one.hit.canonical_id))
            scored = list({one.hit.uuid: one for one in scored}.values())
        return sorted(scored, key=lambda one: (-one.parts.score, -one.hit.canonical_id))


def read_hits(
    own: TopicSearch,
    wanted: Wanted,
    told: Callable[[Candidate], Candidate],
    min_score: float,
    hits: Sequence[ScoredHit],
    visible_digests: Collection[bytes],
    count: int,
) -> tuple[list[Candidate], int]:
    """Read chunks that are wanted and not visible until `count` have the strength `min_score`; how many were read, too.

    `told`: a candidate with what it loses by itself, whatever else there is.
    """
    candidates: list[Candidate] = []
    for search in {id(one.search): one.search for one in hits[:count]}.values():
        search.read_ahead((one.hit.segment, one.hit.row) for one in hits[:count] if one.search is search)
    for seen, one in enumerate(hits):
        if not count:
            return candidates, seen
        if one.search is own or not own.snapshot.knows(one.hit.uuid):
            candidate = one.read()
            if candidate is None or is_visible(candidate.entry, visible_digests):
                continue
            if wanted.admits_entry(candidate.entry):
                candidates.append(told(candidate))
                count -= candidates[-1].parts.strength >= min_score
    return candidates, len(hits)
