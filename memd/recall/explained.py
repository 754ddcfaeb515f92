"""A retrieval as plain values for JSON: the candidates in a turn's receipt, and the answer of `memd search`.

Rule: every field is copied from `Retrieved` or from its texts; nothing is decided here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from memd.entries import Entry
from memd.recall.untrusted import instructing_chunk

if TYPE_CHECKING:
    from memd.recall.retrieve import Candidate, Retrieved

PARTS_DIGITS = 6
"""Decimals of scores in receipts and answers."""


class Verdict(enum.StrEnum):
    """Why a chunk is shown or not, in the words that a user reads."""

    INJECTED = "injected"
    EARLIER = "in the block of an earlier turn"
    NO_ROOM = "no room in the budget"
    WEAK = "too weak"
    VISIBLE = "in the prompt already"
    SILENT = "nothing is near the question"


INJECTED = str(Verdict.INJECTED)
EARLIER = str(Verdict.EARLIER)


class ScoredChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. `score` is (`meaning` + `words` + `feedback` + `neighbours`) × `multiplier` × `echo` × `time`."""

    id: str
    uuid: str
    topic_id: str
    canonical_id: int
    said_at: int = 0
    """Time it was said, in microseconds since the epoch; 0 in receipts of older versions."""
    score: float
    cosine: float
    """Cosine to the nearest part of the question."""
    meaning: float = 0.0
    """Part of the score from its vector. This and the next two are 0 in receipts of older versions."""
    words: float = 0.0
    """Part of the score from the words it shares with the question."""
    feedback: float = 0.0
    """Part of the score from its likeness to the best chunks."""
    neighbours: float
    """Part of the score from the chunks just before and after it."""
    multiplier: float
    """Multiplier of corrections."""
    echo: float = 1.0
    """Factor below 1 for what only the model said, and more so for an answer that repeats chunks it was shown, and when
    a turn recalls again."""
    time: float = 1.0
    """Factor above 1 if it was said at the time that the question names."""
    tokens: int
    """Length of its line in a prompt, in the model's tokens."""
    verdict: str
    """`injected`, or why not."""
    instructs: tuple[str, ...] = ()
    """Signs that a document or tool result in it tries to instruct a model. In receipts only for injected chunks."""


class FoundChunk(ScoredChunk, frozen=True, kw_only=True):
    """One candidate with its text."""

    created_at: int
    """Time it was stored, in microseconds since the epoch."""
    roles: tuple[str, ...]
    content: str
    kind: str = "turn"
    source: str | None = None
    tags: tuple[str, ...] = ()
    heading: tuple[str, ...] = ()
    """The title of a note, or the headings above a document's chunk."""
    page: int | None = None
    sheet: str | None = None
    author: str = ""
    """The principal who said it; empty for the owner, or if there are no principals."""


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, best first."""

    question: str
    topics: tuple[str, ...]
    as_of: int | None = None
    """The last canonical_id (microseconds since the epoch) that was searched; None: the present."""
    note: str | None = None
    """Limits of the search, and why nothing was shown, in sentences for people; None if there were no limits."""
    budget_tokens: int
    tokens: int
    """Length of the block that would be injected."""
    is_model_asked: bool
    """Whether the embedding model read a part of the question; otherwise the table's vectors were enough."""
    is_reranked: bool = False
    """Whether the order is the reranker's; otherwise it is that in which they fill the budget, near copies last."""
    chunks: tuple[FoundChunk, ...]


_Chunk = TypeVar("_Chunk", bound=ScoredChunk)


def scored_chunks(retrieved: Retrieved) -> tuple[ScoredChunk, ...]:
    """Return the candidates without their text."""
    return tuple(
        [
            _scored(ScoredChunk, one, instructs=instructing_chunk(one.entry) if one.verdict is Verdict.INJECTED else ())
            for one in retrieved.candidates
        ]
    )


def search_answer(retrieved: Retrieved, as_of: int | None = None, limit: int | None = None) -> SearchAnswer:
    """Return the answer of a search.

    Args:
        as_of: the canonical_id as of which the topics were searched; None: the present.
        limit: maximum number of candidates, those that are shown before others; None: all.
    """
    chosen = sorted(retrieved.candidates, key=lambda one: one.verdict is not Verdict.INJECTED)[:limit]
    return SearchAnswer(
        question=retrieved.question,
        topics=retrieved.topic_ids,
        as_of=as_of,
        note=retrieved.note,
        budget_tokens=retrieved.budget.tokens,
        tokens=retrieved.budget.drifted(retrieved.raw_tokens),
        is_model_asked=retrieved.is_model_asked,
        is_reranked=retrieved.is_reranked,
        chunks=tuple(
            _scored(
                FoundChunk,
                one,
                instructs=instructing_chunk(one.entry),
                created_at=one.entry.created_at,
                roles=one.entry.roles,
                content=one.entry.displayed,
                **origin_fields(one.entry),
            )
            for one in chosen
        ),
    )


def origin_fields(entry: Entry) -> dict[str, Any]:
    """Return the fields that say where a chunk is from."""
    return {
        "kind": entry.kind,
        "source": entry.source,
        "tags": () if entry.tags is UNSET else entry.tags,
        "heading": entry.heading,
        "page": None if entry.part is UNSET else entry.part.page,
        "sheet": None if entry.part is UNSET else entry.part.sheet,
        "author": entry.author or "",
    }


def _scored(made: type[_Chunk], one: Candidate, /, **more: Any) -> _Chunk:
    entry = one.entry
    return made(
        id=entry.public_id,
        uuid=entry.uuid.hex(),
        topic_id=one.topic_id,
        canonical_id=entry.canonical_id,
        said_at=entry.said,
        score=round(one.parts.score, PARTS_DIGITS),
        tokens=one.tokens,
        verdict=str(one.verdict),
        **msgspec.structs.asdict(one.parts),
        **more,
    )
