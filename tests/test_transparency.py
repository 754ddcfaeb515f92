"""What is on the wire before memd and behind it, byte by byte, and what memd leaves alone."""

import gzip
import http.client
import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import Connect
from daemon_process import DaemonProcess, ask, peak_bytes, user, wait_until
from raw_wire import Peer, RawUpstream, answer, answering, chunked, request
from recording_upstream import RecordingUpstream, Response

from memd.store.layout import RECENT_NAME

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


@pytest.mark.parametrize("method", [b"GET", b"DELETE", b"OPTIONS", b"PURGE"])
def test_the_request_line_is_the_client_s(exchange: Exchange, method: bytes) -> None:
    same = (b"/v1/models", b"/v1/x?a=1&a=2&b=%20%2F&c", b"/slots//0/%2e%2e?x=/../y", b"/x??", b"/x?a#b", b"/x%2")
    absolute = {
        b"http://memd": b"/",
        b"http://memd?a=1": b"/?a=1",
        b"HTTPS://u:p@memd:80/v1/models?": b"/v1/models?",
        b"http://[::1]//x/%2e": b"//x/%2e",
    }
    in_topic = dict.fromkeys((b"/t/notes", b"http://memd/t/notes"), b"/")  # a topic in the path is memd's
    targets = {target: target for target in (*same, b"/a:b@c;d=e,f'(g)*!~$&+")} | absolute | in_topic
    for target, meant in targets.items():
        seen = exchange(request(method, target), answer(b"{}")).request
        assert seen.startswith(method + b" " + meant + b" HTTP/1.1\r\n"), target


def test_targets_that_are_no_paths_are_answered_by_memd_itself(memd: DaemonProcess, connect: Connect) -> None:
    for target in (b"example.com:443", b"/", b"*"):
        client = connect(memd.base_url, request(b"CONNECT", target) + b"\x16\x03\x01")
        assert client.read_head().startswith(b"HTTP/1.1 405 ") and client.header(b"Allow")
        assert b"memd: it opens no tunnels to other addresses" in client.read_body()
        assert client.read_to_end() == b""
    client = connect(memd.base_url, request(b"OPTIONS", b"*"))
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
    twice = [b"X-one: 1", b"x-One: 2"]
    seen = exchange(request(b"GET", b"/v1/models", *headers, *dropped, *twice), answer(b"{}")).request
    _, host, *passed = seen.split(b"\r\n")
    assert host.startswith(b"Host: 127.0.0.1:") and passed[:-2] == headers
    assert [line.lower() for line in passed[-2:]] == [line.lower() for line in twice]


@pytest.mark.parametrize(
    ("asked", "answered", "body"),
    [
        (request(b"HEAD", b"/v1/models"), b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nETag: x", b""),
        (request(b"GET", b"/v1/models", b"If-None-Match: x"), b"HTTP/1.1 304 Not Modified\r\nETag: x", b""),
        (request(b"DELETE", b"/v1/models/x"), b"HTTP/1.1 204 No Content\r\nX-A: b", b""),
        (request(b"GET", b"/x"), b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0", b""),
        (request(b"OPTIONS", b"/v1/chat/completions"), b"HTTP/1.1 200 OK\r\nAllow: *\r\nContent-Length: 0", b""),
        (
            request(b"GET", b"/v1/models"),
            b"HTTP/1.1 299 Odd Reason\r\nsErVer: llama.cpp\r\nETag: x\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
            b"Access-Control-Max-Age: 9\r\nContent-Length: 2",
            b"ok",
        ),
    ],
)
def test_an_answer_has_the_upstream_s_headers_and_no_others(
    exchange: Exchange, asked: bytes, answered: bytes, body: bytes
) -> None:
    exchanged = exchange(asked, answered + b"\r\n\r\n" + body)
    assert exchanged.answer == answered and exchanged.client.read(len(body)) == body
    ended = exchange(request(b"GET", b"/v1/models", b"Connection: close"), b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert ended.answer.startswith(b"HTTP/1.1 200 OK"), "with its connection"


def test_a_compressed_answer_and_a_compressed_request_are_not_unpacked(exchange: Exchange) -> None:
    packed = gzip.compress(BODY)
    asked = request(b"POST", b"/v1/embeddings", b"Content-Encoding: gzip", b"Accept-Encoding: gzip, br", body=packed)
    exchanged = exchange(asked, answer(packed, b"Content-Encoding: gzip"))
    assert exchanged.body == packed
    assert exchanged.sent(b"Accept-Encoding") == [b"Accept-Encoding: gzip, br"]
    assert exchanged.sent(b"Content-Encoding") == [b"Content-Encoding: gzip"]
    assert exchanged.client.read_body() == packed


def test_an_upload_in_chunks_goes_on_in_chunks(exchange: Exchange) -> None:
    asked = request(b"POST", b"/v1/embeddings", b"Transfer-Encoding: chunked") + chunked(b"abc", b"d" * 100_000)
    exchanged = exchange(asked, answer(b"{}"))
    assert exchanged.body == b"abc" + b"d" * 100_000
    assert not exchanged.sent(b"Content-Length")


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/v1/chat/completions"])
def test_a_client_that_waits_to_be_told_to_go_on_is_told(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes
) -> None:
    raw.script = answering(answer(b"{}"))
    client = connect(memd.base_url, request(b"POST", path, b"Expect: 100-continue", b"Content-Length: %d" % len(BODY)))
    assert client.read_head().startswith(b"HTTP/1.1 100 ")
    client.send(BODY)
    assert client.read_head().startswith(b"HTTP/1.1 200 ")
    assert b"\r\nExpect:" not in raw.heads[0]


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
    before = peak_bytes(memd.pid)
    client = connect(memd.base_url, request(b"POST", b"/v1/audio/transcriptions", b"Content-Length: %d" % size))
    for _ in range(size // len(piece)):
        client.send(piece)
    client.read_head()
    got = 0
    while got < size:
        got += len(client.read(1 << 20))
    assert seen == [size]
    assert peak_bytes(memd.pid) - before < 32 << 20


# Other modes, and names that lead elsewhere


FACT = "The spare key hangs behind the barometer."
QUESTION = "Where does the spare key hang?"
ODD_JSON = b'{ "messages" : [ {"content":"h\\u00e9llo \xc3\xa9", "role":"user"} ],\n\t"n":1.0, "x":{"b":1,"a":[]} }'
HOSTILE_TOPICS = [
    *("../../outside", "..", "/etc/memd", "a/b", "a\\b", ".hidden", "x" * 129, "nul\x00byte", "", "ü", "a b")
]
HOSTILE_PATH_TOPICS = ["..", "..%2f..%2foutside", "%2e%2e", ".hidden", "a%00b", "a%20b", "x" * 129]


def test_a_client_that_adds_v1_to_a_base_url_that_has_it_is_answered_as_if_once(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    for base in ("/v1", "/v1/v1", "/t/house/v1"):
        answer = ask(f"{served.base_url}{base}/v1/chat/completions?a=/v1/v1", {"messages": [user(FACT)]})
        assert (answer.status, answer.headers["X-Memory-Mode"]) == (200, "full"), base
        ask(f"{served.base_url}{base}/v1")
    targets = [request.target for request in upstream.requests]
    assert targets.count("/v1/chat/completions?a=/v1/v1") == targets.count("/v1") == 3
    assert not any(target.startswith("/v1/v1") for target in targets)


def test_a_client_that_knows_nothing_of_memd_gets_the_upstream_s_bytes(
    in_topic: DaemonProcess, kept_upstream: RecordingUpstream
) -> None:
    in_topic.chat([user(FACT)])
    odd = b'{ "choices":[{"message":{"role":"assistant","content":"ok"},"index":0 ,"finish_reason":"stop"}] }\n'
    kept_upstream.answer = lambda _: Response((odd,))
    answer = in_topic.chat([user(QUESTION)])
    assert answer.headers["X-Memory-Status"] == "injected"
    assert answer.body == odd


def test_where_the_mode_is_off_or_mistyped_all_passes_through_and_nothing_is_stored(
    in_topic: DaemonProcess, kept_upstream: RecordingUpstream
) -> None:
    in_topic.chat([user(FACT)])
    for mode in ("off", "of", "read-only", "none", "full, off", "0"):
        answer = ask(f"{in_topic.base_url}/v1/chat/completions", ODD_JSON, headers={"X-Memory-Mode": mode})
        assert kept_upstream.chats[-1].body == ODD_JSON
        status = "off" if mode == "off" else "bad-mode"
        assert (answer.headers["X-Memory-Mode"], answer.headers["X-Memory-Status"]) == ("off", status), mode
        told = f"turn={answer.headers['X-Memory-Turn']} problem=" in in_topic.log.read_text()
        assert told == (mode != "off")
    assert in_topic.chat([user(QUESTION)], {"X-Memory-Mode": ""}).headers["X-Memory-Mode"] == "full"
    assert "h\u00e9llo" not in json.dumps(in_topic.export(), ensure_ascii=False)


def test_mode_readonly_shows_memories_and_leaves_no_trace(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    served.chat([user(FACT)])
    served.chat([user("Something else.")])
    served.wait_stored(FACT, "Something else.")
    before = served.export()
    readonly = {"X-Memory-Mode": "readonly"}
    praise = {"chunk_ids": [before[0]["id"]], "action": "Helpful", "reason": "it was"}
    answer = served.chat([user(QUESTION)], readonly, memory_in={"corrections": [praise]})
    assert answer.headers["X-Memory-Mode"] == "readonly"
    assert answer.headers["X-Memory-Status"] == "injected"
    assert "behind the barometer" in upstream.prompts[-1]
    served.restart()
    assert served.export() == before
    assert served.chat([user(QUESTION)], readonly, memory_in={"topic_id": "new"}).headers["X-Memory-Status"] == "none"
    assert not (served.data_dir / "new").exists()
    refused = served.chat([user("Thanks.")], memory_in={"corrections": [praise]})
    assert {"type": "correction_failed", "chunk_id": before[0]["id"]} in refused.json["memory_out"]["signals"]


def test_a_hostile_topic_never_leaves_the_data_directory(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    before = when_started(served)
    for written in HOSTILE_PATH_TOPICS:
        connection = http.client.HTTPConnection(urlsplit(served.base_url).netloc, timeout=120)
        connection.request("POST", f"/t/{written}/v1/chat/completions", json.dumps({"messages": [user(FACT)]}))
        answer = connection.getresponse()
        assert answer.status == 400, written
        assert "topic" in json.loads(answer.read())["error"]["message"]
        connection.close()
    assert everything_in(served.folder) == before and upstream.chats == []
    receipts = {"memory/memd.receipts"}
    for topic_id in HOSTILE_TOPICS:
        answered = served.chat([user(FACT)], memory_in={"topic_id": topic_id})
        assert answered.reply == "Noted."
        assert answered.headers["X-Memory-Status"] == "bad-memory-in", topic_id
        assert everything_in(served.folder) | receipts == before | receipts


def test_a_topic_in_the_path_is_the_default_and_memory_in_outranks_it(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    url = f"{served.base_url}/t/garden/v1/chat/completions"
    ask(url, {"messages": [user(FACT)]})
    assert upstream.chats[-1].target == "/v1/chat/completions"
    assert ask(url, {"messages": [user(QUESTION)], "memory_in": {}}).headers["X-Memory-Status"] == "injected"
    other = ask(url, {"messages": [user(QUESTION)], "memory_in": {"topic_id": "kitchen"}})
    assert other.headers["X-Memory-Status"] == "none"
    served.wait_stored(FACT)
    assert {entry["topic_id"] for entry in served.export() if FACT in entry["content"]} == {"garden"}
    models = ask(f"{served.base_url}/t/garden/v1/models?x=1")
    assert models.status == 200
    assert upstream.requests[-1].target == "/v1/models?x=1"


def when_started(daemon: DaemonProcess) -> set[str]:
    """All files and folders once the list of topics is written."""
    listed = daemon.data_dir / RECENT_NAME
    wait_until(lambda: listed.exists() and not any(daemon.folder.rglob("*.tmp")), lambda: "no list of topics")
    return everything_in(daemon.folder)


def everything_in(folder: Path) -> set[str]:
    """All files and folders below."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
