"""Embedding models of a user's own: a folder on this disk, and the prefixes that models want."""

from __future__ import annotations

import itertools
import json
import threading
from functools import partial
from pathlib import Path

import pytest
from conftest import MakeDaemon
from daemon_process import wait_until
from recording_upstream import RecordingUpstream

from memd.assets import model_dir
from memd.embedding.embedder import Embedder, Prefixes, prefixes_of
from memd.embedding.encoder import Encoder
from memd.embedding.loading import ResidentEmbedder, load_embedder
from memd.embedding.local import load_folder
from memd.errors import EmbeddingError
from memd.settings.loading import load_config
from memd.settings.model import EmbeddingSettings

TEXT = "The spare key hangs behind the blue bicycle."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model as a user would have it."""
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("model.onnx", "tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).symlink_to(model_dir() / name)
    return folder


def loaded(folder: Path, **settings: str) -> Embedder:
    """Its questions as they are, not on the common scale."""
    return load_folder(EmbeddingSettings(model=f"path:{folder}", **settings), folder)  # type: ignore[arg-type]  # texts


def test_a_folder_with_a_graph_and_its_tokenizer_is_a_model(folder: Path, embedder: Embedder) -> None:
    own = loaded(folder)
    long = " ".join([TEXT] * 100)
    assert own.fingerprint == embedder.fingerprint
    assert own.embed_many([TEXT, long]).tobytes() == embedder.embed_many([TEXT, long]).tobytes()


@pytest.mark.parametrize(
    ("lacks", "says"),
    [("model.onnx", "has no model.onnx"), ("tokenizer.json", "has no tokenizer.json")],
)
def test_what_is_missing_is_named(lacks: str, says: str, folder: Path) -> None:
    (folder / lacks).unlink()
    with pytest.raises(EmbeddingError, match=says):
        loaded(folder)


def test_no_folder_several_graphs_and_a_damaged_one_are_said(folder: Path) -> None:
    with pytest.raises(EmbeddingError, match=r"there is no folder .*nowhere"):
        loaded(folder.parent / "nowhere")
    (folder / "model.onnx").rename(folder / "a.onnx")
    (folder / "b.onnx").write_bytes(b"no graph")
    with pytest.raises(EmbeddingError, match=r"several graphs \(a.onnx, b.onnx\)"):
        loaded(folder)
    (folder / "a.onnx").unlink()
    with pytest.raises(EmbeddingError, match=r"cannot be used"):
        loaded(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text("{")
    with pytest.raises(EmbeddingError, match=r"config.json cannot be read"):
        loaded(folder)


def test_prefixes_of_the_folder_stand_in_front_and_those_of_the_settings_count_more(
    folder: Path, embedder: Embedder
) -> None:
    prompts = {"prompts": {"query": "ask: ", "document": "text: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    own = loaded(folder)
    assert own.embed_query(TEXT)[0].tobytes() == embedder.embed(f"ask: {TEXT}").tobytes()
    assert own.embed(TEXT).tobytes() == embedder.embed(f"text: {TEXT}").tobytes()
    other = loaded(folder, query_prefix="q ", text_prefix="")
    assert other.embed_query(TEXT)[0].tobytes() == embedder.embed(f"q {TEXT}").tobytes()
    assert other.embed(TEXT).tobytes() == embedder.embed(TEXT).tobytes()
    assert len({own.fingerprint, other.fingerprint, embedder.fingerprint}) == 3
    assert loaded(folder, query_prefix="", text_prefix="").fingerprint == embedder.fingerprint


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("intfloat/multilingual-e5-small", Prefixes("query: ", "passage: ")),
        ("BAAI/bge-small-en-v1.5", Prefixes("Represent this sentence for searching relevant passages: ", "")),
        ("nomic-ai/nomic-embed-text-v1.5", Prefixes("search_query: ", "search_document: ")),
        ("nomic-embed-text:latest", Prefixes("search_query: ", "search_document: ")),
        ("snowflake/snowflake-arctic-embed-l-v2.0", Prefixes("query: ", "")),
        ("BAAI/bge-m3", Prefixes()),
        ("sentence-transformers/all-MiniLM-L6-v2", Prefixes()),
    ],
)
def test_known_models_bring_the_prefixes_that_their_makers_publish(name: str, prefixes: Prefixes) -> None:
    assert prefixes_of(EmbeddingSettings(), name) == prefixes
    assert prefixes_of(EmbeddingSettings(text_prefix="t "), name) == prefixes._replace(text="t ")


def test_a_folder_is_looked_for_where_the_settings_file_is(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text('embedding:\n  model: path:models/own\n  query_prefix: "query: "\n')
    embedding = load_config(tmp_path / "config.yaml", {}, {}).embedding
    assert embedding.model == f"path:{tmp_path}/models/own"
    assert embedding.query_prefix == "query: "


def test_a_daemon_remembers_with_such_a_model_and_check_says_what_is_missing(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, folder: Path
) -> None:
    daemon = make_daemon(upstream.url, {"embedding": {"model": f"path:{folder}"}}).start()
    daemon.chat([{"role": "user", "content": TEXT}])
    daemon.wait_stored(TEXT)
    daemon.chat([{"role": "user", "content": "Where is the key?"}])
    assert TEXT in upstream.prompts[-1]
    daemon.terminate()
    (folder / "tokenizer.json").unlink()
    told = daemon.run("check", "--config", str(daemon.config))
    assert told.returncode == 1 and "has no tokenizer.json" in " ".join(told.stdout.split())


def test_a_model_is_loaded_at_its_first_use_let_go_when_idle_and_loaded_again(folder: Path, embedder: Embedder) -> None:
    settings = EmbeddingSettings(model=f"path:{folder}", idle_unload_seconds=0.05)
    resident = load_embedder(settings, stored={(384, embedder.fingerprint)})
    assert isinstance(resident, ResidentEmbedder) and not resident.is_loaded
    assert (resident.dimension, resident.fingerprint) == (384, embedder.fingerprint)
    for _ in range(2):
        assert resident.embed_query(TEXT).tobytes() == embedder.embed_query(TEXT).tobytes()
        wait_until(lambda: not resident.is_loaded, lambda: "it stays in memory")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EmbeddingError, match=r"has no tokenizer.json"):
        resident.embed(TEXT)
    resident.close()


def test_without_a_chunk_in_the_log_the_dimension_is_asked_of_the_model(folder: Path, embedder: Embedder) -> None:
    resident = load_embedder(EmbeddingSettings(model=f"path:{folder}", idle_unload_seconds=60))
    assert (resident.dimension, resident.fingerprint) == (384, embedder.fingerprint)
    assert isinstance(resident, ResidentEmbedder) and resident.is_loaded, "and it is not loaded a second time"
    resident.close()


def test_a_question_does_not_wait_longer_than_it_may_for_a_model_that_is_loaded_again(
    embedder: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    may_end, loads = threading.Event(), itertools.count()

    def load() -> Embedder:
        next(loads)
        assert may_end.wait(60), "the test ends it"
        return embedder

    load_later = partial(ResidentEmbedder, "m", embedder.dimension, embedder.fingerprint, load)
    resident = load_later(idle_seconds=60.0, question_seconds=0.02)
    for _ in range(2):
        with pytest.raises(EmbeddingError, match="is being loaded; words alone find until then"):
            resident.embed_query(TEXT)
    encoder = Encoder(resident)
    with pytest.raises(EmbeddingError, match="is being loaded"):
        encoder.embed_parts([TEXT], 60)
    assert encoder.works and not caplog.records, "it does not fail"
    may_end.set()
    assert resident.embed(TEXT).tobytes() == embedder.embed(TEXT).tobytes(), "one who stores waits"
    assert resident.embed_query(TEXT).tobytes() == embedder.embed_query(TEXT).tobytes()
    assert next(loads) == 1, "it was loaded once"
    resident.close()


def test_a_model_of_fastembeds_is_let_go_too(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    def load(settings: EmbeddingSettings, *, fetch: bool) -> Embedder:
        loads.append(settings.model)
        return embedder

    monkeypatch.setattr("memd.embedding.local.load_fastembed", load)
    resident = load_embedder(EmbeddingSettings(model="some/model", idle_unload_seconds=0.05))
    assert isinstance(resident, ResidentEmbedder) and len(loads) == 1
    wait_until(lambda: not resident.is_loaded, lambda: "it stays in memory")
    for count in (2, 3):
        assert resident.embed_query(TEXT).tobytes() == embedder.embed_query(TEXT).tobytes()
        assert len(loads) == count
        wait_until(lambda: not resident.is_loaded, lambda: "it stays in memory")
    resident.close()
