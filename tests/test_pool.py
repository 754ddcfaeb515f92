"""Several model servers behind one memd: conversations stay with theirs, and servers that die cost nobody an answer.

The servers are real llama.cpp where what they do matters (their caches, kill -9, SIGSTOP, a restart). What they do only
rarely comes from a server that does nothing else.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, wait_until
from llama_server import Llama, replaceable_llama
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, recording_upstream
from reserved_port import reserved_port

CONTEXT = 8192
SLOTS = 4
LONG = "Let us talk about the harbour, its cranes and its ferries, and about what the tide does to them. "


class Server:
    """A real llama.cpp at an address that stays its own while it is away."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        self._model, self._port, self._log = model, port, log
        self._running = ExitStack()
        self.url = f"http://127.0.0.1:{port}"
        self.llama: Llama | None = None

    def start(self, *, context: int = CONTEXT) -> None:
        """Start it and wait until it has its model."""
        started: AbstractContextManager[Llama] = replaceable_llama(
            self._model, context=context, log=self._log, parallel=SLOTS, port=self._port
        )
        self.llama = self._running.enter_context(started)

    def send_signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        assert self.llama is not None
        self.llama.send_signal(number)

    def kill(self) -> None:
        """`kill -9`."""
        self.send_signal(signal.SIGKILL)
        self._running.close()


@pytest.fixture
def servers(scripted_gguf: Path, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two real servers that run."""
    with ExitStack() as stack:
        both = []
        for name in ("one", "other"):
            server = Server(scripted_gguf, stack.enter_context(reserved_port()), tmp_path / f"{name}.log")
            server.start()
            stack.callback(server._running.close)
            both.append(server)
        yield both[0], both[1]


@pytest.fixture
def fakes() -> Iterator[tuple[RecordingUpstream, RecordingUpstream]]:
    """Two servers that record what they are sent."""
    with recording_upstream() as one, recording_upstream() as other:
        yield one, other


def pooled(make_daemon: MakeDaemon, *servers: Server | RecordingUpstream, **settings: Any) -> DaemonProcess:
    """A daemon in front of these."""
    upstream = {"urls": [server.url for server in servers]}
    return make_daemon(None, {"upstream": upstream, "log": {"level": "debug"}, **settings}).start()


def figures(daemon: DaemonProcess, name: str) -> dict[str, float]:
    """A metric of each server."""
    text = ask(f"{daemon.own_url}/memd/metrics").body.decode()
    return {
        url: float(number) for url, number in re.findall(rf'^{name}{{server="([^"]+)"}} (\S+)$', text, re.MULTILINE)
    }


class Talk:
    """A client's conversation, and the servers that answered it."""

    def __init__(self, daemon: DaemonProcess, opening: str, headers: Mapping[str, str] | None = None) -> None:
        self._daemon = daemon
        self._opening = opening
        self._headers = headers
        self.messages: list[dict[str, str]] = []
        self.homes: list[str] = []
        self.cached: list[int] = []

    def turn(self) -> Answer:
        """Say something and take the reply."""
        said = f"{self._opening} {LONG}" if not self.messages else f"And then, at turn {len(self.messages)}? {LONG}"
        self.messages.append({"role": "user", "content": said})
        before = figures(self._daemon, "memd_upstream_requests_total")
        answer = self._daemon.chat(self.messages, headers=self._headers)
        after = figures(self._daemon, "memd_upstream_requests_total")
        self.messages.append({"role": "assistant", "content": answer.reply})
        self.homes += [url for url in after if after[url] > before[url]]
        usage = answer.json.get("usage", {})
        self.cached.append(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
        return answer


def is_up(daemon: DaemonProcess, url: str) -> bool:
    """Whether requests go to a server."""
    told = ask(f"{daemon.own_url}/memd/health").json["upstreams"]
    return any(one["url"] == url and one["reachable"] and not one["reason"] for one in told)


# Where requests go


@pytest.mark.llama
@pytest.mark.parametrize("mode", ["full", "readonly", "off"])
def test_a_conversation_stays_with_the_server_that_has_its_cache(
    make_daemon: MakeDaemon, servers: tuple[Server, Server], mode: str
) -> None:
    daemon = pooled(make_daemon, *servers)
    talks = [Talk(daemon, f"This is conversation {number}.", {"X-Memory-Mode": mode}) for number in range(4)]
    for _ in range(3):
        for talk in talks:
            talk.turn()
    for talk in talks:
        assert len(talk.homes) == 3 and len(set(talk.homes)) == 1, [one.homes for one in talks]
        assert talk.cached[2] > talk.cached[1] > len(LONG), [one.cached for one in talks]
    assert {talk.homes[0] for talk in talks} == {server.url for server in servers}, "new ones are dealt out"


@pytest.mark.llama
def test_a_restart_of_memd_finds_the_same_server_again(make_daemon: MakeDaemon, servers: tuple[Server, Server]) -> None:
    daemon = pooled(make_daemon, *servers)
    talk = Talk(daemon, "This is to go on after a restart.")
    talk.turn()
    daemon.restart()
    talk.turn()
    assert len(set(talk.homes)) == 1 and talk.cached[1] > len(LONG)


def test_an_edit_and_another_answer_stay_with_the_server_of_the_conversation(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *fakes)
    talk = Talk(daemon, "This one is edited.")
    for _ in range(3):
        talk.turn()
    del talk.messages[3:]
    talk.turn()
    del talk.messages[-2:]
    talk.turn()
    assert len(set(talk.homes)) == 1


def test_a_thin_client_stays_with_its_server(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *fakes)
    for number in range(6):
        headers = {"X-Memory-History": "daemon", "X-Memory-Session": "thin"}
        assert daemon.chat([{"role": "user", "content": f"Part {number}"}], headers=headers).status == 200
    assert sorted(len(fake.chats) for fake in fakes) == [0, 6]


def test_new_conversations_go_where_the_least_is_under_way(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *fakes)
    with ExitStack() as stack:
        for number in range(4):  # each is still being answered when the next comes
            stack.enter_context(daemon.stream([{"role": "user", "content": f"Conversation {number}"}]))
    for number in range(20):
        daemon.chat([{"role": "user", "content": f"Later conversation {number}"}])
    assert min(len(fake.chats) for fake in fakes) >= 8


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
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *fakes)
    for _ in range(3):
        ask(f"{daemon.base_url}/slots")
        ask(f"{daemon.base_url}/slots/0?action=save", {"filename": "a"})
    targets = [[one.target for one in fake.requests if one.target.startswith("/slots")] for fake in fakes]
    assert (len(targets[0]), len(targets[1])) == (6, 0)


# Servers that die, and come back


@pytest.mark.llama
def test_a_conversation_whose_server_is_killed_goes_on_elsewhere_and_stays_there(
    make_daemon: MakeDaemon, servers: tuple[Server, Server]
) -> None:
    daemon = pooled(make_daemon, *servers)
    talk = Talk(daemon, "My server will be killed.")
    talk.turn()
    home, other = servers if talk.homes == [servers[0].url] else servers[::-1]
    home.kill()
    talk.turn()
    assert set(talk.homes[1:]) == {home.url, other.url}, "refused by the one, answered by the other"
    talk.turn()
    assert talk.homes[-1] == other.url and talk.homes.count(home.url) == 2 and talk.cached[2] > len(LONG)
    home.start()
    wait_until(lambda: is_up(daemon, home.url), lambda: repr(daemon))
    talk.turn()
    assert talk.homes[-1] == other.url, "its cache is there now"
    for number in range(6):
        daemon.chat([{"role": "user", "content": f"A new conversation, number {number}"}])
    used = figures(daemon, "memd_upstream_requests_total")
    assert used[home.url] > talk.homes.count(home.url), "new ones go to both"
    assert daemon.log.read_text().count("a model server is left out until it answers again") == 1


@pytest.mark.llama
def test_a_server_that_is_killed_in_mid_answer_ends_the_stream_as_broken_and_the_next_turn_is_answered(
    make_daemon: MakeDaemon, servers: tuple[Server, Server]
) -> None:
    daemon = pooled(make_daemon, *servers)
    messages = [{"role": "user", "content": "Answer in very many words."}]
    with daemon.stream(messages, ignore_eos=True, max_tokens=7_000) as stream:
        parts = iter(stream)
        next(parts)
        busy = figures(daemon, "memd_upstream_in_flight")
        home = next(server for server in servers if busy[server.url] == 1)
        home.kill()
        for _ in parts:
            pass
        assert not stream.ended_properly
    assert not is_up(daemon, home.url)
    answer = daemon.chat([*messages, {"role": "user", "content": "Once more."}])
    assert answer.status == 200
    assert sum(figures(daemon, "memd_upstream_in_flight").values()) == 0


def test_a_server_that_loads_its_model_is_left_out_until_it_is_ready(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    one, other = fakes
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


def test_an_error_of_one_request_is_the_clients_and_says_nothing_about_its_server(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *fakes)
    for status in (500, 400):
        for fake in fakes:
            fake.answer = partial(failing, status=status)
        answer = daemon.chat([{"role": "user", "content": f"This fails with {status}."}])
        assert answer.status == status and answer.json == {"error": {"message": "for this request"}}
    assert sum(len(fake.chats) for fake in fakes) == 2, "each was asked once"
    assert all(is_up(daemon, fake.url) for fake in fakes)


def failing(request: Request, status: int) -> Response:
    """Fails chats, and is well."""
    if request.target == "/health":
        return Response((b"{}",))
    return Response((json.dumps({"error": {"message": "for this request"}}).encode(),), status=status)


def test_a_server_that_answers_every_request_with_an_error_does_not_get_them_all(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    fakes[0].answer = lambda request: failing(request, 500)
    daemon = pooled(make_daemon, *fakes)
    answers = [daemon.chat([{"role": "user", "content": f"Conversation {number}"}]).status for number in range(30)]
    assert 3 <= answers.count(500) <= 8 and answers[-8:].count(200) >= 6, answers
    assert daemon.log.read_text().count("requests running with errors") >= 1


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
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    fakes[0].answer = hangs_up
    daemon = pooled(make_daemon, *fakes)
    saved = f"{daemon.base_url}/slots/0?action=save"
    assert ask(saved, {"filename": "a"}).status == 502 and not slots_of(fakes[1])
    assert ask(saved, {"filename": "a"}).status == 200 and slots_of(fakes[1]), "the first is left out"


def slots_of(fake: RecordingUpstream) -> list[Request]:
    """What was asked about its slots."""
    return [request for request in fake.requests if request.target.startswith("/slots")]


def test_another_server_is_asked_where_one_has_too_much_to_do_or_wants_another_key(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *fakes)
    for status in (429, 401, 404):
        fakes[0].answer = partial(failing, status=status)
        for number in range(4):
            assert daemon.chat([{"role": "user", "content": f"{status}, {number}"}]).status == 200
    assert fakes[0].chats and len(fakes[1].chats) == 12 and is_up(daemon, fakes[0].url)
    fakes[1].answer = fakes[0].answer = lambda request: failing(request, 429)
    assert daemon.chat([{"role": "user", "content": "All are busy."}]).status == 429


def test_an_answer_that_breaks_off_before_anything_was_passed_on_is_asked_for_elsewhere(
    make_daemon: MakeDaemon, fakes: tuple[RecordingUpstream, RecordingUpstream]
) -> None:
    daemon = pooled(make_daemon, *fakes)
    for stream in (True, False):
        for fake in fakes:
            fake.answer = Breaking(fakes, stream=stream)
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
