"""From the setting `embedding.model` to an `Embedder`, which may be in memory only while it is used.

Rule: each kind of embedder is imported only when loaded: `memd --help` or `memd export` need none. A resident one is
loaded by the first call that needs it and unloaded after an idle time; running calls keep it. Its dimension and
fingerprint are known before, so that a daemon starts without loading it.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memd.assets import model_dir
from memd.embedding.embedder import Embedder
from memd.errors import EmbeddingError, ModelLoading
from memd.settings.model import EmbeddingSettings

BUNDLED = "bundled"
MULTILINGUAL = "multilingual"
PATH = "path:"
HTTP = "http"
QUESTION_SECONDS = 10.0
"""Default limit on a question's wait for a server, or for a model that is loading."""


def load_embedder(
    settings: EmbeddingSettings,
    *,
    models_dir: Path | None = None,
    fetch: bool = True,
    stored: Collection[tuple[int, str]] = (),
    question_seconds: float = QUESTION_SECONDS,
    when_needed: bool = False,
) -> Embedder:
    """Load the model that the settings name: the bundled one (about 0.4 s plus the import), the multilingual one, one
    in a local folder, one on a server, or any text model that fastembed knows and fetches once.

    Args:
        models_dir: folder of added models and of calibrations; None: nowhere.
        fetch: a model that is not on this machine may be fetched.
        stored: dimension and fingerprint of the models that wrote the log. If a server's model is one of them, the
            server is not asked yet and may be down.
        question_seconds: time limit for a server, or for loading, per question.
        when_needed: load the bundled model at the first call: a daemon starts without it and needs 50 MB less until
            then.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read, or the server does not answer.
    """
    if settings.model == HTTP:
        from memd.embedding.http import HttpEmbedder

        embedder: Embedder = HttpEmbedder(settings, question_seconds, stored)
    elif settings.idle_unload_seconds or (when_needed and settings.model == BUNDLED):
        load, folder = partial(_local, settings, models_dir, fetch), _folder(settings, models_dir)
        embedder = ResidentEmbedder(settings, load, folder, stored, question_seconds)
    else:
        embedder = _local(settings, models_dir, fetch)
    from memd.embedding.calibration import CalibratedEmbedder
    from memd.embedding.local import FINGERPRINT

    if embedder.fingerprint == FINGERPRINT:
        return embedder  # the scale is defined by this model

    return CalibratedEmbedder(embedder, models_dir, is_server=settings.model == HTTP)


def _local(settings: EmbeddingSettings, models_dir: Path | None, fetch: bool) -> Embedder:
    if settings.model == BUNDLED:
        from memd.embedding.local import load_bundled

        return load_bundled(settings)
    if (folder := _folder(settings, models_dir)) is not None:
        from memd.embedding.local import load_folder

        return load_folder(settings, folder)
    from memd.embedding.local import load_fastembed

    return load_fastembed(settings, fetch=fetch)


def _folder(settings: EmbeddingSettings, models_dir: Path | None) -> Path | None:
    """Return the folder of the model; None for fastembed's."""
    if settings.model == BUNDLED:
        return model_dir()
    if settings.model.startswith(PATH):
        return Path(settings.model.removeprefix(PATH))
    if settings.model != MULTILINGUAL:
        return None
    if models_dir is None:
        raise EmbeddingError("embedding.model multilingual is in a data directory; here there is none")
    from memd.embedding.multilingual import checked_folder

    return checked_folder(models_dir)


class ResidentEmbedder(Embedder):
    """An `Embedder` that loads another one when needed, and unloads it."""

    batch_texts = 1

    def __init__(
        self,
        settings: EmbeddingSettings,
        load: Callable[[], Embedder],
        folder: Path | None,
        stored: Collection[tuple[int, str]],
        question_seconds: float,
    ) -> None:
        """Load the model if its fingerprint or dimension is unknown otherwise.

        Args:
            folder: folder of the model's files; None: only fastembed knows them.
            stored: dimension and fingerprint of the models that wrote the log, which has them once there is a chunk.
            question_seconds: limit on a question's wait for loading, which continues in the background.
        """
        from memd.embedding.local import DIMENSION, ModelFiles

        self.name = settings.model
        self.fingerprint = "" if folder is None else ModelFiles(settings, folder).fingerprint
        known = DIMENSION if settings.model == BUNDLED else 0
        self.dimension = next((dimension for dimension, one in stored if one == self.fingerprint), known)
        self._idle_seconds = settings.idle_unload_seconds or math.inf
        self.waits = self._idle_seconds < math.inf  # the first load is not a repeated wait
        self._load, self._folder, self._question_seconds = load, folder, question_seconds
        self._lock = threading.Lock()
        self._model: Future[Embedder] | None = None
        self._uses = 0
        self._idle: threading.Timer | None = None
        """Unloads the model if it is idle until then."""
        if not self.dimension:
            loaded = load()
            self.fingerprint, self.dimension = loaded.fingerprint, loaded.dimension
            self._model = Future()
            self._model.set_result(loaded)
            self._rest()

    @property
    def is_loaded(self) -> bool:
        """True if the model is in memory."""
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
        if self._folder is None:
            return super().cut(text, tokens)
        from memd.embedding.local import cut, tokenizer_in

        return cut(text, tokens, tokenizer_in(self._folder))

    def close(self) -> None:
        """See `Embedder.close`."""
        with self._lock:
            self._model, self._idle_seconds = None, math.inf
            self._rest()

    @contextmanager
    def _used(self, seconds: float | None) -> Iterator[Embedder]:
        with self._lock:
            self._uses += 1
            loading = self._model
            if loading is None:
                loading = self._model = Future()
                # Not a daemon thread: a process that ends while loading would be aborted by the runtime.
                threading.Thread(target=self._fill, args=[loading], name="memd-model").start()
        try:
            yield loading.result(seconds)
        except TimeoutError as error:
            raise ModelLoading(f"{self.name} is being loaded; words alone find until then") from error
        finally:
            with self._lock:
                self._uses -= 1
                self._rest()

    def _fill(self, loading: Future[Embedder]) -> None:
        """Load the model, in a thread of its own."""
        try:
            loaded = self._load()
            if (loaded.dimension, loaded.fingerprint) != (self.dimension, self.fingerprint):
                raise EmbeddingError(f"the files of {self.name} have changed since memd was started; restart it")
            loading.set_result(loaded)
            give_back_memory()  # memory for reading the file
        except BaseException as error:  # raised again in the callers
            self._model = None  # the next call tries again
            loading.set_exception(error)

    def _rest(self) -> None:
        """Restart the idle timer; called with the lock held."""
        if self._idle is not None:
            self._idle.cancel()
        if self._idle_seconds < math.inf:
            self._idle = threading.Timer(self._idle_seconds, self._let_go)
            self._idle.daemon = True
            self._idle.start()

    def _let_go(self) -> None:
        with self._lock:
            if not self._uses:
                self._model = None
                give_back_memory()


def give_back_memory() -> None:
    """Return freed memory to the system, which glibc would keep; other libraries return it by themselves."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
