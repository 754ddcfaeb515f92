"""Files of a topic that are missing, or that belong to another topic: the real daemon says it and does not guess."""

import errno
import os
import signal
import subprocess
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import without_rests
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, user, wait_until
from drafts import draft, open_journal, open_store
from recording_upstream import RecordingUpstream

from memd.errors import StoreLocked
from memd.receipts import ReceiptRing
from memd.store.claim import AppendFile
from memd.store.disk import LocalDisk, replace_file
from memd.store.erasure import ForbiddenText, encode_forbidden
from memd.store.log.format import HEADER_BYTES
from memd.store.store import Store

SMALL_SEGMENTS = {"segment": {"max_entries": 2}, "retrieval": {"min_score": 0.4}}
FACTS = (
    "The password for the boathouse door is heliotrope, and only the ferryman's wife knows it by heart.",
    "Grandmother's recipe for gooseberry jam takes eleven lemons, no more, and two days of waiting.",
    "The lighthouse keeper's cat is called Admiral Tegetthoff and is afraid of nothing but the kettle.",
)


def told(daemon: DaemonProcess, *facts: str, topic: str = "default") -> None:
    """Tell facts, each in a conversation of its own, and wait until all that is full is sealed."""
    for fact in facts:
        daemon.chat([user(fact)], memory_in={"topic_id": topic})
        daemon.wait_stored(fact)
    segments = daemon.data_dir / topic / "segments"
    wait_until(
        lambda: len([*segments.glob("seg_*.meta")]) == len([*segments.glob("seg_*.bin")]),
        lambda: f"unsealed {daemon!r}",
    )


def test_columns_that_cannot_be_written_are_named_with_the_remedy_and_tried_again(serving: Serving) -> None:
    daemon = serving(SMALL_SEGMENTS)
    columns = daemon.data_dir / "default" / "segments" / "seg_0001.meta"
    told(daemon, FACTS[0])
    (columns / "a folder").mkdir(parents=True)
    for fact in FACTS[1:]:
        daemon.chat([user(fact)])
        daemon.wait_stored(fact)
    wait_until(lambda: "work on an index failed" in daemon.log.read_text(), lambda: repr(daemon))
    assert f"{columns}: cannot be written" in daemon.log.read_text()
    health = ask(f"{daemon.own_url}/memd/health").json
    [trouble] = [one for one in health["troubles"] if str(columns) in one["what"]]
    assert "check that the disk is healthy" in trouble["remedy"] and health["memory"] == "ok"
    checked = daemon.run("check").stdout
    assert str(columns) in checked and "check that the disk is healthy" in " ".join(checked.split())
    assert "heliotrope" in daemon.run("search", "the password of the boathouse").stdout
    (columns / "a folder").rmdir()
    columns.rmdir()
    wait_until(columns.is_file, lambda: repr(daemon))
    wait_until(lambda: not ask(f"{daemon.own_url}/memd/health").json["troubles"], lambda: repr(daemon))
    assert str(columns) not in daemon.run("check").stdout


def test_a_missing_segment_is_not_passed_over_in_silence(serving: Serving) -> None:
    daemon = serving(SMALL_SEGMENTS)
    told(daemon, *FACTS)
    assert daemon.terminate() == 0
    aside, missing = daemon.folder / "aside.bin", daemon.data_dir / "default" / "segments" / "seg_0001.bin"
    missing.rename(aside)
    (daemon.data_dir / "default" / "hot.log").unlink()  # else what it still has is stored again
    verified = daemon.run("verify")
    assert verified.returncode == 1 and f"{missing}: is missing" in verified.stdout

    daemon.start()
    lost = [user("What is the password for the boathouse door?")]
    answer = daemon.chat(lost)
    assert answer.headers["X-Memory-Status"] == "degraded:store", "nothing found is not nothing known"
    assert f"{missing}: is missing" in daemon.log.read_text()
    assert any("is missing" in one for one in ask(f"{daemon.own_url}/memd/stats").json["topics"]["default"]["damage"])
    assert "is missing" in " ".join(daemon.run("stats").stdout.split())
    found = daemon.chat([user("What is the lighthouse keeper's cat called?")])
    assert found.headers["X-Memory-Status"] == "injected", "the rest is served"
    assert daemon.terminate() == 0

    aside.rename(missing)
    daemon.start()
    assert daemon.chat(lost, headers={"X-Memory-Mode": "readonly"}).headers["X-Memory-Status"] == "injected"
    assert daemon.terminate() == 0
    assert daemon.run("verify").returncode == 0


LISTS = "log", "chunks", "days", "documents", "digest", "transcript", "entities", "conversations", "figures", "sources"


def forbids_something_else(topic: Path) -> None:
    (topic / "forbidden").write_bytes(
        encode_forbidden(ForbiddenText(texts=frozenset({"0" * 16}))).replace(b"0", b"1", 1)
    )


def is_of_a_newer_memd(topic: Path) -> None:
    path = topic / "active.bin"
    data = bytearray(path.read_bytes())
    data[8] = 9
    data[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(data[: HEADER_BYTES - 4]).to_bytes(4, "little")
    path.write_bytes(data)


def lacks_a_segment_that_can_be_read(topic: Path) -> None:
    segment = topic / "segments" / "seg_0001.bin"
    segment.unlink()
    segment.mkdir()


@pytest.mark.parametrize(
    "damage", [forbids_something_else, is_of_a_newer_memd, lacks_a_segment_that_can_be_read], ids=lambda it: it.__name__
)
def test_a_topic_that_cannot_be_read_hides_no_other_and_is_named(
    serving: Serving, damage: Callable[[Path], None]
) -> None:
    daemon = serving({**SMALL_SEGMENTS, "retrieval": {"global_topics": ["work"]}})
    told(daemon, *FACTS, topic="work")
    told(daemon, FACTS[0], topic="home")
    assert daemon.terminate() == 0
    damage(daemon.data_dir / "work")
    verified = daemon.run("verify")
    assert verified.returncode == 1 and str(daemon.data_dir / "work") in verified.stdout
    checked = daemon.run("check")
    assert checked.returncode == 1 and str(daemon.data_dir / "work") in checked.stdout
    for is_running in (False, True):
        if is_running:
            daemon.start()
        found = daemon.run("search", "the password of the boathouse")
        assert found.returncode == 0 and "heliotrope" in found.stdout
        assert "Topic work cannot be read: " in " ".join(found.stdout.split())
        assert daemon.run("search", "the boathouse", "--topic", "work").returncode == 1
        logged, stats = daemon.run("log"), daemon.run("stats").stdout
        assert "heliotrope" in logged.stdout and "Topic work cannot be read: " in logged.stderr
        assert (damage is forbids_something_else) or ("work ? ?" in " ".join(stats.split()) and "work: " in stats)
    for path in LISTS:
        assert ask(f"{daemon.own_url}/memd/{path}").json["note"].startswith("Topic work cannot be read: "), path
    question = [user("What is the password for the boathouse door?")]
    answer = daemon.chat(question, memory_in={"topic_id": "home"})
    assert answer.headers["X-Memory-Injected"] and answer.headers["X-Memory-Status"] == "degraded:store"
    health = ask(f"{daemon.own_url}/memd/health").json
    assert health["memory"] == "degraded" and str(daemon.data_dir / "work") in health["trouble"]
    assert daemon.log.read_text().count("a topic cannot be opened") == 1


def test_a_memory_of_which_nothing_can_be_read_does_not_look_empty(serving: Serving) -> None:
    daemon = serving()
    told(daemon, *FACTS)
    assert daemon.terminate() == 0
    forbids_something_else(daemon.data_dir / "default")
    for is_running in (False, True):
        if is_running:
            daemon.start()
        for command in ("log", "sources", "digest", "search boathouse"):
            ended = daemon.run(*command.split())
            assert ended.returncode == 1 and "does not match its checksum" in ended.stderr, command
    for path in LISTS:
        answer = ask(f"{daemon.own_url}/memd/{path}")
        assert answer.status == 503 and b"does not match its checksum" in answer.body, path


def test_the_files_of_another_topic_are_not_read_as_ones_own(serving: Serving, upstream: RecordingUpstream) -> None:
    daemon = serving(SMALL_SEGMENTS)
    told(daemon, FACTS[0], FACTS[2], topic="work")
    told(daemon, FACTS[1], topic="home")
    assert daemon.terminate() == 0
    work, home = daemon.data_dir / "work", daemon.data_dir / "home"
    (work / "hot.log").rename(home / "hot.log")
    verified = daemon.run("verify")
    assert verified.returncode == 1 and f"{home / 'hot.log'}: belongs to the topic 'work'" in verified.stdout
    assert daemon.run("stats").returncode == 0

    daemon.start()
    lost = [user("What is the password for the boathouse door?")]
    answer = daemon.chat(lost, memory_in={"topic_id": "home"})
    assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "degraded:store")
    assert "heliotrope" not in upstream.prompts[-1]
    assert "If you have renamed the topic's folder on purpose" in daemon.log.read_text()
    assert daemon.terminate() == 0

    (home / "hot.log").rename(work / "hot.log")
    work.rename(daemon.data_dir / "office")
    daemon.start()
    moved = {"memory_in": {"topic_id": "office"}}
    assert daemon.chat(lost, **moved).headers["X-Memory-Status"] == "degraded:store"
    (daemon.data_dir / "office" / "former_names").write_text("work\n")
    assert daemon.chat(lost, **moved).headers["X-Memory-Status"] == "injected", "without a restart"
    daemon.wait_stored("boathouse door?")
    assert daemon.terminate() == 0
    assert daemon.run("verify").returncode == 0
    assert daemon.run("backup", str(daemon.folder / "backup")).returncode == 0
    assert daemon.run("verify", str(daemon.folder / "backup")).returncode == 0


def test_what_is_said_after_a_log_was_replaced_under_the_daemon_stays_in_the_journal(serving: Serving) -> None:
    daemon = serving({"retrieval": {"min_score": 0.4}})
    told(daemon, FACTS[0])
    log, restored = daemon.data_dir / "default" / "active.bin", daemon.folder / "restored"
    restored.write_bytes(log.read_bytes())
    restored.rename(log)
    before = log.read_bytes()

    told_then = daemon.chat([user(FACTS[1])])
    assert told_then.status == 200
    wait_until(lambda: "something else replaced it" in daemon.log.read_text(), lambda: f"not told: {daemon!r}")
    for question in ("What is in grandmother's gooseberry jam?", "And how long does it wait?"):
        asked = daemon.chat([user(question)])
        assert asked.headers["X-Memory-Status"] == "degraded:store", "each time, though the journal can be written"
    assert log.read_bytes() == before, "it is not memd's to change"
    daemon.kill()

    daemon.start()
    daemon.wait_stored(FACTS[0])
    daemon.wait_stored(FACTS[1])
    assert daemon.terminate() == 0
    assert daemon.run("verify").returncode == 0


@pytest.mark.parametrize(
    ("name", "put"), [("active.bin", os.mkfifo), ("hot.log", lambda path: path.symlink_to("/dev/zero"))]
)
def test_a_pipe_in_place_of_a_file_holds_up_nobody(serving: Serving, put: Callable[[Path], None], name: str) -> None:
    daemon = serving()
    told(daemon, FACTS[0], topic="odd")
    assert daemon.terminate() == 0
    odd = daemon.data_dir / "odd" / name
    odd.unlink()
    put(odd)
    verified = daemon.run("verify")
    assert verified.returncode == 1 and f"{odd}: is no file but a pipe or a device" in verified.stdout
    daemon.start()
    answer = daemon.chat([user(FACTS[1])], memory_in={"topic_id": "odd"})
    assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "degraded:store")
    assert daemon.chat([user(FACTS[2])]).headers["X-Memory-Status"] == "none"
    assert "is no file but a pipe or a device; remove it" in daemon.log.read_text()


# Disks that are not as they should be


FACT = "The password for the boathouse door is heliotrope, and only the ferryman's wife knows it by heart."
QUESTION = "What is the password for the boathouse door?"


def asked(daemon: DaemonProcess, text: str) -> str:
    answer = daemon.chat([{"role": "user", "content": text}])
    assert answer.status == 200, answer.body
    return str(answer.headers["X-Memory-Status"])


def test_a_directory_that_has_nothing_to_sync_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", without_rests.SYNC)
    descriptor = os.open("/proc", os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(descriptor)
    os.close(descriptor)
    LocalDisk().sync_directory(Path("/proc"))


def test_an_error_at_close_is_none_of_what_was_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path, real = LocalDisk(), tmp_path / "log", os.close
    files.create(path)
    file = AppendFile(files, path, 0)
    file.append(b"one", sync=True)

    def close(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("memd.store.disk.os.close", close)
    file.close()
    assert files.read(path) == b"one"


@pytest.mark.linux
def test_on_a_read_only_disk_requests_pass_through_and_memory_is_still_read(
    serving: Serving, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine gives no mount namespace to its users")
    daemon = serving()
    asked(daemon, FACT)
    daemon.wait_stored(FACT)
    assert daemon.terminate() == 0
    before = {path: path.read_bytes() for path in daemon.data_dir.rglob("*") if path.is_file()}
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    command = daemon.command
    monkeypatch.setattr(daemon, "forks", False)  # it is started by another program
    monkeypatch.setattr(
        daemon, "command", lambda: ["unshare", "-rm", "sh", "-c", mount, str(daemon.data_dir), *command()]
    )
    daemon.start()
    assert asked(daemon, QUESTION) in ("injected", "degraded:store")
    assert "heliotrope" in upstream.prompts[-1], "what is there can be read"
    assert "the disk is read-only; mount it writable" in daemon.log.read_text()
    assert daemon.chat([{"role": "user", "content": FACT}], memory_in={"topic_id": "new"}).status == 200
    assert daemon.terminate() == 1, "what was said could not be written"
    assert {path: path.read_bytes() for path in daemon.data_dir.rglob("*") if path.is_file()} == before


def test_without_its_lock_file_a_daemon_writes_alone_on(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    first = make_daemon(upstream.url).start()
    lock = first.data_dir / "memd.lock"
    lock.unlink()
    asked(first, FACT)
    first.wait_stored(FACT)
    assert lock.exists(), "made anew"
    second = make_daemon(upstream.url)
    second.data_dir = first.data_dir
    with pytest.raises(AssertionError, match=f"memd already runs on {first.data_dir} at {first.base_url}"):
        second.start()
    second.wait()

    first.send_signal(signal.SIGSTOP)  # else what it still has to write may make the lock anew before the second comes
    lock.unlink()
    second.start()
    first.send_signal(signal.SIGCONT)
    log = (first.data_dir / "default" / "active.bin").read_bytes()
    asked(first, "The lighthouse keeper's cat is called Admiral Tegetthoff.")
    assert asked(first, "The bus to the quarry leaves at seven minutes past six.") == "degraded:store"
    wait_until(lambda: "storing failed" in first.log.read_text(), lambda: repr(first))
    assert "was replaced while memd ran" in first.log.read_text()
    assert "what is said now is lost if memd ends" in first.log.read_text()
    first.kill()
    assert (first.data_dir / "default" / "active.bin").read_bytes() == log
    assert asked(second, QUESTION) == "injected"
    assert second.terminate() == 0
    assert second.run("verify").returncode == 0


WRITERS: tuple[Callable[[Store], object], ...] = (
    lambda store: store.topic("talk").append([draft("after")]),
    lambda store: store.topic("another"),
    lambda store: store.topic("talk").merge((1, 2)),
    lambda store: store.topic("talk").complete_words(),
    lambda store: ReceiptRing(store.files, store.data_dir, 1000).append(b"{}"),
    lambda store: replace_file(store.files, store.data_dir / "memd.url", b"http://127.0.0.1:1"),
    lambda store: open_journal(store.journal_of("talk"), store.files)[0].append([b"said"]),
)


def test_whatever_writes_makes_sure_first_that_no_other_daemon_does(tmp_path: Path) -> None:
    store = open_store(None, tmp_path, segment_entries_max=2)
    topic = store.topic("talk")
    for number in range(7):
        topic.append([draft(number)])
    (tmp_path / "talk" / "segments" / "seg_0001.words").unlink()
    store.close()
    store = open_store(None, tmp_path, segment_entries_max=2)
    topic = store.topic("talk")
    open_journal(topic.hot_path, store.files)[0].append([b"said"])
    topic.append([draft(7)])
    (tmp_path / "memd.lock").unlink()
    lock = LocalDisk().lock(tmp_path / "memd.lock")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for write in WRITERS:
        with pytest.raises(StoreLocked, match="restart it"):
            write(store)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    lock.release()


def test_threads_that_find_the_lock_file_gone_at_once_make_one_anew(tmp_path: Path) -> None:
    files, path = LocalDisk(), tmp_path / "memd.lock"
    files.lock(path)
    threads_max = 8
    together = threading.Barrier(threads_max)

    def confirm(_: int) -> None:
        together.wait()
        files.confirm_lock()

    with ThreadPoolExecutor(threads_max) as pool:
        for _ in range(20):
            path.unlink()
            list(pool.map(confirm, range(threads_max)))
    assert path.exists()


def test_a_folder_that_a_full_disk_left_empty_is_no_topic(tmp_path: Path) -> None:
    with closing(open_store(LocalDisk(), tmp_path)) as store:
        store.topic("talk").append([draft("one")])
    (tmp_path / "unfinished" / "segments").mkdir(parents=True)
    (tmp_path / "begun").mkdir()
    with closing(open_store(LocalDisk(), tmp_path)) as store:
        assert store.topic_ids() == ["talk"]
