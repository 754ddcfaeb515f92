"""Ranks the chunks that a search found and fills the budget with the best of them.

Rule: decided from values alone. Nothing is cut to fit; a chunk that does not fit is skipped and the next one tried.
How a score is computed is in fusion.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.embedding.embedder import Prior
from memd.entries import Entry, Vector
from memd.recall.fusion import COVERED, Parts
from memd.recall.small_talk import is_small_talk
from memd.settings.model import RetrievalSettings
from memd.store.lexical.analyzer import are_of_one_language

NEAR_IDENTICAL_COSINE = 0.99
"""Two chunks of one stream that are at least this similar say the same: only the better one is shown."""
TERSE_WORDS = 2
TERSE_SHARE = 0.85
"""A question of one or two words ("hometown?") is less like any text than a sentence is: so much of the evidence that
others need is enough."""
FOREIGN_MAX = 8
"""The best chunks whose language is looked at."""
KIND_SHARE = 0.34
"""In cosines, beside `retrieval.min_evidence`: what a question in the middle of the kind that memory answers need not
show, as its kind counts 1, but one about anything else must. Measured; see bench/NOTES.md."""
COVERAGE_WORTH = 0.1
"""The cosine that all words of a question are worth beside its kind."""
CHANCE_CHUNKS_MAX = 512
"""The nearest of many chunks is near by chance. Beyond so many it was not measured, and no more is asked for."""

Stream = tuple[str, str | None, bytes]


class Verdict(enum.StrEnum):
    """The decision on a candidate, in the words that a user reads."""

    INJECTED = "injected"
    EARLIER = "in the block of an earlier turn"
    NO_ROOM = "no room in the budget"
    WEAK = "below retrieval.min_score"
    VISIBLE = "in the prompt already"
    REPEATS = "nearly repeats a better one"
    BEYOND = "beyond retrieval.top_k"
    ASKED_AGAIN = "asks the same as a newer one"
    RETELLS = "retells what was corrected"
    FAR_BELOW = "far below the best (retrieval.min_share)"
    UNSUPPORTED = "too little evidence (retrieval.min_evidence)"
    SMALL_TALK = "the question is small talk"


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A chunk that a search found, with its score."""

    entry: Entry
    topic_id: str
    parts: Parts
    aside: Verdict | None = None
    """Why it is not shown although it matches (see `echoes`)."""

    @property
    def score(self) -> float:
        """See `Parts.score`."""
        return self.parts.score


class Demands(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds that chunks must reach to be shown."""

    min_score: float
    """The strength of each."""
    min_share: float = 0.0
    """The score of each, as a share of the relevance of the best; not of what was said when the question says."""
    min_evidence: float = 0.0
    """The evidence for the best; where that is less, and nothing was said when the question says, nothing is shown."""
    top_k: int
    is_small_talk: bool = False
    """Nothing is shown, whatever there is."""
    min_cosine: float | None = None
    """The cosine that takes the place of evidence where the model tells the question's kind (`Prior`); None: it does
    not, or there is no minimum."""
    is_terse: bool = False
    """The question has a word or two, whose kind says little: a chunk with all of them is enough."""
    asked_across: tuple[str, float] | None = None
    """The question, where it may be in another language than a chunk, and by how much lower cosines are then."""

    @classmethod
    def of(
        cls,
        settings: RetrievalSettings,
        question: str,
        depth: int,
        *,
        has_words: bool,
        prior: Prior | None,
        chunks: int,
    ) -> Demands:
        """The demands on what answers a question.

        Args:
            depth: how many times deeper than `retrieval.top_k` is looked, and how many times later it ends.
            has_words: whether words are searched.
            prior: None: the model tells nothing of a question.
            chunks: how many are searched.
        """
        is_terse = len(question.split()) <= TERSE_WORDS
        min_evidence = settings.min_evidence * (TERSE_SHARE if is_terse else 1) if has_words else 0.0
        min_cosine = None
        if prior is not None and min_evidence:
            chance = prior.spread * math.sqrt(2 * math.log(min(max(chunks, 2), CHANCE_CHUNKS_MAX)))
            min_cosine = min_evidence + KIND_SHARE + chance - min(prior.kind, 1.0)
        return cls(
            min_score=settings.min_score,
            min_share=settings.min_share / depth,
            min_evidence=min_evidence,
            top_k=settings.top_k * depth,
            is_small_talk=is_small_talk(question),
            min_cosine=min_cosine,
            is_terse=is_terse,
            asked_across=None if prior is None or prior.across is None else (question, prior.across),
        )

    def are_met_by(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one of these chunks has enough evidence, or was said when the question says."""
        if any(one.parts.time > 1 or self._is_enough(one.parts) for one in candidates):
            return True
        if self.min_cosine is None or self.asked_across is None:
            return False
        question, lower = self.asked_across
        best = sorted(candidates, key=lambda one: -one.parts.similarity)[:FOREIGN_MAX]
        return any(
            _boosted_cosine(one.parts) + lower >= self.min_cosine
            and not are_of_one_language(question, one.entry.content)
            for one in best
        )

    def _is_enough(self, parts: Parts) -> bool:
        if self.min_cosine is None or parts.words_alone:  # without a cosine there are only the words
            return parts.evidence >= self.min_evidence
        if parts.evidence >= 1 or (self.is_terse and parts.coverage >= COVERED):
            return parts.evidence >= self.min_evidence
        return _boosted_cosine(parts) + COVERAGE_WORTH * parts.coverage >= self.min_cosine


def _boosted_cosine(parts: Parts) -> float:
    """Praise counts for a chunk whose evidence is thin."""
    return parts.similarity * max(1.0, parts.multiplier)


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A candidate before the budget is filled."""

    candidate: Candidate
    excluded: Verdict | None = None
    """Why it is not worth showing; None: it is shown if there is room."""


class Judged(msgspec.Struct, frozen=True, gc=False):
    """A candidate with the final verdict on it."""

    candidate: Candidate
    verdict: Verdict
    tokens: int
    """The tokens of its line in a block, in the model's tokens; estimated where the verdict is NO_ROOM."""


class Selection(msgspec.Struct, frozen=True):
    """The chunks to show, and how full the budget would be with all that are worth showing."""

    judged: tuple[Judged, ...]
    """All candidates, best first."""
    shown: tuple[Candidate, ...]
    """In the order in which the model reads them: in which it was said."""
    fill_ratio: float
    """Tokens of all candidates worth showing over what they may take: above 1 exactly if one is not shown."""


def stream_of(entry: Entry) -> Stream:
    """Return the stream of text that a chunk was cut from; chunks of different streams are never compared.

    Only chunks of one stream can be neighbours, or repeat each other: a document that quotes a chat is another witness
    to the same fact, and a page imported between two turns was not said between them. A stream is a kind and a source,
    which names the conversation of imported turns, and of notes each is its own, while all live conversations of a
    topic are one stream. The log cannot separate them: it records which entries were appended together (`group_left`),
    but a conversation is stored in many appends, and the turns at the seam of two appends are neighbours. An entry that
    names its conversation would extend this key. Turns repeat each other whatever their conversation.
    """
    note = entry.part.hash if entry.kind == "note" and entry.part is not UNSET else b""
    return entry.kind, entry.source, note


def rank(
    candidates: Sequence[Candidate],
    *,
    demands: Demands,
    visible_digests: Collection[bytes],
    same_cosine: Callable[[float], float] = float,
) -> list[Ranked]:
    """Order the candidates best first, ties to the older entry, and exclude those that are not worth showing.

    Excluded are chunks weaker than `min_score`, chunks whose messages are all in this prompt, near repetitions of a
    better chunk (`Embedder.same_cosine` of 0.99), the same text in another document, those far below the best, all
    beyond the best `top_k`, and all but Updates where the best has too little evidence.
    """
    kept = _KeptVectors(same_cosine(NEAR_IDENTICAL_COSINE))
    strong = [one for one in candidates if one.parts.strength >= demands.min_score]  # whatever weak ones are listed too
    free = [one for one in strong if one.aside is None and not is_visible(one.entry, visible_digests)]
    least = demands.min_share * max((one.parts.relevance for one in free), default=0.0)
    silent = None
    if demands.is_small_talk:
        silent = Verdict.SMALL_TALK
    elif free and not demands.are_met_by(free):
        silent = Verdict.UNSUPPORTED
    ranked = []
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.score, candidate.entry.canonical_id)):
        excluded = None
        if not candidate.parts.strength >= demands.min_score:  # not "<": a NaN is weak
            excluded = Verdict.WEAK
        elif silent is not None and not (silent is Verdict.UNSUPPORTED and candidate.entry.action == "Update"):
            excluded = silent  # but what somebody put right is asked for in the words of what it replaced
        elif is_visible(candidate.entry, visible_digests):
            excluded = Verdict.VISIBLE
        elif candidate.aside is not None:
            excluded = candidate.aside
        elif candidate.score < least and candidate.parts.time <= 1:
            excluded = Verdict.FAR_BELOW
        elif kept.count >= demands.top_k:
            excluded = Verdict.BEYOND
        elif not kept.add(candidate.entry):
            excluded = Verdict.REPEATS
        ranked.append(Ranked(candidate, excluded))
    return ranked


class _KeptVectors:
    """The vectors of the chunks worth showing so far, by stream and dimension."""

    def __init__(self, near_identical: float) -> None:
        self.count = 0
        self._near_identical = near_identical
        self._groups: dict[tuple[Stream, int], tuple[NDArray[np.float32], int]] = {}
        self._of_documents: set[str] = set()

    def add(self, entry: Entry) -> bool:
        """Add a chunk's vector and return True, unless it nearly equals one of its stream.

        A document is no second witness where it has the same words below the same headings: it is a copy.
        """
        vector: Vector = entry.embedding
        # Of turns it does not matter in which conversation they were said.
        stream = ("turn", None, b"") if entry.kind == "turn" else stream_of(entry)
        key = stream, len(vector)  # a vector of another model is comparable to none of this one
        vectors, count = self._groups.get(key) or (np.zeros((32, len(vector)), np.float32), 0)
        text = entry.embedded_text if entry.kind == "document" else ""
        if text in self._of_documents or np.any(vectors[:count] @ vector >= self._near_identical):
            return False
        self._of_documents |= {text} if text else set()
        if count == len(vectors):
            vectors = np.concatenate([vectors, np.zeros_like(vectors)])
        vectors[count] = vector
        self._groups[key] = vectors, count + 1
        self.count += 1
        return True


def is_visible(entry: Entry, visible_digests: Collection[bytes]) -> bool:
    """Return whether every message that a chunk came from is in the prompt; False for one that came from none."""
    return bool(entry.digests) and all(digest in visible_digests for digest in entry.digests)


def select(
    ranked: Sequence[Ranked],
    *,
    budget_tokens: int,
    frame_tokens: int,
    cost: Callable[[Candidate, int], int],
    day: Callable[[Candidate], tuple[str, int]] = lambda _: ("", 0),
    shown_uuids: Collection[bytes] = (),
    block_tokens: int | None = None,
) -> Selection:
    """Fill the budget with the best candidates.

    A chunk that an earlier turn's block still shows takes its place in the budget but is not shown twice: the answer
    to the question is then in the prompt, and worse chunks must not be added in its stead.

    Args:
        ranked: best first, as `rank` gives them.
        budget_tokens: the most that chunks for this question may take, those shown already included.
        frame_tokens: the tokens of the block's own first and last line.
        cost: returns the tokens of a chunk's line, given how many are left; it may estimate a line that takes more
            than those, as long as the estimate is also above them.
        day: returns the line before all chunks of the day of a candidate, and its tokens.
        shown_uuids: chunks that other blocks of this prompt show.
        block_tokens: the most that the block itself may take, where the prompt has less room than the budget.
    """
    block_tokens = budget_tokens if block_tokens is None else min(budget_tokens, block_tokens)
    filling = _Filling(budget_tokens - frame_tokens, block_tokens - frame_tokens, cost, day)
    judged = [filling.judged(one, is_earlier=one.candidate.entry.uuid in shown_uuids) for one in ranked]
    shown = [one.candidate for one in judged if one.verdict is Verdict.INJECTED]
    shown.sort(key=lambda one: (one.entry.said, one.entry.origin_id, one.entry.uuid))
    wanted = frame_tokens if any(one.excluded is None for one in ranked) else 0
    fill_ratio = 0.0
    if block_tokens > 0:
        fill_ratio = max((wanted + filling.wanted) / budget_tokens, (wanted + filling.wanted_new) / block_tokens)
    return Selection(tuple(judged), tuple(shown), fill_ratio)


class _Filling:
    """A budget while it is filled, in tokens, the block's first and last line already paid.

    A day's line is paid by the first chunk of the day: of those shown, and among all that are wanted.
    """

    def __init__(
        self, left: int, room: int, cost: Callable[[Candidate, int], int], day: Callable[[Candidate], tuple[str, int]]
    ) -> None:
        self.wanted = self.wanted_new = 0
        """Tokens of all that are worth showing, and of those among them that no earlier block shows."""
        self._left, self._room = left, room
        self._cost, self._day = cost, day
        self._wanted_days: set[str] = set()
        self._shown_days: set[str] = set()

    def judged(self, one: Ranked, *, is_earlier: bool) -> Judged:
        """The verdict on the next candidate; takes its tokens out of the budget if it is shown."""
        candidate, verdict = one.candidate, one.excluded
        line, line_tokens = ("", 0) if is_earlier else self._day(candidate)
        new_line = 0 if line in self._shown_days else line_tokens
        free = (self._left if is_earlier else min(self._left, self._room)) - new_line
        tokens = self._cost(candidate, free)
        if verdict is None:
            in_all = tokens + (0 if line in self._wanted_days else line_tokens)
            self._wanted_days.add(line)
            self.wanted += in_all
            self.wanted_new += 0 if is_earlier else in_all
            taken = tokens + new_line if tokens <= free else 0
            self._left -= taken
            self._room -= 0 if is_earlier else taken
            verdict = Verdict.EARLIER if is_earlier else Verdict.INJECTED if taken else Verdict.NO_ROOM
        if verdict is Verdict.INJECTED:
            self._shown_days.add(line)
        return Judged(candidate, verdict, tokens)
