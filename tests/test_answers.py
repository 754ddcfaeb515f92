"""Answers as bytes on a socket: passed on at once and unchanged; what no upstream should send ends clearly."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Connect
from daemon_process import DaemonProcess, ask, peak_bytes, wait_until, wait_until_stalled
from raw_wire import Peer, RawUpstream, Script, answer, answering, chunked, raw_upstream, request

from memd.cli.check.upstream import asked as asked_server
from memd.settings.model import Config, UpstreamSettings

CHAT = b"/v1/chat/completions"
PLAIN = b"/v1/embeddings"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n"
SSE = b"Content-Type: text/event-stream\r\n"
DEPTHS = [500, 900, 990, 100_000]
STREAM_HEAD = CHUNKED + SSE + b"\r\n"
BYTES_UNREAD_MAX = 32 << 20
"""More than all buffers between two sockets and memd together."""
REPLY = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}]}'


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    return {"limits": {"capture_bytes_max": 1 << 20}}


@pytest.fixture
def asked(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> Callable[[bytes, Script | bytes], Peer]:
    """Sends a request and returns its client's end; a script, or the bytes of an answer, is what the upstream plays."""

    def send(data: bytes, played: Script | bytes) -> Peer:
        raw.script = answering(played)
        return connect(memd.base_url, data)

    return send


Asked = Callable[[bytes, "Script | bytes"], Peer]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode()


def chat(text: str, *headers: bytes, path: bytes = CHAT, **more: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], **more}
    return request(b"POST", path, *headers, body=json.dumps(body).encode())


# -- as they come --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, b"/completion"])
@pytest.mark.parametrize("memory_in", [{}, {"memory_in": {}}])
def test_each_piece_arrives_before_the_next_one_is_sent(
    asked: Asked, path: bytes, memory_in: dict[str, object]
) -> None:
    arrived = threading.Semaphore(1)
    pieces = [event("a"), b": ping\n\n", b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n', b"data: [DONE]\n\n"]

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD)
        for piece in pieces:
            assert arrived.acquire(timeout=60)
            peer.send(chunk(piece))
        peer.send(chunked())

    client = asked(chat("hi", path=path, stream=True, **memory_in), script)
    assert client.read_head().startswith(b"HTTP/1.1 200 OK")
    for piece in pieces:
        got = b""
        while not got.endswith(b"\n\n"):
            got += client.read_chunk()
        assert got == piece or b'"memory_out"' in got
        arrived.release()
    assert client.read_chunk() == b""


def test_a_stream_is_not_put_into_other_pieces(asked: Asked) -> None:
    taken = threading.Semaphore(0)
    whole = event("héllo") + event("b")
    pieces = [event("a"), *(whole[at : at + 7] for at in range(0, len(whole), 7))]  # in mid-line and mid-character

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD)
        for piece in pieces:
            peer.send(chunk(piece))
            assert taken.acquire(timeout=60)
        peer.send(chunked())

    client = asked(chat("hi", stream=True), script)
    client.read_head()
    for piece in pieces:
        assert client.read_chunk() == piece
        taken.release()
    assert client.read_chunk() == b""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_takes_its_upstream_request_with_it(asked: Asked, stream: bool, begun: bool) -> None:
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
    client = asked(chat(said, stream=stream), script)
    assert waiting.wait(60)
    if stream and begun:
        client.read_head()
        client.read_chunk()
    client.close()
    assert closed.wait(60)


def test_what_was_said_before_the_client_left_is_remembered_as_interrupted(memd: DaemonProcess, asked: Asked) -> None:
    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD + chunk(event("The lighthouse keeper is ")))
        peer.wait_until_closed()

    client = asked(chat("Who keeps the lighthouse?", stream=True), script)
    client.read_head()
    client.read_chunk()
    client.close()
    # Another chat opens, so the one before is stored.
    asked(chat("Something else."), answer(b"{}")).read_head()
    wanted = "assistant: The lighthouse keeper is \n[interrupted]"
    wait_until(lambda: any(wanted in text for text in memd.said()), lambda: repr(memd.said()))


def test_a_client_that_leaves_as_soon_as_it_has_all_of_a_long_answer_had_a_whole_one(
    memd: DaemonProcess, asked: Asked
) -> None:
    """What has passed is read behind the end, in steps; a client that goes meanwhile interrupts nothing."""
    words = b"".join(chunk(event(f"word {number} " * 40)) for number in range(1_500))

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD + words + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    client = asked(chat("Tell me all of it.", stream=True), script)
    turn = client.read_head().lower().split(b"x-memory-turn: ")[1].split(b"\r\n")[0].decode()
    while client.read_chunk():
        pass
    client.abort()
    wait_until(lambda: f"turn={turn} " in memd.log.read_text(), lambda: repr(memd))
    [line] = [one for one in memd.log.read_text().splitlines() if "answered" in one and f"turn={turn} " in one]
    assert "outcome=complete" in line and "http_status=200" in line


def test_a_client_that_does_not_read_holds_its_upstream_back(memd: DaemonProcess, asked: Asked) -> None:
    sent = [0]
    piece = chunk(event("x" * 60_000))

    def script(peer: Peer) -> None:
        peer.send(STREAM_HEAD)
        for _ in range(4000):  # 240 MB
            peer.send(piece)
            sent[0] += len(piece)

    text, path = "What was said before this is stored, by a model that is loaded.", b"/t/before-it" + CHAT
    asked(chat(text, path=path), answer(REPLY)).read_head()
    memd.in_topic("before-it").wait_stored(text)  # in other topics there are answers that are never stored
    before = peak_bytes(memd.pid)
    client = asked(chat("long", stream=True), script)
    client.read_head()
    wait_until_stalled(lambda: sent[0])
    assert sent[0] < BYTES_UNREAD_MAX
    assert peak_bytes(memd.pid) - before < BYTES_UNREAD_MAX


@pytest.mark.parametrize("mode", [b"full", b"off"])
def test_a_pooled_connection_that_the_upstream_closed_is_not_noticed(asked: Asked, mode: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.send(answer(b"{}"))
        peer.abort()

    for number in range(5):
        body = b'{"messages":[{"role":"user","content":"again %d"}]}' % number
        client = asked(request(b"POST", CHAT, b"X-Memory-Mode: " + mode, body=body), script)
        assert client.read_head().startswith(b"HTTP/1.1 200 OK")


def test_other_requests_go_on_while_one_waits(asked: Asked) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def slow(peer: Peer) -> None:
        begun.release()
        assert gate.wait(60)
        peer.send(answer(b'"slow"'))

    waiting = [asked(chat(f"slow {number}"), slow) for number in range(50)]
    assert all(begun.acquire(timeout=60) for _ in waiting)
    quick = asked(chat("quick"), answer(b'"quick"'))
    quick.read_head()
    assert quick.read_body() == b'"quick"'
    gate.set()
    for client in waiting:
        client.read_head()
        assert client.read_body() == b'"slow"'


# -- 13: bodies that break ---------------------------------------------------------------------------------------


JSON = b"Content-Type: application/json\r\n"
GARBAGE = b"ZZ\r\nno chunk\r\n"
BEGUN = b'{"choices":[{"index":0,'
BREAKS = {
    "a stream that is aborted": (STREAM_HEAD + chunk(event("a")), b"", Peer.abort),
    "a stream that is malformed and closed": (STREAM_HEAD + chunk(event("a")), GARBAGE, Peer.close),
    "a stream that is malformed and left open": (STREAM_HEAD + chunk(event("a")), GARBAGE, None),
    "a stream without a length that is aborted": (OK + SSE + b"\r\n" + event("a"), b"", Peer.abort),
    "chunks of JSON that are malformed and closed": (CHUNKED + JSON + b"\r\n" + chunk(BEGUN), GARBAGE, Peer.close),
    "chunks of JSON that are malformed and left open": (CHUNKED + JSON + b"\r\n" + chunk(BEGUN), GARBAGE, None),
    "JSON with a length that is aborted": (OK + JSON + b"Content-Length: 999\r\n\r\n" + BEGUN, b"", Peer.abort),
    "JSON with a length that is closed": (OK + JSON + b"Content-Length: 999\r\n\r\n" + BEGUN, b"", Peer.close),
}


@pytest.mark.parametrize("path", [CHAT, PLAIN, b"/completion"])
@pytest.mark.parametrize("name", BREAKS)
def test_what_came_of_an_answer_that_breaks_off_is_passed_on_at_once_and_never_looks_whole(
    asked: Asked, path: bytes, name: str
) -> None:
    begun, then, end = BREAKS[name]
    held, taken = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.send(begun)
        assert taken.wait(60)
        peer.send(then)
        assert held.wait(60) if end is None else end(peer) is None

    is_stream, got = SSE in begun, b""
    what = event("a") if is_stream else BEGUN
    client = asked(chat("hi", b"Connection: close", stream=is_stream, path=path), script)
    while what not in got and (is_stream or path != CHAT):  # where memory may be told, JSON is passed on as a whole
        got += client.read_some()
    taken.set()
    got += client.read_to_end()
    held.set()
    assert what in got or end is Peer.abort or got.startswith(b"HTTP/1.1 502 ")
    assert not got.endswith(chunked()) and len(got.partition(b"\r\n\r\n")[2]) < 999


@pytest.mark.parametrize("unasked", [answer(b"of somebody else"), b"more", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_bytes_that_nobody_asked_for_are_never_the_next_answer(
    memd: DaemonProcess, raw: RawUpstream, asked: Asked, unasked: bytes
) -> None:
    go_on, sent = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.send(answer(b"first"))
        assert go_on.wait(60)
        peer.send(unasked)
        sent.set()

    client = asked(request(b"GET", b"/first"), script)
    client.read_head()
    assert client.read_body() == b"first"
    go_on.set()
    assert sent.wait(60)
    assert ask(memd.own_url + "/memd/health").status == 200, "memd has read what came before"
    raw.script = lambda peer: peer.send(answer(b"second"))
    client.send(request(b"GET", b"/second"))
    client.read_head()
    assert client.read_body() == b"second"


# -- 14: what streams --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "media_type",
    [b"Text/Event-Stream", b"text/event-stream; charset=utf-8", b"TEXT/EVENT-STREAM;x=y", b"text/plain", b""],
)
def test_a_stream_streams_and_is_remembered_however_its_type_is_spelt(
    memd: DaemonProcess, asked: Asked, media_type: bytes
) -> None:
    arrived = threading.Event()
    secret = f"The lock code of shed {len(media_type)}{media_type[:1].hex()} is 4711."

    def script(peer: Peer) -> None:
        peer.send(CHUNKED + (b"Content-Type: %s\r\n" % media_type if media_type else b"") + b"\r\n")
        first = event(secret)
        peer.send(b"%x\r\n%s\r\n" % (len(first), first))
        assert arrived.wait(60), "the first piece did not arrive before the second was sent"
        peer.send(chunked(event(" Yes."), b"data: [DONE]\n\n"))

    there = memd.in_topic(f"types{len(media_type)}{media_type[:1].hex()}")
    client = asked(chat("hi", stream=True, path=f"/t/{there.topic_id}".encode() + CHAT), script)
    client.read_head()
    assert client.read_chunk() == event(secret)
    arrived.set()
    assert client.read_body() == event(" Yes.") + b"data: [DONE]\n\n"
    there.wait_stored(f"{secret} Yes.")


@pytest.mark.parametrize(
    "media_type", [b"application/json", b"Application/JSON; charset=utf-8", b"application/problem+json"]
)
def test_json_is_an_answer_and_headers_about_memory_are_memd_s_and_not_the_upstream_s(
    asked: Asked, media_type: bytes
) -> None:
    forged = [b"X-Memory-Status: injected", b"x-memory-injected: a3f9", b"X-MEMORY-TURN: 1"]
    said = answer(REPLY, *forged, b"Server-Timing: its;dur=1", b"Content-Type: " + media_type)
    client = asked(chat("hi", path=b"/t/forged%d" % len(media_type) + CHAT, stream=True, memory_in={}), said)
    client.read_head()
    assert client.headers(b"X-Memory-Status") == [b"none"] and client.headers(b"X-Memory-Injected") == [b""]
    assert len(client.headers(b"X-Memory-Turn")) == 1 and b"its;dur=1" in client.headers(b"Server-Timing")
    assert b'"memory_out"' in client.read_body(), "though a stream was asked for"


# -- 15: sent once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [request(b"POST", PLAIN, body=b"{}"), chat("hi"), request(b"GET", b"/v1/models")])
@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 20"])
def test_a_fresh_connection_that_ends_without_an_answer_is_not_asked_again(
    memd: DaemonProcess, asked: Asked, data: bytes, begun: bytes
) -> None:
    heads: list[int] = []  # that came on the connection so far: 1 on a fresh one

    def script(peer: Peer) -> None:
        heads.append(peer.heads)
        peer.send(begun)
        peer.close()

    client = asked(data, script)
    assert client.read_head().startswith(b"HTTP/1.1 502")
    reused = heads[:-1]  # those that other tests left in the pool broke before any byte, and were replaced
    assert 1 not in reused and (heads[-1] == 1 if not begun else reused == [])


def test_a_reused_connection_that_broke_before_any_byte_is_replaced_by_a_new_one(asked: Asked) -> None:
    together = threading.Barrier(3)

    def first(peer: Peer) -> None:
        together.wait(60)
        peer.send(answer(b"{}"))

    clients = [asked(chat(f"number {number}"), first) for number in range(3)]
    for client in clients:
        client.read_head()
        client.read_body()
    were_reused: list[bool] = []

    def second(peer: Peer) -> None:
        were_reused.append(peer.heads > 1)
        if were_reused[-1]:
            peer.close()
        else:
            peer.send(answer(b"{}"))

    assert asked(chat("again"), second).read_head().startswith(b"HTTP/1.1 200")
    assert were_reused == [True, False]  # though there are three old ones


def test_a_reused_connection_that_broke_in_the_head_of_an_answer_is_the_end_of_it(asked: Asked) -> None:
    asked(request(b"GET", b"/x"), answer(b"{}")).read_head()
    times: list[int] = []

    def script(peer: Peer) -> None:
        times.append(1)
        peer.send(b"HTTP/1.1 200 OK\r\nX-A:")
        peer.abort()

    assert asked(chat("once"), script).read_head().startswith(b"HTTP/1.1 502")
    assert len(times) == 1


REFUSALS = {
    "a wrong field": (b'{"error":{"message":"temperature: must be at most 2","code":400}}', 1),
    "a wrong type": (b'{"detail":[{"loc":["body","top_p"],"msg":"not a number"}]}', 1),
    "nothing at all": (b"", 1),
    "a bug": (b'{"error":{"message":"CUDA error: out of memory"}}', 1),
    "a template": (b'{"error":{"message":"Jinja Exception: no"}}', 2),
    "roles": (b'{"object":"error","message":"Conversation roles must alternate user/assistant/user"}', 2),
    "a filter": (
        b'{"error":{"message":"The prompt triggered the content management policy","code":"content_filter"}}',
        2,
    ),
}


@pytest.mark.parametrize("status", [b"400 Bad Request", b"422 Unprocessable Entity", b"500 Internal Server Error"])
@pytest.mark.parametrize("name", REFUSALS)
def test_only_what_memory_can_have_caused_is_asked_again_without_it(
    memd: DaemonProcess, asked: Asked, name: str, status: bytes
) -> None:
    said, times = REFUSALS[name]
    topic = f"/t/refused{list(REFUSALS).index(name)}".encode() + CHAT
    asked(chat("The gate code is 5511.", path=topic), answer(REPLY)).read_head()
    seen: list[bytes] = []

    def script(peer: Peer) -> None:
        seen.append(peer.body)
        peer.send(answer(said, status=status))

    client = asked(chat("What is the gate code?", path=topic), script)
    assert client.read_head().startswith(b"HTTP/1.1 " + status[:3])
    assert client.read_body() == said
    assert [b"5511" in body for body in seen] == [True, False][:times]
    told = client.header(b"X-Memory-Status"), client.header(b"X-Memory-Injected")
    assert (told[0] == b"injected") == (times == 1)
    assert bool(told[1]) == (times == 1)
    seen.clear()
    client = asked(chat("What is the gate code?", path=topic), answer(REPLY))
    client.read_head()
    assert client.header(b"X-Memory-Status") == b"injected"  # it was not memory that the upstream did not like


@pytest.mark.parametrize("end", ["closes", "is broken", "is no HTTP"])
def test_a_refusal_is_passed_on_where_the_prompt_without_memory_is_not_answered(
    memd: DaemonProcess, asked: Asked, end: str
) -> None:
    said = REFUSALS["a template"][0]
    topic = b"/t/unanswered-" + end.replace(" ", "-").encode() + CHAT
    asked(chat("The gate code is 5511.", path=topic), answer(REPLY)).read_head()
    seen: list[bool] = []

    def script(peer: Peer) -> None:
        seen.append(b"5511" in peer.body)
        if seen[-1]:
            peer.send(answer(said, status=b"400 Bad Request"))
            return
        peer.send({"closes": b"", "is broken": b"HTTP/1.1 200 OK\r\nConte", "is no HTTP": b"SSH-2.0\r\n"}[end])
        peer.close()

    client = asked(chat("What is the gate code?", path=topic), script)
    assert client.read_head().startswith(b"HTTP/1.1 400 ")
    assert client.read_body() == said
    assert client.header(b"X-Memory-Status") == b"injected" and client.header(b"X-Memory-Injected")
    assert seen[0] and not any(seen[1:]) and len(seen) > 1
    assert "Traceback" not in memd.log.read_text()


# -- 16: heads beyond the usual ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (OK + b"X-Long: " + b"a" * 70_000 + b"\r\n\r\n", b"larger than 65,536 bytes"),
        (
            OK + b"".join(b"X-%d: %s\r\n" % (number, b"a" * 500) for number in range(900)) + b"\r\n",
            b"larger than 65,536 bytes",
        ),
        (OK + b"".join(b"X-%d: a\r\n" % number for number in range(1200)) + b"\r\n", b"1000 header lines"),
        (OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", b"Content-Length"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", b"status"),
        (CHUNKED + b"\r\nZZ\r\nno chunk\r\n", b"no HTTP that could be read"),
        (OK + b"Content-Length: many\r\n\r\n", b"Content-Length"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", b"nobody asked"),
        (b"HTTP/1.1 099 X\r\nContent-Length: 2\r\n\r\n{}", b"status is 99"),
        (OK + b"Content-Length : 2\r\n\r\n{}", b"a space between"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunked(b"{}"), b"'gzip, chunked'"),
        (OK + b"Transfer-Encoding: xchunked\r\n\r\n" + chunked(b"{}"), b"'xchunked'"),
    ],
)
def test_a_head_that_cannot_be_read_is_answered_502_with_the_reason(
    memd: DaemonProcess, raw: RawUpstream, asked: Asked, head: bytes, named: bytes
) -> None:
    client = asked(chat("hi"), head)
    assert client.read_head().startswith(b"HTTP/1.1 502")
    message = client.read_body()
    assert named.lower() in message.lower(), message
    assert raw.url.encode() in message
    assert b"did not answer" not in message
    assert len(message) < 1000


# -- 17: HTTP/1.0 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0_that_would_keep_its_connection_sees_the_end_of_a_stream(
    asked: Asked, path: bytes, stream: bool
) -> None:
    pieces = [event("a"), b"data: [DONE]\n\n"] if stream else [REPLY]
    kind = SSE if stream else b"Content-Type: application/json\r\n"
    data = chat("hi", b"Connection: keep-alive", stream=stream, path=path).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    client = asked(data, CHUNKED + kind + b"\r\n" + chunked(*pieces))
    head = client.read_head()
    assert b"\r\nTransfer-Encoding:" not in head
    if (length := client.header(b"Content-Length")) is not None:
        assert client.read(int(length)) == b"".join(pieces)
    else:
        assert client.read_to_end() == b"".join(pieces)


# -- 18: bytes of headers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_header_bytes_that_are_no_utf_8_pass_both_ways_and_control_characters_become_spaces(
    memd: DaemonProcess, raw: RawUpstream, asked: Asked, path: bytes
) -> None:
    said = answer(REPLY, b"X-Back: caf\xe9 \xff\xfe", b"X-Both: h\xc3\xa9", status=b"200 D\xe9j\xe0")
    client = asked(chat("hi", b"X-There: na\xefve \x80", b"X-Name: \xc3\xa9", path=path), said)
    head = client.read_head()
    assert b"\r\nX-There: na\xefve \x80" in raw.heads[0] and b"\r\nX-Name: \xc3\xa9" in raw.heads[0]
    assert head.startswith(b"HTTP/1.1 200 D\xe9j\xe0\r\n")
    assert b"\r\nX-Back: caf\xe9 \xff\xfe" in head and b"\r\nX-Both: h\xc3\xa9" in head

    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n"
    said = answer(REPLY, b"X-A: a\x1b[31mb\x07", status=b"200 \x1b]0;owned\x07OK")
    client = asked(chat("hi", path=path), b"HTTP/1.1 100 Continue\r\n\r\n" + early + early + said)
    assert [client.read_head() + b"\r\n\r\n" for _ in range(2)] == [early, early], "what comes before it passes"
    assert client.read_head().startswith(b"HTTP/1.1 200  ]0;owned OK\r\n")
    assert client.header(b"X-A") == b"a [31mb"
    assert "Traceback" not in memd.log.read_text() and "\x1b" not in memd.log.read_text()


@pytest.mark.parametrize("host", [b"[::1", b"[", b"a]b", b""])
def test_a_host_that_is_none_is_answered_and_no_traceback(memd: DaemonProcess, connect: Connect, host: bytes) -> None:
    client = connect(memd.base_url, b"GET /memd/health HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
    assert client.read_head().split(b" ")[1] in (b"403", b"400")
    assert "Traceback" not in memd.log.read_text()


# -- nested as deeply as a decoder takes them, and deeper ----------------------------------------------------------


def deep(opening: bytes, depth: int, closing: bytes) -> bytes:
    return opening * depth + b'"x"' + closing * depth


@pytest.mark.parametrize("nested", [(b"[", b"]"), (b'{"error":', b"}")])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
@pytest.mark.parametrize(
    ("path", "status"),
    [(CHAT, b"200 OK"), (CHAT, b"400 Bad Request"), (b"/v1/responses", b"200 OK"), (b"/v1/messages", b"200 OK")],
)
def test_a_deep_answer_passes_as_it_is(
    memd: DaemonProcess, asked: Asked, nested: tuple[bytes, bytes], kind: bytes, path: bytes, status: bytes
) -> None:
    member = b"input" if b"responses" in path else b"messages"
    for depth in DEPTHS:
        body = b'{"error":' + deep(nested[0], depth, nested[1]) + b"}"
        body = b"data: " + body + b"\n\n" if b"event" in kind else body
        question = request(b"POST", path, body=b'{"max_tokens":9,"%s":[{"role":"user","content":"hi"}]}' % member)
        client = asked(question, answer(body, b"Content-Type: " + kind, status=status))
        assert client.read_head().startswith(b"HTTP/1.1 " + status)
        assert client.read_body() == body
    assert "Traceback" not in memd.log.read_text()


FACTS = [
    deep(opening, depth, closing)
    for opening, closing in ((b"[", b"]"), (b'{"default_generation_settings":', b"}"), (b'{"data":[', b"]}"))
    for depth in DEPTHS
]


@pytest.mark.parametrize("said", [*FACTS, b"[" + b" " * (20 << 20) + b"]"], ids=len)
def test_a_server_whose_own_facts_are_deep_or_have_no_end_tells_nothing(said: bytes) -> None:
    with raw_upstream(props=said) as upstream:
        upstream.script = lambda peer: peer.send(answer(said[: 1 << 20]))
        server = asyncio.run(asked_server(Config(upstream=UpstreamSettings(url=upstream.url))))
    assert (server.model, server.window) == ("", None) and "does not answer" not in str(server.told)
