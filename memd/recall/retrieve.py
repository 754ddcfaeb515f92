"""Answers a question with the chunks to show; prompts, `memd search` and replay all use it.

Rule: reading changes nothing, and who asks makes no difference: the same question, topics, budget and filters give the
same chunks with the same verdicts. Every error of recall is raised; a caller that can do without memory catches it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from memd.embedding.encoder import Encoder
from memd.errors import EmbeddingError
from memd.recall import block
from memd.recall.asked import embedded_texts
from memd.recall.filling import Judged, Selection, select
from memd.recall.looking import Looking
from memd.recall.ranking import Candidate, Demands, Ranked, Verdict
from memd.recall.read_before import ReadBefore
from memd.recall.rerank import Reranker
from memd.recall.scored_hits import Scoring
from memd.recall.small_talk import is_small_talk
from memd.recall.standing import CommonParts
from memd.recall.times import TimedQuestion
from memd.recall.topic_search import NO_QUERIES, Searchable, TopicSearch, search_by_words
from memd.settings.model import RetrievalSettings
from memd.store.as_of import TopicAsOf
from memd.store.pending import UnstoredText
from memd.store.store import TopicLog
from memd.wanted import EVERYTHING, Wanted
from memd.wording import unsearched

log = logging.getLogger("memd")

TOP_K_TOKENS = 2_000
"""A budget of more is looked into as many times deeper, and ends as many times later below the best chunk."""
DEPTH_MAX = 8
CUTTING_SHARE = 0.5
"""Of the time that a request waits: what is not cut into chunks by then is not searched, but all else is, and requests
for other topics get their turn."""
_Begun = Sequence[tuple[str, Future[NDArray[np.float32]] | None]]
"""The texts of a question, each with its vectors as they are being made."""


class Budget(msgspec.Struct, frozen=True):
    """The limits of a retrieval."""

    tokens: int
    """The most that chunks for this question may take, in the model's tokens, those shown already included."""
    drift: float = 1.0
    """The model's tokens for one raw (cl100k_base) token."""
    block: int | None = None
    """The most that the new block may take, where the prompt has less room than that."""
    seconds: float | None = None
    """The longest that the caller waits; None: as long as it takes."""

    def drifted(self, raw_tokens: int) -> int:
        """`raw_tokens` in the model's tokens, rounded up."""
        return math.ceil(raw_tokens * self.drift)


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates that a caller does not want."""

    visible_digests: Collection[bytes] = ()
    """Digests of the messages in the prompt: a chunk that came from these alone is not shown."""
    shown_uuids: Collection[bytes] = ()
    """Chunks that blocks in the prompt show already: they take their place in the budget and are not shown again."""
    in_turn: bool = False
    """The question is about a turn under way, in which much was said that only repeats it (see `echoes.telling`)."""
    wanted: Wanted = EVERYTHING
    """The choice of who asks: other chunks are no candidates."""
    asked_at: int | None = None
    """Microseconds since the epoch at which it is asked, for "yesterday" and the day that is today; None: now."""
    relevant_only: bool = True
    """Leave out of the result what is not worth showing (weak, visible, repeated, beyond `retrieval.top_k`): it is not
    even read from disk."""


class Retrieved(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question, with the reasons for it."""

    question: str
    topic_ids: tuple[str, ...]
    """The request's own topic first."""
    budget: Budget
    candidates: tuple[Judged, ...] = ()
    """Best first."""
    shown: tuple[Candidate, ...] = ()
    """The chunks of the block, in reading order."""
    raw_tokens: int = 0
    """Of the whole block, in cl100k_base tokens; 0 where nothing is shown."""
    header: str = ""
    """The words of the block's first line."""
    fill_ratio: float = 0.0
    """See `ranking.Selection`."""
    embed_ms: float = 0.0
    """Waited for the question's vectors once its words were looked up."""
    search_ms: float = 0.0
    fill_ms: float = 0.0
    """Of filling the budget: counting tokens."""
    trouble: EmbeddingError | None = None
    """Why it was searched by words alone; None: it was searched by meaning too."""
    note: str | None = None
    """The limits of the search, in sentences for people; None: everything was searched, by meaning and by words."""


class Retriever:
    """Answers questions from snapshots, in threads of its own."""

    def __init__(
        self,
        encoder: Encoder,
        settings: RetrievalSettings,
        *,
        header: str,
        dates: bool,
        count: Callable[[str], int],
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """
        Args:
            header: `injection.header`, whose tokens are part of the block's.
            dates: whether the block shows days (`injection.dates`).
            count: the raw tokens of a text; called from several threads.
            now_us: microseconds since the epoch, for the day that is today.
        """
        self._encoder = encoder
        self._settings = settings
        self._count = count
        self._header = header
        self._dates = dates
        self._now_us = now_us
        self.reranker: Reranker | None = None
        """Puts the best candidates into its order."""
        self.read_before = ReadBefore()
        self._scoring = Scoring(settings, CommonParts(), encoder)
        self._day_tokens = lru_cache(maxsize=4096)(lambda line: count(line + "\n"))
        self._searches = ThreadPoolExecutor(max_workers=2, thread_name_prefix="memd-search")
        self._loads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="memd-load")
        self._loading: dict[TopicLog, asyncio.Future[None]] = {}

    async def retrieve(
        self, question: str, topics: Sequence[Searchable], budget: Budget, filters: Filters | None = None
    ) -> Retrieved:
        """Find the chunks that answer a question and fill the budget with the best of them.

        Args:
            question: the text to search for, usually the last user message.
            topics: the request's own topic, which overrides the others on every chunk that it knows, and the related
                ones; where they have nothing but what is visible already, nothing is embedded.

        Raises:
            EmbeddingError: the question cannot be embedded, and words are not searched.
            StoreError: recall is not possible now.
            TimeoutError: it took longer than `budget.seconds`.
        """
        filters = filters or Filters()
        nothing = Retrieved(question=question, topic_ids=tuple(topic.topic_id for topic in topics), budget=budget)
        if filters.relevant_only and is_small_talk(question):
            return msgspec.structs.replace(nothing, note=f"Nothing is shown: {Verdict.SMALL_TALK}.")
        unstored = [topic.unstored() for topic in topics]
        has_entries = any(len(view.rows) for topic in topics for view in topic.snapshot().views.values())
        if not has_entries and not any(one.has_others_than(filters.visible_digests) for one in unstored):
            return nothing
        with self._encoder.priority.held():
            async with asyncio.timeout(budget.seconds):
                for load in [self.load(topic) for topic in topics if isinstance(topic, TopicLog)]:
                    await asyncio.shield(load)  # goes on for the next request if this one cannot wait for it
                begun = [(part, self._encoder.begin(part)) for part in embedded_texts(question)]
                return await asyncio.get_running_loop().run_in_executor(
                    self._searches, self._retrieved, question, begun, topics, unstored, budget, filters
                )

    async def as_of(self, topics: Sequence[TopicLog], canonical_id: int) -> list[Searchable]:
        """The topics as they were after the entry with this id, or at a WallTime; slow, as words are indexed anew."""

        def past() -> list[Searchable]:
            return [TopicAsOf(topic, canonical_id, words=self._settings.lexical_weight > 0) for topic in topics]

        return await asyncio.get_running_loop().run_in_executor(None, past)

    def load(self, topic: TopicLog) -> asyncio.Future[None]:
        """Begin to load the topic's indexes into memory, unless that is done or under way."""
        loop = asyncio.get_running_loop()
        loading = self._loading.get(topic)
        if loading is None and topic.is_loaded:
            loading = loop.create_future()
            loading.set_result(None)
        elif loading is None:
            loading = self._loading[topic] = loop.run_in_executor(self._loads, _load, topic)
            loading.add_done_callback(lambda done: self._loaded(topic, done))
        return loading

    def close(self) -> None:
        """End the threads."""
        if self.reranker is not None:
            self.reranker.close()
        self._searches.shutdown(wait=True, cancel_futures=True)
        self._loads.shutdown(wait=True, cancel_futures=True)

    def _loaded(self, topic: TopicLog, done: asyncio.Future[None]) -> None:
        del self._loading[topic]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("indexes cannot be loaded", extra={"topic": topic.topic_id, "error": error})

    # -- in a search thread, as each change of threads costs the request a wait; another one embeds the question while
    # its words are looked up: neither needs what the other finds, and the model runs without the GIL ------------------

    def _retrieved(
        self,
        question: str,
        begun: _Begun,
        topics: Sequence[Searchable],
        unstored: Sequence[UnstoredText],
        budget: Budget,
        filters: Filters,
    ) -> Retrieved:
        times, began = [time.perf_counter()], time.monotonic()
        until = None if budget.seconds is None else began + CUTTING_SHARE * budget.seconds
        depth = max(1, min(DEPTH_MAX, budget.tokens // TOP_K_TOKENS))
        now_us = self._now_us() if filters.asked_at is None else filters.asked_at
        k = self._settings.top_k * depth
        timed, searches, is_partial = self._searches_by_words(question, now_us, k, topics, unstored, filters, until)
        times.append(time.perf_counter())
        queries, trouble = self._embedded(begun)
        times.append(time.perf_counter())
        if trouble is not None and not any(search.has_words for search in searches):
            raise trouble
        for search in searches:
            search.by_meaning(queries)
        demands = self._demands(question, queries, searches, depth)
        looking = Looking(self._scoring, timed, searches, demands, filters.visible_digests, filters.wanted)
        ranked, silence = looking.ranked(k, in_turn=filters.in_turn, relevant_only=filters.relevant_only)
        more = None if silence is None else f"Nothing is shown: {silence}."
        if self.reranker is not None and silence is None:
            ranked, more = self.reranker.reordered(question, ranked, began, budget.seconds)
        times.append(time.perf_counter())
        header = block.heading(self._header, now_us if self._dates else None)
        filled = self._filled(ranked, header, budget, filters)
        if is_partial and not filled.selection.shown:
            raise TimeoutError("not all that was said could be searched in time")
        times.append(time.perf_counter())
        words_ms, embed_ms, search_ms, fill_ms = ((end - start) * 1000 for start, end in itertools.pairwise(times))
        return Retrieved(
            question=question,
            topic_ids=tuple(topic.topic_id for topic in topics),
            budget=budget,
            candidates=filled.selection.judged,
            shown=filled.selection.shown,
            raw_tokens=filled.raw_tokens,
            header=header,
            fill_ratio=filled.selection.fill_ratio,
            embed_ms=embed_ms,
            search_ms=words_ms + search_ms,
            fill_ms=fill_ms,
            trouble=trouble,
            note=self._note(searches, trouble, more),
        )

    def _embedded(self, begun: _Begun) -> tuple[NDArray[np.float32], EmbeddingError | None]:
        """The question's vectors; where it cannot be embedded none, and why: words alone find most."""
        try:
            return np.concatenate([self._encoder.embed_query(*one) for one in begun]), None
        except EmbeddingError as error:
            return NO_QUERIES, error

    def _note(self, searches: Sequence[TopicSearch], trouble: EmbeddingError | None, more: str | None) -> str | None:
        notes = [] if more is None else [more]
        notes += [] if trouble is None else [f"Searched by words alone: {trouble}."]
        views = (view for search in searches for view in search.snapshot.views.values())
        others = sum(view.live_count for view in views if view.segment.header.fingerprint != self._encoder.fingerprint)
        notes += [f"{unsearched(others)}."] if others else []
        wordless = [one.snapshot.topic_id for one in searches if self._settings.lexical_weight and not one.has_words]
        if wordless:
            notes.append(f"Searched by meaning alone: {', '.join(wordless)}.")
        return " ".join(notes) or None

    def _searches_by_words(
        self,
        question: str,
        now_us: int,
        k: int,
        topics: Sequence[Searchable],
        unstored: Sequence[UnstoredText],
        filters: Filters,
        until: float | None,
    ) -> tuple[TimedQuestion, list[TopicSearch], bool]:
        """The searches of all topics, words looked up; and whether time was too short to cut all that is unstored."""
        asked = TimedQuestion.of(question, now_us, self._settings.time_weight)
        # First, as one that is stored meanwhile is then in both, and not in neither.
        told = [one.chunks(but=filters.visible_digests, until=until) for one in unstored]
        is_partial = (until is not None and time.monotonic() > until) or any(one.is_partial for one in unstored)
        k = k if self._settings.lexical_weight else 0
        choice, pairs = (filters.wanted, filters.visible_digests), zip(topics, told, strict=True)
        return asked, [search_by_words(*pair, asked, k, *choice, self.read_before) for pair in pairs], is_partial

    def _demands(
        self, question: str, queries: NDArray[np.float32], searches: Sequence[TopicSearch], depth: int
    ) -> Demands:
        has_words = any(search.has_words for search in searches)
        prior = self._encoder.prior(queries)
        chunks = sum(search.chunk_count for search in searches) if prior is not None else 0
        return Demands.of(self._settings, question, depth, has_words=has_words, prior=prior, chunks=chunks)

    def _filled(self, ranked: Sequence[Ranked], header: str, budget: Budget, filters: Filters) -> _Filled:
        raw: dict[bytes, int] = {}

        def cost(candidate: Candidate, left: int) -> int:
            tokens = candidate.entry.line_tokens
            if tokens is UNSET:  # of a log from before it was written there, or what is not stored yet
                line = block.line_of(candidate.entry)
                if not filters.relevant_only or budget.drifted(block.tokens_at_least(line)) <= left:
                    tokens = self._count(line)
                else:  # counting takes 0.1 ms, and half of the candidates find no room
                    tokens = block.tokens_about(line)
            raw[candidate.entry.uuid] = tokens
            return budget.drifted(tokens)

        def day(candidate: Candidate) -> tuple[str, int]:
            line = block.day_line(candidate.entry) if self._dates else ""
            return line, budget.drifted(self._day_tokens(line))

        frame_tokens = self._count(block.frame(header)) if ranked else 0
        selection = select(
            ranked,
            budget_tokens=budget.tokens,
            frame_tokens=budget.drifted(frame_tokens),
            cost=cost,
            day=day,
            shown_uuids=filters.shown_uuids,
            block_tokens=budget.block,
        )
        raw_tokens = sum(raw[one.entry.uuid] for one in selection.shown)
        days = {block.day_line(one.entry) for one in selection.shown} if self._dates else ()
        raw_tokens += sum(map(self._day_tokens, days))
        return _Filled(selection, raw_tokens + frame_tokens if selection.shown else 0)


class _Filled(NamedTuple):
    selection: Selection
    raw_tokens: int


def _load(topic: TopicLog) -> None:
    known = len(topic.findings)
    topic.load()
    for finding in topic.findings[known:]:
        log.warning("found in the log", extra={"topic": topic.topic_id, "finding": finding})
