"""What memory would bring up for a question, and why: recall with all its reasons, for people and programs that ask.

Rule: the same search and the same choice as for a prompt, in an empty conversation; it changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from memd.assets import ranks_bytes
from memd.config import Config
from memd.context import injection
from memd.context.ranking import Candidate, Verdict, select
from memd.context.tokens import TokenCounter, cl100k_base
from memd.daemon.encoder import Encoder
from memd.daemon.offline import opened
from memd.daemon.recall import Recall
from memd.daemon.right_of_way import RightOfWay
from memd.errors import BadQuestion
from memd.store.log import TopicLog

INJECTED = "injected"
NO_ROOM = "no room in the budget"


class FoundChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. `score` is (`cosine_share` + `lexical` + `neighbours`) × `multiplier`."""

    id: str
    uuid: str
    topic_id: str
    canonical_id: int
    created_at: int
    """Microseconds since the epoch."""
    roles: tuple[str, ...]
    score: float
    strength: float
    """What `retrieval.min_score` is held against."""
    cosine: float
    cosine_share: float
    lexical: float
    neighbours: float
    multiplier: float
    tokens: int
    """What it takes in a prompt."""
    verdict: str
    """`injected`, or why it would not be."""
    content: str


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, best first."""

    question: str
    topics: tuple[str, ...]
    budget_tokens: int
    tokens: int
    """Of the block that would be injected."""
    chunks: tuple[FoundChunk, ...]


async def search(
    recall: Recall, counter: TokenCounter, config: Config, question: str, topics: Sequence[TopicLog]
) -> SearchAnswer:
    """Search the topics, the first as a request's own and the others as related ones.

    Raises:
        EmbeddingError, StoreError: recall is not possible now.
        TimeoutError: it took too long.
    """
    judged = await recall.explain(question, topics[0], topics[1:]) if topics else []
    relevant = [one.candidate for one in judged if one.verdict is Verdict.RELEVANT]
    costs = {one.candidate.entry.uuid: _cost(counter, one.candidate) for one in judged}
    frame_tokens = counter.count(injection.frame(config.injection.header))
    selection = select(
        relevant,
        budget_tokens=config.injection.budget_tokens,
        frame_tokens=frame_tokens,
        cost=lambda candidate: costs[candidate.entry.uuid],
    )
    shown = {candidate.entry.uuid for candidate in selection.shown}
    used = sum(costs[uuid] for uuid in shown) + (frame_tokens if shown else 0)
    return SearchAnswer(
        question=question,
        topics=tuple(topic.topic_id for topic in topics),
        budget_tokens=config.injection.budget_tokens,
        tokens=used,
        chunks=tuple(
            _found(one.candidate, costs[one.candidate.entry.uuid], _said(one.candidate, one.verdict, shown))
            for one in judged
        ),
    )


def search_offline(config: Config, question: str, topic_ids: Sequence[str]) -> SearchAnswer:
    """The same while no daemon runs.

    Args:
        topic_ids: those to search; none: all.

    Raises:
        StoreLocked: a daemon is running on the folder.
        MemdError: the model cannot be loaded, or the directory not be used.
    """
    counter = TokenCounter(cl100k_base(ranks_bytes()))
    with opened(config) as (store, embedder):
        known = store.topic_ids()
        for topic_id in topic_ids:
            if topic_id not in known:
                raise no_topic(topic_id)
        encoder, topics = Encoder(embedder), [store.topic(topic_id) for topic_id in topic_ids or known]
        recall = Recall(encoder, config.retrieval, RightOfWay())
        try:
            for topic in topics:
                topic.index_words()
            return asyncio.run(search(recall, counter, config, question, topics))
        finally:
            recall.close()
            encoder.close()


def no_topic(topic_id: str) -> BadQuestion:
    """What is wrong with a question to a topic that is not there."""
    return BadQuestion(f"there is no topic {topic_id!r}; `memd stats` lists them")


def _cost(counter: TokenCounter, candidate: Candidate) -> int:
    return counter.count_again(injection.chunk_line(candidate.entry.public_id, candidate.entry.content) + "\n")


def _said(candidate: Candidate, verdict: Verdict, shown: set[bytes]) -> str:
    if verdict is not Verdict.RELEVANT:
        return str(verdict)
    return INJECTED if candidate.entry.uuid in shown else NO_ROOM


def _found(candidate: Candidate, tokens: int, verdict: str) -> FoundChunk:
    entry, parts = candidate.entry, candidate.parts
    return FoundChunk(
        id=entry.public_id,
        uuid=entry.uuid.hex(),
        topic_id=candidate.topic_id,
        canonical_id=entry.canonical_id,
        created_at=entry.created_at,
        roles=entry.roles,
        score=round(parts.score, 6),
        strength=round(parts.strength, 6),
        cosine=round(parts.similarity, 6),
        cosine_share=round(parts.cosine, 6),
        lexical=round(parts.lexical, 6),
        neighbours=round(parts.neighbours, 6),
        multiplier=parts.multiplier,
        tokens=tokens,
        verdict=verdict,
        content=entry.content,
    )
