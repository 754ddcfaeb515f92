"""Embeds what is to be stored, and appends it: parts of conversations, notes, and drafts of other sources.

Rule: whoever calls holds `Topic.storing`, so that nothing but corrections is appended to the topic meanwhile. Embedding
runs in the ingesting thread, writing in the topic's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence

from memd.conversation.conversation import Conversation
from memd.conversation.tokens import TokenCounter
from memd.embedding.encoder import Encoder
from memd.entries import Draft, Entry
from memd.errors import MadeAnew
from memd.ingest.pipeline import Drafter
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.topics import Topic
from memd.ingest.unstored import Batch, Part, newly_said
from memd.settings.model import Config
from memd.telemetry.events import Events, authors_told
from memd.telemetry.metrics import Metrics
from memd.wording import tallied

log = logging.getLogger("memd")

MADE_TRIES = 5
BATCH_CHARACTERS = 8_000
"""Text that is embedded and appended at once, if a part is not longer: about a second's work."""


class TopicAppender:
    """Of the event loop. All methods raise EmbeddingError and StoreError; then nothing was written."""

    def __init__(
        self,
        config: Config,
        encoder: Encoder,
        counter: TokenCounter,
        redactor: Redactor,
        metrics: Metrics,
        events: Events,
    ) -> None:
        self._drafter = Drafter(config, counter, encoder.embed_texts, encoder.embedder.same_cosine, redactor=redactor)
        self._encoder = encoder
        self._counter = counter
        self._redactor = redactor
        self._metrics = metrics
        self._events = events

    async def append_parts(
        self,
        topic: Topic,
        parts: Sequence[Part],
        conversation: Conversation | None = None,
        named: Collection[bytes] = (),
    ) -> bool:
        """Append the next chunks of parts of a conversation, of a part of any, or of a note; True if that was the last.

        `named`: the uuids of chunks that go before all others of a long part.
        """
        named = named if sum(part.characters for part in parts) > BATCH_CHARACTERS else ()
        shown = topic.buffer.injected_uuids()
        talks = topic.buffer.conversations()
        lines = (line for one in talks for line in (*one.lines.values(), *one.former_lines.values()))
        lines_named = tuple({chunk_id for line in lines for chunk_id in line.chunk_ids})
        is_note = any(part.note is not None for part in parts)
        messages = [] if conversation is None else conversation.messages[:]
        new = functools.cache(lambda: newly_said(topic.log, messages))

        def is_shown(uuid: bytes) -> bool:
            return is_note or uuid in shown or uuid.hex().startswith(lines_named)

        def is_new(digest: bytes) -> bool:
            return conversation is None or digest in new()

        batch: Batch | None = None

        def made() -> tuple[Sequence[Draft], int]:
            nonlocal batch
            give_way = self._encoder.give_way
            batch = topic.cutter.next_batch(parts, is_shown, BATCH_CHARACTERS, named, give_way)
            digests = batch.digests if batch.is_first else ()
            drafts = self._drafter.embedded(topic.log, batch.drafts, digests, is_shown=is_shown, is_new=is_new)
            return batch.completing(drafts), sum(self._counter.count(draft.content) for draft in batch.new)

        topic.being_stored = frozenset(digest for part in parts for digest, _ in part.messages)
        try:
            topic.note_chunks(await self._append(topic, made))
        finally:
            topic.being_stored = frozenset()
        assert batch is not None, "it was made"
        batch.done()
        if batch.is_last:
            for note_id, _ in (part.note for part in parts if part.note is not None):
                topic.buffer.settle_note(note_id)
        return batch.is_last

    async def append_made(self, topic: Topic, make: Callable[[Drafter], Sequence[Draft]]) -> list[Entry]:
        """Append the drafts that `make` returns; it is called in the ingesting thread."""

        def made() -> tuple[Sequence[Draft], int]:
            drafts = make(self._drafter)
            return drafts, sum(self._counter.count(draft.content) for draft in drafts)

        return await self._append(topic, made)

    async def _append(self, topic: Topic, make: Callable[[], tuple[Sequence[Draft], int]]) -> list[Entry]:
        """Append the drafts that `make` returns, with the tokens they came from."""
        started = time.perf_counter()
        loop, entries = asyncio.get_running_loop(), list[Entry]()
        for left in reversed(range(MADE_TRIES)):
            made_at = topic.log.head
            drafts, tokens = await loop.run_in_executor(self._encoder.ingestion, make)
            try:
                entries = await topic.append(drafts, made_at) if drafts else []
                break
            except MadeAnew:  # another daemon has stored some of the same: it is made anew, without that
                if not left:
                    raise
        if drafts:
            self._events.publish("stored", {"topic_id": topic.id, "chunks": len(drafts), **authors_told(entries)})
        if redacted := self._redactor.marks([draft.content for draft in drafts]):
            self._redactor.count(redacted)
            log.info(
                "stored, redacted", extra={"topic": topic.id, "chunks": len(drafts), "redacted": tallied(redacted)}
            )
        self._metrics.ingestions.add(time.perf_counter() - started)
        self._metrics.ingested_tokens.add(count=tokens)
        self._metrics.ingested_chunks.add(count=len(drafts))
        return entries
