"""The stores that bench/overhead.py and bench/start.py ask."""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import shutil
from pathlib import Path

import numpy as np
from store import drafts, settle
from vectors import embedded, mixed

from memd.assets import ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.loading import load_embedder
from memd.recall.block import line_of
from memd.settings.model import EmbeddingSettings
from memd.store.layout import TopicLayout
from memd.store.log.format import HEADER_BYTES, ModelId, encode_header
from memd.store.log.segment import new_header
from memd.store.store import Store, StoreShared

SEGMENT_ENTRIES = 5000
BASE_SENTENCES = 2000


def fill(folder: Path, chunks: int, kept: Path | None) -> None:
    """A store with that many chunks in the default topic, with its indexes; a copy of the one in `kept`, if it is."""
    embedder, counter = load_embedder(EmbeddingSettings()), TokenCounter(cl100k_base(ranks_bytes()))
    if kept is not None and (kept / str(chunks)).is_dir():
        shutil.copytree(kept / str(chunks), folder / "memory")
        chunks = 0
    store = Store(
        folder / "memory",
        StoreShared(
            model=ModelId(embedder.dimension, embedder.fingerprint),
            segment_entries_max=SEGMENT_ENTRIES,
            line_tokens=lambda entry: counter.count(line_of(entry)),
        ),
    )
    log = store.topic("default")
    if chunks:
        base, chosen = embedded(embedder, BASE_SENTENCES), np.random.default_rng(1)
        for start in range(0, chunks, SEGMENT_ENTRIES):
            log.append(drafts(mixed(base, min(SEGMENT_ENTRIES, chunks - start), chosen), chosen))
            settle(log)
    log.complete_words()
    found = log.snapshot()
    newest = found.read(next(found.latest_places()))
    assert newest.line_tokens, f"keep the store of {kept} anew: memd would count its chunks in each request"
    store.close()


def add_topics(folder: Path, count: int) -> None:
    """That many topics of one entry each, beside the default one, in a store that `fill` made."""
    embedder, chosen = load_embedder(EmbeddingSettings()), np.random.default_rng(2)
    data_dir, model = folder / "memory", ModelId(embedder.dimension, embedder.fingerprint)
    store = Store(
        data_dir, StoreShared(model=ModelId(model.dimension, model.fingerprint), segment_entries_max=SEGMENT_ENTRIES)
    )
    store.topic("topic-0").append(drafts(embedded(embedder, 1), chosen))
    store.close()
    entry = TopicLayout(data_dir, "topic-0").active.read_bytes()[HEADER_BYTES:]
    for number in range(1, count):
        layout = TopicLayout(data_dir, f"topic-{number}")
        layout.segments.mkdir(parents=True)
        layout.active.write_bytes(encode_header(new_header(layout, model, 1)) + entry)
