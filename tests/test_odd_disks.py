"""Disks that are not as they should be: read-only, without syncs of directories, with errors at close, no lock file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import without_rests
from conftest import MakeDaemon
from daemon_process import DaemonProcess, wait_until
from drafts import draft, open_journal, open_store
from recording_upstream import RecordingUpstream

from memd.errors import StoreLocked
from memd.store.claim import AppendFile
from memd.store.disk import LocalDisk, replace_file
from memd.store.receipts import ReceiptRing
from memd.store.store import Store

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
    files.create(path).close()
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
    make_daemon: MakeDaemon, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine gives no mount namespace to its users")
    daemon = make_daemon(upstream.url).start()
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
    assert daemon.terminate() == 0
    assert {path: path.read_bytes() for path in daemon.data_dir.rglob("*") if path.is_file()} == before


def test_after_its_lock_file_was_removed_a_daemon_writes_on_unless_another_one_came(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
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
    lambda store: store.topic("talk").seal(store.topic("talk").unsealed()[0]),
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
    for segment_id in topic.unsealed()[:2]:
        topic.seal(segment_id)
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
