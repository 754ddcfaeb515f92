"""Daemons of a cluster: real processes on one PostgreSQL and one bucket."""

from __future__ import annotations

import itertools
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bucket_server import S3Server
from conftest import MakeDaemon
from cut_connections import LosingRelay
from daemon_process import Answer, DaemonProcess, ask, wait_until
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream

from memd.store.encryption.master_key import new_key_file

pytestmark = pytest.mark.process
_numbers = itertools.count(1)


@pytest.fixture
def settings(postgres: PostgresServer, s3: S3Server) -> dict[str, Any]:
    """Of a daemon in a new cluster."""
    store = {"url": postgres.database(f"core_{next(_numbers)}"), "lease_seconds": 2, **s3.told()}
    return {"store": store, "buffer": {"store_after_seconds": 0.0}, "retrieval": {"timeout_ms": 5_000}}


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def chat(daemon: DaemonProcess, *texts: str, topic: str = "talk") -> str:
    """The status of memory in the answer."""
    answer = daemon.chat(said(*texts), headers={"X-Memory-Topic": topic})
    assert answer.status == 200, answer.body
    return answer.headers["X-Memory-Status"]


def memory(daemon: DaemonProcess) -> str:
    """As its health says."""
    told: str = ask(f"{daemon.own_url}/memd/health").json["memory"]
    return told


def found(daemon: DaemonProcess, words: str, topic: str = "talk") -> str:
    return ask(f"{daemon.own_url}/memd/search?q={words.replace(' ', '+')}&topic={topic}").body.decode()


def test_a_topic_is_had_by_one_daemon_and_goes_to_another_when_that_ends(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    assert "PostgreSQL" in first.log.read_text() and "s3://" in first.log.read_text()
    assert chat(first, "The lamp of the lighthouse was made in Paris.") == "none"
    wait_until(lambda: "made in Paris" in found(first, "lamp Paris"), lambda: repr(first))
    assert chat(second, "Where was the lamp of the lighthouse made?") == "injected"
    assert first.terminate() == 0
    assert chat(second, "Where was the lamp of the lighthouse made?") == "injected"
    assert "made in Paris" in found(second, "lamp Paris")


def test_a_killed_daemon_loses_its_topics_with_its_lease_and_nothing_that_was_said(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    assert chat(first, "The lamp was made in Paris.") == "none"
    first.kill()
    wait_until(lambda: chat(second, "Where was the lamp made?") == "injected", lambda: repr(second))
    assert chat(second, "The lens was ground in Brest.") in ("none", "injected")
    first.start()
    assert chat(first, "Where was the lens ground, and by whom?") == "injected", "the second has it"
    assert second.terminate() == 0
    assert chat(first, "Where was the lens ground?") == "injected"
    ids = [entry["canonical_id"] for entry in first.export()]
    assert ids == sorted(set(ids))


def test_work_that_a_killed_daemon_left_is_done_by_another_one_that_nobody_asks(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    settings["buffer"]["store_after_seconds"] = 3_600.0
    first = make_daemon(upstream.url, settings).start()
    assert chat(first, "The lamp was made in Paris.") == "none"
    first.kill()
    settings["buffer"]["store_after_seconds"] = 0.0
    second = make_daemon(upstream.url, settings).start()
    wait_until(lambda: any("made in Paris" in text for text in second.said()), lambda: repr(second))
    wait_until(lambda: "is let go from memory" in second.log.read_text(), lambda: repr(second))


def test_a_daemon_that_was_stopped_does_not_answer_from_what_it_remembers(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    assert chat(first, "The lamp was made in Paris.") == "none"
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: chat(second, "Where was the lamp made?") == "injected", lambda: repr(second))
    first.send_signal(signal.SIGCONT)
    asked = first.chat(said("Where was the lamp made?"), headers={"X-Memory-Topic": "talk"})
    assert asked.headers["X-Memory-Owner"] == second.base_url
    assert second.terminate() == 0
    assert chat(first, "Where was the lamp made?") == "injected"


def test_requests_go_on_while_the_database_is_away_and_what_is_said_meanwhile_is_stored_afterwards(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any], postgres: PostgresServer
) -> None:
    first = make_daemon(upstream.url, settings).start()
    assert chat(first, "The lamp was made in Paris.") == "none"
    postgres.stop()
    try:
        late = make_daemon(upstream.url, settings).start()
        assert chat(late, "Where was the lamp made?", topic="other") == "degraded:store"
        wait_until(lambda: chat(first, "The lens was ground in Brest.") == "degraded:store", lambda: repr(first))
        wait_until(lambda: (memory(late), memory(first)) == ("degraded", "degraded"), lambda: repr(late))
    finally:
        postgres.start()
    wait_until(lambda: chat(late, "The oil comes by boat.", topic="other") == "none", lambda: repr(late))
    wait_until(lambda: (memory(late), memory(first)) == ("ok", "ok"), lambda: repr(late))
    wait_until(lambda: chat(first, "Who broke the lens?") in ("none", "injected"), lambda: repr(first))
    first.wait_stored("made in Paris", "ground in Brest")
    assert first.terminate() == 0
    assert "ground in Brest" in found(late, "lens ground in Brest")
    assert sum("ground in Brest" in text for text in late.said()) == 1


@pytest.fixture
def relay(settings: dict[str, Any], postgres: PostgresServer) -> Iterator[LosingRelay]:
    """Between the daemons and the database."""
    with (
        tempfile.TemporaryDirectory(prefix="memd-") as folder,
        closing(LosingRelay(Path(folder), postgres.socket)) as made,
    ):
        settings["store"]["url"] = settings["store"]["url"].replace(str(postgres.socket.parent), folder)
        yield made


def test_a_topic_whose_last_write_is_in_doubt_is_opened_again_with_all_that_was_said(
    relay: LosingRelay, make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    first = make_daemon(upstream.url, settings).start()
    assert chat(first, "The lamp was made in Paris.") == "none"
    first.wait_stored("made in Paris")
    relay.lose_answer_to(b"ground in Brest", times=3)
    chat(first, "The lens was ground in Brest.")
    wait_until(lambda: "a topic was opened again" in first.log.read_text(), lambda: repr(first))
    first.wait_stored("ground in Brest")
    assert [sum(words in text for text in first.said()) for words in ("in Paris", "in Brest")] == [1, 1]
    first.terminate()


PRAISE = "the keeper said so"


def steps_of(daemon: DaemonProcess, chunk_id: str) -> int:
    """How many corrections have changed a chunk."""
    told = ask(f"{daemon.own_url}/memd/chunks/{chunk_id}?topic=talk")
    assert told.status == 200, told.body
    return sum(one["event"] == "Helpful" for one in told.json["versions"])


def praise(daemon: DaemonProcess, chunk_id: str, **headers: str) -> Answer:
    """A correction by a person."""
    body = {"topic_id": "talk", "chunk_ids": [chunk_id], "action": "Helpful", "reason": PRAISE}
    return ask(f"{daemon.own_url}/memd/corrections", body, headers=headers)


def noted(daemon: DaemonProcess, text: str) -> str:
    told = ask(f"{daemon.own_url}/memd/notes", {"topic_id": "talk", "notes": [{"content": text}]}).json
    chunk_id: str = told["notes"][0]["chunk_ids"][0]
    return chunk_id


def test_a_correction_that_is_in_doubt_is_found_in_the_log_and_applied_once(
    relay: LosingRelay, make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    daemon = make_daemon(upstream.url, settings).start()
    chunk_id = noted(daemon, "The lamp was made in Paris.")
    relay.lose_answer_to(PRAISE.encode(), times=3)
    answer = praise(daemon, chunk_id)
    assert answer.status == 200 and len(answer.json["applied"]) == 1, answer.body
    assert steps_of(daemon, chunk_id) == 1
    assert praise(daemon, chunk_id).status == 200
    assert steps_of(daemon, chunk_id) == 2, "the same words of somebody else are another correction"
    entry = ask(f"{daemon.own_url}/memd/chunks/{chunk_id}?topic=talk").json["versions"][-1]["canonical_id"]
    relay.lose_answer_to(b"thought better", times=3)
    undone = ask(f"{daemon.own_url}/memd/undo", {"topic_id": "talk", "canonical_id": entry, "reason": "thought better"})
    assert undone.status == 200 and len(undone.json["applied"]) == 1, undone.body
    daemon.terminate()


def test_a_correction_in_doubt_that_nobody_can_settle_is_applied_once_when_it_is_sent_again(
    relay: LosingRelay, make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    daemon = make_daemon(upstream.url, settings).start()
    chunk_id = noted(daemon, "The lamp was made in Paris.")
    history = said("Where was the lamp made?")
    assert daemon.chat(history, memory_in={"topic_id": "talk"}).json["memory_out"]["injected_chunks"]
    history += [{"role": "assistant", "content": "In Paris."}, {"role": "user", "content": "Thanks, that will do."}]
    corrections = [{"chunk_ids": [chunk_id], "action": "Helpful", "reason": "it helped me"}]

    def by_chat() -> str:
        answer = daemon.chat(history, memory_in={"topic_id": "talk", "corrections": corrections})
        assert answer.status == 200
        return answer.headers["X-Memory-Status"]

    def by_route() -> int:
        return praise(daemon, chunk_id, **{"Idempotency-Key": "one"}).status

    for send, marker, refused in ((by_chat, b"it helped me", "degraded:store"), (by_route, PRAISE.encode(), 503)):
        before = steps_of(daemon, chunk_id)
        relay.lose_answer_to(marker, times=3, freezes=True)
        assert send() == refused and relay.has_lost_all.is_set()
        relay.thaw()
        wait_until(lambda send=send, refused=refused: send() != refused, lambda: repr(daemon))  # type: ignore[misc]
        assert steps_of(daemon, chunk_id) == before + 1
        send()
        assert steps_of(daemon, chunk_id) == before + 1
    daemon.terminate()


def test_a_correction_whose_daemon_is_killed_when_it_is_stored_is_applied_once_by_the_next_one(
    relay: LosingRelay,
    make_daemon: MakeDaemon,
    upstream: RecordingUpstream,
    settings: dict[str, Any],
    postgres: PostgresServer,
) -> None:
    owner = make_daemon(upstream.url, settings).start()
    direct = settings["store"]["url"].replace(str(relay.folder), str(postgres.socket.parent))
    asked = make_daemon(upstream.url, {**settings, "store": {**settings["store"], "url": direct}}).start()
    chunk_id = noted(owner, "The lamp was made in Paris.")
    relay.lose_answer_to(PRAISE.encode(), freezes=True)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(praise, asked, chunk_id)
        assert relay.has_lost_all.wait(60)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        told = answer.result()
    assert told.status == 200 and len(told.json["applied"]) == 1, told.body
    assert steps_of(asked, chunk_id) == 1
    asked.terminate()


def test_a_database_that_says_nothing_any_more_costs_requests_their_memory_alone(
    relay: LosingRelay, make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    first = make_daemon(upstream.url, settings).start()
    assert chat(first, "The lamp was made in Paris.") == "none"
    relay.freeze()
    wait_until(lambda: chat(first, "The lens was ground in Brest.") == "degraded:store", lambda: repr(first))
    assert chat(first, "The oil comes by boat.", topic="other") == "degraded:store"
    relay.thaw()
    wait_until(lambda: chat(first, "Who broke the lens?") in ("none", "injected"), lambda: repr(first))
    wait_until(lambda: chat(first, "Who has the oil?", topic="other") in ("none", "injected"), lambda: repr(first))
    first.wait_stored("made in Paris", "ground in Brest")
    assert sum("ground in Brest" in text for text in first.said()) == 1
    first.terminate()


def test_a_folder_is_a_cache_or_a_data_directory_and_never_both(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    first = make_daemon(upstream.url, settings).start()
    assert chat(first, "The lamp was made in Paris.") == "none"
    first.terminate()
    first.configure({})
    with pytest.raises(AssertionError, match=r"is the cache of a cluster.*give store\.url"):
        first.start()
    alone = make_daemon(upstream.url).start()
    assert chat(alone, "The lamp was made in Paris.") == "none"
    alone.terminate()
    alone.configure(settings)
    with pytest.raises(AssertionError, match="holds topics that this cluster does not keep"):
        alone.start()


def test_nothing_that_is_said_leaves_an_encrypted_folder_in_plain_text(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any], tmp_path: Path
) -> None:
    new_key_file(tmp_path / "key")
    settings["encryption"] = {"key_file": str(tmp_path / "key")}
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    assert chat(first, "The lamp was made in Paris.") == "none"
    wait_until(lambda: "made in Paris" in found(first, "lamp Paris"), lambda: repr(first))
    with psycopg.connect(settings["store"]["url"]) as connection:
        rows = [bytes(data) for (data,) in connection.execute("SELECT data FROM memd_log").fetchall()]
    assert rows and not any(b"Paris" in row for row in rows)
    first.terminate()
    assert chat(second, "Where was the lamp made?") == "injected"


def test_a_cluster_gets_another_key_while_a_daemon_serves(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("old", "new"):
        new_key_file(tmp_path / name)
    settings["encryption"] = {"key_file": str(tmp_path / "old")}
    renewed = {**settings, "encryption": {"key_file": str(tmp_path / "new")}}
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    assert chat(first, "The lamp was made in Paris.") == "none"

    def rekeyed(daemon: DaemonProcess, *more: str) -> tuple[int, str]:
        done = daemon.run("rekey", "--config", str(daemon.config), "--new-key-file", str(tmp_path / "new"), *more)
        return done.returncode, done.stdout + done.stderr

    assert rekeyed(second, "--data")[0] == 2
    code, told = rekeyed(second)
    assert code == 1 and "is in use by a daemon; stop it, the others of the cluster may run" in told
    assert second.terminate() == 0
    code, told = rekeyed(second)
    assert code == 0 and "on each machine" in told and "name it in the settings" in told
    code, told = rekeyed(second)
    assert code == 0 and "had the key" in told, "it may be run again"
    second.configure(renewed)
    second.start()
    assert chat(first, "The lens was ground in Brest.", topic="new") == "none", "who runs goes on, also with new topics"
    assert first.terminate() == 0
    assert chat(second, "Where was the lamp made?") == "injected"
    assert chat(second, "Where was the lens ground?", topic="new") == "injected"
    failed = first.run("serve", "--config", str(first.config), "--port", "0")
    assert failed.returncode == 1 and "where `memd rekey` gave it another one, run that here, too" in failed.stderr
    code, told = rekeyed(first)
    assert code == 0 and "had the key" in told
    first.configure(renewed)
    first.start()
    assert second.terminate() == 0
    assert chat(first, "Where was the lamp made, and when?") == "injected"
