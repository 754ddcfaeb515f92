"""Two daemons that share their topics in PostgreSQL: whichever is asked, it is one memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
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


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


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
