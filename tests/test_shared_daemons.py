"""Two daemons that share their topics in PostgreSQL: whichever is asked, it is one memory."""

import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psycopg
import pytest
import yaml
from clocks import at_time
from cut_connections import Relay
from daemon_process import Answer, DaemonProcess, ask, clean_environment, run_memd, user, wait_until
from postgres_server import PostgresServer, running_postgres
from recording_upstream import RecordingUpstream, chat_answer, recording_upstream, streamed

from memd.admin.oauth.ledger import SharedGrants
from memd.store.log.recovery import read_log_file
from memd.store.shared.books import SharedBook
from memd.store.shared.postgres import Row, SharedLog

_numbers = itertools.count(1)


class Cluster:
    """Two daemons, the database that they share, and the model that they all ask."""

    def __init__(self, daemons: Sequence[DaemonProcess], url: str, upstream: RecordingUpstream) -> None:
        self.daemons = daemons
        self.url = url
        self.upstream = upstream

    def tell(self, number: int, topic: str, messages: Sequence[Mapping[str, Any]], **more: Any) -> Answer:
        """A chat through one of the daemons."""
        headers = more.pop("headers", {})
        body = {"model": "tiny", "messages": list(messages), **more}
        return ask(f"{self.daemons[number].base_url}/t/{topic}/v1/chat/completions", body, headers=headers)

    def stored(self, topic: str) -> list[str]:
        """The content of each entry that the database has, in order: what a checker outside sees."""
        return [entry.content for entry in self.entries(topic)]

    def entries(self, topic: str) -> list[Any]:
        """All entries in the rows of a topic's log."""
        with psycopg.connect(self.url) as connection:
            rows = connection.execute(
                "SELECT data FROM memd_log WHERE topic = %s AND stream = 'log' ORDER BY last", (topic,)
            ).fetchall()
        return [entry for (data,) in rows for entry in read_log_file(bytes(data), name="a row", dimension=None).entries]

    def bytes_of(self, topic: str) -> bytes:
        """All bytes that the database has of a topic."""
        with psycopg.connect(self.url) as connection:
            rows = connection.execute("SELECT data FROM memd_log WHERE topic = %s", (topic,)).fetchall()
        return b"".join(bytes(data) for (data,) in rows)

    def wait_stored(self, topic: str, *texts: str) -> None:
        """Return when the database has all of these texts."""
        wait_until(
            lambda: all(any(text in one for one in self.stored(topic)) for text in texts),
            lambda: f"stored: {self.stored(topic)}",
        )

    def last_prompt(self) -> list[dict[str, Any]]:
        """The messages that the model was sent last."""
        messages: list[dict[str, Any]] = json.loads(self.upstream.prompts[-1])
        return messages


@contextmanager
def cluster(
    postgres: PostgresServer,
    upstream: RecordingUpstream,
    folder: Path,
    *,
    through: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Cluster]:
    """Two daemons on a new database, until the block ends. `through`: the folder of a socket that leads there."""
    direct = postgres.database(name := f"shared_{next(_numbers)}")
    told = {
        "cluster": {"database": postgres.url(name, folder=through) if through else direct},
        "buffer": {"store_after_seconds": 0.0},
        **(settings or {}),
    }
    daemons = []
    try:
        for number in range(2):
            (own := folder / f"daemon{number}").mkdir(parents=True)
            daemons.append(DaemonProcess(own, upstream.url, told).start())
        yield Cluster(daemons, direct, upstream)
    finally:
        for daemon in daemons:
            print(repr(daemon))
            daemon.discard()


pytestmark = pytest.mark.process

FACT = "The lamp of the lighthouse was made in Paris."
QUESTION = "Where was the lamp of the lighthouse made?"


@pytest.fixture(scope="module")
def pair(
    postgres: PostgresServer, kept_upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with cluster(postgres, kept_upstream, tmp_path_factory.mktemp("pair")) as made:
        yield made


def test_what_one_daemon_was_told_the_other_knows_at_once(pair: Cluster) -> None:
    assert pair.tell(0, "known", [user(FACT)]).headers["X-Memory-Status"] == "none"

    told = pair.tell(1, "known", [user(QUESTION)])

    assert told.headers["X-Memory-Status"] == "injected"
    assert FACT in pair.last_prompt()[-1]["content"]


def test_a_conversation_goes_on_at_any_daemon_with_an_unchanged_prefix(pair: Cluster) -> None:
    pair.tell(0, "turns", [user(FACT)])
    messages = []
    prompts = []
    for number in range(6):
        messages.append(user(f"{QUESTION} Step {number}, please."))
        answer = pair.tell(number % 2, "turns", messages)
        messages.append({"role": "assistant", "content": answer.reply})
        prompts.append(pair.last_prompt())
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before
    pair.wait_stored("turns", *(f"Step {number}, please." for number in range(6)))
    stored = "\n".join(pair.stored("turns"))
    assert [stored.count(f"Step {number}, please.") for number in range(6)] == [1] * 6
    assert stored.count(FACT) == 1


def test_a_correction_of_what_another_daemon_showed_applies_once(pair: Cluster) -> None:
    pair.tell(0, "corrected", [user(FACT)])
    pair.wait_stored("corrected", FACT)
    shown = pair.tell(0, "corrected", [user(QUESTION)], memory_in={}).json["memory_out"]["injected_chunks"]
    correction = {
        "chunk_ids": [shown[0]["id"]],
        "action": "Update",
        "reason": "it was London",
        "content": "The lamp of the lighthouse was made in London.",
    }
    asked = [user("And the tower?")]
    memory_in = {"corrections": [correction]}

    first = pair.tell(1, "corrected", asked, memory_in=memory_in)
    again = pair.tell(0, "corrected", asked, memory_in=memory_in)

    assert "signals" not in first.json["memory_out"] or not first.json["memory_out"]["signals"]
    assert "signals" not in again.json["memory_out"] or not again.json["memory_out"]["signals"]
    assert [one.content for one in pair.entries("corrected")].count(correction["content"]) == 1
    pair.tell(0, "corrected", [user(QUESTION)])
    assert "London" in pair.last_prompt()[-1]["content"] and FACT not in pair.last_prompt()[-1]["content"]


def test_of_updates_of_one_chunk_at_the_same_moment_one_is_applied(pair: Cluster) -> None:
    note = {"topic_id": "at-once", "notes": [{"content": "The gate is green."}]}
    [taken] = ask(f"{pair.daemons[0].own_url}/memd/notes", note).json["notes"]

    def update(number: int) -> Answer:
        body = {"topic_id": "at-once", "chunk_ids": taken["chunk_ids"], "action": "Update", "reason": "it was painted"}
        url = f"{pair.daemons[number % 2].own_url}/memd/corrections"
        return ask(url, {**body, "content": f"The gate has the colour {number}."})

    with ThreadPoolExecutor(6) as at_once:
        answers = list(at_once.map(update, range(6)))

    assert sorted(len(one.json["failed"]) for one in answers) == [0, 1, 1, 1, 1, 1]
    for daemon in pair.daemons:
        found = ask(f"{daemon.own_url}/memd/search?topic=at-once&q=gate").json["chunks"]
        assert ["colour" in one["content"] for one in found] == [True]


def test_what_is_erased_leaves_every_copy_and_the_rows(pair: Cluster) -> None:
    topic = "erased"
    pair.tell(0, topic, [user("My bank code is 4711-secret.")])
    pair.tell(0, topic, [user("The garden has nine apple trees.")])
    pair.wait_stored(topic, "4711-secret", "apple")
    pair.tell(1, topic, [user("What is my bank code?")])
    assert "4711-secret" in str(pair.last_prompt())
    copies = [daemon.data_dir / topic for daemon in pair.daemons]
    uuids = [entry.uuid.hex() for entry in pair.entries(topic) if "4711" in entry.content]

    url = f"{pair.daemons[0].own_url}/memd/erase"
    done = ask(url, {"topic_id": topic, "chunk_ids": uuids})
    assert done.status == 200, done

    assert pair.tell(1, topic, [user("And the garden, how many trees?")]).status == 200
    assert "nine apple" in str(pair.last_prompt()) and "4711" not in str(pair.last_prompt())
    assert not any("4711" in text for text in pair.stored(topic))
    wait_until(lambda: not any(_has(copy, b"4711-secret") for copy in copies), lambda: str(list(map(str, copies))))
    assert b"4711-secret" not in pair.bytes_of(topic)


def test_an_erased_topic_is_gone_everywhere_and_may_begin_anew(pair: Cluster) -> None:
    topic = "gone"
    pair.tell(0, topic, [user("The plan is called Walrus.")])
    pair.wait_stored(topic, "Walrus")
    pair.tell(1, topic, [user("What is the plan called?")])

    done = ask(f"{pair.daemons[1].own_url}/memd/erase", {"topic_id": topic})
    assert done.status == 200, done

    pair.tell(0, topic, [user("What is the plan called, please?")])
    assert "Walrus" not in str(pair.last_prompt())
    pair.tell(1, topic, [user("The new plan is called Otter.")])
    pair.wait_stored(topic, "Otter")
    assert b"Walrus" not in pair.bytes_of(topic)
    pair.tell(0, topic, [user("Which animal is the new plan named after?")])
    assert "Otter" in str(pair.last_prompt())


def test_a_daemon_that_was_off_drops_what_was_erased_before_it_serves_anything_of_it(pair: Cluster) -> None:
    topic = "off"
    pair.tell(1, topic, [user("The password of the cellar is Heidelberg-1386.")])
    pair.wait_stored(topic, "Heidelberg-1386")
    pair.daemons[1].terminate()
    uuids = [entry.uuid.hex() for entry in pair.entries(topic) if "Heidelberg" in entry.content]
    assert _has(pair.daemons[1].data_dir / topic, b"Heidelberg-1386")
    done = ask(f"{pair.daemons[0].own_url}/memd/erase", {"topic_id": topic, "chunk_ids": uuids})
    assert done.status == 200, done

    pair.daemons[1].start()

    assert pair.tell(1, topic, [user("What is the password of the cellar?")]).status == 200
    assert "Heidelberg" not in str(pair.last_prompt())
    assert not _has(pair.daemons[1].data_dir / topic, b"Heidelberg-1386")


def _has(folder: Path, text: bytes) -> bool:
    return any(text in path.read_bytes() for path in folder.rglob("*") if path.is_file())


# The commands: a cluster's tokens, its topics moved in and out, and what reads all of it


def test_commands_read_all_topics_of_a_cluster(pair: Cluster) -> None:
    pair.tell(0, "read-a", [user("The quay was built of basalt.")])
    pair.tell(1, "read-b", [user("The crane lifts nine tonnes.")])
    pair.wait_stored("read-a", "basalt")
    pair.wait_stored("read-b", "nine tonnes")
    config = pair.daemons[0].config

    verified = run_memd("verify", "--config", config)
    assert verified.returncode == 0, verified
    exported = run_memd("export", "--config", config, "--data-dir", pair.daemons[0].data_dir)
    assert exported.returncode == 0, exported
    lines = [json.loads(line) for line in exported.stdout.splitlines()]
    assert {line["topic_id"] for line in lines} >= {"read-a", "read-b"}
    assert [line["content"] for line in lines if "basalt" in line["content"]] == pair.stored("read-a")
    found = ask(f"{pair.daemons[0].own_url}/memd/search?q=What+lifts+tonnes&topic=read-b").json
    assert "nine tonnes" in json.dumps(found)
    backup = pair.daemons[0].folder / "backup"
    made = run_memd("backup", "--config", config, backup)
    assert made.returncode == 0, made
    assert run_memd("verify", "--config", config, backup).returncode == 0


def test_a_folder_is_moved_into_a_cluster_and_out_again(
    postgres: PostgresServer, kept_upstream: RecordingUpstream, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    alone = DaemonProcess(tmp_path / "alone", kept_upstream.url, {"buffer": {"store_after_seconds": 0.0}}).start()
    for number in range(5):
        alone.chat([user(f"Fact {number} of the archive is {number * 17}.")])
    alone.wait_stored(*(f"Fact {number} of" for number in range(5)))
    open_messages = [user("Let us talk about the harbour.")]
    alone.chat(open_messages)
    alone.terminate()
    before = [(line["uuid"], line["canonical_id"], line["content"]) for line in alone.export()]
    url = postgres.database()

    moved = run_memd("move", alone.data_dir, url)
    again = run_memd("move", alone.data_dir, url)

    assert moved.returncode == 0 and again.returncode == 0, (moved, again)
    assert "1 topic moved, 0 refused" in moved.stdout and "1 topic moved, 0 refused" in again.stdout
    refused = run_memd("serve", "--config", _config(tmp_path, url), "--data-dir", alone.data_dir, "--port", "0")
    assert refused.returncode != 0 and "has topics of its own" in refused.stderr
    back = tmp_path / "back"
    out = run_memd("move", url, back)
    assert out.returncode == 0, out
    (tmp_path / "again").mkdir()
    reader = DaemonProcess(tmp_path / "again", kept_upstream.url)
    reader.data_dir = back
    after = [(line["uuid"], line["canonical_id"], line["content"]) for line in reader.export()]
    assert after[: len(before)] == before
    verified = run_memd("verify", "--data-dir", back)
    assert verified.returncode == 0, verified
    try:
        reader.start()
        answer = reader.chat([user("What is fact 3 of the archive?")])
        assert answer.headers["X-Memory-Status"] == "injected"
        assert "Fact 3 of the archive is 51." in kept_upstream.prompts[-1]
    finally:
        reader.discard()


def test_with_a_key_the_database_has_no_word_in_plain_text(
    postgres: PostgresServer, kept_upstream: RecordingUpstream, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    assert run_memd("key", "new", key).returncode == 0
    settings = {"encryption": {"key_file": str(key)}}
    with cluster(postgres, kept_upstream, tmp_path, settings=settings) as sealed:
        sealed.tell(0, "sealed", [user("The treasure lies under the third birch.")])
        told = sealed.tell(1, "sealed", [user("Under which birch lies the treasure?")])
        assert told.headers["X-Memory-Status"] in ("injected", "none")
        assert b"birch" not in sealed.bytes_of("sealed") and sealed.bytes_of("sealed")
        plain = run_memd(
            "serve", "--config", _config(tmp_path, sealed.url), "--data-dir", tmp_path / "p", "--port", "0"
        )
        assert plain.returncode != 0 and "the cluster is encrypted with the key" in plain.stderr


def test_a_token_that_is_taken_back_holds_at_no_daemon(
    postgres: PostgresServer, kept_upstream: RecordingUpstream, tmp_path: Path
) -> None:
    with cluster(postgres, kept_upstream, tmp_path) as closed:
        config = closed.daemons[0].config
        owner = run_memd("token", "add", "boss", "--topics", "*", "--rights", "admin", "--config", config)
        assert owner.returncode == 0, owner
        made = run_memd("token", "add", "guest", "--topics", "*", "--rights", "read,write", "--config", config)
        assert made.returncode == 0, made
        secret = next(word for word in made.stdout.split() if len(word) > 30)
        shown = {"Authorization": f"Bearer {secret}"}
        for number in (0, 1, 0, 1):
            assert closed.tell(number, "t", [user("Hello there.")], headers=shown).status == 200
        assert closed.tell(1, "t", [user("Hello.")], headers={"Authorization": "Bearer wrong"}).status == 401

        gone = run_memd("token", "revoke", "guest", "--config", config)
        assert gone.returncode == 0, gone

        for number in (1, 0):
            assert closed.tell(number, "t", [user("Hello again.")], headers=shown).status == 401


def test_the_books_are_rows_that_daemons_of_the_version_before_read_and_write(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    digest = "a1" * 32
    ann = f'{{"name":"ann","token_sha256":"{digest}","topics":["team"],"rights":["read"],"since":17}}'
    allowed = f'"principal":"ann","principal_sha256":"{digest}","rights":["read"],"topics":["team"]'
    asked = '"client":["Editor",["http://[::1]/"]],"redirect_uri":"http://[::1]/","state":null,"challenge":"c"'
    grants = {
        "key": f'"{"6b" * 32}"',
        "grant/0a1b2c3d": f'{{{allowed},"id":"0a1b2c3d","client_name":"Editor","client_sha256":"c2","created_at":17,'
        '"access_sha256":"a2","access_until":18,"refresh_sha256":"a3","refresh_until":19,"spent":["a4"]}',
        "code/c0de": f'{{"permission":{{"client_id":"id",{asked},"scopes":["read"]}},"allowed":{{{allowed}}},'
        '"until":20,"grant_id":""}',
    }
    url = postgres.database()
    with closing(SharedLog(url)) as kept:
        kept.connect()

        def row(book: str) -> Any:
            [found] = kept.since(f"memd.{book}", {"kept": 0}).rows
            return json.loads(found.data)

        for book, rows in (("tokens", {"ann": ann}), ("grants", grants)):
            data = json.dumps(rows).encode()
            assert kept.append(f"memd.{book}", 0, Row("kept", 1, data, is_base=True), generation=0)
        state = SharedGrants(SharedBook(kept, "memd.grants"))
        assert (state.read().key, [*state.read().grants], [*state.read().codes]) == (b"k" * 32, ["0a1b2c3d"], ["c0de"])
        state.change(lambda state: state.codes.update(beef=state.codes["c0de"]))
        assert row("grants") == grants | {"code/beef": grants["code/c0de"]}

        config = _config(tmp_path, url)
        assert "ann" in run_memd("token", "list", "--config", config).stdout
        added = run_memd("token", "add", "bea", "--topics", "team", "--rights", "read", "--config", config)
        assert added.returncode == 0, added
        assert row("tokens")["ann"] == ann and [*json.loads(row("tokens")["bea"])] == [*json.loads(ann)]
        assert run_memd("token", "revoke", "ann", "--config", config).returncode == 0
        assert [*row("tokens")] == ["bea"]


def _config(folder: Path, url: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster": {"database": url}}))
    return path


def test_a_move_that_was_killed_in_an_append_goes_on_when_it_is_run_again(
    postgres: PostgresServer, kept_upstream: RecordingUpstream, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    alone = DaemonProcess(tmp_path / "alone", kept_upstream.url).start()
    for number in range(4):
        note = {"topic_id": f"room-{number}", "notes": [{"content": f"Room {number} has {number * 17} chairs."}]}
        assert ask(f"{alone.own_url}/memd/notes", note).status == 200
    alone.terminate()
    url = postgres.database()
    with closing(SharedLog(url)) as kept, psycopg.connect(url, autocommit=True) as held:
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

        again = run_memd("move", alone.data_dir, url)

        assert again.returncode == 0 and "4 topics moved, 0 refused" in again.stdout, again
        rows = [(f"room-{number}", row) for number in range(4) for row in kept.since(f"room-{number}", {"log": 0}).rows]
        assert [(name, row.data.count(b" chairs.")) for name, row in rows] == [(f"room-{n}", 1) for n in range(4)]


# The database is away, silent, or loses an answer; or a daemon dies


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def relay(server: PostgresServer) -> Iterator[Relay]:
    with closing(Relay(server.socket)) as made:
        yield made


@pytest.fixture(scope="module")
def relayed(server: PostgresServer, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("relayed")
    with recording_upstream() as upstream, cluster(server, upstream, folder, through=str(relay.folder)) as made:
        yield made


def status(relayed: Cluster, number: int, topic: str, text: str) -> str:
    answer = relayed.tell(number, topic, [user(text)])
    assert answer.status == 200, answer
    return str(answer.headers["X-Memory-Status"])


def said(relayed: Cluster) -> str:
    """What the first daemon says of itself."""
    return ask(f"{relayed.daemons[0].own_url}/memd/health").body.decode()


def test_what_is_said_while_the_database_is_away_is_stored_later(relayed: Cluster, server: PostgresServer) -> None:
    status(relayed, 0, "away", "The first keeper of the lighthouse was Ada.")
    relayed.wait_stored("away", "Ada")
    server.stop()

    status(relayed, 0, "away", "Her boat was called the Heron.")
    assert status(relayed, 0, "away", "Who was the first keeper of the lighthouse?") == "degraded:store"
    assert "Ada" in relayed.last_prompt()[-1]["content"]
    assert status(relayed, 0, "new-meanwhile", "The second keeper was Bertram.") == "degraded:store"
    told = said(relayed)
    assert "PostgreSQL" in told and "check that the server runs" in told

    server.start()
    relayed.wait_stored("away", "Heron")
    relayed.wait_stored("new-meanwhile", "Bertram")
    assert "\n".join(relayed.stored("away")).count("Heron") == 1
    wait_until(
        lambda: status(relayed, 1, "away", "What was the boat called?") != "degraded:store", lambda: str(relayed)
    )
    assert "Heron" in relayed.last_prompt()[-1]["content"]


def test_what_is_said_while_the_databases_disk_is_full_is_stored_once_there_is_room(relayed: Cluster) -> None:
    status(relayed, 0, "full", "The mill was built by Konrad.")
    relayed.wait_stored("full", "Konrad")
    with psycopg.connect(relayed.url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION "
            "'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;"
            "CREATE TRIGGER full_disk BEFORE INSERT ON memd_log FOR EACH ROW EXECUTE FUNCTION full_disk()"
        )
        try:
            assert status(relayed, 0, "full", "Its wheel is made of larch.") == "degraded:disk-full"
            assert status(relayed, 0, "full", "Who built the mill?") == "degraded:disk-full"
            assert "Konrad" in relayed.last_prompt()[-1]["content"]
            told = said(relayed)
            assert "No space left on device" in told and "free some space on its disk" in told
        finally:
            connection.execute("DROP FUNCTION full_disk CASCADE")

    wait_until(lambda: status(relayed, 0, "full", "Who built it?") == "injected", lambda: str(relayed))
    relayed.wait_stored("full", "larch")
    assert "\n".join(relayed.stored("full")).count("larch") == 1


def test_a_database_that_was_made_read_only_is_told_with_the_remedy(relayed: Cluster, server: PostgresServer) -> None:
    name = relayed.url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(server.url(), autocommit=True) as connection:
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        try:
            connection.execute(cut, (name,))
            assert status(relayed, 0, "quota", "The bell is made of bronze.") == "degraded:store"
            assert "make room where it is read-only because it is full" in said(relayed)
        finally:
            connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
            connection.execute(cut, (name,))

    relayed.wait_stored("quota", "bronze")
    wait_until(lambda: status(relayed, 0, "quota", "And the bell?") != "degraded:store", lambda: str(relayed))
    assert "\n".join(relayed.stored("quota")).count("bronze") == 1


def test_no_request_waits_for_a_silent_database_but_the_first(relayed: Cluster, relay: Relay) -> None:
    status(relayed, 0, "frozen", "The lamp burns oil.")
    relayed.wait_stored("frozen", "oil")
    relay.freeze()
    try:
        waits = []
        for number in range(6):
            began = time.monotonic()
            assert status(relayed, 0, "frozen", f"Fact {number}: the stairs have {number} steps.")
            waits.append(time.monotonic() - began)
    finally:
        relay.open()
    assert max(waits[3:]) < 0.5
    assert sum(waits[:3]) < 5
    relayed.wait_stored("frozen", *(f"Fact {number}:" for number in range(6)))
    stored = "\n".join(relayed.stored("frozen"))
    assert [stored.count(f"Fact {number}:") for number in range(6)] == [1] * 6


def test_of_many_requests_at_once_none_waits_longer_for_a_silent_database(relayed: Cluster, relay: Relay) -> None:
    """There is no connection for most of them, and making one takes as long as the database is silent."""
    topics = [f"silent-{number}" for number in range(6)]
    for topic in topics:
        is_on = partial(status, relayed, 1, topic, "It is on.")
        wait_until(lambda is_on=is_on: is_on() != "degraded:store", lambda: str(relayed))  # type: ignore[misc]

    def wait(topic: str) -> float:
        began = time.monotonic()
        assert status(relayed, 1, topic, "Is the lamp on?") == "degraded:store"
        return time.monotonic() - began

    relay.freeze()
    try:
        with ThreadPoolExecutor(len(topics)) as agents:
            waits = list(agents.map(wait, topics))
    finally:
        relay.open()
    assert max(waits) < 2.0, "the least that libpq waits for a connection"


def test_with_a_slow_database_requests_go_on_and_know_what_others_have_stored(relayed: Cluster, relay: Relay) -> None:
    """Whether a write is confirmed in the time that an answer has depends on who else writes; it is stored once."""
    wait_until(lambda: status(relayed, 1, "slow-other", "Is it back?") != "degraded:store", lambda: str(relayed))
    status(relayed, 0, "slow", "The stairs are made of oak.")
    relayed.wait_stored("slow", "oak")
    relay.delay_seconds = 0.5
    try:
        assert status(relayed, 1, "slow", "Of which wood are the stairs made?") in ("injected", "degraded:store")
        assert "oak" in relayed.last_prompt()[-1]["content"]
        status(relayed, 0, "slow", "The rail is made of brass.")
        relayed.wait_stored("slow", "brass")
    finally:
        relay.open()
    assert "\n".join(relayed.stored("slow")).count("brass") == 1


def test_a_search_over_many_topics_waits_for_one_round_trip(relayed: Cluster, relay: Relay) -> None:
    topics = [f"many-{number}" for number in range(32)]
    for topic in topics:
        status(relayed, 0, topic, "Where is it?")  # on a busy machine perhaps not in PostgreSQL yet
    for topic in topics:
        relayed.wait_stored(topic, "Where is it?")
    asked = f"{relayed.daemons[0].own_url}/memd/search?q=it&" + "&".join(f"topic={topic}" for topic in topics)
    relay.counts = {b"FROM memd_topic WHERE topic = ANY": 0}
    assert ask(asked).status == 200
    assert relay.counts.popitem()[1] == 1


@pytest.mark.parametrize("times", [1, 2])
def test_where_an_answer_was_lost_the_rows_tell(relayed: Cluster, relay: Relay, times: int) -> None:
    topic = f"doubt-{times}"
    status(relayed, 0, topic, "The wall was painted white.")
    relayed.wait_stored(topic, "white")
    relay.lose_answer_to(b"INSERT INTO memd_log", times=times)

    status(relayed, 0, topic, "The door was painted red.")

    assert relay.has_lost_all.wait(30)
    relayed.wait_stored(topic, "red")
    wait_until(lambda: status(relayed, 1, topic, "Which colour?") != "degraded:store", lambda: str(relayed))
    assert "\n".join(relayed.stored(topic)).count("red") == 1


def test_two_daemons_that_are_told_the_same_at_once_store_it_once(relayed: Cluster) -> None:
    history = []
    for number in range(8):
        history += [
            user(f"Point {number} of the list is number {number * 7}."),
            {"role": "assistant", "content": "Yes."},
        ]
    for turn in range(3):
        asked = [*history, user(f"Question {turn}: is the list complete?")]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda number, asked=asked: relayed.tell(number, "same", asked), range(2)))
        assert [answer.status for answer in answers] == [200, 200]
        history = [*asked, {"role": "assistant", "content": answers[0].reply}]
    relayed.wait_stored("same", *(f"Point {number} of" for number in range(8)), "Question 2:")
    for daemon in range(2):
        status(relayed, daemon, "same-other", "Nothing.")
    stored = "\n".join(relayed.stored("same"))
    assert [stored.count(f"Point {number} of") for number in range(8)] == [1] * 8
    assert [stored.count(f"Question {turn}:") for turn in range(3)] == [1] * 3


@pytest.mark.parametrize("asked", [0, 1])
def test_where_clocks_are_apart_an_open_question_is_stored_with_its_answer_alone(
    postgres: PostgresServer, tmp_path: Path, asked: int
) -> None:
    """A clock that is an hour ahead makes it an hour old to one daemon, and of the future to the other."""
    gate = threading.Event()

    def answer_late(request: Any) -> Any:
        is_asked = json.loads(request.body)["messages"][-1]["content"].endswith("cast?")
        return chat_answer(request, "In Ghent.")._replace(gate=gate) if is_asked else chat_answer(request)

    with recording_upstream() as upstream, cluster(postgres, upstream, tmp_path) as apart:
        upstream.answer = answer_late
        for number in (0, 1):
            assert apart.daemons[number].terminate() == 0
        at_time(apart.daemons[0], days_ago=-1 / 24)
        apart.daemons[asked].start()
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(apart.tell, asked, "apart", [user("Where was the bell cast?")])
            try:
                wait_until(lambda: b"the bell cast" in apart.bytes_of("apart"), lambda: str(apart.daemons))
                apart.daemons[1 - asked].start()
                for fact in ("The stairs are made of oak.", "The rail is made of brass."):
                    apart.tell(1 - asked, "apart", [user(fact)])  # each is stored with all that is due
                    apart.wait_stored("apart", fact)
            finally:
                gate.set()
            assert answer.result().reply == "In Ghent."
        apart.wait_stored("apart", "In Ghent.")
        turn = [text for text in apart.stored("apart") if "bell" in text or "Ghent" in text]
        assert turn == ["Where was the bell cast?\nIn Ghent."]


def test_who_opens_a_topic_leaves_a_question_in_it_to_the_daemon_that_awaits_its_answer(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Also where a conversation soon counts as one that rests."""
    gate = threading.Event()

    def answer_late(request: Any) -> Any:
        is_asked = json.loads(request.body)["messages"][-1]["content"].endswith("cast?")
        return chat_answer(request, "In Ghent.")._replace(gate=gate) if is_asked else chat_answer(request)

    soon = {"buffer": {"store_after_seconds": 0.0, "idle_seconds": 0.1}}
    with recording_upstream() as upstream, cluster(postgres, upstream, tmp_path, settings=soon) as both:
        upstream.answer = answer_late
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(both.tell, 0, "open", [user("Where was the bell cast?")])
            try:
                wait_until(lambda: b"the bell cast" in both.bytes_of("open"), lambda: str(both.daemons))
                for fact in ("oak", "brass", "iron", "lead", "slate"):  # each is stored with all that is due
                    both.tell(1, "open", [user(f"The part that is made of {fact}.")])
                    both.wait_stored("open", f"made of {fact}")
            finally:
                gate.set()
            assert answer.result().reply == "In Ghent."
        both.wait_stored("open", "In Ghent.")
        turn = [text for text in both.stored("open") if "bell" in text or "Ghent" in text]
        assert turn == ["Where was the bell cast?\nIn Ghent."]


def test_where_clocks_are_apart_a_retry_is_known_and_what_holds_again_is_the_newest(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """An hour is longer than the time in which a request that comes again is a retry."""
    with recording_upstream() as upstream, cluster(postgres, upstream, tmp_path) as apart:
        assert apart.daemons[1].terminate() == 0
        at_time(apart.daemons[1], days_ago=-1 / 24)
        apart.daemons[1].start()
        on_monday = "The server of the harbour office is started anew on Monday."
        days = on_monday, "No, the server of the harbour office is started anew on Tuesday.", on_monday
        history = list[dict[str, str]]()
        for daemon, day in zip((1, 0, 1), days, strict=True):  # Tuesday's clock is behind Monday's
            stored = len(apart.entries("apart"))
            history.append(user(day))
            answer = apart.tell(daemon, "apart", history).reply
            history.append({"role": "assistant", "content": answer})
            wait_until(lambda stored=stored: len(apart.entries("apart")) > stored, lambda: str(apart.stored("apart")))  # type: ignore[misc]

        shown = apart.tell(0, "apart", [user("When is the server started anew?")], memory_in={})
        ids = [one["id"] for one in shown.json["memory_out"]["injected_chunks"]]
        memory_in = {"corrections": [{"chunk_ids": ids[:1], "action": "Unhelpful", "reason": "no"}]}
        for daemon in (0, 1):
            apart.tell(daemon, "apart", [user("And the tower?")], memory_in=memory_in)
        assert [one.action for one in apart.entries("apart")].count("Unhelpful") == 1


def test_a_daemon_that_was_killed_keeps_nobody_waiting_and_its_folder_may_be_removed(relayed: Cluster) -> None:
    """Its client has only the beginning of an answer, and goes on elsewhere with the prompt that was answered."""
    assert relayed.tell(1, "killed", [user("The bell was cast in Ghent.")]).status == 200
    messages, gate = [user("Where was the bell cast?")], threading.Event()
    relayed.upstream.answer = lambda _: streamed("In Ghent.", gate)
    body = {"model": "tiny", "messages": messages, "stream": True}
    to_killed = f"{relayed.daemons[1].base_url}/t/killed/v1/chat/completions"
    with urlopen(Request(to_killed, json.dumps(body).encode(), {"Content-Type": "application/json"})) as begun:
        assert begun.headers["X-Memory-Status"] == "injected"
        before = relayed.last_prompt()
        relayed.daemons[1].kill()
    gate.set()
    relayed.upstream.answer = chat_answer

    began = time.monotonic()
    messages += [{"role": "assistant", "content": "In"}, user("By whom?")]
    told = relayed.tell(0, "killed", messages)
    assert told.status == 200 and time.monotonic() - began < 5
    assert relayed.last_prompt()[:1] == before and "cast in Ghent" in before[0]["content"]

    shutil.rmtree(relayed.daemons[1].data_dir)
    relayed.daemons[1].start()
    assert (
        relayed.tell(1, "killed", [user("Tell me about the bell of Ghent.")]).headers["X-Memory-Status"] == "injected"
    )
    assert "cast in Ghent" in relayed.last_prompt()[-1]["content"]


def test_a_prompt_that_waited_brings_nothing_erased_back(relayed: Cluster, relay: Relay, tmp_path: Path) -> None:
    secret = "The safe behind the stove opens with 4711."
    status(relayed, 0, "waited", secret)
    relayed.wait_stored("waited", secret)
    other = DaemonProcess(tmp_path, relayed.upstream.url, {"cluster": {"database": relayed.url}})
    try:
        other.start()
        relay.freeze()
        assert status(relayed, 0, "waited", "With what opens the safe?") == "degraded:store"
        assert secret in relayed.last_prompt()[-1]["content"]
        found = ask(f"{other.own_url}/memd/search?topic=waited&q=safe").json["chunks"]
        erased = {"topic_id": "waited", "chunk_ids": [one["id"] for one in found]}
        assert ask(f"{other.own_url}/memd/erase", erased).status == 200
    finally:
        relay.open()
        other.discard()

    wait_until(lambda: status(relayed, 0, "waited", "And the stove?") != "degraded:store", lambda: str(relayed))
    relayed.wait_stored("waited", "With what opens the safe?")

    assert b"4711" not in ask(f"{relayed.daemons[0].own_url}/memd/search?topic=waited&q=safe").body
    wait_until(lambda: b"4711" not in relayed.bytes_of("waited"), lambda: str(relayed))  # an erasure follows in files


def die_erasing(relayed: Cluster, erasing: DaemonProcess, chunk_ids: Sequence[str], when: str) -> None:
    """Let a daemon erase, and kill it while it writes the first row for which `when` holds, which is lost."""
    with psycopg.connect(relayed.url, autocommit=True) as held, ThreadPoolExecutor(1) as pool:
        held.execute(
            "CREATE FUNCTION lost() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF {when} THEN PERFORM pg_advisory_lock(7); RAISE EXCEPTION 'lost'; END IF; RETURN NEW; END $$;"
            "CREATE TRIGGER lost BEFORE INSERT OR UPDATE ON memd_log FOR EACH ROW EXECUTE FUNCTION lost();"
            "SELECT pg_advisory_lock(7)"
        )
        asked = pool.submit(ask, f"{erasing.own_url}/memd/erase", {"chunk_ids": chunk_ids})
        waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        wait_until(lambda: held.execute(waiting).fetchone() is not None, lambda: repr(erasing))
        erasing.kill()
        held.execute("SELECT pg_advisory_unlock(7)")
        held.execute("DROP FUNCTION lost CASCADE")
        assert isinstance(asked.exception(), OSError), "it was never answered"


def erased_by(daemon: DaemonProcess, **body: Any) -> Any:
    return ask(f"{daemon.own_url}/memd/erase", body).json["done"]


@pytest.fixture
def other(relayed: Cluster, tmp_path: Path) -> Iterator[DaemonProcess]:
    """A third daemon, directly at the database."""
    made = DaemonProcess(tmp_path, relayed.upstream.url, {"cluster": {"database": relayed.url}})
    try:
        yield made.start()
    finally:
        made.discard()


def test_an_erasure_that_is_killed_before_all_is_written_down_was_never_begun(
    relayed: Cluster, other: DaemonProcess
) -> None:
    topics = ("half-a", "half-b", "half-c")
    for topic in topics:
        status(relayed, 0, topic, f"The keeper of {topic} is called Leopold.")
        relayed.wait_stored(topic, "Leopold")
    found = [entry.uuid.hex() for topic in topics for entry in relayed.entries(topic) if "Leopold" in entry.content]
    ours = "topic = 'memd.erasures' AND stream = 'hot'"
    with psycopg.connect(relayed.url) as connection:
        (rows,) = connection.execute(f"SELECT count(*) FROM memd_log WHERE {ours}").fetchone() or (0,)
    die_erasing(relayed, other, found, f"NEW.topic = 'memd.erasures' AND NEW.stream = 'hot' AND NEW.last = {rows + 3}")

    other.start()
    assert erased_by(other, resume=True) == [] and all("Leopold" in str(relayed.stored(topic)) for topic in topics)
    assert len(erased_by(other, chunk_ids=found)) == 3
    assert not any("Leopold" in str(relayed.stored(topic)) for topic in topics)


def test_a_daemon_that_finishes_the_erasure_of_another_knows_the_calls_in_it(
    relayed: Cluster, other: DaemonProcess
) -> None:
    function = {"name": "write", "arguments": json.dumps({"text": "a vermilion walrus"})}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = "\n".join(
        f"Line {number} of the ferry's timetable: it leaves at {number} past nine." for number in range(40)
    )
    relayed.tell(0, "calls", [user("Write it."), call, {"role": "tool", "tool_call_id": "c", "content": result}])
    relayed.wait_stored("calls", "Line 39")
    first, *others = [entry.uuid.hex() for entry in relayed.entries("calls") if "Line" in entry.content]
    assert others and relayed.bytes_of("calls").count(b"walrus") > 1, "each chunk of the result names the call"
    die_erasing(relayed, other, [first], "TG_OP = 'UPDATE' AND NEW.topic = 'calls'")
    assert b"walrus" in relayed.bytes_of("calls")

    wait_until(lambda: bool(erased_by(relayed.daemons[0], resume=True)), lambda: repr(relayed.daemons[0]))

    assert b"walrus" not in relayed.bytes_of("calls")
    assert all(any(one.uuid.hex() == kept and one.content for one in relayed.entries("calls")) for kept in others)
    with psycopg.connect(relayed.url) as connection:
        rows = connection.execute("SELECT data FROM memd_log WHERE topic = 'memd.erasures'").fetchall()
        assert rows and not any(b"digests" in data for (data,) in rows), "nobody can verify a guess of it any more"


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
        with cluster(primary, upstream, tmp_path, settings={"cluster": {"database": url}}) as relayed:
            relayed.url = standby.url(name)
            for number in range(5):
                assert status(relayed, number % 2, "failing", f"Buoy {number} lies at mark {number * 13}.")
            primary.kill()
            status(relayed, 0, "failing", "Buoy 5 lies at mark 65.")
            assert "promote the standby, or start the primary" in said(relayed)
            with psycopg.connect(standby.url(), autocommit=True) as connection:
                connection.execute("SELECT pg_promote()")

            relayed.wait_stored("failing", *(f"Buoy {number} lies" for number in range(6)))

            wait_until(
                lambda: status(relayed, 1, "failing", "Where is buoy 3?") != "degraded:store", lambda: str(relayed)
            )
            assert "mark 39" in relayed.last_prompt()[-1]["content"]
            stored = "\n".join(relayed.stored("failing"))
            assert [stored.count(f"Buoy {number} lies") for number in range(6)] == [1] * 6
