"""`memd reembed`: makes chunks that a former embedding model embedded searchable again.

Rule: nothing in the log is changed; for every live chunk whose present entry another model embedded, a copy with a new
vector is appended. A chunk with its copy is passed over, so another run resumes one that was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from memd.embedding.embedder import EmbedMany
from memd.entries import Draft
from memd.errors import StoreError
from memd.ingest.offline import Advanced, append_and_seal, ignore_progress, opened
from memd.ingest.redaction.redactor import NO_REDACTION, Redactor
from memd.settings.model import Config
from memd.store.snapshot import SegmentView
from memd.store.store import Store, TopicLog

GROUP_CHUNKS = 256
"""Appended with one fsync: about three seconds of embedding."""


def reembed(config: Config, advanced: Advanced = ignore_progress) -> tuple[int, list[StoreError]]:
    """Embed again in all topics of `config.data_dir`; see `reembed_topics`.

    Raises:
        StoreLocked: a daemon is running on it.
        MemdError: see `reembed_topics`.
    """
    with opened(config) as (store, embedder):
        redactor = Redactor.of(config.ingest)
        return reembed_topics(store, embedder.embed_many, advanced, redactor, batch_texts=embedder.batch_texts)


def reembed_topics(
    store: Store,
    embed_many: EmbedMany,
    advanced: Advanced = ignore_progress,
    redactor: Redactor = NO_REDACTION,
    *,
    batch_texts: int = 1,
) -> tuple[int, list[StoreError]]:
    """Embed again the live chunks of another model; return their number, and the errors of those that are unreadable.

    Raises:
        EmbeddingError, StoreError: the model or a write failed; the groups that were appended before stay.
    """
    topics = [store.topic(topic_id) for topic_id in store.topic_ids() if store.has_other_model(topic_id)]
    groups = [group for topic in topics for group in _groups(topic)]
    total = sum(len(rows) for _, _, rows in groups)
    done = 0
    problems: list[StoreError] = []
    for topic, view, rows in groups:
        drafts: list[Draft] = []
        for row in rows:
            try:
                draft = redactor.draft(view.segment.read(view.rows[row]).as_draft())
            except StoreError as error:
                problems.append(error)
                continue
            drafts.append(draft)
        embedded: list[Draft] = []
        for start in range(0, len(drafts), max(1, batch_texts)):
            batch = drafts[start : start + max(1, batch_texts)]
            vectors = embed_many([draft.embedded_text for draft in batch])
            embedded += [
                msgspec.structs.replace(draft, vector=vector.astype("<f4").tobytes())
                for draft, vector in zip(batch, vectors, strict=True)
            ]
            advanced(done + len(embedded), total)
        append_and_seal(topic, embedded)
        done += len(embedded)
    return done, problems


def _groups(topic: TopicLog) -> Iterator[tuple[TopicLog, SegmentView, list[int]]]:
    """The rows to embed again, in groups that are appended together."""
    for view, rows in topic.unsearched():
        for start in range(0, len(rows), GROUP_CHUNKS):
            yield topic, view, rows[start : start + GROUP_CHUNKS].tolist()
