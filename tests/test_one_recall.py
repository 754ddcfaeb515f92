"""One recall: the receipt of a prompt, `/memd/search`, `memd search` and replay agree on ids, verdicts and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

WINDOW = 4096  # the recording upstream's
PLACES = ("the boat house", "the mill", "the cellar", "the harbour office", "the north tower", "the old bakery")
THINGS = ("lock", "door", "roof", "stove", "window")
QUESTION = "What did Ingrid say about the keys, the lock and the door of the boat house and the mill?"
RELEVANT = {"injected", "no room in the budget", "in the block of an earlier turn"}


def facts() -> list[str]:
    """Thirty notes of about seventy tokens about one subject: far more than the budget of a block."""
    return [
        f"Note {number}: Ingrid said that the {thing} of {place} has key number {number * 37 % 101}, that it was "
        f"mended in the week of {number % 28 + 1} May by a locksmith from Mill Lane, who charged {number * 13} crowns, "
        f"and that the spare hangs on hook {number} behind the blue cupboard beside the stairs."
        for number, (place, thing) in enumerate((place, thing) for place in PLACES for thing in THINGS)
    ]


def with_usage(request: Request) -> Response:
    """An answer of a model that counts more tokens than the bundled tokenizer: one for three bytes of the body."""
    [body] = chat_answer(request).parts
    usage = {"prompt_tokens": len(request.body) // 3, "completion_tokens": 1}
    return Response((json.dumps(json.loads(body) | {"usage": usage}).encode(),))


@pytest.fixture
def told(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    daemon = make_daemon(upstream.url).start()
    upstream.answer = with_usage
    daemon.chat([{"role": "user", "content": " ".join(facts()[:10])}], memory_in={"topic_id": "elsewhere"})
    upstream.answer = chat_answer  # from now on nothing new is learned of the model's tokens
    for fact in facts():
        daemon.chat([{"role": "user", "content": fact}], memory_in={"topic_id": "work"})
    wait_until(lambda: unstored(daemon) == [], lambda: f"not stored: {unstored(daemon)}")
    return daemon


def unstored(daemon: DaemonProcess) -> list[str]:
    stored = "\n".join(entry["content"] for entry in daemon.export() if entry["topic_id"] == "work")
    return [fact for fact in facts() if fact not in stored]


def relevant(chunks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """Id, verdict and score of the candidates that are worth showing, best first."""
    return [(one["id"], one["verdict"], one["score"]) for one in chunks if one["verdict"] in RELEVANT]


def test_a_prompt_search_and_replay_show_the_same_chunks_for_the_same_reasons(told: DaemonProcess) -> None:
    answer = told.chat(
        [{"role": "user", "content": QUESTION}], {"X-Memory-Mode": "readonly"}, memory_in={"topic_id": "work"}
    )
    turn = f"{told.own_url}/memd/turns/{answer.headers['X-Memory-Turn']}"
    wait_until(lambda: ask(turn).status == 200, lambda: "no receipt")
    receipt = ask(turn).json
    by_route = ask(f"{told.own_url}/memd/search?topic=work&q={QUESTION.replace(' ', '+')}").json
    by_command = json.loads(told.run("search", "--json", "--topic", "work", QUESTION).stdout)
    replay = ask(f"{turn}/replay").json

    verdicts = [one["verdict"] for one in receipt["candidates"]]
    assert receipt["budget_tokens"] == WINDOW // 4 and {"injected", "no room in the budget"} <= set(verdicts)
    assert receipt["block_tokens"] > len(receipt["block"]) / 3.6, "drifted: a raw token has four characters and more"
    injected = [one for one in receipt["candidates"] if one["verdict"] == "injected"]
    assert {one["id"] for one in injected} == set(receipt["shown"])
    for search in (by_route, by_command, replay["now"]):
        assert search["budget_tokens"] == receipt["budget_tokens"]
        listed = relevant(receipt["candidates"])  # of those without room the best
        assert relevant(search["chunks"])[: len(listed)] == listed
        assert {one["id"]: one["tokens"] for one in search["chunks"] if one["verdict"] == "injected"} == {
            one["id"]: one["tokens"] for one in injected
        }, "in the model's tokens"
        assert abs(search["tokens"] - receipt["block_tokens"]) <= 1
    assert (replay["gained"], replay["lost"]) == ([], [])
    assert sorted(replay["kept"]) == sorted(receipt["shown"])
