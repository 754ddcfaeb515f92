"""A retrieval as plain values: the candidates in a turn's receipt, and the answer of `memd search`.

Rule: a value for JSON only; every field is taken from `Retrieved` or its texts, and nothing is decided here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from memd.entries import Entry
from memd.recall.instructions import instructing_chunk

if TYPE_CHECKING:
    from memd.recall.retrieve import Candidate, Retrieved

PARTS_DIGITS = 6
"""Of the parts of a score that people and programs are told."""


class Verdict(enum.StrEnum):
    """Why a chunk is in or out, in the words that a user reads."""

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
    """When it was said, in microseconds since the epoch; 0 in receipts from before it was known."""
    score: float
    cosine: float
    """To the nearest part of the question."""
    meaning: float = 0.0
    """The share of the score that it has for its vector; 0, as the next two, in receipts from before they were told."""
    words: float = 0.0
    """For the words that it shares with the question."""
    feedback: float = 0.0
    """For its likeness to the best chunks."""
    neighbours: float
    """For the chunks just before and after it."""
    multiplier: float
    """Of corrections."""
    echo: float = 1.0
    """The share of its score that an answer has left which was shown what it says, and the model's own words in a turn
    that recalls anew."""
    time: float = 1.0
    """Above 1 where it was said when the question says."""
    tokens: int
    """The tokens of its line in a prompt, in the model's tokens."""
    verdict: str
    """`injected`, or why not."""
    instructs: tuple[str, ...] = ()
    """The signs that a document or a tool's result in it looks like an instruction to a model. In receipts only of what
    was injected."""


class FoundChunk(ScoredChunk, frozen=True, kw_only=True):
    """One candidate with its text."""

    created_at: int
    """When it was stored, in microseconds since the epoch."""
    roles: tuple[str, ...]
    content: str
    kind: str = "turn"
    source: str | None = None
    tags: tuple[str, ...] = ()
    heading: tuple[str, ...] = ()
    """Of a note its title, of a document's chunk the headings above it."""
    page: int | None = None
    sheet: str | None = None
    author: str = ""
    """The principal who said it; empty for the owner, and where there are none."""


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, best first."""

    question: str
    topics: tuple[str, ...]
    as_of: int | None = None
    """The last canonical_id (microseconds since the epoch) that counted; None: the present."""
    note: str | None = None
    """The limits of the search, and why nothing was shown, in sentences for people; None: everything was searched, by
    meaning and by words."""
    budget_tokens: int
    tokens: int
    """Of the block that would be injected."""
    is_model_asked: bool
    """Whether the embedding model read a part of the question; else the question table's vectors stood."""
    chunks: tuple[FoundChunk, ...]


_Chunk = TypeVar("_Chunk", bound=ScoredChunk)


def scored_chunks(retrieved: Retrieved) -> tuple[ScoredChunk, ...]:
    """The candidates without their text."""
    return tuple(
        [
            _scored(ScoredChunk, one, instructs=instructing_chunk(one.entry) if one.verdict is Verdict.INJECTED else ())
            for one in retrieved.candidates
        ]
    )


def search_answer(retrieved: Retrieved, as_of: int | None = None, limit: int | None = None) -> SearchAnswer:
    """The whole answer.

    Args:
        as_of: the canonical_id as of which the topics were searched; None: the present.
        limit: the most candidates that are told; None: all.
    """
    return SearchAnswer(
        question=retrieved.question,
        topics=retrieved.topic_ids,
        as_of=as_of,
        note=retrieved.note,
        budget_tokens=retrieved.budget.tokens,
        tokens=retrieved.budget.drifted(retrieved.raw_tokens),
        is_model_asked=retrieved.is_model_asked,
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
            for one in retrieved.candidates[:limit]
        ),
    )


def origin_fields(entry: Entry) -> dict[str, Any]:
    """The fields that say where a chunk is from."""
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
    entry, parts = one.entry, one.parts
    return made(
        id=entry.public_id,
        uuid=entry.uuid.hex(),
        topic_id=one.topic_id,
        canonical_id=entry.canonical_id,
        said_at=entry.said,
        score=round(parts.score, PARTS_DIGITS),
        cosine=parts.cosine,
        meaning=parts.meaning,
        words=parts.words,
        feedback=parts.feedback,
        neighbours=parts.neighbours,
        multiplier=parts.multiplier,
        echo=parts.echo,
        time=parts.time,
        tokens=one.tokens,
        verdict=str(one.verdict),
        **more,
    )
