"""What a shared log promises to all who append to it, in PostgreSQL."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import psycopg
import pytest
from cut_connections import Relay
from daemon_process import wait_until
from drafts import DIMENSION, FINGERPRINT, draft
from faulty_log import FaultyLog
from msgspec.structs import replace
from postgres_server import PostgresServer

from memd.errors import BadTopicId, MadeAnew, MemdError, StoreError
from memd.store.disk import LocalDisk
from memd.store.erasure import Erasure
from memd.store.shared.books import SharedErasures
from memd.store.shared.postgres import PAGE_ROWS, STREAMS, News, Row, SharedLog, Stream
from memd.store.shared.shared_topic import SharedTopicLog
from memd.store.store import ModelId, Store, StoreShared

pytestmark = pytest.mark.process


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


@pytest.fixture
def kept(postgres: PostgresServer) -> Iterator[FaultyLog]:
    with closing(FaultyLog(postgres.database())) as made:
        yield made


def _log(kept: SharedLog, after: int = 0, topic_id: str = "t") -> News:
    return kept.since(topic_id, {"log": after})


def test_only_who_knows_the_head_appends_and_since_tells_what_is_new_in_each_stream(kept: SharedLog) -> None:
    assert _log(kept) == News(), "what nobody has written has no generation"
    first = bytes(range(256)) * 400
    assert kept.append("t", 0, Row("log", 100, first), generation=0)
    generation = _log(kept).generation
    assert generation > 0
    for behind, of in ((200, generation), (200, 0), (100, generation)):
        assert not kept.append("t", 0, Row("log", behind, first), generation=of)
    assert kept.append("t", 100, Row("log", 200, b"second"), generation=generation)
    assert kept.append("t", 0, Row("hot", 1, b"events"), generation=generation)

    assert [(row.last, row.data) for row in _log(kept).rows] == [(100, first), (200, b"second")]
    assert [row.data for row in _log(kept, 100).rows] == [b"second"]
    assert (_log(kept, 200).rows, _log(kept, 200).heads) == ((), {"log": 200})
    news = kept.since("t", {"log": 100, "hot": 0, "kept": 0})
    assert {row.stream: row.data for row in news.rows} == {"log": b"second", "hot": b"events"}
    assert news.heads == {"log": 200, "hot": 1, "kept": 0}


def test_a_name_that_differs_only_in_case_is_refused(kept: SharedLog) -> None:
    kept.append("topic", 0, Row("log", 100, b"x"), generation=0)

    with pytest.raises(BadTopicId):
        kept.append("Topic", 0, Row("log", 100, b"x"), generation=0)


def test_a_base_replaces_what_is_before_it(kept: SharedLog) -> None:
    kept.append("t", 0, Row("hot", 1, b"one"), generation=0)
    kept.append("t", 1, Row("hot", 2, b"two"), generation=1)
    assert not kept.append("t", 1, Row("hot", 3, b"who is behind", is_base=True), generation=1)
    assert kept.append("t", 2, Row("hot", 3, b"all", is_base=True), generation=1)
    kept.append("t", 3, Row("hot", 4, b"four"), generation=1)

    news = kept.since("t", {"hot": 0})

    assert [row.data for row in news.rows] == [b"all", b"four"]
    assert [row.last for row in news.rows if row.is_base] == [3]
    assert [row.data for row in kept.since("t", {"hot": 2}).rows] == [b"all", b"four"]
    assert [row.data for row in kept.since("t", {"hot": 3}).rows] == [b"four"]


def test_a_long_stream_is_told_in_pages(kept: SharedLog) -> None:
    for number in range(PAGE_ROWS + 3):
        assert kept.append("t", number, Row("hot", number + 1, b"%d" % number), generation=1 if number else 0)

    first = kept.since("t", {"hot": 0})
    second = kept.since("t", {"hot": first.rows[-1].last})

    assert len(first.rows) == PAGE_ROWS
    assert [row.last for row in (*first.rows, *second.rows)] == list(range(1, PAGE_ROWS + 4))


def test_rewriting_begins_a_generation_in_which_nobody_of_the_former_one_appends(kept: SharedLog) -> None:
    kept.append("t", 0, Row("log", 100, b"secret"), generation=0)
    kept.append("t", 100, Row("log", 200, b"other"), generation=1)

    generation = kept.rewrite("t", 1, {("log", 100): b"******"})

    assert (_log(kept).generation, [row.data for row in _log(kept).rows]) == (generation, [b"******", b"other"])
    assert not kept.append("t", 200, Row("log", 300, b"late"), generation=1)
    assert not kept.append("t", 0, Row("hot", 1, b"late"), generation=1)
    assert kept.append("t", 0, Row("hot", 1, b"events"), generation=generation)
    assert kept.rewrite("t", 1, None) == 0

    removed = kept.rewrite("t", generation, None)

    assert removed > generation > 1 and kept.topics("", 10) == []
    news = kept.since("t", {"log": 0, "hot": 0})
    assert (news.rows, news.heads) == ((), {"log": 200, "hot": 1}), "a removed topic keeps its heads"
    assert not kept.append("t", 0, Row("log", 50, b"below"), generation=removed)
    assert kept.append("t", 200, Row("log", 201, b"anew"), generation=removed)


def test_who_is_stopped_while_it_rewrites_does_not_keep_others_from_appending(postgres: PostgresServer) -> None:
    name = f"stopped_{id(postgres)}"
    with closing(Relay(postgres.socket)) as relay, closing(SharedLog(postgres.database(name))) as kept:
        kept.append("t", 0, Row("log", 100, b"secret"), generation=0)
        with (
            closing(SharedLog(postgres.url(name, folder=str(relay.folder)))) as stopped,
            ThreadPoolExecutor(1) as thread,
        ):
            stopped.ends(["t"])
            relay.freeze_after(b"generation + 1")
            rewriting = thread.submit(stopped.rewrite, "t", 1, {("log", 100): b"******"})
            assert relay.has_passed_last.wait(30)

            def appended() -> bool:
                with suppress(StoreError):  # where the answer came too late the row is there all the same
                    row = Row("log", 200, b"other")
                    return kept.append("t", 100, row, generation=1) or bool(_log(kept, 100).rows)
                return False

            wait_until(appended, lambda: kept.trouble, 25)
            relay.open()
            assert rewriting.result() == 2
        assert [row.data for row in _log(kept).rows] == [b"******", b"other"]


def test_when_one_call_has_waited_in_vain_all_that_are_under_way_end(postgres: PostgresServer) -> None:
    name = postgres.database().partition("@/")[2].partition("?")[0]
    with (
        closing(Relay(postgres.socket)) as relay,
        ThreadPoolExecutor(1) as threads,
        closing(SharedLog(postgres.url(name, folder=str(relay.folder)), wait_seconds=60)) as log,
    ):
        log.ends(["gate"])
        relay.counts = {b"FROM memd_topic t JOIN": 0}
        relay.freeze()
        under_way = threads.submit(log.since, "gate", {"log": 0})
        wait_until(lambda: relay.counts[b"FROM memd_topic t JOIN"] == 1, lambda: "not asked")
        log._wait_seconds = 0.5
        with pytest.raises(StoreError):
            log.ends(["gate"])
        with pytest.raises(StoreError):
            under_way.result(timeout=20)
        relay.open()  # for the watch


def test_of_many_who_append_at_once_each_row_is_there_once_and_in_order(kept: SharedLog) -> None:
    barrier = threading.Barrier(4)

    def write(name: int) -> int:
        barrier.wait()
        told, behind = 0, 0
        while told < 20:
            news = kept.since("t", {"hot": 0})
            head = news.heads["hot"] if news.generation else 0
            if kept.append("t", head, Row("hot", head + 1, b"%d %d" % (name, told)), generation=news.generation):
                told += 1
            else:
                behind += 1
        return behind

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))

    rows = kept.since("t", {"hot": 0}).rows
    assert [row.last for row in rows] == list(range(1, 81))
    assert sorted(row.data for row in rows) == sorted(b"%d %d" % (n, i) for n in range(4) for i in range(20))


def test_the_first_chunk_of_a_topic_is_stored_once_by_two_who_begin_it(kept: SharedLog, tmp_path: Path) -> None:
    stores = [
        Store(tmp_path / name, StoreShared(model=ModelId(DIMENSION, FINGERPRINT), segment_entries_max=9), kept=kept)
        for name in ("one", "other")
    ]
    one, other = (store.topic("t") for store in stores)
    assert isinstance(other, SharedTopicLog)
    said, made_at = draft("buoy"), other.head
    one.append([said], one.head)
    other.catch_up()  # as a request does between the cutting and the append
    with pytest.raises(MadeAnew):
        other.append([said], made_at)
    for store in stores:
        store.close()
    assert len(_log(kept).rows) == 1


def test_tables_are_made_once_and_their_version_is_checked(url: str) -> None:
    first, second = SharedLog(url), SharedLog(url)
    first.connect()
    second.connect()
    assert first.cluster == second.cluster
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE memd_shared SET version = 9")

    with pytest.raises(StoreError, match="has schema 9, and this memd knows schema 1"):
        SharedLog(url).connect()


def test_the_tables_of_an_earlier_memd_are_left_alone(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE memd_version (version int)")

    with pytest.raises(StoreError, match="memd move"):
        SharedLog(url).connect()


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda url: url.replace("@/", "@/nothing_"), "make it \\(CREATE DATABASE\\)"),
        (lambda url: url.replace("memd@", "nobody@"), "make that user"),
        (lambda url: url.replace("port=5432", "port=5433"), "start the server"),
    ],
)
def test_a_wrong_address_is_told_with_the_remedy(url: str, change: object, remedy: str) -> None:
    assert callable(change)
    kept = SharedLog(change(url))

    with pytest.raises(MemdError, match=remedy):
        kept.connect()
    kept.close()


def test_ends_tell_of_many_topics_at_once_what_since_tells_of_each(kept: SharedLog) -> None:
    assert kept.append("one", 0, Row("log", 100, b"a"), generation=0)
    assert kept.append("one", 0, Row("hot", 1, b"base", is_base=True), generation=1)
    assert kept.append("two", 0, Row("log", 7, b"b"), generation=0)

    ends = kept.ends(["one", "two", "nobody's"])

    assert set(ends) == {"one", "two", "nobody's"}
    for name, told in ends.items():
        assert told == replace(kept.since(name, dict.fromkeys(STREAMS, 0)), rows=())


@pytest.mark.parametrize("has_heard", [False, True])
def test_of_erasures_at_once_each_keeps_its_digests_until_it_is_done(url: str, tmp_path: Path, has_heard: bool) -> None:
    def erasure(number: int) -> Erasure:
        bare = Erasure(id=number, kind="chunks", topic_id="t", at=number, by="x", chunks=1)
        return replace(bare, uuids=bytes([number]) * 16, digests=bytes([number]) * 32)

    def rows(*streams: Stream) -> tuple[Row, ...]:
        return log.since("memd.erasures", dict.fromkeys(streams, 0)).rows

    with closing(SharedLog(url)) as log:
        log.connect()
        for name in (names := "abc"):
            (tmp_path / name).mkdir()
        first, second, third = (SharedErasures(log, LocalDisk(), tmp_path / name) for name in names)
        [later] = second.begin([erasure(12)])
        begun = first.begin([erasure(10), erasure(11)])
        before = [msgspec.json.decode(row.data, type=Erasure) for row in rows("hot")]
        assert before == [replace(one, digests=b"") for one in (later, *begun)], "as the version before reads them"
        if has_heard:
            second.catch_up()
        second.write(replace(later, digests=b"", done_at=1))

        for other in (second, third):  # the first is killed
            other.catch_up()
            assert other.pending == begun

        for number, one in enumerate(begun):  # and a daemon of the version before finishes what it has begun
            done, news = (
                msgspec.json.encode(replace(one, digests=b"", done_at=2)),
                log.since("memd.erasures", {"hot": 0}),
            )
            assert log.append("memd.erasures", 4 + number, Row("hot", 5 + number, done), generation=news.generation)
            third.catch_up()
            assert third.pending == begun[number + 1 :]
            assert sum(b"digests" in row.data for row in rows(*STREAMS)) == len(third.pending[:1])
