"""From the setting `embedding.model` to an `Embedder`, which may be in memory only while it is used, and whose cosines
are calibrated to those of the bundled model, for which settings and fusion are tuned.

Rule: each kind of embedder is imported only when loaded: `memd --help` or `memd export` need none. A resident one is
loaded by the first call that needs it and unloaded after an idle time; running calls keep it. Its dimension and
fingerprint are known before, so that a daemon starts without loading it.

A calibration is computed from vectors alone. Only questions are transformed, so nothing stored depends on it, and it
may be measured again at any time. The result is stored by the model's fingerprint, with the vector of a probe text. A
server is asked for that vector repeatedly, to notice if another model uses the same name before the vectors mix.

Unrelated texts have a cosine of 0.08 with the bundled model and of 0.75 with e5, which adds 0.1 if both are Chinese. It
is measured on pairs of a sentence and a question, the same pairs in each language:

    q' = q − projection on the directions of languages − half of the projection on the questions' mean, normalised
    value = slope (q' · text) + offset

`slope` and `offset` give matching pairs, and other pairs, the mean values they have with the bundled model. Without the
directions of languages, texts in other languages are found as well as those in the question's own (Yang et al. 2021,
"Self Language Bias"; figures in bench/NOTES.md). Without the questions' mean, texts that resemble any question no
longer rank first. The factor one half was chosen on the same pairs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.assets import calibration_pairs, model_dir
from memd.embedding.embedder import Embedder
from memd.entries import Vector
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


Floats = NDArray[np.float32]

RELATED, UNRELATED = 0.605, 0.083
"""The bundled model's mean cosines of the English pairs; a test checks them."""
_MEAN_SHARE = 0.5
_DIRECTIONS_ENERGY = 0.9
_KNOWN_FROM = 2 / 3
"""A model knows a language if it finds this share of the language's sentences by their questions."""
_ACROSS_FROM = 0.5
_LANGUAGES_MIN = 3
_SLOPE_MAX = 20.0


class Calibration(msgspec.Struct, frozen=True):
    """Transforms a model's questions so that their products are on the common scale."""

    directions: bytes
    """Unit vectors, float32 `(n, dimension)`; their projections are removed from questions, the last one's in part."""
    slope: float
    offset: float

    def applied(self, queries: Floats) -> Floats:
        """Transform questions, unit vectors `(q, dimension)`; see the module."""
        if self == UNMEASURED:
            return queries
        rows = np.frombuffer(self.directions, "<f4").reshape(-1, queries.shape[1])
        languages, mean = rows[:-1], rows[-1:]
        cleared = queries - (queries @ languages.T) @ languages
        cleared = cleared - np.float32(_MEAN_SHARE) * (cleared @ mean.T) @ mean
        lengths = np.linalg.norm(cleared, axis=1, keepdims=True)
        return np.ascontiguousarray(cleared / np.maximum(lengths, 1e-9), np.float32)

    def same(self, cosine: float) -> float:
        """Return this model's cosine for two texts as similar as texts with `cosine` by the bundled one."""
        return 1 - (1 - cosine) / max(1.0, self.slope)


UNMEASURED = Calibration(b"", 1.0, 0.0)
"""Leaves cosines unchanged."""


def measure(questions: Floats, texts: Floats) -> Calibration:
    """Return the calibration from the vectors of the pairs, both `(languages, pairs, dimension)`, English first."""
    if _found(questions[0], texts[0]) < _KNOWN_FROM:
        return UNMEASURED  # useless even in English
    known = [one for one in range(len(texts)) if one == 0 or _found(questions[one], texts[one]) >= _KNOWN_FROM]
    across = [_found(questions[one], texts[other]) for one in known for other in known if one != other]
    if len(known) < _LANGUAGES_MIN or np.mean(across) < _ACROSS_FROM:
        known, directions = known[:1], np.zeros((1, texts.shape[2]), np.float32)
    else:
        directions = np.vstack([_directions(texts[known].mean(axis=1)), _unit(questions[known].mean(axis=(0, 1)))])
    rough = Calibration(directions.astype("<f4").tobytes(), 1.0, 0.0)
    tables = np.stack([rough.applied(questions[language]) @ texts[language].T for language in known])
    own = np.eye(texts.shape[1], dtype=bool)  # the matching pairs
    related, unrelated = float(tables[:, own].mean()), float(tables[:, ~own].mean())
    slope = min(_SLOPE_MAX, (RELATED - UNRELATED) / max(1e-6, related - unrelated))
    return Calibration(rough.directions, slope, UNRELATED - slope * unrelated)


def _directions(centres: Floats) -> Floats:
    """Return the main directions in which the languages' means differ."""
    _, sizes, found = np.linalg.svd(centres - centres.mean(axis=0), full_matrices=False)
    share = np.cumsum(sizes**2) / np.sum(sizes**2)
    return found[: int(np.searchsorted(share, _DIRECTIONS_ENERGY)) + 1]


def _unit(vector: Floats) -> Floats:
    return vector / np.linalg.norm(vector)


def _found(questions: Floats, texts: Floats) -> float:
    """Return the share of questions whose own text is nearest."""
    return float(np.mean((questions @ texts.T).argmax(axis=1) == np.arange(len(texts))))


log = logging.getLogger("memd")

SAME_MODEL_COSINE = 0.95
"""One model's vectors of one text have a cosine of 0.98 or more, however quantised; two models' about 0."""
ASKED_AGAIN_SECONDS = 60.0
"""Interval at which a server that serves questions must show its vector of the probe text again."""
MEASURE = 4
"""Increase it when `measure` gives other results, so that they are measured again."""
PROBE = "The quick brown fox jumps over the lazy dog."
"""The text whose vector identifies a model."""


class _Kept(msgspec.Struct, frozen=True):
    """The content of a calibration file."""

    pairs: str
    """Hash of the pairs and of the version of `measure`."""
    calibration: Calibration
    probe: bytes
    """The vector of `PROBE`, float32."""


class CalibratedEmbedder(Embedder):
    """Wraps an `Embedder`: questions are on the common scale, texts are unchanged."""

    def __init__(self, inner: Embedder, models_dir: Path | None, *, is_server: bool) -> None:
        """`models_dir`: where measurements are stored; None: nowhere."""
        self.name, self.dimension, self.fingerprint = inner.name, inner.dimension, inner.fingerprint
        self.batch_texts = max(1, inner.batch_texts - 1) if is_server else inner.batch_texts
        self.waits = inner.waits
        self._inner = inner
        self._is_server = is_server
        self._path = models_dir / f"{inner.fingerprint}.calibration" if models_dir else None
        self._kept = self._read()
        self._checked_at = -ASKED_AGAIN_SECONDS
        self._measuring = threading.Lock()

    def prepare(self) -> None:
        """See `Embedder.prepare`: measures the model's cosines if not done before."""
        if self._kept is None:
            if self._is_server:
                self._inner.embed_query(PROBE)  # waits only briefly; a request for texts is retried
            self._measure()

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`."""
        if self._kept is not None:
            self._check(self._kept)
        found = self._inner.embed_query(text)
        if self._kept is None and self._is_server:
            threading.Thread(target=self._measure_behind, name="memd-calibration", daemon=True).start()
            raise EmbeddingError(f"the cosines of {self.name} are being measured, once; words alone find until then")
        return (self._kept or self._measure()).calibration.applied(found)

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`. A server gets the probe text with each batch, to check the model."""
        if not self._is_server or self._kept is None:
            return self._inner.embed_many(texts)
        found = self._inner.embed_many([PROBE, *texts])
        self._compare(self._kept, found[0])
        return found[1:]

    def same_cosine(self, cosine: float) -> float:
        """See `Embedder.same_cosine`; before calibration, only identical texts count as alike."""
        return self._kept.calibration.same(cosine) if self._kept else 1 - 1e-5

    def cut(self, text: str, tokens: int) -> str:
        """See `Embedder.cut`."""
        return self._inner.cut(text, tokens)

    @property
    def scale(self) -> tuple[float, float]:
        """See `Embedder.scale`; before calibration, the bundled model's."""
        return (self._kept.calibration.slope, self._kept.calibration.offset) if self._kept else (1.0, 0.0)

    @property
    def tells_apart(self) -> bool:
        """See `Embedder.tells_apart`."""
        return self._kept is None or self._kept.calibration != UNMEASURED

    def close(self) -> None:
        """See `Embedder.close`."""
        self._inner.close()

    def _check(self, kept: _Kept) -> None:
        if self._is_server and time.monotonic() - self._checked_at > ASKED_AGAIN_SECONDS:
            self._compare(kept, self._inner.embed(PROBE))

    def _compare(self, kept: _Kept, found: Vector) -> None:
        cosine = float(np.frombuffer(kept.probe, "<f4") @ found)
        if not cosine >= SAME_MODEL_COSINE:
            self._checked_at = -ASKED_AGAIN_SECONDS
            raise EmbeddingError(
                f"{self.name} gives other vectors than before (cosine {cosine:.2f}): another model has this name now. "
                "Serve the former model again, or give embedding.name another name and run `memd reembed`"
            )
        self._checked_at = time.monotonic()

    def _measure_behind(self) -> None:
        """Measure in a thread of its own, so that no question waits for it."""
        if not self._measuring.acquire(blocking=False):
            return
        try:
            if self._kept is None:
                self._measure()
        except EmbeddingError as error:
            log.warning("the embedding model's cosines could not be measured yet", extra={"error": error})
        finally:
            self._measuring.release()

    def _measure(self) -> _Kept:
        pairs: dict[str, list[tuple[str, str]]] = msgspec.json.decode(calibration_pairs())
        answered = np.stack([self._inner.embed_many([text for text, _ in one]) for one in pairs.values()])
        asked = np.stack([self._asked([question for _, question in one]) for one in pairs.values()])
        calibration = measure(asked, answered)
        self._kept = _Kept(_which_pairs(), calibration, self._inner.embed(PROBE).astype("<f4").tobytes())
        self._write(self._kept)
        return self._kept

    def _asked(self, questions: Sequence[str]) -> NDArray[np.float32]:
        return np.concatenate([self._inner.embed_query(question)[:1] for question in questions])

    def _read(self) -> _Kept | None:
        if self._path is None:
            return None
        try:
            kept = msgspec.msgpack.decode(self._path.read_bytes(), type=_Kept)
        except (OSError, msgspec.MsgspecError):
            return None
        fits = len(kept.probe) == 4 * self.dimension and not len(kept.calibration.directions) % len(kept.probe)
        return kept if kept.pairs == _which_pairs() and fits else None

    def _write(self, kept: _Kept) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_bytes(msgspec.msgpack.encode(kept))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("what was measured of the embedding model is not kept", extra={"error": error})


def _which_pairs() -> str:
    return hashlib.sha256(bytes([MEASURE]) + calibration_pairs()).hexdigest()[:16]
