"""Moves turns from the hot buffer into the log, and appends entries of other sources and corrections.

Rule: nothing else in a daemon appends. Messages count as stored only after their chunks are durable. They leave the
prompt only when they are durable, in the log or, for the time until they are embedded, in the journal. A failed append
of messages changes nothing but the time of the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from memd.conversation import compaction
from memd.conversation.compaction import Departure
from memd.conversation.conversation import Conversation, Line
from memd.conversation.tokens import MESSAGE_OVERHEAD, TokenCounter
from memd.embedding.encoder import Encoder
from memd.entries import Draft, Entry
from memd.errors import MemdError
from memd.ingest.indexer import Indexer
from memd.ingest.pipeline import Drafter, unstored_runs
from memd.ingest.redaction.redactor import Redactor, redacted_drafts
from memd.ingest.topics import Topic, Topics
from memd.settings.model import Config
from memd.telemetry.events import Events
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks
from memd.wording import tallied

log = logging.getLogger("memd")

BACKOFF_SECONDS_MAX = 300.0
TEND_SECONDS = 0.5
"""The interval at which idle conversations are stored, journals synced and indexes brought up to date."""
UNLOAD_SECONDS = 5.0
"""The interval at which idle topics are closed."""


class Archiver:
    """Stores, compacts, appends. Of the event loop; embedding and writing run in threads."""

    def __init__(
        self,
        config: Config,
        encoder: Encoder,
        counter: TokenCounter,
        tasks: Tasks,
        indexer: Indexer,
        redactor: Redactor,
        metrics: Metrics,
        events: Events,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, for the pauses between attempts that fail."""
        self._config = config
        self._clock = clock
        self._redactor = redactor
        self._encoder = encoder
        self._drafter = Drafter(config, counter, encoder.embed_texts, redactor=redactor)
        self._counter = counter
        self._tasks = tasks
        self._indexer = indexer
        self._metrics = metrics
        self._events = events
        self._compacting: set[str] = set()
        self._storing: set[str] = set()
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    # -- on behalf of requests ----------------------------------------------------------------------------------

    async def compact(
        self, topic: Topic, conversation: Conversation, excess_tokens: int = 0, *, forced: bool = False
    ) -> bool:
        """Take the oldest part of a conversation out of its prompt; False if nothing may leave.

        It is forced to disk first and stored in the background: nobody waits for its embedding.

        Args:
            excess_tokens: the least that must go, in raw tokens, where that may go at all; 0 if no request waits.
            forced: see `compaction.departure`.
        """
        started, fraction = time.perf_counter(), self._config.compaction.fraction
        chosen = compaction.departure(conversation, fraction=fraction, excess_tokens=excess_tokens, forced=forced)
        if chosen.end > conversation.stored and not await self.make_durable(topic):
            upto = conversation.stored
            chosen = compaction.departure(conversation, fraction=fraction, excess_tokens=excess_tokens, upto=upto)
        if chosen.is_empty:
            return False
        self._let_go(topic, conversation, chosen)
        self._metrics.compactions.add(time.perf_counter() - started, "hard" if excess_tokens else "soft")
        return True

    def compact_copy(self, topic: Topic, copy: Conversation, excess_tokens: int) -> bool:
        """Do the same to a detached copy, for which nothing may be written: only what is in the log may leave."""
        fraction, upto = self._config.compaction.fraction, copy.stored
        chosen = compaction.departure(copy, fraction=fraction, excess_tokens=excess_tokens, upto=upto)
        copy.mark_left_out(chosen.left_out)
        copy.mark_gone(chosen.gone, self._lines(topic, copy, chosen))
        return not chosen.is_empty

    async def let_instructions_go(self, topic: Topic, conversation: Conversation, positions: Sequence[int]) -> None:
        """Take instructions in mid-conversation out of the prompt; they are stored in the background."""
        if await self.make_durable(topic):
            self._let_go(topic, conversation, Departure(conversation.left_out, tuple(positions)))

    async def make_durable(self, topic: Topic) -> bool:
        """Force all that was said to disk, so that it may leave prompts; False (disk full): only what is stored may."""
        return await topic.make_durable()

    def store_later(self, topic: Topic, conversation: Conversation, upto: int) -> None:
        """Store all messages before `upto` in the background; where that fails, `tend` tries again."""
        if (upto > conversation.stored or conversation.owed) and conversation.id not in self._storing:
            self._storing.add(conversation.id)
            topic.hold()
            self._tasks.spawn(self._store_in_background(topic, conversation, upto), "storing")

    async def store(self, topic: Topic, conversation: Conversation, upto: int) -> bool:
        """Make all messages before `upto` durable in the log; False if that failed and is to be tried again later."""
        async with topic.storing:
            owed = sorted(conversation.owed)
            if upto <= conversation.stored and not owed:
                return True
            if self._clock() < self._retry_at.get(topic.id, 0.0):
                return False
            try:
                await self._append_turns(topic, conversation, upto, owed)
            except MemdError as error:
                self._back_off(topic, error)
                return False
            self._failures.pop(topic.id, None)
            settled = conversation.settled
            topic.buffer.mark(conversation, stored=upto, instructions=owed)
        if conversation.settled > settled:
            await topic.rewrite_journal()  # without the texts that are in the log now
        else:
            await topic.save()
        self._indexer.look_after(topic)
        return True

    async def hand_over(self, topic: Topic, opened: Conversation) -> None:
        """As a conversation opens, store the finished turns of the topic's others; wait `handover_ms` at most."""
        finished = [
            (other, end)
            for other in topic.buffer.conversations()
            if other is not opened and not other.abandoned
            for end in [compaction.finished_end(other)]
            if end > other.stored
        ]
        if finished:
            work = self._tasks.spawn(self._store_all(topic, finished), "hand-over")
            await asyncio.wait({work}, timeout=self._config.buffer.handover_ms / 1000)

    async def append_drafts(self, topic: Topic, make: Callable[[Drafter], Sequence[Draft]]) -> list[Entry]:
        """Append what is no conversation's (a note, a document), durably and as one group; return the entries.

        Args:
            make: returns the drafts, redacted and embedded (see `Drafter.passages`); called in the ingesting thread,
                while nothing but corrections is appended to the topic.

        Raises:
            EmbeddingError, StoreError: nothing was written.
        """

        def made() -> tuple[Sequence[Draft], int]:
            drafts = make(self._drafter)
            return drafts, sum(self._counter.count(draft.content) for draft in drafts)

        with topic.used():
            async with topic.storing:
                entries = await self._ingest(topic, made)
        self._indexer.look_after(topic)
        return entries

    async def append_corrections(self, topic: Topic, drafts: Sequence[Draft]) -> list[Entry]:
        """Redact and append the entries of one request's corrections, durably and as one group; return them.

        Raises:
            EmbeddingError, StoreError: nothing was written.
        """

        def redact() -> list[Draft]:
            return redacted_drafts(drafts, self._redactor, self._encoder.embed_text)

        redacted = await asyncio.get_running_loop().run_in_executor(None, redact) if self._redactor else drafts
        entries = await topic.write(lambda: topic.log.append(redacted))
        self._events.publish(
            "corrected", {"topic_id": topic.id, "canonical_ids": tuple(entry.canonical_id for entry in entries)}
        )
        self._indexer.look_after(topic)
        return entries

    def compact_later(self, topic: Topic, conversation: Conversation) -> None:
        """Compact in the background, unless a compaction of this conversation is waiting or running already."""
        if conversation.id not in self._compacting:
            self._compacting.add(conversation.id)
            topic.hold()
            self._tasks.spawn(self._compact_in_background(topic, conversation), "compaction")

    # -- periodically -------------------------------------------------------------------------------------------

    async def tend(self, topics: Topics) -> None:
        """Store idle conversations, close surplus ones, sync journals and close idle topics, until cancelled."""
        synced_at = unloaded_at = time.monotonic()
        while True:
            await asyncio.sleep(TEND_SECONDS)
            sync_due = time.monotonic() - synced_at >= self._config.buffer.journal_fsync_seconds
            for topic in topics.opened():
                with topic.held():
                    await self.tend_topic(topic)
                    if sync_due:
                        await topic.save(sync=True)
            if sync_due:
                synced_at = time.monotonic()
            if time.monotonic() - unloaded_at >= min(UNLOAD_SECONDS, self._config.store.topic_idle_seconds):
                await topics.let_idle_go()
                unloaded_at = time.monotonic()

    async def tend_topic(self, topic: Topic) -> None:
        """Store the topic's idle conversations, and close the least recently used ones above `max_open`."""
        conversations = topic.buffer.conversations()
        surplus = len(conversations) - self._config.conversation.max_open
        idle_before = time.time() - self._config.buffer.idle_seconds
        for index, conversation in enumerate(conversations):
            closing = index < surplus
            due = closing or conversation.used_at < idle_before
            end = len(conversation) if due else conversation.departed_end
            if not conversation.abandoned and (conversation.stored < end or conversation.owed):
                await self.store(topic, conversation, end)
            if closing and (conversation.abandoned or conversation.stored == len(conversation)):
                topic.buffer.close(conversation)
        if surplus > 0:
            await topic.rewrite_journal()
        self._indexer.look_after(topic)

    # -- private ------------------------------------------------------------------------------------------------

    def _let_go(self, topic: Topic, conversation: Conversation, chosen: Departure) -> None:
        """Take what is durable out of the prompt. An open turn recalls anew: its prompt is read from there anyway."""
        settled = conversation.settled
        topic.buffer.mark(conversation, left_out=chosen.left_out)
        if chosen.gone or chosen.replaced:
            topic.buffer.depart(conversation, chosen.gone, self._lines(topic, conversation, chosen))
        opened = conversation.last_user_position()
        if opened is not None and compaction.finished_end(conversation) <= opened:
            topic.buffer.remove_blocks(conversation, [conversation.messages[opened].digest])
        if conversation.settled > settled:
            self._tasks.spawn(topic.rewrite_journal(), "journal")
        self.store_later(topic, conversation, conversation.departed_end)

    def _lines(self, topic: Topic, conversation: Conversation, chosen: Departure) -> dict[int, Line]:
        """The lines that take the places of results: how much is gone, and the ids under which it is in memory."""
        lines = {}
        for position in chosen.replaced:
            item = conversation.messages[position]
            text = compaction.line_text(item.tokens, topic.chunk_ids.get(item.digest, ()))
            lines[position] = Line(text, self._counter.count(text) + MESSAGE_OVERHEAD)
        return lines

    async def _compact_in_background(self, topic: Topic, conversation: Conversation) -> None:
        try:
            await self.compact(topic, conversation)
            await self.store(topic, conversation, compaction.storable_end(conversation))
        finally:
            self._compacting.discard(conversation.id)
            topic.release()

    async def _store_in_background(self, topic: Topic, conversation: Conversation, upto: int) -> None:
        try:
            await self.store(topic, conversation, upto)
        finally:
            self._storing.discard(conversation.id)
            topic.release()

    async def _store_all(self, topic: Topic, finished: Sequence[tuple[Conversation, int]]) -> None:
        for conversation, end in finished:
            await self.store(topic, conversation, end)

    async def _append_turns(
        self, topic: Topic, conversation: Conversation, upto: int, instructions: Sequence[int]
    ) -> None:
        messages = [(item.digest, item.message) for item in conversation.messages[conversation.stored : upto]]
        owed = [conversation.messages[position] for position in instructions]
        tokens = conversation.tokens_between(conversation.stored, upto)

        def made() -> tuple[Sequence[Draft], int]:
            runs = unstored_runs(topic.log, messages, self._redactor)
            for item in owed:  # each by itself: its neighbours were stored without it
                runs += unstored_runs(topic.log, [(item.digest, item.message)], self._redactor, instructions=True)
            return self._drafter.drafts(topic.log, runs), tokens

        topic.note_chunks(await self._ingest(topic, made))

    async def _ingest(self, topic: Topic, make: Callable[[], tuple[Sequence[Draft], int]]) -> list[Entry]:
        """Append the drafts that `make` returns, with the tokens they came from; the caller holds `topic.storing`."""
        started = time.perf_counter()
        drafts, tokens = await asyncio.get_running_loop().run_in_executor(self._encoder.ingestion, make)
        entries: list[Entry] = []
        if drafts:
            entries = await topic.write(lambda: topic.log.append(drafts))
            self._events.publish("stored", {"topic_id": topic.id, "chunks": len(drafts)})
        if redacted := self._redactor.marks([draft.content for draft in drafts]):
            self._redactor.count(redacted)
            log.info(
                "stored, redacted", extra={"topic": topic.id, "chunks": len(drafts), "redacted": tallied(redacted)}
            )
        self._metrics.ingestions.add(time.perf_counter() - started)
        self._metrics.ingested_tokens.add(count=tokens)
        self._metrics.ingested_chunks.add(count=len(drafts))
        return entries

    def _back_off(self, topic: Topic, error: MemdError) -> None:
        failures = self._failures[topic.id] = self._failures.get(topic.id, 0) + 1
        pause = min(BACKOFF_SECONDS_MAX, self._config.compaction.retry_seconds * 2 ** (failures - 1))
        self._retry_at[topic.id] = self._clock() + pause
        self._metrics.errors.add("store")
        fields = {"topic": topic.id, "retry_seconds": pause, "error": error}
        log.warning("storing failed and is tried again, nothing is lost", extra=fields)
