"""A model that is in memory only while it is used.

Rule: it is loaded by the first call that needs it and let go when none has for so long; a call that is under way keeps
it. Its dimension and fingerprint are known before, so that a daemon starts without it.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder
from memd.embedding.pieces import cut, tokenizer_in
from memd.errors import EmbeddingError


class ResidentEmbedder(Embedder):
    """An `Embedder` that loads another one, and lets it go."""

    batch_texts = 1

    def __init__(
        self,
        name: str,
        dimension: int,
        fingerprint: str,
        load: Callable[[], Embedder],
        folder: Path | None = None,
        *,
        idle_seconds: float,
        question_seconds: float,
        loaded: Embedder | None = None,
    ) -> None:
        """
        Args:
            folder: where the model's tokenizer is; None: it is not known.
            idle_seconds: infinite: the model stays once it was loaded.
            question_seconds: the longest that a question waits for loading, which goes on behind it.
            loaded: the model, where it had to be loaded to know it: a second one beside it would take as much again.
        """
        self.name, self.dimension, self.fingerprint = name, dimension, fingerprint
        self.waits = idle_seconds < math.inf  # loading for the first time keeps nobody waiting twice
        self._load, self._folder = load, folder
        self._idle_seconds, self._question_seconds = idle_seconds, question_seconds
        self._lock = threading.Lock()
        self._model: Future[Embedder] | None = None
        self._uses = 0
        self._used_at = 0.0
        self._timer: threading.Timer | None = None
        self._is_closed = False
        if loaded is not None:
            self._model = Future()
            self._model.set_result(loaded)
            self._used_at = time.monotonic()
            self._look_in(idle_seconds)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._model is not None and self._model.done()

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`."""
        with self._used(None) as model:
            return model.embed_many(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`."""
        with self._used(self._question_seconds) as model:
            return model.embed_query(text)

    def cut(self, text: str, tokens: int) -> str:
        """See `Embedder.cut`."""
        return super().cut(text, tokens) if self._folder is None else cut(text, tokens, tokenizer_in(self._folder))

    def close(self) -> None:
        """See `Embedder.close`."""
        with self._lock:
            self._is_closed, self._model = True, None
            if self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def _used(self, seconds: float | None) -> Iterator[Embedder]:
        with self._lock:
            self._uses += 1
            loading = self._model
            if loading is None:
                loading = self._model = Future()
                threading.Thread(target=self._fill, args=[loading], name="memd-model", daemon=True).start()
        try:
            yield loading.result(seconds)
        except TimeoutError as error:
            raise EmbeddingError(f"{self.name} is being loaded; words alone find until then") from error
        finally:
            with self._lock:
                self._uses -= 1
                self._used_at = time.monotonic()
                if self._timer is None:
                    self._look_in(self._idle_seconds)

    def _fill(self, loading: Future[Embedder]) -> None:
        """Load the model, in a thread of its own."""
        try:
            loaded = self._load()
            if (loaded.dimension, loaded.fingerprint) != (self.dimension, self.fingerprint):
                raise EmbeddingError(f"the files of {self.name} have changed since memd was started; restart it")
            loading.set_result(loaded)
            give_back_memory()  # the file, which was read
        except BaseException as error:  # raised again where it was asked for
            self._model = None  # the next call tries again
            loading.set_exception(error)

    def _look_in(self, seconds: float) -> None:
        if not self._is_closed and self._idle_seconds < math.inf:
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
                give_back_memory()


def give_back_memory() -> None:
    """Hand what was freed to the system: glibc keeps it otherwise. Other libraries do so by themselves."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
