"""Corrections and notes of a request: applied before it is forwarded, once, and durably.

Rule: an error loses only the corrections or notes, never the request; the status, a signal per id and each note report
it. Work that has begun is finished even if the client leaves. A retry gets the first outcome, which the log's entries
show (`ChunkState.asked_by`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from memd.conversation.hot_buffer import CORRECTABLE_TURNS
from memd.embedding.encoder import Encoder
from memd.entries import Correction, Entry
from memd.errors import BadNote, DiskFull, EmbeddingError, ErasedForGood, MemdError
from memd.ingest.archiver import FORBIDDEN, Archiver, take_note
from memd.ingest.topics import Topic, Topics
from memd.messages import BlockChunk
from memd.notes import Note
from memd.proxy.prompt import Received
from memd.recall import corrections
from memd.store.store import Snapshot
from memd.telemetry.tasks import Tasks
from memd.wire.sideband import MemoryIn, NoteOut
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
