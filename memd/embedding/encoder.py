"""The embedding model for several threads, queries first.

Rule: a query never waits for more than one batch of a compaction (`Embedder.batch_texts`): ingestion gives way to
queries before each. Both use the same model at the same time, from different threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder
from memd.embedding.priority import Priority
from memd.entries import Vector


class Encoder:
    """Embeds queries in any thread, and texts in one ingesting thread."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._ingestion = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-ingest")
        self._priority = Priority()

    @property
    def ingestion(self) -> ThreadPoolExecutor:
        """The one thread in which compactions are chunked and embedded."""
        return self._ingestion

    @property
    def fingerprint(self) -> str:
        """The model's; see `Embedder.fingerprint`."""
        return self._embedder.fingerprint

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`; in the caller's thread, while ingestion waits."""
        with self._priority.held():
            return self._embedder.embed_query(text)

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`; gives way to queries between batches. Called in the ingesting thread."""
        size = max(1, self._embedder.batch_texts)
        batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        return np.concatenate([self._embed_batch(batch) for batch in batches or [[]]])

    def embed_text(self, text: str) -> Vector:
        """Embed one text as soon as no query is waiting. Called in the ingesting thread."""
        vector: Vector = self._embed_batch([text])[0]
        return vector

    def close(self) -> None:
        """End the thread; work that has not begun is dropped."""
        self._ingestion.shutdown(wait=True, cancel_futures=True)

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self._priority.give_way()
        return self._embedder.embed_many(texts)
