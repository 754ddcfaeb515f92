"""The continuous backup to a bucket: what is restored is what was there, whatever happened on the way."""

import itertools
import json
import logging
import re
import shutil
import threading
import urllib.request
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, wait_until
from drafts import DISK, contents, draft, live_contents, open_journal, open_store, uuid_of
from effort import steps
from moto.server import ThreadedMotoServer
from obstore.store import MemoryStore
from recording_upstream import RecordingUpstream

from memd.cli.main import main
from memd.errors import BadQuestion, BucketError, DiskFull, NotOurBucket, StoreError
from memd.selection import until as time_of
from memd.settings.model import BackupSettings, Config, EncryptionSettings
from memd.store.bucket.objects import FILES, ROUNDS, Bucket
from memd.store.bucket.restoring import RestoreReport, restore
from memd.store.bucket.writing import BucketTender, BucketWriter, MovedMeanwhile, NotingDisk
from memd.store.disk import LocalDisk, Room, Wiper, replace_file
from memd.store.encryption.disk import disk_of
from memd.store.erasure import Erasure, ForbiddenText
from memd.store.layout import RESTORING_NAME
from memd.store.log.format import HEADER_BYTES
from memd.store.tools.backup import known_buckets
from memd.store.tools.verify import verify
from memd.store.topic import TopicLog

_numbers = itertools.count(1)


class S3Server:
    """The server; keys are not checked."""

    def __init__(self, url: str) -> None:
        self.url = url

    def settings(self) -> BackupSettings:
        """The settings of a backup into a new bucket."""
        name = f"bucket-{next(_numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT")).close()
        return self.settings_of(f"s3://{name}/memd")

    def settings_of(self, url: str) -> BackupSettings:
        return BackupSettings(bucket=url, endpoint=self.url, region="us-east-1", access_key="any", secret_key="any")

    def keep_versions(self, settings: BackupSettings) -> None:
        """Let the bucket of these settings keep what is overwritten."""
        name, kind = settings.bucket.split("/")[2], {"Content-Type": "application/xml"}
        on = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        url = f"{self.url}/{name}?versioning"
        urllib.request.urlopen(urllib.request.Request(url, on, kind, method="PUT")).close()

    def bucket(self) -> Bucket:
        return Bucket.of(self.settings(), {})


class FaultyBucket(Bucket):
    """A bucket in memory whose requests fail as `fails` says of their number, before or after they were carried out."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "s3://faulty/memd")
        self.calls = 0
        self.fails: Callable[[int], bool] = lambda call: False
        self.fails_after = False
        """Whether a request that fails was carried out, and only its answer was lost."""

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.calls += 1
        is_failing = self.fails(self.calls)
        if is_failing and not self.fails_after:
            raise BucketError("s3://faulty/memd: SlowDown: it is tried again later")
        yield
        if is_failing:
            raise BucketError("s3://faulty/memd: the answer was lost")

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        with self._call():
            super().put(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        with self._call():
            return super().get(key, start, end)

    def delete(self, keys: list[str]) -> None:
        with self._call():
            super().delete(keys)


def writer_for(bucket: Bucket, disk: NotingDisk, data_dir: Path, now_us: Callable[[], int]) -> BucketWriter:
    """A writer whose generations have names that can be foretold."""
    numbers = itertools.count(1)
    return BucketWriter(bucket, disk, data_dir, 7, now_us, lambda length: next(numbers).to_bytes(length, "big"))


class Clock:
    """A time that a test sets."""

    now = 1_800_000_000_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Source:
    """A data directory, and the writer that backs it up."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.folder, self.bucket = folder, bucket
        self.clock = Clock()
        self.restart()

    def restart(self) -> None:
        self.restart_writer()
        self.store = open_store(self.disk, self.folder, segment_entries_max=5)

    def restart_writer(self) -> None:
        """Begin another generation."""
        self.disk = NotingDisk(self.folder)
        self.writer = writer_for(self.bucket, self.disk, self.folder, self.clock)

    def topic(self, name: str = "talk") -> TopicLog:
        return self.store.topic(name)

    def say(self, *numbers: int, topic: str = "talk") -> None:
        for number in numbers:
            self.topic(topic).append([draft(number)])

    def back_up(self) -> int:
        """Begin, if necessary, and write all; the time afterwards."""
        if not self.writer.is_begun:
            self.writer.begin()
        while not self.writer.round():
            pass
        self.writer.tidy()
        return self.clock()


DAY_US = 86_400_000_000


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    return s3.bucket()


@pytest.fixture
def source(tmp_path: Path, bucket: Bucket) -> Iterator[Source]:
    made = Source(tmp_path / "memory", bucket)
    yield made
    made.store.close()


def chunks(*numbers: int) -> list[str]:
    return [f"user: chunk {number}" for number in numbers]


def restored(source: Source, name: str = "restored", until: int | None = None) -> tuple[Path, RestoreReport]:
    target = source.folder.parent / name
    report = restore(source.bucket, target, DISK, until)
    assert verify(target, DISK).ok
    return target, report


def keys(bucket: Bucket, prefix: str) -> list[str]:
    return [one.key for one in bucket.listed(prefix)]


def bytes_in(bucket: Bucket) -> bytes:
    every = [*keys(bucket, ROUNDS), *keys(bucket, FILES)]
    return b"".join(bucket.get(key) or b"" for key in every)


def files_of(folder: Path) -> dict[str, bytes]:
    """All that a backup has of a folder."""
    kept = re.compile(r"memd\.(key|audit/.*|erasures/.*json)|[^/]+/(hot\.log|active\.bin|segments/seg.*|topic\.key)")
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {name: path.read_bytes() for path in paths if kept.fullmatch(name := path.relative_to(folder).as_posix())}


def test_a_restored_folder_has_the_same_bytes_and_can_be_verified_and_served(source: Source) -> None:
    source.say(*range(13))
    source.say(20, 21, topic="other")
    open_journal(source.store.journal_of("talk"), source.disk)[0].append([b"a turn"])
    source.back_up()
    source.say(13, 14)
    source.back_up()

    target, report = restored(source)

    assert files_of(target) == files_of(source.folder)
    assert (report.topics, report.notes) == (2, [])
    with closing(open_store(DISK, target)) as store:
        assert live_contents(store.topic("talk")) == chunks(*range(15))


def test_indexes_that_the_bucket_has_lost_are_built_again_from_the_log_that_is_restored(source: Source) -> None:
    source.say(*range(13))
    source.back_up()
    first, second = (
        next(key for key in keys(source.bucket, FILES) if name in key) for name in ("seg_0001.meta", "seg_0002.words")
    )
    source.bucket.delete([first])
    source.bucket.put(second, b"damaged")
    target = source.folder.parent / "restored"
    report = restore(source.bucket, target, DISK)
    assert len(report.notes) == 1 and "2 index files cannot be had from the bucket" in report.notes[0]
    assert report.files == len(files_of(target)) == len(files_of(source.folder)) - 2
    with closing(open_store(DISK, target)) as store:
        assert live_contents(store.topic("talk")) == chunks(*range(13))
    assert verify(target, DISK).ok


def test_a_start_sends_again_what_the_bucket_has_lost(source: Source) -> None:
    source.say(*range(13))
    source.back_up()
    first, *_, last = keys(source.bucket, FILES)
    source.bucket.delete([first])
    source.bucket.put(last, b"cut off")
    source.store.close()
    source.restart()
    source.back_up()
    assert files_of(restored(source)[0]) == files_of(source.folder)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_log_that_the_bucket_has_lost_is_named(source: Source, is_damaged: bool) -> None:
    source.say(*range(13))
    source.back_up()
    key = next(key for key in keys(source.bucket, FILES) if "seg_0001.bin" in key)
    source.bucket.put(key, b"damaged") if is_damaged else source.bucket.delete([key])
    named = rf"restored/talk/segments/seg_0001\.bin: cannot be had from the backup .*{key}.*memd restore --until"
    with pytest.raises(StoreError, match=named):
        restore(source.bucket, source.folder.parent / "restored", DISK)


def test_nothing_is_asked_of_the_bucket_while_nothing_changes(source: Source) -> None:
    source.say(1)
    source.back_up()
    asked = source.bucket.requests
    for _ in range(100):
        assert source.writer.round()
        source.writer.tidy()
    assert source.bucket.requests == asked


def test_what_was_written_while_no_backup_ran_is_found_by_the_next_start(source: Source) -> None:
    source.say(*range(3))
    source.back_up()
    source.store.close()
    with closing(open_store(DISK, source.folder, segment_entries_max=5)) as store:
        for number in range(3, 9):
            store.topic("talk").append([draft(number)])
        store.topic("new").append([draft(30)])
    source.restart()
    source.back_up()
    assert sorted(contents(restored(source)[0])) == sorted(chunks(*range(9), 30))


def test_a_large_file_is_sent_in_parts_and_restored(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.store.bucket.writing.ALONE_BYTES", 1000)
    source.say(1)
    journal = open_journal(source.store.journal_of("talk"), source.disk)[0]
    journal.append([bytes(9 << 20), b"end"])
    source.back_up()
    journal.append([bytes(9 << 20)])
    source.back_up()
    assert files_of(restored(source)[0]) == files_of(source.folder)


def test_a_folder_that_begins_anew_does_not_replace_the_backup_of_a_lost_one(source: Source, tmp_path: Path) -> None:
    source.say(1)
    source.back_up()
    other = Source(tmp_path / "new", source.bucket)
    other.say(2)
    with pytest.raises(NotOurBucket, match="memd restore s3://"):
        other.back_up()
    other.store.close()
    assert contents(restored(source)[0]) == chunks(1)


def test_a_restored_folder_goes_on_with_the_backup(source: Source) -> None:
    source.say(*range(7))
    source.back_up()
    target, _ = restored(source)
    again = Source(target, source.bucket)
    again.say(7)
    sent = source.bucket.bytes_sent
    again.back_up()
    again.store.close()
    assert source.bucket.bytes_sent - sent < 2_500
    assert contents(restored(source, "once more")[0]) == chunks(*range(8))


def test_the_daemon_that_began_later_goes_on_and_the_other_one_stops(source: Source, tmp_path: Path) -> None:
    source.say(1)
    source.back_up()
    shutil.copytree(source.folder, tmp_path / "copy")
    (tmp_path / "copy" / "memd.lock").unlink()
    later = Source(tmp_path / "copy", source.bucket)
    later.back_up()
    later.say(2)
    later.back_up()
    source.say(3)
    with pytest.raises(NotOurBucket, match="another daemon"):
        source.back_up()
    later.say(4)
    later.back_up()
    later.store.close()
    assert contents(restored(source)[0]) == chunks(1, 2, 4)


def test_a_backup_from_before_encryption_is_not_mixed_with_one_from_after(source: Source, tmp_path: Path) -> None:
    source.say(1)
    source.back_up()
    source.store.close()
    key = {"format": 1, "directory": "0" * 32, "master": "1" * 16, "key_id": "2" * 16, "state": "whole", "key": ""}
    monkey = NotingDisk(source.folder)
    replace_file(monkey, source.folder / "memd.key", msgspec.json.encode(key | {"former": "", "crc": 0}))
    source.restart_writer()
    with pytest.raises(StoreError):
        source.back_up()
    assert contents(restored(source)[0]) == chunks(1)


def test_every_time_that_is_kept_can_be_restored(source: Source) -> None:
    times = {}
    for number in range(12):
        source.say(number)
        times[source.back_up()] = number + 1
    for at, count in times.items():
        target, report = restored(source, f"at {at}", at)
        assert contents(target) == chunks(*range(count))
        assert report.at <= at
    with pytest.raises(BadQuestion, match="the earliest is 20") as told:
        restored(source, "too early", min(times) - DAY_US)
    [earliest] = re.findall("the earliest is ([^,]+),", str(told.value))
    assert restored(source, "as it was told", int(time_of(earliest)))[1].topics


def test_what_no_kept_time_needs_is_removed(source: Source) -> None:
    times = []
    for number in range(30):
        source.say(number)
        times.append(source.back_up())
        source.clock.now += DAY_US
    source.back_up()
    assert len(keys(source.bucket, ROUNDS)) < 40
    for number in (29, 24):
        assert contents(restored(source, f"{number}", times[number])[0]) == chunks(*range(number + 1))
    with pytest.raises(BadQuestion, match="the earliest is"):
        restored(source, "too old", times[5])


def test_a_gap_in_a_listing_is_an_error_and_no_older_state(source: Source) -> None:
    for number in range(4):
        source.say(number)
        source.back_up()
    gone = keys(source.bucket, ROUNDS)[-2]
    source.bucket.delete([gone])
    with pytest.raises(BucketError, match="is missing"):
        restored(source)
    source.store.close()
    source.restart()
    source.back_up()
    assert contents(restored(source, "anew")[0]) == chunks(*range(4))


def _erasure_of(source: Source, *numbers: int) -> Erasure:
    uuids = b"".join(map(uuid_of, numbers))
    at = source.clock()
    return Erasure(id=source.store.clock.next(), kind="chunks", topic_id="talk", at=at, by="ann", chunks=1, uuids=uuids)


def erase(source: Source, *numbers: int, erasure: Erasure | None = None) -> None:
    """As the eraser does: the log, and the ledger last."""
    erasure = erasure or _erasure_of(source, *numbers)
    source.topic(erasure.topic_id).erase(set(map(uuid_of, numbers)), erasure.mark, Wiper(source.disk))
    source.store.ledger.write(msgspec.structs.replace(erasure, done_at=source.clock()))


def test_what_is_erased_leaves_the_bucket_for_all_times(source: Source) -> None:
    times = []
    for number in range(12):
        source.say(number)
        source.say(200 + number, topic="other")
        times.append(source.back_up())
    assert b"chunk 3" in bytes_in(source.bucket)
    erase(source, 3, 11)
    after = source.back_up()

    left = bytes_in(source.bucket)
    assert b"user: chunk 3" not in left
    assert b"user: chunk 11" not in left
    assert b"user: chunk 4" in left
    target, report = restored(source, "before", times[5])
    assert contents(target)[:12] == contents(restored(source, "after", after)[0])[:12]
    assert "right after that" in report.notes[-1]
    assert "user: chunk 3" not in contents(target)
    assert set(chunks(*range(200, 206))) <= set(contents(target))
    assert set(chunks(206)) & set(contents(target)) == set()


def test_what_is_erased_while_a_round_is_written_leaves_the_bucket_too(source: Source) -> None:
    source.say(*range(4))
    source.back_up()
    erasure = _erasure_of(source, 2)
    source.store.ledger.write(erasure)
    assert source.writer.round(), "which sees that an erasure has begun, and the folder as it was before"
    erase(source, 2, erasure=erasure)
    source.writer.tidy()
    assert b"user: chunk 2" not in bytes_in(source.bucket)
    assert contents(restored(source)[0]) == contents(source.folder)


def test_what_is_erased_in_a_topic_that_was_renamed_is_restored_under_no_name(source: Source) -> None:
    source.say(*range(7))
    source.say(30, topic="other")
    source.back_up()
    source.store.close()
    (source.folder / "talk").rename(source.folder / "chat")
    (source.folder / "chat" / "former_names").write_text("talk\n")
    source.restart()
    source.back_up()
    erase(source, 3, erasure=msgspec.structs.replace(_erasure_of(source, 3), topic_id="chat"))
    source.back_up()
    target, _ = restored(source)
    assert contents(target) == contents(source.folder) == [*chunks(0, 1, 2), "", *chunks(4, 5, 6, 30)]
    assert not (target / "talk").exists()


def test_an_erased_topic_leaves_the_bucket(source: Source) -> None:
    source.say(1, 2)
    source.say(*range(100, 107), topic="other")
    before = source.back_up()
    erasure = Erasure(
        id=source.store.clock.next(), kind="topic", topic_id="other", at=source.clock(), by="ann", chunks=7
    )
    source.store.ledger.write(erasure)
    source.store.retire("other")
    moved = source.store.put_topic_aside(erasure, ForbiddenText())
    source.store.wipe_aside(moved, Wiper(source.disk))
    source.store.ledger.write(msgspec.structs.replace(moved, is_moved=False, done_at=source.clock()))
    source.back_up()
    assert b"chunk 10" not in bytes_in(source.bucket)
    assert keys(source.bucket, f"{FILES}other/") == []
    for name, until in (("now", None), ("before", before)):
        assert sorted(contents(restored(source, name, until)[0])) == chunks(1, 2)


def test_of_an_encrypted_folder_the_bucket_gets_no_plain_text(tmp_path: Path, bucket: Bucket) -> None:
    folder, key = tmp_path / "memory", tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(bytes(range(32)))
    config, disk = Config(data_dir=folder, encryption=EncryptionSettings(key_file=str(key))), NotingDisk(folder)
    store = open_store(disk_of(config, disk, creating=True), folder, segment_entries_max=5)
    writer = writer_for(bucket, disk, folder, Clock())
    writer.begin()
    for number in range(13):
        store.topic("talk").append([draft(number)])
        while not writer.round():
            pass
    store.close()
    assert b"chunk" not in bytes_in(bucket)
    assert bytes(range(32)) not in bytes_in(bucket)

    target = tmp_path / "restored"
    restore(bucket, target, DISK)
    assert files_of(target) == files_of(folder)
    files = disk_of(msgspec.structs.replace(config, data_dir=target))
    assert verify(target, files).ok
    with closing(open_store(files, target)) as again:
        assert live_contents(again.topic("talk")) == chunks(*range(13))


# Faults: nothing acknowledged is lost but what the lag says, whatever request fails, and whenever memd is killed


class KilledError(BaseException):
    """The process ended here."""


def back(bucket: Bucket, target: Path, until: int | None = None) -> list[str]:
    """What is in a folder that is restored, which is whole."""
    restore(bucket, target, DISK, until)
    assert verify(target, DISK).ok
    return contents(target)


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
        assert back(bucket, tmp_path / f"restored {call}") == chunks(*range(14))


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
            found = back(bucket, tmp_path / f"lost {call}")
            assert len(found) >= safe[-1]
            assert found == chunks(*range(len(found)))
        source.store.close()
        source.restart()
        source.back_up()
        source.store.close()
        assert back(bucket, tmp_path / f"restored {call}") == contents(source.folder)


def test_every_round_beside_a_busy_writer_is_restored_with_all_that_was_acknowledged(tmp_path: Path) -> None:
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
        assert len(back(bucket, tmp_path / str(at), at)) >= before


def test_a_file_that_fills_while_it_is_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, bucket = made(tmp_path)
    source.say(0)
    source.back_up()
    active, numbers, names = source.folder / "talk" / "active.bin", iter(range(1, 100)), BucketWriter._files

    def filling(writer: BucketWriter, folder: str) -> Iterator[tuple[str, Path]]:
        for one in names(writer, folder):
            while one[1] == active and active.exists():
                source.say(next(numbers))
            yield one

    monkeypatch.setattr(BucketWriter, "_files", filling)
    source.say(next(numbers))
    at = source.back_up()
    assert not active.exists(), "the next append begins it"
    assert back(bucket, tmp_path / "restored", at) == contents(source.folder)


def test_a_round_within_a_rotation_has_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert back(bucket, tmp_path / str(at), at)


def test_a_bucket_that_is_away_costs_a_line_and_a_lag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert len(back(bucket, tmp_path / "restored")) == 32


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
    assert contents(target) == chunks(*range(23))
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
    assert back(bucket, tmp_path / "restored") == chunks(*range(9))


def test_an_erasure_that_is_interrupted_in_the_bucket_is_finished(tmp_path: Path) -> None:
    def erased(name: str, call: int | None) -> tuple[Source, FaultyBucket, int]:
        source, bucket = made(tmp_path, name)
        for number in range(12):
            source.say(number)
            source.back_up()
        erase(source, 2)
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
        assert b"user: chunk 2" not in bytes_in(bucket) and b"user: chunk 3" in bytes_in(bucket)
        assert back(bucket, tmp_path / f"restored {call}") == contents(source.folder)


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
    assert sorted(back(bucket, tmp_path / "restored")) == chunks(1, 2, 3)


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
    assert b"user: chunk 2" in bytes_in(bucket) and b"said in a journal" not in bytes_in(bucket)
    monkeypatch.undo()
    assert source.writer.round()


# As an operator meets it: a daemon that is killed, a disk that is lost, commands


SECONDS = 0.2
SAID = (
    *("", "the keeper has two dogs", "paint is cheaper in Brest", "the stairs were counted in June: 214"),
    *("oil comes by boat on Fridays", "nobody knows who broke the lens", "rent is 400 euros a month"),
    *("the radio needs new batteries", "Ann plays the violin upstairs", "a museum wants to buy it"),
)
"""Nothing is like another: what is nearly the same, and stored together, is stored once."""


def settings_for(s3: S3Server, **more: Any) -> tuple[dict[str, Any], Bucket]:
    made = s3.settings()
    names = ("bucket", "endpoint", "region", "access_key", "secret_key")
    backup = {name: getattr(made, name) for name in names} | {"seconds": SECONDS}
    return {"backup": backup, "buffer": {"store_after_seconds": 0.0}, **more}, Bucket.of(made, {})


def health(daemon: DaemonProcess) -> dict[str, Any]:
    told: dict[str, Any] = ask(f"{daemon.own_url}/memd/stats").json["backup"]
    return told


def remember(daemon: DaemonProcess, *numbers: int) -> None:
    notes = [{"content": f"Of lighthouse number {number} : {SAID[number]}."} for number in numbers]
    assert ask(f"{daemon.own_url}/memd/notes", {"notes": notes, "topic_id": "lamps"}).status == 200


def restored_by_command(daemon: DaemonProcess, source: str, folder: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["restore", source, str(folder), "--config", str(daemon.config), *flags])


def has(bucket: Bucket, words: str) -> bool:
    every = [one.key for prefix in ("rounds/", "files/") for one in bucket.listed(prefix)]
    return any(words.encode() in (bucket.get(key) or b"") for key in every)


def test_a_disk_that_is_lost_comes_back_out_of_the_bucket(serving: Serving, s3: S3Server, tmp_path: Path) -> None:
    settings, bucket = settings_for(s3)
    daemon = serving(settings)
    for number in range(1, 8):
        remember(daemon, number)
    wait_until(lambda: has(bucket, "lighthouse number 7 "), lambda: f"{health(daemon)}")
    remember(daemon, 8)
    daemon.kill()
    shutil.rmtree(daemon.data_dir)

    daemon.start()  # whoever does not know yet that the disk was lost
    wait_until(lambda: health(daemon)["trouble"] is not None, lambda: f"{health(daemon)}")
    assert "has the backup of another data directory" in health(daemon)["trouble"]
    daemon.terminate()
    shutil.rmtree(daemon.data_dir)

    told = restored_by_command(daemon, settings["backup"]["bucket"], daemon.data_dir, "--json")
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["topics"] == 1
    assert known_buckets(daemon.data_dir, LocalDisk()) == [settings["backup"]["bucket"]]
    assert daemon.run("verify", str(daemon.data_dir)).returncode == 0
    there = b"".join(path.read_bytes() for path in daemon.data_dir.rglob("*") if path.is_file()).decode(
        "utf-8", "ignore"
    )
    told_of = [f"Of lighthouse number {number} : {SAID[number]}." for number in range(1, 8)]
    assert [text for text in told_of if text not in there] == []
    daemon.start()
    daemon.wait_stored(*told_of)  # what was in the journal alone is stored by the start
    found = [entry["content"] for entry in daemon.export()]
    assert [sum(text in one for one in found) for text in told_of] == [1] * 7
    remember(daemon, 9)
    wait_until(lambda: has(bucket, "lighthouse number 9 "), lambda: f"{health(daemon)}")


def test_what_is_removed_behind_memd_stays_in_the_bucket(serving: Serving, s3: S3Server, tmp_path: Path) -> None:
    settings, bucket = settings_for(s3)
    daemon = serving(settings)
    for number in (1, 2):
        remember(daemon, number)
    wait_until(lambda: has(bucket, "lighthouse number 2 "), lambda: f"{health(daemon)}")
    daemon.wait_stored("lighthouse number 1 ", "lighthouse number 2 ")
    removed = tmp_path / "removed"
    removed.mkdir()
    for path in list(
        daemon.data_dir.iterdir()
    ):  # each at once: a round in the middle of a topic would see a part of it
        path.rename(removed / path.name)
    daemon.terminate()  # its last round

    told = restored_by_command(daemon, settings["backup"]["bucket"], tmp_path / "restored")
    assert told.exit_code == 0, told.stderr
    there = b"".join(path.read_bytes() for path in (tmp_path / "restored").rglob("*") if path.is_file())
    assert all(f"lighthouse number {number} ".encode() in there for number in (1, 2))


def test_a_daemon_that_ends_sends_the_last_changes_first(serving: Serving, s3: S3Server) -> None:
    settings, bucket = settings_for(s3)
    settings["backup"]["seconds"] = 3600
    daemon = serving(settings)
    wait_until(
        lambda: health(daemon)["lag_seconds"] < 60 and health(daemon)["requests"] > 5, lambda: f"{health(daemon)}"
    )
    remember(daemon, 1)
    assert not has(bucket, "lighthouse")
    daemon.terminate()
    assert has(bucket, "lighthouse number 1 ")


def test_erasing_and_the_check_say_how_the_bucket_is(serving: Serving, s3: S3Server) -> None:
    settings, bucket = settings_for(s3)
    daemon = serving(settings)
    remember(daemon, 1)
    remember(daemon, 2)
    wait_until(lambda: has(bucket, "lighthouse number 2 "), lambda: f"{health(daemon)}")
    chunk = next(one["id"] for one in daemon.export() if "number 1 " in one["content"])
    told = daemon.run("erase", "--chunk", chunk, "--yes", "--data-dir", str(daemon.data_dir))
    assert f"the backup in {settings['backup']['bucket']}, until one of its next rounds" in told.stdout, told.stderr
    wait_until(lambda: not has(bucket, "lighthouse number 1 "), lambda: f"{health(daemon)}")
    assert has(bucket, "lighthouse number 2 ")

    def checked() -> list[dict[str, str]]:
        told = daemon.run("check", "--config", str(daemon.config), "--json")
        return [one for one in json.loads(told.stdout)["checks"] if one["check"] in ("backup", "daemon")]

    assert [(one["check"], one["mark"]) for one in checked()] == [("backup", "ok")], "and no trouble of the daemon"
    s3.keep_versions(s3.settings_of(settings["backup"]["bucket"]))
    assert checked()[0]["mark"] == "warning"
    assert "keeps versions" in checked()[0]["said"]
    daemon.terminate()
    daemon.configure(settings | {"backup": settings["backup"] | {"bucket": "s3://bucket-none/memd"}})
    [failed] = checked()
    assert (failed["mark"], "does not exist" in failed["remedy"] + failed["said"]) == ("failed", True)


def test_requests_go_on_while_the_bucket_is_away_and_the_metric_tells(serving: Serving, s3: S3Server) -> None:
    settings, _ = settings_for(s3)
    settings["backup"]["endpoint"] = "http://127.0.0.1:9"
    daemon = serving(settings)
    remember(daemon, 1)
    assert daemon.chat([{"role": "user", "content": "hello"}]).status == 200
    wait_until(lambda: health(daemon)["trouble"] is not None, lambda: f"{health(daemon)}")
    told = ask(f"{daemon.own_url}/memd/metrics").body.decode()
    line = next(line for line in told.splitlines() if line.startswith("memd_backup_lag_seconds "))
    assert float(line.split()[1]) > 0
    assert "backup.endpoint" in health(daemon)["trouble"]
    checks = json.loads(daemon.run("check", "--config", str(daemon.config), "--json").stdout)["checks"]
    assert any(one["check"] == "daemon" and "backup.endpoint" in one["said"] + one["remedy"] for one in checks)


def test_the_conversation_of_the_check_is_not_in_the_backup(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server
) -> None:
    settings, bucket = settings_for(s3)
    daemon = make_daemon(None, settings | {"upstream": {"url": upstream.url}})
    told = daemon.run("check", "--live", "--json", "--config", str(daemon.config))
    marks = [one["mark"] for one in json.loads(told.stdout)["checks"] if one["check"] == "live"]
    assert marks == ["warning", "ok"], f"answered, by a model that does not use what it is shown: {told.stdout}"
    assert list(bucket.listed("")) == []


def test_a_restoration_of_nothing_says_so(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server, tmp_path: Path
) -> None:
    settings, _ = settings_for(s3)
    daemon = make_daemon(upstream.url, settings)
    for source, said in (
        (settings["backup"]["bucket"], "has no backup"),
        ("/some/folder", "has no backup of memd; give its folder, or s3://BUCKET/PREFIX"),
        ("https://bucket", "is no bucket; give s3://BUCKET/PREFIX"),
    ):
        told = restored_by_command(daemon, source, tmp_path / "to")
        assert told.exit_code in (1, 2)
        assert said in told.stderr
    assert not (tmp_path / "to").exists()
