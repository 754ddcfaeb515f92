"""The embedding model for several threads, requests first.

Rule: a request never waits for more than one batch of a compaction (`Embedder.batch_texts`): ingestion gives way to
requests before each. Both use the same model at the same time, from different threads.
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
        self.priority = Priority()
        """Held by every request that is being prepared; ingestion and indexing give way to it."""
        self._background = self.priority.for_background()

    @property
    def ingestion(self) -> ThreadPoolExecutor:
        """The one thread in which compactions are chunked and embedded."""
        return self._ingestion

    @property
    def fingerprint(self) -> str:
        """The model's; see `Embedder.fingerprint`."""
        return self._embedder.fingerprint

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`; in the caller's thread, which holds the priority."""
        return self._embedder.embed_query(text)

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`; gives way to requests between batches. Called in the ingesting thread."""
        size = max(1, self._embedder.batch_texts)
        batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        return np.concatenate([self._embed_batch(batch) for batch in batches or [[]]])

    def embed_text(self, text: str) -> Vector:
        """Embed one text that somebody waits for, such as a correction's; in the caller's thread."""
        return self._embedder.embed(text)

    def close(self) -> None:
        """End the thread; work that has not begun is dropped."""
        self._ingestion.shutdown(wait=True, cancel_futures=True)

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self._background.give_way()
        return self._embedder.embed_many(texts)
