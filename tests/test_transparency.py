"""What is on the wire before memd and behind it, byte by byte: other routes, headers, bodies, statuses."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Connect
from daemon_process import DaemonProcess
from raw_wire import Peer, RawUpstream, answer, chunked, request

BODY = b'{"input": "x"}'


class Exchanged:
    """What the upstream saw and what the client got."""

    def __init__(self, client: Peer, raw: RawUpstream, asked: bytes, answered: bytes) -> None:
        self.request = b""
        self.body = b""

        def script(peer: Peer) -> None:
            self.request, self.body = peer.head, peer.read_body()
            peer.send(answered)

        raw.script = script
        self.client = client
        self.client.send(asked)
        self.answer = self.client.read_head()

    def sent(self, name: bytes) -> list[bytes]:
        """Header lines of that name, whatever its case, that the upstream saw."""
        return [line for line in self.request.split(b"\r\n")[1:] if line.lower().startswith(name.lower() + b":")]


Exchange = Callable[[bytes, bytes], Exchanged]


@pytest.fixture
def exchange(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> Exchange:
    return lambda asked, answered: Exchanged(connect(memd.base_url), raw, asked, answered)


def lines(*wanted: bytes) -> bytes:
    return b"\r\n".join(wanted)


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/models",
        b"/v1/x?a=1&a=2&b=%20%2F&c",
        b"/slots//0/%2e%2e?x=/../y",
        b"/t/notes",
        b"/a:b@c;d=e,f'(g)*!~$&+",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"DELETE", b"OPTIONS", b"PURGE"])
def test_the_request_line_is_the_client_s(exchange: Exchange, method: bytes, target: bytes) -> None:
    seen = exchange(request(method, target), answer(b"{}")).request
    target = b"/" if target == b"/t/notes" else target  # a topic in the path is memd's
    assert seen.startswith(method + b" " + target + b" HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        (b"http://memd", b"/"),
        (b"http://memd?a=1", b"/?a=1"),
        (b"HTTPS://u:p@memd:80/v1/models?", b"/v1/models?"),
        (b"http://[::1]//x/%2e", b"//x/%2e"),
        (b"http://memd/t/notes", b"/"),
    ],
)
def test_a_target_in_the_absolute_form_is_its_path(exchange: Exchange, target: bytes, meant: bytes) -> None:
    assert exchange(request(b"GET", target), answer(b"{}")).request.startswith(b"GET " + meant + b" HTTP/1.1\r\n")


def test_targets_that_are_no_paths_are_answered_by_memd_itself(memd: DaemonProcess, connect: Connect) -> None:
    for target in (b"example.com:443", b"/", b"*"):
        client = connect(memd.base_url)
        client.send(request(b"CONNECT", target) + b"\x16\x03\x01")
        assert client.read_head().startswith(b"HTTP/1.1 405 ") and client.header(b"Allow")
        assert b"memd: it opens no tunnels to other addresses" in client.read_body()
        assert client.read_to_end() == b""
    client = connect(memd.base_url)
    client.send(request(b"OPTIONS", b"*"))
    assert client.read_head().startswith(b"HTTP/1.1 204 ")
    for target, status in ((b"http://memd", b"307"), (b"*", b"404")):
        client = connect(memd.own_url)
        client.send(
            request(b"OPTIONS" if target == b"*" else b"GET", target).replace(b"Host: memd", b"Host: 127.0.0.1")
        )
        assert client.read_head().split(b" ")[1] == status
        assert b'"message":"memd: ' in client.read_body()


def test_headers_keep_their_names_order_and_number_but_for_those_of_the_connection(exchange: Exchange) -> None:
    headers = [b"x-MiXed: 1", b"Accept: */*", b"x-MiXed: 2", b"Cookie: a=b; c=d", b"X-Conversation-Id: 7"]
    dropped = [b"Connection: keep-alive, X-Hop", b"X-Hop: 1", b"Keep-Alive: timeout=5", b"X-Memory-Session: s"]
    seen = exchange(request(b"GET", b"/v1/models", *headers, *dropped), answer(b"{}")).request
    assert seen.split(b"\r\n")[1:] == [seen.split(b"\r\n")[1], *headers]
    assert seen.split(b"\r\n")[1].startswith(b"Host: 127.0.0.1:")


def test_headers_of_one_name_in_two_spellings_are_both_there(exchange: Exchange) -> None:
    exchanged = exchange(request(b"GET", b"/v1/models", b"X-one: 1", b"x-One: 2"), answer(b"{}"))
    assert [line.partition(b": ")[2] for line in exchanged.sent(b"X-One")] == [b"1", b"2"]


def test_the_answer_has_the_upstream_s_headers_and_no_others(exchange: Exchange) -> None:
    headers = [
        b"sErVer: llama.cpp",
        b"ETag: x",
        b"Set-Cookie: a=1",
        b"Set-Cookie: b=2",
        b"Access-Control-Max-Age: 9",
    ]
    exchanged = exchange(request(b"GET", b"/v1/models"), answer(b"ok", *headers, status=b"299 Odd Reason"))
    assert exchanged.answer == lines(b"HTTP/1.1 299 Odd Reason", *headers, b"Content-Length: 2")
    assert exchanged.client.read_body() == b"ok"


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (request(b"HEAD", b"/v1/models"), b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nETag: x"),
        (request(b"GET", b"/v1/models", b"If-None-Match: x"), b"HTTP/1.1 304 Not Modified\r\nETag: x"),
        (request(b"DELETE", b"/v1/models/x"), b"HTTP/1.1 204 No Content\r\nX-A: b"),
        (request(b"GET", b"/x"), b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0"),
        (
            request(b"OPTIONS", b"/v1/chat/completions"),
            b"HTTP/1.1 200 OK\r\nAllow: *\r\nContent-Length: 0",
        ),
    ],
)
def test_answers_without_a_body_pass_as_they_are(exchange: Exchange, asked: bytes, answered: bytes) -> None:
    assert exchange(asked, answered + b"\r\n\r\n").answer == answered


def test_a_compressed_answer_and_a_compressed_request_are_not_unpacked(exchange: Exchange) -> None:
    packed = gzip.compress(BODY)
    asked = request(b"POST", b"/v1/embeddings", b"Content-Encoding: gzip", b"Accept-Encoding: gzip, br", body=packed)
    exchanged = exchange(asked, answer(packed, b"Content-Encoding: gzip"))
    assert exchanged.body == packed
    assert exchanged.sent(b"Accept-Encoding") == [b"Accept-Encoding: gzip, br"]
    assert exchanged.sent(b"Content-Encoding") == [b"Content-Encoding: gzip"]
    assert exchanged.client.read_body() == packed


def test_a_compressed_chat_passes_without_memory(exchange: Exchange) -> None:
    packed = gzip.compress(b'{"messages": [{"role": "user", "content": "hi"}]}')
    asked = request(b"POST", b"/v1/chat/completions", b"Content-Encoding: gzip", body=packed)
    exchanged = exchange(asked, answer(b"{}"))
    assert exchanged.body == packed
    assert exchanged.client.header(b"X-Memory-Status") == b"none"


def test_an_upload_in_chunks_goes_on_in_chunks(exchange: Exchange) -> None:
    asked = request(b"POST", b"/v1/embeddings", b"Transfer-Encoding: chunked") + chunked(b"abc", b"d" * 100_000)
    exchanged = exchange(asked, answer(b"{}"))
    assert exchanged.body == b"abc" + b"d" * 100_000
    assert not exchanged.sent(b"Content-Length")


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/v1/chat/completions"])
def test_a_client_that_waits_to_be_told_to_go_on_is_told(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes
) -> None:
    heads: list[bytes] = []

    def script(peer: Peer) -> None:
        heads.append(peer.head)
        peer.read_body()
        peer.send(answer(b"{}"))

    raw.script = script
    client = connect(memd.base_url)
    client.send(request(b"POST", path, b"Expect: 100-continue", b"Content-Length: %d" % len(BODY)))
    assert client.read_head().startswith(b"HTTP/1.1 100 ")
    client.send(BODY)
    assert client.read_head().startswith(b"HTTP/1.1 200 ")
    assert b"\r\nExpect:" not in heads[0]


def test_an_answer_that_ends_with_its_connection_is_whole(exchange: Exchange) -> None:
    exchanged = exchange(request(b"GET", b"/v1/models", b"Connection: close"), b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert exchanged.answer.startswith(b"HTTP/1.1 200 OK")


def test_a_large_body_is_never_held_as_a_whole(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    size, piece = 100 << 20, os.urandom(1 << 20)
    seen: list[int] = []

    def script(peer: Peer) -> None:
        length = int(peer.header(b"Content-Length") or 0)
        taken = 0
        while taken < length:
            taken += len(peer.read(min(1 << 20, length - taken)))
        seen.append(taken)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            peer.send(piece)

    raw.script = script
    before = _peak_bytes(memd.pid)
    client = connect(memd.base_url)
    client.send(request(b"POST", b"/v1/audio/transcriptions", b"Content-Length: %d" % size))
    for _ in range(size // len(piece)):
        client.send(piece)
    client.read_head()
    got = 0
    while got < size:
        got += len(client.read(1 << 20))
    assert seen == [size]
    assert _peak_bytes(memd.pid) - before < 32 << 20


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
