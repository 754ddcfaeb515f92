"""Finds what the log has to say to a question: by meaning and by words, in the topic and its related ones.

Rule: reading changes nothing. Whatever goes wrong here costs the request its memory, never its answer; the caller turns
the error into a status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.embedding.encoder import Encoder
from memd.embedding.priority import RightOfWay
from memd.errors import StoreError
from memd.recall.fusion import Evidence, Parts, fuse
from memd.recall.ranking import Candidate, Judged, is_visible, judged, relevant
from memd.recall.topic_search import TopicSearch
from memd.settings.model import Retrieval
from memd.store.lexical.bm25 import Question
from memd.store.store import Hit, Snapshot, TopicLog

log = logging.getLogger("memd")

EXPLAINED_TOP_KS = 2
"""An explained search looks at so many times `retrieval.top_k` chunks."""


class Searchable(Protocol):
    """What recall asks of a topic's log."""

    @property
    def topic_id(self) -> str:
        """The topic."""

    def snapshot(self) -> Snapshot:
        """What is in it."""

    def ask(self, text: str) -> Question:
        """A question to its words; raises StoreError where they cannot be searched."""


class Recalled(msgspec.Struct, frozen=True):
    """The chunks worth showing, best first, and how long it took to find them."""

    candidates: list[Candidate]
    embed_ms: float
    search_ms: float


class Recall:
    """Answers queries from snapshots, in threads."""

    def __init__(self, encoder: Encoder, settings: Retrieval, right_of_way: RightOfWay) -> None:
        self._encoder = encoder
        self._settings = settings
        self._right_of_way = right_of_way
        self._searches = ThreadPoolExecutor(max_workers=2, thread_name_prefix="memd-search")
        self._loads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="memd-load")
        self._loading: dict[TopicLog, asyncio.Future[None]] = {}

    async def query(
        self,
        text: str,
        own: TopicLog,
        related: Sequence[TopicLog],
        *,
        visible_digests: Collection[bytes],
    ) -> Recalled:
        """The best chunks for a question.

        Args:
            text: the question, usually the last user message.
            own: the request's topic; it has the last word on every chunk that it knows.
            related: topics that are searched too.
            visible_digests: the messages that are in the prompt themselves.

        Raises:
            EmbeddingError, StoreError: recall is not possible now.
            TimeoutError: it took longer than `retrieval.timeout_ms`.
        """
        if not any(len(view.rows) for log_ in (own, *related) for view in log_.snapshot().views.values()):
            return Recalled([], 0.0, 0.0)  # nothing to find: a new topic need not wait for an embedding
        with self._right_of_way.taken():
            async with asyncio.timeout(self._settings.timeout_ms / 1000):
                for load in [self.load(log_) for log_ in (own, *related)]:
                    await asyncio.shield(load)  # goes on for the next request if this one cannot wait for it
                return await asyncio.get_running_loop().run_in_executor(
                    self._searches, self._answered, text, (own, *related), visible_digests
                )

    async def explain(self, text: str, own: Searchable, related: Sequence[Searchable]) -> list[Judged]:
        """The best candidates of a search in an empty conversation, also those that would not be shown, and why.

        Raises:
            EmbeddingError, StoreError: recall is not possible now.
        """
        for log_ in (own, *related):
            if isinstance(log_, TopicLog):
                await asyncio.shield(self.load(log_))
        queries = await self._encoder.query(text)
        return await asyncio.get_running_loop().run_in_executor(
            self._searches, self._explained, text, queries, (own, *related)
        )

    def load(self, log_: TopicLog) -> asyncio.Future[None]:
        """Begin to bring the topic's indexes into memory, unless that is done or under way."""
        loop = asyncio.get_running_loop()
        loading = self._loading.get(log_)
        if loading is None and log_.is_loaded:
            loading = loop.create_future()
            loading.set_result(None)
        elif loading is None:
            loading = self._loading[log_] = loop.run_in_executor(self._loads, _load, log_)
            loading.add_done_callback(lambda done: self._loaded(log_, done))
        return loading

    def close(self) -> None:
        """End the threads."""
        self._searches.shutdown(wait=True, cancel_futures=True)
        self._loads.shutdown(wait=True, cancel_futures=True)

    def _loaded(self, log_: TopicLog, done: asyncio.Future[None]) -> None:
        del self._loading[log_]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("indexes cannot be loaded", extra={"topic": log_.topic_id, "error": error})

    def _answered(self, text: str, logs: Sequence[TopicLog], visible_digests: Collection[bytes]) -> Recalled:
        """Embedding and search in one thread: each turn of a thread costs the request a wait."""
        started = time.perf_counter()
        queries = self._encoder.query_vectors(text)
        embedded = time.perf_counter()
        candidates = self._search(text, queries, logs, visible_digests)
        searched = time.perf_counter()
        return Recalled(candidates, (embedded - started) * 1000, (searched - embedded) * 1000)

    def _search(
        self,
        text: str,
        queries: NDArray[np.float32],
        logs: Sequence[TopicLog],
        visible_digests: Collection[bytes],
    ) -> list[Candidate]:
        """The best of all topics; the first of `logs` is the request's own."""
        searches = [self._begun(log_, text, queries) for log_ in logs]
        k = self._settings.top_k
        while True:
            ranked = [one for one in self._ranked(searches, k) if one.parts.strength >= self._settings.min_score]
            found, seen = self._read(ranked, searches[0].snapshot, visible_digests, k)
            best = relevant(
                found,
                min_score=self._settings.min_score,
                top_k=self._settings.top_k,
                visible_digests=visible_digests,
            )
            # What was passed over took places among the best k: look further, unless there is nothing further.
            is_complete = len(best) == seen or all(search.is_exhausted for search in searches)
            if len(best) >= self._settings.top_k or is_complete:
                return best
            k *= 4

    def _explained(self, text: str, queries: NDArray[np.float32], logs: Sequence[Searchable]) -> list[Judged]:
        searches = [self._begun(log_, text, queries) for log_ in logs]
        k = EXPLAINED_TOP_KS * self._settings.top_k
        found, _ = self._read(self._ranked(searches, k), searches[0].snapshot, (), k)
        return judged(found, min_score=self._settings.min_score, top_k=self._settings.top_k, visible_digests=())

    def _read(
        self,
        ranked: Sequence[_Found],
        own: Snapshot,
        visible_digests: Collection[bytes],
        k: int,
    ) -> tuple[list[Candidate], int]:
        """The first `k` that may be shown, and how many were looked at for that."""
        found: list[Candidate] = []
        for seen, one in enumerate(ranked):
            if len(found) == k:
                return found, seen
            if one.snapshot is own or not own.knows(one.hit.uuid):
                candidate = one.read()
                if candidate is not None and not is_visible(candidate.entry, visible_digests):
                    found.append(candidate)
        return found, len(ranked)

    def _begun(self, log_: Searchable, text: str, queries: NDArray[np.float32]) -> TopicSearch:
        words = None
        if self._settings.lexical_weight:
            try:
                words = log_.ask(text)
            except StoreError as error:
                log.error("searched without its words", extra={"topic": log_.topic_id, "error": error})
        return TopicSearch(log_.snapshot(), queries, words)

    def _ranked(self, searches: Sequence[TopicSearch], k: int) -> list[_Found]:
        """What any topic may have to say, best first."""
        hits: list[tuple[Hit, Snapshot]] = []
        evidence: list[Evidence] = []
        for search in searches:
            found, known = search.evidence(k, self._settings, first=len(evidence))
            hits += [(hit, search.snapshot) for hit in found]
            evidence += known
        parts = fuse(
            evidence,
            lexical_weight=self._settings.lexical_weight,
            neighbour_weight=self._settings.neighbour_weight,
        )
        ranked = [_Found(hit, snapshot, part) for (hit, snapshot), part in zip(hits, parts, strict=True)]
        return sorted(ranked, key=lambda one: (-one.parts.score, one.hit.canonical_id))


class _Found(NamedTuple):
    """A chunk of one topic whose content is not read yet."""

    hit: Hit
    snapshot: Snapshot
    parts: Parts

    def read(self) -> Candidate | None:
        """The chunk; None if its entry is damaged, which costs this chunk and not the others."""
        try:
            return Candidate(self.snapshot.entry(self.hit), self.snapshot.topic_id, self.parts)
        except StoreError as error:
            fields = {"topic": self.snapshot.topic_id, "error": error}
            log.error("a chunk cannot be recalled; run `memd verify`", extra=fields)
            return None


def _load(log_: TopicLog) -> None:
    known = len(log_.findings)
    log_.load()
    for finding in log_.findings[known:]:
        log.warning("found in the log", extra={"topic": log_.topic_id, "finding": finding})
