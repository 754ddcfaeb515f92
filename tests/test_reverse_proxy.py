"""Requests that a proxy passes on: no memory without a token, and the documented nginx, run as it stands there."""

import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, ask
from nginx_server import running_nginx
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, streamed
from reserved_port import reserved_port
from tls_files import TlsFiles, make_tls_files

DOCUMENT = Path(__file__).parent.parent / "docs" / "reverse-proxy.md"
NAME, OWN_NAME = "memd.example.com", "memory.example.com"
TOKEN = "a token of some length"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
FACT = {"role": "user", "content": "The code of the boathouse is 5511."}
QUESTION = {"role": "user", "content": "What is the code of the boathouse?"}
FORWARDED = (
    *("Forwarded", "X-Forwarded-For", "x-forwarded-proto", "X-Forwarded-Host", "Via", "X-Real-IP"),
    *("CF-Connecting-IP", "Cf-Ray", "True-Client-IP", "Fly-Client-IP", "X-Client-IP", "X-Cluster-Client-IP"),
    *("X-Envoy-External-Address", "Tailscale-User-Login", "X-Original-Forwarded-For"),
)


def test_what_a_proxy_passed_on_gets_no_memory_without_a_token(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    assert served.chat([FACT]).status == 200
    for header in (
        "X-Request-ID",
        "User-Agent",
        "Cf",
        "X-Client-Version",
        "Client-IP-Note",
    ):  # of programs on a machine
        assert served.chat([QUESTION], {header: "1"}).headers["X-Memory-Status"] == "injected", header
    for header in FORWARDED:
        answered = served.chat([QUESTION], {header: "for=203.0.113.9"})
        assert answered.reply and answered.headers["X-Memory-Status"] == "token-required", header
        assert b"5511" not in upstream.requests[-1].body
        for url in (served.own_url, served.base_url):
            refused = ask(f"{url}/memd/health", headers={header: "for=203.0.113.9"})
            assert refused.status == 403 and "auth.token" in refused.json["error"]["message"]


class Nginx:
    """A running nginx with the documented configuration; names lead to it."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port = port
        self._context = context

    def open(self, name: str, method: str, path: str, body: object, headers: Mapping[str, str]) -> Any:
        """A connection, and the answer as it begins."""
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=120, context=self._context)
        sent = None if body is None else json.dumps(body).encode()
        connection.request(method, path, sent, {"Host": name, "Content-Type": "application/json", **headers})
        return connection, connection.getresponse()

    def ask(self, name: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
        """A whole answer; redirections are not followed."""
        connection, answer = self.open(name, "GET" if body is None else "POST", path, body, headers or {})
        with closing(connection):
            return Answer(answer.status, answer.headers, answer.read())


@contextmanager
def nginx(folder: Path, memd: DaemonProcess, files: TlsFiles, port: int) -> Iterator[Nginx]:
    """The configuration in the document, with this machine's ports and files in the place of the example's."""
    [documented] = re.findall(r"```nginx\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for example, here in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "http://127.0.0.1:8765": memd.base_url,
        "http://127.0.0.1:8766": memd.own_url,
        "/etc/ssl/memd": str(files.cert.parent),
    }.items():
        assert example in documented
        documented = documented.replace(example, here)
    with running_nginx(folder, documented, lambda: listens(port)):
        yield Nginx(port, files.trusting())


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


Behind = Callable[[DaemonProcess], Any]


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    """`behind(memd)`: nginx in front of it, as a context."""
    files = make_tls_files(tmp_path, NAME, OWN_NAME)
    folder = tmp_path / "nginx"
    folder.mkdir()
    with reserved_port() as port:
        yield lambda memd: nginx(folder, memd, files, port)


def test_behind_the_documented_nginx_all_works_with_the_token(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, behind: Behind
) -> None:
    memd = make_daemon(upstream.url, {"auth": {"token": TOKEN}}).start()
    chat = "/v1/chat/completions"
    with behind(memd) as proxy:
        assert proxy.ask(NAME, chat, {"messages": [FACT]}).status == 401
        assert memd.chat([FACT], SHOWN).status == 200
        answered = memd.chat([QUESTION], SHOWN | {"X-Forwarded-For": "203.0.113.9"})
        assert answered.headers["X-Memory-Status"] == "injected"
        answered = proxy.ask(NAME, chat, {"messages": [QUESTION]}, SHOWN)
        assert answered.headers["X-Memory-Status"] == "injected" and b"5511" in upstream.requests[-1].body
        large = {"messages": [{"role": "user", "content": "long " * 1_000_000}]}
        assert proxy.ask(NAME, chat, large, SHOWN | {"X-Memory-Mode": "off"}).status == 200
        assert proxy.ask(NAME, "/memd/health", None, SHOWN).json["status"] == "ok"
        led = proxy.ask(NAME, "/memd/search?q=code", None, SHOWN)
        assert led.status == 307 and led.headers["Location"] == f"https://{OWN_NAME}/memd/search?q=code"
        assert "5511" in proxy.ask(OWN_NAME, "/memd/search?q=code", None, SHOWN).body.decode()
        assert proxy.ask(OWN_NAME, "/memd/search?q=code").status == 401
        assert b"<title>memd</title>" in proxy.ask(OWN_NAME, "/memd/").body
        assert proxy.ask(OWN_NAME, "/.well-known/oauth-authorization-server").json["issuer"] == f"https://{OWN_NAME}"
        resource = f"https://{OWN_NAME}/.well-known/oauth-protected-resource/mcp"
        assert resource in proxy.ask(OWN_NAME, "/mcp", {}).headers["WWW-Authenticate"]


def test_behind_the_documented_nginx_words_come_as_the_model_writes_them(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, behind: Behind
) -> None:
    may_end = threading.Event()

    def respond(request: Request) -> Response:
        return streamed("One two three.", may_end) if b'"stream"' in request.body else chat_answer(request)

    upstream.answer = respond
    memd = make_daemon(upstream.url, {"auth": {"token": TOKEN}}).start()
    with behind(memd) as proxy:
        asked = {"messages": [FACT], "stream": True}
        connection, answer = proxy.open(NAME, "POST", "/v1/chat/completions", asked, SHOWN)
        with closing(connection):
            try:
                begun = b""
                while b"three." not in begun:
                    begun += answer.readline()
                assert b"[DONE]" not in begun
            finally:
                may_end.set()
            assert b"[DONE]" in answer.read()


def test_behind_the_documented_nginx_there_is_no_memory_without_a_token(
    served: DaemonProcess, upstream: RecordingUpstream, behind: Behind
) -> None:
    assert served.chat([FACT]).status == 200
    with behind(served) as proxy:
        answered = proxy.ask(NAME, "/v1/chat/completions", {"messages": [QUESTION]})
        assert answered.reply and answered.headers["X-Memory-Status"] == "token-required"
        assert b"5511" not in upstream.requests[-1].body
        assert proxy.ask(OWN_NAME, "/memd/search?q=code").status == 403
        assert urlsplit(served.own_url).hostname == "127.0.0.1"
