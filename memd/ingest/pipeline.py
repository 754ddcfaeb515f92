"""From messages to entries that can be appended: what a compaction and `memd import` have in common.

Rule: synchronous, and appends nothing. What a topic has already is left out here: messages by their digests, chunks by
their exact text, and of chunks that say the same within one batch all but the first.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from memd.conversation import compaction
from memd.conversation.tokens import TokenCounter
from memd.entries import Draft, Vector
from memd.ingest.chunking import Chunk, Source, split
from memd.ingest.redaction.redactor import NO_REDACTION, Redactor
from memd.messages import Message, stored_text
from memd.settings.model import Config
from memd.store.store import TopicLog

log = logging.getLogger("memd")


class Drafter:
    """Makes drafts with one embedding model and one set of settings. Use it in one thread at a time."""

    def __init__(
        self,
        config: Config,
        counter: TokenCounter,
        embed: Callable[[str], Vector],
        *,
        budget_seconds: float,
    ) -> None:
        """`budget_seconds`: the time for finding boundaries in one batch; what it does not reach is cut in fixed
        windows."""
        self._config = config
        self._counter = counter
        self._embed = embed
        self._budget_seconds = budget_seconds

    def drafts(self, topic: TopicLog, runs: Sequence[Sequence[Source]]) -> list[Draft]:
        """Chunk and embed one batch; a chunk never crosses two runs.

        Raises:
            EmbeddingError: the model failed on a text.
        """
        chunks = [chunk for chunk in self._chunks(topic, runs) if not topic.has_live_text(chunk.content)]
        if not chunks:
            return []
        vectors = np.stack([self._embed(chunk.content) for chunk in chunks])
        firsts = compaction.distinct(vectors, self._config.dedupe.cosine)
        now_us = time.time_ns() // 1000
        drafts = [
            Draft(
                uuid=uuid.uuid4().bytes,
                content=chunk.content,
                vector=vectors[index].astype("<f4").tobytes(),
                created_at=now_us,
                roles=tuple(dict.fromkeys(chunk.roles)),
                # A chunk that repeats an earlier one is not stored, but its messages are known by the one that is.
                digests=tuple(dict.fromkeys(d for i, c in enumerate(chunks) if firsts[i] == index for d in c.digests)),
            )
            for index, chunk in enumerate(chunks)
            if firsts[index] == index
        ]
        return _knowing_all(drafts, runs)

    def _chunks(self, topic: TopicLog, runs: Sequence[Sequence[Source]]) -> list[Chunk]:
        started = time.monotonic()
        chunks: list[Chunk] = []
        for run in runs:
            result = split(
                run,
                settings=self._config.chunking,
                count=self._counter.count,
                embed=self._embed,
                expired=lambda: time.monotonic() - started > self._budget_seconds,
            )
            if result.used_fallback:
                took = "boundaries took longer than chunking.budget_ms; fixed windows used"
                log.info(took, extra={"topic": topic.topic_id})
            chunks += result.chunks
        return chunks


def _knowing_all(drafts: list[Draft], runs: Sequence[Sequence[Source]]) -> list[Draft]:
    """The drafts, the last one with the digests of the messages that were left out because their text is in the log.

    Otherwise those alone would be cut into other chunks the next time, and be stored.
    """
    known = {digest for draft in drafts for digest in draft.digests}
    left_out = [source.digest for run in runs for source in run if source.digest not in known]
    return [*drafts[:-1], msgspec.structs.replace(drafts[-1], digests=(*drafts[-1].digests, *left_out))]


def unstored_runs(
    topic: TopicLog, messages: Sequence[tuple[bytes, Message | None]], redactor: Redactor = NO_REDACTION
) -> list[list[Source]]:
    """The messages that are to be remembered and are not yet, redacted, in runs of neighbours.

    Args:
        messages: consecutive messages of one conversation, each with its chained digest; None stands for one that is in
            the log and out of the prompt.
    """
    sources = {
        position: Source(stored_text(kept), kept.role, digest)
        for position, (digest, message) in enumerate(messages)
        if message is not None and compaction.is_stored_kind(message) and not topic.has_digest(digest)
        for kept in [redactor.message(message)]
    }
    return [[sources[position] for position in run] for run in compaction.contiguous(list(sources))]
