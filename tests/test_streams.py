"""Answers as they come: at once, unchanged, without limit on their length; and what happens when one side leaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Connect
from daemon_process import DaemonProcess, wait_until
from raw_wire import Peer, RawUpstream, answer, chunked, request

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHAT = b"/v1/chat/completions"
BYTES_UNREAD_MAX = 32 << 20
"""More than all buffers between two sockets and memd together."""


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    return {"limits": {"capture_bytes_max": 1 << 20}}


def event(text: str) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def chat(text: str, **more: object) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], **more}
    return request(b"POST", CHAT, body=json.dumps(body).encode())


def asked(connect: Connect, memd: DaemonProcess, raw: RawUpstream, script: Callable[[Peer], None], data: bytes) -> Peer:
    """A client that has sent its request."""

    def whole(peer: Peer) -> None:
        peer.read_body()
        script(peer)

    raw.script = whole
    client = connect(memd.base_url)
    client.send(data)
    return client


@pytest.mark.parametrize("path", [CHAT, b"/completion"])
@pytest.mark.parametrize("memory_in", [{}, {"memory_in": {}}])
def test_each_piece_arrives_before_the_next_one_is_sent(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes, memory_in: dict[str, object]
) -> None:
    arrived = threading.Semaphore(0)
    pieces = [b": ping\n\n", event("a"), b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n', b"data: [DONE]\n\n"]

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD)
        for piece in pieces:
            assert arrived.acquire(timeout=60)
            peer.send(chunk(piece))
        peer.send(chunked())

    data = chat("hi", stream=True, **memory_in).replace(CHAT, path, 1)
    client = asked(connect, memd, raw, script, data)
    assert client.read_head().startswith(b"HTTP/1.1 200 OK")
    for piece in pieces:
        arrived.release()
        got = b""
        while not got.endswith(b"\n\n"):
            got += client.read_chunk()
        assert got == piece or b'"memory_out"' in got
    assert client.read_chunk() == b""


def test_a_stream_is_not_put_into_other_pieces(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    taken = threading.Semaphore(0)
    whole = event("héllo") + event("b")
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]  # in the middle of lines and characters

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD)
        for piece in pieces:
            peer.send(chunk(piece))
            assert taken.acquire(timeout=60)
        peer.send(chunked())

    client = asked(connect, memd, raw, script, chat("hi", stream=True))
    client.read_head()
    for piece in pieces:
        assert client.read_chunk() == piece
        taken.release()
    assert client.read_chunk() == b""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_takes_its_upstream_request_with_it(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, stream: bool, begun: bool
) -> None:
    waiting, closed = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        if begun:
            peer.send(
                STREAM_HEAD + chunk(event("It is")) if stream else b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"
            )
        waiting.set()
        peer.wait_until_closed()
        closed.set()

    said = f"left {stream} {begun}"
    client = asked(connect, memd, raw, script, chat(said, stream=stream))
    assert waiting.wait(60)
    if stream and begun:
        client.read_head()
        client.read_chunk()
    client.close()
    assert closed.wait(60)


def test_what_was_said_before_the_client_left_is_remembered_as_interrupted(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD + chunk(event("The lighthouse keeper is ")))
        peer.wait_until_closed()

    client = asked(connect, memd, raw, script, chat("Who keeps the lighthouse?", stream=True))
    client.read_head()
    client.read_chunk()
    client.close()
    # Another chat opens, so the one before is stored.
    asked(connect, memd, raw, lambda peer: peer.send(answer(b"{}")), chat("Something else.")).read_head()
    wanted = "assistant: The lighthouse keeper is \n[interrupted]"
    wait_until(lambda: any(wanted in text for text in memd.said()), lambda: repr(memd.said()))


def test_a_client_that_leaves_as_soon_as_it_has_all_of_a_long_answer_had_a_whole_one(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    """What has passed is read behind the end, in steps; a client that goes meanwhile interrupts nothing."""
    words = b"".join(chunk(event(f"word {number} " * 40)) for number in range(1_500))

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD + words + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    client = asked(connect, memd, raw, script, chat("Tell me all of it.", stream=True))
    turn = client.read_head().lower().split(b"x-memory-turn: ")[1].split(b"\r\n")[0].decode()
    while client.read_chunk():
        pass
    client.abort()
    wait_until(lambda: f"turn={turn} " in memd.log.read_text(), lambda: repr(memd))
    [line] = [one for one in memd.log.read_text().splitlines() if "answered" in one and f"turn={turn} " in one]
    assert "outcome=complete" in line and "http_status=200" in line


@pytest.mark.parametrize("path", [CHAT, b"/completion"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_upstream_that_dies_in_mid_answer_never_gives_a_whole_one(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes, stream: bool
) -> None:
    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD + chunk(event("a")) if stream else b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
        peer.abort()

    client = asked(connect, memd, raw, script, chat("hi", stream=stream).replace(CHAT, path, 1))
    got = client.read_to_end()
    if stream:
        assert event("a") in got and not got.endswith(chunked())
    else:
        assert b"\r\n\r\n" not in got or len(got.partition(b"\r\n\r\n")[2]) < 99


def test_a_client_that_does_not_read_holds_its_upstream_back(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    sent = [0]
    piece = chunk(event("x" * 60_000))

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD)
        for _ in range(4000):  # 240 MB
            peer.send(piece)
            sent[0] += len(piece)

    before = _peak_bytes(memd.pid)
    client = asked(connect, memd, raw, script, chat("long", stream=True))
    client.read_head()
    stalled: list[int] = []

    def is_stalled() -> bool:
        stalled.append(sent[0])
        return len(stalled) > 50 and stalled[-1] == stalled[-50]  # for a second

    wait_until(is_stalled, lambda: f"{sent[0]} bytes were taken")
    assert sent[0] < BYTES_UNREAD_MAX
    assert _peak_bytes(memd.pid) - before < BYTES_UNREAD_MAX


@pytest.mark.parametrize("mode", [b"full", b"off"])
def test_a_pooled_connection_that_the_upstream_closed_is_not_noticed(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, mode: bytes
) -> None:
    def script(peer: Peer) -> None:
        peer.send(answer(b"{}"))
        peer.abort()

    for number in range(5):
        body = b'{"messages":[{"role":"user","content":"again %d"}]}' % number
        client = asked(connect, memd, raw, script, request(b"POST", CHAT, b"X-Memory-Mode: " + mode, body=body))
        assert client.read_head().startswith(b"HTTP/1.1 200 OK")


def test_an_upstream_that_is_still_loading_is_heard(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    loading = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
    said = answer(loading, b"Content-Type: application/json", b"Retry-After: 1", status=b"503 Service Unavailable")
    client = asked(connect, memd, raw, lambda peer: peer.send(said), chat("hi", memory_in={}))
    assert client.read_head().startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert client.header(b"Retry-After") == b"1"
    assert client.read_body() == loading


def test_other_requests_go_on_while_one_waits(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def slow(peer: Peer) -> None:
        begun.release()
        assert gate.wait(60)
        peer.send(answer(b'"slow"'))

    waiting = [asked(connect, memd, raw, slow, chat(f"slow {number}")) for number in range(50)]
    assert all(begun.acquire(timeout=60) for _ in waiting)
    quick = asked(connect, memd, raw, lambda peer: peer.send(answer(b'"quick"')), chat("quick"))
    quick.read_head()
    assert quick.read_body() == b'"quick"'
    gate.set()
    for client in waiting:
        client.read_head()
        assert client.read_body() == b'"slow"'


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
