"""Descriptors: many topics and many connections need few of them, and nothing fails where a process may have few."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Connect, MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream

from memd.errors import StoreError, StoreWriteFailed
from memd.ingest.topics import OPEN_MAX
from memd.store.disk import Appender, LocalDisk
from memd.store.tools.export import export

DESCRIPTORS_MAX = 256
"""What macOS gives a process by default."""
TOPICS = 280


def fact(number: int) -> str:
    return f"The locker number {number} is opened with the key {number * 37 % 1009}."


def tell(daemon: DaemonProcess, number: int) -> None:
    answer = daemon.chat([{"role": "user", "content": fact(number)}], memory_in={"topic_id": f"topic{number}"})
    assert answer.status == 200 and answer.headers["X-Memory-Status"] == "none"


def test_more_topics_than_256_descriptors_are_stored_and_all_connections_taken(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, connect: Connect
) -> None:
    daemon = make_daemon(upstream.url)
    daemon.descriptors_max = DESCRIPTORS_MAX
    daemon.start()
    for number in range(TOPICS - 1):
        tell(daemon, number)
        assert number % 20 or is_healthy(daemon)
    held = [connect(daemon.base_url) for _ in range(DESCRIPTORS_MAX)]
    wait_until(lambda: "made room for another" in daemon.log.read_text(), lambda: f"there was room: {daemon!r}")
    assert is_healthy(daemon), "silent connections keep nobody out"
    for client in held:
        client.close()
    wait_until(lambda: is_healthy(daemon), lambda: f"it does not heal: {daemon!r}")
    tell(daemon, TOPICS - 1)

    def missing() -> set[int]:
        lines = export(daemon.data_dir, LocalDisk(), topic_id=None, live_only=True)
        stored = "\n".join(line["content"] for line in lines)
        return {number for number in range(TOPICS) if fact(number) not in stored}

    wait_until(lambda: not missing(), lambda: f"not stored: {missing()}")
    wait_until(lambda: count_open(daemon) <= OPEN_MAX, lambda: f"{count_open(daemon)} topics are open")
    said = daemon.log.read_text()
    assert "Too many open files" not in said and "Traceback" not in said
    assert f"this process may have {DESCRIPTORS_MAX} descriptors" in said and "ulimit -n" in said


def count_open(daemon: DaemonProcess) -> int:
    return sum(topic["is_open"] for topic in ask(f"{daemon.own_url}/memd/topics").json["topics"])


def is_healthy(daemon: DaemonProcess) -> bool:
    try:
        return ask(f"{daemon.base_url}/memd/health").status == 200
    except OSError:
        return False


@pytest.mark.process
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = "from memd.store.disk import descriptors_limit as now, raise_descriptors_limit as raised; "
    code += "print(now(), raised(), now(), raised())"
    limits = 'ulimit -Sn 128 && ulimit -Hn 700 && exec "$@"'
    told = subprocess.run(["sh", "-c", limits, "sh", sys.executable, "-c", code], capture_output=True, check=True)
    assert told.stdout.split() == [b"128", b"700", b"700", b"700"]


def count_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def appenders(files: LocalDisk, folder: Path, count: int) -> list[Appender]:
    made = [files.create(folder / f"log{number}") for number in range(count)]
    for file in made:
        file.sync()
    return made


def test_files_beyond_the_limit_are_synced_at_once_and_lose_nothing(tmp_path: Path) -> None:
    files, before = appenders(LocalDisk(unsynced_max=3), tmp_path, 20), count_descriptors()
    for text in (b"one ", b"two ", b"three"):
        for file in files:
            file.write(text)
            assert count_descriptors() <= before + 3
    for file in files:
        file.sync()
    assert count_descriptors() == before, "what is synced has no descriptor"
    for file in files:
        file.close()
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"one two three"] * 20


def test_a_write_that_could_not_be_synced_as_too_many_wait_for_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = appenders(LocalDisk(unsynced_max=1), tmp_path, 2)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    first.write(b"not synced")
    with monkeypatch.context() as patched:
        patched.setattr("memd.store.disk.sync_descriptor", broken)
        with pytest.raises(StoreWriteFailed, match=r"log1: cannot be written \(Input/output error\)"):
            second.write(b"one too many")
    first.sync()


def test_an_error_for_want_of_descriptors_names_the_limit_and_the_remedy(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = LocalDisk()
    (tmp_path / "log").write_bytes(b"")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreError, match=r"the limit of this process is 3\); allow more: `ulimit -n"):
            files.read(tmp_path / "log")
        with pytest.raises(StoreWriteFailed, match=r"the limit of this process is 3\); allow more: `ulimit -n"):
            files.append_to(tmp_path / "log")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
