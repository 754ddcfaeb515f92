"""The seam that embedders to come must fit: one at an address, which takes batches and wants prefixes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from archiver_stage import COUNTER, DATA_DIR
from crash_files import CrashFiles
from drafts import search
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.errors import EmbeddingError
from memd.ingest.chunking import Utterance
from memd.ingest.pipeline import Drafter
from memd.settings.model import Config
from memd.store.store import ModelId, Store, StoreShared, TopicLog

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
    store = Store(
        DATA_DIR, StoreShared(model=ModelId(DIMENSION, "b" * 32), segment_entries_max=100, files=CrashFiles())
    )
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


def test_a_question_has_the_prefix_of_a_question_and_finds_among_the_texts(
    topic: TopicLog, embedder: RemoteEmbedder, encoder: Encoder
) -> None:
    topic.append(Drafter(Config(), COUNTER, encoder.embed_texts).drafts(topic, runs(3)))
    question = encoder.embed_parts(["Which lamp?"], 60)
    assert embedder.requests[-1] == ["query: Which lamp?"]
    assert len(search(topic.snapshot(), question, 3)) == 3


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
