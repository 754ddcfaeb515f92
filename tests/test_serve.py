"""`memd serve` as its user meets it: how it starts, how it ends, and what it says when something is wrong."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import REPLY, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import DaemonProcess, ask, clean_environment, text_of, user, wait_until
from recording_upstream import RecordingUpstream, chat_answer, recording_upstream, streamed
from reserved_port import reserved_port

from memd.cli.main import main
from memd.daemon.app import AT_ONCE
from memd.proxy.connections import SPEAKS_TLS

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
    assert text_of(seen) == "Onetwothree."
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


def test_a_second_daemon_names_the_first_also_where_its_port_is_taken(served: DaemonProcess) -> None:
    port = served.base_url.rpartition(":")[2]
    for flags in ((), ("--port", port)):
        second = run(served.command(*flags))
        [line] = second.stderr.splitlines()
        assert second.returncode == 1 and line.startswith(
            f"memd: memd already runs on {served.data_dir} at {served.base_url} (pid {served.pid}, "
        )


def test_a_taken_port_is_one_clear_line(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(make_daemon(upstream.url).command("--port", str(port)))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("memd: ")
    assert f"127.0.0.1:{port}" in line


def test_a_client_that_speaks_tls_to_plain_http_is_told_of_in_the_log(served: DaemonProcess) -> None:
    with pytest.raises(OSError, match="SSL"):
        ask(served.base_url.replace("http:", "https:"))
    wait_until(lambda: SPEAKS_TLS in served.log.read_text(), lambda: repr(served))


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


def test_a_model_file_is_served_and_its_server_ends_with_memd(make_daemon: MakeDaemon, scripted_gguf: Path) -> None:
    daemon = make_daemon(None).start("--model", str(scripted_gguf))
    assert daemon.chat([user("The ferry leaves at noon from pier four.")]).reply == "".join(REPLY)
    assert daemon.chat([user("From which pier does the ferry leave?")]).reply == "".join(REPLY_WITH_MEMORY)
    child = child_url(daemon)
    assert ask(f"{child}/health").status == 200
    assert daemon.terminate() == 0
    assert not listens(child)


def test_the_model_server_ends_also_when_memd_is_killed(make_daemon: MakeDaemon, scripted_gguf: Path) -> None:
    daemon = make_daemon(None).start("--model", str(scripted_gguf))
    child = child_url(daemon)
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
