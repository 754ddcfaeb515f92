"""The routes of OAuth: whom they answer, what with, and what an access token opens and what not."""

from __future__ import annotations

import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import Request, urlopen

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from conftest import MakeDaemon
from crash_files import CrashFiles
from daemon_process import DaemonProcess, ask, token_setting, tool_call
from recording_upstream import RecordingUpstream
from test_oauth import CHALLENGE, VERIFIER
from typescript_client import TypeScriptClient
from yarl import URL

from memd.access import WrongTokens
from memd.admin.oauth.endpoint import OAuthEndpoint
from memd.admin.oauth.ledger import GrantFile, Ledger
from memd.errors import StoreError
from memd.principals import Principal, Principals, digest_of

OWNER, ANN = "the-owner-has-this-token", "ann-has-a-token-of-her-own"
CALLBACK = "http://localhost:5050/callback"
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
MCP = {"Accept": "application/json, text/event-stream"}


def asked_of(client_id: str, **changed: str) -> str:
    asked = {
        "response_type": "code",
        "client_id": client_id,
        "redirect_uri": CALLBACK,
        "code_challenge": CHALLENGE,
        "code_challenge_method": "S256",
        "state": "a+b&c",
        **changed,
    }
    return urlencode(asked)


def led_to(page: str) -> str:
    """The address that a page leads back to."""
    [url] = re.findall(r'http-equiv="refresh" content="0;url=([^"]*)"', page)
    return html.unescape(url)


class Routes:
    """The routes over a disk in memory, with a stand-in for the audit."""

    client: TestClient[Any, Any]

    def __init__(self) -> None:
        self.files = CrashFiles()
        self.files.make_directory(Path("/data"))
        self.principals = Principals({digest_of(ANN): Principal("ann", ("team-*",), frozenset({"read", "write"}))})
        self.refused_tokens: list[Any] = []
        self.recorded: list[tuple[str, str]] = []
        self.audit_is_full = False

    async def record(self, request: web.BaseRequest, name: str, detail: str) -> None:
        if self.audit_is_full:
            raise StoreError("the disk is full")
        self.recorded.append((name, detail))

    async def client_id(self) -> str:
        answer = await self.client.post(
            "/oauth/register", json={"redirect_uris": [CALLBACK], "client_name": "An editor"}
        )
        assert answer.status == 201, await answer.text()
        return str((await answer.json())["client_id"])

    async def fill(self, query: str, **fields: Any) -> ClientResponse:
        form = {"request": query, "right": ["read", "write"], "topics": "", "token": ANN, "answer": "allow", **fields}
        body = urlencode(form, doseq=True)
        return await self.client.post("/oauth/authorize", data=body, headers={"Content-Type": FORM})

    async def exchange(self, code: str, client_id: str) -> ClientResponse:
        form = {"grant_type": "authorization_code", "code": code, "client_id": client_id, "code_verifier": VERIFIER}
        return await self.client.post("/oauth/token", data=form)


FORM = "application/x-www-form-urlencoded"


@pytest.fixture
async def routes() -> AsyncIterator[Routes]:
    routes = Routes()
    ledger = Ledger(GrantFile(routes.files, Path("/data/memd.grants")), routes.principals.known)
    wrong_tokens = WrongTokens(routes.principals, lambda *call: routes.refused_tokens.append(call))
    endpoint = OAuthEndpoint(ledger, wrong_tokens, idle_seconds=60, recorded=routes.record)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    async with TestClient(TestServer(application)) as routes.client:
        yield routes


async def test_a_program_is_let_in_once_the_audit_has_it_and_its_end_is_recorded_too(routes: Routes) -> None:
    client_id = await routes.client_id()
    routes.audit_is_full = True
    refused = await routes.fill(asked_of(client_id))
    assert refused.status == 503 and "code=" not in await refused.text()
    routes.audit_is_full = False
    back = urlsplit(led_to(await (await routes.fill(asked_of(client_id), topics="team-a")).text()))
    tokens = await (await routes.exchange(parse_qs(back.query)["code"][0], client_id)).json()
    form = urlencode({"token": tokens["access_token"]})
    await routes.client.post("/oauth/revoke", data=form, headers={"Content-Type": FORM})
    assert routes.recorded == [
        ("ann", "a program is let in to read, write in team-a"),
        ("ann", "a program is let in no more"),
    ]


async def error_of(answer: ClientResponse) -> tuple[int, str]:
    return answer.status, (await answer.json())["error"]


async def test_a_person_narrows_what_a_program_gets(routes: Routes) -> None:
    client_id = await routes.client_id()
    query = asked_of(client_id, scope="read write correct")
    page = await routes.client.get(URL(f"/oauth/authorize?{query}", encoded=True))
    text = await page.text()
    assert (
        page.status == 200 and "An editor" in text and html.escape(CALLBACK) in text and "no-store" in str(page.headers)
    )
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"] and "<script" not in text
    [kept] = re.findall(r'name="request" value="([^"]*)"', text)
    assert html.unescape(kept) == query, "it comes back with the answer, byte for byte"
    back = urlsplit(led_to(await (await routes.fill(query, topics="team-a", right=["read", "correct"])).text()))
    said = parse_qs(back.query)
    assert said["state"] == ["a+b&c"] and said["iss"] == [str(routes.client.make_url("")).rstrip("/")]
    tokens = await (await routes.exchange(said["code"][0], client_id)).json()
    assert tokens["scope"] == "read", "the token of the person has no right to correct"


@pytest.mark.parametrize(
    ("fields", "status", "problem"),
    [
        ({"token": "wrong"}, 403, "no token of this memd"),
        ({"token": ""}, 403, "no token of this memd"),
        ({"right": []}, 422, "at least one"),
        ({"right": ["admin"]}, 422, "at least one"),
        ({"right": ["correct"]}, 422, "none of these rights; it has read, write"),
        ({"topics": "team-a secret"}, 422, "no topic like secret; it has team-*"),
        ({"topics": "../x"}, 422, "no name of a topic"),
        ({"topics": "team-a " * 65}, 422, "more than 64 names of topics"),
    ],
)
async def test_an_answer_that_cannot_be_taken_is_asked_for_again(
    routes: Routes, fields: dict[str, Any], status: int, problem: str
) -> None:
    answer = await routes.fill(asked_of(await routes.client_id()), **fields)
    page = html.unescape(await answer.text())
    assert answer.status == status and problem in page and "refresh" not in page and ANN not in page
    assert len(routes.refused_tokens) == (status == 403), "wrong tokens are noted as everywhere"


async def test_who_is_not_known_is_led_nowhere_and_a_person_is_told_why(routes: Routes) -> None:
    client_id = await routes.client_id()
    for query, told in (
        (asked_of("x.y"), "not registered here"),
        (asked_of(client_id, redirect_uri="https://evil.example.com/"), "redirect_uri is none of those"),
    ):
        for answer in (await routes.client.get(f"/oauth/authorize?{query}"), await routes.fill(query)):
            page = await answer.text()
            assert answer.status == 400 and told in page and "evil" not in page and "refresh" not in page
    wrong = await routes.client.get(f"/oauth/authorize?{asked_of(client_id, response_type='token')}")
    page = await wrong.text()
    assert wrong.status == 400 and "refresh" not in page and f'<a href="{CALLBACK}?error=unsupported' in page


async def test_no_document_is_fetched_that_a_stranger_names(routes: Routes) -> None:
    fetched: list[str] = []

    async def document(request: web.Request) -> web.Response:
        fetched.append(request.path)
        return web.json_response({"client_id": named, "client_name": "An editor", "redirect_uris": [CALLBACK]})

    elsewhere = web.Application()
    elsewhere.router.add_get("/client.json", document)
    async with TestServer(elsewhere) as server:
        named = str(server.make_url("/client.json"))
        answer = await routes.client.get(f"/oauth/authorize?{asked_of(named)}")
        assert answer.status == 400 and "not registered here" in await answer.text()
        assert await error_of(await routes.exchange("a code", named)) == (401, "invalid_client")
    assert fetched == []
    server_metadata = await (await routes.client.get("/.well-known/oauth-authorization-server")).json()
    assert (
        server_metadata["code_challenge_methods_supported"] == ["S256"] and "registration_endpoint" in server_metadata
    )
    assert "client_id_metadata_document_supported" not in server_metadata


async def test_errors_have_the_standards_names_and_say_what_to_do(routes: Routes) -> None:
    post, client_id = routes.client.post, await routes.client_id()
    assert await error_of(await post("/oauth/register", data=b"{")) == (400, "invalid_client_metadata")
    assert await error_of(await post("/oauth/register", data=b"x" * 40_000)) == (413, "invalid_request")
    assert await error_of(await post("/oauth/token", data={"client_id": "x.y"})) == (401, "invalid_client")
    assert await error_of(await routes.exchange("no code", client_id)) == (400, "invalid_grant")
    assert await error_of(await post("/oauth/token", data=b"\xff\xfe")) == (401, "invalid_client")
    assert await error_of(await post("/oauth/revoke", data={})) == (400, "invalid_request")
    assert (await post("/oauth/revoke", data={"token": "none of ours"})).status == 200
    assert await error_of(await routes.client.get("/oauth/token")) == (405, "invalid_request")
    routes.files.bytes_left = 0
    said = parse_qs(urlsplit(led_to(await (await routes.fill(asked_of(client_id))).text())).query)
    full = await routes.exchange(said["code"][0], client_id)
    assert await error_of(full) == (503, "server_error") and "disk" in (await full.json())["error_description"]


async def test_pages_of_others_may_lead_to_the_question_and_no_further(routes: Routes) -> None:
    client_id = await routes.client_id()
    url, foreign = f"/oauth/authorize?{asked_of(client_id)}", {"Sec-Fetch-Site": "cross-site"}
    opened = foreign | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await routes.client.get(url, headers=opened)).status == 200
    assert (await routes.client.get(url, headers=opened | {"Sec-Fetch-Dest": "iframe"})).status == 403
    assert (await routes.client.get(url, headers=foreign | {"Sec-Fetch-Mode": "no-cors"})).status == 403
    for path in ("/oauth/authorize", "/oauth/token", "/oauth/register", "/oauth/revoke"):
        assert (await routes.client.post(path, data=b"", headers=opened)).status == 403


@pytest.mark.parametrize(
    ("headers", "issuer"),
    [
        ({"Host": "127.0.0.1:8766"}, "http://127.0.0.1:8766"),
        ({"Host": "LOCALHOST:8766"}, "http://localhost:8766"),
        ({"Host": "[::1]:8766"}, "http://[::1]:8766"),
        ({"Host": "memory.example.com", "X-Forwarded-Proto": "https"}, "https://memory.example.com"),
        ({"Host": "memory.example.com:8443", "X-Forwarded-Proto": "https, http"}, "https://memory.example.com:8443"),
        ({"Host": "memory.example.com"}, None),
        ({"Host": "192.168.1.5:8766"}, None),
        ({"Host": "memory.example.com", "X-Forwarded-Proto": "http"}, None),
        ({"Host": "memory.example.com", "X-Forwarded-Proto": "gopher"}, None),
        ({"Host": 'x"><script>', "X-Forwarded-Proto": "https"}, None),
        ({"Host": "user@evil.example.com", "X-Forwarded-Proto": "https"}, None),
    ],
)
async def test_the_issuer_is_the_address_that_the_client_calls_if_nobody_can_read_along(
    routes: Routes, headers: dict[str, str], issuer: str | None
) -> None:
    answer = await routes.client.get("/.well-known/oauth-authorization-server", headers=headers)
    said = await answer.json()
    assert said.get("issuer") == issuer
    if issuer is None:
        assert answer.status == 400 and "needs TLS" in said["error_description"]


# -- with a daemon ----------------------------------------------------------------------------------------------------


def posted(url: str, form: dict[str, Any]) -> str:
    with urlopen(Request(url, urlencode(form, doseq=True).encode())) as answer:
        return str(answer.read().decode())


def tokens_of(daemon: DaemonProcess, **fields: Any) -> dict[str, Any]:
    """Tokens of a new grant, as a client gets them."""
    url = f"{daemon.own_url}/oauth"
    client_id = ask(f"{url}/register", {"redirect_uris": [CALLBACK]}).json["client_id"]
    form = {"request": asked_of(client_id), "right": ["read"], "token": OWNER, "answer": "allow", **fields}
    [code] = parse_qs(urlsplit(led_to(posted(f"{url}/authorize", form))).query)["code"]
    form = {"grant_type": "authorization_code", "code": code, "client_id": client_id, "code_verifier": VERIFIER}
    return {**json.loads(posted(f"{url}/token", form)), "client_id": client_id}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **MCP}


def test_an_access_token_opens_mcp_and_nothing_else(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": OWNER}}).start()
    mcp, shown = f"{daemon.own_url}/mcp", bearer(tokens_of(daemon)["access_token"])
    assert ask(mcp, LIST, headers=shown).status == 200
    for url in (f"{daemon.own_url}/memd/topics", f"{daemon.base_url}/v1/models", f"{daemon.base_url}/memd/health"):
        assert ask(url, headers=shown).status == 401, url
    refused = ask(mcp, LIST, headers=bearer("none of ours"))
    resource = f'resource_metadata="{daemon.own_url}/.well-known/oauth-protected-resource/mcp"'
    assert refused.status == 401 and refused.headers["WWW-Authenticate"].startswith("Bearer error=")
    assert resource in refused.headers["WWW-Authenticate"]
    assert ask(f"{daemon.base_url}/.well-known/oauth-authorization-server").status == 401, "that is the model's address"
    [grant] = json.loads(daemon.run("token", "list", "--json").stdout)
    assert "sha256" not in str(grant)
    end, owner = f"{daemon.own_url}/memd/grants/end", bearer(OWNER)
    assert ask(end, {"id": grant["id"]}, headers=shown).status == 401
    assert ask(end, {"id": grant["id"]}, headers=owner).status == 200
    assert ask(end, {"id": grant["id"]}, headers=owner).status == 404
    assert ask(mcp, LIST, headers=shown).status == 401


def test_a_tool_beyond_the_grant_says_once_where_to_ask_and_then_why_it_fails(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    ann = token_setting("ann", ANN, "read", "write")
    daemon = make_daemon(upstream.url, {"auth": {"token": OWNER, "tokens": [ann]}}).start()
    mcp, shown = f"{daemon.own_url}/mcp", bearer(tokens_of(daemon, token=ANN)["access_token"])
    note = tool_call("remember", content="The keeper is Ada.")
    refused = ask(mcp, note, headers=shown)
    assert refused.status == 403
    assert refused.headers["WWW-Authenticate"] == (
        f'Bearer error="insufficient_scope", resource_metadata="{daemon.own_url}/.well-known/oauth-protected-resource'
        '/mcp", scope="read write"'
    )
    assert "was allowed read, and this tool needs write" in refused.json["error"]["message"]
    again = ask(mcp, note, headers=shown).json["result"]
    assert again["isError"] and "has no right to write" in again["content"][0]["text"]
    correction = tool_call("correct_memory", ids="a3f9", action="Helpful")
    assert ask(mcp, correction, headers=shown).status == 200, "ann's own token has it not either"
    assert ask(mcp, tool_call("list_topics"), headers=shown).status == 200
    assert ask(mcp, note, headers=bearer(ANN)).json["result"]["isError"] is False, "it is no grant"
    told = daemon.run("audit", "--act", "refused", "--json", "--config", str(daemon.config)).stdout.splitlines()[1:]
    assert next(json.loads(one).get("what") for one in told if '"ann"' in one) == "POST /mcp"


@pytest.mark.parametrize("renews", [True, False])
def test_the_official_client_asks_for_more_or_tells_its_model_why_not(
    typescript: TypeScriptClient, make_daemon: MakeDaemon, upstream: RecordingUpstream, renews: bool
) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": OWNER}}).start()
    given = tokens_of(daemon)
    tokens = {name: given[name] for name in ("access_token", "token_type", *(["refresh_token"] if renews else []))}
    asked = {"tokens": tokens, "client_id": given["client_id"]}
    told = typescript.run("mcp_step_up.ts", f"{daemon.own_url}/mcp", asked)
    if renews:  # it renews its token before it asks anybody, and comes back with the same rights
        assert "has no right to write" in told["told"] and told["opened"] == ""
    else:
        assert told["told"] == "UnauthorizedError"
        assert parse_qs(urlsplit(told["opened"]).query)["scope"] == ["read write"]


def test_grants_outlive_a_kill_and_end_with_the_token_of_who_gave_them(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": OWNER}}).start()
    mcp, tokens = f"{daemon.own_url}/mcp", tokens_of(daemon)
    assert (daemon.data_dir / "memd.grants").stat().st_mode & 0o777 == 0o600
    daemon.kill()
    daemon.start()
    mcp = f"{daemon.own_url}/mcp"
    assert ask(mcp, LIST, headers=bearer(tokens["access_token"])).status == 200
    daemon.terminate()
    daemon.configure({"auth": {"token": "the-owner-has-another-token-now"}})
    daemon.start()
    assert ask(f"{daemon.own_url}/mcp", LIST, headers=bearer(tokens["access_token"])).status == 401


def test_without_a_token_there_is_no_oauth_and_mcp_is_as_it_was(served: DaemonProcess) -> None:
    for path in ("/oauth/register", "/oauth/authorize", "/.well-known/oauth-protected-resource/mcp"):
        assert ask(f"{served.own_url}{path}").status == 404
    assert ask(f"{served.own_url}/mcp", LIST, headers=MCP).status == 200
    assert not (served.data_dir / "memd.grants").exists()


def test_grants_are_listed_beside_the_tokens_and_revoked_like_them(served: DaemonProcess) -> None:
    ann = served.run("token", "add", "ann", "--topics", "team-*", "--rights", "read").stdout.strip()
    whole, narrow = tokens_of(served, token=ann), tokens_of(served, token=ann, topics="team-a")
    mcp = f"{served.own_url}/mcp"
    first, *grants = served.run("token", "list").stdout.splitlines()
    assert first.startswith("ann: read in team-*")
    ids = [line.partition(":")[0] for line in grants]
    assert [line.partition(": ")[2].partition(" (OAuth")[0] for line in grants] == [
        "A program without a name, as ann: read in the topics of ann",
        "A program without a name, as ann: read in team-a",
    ]
    assert served.run("token", "revoke", ids[0]).stdout == f"revoked {ids[0]}\n"
    assert [ask(mcp, LIST, headers=bearer(one["access_token"])).status for one in (whole, narrow)] == [401, 200]
    assert served.run("token", "revoke", ids[0]).returncode == 1
    assert served.run("token", "revoke", "ann").returncode == 0
    assert ask(mcp, LIST, headers=bearer(narrow["access_token"])).status == 401
    assert served.run("token", "list", "--json").stdout == "[]\n"


def test_a_grant_is_revoked_without_a_daemon_too(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": OWNER}}).start()
    shown = bearer(tokens_of(daemon)["access_token"])
    daemon.terminate()
    [grant] = json.loads(daemon.run("token", "list", "--json").stdout)
    assert daemon.run("token", "revoke", grant["id"]).returncode == 0
    daemon.start()
    assert ask(f"{daemon.own_url}/mcp", LIST, headers=shown).status == 401
