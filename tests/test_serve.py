"""`memd serve` as its user meets it: its start and end, its two addresses, TLS, and what it says of what is wrong."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from conftest import REPLY, REPLY_WITH_MEMORY, Connect, MakeDaemon, Serving
from daemon_process import Answer, DaemonProcess, ask, clean_environment, run_memd, text_of, user, wait_until
from recording_upstream import RecordingUpstream, chat_answer, recording_upstream, streamed
from reserved_port import reserved_port
from tls_files import TlsFiles, make_tls_files

from memd.cli.main import main
from memd.daemon.app import AT_ONCE
from memd.errors import MemdError
from memd.proxy.connections import SPEAKS_TLS, addresses_of, bound, leading_back, own_port, tls_of
from memd.settings.model import AdminSettings, Config, ListenSettings, UpstreamSettings

GRACE = {"shutdown": {"grace_seconds": 30}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stream_in_flight_is_finished_before_the_end(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, number: signal.Signals
) -> None:
    gate = threading.Event()
    upstream.answer = lambda _: streamed("One two three.", gate)
    daemon = make_daemon(upstream.url, GRACE).start()
    with daemon.stream([user("Count.")]) as stream:
        chunks = iter(stream)
        seen = [next(chunks)]
        daemon.send_signal(number)
        wait_until(lambda: "stopping after replies in flight" in daemon.log.read_text(), lambda: repr(daemon))
        gate.set()
        seen += chunks
        assert stream.ended_properly
    assert text_of(seen) == "One two three."
    assert daemon.wait() == 0
    assert "Traceback" not in daemon.log.read_text()


def test_a_second_ctrl_c_ends_the_daemon_at_once_and_says_what_is_kept(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, GRACE).start()
    daemon.chat([user("The spare key hangs behind the barometer.")])
    gate = threading.Event()
    upstream.answer = lambda _: streamed("One two three.", gate)
    with daemon.stream([user("Count.")]) as stream:
        next(iter(stream))
        daemon.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping after replies in flight" in daemon.log.read_text(), lambda: repr(daemon))
        daemon.send_signal(signal.SIGINT)
        assert daemon.wait() == 128 + signal.SIGINT
    gate.set()
    assert daemon.log.read_text().endswith(AT_ONCE)
    upstream.answer = chat_answer
    answer = daemon.start().chat([user("Where does the spare key hang?")])
    assert answer.headers["X-Memory-Status"] == "injected"


def test_a_stream_that_outlasts_the_grace_is_cut_and_never_ended_as_if_it_were_whole(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    gate = threading.Event()
    upstream.answer = lambda _: streamed("One two three.", gate)
    daemon = make_daemon(upstream.url, {"shutdown": {"grace_seconds": 0.1}}).start()
    with daemon.stream([user("Count.")]) as stream:
        chunks = iter(stream)
        next(chunks)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0
        with pytest.raises((ConnectionError, urllib.error.URLError, ValueError, OSError)):
            raise_if_cut(list(chunks), ended=stream.ended_properly)
    gate.set()


def test_what_was_said_before_a_clean_end_is_known_after_the_next_start(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These two are started as a user starts them, by a new interpreter that loads the model."""
    monkeypatch.setattr(DaemonProcess, "forks", False)
    daemon = make_daemon(upstream.url).start()
    daemon.chat([user("The spare key hangs behind the barometer.")])
    daemon.restart()
    answer = daemon.chat([user("Where does the spare key hang?")])
    assert answer.headers["X-Memory-Status"] == "injected"
    assert "behind the barometer" in upstream.prompts[-1]


def test_a_second_daemon_names_the_first_and_a_client_of_plain_http_that_speaks_tls_is_told_of(
    served: DaemonProcess,
) -> None:
    port = served.base_url.rpartition(":")[2]
    for flags in ((), ("--port", port)):
        second = run(served.command(*flags))
        [line] = second.stderr.splitlines()
        assert second.returncode == 1 and line.startswith(
            f"memd: memd already runs on {served.data_dir} at {served.base_url} (pid {served.pid}, "
        )

    with pytest.raises(OSError, match="SSL"):
        ask(served.base_url.replace("http:", "https:"))
    wait_until(lambda: SPEAKS_TLS in served.log.read_text(), lambda: repr(served))


def test_a_taken_port_is_one_clear_line(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(make_daemon(upstream.url).command("--port", str(port)))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("memd: ")
    assert f"127.0.0.1:{port}" in line


def test_without_an_upstream_it_starts_warns_and_answers_what_to_do(make_daemon: MakeDaemon) -> None:
    with reserved_port() as port:
        nowhere = f"http://127.0.0.1:{port}"
        daemon = make_daemon(nowhere).start()
        assert nowhere in daemon.log.read_text()
        assert "NOT REACHABLE" in daemon.log.read_text()
        answers = daemon.chat([user("Hello?")]), ask(f"{daemon.base_url}/v1/models")
    for answer in answers:
        assert answer.status == 502
        assert answer.headers.get_content_type() == "application/json"
        error = answer.json["error"]
        assert nowhere in error["message"]
        assert "upstream.url" in error["message"]
        assert {"message", "type", "code"} <= set(error)
    assert ask(f"{daemon.own_url}/memd/health").status == 200


def test_a_server_that_tells_no_model_serves_the_one_that_a_request_names(make_daemon: MakeDaemon) -> None:
    with recording_upstream(window=None) as upstream:
        daemon = make_daemon(upstream.url).start()
        told = f"  {upstream.url}  (the model that a request names, window unknown yet)\n"
        assert told in daemon.log.read_text()
        daemon.terminate()


def test_an_upstream_that_comes_later_is_used(make_daemon: MakeDaemon, scripted_gguf: Path) -> None:
    from llama_server import running_llama

    with reserved_port() as port:
        daemon = make_daemon(f"http://127.0.0.1:{port}").start()
        assert daemon.chat([user("Hello?")]).status == 502
        with running_llama(scripted_gguf, context=4096, log=daemon.folder / "llama.log", port=port):
            assert daemon.chat([user("Hello?")]).reply == "".join(REPLY)


def test_a_model_file_is_served_and_its_server_ends_with_memd_also_when_that_is_killed(
    make_daemon: MakeDaemon, scripted_gguf: Path
) -> None:
    daemon = make_daemon(None).start("--model", str(scripted_gguf))
    assert daemon.chat([user("The ferry leaves at noon from pier four.")]).reply == "".join(REPLY)
    assert daemon.chat([user("From which pier does the ferry leave?")]).reply == "".join(REPLY_WITH_MEMORY)
    child = child_url(daemon)
    assert ask(f"{child}/health").status == 200
    assert daemon.terminate() == 0
    assert not listens(child)
    child = child_url(daemon.start("--model", str(scripted_gguf)))
    assert listens(child)
    daemon.kill()
    wait_until(lambda: not listens(child), lambda: f"llama.cpp at {child} outlived memd")


def test_without_llama_cpp_a_model_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    (tmp_path / "a.gguf").touch()
    arguments = ["serve", "--model", str(tmp_path / "a.gguf"), "--data-dir", str(tmp_path / "data"), "--port", "0"]
    done = CliRunner().invoke(main, arguments)
    needed = f"{sys.executable} -m pip install 'memd-proxy[llama]'"
    assert done.exit_code == 1
    assert f"memd: --model needs llama.cpp: {needed} (or start llama-server" in done.stderr
    assert "stands above" not in done.stderr


def test_a_file_that_is_no_model_is_said_to_be_none(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"not a model")
    done = run(make_daemon(None).command("--model", str(tmp_path / "no.gguf")))
    assert done.returncode == 1
    assert "no.gguf" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


# -- small things the tests share ---------------------------------------------------------------------------------


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=clean_environment())


def raise_if_cut(chunks: list[object], *, ended: bool) -> None:
    """Clients see a cut stream either as an error while reading, or as one without its `[DONE]`."""
    if not ended:
        raise ConnectionError(f"no [DONE] after {json.dumps(chunks)}")


def child_url(daemon: DaemonProcess) -> str:
    """Where memd's own llama.cpp listens, as health tells it."""
    url = ask(f"{daemon.own_url}/memd/health").json["upstream"]["url"]
    assert isinstance(url, str)
    return url


def listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


# The two addresses of a daemon: that of the model and memd's own


def unfollowed(url: str, method: str = "GET", **headers: str) -> Answer:
    """An answer as it comes, redirects included."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=120)) as connection:
        connection.request(method, f"{parts.path}?{parts.query}" if parts.query else parts.path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())


def test_it_leads_to_the_host_that_the_client_knows_and_models_are_not_at_its_own_address(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    port = urlsplit(served.own_url).port
    led = {"localhost:1": f"http://localhost:{port}/memd/", "[::1]:80": f"http://[::1]:{port}/memd/"}
    for host, location in led.items():
        assert unfollowed(f"{served.base_url}/memd/", Host=host).headers["Location"] == location
    assert unfollowed(f"{served.base_url}/memd/", Host="evil.example").status == 403
    for odd in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "http://["}):
        assert unfollowed(f"{served.own_url}/memd/health", **odd).status == 403, odd

    seen = len(upstream.requests)
    answer = ask(f"{served.own_url}/v1/chat/completions", {"messages": []})
    assert answer.status == 404 and f"{served.base_url}/v1" in answer.json["error"]["message"]
    assert len(upstream.requests) == seen


def test_the_token_is_wanted_at_memd_s_own_address_but_not_to_be_led_there(serving: Serving) -> None:
    served = serving({"auth": {"token": "of some length"}})
    assert unfollowed(f"{served.base_url}/memd/turns").status == 307
    odd = unfollowed(f"{served.base_url}/memd/turns", Host="[::1")
    assert (odd.status, odd.headers["Location"]) == (307, f"{served.own_url}/memd/turns")
    assert (
        unfollowed(f"{served.base_url}/memd/health").status == unfollowed(f"{served.own_url}/memd/turns").status == 401
    )
    assert unfollowed(f"{served.own_url}/memd/").status == 200
    assert unfollowed(f"{served.own_url}/v1/models").status == 401
    assert ask(f"{served.base_url}/memd/turns", headers={"X-Memory-Token": "of some length"}).status == 200


def test_a_port_that_is_taken_stops_a_start_only_where_it_was_asked_for(tmp_path: Path) -> None:
    with two_free_ports() as (port, taken):
        with pytest.raises(MemdError, match=rf"127.0.0.1:{taken}: .*--admin-port"):
            bound(config(tmp_path, port, taken))
        listeners = bound(config(tmp_path, port, "auto"))
        try:
            assert f"127.0.0.1:{taken}" in listeners.moved
            model, own, _ = addresses_of(config(tmp_path, port, "auto"), listeners)
            assert model.endswith(f":{port}") and own != model and not own.endswith(f":{taken}")
        finally:
            listeners.close()


def test_memd_s_own_port_is_one_above_the_clients_unless_it_is_set(tmp_path: Path) -> None:
    assert own_port(Config()) == 8766
    assert own_port(config(tmp_path, 9000, "auto")) == 9001
    assert own_port(config(tmp_path, 9000, 9900)) == 9900
    assert own_port(config(tmp_path, 0, "auto")) == own_port(config(tmp_path, 65_535, "auto")) == 0


def test_an_address_that_cannot_be_taken_is_told_with_what_helps() -> None:
    for listen, remedy in (("192.0.2.1", "--host"), ("no-such-host.invalid", "--host")):
        with pytest.raises(MemdError, match=f"{listen}:0: .*; give an address of this machine with {remedy}"):
            bound(Config(listen=ListenSettings(host=listen, port=0)))


@pytest.mark.process
def test_memd_is_not_started_in_front_of_itself(tmp_path: Path) -> None:
    for listens, named in (("127.0.0.1", "localhost"), ("::1", "[::1]"), ("0.0.0.0", "127.0.0.1")):
        assert leading_back(in_front_of(f"http://{named}:8765", listens))
    for other in ("http://127.0.0.1:8080", "http://127.0.0.2:8765", "http://model.example:8765", "https://localhost"):
        assert not leading_back(in_front_of(other, "127.0.0.1"))
    served = DaemonProcess(tmp_path, None)
    refused = served.run("serve", "--port", "18765", "--upstream", "http://127.0.0.1:18765/v1")
    assert refused.returncode == 2 and "in circles" in refused.stderr and "give the model server's" in refused.stderr


def in_front_of(url: str, host: str) -> Config:
    return Config(listen=ListenSettings(host=host), upstream=UpstreamSettings(url=url))


def config(folder: Path, port: int, own: int | str) -> Config:
    admin = AdminSettings(port="auto") if own == "auto" else AdminSettings(port=int(own))
    return Config(listen=ListenSettings(port=port), admin=admin, data_dir=folder)


@contextmanager
def two_free_ports() -> Iterator[tuple[int, int]]:
    """A free port, and the one above it, on which somebody listens."""
    while True:
        with reserved_port() as port:
            try:
                second = socket.create_server(("127.0.0.1", port + 1))
            except OSError:
                continue
            with second:
                yield port, port + 1
            return


# memd's own TLS: both addresses, streams, the commands beside it, and wrong files


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


def test_both_addresses_speak_tls_and_commands_find_it_whatever_name_the_certificate_has(
    memd: DaemonProcess, files: TlsFiles, connect: Connect
) -> None:
    for url in (memd.base_url, memd.own_url):
        parts = urlsplit(url)
        assert parts.scheme == "https"
        with closing(http.client.HTTPSConnection(parts.netloc, timeout=120, context=files.trusting())) as connection:
            connection.request("GET", "/memd/health", headers={"X-Memory-Token": TOKEN})
            told = json.loads(connection.getresponse().read())
        assert (told["model_url"], told["own_url"]) == (memd.base_url, memd.own_url)
    led = ask(f"{memd.base_url}/memd/turns", headers={"X-Memory-Token": TOKEN})
    assert led.status == 200

    shown = {"X-Memory-Token": TOKEN}
    assert memd.chat([FACT], shown).status == 200
    answered = memd.chat([{"role": "user", "content": "What is the code of the boathouse?"}], shown, stream=True)
    assert answered.headers["X-Memory-Status"] == "injected" and answered.body.rstrip().endswith(b"[DONE]")

    for command in (["stats"], ["log"], ["check", "--live"]):
        done = memd.run(*command, "--config", str(memd.config))
        assert memd.own_url in done.stdout or command == ["log"], done
        assert "in use by another" not in done.stderr
    assert "passes a chat request on" in done.stdout

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
    refused = run_memd(*memd.command()[3:])
    assert refused.returncode == 2 and "listen.tls_key belong together" in refused.stderr
