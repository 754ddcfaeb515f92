"""Two daemons that share their topics in PostgreSQL: whichever is asked, it is one memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_process import Answer, ask, user, wait_until
from postgres_server import PostgresServer
from recording_upstream import recording_upstream
from shared_daemons import Cluster, cluster

pytestmark = pytest.mark.process

FACT = "The lamp of the lighthouse was made in Paris."
QUESTION = "Where was the lamp of the lighthouse made?"


@pytest.fixture(scope="module")
def pair(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with recording_upstream() as upstream, cluster(postgres, upstream, tmp_path_factory.mktemp("pair")) as made:
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
