"""The question table, which has vectors without the model, and the parts of a question that the model reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from memd.assets import model_dir
from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.embedding.local import FINGERPRINT, readable, tokenizer_in
from memd.embedding.table import QuestionTable, table_of
from memd.errors import EmbeddingError
from memd.recall.question import PART_TOKENS

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


def test_the_table_comes_near_the_models_vectors(table: QuestionTable, embedder: Embedder) -> None:
    assert table.fingerprint == embedder.fingerprint and table.dimension == embedder.dimension
    found = table.vectors(QUESTIONS)
    assert found.dtype == np.float32 and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    cosines = found @ embedder.embed_many(QUESTIONS).T
    assert cosines.diagonal().mean() > 0.75
    assert (cosines.argmax(axis=1) == np.arange(len(QUESTIONS))).all()


@pytest.mark.parametrize("text", ["", " \n", "\ud800", "?" * 500, "x" * 1_000_000, "这是没有空格的中文" * 10_000, "\0"])
def test_any_text_has_a_vector_of_length_one_or_zeros(table: QuestionTable, text: str) -> None:
    [vector] = table.vectors([text])
    assert vector.shape == (table.dimension,) and vector.dtype == np.float32
    assert float(np.linalg.norm(vector)) == pytest.approx(1 if vector.any() else 0, abs=1e-5)
    assert (table.vectors(["before", text])[1] == vector).all()


@pytest.fixture(scope="module")
def encoder(embedder: Embedder) -> Iterator[Encoder]:
    with closing(Encoder(embedder)) as encoder:
        yield encoder


@pytest.mark.parametrize(
    "text", ["w " * 500, "x" * 9_000, "这是没有空格的中文" * 1_000, "\ud800?" * 300, "🙂" * 300, ""]
)
def test_a_part_is_cut_at_a_character(embedder: Embedder, encoder: Encoder, text: str) -> None:
    head = encoder.embedder.cut(text, PART_TOKENS)
    assert text.startswith(head) and bool(head) == bool(text)
    assert len(tokenizer_in(model_dir()).encode(readable(head), add_special_tokens=False)) <= PART_TOKENS
    assert encoder.embed_parts([head, "a question"], 60).shape == (2, embedder.dimension)


def test_parts_have_the_models_vectors_where_there_is_time(embedder: Embedder, encoder: Encoder) -> None:
    assert encoder.table is not None and encoder.table.fingerprint == encoder.fingerprint
    assert len(encoder.embed_parts(["nobody asked this before", "nor this"], 0)) == 1
    vectors = encoder.embed_parts(QUESTIONS, 60)
    assert np.allclose(vectors, embedder.embed_many(QUESTIONS), atol=1e-5)
    assert (encoder.embed_parts(QUESTIONS, 0) == vectors).all()  # the questions asked last are known


class Slow(Embedder):
    """A model behind an address, which answers when it is let."""

    name, dimension, fingerprint, batch_texts, waits = "slow", 2, "0" * 32, 1, True

    def __init__(self) -> None:
        self.let = threading.Event()

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.array([[1, 0]] * len(texts), np.float32)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        assert self.let.wait(30)
        if text == "fails":
            raise EmbeddingError("it fails")
        return self.embed_many([text])


def test_a_model_that_is_too_slow_is_known_when_it_is_asked_again() -> None:
    slow = Slow()
    with closing(Encoder(slow)) as encoder:
        assert encoder.table is None
        with pytest.raises(EmbeddingError, match="within 10 ms"):
            encoder.embed_parts(["where is it?"], 0.01)
        slow.let.set()
        assert encoder.embed_parts(["where is it?"], 30).tolist() == [[1, 0]]
        with pytest.raises(EmbeddingError, match="it fails"):
            encoder.embed_parts(["fails"], 30)
