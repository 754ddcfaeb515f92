"""The embedding model: the real bundled one, loaded as the daemon loads it."""

import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from memd.assets import model_dir
from memd.embedding import local
from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.embedding.loading import load_embedder
from memd.embedding.local import (
    FINGERPRINT,
    PIECES_MAX,
    PiecewiseEmbedder,
    QuestionTable,
    readable,
    table_of,
    tokenizer_in,
)
from memd.errors import EmbeddingError
from memd.recall.question import PART_TOKENS
from memd.settings.model import EmbeddingSettings

SENTENCE = "The session store keeps its rows in PostgreSQL, and a token expires after twenty-four hours. "


@pytest.fixture(scope="module", autouse=True)
def loaded_anew() -> Iterator[None]:
    """Loading is what some of these tests are about."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local, "load_bundled", inspect.unwrap(local.load_bundled))
        yield


@pytest.fixture(scope="module")
def embedder(loaded_anew: None) -> PiecewiseEmbedder:
    embedder = load_embedder(EmbeddingSettings(threads=2))
    assert isinstance(embedder, PiecewiseEmbedder)
    return embedder


def test_the_bundled_model_gives_the_documented_vector(embedder: PiecewiseEmbedder) -> None:
    vector = embedder.embed("This is an example sentence")
    assert vector.dtype == np.float32 and vector.shape == (384,) == (embedder.dimension,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert vector[:4] == pytest.approx([0.0677, 0.0635, 0.0487, 0.0793], abs=0.012)  # the model card, fp32
    assert vector[:4] == pytest.approx([0.0602, 0.0659, 0.0426, 0.0784], abs=0.001)  # the int8 file, not rewritten


@pytest.mark.thorough
def test_a_text_has_one_vector_whatever_the_thread_count_or_the_load() -> None:
    texts = ["short", SENTENCE * 3, SENTENCE * 40, "短い文。", ""]
    alone = load_embedder(EmbeddingSettings())
    beside = load_embedder(EmbeddingSettings(threads=2))
    expected = [alone.embed(text).tobytes() for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: beside.embed(text).tobytes(), texts * 4))
    assert found == expected * 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\x00",
        "a\x00b",
        "\ud800",
        json.loads('"\\udc00 and \\ud83d"'),
        "[CLS] [SEP] [PAD]",
        "[PAD]",
        "\u0301" * 500,
    ],
)
def test_odd_texts_have_a_finite_unit_vector(embedder: PiecewiseEmbedder, text: str) -> None:
    vector = embedder.embed(text)
    assert np.isfinite(vector).all() and np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("unit", ["a", " ", "aB3+", SENTENCE, "记忆"])
def test_a_megabyte_is_read_at_its_head_and_tail_only(embedder: PiecewiseEmbedder, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    vectors = embedder.embed_query(text)
    assert 1 <= len(vectors) <= PIECES_MAX and np.isfinite(vectors).all()


def test_the_bundled_model_touches_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_embedder(EmbeddingSettings()).embed("offline").shape == (384,)


@pytest.mark.process
def test_what_runs_the_model_reports_nothing_to_its_makers(tmp_path: Path) -> None:
    program = "import memd.embedding.loading as l, memd.settings.model as m; "
    program += "l.load_embedder(m.EmbeddingSettings()).embed('private')"
    places = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORT_")}
    subprocess.run([sys.executable, "-c", program], env=inherited | places, check=True)
    assert list(tmp_path.rglob("*")) == [], "such reports wait in a database"


LEAVING = """
import sys, time
from memd.embedding.loading import load_embedder
from memd.errors import EmbeddingError
from memd.settings.model import EmbeddingSettings
embedder = load_embedder(EmbeddingSettings(), when_needed=True, question_seconds=0.0)
try:
    embedder.embed_query("Which port does the shop listen on?")
except EmbeddingError:
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.process
def test_a_process_that_ends_while_the_model_is_being_loaded_ends_well() -> None:
    for tenths in range(2, 7):  # the runtime of the model makes its threads somewhere in there
        done = subprocess.run(
            [sys.executable, "-c", LEAVING, str(tenths / 10)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(EmbeddingError, match=r"bge-small-en-v1\.5'"):
        load_embedder(EmbeddingSettings(model="BAAI/bge-smal-en-v1.5"))


def test_without_fastembed_a_name_of_its_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastembed", None)
    with pytest.raises(EmbeddingError, match=r"pip install 'memd-proxy\[fastembed\]'"):
        load_embedder(EmbeddingSettings(model="BAAI/bge-small-en-v1.5"))
    with pytest.raises(EmbeddingError, match=r"did you mean 'multilingual'\?"):
        load_embedder(EmbeddingSettings(model="multilingal"))


def test_a_model_that_cannot_be_fetched_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # fastembed then looks in its cache only
    monkeypatch.setenv("FASTEMBED_CACHE_PATH", str(tmp_path))
    with pytest.raises(EmbeddingError, match=r"set embedding\.model to 'bundled'"):
        load_embedder(EmbeddingSettings(model="BAAI/bge-small-en-v1.5"))


@pytest.mark.process
def test_the_bundled_model_is_run_without_the_library_that_fetches_others() -> None:
    code = "import sys, memd.embedding.loading as l, memd.settings.model as m; "
    code += "l.load_embedder(m.EmbeddingSettings())"
    ended = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('fastembed' in sys.modules)"], check=False)
    assert ended.returncode == 0, "it takes a third of the daemon's start to import"


# The question table, which has vectors without the model, and the parts of a question that the model reads


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
