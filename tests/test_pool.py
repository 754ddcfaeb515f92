"""Several model servers behind one memd: which of them a request goes to."""

import asyncio
import json
import signal
import threading
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_in_process import Client, daemon_in_process
from daemon_process import ask, wait_until
from hypothesis import given
from hypothesis import strategies as st
from pooled_servers import LONG, SLOTS, Server, Talk, figures, is_up, made, pooled
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, recording_upstream
from reserved_port import reserved_port

from memd.proxy.upstream import pool
from memd.proxy.upstream.client import ERRORS_MAX, Health
from memd.proxy.upstream.pool import KNOWN_MAX, Affinity, Trail, merged_lists, rank
from memd.settings import model


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


def test_an_edit_a_thin_client_and_questions_about_a_server_stay_with_one_server(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    for number in range(6):
        headers = {"X-Memory-History": "daemon", "X-Memory-Session": "thin"}
        assert daemon.chat([{"role": "user", "content": f"Part {number}"}], headers=headers).status == 200
    assert sorted(len(fake.chats) for fake in two_upstreams) == [0, 6]

    for _ in range(3):
        ask(f"{daemon.base_url}/slots")
        ask(f"{daemon.base_url}/slots/0?action=save", {"filename": "a"})
    targets = [[one.target for one in fake.requests if one.target.startswith("/slots")] for fake in two_upstreams]
    assert (len(targets[0]), len(targets[1])) == (6, 0)

    talk = Talk(daemon, "This one is edited.")
    for _ in range(3):
        talk.turn()
    del talk.messages[3:]
    talk.turn()
    del talk.messages[-2:]
    talk.turn()
    assert len(set(talk.homes)) == 1


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


def test_conversations_that_began_elsewhere_as_their_server_had_more_stay_there(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    talks = [Talk(daemon, f"Conversation {number}.") for number in range(12)]
    for talk in talks:
        talk.turn()
    assert min(sum(talk.homes == [fake.url] for talk in talks) for fake in two_upstreams) >= 5, "they are dealt out"
    for talk in talks:
        talk.turn()
    assert [talk.homes[1] for talk in talks] == [talk.homes[0] for talk in talks]


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


# Several model servers behind one memd: those that die, hang, or do not do their work cost nobody an answer


@pytest.mark.llama
def test_a_conversation_whose_server_is_killed_goes_on_elsewhere_and_stays_there(
    make_daemon: MakeDaemon, two_llamas: tuple[Server, Server]
) -> None:
    daemon = pooled(make_daemon, *two_llamas)
    talk = Talk(daemon, "My server will be killed.")
    talk.turn()
    home, other = two_llamas if talk.homes == [two_llamas[0].url] else two_llamas[::-1]
    home.kill()
    talk.turn()
    assert set(talk.homes[1:]) == {home.url, other.url}, "refused by the one, answered by the other"
    talk.turn()
    assert talk.homes[-1] == other.url and talk.homes.count(home.url) == 2 and talk.cached[2] > len(LONG)
    home.start()
    wait_until(lambda: is_up(daemon, home.url), lambda: repr(daemon))
    talk.turn()
    assert talk.homes[-1] == other.url, "its cache is there now"
    assert "\nmemd_upstream_moves_total 1.0\n" in ask(f"{daemon.own_url}/memd/metrics").body.decode()
    for number in range(6):
        daemon.chat([{"role": "user", "content": f"A new conversation, number {number}"}])
    used = figures(daemon, "memd_upstream_requests_total")
    assert used[home.url] > talk.homes.count(home.url), "new ones go to both"
    assert daemon.log.read_text().count("a model server is left out until it answers again") == 1


@pytest.mark.llama
def test_a_server_that_is_killed_in_mid_answer_ends_the_stream_as_broken_and_the_next_turn_is_answered(
    make_daemon: MakeDaemon, two_llamas: tuple[Server, Server]
) -> None:
    daemon = pooled(make_daemon, *two_llamas)
    messages = [{"role": "user", "content": "Answer in very many words."}]
    with daemon.stream(messages, ignore_eos=True, max_tokens=8_000) as stream:
        parts = iter(stream)
        next(parts)
        busy = figures(daemon, "memd_upstream_in_flight")
        home = next(server for server in two_llamas if busy[server.url] == 1)
        home.kill()
        for _ in parts:
            pass
        assert not stream.ended_properly
    assert not is_up(daemon, home.url)
    answer = daemon.chat([*messages, {"role": "user", "content": "Once more."}])
    assert answer.status == 200
    assert sum(figures(daemon, "memd_upstream_in_flight").values()) == 0


def test_a_server_that_loads_its_model_is_left_out_until_it_is_ready(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    one, other = two_upstreams
    one.is_loading = True
    daemon = pooled(make_daemon, one, other)
    for number in range(6):
        assert daemon.chat([{"role": "user", "content": f"Conversation {number}"}]).status == 200
    assert not one.chats and len(other.chats) == 6
    other.is_loading = True
    answer = daemon.chat([{"role": "user", "content": "Is anybody there?"}])
    assert answer.status == 503 and "Loading model" in answer.body.decode(), "as with one server"
    one.is_loading = False
    wait_until(lambda: is_up(daemon, one.url), lambda: repr(daemon))
    assert daemon.chat([{"role": "user", "content": "And now?"}]).status == 200 and one.chats


@pytest.mark.process
def test_when_all_servers_are_away_the_error_names_each_with_its_reason(make_daemon: MakeDaemon) -> None:
    with reserved_port() as one, reserved_port() as other:
        urls = [f"http://127.0.0.1:{port}" for port in (one, other)]
        daemon = make_daemon(None, {"upstream": {"urls": urls}}).start()
        for answer in (
            daemon.chat([{"role": "user", "content": "Is anybody there?"}]),
            daemon.chat([{"role": "user", "content": "Is anybody there?"}], headers={"X-Memory-Mode": "off"}),
            ask(f"{daemon.base_url}/v1/models"),
        ):
            assert answer.status == 502
            message = answer.json["error"]["message"]
            assert all(f"{url} (Connection refused)" in message for url in urls), message


def test_a_model_that_only_one_server_lists_is_not_asked_of_another_that_would_answer_with_its_own(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    for fake in two_upstreams:
        fake.answer = partial(lists_and_dies, model=fake.url)
    daemon = pooled(make_daemon, *two_upstreams)
    answer = daemon.chat([{"role": "user", "content": "Hello"}], model=two_upstreams[0].url)
    message = answer.json["error"]["message"]
    assert answer.status == 502 and f"{two_upstreams[1].url} was not asked: it does not list" in message
    assert not two_upstreams[1].chats


def lists_and_dies(request: Request, model: str) -> Response:
    """Lists one model, and dies of each chat."""
    if request.target == "/v1/models":
        return Response((json.dumps({"data": [{"id": model}]}).encode(),))
    return hangs_up(request)


def test_an_error_of_one_request_is_the_clients_and_says_nothing_about_its_server(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    for status in (500, 400):
        for fake in two_upstreams:
            fake.answer = partial(failing, status=status)
        answer = daemon.chat([{"role": "user", "content": f"This fails with {status}."}])
        assert answer.status == status and answer.json == {"error": {"message": "for this request"}}
    assert sum(len(fake.chats) for fake in two_upstreams) == 2, "each was asked once"
    assert all(is_up(daemon, fake.url) for fake in two_upstreams)


def failing(request: Request, status: int) -> Response:
    """Fails chats, and is well."""
    if request.target == "/health":
        return Response((b"{}",))
    return Response((json.dumps({"error": {"message": "for this request"}}).encode(),), status=status)


def test_a_server_that_answers_every_request_with_an_error_does_not_get_them_all(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    two_upstreams[0].answer = lambda request: failing(request, 500)
    daemon = pooled(make_daemon, *two_upstreams)
    answers = [daemon.chat([{"role": "user", "content": f"Conversation {number}"}]).status for number in range(30)]
    told = daemon.log.read_text()
    assert "it answered 3 conversations running with errors" in told
    assert 3 <= answers.count(500) <= 3 + told.count("a model server answers again"), answers


def test_a_request_that_may_have_killed_a_server_is_sent_to_one_more_only(make_daemon: MakeDaemon) -> None:
    with recording_upstream() as one, recording_upstream() as two, recording_upstream() as three:
        fakes = (one, two, three)
        for fake in fakes:
            fake.answer = hangs_up
        daemon = pooled(make_daemon, *fakes)
        answer = daemon.chat([{"role": "user", "content": "A prompt of death."}])
        assert answer.status == 502 and answer.json["error"]["message"].count("it closed the connection") == 2
        assert sum(bool(fake.chats) for fake in fakes) == 2


def hangs_up(request: Request) -> Response:
    """Reads a chat and dies."""
    if request.method == "POST":
        raise ConnectionError
    return Response((b"{}",))


def test_what_changes_something_at_a_server_is_not_sent_again_after_it_was_read(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    two_upstreams[0].answer = hangs_up
    daemon = pooled(make_daemon, *two_upstreams)
    saved = f"{daemon.base_url}/slots/0?action=save"
    assert ask(saved, {"filename": "a"}).status == 502 and not slots_of(two_upstreams[1])
    assert ask(saved, {"filename": "a"}).status == 200 and slots_of(two_upstreams[1]), "the first is left out"


def slots_of(fake: RecordingUpstream) -> list[Request]:
    """What was asked about its slots."""
    return [request for request in fake.requests if request.target.startswith("/slots")]


def test_another_server_is_asked_where_one_has_too_much_to_do_or_wants_another_key(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    for status in (429, 401, 404):
        two_upstreams[0].answer = partial(failing, status=status)
        for number in range(4):
            assert daemon.chat([{"role": "user", "content": f"{status}, {number}"}]).status == 200
    assert two_upstreams[0].chats and len(two_upstreams[1].chats) == 12 and is_up(daemon, two_upstreams[0].url)
    two_upstreams[1].answer = two_upstreams[0].answer = lambda request: failing(request, 429)
    assert daemon.chat([{"role": "user", "content": "All are busy."}]).status == 429


def test_an_answer_that_breaks_off_before_anything_was_passed_on_is_asked_for_elsewhere(
    make_daemon: MakeDaemon, two_upstreams: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *two_upstreams)
    for stream in (True, False):
        for fake in two_upstreams:
            fake.answer = Breaking(two_upstreams, stream=stream)
        messages = [{"role": "user", "content": f"An answer of which only the head comes, {stream}."}]
        if stream:
            with daemon.stream(messages) as answer:
                list(answer)
                assert answer.ended_properly
        else:
            assert daemon.chat(messages).reply == "Noted."


class Breaking:
    """The first of several servers that is asked sends the head of an answer and hangs up."""

    def __init__(self, fakes: tuple[RecordingUpstream, ...], *, stream: bool) -> None:
        self._fakes = fakes
        self._kind = "text/event-stream" if stream else "application/json"

    def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            return Response((b"{}",))
        for fake in self._fakes:
            fake.answer = chat_answer
        headers = (("Content-Type", self._kind), ("Content-Length", "1000"))
        return Response((b"", b""), headers=headers, gate=HangsUp())


class HangsUp(threading.Event):
    """Ends the connection where a gate would be waited for."""

    def wait(self, timeout: float | None = None) -> bool:
        """Raise what a connection that has ended raises."""
        raise ConnectionError


@pytest.mark.llama
async def test_a_server_that_hangs_loses_the_request_to_the_next_and_gets_others_when_it_goes_on(
    two_llamas: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(pool, "SILENT_SECONDS", 0.5)
    async with in_front_of(tmp_path, *two_llamas) as client:
        for server in two_llamas:
            server.send_signal(signal.SIGSTOP)
            for number in range(3):
                _, _, answer = await client.ask(f"While {server.url} hangs, {number}.", model="tiny")
                assert answer["choices"][0]["message"]["content"]
            [stopped] = [one for one in client.daemon.upstream.servers if one.url == server.url]
            assert "nothing" in stopped.health.reason and not stopped.in_flight
            server.send_signal(signal.SIGCONT)
            await asyncio.to_thread(wait_until, partial(getattr, stopped, "is_up"), lambda: "it is not used again")


@pytest.mark.llama
async def test_a_server_that_is_busy_is_waited_for(
    two_llamas: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STALL_SECONDS", 0.01)
    async with in_front_of(tmp_path, *two_llamas) as client:
        daemon = client.daemon
        answers = await asyncio.gather(*(client.ask(f"{number}: {LONG * 12}", model="tiny") for number in range(24)))
        assert [status for status, _, _ in answers] == [200] * 24
        assert all(not server.health.reason for server in daemon.upstream.servers)
        assert daemon.metrics.upstream_failures.counts.keys() == daemon.metrics.upstream_requests.counts.keys()
        assert sum(daemon.metrics.upstream_requests.counts.values()) == 24


def in_front_of(folder: Path, *servers: Server) -> AbstractAsyncContextManager[Client]:
    """A daemon in this process, and a client of it."""
    urls = tuple(server.url for server in servers)
    return daemon_in_process(folder, upstream={"url": urls[0], "urls": urls}, buffer=model.BufferSettings())


@pytest.mark.llama
def test_a_conversation_that_moves_to_a_smaller_window_is_made_to_fit_it(
    make_daemon: MakeDaemon, scripted_gguf: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        large, small = (made(stack, scripted_gguf, tmp_path / f"{name}.log") for name in ("large", "small"))
        large.start(context=SLOTS * 4096)
        daemon = pooled(make_daemon, large, small)
        talk = Talk(daemon, "This one outgrows the small window.")
        for _ in range(9):
            prompt_tokens = talk.turn().json["usage"]["prompt_tokens"]
        assert prompt_tokens > 1200
        small.start(context=SLOTS * 1024)
        wait_until(lambda: is_up(daemon, small.url), lambda: repr(daemon))
        large.kill()
        answer = talk.turn()
        assert answer.json["usage"]["prompt_tokens"] < 1024 and talk.homes[-1] == small.url
        assert "refused a prompt as too long" not in daemon.log.read_text()
