"""`memd erase` with the real daemon: no byte of what was erased is in any file, and everything else is as it was.

Rule: the witness is the bytes of every file under the data directory.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from click.testing import CliRunner
from conftest import Serving
from daemon_process import DaemonProcess, ask, user, wait_until
from effort import scaled
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

from memd.cli.main import main
from memd.entries import Entry
from memd.store.disk import LocalDisk
from memd.store.erasure import Erasure, ErasureLedger
from memd.store.tools.export import exported_entries, exported_topics

SETTINGS: dict[str, Any] = {"segment": {"max_entries": 4}, "buffer": {"store_after_seconds": 0}}
SECRET = "The vermilion walrus keeps the foghorn's spare key under the third granite step."
WORDS = ("vermilion", "walrus", "granite")
OTHERS = [
    "Please note that the lighthouse is painted white every spring by Theodora.",
    "The ferry to the quarry island leaves at seven in the morning on weekdays.",
    "Our barometer was repaired in the harbour workshop by old Bartholomew.",
    "The granary roof needs two hundred new slates before the winter storms.",
    "On Sundays the smithy is closed and the windmill does not turn at all.",
]


def tell(daemon: DaemonProcess, texts: list[str]) -> list[dict[str, str]]:
    """Say some things in one chat; all of its messages, the answers included."""
    history: list[dict[str, str]] = []
    for text in texts:
        history.append(user(text))
        history.append({"role": "assistant", "content": daemon.chat(history).reply})
    return history


def found_in(folder: Path) -> list[str]:
    """The files that have one of the words."""
    return files_with(folder, *map(str.encode, WORDS))


def files_with(folder: Path, *words: bytes) -> list[str]:
    """The files that have one of the words; one that is gone by the time it is read has none."""
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                if any(word.lower() in (Path(parent) / name).read_bytes().lower() for word in words):
                    found.append(name)
    return found


def entry_of(daemon: DaemonProcess, chunk_id: str) -> Entry:
    """A live chunk, out of the log."""
    disk = LocalDisk()
    entries = exported_entries(daemon.data_dir, disk, exported_topics(daemon.data_dir, disk, None), live_only=True)
    return next(entry for _, entry, _ in entries if entry.public_id == chunk_id)


def id_of(daemon: DaemonProcess, words: str) -> str:
    return str(next(one["id"] for one in daemon.export() if words in one["content"] and one["live"]))


@pytest.fixture
def daemon(serving: Serving) -> DaemonProcess:
    return serving(SETTINGS)


def test_a_chunk_of_a_live_chat_is_erased_everywhere(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    history = tell(daemon, [OTHERS[0], SECRET, *OTHERS[1:]])
    daemon.wait_stored(*OTHERS, SECRET)
    daemon.chat([user("Where is the spare key of the foghorn?")])
    assert "granite step" in upstream.prompts[-1], "it is recalled, so receipts and a block have it"
    chunk = id_of(daemon, "vermilion")
    vector = entry_of(daemon, chunk).vector
    wait_until(lambda: {"memd.receipts", "hot.log"} <= set(found_in(daemon.data_dir)), lambda: repr(daemon))

    planned = daemon.run("erase", "--chunk", chunk, "--dry-run")
    assert planned.returncode == 0 and "topic default: 1 chunk (1 entry), said from" in planned.stdout
    assert (
        "The vermilion walrus" in planned.stdout
        and "the prompts of 1 live conversation of topic default" in planned.stdout
    )
    assert "stored again in a new chat without --forbid" in planned.stdout
    forbidden = daemon.run("erase", "--chunk", chunk, "--forbid", "--dry-run").stdout
    assert "but it is not stored again" in forbidden and "--forbid" not in forbidden
    assert found_in(daemon.data_dir), "a dry run erases nothing"
    refused = daemon.run("erase", "--chunk", chunk)
    assert refused.returncode == 1 and found_in(daemon.data_dir), "nobody has confirmed it"
    done = daemon.run("erase", "--chunk", chunk, "--yes")
    assert done.returncode == 0 and "Erased in topic default: 1 chunk (1 entry), in" in done.stdout
    assert found_in(daemon.data_dir) == []
    assert not [path for path in daemon.data_dir.rglob("*") if path.is_file() and vector[:32] in path.read_bytes()]

    shown = daemon.run("show", chunk)
    assert shown.returncode == 0 and "was erased on" in shown.stdout and "its text is gone" in shown.stdout
    assert " by owner" in shown.stdout, "as in the audit: a command asks the daemon as its owner"
    assert "erased" in daemon.run("log").stdout and "vermilion" not in daemon.run("log").stdout
    assert "vermilion" not in daemon.run("search", "Where is the spare key of the foghorn?").stdout
    assert daemon.run("correct", chunk, "--helpful").returncode == 1
    daemon.chat([user("Where is the spare key of the foghorn, again?")])
    assert "granite" not in upstream.prompts[-1]
    assert "Theodora" in daemon.run("search", "Who paints the lighthouse?").stdout

    daemon.chat([*history, user("And now?")])
    assert "vermilion" in upstream.prompts[-1], "the prompt is the client's own"
    daemon.kill()
    daemon.start()
    daemon.chat([*history, user("And now, after a restart?")])
    daemon.wait_stored("after a restart")
    daemon.terminate()
    assert found_in(daemon.data_dir) == [], "a live chat is known again"
    verified = daemon.run("verify")
    assert verified.returncode == 0 and "1 chunk of topic default erased on" in verified.stdout


def test_a_chunk_that_waits_to_be_stored_is_erased_and_not_stored_later(serving: Serving) -> None:
    daemon = serving({"buffer": {"store_after_seconds": 3600}})
    history = tell(daemon, [OTHERS[0], SECRET])
    question = f"{daemon.own_url}/memd/search?topic=default&q=vermilion%20walrus"

    def found() -> list[str]:
        return [one["id"] for one in ask(question).json["chunks"] if "vermilion" in one["content"]]

    [chunk] = found()
    assert daemon.run("erase", "--chunk", chunk, "--yes").returncode == 0
    assert found() == []
    daemon.chat([*history, user(OTHERS[1])])
    assert found() == []
    daemon.terminate()
    daemon.configure(SETTINGS)
    daemon.start()
    daemon.wait_stored(OTHERS[1])
    daemon.terminate()
    assert found_in(daemon.data_dir) == []


def test_a_turn_of_another_topic_that_showed_it_loses_it(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    """A retry and a step of a tool loop show the block of their turn, and have no candidates of their own."""
    tell(daemon, [SECRET])
    daemon.wait_stored(SECRET)
    asked = [user("Where is the spare key of the foghorn?")]
    for _ in range(2):
        daemon.chat(asked, memory_in={"topic_id": "elsewhere", "related_topic_ids": ["default"]})
        assert "granite step" in upstream.prompts[-1]
    wait_until(lambda: len(turns_of(daemon, "elsewhere")) == 2, lambda: repr(daemon))
    assert daemon.run("erase", "--chunk", id_of(daemon, "vermilion"), "--yes").returncode == 0
    daemon.terminate()
    assert "memd.receipts" not in found_in(daemon.data_dir)


def test_a_turn_answered_later_does_not_bring_it_back(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    tell(daemon, [SECRET])
    daemon.wait_stored(SECRET)
    gate = threading.Event()
    upstream.answer = lambda request: chat_answer(request)._replace(gate=gate)
    asked = threading.Thread(target=daemon.chat, args=([user("Where is the spare key of the foghorn?")],))
    asked.start()
    wait_until(lambda: "granite step" in upstream.prompts[-1], lambda: repr(daemon))
    try:
        assert daemon.run("erase", "--chunk", id_of(daemon, "vermilion"), "--yes").returncode == 0
    finally:
        gate.set()
        asked.join()
    wait_until(lambda: len(turns_of(daemon, "default")) == 2, lambda: repr(daemon))
    assert turns_of(daemon, "default")[0]["note"] == "Its texts were erased."
    assert found_in(daemon.data_dir) == []


def test_a_block_that_shows_it_with_an_older_answer_goes_too(serving: Serving, upstream: RecordingUpstream) -> None:
    """What was shown is a chunk that was never stored: the question stands in the log with the new answer."""
    daemon = serving({"buffer": {"store_after_seconds": 3600}})
    daemon.chat([user(SECRET)])
    asked = [user("Where is the spare key of the foghorn?")]
    reply = daemon.chat(asked).reply
    assert "granite step" in upstream.prompts[-1]
    upstream.answer = lambda request: chat_answer(request, "I shall remember that.")
    daemon.chat([user(SECRET)])
    question = f"{daemon.own_url}/memd/search?topic=default&q=vermilion%20walrus"
    found = [one["id"] for one in ask(question).json["chunks"] if "vermilion" in one["content"]]
    assert daemon.run("erase", *(f"--chunk={one}" for one in found), "--yes").returncode == 0
    daemon.chat([*asked, {"role": "assistant", "content": reply}, user("And the ladder?")])
    assert "granite step" not in upstream.prompts[-1]
    daemon.terminate()
    assert found_in(daemon.data_dir) == []


def turns_of(daemon: DaemonProcess, topic: str) -> list[dict[str, Any]]:
    return list(ask(f"{daemon.own_url}/memd/turns?topic={topic}").json["turns"])


@pytest.mark.parametrize("forbid", [True, False])
def test_what_a_client_sends_again_is_stored_again_unless_it_is_forbidden(serving: Serving, forbid: bool) -> None:
    daemon = serving({**SETTINGS, "conversation": {"max_open": 1}})
    history = tell(daemon, [SECRET, *OTHERS[:2]])
    daemon.wait_stored(*OTHERS[:2], SECRET)
    chunk = id_of(daemon, "vermilion")
    uuid = next(one["uuid"] for one in daemon.export() if one["id"] == chunk)
    flags = ["--forbid"] if forbid else []
    assert daemon.run("erase", "--chunk", chunk, "--yes", *flags).returncode == 0
    daemon.chat([user("Something else, so that the former chat is closed.")])
    daemon.wait_stored("the former chat is closed")
    buffer = f"{daemon.base_url}/memd/buffer?topic=default"
    wait_until(lambda: len(ask(buffer).json["conversations"]) == 1, lambda: repr(daemon))
    elsewhere = [user("Another beginning of it all."), {"role": "assistant", "content": "Yes."}, *history]
    daemon.chat([*elsewhere, user("Tell me about the slates.")])
    daemon.wait_stored("about the slates")
    if not forbid:
        daemon.wait_stored(SECRET)
        again = id_of(daemon, "vermilion")
        assert next(one["uuid"] for one in daemon.export() if one["id"] == again) != uuid, "ids do not come back"
        return
    daemon.restart()
    daemon.chat([user(SECRET)])
    daemon.chat([*history, user("Is it stored?")])
    daemon.wait_stored("Is it stored")
    daemon.terminate()
    assert not any("vermilion" in one["content"] for one in daemon.export())
    assert found_in(daemon.data_dir) == [], "the journal and the receipts have no text of it either"


def test_what_was_imported_from_a_source_is_found_shown_and_erased_by_it(daemon: DaemonProcess, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    (folder / "boats").mkdir(parents=True)
    for name, text in (("lamps.md", OTHERS[0]), ("boats/foghorn.md", SECRET)):
        (folder / name).write_text(text)
    assert daemon.run("add", str(folder)).returncode == 0
    export = tmp_path / "export.jsonl"
    message = {"uuid": "m", "sender": "human", "text": OTHERS[1], "created_at": "2026-01-01T00:00:00Z"}
    export.write_text(json.dumps([{"uuid": "c-1", "name": "A day", "chat_messages": [message]}]))
    assert daemon.run("import", str(export)).returncode == 0
    [imported] = [one for one in daemon.export() if OTHERS[1] in one["content"]]
    program, _, _ = imported["source"].partition(":")

    for name, text, others in ((program, OTHERS[1], SECRET), ("notes/boats/", SECRET, OTHERS[0])):
        found = daemon.run("search", text, "--source", name)
        assert text in found.stdout and others not in found.stdout, found
    assert imported["source"] in daemon.run("search", OTHERS[1]).stdout
    assert imported["source"] in daemon.run("show", imported["id"]).stdout

    assert daemon.run("erase", "--source", "note", "--dry-run").stdout.startswith("There is nothing to erase")
    planned = daemon.run("erase", "--source", program, "--dry-run")
    assert f"ids: {imported['id']}" in planned.stdout and SECRET not in planned.stdout, planned
    for name in (program, "notes/boats"):
        assert daemon.run("erase", "--source", name, "--yes").returncode == 0
    live = [one["content"] for one in daemon.export() if one["live"]]
    assert [any(text in one for one in live) for text in (OTHERS[0], OTHERS[1], SECRET)] == [True, False, False]


def test_after_a_restore_the_backups_that_still_have_it_are_named(daemon: DaemonProcess, tmp_path: Path) -> None:
    daemon.chat([user(SECRET)])
    daemon.wait_stored(SECRET)
    first, second, moved = (tmp_path / name for name in ("first", "second", "moved"))
    assert [daemon.run("backup", str(one)).returncode for one in (first, second)] == [0, 0]
    assert daemon.terminate() == 0
    first.rename(moved)
    shutil.rmtree(daemon.data_dir)
    done = CliRunner().invoke(main, ["restore", str(moved), str(daemon.data_dir)])
    assert done.exit_code == 0, done.output
    told = daemon.run("erase", "default", "--dry-run").stdout
    assert f"the backup in {moved}, until the next" in told and f"the backup in {second}, until the next" in told
    assert str(first) not in told, "it is not there any more"


def test_a_topic_goes_whole_and_a_restored_backup_is_noticed(daemon: DaemonProcess, tmp_path: Path) -> None:
    team = {"X-Memory-Topic": "team"}
    for text in (SECRET, *OTHERS):
        daemon.chat([user(text)], headers=team)
    daemon.chat([user("Who repaired the barometer?")])
    daemon.wait_stored(SECRET, *OTHERS)
    backup = tmp_path / "backup"
    assert daemon.run("backup", str(backup)).returncode == 0
    done = daemon.run("erase", "team", "--yes")
    assert done.returncode == 0, done.stderr
    assert "topic team, with its folder:" in done.stdout and f"the backup in {backup}, until the next" in done.stdout
    assert "encryption" not in done.stdout, "there never was any"
    assert done.stdout.count("overwritten") == 2 and ", but for " in done.stdout, "one sentence, and a true one"
    assert "could not be overwritten" in done.stdout
    assert found_in(daemon.data_dir) == [] and found_in(backup)
    assert not (daemon.data_dir / "team").exists()
    assert ask(f"{daemon.own_url}/memd/erase", {"topic_id": "team"}).status == 404
    daemon.chat([user(OTHERS[0])], headers=team)
    daemon.wait_stored(OTHERS[0])
    assert daemon.terminate() == 0
    assert "team" in daemon.run("verify").stdout and daemon.run("verify").returncode == 0

    shutil.rmtree(daemon.data_dir / "team")
    shutil.copytree(backup / "team", daemon.data_dir / "team")
    told = daemon.run("verify")
    assert told.returncode == 1 and "is there again, as a backup had it" in told.stdout
    daemon.start()
    daemon.chat([user("Hello, is this known?")], headers=team)
    wait_until(lambda: "is there again, as a backup had it" in daemon.log.read_text(), lambda: repr(daemon))
    assert "Erased in topic team: 6 chunks" in daemon.run("erase", "--resume").stdout
    assert found_in(daemon.data_dir) == []
    daemon.terminate()
    assert daemon.run("verify").returncode == 0


@pytest.mark.parametrize("rounds", [0, 3])
def test_what_was_said_anew_stays_in_the_backup_where_the_old_folder_is_restored_over_it(
    daemon: DaemonProcess, tmp_path: Path, rounds: int
) -> None:
    team = {"X-Memory-Topic": "team"}
    old, target = tmp_path / "old", tmp_path / "backup"
    daemon.chat([user(SECRET)], headers=team)
    daemon.wait_stored(SECRET)
    for one in (old, target):
        assert daemon.run("backup", str(one)).returncode == 0
    assert daemon.run("erase", "team", "--yes").returncode == 0
    daemon.chat([user(OTHERS[0])], headers=team)
    daemon.wait_stored(OTHERS[0])
    assert daemon.run("backup", str(target)).returncode == 0 and found_in(target) == []
    daemon.terminate()
    shutil.rmtree(daemon.data_dir / "team")
    shutil.copytree(old / "team", daemon.data_dir / "team")
    for _ in range(rounds):
        assert daemon.run("backup", str(target)).returncode == 0
        assert files_with(target, b"Theodora"), "memd has it nowhere else"
    assert daemon.run("erase", "--resume").returncode == 0
    assert daemon.run("backup", str(target)).returncode == 0 and found_in(target) == []
    assert files_with(target, b"Theodora")


def test_what_was_erased_is_not_erased_again_with_what_was_said_since(daemon: DaemonProcess, tmp_path: Path) -> None:
    team = {"X-Memory-Topic": "team"}
    daemon.chat([user(SECRET)], headers=team)
    daemon.wait_stored(SECRET)
    assert daemon.run("backup", str(tmp_path / "backup")).returncode == 0
    assert daemon.run("erase", "team", "--yes").returncode == 0
    daemon.terminate()
    shutil.copytree(tmp_path / "backup" / "team", daemon.data_dir / "team")
    daemon.start()
    daemon.chat([user(OTHERS[0])], headers=team)
    daemon.wait_stored(OTHERS[0])
    daemon.chat([user(OTHERS[1])], headers=team)  # not stored yet
    assert "Erased in topic team: 1 chunk" in daemon.run("erase", "--resume").stdout
    daemon.wait_stored(OTHERS[1])
    assert found_in(daemon.data_dir) == [] and files_with(daemon.data_dir, b"Theodora")
    assert "Nothing was left to erase" in daemon.run("erase", "--resume").stdout
    assert daemon.run("backup", str(tmp_path / "backup")).returncode == 0
    assert found_in(tmp_path / "backup") == [] and files_with(tmp_path / "backup", b"Theodora")


def test_a_topic_that_is_given_the_name_of_an_erased_one_is_another_topic(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    for topic, text in ("office", OTHERS[0]), ("team", SECRET):
        daemon.chat([user(text)], headers={"X-Memory-Topic": topic})
    daemon.wait_stored(SECRET, OTHERS[0])
    assert daemon.run("backup", str(tmp_path / "backup")).returncode == 0
    assert daemon.run("erase", "team", "--yes").returncode == 0
    daemon.terminate()
    renamed = (daemon.data_dir / "office").rename(daemon.data_dir / "team")
    (renamed / "former_names").write_text("office\n")
    assert daemon.run("verify").returncode == 0
    assert "Nothing was left to erase" in daemon.run("erase", "--resume").stdout
    assert daemon.run("backup", str(tmp_path / "backup")).returncode == 0
    daemon.start()
    assert [one["content"] for one in daemon.export() if one["topic_id"] == "team"] != []
    assert daemon.run("erase", "team", "--yes").returncode == 0
    daemon.terminate()
    shutil.copytree(tmp_path / "backup" / "team", daemon.data_dir / "team")
    assert "is there again" in daemon.run("verify").stdout, "under the name that it had when it was erased"
    assert "Erased in topic team: 1 chunk" in daemon.run("erase", "--resume").stdout


def test_a_backup_in_a_folder_loses_an_erased_topic_of_which_nothing_was_stored_yet(
    serving: Serving, tmp_path: Path
) -> None:
    daemon, target = serving({"buffer": {"store_after_seconds": 3600}}), tmp_path / "backup"
    daemon.chat([user(SECRET)], headers={"X-Memory-Topic": "team"})
    assert daemon.run("backup", str(target)).returncode == 0
    assert set(found_in(target)) == {"hot.log"}
    assert daemon.run("erase", "team", "--yes").returncode == 0
    assert daemon.run("backup", str(target)).returncode == 0
    assert found_in(target) == []


def test_a_topic_whose_folder_was_removed_by_hand_is_erased_in_the_backup_as_the_refusal_says(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    backup, own = tmp_path / "backup", daemon.data_dir / "team"
    daemon.chat([user(SECRET)], headers={"X-Memory-Topic": "team"})
    daemon.chat([user(OTHERS[0])])
    daemon.wait_stored(SECRET, OTHERS[0])
    assert daemon.run("backup", str(backup)).returncode == 0
    daemon.terminate()
    shutil.rmtree(own)
    daemon.start()
    told = daemon.run("erase", "team", "--yes")
    assert (
        told.returncode == 2 and f"A backup may have it ({backup}): to erase it there, stop memd, put " in told.stderr
    )
    assert "backup" not in daemon.run("erase", "tame", "--yes").stderr, "which no backup has"
    assert found_in(backup), "nothing is erased by its name alone"
    daemon.terminate()
    shutil.copytree(backup / "team", own)
    daemon.start()
    assert daemon.run("erase", "team", "--yes").returncode == 0
    assert daemon.run("backup", str(backup)).returncode == 0
    assert found_in(backup) == [] and files_with(backup, b"Theodora")
    assert "A backup" not in daemon.run("erase", "team", "--yes").stderr, "it was erased there"


def test_text_that_one_file_of_a_backup_brings_back_is_erased_again(daemon: DaemonProcess, tmp_path: Path) -> None:
    tell(daemon, [SECRET, *OTHERS])
    daemon.wait_stored(*OTHERS, SECRET)
    assert daemon.run("backup", str(tmp_path / "backup")).returncode == 0
    assert daemon.run("erase", "--chunk", id_of(daemon, "vermilion"), "--yes").returncode == 0
    assert found_in(daemon.data_dir) == []
    daemon.terminate()
    [segment] = [name for name in found_in(tmp_path / "backup") if name.startswith("seg_") and name.endswith(".bin")]
    place = Path("default", "segments", segment)
    shutil.copy(tmp_path / "backup" / place, daemon.data_dir / place)
    assert "`memd erase --resume` erases it once more" in daemon.run("verify").stdout
    planned = daemon.run("erase", "--resume", "--dry-run").stdout
    assert "topic default: 1 chunk" in planned and "the backup in" in planned, planned
    assert json.loads(daemon.run("erase", "--resume", "--dry-run", "--json").stdout)["plans"][0]["chunks"] == 1
    assert found_in(daemon.data_dir), "a dry run erases nothing"
    assert "Erased in topic default: 1 chunk" in daemon.run("erase", "--resume").stdout
    assert daemon.run("erase", "--resume", "--dry-run").stdout.strip() == "There is nothing to erase."
    older = daemon.run("erase", "default", "--before", "2020-01-01", "--dry-run").stdout
    assert older.startswith("There is nothing to erase.") and "does not reach" not in older, older
    assert found_in(daemon.data_dir) == [] and daemon.run("verify").returncode == 0


def test_an_erasure_that_was_interrupted_is_finished_by_the_next_start(daemon: DaemonProcess) -> None:
    tell(daemon, [SECRET, *OTHERS])
    daemon.wait_stored(*OTHERS, SECRET)
    entry = entry_of(daemon, id_of(daemon, "vermilion"))
    daemon.kill()
    of: dict[str, Any] = {"by": "ann", "chunks": 1, "uuids": entry.uuid, "digests": b"".join(entry.digests)}
    at = 1_900_000_000_000_000
    erasure = Erasure(id=4_000_000_000_000_000, kind="chunks", topic_id="default", at=at, **of)
    ErasureLedger(LocalDisk(), daemon.data_dir).write(erasure)  # first of all, and then the power failed
    told = daemon.run("verify")
    assert told.returncode == 1 and "is being erased on" in told.stdout
    daemon.start()
    [intent] = (daemon.data_dir / "memd.erasures").glob("*.json")
    wait_until(lambda: "done_at" in json.loads(intent.read_text()), lambda: repr(daemon))
    daemon.terminate()
    assert found_in(daemon.data_dir) == [] and daemon.run("verify").returncode == 0


def test_a_topic_that_cannot_be_read_holds_up_only_its_own_erasure(daemon: DaemonProcess, tmp_path: Path) -> None:
    tell(daemon, [SECRET, *OTHERS])
    daemon.chat([user(OTHERS[0])], headers={"X-Memory-Topic": "bad"})
    daemon.wait_stored(*OTHERS, SECRET)
    wait_until(lambda: len([one for one in daemon.export() if one["topic_id"] == "bad"]) == 1, lambda: repr(daemon))
    entry = entry_of(daemon, id_of(daemon, "vermilion"))
    daemon.kill()
    of: dict[str, Any] = {"by": "ann", "chunks": 1, "uuids": entry.uuid, "digests": b"".join(entry.digests)}
    ledger, at = ErasureLedger(LocalDisk(), daemon.data_dir), 1_900_000_000_000_000
    for number, topic_id in enumerate(("bad", "default")):
        ledger.write(Erasure(id=4_000_000_000_000_000 + number, kind="chunks", topic_id=topic_id, at=at, **of))
    bad = daemon.data_dir / "bad" / "active.bin"
    whole = bad.read_bytes()
    bad.write_bytes((daemon.data_dir / "default" / "segments" / "seg_0001.bin").read_bytes())  # another topic's
    daemon.start()
    own, other = (daemon.data_dir / "memd.erasures" / f"{4_000_000_000_000_000 + number}.json" for number in (0, 1))
    wait_until(lambda: "done_at" in json.loads(other.read_text()), lambda: repr(daemon))
    assert "done_at" not in json.loads(own.read_text())
    again = daemon.run("erase", "--resume")
    assert again.returncode == 1 and "the erasure in topic bad is not finished" in again.stderr
    daemon.terminate()
    bad.write_bytes(whole)
    assert daemon.run("erase", "--resume").returncode == 0 and "done_at" in json.loads(own.read_text())
    assert found_in(daemon.data_dir) == [] and daemon.run("verify").returncode == 0


@pytest.mark.parametrize(("is_running", "whole_topic"), [(True, False), (False, True)])
def test_what_was_shown_of_it_in_another_topic_is_erased_too(
    daemon: DaemonProcess, upstream: RecordingUpstream, is_running: bool, whole_topic: bool
) -> None:
    assert ask(f"{daemon.own_url}/memd/notes", {"topic_id": "walls", "notes": [{"content": SECRET}]}).status == 200
    reads = {"memory_in": json.dumps({"topic_id": "yard", "related_topic_ids": ["walls"]})}
    asked = [user("Where is the spare key of the foghorn?")]
    answer = daemon.chat(asked, metadata=reads)
    assert "granite step" in upstream.prompts[-1], "it is shown in the other topic"
    wait_until(lambda: "hot.log" in found_in(daemon.data_dir / "yard"), lambda: repr(daemon))
    chunk = id_of(daemon, "vermilion")
    if not is_running:
        daemon.terminate()
    done = daemon.run("erase", *(["walls"] if whole_topic else ["--chunk", chunk]), "--yes")
    assert done.returncode == 0, done.stderr
    assert found_in(daemon.data_dir) == []
    if not is_running:
        daemon.start()
    going_on = [*asked, {"role": "assistant", "content": answer.reply}, user("And where is the ferry?")]
    assert daemon.chat(going_on, metadata=reads).status == 200
    assert "granite" not in upstream.prompts[-1]


def test_other_chunks_that_repeat_the_words_are_named(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    tell(daemon, [SECRET])
    upstream.answer = lambda request: chat_answer(request, "Under the third granite step.")
    tell(daemon, ["Where was it again?"])
    upstream.answer = chat_answer
    tell(daemon, OTHERS)
    daemon.wait_stored(SECRET, "Under the third", *OTHERS)
    answer = next(one for one in daemon.export() if "Under the third" in one["content"])["id"]
    daemon.run("remember", "--title", "Spare key under the third step", OTHERS[2])
    planned = daemon.run("erase", "--chunk", id_of(daemon, "vermilion"), "--dry-run").stdout
    assert f"chunk {answer} in topic default stays: it has 'under the third granite step' too" in planned
    assert "in topic default stays: it has 'spare key under the third' too" in planned, "a title"


def call_and_result(call_id: str = "c", lines: int = 40) -> list[dict[str, Any]]:
    call = {"name": "write", "arguments": json.dumps({"text": SECRET})}
    made = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": call}]}
    told = "\n".join(f"Line {number} of the ferry's timetable is as it was before." for number in range(lines))
    return [user("Write it."), made, {"role": "tool", "tool_call_id": call_id, "content": told}]


def test_an_erased_call_goes_from_the_chunks_of_its_result_and_these_stay(
    daemon: DaemonProcess, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    daemon.chat(call_and_result())
    daemon.wait_stored("Line 39")
    daemon.chat([user("What does line 30 of the ferry's timetable say?")])
    assert "walrus" in upstream.prompts[-1], "the chunks of a result are shown behind their call"
    first, *others = [one["id"] for one in daemon.export() if "Line" in one["content"]]
    assert len(others) > 3
    assert daemon.run("correct", others[-1], "--helpful").returncode == 0, "an older entry has the call too"
    backup = tmp_path / "backup"
    assert daemon.run("backup", str(backup)).returncode == 0 and found_in(backup)
    planned = daemon.run("erase", "--chunk", first, "--dry-run").stdout
    assert f"  the call goes from {len(others)} other chunks of its result, too" in planned
    assert "walrus" not in planned.partition("What this does not reach:")[2]
    assert daemon.run("erase", "--chunk", first, "--yes").returncode == 0
    assert found_in(daemon.data_dir) == [] and "walrus" not in json.dumps(daemon.export())
    assert [one["id"] for one in daemon.export() if "Line" in one["content"] and one["live"]] == others
    assert "Line 30" in daemon.run("search", "line 30 of the timetable").stdout
    assert daemon.run("search", "vermilion walrus").stdout.find("walrus") < 0
    daemon.chat([user("What does line 30 of the ferry's timetable say, again?")])
    assert "Line 30" in upstream.prompts[-1] and "walrus" not in upstream.prompts[-1]
    assert daemon.run("backup", str(backup)).returncode == 0 and found_in(backup) == []
    daemon.restart()
    assert daemon.run("verify").returncode == 0 and found_in(daemon.data_dir) == []
    assert "Line 30" in daemon.run("search", "line 30 of the timetable").stdout


def test_the_chunks_of_a_result_that_wait_lose_an_erased_call_too(serving: Serving) -> None:
    daemon = serving({"buffer": {"store_after_seconds": 3600}})
    said = call_and_result()
    daemon.chat(said)
    chunks = ask(f"{daemon.own_url}/memd/search?topic=default&q=walrus").json["chunks"]
    first = next(one["id"] for one in chunks if "[call write" in one["content"] and "Line 1 of" in one["content"])
    assert daemon.run("erase", "--chunk", first, "--yes").returncode == 0
    assert found_in(daemon.data_dir) == []
    daemon.chat([*said, user("And what does line 30 of the timetable say?")])
    daemon.terminate()
    daemon.configure(SETTINGS)
    daemon.start()
    daemon.wait_stored("Line 39")
    daemon.terminate()
    assert found_in(daemon.data_dir) == []


def test_a_copy_of_a_result_in_another_topic_loses_an_erased_call_too(
    daemon: DaemonProcess, upstream: RecordingUpstream
) -> None:
    daemon.chat(call_and_result())
    daemon.wait_stored("Line 39")
    first, *others = [one["id"] for one in daemon.export() if "Line" in one["content"]]
    reads = {"topic_id": "work", "related_topic_ids": ["default"]}
    asked = [user("What does line 30 of the ferry's timetable say?")]
    daemon.chat(asked, metadata={"memory_in": json.dumps(reads)})
    shown = next(one for one in others if f"[mem:{one}]" in upstream.prompts[-1])
    praise = {"chunk_ids": [shown], "action": "Helpful", "reason": "it is right"}
    daemon.chat([user("Thank you.")], metadata={"memory_in": json.dumps(reads | {"corrections": [praise]})})
    assert "walrus" in json.dumps([one for one in daemon.export() if one["topic_id"] == "work"])
    assert "topic work: 0 chunks" in daemon.run("erase", "--chunk", first, "--dry-run").stdout
    assert daemon.run("erase", "--chunk", first, "--yes").returncode == 0
    assert found_in(daemon.data_dir) == [] and "walrus" not in json.dumps(daemon.export())


def test_a_forbidden_call_is_not_named_by_a_result_that_comes_later(daemon: DaemonProcess) -> None:
    daemon.chat(call_and_result())
    daemon.wait_stored("Line 39")
    first, *others = [one["uuid"].replace("-", "")[:8] for one in daemon.export() if "Line" in one["content"]]
    assert daemon.run("erase", *(part for one in others for part in ("--chunk", one)), "--yes").returncode == 0
    assert daemon.run("erase", "--chunk", first, "--forbid", "--yes").returncode == 0
    daemon.chat(call_and_result("another", lines=60))
    daemon.wait_stored("Line 59")
    speakers = [one["speakers"] for one in daemon.export() if one["live"]]
    assert len(speakers) > 3 and "walrus" not in json.dumps(speakers)


# Chats go on, answers are made anew, texts wait, the daemon is killed, and meanwhile chunks are erased


FACT = re.compile(rb"QX\d{5}Z")
NAMES = ["stove", "boat", "barometer", "staircase", "flag", "goat", "radio", "well", "window", "path", "ladder"]
STEPS, CHATS_MAX = 120, 6
WINDOW = 1_500
"""So that turns leave the prompt."""


class Talker:
    """Chats of one topic, and what was erased in it."""

    def __init__(self, daemon: DaemonProcess, chance: random.Random) -> None:
        self.daemon = daemon
        self.chance = chance
        self.chats: list[list[dict[str, str]]] = []
        self.alive: list[str] = []
        self.erased: set[str] = set()
        self._facts = 0

    def step(self) -> None:
        """One thing that people and programs do."""
        ways = [self._begin, self._go_on, self._go_on, self._edit, self._fork, self._shorten, self._rewrite]
        ways += [self._answer_anew, self._answer_anew, self._note, *[self._erase] * 4]
        self.chance.choice(ways if self.chats else [self._begin])()

    def back(self, folder: Path) -> set[str]:
        """What was erased and is in a file."""
        found = set[str]()
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):  # an index that was merged meanwhile
                    found |= {one.decode() for one in FACT.findall((Path(parent) / name).read_bytes())}
        return found & self.erased

    def _text(self) -> str:
        self._facts += 1
        self.alive.append(f"QX{self._facts:05}Z")
        said = "The {} {} because of the {}, so the {} waits until the {} is done."
        before, behind = (said.format(*self.chance.sample(NAMES, 5)) for _ in range(2))
        key = f"The key {self.alive[-1]} belongs to the {self.chance.choice(NAMES)}."
        return key if self.chance.random() < 0.3 else f"{before} {key} {behind}"

    def _say(self, history: list[dict[str, str]]) -> list[dict[str, str]]:
        return [*history, {"role": "assistant", "content": self.daemon.chat(history).reply}]

    def _begin(self) -> None:
        self.chats = [*self.chats, self._say([user(self._text())])][-CHATS_MAX:]

    def _in_a_chat(self, begin: int, end: int) -> None:
        at = self.chance.randrange(len(self.chats))
        self.chats[at] = self._say([*self.chats[at][begin:end], user(self._text())])

    def _go_on(self) -> None:
        self._in_a_chat(0, 1 << 30)

    def _edit(self) -> None:
        self._in_a_chat(0, -2)

    def _fork(self) -> None:
        history = self.chance.choice(self.chats)
        history = history[: 2 * self.chance.randrange(len(history) // 2)]
        self.chats = [*self.chats, self._say([*history, user(self._text())])][-CHATS_MAX:]

    def _shorten(self) -> None:
        self._in_a_chat(2, 1 << 30)

    def _rewrite(self) -> None:
        at = self.chance.randrange(len(self.chats))
        history = [*self.chats[at]]
        history[1] = {"role": "assistant", "content": f"In short: {self.chance.choice(NAMES)}."}
        self.chats[at] = self._say([*history, user(self._text())])

    def _answer_anew(self) -> None:
        at = self.chance.randrange(len(self.chats))
        self.chats[at] = self._say(self.chats[at][:-1])

    def _note(self) -> None:
        note = {"topic_id": "default", "notes": [{"content": self._text()}]}
        assert ask(f"{self.daemon.own_url}/memd/notes", note).status == 200

    def _erase(self) -> None:
        fact = self.chance.choice(self.alive)
        self.alive.remove(fact)
        asked = urlencode({"topic": "default", "q": f"What about the key {fact}?"})
        listed = urlencode({"topic": "default", "contains": fact})
        found = ask(f"{self.daemon.own_url}/memd/search?{asked}").json["chunks"]
        while ids := [one["id"] for one in found if fact in one["content"]]:
            body = {"topic_id": "default", "chunk_ids": ids, "forbid": self.chance.random() < 0.2}
            erased = ask(f"{self.daemon.own_url}/memd/erase", body)
            assert erased.status == 200, erased.body
            self.erased.add(fact)
            found = ask(f"{self.daemon.own_url}/memd/chunks?{listed}").json["chunks"]  # with another answer
        if fact in self.erased:
            assert self.back(self.daemon.data_dir) == set(), repr(self.daemon)


@pytest.mark.thorough
@pytest.mark.parametrize("store_after_seconds", [0.3, 3600])
def test_what_is_erased_while_other_things_wait_stays_away(
    serving: Serving, upstream: RecordingUpstream, store_after_seconds: float
) -> None:
    chance, answers = random.Random(7), iter(range(100_000))

    def answer(request: Request) -> Response:
        return chat_answer(request, f"Noted under number {next(answers)} in the ledger of this house, and no more.")

    upstream.answer = answer
    settings: dict[str, Any] = {
        "buffer": {"store_after_seconds": store_after_seconds},
        "segment": {"max_entries": 8},
        "upstream": {"window": WINDOW},
    }
    daemon = serving(settings)
    talker = Talker(daemon, chance)
    for number in range(max(40, scaled(STEPS))):
        talker.step()
        if number % 20 == 19:
            daemon.kill()
            assert talker.back(daemon.data_dir) == set()
            daemon.start()
    assert daemon.terminate() == 0
    assert len(talker.erased) > 3
    assert talker.back(daemon.data_dir) == set()
