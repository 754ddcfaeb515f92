"""Moves turns from the hot buffer into the log, appends entries of other sources and corrections, and takes notes.

The life of a text, which is found and named by one id from the second step on:

    said       a message of a conversation, in the journal within a second         conversation.hot_buffer
    listed     in a part, once that is complete: a turn, a round of calls          unstored.ListedParts
    cut        into chunks, which questions look into and corrections may name     unstored.PartCutter
    drafted    as many as a step takes, but for those that the log has already     pipeline.Drafter
    appended   durably, as one group; then the conversation's mark moves on        Topic.append

Rule: nothing else in a daemon appends. Messages count as stored only after their chunks are durable. They leave the
prompt only when they are durable, in the log or, for the time until they are embedded, in the journal. A failed append
of messages changes nothing but the time of the next attempt. Whatever embeds and appends holds `Topic.storing`, so that
nothing but corrections is appended to the topic meanwhile; it is embedded in an ingesting thread and written in the
topic's.

A note is durable before anybody is told so, and found from then on, by its words until it is embedded. What is live in
the topic, from the same author and source, is not taken again; its ids are told.
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
from memd.principals import Held, by_turns, surplus
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
"""The share of the buffer, by tokens, that leaves in one compaction. After each the model reads its prompt anew."""
JOURNAL_FSYNC_SECONDS = 1.0
"""With `buffer.journal_fsync: interval` the age of turns not in the log yet that a power failure may cost."""
TEND_SECONDS = 0.5
"""The interval at which idle conversations are stored, journals synced and indexes brought up to date."""
WAITING_MAX = 2_000
"""Beyond so many messages that are not stored yet, each of 5 to 15 KB of memory, storing goes beside requests instead
of behind them: who says more than can be stored meanwhile waits for it, and what waits has a bound."""
TEXT_CHARACTERS_MAX = 32 << 20
"""Of what waits, in all topics: an hour's work of the model. Beyond it requests wait, too."""
ROOM_SECONDS_MAX = 30.0
LISTING_SECONDS = 1.0
"""After so long it is looked at anew what is due: what somebody says meanwhile takes its turn."""
UNLOAD_SECONDS = 5.0
"""The interval at which idle topics are closed."""
Append = Callable[[Sequence[Draft]], Awaitable[Sequence[Entry]]]
Result = TypeVar("Result")


class Archiver:
    """Stores, compacts, appends. Of the event loop; embedding and writing run in threads."""

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
        """`now`: seconds, by which the buffer is dated and attempts that fail are tried again."""
        self._now = now
        self._config = config
        self._redactor, self._counter = cutter.redactor, cutter.counter
        self._encoder = encoder
        self._drafter = Drafter(cutter, config.dedupe.cosine, encoder.embed_texts, encoder.embedder.same_cosine)
        self._tasks = tasks
        self.indexer = Indexer(tasks, encoder.priority)
        self._metrics = tasks.metrics
        self._events = events
        self._cutting = ThreadPoolExecutor(1, "memd-cut")  # a second for each megabyte: requests wait for other threads
        self._turn = encoder.priority.for_background(
            lambda: StoreError("memd ends; what was being cut is in the journal")
        )  # of that thread: a book takes a minute
        self._loading: Future[object] | None = None  # of a model that stays once it is loaded
        self._jobs = Jobs(tasks)
        self._retries = Retries(config.compaction.retry_seconds, BACKOFF_SECONDS_MAX, now)
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._unembedded: set[str] = set()  # topics whose last attempt failed in the embedding model
        self._failures = WeakKeyDictionary[Conversation, int]()  # how often that was in a batch with text of one

    def close(self) -> None:
        """End the threads; what is or waits to be cut is cut when it is asked for."""
        self.indexer.close()
        self._turn.end()
        self._cutting.shutdown(wait=True, cancel_futures=True)

    # -- on behalf of requests ----------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait while more waits than may: whoever says more than can be stored is slowed down, and what waits has a
        bound. Not for long, and not where storing fails: it is no use then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_SECONDS_MAX):
                await self._has_room.wait()

    async def compact(
        self, topic: Topic, conversation: Conversation, excess_tokens: int = 0, *, forced: bool = False
    ) -> bool:
        """Take the oldest part of a conversation out of its prompt; False if nothing may leave. It is forced to disk
        first and stored in the background: nobody waits for its embedding. `excess_tokens`: the least that must go, in
        raw tokens, where that may go at all; 0 if no request waits. `forced`: see `compaction.departure`."""
        started = time.perf_counter()
        choose = partial(compaction.departure, conversation, fraction=FRACTION, excess_tokens=excess_tokens)
        chosen = choose(forced=forced)
        if chosen.end > conversation.stored and not await topic.make_durable():
            chosen = choose(upto=conversation.stored)
        if chosen.is_empty:
            return False
        self._let_go(topic, conversation, chosen)
        self._metrics.compactions.add(time.perf_counter() - started, "hard" if excess_tokens else "soft")
        return True

    def compact_copy(self, topic: Topic, copy: Conversation, excess_tokens: int) -> bool:
        """Do the same to a detached copy, for which nothing may be written: only what is in the log may leave."""
        chosen = compaction.departure(copy, fraction=FRACTION, excess_tokens=excess_tokens, upto=copy.stored)
        copy.mark_left_out(chosen.left_out)
        copy.mark_gone(chosen.gone, self._lines(topic, copy, chosen))
        return not chosen.is_empty

    async def let_instructions_go(self, topic: Topic, conversation: Conversation, positions: Sequence[int]) -> None:
        """Take instructions in mid-conversation out of the prompt; they are stored in the background."""
        if await topic.make_durable():
            self._let_go(topic, conversation, Departure(conversation.left_out, tuple(positions)))

    def tend_later(self, topic: Topic) -> None:
        """Store what is due in the topic in the background, unless that is under way; what fails is tried again."""
        self._jobs.begin(f"tending {topic.id}", topic, partial(self.tend_topic, topic))

    async def store(self, topic: Topic, conversation: Conversation, upto: int) -> bool:
        """Store all messages before `upto` now, part by part; False if that failed and is to be tried again later.

        A part that is not complete yet waits for its end, unless `upto` is the conversation's.
        """
        is_stored = None
        while is_stored is None:
            is_stored = (await self._store_some(topic, [(conversation, upto)]))[conversation]
        return is_stored

    async def store_named(self, topic: Topic, uuids: Iterable[bytes], *, whole: bool = False) -> None:
        """Store pending chunks at once, before all else: somebody corrects them. `uuids`: those of others are ignored.
        `whole`: all that was said with them is stored, too. Raises EmbeddingError, StoreError: not all were stored."""
        wanted = frozenset(uuids)
        for uuid in wanted:
            # Looked for twice, so that what the log has already does not wait for what is being stored.
            while await self._part_with(topic, uuid, whole=whole) is not None:
                async with self._encoder.priority.awaited(), topic.storing:
                    part = await self._part_with(topic, uuid, whole=whole)
                    named = () if whole else wanted
                    # The marks follow when its conversation is stored.
                    if part is None or (await self._append_parts(topic, [part], named=named)).is_last or not whole:
                        break

    def store_notes_later(self, topic: Topic) -> None:
        """Store the topic's notes in the background; where that fails, `tend` tries again."""
        if topic.buffer.notes:
            self._jobs.begin(f"storing notes {topic.id}", topic, partial(self._store_notes, topic))

    def cut_later(self, topic: Topic) -> None:
        """Cut in the background what was said, so that no search has to wait for that, nor for the model, which is to
        embed it."""

        async def cut() -> None:
            with topic.held():
                work = partial(topic.cutter.cut_waiting, self._turn.give_way)
                await asyncio.get_running_loop().run_in_executor(self._cutting, work)

        loading, embedder = self._loading, self._encoder.embedder
        is_asked = loading is not None and not (loading.done() and loading.exception())
        if topic.unstored():
            self._tasks.spawn(cut(), "cutting")
            if not (is_asked or embedder.waits):
                self._loading = self._encoder.ingestion.submit(embedder.embed_many, ())

    async def append_drafts(self, topic: Topic, make: Callable[[Drafter], Sequence[Draft]]) -> list[Entry]:
        """Append what is no conversation's (a document), durably and as one group; return the entries. `make` returns
        the drafts, redacted and embedded; it is called in the ingesting thread, while nothing but corrections is
        appended to the topic. Raises EmbeddingError, StoreError: nothing was written."""
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
        since_us: int = 0,
    ) -> Result:
        """Do what a request asks for to chunks of a topic, unless the log says that it was done; again where another
        daemon has stored something of the same meanwhile.

        Args:
            mark: of the request (`ChunkState.asked_by`).
            uuids: of the chunks that it names.
            work: takes the topic as it is, and what appends to it.
            was_done: makes the outcome of the entries that were appended before.
            since_us: what was appended before this time was asked for by another request.

        Raises:
            EmbeddingError, ErasedForGood, StoreError: nothing was done.
        """
        async with topic.correcting:
            while True:
                log_ = topic.log
                made_at, snapshot = log_.head, log_.snapshot()
                done = await asyncio.to_thread(asked_by, snapshot, uuids, mark)
                if done and done[-1].at >= since_us:
                    return was_done(done)
                with suppress(MadeAnew):
                    return await work(snapshot, partial(self.append_corrections, topic, log_, made_at=made_at))

    async def append_corrections(
        self, topic: Topic, log_: TopicLog, drafts: Sequence[Draft], made_at: int | None = None
    ) -> list[Entry]:
        """Redact and append the entries of one request's corrections, durably and as one group; return them.

        `log_`: the topic's, as it was when the request was looked for in it (`change_once`), and `made_at` its `head`
        then. Raises EmbeddingError, ErasedForGood, and what `Topic.append_once` raises.
        """
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
        """Compact in the background, unless a compaction of this conversation is waiting or running already."""
        work = partial(self._compact_in_background, topic, conversation)
        self._jobs.begin(f"compaction {conversation.id}", topic, work)

    # -- periodically -------------------------------------------------------------------------------------------

    async def tend(self, topics: Topics) -> None:
        """Store what is due, close surplus conversations, sync journals and close idle topics, until cancelled.

        What waits in a topic when it is opened is cut then, so that its first question need not wait for it.
        """
        synced_at = unloaded_at = time.monotonic()
        seen = WeakSet[Topic]()
        while True:
            await asyncio.sleep(TEND_SECONDS)
            waiting = sum(one.buffer.unstored_count for one in topics.opened())
            self._encoder.priority.is_pressed = waiting > WAITING_MAX
            self._note_room(sum(topic.listed_parts.characters for topic in topics.opened() if topic.unstored()))
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
                        await topic.save(sync=True)
            if sync_due:
                synced_at = time.monotonic()

    async def tend_topic(self, topic: Topic) -> None:
        """Store finished turns a moment after their reply and idle conversations whole; close surplus conversations."""
        await topic.before_storing()
        self.store_notes_later(topic)
        has_closed, has_others, stuck = False, True, set[Conversation]()
        while has_others:  # bit by bit: what is said beside a long message is due before all of that is embedded
            conversations = topic.buffer.conversations()
            surplus_now = surplus_of(conversations, self._config.conversation.max_open)
            has_closed |= _close(topic, [one for one in conversations if one in surplus_now])
            for one in surplus_now:  # its client comes back to another one: of this one only what was said is kept
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
            await topic.rewrite_journal()  # not for those that cannot be stored now: they may be thousands
        self.indexer.look_after(topic)

    # -- private ------------------------------------------------------------------------------------------------

    def _note_room(self, waiting: int) -> None:
        has_room = waiting <= TEXT_CHARACTERS_MAX or bool(self._retries.waiting)
        if has_room != self._has_room.is_set():
            told = "requests do not wait for storing any more" if has_room else "requests wait until more is stored"
            log.warning(told, extra={"characters": waiting})
        (self._has_room.set if has_room else self._has_room.clear)()

    def _let_go(self, topic: Topic, conversation: Conversation, chosen: Departure) -> None:
        """Take what is durable out of the prompt.

        A turn recalls anew where its prompt is read from its beginning anyway, and when it gives way for the first
        time; where more results become lines its block stays, if it had room to show anything.
        """
        settled, opened = conversation.settled, conversation.last_user_position()
        is_moved = bool(chosen.gone) or chosen.left_out > conversation.left_out
        is_first = opened is not None and all(place < opened for place in (*conversation.lines, *conversation.gone))
        topic.buffer.mark(conversation, left_out=chosen.left_out)
        if chosen.gone or chosen.replaced:
            topic.buffer.record(Departed(conversation.id, list(chosen.gone), self._lines(topic, conversation, chosen)))
        if opened is not None and (compaction.finished_end(conversation) <= opened or chosen.takes_behind(opened)):
            digest = conversation.messages[opened].digest
            block = conversation.blocks.get(digest)
            if is_moved or is_first or block is None or not block.chunks or block.is_short is True:
                topic.buffer.remove_blocks(conversation, [digest])
        if conversation.settled > settled:
            self._tasks.spawn(topic.rewrite_journal(), "journal")
        self.tend_later(topic)

    def _lines(self, topic: Topic, conversation: Conversation, chosen: Departure) -> dict[int, Line]:
        """The lines that take the places of results: how much is gone, and the ids under which it is in memory."""
        lines = {}
        for position in chosen.replaced:
            item = conversation.messages[position]
            text = compaction.line_text(item.tokens, topic.ids_of(item.identity))
            lines[position] = Line(text, self._counter.count(text) + MESSAGE_OVERHEAD)
        return lines

    async def _compact_in_background(self, topic: Topic, conversation: Conversation) -> None:
        shown = compaction.shown_of(conversation)
        await self.compact(topic, conversation)
        if left := compaction.left_since(shown, conversation):
            log.info("left the prompt", extra={"topic": topic.id, **msgspec.structs.asdict(left)})

    async def _store_some(
        self, topic: Topic, ends: Sequence[tuple[Conversation, int]]
    ) -> dict[Conversation, bool | None]:
        """Store the next parts of some conversations, of each before a position; for each None if there are others,
        False if that failed.

        Where the position is the conversation's end, what is behind the last part is one too, although it may go on.
        No two of them share a message that is to be stored: a batch would have it twice.
        """
        outcomes: dict[Conversation, bool | None] = {one: True for one, _ in ends}
        async with topic.storing_in_turn():
            works = [
                StoringWork(one, [*_next_of(topic.listed_parts.before(one, upto))], sorted(one.owed), one.stored, upto)
                for one, upto in ends
                if topic.buffer.is_open(one)  # else it was settled meanwhile, and its marks do not move any more
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
            # What left the prompt and is in the log now need not be in the journal.
            has_settled = any(one.conversation.settled > before for one, before in zip(works, settled, strict=True))
            await (topic.rewrite_journal() if has_settled else topic.save())
            self.indexer.look_after(topic)
        return outcomes

    async def _settle(self, topic: Topic, conversation: Conversation, *, is_kept: bool) -> bool | None:
        """Store what an abandoned branch alone has, and close it: the others see to what they share with it. Returns as
        `_store_some`.

        `is_kept`: it stays open, as something in it was erased, which a client that comes back to it sends again.
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

    async def _store_notes(self, topic: Topic) -> None:
        while True:
            own = (note_part(*one) for one in topic.buffer.notes.items() if not topic.is_others(one[0]))
            if not (parts := [*_next_of(own)]):
                break
            async with topic.storing_in_turn():
                if await self._appended(topic, parts) is None:
                    return
        await topic.rewrite_journal()  # without their texts
        self.indexer.look_after(topic)

    async def _appended(
        self, topic: Topic, parts: Sequence[Part], conversations: Sequence[Conversation] = ()
    ) -> Batch | None:
        """Append as `_append_parts`; None if that failed, or it is too early to try again: a failure of the embedding
        model ends its pause with the first question that can be embedded again."""
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
        """Append the next chunks of parts of some conversations, of a part of any, or of notes.

        `named`: the uuids of chunks that go before all others of a part.
        """
        talks = {one for part in parts for digest in part.said for one in topic.buffer.holders(digest)}
        is_in_prompts, is_note = _shown_in(topic, talks), any(part.note is not None for part in parts)
        histories = [one.messages[:] for one in conversations]
        new = cache(lambda: set[bytes]().union(*(newly_said(topic.log, messages) for messages in histories)))

        def is_shown(uuid: bytes) -> bool:
            return is_note or is_in_prompts(uuid)

        def is_new(digest: bytes) -> bool:
            return not conversations or digest in new()

        batch: Batch | None = None
        log_ = topic.log

        def made() -> list[Draft]:
            nonlocal batch
            self._encoder.give_way()  # to the request, too, for which some of it has just left the prompt
            _check_same(topic, log_)  # else the parts have what was erased
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
            except MadeAnew:  # another daemon has stored some of the same: it is made anew, without that
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
        """The part that is to be stored and has the chunk with this uuid; None if nobody has it, or the log has it
        (`whole`: all of the part)."""
        log_, cutter = topic.log, topic.cutter
        topic.unstored()

        def found() -> Part | None:
            return None if not whole and log_.snapshot().knows(uuid) else cutter.part_with(uuid)

        return await asyncio.get_running_loop().run_in_executor(None, found)

    def _due(
        self,
        topic: Topic,
        conversations: Sequence[Conversation],
        surplus_now: Collection[Conversation],
        stuck: Collection[Conversation],
    ) -> Iterator[tuple[Conversation, int]]:
        """Those that have something to be stored, or are to be settled, each with the position before which."""
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
        """Conversations with the positions before which they are to be stored, as many together as a batch takes: each
        batch costs a write to disk and a look at all that is open. Alone go those that are to be settled, those that
        share a message, as the branches of one do, and those of a batch in which the embedding model failed: a text
        that it cannot read keeps back its own conversation alone.
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
        """The position up to which a conversation is to be stored now."""
        idle_seconds = self._now() - conversation.used_at
        is_of_former_run = idle_seconds < 0  # and the clock was set back since: nobody knows how long ago it was
        is_idle = idle_seconds > self._config.buffer.idle_seconds and not conversation.awaiting
        if closing or is_of_former_run or is_idle:
            return conversation.wanted_end
        departed = min(conversation.departed_end, conversation.wanted_end)
        if idle_seconds < self._config.buffer.store_after_seconds:
            return departed
        if conversation.abandoned and conversation.is_answered:
            return conversation.wanted_end
        return max(departed, compaction.finished_end(conversation))


class StoringWork(NamedTuple):
    """The next that is to be stored of a conversation."""

    conversation: Conversation
    parts: list[Part]
    owed: list[int]
    """The positions of instructions that left the prompt."""
    begun: int
    """Its `stored` now."""
    upto: int


def _next_of(parts: Iterable[Part]) -> Iterator[Part]:
    """The first of them: a batch's, and as much again, for of some the log has the text; long ones count as none."""
    room = 2 * BATCH_CHARACTERS
    for part in parts:
        yield part
        room -= part.characters if part.characters <= BATCH_CHARACTERS else 0
        if room <= 0:
            return


def _shown_in(topic: Topic, conversations: Iterable[Conversation]) -> Callable[[bytes], bool]:
    """Whether a chunk with this uuid was shown in a prompt lately, or is named by a line of these conversations."""
    shown = topic.buffer.injected_uuids()
    lines = (line for one in conversations for line in (*one.lines.values(), *one.former_lines.values()))
    named = tuple({chunk_id for line in lines for chunk_id in line.chunk_ids})
    return lambda uuid: uuid in shown or uuid.hex().startswith(named)


def _mark_stored(topic: Topic, work: StoringWork, complete: int) -> bool | None:
    """Move a conversation's marks behind the first of its parts, of which the log has so many; None if there are
    others."""
    conversation, done = work.conversation, work.parts[:complete]
    if has_changed(conversation, work.begun, done):
        return None  # the client has sent again what the log had lost
    is_last = complete >= len(work.parts) + len(work.owed)
    if done or is_last:
        end = done[-1].end if done else work.begun
        repeats = repeated(topic.log, conversation, range(work.begun, end))
        topic.buffer.mark(conversation, stored=end, instructions=work.owed if is_last else (), repeats=repeats)
    return True if is_last and next(topic.listed_parts.before(conversation, work.upto), None) is None else None


def _close(topic: Topic, surplus: Sequence[Conversation]) -> bool:
    """Close those of surplus conversations that are stored whole; whether any is closed now."""
    for one in surplus:
        if one.stored == len(one) and not one.owed and not topic.is_others(one.id) and topic.buffer.is_open(one):
            topic.buffer.record(Closed(one.id))
    return not all(map(topic.buffer.is_open, surplus))


def _is_to_be_settled(conversation: Conversation, *, closing: bool) -> bool:
    return conversation.abandoned and (conversation.is_answered or closing)


def _check_same(topic: Topic, log_: TopicLog) -> None:
    """Raise MadeAnew if the topic was read anew meanwhile, as another daemon has erased something in it."""
    if topic.log is not log_:
        raise MadeAnew(f"topic {topic.id}: something in it was erased meanwhile; it is looked at anew")


def surplus_of(conversations: Sequence[Conversation], room: int) -> frozenset[Conversation]:
    """Those of too many open conversations that are to be closed; none whose answer is awaited, which would be lost.
    `conversations`: the one used last comes last. `room`: how many may be open."""
    by_rest = sorted(conversations, key=lambda one: one.awaiting > 0)  # those that are at work go last
    leaving = (by_rest[one.place] for one in surplus((Held(one.author) for one in by_rest), room))
    return frozenset(one for one in leaving if not one.awaiting)


# Notes

FORBIDDEN = "forbidden"
"""The error of a note, or of a part of it, that was erased for good (`memd erase --forbid`)."""


class TakenNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a note."""

    chunk_ids: tuple[str, ...]
    """Of the chunks that it was cut into, in order."""
    duplicate: bool = False
    """All of it was live in the topic already, and nothing was stored."""
    error: str = ""
    """`forbidden`: what has no id in `chunk_ids` was erased for good, and was not stored."""


async def take_note(
    topic: Topic,
    note: Note,
    archiver: Archiver,
    author: str = "",
    *,
    mark: bytes | None = None,
    is_apart: bool = False,
) -> TakenNote:
    """Take one note of a principal's (`Principal.author`), durably; it is stored in the background. `mark`: one that
    was taken with the same mark before is not taken again, also where it was corrected since. `is_apart`: they may not
    know what others have erased: of that they are told as of what is stored. Raises BadNote: it is said to be from the
    future; StoreError: it cannot be made durable, and was not taken."""
    now_us = time.time_ns() // 1000
    check_not_ahead(note, now_us)
    note = msgspec.structs.replace(note, author=author, said_at=now_us if note.said_at is UNSET else note.said_at)
    note_id = uuid4().bytes if mark is None else hashlib.blake2b(mark, digest_size=16).digest()
    part = Part((), 0, note=(note_id, note))
    with topic.used():
        async with topic.noting:
            topic.unstored()
            is_waiting = note_id in topic.buffer.notes
            taken, is_new = await asyncio.to_thread(_as_told, topic, part, is_waiting=is_waiting, is_apart=is_apart)
            if is_new:
                topic.buffer.record(Noted(note_id, note))
            if not await topic.make_durable():  # of a copy too: it may be in the journal alone
                if is_new:
                    topic.buffer.record(NoteStored(note_id))
                raise topic.write_trouble or StoreError("the journal cannot be written; see the log of memd")
        archiver.store_notes_later(topic)
    return taken


def _as_told(topic: Topic, part: Part, *, is_waiting: bool, is_apart: bool) -> tuple[TakenNote, bool]:
    """The answer to a note: the ids of chunks that say the same, live or waiting, else those that it gets. And whether
    it has something to store. `is_waiting`: it was taken before, and waits. For `is_apart` see `take_note`."""
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
    """By uuid the id with which a forbidden chunk would be stored, and the id of the note of the same author that had
    it before; empty: none had. It is kept, so that a note that is sent again hears the same as of one that is stored.
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
    """A chunk of a note that waits and has the text of another one, from the same source and author."""
    same = draft.kind, draft.source, draft.author
    copies = (one.entry for one in pending.with_text(draft.content))
    return next((one for one in copies if (one.kind, one.source, one.author) == same), None)
