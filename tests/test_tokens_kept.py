"""`memd token`: tokens are made, listed, exchanged and taken back, and a running daemon follows at once."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import aiohttp
import daemon_process
import pytest
import yaml
from aiohttp.test_utils import make_mocked_request
from conftest import MakeDaemon
from daemon_in_process import TOKENS, house_in, secret_of
from daemon_process import DaemonProcess, ask, token_setting, wait_until
from raw_wire import Peer, RawUpstream, request
from recording_upstream import RecordingUpstream
from test_rights import LAMP, told
from test_websockets import AGREED, UPGRADE

from memd.access import headers_with_token
from memd.admin import reads, status
from memd.admin.tokens import AuthSource, TokenWatch
from memd.errors import MemdError, StoreError
from memd.principals import OWNER, Principals, digest_of
from memd.settings.loading import load_config
from memd.settings.model import known_principals
from memd.store.disk import LocalDisk
from memd.store.shared.books import KeptToken, TokenList

NOTE = {"topic_id": "team-a", "notes": [{"content": "The lamp is in the attic."}]}


def status_of(served: DaemonProcess, secret: str, body: object = None) -> int:
    headers = {"X-Memory-Token": secret} if secret else {}
    return ask(f"{served.own_url}/memd/{'notes' if body else 'topics'}", body, headers=headers).status


def made(served: DaemonProcess, name: str, topics: str, rights: str) -> str:
    done = served.run("token", "add", name, "--topics", topics, "--rights", rights)
    assert done.returncode == 0, done.stderr
    secret: str = done.stdout.strip()
    assert secret.startswith("memd_") and len(secret) > 40
    return secret


def test_a_token_is_made_exchanged_and_taken_back_beside_a_running_daemon(served: DaemonProcess) -> None:
    assert status_of(served, "") == 200
    ann = made(served, "ann", "team-*,ann", "read, write")
    assert status_of(served, "") == 401, "now there are tokens"
    assert (status_of(served, ann, NOTE), status_of(served, ann)) == (200, 200)
    assert ann not in (served.data_dir / "memd.tokens").read_text()
    assert "lamp" in served.run("search", "Where is the lamp?").stdout, "commands on this machine need no token"
    reader = served.folder / "reader.yaml"
    reader.write_text(yaml.safe_dump({"auth": {"token": made(served, "bob", "team-*", "read")}}))
    refused = served.run("remember", "x", "--config", str(reader))
    assert (refused.returncode, refused.stderr) == (1, "memd: the token 'bob' has no right to write; it may read\n")
    assert "there is a token ann already" in served.run("token", "add", "ann", "--topics=*", "--rights=read").stderr
    listed = served.run("token", "list").stdout.splitlines()
    assert listed[0].startswith("ann: read, write in team-*, ann (since 20") and len(listed) == 2
    rotated = served.run("token", "rotate", "ann").stdout.strip()
    assert (status_of(served, ann), status_of(served, rotated)) == (401, 200)
    assert served.run("token", "revoke", "ann").stdout == "revoked ann\n"
    assert status_of(served, rotated) == 401
    assert served.run("token", "revoke", "ann").returncode == 1
    assert served.run("token", "revoke", "bob").returncode == 0
    assert status_of(served, "") == 401, "what was closed stays closed while it runs"
    assert json.loads(served.run("token", "list", "--json").stdout) == []
    told = [json.loads(line) for line in served.run("audit", "--act", "token", "--json").stdout.splitlines()[1:]]
    assert [(one["who"], one["detail"]) for one in told] == [
        (getpass.getuser(), detail)
        for detail in (
            "added ann: read, write in team-*, ann",
            "added bob: read in team-*",
            "rotated ann",
            "revoked ann",
            "revoked bob",
        )
    ]
    acts = [json.loads(line) for line in served.run("audit", "--act", "settings", "--json").stdout.splitlines()[1:]]
    taken = [one["detail"] for one in acts if one["detail"] != "no token has changed"]  # it was taken up just before
    assert taken == [f"tokens {one}" for one in ("added: bob", "changed: ann", "gone: ann", "gone: bob")], (
        "with ann it began"
    )


def test_a_command_without_the_right_token_changes_tokens_and_the_daemon_follows_by_itself(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    served = make_daemon(upstream.url)
    served.environment = {"MEMD_AUTH_TOKEN": "o" * 40}
    served.start()
    added = served.run("token", "add", "ann", "--topics=*", "--rights=read")
    assert added.returncode == 0 and added.stderr.endswith("The running daemon takes this up within a second.\n")
    wait_until(lambda: status_of(served, added.stdout.strip()) == 200, served.log.read_text)


def test_the_settings_are_read_again_and_a_wrong_list_changes_nothing(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    def one(name: str) -> dict[str, object]:
        return token_setting(name, f"secret-of-{name}", "read")

    served = make_daemon(upstream.url, {"auth": {"tokens": [one("ann")]}}).start()
    assert (status_of(served, "secret-of-ann"), status_of(served, "secret-of-bob")) == (200, 401)
    given = yaml.safe_load(served.config.read_text())
    given["auth"]["tokens"] = [one("ann"), one("ann")]
    served.config.write_text(yaml.safe_dump(given))
    wait_until(lambda: "tokens stay as they were" in served.log.read_text(), served.log.read_text)
    assert status_of(served, "secret-of-ann") == 200
    given["auth"]["tokens"] = [one("bob")]
    served.config.write_text(yaml.safe_dump(given))
    wait_until(lambda: status_of(served, "secret-of-bob") == 200, served.log.read_text)
    assert status_of(served, "secret-of-ann") == 401
    audit = served.run("audit", "--act", "settings", "--json", "--config", str(served.config)).stdout.splitlines()[1:]
    [taken] = map(json.loads, audit)
    assert (taken["who"], taken["from"], taken["detail"]) == (
        "memd",
        str(served.config),
        "tokens added: bob; gone: ann",
    )
    assert (
        "stands in auth.tokens of the settings"
        in served.run("token", "revoke", "bob", "--config", str(served.config)).stderr
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("x", "--topics", "team-*,team-a", "--rights", "read"), "have team-* and team-a, which overlap"),
        (("x", "--topics", "a", "--rights", ","), "memd: rights is not what it should be"),
        (("owner", "--topics", "a", "--rights", "read"), "the name owner is that of auth.token"),
        (("a b", "--topics", "a", "--rights", "read"), "name is not what it should be; give 1 to 64 letters"),
    ],
)
@pytest.mark.process
def test_a_wrong_token_is_not_made(make_daemon: MakeDaemon, arguments: tuple[str, ...], reason: str) -> None:
    done = make_daemon("http://127.0.0.1:9").run("token", "add", *arguments)
    assert (done.returncode, done.stdout) == (2, "") and reason in done.stderr


def test_a_token_that_was_taken_back_does_not_reach_the_upstream_beside_one_that_is_known() -> None:
    shown = {"X-Memory-Token": "known", "Authorization": "Bearer memd_taken-back", "X-Api-Key": "the upstream's"}
    request = make_mocked_request("GET", "/v1/models", headers=shown)
    principals = Principals({digest_of("known"): OWNER})
    assert headers_with_token(request, principals) == {"x-memory-token", "authorization"}
    assert headers_with_token(request, Principals()) == set()


def test_a_list_of_a_later_version_is_not_read_as_this_one(tmp_path: Path) -> None:
    (tmp_path / "memd.tokens").write_text('{"tokens": [], "version": 2}')
    with pytest.raises(StoreError, match="is no list of tokens"):
        TokenList(LocalDisk(), tmp_path).read()


@pytest.mark.process
def test_a_command_may_have_the_token_of_anybody_in_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memd(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memd", *arguments, "--data-dir", str(tmp_path / "memory")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    secret = memd("token", "add", "ann", "--topics", "*", "--rights", "read").stdout.strip()
    monkeypatch.setenv("MEMD_AUTH_TOKEN", secret)
    listed = memd("token", "list")
    assert "ann: read in *" in listed.stdout and "owner" not in listed.stdout
    for command in (
        ["remember", "The lamp is in the attic."],
        ["token", "add", "bob", "--topics", "x", "--rights", "read"],
    ):
        done = memd(*command)
        assert done.returncode == 0, done.stderr


def test_the_log_counts_what_waits_in_the_topics_that_a_token_may_read(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 3600, "idle_seconds": 3600}}).start()
    ann, ben = (made(served, name, name, "read,write") for name in ("ann", "ben"))
    for name, secret in (("ann", ann), ("ben", ben)):
        said = [{"role": "user", "content": "The lamp is in the attic."}]
        served.chat(said, {"Authorization": f"Bearer {secret}"}, memory_in={"topic_id": name})
    monkeypatch.setattr(daemon_process, "clean_environment", lambda: {**os.environ, "MEMD_AUTH_TOKEN": ann})
    wait_until(lambda: "2 messages are not in the log yet" in served.run("log").stdout, lambda: repr(served))
    assert "4 messages" in served.run("stats").stdout, "who reads the files reads all of them"


# The end of a token: what is under way with it, and lists of tokens that are being written or cannot be read


ANN, BOB, CID = ("ann-" * 8, "bob-" * 8, "cid-" * 8)


def listed(secret: str, since: int | None = None) -> dict[str, object]:
    return token_setting(secret[:3], secret, "read") | ({} if since is None else {"since": since})


class Lists:
    """The settings file and the list of `memd token`, and who reads them while they change."""

    def __init__(self, folder: Path) -> None:
        self.path, self._folder = folder / "config.yaml", folder
        self.write([ANN, BOB])
        source = AuthSource(self.path, lambda: load_config(self.path, {}, {}).auth)
        self.watch = TokenWatch(source.read(), TokenList(LocalDisk(), folder), source)
        self.watch.load()

    def text(self, secrets: list[str]) -> str:
        return yaml.safe_dump({"auth": {"tokens": [listed(one) for one in secrets]}})

    def write(self, secrets: list[str]) -> None:
        self.path.write_text(self.text(secrets))

    def keep(self, *secrets: str) -> None:
        TokenList(LocalDisk(), self._folder).keep([KeptToken(**listed(one, 1)) for one in secrets])  # type: ignore[arg-type]

    async def known(self) -> tuple[list[str], str]:
        """Who is known after another look, and what was wrong with the lists."""
        problem = ""
        try:
            await self.watch.reload()
        except MemdError as error:
            problem = str(error)
        return self.watch.principals.names, problem


@pytest.fixture
def lists(tmp_path: Path) -> Lists:
    return Lists(tmp_path)


async def test_a_settings_file_that_is_empty_wrong_or_gone_takes_no_token_back(lists: Lists) -> None:
    whole = lists.path.read_text()
    for left, problem in (
        ("", "is empty"),
        (whole[: whole.index("rights")], "it has no token_sha256"),
        ("a: [", "not YAML"),
    ):
        lists.path.write_text(left)
        names, told_problem = await lists.known()
        assert names == ["ann", "bob"] and problem in told_problem
    lists.path.unlink()
    assert (await lists.known())[0] == ["ann", "bob"]
    lists.write([BOB])
    assert await lists.known() == (["bob"], "")


async def test_a_token_is_taken_back_also_while_the_settings_are_wrong(lists: Lists) -> None:
    lists.keep(CID)
    assert await lists.known() == (["ann", "bob", "cid"], "")
    lists.path.write_text("nothing: known")
    lists.keep()
    names, problem = await lists.known()
    assert names == ["ann", "bob"] and "nothing" in problem
    assert await lists.known() == (["ann", "bob"], ""), "it is told once"
    lists.write([BOB])
    lists.keep(BOB)
    names, problem = await lists.known()
    assert names == ["ann", "bob"] and "another token with the name bob" in problem
    lists.keep()
    assert await lists.known() == (["bob"], ""), "what was wrong was only that both have it"


@asynccontextmanager
async def streaming(tmp_path: Path, path: str) -> AsyncIterator[tuple[aiohttp.ClientResponse, Callable[[], None]]]:
    """A stream that ann reads, from behind its first part on, and how her token is taken back."""
    async with house_in(tmp_path) as house:
        for number in range(3):
            await told(house, "team-a", f"{LAMP} {number}")
        await house.settled()

        def revoke() -> None:
            left = tuple(one for one in TOKENS if one.name != "ann")
            auth = type(house.daemon.config.auth)(token=secret_of("owner"), tokens=left)
            house.daemon.principals.exchange(known_principals(auth))

        shown = {"X-Memory-Token": secret_of("ann")}
        async with (
            aiohttp.ClientSession() as session,
            session.get(house.daemon.own_url + path, headers=shown) as answer,
        ):
            yield answer, revoke


async def test_the_stream_of_events_of_a_token_that_was_taken_back_ends_also_when_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PING_SECONDS", 0.05)
    async with streaming(tmp_path, "/memd/events") as (events, revoke):
        await events.content.readuntil(b": ping\n\n")
        revoke()
        assert (await events.content.read()).replace(b": ping\n\n", b"") == b""


async def test_an_export_of_a_token_that_was_taken_back_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(reads, "EXPORTED_AT_ONCE", 1)
    given = 0

    def slowly(lines: Iterator[bytes], count: int) -> Iterator[bytes]:
        nonlocal given
        given += 1
        assert given == 1 or go.wait(60)
        return islice(lines, count)

    monkeypatch.setattr(reads, "islice", slowly)
    async with streaming(tmp_path, "/memd/export") as (answer, revoke):
        assert b"cinnamon" in await answer.content.readline()
        revoke()
        go.set()
        with pytest.raises(aiohttp.ClientError):
            await answer.content.read()


def test_a_tunnel_of_a_token_that_was_taken_back_ends(
    make_daemon: MakeDaemon, raw: RawUpstream, connect: Callable[..., Peer]
) -> None:
    ended = threading.Event()

    def script(peer: Peer) -> None:
        peer.send(AGREED)
        peer.read_to_end()
        ended.set()

    raw.script = script
    daemon = make_daemon(raw.url).start()
    secret = daemon.run("token", "add", "ann", "--topics=*", "--rights=read").stdout.strip()
    client = connect(daemon.base_url, request(b"GET", b"/v1/realtime", *UPGRADE, b"X-Memory-Token: " + secret.encode()))
    assert client.read_head().startswith(b"HTTP/1.1 101")
    assert daemon.run("token", "revoke", "ann").returncode == 0
    assert ended.wait(60) and client.read_to_end() == b""
