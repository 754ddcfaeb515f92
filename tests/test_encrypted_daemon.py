"""An encrypted data directory under the real daemon and the real commands.

Rule: the witness is every byte below the data directory; nothing that was said, and no vector, may be among them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from drafts import draft, open_store
from numpy.typing import NDArray
from recording_upstream import RecordingUpstream, chat_answer

from memd.cli.main import main
from memd.errors import WrongKey
from memd.settings.model import EncryptionSettings
from memd.store.disk import LocalDisk
from memd.store.encryption.disk import disk_for
from memd.store.encryption.key_files import MasterKey, new_key_file
from memd.store.layout import topic_ids_in
from memd.store.tools.export import exported_entries

RARE = [f"zanzibar{word}quokka" for word in ("lamp", "gull", "paint", "ferry", "foghorn", "keeper")]
ANSWER = "The vermilion walrus agrees with that."
SETTINGS = {"segment": {"max_entries": 10}, "buffer": {"soft_tokens": 300, "hard_tokens": 700}}


def key_file(folder: Path, name: str = "key") -> Path:
    path = folder / name
    new_key_file(path)
    return path


def bytes_below(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.read_bytes()


def memd(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [str(one) for one in arguments], prog_name="memd")


def vectors_in(daemon: DaemonProcess, settings: EncryptionSettings) -> list[NDArray[np.float32]]:
    disk = disk_for(daemon.data_dir, settings)
    found = exported_entries(daemon.data_dir, disk, topic_ids_in(disk, daemon.data_dir), live_only=False)
    return [np.frombuffer(entry.vector, dtype="<f4") for _, entry, _ in found if entry.vector]


def test_no_byte_below_the_data_directory_is_text_or_vector_while_a_daemon_works_is_killed_and_ends(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    upstream.answer = lambda request: chat_answer(request, ANSWER)
    settings = EncryptionSettings(key_file=str(key_file(tmp_path)))
    daemon = make_daemon(upstream.url, {**SETTINGS, "encryption": {"key_file": settings.key_file}}).start()
    history = []
    for word in RARE:
        history.append({"role": "user", "content": f"I have to tell you of the {word} at the pier. " * 12})
        history.append({"role": "assistant", "content": daemon.chat(history).reply})
    wait_until(lambda: len(vectors_in(daemon, settings)) >= len(RARE), lambda: repr(daemon))
    assert "memd.receipts" in [path.name for path in daemon.data_dir.iterdir()]
    for path, data in bytes_below(daemon.data_dir):
        assert not any(word.encode() in data for word in RARE), path
    daemon.kill()
    daemon.start()
    daemon.chat([{"role": "user", "content": f"What do you know of the {RARE[0]}?"}])
    assert f"of the {RARE[0]} at the pier" in upstream.prompts[-1], "and it is remembered"
    wait_until(lambda: any(path.suffix == ".meta" for path in daemon.data_dir.rglob("*")), lambda: repr(daemon))
    topics = ask(f"{daemon.own_url}/memd/topics")
    assert topics.status == 200 and topics.json["topics"][0]["segments"], topics
    assert ask(f"{daemon.own_url}/memd/backup", {"folder": str(tmp_path / "backup")}).status == 200
    assert daemon.terminate() == 0
    vectors = vectors_in(daemon, settings)
    pieces = [form[at : at + 16].tobytes() for one in vectors for form in (one, one.astype("<f2")) for at in (0, 100)]
    wanted = [*(word.encode() for word in RARE), b"vermilion", b"walrus", *pieces]
    for folder in (daemon.data_dir, tmp_path / "backup"):
        for path, data in bytes_below(folder):
            assert [one for one in wanted if one in data] == [], path
        assert "all whole" in memd("verify", folder, MEMD_ENCRYPTION_KEY_FILE=settings.key_file).output
    turns = LocalDisk().read(daemon.data_dir / "memd.receipts")
    assert turns[:8] == b"memd.enc"


REFUSED = (
    ["verify"],
    ["stats"],
    ["export"],
    ["backup", "elsewhere"],
    ["search", "gull"],
    ["audit"],
    ["remember", "a gull"],
    ["reembed"],
    ["encrypt"],
    ["decrypt"],
    ["serve", "--port", "0"],
)


@pytest.fixture
def encrypted(tmp_path: Path) -> Path:
    """An encrypted directory with a topic; `key` beside it is its key, `other` another one."""
    key_file(tmp_path)
    key_file(tmp_path, "other")
    folder = tmp_path / "memory"
    files = disk_for(folder, EncryptionSettings(key_file=str(tmp_path / "key")), creating=True)
    store = open_store(files, folder, segment_entries_max=2, dimension=384, fingerprint="")
    store.topic("talk").append([draft("gull", dimension=384)])
    store.close()
    return folder


def test_a_command_that_asks_the_running_daemon_needs_no_key(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    daemon = make_daemon(upstream.url, {"encryption": {"key_file": str(key_file(tmp_path))}}).start()
    body = {"notes": [{"content": "The crane needs oil."}]}
    assert ask(f"{daemon.own_url}/memd/notes", body).status == 200
    told = memd("search", "What does the crane need?", "--data-dir", daemon.data_dir)
    assert told.exit_code == 0 and "The crane needs oil." in told.output, told.output

    def log() -> str:  # where a note is as soon as it is embedded
        return memd("log", "--data-dir", daemon.data_dir).output

    wait_until(lambda: "The crane needs oil." in log(), log)


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command[0])
def test_without_the_key_or_with_a_wrong_one_a_command_says_so_and_writes_nothing(
    encrypted: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(encrypted.parent)
    before = [(path, data) for path, data in bytes_below(encrypted.parent) if path.name != "memd.lock"]
    missing = memd(*command, "--data-dir", encrypted)
    assert missing.exit_code == 1 and "key" in missing.output and "encryption.key_file" in missing.output
    wrong = memd(*command, "--data-dir", encrypted, MEMD_ENCRYPTION_KEY_FILE="other")
    assert wrong.exit_code == 1 and "another directory's, or one from before a `memd encrypt rekey`" in wrong.output
    assert [(path, data) for path, data in bytes_below(encrypted.parent) if path.name != "memd.lock"] == before


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o622])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(WrongKey, match=f"others may read this key \\(mode {mode:04o}\\); chmod 600"):
        MasterKey.in_file(path)


def test_a_key_is_the_same_in_each_form(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    text = path.read_text().strip()
    one = MasterKey.in_file(path)
    raw = base64.b64decode(text)
    forms = [
        raw,
        raw.hex().encode(),
        raw.hex().upper().encode() + b"\n",
        text.replace("+", "-").replace("/", "_").encode(),
    ]
    assert {MasterKey.parsed(form, "x").id for form in forms} == {one.id}
    for wrong in (b"", raw[:-1], raw.hex()[:-2].encode(), b"z" * 64, b"\xff" * 64, b"a passphrase, which is no key"):
        with pytest.raises(WrongKey, match="x: holds no key"):
            MasterKey.parsed(wrong, "x")
    with pytest.raises(WrongKey):
        MasterKey.in_file(_written(tmp_path / "empty"))


def _written(path: Path) -> Path:
    path.touch(0o600)
    return path


def test_a_key_file_that_is_gone_is_named_with_what_to_do(tmp_path: Path) -> None:
    done = memd("encrypt", "--data-dir", tmp_path, MEMD_ENCRYPTION_KEY_FILE=str(tmp_path / "gone"))
    assert done.exit_code == 1 and f"{tmp_path / 'gone'}: there is no such file; put the key" in done.output


def test_a_new_key_never_replaces_one(tmp_path: Path) -> None:
    assert memd("key", "new", tmp_path / "key").exit_code == 0
    made = (tmp_path / "key").read_bytes()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    again = memd("key", "new", tmp_path / "key")
    assert again.exit_code == 2 and "is there already" in again.output
    assert (tmp_path / "key").read_bytes() == made


def test_a_key_in_a_settings_file_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("encryption:\n  key: c2VjcmV0\n")
    told = memd("stats", "--config", config)
    assert told.exit_code == 2 and "does not belong into a settings file" in told.output
    assert "c2VjcmV0" not in told.output


def test_a_plain_directory_is_encrypted_rekeyed_and_decrypted_by_commands(tmp_path: Path) -> None:
    folder, old, new = tmp_path / "memory", key_file(tmp_path, "old"), key_file(tmp_path, "new")
    where: list[str | Path] = ["--data-dir", folder]
    with_old, with_new = {"MEMD_ENCRYPTION_KEY_FILE": str(old)}, {"MEMD_ENCRYPTION_KEY": new.read_text().strip()}
    store = open_store(None, folder, segment_entries_max=2, dimension=384, fingerprint="")
    store.topic("talk").append([draft(bird, dimension=384) for bird in ("gull", "tern")])
    store.topic("talk").seal(store.topic("talk").unsealed()[0])
    store.topic("talk").append([draft("wren", dimension=384)])
    store.close()
    (folder / "memd.receipts").write_bytes(b'{"asked":"zanzibar"}\n')
    refused = memd("stats", *where, **with_old).output
    assert "run `memd encrypt` first" in refused and "or take the key out of the settings" in refused
    assert memd("backup", tmp_path / "plain", *where).exit_code == 0
    checked = memd("verify", tmp_path / "plain", **with_old)
    assert checked.exit_code == 0 and "backup is in plain text" in checked.output and "all whole" in checked.output
    stdin = CliRunner().invoke(main, ["encrypt", "--key-stdin", "--data-dir", str(folder)], input=old.read_text())
    assert stdin.exit_code == 0 and "is encrypted with the key" in stdin.output, stdin.output
    assert "\n  talk/segments/" in stdin.output and ".memd-encrypting" not in stdin.output  # the backup shares it
    assert not any(b"zanzibar" in data for _, data in bytes_below(folder))
    assert "is encrypted already" in memd("encrypt", *where, **with_old).output
    told = memd("rekey", *where, "--new-key-file", new, **with_old)
    assert told.exit_code == 0 and "name it in the settings" in told.output, told.output
    assert memd("verify", *where, **with_old).exit_code == 1
    assert memd("verify", *where, **with_new).exit_code == 0
    back = tmp_path / "backup"
    assert memd("backup", back, *where, **with_new).exit_code == 0
    assert memd("verify", back, **with_new).exit_code == 0
    assert memd("verify", back).exit_code == 1
    (back / "memd.key").rename(tmp_path / "lost")
    lost = memd("verify", back, **with_new)
    assert lost.exit_code == 1 and "is missing" in lost.output and "plain text" not in lost.output
    (tmp_path / "lost").rename(back / "memd.key")
    again = tmp_path / "restored"
    assert memd("restore", back, again).exit_code == 0
    assert [memd("verify", again, **with_new).exit_code, memd("verify", again).exit_code] == [0, 1]
    assert memd("decrypt", *where, **with_new).exit_code == 0
    assert memd("verify", *where).exit_code == 0
    assert (folder / "memd.receipts").read_bytes() == b'{"asked":"zanzibar"}\n'
    assert (
        "from before the data directory was encrypted, decrypted or given new keys"
        in memd("backup", back, *where).output
    )
    assert sorted(path.name for path in (folder / "talk").iterdir()) == ["active.bin", "segments"]
