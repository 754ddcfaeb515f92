"""What memory would bring up for a question, and why: recall with all its reasons, for people and programs that ask.

Rule: the same search and the same choice as for a prompt, in an empty conversation; it changes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from memd.conversation.tokens import TokenCounter
from memd.errors import BadQuestion
from memd.recall import block
from memd.recall.ranking import Candidate, Selection, Verdict, select
from memd.recall.retrieve import Recall, Searchable
from memd.settings.model import Config
from memd.store.as_of import PastTopic
from memd.store.store import TopicLog

INJECTED = "injected"
NO_ROOM = "no room in the budget"
EARLIER = "in the block of an earlier turn"


class ScoredChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. `score` is (`cosine_share` + `lexical` + `neighbours`) × `multiplier`."""

    id: str
    uuid: str
    topic_id: str
    canonical_id: int
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
    """`injected`, or why not."""


class FoundChunk(ScoredChunk, frozen=True, kw_only=True):
    """One candidate with what it says."""

    created_at: int
    """Microseconds since the epoch."""
    roles: tuple[str, ...]
    content: str


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, best first."""

    question: str
    topics: tuple[str, ...]
    as_of: int | None = None
    """The last canonical_id (microseconds since the epoch) that counted; None: the present."""
    note: str | None = None
    """What was not searched, if anything."""
    budget_tokens: int
    tokens: int
    """Of the block that would be injected."""
    chunks: tuple[FoundChunk, ...]


async def search(
    recall: Recall,
    counter: TokenCounter,
    config: Config,
    question: str,
    topics: Sequence[TopicLog],
    *,
    as_of: int | None = None,
) -> SearchAnswer:
    """Search the topics, the first as a request's own and the others as related ones.

    Args:
        as_of: search them as they were after the entry with this canonical_id.

    Raises:
        EmbeddingError, StoreError: recall is not possible now.
    """
    searched: Sequence[Searchable] = topics
    note = None
    if as_of is not None:
        past = await asyncio.get_running_loop().run_in_executor(None, _past, topics, as_of, config)
        meaning_only = [topic.topic_id for topic in past if not topic.has_words and config.retrieval.lexical_weight]
        searched, note = past, f"by meaning alone: {', '.join(meaning_only)}" if meaning_only else None
    judged = await recall.explain(question, searched[0], searched[1:]) if searched else []
    relevant = [one.candidate for one in judged if one.verdict is Verdict.RELEVANT]
    costs = {one.candidate.entry.uuid: _cost(counter, one.candidate) for one in judged}
    frame_tokens = counter.count(block.frame(config.injection.header))
    selection = select(
        relevant,
        budget_tokens=config.injection.budget_tokens,
        frame_tokens=frame_tokens,
        cost=lambda candidate, _: costs[candidate.entry.uuid],
    )
    shown = {candidate.entry.uuid for candidate in selection.shown}
    used = sum(costs[uuid] for uuid in shown) + (frame_tokens if shown else 0)
    return SearchAnswer(
        question=question,
        topics=tuple(topic.topic_id for topic in topics),
        as_of=as_of,
        note=note,
        budget_tokens=config.injection.budget_tokens,
        tokens=used,
        chunks=tuple(
            _found(one.candidate, costs[one.candidate.entry.uuid], _said(one.candidate, one.verdict, shown))
            for one in judged
        ),
    )


def _past(topics: Sequence[TopicLog], as_of: int, config: Config) -> list[PastTopic]:
    return [PastTopic(topic, as_of, words=config.retrieval.lexical_weight > 0) for topic in topics]


def moment(text: str) -> int:
    """The canonical_id that a time stands for: ids are given by the clock, in microseconds since the epoch.

    Args:
        text: a canonical_id, or an ISO 8601 date (its end) or time, of this machine's time zone if it names none.

    Raises:
        BadQuestion: it is neither.
    """
    if re.fullmatch(r"[0-9]{1,19}", text):
        return int(text)
    try:
        then = datetime.fromisoformat(text)
    except ValueError:
        raise BadQuestion(f"{text[:60]!r} is no canonical_id and no time; write it like 2026-11-20T14:30") from None
    if re.fullmatch(r"[0-9-]+", text):
        then += timedelta(days=1)
    return int(then.timestamp() * 1e6)


def no_topic(topic_id: str) -> BadQuestion:
    """What is wrong with a question to a topic that is not there."""
    return BadQuestion(f"there is no topic {topic_id!r}; `memd stats` lists them")


def _cost(counter: TokenCounter, candidate: Candidate) -> int:
    return counter.count_again(block.chunk_line(candidate.entry.public_id, candidate.entry.content) + "\n")


def _said(candidate: Candidate, verdict: Verdict, shown: set[bytes]) -> str:
    if verdict is not Verdict.RELEVANT:
        return str(verdict)
    return INJECTED if candidate.entry.uuid in shown else NO_ROOM


def scored_candidates(
    candidates: Sequence[Candidate], costs: Mapping[bytes, int], selection: Selection, visible: Collection[bytes]
) -> tuple[ScoredChunk, ...]:
    """What became of the candidates of a prompt, without their text.

    Args:
        costs: uuid → tokens; of those for which there was no room roughly.
        visible: the uuids that earlier blocks of the prompt show.
    """
    shown = {candidate.entry.uuid for candidate in selection.shown}
    return tuple(
        ScoredChunk(
            **_parts(
                one,
                costs[one.entry.uuid],
                INJECTED if one.entry.uuid in shown else EARLIER if one.entry.uuid in visible else NO_ROOM,
            )
        )
        for one in candidates
    )


def _found(candidate: Candidate, tokens: int, verdict: str) -> FoundChunk:
    entry = candidate.entry
    return FoundChunk(
        **_parts(candidate, tokens, verdict), created_at=entry.created_at, roles=entry.roles, content=entry.content
    )


def _parts(candidate: Candidate, tokens: int, verdict: str) -> dict[str, Any]:
    entry, parts = candidate.entry, candidate.parts
    return {
        "id": entry.public_id,
        "uuid": entry.uuid.hex(),
        "topic_id": candidate.topic_id,
        "canonical_id": entry.canonical_id,
        "score": round(parts.score, 6),
        "strength": round(parts.strength, 6),
        "cosine": round(parts.similarity, 6),
        "cosine_share": round(parts.cosine, 6),
        "lexical": round(parts.lexical, 6),
        "neighbours": round(parts.neighbours, 6),
        "multiplier": parts.multiplier,
        "tokens": tokens,
        "verdict": verdict,
    }
