"""The question table: vectors without the model, in the model's space."""

from __future__ import annotations

import numpy as np
import pytest

from memd.embedding.bundled import FINGERPRINT
from memd.embedding.embedder import Embedder
from memd.embedding.loading import load_embedder
from memd.embedding.table import QuestionTable, table_of
from memd.settings.model import EmbeddingSettings

QUESTIONS = (
    "where is the spare key of the garden shed",
    "Which port does the staging database listen on?",
    "What did Anna say about her trip to Norway in spring?",
    "how do I restart the nightly backup job",
)


@pytest.fixture(scope="module")
def table() -> QuestionTable:
    found = table_of(FINGERPRINT)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder(EmbeddingSettings())


def test_another_models_vectors_have_no_table() -> None:
    assert table_of("0" * 32) is None


def test_the_table_comes_near_the_models_vectors(table: QuestionTable, embedder: Embedder) -> None:
    assert table.fingerprint == embedder.fingerprint and table.dimension == embedder.dimension
    found = table.vectors(QUESTIONS)
    assert found.dtype == np.float32 and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    cosines = found @ embedder.embed_many(QUESTIONS).T
    assert cosines.diagonal().mean() > 0.75
    assert (cosines.argmax(axis=1) == np.arange(len(QUESTIONS))).all()


@pytest.mark.parametrize("text", ["", " \n", "\ud800", "?" * 500, "x" * 1_000_000, "这是没有空格的中文" * 10_000, "\0"])
def test_any_text_has_a_vector_of_length_one_or_zeros(table: QuestionTable, text: str) -> None:
    vector = table.vector(text)
    assert vector.shape == (table.dimension,) and vector.dtype == np.float32
    assert float(np.linalg.norm(vector)) == pytest.approx(1 if vector.any() else 0, abs=1e-5)
    assert (table.vectors([text])[0] == vector).all()
