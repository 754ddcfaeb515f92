"""Which of the chunks that a search found are shown: the best by score, as far as the budget reaches.

Rule: a decision from values alone. Nothing is cut to fit; a chunk that does not fit is skipped and the next one tried.
What a score is made of stands in fusion.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry, Vector
from memd.recall.fusion import Parts

NEAR_IDENTICAL_COSINE = 0.99
"""Two chunks at least this similar say the same: the better one is shown."""
PRESSURE_FROM = 0.8
"""The fill ratio from which `context_pressure` is signalled; above 1.0 it is `context_overflow`."""


class Candidate(msgspec.Struct, frozen=True):
    """A chunk that a search found."""

    entry: Entry
    topic_id: str
    parts: Parts

    @property
    def score(self) -> float:
        """See `Parts.score`."""
        return self.parts.score


class Verdict(enum.StrEnum):
    """What becomes of a candidate, in words that a user reads."""

    RELEVANT = "relevant"
    WEAK = "below retrieval.min_score"
    VISIBLE = "in the prompt already"
    REPEATS = "nearly repeats a better one"
    BEYOND = "beyond retrieval.top_k"


class Judged(msgspec.Struct, frozen=True):
    """A candidate and what becomes of it."""

    candidate: Candidate
    verdict: Verdict


class Selection(msgspec.Struct, frozen=True):
    """What to show, in the order in which the model reads it, and how full the budget would be with everything."""

    shown: tuple[Candidate, ...]
    """By `origin_id`: chronological."""
    fill_ratio: float
    """Tokens of a block with all candidates over the budget: above 1 exactly if something is not shown."""


def relevant(
    candidates: Sequence[Candidate],
    *,
    min_score: float,
    top_k: int,
    visible_digests: Collection[bytes],
) -> list[Candidate]:
    """The candidates worth showing, best first. See `judged`."""
    found = judged(candidates, min_score=min_score, top_k=top_k, visible_digests=visible_digests)
    return [one.candidate for one in found if one.verdict is Verdict.RELEVANT]


def judged(
    candidates: Sequence[Candidate],
    *,
    min_score: float,
    top_k: int,
    visible_digests: Collection[bytes],
) -> list[Judged]:
    """Whether each candidate is worth showing and, if not, why; best first, ties to the older entry.

    Not worth showing is what is weaker than `min_score`, what comes from messages that are all in this prompt
    themselves, what nearly repeats a better one, and all beyond the best `top_k`. Of a chunk that several topics have
    (a correction adopted it) the newest entry counts and the others are left out altogether.
    """
    newest: dict[bytes, Candidate] = {}
    for candidate in candidates:
        known = newest.setdefault(candidate.entry.uuid, candidate)
        if candidate.entry.canonical_id > known.entry.canonical_id:
            newest[candidate.entry.uuid] = candidate
    ordered = sorted(newest.values(), key=lambda candidate: (-candidate.score, candidate.entry.canonical_id))
    kept = _Kept()
    found = []
    for candidate in ordered:
        verdict = Verdict.RELEVANT
        if not candidate.parts.strength >= min_score:  # not "<": a score that is no number is weak
            verdict = Verdict.WEAK
        elif is_visible(candidate.entry, visible_digests):
            verdict = Verdict.VISIBLE
        elif len(kept) >= top_k:
            verdict = Verdict.BEYOND
        elif not kept.add(candidate.entry.embedding):
            verdict = Verdict.REPEATS
        found.append(Judged(candidate, verdict))
    return found


class _Kept:
    """The vectors of what is kept; one of another model than the first one's is like none."""

    def __init__(self) -> None:
        self._vectors: NDArray[np.float32] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, vector: Vector) -> bool:
        """Whether it is kept: not if it nearly repeats one that is."""
        if self._vectors is None:
            self._vectors = np.zeros((32, len(vector)), np.float32)
        if self._count == len(self._vectors):
            self._vectors = np.concatenate([self._vectors, np.zeros_like(self._vectors)])
        if len(vector) == self._vectors.shape[1]:
            if np.any(self._vectors[: self._count] @ vector >= NEAR_IDENTICAL_COSINE):
                return False
            self._vectors[self._count] = vector
        self._count += 1
        return True


def is_visible(entry: Entry, visible_digests: Collection[bytes]) -> bool:
    """Whether every message that a chunk came from is in the prompt; a chunk that came from none never is."""
    return bool(entry.digests) and all(digest in visible_digests for digest in entry.digests)


def select(
    candidates: Sequence[Candidate],
    *,
    budget_tokens: int,
    frame_tokens: int,
    cost: Callable[[Candidate, int], int],
    visible_uuids: Collection[bytes] = (),
) -> Selection:
    """Fill the budget with the best candidates.

    A chunk that an earlier turn's block still shows takes its place in the budget but is not shown twice: what the
    question needs is then in the prompt, and worse chunks must not be added in its stead.

    Args:
        candidates: best first, as `relevant` gives them.
        budget_tokens: what the whole block may take.
        frame_tokens: the block's own first and last line.
        cost: tokens of one chunk as it will be shown, its marker included, given how many are left; of one that takes
            more than those it may be a guess, as long as the guess does.
        visible_uuids: chunks that blocks in this prompt show already.
    """
    left = budget_tokens - frame_tokens
    wanted = frame_tokens if candidates else 0
    shown = []
    for candidate in candidates:
        tokens = cost(candidate, left)
        wanted += tokens
        if tokens <= left:
            left -= tokens
            if candidate.entry.uuid not in visible_uuids:
                shown.append(candidate)
    shown.sort(key=lambda candidate: (candidate.entry.origin_id, candidate.entry.uuid))
    return Selection(tuple(shown), wanted / budget_tokens if budget_tokens > 0 else 0.0)
