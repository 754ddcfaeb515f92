"""Hits of several topics with their scores, read from disk only as far as they may be shown.

Rule: a damaged entry costs its own chunk and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from memd.errors import StoreError
from memd.recall.fusion import Parts
from memd.recall.ranking import Candidate, is_visible
from memd.recall.topic_search import TopicSearch
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
