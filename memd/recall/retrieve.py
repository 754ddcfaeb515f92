"""Retrieval: from a question to the chunks to show, for prompts, `memd search`, replay, MCP and the page.

Rule: this is the only way from a question to chunks, and one pipeline of array operations. Reading changes nothing: the
same question, topics, budget and filters give the same chunks, whoever asks. The content of an answer is never judged,
and a later text never hides an earlier one; only corrections do. Errors are raised, and a caller that can do without
memory catches them.

    question → parts → one vector per part: from the table, or from the model where the table leaves silence open
             → columns of all candidates → relevance to each part → echoes → fill the budget, best first

bench/NOTES.md has the figures of each step, and the variants that were tried and rejected.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.embedding.encoder import Encoder
from memd.embedding.priority import yield_to_others
from memd.entries import Entry
from memd.errors import EmbeddingError, Refused, StoreError
from memd.recall import block
from memd.recall.columns import Searchable, TopicColumns, WordCounts
from memd.recall.explained import Verdict
from memd.recall.question import PART_TOKENS, parts_of
from memd.recall.relevance import LISTED, STEP_WEIGHT, Field, Parts, Scores
from memd.recall.rerank import Reranker
from memd.recall.times import is_about_time, spans
from memd.selection import EVERYTHING, Selection
from memd.settings.model import RetrievalSettings
from memd.store.lexical.analyzer import is_english
from memd.store.snapshot import TopicAsOf
from memd.store.store import TopicLog
from memd.wording import unread_topics, unsearched

log = logging.getLogger("memd")

NO_ROOM_LISTED = 8
"""A turn's receipt lists at most so many chunks that did not fit."""
STEP_PARTS_MAX = 2
"""Parts taken from the model's latest step; each may cost a call of the embedding model."""
CUTTING_SHARE, UNHURRIED_SECONDS = 0.5, 5.0
"""A request spends at most this share of its time limit on waiting for pending text to be cut into chunks; the rest is
not searched. A caller without a limit waits this many seconds, since all callers share the threads."""
UNCUT_NOTE = "Not all that was said a moment ago could be searched yet; ask again."
LINE_TOKENS_MIN = 8
"""The shortest line possible: `[mem:a3f9] user: ` alone has this many tokens."""

Floats = NDArray[np.float32]
Rows = NDArray[np.intp]
AnyTopic = TypeVar("AnyTopic", bound=Searchable)

SILENT_NOTE = f"Nothing is shown: {Verdict.SILENT}."
NOTHING_THEN = "nothing was said at the time that the question asks for"
NONE_NEW_NOTE = f"Nothing new is shown: {Verdict.SILENT}; earlier blocks stay."


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A chunk that was considered, and why it is shown or not."""

    entry: Entry
    topic_id: str
    tokens: int
    """Length of its line in the block, in the model's tokens."""
    parts: Parts
    verdict: Verdict


FEW_CHUNKS_TOKENS = 384
"""Raw tokens of three chunks of usual length in their block. Chunks better than those of earlier blocks always get so
much of a budget. With many similar chunks, 119 of 120 requested ones were shown, and 44 without this reserve."""


class Budget(msgspec.Struct, frozen=True):
    """The limits of a retrieval."""

    tokens: int
    """Limit for all chunks shown for this question, earlier ones included, in the model's tokens; but see
    `FEW_CHUNKS_TOKENS`."""
    drift: float = 1.0
    """The model's tokens per raw (cl100k_base) token."""
    block: int | None = None
    """Limit for the new block alone, where the prompt has less room than `tokens`."""
    seconds: float | None = None
    """The caller's time limit; None: no limit."""

    def drifted(self, raw_tokens: int) -> int:
        """`raw_tokens` in the model's tokens, rounded up."""
        return math.ceil(raw_tokens * self.drift)


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Restrictions on the candidates, and the question's context."""

    visible_digests: Collection[bytes] = ()
    """Digests of the messages in the prompt. A chunk made only of these is not shown."""
    shown_uuids: Collection[bytes] = ()
    """Chunks that earlier blocks of the prompt show. They count against the budget and are not shown again."""
    wanted: Selection = EVERYTHING
    """The caller's selection; other chunks are not candidates."""
    asked_at: int | None = None
    """Time of the question in microseconds since the epoch, to resolve "yesterday" and "today"; None: now."""
    step: str = ""
    """The model's latest step, searched beside the question where a turn recalls again in mid-loop."""
    everything: bool = False
    """List every candidate, also those not shown, with the reason."""


class Retrieved(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a retrieval, with its reasons."""

    question: str
    topic_ids: tuple[str, ...]
    """The request's own topic first."""
    budget: Budget
    candidates: tuple[Candidate, ...] = ()
    """Best first."""
    shown: tuple[Candidate, ...] = ()
    """The chunks to show, in reading order."""
    raw_tokens: int = 0
    """Length of the whole block in cl100k_base tokens; 0 if nothing is shown."""
    header: str = ""
    """The text of the block's first line."""
    fill_ratio: float = 0.0
    """Tokens of all chunks worth showing, over the room for them; above 1 if some did not fit."""
    worth_showing: int = 0
    embed_ms: float = 0.0
    """Time spent on the embedding model; 0 if the table was enough."""
    search_ms: float = 0.0
    fill_ms: float = 0.0
    is_model_asked: bool = False
    is_reranked: bool = False
    trouble: EmbeddingError | StoreError | None = None
    """Why the embedding model failed, or a topic could not be read; None: neither did."""
    note: str | None = None
    """Limits of this search, and why nothing was shown, in sentences for people."""


class Retriever:
    """Answers questions from snapshots, in its own threads."""

    def __init__(
        self,
        encoder: Encoder,
        settings: RetrievalSettings,
        *,
        count: Callable[[str], int],
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """
        Args:
            count: raw tokens of a text, cached; called from several threads.
            now_us: the current time in microseconds since the epoch.
        """
        self._encoder = encoder
        self._settings = settings
        self._now_us = now_us
        self.reranker: Reranker | None = None
        """Reorders the best candidates, if a reranking model is configured."""
        self._tokens_of = count
        self._searches = ThreadPoolExecutor(max_workers=2, thread_name_prefix="memd-search")
        self._one_at_a_time = threading.Lock()
        """Held by the request's search that computes, and not while it waits for a model. Array operations release the
        GIL, so two searches and the event loop take it from each other at each of them, which costs a fifth of the
        processor and gains no time."""
        self._loads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="memd-load")
        self._words = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-words", initializer=yield_to_others)
        self._loading: dict[TopicLog, asyncio.Future[None]] = {}

    async def retrieve(
        self,
        question: str,
        topics: Sequence[Searchable],
        budget: Budget,
        filters: Filters | None = None,
        refused: Mapping[str, StoreError] | None = None,
    ) -> Retrieved:
        """Find the chunks that answer a question, and fill the budget with the best of them.

        Args:
            question: the text to search for, usually the last user message.
            topics: the request's own topic first, then the related ones. The own topic overrides the others on chunks
                that both have. One that cannot be read is left out, and the note says so.
            refused: topics that could not be opened, each with the reason.

        Raises:
            EmbeddingError: the question cannot be embedded, and word search is off.
            StoreError: none of the topics can be read.
            TimeoutError: it took longer than `budget.seconds`.
        """
        filters, unread = filters or Filters(), dict(refused or {})
        async with asyncio.timeout(budget.seconds):
            topics = await self._readable(topics, unread)
            unstored = [topic.unstored() for topic in topics]

            def answer() -> Retrieved:
                # Pending chunks before the log: one that is stored in between is then seen twice, and not missed.
                patience = UNHURRIED_SECONDS if budget.seconds is None else CUTTING_SHARE * budget.seconds
                until = time.monotonic() + patience
                waiting = [one.chunks(but=filters.visible_digests, until=until) for one in unstored]
                parts = self._parts(question, filters.step)
                now_us = self._now_us() if filters.asked_at is None else int(filters.asked_at)
                times = spans(question, now_us) if self._settings.time_weight else ()
                while True:
                    searched = [
                        TopicColumns(topic, list(parts), some, filters.wanted, filters.visible_digests, times)
                        for topic, some in zip(topics, waiting, strict=True)
                    ]
                    word_counts = WordCounts([columns for one in searched for columns in one.columns])
                    for one in searched:
                        one.word_counts = word_counts
                    found = self._answer(question, parts, searched, times, now_us, budget, filters)
                    pairs = zip(searched, topics, strict=True)
                    if all(one.snapshot.has_same_files(topic.snapshot()) for one, topic in pairs):
                        break  # else an erasure may have overwritten an index during the search
                is_partial = any(one.is_partial for one in unstored)
                if is_partial and budget.seconds is not None and not found.shown:
                    raise TimeoutError("not all that was said could be searched in time")
                notes = [found.note, UNCUT_NOTE if is_partial else None, unread_topics(unread)]
                trouble = found.trouble or next(iter(unread.values()), None)
                return msgspec.structs.replace(found, note=" ".join(filter(None, notes)) or None, trouble=trouble)

            return await asyncio.get_running_loop().run_in_executor(self._searches, answer)

    async def as_of(self, topics: Sequence[TopicLog], canonical_id: int, refused: Refused) -> list[Searchable]:
        """Return the topics as they were after the entry with this id, or at a WallTime; those that cannot be read are
        noted in `refused`."""
        loaded = await self._readable(topics, refused)
        return await asyncio.to_thread(lambda: [TopicAsOf(topic, canonical_id) for topic in loaded])

    async def _readable(self, topics: Sequence[AnyTopic], refused: Refused) -> list[AnyTopic]:
        """Load topics, and return the readable ones; the others are noted in `refused`. Raises StoreError: none is
        readable."""
        unloaded = [topic for topic in topics if isinstance(topic, TopicLog) and not topic.is_loaded]
        for topic, load in [(topic, self.load(topic)) for topic in unloaded]:
            try:
                await asyncio.shield(load)  # goes on for the next request if this one cannot wait for it
            except StoreError as error:
                refused[topic.topic_id] = error
        found = [topic for topic in topics if topic.topic_id not in refused]
        if refused and not found:
            raise next(iter(refused.values()))
        return found

    def load(self, topic: TopicLog) -> asyncio.Future[None]:
        """Start loading a topic's indexes into memory, or return the load already under way."""
        if (loading := self._loading.get(topic)) is None:
            loading = asyncio.get_running_loop().run_in_executor(self._loads, _load, topic)
            self._loading[topic] = loading
            loading.add_done_callback(lambda done: self._loaded(topic, done))
        return loading

    def close(self) -> None:
        """End the threads."""
        if self.reranker is not None:
            self.reranker.close()
        self._searches.shutdown(wait=True, cancel_futures=True)
        self._loads.shutdown(wait=True, cancel_futures=True)
        self._words.shutdown(wait=True, cancel_futures=True)

    def _loaded(self, topic: TopicLog, done: asyncio.Future[None]) -> None:
        del self._loading[topic]
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.error("indexes cannot be loaded", extra={"topic": topic.topic_id, "error": error})
        elif topic.wordless:
            self._words.submit(_complete, topic)

    def _answer(
        self,
        question: str,
        asked: dict[str, AskedPart],
        topics: Sequence[TopicColumns],
        times: Sequence[tuple[int, int]],
        now_us: int,
        budget: Budget,
        filters: Filters,
    ) -> Retrieved:
        marks = [time.perf_counter()]
        notes, silent = self._notes(topics), NONE_NEW_NOTE if filters.shown_uuids else SILENT_NOTE
        nothing = Retrieved(
            question=question,
            topic_ids=tuple(one.topic_id for one in topics),
            budget=budget,
            note=" ".join(notes) or None,
        )
        parts = list(asked)
        filled = [topic for topic in topics if topic.sources]
        if not filled:
            return nothing
        if not parts:
            return msgspec.structs.replace(nothing, note=" ".join([silent, *notes]))
        computing = nullcontext() if budget.seconds is None else self._one_at_a_time
        vectors = self._table_vectors(parts)
        with computing:
            field = Field(filled, [part.weight for part in asked.values()], vectors, self._encoder.embedder.scale)
        marks.append(time.perf_counter())
        reading = self._read_question(field, asked, vectors)
        notes[:0] = reading.notes
        marks.append(time.perf_counter())
        with computing:
            scores = field.scores(self._settings, reading.speaking)
            if times:
                then, is_alone = field.said_within(times), is_about_time(question)
                scores.favour(then, 1 + self._settings.time_weight, is_alone=is_alone)
                silent = silent.replace(Verdict.SILENT, NOTHING_THEN) if is_alone and not then.any() else silent
            scores.weigh_model(field)
            scores.weigh_echoes(field)
            if filters.step:
                scores.weigh_own_words(field, parts)
            rows = scores.order(field, everything=filters.everything)
        if scores.is_silent and field.competes.any():
            notes.insert(0, silent)
        is_reranked = False
        if self.reranker is not None and not scores.is_silent:
            rows, more = self._reranked(question, field, rows, budget)
            is_reranked = more is None
            notes += [] if more is None else [more]
        marks.append(time.perf_counter())
        header = block.heading(now_us)
        filling = self._filled(field, scores, rows, header, budget, filters)
        marks.append(time.perf_counter())
        spent = [(end - start) * 1000 for start, end in itertools.pairwise(marks)]
        return msgspec.structs.replace(
            nothing,
            candidates=filling.candidates,
            shown=filling.shown,
            raw_tokens=filling.raw_tokens,
            header=header,
            fill_ratio=filling.ratio,
            worth_showing=filling.worth_showing,
            search_ms=spent[0] + spent[2],
            embed_ms=spent[1] if reading.read or reading.notes else 0.0,
            fill_ms=spent[3],
            is_model_asked=bool(reading.read),
            is_reranked=is_reranked,
            trouble=reading.trouble,
            note=" ".join(notes) or None,
        )

    def _parts(self, question: str, step: str) -> dict[str, AskedPart]:
        """Return the parts of the question, then those of the model's latest step."""
        cut = functools.partial(self._encoder.embedder.cut, tokens=PART_TOKENS)
        parts = {cut(text): AskedPart(1.0, asks) for text, asks in parts_of(question).items()}
        for text in itertools.islice(parts_of(step), STEP_PARTS_MAX):
            parts.setdefault(cut(text), AskedPart(STEP_WEIGHT, asks=True))
        return parts

    def _read_question(self, field: Field, asked: dict[str, AskedPart], vectors: Floats) -> QuestionReading:
        """Embed the unclear parts that ask with the model. If nothing stored is near those, embed the surrounding parts
        too: in "… Is this still so?" the subject stands beside the question."""
        parts, embedder = list(asked), self._encoder.embedder
        unclear = self._unclear(field)
        beside = [one for one in unclear if vectors[one].any() and not asked[parts[one]].asks]
        reading = [one for one in unclear if one not in beside]  # a clause is read as part of its sentence
        readers = {one: next(other for other, text in enumerate(parts) if parts[one] in text) for one in reading}
        asking = [one for one in dict.fromkeys(readers.values()) if one in unclear]
        until = time.monotonic() + self._settings.recall_budget_ms / 1000
        read, notes, trouble = list[int](), list[str](), None
        try:
            read += self._read(field, parts, asking, until)
            if beside and embedder.tells_apart and not np.delete(field.speaking(read, readers), beside).any():
                read += self._read(field, parts, beside, until)
        except EmbeddingError as error:
            if not self._settings.lexical_weight and self._encoder.table is None:
                raise
            notes.append(f"Searched by words alone: {error}.")
            trouble = None if self._encoder.works else error  # a server that is late works
        judged = [*read, *beside] if embedder.tells_apart else []
        is_bundled = self._encoder.table is not None
        unread = [one for one in judged if is_bundled and not is_english(parts[one])]
        return QuestionReading(read, field.speaking(judged, readers, unread), notes, trouble)

    def _read(self, field: Field, parts: Sequence[str], numbers: Sequence[int], until: float) -> Sequence[int]:
        """Embed these parts with the model, as many as time allows; return the numbers of those embedded."""
        if not numbers:
            return numbers
        vectors = self._encoder.embed_parts([parts[number] for number in numbers], max(0, until - time.monotonic()))
        field.read_again(read := numbers[: len(vectors)], vectors)
        return read

    def _table_vectors(self, parts: Sequence[str]) -> Floats:
        table = self._encoder.table
        if table is None or self._settings.question == "model":
            return np.zeros((len(parts), self._encoder.embedder.dimension), np.float32)
        return table.vectors(parts)

    def _unclear(self, field: Field) -> list[int]:
        """Return the parts of which the table does not show that something stored is about them."""
        if self._settings.question == "table" and self._encoder.table is not None:
            return []
        return (~field.is_clear()).nonzero()[0].tolist()

    def _notes(self, topics: Sequence[TopicColumns]) -> list[str]:
        views = (view for topic in topics for view in topic.snapshot.views.values())
        others = sum(view.live_count for view in views if view.segment.header.fingerprint != self._encoder.fingerprint)
        return [f"{unsearched(others)}."] if others else []

    def _reranked(self, question: str, field: Field, rows: Rows, budget: Budget) -> tuple[Rows, str | None]:
        assert self.reranker is not None, "asked for"
        entries = field.entries(rows)
        listed = [row for row in rows.tolist() if row in entries]
        texts = [entries[row].displayed for row in listed]
        order, why = self.reranker.order(question, texts, budget.seconds)
        return np.array([listed[place] for place in order], np.intp), why

    def _filled(
        self, field: Field, scores: Scores, rows: Rows, header: str, budget: Budget, filters: Filters
    ) -> Filling:
        """Fill the budget, best first; a chunk that does not fit is skipped, never cut.

        Index columns do not have a chunk's message digests. So the chosen chunks are read, and if the prompt already
        shows all messages of one, the choice is repeated without it.
        """
        competes, costs = field.competes[rows].copy(), np.ceil(field.tokens[rows] * budget.drift).astype(np.intp)
        strong = scores.strong(rows, self._settings) & (not scores.is_silent)
        before = {int.from_bytes(uuid[:8], "big") for uuid in filters.shown_uuids}
        is_shown = np.array([uuid in before for uuid in field.uuids[rows].tolist()], np.bool_)
        visible = frozenset(filters.visible_digests)
        frame = self._tokens_of(block.frame(header))
        room = budget.tokens if budget.block is None else min(budget.tokens, budget.block)
        earlier = competes & strong & is_shown
        beside = np.cumsum(np.where(earlier, costs, 0))  # up to each place, what earlier blocks show
        own = np.maximum(budget.tokens - beside[-1:], budget.drifted(FEW_CHUNKS_TOKENS) - beside)
        most = np.minimum(own, room) - budget.drifted(frame)
        while True:
            worth = competes & strong
            places = (worth & ~earlier).nonzero()[0]
            injected, day_tokens, spare = self._chosen(places, costs, field.said_at[rows], most, budget)
            if not visible:
                break
            read = field.entries(rows[injected])
            digests = {place: one.digests for place in injected if (one := read.get(int(rows[place]))) is not None}
            seen = [place for place, its in digests.items() if its and visible.issuperset(its)]
            if not seen:
                break
            competes[seen] = False
        raw_tokens = frame + day_tokens + int(field.tokens[rows[injected]].sum())
        lowest = Verdict.SILENT if scores.is_silent else Verdict.WEAK
        why = np.zeros(len(rows), np.int8)  # position in `verdicts`
        verdicts = lowest, Verdict.NO_ROOM, Verdict.VISIBLE, Verdict.EARLIER, Verdict.INJECTED
        why[worth], why[~competes], why[earlier], why[injected] = 1, 2, 3, 4
        is_listed = (why >= 3) | filters.everything
        is_listed[(why == 1).nonzero()[0][:NO_ROOM_LISTED]] = True
        listed = is_listed.nonzero()[0]
        candidates = self._candidates(
            field, scores, rows[listed], costs[listed], [verdicts[one] for one in why[listed].tolist()]
        )
        listing = [one for one in candidates if one.verdict is Verdict.INJECTED]
        listing.sort(key=lambda one: (one.entry.said, one.entry.origin_id, one.entry.uuid))
        shown, call_tokens = self._with_calls(listing, spare, budget)
        raw_tokens += call_tokens
        wanted = int(costs[worth].sum()) + budget.drifted(frame)
        count = int(worth.sum())
        return Filling(
            tuple(candidates), shown, raw_tokens if shown else 0, wanted / max(1, room) if count else 0.0, count
        )

    def _chosen(
        self, places: Rows, costs: Rows, said: NDArray[np.uint64], most: Rows, budget: Budget
    ) -> tuple[list[int], int, int]:
        """Choose places, best first, whose lines fit; `most`: limit for each place and all before it. Return
        them, the raw tokens of their day lines, and the tokens left over."""
        chosen, days, day_tokens, taken, left = list[int](), {""}, 0, 0, 0
        given = (one[places].tolist() for one in (costs, said, most))
        for place, cost, said_at, may_take in zip(places.tolist(), *given, strict=True):
            left = may_take - taken
            if left < LINE_TOKENS_MIN or len(chosen) == (self._settings.top_k or LISTED):
                break
            if cost > left:
                continue
            day = block.day_line(said_at)
            more = 0 if day in days else self._tokens_of(day + "\n")
            if (cost := cost + budget.drifted(more)) <= left:
                chosen.append(place)
                days.add(day)
                taken, left, day_tokens = taken + cost, left - cost, day_tokens + more
        return chosen, day_tokens, left

    def _with_calls(self, shown: Sequence[Candidate], left: int, budget: Budget) -> tuple[tuple[Candidate, ...], int]:
        """Show the call of each tool result while the calls fit into `left`; otherwise leave it out, so that no chunk
        loses its place to a call. Return the chunks, and the raw tokens of the calls."""
        kept, tokens = list[Candidate](), 0
        for one in shown:
            more = sum(self._tokens_of(block.call_line(call)) for call in one.entry.calls)
            is_whole = budget.drifted(tokens + more) <= left
            tokens += more if is_whole else 0
            kept.append(one if is_whole else msgspec.structs.replace(one, entry=one.entry.without_calls()))
        return tuple(kept), tokens

    def _candidates(
        self, field: Field, scores: Scores, rows: Rows, costs: Rows, verdicts: Sequence[Verdict]
    ) -> list[Candidate]:
        """Read the chunks at `rows`; a damaged one is skipped."""
        entries, topics = field.entries(rows), field.topics_of(rows)
        parts = scores.parts(rows)
        columns = zip(rows.tolist(), topics, costs.tolist(), parts, verdicts, strict=True)
        return [Candidate(entries[row], *rest) for row, *rest in columns if row in entries]


class AskedPart(NamedTuple):
    """How one part of a question is searched."""

    weight: float
    asks: bool
    """False for context beside the asking parts. The model embeds context only if nothing is near the asking parts, and
    context counts only where something stored is near it."""


class QuestionReading(NamedTuple):
    """The outcome of embedding parts with the model."""

    read: list[int]
    """Numbers of the parts that the model embedded."""
    speaking: NDArray[np.bool_]
    """Parts that may contribute candidates, shape (p,)."""
    notes: list[str]
    """Why the model was not used, for people."""
    trouble: EmbeddingError | None
    """See `Retrieved.trouble`."""


class Filling(NamedTuple):
    """A filled budget."""

    candidates: tuple[Candidate, ...]
    shown: tuple[Candidate, ...]
    raw_tokens: int
    ratio: float
    worth_showing: int


def _complete(topic: TopicLog) -> None:
    """Compute the word columns that a log of an old version lacks; until then only meaning finds its chunks."""
    try:
        topic.complete_words()
    except StoreError as error:
        log.error("words cannot be completed", extra={"topic": topic.topic_id, "error": error})


def _load(topic: TopicLog) -> None:
    known = len(topic.findings)
    topic.load()
    for finding in topic.findings[known:]:
        log.warning("found in the log", extra={"topic": topic.topic_id, "finding": finding})
