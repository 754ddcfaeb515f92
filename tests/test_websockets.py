"""WebSockets through memd, as bytes: the upgrade, frames of any size and pace both ways, and the end of either side."""

import os
import threading
from collections.abc import Callable

import pytest
from conftest import Connect
from daemon_process import DaemonProcess, ask, wait_until_stalled
from raw_wire import Peer, RawUpstream, answer, request

PATH = b"/v1/realtime?model=x"
UPGRADE = [b"Connection: keep-alive, Upgrade", b"Upgrade: WebSocket", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
AGREED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3\r\n\r\n"
)
TOKEN = "a secret of some length"
BYTES_UNREAD_MAX = 32 << 20
"""More than all buffers between two sockets and memd together."""


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    return {"auth": {"token": TOKEN}, "limits": {"idle_seconds": 1.0}, "shutdown": {"grace_seconds": 1.0}}


@pytest.fixture
def opened(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> Callable[[Callable[[Peer], None]], Peer]:
    """A client that asked for the upgrade, in front of an upstream that plays a script."""

    def open_one(script: Callable[[Peer], None], path: bytes = PATH, *frames: bytes) -> Peer:
        raw.script = script
        client = connect(memd.base_url)
        shown = b"X-Memory-Token: " + TOKEN.encode()
        client.send(request(b"GET", path, *UPGRADE, shown, b"Authorization: Bearer k") + b"".join(frames))
        return client

    return open_one


Opened = Callable[..., Peer]


def echo(peer: Peer) -> None:
    peer.send(AGREED)
    while data := peer.read_some():
        peer.send(data)


@pytest.mark.parametrize("path", [PATH, b"/t/notes/v1/realtime", b"/v1/chat/completions", b"/ws?"])
def test_the_upgrade_and_its_answer_pass(raw: RawUpstream, opened: Opened, path: bytes) -> None:
    client = opened(echo, path)
    assert client.read_head().startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert client.header(b"Upgrade") == b"websocket" and client.header(b"Connection") == b"Upgrade"
    assert client.header(b"Sec-WebSocket-Accept") == b"s3"
    assert client.header(b"Transfer-Encoding") is None and client.header(b"Content-Length") is None
    [head] = raw.heads
    assert head.startswith(b"GET %s HTTP/1.1\r\n" % path.removeprefix(b"/t/notes"))
    assert b"\r\nUpgrade: websocket" in head and b"\r\nConnection: Upgrade" in head
    assert UPGRADE[2] in head and b"Authorization: Bearer k" in head and TOKEN.encode() not in head


def test_frames_pass_both_ways_as_bytes(opened: Opened) -> None:
    client = opened(echo, PATH, b"\x81\x85early")  # behind the request at once, before the upstream has agreed
    client.read_head()
    assert client.read(7) == b"\x81\x85early"
    for size in (1, 1000, 3 << 20):
        frame = os.urandom(size)
        sender = threading.Thread(target=client.send, args=(frame,))
        sender.start()
        assert client.read(size) == frame
        sender.join()


def test_a_silent_tunnel_stays_open(opened: Opened) -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.send(AGREED)
        assert go.wait(60)
        peer.send(b"late")
        peer.read_some()

    client = opened(script)
    client.read_head()
    assert not client.is_readable(2.5)  # longer than `limits.idle_seconds`
    go.set()
    assert client.read(4) == b"late"


def test_an_upstream_that_closes_ends_the_client_s_connection_after_all_it_said(opened: Opened) -> None:
    said = os.urandom(300_000)

    def script(peer: Peer) -> None:
        peer.send(AGREED + said)
        peer.close()

    client = opened(script)
    client.read_head()
    assert client.read_to_end() == said


@pytest.mark.parametrize("abort", [True, False])
def test_a_client_that_leaves_ends_the_upstream_s_connection(opened: Opened, abort: bool) -> None:
    ended = threading.Event()

    def script(peer: Peer) -> None:
        peer.send(AGREED)
        peer.read_to_end()
        ended.set()

    client = opened(script)
    client.read_head()
    client.abort() if abort else client.close()
    assert ended.wait(60)


@pytest.mark.parametrize("reader", ["client", "upstream"])
def test_a_side_that_does_not_read_holds_the_other_back(memd: DaemonProcess, opened: Opened, reader: str) -> None:
    sent, piece, stop = [0], b"x" * 60_000, threading.Event()

    def flood(peer: Peer) -> None:
        try:
            for _ in range(4000):  # 240 MB
                peer.send(piece)
                sent[0] += len(piece)
        except OSError:
            pass

    def script(peer: Peer) -> None:
        peer.send(AGREED)
        if reader == "client":
            flood(peer)
        else:
            assert stop.wait(60)

    client = opened(script)
    client.read_head()
    if reader == "upstream":
        threading.Thread(target=flood, args=(client,), daemon=True).start()
    wait_until_stalled(lambda: sent[0])
    stop.set()
    client.abort()
    assert 0 < sent[0] < BYTES_UNREAD_MAX
    assert ask(memd.base_url + "/memd/health", headers={"X-Memory-Token": TOKEN}).status == 200


@pytest.mark.parametrize("status", [b"426 Upgrade Required", b"404 Not Found", b"200 OK"])
def test_an_upstream_that_does_not_agree_is_heard_and_the_connection_goes_on(opened: Opened, status: bytes) -> None:
    client = opened(lambda peer: peer.send(answer(b"no", status=status)))
    for _ in range(2):
        assert client.read_head().startswith(b"HTTP/1.1 " + status)
        assert client.read_body() == b"no"
        client.send(request(b"GET", b"/v1/models", b"X-Memory-Token: " + TOKEN.encode()))


def test_without_the_token_there_is_no_tunnel_and_memd_ends_with_one_open(
    memd: DaemonProcess, opened: Opened, connect: Connect
) -> None:
    assert connect(memd.base_url, request(b"GET", PATH, *UPGRADE)).read_head().startswith(b"HTTP/1.1 401")
    client = opened(echo)
    client.read_head()
    assert memd.terminate() == 0
    assert client.read_to_end() == b""
    assert "Traceback" not in memd.log.read_text() and "never" not in memd.log.read_text()
    memd.start()
