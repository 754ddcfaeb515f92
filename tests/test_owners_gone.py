"""A daemon that has a topic is gone: killed, stopped, cut off. What is asked of the others is answered all the same."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from archiver_stage import HashEmbedder
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, text_of, wait_until
from owner_daemons import Ground, figure, ground, owner_of, tell
from raw_wire import connected, request
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, recording_upstream, streamed
from tls_files import make_tls_files

pytestmark = pytest.mark.process

FACT = "The lamp of the lighthouse was made in Paris."
QUESTION = "Where was the lamp of the lighthouse made?"
MESSAGES = [{"role": "user", "content": "What is the lamp made of?"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Ground]:
    with ground() as both:
        yield both


@pytest.fixture
def daemons(make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground) -> tuple[DaemonProcess, ...]:
    """Two daemons; the second one has the topic."""
    settings = shared.settings()
    asked, owner = (make_daemon(upstream.url, settings).start() for _ in range(2))
    assert owner_of(tell(owner, "talk", FACT)) is None
    assert owner_of(tell(asked, "talk", "It is large.")) == owner.base_url
    return asked, owner


def test_the_topics_of_a_killed_daemon_are_taken_at_the_next_request(daemons: tuple[DaemonProcess, ...]) -> None:
    asked, owner = daemons
    owner.kill()
    told = tell(asked, "talk", QUESTION)
    assert owner_of(told) is None and told.headers["X-Memory-Status"] == "injected"
    assert "Connection refused" in asked.log.read_text()
    assert figure(asked, "memd_topics_taken_over_total") == 1
    owner.start()
    assert owner_of(tell(owner, "talk", "What do you know of the lamp of the lighthouse?")) == asked.base_url


def test_a_request_whose_owner_is_killed_is_answered_by_whom_it_was_asked_of(
    daemons: tuple[DaemonProcess, ...], upstream: RecordingUpstream
) -> None:
    asked, owner = daemons
    come, killed = threading.Event(), threading.Event()

    def answer(sent: Request) -> Response:
        is_first = not come.is_set()
        come.set()
        if is_first:
            killed.wait()
        return chat_answer(sent)

    upstream.answer = answer
    with ThreadPoolExecutor(1) as client:
        telling = client.submit(tell, asked, "talk", QUESTION)
        come.wait()
        owner.kill()
        told = telling.result()
        killed.set()
    assert owner_of(told) is None and told.headers["X-Memory-Status"] == "injected"


def test_an_owner_that_dies_in_mid_answer_ends_the_answer_abnormally(
    daemons: tuple[DaemonProcess, ...], upstream: RecordingUpstream
) -> None:
    asked, owner = daemons
    gate = threading.Event()
    upstream.answer = lambda _: streamed("One two", gate)
    client = connected(asked.base_url)
    body = b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "Count."}]}'
    client.send(request(b"POST", b"/t/talk/v1/chat/completions", body=body))
    assert b" 200 " in client.read_head() and client.header(b"X-Memory-Owner") == owner.base_url.encode()
    begun = client.read_some()
    owner.kill()
    assert len(begun + client.read_to_end()) < int(client.header(b"Content-Length") or 0), "no clean end"
    gate.set()
    client.close()
    upstream.answer = chat_answer
    assert owner_of(tell(asked, "talk", QUESTION)) is None


def test_the_topics_of_a_silent_daemon_are_taken_when_its_lease_is_over(
    daemons: tuple[DaemonProcess, ...],
) -> None:
    asked, owner = daemons
    owner.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(3) as clients:
        chats = [clients.submit(tell, asked, "talk", f"{QUESTION} I ask for the {n}th time.") for n in range(2)]
        search = clients.submit(ask, f"{asked.own_url}/memd/search?q=lamp&topic=talk")
        answers = [one.result() for one in (*chats, search)]
    assert [owner_of(one) for one in answers] == [None] * 3
    assert [one.headers["X-Memory-Status"] for one in answers[:2]] == ["injected"] * 2
    assert FACT.encode() in answers[2].body
    owner.send_signal(signal.SIGCONT)
    assert owner_of(tell(owner, "talk", "And where was the house made?")) == asked.base_url
    wait_until(lambda: "another daemon has taken a topic" in owner.log.read_text(), lambda: repr(owner))


def test_what_a_daemon_remembers_is_not_told_once_it_was_stopped_for_longer_than_a_lease(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    """Also where it had the topic when the request came: it is asked of whoever has it by now."""
    come, gate, question = threading.Event(), threading.Event(), "Who keeps the lighthouse since last week, and where?"

    def embedded(sent: Request) -> Response:
        if question.encode() in sent.body and not come.is_set():
            come.set()
            gate.wait()
        vectors = HashEmbedder().embed_many(json.loads(sent.body)["input"]).tolist()
        return Response((json.dumps({"data": [{"index": i, "embedding": v} for i, v in enumerate(vectors)]}).encode(),))

    with recording_upstream() as server, ThreadPoolExecutor(2) as clients:
        server.answers_all, server.answer = True, embedded
        embedding = {"model": "http", "url": f"{server.url}/v1", "name": "hash"}
        settings = shared.settings(embedding=embedding, retrieval={"timeout_ms": 600_000}, store={"lease_seconds": 3})
        owner, other = (make_daemon(upstream.url, settings).start() for _ in range(2))
        assert owner_of(tell(owner, "talk", "Ada keeps the lighthouse.")) is None
        telling = clients.submit(tell, owner, "talk", question)
        assert come.wait(60)
        owner.send_signal(signal.SIGSTOP)
        assert owner_of(tell(other, "talk", "Since last week Grace keeps the lighthouse.")) is None
        owner.send_signal(signal.SIGCONT)
        gate.set()
        assert owner_of(telling.result()) == other.base_url
        assert b"Grace keeps" in upstream.requests[-1].body
        assert owner_of(ask(f"{owner.own_url}/memd/search?q=lighthouse&topic=talk")) == other.base_url


def let_go(topic: str, settings: dict[str, Any]) -> None:
    """Let nobody have a topic, whatever the daemon believes that had it."""
    with psycopg.connect(settings["store"]["url"], autocommit=True) as connection:
        freed = "UPDATE memd_topic SET url = NULL, epoch = epoch + 1 WHERE topic = %s"
        assert connection.execute(freed, (topic,)).rowcount == 1


def taken_by(thief: DaemonProcess, topic: str, settings: dict[str, Any]) -> None:
    """Have a daemon take a topic from another one that does not know it, and has just renewed its lease."""
    let_go(topic, settings)
    assert owner_of(tell(thief, topic, "The house is white.")) is None


def test_what_runs_into_a_takeover_is_asked_again_of_the_daemon_that_has_the_topic(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    settings = shared.settings(store={"lease_seconds": 600}, retrieval={"timeout_ms": 600_000})
    owner, thief = (make_daemon(upstream.url, settings).start() for _ in range(2))
    topics = "noted", "corrected", "talked"
    for topic in topics:
        assert owner_of(tell(owner, topic, FACT)) is None
    wait_until(lambda: sum(FACT in one for one in owner.said()) == len(topics), lambda: repr(owner))
    taken_by(thief, "noted", settings)
    note = {"topic_id": "noted", "notes": [{"content": "The lens was ground in Brest."}]}
    assert owner_of(ask(f"{owner.own_url}/memd/notes", note)) == thief.base_url
    assert sum("ground in Brest" in one for one in thief.said()) == 1
    taken_by(thief, "corrected", settings)
    [chunk] = [
        one["id"]
        for one in ask(f"{thief.own_url}/memd/chunks?topic=corrected").json["chunks"]
        if FACT in one["content"]
    ]
    praise = {"topic_id": "corrected", "chunk_ids": [chunk], "action": "Helpful", "reason": "it helped"}
    corrected = ask(f"{owner.own_url}/memd/corrections", praise)
    assert owner_of(corrected) == thief.base_url and len(corrected.json["applied"]) == 1
    taken_by(thief, "talked", settings)
    told = tell(owner, "talked", QUESTION)
    assert owner_of(told) == thief.base_url and told.headers["X-Memory-Status"] == "injected"


def test_a_daemon_that_cannot_be_reached_keeps_its_topics_and_requests_go_on_without_memory(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    with silent_server() as (url, received):
        settings = shared.settings(retrieval={"timeout_ms": 600_000})
        asked = make_daemon(upstream.url, settings).start()
        owner = make_daemon(upstream.url, {**settings, "store": {**settings["store"], "own_url": url}}).start()
        assert owner_of(tell(owner, "talk", FACT)) is None
        told = tell(asked, "talk", QUESTION)
        assert owner_of(told) is None and told.headers["X-Memory-Status"] == "degraded:store"
        assert QUESTION in b"".join(received).decode()
        told = tell(asked, "talk", "And of what is it made?")
        assert owner_of(told) is None and told.headers["X-Memory-Status"] == "degraded:store"
        assert "of what is it made" not in b"".join(received).decode(), "nobody waits for it again"
        own = ask(f"{asked.own_url}/memd/search?q=lamp&topic=talk")
        assert own.status == 503 and url in own.body.decode()
        assert tell(owner, "talk", QUESTION).headers["X-Memory-Status"] == "injected"


@contextmanager
def silent_server() -> Iterator[tuple[str, list[bytes]]]:
    """An address at which connections are taken and nothing is said; and what came over them."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as taken:

        def take() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    taken.enter_context(connection)
                    threading.Thread(target=read, args=[connection], daemon=True).start()

        def read(connection: socket.socket) -> None:
            with suppress(OSError):
                while data := connection.recv(1 << 16):
                    received.append(data)

        threading.Thread(target=take, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", received
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def test_nothing_is_given_to_a_stranger_at_the_address_of_an_owner(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    settings, stranger = shared.settings(), make_daemon(upstream.url, {}).start()
    asked = make_daemon(upstream.url, settings).start()
    led_astray = {**settings["store"], "own_url": stranger.base_url}
    owner = make_daemon(upstream.url, {**settings, "store": led_astray}).start()
    tell(owner, "talk", FACT)
    told = tell(asked, "talk", QUESTION)
    assert owner_of(told) is None and told.headers["X-Memory-Status"] == "degraded:store"
    assert ask(f"{asked.own_url}/memd/search?q=lamp&topic=talk").status == 503
    assert not stranger.said()
    owner.kill()
    wait_until(
        lambda: tell(asked, "talk", QUESTION).headers["X-Memory-Status"] == "injected", lambda: f"taken: {asked!r}"
    )


def test_an_answer_of_whoever_got_the_address_of_a_daemon_is_none(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    settings = shared.settings()
    asked = make_daemon(upstream.url, settings).start()
    with recording_upstream() as stranger:
        stranger.answers_all = True
        owner = make_daemon(upstream.url, {**settings, "store": {**settings["store"], "own_url": stranger.url}})
        owner.start()
        tell(owner, "talk", FACT)
        told = tell(asked, "talk", QUESTION)
        assert owner_of(told) is None and told.headers["X-Memory-Status"] == "degraded:store"
        assert ask(f"{asked.own_url}/memd/search?q=lamp&topic=talk").status == 503
        owner.kill()
        wait_until(
            lambda: tell(asked, "talk", QUESTION).headers["X-Memory-Status"] == "injected", lambda: f"taken: {asked!r}"
        )


def test_a_daemon_that_has_got_a_topic_asks_nobody_else_for_it(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    settings = shared.settings(store={"lease_seconds": 600}, retrieval={"timeout_ms": 600_000})
    asked, owner = (make_daemon(upstream.url, settings).start() for _ in range(2))
    tell(owner, "talk", FACT)
    assert owner_of(tell(asked, "talk", "It is large.")) == owner.base_url
    let_go("talk", settings)
    assert owner_of(ask(f"{asked.own_url}/memd/search?q=lamp&topic=talk")) is None
    assert owner_of(tell(asked, "talk", QUESTION)) is None
    assert "http_status=421" not in owner.log.read_text(), "it was not asked"


def test_a_topic_that_has_moved_is_found_where_it_is(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    settings = shared.settings()
    asked, owner, other = (make_daemon(upstream.url, settings).start() for _ in range(3))
    tell(owner, "talk", FACT)
    assert owner_of(tell(asked, "talk", "It is large.")) == owner.base_url
    owner.send_signal(signal.SIGSTOP)
    assert owner_of(tell(other, "talk", QUESTION)) is None
    owner.send_signal(signal.SIGCONT)
    assert owner_of(tell(asked, "talk", "Of what is it made?")) == other.base_url, "the daemon that had it says so"


def test_where_the_database_is_away_the_daemon_that_has_a_topic_goes_on_answering(
    daemons: tuple[DaemonProcess, ...], shared: Ground
) -> None:
    asked, owner = daemons
    shared.postgres.stop()
    try:
        told = tell(asked, "talk", QUESTION)
        assert owner_of(told) == owner.base_url and told.headers["X-Memory-Status"] in ("injected", "degraded:store")
    finally:
        shared.postgres.start()


def test_daemons_that_speak_tls_trust_whom_the_machine_trusts(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground, tmp_path: Path
) -> None:
    files = make_tls_files(tmp_path)
    settings = shared.settings(listen={"tls_cert": str(files.cert), "tls_key": str(files.key)})
    asked, owner, distrustful = (make_daemon(upstream.url, settings) for _ in range(3))
    for daemon in (asked, owner):
        daemon.environment = {"SSL_CERT_FILE": str(files.cert)}
    for daemon in (asked, owner, distrustful):
        daemon.start()
    assert owner_of(tell(owner, "talk", FACT)) is None
    told = tell(asked, "talk", QUESTION)
    assert owner_of(told) == owner.base_url and owner.base_url.startswith("https:")
    refused = tell(distrustful, "talk", QUESTION)
    assert owner_of(refused) is None and refused.headers["X-Memory-Status"] == "degraded:store"
    assert "SSL_CERT_FILE" in distrustful.log.read_text()


def test_a_daemon_that_ends_in_good_order_keeps_a_topic_until_it_has_answered(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, shared: Ground
) -> None:
    settings = shared.settings(store={"lease_seconds": 60}, shutdown={"grace_seconds": 60})
    asked, owner = (make_daemon(upstream.url, settings).start() for _ in range(2))
    tell(owner, "talk", FACT)
    tell(owner, "idle", FACT)
    gate = threading.Event()
    upstream.answer = lambda _: streamed("Of Venetian-glass-42.", gate)
    with ThreadPoolExecutor(2) as clients, owner.stream(MESSAGES, memory_in={"topic_id": "talk"}) as answer:
        next(iter(answer))
        upstream.answer = chat_answer
        owner.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(owner.base_url), lambda: repr(owner))
        assert owner_of(tell(asked, "idle", QUESTION)) is None, "it is let go at once"
        telling = clients.submit(tell, asked, "talk", "Of what is the lamp?")
        gate.set()
        assert text_of(list(answer)).endswith("glass-42.") and answer.ended_properly
        assert owner_of(told := telling.result()) is None and told.headers["X-Memory-Status"] == "injected"
    assert owner.wait() == 0 and "writing failed" not in owner.log.read_text()
    assert b"Venetian-glass-42" in ask(f"{asked.own_url}/memd/search?q=OfVenetian-glass-42.&topic=talk").body


def is_refused(url: str) -> bool:
    """Whether nobody listens at an address."""
    try:
        connected(url).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_daemon_whose_folder_was_removed_ends_and_its_topics_are_taken(daemons: tuple[DaemonProcess, ...]) -> None:
    asked, owner = daemons
    owner.data_dir.rename(owner.data_dir.with_name("elsewhere"))  # at once: it goes on writing there meanwhile
    assert owner.wait() == 1
    last = owner.log.read_text().splitlines()[-1]
    assert last.startswith("memd: ") and "was removed or replaced while memd ran" in last and "start it again" in last
    told = tell(asked, "talk", QUESTION)
    assert owner_of(told) is None and told.headers["X-Memory-Status"] == "injected"
    owner.start()
    assert owner_of(tell(owner, "talk", "Where was the lamp made, again?")) == asked.base_url


def test_a_topic_whose_folder_was_removed_is_had_again(daemons: tuple[DaemonProcess, ...]) -> None:
    _, owner = daemons
    (owner.data_dir / "talk").rename(owner.data_dir.with_name("elsewhere"))
    wait_until(lambda: "a topic was opened again" in owner.log.read_text(), lambda: repr(owner))
    note = {"topic_id": "talk", "notes": [{"content": "The lens was ground in Brest."}]}
    assert ask(f"{owner.own_url}/memd/notes", note).status == 200
    assert tell(owner, "talk", QUESTION).headers["X-Memory-Status"] == "injected"
    assert b"ground in Brest" in ask(f"{owner.own_url}/memd/search?q=lens&topic=talk").body
