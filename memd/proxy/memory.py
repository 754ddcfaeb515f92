"""Memory of a turn: applies the corrections and notes of its request, makes room in the model's window, recalls the
block once, and settles what the prompt shows and the response reports.

Rule: memory fails open: an error of recall becomes the request's status, and the request goes on without a block. If
only the embedding failed, the block shows chunks found by words. An error of corrections loses only these; the status,
a signal per id and each note report it.

Corrections and notes are applied before the request is forwarded, once, and durably. Work that has begun is finished
even if the client leaves. A retry gets the first outcome, which the log's entries show (`ChunkState.asked_by`).

Only durable messages may leave the prompt, and memory blocks leave before history does (`conversation/compaction.py`
has the order). A prompt that still does not fit is sent without memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

import msgspec

from memd.conversation import compaction
from memd.conversation.conversation import Conversation, Counted
from memd.conversation.events import Injected, Placed, Removed, Returned
from memd.conversation.hot_buffer import CORRECTABLE_TURNS
from memd.conversation.tokens import ATTACHMENT_TOKENS, Drift, TokenCounter
from memd.embedding.encoder import Encoder
from memd.entries import Correction, Entry
from memd.errors import BadNote, DiskFull, EmbeddingError, ErasedForGood, MemdError
from memd.ingest.archiver import FORBIDDEN, Archiver, take_note
from memd.ingest.redaction import Redactor
from memd.ingest.topics import Topic, Topics
from memd.messages import NO_BLOCK, Block, BlockChunk, stored_text
from memd.notes import Note
from memd.proxy.prompt import Prompt, Received
from memd.proxy.upstream.windows import LengthRefusal, ModelWindow, Sent
from memd.recall import block, corrections
from memd.recall.retrieve import Budget, Filters, Retrieved, Retriever
from memd.settings.model import BufferSettings, InjectionSettings
from memd.store.store import Snapshot
from memd.telemetry.logging import Content
from memd.telemetry.tasks import Tasks
from memd.wire.sideband import InjectedChunk, MemoryIn, MemoryOut, NoteOut, Signal, memory_headers
from memd.wording import counted, tallied

log = logging.getLogger("memd")
FailedIds = tuple[str, ...]
"""The ids that could not be corrected."""
Resolve = Callable[[str], BlockChunk | None]
READONLY, AHEAD = "readonly", "said_at"
NOT_READ = "memory_in is not read in a request that goes on with a conversation that the upstream keeps"


class CorrectionResult(msgspec.Struct, frozen=True):
    """The outcome of a request's corrections and notes."""

    failed_ids: FailedIds = ()
    taken_out: FailedIds = ()
    """Ids deprecated by an Update without a new text."""
    notes: tuple[NoteOut, ...] = ()
    """The outcome of its notes, in order."""
    trouble: str | None = None
    """The status to report if corrections or notes failed."""
    problem: str = ""
    """Why none of them had an effect; empty if any had."""


class Corrector(msgspec.Struct, frozen=True):
    """Applies the corrections of requests."""

    topics: Topics
    encoder: Encoder
    archiver: Archiver
    tasks: Tasks

    async def correct(self, received: Received) -> CorrectionResult:
        """Apply the corrections and take the notes, unless the same request was handled before."""
        memory_in = received.request.memory_in or MemoryIn()
        if not (memory_in.corrections or memory_in.notes or received.request.goes_on_with):
            return CorrectionResult()
        doing = self.tasks.spawn(self._done(received, memory_in), "correct")
        return await asyncio.shield(doing)  # finishes even if the client leaves

    async def _done(self, received: Received, memory_in: MemoryIn) -> CorrectionResult:
        with received.topic.used():
            corrected = await self._corrected(received, memory_in.corrections)
            notes = await self._noted(received, memory_in.notes)
        failed = next(
            (f"degraded:{note.error}" for note in notes if note.error not in ("", READONLY, AHEAD, FORBIDDEN)), None
        )
        problem = _problem(received, corrected, notes)
        if problem:
            log.warning("nothing of a memory_in was done", extra={**received.log_fields(), "problem": problem})
        asked = () if received.key is None else memory_in.corrections
        emptied = _named(one for one in asked if one.action == "Update" and not (one.content or "").strip())
        return msgspec.structs.replace(
            corrected,
            taken_out=tuple(one for one in emptied if one not in corrected.failed_ids),
            notes=notes,
            trouble=corrected.trouble or failed,
            problem=problem,
        )

    async def _noted(self, received: Received, notes: Sequence[Note]) -> tuple[NoteOut, ...]:
        """Take the notes; those of a retry are found as duplicates."""
        if not received.is_traced:
            return tuple(NoteOut(error=READONLY) for _ in notes)
        told = []
        for note in notes:
            try:
                who, topic = received.asked.who, received.topic
                is_apart = not who.may("read", topic.id)
                taken = await take_note(topic, note, self.archiver, who.author, is_apart=is_apart)
                told.append(NoteOut(taken.chunk_ids, taken.duplicate, taken.error))
            except BadNote:
                told.append(NoteOut(error=AHEAD))
            except MemdError as error:
                log.error("a note was not taken", extra=received.log_fields(error))
                told.append(NoteOut(error=degraded(error).removeprefix("degraded:")))
        return tuple(told)

    async def _corrected(self, received: Received, asked: Sequence[Correction]) -> CorrectionResult:
        topic, key, who = received.topic, received.key, received.asked.who
        if received.asked.is_held_back or (key is not None and not who.may("correct", topic.id)):
            return CorrectionResult(_named(asked))
        if key is None or not asked:
            return CorrectionResult()
        told = "\0".join((who.author, received.asked.session or "")).encode(errors="surrogateescape")
        mark = hashlib.blake2b(told + key.last_digest + key.memory_in, digest_size=16).digest()
        try:
            await topic.save()  # save the arrival before its effect, so that a retry after a kill is recognized
            return CorrectionResult(await self._apply(received, asked, mark))
        except MemdError as error:
            failed = _named(asked)
            self.tasks.metrics.count_corrections(asked, len(failed))
            if isinstance(error, ErasedForGood):
                return CorrectionResult(failed)
            log.error("corrections were not applied", extra=received.log_fields(error))
            return CorrectionResult(failed, trouble=degraded(error))

    async def _apply(self, received: Received, asked: Sequence[Correction], mark: bytes) -> FailedIds:
        """Apply corrections once. The log shows whether the same request did so since it first arrived, also before a
        restart or at another daemon."""
        topic, resolve, named = received.topic, _resolving(received), dict.fromkeys(_named(asked))
        shown = {one: chunk for one in named if (chunk := resolve(one)) is not None}
        await self._store_pending(topic, shown.values())

        async def work(snapshot: Snapshot, append: corrections.Append) -> FailedIds:
            applied = await corrections.correct_shown(
                asked,
                own=snapshot,
                resolve=shown.get,
                snapshot_of=self._snapshot_of,
                encoder=self.encoder,
                append=append,
            )
            self.tasks.metrics.count_corrections(asked, len(applied.failed))
            return applied.failed

        def was_done(entries: Sequence[Entry]) -> FailedIds:
            changed = {entry.uuid for entry in entries}
            return tuple(one for one in named if one not in shown or shown[one].uuid not in changed)

        uuids = {chunk.uuid for chunk in shown.values()}
        by, after = received.asked.who.author, received.head
        return await self.archiver.change_once(topic, mark, uuids, work, was_done, after, by=by)

    async def _store_pending(self, topic: Topic, shown: Iterable[BlockChunk]) -> None:
        """Store chunks that were shown while still pending, because only stored chunks can be corrected."""
        for chunk in shown:
            source = topic if chunk.topic_id == topic.id else await self._readable(chunk.topic_id)
            logs = [topic.log] if source is None else [topic.log, source.log]
            if source is None or any(one.snapshot().knows(chunk.uuid) for one in logs):
                continue
            with source.used():
                await self.archiver.store_named(source, [chunk.uuid])

    async def _snapshot_of(self, topic_id: str) -> Snapshot | None:
        topic = await self._readable(topic_id)
        return None if topic is None else topic.log.snapshot()

    async def _readable(self, topic_id: str) -> Topic | None:
        return next(iter(await self.topics.readable([topic_id])), None)


def _named(asked: Iterable[Correction]) -> FailedIds:
    return tuple(one for correction in asked for one in correction.chunk_ids)


def _problem(received: Received, corrected: CorrectionResult, notes: Sequence[NoteOut]) -> str:
    """Return why a MemoryIn had no effect; empty if it had one or asked for nothing. The text is logged, so it quotes
    no ids."""
    asked, failed = received.request.memory_in, corrected.failed_ids
    if received.request.goes_on_with:
        fields = received.request.fields
        is_given = "memory_in" in fields or b'"memory_in"' in bytes(fields.get("metadata", b""))
        return NOT_READ if is_given else ""
    named = 0 if asked is None else sum(len(set(one.chunk_ids)) for one in asked.corrections)
    is_corrected = named and received.key is not None and len(failed) < named
    if is_corrected or any(not note.error for note in notes):
        return ""
    why = [f"no chunk was corrected: {_uncorrected(received, corrected)}"] if named else []
    why += [f"no note was taken: {tallied(Counter(note.error for note in notes))}"] if notes else []
    return f"memory_in: {'; '.join(why)}" if why else ""


def _uncorrected(received: Received, corrected: CorrectionResult) -> str:
    if corrected.trouble is not None:
        return corrected.trouble
    if received.key is None or not received.asked.who.may("correct", received.topic.id):
        return "the request may only read in this topic"
    failed = corrected.failed_ids
    unknown = list(map(_resolving(received), failed)).count(None)
    told = {
        f"not shown in the topic's last {CORRECTABLE_TURNS} turns": unknown,
        "taken out or erased since": len(failed) - unknown,
    }
    return ", ".join(f"{counted(number, 'id')} {why}" for why, number in told.items() if number)


def _resolving(received: Received) -> Resolve:
    """Return a function that finds a shown chunk by its id; a chunk that may not be corrected counts as unknown."""

    def resolve(chunk_id: str) -> BlockChunk | None:
        chunk = received.topic.buffer.resolve(chunk_id)
        return chunk if chunk is not None and received.asked.who.may("correct", chunk.topic_id) else None

    return resolve


def degraded(error: MemdError) -> str:
    """Return the status of a request that goes on although memory failed."""
    if isinstance(error, DiskFull):
        return "degraded:disk-full"
    return "degraded:embedding" if isinstance(error, EmbeddingError) else "degraded:store"


HARD_ROUNDS_MAX = 4
"""Limit on compactions before one request; each halves the prompt or takes everything that may leave."""
INSTRUCTIONS_SHARE_MAX = 8
"""Instructions in mid-conversation stay while together they take at most an eighth of the window."""
BLOCK_SHARE = 8
"""Once history has left for lack of room, a block takes at most an eighth of the room, because it is read anew each
time that compaction moves the prompt (bench/NOTES.md)."""
THREE_CHUNKS_TOKENS, THREE_CHUNKS_SHARE = 896, 2
"""A block may still take room for three of the longest chunks, in raw tokens, up to half of the room."""
SHORT_SHARE = 2 / 3
"""A block with a smaller share of its limit is recalled again once results are shortened to lines. Otherwise an agent's
turn beside one long unread result kept a quarter of a block, and missed facts it needed."""
COUNT_MARGIN = 1.15
"""The upstream counts the prompt (50 ms for 6,000 tokens with llama.cpp on 2 cores) if the estimated part, multiplied
by this, could exceed the threshold."""
COUNT_MARGIN_UNKNOWN = 6.0
"""The same for a model with an unknown tokenizer: a byte tokenizer has six tokens for one of ours."""

COUNT_DOUBT = 2.0
"""An estimate with a known tokenizer is wrong by at most this factor, for any text."""


class PromptRoom(msgspec.Struct, frozen=True):
    """The token budgets of a request, and whether its prompt keeps within them."""

    thresholds: compaction.Thresholds
    """In the model's tokens."""
    block: int
    """Limit for this turn's block; 0 if there is no room for it."""
    is_short: bool
    """The block gets less than `SHORT_SHARE` of its limit, because unread messages may not leave."""


class RoomMaker(msgspec.Struct, frozen=True):
    """Makes room before recall, so that what has just left the prompt can be recalled into it."""

    buffer: BufferSettings
    injection: InjectionSettings
    counter: TokenCounter
    archiver: Archiver
    left_out: WeakKeyDictionary[Conversation, int] = msgspec.field(default_factory=WeakKeyDictionary)
    """Each conversation's compaction mark when its prompt was last made."""

    async def make_room(self, received: Received) -> PromptRoom:
        """Remove earlier blocks and the oldest turns until the prompt fits. May be called again for a request. Raises
        MemdError: the messages that leave could not be written."""
        conversation = received.prompt.conversation
        window = await received.assignment.server.window(received.request.model, received.asked.credentials)
        limits = self._limits(received, window)
        await self._used_tokens(received, limits, limits.hard)  # may count what system prompt and tools really take
        limits = self._limits(received, window)
        self._bring_back(received, limits)
        await self._limit_instructions(received, limits.window)
        is_short = await self._let_blocks_leave(received, limits)
        # A step whose turn has its block may use all the room; if messages leave, there is room for a new block.
        has_block = received.prompt.has_block and not received.needs_block
        reserved = 0 if has_block else max(0, limits.injection_min - self._current_tokens(received))
        if is_short:  # all that follows is read anew anyway, so more leaves at once
            await self._fit(received, limits, limits.room // 2)
        await self._fit(received, limits, limits.room - reserved)
        used = await self._used_tokens(received, limits, limits.room)
        if used > limits.room:
            remove_blocks(received, list(conversation.blocks))
            used = await self._used_tokens(received, limits, limits.room)
        self.left_out[conversation] = conversation.left_out
        free = limits.room - used + (self._current_tokens(received) if received.needs_block else 0)
        most = limits.injection
        if conversation.left_out_count() or conversation.lines:
            three = self.counter.drift.drifted(received.request.model, THREE_CHUNKS_TOKENS)
            most = min(most, max(limits.room // BLOCK_SHARE, min(three, limits.room // THREE_CHUNKS_SHARE)))
        return PromptRoom(limits, max(0, min(most, free)), free < SHORT_SHARE * most)

    def learn(self, received: Received, refusal: LengthRefusal) -> bool:
        """Learn from the upstream's refusal of the present prompt, so that `make_room` can run again. False if the
        refusal is not credible (`KnownWindows.refused`)."""
        drift, request, prompt = self.counter.drift, received.request, received.prompt
        raw = prompt.tokens()
        doubt = COUNT_DOUBT if drift.is_known(request.model) else COUNT_MARGIN_UNKNOWN
        attachments = prompt.attachments()
        sent = Sent(self._estimate(received)[0], max(0, request.max_tokens or 0), math.inf if attachments else doubt)
        if not received.assignment.server.windows.refused(request.model, refusal, sent):
            return False
        least = 1 + (refusal.window or 0) - (sent.reply_tokens if refusal.counts_reply else 0)
        if refusal.prompt_tokens is not None:
            counted = Counted(request.model, raw, refusal.prompt_tokens, attachments)
            count(drift, prompt.conversation, counted)
        elif sent.tokens < least:  # the refusal gives no count, so assume the least
            prompt.conversation.counted = Counted(request.model, raw, least, attachments)
        return True

    def _limits(self, received: Received, known: ModelWindow) -> compaction.Thresholds:
        request = received.request
        return compaction.thresholds(
            self.buffer,
            self.injection,
            window=request.window or known.tokens,
            counts_reply=known.counts_reply,
            max_tokens=request.max_tokens,
            standing_tokens=self._standing_tokens(received),
        )

    async def _let_blocks_leave(self, received: Received, limits: compaction.Thresholds) -> bool:
        """Remove the blocks of earlier turns if their room is needed or the prompt's beginning has changed anyway.
        Return True if lack of room was the only reason."""
        prompt, conversation = received.prompt, received.prompt.conversation
        shown = ((conversation.messages[at].digest, block.tokens) for at, block in prompt.blocks())
        earlier = {digest: tokens for digest, tokens in shown if digest != prompt.turn_digest}
        if not earlier:
            return False
        moved = conversation.left_out > self.left_out.get(conversation, conversation.left_out)
        tokens = self.counter.drift.drifted(received.request.model, sum(earlier.values()))
        current = self._current_tokens(received)
        text = await self._used_tokens(received, limits, limits.room) - tokens - current
        if not moved and compaction.keeps_earlier_blocks(limits, text=text, earlier=tokens, current=current):
            return False
        remove_blocks(received, list(earlier))
        return not moved and tokens <= limits.sticky

    def _standing_tokens(self, received: Received) -> int:
        """Return model tokens of system prompt and tools: from the last count of this prompt, else estimated."""
        prompt, model = received.prompt, received.request.model
        counted = prompt.conversation.counted
        if counted is None or counted.model != model or counted.raw_tokens <= 0 or counted.attachments:
            return self.counter.drift.drifted(model, prompt.standing_tokens)
        return math.ceil(prompt.standing_tokens * counted.prompt_tokens / counted.raw_tokens)

    def _current_tokens(self, received: Received) -> int:
        """Return model tokens of the block that this turn already has."""
        prompt = received.prompt
        block = prompt.turn_block
        return 0 if block is None else self.counter.drift.drifted(received.request.model, block.tokens)

    def _bring_back(self, received: Received, limits: compaction.Thresholds) -> None:
        """Show messages again that another branch left out, all or as many as compaction allows. Only where a client
        goes back: otherwise the prompt's beginning would move whenever it rewrites something."""
        prompt, factor = received.prompt, self.counter.drift.factor(received.request.model)
        position = prompt.return_position(whole_max=limits.soft / factor, part_max=limits.hard / 2 / factor)
        if position is None:
            return
        received.record(Returned(prompt.conversation.id, position, prompt.texts_from(position)))

    async def _fit(self, received: Received, limits: compaction.Thresholds, hard: int) -> None:
        """Compact until the prompt takes at most `hard`, if possible. A prompt larger than the room, which the upstream
        would refuse, may also lose parts of the open turn's last unit."""
        used = await self._used_tokens(received, limits, hard)
        coming = 0 if self._current_tokens(received) or not received.prompt.has_results else limits.injection
        kept = max(limits.hard // 2, min(hard, limits.hard, limits.room - coming))
        for _ in range(HARD_ROUNDS_MAX):
            if used <= hard:
                return
            if not await self._take_oldest(received, used - kept):
                break
            used = await self._used_tokens(received, limits, hard)
        if used > limits.room:
            await self._take_oldest(received, used - limits.room, forced=True)

    async def _limit_instructions(self, received: Received, window_tokens: int | None) -> None:
        """Remove the oldest instructions in mid-conversation if together they take too much of the window."""
        if window_tokens is None or not received.is_traced:
            return
        share = window_tokens // INSTRUCTIONS_SHARE_MAX
        raw = int(share / self.counter.drift.factor(received.request.model))
        surplus = compaction.surplus_instructions(received.prompt.conversation, raw)
        if surplus:
            await self.archiver.let_instructions_go(received.topic, received.prompt.conversation, surplus)

    async def _used_tokens(self, received: Received, limits: compaction.Thresholds, hard: int) -> int:
        """Return model tokens of the prompt's buffered part: estimated, or near `hard` counted by the upstream."""
        drift, model, prompt = self.counter.drift, received.request.model, received.prompt
        standing = limits.standing
        estimate, uncounted = self._estimate(received)
        margin = COUNT_MARGIN if drift.is_known(model) else COUNT_MARGIN_UNKNOWN
        doubt = uncounted * (margin - 1)
        if estimate + doubt <= hard + standing or (drift.is_known(model) and estimate - doubt > hard + standing):
            return estimate - standing
        asked, server = received.asked, received.assignment.server
        exact = await server.count_tokens(asked.api.count_path, prompt.body, asked.credentials)
        if exact is None:
            return estimate - standing
        count(drift, prompt.conversation, Counted(model, prompt.tokens(), exact, prompt.attachments()))
        return exact - standing

    def _estimate(self, received: Received) -> tuple[int, int]:
        """Return the prompt's model tokens, and how many of them are estimated rather than counted."""
        prompt, model = received.prompt, received.request.model
        now = Counted(model, prompt.tokens(), 0, prompt.attachments())
        return _estimate(prompt.conversation.counted, now, self.counter.drift.factor(model))

    async def _take_oldest(self, received: Received, excess: int, *, forced: bool = False) -> bool:
        """Compact so that at least `excess` model tokens leave; False if nothing may leave."""
        conversation = received.prompt.conversation
        per_raw = self.counter.drift.factor(received.request.model)
        if received.prompt.attachments():  # memd counts the same for each image
            per_raw = max(per_raw, self._estimate(received)[0] / max(1, received.prompt.tokens()))
        raw = int(excess / per_raw) + 1
        if received.is_traced:
            return await self.archiver.compact(received.topic, conversation, raw, forced=forced)
        # Nothing may be written for a detached copy, so only messages already in the log may leave.
        return self.archiver.compact_copy(received.topic, conversation, raw)


def _estimate(counted: Counted | None, now: Counted, factor: float) -> tuple[int, int]:
    """Return the model tokens of the prompt `now`, and how many of them are estimated rather than counted.

    Args:
        counted: the last count; tokens beyond its text are attributed to its images in equal parts.
        factor: model tokens per raw token of text.
    """
    known = counted if counted is not None and counted.model == now.model else Counted(now.model, 0, 0)
    image = ATTACHMENT_TOKENS * factor
    if known.attachments:
        image = max(1.0, (known.prompt_tokens - _text_tokens(known) * factor) / known.attachments)
    text = (_text_tokens(now) - _text_tokens(known)) * factor
    images = (now.attachments - known.attachments) * image
    return math.ceil(known.prompt_tokens + text + images), math.ceil(abs(text) + abs(images))


def _text_tokens(counted: Counted) -> int:
    return counted.raw_tokens - ATTACHMENT_TOKENS * counted.attachments


def count(drift: Drift, conversation: Conversation, counted: Counted) -> None:
    """Record a model's own count of a conversation's prompt; with images it does not show how text is counted."""
    if not counted.attachments:
        drift.observe(counted.model, counted.raw_tokens, counted.prompt_tokens)
    conversation.counted = counted


def remove_blocks(received: Received, digests: list[bytes]) -> None:
    """Remove the blocks in front of these user messages from the prompt."""
    conversation = received.prompt.conversation
    if present := [digest for digest in digests if digest in conversation.blocks]:
        received.record(Removed(conversation.id, present))


log = logging.getLogger("memd")


STEP_CHARACTERS = 400
"""Limit for the model's latest step in the question of a turn that recalls anew."""


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """The recall of a turn; the defaults describe a request that needs none."""

    retrieved: Retrieved | None = None
    """The result, without topics if the search failed; None if nothing was asked."""
    step: str = ""
    """See `Filters.step`."""
    trouble: str | None = None
    """The status to report if recall failed or could not search by meaning."""

    @property
    def spans_ms(self) -> dict[str, float]:
        """The time that its steps took; empty if nothing was searched."""
        found = self.retrieved
        if found is None or not found.topic_ids:
            return {}
        return {"embed": found.embed_ms, "search": found.search_ms, "inject": found.fill_ms}


class SettledPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The memory in a prompt, and what the response reports about it."""

    status: str
    chunks: tuple[BlockChunk, ...]
    """All chunks in this prompt's blocks, earlier and new ones."""
    signals: tuple[Signal, ...]
    notes: tuple[NoteOut, ...]
    block_tokens: int
    """Raw tokens of the blocks."""
    prompt_tokens: int
    """Raw tokens of the whole prompt."""
    attachments: int
    """Number of images in it."""
    problem: str = ""
    """Why the request's `memory_in` had no effect."""

    def headers(self, received: Received, recalled: Recalled) -> list[tuple[str, str]]:
        """Return memory's response headers."""
        return memory_headers(
            status=self.status,
            mode=received.asked.mode,
            injected_ids=[chunk.shown_id for chunk in self.chunks],
            turn_id=received.asked.turn_id,
            timings_ms=recalled.spans_ms,
            problem=self.problem,
        )

    def memory_out(self, received: Received) -> MemoryOut | None:
        """Return the MemoryOut of the response's body; None unless the request carried a MemoryIn."""
        if received.request.memory_in is None:
            return None
        chunks = (InjectedChunk(id=c.shown_id, topic_id=c.topic_id, canonical_id=c.origin_id) for c in self.chunks)
        return MemoryOut(injected_chunks=tuple(chunks), signals=self.signals, notes=self.notes)


class Prepared(msgspec.Struct, frozen=True):
    """A prompt ready to be forwarded."""

    room: PromptRoom
    recalled: Recalled
    shown: SettledPrompt
    freed_tokens: int
    """Raw tokens that left the prompt to make room."""
    saving: asyncio.Task[bool]
    """Writes the question and its block to the journal."""


class Memory(msgspec.Struct, frozen=True):
    """Recalls a turn's block and settles the prompt."""

    settings: InjectionSettings
    timeout_seconds: float
    """Limit on the time that a request waits for recall."""
    retriever: Retriever
    counter: TokenCounter
    redactor: Redactor

    async def recall(self, received: Received, room: PromptRoom) -> Recalled:
        """Compute this turn's block unless it has one; steps and retries of a turn show the same block again."""
        prompt, turn = received.prompt, received.prompt.turn_digest
        if turn is None or room.block <= 0 or received.request.goes_on_with:
            return Recalled()  # `goes_on_with`: the upstream would keep the block, and those of all later turns
        if prompt.has_block and not received.needs_block:
            return Recalled()
        if prompt.has_block:  # asked again much later
            remove_blocks(received, [turn])
        drift = self.counter.drift.factor(received.request.model)
        budget = Budget(room.thresholds.injection, drift, room.block, self.timeout_seconds)
        question = next(iter(prompt.user_texts()), "").strip()
        asked = Recalled(retrieved=Retrieved(question=question, topic_ids=(), budget=budget), step=_step(prompt))
        try:
            recalled, placed = await self._retrieved(received, asked, question, budget)
        except TimeoutError:
            return msgspec.structs.replace(asked, trouble="degraded:timeout")
        except MemdError as error:
            log.error("recall failed, the request goes on without memory", extra=received.log_fields(error))
            return msgspec.structs.replace(asked, trouble=degraded(error))
        if room.is_short and placed.chunks and recalled.retrieved is not None and recalled.retrieved.fill_ratio > 1:
            placed = msgspec.structs.replace(placed, is_short=True)
        if not prompt.has_block:  # else the same request came at the same moment: both show one block
            received.record(Placed(prompt.conversation.id, turn, placed))
        return recalled

    def settle(self, received: Received, corrected: CorrectionResult, recalled: Recalled) -> SettledPrompt:
        """Settle what the prompt shows; afterwards only `forget_blocks` and `without_blocks` change it."""
        topic, prompt = received.topic, received.prompt
        chunks = tuple(prompt.chunks())
        found = "injected" if chunks else "degraded:store" if topic.log.is_incomplete else "none"
        stale = None if received.is_fresh else "degraded:store"
        status = recalled.trouble or corrected.trouble or stale or found
        if topic.write_trouble is not None and received.is_traced:
            status = degraded(topic.write_trouble)
        has_recalled = received.needs_block or recalled.retrieved is not None
        if has_recalled and chunks and received.is_traced:
            topic.buffer.record(Injected(list(chunks), received.asked.who.author))
        failed = (Signal(type="correction_failed", chunk_id=chunk_id) for chunk_id in corrected.failed_ids)
        taken_out = (Signal(type="taken_out", chunk_id=chunk_id) for chunk_id in corrected.taken_out)
        return SettledPrompt(
            status=status,
            chunks=chunks,
            signals=(*failed, *taken_out, *self._pressure(recalled.retrieved)),
            notes=corrected.notes,
            block_tokens=prompt.block_tokens(),
            prompt_tokens=prompt.tokens(),
            attachments=prompt.attachments(),
            problem=corrected.problem,
        )

    def _pressure(self, retrieved: Retrieved | None) -> tuple[Signal, ...]:
        fill_ratio = 0.0 if retrieved is None else retrieved.fill_ratio
        if fill_ratio > 1:
            return (Signal(type="context_overflow", fill_ratio=round(fill_ratio, 3)),)
        if fill_ratio >= self.settings.pressure_ratio:
            return (Signal(type="context_pressure", fill_ratio=round(fill_ratio, 3)),)
        return ()

    async def _retrieved(
        self, received: Received, asked: Recalled, question: str, budget: Budget
    ) -> tuple[Recalled, Block]:
        """Retrieve for the question. The block shows chunks up to the budget, in the model's tokens."""
        if not (question or asked.step):
            return Recalled(), NO_BLOCK
        earlier = received.prompt.chunks()
        retrieved = await self.retriever.retrieve(
            question,
            [topic.log for topic in (received.topic, *received.related)],
            budget,
            Filters(
                visible_digests=received.prompt.visible_digests() | received.replaced,
                shown_uuids={chunk.uuid for chunk in earlier},
                wanted=received.request.wanted,
                step=asked.step,
            ),
        )
        placed = block.render(
            [(one.entry, one.topic_id) for one in retrieved.shown],
            own_topic_id=received.topic.id,
            header=retrieved.header,
            taken={chunk.shown_id for chunk in earlier},
            tokens=retrieved.raw_tokens,
            reader=self.redactor.identifier(received.asked.who.author),
        )
        if placed.chunks and (reader := received.asked.who.author):  # the owner's chunks were counted without a name
            placed = msgspec.structs.replace(placed, tokens=self.counter.count(placed.text), reader=reader)
        fields = {**received.log_fields(), "question": Content(question), "block": Content(placed.text)}
        log.debug("recalled", extra=fields)
        trouble = None if retrieved.trouble is None else degraded(retrieved.trouble)
        return Recalled(retrieved=retrieved, step=asked.step, trouble=trouble), placed


def _step(prompt: Prompt) -> str:
    """Return the model's latest step, whose words or calls show what a turn that recalls anew needs."""
    step = prompt.latest_step()
    if step is None:
        return ""
    shortened = msgspec.structs.replace(step, tool_calls=step.tool_calls[:STEP_CHARACTERS])  # there may be thousands
    return (step.said.strip() or stored_text(shortened))[:STEP_CHARACTERS]


def forget_blocks(received: Received) -> None:
    """Remove all blocks for good, because the upstream accepted the prompt only without them.

    The turn keeps an empty block, so that its later steps and retries are not refused again.
    """
    prompt = received.prompt
    remove_blocks(received, list(prompt.conversation.blocks))
    if prompt.turn_digest is not None:
        received.record(Placed(prompt.conversation.id, prompt.turn_digest, NO_BLOCK))


def without_blocks(shown: SettledPrompt) -> SettledPrompt:
    """Return the prompt without its blocks, which the upstream refused."""
    tokens = shown.prompt_tokens - shown.block_tokens
    return msgspec.structs.replace(shown, chunks=(), block_tokens=0, prompt_tokens=tokens, status="degraded:template")
