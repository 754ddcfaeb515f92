"""memd's own TLS: both addresses, streams, the commands beside it, and wrong files."""

from __future__ import annotations

import http.client
import json
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import Connect, MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, clean_environment
from tls_files import TlsFiles, make_tls_files

from memd.errors import MemdError
from memd.proxy.connections import tls_of
from memd.settings.model import Config, ListenSettings

TOKEN = "a token of some length"
FACT = {"role": "user", "content": "The code of the boathouse is 5511."}


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return make_tls_files(tmp_path, "memd.example.com")


@pytest.fixture
def memd(serving: Serving, files: TlsFiles) -> DaemonProcess:
    """Named relative to the settings file, one folder above which the files are."""
    tls = {"tls_cert": f"../{files.cert.name}", "tls_key": f"../{files.key.name}"}
    return serving({"listen": tls, "auth": {"token": TOKEN}})


def test_both_addresses_speak_tls_with_the_certificate(memd: DaemonProcess, files: TlsFiles) -> None:
    for url in (memd.base_url, memd.own_url):
        parts = urlsplit(url)
        assert parts.scheme == "https"
        with closing(http.client.HTTPSConnection(parts.netloc, timeout=120, context=files.trusting())) as connection:
            connection.request("GET", "/memd/health", headers={"X-Memory-Token": TOKEN})
            told = json.loads(connection.getresponse().read())
        assert (told["model_url"], told["own_url"]) == (memd.base_url, memd.own_url)
    led = ask(f"{memd.base_url}/memd/turns", headers={"X-Memory-Token": TOKEN})
    assert led.status == 200


def test_a_conversation_is_remembered_and_streams_by_it(memd: DaemonProcess) -> None:
    shown = {"X-Memory-Token": TOKEN}
    assert memd.chat([FACT], shown).status == 200
    answered = memd.chat([{"role": "user", "content": "What is the code of the boathouse?"}], shown, stream=True)
    assert answered.headers["X-Memory-Status"] == "injected" and answered.body.rstrip().endswith(b"[DONE]")


def test_commands_find_it_and_prove_it_whatever_name_the_certificate_has(memd: DaemonProcess) -> None:
    for command in (["stats"], ["log"], ["check", "--live"]):
        done = memd.run(*command, "--config", str(memd.config))
        assert memd.own_url in done.stdout or command == ["log"], done
        assert "in use by another" not in done.stderr
    assert "passes a chat request on" in done.stdout


def test_a_client_that_speaks_no_tls_costs_itself_its_connection(memd: DaemonProcess, connect: Connect) -> None:
    peer = connect(memd.base_url, b"GET /v1/models HTTP/1.1\r\nHost: memd\r\n\r\n")
    assert b"200" not in peer.read_to_end()
    assert ask(f"{memd.base_url}/memd/health", headers={"X-Memory-Token": TOKEN}).status == 200
    assert "Traceback" not in memd.log.read_text()


CONNECTIONS_MAX = 12


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], ids=["silent", "begun"])
def test_handshakes_that_nobody_finishes_take_no_more_places_than_there_are(
    serving: Serving, files: TlsFiles, connect: Connect, said: bytes
) -> None:
    tls = {"tls_cert": str(files.cert), "tls_key": str(files.key)}
    limits = {"connections_max": CONNECTIONS_MAX, "idle_seconds": 3.0}
    memd = serving({"listen": tls, "auth": {"token": TOKEN}, "limits": limits})
    health = f"{memd.own_url}/memd/health"
    assert ask(health, headers={"X-Memory-Token": TOKEN}).status == 200
    sockets = sockets_of(memd)
    strangers = [connect(url) for url in (memd.base_url, memd.own_url) for _ in range(10 * CONNECTIONS_MAX)]
    for stranger in strangers[-CONNECTIONS_MAX:]:
        stranger.send(said)
    assert ask(health, headers={"X-Memory-Token": TOKEN}).status == 200, "all before it have been accepted"
    assert sockets_of(memd) <= sockets + CONNECTIONS_MAX
    for stranger in strangers:
        assert stranger.wait_until_closed() < 9
    late = connect(memd.base_url, said)
    assert ask(health, headers={"X-Memory-Token": TOKEN}).status == 200
    assert memd.terminate() == 0 and late.read_to_end() == b""
    assert "Traceback" not in memd.log.read_text() and "Exception" not in memd.log.read_text()


def sockets_of(memd: DaemonProcess) -> int:
    """How many sockets the daemon has open."""
    found = 0
    for descriptor in Path(f"/proc/{memd.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found += str(descriptor.readlink()).startswith("socket:")
    return found


@pytest.mark.process
def test_files_that_cannot_be_used_are_named_with_the_remedy(tmp_path: Path, files: TlsFiles) -> None:
    (tmp_path / "other").mkdir()
    other = make_tls_files(tmp_path / "other")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", str(files.key), "-aes128", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    for cert, key in ((files.cert, other.key), (files.key, files.cert), (files.cert, locked), (tmp_path, files.key)):
        config = Config(listen=ListenSettings(tls_cert=str(cert), tls_key=str(key)))
        with pytest.raises(MemdError, match=r"listen\.tls_cert|without a passphrase"):
            tls_of(config)


def test_one_file_without_the_other_is_refused(make_daemon: MakeDaemon, files: TlsFiles) -> None:
    memd = make_daemon("http://127.0.0.1:9", {"listen": {"tls_cert": str(files.cert)}})
    refused = subprocess.run(memd.command(), capture_output=True, text=True, timeout=120, env=clean_environment())
    assert refused.returncode == 2 and "listen.tls_key belong together" in refused.stderr
