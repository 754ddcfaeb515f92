"""The commands against a cluster: its tokens, its topics moved in and out, and what reads all of it."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import yaml
from daemon_process import DaemonProcess, ask, clean_environment, user, wait_until
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream, recording_upstream
from shared_daemons import Cluster, cluster

from memd.store.shared.postgres import PostgresLog

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def upstreams() -> Iterator[RecordingUpstream]:
    with recording_upstream() as running:
        yield running


@pytest.fixture(scope="module")
def pair(
    postgres: PostgresServer, upstreams: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with cluster(postgres, upstreams, tmp_path_factory.mktemp("pair")) as made:
        yield made


def memd(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memd", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())


def test_commands_read_all_topics_of_a_cluster(pair: Cluster) -> None:
    pair.tell(0, "read-a", [user("The quay was built of basalt.")])
    pair.tell(1, "read-b", [user("The crane lifts nine tonnes.")])
    pair.wait_stored("read-a", "basalt")
    pair.wait_stored("read-b", "nine tonnes")
    config = pair.daemons[0].config

    verified = memd("verify", "--config", config)
    assert verified.returncode == 0, verified
    exported = memd("export", "--config", config, "--data-dir", pair.daemons[0].data_dir)
    assert exported.returncode == 0, exported
    lines = [json.loads(line) for line in exported.stdout.splitlines()]
    assert {line["topic_id"] for line in lines} >= {"read-a", "read-b"}
    assert [line["content"] for line in lines if "basalt" in line["content"]] == pair.stored("read-a")
    found = ask(f"{pair.daemons[0].own_url}/memd/search?q=What+lifts+tonnes&topic=read-b").json
    assert "nine tonnes" in json.dumps(found)
    backup = pair.daemons[0].folder / "backup"
    made = memd("backup", "--config", config, backup)
    assert made.returncode == 0, made
    assert memd("verify", "--config", config, backup).returncode == 0


def test_check_tells_what_the_database_keeps(pair: Cluster) -> None:
    told = memd("check", "--config", pair.daemons[0].config, "--upstream", pair.upstream.url)

    assert "schema 1, answers in" in told.stdout, told
    assert "fsync is off" in told.stdout
    assert "has no synchronous standby" in told.stdout


def test_a_folder_is_moved_into_a_cluster_and_out_again(
    postgres: PostgresServer, upstreams: RecordingUpstream, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    alone = DaemonProcess(tmp_path / "alone", upstreams.url, {"buffer": {"store_after_seconds": 0.0}}).start()
    for number in range(5):
        alone.chat([user(f"Fact {number} of the archive is {number * 17}.")])
    alone.wait_stored(*(f"Fact {number} of" for number in range(5)))
    open_messages = [user("Let us talk about the harbour.")]
    alone.chat(open_messages)
    alone.terminate()
    before = [(line["uuid"], line["canonical_id"], line["content"]) for line in alone.export()]
    url = postgres.database(f"m{uuid.uuid4().hex}")

    moved = memd("move", alone.data_dir, url)
    again = memd("move", alone.data_dir, url)

    assert moved.returncode == 0 and again.returncode == 0, (moved, again)
    assert "1 topic moved, 0 refused" in moved.stdout and "1 topic moved, 0 refused" in again.stdout
    refused = memd("serve", "--config", _config(tmp_path, url), "--data-dir", alone.data_dir, "--port", "0")
    assert refused.returncode != 0 and "has topics of its own" in refused.stderr
    back = tmp_path / "back"
    out = memd("move", url, back)
    assert out.returncode == 0, out
    (tmp_path / "again").mkdir()
    reader = DaemonProcess(tmp_path / "again", upstreams.url)
    reader.data_dir = back
    after = [(line["uuid"], line["canonical_id"], line["content"]) for line in reader.export()]
    assert after[: len(before)] == before
    verified = memd("verify", "--data-dir", back)
    assert verified.returncode == 0, verified
    try:
        reader.start()
        answer = reader.chat([user("What is fact 3 of the archive?")])
        assert answer.headers["X-Memory-Status"] == "injected"
        assert "Fact 3 of the archive is 51." in upstreams.prompts[-1]
    finally:
        reader.discard()


def test_with_a_key_the_database_has_no_word_in_plain_text(
    postgres: PostgresServer, upstreams: RecordingUpstream, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    assert memd("key", "new", key).returncode == 0
    settings = {"encryption": {"key_file": str(key)}}
    with cluster(postgres, upstreams, tmp_path, settings=settings) as sealed:
        sealed.tell(0, "sealed", [user("The treasure lies under the third birch.")])
        told = sealed.tell(1, "sealed", [user("Under which birch lies the treasure?")])
        assert told.headers["X-Memory-Status"] in ("injected", "none")
        assert b"birch" not in sealed.bytes_of("sealed") and sealed.bytes_of("sealed")
        plain = memd("serve", "--config", _config(tmp_path, sealed.url), "--data-dir", tmp_path / "p", "--port", "0")
        assert plain.returncode != 0 and "the cluster is encrypted with the key" in plain.stderr


def test_a_token_that_is_taken_back_holds_at_no_daemon(
    postgres: PostgresServer, upstreams: RecordingUpstream, tmp_path: Path
) -> None:
    with cluster(postgres, upstreams, tmp_path) as closed:
        config = closed.daemons[0].config
        owner = memd("token", "add", "boss", "--topics", "*", "--rights", "admin", "--config", config)
        assert owner.returncode == 0, owner
        made = memd("token", "add", "guest", "--topics", "*", "--rights", "read,write", "--config", config)
        assert made.returncode == 0, made
        secret = next(word for word in made.stdout.split() if len(word) > 30)
        shown = {"Authorization": f"Bearer {secret}"}
        for number in (0, 1, 0, 1):
            assert closed.tell(number, "t", [user("Hello there.")], headers=shown).status == 200
        assert closed.tell(1, "t", [user("Hello.")], headers={"Authorization": "Bearer wrong"}).status == 401

        gone = memd("token", "revoke", "guest", "--config", config)
        assert gone.returncode == 0, gone

        for number in (1, 0):
            assert closed.tell(number, "t", [user("Hello again.")], headers=shown).status == 401


def _config(folder: Path, url: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster": {"database": url}}))
    return path


def test_a_move_that_was_killed_in_an_append_goes_on_when_it_is_run_again(
    postgres: PostgresServer, upstreams: RecordingUpstream, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    alone = DaemonProcess(tmp_path / "alone", upstreams.url).start()
    for number in range(4):
        note = {"topic_id": f"room-{number}", "notes": [{"content": f"Room {number} has {number * 17} chairs."}]}
        assert ask(f"{alone.own_url}/memd/notes", note).status == 200
    alone.terminate()
    url = postgres.database(f"m{uuid.uuid4().hex}")
    with closing(PostgresLog(url)) as kept, psycopg.connect(url, autocommit=True) as held:
        kept.connect()
        held.execute(
            "CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF (SELECT count(*) FROM memd_log) > 1 THEN PERFORM pg_advisory_xact_lock(7); END IF; RETURN NEW; END $$;"
            "CREATE TRIGGER held BEFORE INSERT ON memd_log FOR EACH ROW EXECUTE FUNCTION held()"
        )
        held.execute("SELECT pg_advisory_lock(7)")
        command = [sys.executable, "-m", "memd", "move", str(alone.data_dir), url]
        moving = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean_environment()
        )
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        wait_until(lambda: held.execute(waiting).fetchone() == (1,), lambda: "it appends")
        moving.kill()
        moving.wait()
        held.execute("SELECT pg_advisory_unlock(7)")

        again = memd("move", alone.data_dir, url)

        assert again.returncode == 0 and "4 topics moved, 0 refused" in again.stdout, again
        rows = [(f"room-{number}", row) for number in range(4) for row in kept.since(f"room-{number}", {"log": 0}).rows]
        assert [(name, row.data.count(b" chairs.")) for name, row in rows] == [(f"room-{n}", 1) for n in range(4)]
