"""Calibration: maps a model's cosines to the scale of the bundled model, for which settings and fusion are tuned.

Rule: computed from vectors alone. Only questions are transformed, so nothing stored depends on it, and it may be
measured again at any time. The result is stored by the model's fingerprint, with the vector of a probe text. A server
is asked for that vector repeatedly, to notice if another model uses the same name before the vectors mix.

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

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.assets import calibration_pairs
from memd.embedding.embedder import Embedder
from memd.entries import Vector
from memd.errors import EmbeddingError

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
