"""Which of the chunks that a search found are shown: the best by score, as far as the budget reaches.

Rule: a decision from values alone. Nothing is cut to fit; a chunk that does not fit is skipped and the next one tried.
What a score is made of stands in fusion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np

from memd.chunks import Entry

NEAR_IDENTICAL_COSINE = 0.99
"""Two chunks at least this similar say the same: the better one is shown."""
PRESSURE_FROM = 0.8
"""The fill ratio from which `context_pressure` is signalled; above 1.0 it is `context_overflow`."""


class Candidate(msgspec.Struct, frozen=True):
    """A chunk that a search found."""

    entry: Entry
    topic_id: str
    score: float


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
    """The candidates worth showing, best first.

    Left out are scores below `min_score`, chunks whose messages are all in this prompt themselves, and all beyond the
    best `top_k`, and what nearly repeats a better one. Ties go to the older entry. Of a chunk that several topics have
    (a correction adopted it) the newest entry counts.
    """
    newest: dict[bytes, Candidate] = {}
    for candidate in candidates:
        known = newest.setdefault(candidate.entry.uuid, candidate)
        if candidate.entry.canonical_id > known.entry.canonical_id:
            newest[candidate.entry.uuid] = candidate
    kept = [
        candidate
        for candidate in newest.values()
        if candidate.score >= min_score and not is_visible(candidate.entry, visible_digests)
    ]
    kept.sort(key=lambda candidate: (-candidate.score, candidate.entry.canonical_id))
    return _distinct(kept, top_k)


def _distinct(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first `count` without those that nearly repeat an earlier one."""
    kept: list[Candidate] = []
    for candidate in candidates:
        vector = candidate.entry.embedding
        others = (one.entry.embedding for one in kept)
        if len(kept) < count and not any(
            len(other) == len(vector) and float(np.dot(other, vector)) >= NEAR_IDENTICAL_COSINE for other in others
        ):
            kept.append(candidate)
    return kept


def is_visible(entry: Entry, visible_digests: Collection[bytes]) -> bool:
    """Whether every message that a chunk came from is in the prompt; a chunk that came from none never is."""
    return bool(entry.digests) and all(digest in visible_digests for digest in entry.digests)


def select(
    candidates: Sequence[Candidate],
    *,
    budget_tokens: int,
    frame_tokens: int,
    cost: Callable[[Candidate], int],
    visible_uuids: Collection[bytes] = (),
) -> Selection:
    """Fill the budget with the best candidates.

    A chunk that an earlier turn's block still shows takes its place in the budget but is not shown twice: what the
    question needs is then in the prompt, and worse chunks must not be added in its stead.

    Args:
        candidates: best first, as `relevant` gives them.
        budget_tokens: what the whole block may take.
        frame_tokens: the block's own first and last line.
        cost: tokens of one chunk as it will be shown, its marker included.
        visible_uuids: chunks that blocks in this prompt show already.
    """
    costs = [cost(candidate) for candidate in candidates]
    left = budget_tokens - frame_tokens
    shown = []
    for candidate, tokens in zip(candidates, costs, strict=True):
        if tokens <= left:
            left -= tokens
            if candidate.entry.uuid not in visible_uuids:
                shown.append(candidate)
    shown.sort(key=lambda candidate: (candidate.entry.origin_id, candidate.entry.uuid))
    wanted = sum(costs) + (frame_tokens if costs else 0)
    return Selection(tuple(shown), wanted / budget_tokens if budget_tokens > 0 else 0.0)
