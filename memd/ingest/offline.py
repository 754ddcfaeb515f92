"""The store for a command that appends to it while no daemon runs, such as `memd reembed`.

Rule: the lock is held from the first read to the last write, so a running daemon and such a command exclude each
other. An append is durable at once; segments that it fills get their index before the command continues.

`memd reembed` makes the chunks of a former embedding model searchable again. The log is not changed: for each live
chunk whose present entry is from another model, a copy with a new vector is appended. Chunks with a copy are skipped,
so another run resumes an interrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from memd.embedding.embedder import Embedder, EmbedMany
from memd.embedding.loading import load_embedder
from memd.entries import Draft, Entry
from memd.errors import StoreError
from memd.ingest.redaction import NO_REDACTION, Redactor, last_look
from memd.settings.model import Config
from memd.store.disk import LocalDisk
from memd.store.encryption.disk import disk_of
from memd.store.layout import TopicLayout, models_dir, topic_ids_in
from memd.store.store import ModelId, Store, StoreShared, models_in

Advanced = Callable[[int, int], None]
"""A callback for progress: the amount done, and the total."""


def stored_models(config: Config, files: LocalDisk) -> set[tuple[int, str]]:
    """Return dimension and fingerprint of the models in the log, if the present model is loaded later; see
    `load_embedder`."""
    is_asked = config.embedding.url or config.embedding.idle_unload_seconds
    names = topic_ids_in(files, config.data_dir) if is_asked else ()
    models = (one for name in names for one in models_in(files, TopicLayout(config.data_dir, name)))
    return {(one.dimension, one.fingerprint) for one in models}


@contextmanager
def opened(config: Config, line_tokens: Callable[[Entry], int]) -> Iterator[tuple[Store, Embedder]]:
    """Open the store of `config.data_dir`, and load the embedding model of the settings; for `line_tokens` see
    `StoreShared`. Raises StoreLocked: a daemon is running on it; MemdError: the model cannot be loaded, or the
    directory cannot be used."""
    files = disk_of(config, creating=True)
    stored = stored_models(config, files)
    embedder = load_embedder(config.embedding, models_dir=models_dir(config.data_dir), stored=stored)
    redactor = Redactor.of(config.ingest)
    store = Store(
        config.data_dir,
        StoreShared(
            model=ModelId(embedder.dimension, embedder.fingerprint),
            segment_entries_max=config.segment.max_entries,
            draft_filter=last_look(redactor),
            line_tokens=line_tokens,
            files=files,
        ),
    )
    try:
        yield store, embedder
    finally:
        store.close()


GROUP_CHUNKS = 256
"""Chunks appended with one fsync: about three seconds of embedding."""


def reembed_topics(
    store: Store,
    embed_many: EmbedMany,
    advanced: Advanced = lambda done, total: None,
    redactor: Redactor = NO_REDACTION,
) -> tuple[int, list[StoreError]]:
    """Embed the live chunks of other models again; return their number, and the errors of unreadable ones. Raises
    EmbeddingError, StoreError: the model or a write failed; groups appended before stay."""
    topics = [store.topic(topic_id) for topic_id in store.topic_ids() if store.has_other_model(topic_id)]
    groups = [
        (topic, view, rows[start : start + GROUP_CHUNKS].tolist())
        for topic in topics
        for view, rows in topic.unsearched()
        for start in range(0, len(rows), GROUP_CHUNKS)
    ]
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
        vectors = embed_many([draft.embedded_text for draft in drafts])
        topic.append(
            [
                msgspec.structs.replace(draft, vector=vector.astype("<f4").tobytes())
                for draft, vector in zip(drafts, vectors, strict=True)
            ]
        )
        done += len(drafts)
        advanced(done, total)
    return done, problems
