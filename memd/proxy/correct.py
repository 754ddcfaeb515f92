"""The corrections and notes of a request: applied and taken before it is forwarded, once, and durably.

Rule: an error costs them, never the request; it is told in the status, each id in a signal, and with each note.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from memd.embedding.encoder import Encoder
from memd.entries import Correction
from memd.errors import BadNote, DiskFull, EmbeddingError, MemdError
from memd.ingest.archiver import Archiver
from memd.ingest.notes import take_note
from memd.ingest.topics import Topic, Topics
from memd.notes import Note
from memd.proxy.idempotency import FailedIds, IdempotencyKeys
from memd.proxy.receive import Received
from memd.recall import corrections
from memd.store.store import Snapshot
from memd.telemetry.metrics import Metrics
from memd.wire.sideband import NoteOut

log = logging.getLogger("memd")
READONLY, AHEAD = "readonly", "said_at"


class CorrectionResult(msgspec.Struct, frozen=True):
    """The outcome of a request's corrections and notes."""

    failed_ids: FailedIds = ()
    notes: tuple[NoteOut, ...] = ()
    """The outcome of its notes, in their order."""
    trouble: str | None = None
    """The status to tell, where they could not be applied."""


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
        failed = next((f"degraded:{note.error}" for note in notes if note.error not in ("", READONLY, AHEAD)), None)
        return msgspec.structs.replace(corrected, notes=notes, trouble=corrected.trouble or failed)

    async def _noted(self, received: Received) -> tuple[NoteOut, ...]:
        notes = () if received.request.memory_in is None else received.request.memory_in.notes
        if not notes or not received.is_traced:
            return tuple(NoteOut(error=READONLY) for _ in notes)
        key = "notes", received.key
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
                taken = await take_note(received.topic, note, self._archiver)
                told.append(NoteOut(taken.chunk_ids, taken.duplicate))
            except BadNote:
                told.append(NoteOut(error=AHEAD))
            except MemdError as error:
                log.error("a note was not taken", extra=received.log_fields(error))
                told.append(NoteOut(error=degraded(error).removeprefix("degraded:")))
        return tuple(told)

    async def _corrected(self, received: Received) -> CorrectionResult:
        memory_in, topic, key = received.request.memory_in, received.topic, received.key
        if memory_in is None or not memory_in.corrections or key is None:
            return CorrectionResult()
        asked = tuple(memory_in.corrections)
        applied_now = () if received.is_retry else asked
        try:
            if not self._idempotency.knows(key):  # it came before memd was restarted, which may have been too early
                if await asyncio.get_running_loop().run_in_executor(None, self._was_applied, topic, asked, key.digest):
                    return CorrectionResult()
                self._idempotency.register(key)
                applied_now = asked
            await topic.save()  # the arrival, before its effect: sent again after a kill, it is the same request
            failed = await self._idempotency.run_once(key, lambda: self._apply(topic, asked, key.digest))
            corrected = CorrectionResult(failed)
        except MemdError as error:
            log.error("corrections were not applied", extra=received.log_fields(error))
            corrected = CorrectionResult(
                tuple(one for correction in asked for one in correction.chunk_ids), trouble=degraded(error)
            )
        self._metrics.count_corrections(applied_now, len(corrected.failed_ids))
        return corrected

    def _was_applied(self, topic: Topic, asked: Sequence[Correction], digest: bytes) -> bool:
        """Whether the log has what the request with this digest changed: one of its entries stands for all.

        Raises:
            StoreError: an entry cannot be read.
        """
        snapshot = topic.log.snapshot()
        shown = {topic.buffer.resolve(one) for correction in asked for one in correction.chunk_ids}
        return any(
            entry.asked_by == digest for chunk in shown if chunk is not None for entry in snapshot.history(chunk.uuid)
        )

    async def _apply(self, topic: Topic, asked: Sequence[Correction], asked_by: bytes) -> FailedIds:
        await self._store_pending(topic, asked)
        applied = await corrections.correct_shown(
            asked,
            own=topic.log.snapshot(),
            resolve=topic.buffer.resolve,
            snapshot_of=self._snapshot_of,
            encoder=self._encoder,
            append=partial(self._archiver.append_corrections, topic),
            asked_by=asked_by,
        )
        return applied.failed

    async def _store_pending(self, topic: Topic, asked: Sequence[Correction]) -> None:
        """Store the chunks that were shown before they were in a log: only what is there can be corrected."""
        named = dict.fromkeys(one for correction in asked for one in correction.chunk_ids)
        for chunk in filter(None, map(topic.buffer.resolve, named)):
            source = topic if chunk.topic_id == topic.id else await self._topics.existing(chunk.topic_id)
            logs = [topic.log] if source is None else [topic.log, source.log]
            if source is not None and not any(one.snapshot().knows(chunk.uuid) for one in logs):
                with source.used():
                    await self._archiver.store_named(source, [chunk.uuid.hex()])

    async def _snapshot_of(self, topic_id: str) -> Snapshot | None:
        topic = await self._topics.existing(topic_id)
        return None if topic is None else topic.log.snapshot()


def degraded(error: MemdError) -> str:
    """The status of a request that goes on although memory failed."""
    if isinstance(error, DiskFull):
        return "degraded:disk-full"
    return "degraded:embedding" if isinstance(error, EmbeddingError) else "degraded:store"
