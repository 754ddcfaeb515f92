"""Erasing in a cluster: all daemons know what was erased, clear their own copies, and finish what one left undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream
from test_cluster_core import settings  # noqa: F401  # a fixture
from test_erasing import OTHERS, SECRET, found_in, said

from memd.errors import StoreError
from memd.ingest.erasing.following import ABANDONED_US, ErasureFollower
from memd.store.cluster.book import SharedBook
from memd.store.cluster.database import Database
from memd.store.cluster.erasures import SharedErasures, SharedTimes
from memd.store.disk import DiskFiles
from memd.store.erasure.ledger import Erasure

pytestmark = pytest.mark.process
ERASURE = Erasure(
    id=7, kind="chunks", topic_id="team", at=1, by="ann", chunks=1, uuids=b"u" * 16, digests=b"d" * 16, highest_id=9
)
DONE = msgspec.structs.replace(ERASURE, digests=b"", done_at=2)


@pytest.fixture
def database(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    with closing(Database(postgres.database(f"e{abs(hash(request.node.name))}"))) as database:
        yield database


def erasures(database: Database, folder: Path) -> SharedErasures:
    folder.mkdir(exist_ok=True)
    return SharedErasures(SharedBook(database, "erasures"), DiskFiles(), folder)


def test_what_one_daemon_erases_the_others_follow_once_also_after_a_restart(database: Database, tmp_path: Path) -> None:
    one, two = (erasures(database, tmp_path / name) for name in ("one", "two"))
    assert one.catch_up() == two.catch_up() == []
    (tmp_path / "two" / "team").mkdir()
    one.write(ERASURE)
    assert two.catch_up() == [] and two.pending == one.pending == [ERASURE]
    one.write(DONE)
    assert two.catch_up() == [DONE] == two.catch_up(), "until it is noted"
    assert two.pending == one.pending == [] and one.catch_up() == []
    again = erasures(database, tmp_path / "two")
    assert again.catch_up() == [DONE], "a daemon that ended in between goes on"
    again.note_followed()
    assert again.catch_up() == [] == erasures(database, tmp_path / "two").catch_up()
    assert list(again) == [DONE] and again.highest_id == 9
    later = msgspec.structs.replace(DONE, id=8)
    one.write(later)
    assert erasures(database, tmp_path / "two").catch_up() == [later], "also what was erased while it was away"
    assert erasures(database, tmp_path / "new").catch_up() == [], "a new daemon has nothing of it"
    with database.connection() as connection:
        [(kept,)] = connection.execute("SELECT string_agg(data, '') FROM memd_book WHERE book = 'erasures'")
    assert "digests" not in kept, "what could be guessed goes when it is done"


def test_the_first_erasure_of_a_cluster_is_followed_by_those_that_were_there_before(
    database: Database, tmp_path: Path
) -> None:
    one, two, three = (erasures(database, tmp_path / name) for name in ("one", "two", "three"))
    assert one.catch_up() == two.catch_up() == three.catch_up() == []
    one.write(DONE)
    assert two.catch_up() == [DONE]
    assert erasures(database, tmp_path / "three").catch_up() == [DONE], "also if they were away"


def test_a_topic_is_erased_by_the_daemon_that_has_it_and_by_nobody_else_later(
    make_daemon: MakeDaemon,
    upstream: RecordingUpstream,
    settings: dict[str, Any],  # noqa: F811
) -> None:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    first.chat([said(SECRET)], headers={"X-Memory-Topic": "team"})
    done = ask(f"{second.own_url}/memd/erase", {"topic_id": "team"})
    assert done.status == 200 and done.headers["X-Memory-Owner"], done.body
    with closing(Database(settings["store"]["url"])) as database:
        begun = SharedBook(database, "erasures").read().rows.values()
    assert len(begun) == 1 and all("done_at" in one for one in begun), "what was said since would go later"


def test_retention_looks_at_a_topic_once_a_day_in_the_whole_cluster(database: Database) -> None:
    times = SharedTimes(database)
    with database.connection() as connection:
        columns, values = "topic, epoch, owner, since, lease_until", "'team', 1, '', 0, now()"
        connection.execute(f"INSERT INTO memd_topic ({columns}) VALUES ({values})")
    assert times.get("team", 0) == times.get("nobody's", 0) == 0
    times["team"] = 5
    times["team"] = 3
    assert SharedTimes(database).get("team", 0) == 5


def wait_gone(*daemons: DaemonProcess) -> None:
    """Wait until no file of theirs has one of the words."""
    for one in daemons:
        wait_until(partial(lambda folder: found_in(folder) == [], one.data_dir), one.log.read_text)


def test_what_a_daemon_erases_leaves_the_cache_and_the_receipts_of_another(
    make_daemon: MakeDaemon,
    upstream: RecordingUpstream,
    settings: dict[str, Any],  # noqa: F811
) -> None:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    team = {"X-Memory-Topic": "team"}
    for text in (SECRET, *OTHERS):
        first.chat([said(text)], headers=team)
    assert first.terminate() == 0
    answer = second.chat([said("Where is the spare key of the foghorn?")], headers=team)
    assert answer.headers["X-Memory-Status"] == "injected" and "granite step" in upstream.prompts[-1]
    wait_until(lambda: {"memd.receipts", "active.bin"} <= set(found_in(second.data_dir)), second.log.read_text)
    assert second.terminate() == 0
    for one in (first, second):  # nobody has the topic now
        one.start()
    found = f"{first.own_url}/memd/search?q=vermilion+walrus&topic=team"
    hits = ask(found).json["chunks"]
    chunk = next(one["id"] for one in hits if "vermilion" in one["content"])
    done = ask(f"{first.own_url}/memd/erase", {"topic_id": "team", "chunk_ids": [chunk], "forbid": True})
    assert done.status == 200, done.body
    wait_gone(first, second)  # whichever has the topic, and the other one
    assert first.terminate() == 0
    assert second.chat([said(SECRET)], headers=team).headers["X-Memory-Status"] == "none"
    assert second.terminate() == 0
    assert found_in(second.data_dir) == [], "it is forbidden at every daemon"


def test_a_topic_that_is_erased_at_one_daemon_is_gone_at_all_and_begins_anew_at_another(
    make_daemon: MakeDaemon,
    upstream: RecordingUpstream,
    settings: dict[str, Any],  # noqa: F811
) -> None:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    team = {"X-Memory-Topic": "team"}
    first.chat([said(SECRET)], headers=team)
    found = "/memd/search?q=vermilion+walrus&topic=team"
    wait_until(lambda: b"granite" in ask(first.own_url + found).body, first.log.read_text)
    assert first.terminate() == 0
    assert b"granite" in ask(second.own_url + found).body
    assert second.terminate() == 0
    for one in (first, second):
        assert found_in(one.start().data_dir)
    done = ask(f"{first.own_url}/memd/erase", {"topic_id": "team"})
    assert done.status == 200, done.body
    wait_gone(first, second)
    second.chat([said(OTHERS[0])], headers=team)
    wait_until(lambda: b"Theodora" in ask(f"{second.own_url}{found}").body, second.log.read_text)
    resumed = ask(f"{second.own_url}/memd/erase", {"resume": True})
    assert resumed.status == 200 and resumed.json["done"] == [], "what has begun anew is not taken for what was erased"
    assert b"Theodora" in ask(f"{second.own_url}{found}").body


class Finishing:
    """Stands for the eraser, and for the clock of its store."""

    def __init__(self) -> None:
        self.store = self
        self.now, self.resumed, self.followed = 0, list[int | None](), list[int]()

    def now_us(self) -> int:
        return self.now

    async def follow(self, erasure: Erasure) -> None:
        self.followed.append(erasure.id)

    async def resume(self, before: int | None = None) -> None:
        self.resumed.append(before)


async def test_an_erasure_whose_daemon_is_gone_is_finished_by_another_one_after_a_while(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, eraser = erasures(database, tmp_path / "one"), erasures(database, tmp_path / "two"), Finishing()
    follower = ErasureFollower(two, eraser)  # type: ignore[arg-type]
    await follower.look()
    one.write(ERASURE)
    eraser.now = ERASURE.at + ABANDONED_US
    await follower.look()
    assert eraser.resumed == [], "its daemon may be at it"
    eraser.now += 1
    for _ in range(2):
        await follower.look()
    assert eraser.resumed == [eraser.now - ABANDONED_US], "and no oftener than once a minute"
    one.write(DONE)
    for _ in range(2):
        await follower.look()
    assert eraser.followed == [DONE.id] and "followed later" not in caplog.text


async def test_a_database_that_is_away_is_told_once_whatever_it_says_each_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = iter(["connection refused", "does not answer", None, "connection refused", "does not answer"])

    class Away:
        pending: Sequence[Erasure] = ()

        def catch_up(self) -> list[Erasure]:
            if (words := next(said)) is not None:
                raise StoreError(words)
            return []

    follower = ErasureFollower(Away(), Finishing())  # type: ignore[arg-type]
    for _ in range(5):
        await follower.look()
    assert caplog.text.count("followed later") == 2, "once each time"
