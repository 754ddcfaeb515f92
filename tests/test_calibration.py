"""Cosines of all models on one scale, and a server whose model is another one than before."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from archiver_stage import HashEmbedder
from daemon_process import wait_until
from numpy.typing import NDArray

from memd.assets import calibration_pairs
from memd.embedding import calibration
from memd.embedding.calibration import RELATED, UNRELATED, CalibratedEmbedder, measure
from memd.embedding.embedder import Embedder
from memd.errors import EmbeddingError

PAIRS: dict[str, list[tuple[str, str]]] = json.loads(calibration_pairs())
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def english(embedder: Embedder) -> tuple[Floats, Floats]:
    """Questions and texts of the English pairs."""
    return (
        np.concatenate([embedder.embed_query(question) for _, question in PAIRS["en"]]),
        embedder.embed_many([text for text, _ in PAIRS["en"]]),
    )


def unit(vectors: Floats) -> Floats:
    found: Floats = (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)
    return found


def means(table: NDArray[np.float64] | Floats) -> tuple[float, float]:
    """Of the pairs that belong together, and of the others."""
    own = np.eye(len(table), dtype=bool)
    return float(table[own].mean()), float(table[~own].mean())


class Narrow(Embedder):
    """The bundled model with all vectors in a narrow cone, and each language in a place of its own: as e5."""

    name, batch_texts = "narrow", 16

    def __init__(self, embedder: Embedder, *, shift: int = 0) -> None:
        self._embedder = embedder
        self.dimension = embedder.dimension
        self.fingerprint = "e" * 32
        self.shift = shift
        self.asked = 0
        self._meant = functools.cache(embedder.embed)
        random = np.random.default_rng(7 + shift)
        cone = random.normal(size=(1 + len(PAIRS), self.dimension)).astype(np.float32) / np.sqrt(self.dimension)
        self._moves = 1.5 * cone[0] + 0.7 * cone[1:]

    def embed_many(self, texts: Sequence[str]) -> Floats:
        self.asked += len(texts)
        return np.stack([self._of(text) for text in texts]) if texts else np.empty((0, self.dimension), np.float32)

    def embed_query(self, text: str) -> Floats:
        return self.embed_many([text])

    def _of(self, text: str) -> Floats:
        language = next((n for n, pairs in enumerate(PAIRS.values()) for pair in pairs if text in pair), 0)
        number = next((n for pairs in PAIRS.values() for n, pair in enumerate(pairs) if text in pair), None)
        meant = text
        if number is not None and language:
            question = text == list(PAIRS.values())[language][number][1]
            meant = PAIRS["en"][number][question]
        return unit(np.roll(self._meant(meant), self.shift) + self._moves[language])


@pytest.fixture
def narrow(embedder: Embedder) -> Narrow:
    return Narrow(embedder)


@pytest.mark.thorough
def test_a_model_with_other_cosines_gets_the_same_values(narrow: Narrow, tmp_path: Path) -> None:
    embedder = CalibratedEmbedder(narrow, tmp_path, is_server=False)
    texts = {language: narrow.embed_many([text for text, _ in pairs]) for language, pairs in PAIRS.items()}
    raw = np.stack([narrow.embed_query(question)[0] for _, question in PAIRS["en"]]) @ texts["en"].T
    assert means(raw)[1] > 0.5, "all are alike"

    def values(asks: str, has: str) -> tuple[float, float]:
        queries = np.concatenate([embedder.embed_query(question) for _, question in PAIRS[asks]])
        slope, offset = embedder.scale
        return means(slope * (queries @ texts[has].T) + offset)

    embedder.prepare()
    each = [values(language, language) for language in PAIRS]
    assert np.mean(each, axis=0) == pytest.approx((RELATED, UNRELATED), abs=0.01)
    assert np.ptp(each, axis=0).max() < 0.3, "in the cone they are further apart"
    assert values("de", "th")[0] > (RELATED + UNRELATED) / 2, "another language is no disadvantage"


def test_it_is_measured_once_and_kept(narrow: Narrow, tmp_path: Path) -> None:
    first = CalibratedEmbedder(narrow, tmp_path, is_server=False)
    first.prepare()
    asked, [file] = narrow.asked, list(tmp_path.iterdir())
    assert file.name == f"{narrow.fingerprint}.calibration" and asked >= 180
    again = CalibratedEmbedder(narrow, tmp_path, is_server=False)
    again.prepare()
    assert narrow.asked == asked
    assert again.embed_query("which?").tobytes() == first.embed_query("which?").tobytes()
    file.write_bytes(b"damaged")
    CalibratedEmbedder(narrow, tmp_path, is_server=False).prepare()
    assert narrow.asked > 2 * asked - 10, "what is damaged is measured again"


def test_a_model_that_tells_nothing_apart_is_left_as_it_is(tmp_path: Path) -> None:
    embedder = CalibratedEmbedder(HashEmbedder(), tmp_path, is_server=False)
    assert embedder.embed_query("a").shape == (1, HashEmbedder().dimension)
    assert embedder.same_cosine(0.99) == 0.99


def test_a_model_of_one_language_keeps_its_directions(english: tuple[Floats, Floats]) -> None:
    questions, texts = english
    random = np.random.default_rng(1)
    noise = unit(random.normal(size=(4, *texts.shape)).astype(np.float32))
    found = measure(np.stack([questions, *noise]), np.stack([texts, *noise[::-1]]))
    assert found.slope == pytest.approx(1, abs=0.01) and found.offset == pytest.approx(0, abs=0.01)
    assert np.allclose(found.applied(questions), questions, atol=1e-5)


def test_a_server_is_measured_behind_the_first_question(
    narrow: Narrow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = CalibratedEmbedder(narrow, tmp_path, is_server=True)
    with pytest.raises(EmbeddingError, match="words alone find until then"):
        embedder.embed_query("early")
    wait_until(lambda: list(tmp_path.glob("*.calibration")) != [], lambda: "it is not measured")
    wait_until(lambda: embedder.same_cosine(0.99) < 0.9999, lambda: "nor used")
    assert embedder.embed_query("later").shape == (1, 384)
    assert embedder.batch_texts == narrow.batch_texts - 1, "one more text goes with each batch"
    asked = narrow.asked
    embedder.embed_query("at once")
    assert narrow.asked == asked + 1
    monkeypatch.setattr(calibration, "ASKED_AGAIN_SECONDS", 0)
    embedder.embed_query("long after")
    assert narrow.asked == asked + 3


def test_a_server_that_hangs_keeps_a_start_for_a_question_s_time_only(narrow: Narrow, tmp_path: Path) -> None:
    class Hanging(Narrow):
        def embed_query(self, text: str) -> Floats:
            raise EmbeddingError("does not answer in time")

        def embed_many(self, texts: Sequence[str]) -> Floats:
            raise AssertionError("this would be tried for a minute and a half")

    with pytest.raises(EmbeddingError, match="in time"):
        CalibratedEmbedder(Hanging(narrow._embedder), tmp_path, is_server=True).prepare()
