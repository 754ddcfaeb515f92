"""Moves turns from the hot buffer into the log, appends entries of other sources and corrections, and takes notes.

The stages of a text; once cut, it is searchable and keeps its id:

    said       a message of a conversation, in the journal within a second         conversation.hot_buffer
    listed     in a complete part: a turn, or a round of calls                     unstored.ListedParts
    cut        into chunks that searches find and corrections may name             unstored.PartCutter
    drafted    a batch of chunks that are not in the log yet                       pipeline.Drafter
    appended   durably, as one group; then the conversation's mark advances        Topic.append

Rule: nothing else in a daemon appends. Messages count as stored only after their chunks are durable. They leave the
prompt only when they are durable, in the log or, until they are embedded, in the journal. A failed append of messages
changes only the time of the next attempt. Every task that embeds and appends holds `Topic.storing`, so that only
corrections can be appended meanwhile. It embeds in an ingesting thread and writes in the topic's writer thread.

A note is durable before it is acknowledged. It can be found from then on, by its words until it is embedded. A note
whose text is live in the topic, from the same author and source, is not taken again; the answer has the existing ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

import msgspec
from msgspec import UNSET

from memd.clock import Retries, steady_now
from memd.conversation import compaction
from memd.conversation.compaction import Departure
from memd.conversation.conversation import Conversation, Line
from memd.conversation.events import Closed, Departed, Noted, NoteStored
from memd.conversation.tokens import MESSAGE_OVERHEAD
from memd.embedding.encoder import Encoder
from memd.entries import Draft, Entry
from memd.errors import EmbeddingError, ErasedForGood, MadeAnew, MemdError, StoreError
from memd.ingest.indexer import Indexer, Jobs
from memd.ingest.pipeline import Cutter, Drafter
from memd.ingest.redaction import redacted_drafts
from memd.ingest.topics import Topic, Topics
from memd.ingest.unstored import (
    BATCH_CHARACTERS,
    Batch,
    Part,
    each_part,
    has_changed,
    newly_said,
    note_part,
    owed_parts,
    repeated,
)
from memd.notes import Note, check_not_ahead
from memd.principals import by_turns, surplus
from memd.settings.model import Config
from memd.store.log.segment import PendingView
from memd.store.snapshot import Snapshot, asked_by, live_copy
from memd.store.store import TopicLog
from memd.telemetry.events import Events, authors_member
from memd.telemetry.tasks import Tasks
from memd.wording import erased_for_good, tallied

log = logging.getLogger("memd")

MADE_TRIES = 5
BACKOFF_SECONDS_MAX = 30.0
"""The longest pause after a failure."""
FRACTION = 0.5
"""Share of the buffer's tokens removed by one compaction. After each one the model reads its whole prompt anew."""
NAMING_SECONDS = 0.05
"""Longest wait of a request for results that become lines to be cut, as those of an agent that never pauses are not."""
JOURNAL_FSYNC_SECONDS = 1.0
"""Interval of `buffer.journal_fsync: interval`. A power failure loses at most so many seconds of unstored turns."""
TEND_SECONDS = 0.5
"""The interval at which idle conversations are stored, journals synced and indexes brought up to date."""
WAITING_MAX = 2_000
"""With more pending messages, of 5 to 15 KB of memory each, storing no longer yields to requests. Requests get slower
then, which bounds the backlog."""
TEXT_CHARACTERS_MAX = 32 << 20
"""Pending text of all topics, about an hour's work of the model, beyond which requests wait."""
ROOM_SECONDS_MAX = 30.0
LISTING_SECONDS = 1.0
"""Interval at which due conversations are listed anew, so that new messages get their turn."""
UNLOAD_SECONDS = 5.0
"""The interval at which idle topics are closed."""
Append = Callable[[Sequence[Draft]], Awaitable[Sequence[Entry]]]
Result = TypeVar("Result")


class Archiver:
    """Stores, compacts, appends. Used on the event loop; embedding and writing run in threads."""

    def __init__(
        self,
        config: Config,
        encoder: Encoder,
        cutter: Cutter,
        tasks: Tasks,
        events: Events,
        *,
        now: Callable[[], float] = steady_now,
    ) -> None:
        """`now`: the clock of the buffer and of retries, in seconds."""
        self._now = now
        self._config = config
        self._redactor, self._counter = cutter.redactor, cutter.counter
        self._encoder = encoder
        self._drafter = Drafter(cutter, config.dedupe.cosine, encoder.embed_texts, encoder.embedder.same_cosine)
        self.tasks = tasks
        self.indexer = Indexer(tasks, encoder.priority)
        self._metrics = tasks.metrics
        self._events = events
        self._cutting = ThreadPoolExecutor(1, "memd-cut")  # takes a second per megabyte; requests use other threads
        self._turn = encoder.priority.for_background(
            lambda: StoreError("memd ends; what was being cut is in the journal")
        )  # for that thread: a book takes a minute
        self._loading: Future[object] | None = None  # the loading of a model that stays in memory
        self._jobs = Jobs(tasks)
        self._retries = Retries(config.compaction.retry_seconds, BACKOFF_SECONDS_MAX, now)
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._unembedded: set[str] = set()  # topics whose last attempt failed in the embedding model
        self._failures = WeakKeyDictionary[Conversation, int]()  # failures of the model in a conversation's batches

    def close(self) -> None:
        """End the threads; uncut parts are cut on request."""
        self.indexer.close()
        self._turn.end()
        self._cutting.shutdown(wait=True, cancel_futures=True)

    # -- on behalf of requests ----------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait while too much text is pending, so that the backlog is bounded. The wait is limited to
        ROOM_SECONDS_MAX; there is none while storing fails, as it would be useless."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_SECONDS_MAX):
                await self._has_room.wait()

    async def compact(
        self, topic: Topic, conversation: Conversation, excess_tokens: int = 0, *, forced: bool = False
    ) -> bool:
        """Take the oldest messages of a conversation out of its prompt; return False if nothing may leave. They are
        forced to disk first, and embedded and stored in the background. `excess_tokens`: raw tokens to remove at least,
        as far as allowed; 0 if no request waits. `forced`: see `compaction.departure`."""
        started = time.perf_counter()
        choose = partial(compaction.departure, conversation, fraction=FRACTION, excess_tokens=excess_tokens)
        chosen = choose(forced=forced)
        if chosen.end > conversation.stored:
            durable, _ = await asyncio.gather(topic.make_durable(), self._cut_replaced(topic, conversation, chosen))
            chosen = chosen if durable else choose(upto=conversation.stored)
        if chosen.is_empty:
            return False
        self._let_go(topic, conversation, chosen)
        self._metrics.compactions.add(time.perf_counter() - started, "hard" if excess_tokens else "soft")
        return True

    def compact_copy(self, topic: Topic, copy: Conversation, excess_tokens: int) -> bool:
        """Compact a detached copy, for which nothing may be written: only messages in the log may leave."""
        chosen = compaction.departure(copy, fraction=FRACTION, excess_tokens=excess_tokens, upto=copy.stored)
        copy.mark_left_out(chosen.left_out)
        copy.mark_gone(chosen.gone, self._lines(topic, copy, chosen))
        return not chosen.is_empty

    async def let_instructions_go(self, topic: Topic, conversation: Conversation, positions: Sequence[int]) -> None:
        """Take instructions in mid-conversation out of the prompt; they are stored in the background."""
        if await topic.make_durable():
            self._let_go(topic, conversation, Departure(conversation.left_out, tuple(positions)))

    def tend_later(self, topic: Topic) -> None:
        """Run `tend_topic` in the background, unless it is already running."""
        self._jobs.begin(f"tending {topic.id}", topic, partial(self.tend_topic, topic))

    async def store(self, topic: Topic, conversation: Conversation, upto: int) -> bool:
        """Store all messages before `upto` now, part by part; return False if that failed and must be retried.

        An incomplete part is stored only if `upto` is the conversation's end.
        """
        is_stored = None
        while is_stored is None:
            is_stored = (await self._store_some(topic, [(conversation, upto)]))[conversation]
        return is_stored

    async def store_named(self, topic: Topic, uuids: Iterable[bytes], *, whole: bool = False) -> None:
        """Store pending chunks at once, before all others: a correction needs them. Other `uuids` are ignored. `whole`:
        store the rest of their parts, too. Raises EmbeddingError, StoreError: not all were stored."""
        wanted = frozenset(uuids)
        for uuid in wanted:
            # The first look needs no lock, so that a chunk already in the log does not wait for another batch.
            while await self._part_with(topic, uuid, whole=whole) is not None:
                async with self._encoder.priority.awaited(), topic.storing:
                    part = await self._part_with(topic, uuid, whole=whole)
                    named = () if whole else wanted
                    # The marks follow when its conversation is stored.
                    if part is None or (await self._append_parts(topic, [part], named=named)).is_last or not whole:
                        break

    def store_notes_later(self, topic: Topic) -> None:
        """Store the topic's notes in the background; after a failure `tend` retries."""

        async def work() -> None:
            while True:
                async with topic.storing_in_turn():
                    waiting = (one for one in topic.buffer.notes.items() if one[0] not in topic.undecided)
                    own = (note_part(*one) for one in waiting if not topic.is_others(one[0]))
                    if not (parts := [*_next_of(own)]):
                        break
                    if await self._appended(topic, parts) is None:
                        return
            await topic.rewrite_journal()  # without their texts
            self.indexer.look_after(topic)

        if topic.buffer.notes:
            self._jobs.begin(f"storing notes {topic.id}", topic, work)

    def cut_later(self, topic: Topic) -> None:
        """Cut the pending parts and load the model in the background, so that no search waits for either."""

        async def cut() -> None:
            with topic.held():
                work = partial(topic.cutter.cut_waiting, self._turn.give_way)
                await asyncio.get_running_loop().run_in_executor(self._cutting, work)

        loading, embedder = self._loading, self._encoder.embedder
        is_asked = loading is not None and not (loading.done() and loading.exception())
        if topic.unstored():
            self.tasks.spawn(cut(), "cutting")
            if not (is_asked or embedder.waits):
                self._loading = self._encoder.ingestion.submit(embedder.embed_many, ())

    async def append_drafts(self, topic: Topic, make: Callable[[Drafter], Sequence[Draft]]) -> list[Entry]:
        """Append drafts of another source (a document), durably and as one group; return the entries. `make` returns
        the redacted and embedded drafts. It is called in the ingesting thread, while only corrections can be appended
        to the topic. Raises EmbeddingError, StoreError: nothing was written."""
        with topic.used():
            async with topic.storing_in_turn():
                entries = await self._append(topic, partial(make, self._drafter))
        self.indexer.look_after(topic)
        return entries

    async def change_once(
        self,
        topic: Topic,
        mark: bytes,
        uuids: Collection[bytes],
        work: Callable[[Snapshot, Append], Awaitable[Result]],
        was_done: Callable[[Sequence[Entry]], Result],
        after: int = 0,
        *,
        by: str,
    ) -> Result:
        """Apply a request to chunks of a topic once: not if the log has its entries already. Repeat it if another
        daemon has changed the same chunks meanwhile.

        Args:
            mark: the request's mark (`ChunkState.asked_by`).
            uuids: uuids of the chunks that it names.
            work: does the work, given the present snapshot and a function that appends.
            was_done: returns the result from entries that were appended before.
            after: entries up to this canonical_id belong to another request.
            by: the corrector (`Principal.author`), who is also the author of new chunks.

        Raises:
            EmbeddingError, ErasedForGood, StoreError: nothing was done.
        """
        async with topic.correcting:
            while True:
                log_ = topic.log
                made_at, snapshot = log_.head, log_.snapshot()
                if done := await asyncio.to_thread(asked_by, snapshot, uuids, mark, after):
                    return was_done(done)
                with suppress(MadeAnew):
                    return await work(snapshot, partial(self.append_corrections, topic, log_, made_at, mark, by))

    async def append_corrections(
        self, topic: Topic, log_: TopicLog, made_at: int | None, mark: bytes, by: str, drafts: Sequence[Draft]
    ) -> list[Entry]:
        """Sign, redact and append the entries of one request's corrections, durably and as one group; return them.

        `log_`, `made_at`: the topic's log and its `head` when `change_once` looked for the request in it. Raises
        EmbeddingError, ErasedForGood, and the errors of `Topic.append_once`.
        """
        drafts = [msgspec.structs.replace(one, action_by=by or UNSET, asked_by=mark) for one in drafts]
        drafts = [msgspec.structs.replace(one, author=by or UNSET) if one.origin_id is None else one for one in drafts]
        if self._redactor:
            drafts = await asyncio.to_thread(redacted_drafts, drafts, self._redactor, self._encoder.embed_text)
        if any(log_.forbidden.has_text(draft.content) for draft in drafts):
            raise ErasedForGood(f"nothing was changed: {erased_for_good(topic.id)}")
        entries = await topic.append_once(drafts, log_, made_at)
        ids = tuple(entry.canonical_id for entry in entries)
        self._events.publish("corrected", {"topic_id": topic.id, "canonical_ids": ids, **authors_member(entries)})
        self.indexer.look_after(topic)
        return entries

    def compact_later(self, topic: Topic, conversation: Conversation) -> None:
        """Compact in the background, unless a compaction of this conversation is already queued or running."""

        async def work() -> None:
            before = compaction.left_of(conversation)
            await self.compact(topic, conversation)
            if (left := compaction.left_of(conversation).since(before)).tokens:
                log.info("left the prompt", extra={"topic": topic.id, **msgspec.structs.asdict(left)})

        self._jobs.begin(f"compaction {conversation.id}", topic, work)

    # -- periodically -------------------------------------------------------------------------------------------

    async def tend(self, topics: Topics) -> None:
        """Store due messages, close surplus conversations, sync journals and close idle topics, until cancelled.

        Pending parts of a newly opened topic are cut, so that its first question need not wait for that.
        """
        synced_at = unloaded_at = time.monotonic()
        seen = WeakSet[Topic]()
        while True:
            await asyncio.sleep(TEND_SECONDS)
            waiting = sum(one.buffer.unstored_count for one in topics.opened())
            self._encoder.priority.is_pressed = waiting > WAITING_MAX
            characters = sum(topic.listed_parts.characters for topic in topics.opened() if topic.unstored())
            if (
                has_room := characters <= TEXT_CHARACTERS_MAX or bool(self._retries.waiting)
            ) != self._has_room.is_set():
                told = "requests do not wait for storing any more" if has_room else "requests wait until more is stored"
                log.warning(told, extra={"characters": characters})
                (self._has_room.set if has_room else self._has_room.clear)()
            if time.monotonic() - unloaded_at >= min(UNLOAD_SECONDS, self._config.store.topic_idle_seconds):
                await topics.let_idle_go()  # first: a topic that is tended stays open
                unloaded_at = time.monotonic()
            sync_due = time.monotonic() - synced_at >= JOURNAL_FSYNC_SECONDS
            for topic in topics.opened():
                if topic not in seen:
                    seen.add(topic)
                    self.cut_later(topic)
                self.tend_later(topic)  # journals are synced meanwhile
                if sync_due:
                    with topic.held():
                        await topic.exchange_news()
                        await topic.save(sync=True)
            if sync_due:
                synced_at = time.monotonic()

    async def tend_topic(self, topic: Topic) -> None:
        """Store finished turns soon after their reply, and idle conversations whole; close surplus conversations."""
        self.store_notes_later(topic)
        has_closed, has_others, stuck = False, True, set[Conversation]()
        while has_others:  # in steps: messages sent while a long one is embedded are due before its end
            conversations = topic.buffer.conversations()
            surplus_now = surplus_of(conversations, self._config.conversation.max_open)
            has_closed |= _close(topic, [one for one in conversations if one in surplus_now])
            for one in surplus_now:  # if its client returns, it gets a new conversation: no block is needed any more
                topic.buffer.remove_blocks(one, [*one.blocks])
            has_others, until = False, time.monotonic() + LISTING_SECONDS
            for group in self._grouped(topic, self._due(topic, conversations, surplus_now, stuck), surplus_now):
                conversation, closing = group[0][0], group[0][0] in surplus_now
                if _is_to_be_settled(conversation, closing=closing):
                    is_kept = not closing and conversation.has_erased
                    outcomes = {conversation: await self._settle(topic, conversation, is_kept=is_kept)}
                else:
                    outcomes = await self._store_some(topic, group)
                stuck.update(one for one, end in group if outcomes[one] is not None and (one.stored < end or one.owed))
                has_others = has_others or None in outcomes.values()
                has_closed |= _close(topic, [one for one, _ in group if one in surplus_now])
                if time.monotonic() >= until:
                    has_others = True
                    break
        if has_closed:
            await topic.rewrite_journal()  # not without a closed one: thousands may be open that cannot be stored now
        self.indexer.look_after(topic)

    # -- private ------------------------------------------------------------------------------------------------

    def _let_go(self, topic: Topic, conversation: Conversation, chosen: Departure) -> None:
        """Take durable messages out of the prompt.

        The turn recalls anew if its prompt is read from the beginning anyway, or if results in it become lines for the
        first time. If only further results become lines, its block stays, unless it was empty or cut short.
        """
        settled, opened = conversation.settled, conversation.last_user_position()
        is_moved = bool(chosen.gone) or chosen.left_out > conversation.left_out
        is_first = opened is not None and all(place < opened for place in (*conversation.lines, *conversation.gone))
        topic.buffer.mark(conversation, left_out=chosen.left_out)
        if chosen.gone or chosen.replaced:
            topic.buffer.record(Departed(conversation.id, list(chosen.gone), self._lines(topic, conversation, chosen)))
        last = max((*chosen.gone, *chosen.replaced), default=-1)
        if opened is not None and (compaction.finished_end(conversation) <= opened or last > opened):
            digest = conversation.messages[opened].digest
            block = conversation.blocks.get(digest)
            if is_moved or is_first or block is None or not block.chunks or block.is_short is True:
                topic.buffer.remove_blocks(conversation, [digest])
        if conversation.settled > settled:
            self.tasks.spawn(topic.rewrite_journal(), "journal")
        self.tend_later(topic)

    async def _cut_replaced(self, topic: Topic, conversation: Conversation, chosen: Departure) -> None:
        """Cut the results to be replaced, as far as NAMING_SECONDS allow: their lines name only chunks that are cut."""
        named = {conversation.messages[position].identity for position in chosen.replaced}
        if named and topic.buffer.is_open(conversation):
            parts = [part for part in topic.listed_parts.of(conversation) if not named.isdisjoint(part.said)]
            cutting = asyncio.to_thread(topic.cutter.cut, parts, time.monotonic() + NAMING_SECONDS)
            with suppress(TimeoutError):  # the part that is being cut is finished all the same
                await asyncio.wait_for(cutting, NAMING_SECONDS)

    def _lines(self, topic: Topic, conversation: Conversation, chosen: Departure) -> dict[int, Line]:
        """Return the lines that replace results: the size of each, and its ids in memory."""
        lines = {}
        for position in chosen.replaced:
            item = conversation.messages[position]
            text = compaction.line_text(item.tokens, topic.ids_of(item.identity))
            lines[position] = Line(text, self._counter.count(text) + MESSAGE_OVERHEAD)
        return lines

    async def _store_some(
        self, topic: Topic, ends: Sequence[tuple[Conversation, int]]
    ) -> dict[Conversation, bool | None]:
        """Store the next parts of conversations, each up to its position. Return for each True if all is stored, None
        if parts are left, False if storing failed.

        If the position is the conversation's end, an incomplete last part is stored, too. No two conversations may
        share an unstored message: the batch would have it twice.
        """
        outcomes: dict[Conversation, bool | None] = {one: True for one, _ in ends}
        async with topic.storing_in_turn():
            works = [
                StoringWork(one, [*_next_of(topic.listed_parts.before(one, upto))], sorted(one.owed), one.stored, upto)
                for one, upto in ends
                if topic.buffer.is_open(one)  # else it was settled meanwhile, and its marks are final
            ]
            works = [one for one in works if one.parts or one.owed]
            if not works:
                return outcomes
            settled = [one.conversation.settled for one in works]
            parts = [part for one in works for part in (*one.parts, *owed_parts(one.conversation))]
            batch = await self._appended(topic, parts, [one.conversation for one in works])
            complete = None if batch is None else batch.complete
            for one in works:
                outcomes[one.conversation] = False if complete is None else _mark_stored(topic, one, complete)
                complete = None if complete is None else max(0, complete - len(one.parts) - len(one.owed))
        if any(outcomes[one.conversation] for one in works):
            # Messages that left the prompt and are in the log now need not be in the journal.
            has_settled = any(one.conversation.settled > before for one, before in zip(works, settled, strict=True))
            await (topic.rewrite_journal() if has_settled else topic.save())
            self.indexer.look_after(topic)
        return outcomes

    async def _settle(self, topic: Topic, conversation: Conversation, *, is_kept: bool) -> bool | None:
        """Store the messages that only an abandoned branch has, and close it; other branches store the shared ones.
        Return True, None or False as in `_store_some`.

        `is_kept`: leave it open, because some of its text was erased, and a returning client would send that again.
        """
        async with topic.storing_in_turn():
            lives_on, end = topic.buffer.lives_on, conversation.wanted_end
            parts = each_part(conversation, closing=True, is_elsewhere=lambda item: lives_on(item, conversation))
            batch = await self._appended(topic, [*parts, *owed_parts(conversation)], [conversation])
            if batch is None:
                return False
            is_as_it_was = conversation.abandoned and end == conversation.wanted_end
            if batch.is_last and is_as_it_was and topic.buffer.is_open(conversation):
                if is_kept:
                    topic.buffer.mark(conversation, stored=end)
                else:
                    topic.buffer.record(Closed(conversation.id))
        return batch.is_last or None

    async def _appended(
        self, topic: Topic, parts: Sequence[Part], conversations: Sequence[Conversation] = ()
    ) -> Batch | None:
        """Call `_append_parts`; return None if it failed, or if it is too early for a retry. The back-off after a
        failure of the embedding model ends when a question can be embedded again."""
        is_early = self._retries.is_early(topic.id)
        if is_early and not (topic.id in self._unembedded and self._encoder.works):
            return None
        try:
            batch = await self._append_parts(topic, parts, conversations)
        except MemdError as error:
            (self._unembedded.add if isinstance(error, EmbeddingError) else self._unembedded.discard)(topic.id)
            fields = {"topic": topic.id, "retry_seconds": self._retries.failed(topic.id), "error": error}
            self._metrics.errors.add("store")
            if isinstance(error, EmbeddingError):
                self._failures.update((one, self._failures.get(one, 0) + 1) for one in conversations)
            log.warning(f"storing failed and is tried again, {topic.risk}", extra=fields)
            return None
        self._retries.succeeded(topic.id)
        for one in conversations:
            self._failures.pop(one, None)
        return batch

    async def _append_parts(
        self,
        topic: Topic,
        parts: Sequence[Part],
        conversations: Sequence[Conversation] = (),
        named: Collection[bytes] = (),
    ) -> Batch:
        """Append the next chunks of parts or notes. `conversations`: those to which all the parts belong, if known.

        `named`: uuids of chunks to be stored before all others of a part.
        """
        talks = {one for part in parts for digest in part.said for one in topic.buffer.holders(digest)}
        lines = (line for one in talks for line in (*one.lines.values(), *one.former_lines.values()))
        in_lines = tuple({chunk_id for line in lines for chunk_id in line.chunk_ids})
        in_blocks, is_note = topic.buffer.injected_uuids(), any(part.note is not None for part in parts)
        histories = [one.messages[:] for one in conversations]
        new = cache(lambda: set[bytes]().union(*(newly_said(topic.log, messages) for messages in histories)))

        def is_shown(uuid: bytes) -> bool:
            return is_note or uuid in in_blocks or uuid.hex().startswith(in_lines)

        def is_new(digest: bytes) -> bool:
            return not conversations or digest in new()

        batch: Batch | None = None
        log_ = topic.log

        def made() -> list[Draft]:
            nonlocal batch
            self._encoder.give_way()  # also to the request for which messages have just left the prompt
            _check_same(topic, log_)  # else the parts may have erased text
            batch = topic.cutter.next_batch(parts, is_shown, named, self._encoder.give_way)
            topic.being_stored = frozenset(digest for one in batch.cut for digest in one.digests)
            digests = (*batch.digests,)
            return self._drafter.embedded(topic.log, batch.drafts, digests, is_shown=is_shown, is_new=is_new)

        try:
            topic.note_chunks(await self._append(topic, made))
        finally:
            topic.being_stored = frozenset()
        assert batch is not None, "it was made"
        batch.done()
        for note_id in topic.buffer.notes.keys() & batch.digests.keys():
            topic.buffer.record(NoteStored(note_id))
        return batch

    async def _append(self, topic: Topic, make: Callable[[], Sequence[Draft]]) -> list[Entry]:
        """Append the drafts that `make` returns; it is called in the ingesting thread."""
        started = time.perf_counter()
        loop, entries = asyncio.get_running_loop(), list[Entry]()
        for left in reversed(range(MADE_TRIES)):
            log_, made_at = topic.log, topic.log.head
            drafts = await loop.run_in_executor(self._encoder.ingestion, make)
            try:
                _check_same(topic, log_)
                entries = await topic.append(drafts, made_at) if drafts else []
                break
            except MadeAnew:  # another daemon has stored some of it: repeat without that
                if not left:
                    raise
        if drafts:
            self._events.publish("stored", {"topic_id": topic.id, "chunks": len(drafts), **authors_member(entries)})
        if redacted := self._redactor.marks([draft.content for draft in drafts]):
            self._redactor.count(redacted)
            log.info(
                "stored, redacted", extra={"topic": topic.id, "chunks": len(drafts), "redacted": tallied(redacted)}
            )
        self._metrics.ingestions.add(time.perf_counter() - started)
        self._metrics.ingested_tokens.add(count=sum(one.line_tokens or 0 for one in entries))
        self._metrics.ingested_chunks.add(count=len(drafts))
        return entries

    async def _part_with(self, topic: Topic, uuid: bytes, *, whole: bool) -> Part | None:
        """Return the pending part with this chunk; None if there is none, or if the log has the chunk (`whole`: the
        whole part)."""
        log_, cutter = topic.log, topic.cutter
        topic.unstored()

        is_stored = not whole and await asyncio.to_thread(lambda: log_.snapshot().knows(uuid))
        return None if is_stored else await asyncio.to_thread(cutter.part_with, uuid)

    def _due(
        self,
        topic: Topic,
        conversations: Sequence[Conversation],
        surplus_now: Collection[Conversation],
        stuck: Collection[Conversation],
    ) -> Iterator[tuple[Conversation, int]]:
        """Yield the conversations to be stored or settled, each with the position up to which."""
        in_turn = by_turns((one.author, one) for one in conversations)
        for one in sorted(in_turn, key=lambda one: self._failures.get(one, 0)):
            if topic.is_others(one.id) or one in stuck:
                continue
            closing = one in surplus_now
            end = self._due_end(topic, one, closing=closing)
            if _is_to_be_settled(one, closing=closing):
                is_kept = not closing and one.has_erased
                if end == one.wanted_end and not (is_kept and one.stored == end):
                    yield one, end
            elif one.stored < end or one.owed:
                yield one, end

    def _grouped(
        self, topic: Topic, due: Iterable[tuple[Conversation, int]], surplus_now: Collection[Conversation]
    ) -> Iterator[list[tuple[Conversation, int]]]:
        """Group due conversations into batches, because each batch costs a write to disk and a pass over all open
        conversations. Conversations to be settled are not grouped. Neither are branches that share a message, nor
        conversations of a failed batch: a text that the embedding model cannot read delays only its conversation.
        """
        group, said, room = list[tuple[Conversation, int]](), set[bytes](), BATCH_CHARACTERS
        for one, end in due:
            is_alone = one in self._failures or _is_to_be_settled(one, closing=one in surplus_now)
            parts = [] if is_alone else [*_next_of(topic.listed_parts.before(one, end))]
            own = {digest for part in parts for digest in part.said}
            characters = sum(part.characters for part in parts)
            if group and (is_alone or characters > room or not said.isdisjoint(own)):
                yield group
                group, said, room = [], set(), BATCH_CHARACTERS
            group.append((one, end))
            said, room = said | own, -1 if is_alone else room - characters
        if group:
            yield group

    def _due_end(self, topic: Topic, conversation: Conversation, *, closing: bool) -> int:
        """Return the position up to which a conversation is to be stored now."""
        idle_seconds = self._now() - conversation.used_at
        is_of_former_run = idle_seconds < 0  # and the clock was set back since: its idle time is unknown
        is_idle = idle_seconds > self._config.buffer.idle_seconds and not conversation.awaiting
        if closing or is_of_former_run or is_idle:
            return conversation.wanted_end
        departed = min(conversation.departed_end, conversation.wanted_end)
        if idle_seconds < self._config.buffer.store_after_seconds:
            return departed
        if conversation.abandoned and conversation.is_answered:
            return conversation.wanted_end
        if conversation.awaiting:  # also behind the beginning of an answer with which the request ended
            return max([departed, *compaction.cut_positions(conversation)])
        return max(departed, compaction.finished_end(conversation))


class StoringWork(NamedTuple):
    """The parts of a conversation to be stored next."""

    conversation: Conversation
    parts: list[Part]
    owed: list[int]
    """Positions of unstored instructions that left the prompt."""
    begun: int
    """The conversation's `stored` when this was listed."""
    upto: int


def _next_of(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the first parts, up to the text of two batches, as the log may have some of it; long parts do not count."""
    room = 2 * BATCH_CHARACTERS
    for part in parts:
        yield part
        room -= part.characters if part.characters <= BATCH_CHARACTERS else 0
        if room <= 0:
            return


def _mark_stored(topic: Topic, work: StoringWork, complete: int) -> bool | None:
    """Advance a conversation's marks past its first `complete` parts. Return True if all is stored, None if parts are
    left."""
    conversation, done = work.conversation, work.parts[:complete]
    if has_changed(conversation, work.begun, done):
        return None  # the client has sent text again that the log had lost
    is_last = complete >= len(work.parts) + len(work.owed)
    if done or is_last:
        end = done[-1].end if done else work.begun
        repeats = repeated(topic.log, conversation, range(work.begun, end))
        topic.buffer.mark(conversation, stored=end, instructions=work.owed if is_last else (), repeats=repeats)
    return True if is_last and next(topic.listed_parts.before(conversation, work.upto), None) is None else None


def _close(topic: Topic, surplus: Sequence[Conversation]) -> bool:
    """Close the surplus conversations that are stored whole; return True if any of them is closed."""
    for one in surplus:
        if one.stored == len(one) and not one.owed and not topic.is_others(one.id) and topic.buffer.is_open(one):
            topic.buffer.record(Closed(one.id))
    return not all(map(topic.buffer.is_open, surplus))


def _is_to_be_settled(conversation: Conversation, *, closing: bool) -> bool:
    return conversation.abandoned and (conversation.is_answered or closing)


def _check_same(topic: Topic, log_: TopicLog) -> None:
    """Raise MadeAnew if the topic was read anew meanwhile, because another daemon erased something in it."""
    if topic.log is not log_:
        raise MadeAnew(f"topic {topic.id}: something in it was erased meanwhile; it is looked at anew")


def surplus_of(conversations: Sequence[Conversation], room: int) -> frozenset[Conversation]:
    """Return the conversations to close when too many are open; none with an awaited answer, which would be lost.
    `conversations`: in order of last use. `room`: number that may be open."""
    by_rest = sorted(conversations, key=lambda one: one.awaiting > 0)  # those with awaited answers come last
    leaving = (by_rest[one.place] for one in surplus(((one.author, 1) for one in by_rest), room))
    return frozenset(one for one in leaving if not one.awaiting)


# Notes

FORBIDDEN = "forbidden"
"""Error of a note that is forbidden as a whole or in part (`memd erase --forbid`)."""


class TakenNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a note."""

    chunk_ids: tuple[str, ...]
    """Ids of its chunks, in order."""
    duplicate: bool = False
    """True if all its text was live in the topic already, so that nothing was stored."""
    error: str = ""
    """`forbidden`: chunks without an id in `chunk_ids` were erased for good, and not stored."""


async def take_note(
    topic: Topic, note: Note, archiver: Archiver, author: str = "", *, mark: bytes | None = None, is_apart: bool = False
) -> TakenNote:
    """Take a note of a principal (`Principal.author`) durably; it is stored in the background. `mark`: a note with a
    known mark is not taken again, even if it was corrected since. `is_apart`: the author must not learn of others'
    erasures, so forbidden text is acknowledged as if it were stored. Raises BadNote: its date is in the future;
    StoreError: it cannot be made durable, and was not taken."""
    now_us = time.time_ns() // 1000
    check_not_ahead(note, now_us)
    note = msgspec.structs.replace(note, author=author, said_at=now_us if note.said_at is UNSET else note.said_at)
    note_id = uuid4().bytes if mark is None else hashlib.blake2b(mark, digest_size=16).digest()
    part = Part((), 0, note=(note_id, note))

    async def outcome() -> TakenNote | BaseException:
        return (await asyncio.gather(_taken(topic, part, archiver, is_apart=is_apart), return_exceptions=True))[0]

    doing = archiver.tasks.spawn(outcome(), "note")
    done: TakenNote | BaseException = await asyncio.shield(doing)  # it is finished even if the client leaves
    if isinstance(done, BaseException):
        raise done
    return done


async def _taken(topic: Topic, part: Part, archiver: Archiver, *, is_apart: bool) -> TakenNote:
    assert part.note is not None, "a note's part"
    note_id, note = part.note
    with topic.used():
        async with topic.noting:
            try:
                while True:  # until it is decided with all that other daemons have said before it
                    topic.undecided.add(note_id)
                    topic.unstored()
                    is_waiting = note_id in topic.buffer.notes
                    as_told = partial(_as_told, topic, part, is_waiting=is_waiting, is_apart=is_apart)
                    taken, is_new = await asyncio.to_thread(as_told)
                    if is_new and note_id in topic.undecided:
                        topic.buffer.record(Noted(note_id, note))
                    is_durable = await topic.make_durable()  # for a duplicate, too: the first may be in the journal
                    if not is_new or note_id in topic.buffer.notes or topic.log.has_digest(note_id):
                        break
            finally:
                topic.undecided.discard(note_id)
            if not is_durable:
                async with topic.storing:
                    if not is_new or await topic.withdraw(note_id):
                        raise topic.write_trouble or StoreError("the journal cannot be written; see the log of memd")
        archiver.store_notes_later(topic)
    return taken


def _as_told(topic: Topic, part: Part, *, is_waiting: bool, is_apart: bool) -> tuple[TakenNote, bool]:
    """Return the answer to a note, and True if any of it has to be stored. The answer has the ids of live or pending
    chunks with the same text, else new ones. `is_waiting`: the note is already pending. For `is_apart` see
    `take_note`."""
    assert part.note is not None, "a note's part"
    topic.cutter.cut_waiting(notes_alone=True)
    pending, _ = topic.cutter.waiting(until=0.0)
    drafts, snapshot = topic.cutter.drafts_of(*part.note), topic.log.snapshot()
    if topic.log.has_digest(part.note[0]) or is_waiting:
        entries = [chunk.entry if (chunk := pending.find(one.uuid)) else snapshot.find(one.uuid) for one in drafts]
        return TakenNote(tuple(one.public_id for one in entries if one is not None)), False
    found = {one.uuid: live_copy(snapshot, one) or _waiting_copy(pending, one) for one in drafts}
    lacking = [draft for draft in drafts if found[draft.uuid] is None]
    gone = [draft for draft in lacking if topic.log.forbidden.has_text(draft.content)]
    is_new = len(gone) < len(lacking)
    if is_new:
        found |= {chunk.draft.uuid: chunk.entry for cut in topic.cutter.cut([part]) for chunk in cut.chunks}
    ids = {uuid: one.public_id for uuid, one in found.items() if one is not None}
    if gone and is_apart:
        former = _as_if_stored(topic, part.note[0], gone)
        ids |= {uuid: public_id for uuid, (public_id, _) in former.items()}
        is_known = not is_new and all(by not in ("", part.note[0].hex()) for _, by in former.values())
        return TakenNote(tuple(dict.fromkeys(ids[one.uuid] for one in drafts)), is_known), is_new
    return TakenNote(tuple(dict.fromkeys(ids.values())), not lacking, FORBIDDEN if gone else ""), is_new


def _as_if_stored(topic: Topic, note_id: bytes, drafts: Sequence[Draft]) -> dict[bytes, tuple[str, str]]:
    """Return by uuid the id that a forbidden chunk would get, and the id of the first note of the same author with it,
    empty if there was none. Both are kept, so that a repeated note gets the same answer as if the first were stored.
    """
    names = ("\0".join((one.author or "", one.source or "", one.content)) for one in drafts)
    keys = [hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() for name in names]
    with topic.log.forbidding:
        known = topic.log.forbidden.sent
        reserved = [(one.public_id, note_id.hex()) for one in topic.log.reserve(drafts)]
        if new := {key: one for key, one in zip(keys, reserved, strict=True) if key not in known}:
            topic.log.forbid(msgspec.structs.replace(topic.log.forbidden, sent=known | new))
    told = [known.get(key, (one[0], "")) for key, one in zip(keys, reserved, strict=True)]
    return {draft.uuid: one for draft, one in zip(drafts, told, strict=True)}


def _waiting_copy(pending: PendingView, draft: Draft) -> Entry | None:
    """Return the entry of a pending chunk with the draft's text, kind, source and author."""
    same = draft.kind, draft.source, draft.author
    copies = (one.entry for one in pending.with_text(draft.content))
    return next((one for one in copies if (one.kind, one.source, one.author) == same), None)
