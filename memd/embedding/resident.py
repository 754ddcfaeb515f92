"""A model that is in memory only while it is used.

Rule: it is loaded by the first call that needs it and let go when none has for so long; a call that is under way keeps
it. Its dimension and fingerprint are known before, so that a daemon starts without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder
from memd.errors import EmbeddingError


class ResidentEmbedder(Embedder):
    """An `Embedder` that loads another one, and lets it go."""

    batch_texts = 1

    def __init__(
        self, name: str, dimension: int, fingerprint: str, load: Callable[[], Embedder], idle_seconds: float
    ) -> None:
        self.name, self.dimension, self.fingerprint = name, dimension, fingerprint
        self._load = load
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._model: Embedder | None = None
        self._uses = 0
        self._used_at = 0.0
        self._timer: threading.Timer | None = None
        self._is_closed = False

    @property
    def is_loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._model is not None

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`."""
        with self._used() as model:
            return model.embed_many(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`."""
        with self._used() as model:
            return model.embed_query(text)

    def close(self) -> None:
        """See `Embedder.close`."""
        with self._lock:
            self._is_closed, self._model = True, None
            if self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def _used(self) -> Iterator[Embedder]:
        with self._lock:
            if self._model is None:
                loaded = self._load()
                if (loaded.dimension, loaded.fingerprint) != (self.dimension, self.fingerprint):
                    raise EmbeddingError(f"the files of {self.name} have changed since memd was started; restart it")
                self._model = loaded
            model = self._model
            self._uses += 1
        try:
            yield model
        finally:
            with self._lock:
                self._uses -= 1
                self._used_at = time.monotonic()
                if self._timer is None:
                    self._look_in(self._idle_seconds)

    def _look_in(self, seconds: float) -> None:
        if not self._is_closed:
            self._timer = threading.Timer(seconds, self._look)
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        with self._lock:
            self._timer = None
            left = self._used_at + self._idle_seconds - time.monotonic()
            if self._uses or left > 0:
                self._look_in(max(left, 0.01))
            else:
                self._model = None
