"""The embedding model: the real bundled one, loaded as the daemon loads it."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from memd.embedding import local
from memd.embedding.loading import load_embedder
from memd.embedding.local import PIECES_MAX, PiecewiseEmbedder
from memd.entries import Vector
from memd.errors import EmbeddingError
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


def cosine(one: Vector, other: Vector) -> float:
    return float(one @ other)


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
        SENTENCE * 60,
        "记忆系统保存对话。" * 200,
        "안녕하세요 " * 300,
        "naïve café — “quotes” 👩‍👩‍👧 " * 200,
        "aB3+" * 2000,
        "   \n" * 3000,
        "\ud800 lone \udfff" * 500,
    ],
)
def test_pieces_join_to_the_text_and_fit_the_model(embedder: PiecewiseEmbedder, text: str) -> None:
    pieces = embedder.pieces(text)
    assert "".join(pieces) == text
    assert all(embedder.pieces(piece) == [piece] for piece in pieces)


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


def test_a_misspelt_model_of_memds_own_is_named() -> None:
    with pytest.raises(EmbeddingError, match=r"'multilingual', 'http'.*did you mean 'multilingual'\?"):
        load_embedder(EmbeddingSettings(model="multilingal"))


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
