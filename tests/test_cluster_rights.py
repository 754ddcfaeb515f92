"""Rights in a cluster: tokens and grants are in the database, and every daemon has the same ones."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from crash_files import CrashFiles
from cut_connections import LosingRelay
from postgres_server import PostgresServer
from test_oauth import ALLOWED, ANN, CALLBACK, CLIENT, FILE, ISSUER, VERIFIER, query

from memd.admin.access import acting_headers, headers_with_token, let_in
from memd.admin.oauth.clients import client_id_of
from memd.admin.oauth.grants import Grant, Tokens
from memd.admin.oauth.ledger import LedgerFile
from memd.admin.oauth.protocol import permission_asked, token_asked
from memd.admin.oauth.shared_ledger import SharedLedger
from memd.cli.moving_rights import copy_rights
from memd.errors import BadQuestion, InDoubt, OAuthRefused, StoreError
from memd.principals import OWNER, Acting, Principal, Principals, digest_of
from memd.proxy.sharing import DaemonTrust
from memd.proxy.token_watch import TokenWatch
from memd.settings.tokens import AuthSettings, TokenSettings, auth_mark
from memd.store.cluster.book import SharedBook
from memd.store.cluster.database import Database
from memd.store.cluster.tokens import SharedTokens
from memd.store.disk import DiskFiles
from memd.store.token_list import KeptToken, TokenFile

pytestmark = pytest.mark.process
HELD = """
import sys
from memd.store.cluster.book import SharedBook
from memd.store.cluster.database import Database

def work(rows):
    print("held", flush=True)
    sys.stdin.read()

SharedBook(Database(sys.argv[1]), "tokens").change(work)
"""


def token(name: str) -> KeptToken:
    digest = digest_of(f"{name} " * 8).hex()
    return KeptToken(name=name, token_sha256=digest, topics=("*",), rights=("read",), since=ord(name[0]))


class Shared:
    """A database, a relay to it that can lose answers, and daemons."""

    def __init__(self, postgres: PostgresServer, url: str, relay: LosingRelay, stack: ExitStack) -> None:
        self.server, self.url, self.relay, self._stack = postgres, url, relay, stack
        self.principals = {ANN: Principal("ann", ("team-*",), frozenset({"read"}))}

    def book(self, name: str = "tokens") -> SharedBook:
        database = self._stack.enter_context(closing(Database(self.url, connect_seconds=2.0)))
        return SharedBook(database, name)  # type: ignore[arg-type]

    def tokens(self, folder: Path | None = None) -> SharedTokens:
        return SharedTokens(self.book(), None if folder is None else TokenFile(DiskFiles(), folder))

    def ledger(self, files: CrashFiles | None = None) -> SharedLedger:
        """That of a daemon."""
        if files is None:
            files = CrashFiles()
            files.make_directory(FILE.parent)
        writer = self._stack.enter_context(ThreadPoolExecutor(1))
        return SharedLedger(self.book("grants"), files, FILE, writer, self.principals.get)

    def rows(self) -> list[tuple[str, ...]]:
        with self.book()._database.connection() as connection:
            found: list[tuple[str, ...]] = connection.execute("SELECT * FROM memd_book").fetchall()
            return found


@pytest.fixture
def shared(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Shared]:
    name = f"d{abs(hash(request.node.name))}"
    postgres.database(name)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memd-"))
        relay = stack.enter_context(closing(LosingRelay(Path(folder), postgres.socket)))
        yield Shared(postgres, postgres.url(name, folder=folder), relay, stack)


def names(shared: Shared) -> list[str]:
    return [one.name for one in shared.tokens().read()]


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_changes_that_are_made_at_once_are_all_there(shared: Shared) -> None:
    lists = [shared.tokens() for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        for one in threads.map(lambda i: lists[i % 4].change(lambda kept: (*kept, token("abcdefgh"[i]))), range(8)):
            assert one is None
    assert names(shared) == list("abcdefgh")


def test_a_refused_change_leaves_the_list_as_it_was(shared: Shared) -> None:
    tokens = shared.tokens()
    tokens.change(lambda kept: (token("a"),))
    before = tokens.stamp()

    def refuse(kept: tuple[KeptToken, ...]) -> tuple[KeptToken, ...]:
        raise BadQuestion("there is one already")

    with pytest.raises(BadQuestion):
        tokens.change(refuse)
    assert (names(shared), tokens.stamp()) == (["a"], before)


def test_a_change_whose_answer_is_lost_is_made_once(shared: Shared) -> None:
    tokens, calls = shared.tokens(), 0

    def add(kept: tuple[KeptToken, ...]) -> tuple[KeptToken, ...]:
        nonlocal calls
        calls += 1
        return (*kept, token("abc"[calls - 1]))

    tokens.read()
    shared.relay.lose_answer_to(b"COMMIT")
    tokens.change(add)
    assert (names(shared), calls) == (["a"], 1)
    shared.relay.lose_answer_to(b"COMMIT", times=3)
    with pytest.raises(InDoubt, match="nobody knows whether the change was made; look"):
        tokens.change(add)
    assert names(shared) == ["a", "b"]


def test_a_command_that_is_killed_in_between_changes_nothing_and_holds_nobody_up(shared: Shared) -> None:
    shared.tokens().change(lambda kept: (token("a"),))
    arguments = [sys.executable, "-c", HELD, shared.url]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None and command.stdout.readline() == "held\n"
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(shared.tokens().change, lambda kept: (*kept, token("b")))
            assert names(shared) == ["a"], "whoever reads does not wait"
            command.kill()
            other.result()
    assert names(shared) == ["a", "b"]


async def test_while_the_database_is_away_who_is_known_stays_and_nobody_comes_or_goes(
    shared: Shared, tmp_path: Path
) -> None:
    shared.tokens().change(lambda kept: (token("a"),))
    watch = TokenWatch(AuthSettings(), shared.tokens(tmp_path), None)
    watch.load()
    assert watch.principals.names == ["a"] and not watch.principals.is_open
    shared.server.stop()
    try:
        with pytest.raises(StoreError):
            await watch.reload()
        with pytest.raises(StoreError):
            shared.tokens().change(lambda kept: (*kept, token("b")))
        assert watch.principals.names == ["a"]
        again = TokenWatch(AuthSettings(), shared.tokens(tmp_path), None)
        again.load()
        assert again.principals.names == ["a"] and not again.principals.is_open, "of a daemon that starts meanwhile"
    finally:
        shared.server.start()
    shared.tokens().change(lambda kept: (token("b"),))
    assert await again.reload() == "added: b; gone: a"
    assert again.principals.names == ["b"]


async def test_a_daemon_that_needed_no_token_needs_one_from_the_first_on_wherever_that_was_made(shared: Shared) -> None:
    watch = TokenWatch(AuthSettings(), shared.tokens(), None)
    watch.load()
    open_before = watch.principals.is_open
    shared.tokens().change(lambda kept: (token("a"),))
    assert await watch.reload() == "added: a"
    shared.tokens().change(lambda kept: ())
    assert await watch.reload() == "gone: a"
    assert open_before and not watch.principals.is_open


def test_settings_that_differ_are_told_apart_without_a_token_in_what_tells_them() -> None:
    ann = TokenSettings(name="ann", token_sha256=ANN, topics=("a", "b"), rights=("read", "write"))
    same = TokenSettings(name="ann", token_sha256=ANN, topics=("b", "a"), rights=("write", "read"))
    marks = [
        auth_mark(AuthSettings(token=secret, tokens=tokens)) for secret in ("", "o" * 20) for tokens in ((), (ann,))
    ]
    assert len(set(marks)) == 4
    assert auth_mark(AuthSettings(token="o" * 20, tokens=(same,))) == marks[3]


# -- programs over OAuth ----------------------------------------------------------------------------------------------


async def exchange(ledger: SharedLedger, client_id: str, code: str) -> Tokens:
    form = {"grant_type": "authorization_code", "code": code, "code_verifier": VERIFIER, "redirect_uri": CALLBACK}
    return await ledger.tokens_for(token_asked(urlencode({"client_id": client_id, **form}), ledger.key, ISSUER))


async def refresh(ledger: SharedLedger, client_id: str, token: str) -> Tokens:
    form = {"grant_type": "refresh_token", "refresh_token": token, "client_id": client_id}
    return await ledger.tokens_for(token_asked(urlencode(form), ledger.key, ISSUER))


async def code_at(ledger: SharedLedger) -> tuple[str, str]:
    """A client that registers, and its code."""
    key = await ledger.key_to_register()
    client_id = client_id_of(CLIENT, key)
    return client_id, await ledger.allow(permission_asked(query(client_id=client_id), key, ISSUER), ALLOWED)


@pytest.fixture
async def pair(shared: Shared) -> tuple[SharedLedger, SharedLedger]:
    one, two = shared.ledger(), shared.ledger()
    for ledger in (one, two):
        await ledger.catch_up()
    assert one.key == two.key != b""
    return one, two


async def test_a_flow_that_begins_at_one_daemon_ends_at_another(
    shared: Shared, pair: tuple[SharedLedger, SharedLedger]
) -> None:
    one, two = pair
    client_id, code = await code_at(one)
    given = await exchange(two, client_id, code)
    assert one.acting(given.access_token) is None
    await one.catch_up()
    found = one.acting(given.access_token)
    assert found is not None and found == two.acting(given.access_token)
    again = await refresh(one, client_id, given.refresh_token)
    await two.catch_up()
    assert two.acting(given.access_token) is None and two.acting(again.access_token)
    kept = str(shared.rows())
    assert not any(secret in kept for secret in (code, given.access_token, given.refresh_token, again.access_token))
    await two.revoke(again.access_token)
    await one.catch_up()
    assert one.live() == () and one.acting(again.access_token) is None


async def test_a_code_and_a_refresh_token_serve_once_in_the_whole_cluster(
    pair: tuple[SharedLedger, SharedLedger],
) -> None:
    one, two = pair
    client_id, code = await code_at(one)
    outcomes = await asyncio.gather(*(exchange(each, client_id, code) for each in pair), return_exceptions=True)
    [refused] = [str(each) for each in outcomes if isinstance(each, OAuthRefused)]
    assert "has served before, so its tokens are void" in refused
    client_id, code = await code_at(two)
    first = await exchange(one, client_id, code)
    second = await refresh(two, client_id, first.refresh_token)
    with pytest.raises(OAuthRefused, match="served before; its grant is void"):
        await refresh(one, client_id, first.refresh_token)
    await two.catch_up()
    assert two.acting(second.access_token) is None and two.live() == one.live() == ()


async def test_tokens_whose_answer_is_lost_on_its_way_are_given_once(
    shared: Shared, pair: tuple[SharedLedger, SharedLedger]
) -> None:
    client_id, code = await code_at(pair[0])
    first = await exchange(pair[0], client_id, code)
    shared.relay.lose_answer_to(b"COMMIT")
    second = await refresh(pair[0], client_id, first.refresh_token)
    await pair[1].catch_up()
    assert pair[1].acting(second.access_token)


async def test_a_program_goes_on_while_the_database_is_away_and_nothing_is_given_or_ended(shared: Shared) -> None:
    files = CrashFiles()
    files.make_directory(FILE.parent)
    ledger = shared.ledger(files)
    await ledger.catch_up()
    client_id, code = await code_at(ledger)
    given = await exchange(ledger, client_id, code)
    shared.server.stop()
    try:
        with pytest.raises(StoreError):
            await refresh(ledger, client_id, given.refresh_token)
        with pytest.raises(StoreError):
            await ledger.revoke(given.access_token)
        await ledger.catch_up()
        assert ledger.acting(given.access_token)
        assert shared.ledger(files).acting(given.access_token), "of a daemon that starts meanwhile"
    finally:
        shared.server.start()
    renewed = None
    async with asyncio.timeout(60):
        while renewed is None:  # who was refused connections waits for a new one for a moment only
            with suppress(StoreError):
                renewed = await refresh(ledger, client_id, given.refresh_token)


async def test_a_grant_whose_token_a_daemon_does_not_know_gets_nothing_there_and_stays(
    shared: Shared, pair: tuple[SharedLedger, SharedLedger]
) -> None:
    client_id, code = await code_at(pair[0])
    given = await exchange(pair[0], client_id, code)
    ann = shared.principals.pop(ANN)
    with pytest.raises(OAuthRefused, match="is gone; ask again"):
        await refresh(pair[1], client_id, given.refresh_token)
    shared.principals[ANN] = ann
    assert await refresh(pair[1], client_id, given.refresh_token)


# -- one daemon in somebody's name at another -------------------------------------------------------------------------


def passed_on(principals: Principals, to: Principals, **headers: str) -> Principal | None:
    """Who it is that asks, where one daemon passes a request on to another."""
    request = make_mocked_request("GET", "/memd/me", headers=headers)
    assert let_in(request, principals) is not None
    hopped = make_mocked_request("GET", "/memd/me", headers=acting_headers(request, principals))
    for principals_ in (to, Principals()):
        assert headers_with_token(hopped, principals_) == {"x-memory-daemon", "x-memory-acting"}
    return let_in(hopped, to)


async def test_a_daemon_is_believed_in_whose_name_it_asks_until_it_ends_or_the_token_is_taken_back(
    shared: Shared,
) -> None:
    ann = Principal("ann", ("team-*",), frozenset({"read"}))
    one, two = (Principals({digest_of("ann's"): ann}) for _ in range(2))
    first, second = (DaemonTrust(shared.book("daemons"), f"http://{id(each)}", each) for each in (one, two))
    for each in (first, second):
        await each.catch_up()
    one.lend("a secret of its own", msgspec.structs.replace(ann, via="MCP"))
    shown = {"X-Memory-Token": "ann's"}
    assert passed_on(one, two, **shown) == ann
    lent = passed_on(one, two, **{"X-Memory-Token": "a secret of its own"})
    assert lent is not None and lent.via == "MCP" and lent.name == "ann"
    assert passed_on(two, one, **shown) is None, "before the first has heard of the second"
    await first.catch_up()
    assert passed_on(two, one, **shown) == ann
    assert one.own_secret not in str(shared.rows()) and two.own_secret != one.own_secret
    two.exchange({})
    assert passed_on(one, two, **shown) is None, "taken back at the one that is asked"
    await first.end()
    await second.catch_up()
    assert passed_on(one, two, **{"X-Memory-Token": "a secret of its own"}) is None


def test_nobody_becomes_a_daemon_by_a_header() -> None:
    principals = Principals({digest_of("ann's"): Principal("ann", ("*",), frozenset({"read"}))})
    told = base64.b64encode(msgspec.json.encode(Acting(OWNER))).decode()
    for daemons in ((), (digest_of("theirs"),)):
        principals.daemons = frozenset(daemons)
        for secret in ("", "mine", "theirs "):
            headers = {"X-Memory-Daemon": secret, "X-Memory-Acting": told}
            assert let_in(make_mocked_request("GET", "/", headers=headers), principals) is None
    for wrong in ("", "ä", "e30=", told[1:]):
        assert principals.acting("theirs", wrong) is None
    assert principals.acting("theirs", told) == OWNER


def test_the_tokens_are_known_before_anybody_else_uses_a_database_that_was_away(shared: Shared) -> None:
    shared.tokens().change(lambda kept: (token("a"),))
    with closing(Database(shared.url)) as database:
        seen: list[list[str]] = []
        tokens = SharedTokens(SharedBook(database, "tokens"))
        database.at_first = lambda connection: seen.append([one.name for one in tokens.read_on(connection)])
        with database.connection():
            assert seen == [["a"]]
        database.connect()
        assert len(seen) == 1


# -- between a folder and a cluster -----------------------------------------------------------------------------------


def test_tokens_and_grants_are_copied_both_ways_and_a_second_time_changes_nothing(
    shared: Shared, tmp_path: Path
) -> None:
    folder = TokenFile(DiskFiles(), tmp_path)
    folder.keep([token("a"), token("b")])
    other = msgspec.structs.replace(token("c"), name="b")
    shared.tokens().change(lambda kept: (other,))
    grant = Grant(
        id="g",
        client_name="An editor",
        client_sha256="",
        principal_sha256=token("a").token_sha256,
        principal="a",
        rights=("read",),
        topics=(),
        created_at=1,
        access_sha256="x",
        access_until=2,
        refresh_sha256="y",
        refresh_until=3,
    )
    given = msgspec.json.encode(LedgerFile(key="ab" * 32, grants=(grant,)))
    (tmp_path / "memd.grants").write_bytes(given)
    with closing(Database(shared.url)) as database:
        copied = copy_rights(tmp_path, database, is_into_cluster=True)
        assert (copied.tokens, copied.left, copied.grants) == (("a",), ("b",), 1)
        again = copy_rights(tmp_path, database, is_into_cluster=True)
        assert (again.tokens, again.left, again.grants) == ((), ("b",), 0)
        assert [one.name for one in shared.tokens().read()] == ["a", "b"]
        back = tmp_path / "back"
        back.mkdir()
        assert copy_rights(back, database, is_into_cluster=False).tokens == ("a", "b")
        assert (back / "memd.grants").read_bytes() == given
