"""Input that is hostile or broken: each is bounded, answered clearly, and harms nobody else."""

import json
from collections.abc import Callable

import pytest
from conftest import Connect, MakeDaemon
from daemon_process import DaemonProcess, ask, run_memd
from raw_wire import Peer, RawUpstream, answer, answering, chunked, request

from memd.access import ADDRESSES_MAX, REST, WrongTokens
from memd.principals import Principals

CHAT = b"/v1/chat/completions"
BODY_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 40
TOKEN = "a secret of some length"


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    limits = {"body_bytes_max": BODY_BYTES_MAX, "connections_max": CONNECTIONS_MAX, "idle_seconds": 3.0}
    return {"limits": limits}


@pytest.fixture
def seen(raw: RawUpstream) -> list[bytes]:
    """The bodies that reach the upstream."""
    bodies: list[bytes] = []

    def script(peer: Peer) -> None:
        bodies.append(peer.read_body())
        peer.send(answer(b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}]}'))

    raw.script = script
    return bodies


def still_answers(memd: DaemonProcess) -> bool:
    return ask(memd.own_url + "/memd/health").status == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(b"POST", CHAT, b"Transfer-Encoding: chunked", b"Content-Length: 5") + chunked(b"abc"), 400),
        (request(b"POST", CHAT, b"Content-Length: 5", b"Transfer-Encoding: chunked") + chunked(b"abc"), 400),
        (request(b"POST", CHAT, b"Content-Length: 5", b"Content-Length: 6") + b"abcdef", 400),
        (request(b"POST", CHAT, b"Transfer-Encoding: xchunked", b"Content-Length: 3") + b"abc", 400),
        (request(b"POST", CHAT, b"Transfer-Encoding: chunked, identity") + chunked(b"abc"), 400),
        (request(b"POST", CHAT, b"Transfer-Encoding: \x0bchunked") + chunked(b"abc"), 400),
        (request(b"POST", CHAT, b"Transfer-Encoding:", b" chunked") + chunked(b"abc"), 400),
        (request(b"POST", CHAT, b"Transfer-Encoding : chunked") + chunked(b"abc"), 400),
        (request(b"POST", CHAT, b"Transfer-Encoding: chunked") + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
        (request(b"POST", CHAT, b"Transfer-Encoding: chunked") + b"3\nabc\n0\n\n", 400),
        (request(b"POST", CHAT, b"Transfer-Encoding: chunked") + b"3;a\nb\r\nabc\r\n0\r\n\r\n", 400),
        (request(b"POST", CHAT, b"Transfer-Encoding: chunked") + b"3\r\nabcXX\r\n0\r\n\r\n", 400),
        (request(b"POST", CHAT, b"Content-Length: 3, 3") + b"abc", 400),
        (request(b"POST", CHAT, b"Content-Length: 3", b"Content-Length: 3") + b"abc", 400),
        (request(b"GET", b"/v1/models", b"X-A: b\nX-B: c"), 400),
        (request(b"GET", b"/v1/models", b"X-A: b\rX-B: c"), 400),
        (request(b"GET", b"/v1/models", b"X A: b"), 400),
        (request(b"GET", b"/v1/models", b"Host: other"), 400),
        (request(b"POST", CHAT, b"Content-Length : 3") + b"abc", 400),
        (request(b"POST", CHAT, b"Content-Length: -3") + b"abc", 400),
        (request(b"POST", CHAT, b"Content-Length: +3") + b"abc", 400),
        (request(b"GET", b"/v1/models", b"X-A: a\0b"), 400),
        (request(b"GET", b"/v1/models", b"X-A: a", b" folded"), 400),
        (b"GET v1/models HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /v1/models HTTP/9.9\r\nHost: a\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (request(b"GET", b"/v1/models", b"X-A: " + b"a" * 70_000), 431),
        (request(b"GET", b"/v1/" + b"a" * 70_000), 431),
        (request(b"GET", b"/v1/models", *(b"X-%d: a" % number for number in range(2000))), 431),
    ],
)
def test_what_is_no_request_is_refused_and_never_reaches_the_upstream(
    memd: DaemonProcess, connect: Connect, seen: list[bytes], data: bytes, status: int
) -> None:
    client = connect(memd.base_url, data)
    assert client.read_head().split(b" ")[1] == b"%d" % status
    assert json.loads(client.read_body())["error"]["message"].startswith("memd: the request cannot be read: ")
    assert client.read_to_end() == b""  # nothing else on this connection
    assert not seen
    assert "Traceback" not in memd.log.read_text()


@pytest.mark.parametrize("path", [CHAT, b"/v1/embeddings"])
@pytest.mark.parametrize(("codings", "version"), [(b"gzip, chunked", b"1.1"), (b"chunked", b"1.0")])
def test_a_transfer_coding_that_memd_does_not_undo_is_answered_501(
    memd: DaemonProcess, connect: Connect, seen: list[bytes], path: bytes, codings: bytes, version: bytes
) -> None:
    head = request(b"POST", path, b"Transfer-Encoding: " + codings, b"Connection: keep-alive")
    client = connect(memd.base_url, head.replace(b"HTTP/1.1", b"HTTP/" + version) + chunked(b"{}"))
    assert client.read_head().split(b" ")[1] == b"501"
    assert b"Content-Encoding" in client.read_body()
    assert client.read_to_end() == b"" and not seen


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_bound_is_answered_413(
    memd: DaemonProcess, connect: Connect, seen: list[bytes], announced: bool
) -> None:
    body = b" " * (BODY_BYTES_MAX + 1)
    whole = request(b"POST", CHAT, b"Transfer-Encoding: chunked") + chunked(body)
    client = connect(memd.base_url, request(b"POST", CHAT, body=body) if announced else whole)
    assert client.read_head().split(b" ")[1] == b"413"
    assert b"limits.body_bytes_max" in client.read_body()
    assert not seen


def test_a_connection_on_which_nothing_more_comes_is_closed_whatever_came_before(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    raw.script = lambda peer: peer.send(peer.read_body())
    more = b"Content-Type: application/json", b"Content-Length: 100"
    begun = [(memd.base_url, b""), (memd.base_url, b"GET /v1/models HTTP/1.1\r\nX-A: a")]
    begun += [(memd.base_url, request(b"POST", path, *more) + b"{") for path in (CHAT, b"/v1/embeddings")]
    own = (
        request(b"POST", path, *more).replace(b"Host: memd", b"Host: 127.0.0.1") for path in (b"/mcp", b"/memd/notes")
    )
    begun += [(memd.own_url, head + b"{") for head in own]
    clients = [connect(url) for url, _ in begun]
    for client, (_, sent) in zip(clients, begun, strict=True):
        client.send(sent)
    assert [client.read_to_end() for client in clients] == [b""] * len(begun)
    assert still_answers(memd) and ask(f"{memd.own_url}/memd/health").status == 200
    log = memd.log.read_text()
    assert "Traceback" not in log and "Error handling request" not in log


PARTS = [{"type": "text", "text": "a"}] * 10_000
BODIES = {
    "an escaped NUL": b'{"messages":[{"role":"user","content":"a\\u0000b"}]}',
    "ten thousand parts": json.dumps({"messages": [{"role": "user", "content": PARTS}]}).encode(),
    "odd types": b'{"messages":[{"role":7,"content":{"a":1},"tool_calls":"x","name":[]}],"stream":"yes","tools":7}',
    "no messages": b'{"messages":[]}',
}


@pytest.mark.parametrize("name", BODIES)
def test_an_odd_body_reaches_the_upstream_byte_for_byte(
    memd: DaemonProcess, connect: Connect, seen: list[bytes], name: str
) -> None:
    client = connect(memd.base_url, request(b"POST", b"/t/%d" % list(BODIES).index(name) + CHAT, body=BODIES[name]))
    assert client.read_head().startswith(b"HTTP/1.1 200")
    assert seen == [BODIES[name]]
    assert still_answers(memd)
    assert "Traceback" not in memd.log.read_text()


def test_thousands_of_messages_are_answered_within_the_window(memd: DaemonProcess, seen: list[bytes]) -> None:
    messages = [{"role": ("user", "assistant")[number % 2], "content": f"number {number}"} for number in range(2_999)]
    assert memd.chat(messages, headers={"X-Memory-Session": "many"}).status == 200
    sent = json.loads(seen[-1])["messages"]
    assert sent[-1]["content"].endswith("number 2998") and len(sent) < 1000
    assert still_answers(memd)


@pytest.mark.parametrize(
    "memory_in",
    [
        {"corrections": [{"chunk_ids": ["a3f9"], "action": "Helpful", "reason": "r"}] * 10_000},
        {"corrections": [{"chunk_ids": ["a"] * 100_000, "action": "Helpful", "reason": "r"}] * 2},
        {"related_topic_ids": [f"topic{number}" for number in range(10_000)]},
        {"topic_id": "x" * 100_000},
    ],
)
def test_a_memory_in_beyond_its_bounds_costs_nothing_but_memory(
    memd: DaemonProcess, seen: list[bytes], memory_in: dict[str, object]
) -> None:
    answered = memd.chat([{"role": "user", "content": "hello"}], memory_in=memory_in)
    assert answered.status == 200
    assert answered.headers["X-Memory-Status"] == "bad-memory-in"
    assert b"memory_in" not in seen[-1]


def test_without_the_token_nothing_is_answered_and_with_it_everything(
    make_daemon: MakeDaemon, raw: RawUpstream, connect: Connect, seen: list[bytes]
) -> None:
    memd = make_daemon(raw.url, {"auth": {"token": TOKEN}}).start()
    for path in (b"/v1/models", CHAT, b"/memd/health", b"/t/notes" + CHAT):
        almost = TOKEN.encode()[:-1]
        for wrong in ([], [b"Authorization: Bearer no"], [b"X-Memory-Token: "], [b"Authorization: " + almost]):
            client = connect(memd.base_url, request(b"POST", path, *wrong, body=b"{}"))
            assert client.read_head().split(b" ")[1] == b"401"
    assert not seen
    raw.script = answering(answer(b"{}"))
    for name, shown in {
        b"Authorization": b"Bearer " + TOKEN.encode(),
        b"X-Api-Key": TOKEN.encode(),
        b"X-Memory-Token": TOKEN.encode(),
    }.items():
        client = connect(memd.base_url)
        client.send(request(b"POST", CHAT, name + b": " + shown, b"X-Other: kept", body=b'{"messages":[]}'))
        assert client.read_head().split(b" ")[1] == b"200"
        assert TOKEN.encode() not in raw.heads[-1] and b"X-Other: kept" in raw.heads[-1]
    client = connect(memd.base_url)
    client.send(request(b"POST", CHAT, b"X-Memory-Token: " + TOKEN.encode(), b"Authorization: Bearer k", body=b"{}"))
    client.read_head()
    assert b"Authorization: Bearer k" in raw.heads[-1]
    assert TOKEN not in memd.log.read_text()
    assert memd.run("stats").returncode == 0


def test_a_token_lets_it_listen_anywhere_and_whoever_guesses_leaves_one_line(
    make_daemon: MakeDaemon, raw: RawUpstream
) -> None:
    listen = {"listen": {"host": "0.0.0.0"}}
    refused = run_memd(*make_daemon(raw.url, listen).command()[3:])
    assert refused.returncode == 2
    assert "auth.token" in refused.stderr and refused.stderr.count("\n") == 1
    memd = make_daemon(raw.url, listen | {"auth": {"token": TOKEN}}).start()
    assert ask(memd.own_url + "/memd/health", headers={"X-Memory-Token": TOKEN, "Host": "box.local"}).status == 200
    guesses = [{"Authorization": f"Bearer almost-{number}"} for number in range(60)]
    assert 401 in {ask(f"{memd.base_url}/v1/models", headers=wrong).status for wrong in guesses} <= {401, 429}
    [line] = [line for line in memd.log.read_text().splitlines() if "refused: no token" in line]
    assert "remote=127.0.0.1 attempts=1" in line
    assert "almost-" not in memd.log.read_text()


def test_the_attempts_of_each_minute_are_counted_by_address(caplog: pytest.LogCaptureFixture) -> None:
    due: list[tuple[Callable[[str], None], str]] = []
    wrong = WrongTokens(Principals(), lambda _, call, address: due.append((call, address)))

    def a_minute_later() -> list[tuple[str, int]]:
        caplog.clear()
        for call, address in [due.pop(0) for _ in due[:]]:
            call(address)
        return [(vars(record)["remote"], vars(record)["attempts"]) for record in caplog.records]

    for _ in range(41):
        wrong.note("10.0.0.7")
    wrong.note("10.0.0.8")
    assert [vars(record)["attempts"] for record in caplog.records] == [1, 1]
    assert a_minute_later() == [("10.0.0.7", 40)]
    wrong.note("10.0.0.7")
    assert a_minute_later() == [("10.0.0.7", 1)]
    assert a_minute_later() == [] and not due
    for number in range(ADDRESSES_MAX + 100):
        wrong.note(f"10.1.{number // 256}.{number % 256}")
    assert a_minute_later() == [(REST, 99)] and len(due) == 1


ORIGINS = {
    "https://evil.example": "off",
    "http://6.6.6.6:8765": "off",
    "http://localhost.evil.example": "off",
    "null": "off",
    "http://[": "off",
    "http://localhost:3000": "injected",
    "http://127.0.0.1:8080": "injected",
    "http://[::1]:8080": "injected",
    "app://notes": "injected",
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_web_page_from_elsewhere_gets_no_memory(memd: DaemonProcess, seen: list[bytes], origin: str) -> None:
    url = f"{memd.base_url}/t/page{list(ORIGINS).index(origin)}/v1/chat/completions"
    assert ask(url, {"messages": [{"role": "user", "content": "The gate code is 5511."}]}).status == 200
    question = {"messages": [{"role": "user", "content": "What is the gate code?"}]}
    answered = ask(url, question, headers={"Origin": origin})
    assert answered.headers["X-Memory-Status"] == ORIGINS[origin]
    assert (b"5511" in seen[-1]) == (ORIGINS[origin] == "injected")
