"""The trouble with a disk: when there is one, when it is over, and where it is told."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from full_disk import FullDisk

from memd.cli.check.data import directory
from memd.cli.main import main
from memd.store.disk import LocalDisk, Room
from memd.store.disk_trouble import RESERVE_BYTES, RESERVE_FILES, DiskTrouble, DiskWatch, disk_trouble

PLENTY = 1 << 40
ON_TMPFS = """
import json, sys
from pathlib import Path
from memd.cli.check.data import directory
from memd.store.disk import LocalDisk
from memd.store.disk_trouble import DiskWatch

folder, files = Path(sys.argv[1]), LocalDisk()
watch = DiskWatch(files, folder, lambda: 7)
watch.look(is_doubtful=False)
said = directory(folder, files)
trouble = watch.trouble
told = None if trouble is None else [trouble.kind, trouble.what, trouble.remedy]
print(json.dumps([told, [said.mark, said.said, said.remedy]]))
"""


@pytest.mark.parametrize(
    ("room", "was", "kind"),
    [
        (Room(PLENTY, PLENTY, is_read_only=False), False, None),
        (Room(None, None, is_read_only=False), True, None),
        (Room(RESERVE_BYTES - 1, PLENTY, is_read_only=False), False, "full"),
        (Room(RESERVE_BYTES, PLENTY, is_read_only=False), False, None),
        (Room(RESERVE_BYTES, PLENTY, is_read_only=False), True, "full"),
        (Room(PLENTY, RESERVE_FILES - 1, is_read_only=False), False, "inodes"),
        (Room(PLENTY, 0, is_read_only=False), False, "inodes"),
        (Room(PLENTY, RESERVE_FILES, is_read_only=False), True, "inodes"),
        (Room(PLENTY, PLENTY, is_read_only=True), False, "read-only"),
    ],
)
def test_a_disk_is_in_trouble_before_nothing_fits_and_until_there_is_some_more_room(
    room: Room, was: bool, kind: str | None
) -> None:
    found = disk_trouble(Path("/memory"), room, was=was)
    assert (None if found is None else found.kind) == kind
    assert found is None or found.remedy


class ProbedDisk(FullDisk):
    probes = 0

    def try_writing(self, directory: Path, data: bytes) -> None:
        self.probes += 1
        super().try_writing(directory, data)


def test_a_disk_is_written_to_only_in_doubt_and_its_trouble_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memd")
    disk, now = ProbedDisk(), iter(range(1, 99))
    watch = DiskWatch(disk, tmp_path, lambda: next(now))

    def looked(*, is_doubtful: bool) -> DiskTrouble | None:
        watch.look(is_doubtful=is_doubtful)
        return watch.trouble

    disk.full = True
    assert (looked(is_doubtful=False), disk.probes) == (None, 0)
    for is_doubtful in (True, True, False):  # it is tried again until there is room
        found = looked(is_doubtful=is_doubtful)
        assert found is not None and (found.kind, found.since) == ("full", 1)
        said = directory(tmp_path, disk)
        assert (said.mark, said.said, said.remedy) == ("failed", found.what, found.remedy)
    [record] = caplog.records
    assert record.getMessage().startswith("the disk is in trouble; what is said waits in memory")
    disk.full = False
    assert looked(is_doubtful=False) is None
    assert caplog.records[-1].getMessage() == "the disk can be written again"


def test_a_directory_that_is_gone_is_a_trouble(tmp_path: Path) -> None:
    watch = DiskWatch(LocalDisk(), tmp_path / "gone")
    watch.look(is_doubtful=False)
    assert watch.trouble is not None and watch.trouble.kind == "errors"


def test_stats_tell_of_a_disk_as_the_check_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalDisk, "room", lambda self, directory: Room(PLENTY, 7, is_read_only=False))
    found = directory(tmp_path, LocalDisk())
    told = CliRunner().invoke(main, ["stats", "--data-dir", str(tmp_path)]).output
    assert f"In trouble: {found.said}; {found.remedy}." in " ".join(told.split())


@pytest.mark.process
@pytest.mark.linux
@pytest.mark.parametrize(
    ("prepared", "kind", "words"),
    [
        ("true", None, "free"),
        ('head -c 25m /dev/zero > "$0/ballast"', "full", "the disk is full"),
        ('i=0; while [ $i -lt 90 ]; do : > "$0/$i"; i=$((i+1)); done', "inodes", "inodes are used up"),
        ('mount -o remount,ro "$0"', "read-only", "the disk is read-only"),
    ],
)
def test_a_real_disk_is_told_in_the_same_words_by_a_daemon_and_by_the_check(
    prepared: str, kind: str | None, words: str, tmp_path: Path
) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine gives no mount namespace to its users")
    mounted = f'mount -t tmpfs -o size=40m,nr_inodes=120 tmpfs "$0" && {prepared} && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mounted, str(tmp_path), sys.executable, "-c", ON_TMPFS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, (mark, said, remedy) = json.loads(done.stdout)
    assert words in said
    assert mark == ("warning" if kind is None else "failed")
    assert told == (None if kind is None else [kind, said, remedy])
