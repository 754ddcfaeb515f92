"""Clients and upstreams that send too much, too slowly, from too many sides: memory is bounded, others go on."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from conftest import Connect
from daemon_process import DaemonProcess, ask, peak_bytes, token_setting, wait_until
from raw_wire import Peer, RawUpstream, answer, answering, request

from memd.proxy.connections import listen
from memd.settings.model import LimitsSettings

CHAT = b"/v1/chat/completions"
TOKEN, FLOODER, ANN = "a secret of some length", "a secret of somebody who floods", "a secret of somebody who talks"
CONNECTIONS_MAX = 12
IDLE_SECONDS = 3.0
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    limits = {
        "connections_max": CONNECTIONS_MAX, "idle_seconds": IDLE_SECONDS, "bodies_bytes_max": 4 * MEGABYTE,
        "body_bytes_max": 3 * MEGABYTE,
    }  # fmt: skip
    tokens = [token_setting("flooder", FLOODER, "write"), token_setting("ann", ANN, "read", "write")]
    return {"limits": limits, "auth": {"token": TOKEN, "tokens": tokens}}


SHOWN = b"X-Memory-Token: " + TOKEN.encode()


@contextmanager
def costs_at_most(memd: DaemonProcess, megabytes: float) -> Iterator[None]:
    """Whether the daemon's memory stays within so much more than before, at every moment."""
    Path(f"/proc/{memd.pid}/clear_refs").write_text("5")  # the peak is counted from now on
    before = peak_bytes(memd.pid) / MEGABYTE
    yield
    assert peak_bytes(memd.pid) / MEGABYTE - before < megabytes


def send_all(client: Peer, data: bytes, times: int) -> None:
    """Send as much as the other end takes."""
    try:
        for _ in range(times):
            client.send(data)
    except OSError:
        pass


# -- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [500, 4_000, 60_000])
def test_headers_are_bounded_all_together_before_anything_else(
    memd: DaemonProcess, connect: Connect, size: int
) -> None:
    client = connect(memd.base_url)
    line = b"X-Bomb: " + b"a" * size + b"\r\n"
    with costs_at_most(memd, 8):
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: memd\r\n")
        client.send(line * (70_000 // size + 1))
        assert client.read_head().split(b" ")[1] == b"431"
        assert b"; send " in client.read_body()
        send_all(client, line, 900)
        client.read_to_end()


def test_headers_within_the_limit_pass_whether_they_come_at_once_or_in_bits(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    raw.script = lambda peer: peer.send(answer(b"{}"))
    lines = [b"X-%d: " % number + b"a" * 1000 for number in range(55)]
    whole = request(b"GET", b"/v1/models", SHOWN, *lines)
    client = connect(memd.base_url)
    for _ in range(3):  # the limit is on each request, not on the connection
        client.send(whole)
        assert client.read_head().split(b" ")[1] == b"200" and client.read_body() == b"{}"
    for start in range(0, len(whole), 5_000):
        client.send(whole[start : start + 5_000])
    assert client.read_head().split(b" ")[1] == b"200"


def test_trailers_and_extensions_of_chunks_are_bounded_too(memd: DaemonProcess, connect: Connect) -> None:
    with costs_at_most(memd, 8):
        for flood in (b"X-Bomb: " + b"a" * 60_000 + b"\r\n", b"1;" + b"a" * 60_000 + b"\r\na\r\n"):
            client = connect(memd.base_url, request(b"POST", CHAT, SHOWN, b"Transfer-Encoding: chunked"))
            send_all(client, b"0\r\n" if flood[:1] == b"X" else b"", 1)
            send_all(client, flood, 900)
            client.read_to_end()
    assert ask(f"{memd.base_url}/memd/health", headers={"X-Memory-Token": TOKEN}).status == 200


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET /v1/models HTTP/1.1\r\nX-A: a", b"POST " + CHAT + b" HTTP/1.1\r\n"])
def test_connections_that_show_no_token_make_room_for_those_that_do(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, said: bytes
) -> None:
    raw.script = lambda peer: peer.send(answer(b"{}"))
    user = connect(memd.base_url)
    for _ in range(2):
        strangers = [connect(memd.base_url) for _ in range(2 * CONNECTIONS_MAX)]
        for stranger in strangers[-CONNECTIONS_MAX:]:
            send_all(stranger, said, 1)
        late = connect(memd.base_url)
        for client in (late, user):
            try:
                client.send(request(b"GET", b"/v1/models", SHOWN))
                head = client.read_head()
            except OSError:
                head = b""
            if client is late:
                assert head.split(b" ")[1] == b"200"
        user = late
        assert memd.log.read_text().count("made room") <= 3, "told once a minute"


def test_strangers_that_do_not_read_their_answers_are_gone_when_they_make_room() -> None:
    async def serve() -> None:
        async def handle(_: web.BaseRequest) -> web.Response:
            return web.Response(body=bytes(16 * MEGABYTE))

        server, listener = web.Server(handle), socket.create_server(("127.0.0.1", 0))
        house = await listen([(server, listener)], LimitsSettings(connections_max=2), None)
        strangers: list[asyncio.StreamWriter] = []
        try:
            async with asyncio.timeout(120):
                for _ in range(6):
                    _, stranger = await asyncio.open_connection(*listener.getsockname(), limit=1)
                    strangers.append(stranger)
                    stranger.write(request(b"GET", b"/"))
                    while not all(map(_has_unread_answer, server.connections)):  # noqa: ASYNC110  # nobody tells
                        await asyncio.sleep(0.01)
            assert len(server.connections) == 2
        finally:
            house.close()
            for stranger in strangers:
                stranger.transport.abort()

    uvloop.run(serve())


def _has_unread_answer(connection: web.RequestHandler) -> bool:
    return connection.transport is not None and connection.transport.get_write_buffer_size() > 0


def test_a_connection_at_work_is_not_closed_for_another(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    asked, go_on = threading.Semaphore(0), threading.Event()

    def script(peer: Peer) -> None:
        asked.release()
        go_on.wait(60)
        peer.send(answer(b"{}"))

    raw.script = script
    users = [connect(memd.base_url) for _ in range(CONNECTIONS_MAX)]
    for user in users:
        user.send(request(b"GET", b"/v1/models", SHOWN, b"Connection: close"))
    for _ in users:
        assert asked.acquire(timeout=60)
    assert connect(memd.base_url).read_to_end() == b"", "all are at work"
    go_on.set()
    assert all(user.read_head().split(b" ")[1] == b"200" for user in users)
    assert f"{CONNECTIONS_MAX} are open" in memd.log.read_text()


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_that_trickles_ends_its_connection(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    raw.script = lambda peer: peer.send(peer.read_body())
    begun = [(path, 100_000, b"{") for path in (CHAT, b"/v1/embeddings")]
    begun.append((CHAT, 2 * MEGABYTE, b" " * MEGABYTE))  # it came fast, and then trickles
    clients, sent = [connect(memd.base_url) for _ in begun], threading.Event()
    feeding = [threading.Thread(target=feed, args=(client, sent)) for client in clients]
    for client, (path, length, first), thread in zip(clients, begun, feeding, strict=True):
        client.send(request(b"POST", path, SHOWN, b"Content-Length: %d" % length) + first)
        thread.start()
    try:
        assert all(client.wait_until_closed() < 10 * IDLE_SECONDS for client in clients)
    finally:
        sent.set()
        for thread in feeding:
            thread.join()
    wait_until(lambda: memd.log.read_text().count("too slowly") >= len(clients), lambda: repr(memd))


@pytest.mark.parametrize("path", [CHAT, b"/memd/documents", b"/mcp"])
def test_bodies_of_one_token_leave_room_for_others(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes
) -> None:
    raw.script = answering(answer(b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}]}'))
    shown = f"X-Memory-Token: {FLOODER}".encode()
    flooding = [connect(memd.base_url if path == CHAT else memd.own_url) for _ in range(4)]
    headers = shown, b"Content-Type: application/json", b"Content-Length: %d" % (2 * MEGABYTE)
    for client in flooding:
        send_all(client, request(b"POST", path, *headers), 1)
        send_all(client, b" " * (MEGABYTE // 16), 15)
    body = {"messages": [{"role": "user", "content": "a"}], "padding": "x" * (MEGABYTE // 4)}
    url, others = memd.base_url + CHAT.decode(), {"X-Memory-Token": ANN}
    wait_until(lambda: any(client.is_readable(0) for client in flooding), lambda: repr(memd))
    [refused] = [client for client in flooding if client.is_readable(0)]
    assert refused.read_head().split(b" ")[1] == b"503"
    assert ask(url, body, headers=others).status == 200


def feed(client: Peer, stop: threading.Event) -> None:
    """A byte every now and then, for as long as the other end takes it."""
    while not stop.wait(IDLE_SECONDS / 6):
        try:
            client.send(b" ")
        except OSError:
            return


def test_bodies_in_flight_are_bounded_all_together(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    asked, go_on = threading.Semaphore(0), threading.Event()

    def script(peer: Peer) -> None:
        peer.read_body()
        asked.release()
        go_on.wait(60)
        peer.send(answer(b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}]}'))

    raw.script = script
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "padding": "x" * (3 * MEGABYTE // 2)}).encode()
    users = [connect(memd.base_url) for _ in range(2)]
    for user in users:
        user.send(request(b"POST", CHAT, SHOWN, body=body))
        assert asked.acquire(timeout=60)
    third = connect(memd.base_url)
    send_all(third, request(b"POST", CHAT, SHOWN, body=body), 1)
    assert third.read_head().split(b" ")[1] == b"503"
    assert int(third.header(b"Retry-After") or 0) > 0
    assert third.header(b"X-Memory-Status") == b"none" and third.header(b"X-Memory-Turn")
    assert b"limits.body_bytes_max" in third.read_body()
    go_on.set()
    assert all(user.read_head().split(b" ")[1] == b"200" for user in users)
    wait_until(lambda: _answered(memd, body), lambda: repr(memd))


def _answered(memd: DaemonProcess, body: bytes) -> bool:
    return ask(f"{memd.base_url}{CHAT.decode()}", json.loads(body), headers={"X-Memory-Token": TOKEN}).status == 200


# -- answers ---------------------------------------------------------------------------------------------------------

ANSWER_MEGABYTES = 96


@pytest.mark.parametrize(("announced", "memory_in"), [(True, {}), (False, None)])
def test_a_huge_answer_is_passed_on_as_it_comes(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, announced: bool, memory_in: dict[str, str] | None
) -> None:
    parts = [b'{"choices":[],"padding":"', *[b"x" * MEGABYTE] * ANSWER_MEGABYTES, b'"}']
    size = sum(map(len, parts))

    def script(peer: Peer) -> None:
        peer.read_body()
        framing = b"Content-Length: %d" % size if announced else b"Connection: close"
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + framing + b"\r\n\r\n")
        for part in parts:
            peer.send(part)
        if not announced:
            peer.close()

    raw.script = script
    asked = {"messages": [{"role": "user", "content": "a"}], **({} if memory_in is None else {"memory_in": memory_in})}
    client = connect(memd.base_url)
    with costs_at_most(memd, 60):
        client.send(request(b"POST", CHAT, SHOWN, b"Connection: close", body=json.dumps(asked).encode()))
        assert client.read_head().split(b" ")[1] == b"200"
        body = client.read_body() if client.header(b"Transfer-Encoding") or announced else client.read_to_end()
    assert len(body) == size and json.loads(body).keys() == {"choices", "padding"}, "byte for byte"


def test_a_huge_answer_that_breaks_off_ends_abnormally(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    def script(peer: Peer) -> None:
        peer.read_body()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99000000\r\n\r\n{")
        for _ in range(20):
            peer.send(b" " * MEGABYTE)
        peer.abort()

    raw.script = script
    client = connect(memd.base_url, request(b"POST", CHAT, SHOWN, body=b'{"messages":[{"role":"user","content":"a"}]}'))
    assert client.read_head().split(b" ")[1] == b"200"
    assert len(client.read_to_end()) < 99_000_000
