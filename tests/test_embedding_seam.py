"""The seam that embedders to come must fit: one at an address, which takes batches and wants prefixes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from archiver_stage import COUNTER, DATA_DIR
from crash_files import CrashFiles
from daemon_process import wait_until
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.errors import EmbeddingError
from memd.ingest.chunking import Utterance
from memd.ingest.pipeline import Drafter
from memd.settings.model import Config
from memd.store.store import Store, TopicLog

DIMENSION = 8


class RemoteEmbedder(Embedder):
    """A model behind an address: `requests` are the texts of each request, prefixed."""

    def __init__(self, batch_texts: int) -> None:
        self.name, self.dimension, self.fingerprint = "http", DIMENSION, "b" * 32
        self.batch_texts = batch_texts
        self.requests: list[list[str]] = []
        self.is_there = True

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._ask([f"passage: {text}" for text in texts])

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return self._ask([f"query: {text}"])

    def _ask(self, inputs: list[str]) -> NDArray[np.float32]:
        if not self.is_there:
            raise EmbeddingError("http://127.0.0.1:1 does not answer; start the embedding server")
        self.requests.append(inputs)
        return np.stack([vector_of(text) for text in inputs]) if inputs else np.empty((0, DIMENSION), np.float32)


def vector_of(text: str) -> NDArray[np.float32]:
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    vector = np.random.default_rng(seed).normal(size=DIMENSION)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


@pytest.fixture
def topic() -> Iterator[TopicLog]:
    store = Store.open(DATA_DIR, dimension=DIMENSION, fingerprint="b" * 32, segment_entries_max=100, files=CrashFiles())
    yield store.topic("default")
    store.close()


@pytest.fixture
def embedder() -> RemoteEmbedder:
    return RemoteEmbedder(batch_texts=4)


@pytest.fixture
def encoder(embedder: RemoteEmbedder) -> Iterator[Encoder]:
    encoder = Encoder(embedder)
    yield encoder
    encoder.close()


def runs(count: int) -> list[list[Utterance]]:
    """Messages that are too short to be divided, each of a conversation of its own."""
    return [[Utterance(f"Lamp {number} is lit.", "user", bytes([number]) * 16)] for number in range(count)]


def test_chunks_are_embedded_in_batches_with_the_prefix_of_a_text(
    topic: TopicLog, embedder: RemoteEmbedder, encoder: Encoder
) -> None:
    drafts = Drafter(Config(), COUNTER, encoder.embed_texts).drafts(topic, runs(10))
    assert [len(request) for request in embedder.requests] == [4, 4, 2]
    assert [draft.vector for draft in drafts] == [vector_of(f"passage: {draft.spoken}").tobytes() for draft in drafts]


def test_a_question_has_the_prefix_of_a_question_and_finds_among_the_texts(
    topic: TopicLog, embedder: RemoteEmbedder, encoder: Encoder
) -> None:
    topic.append(Drafter(Config(), COUNTER, encoder.embed_texts).drafts(topic, runs(3)))
    question = encoder.embed_query("Which lamp?")
    assert embedder.requests[-1] == ["query: Which lamp?"]
    assert len(topic.snapshot().search(question, 3)) == 3


def test_an_embedder_that_does_not_answer_stores_nothing(
    topic: TopicLog, embedder: RemoteEmbedder, encoder: Encoder
) -> None:
    embedder.is_there = False
    with pytest.raises(EmbeddingError, match="does not answer"):
        Drafter(Config(), COUNTER, encoder.embed_texts).drafts(topic, runs(2))
    assert topic.snapshot().live_count == 0


class Held:
    """Holds up a model on one question until it is told to go on."""

    def __init__(self, embedder: RemoteEmbedder, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        ask = embedder._ask

        def asked(inputs: list[str]) -> NDArray[np.float32]:
            if inputs == [f"query: {question}"]:
                self.has_begun.set()
                assert self.may_end.wait(60)
            return ask(inputs)

        monkeypatch.setattr(embedder, "_ask", asked)


def test_a_question_that_was_foreseen_is_embedded_once(
    embedder: RemoteEmbedder, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(embedder, "Which lamp?", monkeypatch)
    encoder.begin("Which lamp?")
    encoder.begin("Which lamp?")
    assert held.has_begun.wait(60)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(encoder.embed_query, "Which lamp?")
        held.may_end.set()
        assert np.array_equal(asked.result(60), [vector_of("query: Which lamp?")])
    assert embedder.requests == [["query: Which lamp?"]]


def test_nobody_waits_for_what_somebody_else_may_ask(
    embedder: RemoteEmbedder, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(embedder, "Which lamp?", monkeypatch)
    for question in ("Which lamp?", "Which door?"):
        encoder.begin(question)
    assert held.has_begun.wait(60)
    assert np.array_equal(encoder.embed_query("Which door?"), [vector_of("query: Which door?")])
    held.may_end.set()
    encoder.embed_query("Which lamp?")
    assert sorted(embedder.requests) == [["query: Which door?"], ["query: Which lamp?"]]


def test_a_foreseen_question_that_could_not_be_embedded_is_tried_when_it_is_asked(
    embedder: RemoteEmbedder, encoder: Encoder
) -> None:
    embedder.is_there = False
    encoder.begin("Which lamp?")
    with pytest.raises(EmbeddingError, match="does not answer"):
        encoder.embed_query("Which lamp?")
    wait_until(lambda: not encoder._begun, lambda: "what failed is kept")
    embedder.is_there = True
    assert np.array_equal(encoder.embed_query("Which lamp?"), [vector_of("query: Which lamp?")])


def test_no_texts_have_no_vectors(encoder: Encoder) -> None:
    assert encoder.embed_texts([]).shape == (0, DIMENSION)


@pytest.mark.process
@pytest.mark.parametrize("module", ["memd.embedding", "memd.embedding.loading", "memd.embedding.encoder"])
def test_importing_an_embedding_module_does_not_load_the_model_library(module: str) -> None:
    loaded = "any(name in sys.modules for name in ('fastembed', 'onnxruntime'))"
    code = f"import sys, {module}; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.process
def test_the_bundled_model_is_run_without_the_library_that_fetches_others() -> None:
    code = "import sys, memd.embedding.loading as l, memd.settings.model as m; "
    code += "l.load_embedder(m.EmbeddingSettings())"
    ended = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('fastembed' in sys.modules)"], check=False)
    assert ended.returncode == 0, "it takes a third of the daemon's start to import"
