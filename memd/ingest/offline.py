"""The store for a command that appends to it while no daemon runs.

Rule: the lock is held from the first read to the last write, so a running daemon and such a command exclude each
other. An append is durable at once; segments that it fills get their index before the command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from memd.embedding.embedder import Embedder
from memd.embedding.loading import load_embedder
from memd.entries import Draft
from memd.ingest.redaction.redactor import Redactor, last_look
from memd.settings.model import Config
from memd.store.encryption.opening import disk_of
from memd.store.files import Files
from memd.store.layout import models_dir
from memd.store.store import Store, TopicLog, models_in

Advanced = Callable[[int, int], None]
"""A callback for progress: how much is done, and how much there is to do altogether."""


def ignore_progress(done: int, total: int) -> None:
    """Show no progress."""


def stored_models(config: Config, files: Files) -> set[tuple[int, str]]:
    """Dimension and fingerprint of the models that wrote the log, for a model that is not there yet; see
    `load_embedder`."""
    is_asked = config.embedding.url or config.embedding.idle_unload_seconds
    return {(one.dimension, one.fingerprint) for one in models_in(config.data_dir, files)} if is_asked else set()


@contextmanager
def opened(config: Config) -> Iterator[tuple[Store, Embedder]]:
    """Open the store of `config.data_dir`, and load the embedding model that the settings name.

    Raises:
        StoreLocked: a daemon is running on it.
        MemdError: the model cannot be loaded, or the directory cannot be used.
    """
    files = disk_of(config, creating=True)
    stored = stored_models(config, files)
    embedder = load_embedder(config.embedding, models_dir=models_dir(config.data_dir), stored=stored)
    redactor = Redactor.of(config.ingest)
    store = Store.open(
        config.data_dir,
        dimension=embedder.dimension,
        fingerprint=embedder.fingerprint,
        segment_entries_max=config.segment.max_entries,
        utility=config.utility,
        draft_filter=last_look(redactor),
        files=files,
    )
    try:
        yield store, embedder
    finally:
        store.close()


def append_and_seal(topic: TopicLog, drafts: Sequence[Draft]) -> None:
    """Append one group, then build the indexes of the segments that it has filled.

    Raises:
        StoreError: the group was not stored, or an index was not written; the next start of memd builds that index.
    """
    topic.append(drafts)
    for segment_id in topic.unsealed():
        topic.seal(segment_id)
