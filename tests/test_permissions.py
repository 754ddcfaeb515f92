"""What memd writes is its user's alone, whatever the umask; older files that are not are named."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess
from recording_upstream import RecordingUpstream


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """The umask that most systems have."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def told(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    """A daemon that has files of every kind: a log, sealed segments, a journal, receipts, indexes."""
    daemon = make_daemon(upstream.url, {"segment": {"max_entries": 2}}).start()
    daemon.tell(*(f"The code of locker {number} is {number * 37}." for number in range(5)))
    return daemon


def open_to_others(folder: Path) -> list[str]:
    return [str(path) for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


def test_files_and_backups_are_their_user_s_alone(told: DaemonProcess, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    for _ in range(2):  # the second one replaces files
        assert told.run("backup", str(backup)).returncode == 0
    assert told.terminate() == 0
    written = [path.name for path in told.data_dir.rglob("*")]
    kinds = (".bin", ".meta", "hot.log", "memd.lock", "memd.receipts", ".words")
    assert [kind for kind in kinds if not any(name.endswith(kind) for name in written)] == []
    assert list(backup.rglob("*.meta"))
    assert open_to_others(told.data_dir) == open_to_others(backup) == []


def test_a_folder_without_a_memory_becomes_private_when_the_first_daemon_begins_in_it(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url)
    daemon.data_dir.mkdir(0o755)
    (daemon.data_dir / ".gitkeep").touch(0o644)
    assert "other users" not in daemon.run("check", "--config", str(daemon.config)).stdout
    daemon.start()
    assert daemon.data_dir.stat().st_mode & 0o777 == 0o700
    assert "other users" not in daemon.run("check", "--config", str(daemon.config)).stdout


def test_check_warns_of_older_files_with_the_command_that_fixes_them(told: DaemonProcess) -> None:
    def warnings() -> list[str]:
        found = json.loads(told.run("check", "--json", "--config", str(told.config)).stdout)["checks"]
        return [one["remedy"] for one in found if one["mark"] == "warning" and "other users" in one["said"]]

    assert warnings() == []
    (told.data_dir / "default" / "hot.log").chmod(0o644)
    [remedy] = warnings()
    told.data_dir.chmod(0o755)
    assert warnings() == [remedy]
    subprocess.run(remedy, shell=True, check=True)
    assert warnings() == [] and open_to_others(told.data_dir) == []
