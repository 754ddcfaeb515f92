"""Ranks the chunks that a search found and leaves out those that are not worth showing.

Rule: decided from values alone. What holds now is shown: of chunks that are nearly the same the newest stays, whatever
matches better. How a score is computed is in fusion.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence

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
"""Two chunks of one stream that are at least this similar say nearly the same. A file that is read again after one
number was changed is nearer than that (0.9955), and so are rows of a table."""
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
    REPEATS = "nearly repeats another one"
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
    is_echo: bool = False
    """It says nothing that it was not shown (see `echoes`), and so is no newer version of it."""

    @property
    def order(self) -> tuple[int, int]:
        """Of two the newer has the higher one."""
        return self.entry.said, self.entry.origin_id

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
    best: Candidate | None = None
    """The best of those that are nearly the same as it, perhaps itself; None: it was compared with none."""


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


def alike_within(entry: Entry) -> tuple[Stream, int]:
    """Return what two chunks must have in common to be compared: of turns it does not matter in which conversation they
    were said, and a vector of another model is comparable to none of this one."""
    stream = ("turn", None, b"") if entry.kind == "turn" else stream_of(entry)
    return stream, len(entry.vector)


def rank(
    candidates: Sequence[Candidate],
    *,
    demands: Demands,
    visible_digests: Collection[bytes],
    same_cosine: Callable[[float], float] = float,
    newest: Mapping[bytes, bytes] | None = None,
) -> list[Ranked]:
    """Order the candidates best first, ties to the newer entry, and exclude those that are not worth showing.

    Excluded are chunks weaker than `min_score`, chunks whose messages are all in this prompt, the same text in another
    document, those far below the best, all beyond the best `top_k`, and all but Updates where the best has too little
    evidence; and of those that are nearly the same (`Embedder.same_cosine` of 0.99) all but those of `_Group.shown`,
    which come one after the other.

    Args:
        newest: by uuid, chunks that were looked for as the newest version of another: the uuid of that. They are shown
            wherever it is, however they match, unless somebody found them unhelpful.
    """
    newest = newest or {}
    ordered = sorted(candidates, key=lambda one: (-one.score, -one.entry.canonical_id))
    verdicts = _verdicts(ordered, demands, visible_digests)
    alike = _Alike(ordered, same_cosine(NEAR_IDENTICAL_COSINE), demands.top_k)
    looked_for = []
    for place, candidate in enumerate(ordered):
        verdict = verdicts[place] or alike.closed
        is_newest = candidate.entry.uuid in newest and candidate.parts.multiplier >= 1
        if is_newest and (verdict in _BEHIND or (verdict is None and not candidate.entry.vector)):
            looked_for.append(place)
        else:
            verdicts[place] = verdict or alike.add(place)
    for place in looked_for:
        if not alike.join(place, newest[ordered[place].entry.uuid]):
            verdicts[place] = verdicts[place] or alike.closed or alike.add(place)
    ranked = []
    for place, candidate in enumerate(ordered):
        group = alike.groups.get(place)
        if group is None:
            ranked.append(Ranked(candidate, verdicts[place], None if verdicts[place] else candidate))
            continue
        if group.place == place:
            ranked += [Ranked(one, None, group.best) for one in group.shown]
        if not any(candidate is one for one in group.shown):
            ranked.append(Ranked(candidate, Verdict.REPEATS, group.best))
    return ranked


_BEHIND = (Verdict.WEAK, Verdict.FAR_BELOW, Verdict.BEYOND)
"""Of what matches less than others."""


def _verdicts(
    ordered: Sequence[Candidate], demands: Demands, visible_digests: Collection[bytes]
) -> list[Verdict | None]:
    """Why each candidate by itself is not worth showing."""
    strong = [one for one in ordered if one.parts.strength >= demands.min_score]  # whatever weak ones are listed too
    free = [one for one in strong if one.aside is None and not is_visible(one.entry, visible_digests)]
    least = demands.min_share * max((one.parts.relevance for one in free), default=0.0)
    silent = None
    if demands.is_small_talk:
        silent = Verdict.SMALL_TALK
    elif free and not demands.are_met_by(free):
        silent = Verdict.UNSUPPORTED
    verdicts: list[Verdict | None] = []
    for candidate in ordered:
        verdict = None
        if not candidate.parts.strength >= demands.min_score:  # not "<": a NaN is weak
            verdict = Verdict.WEAK
        elif silent is not None and not (silent is Verdict.UNSUPPORTED and candidate.entry.action == "Update"):
            verdict = silent  # but what somebody put right is asked for in the words of what it replaced
        elif is_visible(candidate.entry, visible_digests):
            verdict = Verdict.VISIBLE
        elif candidate.aside is not None:
            verdict = candidate.aside
        elif candidate.score < least and candidate.parts.time <= 1:
            verdict = Verdict.FAR_BELOW
        verdicts.append(verdict)
    return verdicts


class _Group:
    """Chunks that are nearly the same as the best of them."""

    def __init__(self, best: Candidate, place: int) -> None:
        self.best, self.place = best, place
        self._newest = None if best.is_echo else best
        self._fullest = best
        self._repeats_best = False
        self.shown = [best]
        """The best and the newest; if these have the same words in the same order, the newest alone. And the one with
        most of the question's words, if it has more than they: the row of a table that is asked for. Where room ends,
        it ends behind what has most of those words, and behind the newest."""

    def add(self, candidate: Candidate) -> None:
        """Count one more."""
        if not candidate.is_echo and (self._newest is None or candidate.order > self._newest.order):
            self._newest = candidate
            self._repeats_best = _has_the_words_of(candidate.entry, self.best.entry)
        if candidate.parts.coverage > self._fullest.parts.coverage:
            self._fullest = candidate
        shown = [] if self._repeats_best else [self.best]
        if self._newest is not None and self._newest is not self.best:
            shown.append(self._newest)
        is_left_out = self._fullest is self.best and self._repeats_best
        if not is_left_out and all(self._fullest.parts.coverage > one.parts.coverage for one in shown):
            shown.append(self._fullest)
        self.shown = sorted(shown, key=lambda one: (one.parts.coverage, one.order), reverse=True)


class _Alike:
    """The chunks worth showing so far, those that are nearly the same in groups."""

    def __init__(self, ordered: Sequence[Candidate], near_identical: float, top_k: int) -> None:
        self.groups: dict[int, _Group] = {}
        """Of more than one, by the place of each chunk in it."""
        self.closed: Verdict | None = None
        """Why there is no place left."""
        self._ordered, self._near_identical, self._top_k = ordered, near_identical, top_k
        self._count = 0
        self._compared: dict[tuple[Stream, int], tuple[NDArray[np.float32], list[int]]] = {}
        """The vectors of the best of each group, with more rows than there are groups, and their places."""
        self._of_documents: set[str] = set()

    def add(self, place: int) -> Verdict | None:
        """Add a chunk to the group whose best is nearly the same, or to a new one.

        A document is no second witness where it has the same words below the same headings: it is a copy.
        """
        entry = self._ordered[place].entry
        vector: Vector = entry.embedding
        key = alike_within(entry)
        vectors, places = self._compared.get(key) or (np.zeros((32, len(vector)), np.float32), [])
        if places:
            cosines = vectors[: len(places)] @ vector
            if cosines[nearest := cosines.argmax()] >= self._near_identical:
                self._join(place, places[nearest])
                return None
        text = entry.embedded_text if entry.kind == "document" else ""
        if text in self._of_documents:
            return Verdict.REPEATS
        self._of_documents |= {text} if text else set()
        if len(places) == len(vectors):
            vectors = np.concatenate([vectors, np.zeros_like(vectors)])
        vectors[len(places)] = vector
        self._compared[key] = vectors, [*places, place]
        self._take(1)
        return None

    def join(self, place: int, uuid: bytes) -> bool:
        """Add a chunk to the group of another one, if that has a place."""
        added = {*self.groups, *(other for _, places in self._compared.values() for other in places)}
        other = next((one for one in added if self._ordered[one].entry.uuid == uuid), None)
        if other is not None:
            self._join(place, other)
        return other is not None

    def _join(self, place: int, other: int) -> None:
        if (group := self.groups.get(other)) is None:
            group = self.groups[other] = _Group(self._ordered[other], other)
        self.groups[place] = group
        before = len(group.shown)
        group.add(self._ordered[place])
        self._take(len(group.shown) - before)

    def _take(self, places: int) -> None:
        self._count += places
        if self._count >= self._top_k:
            self.closed = Verdict.BEYOND


def _has_the_words_of(entry: Entry, other: Entry) -> bool:
    """Whether two chunks have the same words in the same order, of the same speakers below the same headings."""
    return entry.above == other.above and entry.displayed.split() == other.displayed.split()


def is_visible(entry: Entry, visible_digests: Collection[bytes]) -> bool:
    """Return whether every message that a chunk came from is in the prompt; False for one that came from none."""
    return bool(entry.digests) and all(digest in visible_digests for digest in entry.digests)
