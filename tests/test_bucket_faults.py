"""Faults of a bucket: nothing that is acknowledged is lost but what the lag says, whatever request fails, and whenever
memd is killed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bucket_server import FaultyBucket, Source, contents
from drafts import open_journal, uuid_of
from effort import steps

from memd.entries import Erased
from memd.errors import BucketError, DiskFull, StoreError
from memd.store.bucket.objects import ROUNDS
from memd.store.bucket.restoring import restore
from memd.store.bucket.writing import BucketTender, BucketWriter, MovedMeanwhile, NotingDisk
from memd.store.disk import LocalDisk, Room, Wiper
from memd.store.erasure import Erasure
from memd.store.layout import RESTORING_NAME
from memd.store.log.format import HEADER_BYTES
from memd.store.tools.verify import verify

DISK = LocalDisk()


class KilledError(BaseException):
    """The process ended here."""


def chunks(count: int) -> list[str]:
    return [f"user: chunk {number}" for number in range(count)]


def made(tmp_path: Path, name: str = "memory") -> tuple[Source, FaultyBucket]:
    bucket = FaultyBucket()
    return Source(tmp_path / name, bucket), bucket


def retried(source: Source) -> None:
    """Back up as the daemon does: again, until it works."""
    for _ in range(20):
        try:
            source.back_up()
        except BucketError:
            continue
        return
    raise AssertionError("it never works")


def killing(at: int) -> Callable[[int], bool]:
    """The process ends at the request of this number."""

    def kill(call: int) -> bool:
        if call == at:
            raise KilledError
        return False

    return kill


def calls_of(tmp_path: Path) -> int:
    """The requests of the history below."""
    source, bucket = made(tmp_path, "counted")
    history(source)
    source.store.close()
    return bucket.calls


def history(source: Source) -> None:
    source.say(*range(4))
    retried(source)
    source.say(*range(4, 13))
    retried(source)
    source.say(13)
    retried(source)


@pytest.mark.parametrize("was_done", [False, True], ids=["refused", "answer lost"])
def test_whatever_request_fails_once_the_backup_is_whole(tmp_path: Path, was_done: bool) -> None:
    for call in range(1, calls_of(tmp_path) + 1):
        source, bucket = made(tmp_path, f"memory {call}")
        bucket.fails, bucket.fails_after = call.__eq__, was_done
        history(source)
        source.store.close()
        target = tmp_path / f"restored {call}"
        restore(bucket, target, DISK)
        assert contents(target) == chunks(14)
        assert verify(target, DISK).ok


def test_wherever_memd_is_killed_what_the_last_round_had_is_there(tmp_path: Path) -> None:
    for call in range(1, calls_of(tmp_path) + 1):
        source, bucket = made(tmp_path, f"memory {call}")
        safe = [0]
        bucket.fails = killing(call)
        with suppress(KilledError):
            for count in (4, 13, 14):
                source.say(*range(len(contents(source.folder)), count))
                source.back_up()
                safe.append(count)
        assert safe[-1] < 14, "it is killed"
        bucket.fails = lambda now: False
        if safe[-1]:
            lost = tmp_path / f"lost {call}"
            restore(bucket, lost, DISK)
            assert len(contents(lost)) >= safe[-1]
            assert contents(lost) == chunks(len(contents(lost)))
            assert verify(lost, DISK).ok
        source.store.close()
        source.restart()
        source.back_up()
        source.store.close()
        target = tmp_path / f"restored {call}"
        restore(bucket, target, DISK)
        assert contents(target) == contents(source.folder)


def test_every_round_beside_a_busy_writer_can_be_restored_and_has_all_that_was_acknowledged_before(
    tmp_path: Path,
) -> None:
    source, bucket = made(tmp_path)
    acknowledged, done = [0], threading.Event()

    def write() -> None:
        for number in range(120):
            source.say(number)
            acknowledged[0] = number + 1
        done.set()

    source.say(0)
    source.back_up()
    writer = threading.Thread(target=write)
    writer.start()
    known = {}
    while not done.is_set():
        before = acknowledged[0]
        known[source.back_up()] = before
    writer.join()
    source.store.close()
    for at, before in list(known.items())[:: max(1, len(known) // 12)]:
        target = tmp_path / str(at)
        restore(bucket, target, DISK, at)
        found = contents(target)
        assert len(found) >= before
        assert verify(target, DISK).ok


def test_a_file_that_is_full_when_it_was_just_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, bucket = made(tmp_path)
    source.say(0)
    source.back_up()
    active, numbers, names = source.folder / "talk" / "active.bin", iter(range(1, 100)), BucketWriter._files

    def filling(writer: BucketWriter, folder: str) -> Iterator[tuple[str, Path, bool]]:
        for one in names(writer, folder):
            while one[1] == active and active.exists():
                source.say(next(numbers))
            yield one

    monkeypatch.setattr(BucketWriter, "_files", filling)
    source.say(next(numbers))
    at = source.back_up()
    assert not active.exists(), "the next append begins it"
    restore(bucket, tmp_path / "restored", DISK, at)
    assert verify(tmp_path / "restored", DISK).ok
    assert contents(tmp_path / "restored") == contents(source.folder)


def test_a_round_between_the_two_steps_of_a_rotation_has_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, bucket = made(tmp_path)
    times: list[int] = []
    noted = NotingDisk.note

    def note_late(disk: NotingDisk, path: Path) -> None:
        if path.name == "active.bin" and (disk.size(path) or 0) == HEADER_BYTES:  # in its place, and not noted yet
            source.writer.round()
            times.append(source.clock())
        noted(disk, path)

    source.say(0)
    source.back_up()
    monkeypatch.setattr(NotingDisk, "note", note_late)
    source.say(*range(1, 30))
    monkeypatch.undo()
    source.store.close()
    assert times
    for at in times:
        restore(bucket, tmp_path / str(at), DISK, at)
        assert verify(tmp_path / str(at), DISK).ok


def test_a_bucket_that_is_away_costs_one_line_and_a_growing_lag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, bucket = made(tmp_path)
    now = [0.0]
    tender = BucketTender(source.writer, 10.0, lambda: now[0])
    source.say(1)
    assert tender.step() == 10.0
    bucket.fails = lambda call: True
    source.say(2)
    waits: list[float] = []
    with caplog.at_level(logging.INFO, "memd"):
        for _ in range(30):
            now[0] += 120
            source.say(len(waits) + 3)
            waits.append(tender.step())
        assert [record.message for record in caplog.records] == [
            "the backup to the bucket fails; requests go on, and it is tried again"
        ]
        assert (waits[0], waits[-1]) == (20.0, 60.0)
        assert tender.lag_seconds == 3600.0
        assert tender.health.trouble is not None
        bucket.fails = lambda call: False
        assert tender.step() == 10.0
        assert caplog.records[-1].message == "the backup to the bucket works again"
    assert tender.health.lag_seconds == 0.0
    assert "trouble" not in repr(tender.health).replace("trouble=None", "")
    source.store.close()
    restore(bucket, tmp_path / "restored", DISK)
    assert len(contents(tmp_path / "restored")) == 32


def test_a_restoration_that_is_interrupted_goes_on_and_nothing_serves_from_it(tmp_path: Path) -> None:
    source, bucket = made(tmp_path)
    source.say(*range(23))
    source.back_up()
    source.store.close()
    target = tmp_path / "restored"
    kept = []
    for call in range(1, 1_000):
        bucket.fails = (bucket.calls + call).__le__
        try:
            kept.append(restore(bucket, target, DISK).kept)
            break
        except BucketError:
            assert call < 4 or (target / RESTORING_NAME).exists()
    assert kept[0] > 0
    bucket.fails = lambda now: False
    assert contents(target) == chunks(23)
    with pytest.raises(StoreError, match="is not empty"):
        restore(bucket, target, DISK)


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    class Small(LocalDisk):
        def room(self, directory: Path) -> Room:
            return Room(1_000, None, is_read_only=False)

    source, bucket = made(tmp_path)
    source.say(*range(9))
    source.back_up()
    source.store.close()
    with pytest.raises(DiskFull, match=r"has room for 1,000 bytes, and [\d,]+ are to be restored"):
        restore(bucket, tmp_path / "restored", Small())
    restore(bucket, tmp_path / "restored", DISK)
    assert contents(tmp_path / "restored") == chunks(9)


def test_an_erasure_that_is_interrupted_in_the_bucket_is_finished(tmp_path: Path) -> None:
    def erased(name: str, call: int | None) -> tuple[Source, FaultyBucket, int]:
        source, bucket = made(tmp_path, name)
        for number in range(12):
            source.say(number)
            source.back_up()
        uuid, at = uuid_of(2), source.clock()
        source.topic().erase({uuid}, Erased(at=at, by="ann"), Wiper(source.disk))
        told: dict[str, Any] = {"by": "ann", "chunks": 1, "uuids": uuid, "done_at": at}
        erasure = Erasure(id=source.store.clock.next(), kind="chunks", topic_id="talk", at=at, **told)
        source.store.ledger.write(erasure)
        begun = bucket.calls
        if call is not None:
            bucket.fails = killing(begun + call)
            with pytest.raises(KilledError):
                source.back_up()
            bucket.fails = lambda now: False
            source.store.close()
            source.restart()
        source.back_up()
        source.store.close()
        return source, bucket, bucket.calls - begun

    calls = erased("counted", None)[2]
    for call in steps(1, calls + 1):
        source, bucket, _ = erased(f"memory {call}", call)
        objects = [bucket.get(one.key) or b"" for prefix in (ROUNDS, "files/") for one in bucket.listed(prefix)]
        assert not any(b"user: chunk 2" in one for one in objects)
        assert any(b"user: chunk 3" in one for one in objects)
        target = tmp_path / f"restored {call}"
        restore(bucket, target, DISK)
        assert contents(target) == contents(source.folder)


def test_a_folder_that_cannot_be_read_holds_up_no_other_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, bucket = made(tmp_path)
    source.say(1)
    source.say(2, topic="bad")
    names = source.disk.names
    bad = source.folder / "bad" / "segments"

    def failing(directory: Path) -> list[str]:
        if directory == bad:
            raise StoreError("bad: cannot be read")
        return names(directory)

    monkeypatch.setattr(source.disk, "names", failing)
    source.writer.begin()
    assert not source.writer.round()
    assert not source.writer.round()
    assert sum("cannot be backed up" in record.message for record in caplog.records) == 1
    source.clock.now += 86_400_000_000
    source.say(3)
    assert not source.writer.round()
    source.writer.tidy()
    assert sum(one.key.endswith(".full") for one in bucket.listed(ROUNDS)) == 2, "nor what is due once a day"
    monkeypatch.undo()
    assert source.writer.round()
    source.store.close()
    restore(bucket, tmp_path / "restored", DISK)
    assert sorted(contents(tmp_path / "restored")) == ["user: chunk 1", "user: chunk 2", "user: chunk 3"]


def test_what_is_appended_to_the_journal_while_a_topic_is_looked_at_is_in_the_next_round(tmp_path: Path) -> None:
    source, bucket = made(tmp_path)
    source.say(1)
    journal = open_journal(source.store.journal_of("talk"), source.disk)[0]
    source.back_up()
    size, waiting = source.disk.size, [b"said meanwhile"]

    def busy(path: Path) -> int | None:
        if path.name == "active.bin" and waiting:  # the journal was looked at a moment ago
            journal.append([waiting.pop()])
        return size(path)

    journal.append([b"said before"])
    source.disk.size = busy  # type: ignore[method-assign]  # the moment between two steps
    source.back_up()
    source.back_up()
    source.store.close()
    restore(bucket, tmp_path / "restored", DISK)
    journals = [folder / "talk" / "hot.log" for folder in (source.folder, tmp_path / "restored")]
    assert journals[0].read_bytes() == journals[1].read_bytes()
    assert not waiting


def test_a_round_holds_no_bytes_that_nothing_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure would not find them."""
    source, bucket = made(tmp_path)
    journal = open_journal(source.store.journal_of("talk"), source.disk)[0]
    journal.append([b"said in a journal"])
    source.say(1)
    source.say(2, topic="work")
    read = BucketWriter._read

    def replaced(writer: BucketWriter, path: Path, identity: Hashable, start: int, end: int) -> Iterator[bytes]:
        if path == source.folder / "talk" / "active.bin":
            raise MovedMeanwhile("talk: was replaced while it was read")
        return read(writer, path, identity, start, end)

    monkeypatch.setattr(BucketWriter, "_read", replaced)
    source.writer.begin()
    assert not source.writer.round()
    stored = b"".join(bucket.get(one.key) or b"" for one in bucket.listed(ROUNDS))
    assert b"user: chunk 2" in stored
    assert b"said in a journal" not in stored
    monkeypatch.undo()
    assert source.writer.round()
    source.store.close()
