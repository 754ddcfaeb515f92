"""The real disk: errors name the file and the remedy, a full disk is told apart, replacing is all or nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drafts import draft, open_store
from full_disk import FullDisk

from memd.errors import DiskFull, StoreError, StoreLocked, StoreWriteFailed
from memd.store.disk import Appender, LocalDisk, replace_file
from memd.store.index.building import write_index
from memd.store.index.vectors import VectorIndex
from memd.store.syscalls import writing
from memd.store.tools.export import export
from memd.store.tools.verify import verify

FILES = LocalDisk()


def test_what_is_not_there_has_no_size_and_no_names(tmp_path: Path) -> None:
    assert FILES.size(tmp_path / "none") is None
    assert FILES.names(tmp_path / "none") == []
    assert not FILES.is_directory(tmp_path / "none")
    FILES.remove(tmp_path / "none")
    with pytest.raises(StoreError, match=r"none: cannot be read \(No such file"):
        FILES.read(tmp_path / "none")


def test_appending_reading_and_cutting(tmp_path: Path) -> None:
    path = tmp_path / "file"
    appender = FILES.create(path)
    appender.write(b"0123456789")
    appender.truncate(8)
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


def test_replacing_leaves_no_temporary_file(tmp_path: Path) -> None:
    replace_file(FILES, tmp_path / "file", b"old")
    replace_file(FILES, tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"new"}


class Filling(FullDisk):
    """There is room for a new file's name and for half of what is in it."""

    def create(self, path: Path) -> Appender:
        appender = super().create(path)
        self.full = True
        return appender


def test_a_file_that_cannot_be_written_whole_takes_no_room(tmp_path: Path) -> None:
    replace_file(FILES, tmp_path / "file", b"old")
    with pytest.raises(DiskFull):
        replace_file(Filling(), tmp_path / "file", b"new")
    index = VectorIndex(np.eye(4, dtype=np.float32), np.arange(4))
    with pytest.raises(DiskFull):
        write_index(Filling(), tmp_path / "index", index)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_write_into_a_missing_directory_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StoreWriteFailed, match=r"none/file: cannot be written \(No such file.*check that the disk"):
        FILES.create(tmp_path / "none" / "file")


@pytest.mark.linux
def test_a_full_disk_is_told_apart_from_other_errors() -> None:
    full = Path("/dev/full")
    with pytest.raises(DiskFull, match="/dev/full: the disk is full; free some space"), writing(full):
        full.write_bytes(b"x")


def test_a_lock_is_refused_to_others_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "memd.lock"
    assert not FILES.is_locked(path)
    lock = FILES.lock(path)
    assert FILES.is_locked(path)
    with pytest.raises(StoreLocked, match=f"pid {os.getpid()}, started"):
        FILES.lock(path)
    lock.release()
    lock.release()
    assert not FILES.is_locked(path)
    FILES.lock(path).release()


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
