"""Web pages as clients: what a browser asks before a page's request, and which of memd's answers the page may read."""

from collections.abc import Iterator

import pytest
from conftest import Connect
from daemon_process import DaemonProcess, ask
from raw_wire import Peer, RawUpstream, answer, answering, request

CHAT, MODELS = b"/v1/chat/completions", b"/v1/models"
TOKEN = "a secret of some length"
ELSEWHERE, HERE = b"https://app.example", b"http://localhost:3000"
ASKS = [
    b"Access-Control-Request-Method: POST",
    b"Access-Control-Request-Headers: authorization,content-type,x-memory-mode",
]


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    return {"auth": {"token": TOKEN}, "limits": {"body_bytes_max": 2048}}


@pytest.fixture(scope="module")
def open_memd(tmp_path_factory: pytest.TempPathFactory, raw: RawUpstream) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("open"), raw.url).start()
    yield daemon
    daemon.discard()


def asked(connect: Connect, memd: DaemonProcess, data: bytes) -> Peer:
    client = connect(memd.base_url, data)
    client.read_head()
    client.read_body()
    return client


@pytest.mark.parametrize("path", [CHAT, MODELS, b"/t/notes" + CHAT])
def test_a_preflight_needs_no_token_and_reaches_no_upstream(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes
) -> None:
    raw.script = lambda _: None
    client = asked(connect, memd, request(b"OPTIONS", path, b"Origin: " + ELSEWHERE, *ASKS))
    assert client.head.startswith(b"HTTP/1.1 204")
    assert client.header(b"Access-Control-Allow-Origin") == ELSEWHERE
    assert client.header(b"Access-Control-Allow-Methods") == b"POST"
    assert client.header(b"Access-Control-Allow-Headers") == ASKS[1].partition(b": ")[2]
    assert b"Origin" in (client.header(b"Vary") or b"")
    assert client.header(b"Access-Control-Allow-Credentials") is None
    assert not raw.heads


@pytest.mark.parametrize("path", [b"/memd/health", b"/memd/", b"/memd/chunks?contains=a"])
def test_no_page_of_another_origin_gets_to_memd_s_own_routes(
    memd: DaemonProcess, connect: Connect, path: bytes
) -> None:
    shown = b"X-Memory-Token: " + TOKEN.encode()
    for data in (
        request(b"OPTIONS", path, b"Origin: " + ELSEWHERE, *ASKS),
        request(b"GET", path, b"Origin: " + ELSEWHERE, b"Sec-Fetch-Site: cross-site", shown),
        request(b"GET", path, b"Origin: " + ELSEWHERE),
    ):
        assert asked(connect, memd, data).header(b"Access-Control-Allow-Origin") is None


def test_what_is_no_preflight_needs_the_token(memd: DaemonProcess, connect: Connect) -> None:
    for headers in ([], [b"Origin: " + ELSEWHERE], ASKS):
        assert asked(connect, memd, request(b"OPTIONS", CHAT, *headers)).head.startswith(b"HTTP/1.1 401")


def test_a_page_may_read_memd_s_own_errors(memd: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
    raw.script = lambda peer: peer.close()
    shown = b"Authorization: Bearer " + TOKEN.encode()
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    for status, data in {
        b"401": request(b"POST", CHAT, b"Origin: " + ELSEWHERE, body=body),
        b"502": request(b"POST", CHAT, b"Origin: " + ELSEWHERE, shown, body=body),
        b"413": request(b"POST", CHAT, b"Origin: " + ELSEWHERE, shown, body=b" " * 4096),
        b"400": request(b"POST", b"/t/a%20b" + CHAT, b"Origin: " + ELSEWHERE, shown, body=body),
    }.items():
        client = asked(connect, memd, data)
        assert client.head.split(b" ")[1] == status
        assert client.header(b"Access-Control-Allow-Origin") == ELSEWHERE
        assert client.headers(b"Vary") == [b"Origin"]


def test_the_upstream_s_answers_have_the_upstream_s_headers_and_let_memd_s_be_read_with_them(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    raw.script = answering(
        answer(b"{}", b"Access-Control-Allow-Origin: *", b"Access-Control-Expose-Headers: X-Its-Own")
    )
    shown = b"Authorization: Bearer " + TOKEN.encode()
    client = asked(connect, memd, request(b"POST", CHAT, b"Origin: " + ELSEWHERE, shown, body=b'{"messages":[]}'))
    assert client.headers(b"Access-Control-Allow-Origin") == [b"*"]
    its_own, memds = client.headers(b"Access-Control-Expose-Headers")
    told = {line.split(b":")[0] for line in client.head.split(b"\r\n") if line.startswith(b"X-Memory-")}
    assert its_own == b"X-Its-Own" and set(memds.split(b", ")) == told and b"X-Memory-Status" in told
    raw.script = answering(answer(b"{}"))
    client = asked(connect, memd, request(b"POST", CHAT, b"Origin: " + ELSEWHERE, shown, body=b'{"messages":[]}'))
    assert client.headers(b"Access-Control-Expose-Headers") == [], "nothing that no page may read"


@pytest.mark.process
def test_without_a_token_the_upstream_answers_preflights_and_only_pages_of_this_machine_read_errors(
    open_memd: DaemonProcess, raw: RawUpstream, connect: Connect
) -> None:
    allowed = answer(b"", b"Access-Control-Allow-Origin: *", b"Access-Control-Allow-Headers: *")
    raw.script = lambda peer: peer.send(allowed)
    client = asked(connect, open_memd, request(b"OPTIONS", CHAT, b"Origin: " + ELSEWHERE, *ASKS))
    assert client.head == allowed.removesuffix(b"\r\n\r\n")
    raw.script = lambda peer: peer.close()
    for origin, told in {ELSEWHERE: None, HERE: HERE, b"null": None, b"app://notes": b"app://notes"}.items():
        client = asked(connect, open_memd, request(b"GET", b"/x", b"Origin: " + origin))
        assert client.head.startswith(b"HTTP/1.1 502")
        assert client.header(b"Access-Control-Allow-Origin") == told


def test_a_program_gets_no_such_headers(memd: DaemonProcess) -> None:
    refused = ask(memd.base_url + "/v1/models")
    assert refused.status == 401 and refused.headers["Access-Control-Allow-Origin"] is None
