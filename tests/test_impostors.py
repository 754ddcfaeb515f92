"""Commands tell nobody the token but the daemon that has the data directory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, clean_environment
from recording_upstream import RecordingUpstream, Request, Response, recording_upstream

from memd.cli.running import RunningDaemon
from memd.store.disk import LocalDisk, Lock

TOKEN = "the token of this memory"


@pytest.fixture
def stranger() -> Iterator[RecordingUpstream]:
    """A server that is not memd, and all that it has been told."""
    with recording_upstream() as running:
        running.answers_all = True
        running.answer = lambda _: Response((b"{}",))
        yield running


@pytest.fixture
def memd(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    return make_daemon(upstream.url, {"auth": {"token": TOKEN}}).start()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A data directory whose lock is held."""
    lock: Lock = LocalDisk().lock(tmp_path / "memd.lock")
    yield tmp_path
    lock.release()


def run(memd: DaemonProcess, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    flags = ["--data-dir", str(memd.data_dir), "--config", str(memd.config)]
    command = [sys.executable, "-m", "memd", *arguments, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=clean_environment() | environment
    )


def test_an_address_that_was_left_behind_is_not_even_asked(memd: DaemonProcess, stranger: RecordingUpstream) -> None:
    memd.kill()
    assert (memd.data_dir / "memd.url").exists() and (memd.data_dir / "memd.secret").stat().st_mode & 0o777 == 0o600
    (memd.data_dir / "memd.url").write_text(stranger.url)
    for command in (["stats"], ["check", "--upstream", "http://127.0.0.1:9"], ["log"]):
        run(memd, *command)
    assert stranger.requests == []


def test_a_stranger_at_the_address_of_a_running_daemon_never_hears_the_token(
    memd: DaemonProcess, stranger: RecordingUpstream
) -> None:
    """Nor one who passes the challenge on to the real daemon, or leads there."""

    def pass_on(request: Request) -> Response:
        return Response((ask(memd.own_url + request.target).body,))

    def lead(request: Request) -> Response:
        return Response((), 307, (("Location", memd.own_url + request.target),))

    (memd.data_dir / "memd.url").write_text(stranger.url)
    for answer in (stranger.answer, pass_on, lead):
        stranger.answer = answer
        heard = len(stranger.requests)
        refused = run(memd, "log")
        assert refused.returncode == 1 and "in use by another memd" in refused.stderr
        assert len(stranger.requests) == heard + 1 and TOKEN not in str(stranger.requests)


def test_the_daemon_itself_is_found_whatever_proxy_the_environment_names(
    memd: DaemonProcess, stranger: RecordingUpstream
) -> None:
    asked = run(memd, "stats", "--json", http_proxy=stranger.url, all_proxy=stranger.url, HTTP_PROXY=stranger.url)
    assert asked.returncode == 0 and f'"daemon_url":"{memd.own_url}"' in asked.stdout
    assert stranger.requests == []


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:8766", "http://example.invalid:8766", "file:///etc/passwd", "http://127.0.0.1", "", "\0"]
)
def test_only_an_address_of_this_machine_is_asked(held: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("somebody is asked")

    monkeypatch.setattr("socket.create_connection", refuse)
    (held / "memd.url").write_text(url)
    (held / "memd.secret").write_text("0" * 64)
    assert RunningDaemon.find(held, TOKEN) is None


def test_a_proof_is_for_one_challenge_and_needs_one(memd: DaemonProcess) -> None:
    first, second = (ask(f"{memd.own_url}/memd/proof?challenge={digit * 64}") for digit in "ab")
    assert first.status == second.status == 200 and first.json != second.json
    assert ask(f"{memd.own_url}/memd/proof?challenge=short").status == 400
    assert ask(f"{memd.own_url}/memd/proof").status == 400
    assert memd.terminate() == 0
    assert not {"memd.url", "memd.secret"} & {path.name for path in memd.data_dir.iterdir()}


def test_a_command_with_another_token_is_told_so(memd: DaemonProcess) -> None:
    config = memd.folder / "other.yaml"
    config.write_text("auth: {token: some other token}\n")
    checked = memd.run("check", "--config", str(config), "--upstream", "http://127.0.0.1:9")
    assert "does not know this token" in checked.stdout
