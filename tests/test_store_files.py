"""The real disk: errors name the file and the remedy, a full disk is told apart, replacing is all or nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drafts import draft, open_store

from memd.errors import DiskFull, StoreWriteFailed
from memd.store.disk import LocalDisk
from memd.store.syscalls import writing
from memd.store.tools.export import export
from memd.store.tools.verify import verify

FILES = LocalDisk()


def test_appending_reading_and_cutting(tmp_path: Path) -> None:
    path = tmp_path / "file"
    appender = FILES.create(path)
    appender.write(b"0123456789")
    FILES.cut(path, 8)
    appender.write(b"ab")
    appender.sync()
    appender.close()
    appender.close()
    with pytest.raises(StoreWriteFailed, match="closed"):
        appender.write(b"late")
    assert FILES.read(path) == b"01234567ab"
    assert FILES.read_at(path, 6, 100) == b"67ab"
    assert FILES.read_at(path, 60, 100) == b""
    FILES.append_to(path).write(b"!")
    assert FILES.size(path) == 11


def test_a_write_into_a_missing_directory_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StoreWriteFailed, match=r"none/file: cannot be written \(No such file.*check that the disk"):
        FILES.create(tmp_path / "none" / "file")


@pytest.mark.linux
def test_a_full_disk_is_told_apart_from_other_errors() -> None:
    full = Path("/dev/full")
    with pytest.raises(DiskFull, match="/dev/full: the disk is full; free some space"), writing(full):
        full.write_bytes(b"x")


def test_a_file_size_limit_fails_the_append_and_the_log_stays_whole(tmp_path: Path) -> None:
    """The kernel itself cuts a write in the middle, as a full disk does."""
    store = open_store(data_dir=tmp_path)
    topic = store.topic("talk")
    topic.append([draft("first")])
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreWriteFailed):
            topic.append([draft(number) for number in range(10)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    topic.append([draft("second")])
    store.close()
    contents = [entry["content"] for entry in export(tmp_path, FILES, topic_id=None, live_only=False)]
    assert contents == ["user: chunk first", "user: chunk second"]
    assert verify(tmp_path, FILES).ok


INGEST = """
import sys
from pathlib import Path
from drafts import draft, open_store, seal_all
store = open_store(data_dir=Path(sys.argv[1]), segment_entries_max=7)
topic = store.topic("talk")
for number in range(100_000):
    topic.append([draft(f"{number}.{i}") for i in range(3)])
    print(number, flush=True)
    seal_all(topic)
"""


@pytest.mark.process
def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    for round_number in range(3):
        folder = tmp_path / str(round_number)
        command = [sys.executable, "-c", INGEST, str(folder)]
        tests = Path(__file__).parent
        paths = os.pathsep.join([str(tests / "support"), str(tests.parent)])
        environment = {**os.environ, "PYTHONPATH": paths}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(20 + round_number):
                acknowledged = int(process.stdout.readline())
            assert verify(folder, FILES, is_served=True).ok  # beside the running writer
            process.kill()
            acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
        store = open_store(data_dir=folder, segment_entries_max=7)
        store.topic("talk")
        store.close()
        report = verify(folder, FILES)
        assert report.ok, report.lines
        contents = [entry["content"] for entry in export(folder, FILES, topic_id=None, live_only=False)]
        wanted = [f"user: chunk {number}.{i}" for number in range(acknowledged + 1) for i in range(3)]
        assert contents[: len(wanted)] == wanted
        assert len(contents) in (len(wanted), len(wanted) + 3)
