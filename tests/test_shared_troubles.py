"""Daemons that share a log: its database is away, silent, or loses an answer; or one of them dies."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cut_connections import Relay
from daemon_process import DaemonProcess, ask, user, wait_until
from postgres_server import PostgresServer, running_postgres
from recording_upstream import recording_upstream
from shared_daemons import Cluster, cluster

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def relay(server: PostgresServer) -> Iterator[Relay]:
    with closing(Relay(server.socket)) as made:
        yield made


@pytest.fixture(scope="module")
def pair(server: PostgresServer, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pair")
    with recording_upstream() as upstream, cluster(server, upstream, folder, through=str(relay.folder)) as made:
        yield made


def status(pair: Cluster, number: int, topic: str, text: str) -> str:
    answer = pair.tell(number, topic, [user(text)])
    assert answer.status == 200, answer
    return str(answer.headers["X-Memory-Status"])


def said(pair: Cluster) -> str:
    """What the first daemon says of itself."""
    return ask(f"{pair.daemons[0].own_url}/memd/health").body.decode()


def test_what_is_said_while_the_database_is_away_waits_and_is_stored_when_it_is_back(
    pair: Cluster, server: PostgresServer
) -> None:
    status(pair, 0, "away", "The first keeper of the lighthouse was Ada.")
    pair.wait_stored("away", "Ada")
    server.stop()

    status(pair, 0, "away", "Her boat was called the Heron.")
    assert status(pair, 0, "away", "Who was the first keeper of the lighthouse?") == "degraded:store"
    assert "Ada" in pair.last_prompt()[-1]["content"]
    assert status(pair, 0, "new-meanwhile", "The second keeper was Bertram.") == "degraded:store"
    told = said(pair)
    assert "PostgreSQL" in told and "check that the server runs" in told

    server.start()
    pair.wait_stored("away", "Heron")
    pair.wait_stored("new-meanwhile", "Bertram")
    assert "\n".join(pair.stored("away")).count("Heron") == 1
    wait_until(lambda: status(pair, 1, "away", "What was the boat called?") != "degraded:store", lambda: str(pair))
    assert "Heron" in pair.last_prompt()[-1]["content"]


def test_what_is_said_while_the_databases_disk_is_full_waits_and_is_stored_once_when_there_is_room(
    pair: Cluster,
) -> None:
    status(pair, 0, "full", "The mill was built by Konrad.")
    pair.wait_stored("full", "Konrad")
    with psycopg.connect(pair.url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION "
            "'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;"
            "CREATE TRIGGER full_disk BEFORE INSERT ON memd_log FOR EACH ROW EXECUTE FUNCTION full_disk()"
        )
        try:
            assert status(pair, 0, "full", "Its wheel is made of larch.") == "degraded:disk-full"
            assert status(pair, 0, "full", "Who built the mill?") == "degraded:disk-full"
            assert "Konrad" in pair.last_prompt()[-1]["content"]
            told = said(pair)
            assert "No space left on device" in told and "free some space on its disk" in told
        finally:
            connection.execute("DROP FUNCTION full_disk CASCADE")

    wait_until(lambda: status(pair, 0, "full", "Who built it?") == "injected", lambda: str(pair))
    pair.wait_stored("full", "larch")
    assert "\n".join(pair.stored("full")).count("larch") == 1


def test_a_database_that_its_service_has_made_read_only_is_told_with_the_remedy(
    pair: Cluster, server: PostgresServer
) -> None:
    name = pair.url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(server.url(), autocommit=True) as connection:
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        try:
            connection.execute(cut, (name,))
            assert status(pair, 0, "quota", "The bell is made of bronze.") == "degraded:store"
            assert "make room where it is read-only because it is full" in said(pair)
        finally:
            connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
            connection.execute(cut, (name,))

    pair.wait_stored("quota", "bronze")
    wait_until(lambda: status(pair, 0, "quota", "And the bell?") != "degraded:store", lambda: str(pair))
    assert "\n".join(pair.stored("quota")).count("bronze") == 1


def test_no_request_waits_for_a_silent_database_but_the_first(pair: Cluster, relay: Relay) -> None:
    status(pair, 0, "frozen", "The lamp burns oil.")
    pair.wait_stored("frozen", "oil")
    relay.freeze()
    try:
        waits = []
        for number in range(6):
            began = time.monotonic()
            assert status(pair, 0, "frozen", f"Fact {number}: the stairs have {number} steps.")
            waits.append(time.monotonic() - began)
    finally:
        relay.open()
    assert max(waits[3:]) < 0.5
    assert sum(waits[:3]) < 5
    pair.wait_stored("frozen", *(f"Fact {number}:" for number in range(6)))
    stored = "\n".join(pair.stored("frozen"))
    assert [stored.count(f"Fact {number}:") for number in range(6)] == [1] * 6


def test_with_a_slow_database_requests_go_on_and_know_what_others_have_stored(pair: Cluster, relay: Relay) -> None:
    """Whether a write is confirmed in the time that an answer has depends on who else writes; it is stored once."""
    wait_until(lambda: status(pair, 1, "slow-other", "Is it back?") != "degraded:store", lambda: str(pair))
    status(pair, 0, "slow", "The stairs are made of oak.")
    pair.wait_stored("slow", "oak")
    relay.delay_seconds = 0.5
    try:
        assert status(pair, 1, "slow", "Of which wood are the stairs made?") in ("injected", "degraded:store")
        assert "oak" in pair.last_prompt()[-1]["content"]
        status(pair, 0, "slow", "The rail is made of brass.")
        pair.wait_stored("slow", "brass")
    finally:
        relay.open()
    assert "\n".join(pair.stored("slow")).count("brass") == 1


def test_a_search_over_many_topics_waits_for_one_round_trip(pair: Cluster, relay: Relay) -> None:
    topics = [f"many-{number}" for number in range(32)]
    for topic in topics:
        assert status(pair, 0, topic, "Where is it?") != "degraded:store"
    for topic in topics:
        pair.wait_stored(topic, "Where is it?")
    asked = f"{pair.daemons[0].own_url}/memd/search?q=it&" + "&".join(f"topic={topic}" for topic in topics)
    relay.delay_seconds = 0.4
    try:
        began = time.monotonic()
        assert ask(asked).status == 200
        took = time.monotonic() - began
    finally:
        relay.open()
    assert took < 0.4 * len(topics) / 2


@pytest.mark.parametrize("times", [1, 2])
def test_where_an_answer_was_lost_the_rows_tell(pair: Cluster, relay: Relay, times: int) -> None:
    topic = f"doubt-{times}"
    status(pair, 0, topic, "The wall was painted white.")
    pair.wait_stored(topic, "white")
    relay.lose_answer_to(b"INSERT INTO memd_log", times=times)

    status(pair, 0, topic, "The door was painted red.")

    assert relay.has_lost_all.wait(30)
    pair.wait_stored(topic, "red")
    wait_until(lambda: status(pair, 1, topic, "Which colour?") != "degraded:store", lambda: str(pair))
    assert "\n".join(pair.stored(topic)).count("red") == 1


def test_two_daemons_that_are_told_the_same_at_once_store_it_once(pair: Cluster) -> None:
    history = []
    for number in range(8):
        history += [
            user(f"Point {number} of the list is number {number * 7}."),
            {"role": "assistant", "content": "Yes."},
        ]
    for turn in range(3):
        asked = [*history, user(f"Question {turn}: is the list complete?")]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda number, asked=asked: pair.tell(number, "same", asked), range(2)))
        assert [answer.status for answer in answers] == [200, 200]
        history = [*asked, {"role": "assistant", "content": answers[0].reply}]
    pair.wait_stored("same", *(f"Point {number} of" for number in range(8)), "Question 2:")
    for daemon in range(2):
        status(pair, daemon, "same-other", "Nothing.")
    stored = "\n".join(pair.stored("same"))
    assert [stored.count(f"Point {number} of") for number in range(8)] == [1] * 8
    assert [stored.count(f"Question {turn}:") for turn in range(3)] == [1] * 3


def test_a_daemon_that_was_killed_keeps_nobody_waiting_and_its_folder_may_be_removed(pair: Cluster) -> None:
    messages = [user("The bell was cast in Ghent.")]
    answer = pair.tell(1, "killed", messages)
    pair.daemons[1].kill()

    began = time.monotonic()
    messages += [{"role": "assistant", "content": answer.reply}, user("Where was the bell cast?")]
    told = pair.tell(0, "killed", messages)
    assert told.status == 200 and time.monotonic() - began < 5
    assert pair.last_prompt()[0]["content"].endswith("The bell was cast in Ghent.")

    shutil.rmtree(pair.daemons[1].data_dir)
    pair.daemons[1].start()
    assert pair.tell(1, "killed", [user("Tell me about the bell of Ghent.")]).headers["X-Memory-Status"] == "injected"
    assert "cast in Ghent" in pair.last_prompt()[-1]["content"]


def test_a_prompt_that_waited_here_brings_nothing_back_that_was_erased_meanwhile(
    pair: Cluster, relay: Relay, tmp_path: Path
) -> None:
    secret = "The safe behind the stove opens with 4711."
    status(pair, 0, "waited", secret)
    pair.wait_stored("waited", secret)
    other = DaemonProcess(tmp_path, pair.upstream.url, {"cluster": {"database": pair.url}})
    try:
        other.start()
        relay.freeze()
        assert status(pair, 0, "waited", "With what opens the safe?") == "degraded:store"
        assert secret in pair.last_prompt()[-1]["content"]
        found = ask(f"{other.own_url}/memd/search?topic=waited&q=safe").json["chunks"]
        erased = {"topic_id": "waited", "chunk_ids": [one["id"] for one in found]}
        assert ask(f"{other.own_url}/memd/erase", erased).status == 200
    finally:
        relay.open()
        other.discard()

    wait_until(lambda: status(pair, 0, "waited", "And the stove?") != "degraded:store", lambda: str(pair))
    pair.wait_stored("waited", "With what opens the safe?")

    assert b"4711" not in pair.bytes_of("waited")


def test_an_erasure_of_several_topics_whose_daemon_is_killed_before_all_is_written_down_was_never_begun(
    pair: Cluster, tmp_path: Path
) -> None:
    topics = ("half-a", "half-b", "half-c")
    for topic in topics:
        status(pair, 0, topic, f"The keeper of {topic} is called Leopold.")
        pair.wait_stored(topic, "Leopold")
    found = [entry.uuid.hex() for topic in topics for entry in pair.entries(topic) if "Leopold" in entry.content]
    other = DaemonProcess(tmp_path, pair.upstream.url, {"cluster": {"database": pair.url}}).start()

    def erase(**body: Any) -> Any:
        return ask(f"{other.own_url}/memd/erase", body).json["done"]

    try:
        with psycopg.connect(pair.url, autocommit=True) as held, ThreadPoolExecutor(1) as pool:
            (rows,) = held.execute("SELECT count(*) FROM memd_log WHERE topic = 'memd.erasures'").fetchone() or (0,)
            held.execute(
                "CREATE FUNCTION lost() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF NEW.topic = 'memd.erasures' AND NEW.last = {rows + 3} THEN "
                "PERFORM pg_advisory_lock(7); RAISE EXCEPTION 'lost'; END IF; RETURN NEW; END $$;"
                "CREATE TRIGGER lost BEFORE INSERT ON memd_log FOR EACH ROW EXECUTE FUNCTION lost();"
                "SELECT pg_advisory_lock(7)"
            )
            asked = pool.submit(erase, chunk_ids=found)
            waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            wait_until(lambda: held.execute(waiting).fetchone() is not None, lambda: repr(other))
            other.kill()
            held.execute("SELECT pg_advisory_unlock(7)")
            held.execute("DROP FUNCTION lost CASCADE")
            assert isinstance(asked.exception(), OSError), "it was never answered"

        other.start()
        assert erase(resume=True) == [] and all("Leopold" in str(pair.stored(topic)) for topic in topics)
        assert len(erase(chunk_ids=found)) == 3 and not any("Leopold" in str(pair.stored(topic)) for topic in topics)
    finally:
        other.discard()


def test_a_failover_to_a_synchronous_standby_loses_nothing(tmp_path: Path) -> None:
    with running_postgres() as primary, running_postgres(of=primary) as standby, recording_upstream() as upstream:
        with psycopg.connect(primary.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        hosts = f"{primary.socket.parent},{standby.socket.parent}"
        primary.database(name := "failing")
        url = (
            f"postgresql://memd@/{name}?host={hosts}&port=5432,5432&target_session_attrs=read-write&sslmode=disable"
            "&connect_timeout=2"
        )
        with cluster(primary, upstream, tmp_path, settings={"cluster": {"database": url}}) as pair:
            pair.url = standby.url(name)
            for number in range(5):
                assert status(pair, number % 2, "failing", f"Buoy {number} lies at mark {number * 13}.")
            primary.kill()
            status(pair, 0, "failing", "Buoy 5 lies at mark 65.")
            assert "promote the standby, or start the primary" in said(pair)
            with psycopg.connect(standby.url(), autocommit=True) as connection:
                connection.execute("SELECT pg_promote()")

            pair.wait_stored("failing", *(f"Buoy {number} lies" for number in range(6)))

            wait_until(lambda: status(pair, 1, "failing", "Where is buoy 3?") != "degraded:store", lambda: str(pair))
            assert "mark 39" in pair.last_prompt()[-1]["content"]
            stored = "\n".join(pair.stored("failing"))
            assert [stored.count(f"Buoy {number} lies") for number in range(6)] == [1] * 6
