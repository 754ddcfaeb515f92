"""Backups: consistent beside a running daemon, incremental, whole whatever interrupts them, and never overwritten by
something else.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from drafts import DATA_DIR, DISK, contents, draft, open_journal, open_store
from effort import steps

from memd.cli.main import main
from memd.errors import DiskFull, StoreError, StoreLocked
from memd.store.bucket.restoring import restore_copy
from memd.store.disk import LocalDisk
from memd.store.layout import LOCK_NAME, RECENT_NAME, check_restored
from memd.store.log.journal import read_journal
from memd.store.store import TopicLog
from memd.store.tools.backup import LISTING_NAME, MARKER_NAME, backup
from memd.store.tools.verify import verify

BACKUP = Path("/backup")
RESTORED = Path("/restored")


class Unlinkable(LocalDisk):
    """The backup lies on another file system."""

    def link(self, old: Path, new: Path) -> bool:
        return False


def chunks(first: int, end: int) -> list[str]:
    return [f"user: chunk {number}" for number in range(first, end)]


def filled(folder: Path, count: int, files: LocalDisk | None = None) -> TopicLog:
    """A topic with `count` chunks, five a segment, all full ones sealed."""
    topic = open_store(files, folder, segment_entries_max=5).topic("talk")
    for number in range(count):
        topic.append([draft(number)])
    return topic


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.mark.parametrize("files", [DISK, Unlinkable()], ids=["linked", "copied"])
def test_the_next_backup_takes_only_what_is_new(source: Path, target: Path, files: LocalDisk) -> None:
    topic = filled(source, 13)
    backup(source, target, files)
    again = backup(source, target, files)
    assert (again.linked, again.copied, again.kept) == (0, 0, 7), "active.bin too"
    for number in range(13, 27):
        topic.append([draft(number)])
    third = backup(source, target, files)
    assert third.kept >= 6 and third.linked + third.copied <= 13
    assert verify(target, DISK).ok
    assert contents(target) == chunks(0, 27)
    assert not (target / "talk" / "segments" / "seg_0003.bin").samefile(target / "talk" / "active.bin")


def test_a_rotation_while_reading_hides_and_doubles_nothing() -> None:
    class Rotating(CrashFiles):
        """Rotates twice right after active.bin was read."""

        armed = False

        def read(self, path: Path) -> bytes:
            data = super().read(path)
            if self.armed and path == DATA_DIR / "talk" / "active.bin":
                self.armed = False
                topic.append([draft(f"later {self.operations} {number}") for number in range(5)])
                topic.append([draft(f"latest {self.operations} {number}") for number in range(5)])
            return data

    files = Rotating()
    topic = filled(DATA_DIR, 8, files)
    for number in range(8, 30, 3):
        expected = contents(DATA_DIR, files)
        files.armed = True
        assert backup(DATA_DIR, BACKUP, files).findings == []
        found = contents(BACKUP, files)
        assert found[: len(expected)] == expected
        assert len(found) == len(set(found))
        assert verify(BACKUP, files).ok
        topic.append([draft(number + step) for step in range(3)])


def test_a_file_that_was_away_for_the_moment_of_a_rotation_is_read_again() -> None:
    class Between(CrashFiles):
        armed = True

        def read(self, path: Path) -> bytes:
            if self.armed and path == DATA_DIR / "talk" / "active.bin":
                self.armed = False
                raise StoreError(f"{path}: cannot be read (No such file or directory)")
            return super().read(path)

    files = Between()
    files.armed = False
    filled(DATA_DIR, 8, files)
    files.armed = True
    assert backup(DATA_DIR, BACKUP, files).findings == []
    assert not files.armed
    assert contents(BACKUP, files) == contents(DATA_DIR, files)


@pytest.mark.thorough
def test_every_backup_beside_a_busy_writer_has_all_that_was_acknowledged(source: Path, target: Path) -> None:
    topic = open_store(None, source, segment_entries_max=7).topic("talk")
    acknowledged = 0
    done = threading.Event()

    def write() -> None:
        nonlocal acknowledged
        for number in range(0, 600, 2):
            topic.append([draft(number), draft(number + 1)])
            acknowledged = number + 2
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    rounds = 0
    while not done.is_set() or rounds < 3:
        before = acknowledged
        for folder in (target, source.parent / f"fresh {rounds % 5}"):
            if folder != target:
                shutil.rmtree(folder, ignore_errors=True)
            report = backup(source, folder, DISK)
            assert report.findings == []
            assert verify(folder, DISK).ok, verify(folder, DISK).lines
            found = contents(folder)
            assert found == chunks(0, len(found)) and len(found) >= before
        rounds += 1
    writer.join()
    backup(source, target, DISK)
    assert contents(target) == chunks(0, 600)


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_interrupts_a_backup_it_is_whole_and_the_next_one_goes_on(loss: Loss) -> None:
    def prepared() -> CrashFiles:
        """An earlier backup, and since then more in the active file, a rotation, a sealed segment and another one."""
        files = CrashFiles()
        topic = filled(DATA_DIR, 7, files)
        journal, _ = open_journal(topic.hot_path, files)
        journal.append([b"one"])
        backup(DATA_DIR, BACKUP, files)
        journal.append([b"two"])
        for number in range(7, 18):
            topic.append([draft(number)])
        return files

    probe = prepared()
    start = probe.operations
    backup(DATA_DIR, BACKUP, probe)
    for cut in steps(start, probe.operations, loss):
        files = prepared()
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            backup(DATA_DIR, BACKUP, files)
        after = files.after_power_cut(loss)
        found = contents(BACKUP, after)
        assert found == chunks(0, len(found)) and len(found) >= 7, probe.log[cut]
        assert verify(BACKUP, after).damaged == [], probe.log[cut]
        assert backup(DATA_DIR, BACKUP, after).findings == []
        assert contents(BACKUP, after) == chunks(0, 18)
        assert verify(BACKUP, after).ok


@pytest.mark.parametrize("work", ["backup", "restore"])
def test_the_first_steps_of_a_backup_and_of_a_restoration_can_be_interrupted(work: str) -> None:
    def prepared() -> tuple[CrashFiles, Path, Callable[[CrashFiles], object]]:
        files = CrashFiles()
        filled(DATA_DIR, 7, files)
        if work == "backup":
            return files, BACKUP, lambda disk: backup(DATA_DIR, BACKUP, disk)
        backup(DATA_DIR, BACKUP, files)
        return files, RESTORED, lambda disk: restore_copy(BACKUP, RESTORED, disk)

    for cut in range(8):
        files, folder, run = prepared()
        files.cut_after = files.operations + cut
        with pytest.raises(PowerCutError):
            run(files)
        run(again := files.after_power_cut("kept"))
        assert contents(folder, again) == chunks(0, 7), files.log[-1]


def test_a_folder_that_is_no_backup_or_in_or_around_the_data_directory_is_refused(source: Path, target: Path) -> None:
    filled(source, 3)
    target.mkdir()
    (target / "photo.jpg").touch()
    with pytest.raises(StoreError, match="is not empty and not an earlier backup"):
        backup(source, target, DISK)
    assert [path.name for path in target.iterdir()] == ["photo.jpg"]
    for folder in (source, source / "backup", source.parent):
        with pytest.raises(StoreError, match="choose a folder outside"):
            backup(source, folder, DISK)


@pytest.mark.parametrize("own", ["an entry", "an entry of another topic", "an event"])
def test_a_backup_that_was_served_since_is_not_overwritten(source: Path, target: Path, own: str) -> None:
    filled(source, 3)
    backup(source, target, DISK)
    with closing(open_store(None, target)) as store:
        if own == "an event":
            open_journal(target / "talk" / "hot.log", DISK)[0].append([b"its own"])
        else:
            store.topic("talk" if own == "an entry" else "new").append([draft("its own")])
    before = contents(target)
    with pytest.raises(StoreError, match="has been served from this backup, so it has entries of its own"):
        backup(source, target, DISK)
    assert contents(target) == before


@pytest.mark.parametrize("name", [LOCK_NAME, MARKER_NAME], ids=["served from", "backed up to"])
def test_a_backup_that_somebody_holds_is_not_overwritten(source: Path, target: Path, name: str) -> None:
    filled(source, 3)
    backup(source, target, DISK)
    lock = DISK.lock(target / name)
    with pytest.raises(StoreLocked):
        backup(source, target, DISK)
    lock.release()


@pytest.mark.parametrize("later", [0, 1, 9])
@pytest.mark.parametrize("files", [DISK, Unlinkable()], ids=["linked", "copied"])
def test_a_backup_that_was_only_looked_into_is_brought_up_to_date(
    source: Path, target: Path, later: int, files: LocalDisk
) -> None:
    topic = filled(source, 13)
    journal, _ = open_journal(topic.hot_path, DISK)
    journal.append([b"one"])
    backup(source, target, files)
    looked = CliRunner().invoke(main, ["log", "--data-dir", str(target)])
    assert looked.exit_code == 0 and "chunk 12" in looked.stdout
    (target / "talk" / "lexical").mkdir(exist_ok=True)
    assert {LOCK_NAME, RECENT_NAME} <= {path.name for path in target.iterdir()}
    for number in range(13, 13 + later):
        topic.append([draft(number)])
    journal.append([b"two"])
    report = backup(source, target, files)
    assert report.findings == []
    assert {path.name for path in target.iterdir()} == {MARKER_NAME, LISTING_NAME, "talk"}
    assert not (target / "talk" / "lexical").exists()
    assert contents(target) == chunks(0, 13 + later) and verify(target, DISK).ok
    assert read_journal(target / "talk" / "hot.log", DISK) == [b"one", b"two"]


def test_the_backup_of_another_directory_is_not_overwritten(source: Path, target: Path, tmp_path: Path) -> None:
    filled(source, 13)
    backup(source, target, DISK)
    filled(tmp_path / "other", 3)
    report = backup(tmp_path / "other", target, DISK)
    assert "which" in str(report.findings[0]) and len(report.findings) == 1
    assert contents(target) == chunks(0, 13)


def test_a_segment_that_was_damaged_since_does_not_replace_the_good_copy(source: Path, target: Path) -> None:
    filled(source, 13)
    backup(source, target, Unlinkable())
    damaged = source / "talk" / "segments" / "seg_0001.bin"
    data = bytearray(damaged.read_bytes())
    data[300] ^= 1
    damaged.write_bytes(data)
    (source / "talk" / "segments" / "seg_0001.meta").unlink()
    report = backup(source, target, Unlinkable())
    assert "differs from" in str(report.findings[0])
    assert contents(target) == chunks(0, 13)


def test_what_was_read_before_its_append_failed_is_set_aside_by_the_next_backup() -> None:
    files = CrashFiles()
    topic = open_store(files).topic("talk")
    topic.append([draft(0)])
    active = DATA_DIR / "talk" / "active.bin"
    acknowledged = files.read(active)
    topic.append([draft("never acknowledged")])
    backup(DATA_DIR, BACKUP, files)
    files.put(active, acknowledged)
    backup(DATA_DIR, BACKUP, files)
    assert contents(BACKUP, files) == chunks(0, 1)
    assert files.size(BACKUP / "talk" / "active.bin.torn") is not None


def test_torn_tails_that_were_set_aside_are_taken_along(source: Path, target: Path) -> None:
    store = open_store(None, source)
    store.topic("talk").append([draft(0)])
    store.close()
    with (source / "talk" / "active.bin").open("ab") as file:
        file.write(b"half a rec")
    open_store(None, source).topic("talk")
    backup(source, target, DISK)
    backup(source, target, DISK)
    assert (target / "talk" / "active.bin.torn").read_bytes() == b"half a rec"
    assert not (target / "talk" / "active.bin.torn.2").exists()


def test_the_command_says_what_it_did(source: Path, target: Path) -> None:
    filled(source, 13)
    result = CliRunner().invoke(main, ["backup", str(target), "--data-dir", str(source)])
    assert result.exit_code == 0
    assert "1 topic: 6 files linked, 1 copied" in result.stdout
    for path in (source / "talk" / "segments").glob("seg_*"):
        assert path.samefile(target / "talk" / "segments" / path.name)
    assert not (source / "talk" / "active.bin").samefile(target / "talk" / "active.bin")
    checked = CliRunner().invoke(main, ["verify", str(target)])
    taken = sum(path.stat().st_size for path in (target / "talk").rglob("*") if path.is_file())
    whole = f"checked 1 topic: 7 files, 13 records, {taken:,} bytes; all whole\n"
    assert (checked.exit_code, checked.stdout) == (0, whole)


def test_a_backup_is_restored_elsewhere_and_stays_as_it_is(source: Path, target: Path, tmp_path: Path) -> None:
    topic = filled(source, 13)
    open_journal(topic.hot_path, DISK)[0].append([b"a turn"])
    backup(source, target, DISK)
    kept = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    folder = tmp_path / "restored"
    told = CliRunner().invoke(main, ["restore", str(target), str(folder)])
    assert told.exit_code == 0 and "restored: 1 topic as of " in told.stdout
    assert verify(folder, DISK).ok and contents(folder) == chunks(0, 13)
    restored = open_store(None, folder, segment_entries_max=5)
    assert open_journal(restored.topic("talk").hot_path, DISK)[1] == [b"a turn"]
    restored.topic("talk").append([draft(13)])
    restored.close()
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == kept
    backup(source, target, DISK)
    for flags, said in (([], "is not empty"), (["--until", "2026-11-20"], "leave --until away")):
        told = CliRunner().invoke(main, ["restore", str(target), str(folder), *flags])
        assert told.exit_code and said in told.stderr


def test_a_damaged_backup_is_restored_as_far_as_it_is_whole(source: Path, target: Path, tmp_path: Path) -> None:
    filled(source, 13)
    backup(source, target, Unlinkable())
    segment = Path("talk") / "segments" / "seg_0001.bin"
    data = bytearray((target / segment).read_bytes())
    data[len(data) // 2] ^= 1
    (target / segment).write_bytes(data)
    last = target / "talk" / "active.bin"
    last.write_bytes(last.read_bytes()[:-1] + b"?")  # what looks like an interrupted write is told too
    folder = tmp_path / "restored"
    told = CliRunner().invoke(main, ["restore", str(target), str(folder)])
    found = CliRunner().invoke(main, ["verify", str(folder)]).stdout.splitlines()[:-1]
    [torn] = [line for line in found if "are an interrupted write" in line]
    damaged = [line for line in found if line != torn]
    assert told.exit_code == 1 and damaged and str(folder / segment) in damaged[0]
    lines = told.stdout.splitlines()
    assert [line for line in lines if line.startswith("damaged: ")] == [f"damaged: {line}" for line in damaged]
    assert f"note: {torn}" in lines
    assert "1 topic as of" in told.stdout and set(chunks(5, 12)) <= set(contents(folder))
    as_json = CliRunner().invoke(main, ["restore", str(target), str(tmp_path / "again"), "--json"])
    assert as_json.exit_code == 1 and len(msgspec.json.decode(as_json.stdout)["damaged"]) == len(damaged)


def test_a_topic_that_a_backup_has_lost_is_missed(source: Path, target: Path, tmp_path: Path) -> None:
    store = open_store(None, source)
    for name in ("garden", "talk"):
        store.topic(name).append([draft(1)])
    store.close()
    backup(source, target, DISK)
    assert CliRunner().invoke(main, ["verify", str(target)]).exit_code == 0
    shutil.move(target / "garden", tmp_path / "garden")
    checked = CliRunner().invoke(main, ["verify", str(target)])
    lost = f"{target / 'garden'}: is missing: the backup had this topic"
    assert checked.exit_code == 1 and checked.stdout.splitlines()[0] == lost
    assert "1 finding" in checked.stdout and "all whole" not in checked.stdout
    folder = tmp_path / "restored"
    told = CliRunner().invoke(main, ["restore", str(target), str(folder)])
    assert told.exit_code == 1 and f"damaged: {lost}" in told.stdout and "1 topic as of" in told.stdout
    assert CliRunner().invoke(main, ["verify", str(folder)]).exit_code == 0, "it is no backup, and has all that it had"
    shutil.move(tmp_path / "garden", target / "garden")
    erased = ["erase", "garden", "--yes", "--data-dir", str(source)]
    assert CliRunner().invoke(main, erased).exit_code == 0 and backup(source, target, DISK).erased == 1
    assert CliRunner().invoke(main, ["verify", str(target)]).exit_code == 0


def test_an_interrupted_restoration_goes_on_unserved(source: Path, target: Path, tmp_path: Path) -> None:
    class Full(LocalDisk):
        def __init__(self, files_max: int) -> None:
            super().__init__()
            self.left = files_max

        def rename(self, old: Path, new: Path) -> None:
            self.left -= 1
            if self.left < 0:
                raise DiskFull("it is full; make room")
            super().rename(old, new)

    filled(source, 13)
    backup(source, target, DISK)
    folder, kept = tmp_path / "restored", []
    for files_max in range(1, 12):
        try:
            kept.append(restore_copy(target, folder, Full(files_max)).kept)
            break
        except DiskFull:
            if (folder / "talk").exists():
                with pytest.raises(StoreError, match="its restoration is not finished"):
                    check_restored(DISK, folder)
    assert kept and kept[0] > 0
    check_restored(DISK, folder)
    assert verify(folder, DISK).ok and contents(folder) == chunks(0, 13)
    lock = DISK.lock(target / MARKER_NAME)
    with pytest.raises(StoreLocked, match="memd writes to it now"):
        restore_copy(target, tmp_path / "meanwhile", DISK)
    lock.release()
