"""Several model servers behind one memd: which of them a request goes to."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import ask
from hypothesis import given
from hypothesis import strategies as st
from pooled_servers import LONG, Server, Talk, pooled
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, recording_upstream

from memd.proxy.upstream.client import ERRORS_MAX, Health
from memd.proxy.upstream.pool import KNOWN_MAX, Affinity, Trail, merged_lists, rank


@pytest.mark.llama
@pytest.mark.parametrize("mode", ["full", "readonly", "off"])
def test_a_conversation_stays_with_the_server_that_has_its_cache(
    make_daemon: MakeDaemon, two_llamas: tuple[Server, Server], mode: str
) -> None:
    daemon = pooled(make_daemon, *two_llamas)
    talks = [Talk(daemon, f"This is conversation {number}.", {"X-Memory-Mode": mode}) for number in range(4)]
    for _ in range(3):
        for talk in talks:
            talk.turn()
    for talk in talks:
        assert len(talk.homes) == 3 and len(set(talk.homes)) == 1, [one.homes for one in talks]
        assert talk.cached[2] > talk.cached[1] > len(LONG), [one.cached for one in talks]
    assert {talk.homes[0] for talk in talks} == {server.url for server in two_llamas}, "new ones are dealt out"


@pytest.mark.llama
def test_a_restart_of_memd_finds_the_server_again(make_daemon: MakeDaemon, two_llamas: tuple[Server, Server]) -> None:
    daemon = pooled(make_daemon, *two_llamas)
    talk = Talk(daemon, "This is to go on after a restart.")
    talk.turn()
    daemon.restart()
    talk.turn()
    assert len(set(talk.homes)) == 1 and talk.cached[1] > len(LONG)


def test_an_edit_and_another_answer_stay_with_the_server_of_the_conversation(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    talk = Talk(daemon, "This one is edited.")
    for _ in range(3):
        talk.turn()
    del talk.messages[3:]
    talk.turn()
    del talk.messages[-2:]
    talk.turn()
    assert len(set(talk.homes)) == 1


def test_a_thin_client_stays_with_its_server(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    for number in range(6):
        headers = {"X-Memory-History": "daemon", "X-Memory-Session": "thin"}
        assert daemon.chat([{"role": "user", "content": f"Part {number}"}], headers=headers).status == 200
    assert sorted(len(fake.chats) for fake in two_upstreams) == [0, 6]


def test_new_conversations_go_where_the_least_is_under_way(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    with ExitStack() as stack:
        for number in range(4):  # each is still being answered when the next comes
            stack.enter_context(daemon.stream([{"role": "user", "content": f"Conversation {number}"}]))
    for number in range(20):
        daemon.chat([{"role": "user", "content": f"Later conversation {number}"}])
    assert min(len(fake.chats) for fake in two_upstreams) >= 8


def test_a_model_is_asked_of_the_servers_that_list_it_and_all_are_listed(make_daemon: MakeDaemon) -> None:
    with recording_upstream() as one, recording_upstream() as other:
        one.answer, other.answer = lists("small", "common"), lists("large", "common")
        daemon = pooled(make_daemon, one, other)
        listed = ask(f"{daemon.base_url}/v1/models").json
        assert [card["id"] for card in listed["data"]] == ["small", "common", "large"]
        for number in range(4):
            for model in ("small", "large"):
                daemon.chat([{"role": "user", "content": f"{number}, {model}"}], model=model)
                ask(f"{daemon.base_url}/v1/embeddings", {"model": model, "input": str(number)})
        for fake, model in ((one, "small"), (other, "large")):
            asked = [json.loads(request.body)["model"] for request in fake.requests if request.method == "POST"]
            assert set(asked) == {model} and len(asked) == 8
        for number in range(6):  # llama-server takes any name
            assert daemon.chat([{"role": "user", "content": f"{number}"}], model="gpt-4").status == 200
        assert len(one.chats) > 4 and len(other.chats) > 4


def lists(*models: str) -> Any:
    """Answers chats, and lists models."""

    def answer(request: Request) -> Response:
        if request.target == "/v1/models":
            return Response((json.dumps({"object": "list", "data": [{"id": model} for model in models]}).encode(),))
        return chat_answer(request)

    return answer


def test_what_is_asked_about_a_server_itself_goes_to_the_first_that_is_there(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    for _ in range(3):
        ask(f"{daemon.base_url}/slots")
        ask(f"{daemon.base_url}/slots/0?action=save", {"filename": "a"})
    targets = [[one.target for one in fake.requests if one.target.startswith("/slots")] for fake in two_upstreams]
    assert (len(targets[0]), len(targets[1])) == (6, 0)


# The parts


def test_health_leaves_out_ever_longer_and_a_request_that_is_answered_makes_up_for_all() -> None:
    health = Health()
    pauses = []
    for number in range(6):
        health.failed(float(number), "it is away")
        assert health.is_out
        pauses.append(health.retry_at - number)
        health.answers_again()
        assert health.is_on_trial and not health.is_out
    assert pauses == [1, 2, 4, 8, 10, 10]
    health.answered()
    assert not health.is_on_trial
    health.failed(0.0, "it is away")
    assert health.retry_at == 1
    health.answered()
    for count in range(ERRORS_MAX - 1):
        health.erred(0.0, bytes([count]))
        assert not health.is_out, count
    health.answered()
    for count in range(ERRORS_MAX - 1):
        health.erred(0.0, bytes([count]))
    assert not health.is_out
    for _ in range(20):
        health.erred(0.0, bytes([0]))
        assert not health.is_out, "one that is tried again and again"
    health.erred(0.0, b"another")
    assert health.is_out


def test_what_is_remembered_of_conversations_is_bounded() -> None:
    known = Affinity()
    for number in range(KNOWN_MAX):
        key = number.to_bytes(16)
        known.answered(Trail([], [key, key + b"!"], key, goes_on=True), "http://one")
    assert len(known) == KNOWN_MAX
    newest = Trail([b"new"], [b"newer"], b"", goes_on=True)
    known.answered(newest, "http://other")
    assert len(known) == KNOWN_MAX and known.home(newest) == "http://other"
    assert known.home(Trail([], [b"0" * 16, bytes(16) + b"!"], b"", goes_on=True)) is None, "the oldest"


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=8, unique=True), st.binary(min_size=16, max_size=16))
def test_a_server_that_leaves_moves_only_its_own_conversations(urls: list[str], opening: bytes) -> None:
    best = max(urls, key=lambda url: rank(opening, url))
    for gone in urls:
        left = max((url for url in urls if url != gone), key=lambda url: rank(opening, url))
        assert left == best or gone == best


def test_lists_of_models_are_put_together_whatever_servers_say() -> None:
    assert merged_lists([None, "x", {"error": 1}, {"data": "x"}]) is None
    one = {"object": "list", "data": [{"id": "a"}, "odd", {}]}
    assert merged_lists([one]) == one
    both = merged_lists([None, one, {"data": [{"id": "a", "own": 1}, {"id": "b"}, 7], "models": [{"name": "b"}]}])
    assert both is not None and [card for card in both["data"] if card and card != "odd"][:2] == [
        {"id": "a"},
        {"id": "b"},
    ]
    tags = merged_lists([{"models": [{"name": "q:latest"}]}, {"models": [{"name": "q:latest"}, {"name": "r"}]}])
    assert tags == {"models": [{"name": "q:latest"}, {"name": "r"}]}
