"""Two daemons of a cluster: the topics that one of them has are read through the other, as they are at that moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bucket_server import s3_server
from daemon_process import Answer, DaemonProcess, ask, wait_until
from postgres_server import PostgresServer, running_postgres
from recording_upstream import RecordingUpstream, recording_upstream

pytestmark = pytest.mark.process


class Pair:
    """Two daemons, and what they stand on."""

    def __init__(self, folder: Path, postgres: PostgresServer, settings: dict[str, Any]) -> None:
        self.postgres = postgres
        self.url = settings["store"]["url"]
        self._folder, self._settings = folder, settings
        self.upstream: RecordingUpstream
        self.owner: DaemonProcess
        self.reader: DaemonProcess

    def start(self, upstream: RecordingUpstream) -> None:
        self.upstream = upstream
        self.owner, self.reader = (self._started(name) for name in ("owner", "reader"))

    def _started(self, name: str) -> DaemonProcess:
        folder = self._folder / name
        folder.mkdir()
        return DaemonProcess(folder, self.upstream.url, self._settings).start()

    def tell(self, topic: str, text: str, daemon: DaemonProcess | None = None, **more: Any) -> Answer:
        messages = [{"role": "user", "content": text}]
        answer = (daemon or self.owner).chat(messages, headers={"X-Memory-Topic": topic}, **more)
        assert answer.status == 200, answer.body
        return answer

    def ask(self, question: str, related: str, **memory_in: Any) -> tuple[Answer, str]:
        """Ask the reader, in a topic of its own; returns its answer and the prompt that it made."""
        more = {"memory_in": {"related_topic_ids": [related], **memory_in}}
        answer = self.tell(f"asked-{related}", question, self.reader, **more)
        return answer, self.upstream.prompts[-1]

    def owner_of(self, topic: str) -> str | None:
        with psycopg.connect(self.url) as connection:
            row = connection.execute("SELECT url FROM memd_topic WHERE topic = %s", (topic,)).fetchone()
            return None if row is None else row[0]

    def on_disk(self, topic: str) -> bytes:
        """All bytes that the reader has of a topic."""
        return b"".join(path.read_bytes() for path in sorted(self.folder_of(topic).rglob("*")) if path.is_file())

    def folder_of(self, topic: str) -> Path:
        return self.reader.data_dir / "memd.replicas" / topic


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_postgres() as postgres, s3_server() as s3, recording_upstream() as upstream:
        settings = {
            "store": {"url": postgres.database("replicas"), **s3.told()},
            # Turns wait to be stored, notes do not.
            "buffer": {"journal_fsync": "always", "store_after_seconds": 3_600.0},
        }
        pair = Pair(tmp_path_factory.mktemp("replicas"), postgres, settings)
        pair.start(upstream)
        yield pair
        for daemon in (pair.owner, pair.reader):
            daemon.discard()
            print(f"--- {daemon!r}")


def test_what_one_daemon_has_acknowledged_is_found_by_the_next_request_to_the_other(pair: Pair) -> None:
    facts = {"lamp": "Paris", "stairs": "Granite", "bell": "Ghent", "boat": "Oak"}
    for thing, origin in facts.items():
        pair.tell("facts", f"The {thing} of the lighthouse is from {origin}town.")
        answer, prompt = pair.ask(f"Where is the {thing} of the lighthouse from?", "facts")
        assert f"from {origin}town" in prompt
        assert answer.headers["X-Memory-Status"] == "injected"
    assert pair.owner_of("facts") == pair.owner.base_url
    assert pair.owner_of("asked-facts") == pair.reader.base_url


def test_a_topic_that_nobody_has_is_not_claimed_to_be_read(pair: Pair) -> None:
    assert pair.ask("Where is the key of the cellar?", "cellar")[0].headers["X-Memory-Status"] == "none"
    assert pair.owner_of("cellar") is None
    pair.tell("cellar", "The key of the cellar is under the third stone.")
    with psycopg.connect(pair.url) as connection:  # as if its owner had let it go
        connection.execute("UPDATE memd_topic SET url = NULL WHERE topic = 'cellar'")
    assert "under the third stone" in pair.ask("Where was the key of the cellar?", "cellar")[1]
    assert pair.owner_of("cellar") is None


def test_a_chunk_that_another_daemon_is_still_to_store_can_be_corrected(pair: Pair) -> None:
    pair.tell("birds", "The owl of the tower is called Minerva.")
    answer, prompt = pair.ask("How is the owl of the tower called?", "birds")
    assert "called Minerva" in prompt
    chunks = json.loads(answer.body)["memory_out"]["injected_chunks"]
    (shown,) = (one["id"] for one in chunks if one["topic_id"] == "birds")
    correction = {"chunk_ids": [shown], "action": "Update", "reason": "renamed", "content": "The owl is called Athena."}
    assert "Minerva" not in str(pair.owner.export(settled=False))
    answer, _ = pair.ask("Thanks. Note this.", "birds", corrections=[correction])
    assert "signals" not in json.loads(answer.body)["memory_out"]
    _, prompt = pair.ask("How is the owl of the tower called now?", "birds")
    assert "called Athena" in prompt


def test_what_its_owner_has_erased_is_found_by_nobody_and_is_not_on_the_disk(pair: Pair) -> None:
    note = {"topic_id": "safe", "notes": [{"content": "The combination of the safe is Xylophone."}]}
    assert ask(f"{pair.owner.own_url}/memd/notes", note).status == 200
    wait_until(lambda: "Xylophone" in str(pair.owner.export(settled=False)), lambda: repr(pair.owner))
    assert "Xylophone" in pair.ask("What is the combination of the safe?", "safe")[1]
    wait_until(lambda: b"Xylophone" in pair.on_disk("safe"), lambda: repr(pair.reader))
    (entry,) = (one for one in pair.owner.export(settled=False) if "Xylophone" in one["content"])
    erased = ask(f"{pair.owner.own_url}/memd/erase", {"topic_id": "safe", "chunk_ids": [entry["id"]]})
    assert erased.status == 200 and json.loads(erased.body)["done"], erased.body
    pair.tell("safe", "The colour of the safe is turquoise.")
    prompt = pair.ask("Which colour has the safe?", "safe")[1]
    assert "turquoise" in prompt and "Xylophone" not in prompt
    assert b"Xylophone" not in pair.on_disk("safe")
    wait_until(lambda: ".gone" not in str(list(pair.folder_of("safe").rglob("*"))), lambda: repr(pair.reader))


def test_while_the_database_is_away_the_replica_serves_as_it_is_and_says_so(pair: Pair) -> None:
    pair.tell("trees", "The oldest tree of the park is a ginkgo.")
    pair.ask("Which is the oldest tree of the park?", "trees")
    pair.postgres.stop()
    try:
        answer, prompt = pair.ask("So which tree of the park is the oldest one?", "trees")
    finally:
        pair.postgres.start()
    assert "is a ginkgo" in prompt
    assert answer.headers["X-Memory-Status"] == "degraded:store"

    def is_back() -> bool:
        answer, _ = pair.ask("Which tree of the park is the oldest?", "trees")
        return answer.headers["X-Memory-Status"] == "injected"

    wait_until(is_back, lambda: repr(pair.reader))
