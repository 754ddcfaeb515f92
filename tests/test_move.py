"""Topics are moved between a folder and a cluster: nothing is changed, nothing is lost, and what stops goes on."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from bucket_server import S3Server
from click.testing import CliRunner, Result
from conftest import MakeDaemon
from crash_files import CrashFiles, PowerCutError
from drafts import DATA_DIR, draft, live_contents, open_store, seal_all
from effort import steps
from obstore.store import MemoryStore
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream
from test_store_cluster import CutDatabase, Steps, log_of

from memd.cli.main import main
from memd.errors import NotFound, StoreError, StoreLocked, TopicHeld, TopicMoving
from memd.settings.encryption import EncryptionSettings
from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Database
from memd.store.cluster.moving import ClusterPlace, Folder, MovedOne, Wish, move
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.disk import DiskFiles, LocalDisk
from memd.store.encryption.master_key import new_key_file
from memd.store.encryption.opening import disk_for
from memd.store.erasure.forbidden import ForbiddenText, publish_forbidden, read_forbidden
from memd.store.layout import KEY_NAME, MOVING_NAME, TopicLayout
from memd.store.log.journal import Journal
from memd.store.shelf import Claim
from memd.store.tools.verify import verify
from memd.wording import sized

pytestmark = pytest.mark.process
PLAIN = EncryptionSettings()
INTO, OUT = Wish(is_into_cluster=True), Wish(is_into_cluster=False)
_numbers = itertools.count(1)


@pytest.fixture
def cut_database(postgres: PostgresServer) -> Iterator[CutDatabase]:
    with closing(CutDatabase(postgres.database(f"moved_{next(_numbers)}"))) as database:
        yield database


@pytest.fixture
def cluster(postgres: PostgresServer, s3: S3Server) -> Iterator[ClusterPlace]:
    with closing(Database(postgres.database(f"moved_{next(_numbers)}"))) as database:
        yield ClusterPlace(database, s3.bucket())


def talk_in(files: LocalDisk, data_dir: Path, topic_id: str = "talk", *, chunks: range = range(11)) -> list[str]:
    """Say something in a topic: full segments with and without index, a merged one, a journal."""
    store = open_store(files, data_dir, segment_entries_max=3)
    topic = store.topic(topic_id)
    journal, _ = Journal.open(topic.claim)
    for number in chunks:
        topic.append([draft(f"{topic_id} {number}")])
        journal.append([f"said {number}".encode()])
        if number == 6:
            seal_all(topic)
            topic.merge([1, 2])
    journal.sync()
    contents = live_contents(topic)
    store.close()
    return contents


def bytes_of(files: LocalDisk, layout: TopicLayout) -> dict[str, bytes]:
    """All files of a topic."""
    folders = (layout.directory, layout.segments)
    paths = [folder / name for folder in folders for name in files.names(folder)]
    return {
        one.relative_to(layout.directory).as_posix(): files.read(one) for one in paths if not files.is_directory(one)
    }


def outcomes(done: Iterator[MovedOne]) -> dict[str, str]:
    return {one.topic: one.outcome for one in done}


def folder(path: Path) -> Folder:
    return Folder(path, PLAIN)


def shelf_of(cluster: ClusterPlace, path: Path, name: str = "http://other") -> PostgresShelf:
    path.mkdir(exist_ok=True)
    return PostgresShelf(cluster.database, cluster.bucket, DiskFiles(), path, url=name, lease_seconds=60.0)


def test_topics_are_the_same_byte_by_byte_on_the_other_side_and_back(cluster: ClusterPlace, tmp_path: Path) -> None:
    files, here, there = DiskFiles(), tmp_path / "here", tmp_path / "there"
    contents = {name: talk_in(files, here, name) for name in ("talk", "garden")}
    before = {name: bytes_of(files, TopicLayout(here, name)) for name in contents}
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "moved", "garden": "moved"}
    assert {name: bytes_of(files, TopicLayout(here, name)) for name in contents} == before
    assert outcomes(move(folder(there), cluster, OUT)) == {"talk": "moved", "garden": "moved"}
    assert {name: bytes_of(files, TopicLayout(there, name)) for name in contents} == before
    assert files.names(there / MOVING_NAME) == ["moved.jsonl"]
    with cluster.database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM memd_seat").fetchone() == (0,), "ids are for daemons"
    assert verify(there, files).ok
    store = open_store(files, there, segment_entries_max=3)
    assert {name: live_contents(store.topic(name)) for name in contents} == contents
    highest = max(store.topic(name).append([draft(f"{name} new")])[0].canonical_id for name in contents)
    store.close()
    assert highest > 0
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "before", "garden": "before"}


class SteppedBucket(Bucket):
    """The power may fail before a request, and after it."""

    def __init__(self, objects: MemoryStore, steps: Steps) -> None:
        super().__init__(objects, "memory://")
        self._steps = steps

    def put(self, key: str, data: bytes | Iterable[bytes], *, new: bool = False) -> bool:
        self._steps.step()
        done = super().put(key, data, new=new)
        self._steps.step()
        return done

    def delete(self, keys: list[str]) -> None:
        self._steps.step()
        super().delete(keys)


@contextmanager
def released(claim: Claim) -> Iterator[Claim]:
    try:
        yield claim
    finally:
        claim.release()


class Ground:
    """A topic in a folder, or in a cluster, that is moved to the other one while the power fails."""

    def __init__(self, database: CutDatabase, wish: Wish) -> None:
        self.database, self.wish = database, wish
        self.steps, self.objects = Steps(), MemoryStore()
        files = CrashFiles()
        files.make_directory(DATA_DIR)
        self.contents = talk_in(files, DATA_DIR)
        self.bytes = bytes_of(files, TopicLayout(DATA_DIR, "talk"))
        self._talk = files.after_power_cut("torn")
        self._is_ready = False

    def reset(self) -> CrashFiles:
        """A disk as it is before the move; and the cluster."""
        self.steps = self.database.steps = Steps()
        if self.wish.is_into_cluster or self.wish.removes or not self._is_ready:
            self.objects, self._is_ready = MemoryStore(), True
            with self.database.connection() as connection:
                connection.execute("TRUNCATE memd_topic, memd_log, memd_object, memd_garbage")
            if not self.wish.is_into_cluster:
                self.run(self._talk.after_power_cut("torn"), INTO)
        self.steps.count = 0
        return self._talk.after_power_cut("torn") if self.wish.is_into_cluster else CrashFiles()

    def run(self, files: CrashFiles, wish: Wish) -> list[str]:
        done = move(folder(DATA_DIR), ClusterPlace(self.database, self.bucket()), wish, files=files)
        return [one.outcome for one in done]

    def bucket(self) -> Bucket:
        return SteppedBucket(self.objects, self.steps)

    def opened(self, files: CrashFiles) -> list[str] | None:
        """What a daemon finds on the other side; None: no topic, or one that it does not open."""
        with suppress(TopicMoving, TopicHeld):
            if not self.wish.is_into_cluster:
                if not files.size(TopicLayout(DATA_DIR, "talk").active):
                    return None
                store = open_store(files.after_power_cut("torn"), segment_entries_max=3)
                return live_contents(store.topic("talk"))
            disk = CrashFiles()
            disk.make_directory(DATA_DIR)
            shelf = PostgresShelf(self.database, self.bucket(), disk, DATA_DIR, url="http://other", lease_seconds=60.0)
            if "talk" in shelf.heads(["talk"]):
                with released(shelf.claim("talk")) as claim:
                    return live_contents(log_of(shelf, claim))
        return None


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("is_into", [True, False])
def test_wherever_the_power_fails_nobody_uses_half_a_topic_and_the_move_goes_on(
    cut_database: CutDatabase, is_into: bool, removes: bool
) -> None:
    ground = Ground(cut_database, Wish(is_into_cluster=is_into, removes=removes))
    files = ground.reset()
    begun = files.operations
    assert ground.run(files, ground.wish) == ["moved"]
    outside, inside = ground.steps.count, files.operations
    cuts = [(cut, None) for cut in steps(0, outside)] + [(None, cut) for cut in steps(begun, inside)]
    for cut_outside, cut_inside in cuts[:: 1 + 3 * removes]:
        files = ground.reset()
        ground.steps.cut_after, files.cut_after = cut_outside, cut_inside
        with pytest.raises(PowerCutError):
            ground.run(files, ground.wish)
        ground.steps.cut_after = None
        left = files.after_power_cut("torn")
        assert ground.opened(left) in (None, ground.contents)
        assert ground.run(left, ground.wish) in (["moved"], ["same"], ["before"], *[[]] * removes)
        assert ground.opened(left) == ground.contents
        assert bytes_of(left, TopicLayout(DATA_DIR, "talk")) == ({} if is_into and removes else ground.bytes)
        assert left.names(DATA_DIR / MOVING_NAME) == ["moved.jsonl"]


def say(path: Path, *names: str, topic_id: str = "talk") -> None:
    """Say more in a folder's topic, to its log and its journal."""
    store = open_store(DiskFiles(), path, segment_entries_max=3)
    topic = store.topic(topic_id)
    journal, _ = Journal.open(topic.claim)
    for name in names:
        topic.append([draft(name)])
        journal.append([name.encode()])
    journal.sync()
    store.close()


def say_there(cluster: ClusterPlace, path: Path, *names: str, topic_id: str = "talk") -> None:
    """Say more in a topic of the cluster."""
    shelf = shelf_of(cluster, path)
    with released(shelf.claim(topic_id)) as claim:
        log = log_of(shelf, claim, segment_entries_max=3)
        journal, _ = Journal.open(claim)
        for name in names:
            log.append([draft(name)])
            seal_all(log)
            journal.append([name.encode()])
        journal.rewrite([b"all new"])


def contents_in(path: Path, topic_id: str = "talk") -> list[str]:
    store = open_store(DiskFiles(), path, segment_entries_max=3)
    found = live_contents(store.topic(topic_id))
    store.close()
    return found


def test_what_was_said_since_goes_along_the_next_time_and_also_back(cluster: ClusterPlace, tmp_path: Path) -> None:
    here = tmp_path / "here"
    contents = talk_in(DiskFiles(), here)
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "moved"}
    say(here, *"abcde")
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "moved"}
    say_there(cluster, tmp_path / "cache", *"fghij")
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "before"}, "what is used there is left alone"
    assert outcomes(move(folder(here), cluster, OUT)) == {"talk": "moved"}
    assert contents_in(here) == [*contents, *(f"user: chunk {name}" for name in "abcdefghij")]
    assert verify(here, DiskFiles()).ok
    assert outcomes(move(folder(here), cluster, OUT)) == {"talk": "before"}


def test_nothing_is_moved_over_a_topic_that_has_something_of_its_own(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, files = tmp_path / "here", DiskFiles()
    talk_in(files, here)
    talk_in(files, here, "garden")
    assert set(outcomes(move(folder(here), cluster, INTO)).values()) == {"moved"}
    say(here, "mine")
    say_there(cluster, tmp_path / "cache", "theirs")
    say_there(cluster, tmp_path / "cache", "theirs", topic_id="garden")
    (tmp_path / "here" / MOVING_NAME / "moved.jsonl").unlink()
    kept = {name: bytes_of(files, TopicLayout(here, name)) for name in ("garden", "talk")}
    garden, talk = move(folder(here), cluster, INTO)
    assert (garden.outcome, talk.outcome) == ("refused", "refused")
    assert "on the other side has something that this one has not; nothing is moved" in garden.note
    garden, talk = move(folder(here), cluster, OUT)
    assert (garden.outcome, talk.outcome) == ("refused", "refused")
    assert "has conversations of its own" in garden.note, "its log goes on, but nobody noted that its journal does"
    assert {name: bytes_of(files, TopicLayout(here, name)) for name in ("garden", "talk")} == kept


def test_a_folder_in_use_is_refused_and_so_is_a_topic_that_a_daemon_has(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, files = tmp_path / "here", DiskFiles()
    for name in ("garden", "talk"):
        talk_in(files, here, name)
    store = open_store(files, here)
    with pytest.raises(StoreLocked):
        outcomes(move(folder(here), cluster, INTO))
    store.close()
    with released(shelf_of(cluster, tmp_path / "cache").claim("garden")):
        garden, talk = move(folder(here), cluster, INTO)
    assert (garden.outcome, talk.outcome) == ("refused", "moved")
    assert "http://other has it" in garden.note
    with pytest.raises(StoreError, match="is the cache of a cluster"):
        outcomes(move(folder(tmp_path / "cache"), cluster, INTO))
    assert outcomes(move(folder(here), cluster, INTO)) == {"garden": "moved", "talk": "before"}
    with pytest.raises(NotFound, match="no topic 'nothing' to move"):
        outcomes(move(folder(here), cluster, Wish(is_into_cluster=True, topics=("nothing", "talk"))))


def test_what_is_forbidden_goes_along_and_is_never_overwritten(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, there, files = tmp_path / "here", tmp_path / "there", DiskFiles()
    for path in (here, there):
        talk_in(files, path)
    forbidden = ForbiddenText(texts=frozenset({"00aa"}))
    store = open_store(files, here)
    publish_forbidden(store.topic("talk").claim, forbidden)
    publish_forbidden(store.topic("gone").claim, forbidden)
    store.close()
    layout = TopicLayout(here, "gone")
    assert outcomes(move(folder(here), cluster, INTO)) == {"gone": "moved", "talk": "moved"}
    assert files.names(layout.directory) == ["forbidden", "segments"]
    told = list(move(folder(there), cluster, INTO))
    assert [one.outcome for one in told] == ["refused"]
    assert "with --forbid" in told[0].note
    new = tmp_path / "new"
    assert outcomes(move(folder(new), cluster, OUT)) == {"gone": "moved", "talk": "moved"}
    assert {read_forbidden(files, TopicLayout(new, name)) for name in ("gone", "talk")} == {forbidden}


def test_a_dry_run_changes_nothing(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, there, files = tmp_path / "here", tmp_path / "there", DiskFiles()
    talk_in(files, here)
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    [plan] = move(folder(here), cluster, Wish(is_into_cluster=True, is_dry=True))
    assert (plan.outcome, plan.bytes) == ("new", sum(map(len, bytes_of(files, TopicLayout(here, "talk")).values())))
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "moved"}
    assert outcomes(move(folder(there), cluster, Wish(is_into_cluster=False, is_dry=True))) == {"talk": "new"}
    assert not there.exists()


def test_what_an_interrupted_write_left_is_mended_before(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    contents, layout = talk_in(DiskFiles(), here), TopicLayout(here, "talk")
    for path in (layout.active, layout.hot):
        with path.open("ab") as file:
            file.write(b"torn off here")
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "moved"}
    assert outcomes(move(folder(there), cluster, OUT)) == {"talk": "moved"}
    assert contents_in(there) == contents
    assert verify(there, DiskFiles()).ok
    [stays] = move(folder(here), cluster, Wish(is_into_cluster=True, removes=True))
    assert not stays.is_removed
    assert "is an interrupted write that was set aside" in stays.note


def test_what_is_removed_was_moved_before(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, there, files = tmp_path / "here", tmp_path / "there", DiskFiles()
    contents = {name: talk_in(files, here, name) for name in ("garden", "talk")}
    wish = Wish(is_into_cluster=True, topics=("talk",), removes=True)
    assert [one.is_removed for one in move(folder(here), cluster, wish)] == [True]
    assert files.names(here / "talk") == []
    assert contents_in(here, "garden") == contents["garden"]
    assert outcomes(move(folder(there), cluster, OUT)) == {"talk": "moved"}
    assert contents_in(there) == contents["talk"]


def test_what_is_removed_from_a_cluster_can_be_moved_there_again(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, files = tmp_path / "here", DiskFiles()
    contents = {name: talk_in(files, here, name) for name in ("garden", "talk")}
    assert set(outcomes(move(folder(here), cluster, INTO)).values()) == {"moved"}
    say_there(cluster, tmp_path / "cache", *"abcde")
    done = list(move(folder(here), cluster, Wish(is_into_cluster=False, topics=("talk",), removes=True)))
    assert [(one.outcome, one.is_removed) for one in done] == [("moved", True)]
    assert contents_in(here) == [*contents["talk"], *(f"user: chunk {name}" for name in "abcde")]
    assert outcomes(move(folder(tmp_path / "there"), cluster, OUT)) == {"garden": "moved"}
    listed = [one.key for one in cluster.bucket.listed("talk/")]
    assert listed == []
    assert outcomes(move(folder(here), cluster, INTO)) == {"garden": "before", "talk": "moved"}
    with released(shelf_of(cluster, tmp_path / "cache").claim("talk")) as claim:
        assert bytes_of(files, claim.layout).keys() >= {"active.bin", "hot.log"}


@pytest.fixture
def settings(postgres: PostgresServer, s3: S3Server, tmp_path: Path) -> Path:
    """A settings file of a new cluster's daemons."""
    bucket = s3.settings()
    lines = [f"url: {postgres.database(f'moved_{next(_numbers)}')}", f"bucket: {bucket.bucket}", f"endpoint: {s3.url}"]
    lines += ["region: us-east-1", "access_key: any", "secret_key: any"]
    path = tmp_path / "cluster.yaml"
    path.write_text("store:\n" + "".join(f"  {line}\n" for line in lines))
    return path


def memd(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments], prog_name="memd")


def test_a_move_that_is_killed_goes_on_when_it_is_run_again(settings: Path, tmp_path: Path) -> None:
    here, there, files = tmp_path / "here", tmp_path / "there", DiskFiles()
    names = [f"topic-{number}" for number in range(12)]
    store = open_store(files, here)
    for name in names:
        store.topic(name).append([draft(name)])
    store.close()
    commands: list[tuple[str | Path, ...]] = [("move", here, settings), ("move", settings, there)]
    for command in commands:
        line = [sys.executable, "-m", "memd", *map(str, command), "--json"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(4):
                assert json.loads(process.stdout.readline())["outcome"] == "moved"
            process.kill()
            done = 4 + len(process.stdout.read().split("\n")) - 1
        again = memd(*command, "--json")
        assert again.exit_code == 0, again.stderr
        told = {one["topic"]: one["outcome"] for one in map(json.loads, again.stdout.splitlines())}
        assert list(told) == sorted(names)
        # The one after them may have been moved and not told, or moved and not noted.
        assert sum(outcome == "before" for outcome in told.values()) in (done - 1, done, done + 1)
    for name in names:
        assert bytes_of(files, TopicLayout(there, name)) == bytes_of(files, TopicLayout(here, name))


def test_the_command_says_what_it_did_and_what_stays(settings: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    talk_in(DiskFiles(), here)
    size = sized(sum(map(len, bytes_of(DiskFiles(), TopicLayout(here, "talk")).values())))
    plan = memd("move", "--dry-run", here, settings)
    assert plan.stdout == f"talk: to be moved\n1 topic to move, {size}; nothing was changed.\n"
    done = memd("move", here, settings)
    assert done.exit_code == 0
    assert f"1 topic moved, 0 there already, 0 moved before, 0 refused; 11 entries, {size} read again" in done.stdout
    assert f"Nothing was removed from {here}: --remove does that." in done.stdout
    assert "Receipts, the audit and the list of erasures are not moved" in done.stdout
    assert "0 topics moved, 0 there already, 1 moved before" in memd("move", here, settings).stdout
    assert memd("move", settings, there).exit_code == 0
    say(there, "more")
    (there / MOVING_NAME / "moved.jsonl").unlink()
    refused = memd("move", settings, there)
    assert refused.exit_code == 1
    assert "talk: not moved: topic talk: the one of this name on the other side has something" in refused.stdout


def test_the_two_places_are_a_folder_and_a_cluster(settings: Path, tmp_path: Path) -> None:
    assert "name a folder and a cluster" in memd("move", tmp_path, tmp_path / "other").stderr
    assert "name a folder and a cluster" in memd("move", settings, "postgresql://somewhere/db").stderr
    assert "--bucket" in memd("move", tmp_path, "postgresql://somewhere/db").stderr
    nothing = tmp_path / "plain.yaml"
    nothing.write_text("log:\n  level: info\n")
    assert "names no cluster; set store.url" in memd("move", tmp_path, nothing).stderr
    assert "there is no such folder" in memd("move", tmp_path / "none", settings).stderr
    (tmp_path / KEY_NAME).write_text("a key")
    assert "is encrypted, and this cluster keeps plain text" in memd("move", tmp_path, settings).stderr


def test_what_a_daemon_remembers_is_known_to_the_daemons_of_a_cluster_and_back(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: Path, tmp_path: Path
) -> None:
    alone = make_daemon(upstream.url).start()
    told = {"role": "user", "content": "The lamp of the lighthouse was made in Paris."}
    assert alone.chat([told], headers={"X-Memory-Topic": "talk"}).status == 200
    assert alone.terminate() == 0
    done = memd("move", alone.data_dir, settings)
    assert done.exit_code == 0, done.stderr
    of_cluster = make_daemon(upstream.url, yaml.safe_load(settings.read_text())).start()
    asked = {"role": "user", "content": "Where was the lamp of the lighthouse made?"}
    answer = of_cluster.chat([asked], headers={"X-Memory-Topic": "talk"})
    assert answer.headers["X-Memory-Status"] == "injected"
    held = memd("move", settings, tmp_path / "back")
    assert held.exit_code == 1
    assert f"{of_cluster.base_url} has it" in held.stdout
    assert of_cluster.terminate() == 0
    assert memd("move", settings, alone.data_dir).exit_code == 0
    alone.start()
    answer = alone.chat([asked, {"role": "assistant", "content": "OK"}, asked], headers={"X-Memory-Topic": "talk"})
    assert answer.headers["X-Memory-Status"] == "injected"
    assert any("lamp of the lighthouse made?" in text for text in alone.said())


def test_topics_of_a_cluster_are_moved_into_an_encrypted_folder(cluster: ClusterPlace, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    talk_in(DiskFiles(), here)
    assert outcomes(move(folder(here), cluster, INTO)) == {"talk": "moved"}
    new_key_file(tmp_path / "key")
    key = EncryptionSettings(key_file=str(tmp_path / "key"))
    assert outcomes(move(Folder(there, key), cluster, OUT)) == {"talk": "moved"}
    layouts = TopicLayout(there, "talk"), TopicLayout(here, "talk")
    encrypted, plain = bytes_of(disk_for(there, key), layouts[0]), bytes_of(DiskFiles(), layouts[1])
    assert {name: encrypted[name] for name in plain} == plain
    assert DiskFiles().read(layouts[0].active) != plain["active.bin"]
    with pytest.raises(StoreError, match="this cluster keeps plain text"):
        outcomes(move(Folder(there, key), cluster, INTO))


def test_topics_of_an_encrypted_folder_are_moved_into_an_encrypted_cluster_and_back(
    cluster: ClusterPlace, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    keys = {}
    for name in ("folder", "cluster"):
        new_key_file(tmp_path / name)
        keys[name] = EncryptionSettings(key_file=str(tmp_path / name))
    disk = disk_for(here, keys["folder"], creating=True)
    contents = talk_in(disk, here)
    sealed = ClusterPlace(cluster.database, cluster.bucket, keys["cluster"])
    assert outcomes(move(Folder(here, keys["folder"]), sealed, INTO)) == {"talk": "moved"}
    with cluster.database.connection() as connection:
        rows = [bytes(data) for (data,) in connection.execute("SELECT data FROM memd_log")]
    objects = [sealed.bucket.get(one.key) or b"" for one in sealed.bucket.listed("")]
    assert objects and not any(b"talk 1" in data for data in (*rows, *objects))
    assert outcomes(move(Folder(there, keys["folder"]), sealed, OUT)) == {"talk": "moved"}
    store = open_store(disk_for(there, keys["folder"]), there, segment_entries_max=3)
    assert live_contents(store.topic("talk")) == contents
    store.close()
