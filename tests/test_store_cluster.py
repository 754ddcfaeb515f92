"""The contract of shelves, kept by PostgreSQL and a bucket, and what only a shelf has that several daemons share."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest
from bucket_server import held_until
from crash_files import CrashFiles, PowerCutError
from cut_connections import LosingRelay
from drafts import DATA_DIR, counting_clock, draft, live_contents, seal_all
from effort import steps
from encrypted_files import EncryptedCrashFiles
from obstore.store import LocalStore, MemoryStore
from postgres_server import PostgresServer, running_postgres
from shelf_contract import MODEL, TOPIC, Ground, Log, ShelfContract, group, groups_in

from memd.entries import Erased
from memd.errors import (
    BadTopicId,
    BucketError,
    DiskFull,
    Fenced,
    InDoubt,
    StoreError,
    StoreWriteFailed,
    TopicHeld,
    WrongKey,
)
from memd.store.bucket.objects import Bucket
from memd.store.clock import SharedClock
from memd.store.cluster import database as database_module
from memd.store.cluster.database import SCHEMA_VERSION, Connection, Database
from memd.store.cluster.kept import KeptObject
from memd.store.cluster.object_keeper import PIECE_BYTES
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.cluster.reading_ahead import AHEAD_BYTES_MAX, READS_AT_ONCE, read_ahead
from memd.store.disk import DiskFiles, LocalDisk
from memd.store.encryption.master_key import MasterKey
from memd.store.erasure.wiping import Wiper
from memd.store.files import TEMPORARY_SUFFIX, FileChecksum, write_beside
from memd.store.layout import CLUSTER_NAME, LOCK_NAME
from memd.store.log.format import HEADER_BYTES
from memd.store.log.journal import Journal
from memd.store.parts import StoreShared
from memd.store.shelf import Claim, Position, Shelf
from memd.store.topic import TopicLog

pytestmark = pytest.mark.process
Result = TypeVar("Result")


class Steps:
    """Counts what is done outside of the folder, and cuts the power there."""

    def __init__(self) -> None:
        self.count = 0
        self.cut_after: int | None = None

    def step(self) -> None:
        self.count += 1
        if self.cut_after is not None and self.count > self.cut_after:
            raise PowerCutError


class CutDatabase(Database):
    """The power may fail before work, and after it, when nobody has heard of it yet."""

    steps = Steps()

    def again(self, work: Callable[[Connection], Result], *, urgent_seconds: float = 0.0) -> Result:
        self.steps.step()
        result = super().again(work, urgent_seconds=urgent_seconds)
        self.steps.step()
        return result


class CutBucket(Bucket):
    steps = Steps()
    cluster: Cluster

    def put(self, key: str, data: bytes | Iterable[bytes], *, new: bool = False) -> bool:
        self.steps.step()
        self.cluster.attempts += not new
        self._look()
        if not new:
            self.cluster.before_put()
        done = super().put(key, data, new=new)
        self.steps.step()
        return done

    def read(self, key: str, start: int, end: int) -> bytes:
        self._look()
        self.cluster.before_read()
        return super().read(key, start, end)

    def get(self, key: str) -> bytes | None:
        self._look()
        return super().get(key)

    def _look(self) -> None:
        if self.cluster.bucket_is_away:
            raise BucketError("memory://: does not answer")

    def delete(self, keys: list[str]) -> None:
        self.steps.step()
        self._look()
        super().delete(keys)


class Cluster:
    """A database and a bucket, empty. See Ground."""

    def __init__(self, database: CutDatabase, relay: LosingRelay, *, is_encrypted: bool = False) -> None:
        self.database = database
        self._is_encrypted = is_encrypted
        self._relay = relay
        self.clear()

    def clear(self) -> None:
        self.steps = self.database.steps = Steps()
        with self.database.connection() as connection:
            connection.execute("UPDATE memd_version SET key = NULL")
            connection.execute("TRUNCATE memd_topic, memd_log, memd_object, memd_garbage")
        self.objects = MemoryStore()
        self.bucket_is_away, self.attempts = False, 0
        self.before_put: Callable[[], object] = lambda: None
        self.before_read: Callable[[], object] = lambda: None

    def daemon(self, name: str, files: LocalDisk | None = None, *, lease_seconds: float = 60.0) -> PostgresShelf:
        """The shelf of a daemon with a folder of its own."""
        files = files or self.on_disk()
        files.lock(DATA_DIR / LOCK_NAME)
        bucket = CutBucket(self.objects, "memory://")
        bucket.steps, bucket.cluster = self.steps, self
        return PostgresShelf(self.database, bucket, files, DATA_DIR, url=f"http://{name}", lease_seconds=lease_seconds)

    def on_disk(self) -> CrashFiles | EncryptedCrashFiles:
        """An empty folder."""
        return EncryptedCrashFiles(on_disk()) if self._is_encrypted else on_disk()

    def shelf(self) -> Shelf:
        return self.daemon("one")

    def another(self) -> Shelf:
        return self.daemon("two")

    def lose_answer(self, name: str = "two", *, times: int = 1) -> None:
        self._relay.lose_answer_to(f"chunk {name}.0".encode(), times=times)

    def crashes(self, work: Callable[[Shelf], object]) -> Iterator[Shelf]:
        self.clear()
        files = self.on_disk()
        shelf = self.daemon("one", files, lease_seconds=0)
        start = files.operations
        work(shelf)
        counts = self.steps.count, files.operations
        for cut in steps(0, counts[0]):
            yield self._crashed(work, outside=cut, inside=None)
        for cut in steps(start, counts[1]):
            yield self._crashed(work, outside=None, inside=cut)

    def no_object_is_forgotten(self) -> bool:
        """Whether each object in the bucket counts, or is known to be garbage."""
        known = {key for (key,) in self.rows("SELECT key FROM memd_object UNION SELECT key FROM memd_garbage")}
        return self.keys() <= known

    def keys(self) -> set[str]:
        """Of the objects in the bucket."""
        return {one["path"] for page in self.objects.list() for one in page} - {"memd.cluster"}

    def finds(self, text: bytes) -> bool:
        """Whether it is anywhere in the bucket, or in a row."""
        rows = self.rows("SELECT encode(data, 'escape') FROM memd_log")
        tables = [self.rows(f"SELECT t::text FROM memd_{table} AS t") for table in ("topic", "object", "garbage")]
        found = [bytes(self.objects.get(key).bytes()) for key in self.keys()]
        return any(text in data for data in found) or text.decode() in str([rows, tables])

    def _crashed(self, work: Callable[[Shelf], object], *, outside: int | None, inside: int | None) -> Shelf:
        """The shelf of whoever has the topic next: every other time with a folder that knows nothing of it."""
        self.clear()
        files = self.on_disk()
        shelf = self.daemon("one", files, lease_seconds=0)
        self.steps.cut_after, files.cut_after = outside, inside
        with pytest.raises(PowerCutError):
            work(shelf)
        self.steps.cut_after = None
        assert self.no_object_is_forgotten()
        is_other = ((outside or 0) + (inside or 0)) % 2
        return self.daemon("two" if is_other else "one", self.on_disk() if is_other else files.after_power_cut("torn"))

    def rows(self, statement: str) -> list[tuple[object, ...]]:
        with self.database.connection() as connection:
            return list(connection.execute(statement).fetchall())


def on_disk() -> CrashFiles:
    return CrashFiles.with_directory(DATA_DIR)


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[tuple[CutDatabase, LosingRelay]]:
    with (
        tempfile.TemporaryDirectory(prefix="memd-") as folder,
        closing(LosingRelay(Path(folder), postgres.socket)) as relay,
        closing(CutDatabase(postgres.url(folder=folder), connect_seconds=1.0)) as database,
    ):
        yield database, relay


@pytest.fixture
def cluster(database: tuple[CutDatabase, LosingRelay]) -> Cluster:
    return Cluster(*database)


@pytest.fixture
def encrypted(database: tuple[CutDatabase, LosingRelay]) -> Cluster:
    return Cluster(*database, is_encrypted=True)


class TestPostgresShelf(ShelfContract):
    """The contract, in a cluster."""

    @pytest.fixture
    def ground(self, cluster: Cluster) -> Ground:
        return cluster


class TestEncryptedShelf(ShelfContract):
    """The contract, in a cluster that sees nothing of what it keeps."""

    @pytest.fixture
    def ground(self, encrypted: Cluster) -> Iterator[Ground]:
        yield encrypted
        assert not encrypted.finds(b"chunk ")


def open_log(
    shelf: Shelf, *, segment_entries_max: int = 5, gone: str = "", now_us: Callable[[], int] | None = None
) -> TopicLog:
    """A topic as the store opens it."""
    return log_of(shelf, shelf.claim(TOPIC, gone=gone), segment_entries_max=segment_entries_max, now_us=now_us)


def log_of(
    shelf: Shelf, claim: Claim, *, segment_entries_max: int = 5, now_us: Callable[[], int] | None = None
) -> TopicLog:
    shared = StoreShared(
        files=claim.files,
        shelf=shelf,
        model=MODEL,
        clock=SharedClock(now_us or counting_clock()),
        segment_entries_max=segment_entries_max,
    )
    return TopicLog(shared, claim)


def test_a_topic_is_had_by_another_daemon_once_it_is_let_go_or_its_lease_has_ended_or_its_owner_is_gone(
    cluster: Cluster,
) -> None:
    one, two = cluster.daemon("one"), cluster.daemon("two")
    log = Log(one.claim(TOPIC))
    log.append("one")
    with pytest.raises(TopicHeld, match="http://one has it") as held:
        two.claim(TOPIC)
    assert held.value.url == "http://one"
    with pytest.raises(TopicHeld):
        two.claim(TOPIC, gone="http://three")
    second = Log(two.claim(TOPIC, gone="http://one"))
    with pytest.raises(Fenced, match="http://two has it by now"):
        log.append("three")  # also while the end is where it was
    second.append("two")
    with pytest.raises(Fenced):
        log.append("three")
    assert one.renew([log.claim]) == [log.claim]
    assert two.renew([second.claim]) == []
    second.claim.release()
    third = Log(one.claim(TOPIC))
    third.append("four")
    assert groups_in(two, 1) == ["one", "two", "four"]
    cluster.rows("UPDATE memd_topic SET lease_until = clock_timestamp() - interval '1 second' RETURNING 1")
    assert one.renew([third.claim]) == []
    with pytest.raises(TopicHeld):
        two.claim(TOPIC)
    cluster.rows("UPDATE memd_topic SET lease_until = clock_timestamp() - interval '1 second' RETURNING 1")
    Log(two.claim(TOPIC)).append("five")
    assert one.renew([third.claim]) == [third.claim]


def test_a_whole_topic_is_there_on_a_machine_that_never_had_it(cluster: Cluster) -> None:
    here = cluster.daemon("one")
    log = open_log(here)
    entries = []
    for number in range(10):
        entries += log.append([draft(f"{number}.{i}") for i in range(2)])
        seal_all(log)
    log.merge([1, 2])
    erased = [entries[0].uuid, entries[-1].uuid]
    assert log.erase(erased, Erased(at=1, by="test"), Wiper(log.claim.files)) == 2
    seal_all(log)
    contents = live_contents(log)
    names = cluster.rows("SELECT name FROM memd_object ORDER BY name")
    log.close()
    there = open_log(cluster.daemon("two"))
    assert there.findings == [] and there.unsealed() == []
    assert live_contents(there) == contents
    assert len(contents) == 18
    frozen = {("hot.log",), ("segments/seg_0004.bin",)}
    assert set(cluster.rows("SELECT name FROM memd_object")) - frozen == set(names)
    assert {name for (name,) in names} >= {"segments/seg_0001.bin", "segments/seg_0001.meta", "segments/seg_0001.hnsw"}
    assert cluster.rows("SELECT * FROM memd_log") == []
    there.append([draft("later")])
    assert cluster.rows("SELECT stream, number FROM memd_log") == [("log", 4)]
    assert len(live_contents(there)) == 19
    listed = {key for (key,) in cluster.rows("SELECT key FROM memd_object")}
    assert cluster.keys() == listed


def small_segments(cluster: Cluster, count: int) -> list[str]:
    """A topic of so many segments, that nobody has; what it says."""
    log = open_log(cluster.daemon("one"))
    for number in range(count):
        log.append([draft(f"{number}.{i}") for i in range(5)])
        seal_all(log)
    contents = live_contents(log)
    log.close()
    return contents


LOSSES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


def lose(cluster: Cluster, name: str, how: str) -> str:
    """Let something happen to the object of a file; its key."""
    [(key,)] = cluster.rows(f"SELECT key FROM memd_object WHERE name = 'segments/{name}'")
    left = LOSSES[how](bytes(cluster.objects.get(str(key)).bytes()))
    cluster.objects.delete(str(key)) if left is None else cluster.objects.put(str(key), left)
    return str(key)


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_indexes_that_the_bucket_has_lost_are_built_again_and_put_back(
    request: pytest.FixtureRequest, how: str, is_encrypted: bool
) -> None:
    cluster: Cluster = request.getfixturevalue("encrypted" if is_encrypted else "cluster")
    log = open_log(cluster.daemon("one"))
    for number in range(4):
        log.append([draft(f"{number}.{i}") for i in range(5)])
        seal_all(log)
    log.merge([1, 2])
    contents = live_contents(log)
    log.close()
    for name in ("seg_0003.hnsw", "seg_0004.meta", "merged_0001_0002.ivf"):
        lose(cluster, name, how)
    there = open_log(cluster.daemon("two"))
    assert live_contents(there) == contents and there.unsealed() == [3, 4]
    seal_all(there)
    there.close()
    again = open_log(cluster.daemon("three"))
    assert again.findings == [] and again.unsealed() == []
    assert live_contents(again) == contents
    assert cluster.no_object_is_forgotten()


@pytest.mark.parametrize("how", LOSSES)
def test_a_log_that_the_bucket_has_lost_is_named_and_the_topic_is_as_it_was(cluster: Cluster, how: str) -> None:
    contents = small_segments(cluster, 2)
    [(key,)] = cluster.rows("SELECT key FROM memd_object WHERE name = 'segments/seg_0001.bin'")
    before = cluster.objects.get(str(key)).bytes()
    lose(cluster, "seg_0001.bin", how)
    shelf = cluster.daemon("two")
    with pytest.raises(StoreError, match=rf"seg_0001\.bin is nowhere else.*{key}.*put that object back"):
        shelf.claim(TOPIC)
    cluster.objects.put(str(key), before)
    assert live_contents(open_log(shelf)) == contents


def test_the_objects_of_a_topic_are_fetched_at_once_and_not_too_many(cluster: Cluster) -> None:
    contents = small_segments(cluster, READS_AT_ONCE)
    cluster.before_read = held_until(READS_AT_ONCE)
    assert live_contents(open_log(cluster.daemon("two"))) == contents
    read: list[str] = []

    def pieces_of(one: KeptObject) -> Iterator[bytes]:
        read.append(one.name)
        yield b""

    large = [KeptObject(f"{number}", f"{number}", FileChecksum(PIECE_BYTES, 0)) for number in range(9)]
    with read_ahead(large, pieces_of) as ahead:
        assert list(ahead(large[0])) == [b""]
    assert 1 <= len(read) <= 1 + AHEAD_BYTES_MAX // PIECE_BYTES


def test_where_an_object_cannot_be_read_nothing_more_is_asked_and_what_is_there_is_not_fetched_again(
    cluster: Cluster,
) -> None:
    contents, reads, files = small_segments(cluster, READS_AT_ONCE), itertools.count(1), cluster.on_disk()

    def fail() -> None:
        cluster.bucket_is_away |= next(reads) > READS_AT_ONCE

    cluster.before_read = fail
    shelf = cluster.daemon("two", files)
    with pytest.raises(BucketError):
        shelf.claim(TOPIC)
    assert next(reads) <= 1 + 2 * READS_AT_ONCE
    assert not [path for path in files.contents() if path.endswith(TEMPORARY_SUFFIX)]
    fetched = len([path for path in files.contents() if "/segments/" in path])
    assert 0 < fetched < len(cluster.keys())
    cluster.bucket_is_away, cluster.before_read, all_reads = False, lambda: next(reads), next(reads)
    assert live_contents(open_log(shelf)) == contents
    assert next(reads) - all_reads - 1 == len(cluster.rows("SELECT * FROM memd_object")) - fetched


def test_the_heads_tell_when_something_else_than_an_append_has_happened(cluster: Cluster) -> None:
    shelf = cluster.daemon("one")
    log = open_log(shelf)
    log.append([draft("first")])
    revisions = [shelf.heads([TOPIC])[TOPIC].revision]
    log.append([draft("second")])
    assert shelf.heads([TOPIC])[TOPIC].revision == revisions[0]
    for work in (
        lambda: log.erase([draft("first").uuid], Erased(at=1, by="test"), Wiper(log.claim.files)),
        lambda: log.append([draft(number) for number in range(5)]),  # that fills the file
        lambda: log.append([draft("third")]),
        lambda: seal_all(log),
    ):
        ends = shelf.heads([TOPIC])[TOPIC].log
        work()
        now = shelf.heads([TOPIC])[TOPIC]
        assert now.revision not in revisions or now.log.number != ends.number
        revisions.append(now.revision)
    for table in ("topic", "log", "object"):
        cluster.rows(f"DELETE FROM memd_{table} WHERE topic = 'talk' RETURNING 1")
    open_log(shelf).append([draft("of another topic of this name")])
    assert shelf.heads([TOPIC])[TOPIC].revision not in revisions


def test_a_cache_that_was_changed_is_made_equal_again(cluster: Cluster) -> None:
    files = on_disk()
    log = open_log(cluster.daemon("one", files))
    for number in range(4):
        log.append([draft(f"{number}.{i}") for i in range(3)])
        seal_all(log)
    log.append([draft("last")])
    contents, layout = live_contents(log), log.claim.layout
    log.close()
    files.flip(layout.bin(1), 100)
    files.put(layout.meta(7), b"of nobody")
    files.put(layout.active, files.read(layout.active) + group("never acknowledged"))
    again = open_log(cluster.daemon("one", files.after_power_cut("lost")))
    assert again.findings == []
    assert live_contents(again) == contents


def test_a_topic_that_is_let_go_costs_no_rows_and_goes_on_where_it_ended(cluster: Cluster) -> None:
    one, two = cluster.daemon("one"), cluster.daemon("two")
    names: list[str] = []
    for number, shelf in enumerate((one, two, two, one, two)):
        log = Log(shelf.claim(TOPIC))
        journal, payloads = Journal.open(log.claim)
        assert payloads == [name.encode() for name in names[-1:]]
        names.append(f"turn {number}")
        log.append(names[-1])
        journal.rewrite([names[-1].encode()])
        assert groups_in(shelf, log.segment) == names
        if number == 2:
            log.rotate()
        log.claim.release()
        assert cluster.rows("SELECT * FROM memd_log") == []
        keys = cluster.keys()
        assert len(keys) == len(cluster.rows("SELECT DISTINCT key FROM memd_object")) == (1 if number < 2 else 2)
        ended = shelf.heads([TOPIC])[TOPIC].log.end
        assert groups_in(shelf, log.segment) == names
        whole = shelf.read(TOPIC, "log", Position(log.segment, 0))
        assert [shelf.read(TOPIC, "log", Position(log.segment, at)) for at in (9, ended - 7)] == [whole[9:], whole[-7:]]
    for nothing_written in (one, two):
        nothing_written.claim(TOPIC).release()
        assert cluster.keys() == keys
    assert cluster.rows("SELECT key FROM memd_garbage") == []


def test_a_claim_that_was_taken_over_freezes_nothing(cluster: Cluster) -> None:
    log = Log(cluster.daemon("one").claim(TOPIC))
    log.append("one")
    later = Log(cluster.daemon("two").claim(TOPIC, gone="http://one"))
    later.append("two")
    log.claim.release()
    assert cluster.rows("SELECT key FROM memd_object") == []
    later.append("three")
    later.claim.release()
    assert groups_in(cluster.daemon("three"), 1) == ["one", "two", "three"]
    assert len(cluster.keys()) == 1, "what was written for nothing is removed with the next claim"


def test_an_object_that_is_written_after_the_topic_was_taken_over_does_not_stay(cluster: Cluster) -> None:
    for is_sealing in (True, False):
        cluster.clear()
        late = open_log(cluster.daemon("one"), segment_entries_max=3)
        late.append([draft(number) for number in range(3 if is_sealing else 2)])
        two, taken = cluster.daemon("two"), list[Claim]()

        def take_over(two: Shelf = two, taken: list[Claim] = taken) -> None:
            if not taken:  # a daemon that was stopped just here
                taken.append(two.claim(TOPIC, gone="http://one"))

        cluster.before_put = take_over
        if is_sealing:
            with pytest.raises(Fenced):
                late.seal(1)
        late.close()
        assert taken and cluster.attempts
        assert cluster.keys() == set()
        assert cluster.rows("SELECT key FROM memd_garbage UNION SELECT key FROM memd_object") == []
        assert len(live_contents(log_of(two, taken[0]))) == (3 if is_sealing else 2)


def test_while_the_bucket_is_away_topics_are_let_go_as_they_are(cluster: Cluster) -> None:
    shelf = cluster.daemon("one")
    logs = [Log(shelf.claim(topic)) for topic in (TOPIC, "other")]
    logs[0].append("one")
    cluster.bucket_is_away = True
    logs[0].claim.release()
    attempts = cluster.attempts
    logs[1].claim.release()
    assert attempts == cluster.attempts == 1, "of many topics one waits for the bucket"
    assert len(cluster.rows("SELECT * FROM memd_topic WHERE url IS NULL")) == 2
    cluster.bucket_is_away = False
    assert groups_in(shelf, 1) == ["one"]
    log = Log(cluster.daemon("two").claim(TOPIC))
    log.append("two")
    log.claim.release()
    assert cluster.rows("SELECT * FROM memd_log WHERE topic = 'talk'") == []
    assert groups_in(shelf, 1) == ["one", "two"]


def test_what_something_else_has_written_into_a_stream_is_never_frozen(cluster: Cluster) -> None:
    files = on_disk()
    log = Log(cluster.daemon("one", files).claim(TOPIC))
    log.append("one")
    files.flip(log.claim.layout.active, HEADER_BYTES + 40)
    log.claim.release()
    assert cluster.rows("SELECT key FROM memd_object") == []
    assert groups_in(cluster.daemon("two"), 1) == ["one"]


def test_a_claim_reads_nothing_of_what_this_folder_is_known_to_have(cluster: Cluster) -> None:
    files = on_disk()
    log = open_log(cluster.daemon("one", files))
    for number in range(12):
        log.append([draft(number)])
        seal_all(log)
    log.close()
    layout = log.claim.layout
    again = files.after_power_cut("kept")
    shelf = cluster.daemon("one", again)
    cluster.bucket_is_away = True
    claim = shelf.claim(TOPIC)
    assert {name for name, count in again.bytes_read.items() if count} == {"active.bin", "cached", "memd.cluster"}
    assert again.bytes_read["active.bin"] == HEADER_BYTES
    claim.release()
    again.put(layout.hnsw(1), again.read(layout.hnsw(1)))
    again.bytes_read.clear()
    shelf.claim(TOPIC).release()
    assert again.bytes_read[layout.hnsw(1).name] == again.size(layout.hnsw(1)), "it was written since"
    cluster.bucket_is_away = False
    for path in (layout.meta(1), layout.active):
        again.put(path, again.read(path)[:-9])
    assert live_contents(open_log(shelf)) == live_contents(log)


class ReadFiles(DiskFiles):
    """Knows what was read in parts, as checksums are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in: set[str] = set()

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        self.read_in |= {path.name} if length > HEADER_BYTES else set()
        return super().read_at(path, offset, length)


def test_on_a_real_disk_a_file_is_read_again_only_if_something_wrote_to_it(cluster: Cluster, tmp_path: Path) -> None:
    files = ReadFiles()
    files.lock(tmp_path / LOCK_NAME)
    bucket = Bucket(cluster.objects, "memory://")
    shelf = PostgresShelf(cluster.database, bucket, files, tmp_path, url="http://one", lease_seconds=60)
    log = open_log(shelf)
    log.append([draft(number) for number in range(7)])
    seal_all(log)
    log.close()
    full = log.claim.layout.bin(1)
    files.read_in = set()
    shelf.claim(TOPIC).release()
    assert files.read_in == set()
    whole = full.read_bytes()
    with full.open("r+b") as file:
        file.seek(len(whole) // 2)
        file.write(b"???")
    shelf.claim(TOPIC).release()
    assert files.read_in == {full.name}
    assert full.read_bytes() == whole


def test_what_was_erased_elsewhere_leaves_the_cache_and_its_lexical_index(cluster: Cluster) -> None:
    files = on_disk()
    shelf, there = cluster.daemon("one", files), cluster.daemon("two")
    log = open_log(shelf)
    entries = [log.append([draft(f"secret {number}")])[0] for number in range(7)]
    seal_all(log)
    log.close()
    files.make_directory(log.claim.layout.lexical)
    files.put(log.claim.layout.lexical / "terms", b"secret 3")
    kept = files.names(log.claim.layout.lexical)
    open_log(shelf).close()
    assert files.names(log.claim.layout.lexical) == kept
    other = open_log(there)
    other.append([draft(f"later {number}") for number in range(4)])  # that fills the file
    other.close()
    open_log(shelf).close()
    assert files.names(log.claim.layout.lexical) == kept, "more was said, and nothing is gone"
    other = open_log(there)
    other.erase([entries[3].uuid, entries[5].uuid], Erased(at=1, by="test"), Wiper(other.claim.files))
    other.close()
    assert cluster.finds(b"secret 2") and not cluster.finds(b"secret 3") and not cluster.finds(b"secret 5")
    shelf.claim(TOPIC)
    assert files.names(log.claim.layout.lexical) == []
    assert not [path for path, data in files.contents().items() if b"secret 3" in data or b"secret 5" in data]


def test_a_journal_that_is_wiped_leaves_the_object_that_it_was_frozen_into(cluster: Cluster) -> None:
    for wiped in ("hot", "log"):
        cluster.clear()
        shelf = cluster.daemon(f"one of {wiped}")
        log = Log(shelf.claim(TOPIC))
        log.append("one")
        Journal.open(log.claim)[0].rewrite([b"whisper"])
        log.claim.release()
        claim = shelf.claim(TOPIC)
        layout, files, wiper = claim.layout, claim.files, Wiper(claim.files)
        if wiped == "hot":
            Journal.open(claim)[0].rewrite([b"..."], wiper=wiper)
            assert not cluster.finds(b"whisper") and cluster.finds(b"chunk one.0")
        else:
            Log(claim)
            claim.roll("log", write_beside(files, layout.active, files.read(layout.active)[:HEADER_BYTES]), wiper)
            assert not cluster.finds(b"chunk one.0") and cluster.finds(b"whisper")
        assert wiper.left == []
        Log(claim).append("two")
        claim.release()
        assert groups_in(shelf, 1) == (["one", "two"] if wiped == "hot" else ["two"])
        assert Journal.open(shelf.claim(TOPIC))[1] == [b"..." if wiped == "hot" else b"whisper"]


def test_a_topic_that_is_forgotten_is_nowhere_and_the_next_one_of_its_name_is_another(cluster: Cluster) -> None:
    ahead = partial(int, 2 * 10**15)
    shelf = cluster.daemon("one")
    log = open_log(shelf, now_us=ahead)
    entries = log.append([draft(f"secret {number}") for number in range(8)])
    seal_all(log)
    Journal.open(log.claim)[0].rewrite([b"secret whisper"])
    log.claim.publish({log.claim.layout.forbidden: write_beside(log.claim.files, log.claim.layout.forbidden, b"{}")})
    log.close()
    late = open_log(shelf)
    late.append([draft("secret late")])
    revision = shelf.heads([TOPIC])[TOPIC].revision
    with pytest.raises(TopicHeld):
        cluster.daemon("two").forget(TOPIC)
    assert shelf.forget(TOPIC, erasure=5, id_floor=entries[-1].canonical_id) == []
    assert not cluster.finds(b"secret") and len(cluster.keys()) == 1, "but what is forbidden"
    assert (shelf.heads([TOPIC]), shelf.topics("", 9), shelf.read(TOPIC, "log", Position(1, 0))) == ({}, [], b"")
    with pytest.raises(Fenced):
        late.append([draft("secret later")])
    late.close()
    there = cluster.daemon("two")
    log = open_log(there, now_us=partial(int, 1))
    assert log.claim.files.read(log.claim.layout.forbidden) == b"{}"
    assert log.append([draft("new")])[0].canonical_id > entries[-1].canonical_id, "by whatever clock"
    assert there.heads([TOPIC])[TOPIC].revision > revision
    log.close()
    assert shelf.forget(TOPIC, erasure=5) == [], "was done"
    assert live_contents(open_log(shelf)) == ["user: chunk new"]


def test_what_the_bucket_still_has_of_a_forgotten_topic_is_told_until_it_is_gone(cluster: Cluster) -> None:
    shelf = cluster.daemon("one")
    log = Log(shelf.claim(TOPIC))
    log.append("one")
    log.claim.release()
    cluster.bucket_is_away = True
    left = shelf.forget(TOPIC, erasure=1)
    assert set(left) == cluster.keys() and len(left) == 1
    assert shelf.sweep(TOPIC) == left
    log = Log(cluster.daemon("two").claim(TOPIC))
    cluster.bucket_is_away = False
    log.claim.release()
    assert shelf.sweep(TOPIC) == []
    assert not cluster.finds(b"chunk one")


def test_forgetting_is_all_or_nothing_wherever_the_power_fails(cluster: Cluster) -> None:
    words = b'{"never": "again"}'

    def work(shelf: Shelf) -> None:
        log = Log(shelf.claim(TOPIC))
        log.append("one")
        log.claim.release()
        shelf.forget(TOPIC, erasure=1, forbidden=words)

    for shelf in cluster.crashes(work):
        before = groups_in(shelf, 1)
        assert before in ([], ["one"])
        assert shelf.forget(TOPIC, erasure=1, forbidden=words) == []
        assert groups_in(shelf, 1) == [] and not cluster.finds(b"chunk one")
        claim = shelf.claim(TOPIC)
        assert claim.files.read(claim.layout.forbidden) == words


def test_an_encrypted_cluster_is_read_by_who_has_the_key_and_by_nobody_else(encrypted: Cluster) -> None:
    shelf, there = encrypted.daemon("one"), encrypted.daemon("two")
    log = open_log(shelf)
    entries = [log.append([draft(f"secret {number}")])[0] for number in range(12)]
    seal_all(log)
    Journal.open(log.claim)[0].rewrite([b"secret whisper"])
    contents = live_contents(log)
    assert not encrypted.finds(b"secret")
    log.close()
    assert not encrypted.finds(b"secret")
    log = open_log(there)
    assert live_contents(log) == contents
    assert Journal.open(log.claim)[1] == [b"secret whisper"]
    log.append([draft("secret 13")])
    log.erase([entries[0].uuid], Erased(at=1, by="test"), Wiper(log.claim.files))
    listing = shelf.listing(TOPIC)
    assert listing is not None and len(listing.objects) == 4, "the indexes over what was erased are gone"
    for one in listing.objects:
        path = log.claim.layout.directory / one.name
        assert b"".join(shelf.pieces(one)) == log.claim.files.read(path)
    whole = log.claim.files.read(log.claim.layout.active)
    for at in (0, 9, len(whole) - 3, len(whole) + 4):
        assert shelf.read(TOPIC, "log", Position(3, at)) == whole[at:]
    keys = encrypted.rows("SELECT key FROM memd_topic")
    log.claim.publish({log.claim.layout.forbidden: write_beside(log.claim.files, log.claim.layout.forbidden, b"{}")})
    log.close()
    assert shelf.forget(TOPIC) == []
    assert encrypted.rows("SELECT key FROM memd_topic") != keys, "what backups have of it nobody can open"
    claim = there.claim(TOPIC)
    assert claim.files.read(claim.layout.forbidden) == b"{}"
    with pytest.raises(WrongKey, match=r"the cluster is encrypted; give the key that all its daemons have"):
        encrypted.daemon("three", on_disk()).claim("other")
    stranger = EncryptedCrashFiles(on_disk())
    stranger.master = MasterKey(bytes(32))
    with pytest.raises(WrongKey, match=r"was encrypted with the key \w+, and this daemon has \w+"):
        encrypted.daemon("four", stranger).claim("other")


def test_a_sealed_row_or_object_at_another_place_is_refused(encrypted: Cluster) -> None:
    shelf = encrypted.daemon("one")
    for topic in (TOPIC, "other"):
        log = Log(shelf.claim(topic))
        log.append("one")
    for change in (
        "UPDATE memd_log SET data = (SELECT data FROM memd_log WHERE topic = 'other' AND start > 0)"
        " WHERE topic = 'talk' AND start > 0 RETURNING 1",
        "UPDATE memd_log SET data = set_byte(data, 70, get_byte(data, 70) # 1) WHERE topic = 'talk' RETURNING 1",
    ):
        assert encrypted.rows(change)
        with pytest.raises(StoreError, match=r"^talk log 1 \d+: is not as it was encrypted"):
            shelf.read(TOPIC, "log", Position(1, 0))
        with pytest.raises(StoreError, match="is not as it was encrypted"):
            shelf.claim(TOPIC)


def test_a_cluster_in_plain_text_is_not_encrypted_by_the_way(cluster: Cluster, encrypted: Cluster) -> None:
    here = cluster.daemon("one")
    log = Log(here.claim(TOPIC))
    log.append("one")
    encrypted.objects = cluster.objects
    with pytest.raises(WrongKey, match=r"a key is given, but the cluster has topics in plain text; `memd move` them"):
        encrypted.daemon("two").claim(TOPIC)
    log.append("two")
    encrypted.clear()
    Log(encrypted.daemon("two").claim(TOPIC))
    with pytest.raises(WrongKey, match="another daemon has just encrypted the new cluster; restart memd"):
        here.claim("other")  # which began when it was plain


def test_a_directory_with_topics_of_its_own_is_no_cache(cluster: Cluster) -> None:
    files = on_disk()
    files.make_directory(DATA_DIR / "mine")
    files.put(DATA_DIR / "mine" / "active.bin", b"of great worth")
    with pytest.raises(StoreError, match="choose an empty data_dir"):
        cluster.daemon("one", files)
    assert files.read(DATA_DIR / "mine" / "active.bin") == b"of great worth"


def test_no_two_daemons_begin_topics_whose_names_differ_only_in_case(cluster: Cluster) -> None:
    one, two = cluster.daemon("one"), cluster.daemon("two")
    one.claim("Harbour")
    with pytest.raises(BadTopicId, match="differs only in case from 'Harbour'"):
        two.claim("harbour")


def test_the_first_claims_of_a_folder_may_come_all_at_once(cluster: Cluster, tmp_path: Path) -> None:
    for attempt in range(20):
        (folder := tmp_path / str(attempt)).mkdir()
        bucket = Bucket(cluster.objects, "memory://")
        shelf = PostgresShelf(cluster.database, bucket, DiskFiles(), folder, url="http://one", lease_seconds=0)
        with ThreadPoolExecutor(8) as threads:
            assert len(list(threads.map(shelf.claim, (f"talk-{number}" for number in range(8))))) == 8
        assert (folder / CLUSTER_NAME).read_text().startswith(cluster.database.cluster)


def test_an_object_that_was_written_by_a_fenced_claim_counts_for_nothing(cluster: Cluster) -> None:
    one, two = cluster.daemon("one"), cluster.daemon("two")
    late = open_log(one, segment_entries_max=3)
    late.append([draft(number) for number in range(3)])
    now = open_log(two, segment_entries_max=3, gone="http://one")
    assert now.unsealed() == [1]
    with pytest.raises(Fenced):
        late.seal(1)
    assert cluster.rows("SELECT name FROM memd_object") == []
    assert len(live_contents(now)) == 3
    now.seal(1)
    assert len(cluster.rows("SELECT name FROM memd_object")) == 3


def test_rows_are_not_trimmed_for_an_object_that_is_not_as_long(cluster: Cluster) -> None:
    files = on_disk()
    log = open_log(cluster.daemon("one", files), segment_entries_max=3)
    log.append([draft(number) for number in range(3)])
    path = log.claim.layout.bin(1)
    files.put(path, files.read(path) + b"changed")
    with pytest.raises(StoreError, match="something else changed it; nothing was published"):
        log.seal(1)
    assert cluster.rows("SELECT name FROM memd_object") == []
    log.close()
    assert len(live_contents(open_log(cluster.daemon("two")))) == 3


INGEST = """
import sys
from pathlib import Path
from drafts import draft, seal_all
from obstore.store import LocalStore
from test_store_cluster import open_log
from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Database
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.disk import DiskFiles
url, folder, bucket, name, gone = sys.argv[1:]
files = DiskFiles()
files.lock(Path(folder) / "memd.lock")
kept = Bucket(LocalStore(bucket), "file://")
shelf = PostgresShelf(Database(url), kept, files, Path(folder), url=name, lease_seconds=60)
log = open_log(shelf, segment_entries_max=7, gone=gone)
for number in range(100_000):
    log.append([draft(f"{name} {number} {i}") for i in range(3)])
    print(number, flush=True)
    seal_all(log)
"""


def test_daemons_that_are_killed_one_after_the_other_lose_nothing_that_they_acknowledged(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url, wanted, gone = postgres.database("of_the_killed"), list[str](), "nobody"
    folders = {name: tmp_path / name for name in ("bucket", "first", "second", "last")}
    for folder in folders.values():
        folder.mkdir()
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [here / "support", here, here.parent]))}
    for name in ("first", "second", "first again"):
        arguments = [url, str(folders[name.split()[0]]), str(folders["bucket"]), name, gone]
        command = [sys.executable, "-c", INGEST, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(20):
                assert process.stdout.readline()
            process.kill()
            acknowledged = 20 + len(process.stdout.read().split())
        wanted += [f"user: chunk {name} {number} {i}" for number in range(acknowledged) for i in range(3)]
        gone = name
        # Whoever comes next has all of it, each once, and at most one group that was not acknowledged any more.
        files = DiskFiles()
        bucket = Bucket(LocalStore(str(folders["bucket"])), "file://")
        database = Database(url)
        looking = PostgresShelf(database, bucket, files, folders["last"], url="looking", lease_seconds=60)
        log = open_log(looking, segment_entries_max=7, gone=gone)
        found = live_contents(log)
        assert found[: len(wanted)] == wanted
        assert len(found) in (len(wanted), len(wanted) + 3)
        wanted, gone = found, "looking"
        log.close()
        database.close()


def test_a_lost_answer_is_settled_at_once_where_the_database_can_be_asked(cluster: Cluster) -> None:
    log = Log(cluster.daemon("one").claim(TOPIC))
    cluster.lose_answer("one")
    log.append("one")
    log.append("two")
    assert groups_in(cluster.daemon("two"), 1) == ["one", "two"]


def test_an_append_in_doubt_ends_the_claim_and_the_next_one_says_what_is_stored(cluster: Cluster) -> None:
    shelf = cluster.daemon("one")
    log = Log(shelf.claim(TOPIC))
    log.append("one")
    cluster.lose_answer(times=3)
    for name in ("two", "three"):
        with pytest.raises(InDoubt, match="looked at when the topic is opened again"):
            log.append(name)
    again = Log(shelf.claim(TOPIC))
    assert groups_in(shelf, 1) == ["one", "two"]
    again.append("four")
    assert groups_in(shelf, 1) == ["one", "two", "four"]


def until_it_works(work: Callable[[], object]) -> None:
    """Do work that waits for a connection, again and again until there is one."""
    for _ in range(500):
        with suppress(StoreWriteFailed):
            work()
            return
    work()


def test_while_the_database_is_away_nothing_is_stored_and_afterwards_it_goes_on(
    cluster: Cluster, postgres: PostgresServer
) -> None:
    shelf = cluster.daemon("one")
    log = Log(shelf.claim(TOPIC))
    log.append("one")
    postgres.stop()
    try:
        with pytest.raises(StoreWriteFailed, match="check the database") as failed:
            log.append("two")
        with pytest.raises(StoreError):
            shelf.heads([TOPIC])
    finally:
        postgres.start()
    assert not isinstance(failed.value, InDoubt), "nothing was sent"
    until_it_works(lambda: log.append("two"))
    assert groups_in(shelf, 1) == ["one", "two"]


def test_connections_that_the_server_has_ended_hold_nobody_up(postgres: PostgresServer) -> None:
    database = Database(postgres.database("ended"), connections_max=4)
    try:
        with ExitStack() as used:
            for _ in range(4):
                used.enter_context(database.connection())
        with psycopg.connect(postgres.url(), autocommit=True) as other:
            others = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = 'ended'"
            assert len(other.execute(others).fetchall()) >= 4
        assert database.again(lambda connection: connection.execute("SELECT 1").fetchone()) == (1,)
    finally:
        database.close()


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_work_that_had_to_give_way_to_others_is_done_again(cluster: Cluster, state: str) -> None:
    log = Log(cluster.daemon("one").claim(TOPIC))
    with cluster.database.connection() as connection:
        connection.execute("CREATE SEQUENCE tries")  # counts what is undone, too
        connection.execute(
            "CREATE FUNCTION give_way() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF nextval('tries') < 3 THEN RAISE EXCEPTION 'not now' USING ERRCODE = '{state}'; END IF;"
            " RETURN NEW; END $$"
        )
        connection.execute("CREATE TRIGGER tried BEFORE INSERT ON memd_log FOR EACH ROW EXECUTE FUNCTION give_way()")
    try:
        log.append("one")
    finally:
        with cluster.database.connection() as connection:
            connection.execute("DROP TRIGGER tried ON memd_log; DROP FUNCTION give_way; DROP SEQUENCE tries")
    log.append("two")
    assert groups_in(cluster.daemon("two"), 1) == ["one", "two"]


def test_what_the_database_refuses_is_not_in_doubt(cluster: Cluster) -> None:
    log = Log(cluster.daemon("one").claim(TOPIC))
    with cluster.database.connection() as connection:
        connection.execute("ALTER TABLE memd_log ADD CONSTRAINT none CHECK (stream = 'hot') NOT VALID")
    try:
        with pytest.raises(StoreWriteFailed, match="violates check constraint") as failed:
            log.append("one")
        assert not isinstance(failed.value, InDoubt)
        assert "talk" not in str(failed.value), "nothing is told of what was to be stored"
    finally:
        with cluster.database.connection() as connection:
            connection.execute("ALTER TABLE memd_log DROP CONSTRAINT none")
    log.append("two")
    assert groups_in(cluster.daemon("two"), 1) == ["two"]


def test_daemons_never_give_out_the_same_ids_also_if_their_clocks_say_the_same(cluster: Cluster) -> None:
    cluster.rows("DELETE FROM memd_seat RETURNING 1")
    files = on_disk()
    turns = [cluster.daemon(name, files if name == "one" else None).claim(name).id_turn for name in ("one", "two")]
    again = cluster.daemon("one", files.after_power_cut("kept")).claim("one").id_turn
    assert [*turns, again] == [0, 1, 0]
    clocks = [SharedClock(lambda: 1_000_000) for _ in turns]
    for clock, turn in zip(clocks, turns, strict=True):
        assert turn is not None
        clock.take_turn(turn)
    ids = [[clock.next() for _ in range(5)] for clock in clocks]
    assert all(own == sorted(set(own)) and own[0] >= 1_000_000 for own in ids)
    assert set(ids[0]).isdisjoint(ids[1])


def test_the_schema_is_made_once_and_a_newer_one_is_refused(postgres: PostgresServer) -> None:
    url = postgres.database("of_a_newer_memd")
    with closing(Database(url)) as first, closing(Database(url)) as second:
        assert second.cluster == first.cluster
        with first.connection() as connection:
            connection.execute("UPDATE memd_version SET version = %s", (SCHEMA_VERSION + 1,))
    with pytest.raises(StoreError, match=r"has schema 2, and this memd knows schemas up to 1.*update this one"):
        Database(url).connect()


def test_an_older_schema_is_brought_up_to_date_by_whoever_comes_first(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.database("of_an_older_memd")
    before = Database(url)
    before.connect()
    monkeypatch.setattr(database_module, "_MIGRATIONS", (*database_module._MIGRATIONS, "CREATE TABLE memd_more ()"))
    monkeypatch.setattr(database_module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    for _ in range(2):
        with closing(Database(url)) as later, later.connection() as connection:
            assert later.cluster == before.cluster
            assert connection.execute("SELECT version FROM memd_version").fetchall() == [(SCHEMA_VERSION + 1,)]
            connection.execute("SELECT FROM memd_more")
    before.close()


def test_two_clusters_share_a_database_in_schemas_of_their_own(postgres: PostgresServer) -> None:
    url = postgres.database("of_two_clusters")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA blue; CREATE SCHEMA green")
    clusters = [Database(f"{url}&options=-csearch_path%3D{name}") for name in ("blue", "green")]
    assert clusters[0].cluster != clusters[1].cluster
    for number, database in enumerate(clusters):
        files = on_disk()
        files.lock(DATA_DIR / LOCK_NAME)
        bucket = Bucket(MemoryStore(), "memory://")
        shelf = PostgresShelf(database, bucket, files, DATA_DIR, url="http://one", lease_seconds=60)
        Log(shelf.claim(TOPIC)).append(f"of {number}")
        assert groups_in(shelf, 1) == [f"of {number}"]
        database.close()


def test_the_bucket_of_another_cluster_is_refused(cluster: Cluster, postgres: PostgresServer) -> None:
    shelf = cluster.daemon("one")
    log = Log(shelf.claim(TOPIC))
    log.append("one")
    log.claim.release()
    ours, cluster.objects = cluster.objects, MemoryStore()
    with pytest.raises(StoreError, match=r"has nothing of the cluster in store.url.*correct store.bucket"):
        cluster.daemon("two").claim(TOPIC)
    cluster.objects.put("memd.cluster", b"of others")
    with pytest.raises(StoreError, match=r"belongs to another cluster.*a prefix of its own"):
        cluster.daemon("two").claim(TOPIC)
    assert len(cluster.rows("SELECT FROM memd_topic")) == 1
    cluster.objects = ours
    cluster.daemon("two").claim(TOPIC)


def test_two_daemons_that_call_themselves_the_same_do_not_take_topics_from_each_other(cluster: Cluster) -> None:
    files = on_disk()
    log = Log(cluster.daemon("one", files).claim(TOPIC))
    log.append("one")
    with pytest.raises(StoreError, match=r"calls itself http://one, too.*set store.own_url of each") as refused:
        cluster.daemon("one").claim(TOPIC)
    assert not isinstance(refused.value, TopicHeld), "nothing is sent to an address that may be one's own"
    log.append("two")
    again = Log(cluster.daemon("one", files.after_power_cut("lost")).claim(TOPIC))
    again.append("three")  # the same one, started again, does not wait for its lease
    with pytest.raises(Fenced):
        log.append("never")
    assert groups_in(cluster.daemon("two"), 1) == ["one", "two", "three"]


def test_a_topic_whose_row_somebody_holds_is_waited_for_no_longer_than_that_can_help(cluster: Cluster) -> None:
    first, second = cluster.shelf(), cluster.another()
    first.claim(TOPIC)
    with cluster.database.connection() as holding, holding.transaction():
        holding.execute("SELECT FROM memd_topic FOR UPDATE")
        with pytest.raises(TopicHeld):
            second.claim(TOPIC)
        with pytest.raises(StoreWriteFailed, match="lock timeout") as refused:
            second.claim(TOPIC, gone="http://one")
        assert not isinstance(refused.value, InDoubt)


def test_ids_ascend_from_one_daemon_to_the_next_though_their_clocks_are_apart(cluster: Cluster) -> None:
    ids = []
    for number, seconds in enumerate((5, -5, 0, 5)):
        log = open_log(cluster.daemon(f"daemon {number}"), now_us=partial(int, 10**15 + seconds * 10**6))
        ids += [entry.canonical_id for entry in log.append([draft(f"{number}.{i}") for i in range(3)])]
        log.close()
    assert ids == sorted(set(ids))


def test_a_daemon_that_comes_back_after_an_hour_goes_on_only_where_nobody_was_in_between(cluster: Cluster) -> None:
    one, two = cluster.daemon("one"), cluster.daemon("two")
    untouched, taken = Log(one.claim(TOPIC)), Log(one.claim("taken"))
    cluster.rows("UPDATE memd_topic SET lease_until = clock_timestamp() - interval '1 hour' RETURNING 1")
    later = Log(two.claim("taken"))
    with pytest.raises(Fenced):
        taken.append("stale")
    assert one.renew([untouched.claim, taken.claim]) == [taken.claim]
    untouched.append("one")
    later.append("two")
    assert groups_in(two, 1) == ["one"]


def test_nothing_is_asked_of_a_pooler_that_it_does_not_pass_on(cluster: Cluster) -> None:
    with closing(Database(cluster.database._url)) as database, database.connection() as connection:
        for _ in range(20):
            connection.execute("SELECT %s", ("again",))
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        asked = connection.execute("SELECT source FROM pg_settings WHERE name = 'statement_timeout'").fetchone()
    assert asked == ("default",)


def test_a_server_that_says_nothing_is_not_waited_for_long(cluster: Cluster) -> None:
    log = Log(cluster.daemon("one").claim(TOPIC))
    with closing(Database(cluster.database._url)) as database:
        database.connect()
        claim = "UPDATE memd_topic SET url = NULL"
        with cluster.database.connection() as other, other.transaction():
            other.execute("SELECT FROM memd_topic FOR UPDATE")
            with pytest.raises(InDoubt, match="does not answer"):
                database.again(lambda connection: connection.execute(claim), urgent_seconds=0.2)
            assert database.is_away
        until_it_works(lambda: database.again(lambda connection: connection.execute("SELECT 1")))
    log.claim.release()


def test_a_full_disk_of_the_database_is_named(cluster: Cluster) -> None:
    log = Log(cluster.daemon("one").claim(TOPIC))
    with cluster.database.connection() as connection:
        connection.execute(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'cannot extend file: No space left on device' USING ERRCODE = '53100'; END $$;"
            "CREATE TRIGGER full_disk BEFORE INSERT ON memd_log FOR EACH ROW EXECUTE FUNCTION full_disk()"
        )
    try:
        with pytest.raises(DiskFull, match=r"PostgreSQL at .*No space left on device; free some space there"):
            log.append("one")
    finally:
        with cluster.database.connection() as connection:
            connection.execute("DROP FUNCTION full_disk CASCADE")
    log.append("two")
    assert groups_in(cluster.daemon("two"), 1) == ["two"]


def test_a_standby_and_a_database_that_is_read_only_are_named(postgres: PostgresServer) -> None:
    url = postgres.database("of_a_standby")
    with closing(Database(url)) as database:
        database.connect()
    postgres.database("of_nobody_yet")
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("ALTER DATABASE of_a_standby SET default_transaction_read_only = on")
    with (
        closing(Database(url)) as database,
        pytest.raises(StoreWriteFailed, match=r"read-only transaction; let store\.url"),
    ):
        database.again(lambda connection: connection.execute("DELETE FROM memd_topic"))
    with running_postgres(of=postgres) as standby, closing(Database(standby.url("of_a_standby"))) as database:
        with pytest.raises(StoreWriteFailed, match=r"read-only transaction; let store\.url lead to the primary"):
            database.again(lambda connection: connection.execute("DELETE FROM memd_topic"))
        with (
            closing(Database(standby.url("of_nobody_yet"))) as other,
            pytest.raises(StoreError, match=r"let store\.url lead to the prim"),
        ):
            other.connect()


def test_a_wrong_password_is_named_and_not_told(postgres: PostgresServer) -> None:
    rules = "local replication all trust", "local all known scram-sha-256", "local all all trust"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE known LOGIN PASSWORD 'right'")
        connection.execute(f"COPY (SELECT unnest(ARRAY{list(rules)})) TO '{postgres.hba}'")
        connection.execute("SELECT pg_reload_conf()")
    said = ""
    while "password" not in said:  # until the server has read them
        with pytest.raises(StoreError) as failed:
            Database(postgres.url().replace("memd@", "known:wr0ng@")).connect()
        said = str(failed.value)
    assert 'password authentication failed for user "known"): correct user and password in store.url' in said
    assert "wr0ng" not in said


def test_a_database_that_cannot_be_used_is_named_with_the_remedy(postgres: PostgresServer) -> None:
    for url in ("postgresql://memd@127.0.0.1:9/postgres", postgres.url("no_such_database"), "postgresql://%%%"):
        with pytest.raises(StoreError, match=r"PostgreSQL cannot be used.*(in|check) store\.url"):
            Database(url).connect()
    with pytest.raises(StoreError, match="written as %40") as told:
        Database("postgresql://memd:p@s3cret@127.0.0.1/memd")
    assert "s3cret" not in str(told.value)
