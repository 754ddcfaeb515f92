"""The corrections and notes of a request: applied and taken before it is forwarded, once, and durably.

Rule: an error costs them, never the request; it is told in the status, each id in a signal, and with each note.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from memd.embedding.encoder import Encoder
from memd.entries import Correction
from memd.errors import BadNote, DiskFull, EmbeddingError, ErasedForGood, MadeAnew, MemdError
from memd.ingest.archiver import Archiver
from memd.ingest.notes import FORBIDDEN, take_note
from memd.ingest.topics import Topic, Topics
from memd.messages import BlockChunk
from memd.notes import Note
from memd.proxy.receive import FailedIds, IdempotencyKeys, Received
from memd.recall import corrections
from memd.store.snapshot import asked_by
from memd.store.store import Snapshot, TopicLog
from memd.telemetry.metrics import Metrics
from memd.wire.sideband import NoteOut
from memd.wording import tallied

log = logging.getLogger("memd")
Resolve = Callable[[str], BlockChunk | None]
"""Finds the chunk that was shown as an id."""
READONLY, AHEAD = "readonly", "said_at"
NOT_READ = "memory_in is not read in a request that goes on with a conversation that the upstream keeps"


class CorrectionResult(msgspec.Struct, frozen=True):
    """The outcome of a request's corrections and notes."""

    failed_ids: FailedIds = ()
    taken_out: FailedIds = ()
    """The ids of an Update without a text that takes their place."""
    notes: tuple[NoteOut, ...] = ()
    """The outcome of its notes, in their order."""
    trouble: str | None = None
    """The status to tell, where they could not be applied."""
    problem: str = ""
    """Why nothing of them was done; empty where something was."""


class Corrector:
    """Applies the corrections of requests."""

    def __init__(
        self, idempotency: IdempotencyKeys, topics: Topics, encoder: Encoder, archiver: Archiver, metrics: Metrics
    ) -> None:
        self._idempotency = idempotency
        self._topics = topics
        self._encoder = encoder
        self._archiver = archiver
        self._metrics = metrics

    async def correct(self, received: Received) -> CorrectionResult:
        """Apply the corrections and take the notes, unless the same request did before."""
        corrected = await self._corrected(received)
        notes = await self._noted(received)
        failed = next(
            (f"degraded:{note.error}" for note in notes if note.error not in ("", READONLY, AHEAD, FORBIDDEN)), None
        )
        problem = _problem(received, corrected, notes)
        if problem:
            log.warning("nothing of a memory_in was done", extra={**received.log_fields(), "problem": problem})
        asked = (
            () if received.key is None or received.request.memory_in is None else received.request.memory_in.corrections
        )
        emptied = _named(one for one in asked if one.action == "Update" and not (one.content or "").strip())
        return msgspec.structs.replace(
            corrected,
            taken_out=tuple(one for one in emptied if one not in corrected.failed_ids),
            notes=notes,
            trouble=corrected.trouble or failed,
            problem=problem,
        )

    async def _noted(self, received: Received) -> tuple[NoteOut, ...]:
        notes = () if received.request.memory_in is None else received.request.memory_in.notes
        if not notes or not received.is_traced:
            return tuple(NoteOut(error=READONLY) for _ in notes)
        key = "notes", received.prompt.conversation.id, received.key  # in a branch of its own it is told of duplicates
        if not self._idempotency.knows(key):
            self._idempotency.register(key)
        taken = await self._idempotency.run_once(key, lambda: self._taken(received, notes))
        if any(one.error for one in taken):
            self._idempotency.forget(key)  # a retry tries again
        return taken

    async def _taken(self, received: Received, notes: Sequence[Note]) -> tuple[NoteOut, ...]:
        told = []
        for note in notes:
            try:
                taken = await take_note(received.topic, note, self._archiver, received.asked.who.author)
                told.append(NoteOut(taken.chunk_ids, taken.duplicate, taken.error))
            except BadNote:
                told.append(NoteOut(error=AHEAD))
            except MemdError as error:
                log.error("a note was not taken", extra=received.log_fields(error))
                told.append(NoteOut(error=degraded(error).removeprefix("degraded:")))
        return tuple(told)

    async def _corrected(self, received: Received) -> CorrectionResult:
        memory_in, topic, key = received.request.memory_in, received.topic, received.key
        if memory_in is None or not memory_in.corrections:
            return CorrectionResult()
        asked = tuple(memory_in.corrections)
        if received.asked.is_held_back or (key is not None and not received.asked.who.may("correct", topic.id)):
            return CorrectionResult(_named(asked))
        if key is None:
            return CorrectionResult()
        resolve, by = _resolving(received), received.asked.who.author
        applied_now: Sequence[Correction] = ()

        def apply() -> Coroutine[None, None, FailedIds]:
            nonlocal applied_now
            applied_now = asked
            return self._apply(topic, log_, asked, key.digest, resolve, by)

        try:
            log_ = topic.log
            if not self._idempotency.knows(key):  # from before a restart, or it failed: that may be in doubt
                loop = asyncio.get_running_loop()
                if await loop.run_in_executor(None, self._was_applied, log_, resolve, asked, key.digest):
                    return CorrectionResult()
                self._idempotency.register(key)
            await topic.save()  # the arrival, before its effect: sent again after a kill, it is the same request
            corrected = CorrectionResult(await self._idempotency.run_once(key, apply))
        except ErasedForGood:
            corrected = CorrectionResult(_named(asked))
        except MemdError as error:
            log.error("corrections were not applied", extra=received.log_fields(error))
            corrected = CorrectionResult(_named(asked), trouble=degraded(error))
        self._metrics.count_corrections(applied_now, len(corrected.failed_ids))
        return corrected

    def _was_applied(self, log_: TopicLog, resolve: Resolve, asked: Sequence[Correction], digest: bytes) -> bool:
        """Whether the log has what the request with this digest changed: one of its entries stands for all.

        Raises:
            StoreError: an entry cannot be read.
        """
        shown = set(map(resolve, _named(asked)))
        return bool(asked_by(log_.snapshot(), [chunk.uuid for chunk in shown if chunk is not None], digest))

    async def _apply(
        self,
        topic: Topic,
        log_: TopicLog,
        asked: Sequence[Correction],
        digest: bytes,
        resolve: Resolve,
        by: str = "",
    ) -> FailedIds:
        shown = {one.uuid: one for one in map(resolve, _named(asked)) if one is not None}
        await self._store_pending(topic, shown)
        async with topic.correcting:
            while True:
                log_ = topic.log
                made_at = log_.head
                try:
                    applied = await corrections.correct_shown(
                        asked,
                        own=log_.snapshot(),
                        resolve=resolve,
                        snapshot_of=self._snapshot_of,
                        encoder=self._encoder,
                        append=partial(self._archiver.append_corrections, topic, log_, made_at=made_at),
                        asked_by=digest,
                        by=by,
                    )
                    return applied.failed
                except MadeAnew:  # another daemon has corrected the same, or was sent the same request
                    if await asyncio.to_thread(self._was_applied, log_, resolve, asked, digest):
                        return ()

    async def _store_pending(self, topic: Topic, shown: Mapping[bytes, BlockChunk]) -> None:
        """Store the chunks that were shown before they were in a log: only what is there can be corrected."""
        for chunk in shown.values():
            source = topic if chunk.topic_id == topic.id else await self._readable(chunk.topic_id)
            logs = [topic.log] if source is None else [topic.log, source.log]
            if source is None or any(one.snapshot().knows(chunk.uuid) for one in logs):
                continue
            with source.used():
                await self._archiver.store_named(source, [chunk.uuid])

    async def _snapshot_of(self, topic_id: str) -> Snapshot | None:
        topic = await self._readable(topic_id)
        return None if topic is None else topic.log.snapshot()

    async def _readable(self, topic_id: str) -> Topic | None:
        return next(iter(await self._topics.readable([topic_id])), None)


def _named(asked: Iterable[Correction]) -> FailedIds:
    return tuple(one for correction in asked for one in correction.chunk_ids)


def _problem(received: Received, corrected: CorrectionResult, notes: Sequence[NoteOut]) -> str:
    """Why nothing of a MemoryIn was done; empty where something was, or nothing was to be. It quotes no id, because it
    is logged."""
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
    told = {"not shown in this topic lately": unknown, "taken out or erased since": len(failed) - unknown}
    return tallied({why: number for why, number in told.items() if number})


def _resolving(received: Received) -> Resolve:
    """Finds the chunk that was shown as an id; one whose source may not be corrected is as unknown as any other."""

    def resolve(chunk_id: str) -> BlockChunk | None:
        chunk = received.topic.buffer.resolve(chunk_id)
        return chunk if chunk is not None and received.asked.who.may("correct", chunk.topic_id) else None

    return resolve


def degraded(error: MemdError) -> str:
    """The status of a request that goes on although memory failed."""
    if isinstance(error, DiskFull):
        return "degraded:disk-full"
    return "degraded:embedding" if isinstance(error, EmbeddingError) else "degraded:store"
