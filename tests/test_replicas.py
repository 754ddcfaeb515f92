"""Replicas: what another daemon has acknowledged is found here in the next request, and what it has erased is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec
import pytest
from bucket_server import held_until
from crash_files import LOSSES, CrashFiles, PowerCutError
from drafts import DATA_DIR, adjusted, counting_clock, draft, live_contents, seal_all
from effort import steps
from encrypted_files import EncryptedCrashFiles
from obstore.store import MemoryStore
from postgres_server import PostgresServer
from shelf_contract import MODEL, TOPIC

from memd.entries import Entry, Erased
from memd.errors import StoreError, StoreWriteFailed
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.replicas import Replicas
from memd.ingest.topics import Topics
from memd.settings.model import Config
from memd.store.bucket.objects import Bucket
from memd.store.clock import SharedClock
from memd.store.cluster.database import Database
from memd.store.cluster.kept import KeptObject, Listing
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.cluster.replica import Refreshed, Replica
from memd.store.cluster.replica_log import ReplicaLog
from memd.store.disk import DiskFiles, LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.layout import LOCK_NAME, replicas_dir
from memd.store.local_shelf import LocalShelf
from memd.store.log.journal import Journal
from memd.store.parts import StoreShared
from memd.store.shelf import Heads, Position, Shelf, Stream
from memd.store.topic import TopicLog
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

pytestmark = pytest.mark.process


class Watched:
    """A shelf as replicas see it, that counts what they read and is away when told so."""

    def __init__(self, shelf: PostgresShelf) -> None:
        self.shelf = shelf
        self.streams: list[tuple[Stream, Position]] = []
        self.objects: list[str] = []
        self.statements = 0
        self.before_read: Callable[[], None] = lambda: None
        self.before_object: Callable[[], None] = lambda: None
        self.is_away = False
        self.answers = threading.Event()
        self.answers.set()

    def heads(self, topic_ids: Collection[str]) -> dict[str, Heads]:
        self.statements += 1
        assert self.answers.wait(60)
        if self.is_away:
            raise StoreError("the database is away")
        return self.shelf.heads(topic_ids)

    def read(self, topic_id: str, stream: Stream, after: Position) -> bytes:
        self.statements += 1
        self.streams.append((stream, after))
        self.before_read()
        return self.shelf.read(topic_id, stream, after)

    def listing(self, topic_id: str) -> Listing | None:
        self.statements += 1
        return self.shelf.listing(topic_id)

    def pieces(self, kept: KeptObject) -> Iterator[bytes]:
        self.objects.append(kept.name)
        self.before_object()
        yield from self.shelf.pieces(kept)


class Two:
    """A daemon that owns a topic, and another one that reads it."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._objects = MemoryStore()
        self.files: LocalDisk = DiskFiles()
        self.begin()
        self.source = Watched(self._shelf("two", self.files, folder / "two"))
        self.replica = self.begun(self.files, folder / "two")
        self.found: ReplicaLog | None = None

    def begin(self, files: LocalDisk | None = None) -> None:
        """Begin a topic in an empty cluster."""
        self.forget()
        files = files or in_memory()
        self.log = self.opened(self._shelf("one", files, DATA_DIR))
        self.journal, _ = Journal.open(self.log.claim)

    def forget(self) -> None:
        with self._database.connection() as connection:
            connection.execute("UPDATE memd_version SET key = NULL")
            connection.execute("TRUNCATE memd_topic, memd_log, memd_object, memd_garbage")

    def _shelf(self, name: str, files: LocalDisk, folder: Path) -> PostgresShelf:
        files.make_directory(folder)
        bucket = Bucket(self._objects, "memory://")
        return PostgresShelf(self._database, bucket, files, folder, url=f"http://{name}", lease_seconds=60)

    def opened(self, shelf: Shelf) -> TopicLog:
        claim = shelf.claim(TOPIC)
        shared = StoreShared(
            files=claim.files, shelf=shelf, model=MODEL, clock=SharedClock(counting_clock()), segment_entries_max=5
        )
        return TopicLog(shared, claim)

    def begun(self, files: LocalDisk, folder: Path) -> Replica:
        """The replica as a daemon begins it that has just been started."""
        self.clock = SharedClock(counting_clock(0))
        shared = StoreShared(
            files=files, shelf=LocalShelf(files, folder), model=MODEL, clock=self.clock, segment_entries_max=5
        )
        self.folder = replicas_dir(folder)
        return Replica(self.source, shared, folder, TOPIC)

    def refresh(self) -> Refreshed | None:
        refreshed = self.replica.refresh(self.source.heads([TOPIC])[TOPIC])
        if refreshed is not None:
            self.found = refreshed.log
        return refreshed

    def contents(self) -> list[str]:
        """Of the replica, brought up to date."""
        self.refresh()
        assert self.found is not None
        return live_contents(self.found)

    def erase(self, entries: Collection[Entry]) -> None:
        uuids = [entry.uuid for entry in entries]
        assert self.log.erase(uuids, Erased(at=1, by="test"), Wiper(self.log.claim.files)) == len(entries)

    def lose(self, name: str, *, is_damaged: bool) -> None:
        """Let the object of a file be missing in the bucket, or changed."""
        with self._database.connection() as connection:
            [(key,)] = connection.execute("SELECT key FROM memd_object WHERE name = %s", (name,)).fetchall()
        self._objects.put(key, b"changed") if is_damaged else self._objects.delete(key)

    def on_disk(self) -> bytes:
        """All bytes of the replica's folder."""
        return b"".join(path.read_bytes() for path in sorted(self.folder.rglob("*")) if path.is_file())


def in_memory() -> CrashFiles:
    return CrashFiles.with_directory(DATA_DIR)


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[Database]:
    with closing(Database(postgres.url(), connect_seconds=1.0)) as database:
        yield database


@pytest.fixture
def two(database: Database, tmp_path: Path) -> Two:
    return Two(database, tmp_path)


def test_what_was_appended_is_read_in_the_next_moment_and_only_that_is_fetched(two: Two) -> None:
    two.log.append([draft("first")])
    assert two.contents() == ["user: chunk first"]
    two.source.streams.clear()
    known = two.found
    end = two.source.heads([TOPIC])[TOPIC].log
    entries = two.log.append([draft(name) for name in ("second", "third")])
    assert two.contents() == live_contents(two.log)
    assert two.found is known, "it was extended, not opened anew"
    assert two.source.streams == [("log", end)]
    two.log.append([adjusted(entries[0], 2)])
    assert two.contents() == live_contents(two.log)
    assert two.clock.next() > entries[-1].canonical_id, "later ids are higher at all daemons"
    two.source.statements = 0
    assert two.refresh() is None
    assert two.source.statements == 1


def test_objects_are_fetched_at_once_and_after_a_restart_only_those_that_are_not_there(two: Two) -> None:
    two.source.before_object = held_until(8)
    for number in range(2):
        two.log.append([draft(f"{number}.{i}") for i in range(5)])
        seal_all(two.log)
    assert two.contents() == live_contents(two.log)
    two.source.objects.clear()
    two.log.append([draft(f"2.{i}") for i in range(5)])
    seal_all(two.log)
    two.replica = two.begun(two.files, two.folder.parent)
    assert two.contents() == live_contents(two.log)
    assert sorted(two.source.objects) == [f"segments/seg_0003.{kind}" for kind in ("bin", "hnsw", "meta", "words")]


def test_full_segments_seals_and_merges_are_followed_and_no_object_is_fetched_twice(two: Two) -> None:
    contents = []
    for number in range(6):
        two.log.append([draft(f"{number}.{i}") for i in range(3)])
        assert two.contents() == live_contents(two.log)
        if number == 3:
            continue  # one that is full and not sealed
        seal_all(two.log)
        contents = two.contents()
        assert contents == live_contents(two.log)
    two.log.merge([1, 2])
    assert two.contents() == contents
    assert two.found is not None and [len(one.index.segment_ids) for one in two.found.snapshot().indexes] == [2, 1]
    assert len(two.source.objects) == len(set(two.source.objects))
    two.replica.sweep()
    kept = {path.name for path in (two.folder / TOPIC / "segments").iterdir()}
    assert kept == set(two.log.claim.files.names(two.log.claim.layout.segments))


def test_a_replica_that_begins_late_fetches_objects_and_rows(two: Two) -> None:
    for number in range(5):
        two.log.append([draft(f"{number}.{i}") for i in range(3)])
        seal_all(two.log)
    two.log.append([draft("last")])
    assert two.contents() == live_contents(two.log)
    assert "segments/seg_0001.bin" in two.source.objects


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_topic_whose_index_the_bucket_has_lost_is_read_without_it(two: Two, is_damaged: bool) -> None:
    for number in range(2):
        two.log.append([draft(f"{number}.{i}") for i in range(5)])
        seal_all(two.log)
    two.lose("segments/seg_0001.hnsw", is_damaged=is_damaged)
    assert two.contents() == live_contents(two.log)
    two.log.append([draft(f"2.{i}") for i in range(5)])
    seal_all(two.log)
    assert two.contents() == live_contents(two.log)


def test_a_log_that_the_bucket_has_lost_is_named_at_once(two: Two) -> None:
    two.log.append([draft(number) for number in range(5)])
    seal_all(two.log)
    two.lose("segments/seg_0001.bin", is_damaged=False)
    asked = two.source.statements
    with pytest.raises(StoreError, match=r"seg_0001\.bin: is missing"):
        two.refresh()
    assert two.source.statements - asked < 10


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_was_erased_is_gone_from_the_replica_and_its_folder(two: Two, is_sealed: bool) -> None:
    entries = two.log.append([draft(name) for name in ("one", "two", "three")])
    if is_sealed:
        two.log.append([draft(name) for name in ("four", "five", "six")])
        seal_all(two.log)
    assert "user: chunk two" in two.contents()
    assert two.found is not None
    two.found.complete_words()
    assert b"chunk two" in two.on_disk()
    two.erase([entries[1]])
    refreshed = two.refresh()
    assert refreshed is not None and refreshed.has_erased
    two.replica.sweep()
    assert two.contents() == live_contents(two.log)
    assert "user: chunk two" not in two.contents()
    assert b"chunk two" not in two.on_disk() and b"chunk one" in two.on_disk()
    seal_all(two.log)
    refreshed = two.refresh()
    assert refreshed is None or not refreshed.has_erased


def test_a_topic_that_is_gone_is_overwritten(two: Two) -> None:
    two.log.append([draft("first")])
    two.contents()
    two.replica.remove()
    assert not (two.folder / TOPIC).exists()
    two.log.append([draft("second")])
    assert two.contents() == live_contents(two.log)


@pytest.mark.parametrize("count", [0, 2, 6])
def test_a_topic_that_was_begun_anew_is_another_one(two: Two, count: int) -> None:
    two.log.append([draft("first")])
    two.log.append([draft(f"old {number}") for number in range(5)])
    two.journal.rewrite([b"old"])
    two.contents()
    assert two.found is not None
    two.found.complete_words()
    two.begin()
    two.log.append([draft(f"new {number}") for number in range(count)])
    two.journal.append([b"longer than the old one"])
    two.journal.sync()
    refreshed = two.refresh()
    assert refreshed is not None and refreshed.has_erased and refreshed.is_new_journal
    assert refreshed.payloads == (b"longer than the old one",)
    assert two.contents() == [f"user: chunk new {number}" for number in range(count)]
    two.replica.sweep()
    assert b"chunk first" not in two.on_disk() and b"old" not in two.on_disk()


def test_the_journal_is_told_from_the_end_that_is_known_on_and_is_not_on_disk(two: Two) -> None:
    two.journal.append([b"one", b"two"], two.log.snapshot().extent)
    two.journal.sync()
    refreshed = two.refresh()
    assert refreshed is not None and (refreshed.payloads, refreshed.is_new_journal) == ((b"one", b"two"), True)
    two.journal.append([b"three"])
    assert two.refresh() is None, "nobody was told that it is durable"
    two.journal.sync()
    refreshed = two.refresh()
    assert refreshed is not None and (refreshed.payloads, refreshed.is_new_journal) == ((b"three",), False)
    two.journal.rewrite([b"four"])
    refreshed = two.refresh()
    assert refreshed is not None and (refreshed.payloads, refreshed.is_new_journal) == ((b"four",), True)
    assert b"four" not in two.on_disk()


def test_a_topic_that_changes_while_it_is_read_is_read_again(two: Two) -> None:
    two.log.append([draft("first")])
    two.contents()
    works: list[Callable[[], object]] = [
        lambda: two.log.append([draft(number) for number in range(5)]),
        lambda: seal_all(two.log),
        lambda: two.log.append([draft("last")]),
        lambda: two.journal.rewrite([b"new"]),
    ]

    def work() -> None:
        if works:
            works.pop(0)()

    two.source.before_read = work
    two.log.append([draft("second")])
    two.journal.append([b"old"])
    two.journal.sync()
    refreshed = two.refresh()
    assert refreshed is not None
    assert works == [] or two.refresh() is not None
    assert two.contents() == live_contents(two.log)


def test_what_the_database_has_lost_is_lost_here_too(two: Two, database: Database) -> None:
    two.log.append([draft("first")])
    end = two.source.heads([TOPIC])[TOPIC].log.end
    two.log.append([draft("second")])
    two.contents()
    with database.connection() as connection:
        connection.execute("DELETE FROM memd_log WHERE start >= %s AND stream = 'log'", (end,))
        connection.execute("UPDATE memd_topic SET log_end = %s", (end,))
    assert two.contents() == ["user: chunk first"]
    assert b"chunk second" not in two.on_disk()


def test_a_replica_writes_nothing(two: Two) -> None:
    two.log.append([draft("first")])
    two.contents()
    assert two.found is not None
    with pytest.raises(StoreWriteFailed, match="another daemon writes it"):
        two.found.append([draft("second")])
    assert two.found.unsealed() == []
    assert two.contents() == live_contents(two.log)


def test_a_refresh_that_fails_leaves_the_log_as_it_was(two: Two) -> None:
    two.log.append([draft("first")])
    two.contents()
    found = two.found
    two.log.append([draft(number) for number in range(5)])
    seal_all(two.log)
    heads = two.source.heads([TOPIC])[TOPIC]
    two.source.is_away = True
    with pytest.raises(StoreError, match="away"):
        two.replica.refresh(heads)
    assert found is not None and live_contents(found) == ["user: chunk first"]
    two.source.is_away = False
    assert two.contents() == live_contents(two.log)


def test_a_folder_is_compared_after_a_restart_and_what_was_changed_in_it_is_fetched(two: Two) -> None:
    for number in range(3):
        two.log.append([draft(f"{number}.{i}") for i in range(3)])
        seal_all(two.log)
    two.contents()
    two.replica.let_go()
    two.replica = two.begun(two.files, two._folder / "two")
    assert two.replica.is_equal_to(two.source.heads([TOPIC])[TOPIC])
    two.source.objects.clear()
    changed = two.folder / TOPIC / "segments" / "seg_0001.meta"
    changed.write_bytes(changed.read_bytes()[:-1])
    (two.folder / TOPIC / "segments" / "seg_0007.meta").write_bytes(b"of nobody")
    (two.folder / TOPIC / "active.bin").write_bytes(b"changed")
    assert two.contents() == live_contents(two.log)
    assert two.source.objects == ["segments/seg_0001.meta"]
    assert two.found is not None and two.found.findings == []


def test_the_folder_of_an_encrypted_directory_is_encrypted(two: Two) -> None:
    files, owners_files = (EncryptedCrashFiles(in_memory()) for _ in range(2))
    owners_files.lock(DATA_DIR / LOCK_NAME)
    two.begin(owners_files)
    two.source = Watched(two._shelf("two", files, DATA_DIR))
    entries = two.log.append([draft(number) for number in range(5)])
    seal_all(two.log)
    two.log.append([draft("last")])
    two.journal.rewrite([b"one"])
    replica = two.begun(files, DATA_DIR)
    refreshed = replica.refresh(two.source.heads([TOPIC])[TOPIC])
    assert refreshed is not None and live_contents(refreshed.log) == live_contents(two.log)
    two.log.append([draft("later")])
    two.journal.append([b"two"])
    two.journal.sync()
    refreshed = replica.refresh(two.source.heads([TOPIC])[TOPIC])
    assert refreshed is not None and live_contents(refreshed.log) == live_contents(two.log)
    assert refreshed.payloads == (b"two",)
    on_disk = files.contents()
    assert any("memd.replicas/talk/segments/seg_0001.bin" in name for name in on_disk)
    assert not [name for name, data in on_disk.items() if b"chunk" in data or entries[0].vector in data]
    replica.remove()
    assert [name for name in files.contents() if "memd.replicas/talk" in name] == []


def test_a_crash_at_any_step_of_a_refresh_leaves_nothing_wrong(two: Two) -> None:
    def life(files: CrashFiles) -> None:
        two.begin()
        replica = two.begun(files, DATA_DIR)
        entries = two.log.append([draft("first"), draft("second")])
        replica.refresh(two.source.heads([TOPIC])[TOPIC])
        two.log.append([draft(number) for number in range(4)])
        seal_all(two.log)
        two.log.append([draft("last")])
        replica.refresh(two.source.heads([TOPIC])[TOPIC])
        two.erase(entries[:1])
        replica.refresh(two.source.heads([TOPIC])[TOPIC])
        replica.sweep()

    whole = in_memory()
    life(whole)
    for cut in steps(0, whole.operations):
        files = in_memory()
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            life(files)
        after = files.after_power_cut(LOSSES[cut % len(LOSSES)])
        refreshed = two.begun(after, DATA_DIR).refresh(two.source.heads([TOPIC])[TOPIC])
        assert refreshed is not None
        assert live_contents(refreshed.log) == live_contents(two.log)
        assert refreshed.log.findings == []


class Reading:
    """A daemon that reads, without the rest of it."""

    is_open = staticmethod(lambda topic_id: False)
    claims = None

    def __init__(self, two: Two) -> None:
        config = msgspec.structs.replace(Config(), data_dir=two._folder / "two")
        files = DiskFiles()
        shared = StoreShared(
            files=files,
            shelf=LocalShelf(files, config.data_dir),
            model=MODEL,
            clock=SharedClock(counting_clock()),
            segment_entries_max=5,
        )
        self.forgotten: list[str] = []
        self.replicas = Replicas(
            two.source,
            shared,
            config,
            Redactor.of(config.ingest),
            len,
            Tasks(Metrics()),
            lambda topic: None,
            lambda: self.forgotten.append("all"),
        )
        self.replicas.seconds_max = 1_000.0
        self.folder = replicas_dir(config.data_dir) / TOPIC

    async def read(self) -> tuple[list[list[str]], bool]:
        """The contents of the topic, if it is there, and whether it is up to date."""
        found = await self.replicas.readable([TOPIC, "no_such_topic"], cast(Topics, self))
        return [live_contents(topic.log) for topic in found.topics], found.is_fresh


@pytest.fixture
async def reading(two: Two) -> AsyncIterator[Reading]:
    reading = Reading(two)
    yield reading
    reading.replicas.close()


async def test_a_silent_database_is_waited_for_once_and_not_by_each_request(two: Two, reading: Reading) -> None:
    two.log.append([draft("first")])
    assert await reading.read() == ([["user: chunk first"]], True)
    two.log.append([draft("second")])
    two.source.answers.clear()
    reading.replicas.seconds_max = 0.0
    asked = two.source.statements
    for _ in range(3):
        assert await reading.read() == ([["user: chunk first"]], False)
    two.source.answers.set()
    assert reading.replicas.late is not None
    await reading.replicas.late
    assert two.source.statements == asked + 1
    reading.replicas.seconds_max = 1_000.0
    assert await reading.read() == ([["user: chunk first", "user: chunk second"]], True)


async def test_a_topic_that_cannot_be_brought_up_to_date_is_given_out_as_it_was(two: Two, reading: Reading) -> None:
    two.log.append([draft("first")])
    two.source.is_away = True
    assert await reading.read() == ([], False), "never read here"
    two.source.is_away = False
    await reading.read()
    two.source.is_away = True
    two.log.append([draft("second")])
    assert await reading.read() == ([["user: chunk first"]], False)
    two.source.is_away = False
    assert await reading.read() == ([["user: chunk first", "user: chunk second"]], True)


async def test_each_of_many_requests_at_once_sees_what_was_acknowledged_before_it(two: Two, reading: Reading) -> None:
    async def ask(count: int) -> None:
        ((contents,), is_fresh) = await reading.read()
        assert is_fresh and len(contents) >= count

    asking = []
    for number in range(20):
        two.log.append([draft(number)])
        if number % 4 == 3:
            seal_all(two.log)
        asking.append(asyncio.ensure_future(ask(number + 1)))
        await asyncio.sleep(0)
    await asyncio.gather(*asking)


async def test_an_erased_topic_is_gone_at_the_next_look_also_where_nobody_asks(two: Two, reading: Reading) -> None:
    two.log.append([draft("first")])
    await reading.read()
    two.forget()
    assert await reading.read() == ([], True)
    assert not reading.folder.exists() and reading.forgotten
    two.begin()
    two.log.append([draft("second")])
    assert await reading.read() == ([["user: chunk second"]], True)
    two.erase(two.log.snapshot().history(draft("second").uuid))
    await reading.replicas.look()
    assert b"chunk second" not in b"".join(path.read_bytes() for path in reading.folder.rglob("*.bin"))
    again = Reading(two)  # as after a restart, in which nobody asks for it
    two.log.append([draft("third")])
    await again.replicas.look()
    assert reading.folder.exists(), "only appended to"
    seal_all(two.log)
    two.log.append([draft(number) for number in range(5)])
    seal_all(two.log)
    await again.replicas.look()
    assert not reading.folder.exists(), "it is not known what has changed"
    again.replicas.close()
