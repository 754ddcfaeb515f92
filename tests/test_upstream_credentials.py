"""A user and a password in `upstream.url`: the server is shown them where a client shows nothing, nobody else is."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Connect, MakeDaemon
from daemon_process import DaemonProcess, ask
from raw_wire import RawUpstream, answer, answering, request

from memd.errors import ConfigError
from memd.settings.loading import load_config

USER = "ann:s%40cret%2Fword"
SHOWN = b"Basic " + base64.b64encode(b"ann:s@cret/word")
SECRETS = ("s%40cret", "s@cret", SHOWN.decode()[-12:])
PATHS = [b"/v1/chat/completions", b"/v1/embeddings"]


@pytest.fixture(scope="module")
def memd(tmp_path_factory: pytest.TempPathFactory, raw: RawUpstream) -> Iterator[DaemonProcess]:
    url = raw.url.replace("//", f"//{USER}@")
    daemon = DaemonProcess(tmp_path_factory.mktemp("memd"), url).start()
    yield daemon
    daemon.discard()


def shown(raw: RawUpstream) -> list[bytes]:
    """The credentials that the upstream was shown."""
    lines = (line for head in raw.heads for line in head.split(b"\r\n") if line.startswith(b"Authorization:"))
    return [line.partition(b": ")[2] for line in lines]


def seen(memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes, *headers: bytes) -> list[bytes]:
    """Those that it is shown with a request."""
    raw.script = answering(answer(b"{}"))
    asked = request(b"POST", path, *headers, body=b'{"messages":[{"role":"user","content":"hi"}]}')
    assert connect(memd.base_url, asked).read_head().startswith(b"HTTP/1.1 200")
    return shown(raw)


@pytest.mark.parametrize("path", PATHS)
def test_they_are_shown_where_a_client_shows_nothing_and_else_what_it_shows(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes
) -> None:
    assert seen(memd, raw, connect, path) == [SHOWN]
    assert seen(memd, raw, connect, path, b"X-Api-Key: k") == [SHOWN]
    assert seen(memd, raw, connect, path, b"Authorization: Bearer sk-1") == [b"Bearer sk-1"]


def test_nobody_else_is_told(memd: DaemonProcess, raw: RawUpstream, tmp_path: Path) -> None:
    raw.script = lambda peer: peer.close()
    refused = ask(memd.base_url + "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert refused.status == 502
    health = ask(memd.base_url + "/memd/health")
    assert health.json["upstream"]["url"] == raw.url
    raw.script = lambda peer: peer.send(answer(b"{}"))
    checked = memd.run("check", "--json", "--config", str(memd.config))
    assert f"{raw.url} answers" in checked.stdout
    settings = {"upstream": {"url": raw.url.replace("//", f"//{USER}@")}, "data_dir": str(memd.data_dir)}
    (config := tmp_path / "config.yaml").write_text(json.dumps(settings))
    memd.run("check", "--config", str(config))
    assert set(shown(raw)) == {SHOWN}, "by whose settings they are"
    told = [refused.body.decode(), health.body.decode(), memd.log.read_text(), checked.stdout, checked.stderr]
    assert raw.url in memd.log.read_text()  # the lines of the start
    assert not [text for text in told for secret in SECRETS if secret in text]


@pytest.mark.parametrize(
    "url",
    [f"ftp://{USER}@host", "http://ann:s@cret/word@host", "http://ann:s@cret#1@host:99999", [f"http://{USER}@host"]],
    ids=["protocol", "path", "port", "no text"],
)
def test_a_wrong_address_is_refused_without_its_password(url: object) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {}, {"upstream.url": url})
    assert not [secret for secret in SECRETS if secret in str(refused.value)]


@pytest.mark.parametrize("path", [*PATHS, b"/v1/realtime"])
def test_a_web_page_of_another_machine_is_not_lent_them(
    memd: DaemonProcess, raw: RawUpstream, connect: Connect, path: bytes
) -> None:
    raw.script = lambda _: None
    client = connect(memd.base_url)
    upgrade = [b"Connection: Upgrade", b"Upgrade: websocket"] if path.endswith(b"realtime") else []
    client.send(request(b"POST", path, b"Origin: https://evil.example", *upgrade, body=b"{}"))
    assert client.read_head().startswith(b"HTTP/1.1 403") and not raw.heads


OWN = "own=se.cret:word"
"""Made of the characters at which names and values part."""
OTHERS = "memd-key-of-the-model-server"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, raw: RawUpstream) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("closed"), raw.url, {"auth": {"token": OWN}}).start()
    yield daemon
    daemon.discard()


@pytest.mark.process
@pytest.mark.parametrize("mode", ["full", "off"])
@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (f"api-key: {OWN}", None),
        (f"x-goog-api-key: {OWN}", None),
        (f"X-Custom: Token {OWN}, other", None),
        (f"X-Custom: key={OWN}", None),
        (f'X-Custom: Digest username="ann", response="{OWN}"', None),
        ("X-Custom: own%3Dse.cret%3Aword", None),
        (f"Authorization: Basic {base64.b64encode(f'ann:{OWN}'.encode()).decode()}", None),
        (f"X-Custom: {base64.b64encode(f'Bearer {OWN}'.encode()).decode()}", None),
        (f'X-Custom: {{"token": "{OWN}"}}', None),
        (f"X-Custom: '{OWN}'", None),
        (f"Referer: https://ann:{OWN}@host/page", None),
        (f"X-Custom: another principal's is memd_{'b' * 43}", None),
        (f"Cookie: theme=dark; memd={OWN}; session=x=y", "Cookie: theme=dark; session=x=y"),
        (f'Cookie: memd="{OWN}"', None),
        (f"api-key: {OTHERS}", f"api-key: {OTHERS}"),
        (f"api-key: {OWN}s", f"api-key: {OWN}s"),
        (f"Authorization: Bearer {OTHERS}", f"Authorization: Bearer {OTHERS}"),
        ("Authorization: Bearer memd_taken-back", None),
        ("Cookie: a=1;b=2", "Cookie: a=1;b=2"),
    ],
)
def test_a_secret_of_memd_s_own_never_leaves_for_the_upstream(
    closed: DaemonProcess, raw: RawUpstream, connect: Connect, sent: str, kept: str | None, mode: str
) -> None:
    raw.script = answering(answer(b"{}"))
    client = connect(closed.base_url)
    shown = f"X-Memory-Token: {OWN}", f"X-Memory-Mode: {mode}", sent
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    client.send(request(b"POST", b"/v1/chat/completions", *(one.encode() for one in shown), body=body))
    assert client.read_head().startswith(b"HTTP/1.1 200")
    head = next(one.decode() for one in raw.heads if b"/chat/completions " in one)
    assert "se.cret" not in head.replace(f"{OWN}s", "")
    name = sent.partition(":")[0]
    assert [line for line in head.split("\r\n") if line.startswith(name)] == ([] if kept is None else [kept])


@pytest.mark.process
@pytest.mark.parametrize("unit", [".%", "=.:", "%41.", "memd_", "a+/"])
def test_a_header_that_looks_like_thousands_of_secrets_holds_up_nobody(
    closed: DaemonProcess, raw: RawUpstream, connect: Connect, unit: str
) -> None:
    raw.script = answering(answer(b"{}"))
    client, began = connect(closed.base_url), time.monotonic()
    odd = f"X-Foo: {unit * (8_000 // len(unit))}".encode()
    client.send(request(b"GET", b"/v1/models", f"X-Memory-Token: {OWN}".encode(), odd))
    assert client.read_head().startswith(b"HTTP/1.1 200")
    assert time.monotonic() - began < 5


LONG = "memd_" + "a" * 43


@pytest.mark.process
@pytest.mark.parametrize(
    "path", [f"/v1/models/{LONG}", f"/v1/models?key=Bearer%20{LONG}", f"/v1/models;{LONG}?a=1", f"/v1/models?a={LONG}."]
)
def test_a_token_anywhere_in_an_address_is_refused(
    make_daemon: MakeDaemon, raw: RawUpstream, connect: Connect, path: str
) -> None:
    client = connect(make_daemon(raw.url, {"auth": {"token": LONG}}).start().base_url)
    client.send(request(b"GET", path.encode(), f"X-Memory-Token: {LONG}".encode()))
    assert client.read_head().startswith(b"HTTP/1.1 400")
    assert b"does not belong in an address" in client.read_body()
