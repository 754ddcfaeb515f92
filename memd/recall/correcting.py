"""Applies the corrections of a request: looks up what was shown, plans the entries, makes them durable.

Rule: an id that may not be corrected costs only itself; a write that fails leaves the log as it was and is raised.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence

import msgspec

from memd.entries import Correction, Entry, Status
from memd.ingest.topics import Topic
from memd.proxy.service import Daemon
from memd.recall import corrections
from memd.store.store import Snapshot


async def apply_corrections(daemon: Daemon, topic: Topic, asked: Sequence[Correction]) -> tuple[str, ...]:
    """Append what the corrections ask for to the current topic, durably; returns the ids that could not be corrected.

    Raises:
        EmbeddingError, StoreError: nothing was applied.
    """
    sources = await _sources(daemon, topic, asked)
    outcome = await asyncio.get_running_loop().run_in_executor(None, _planned, daemon, topic, asked, sources)
    if outcome.drafts:
        await daemon.archiver.append_corrections(topic, outcome.drafts)
    return outcome.failed


async def _sources(daemon: Daemon, topic: Topic, asked: Sequence[Correction]) -> dict[str, Snapshot]:
    """Snapshots of the topics that the named chunks were found in."""
    named = (topic.buffer.resolve(chunk_id) for correction in asked for chunk_id in correction.chunk_ids)
    sources = {topic.id: topic.log.snapshot()}
    for topic_id in {shown.topic_id for shown in named if shown is not None} - sources.keys():
        other = await daemon.topics.existing(topic_id)
        if other is not None:
            sources[topic_id] = other.log.snapshot()
    return sources


def _planned(
    daemon: Daemon, topic: Topic, asked: Sequence[Correction], sources: Mapping[str, Snapshot]
) -> corrections.Outcome:
    own = sources[topic.id]

    def embed(text: str) -> bytes:
        return daemon.encoder.for_ingestion(text).astype("<f4").tobytes()

    def find(chunk_id: str) -> Entry | None:
        """A recently shown chunk: as this topic has it, else as the topic has it where it was found."""
        shown = topic.buffer.resolve(chunk_id)
        if shown is None:
            return None
        for snapshot in (own, sources.get(shown.topic_id)):
            entry = snapshot.find(shown.uuid) if snapshot is not None else None
            if snapshot is None or entry is None:
                continue
            if snapshot.fingerprint_of(shown.uuid) != daemon.encoder.fingerprint and entry.status is Status.ACTIVE:
                entry = msgspec.structs.replace(entry, vector=embed(entry.content))  # shown before the model changed
            return entry
        return None

    return corrections.plan(
        asked,
        find=find,
        embed=embed,
        new_uuid=lambda: uuid.uuid4().bytes,
        now_us=time.time_ns() // 1000,
    )
