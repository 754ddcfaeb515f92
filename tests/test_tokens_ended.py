"""The end of a token: what is under way with it, and lists of tokens that are being written or cannot be read."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from conftest import MakeDaemon
from daemon_in_process import TOKENS, house_in, secret_of
from raw_wire import Peer, RawUpstream, request
from test_oauth import Stage, stage  # noqa: F401  # a fixture
from test_rights import LAMP, told
from test_websockets import AGREED, UPGRADE

from memd.admin import reads, status
from memd.admin.token_watch import AuthSource, TokenWatch
from memd.errors import MemdError
from memd.principals import digest_of
from memd.settings.loading import load_config
from memd.settings.tokens import known_principals
from memd.store.disk import LocalDisk
from memd.store.token_list import KeptToken, TokenList

ANN, BOB, CID = ("ann-" * 8, "bob-" * 8, "cid-" * 8)


def listed(secret: str, since: int | None = None) -> dict[str, object]:
    one: dict[str, object] = {
        "name": secret[:3],
        "token_sha256": digest_of(secret).hex(),
        "topics": ["*"],
        "rights": ["read"],
    }
    return one if since is None else {**one, "since": since}


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
    encoded, go = reads._encoded, threading.Event()
    monkeypatch.setattr(reads, "EXPORTED_AT_ONCE", 1)
    given = 0

    def slowly(lines: object) -> object:
        nonlocal given
        given += 1
        assert given == 1 or go.wait(60)
        return encoded(lines)  # type: ignore[arg-type]

    monkeypatch.setattr(reads, "_encoded", slowly)
    async with streaming(tmp_path, "/memd/export") as (answer, revoke):
        assert b"cinnamon" in await answer.content.readline()
        revoke()
        go.set()
        with pytest.raises(aiohttp.ClientError):
            await answer.content.read()


def test_a_tunnel_of_a_token_that_was_taken_back_ends(
    make_daemon: MakeDaemon, raw: RawUpstream, connect: Callable[[str], Peer]
) -> None:
    ended = threading.Event()

    def script(peer: Peer) -> None:
        peer.send(AGREED)
        peer.read_to_end()
        ended.set()

    raw.script = script
    daemon = make_daemon(raw.url).start()
    secret = daemon.run("token", "add", "ann", "--topics=*", "--rights=read").stdout.strip()
    client = connect(daemon.base_url)
    client.send(request(b"GET", b"/v1/realtime", *UPGRADE, b"X-Memory-Token: " + secret.encode()))
    assert client.read_head().startswith(b"HTTP/1.1 101")
    assert daemon.run("token", "revoke", "ann").returncode == 0
    assert ended.wait(60) and client.read_to_end() == b""
