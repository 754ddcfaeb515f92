"""OAuth: each refusal, the file that keeps grants, whom the routes answer what, and what an access token opens."""

import base64
import hashlib
import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from conftest import Serving
from crash_files import LOSSES, CrashFiles, PowerCutError
from daemon_process import DaemonProcess, ask, token_setting, tool_call
from typescript_client import TypeScriptClient
from yarl import URL

from memd.access import WrongTokens
from memd.admin.oauth.endpoint import OAuthEndpoint
from memd.admin.oauth.ledger import (
    ACCESS_SECONDS,
    CODE_SECONDS,
    GRANTS_MAX,
    REFRESH_SECONDS,
    Allowed,
    GrantFile,
    Ledger,
    Tokens,
)
from memd.admin.oauth.protocol import (
    OAuthClient,
    Permission,
    TokenRequest,
    client_id_of,
    permission_asked,
    token_asked,
    token_to_revoke,
)
from memd.errors import DiskFull, OAuthRefused, StoreError
from memd.principals import Principal, Principals, digest_of
from memd.store.disk import replace_file

ISSUER = "https://memory.example.com"
KEY = bytes(32)
CALLBACK = "http://localhost:33418/callback"
VERIFIER = "a-verifier-of-at-least-43-characters-0123456789"
CHALLENGE = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).decode().rstrip("=")
CLIENT = OAuthClient("An editor", (CALLBACK,))
CLIENT_ID = client_id_of(CLIENT, KEY)
ANN_DIGEST, BOB_DIGEST = "11" * 32, "22" * 32
ALLOWED = Allowed(principal="ann", principal_sha256=ANN_DIGEST, rights=("read",), topics=("team-*",))
FILE = Path("/data/memd.grants")


def query(**changed: str | None) -> str:
    asked = {
        "response_type": "code",
        "client_id": CLIENT_ID,
        "redirect_uri": CALLBACK,
        "state": "a+b&c t/ä",
        "code_challenge": CHALLENGE,
        "code_challenge_method": "S256",
        "resource": f"{ISSUER}/mcp",
        "scope": "read write offline_access",
        **changed,
    }
    return urlencode({name: value for name, value in asked.items() if value is not None})


def registration(*uris: str, **members: Any) -> bytes:
    return json.dumps({"redirect_uris": uris, "client_name": "An editor", **members}).encode()


OWNER, ANN = "the-owner-has-this-token", "ann-has-a-token-of-her-own"
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
MCP = {"Accept": "application/json, text/event-stream"}


def asked_of(client_id: str | None, **changed: str | None) -> str:
    return query(**{"client_id": client_id, "resource": None, "scope": None, **changed})


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

    async def client_id(self, name: str = "An editor") -> str:
        answer = await self.client.post("/oauth/register", json={"redirect_uris": [CALLBACK], "client_name": name})
        assert answer.status == 201, await answer.text()
        return str((await answer.json())["client_id"])

    async def asked(self, query: str) -> ClientResponse:
        return await self.client.get(URL(f"/oauth/authorize?{query}", encoded=True))

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


async def error_of(answer: ClientResponse) -> tuple[int, str]:
    return answer.status, (await answer.json())["error"]


# -- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uris",
    [
        ("http://localhost:51034/callback",),  # Claude Code
        (
            "https://insiders.vscode.dev/redirect",
            "https://vscode.dev/redirect",
            "http://127.0.0.1/",
            "http://127.0.0.1:33418/",
        ),
        (
            "cursor://anysphere.cursor-mcp/oauth/callback",
            "https://www.cursor.com/agents/mcp/oauth/callback",
            "http://localhost:8787/callback",
        ),
        ("https://claude.ai/api/mcp/auth_callback",),
        ("com.example.app:/oauth2redirect", "http://[::1]:9/x?y=1"),
    ],
)
async def test_clients_that_there_are_can_register(routes: Routes, uris: tuple[str, ...]) -> None:
    more = {"token_endpoint_auth_method": "none", "application_type": "native", "logo_uri": ""}
    answer = await routes.client.post("/oauth/register", data=registration(*uris, **more))
    client_id = (await answer.json())["client_id"]
    for uri in uris:
        assert (await routes.asked(asked_of(client_id, redirect_uri=uri))).status == 200


RUN_OR_READ_ALONG = [
    "javascript:alert(1)",
    "ms-msdt:/id",
    "Search-MS:query=x",
    "JavaScript://x/%0aalert(1)",
    "data:text/html,x",
    "vbscript:x",
    "file:///etc/passwd",
    "http://example.com/callback",
    "http://127.0.0.1.example.com/",
    "https://good.com@evil.com/",
    "https://evil.com\\@good.com/",
    "https:///callback",
    "https://example.com/#fragment",
    "https://example.com/ space",
    "https://exämple.com/",
    "https://example.com/\r\nSet-Cookie:x",
    "http://[::1",
    "https://example.com:99999/",
    "https://example.com/" + "x" * 600,
    "callback",
    "//example.com/",
    "",
]
"""Where a browser would run an answer, or others could read it."""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        *((registration("https://example.com/callback", uri), "invalid_redirect_uri") for uri in RUN_OR_READ_ALONG),
        (b"", "invalid_client_metadata"),
        (b"[]", "invalid_client_metadata"),
        (b"{}", "invalid_client_metadata"),
        (b'{"redirect_uris": "https://example.com"}', "invalid_client_metadata"),
        (b'\xff{"redirect_uris": []}', "invalid_client_metadata"),
        (registration(), "invalid_redirect_uri"),
        (registration(*["https://example.com/"] * 11), "invalid_redirect_uri"),
        (registration("https://example.com/", grant_types=["client_credentials"]), "invalid_client_metadata"),
        (registration("https://example.com/", response_types=["token"]), "invalid_client_metadata"),
    ],
)
async def test_a_registration_that_is_none_or_would_send_an_answer_anywhere_is_refused(
    routes: Routes, body: bytes, code: str
) -> None:
    assert await error_of(await routes.client.post("/oauth/register", data=body)) == (400, code)


async def test_what_a_stranger_calls_itself_and_sends_stays_text_on_the_pages(routes: Routes) -> None:
    client_id = await routes.client_id("\u202eroodkcaB\u2066\x00\n<b>Claude</b>" + "x" * 200)
    query = asked_of(client_id, state='"><script>')
    page = await (await routes.asked(query)).text()
    assert "&lt;b&gt;Claude" in page and "<b>Claude</b>" not in page and "\u202e" not in page and "x" * 60 not in page
    filled = [await (await routes.fill(query, topics=topics)).text() for topics in ("team-a", '"><script>')]
    assert not any("<script" in one for one in (page, *filled))


def test_the_port_of_a_loopback_address_is_free_and_nothing_else_of_any() -> None:
    client = OAuthClient("x", ("http://127.0.0.1:33418/a", "http://localhost/callback", "https://x.com:1/a"))
    assert client.takes("http://127.0.0.1:50000/a") and client.takes("http://localhost:1/callback")
    for uri in (
        *("http://127.0.0.1:33418/b", "http://127.0.0.1:33418/a/", "http://127.0.0.1:33418/a?x=1"),
        *("http://localhost:33418/a", "https://127.0.0.1:33418/a", "http://127.0.0.1:5@evil.com/a"),
        *("https://x.com:2/a", "https://x.com/a", "http://localhost.evil.com/callback", ""),
    ):
        assert not client.takes(uri), uri


# -- requests for permission ------------------------------------------------------------------------------------------


def permission(**changed: str | None) -> Permission:
    return permission_asked(query(**changed), KEY, ISSUER)


def test_a_request_for_permission_is_read_and_answered() -> None:
    asked = permission()
    assert (asked.client, asked.redirect_uri, asked.scopes) == (CLIENT, CALLBACK, ("read", "write"))
    answer = urlsplit(asked.answer(ISSUER, code="c"))
    assert parse_qs(answer.query) == {"code": ["c"], "state": ["a+b&c t/ä"], "iss": [ISSUER]}
    assert permission(scope=None).scopes == permission(scope="openid profile").scopes == ("read", "write", "correct")
    assert permission(resource=None).client == CLIENT
    assert permission(resource="HTTPS://Memory.example.com/mcp/").client == CLIENT
    assert permission(redirect_uri=None).redirect_uri == CALLBACK
    with_query = OAuthClient("x", ("https://x.com/?a=1",))
    named = {"client_id": client_id_of(with_query, KEY), "redirect_uri": "https://x.com/?a=1", "state": None}
    assert permission(**named).answer(ISSUER, error="e").startswith("https://x.com/?a=1&error=e&iss=https")


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"response_type": "token"}, "unsupported_response_type"),
        ({"response_type": None}, "unsupported_response_type"),
        ({"code_challenge": None}, "invalid_request"),
        ({"code_challenge": "short"}, "invalid_request"),
        ({"code_challenge_method": "plain"}, "invalid_request"),
        ({"code_challenge_method": None}, "invalid_request"),
        ({"resource": "https://other.example.com/mcp"}, "invalid_target"),
        ({"resource": "{issuer}"}, "invalid_target"),
        ({"resource": "{issuer}/mcp?x=1"}, "invalid_target"),
        ({"resource": "http://[x"}, "invalid_target"),
    ],
)
async def test_a_known_client_is_told_why_its_request_is_refused(
    routes: Routes, changed: dict[str, str | None], code: str
) -> None:
    issuer = str(routes.client.make_url("")).rstrip("/")
    given = {name: value and value.replace("{issuer}", issuer) for name, value in changed.items()}
    answer = await routes.asked(asked_of(await routes.client_id(), **given))
    page = await answer.text()
    [back] = re.findall(rf'<a href="({re.escape(CALLBACK)}\?[^"]*)"', page)
    told = parse_qs(urlsplit(html.unescape(back)).query)
    assert answer.status == 400 and "refresh" not in page and told["error_description"]
    assert (told["error"], told["iss"], told["state"]) == ([code], [issuer], ["a+b&c t/ä"])


NOT_REGISTERED, NOT_ITS_OWN = "not registered here", "redirect_uri is none of those"
UNKNOWN = (None, "", ".", "x", "x.y", "ä.ö", CLIENT_ID, CLIENT_ID[:-1], "A" * 5_000, f"W10.{'A' * 22}")


@pytest.mark.parametrize(
    ("changed", "more", "told"),
    [
        *(({"client_id": one}, "", NOT_REGISTERED) for one in UNKNOWN),
        ({"redirect_uri": "https://evil.example.com/"}, "", NOT_ITS_OWN),
        ({"redirect_uri": f"{CALLBACK}/more"}, "", NOT_ITS_OWN),
        ({}, "&redirect_uri=https://evil.example.com/", ""),
        ({"state": "x" * 9_000}, "", ""),
        ({}, "".join(f"&a{number}=1" for number in range(100)), ""),
        ({}, "&a=%ff", ""),
    ],
)
async def test_who_is_not_known_is_led_nowhere_and_a_person_is_told_why(
    routes: Routes, changed: dict[str, str | None], more: str, told: str
) -> None:
    query = asked_of(**{"client_id": await routes.client_id(), **changed}) + more
    asked = [await routes.asked(query)] if len(query) < 8_000 else []  # a longer address is refused before
    for answer in (*asked, await routes.fill(query)):
        page = await answer.text()
        assert answer.status == 400 and told in page and "evil" not in page and "refresh" not in page


@pytest.mark.parametrize(
    ("form", "refusal"),
    [
        ({"grant_type": "client_credentials"}, (400, "unsupported_grant_type")),
        ({"grant_type": "password"}, (400, "unsupported_grant_type")),
        ({}, (400, "unsupported_grant_type")),
        ({"grant_type": "authorization_code", "code": "x"}, (400, "invalid_request")),
        ({"grant_type": "authorization_code", "code": "x", "code_verifier": "short"}, (400, "invalid_request")),
        ({"grant_type": "refresh_token", "resource": "https://other.example.com/mcp"}, (400, "invalid_target")),
        ({"grant_type": "refresh_token", "client_id": "x"}, (401, "invalid_client")),
        ({"grant_type": "refresh_token", "client_id": ""}, (401, "invalid_client")),
    ],
)
async def test_a_request_for_tokens_that_is_none_is_refused(
    routes: Routes, form: dict[str, str], refusal: tuple[int, str]
) -> None:
    given = {"client_id": await routes.client_id(), **form}
    assert await error_of(await routes.client.post("/oauth/token", data=given)) == refusal


# -- codes and tokens -------------------------------------------------------------------------------------------------


class Stage:
    """A ledger whose disk, clock and principals a test holds in its hands."""

    def __init__(self, files: CrashFiles | None = None) -> None:
        self.files = files or CrashFiles()
        self.files.make_directory(FILE.parent)
        self.files.sync_directory(FILE.parent.parent)
        self.now = 1_000_000.0
        self.principals = {ANN_DIGEST: Principal("ann", ("team-*",), frozenset({"read"}))}
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(GrantFile(self.files, FILE), self.principals.get, lambda: self.now)

    async def tokens(self) -> Tokens:
        """Tokens of a new grant."""
        return await self.exchange(await self.ledger.allow(permission(), ALLOWED))

    async def exchange(self, code: str, /, **changed: str) -> Tokens:
        form = {"grant_type": "authorization_code", "code": code, "code_verifier": VERIFIER, "redirect_uri": CALLBACK}
        return await self.ledger.tokens_for(read({**form, **changed}))

    async def refresh(self, token: str, **changed: str) -> Tokens:
        return await self.ledger.tokens_for(read({"grant_type": "refresh_token", "refresh_token": token, **changed}))

    async def refusal_of(self, asking: Any) -> str:
        with pytest.raises(OAuthRefused) as refused:
            await asking
        return f"{refused.value.code}: {refused.value}"


def read(form: dict[str, str]) -> TokenRequest:
    return token_asked(urlencode({"client_id": CLIENT_ID, **form}), KEY, ISSUER)


@pytest.fixture
def stage() -> Any:
    return Stage()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"code_verifier": VERIFIER + "x"}, "invalid_grant: code_verifier does not belong"),
        ({"redirect_uri": f"{CALLBACK}/other"}, "invalid_grant: redirect_uri is another one"),
        ({"redirect_uri": "http://localhost:1/callback"}, "invalid_grant: redirect_uri is another one"),
        ({"client_id": client_id_of(OAuthClient("y", (CALLBACK,)), KEY)}, "invalid_grant: the code is not known"),
        ({"code": "another"}, "invalid_grant: the code is not known"),
    ],
)
async def test_a_code_serves_only_whom_it_was_given_to(stage: Stage, changed: dict[str, str], told: str) -> None:
    code = await stage.ledger.allow(permission(), ALLOWED)
    assert (await stage.refusal_of(stage.exchange(code, **changed))).startswith(told)
    assert stage.ledger.live() == ()
    if "code_verifier" in changed:
        assert "served before" in await stage.refusal_of(stage.exchange(code)), "it is shown once"


async def test_a_code_and_a_refresh_token_serve_once_and_their_client(stage: Stage) -> None:
    code = await stage.ledger.allow(permission(), ALLOWED)
    tokens = await stage.exchange(code)
    assert "served before" in await stage.refusal_of(stage.exchange(code))
    assert stage.ledger.acting(tokens.access_token) is None
    assert (await stage.refusal_of(stage.refresh(tokens.refresh_token))).startswith("invalid_grant")
    stage.open()
    assert stage.ledger.live() == ()

    first = await stage.tokens()
    second = await stage.refresh(first.refresh_token)
    assert stage.ledger.acting(first.access_token) is None and stage.ledger.acting(second.access_token)
    other = await stage.tokens()
    assert "served before" in await stage.refusal_of(stage.refresh(first.refresh_token))
    assert stage.ledger.acting(second.access_token) is None
    assert "not known" in await stage.refusal_of(stage.refresh(second.refresh_token))
    assert stage.ledger.acting(other.access_token), "another grant is not touched"
    stage.open()
    assert len(stage.ledger.live()) == 1

    stranger = client_id_of(OAuthClient("y", (CALLBACK,)), KEY)
    assert "not known" in await stage.refusal_of(stage.refresh(other.refresh_token, client_id=stranger))
    assert await stage.refresh(other.refresh_token)


async def test_codes_and_tokens_have_their_time(stage: Stage) -> None:
    code = await stage.ledger.allow(permission(), ALLOWED)
    stage.now += CODE_SECONDS
    assert "older than 60 s" in await stage.refusal_of(stage.exchange(code))
    tokens = await stage.tokens()
    stage.now += ACCESS_SECONDS - 1
    assert stage.ledger.acting(tokens.access_token)
    stage.now += 1
    assert stage.ledger.acting(tokens.access_token) is None
    stage.now += REFRESH_SECONDS - ACCESS_SECONDS - 1
    tokens = await stage.refresh(tokens.refresh_token)
    stage.now += REFRESH_SECONDS - 1
    assert len(stage.ledger.live()) == 1
    stage.now += 1
    assert "not used for 30 days" in await stage.refusal_of(stage.refresh(tokens.refresh_token))
    assert stage.ledger.live() == ()


async def test_either_token_revokes_the_grant_which_ends_with_the_token_that_allowed_it(stage: Stage) -> None:
    for name in ("access_token", "refresh_token"):
        tokens = await stage.tokens()
        await stage.ledger.revoke("no token")
        assert stage.ledger.acting(tokens.access_token)
        await stage.ledger.revoke(token_to_revoke(urlencode({"token": getattr(tokens, name), "token_type_hint": "x"})))
        assert stage.ledger.acting(tokens.access_token) is None and stage.ledger.live() == ()
    with pytest.raises(OAuthRefused):
        token_to_revoke("token=")

    tokens = await stage.tokens()
    ann = stage.principals.pop(ANN_DIGEST)
    assert stage.ledger.acting(tokens.access_token) is None and stage.ledger.live() == ()
    assert (await stage.refusal_of(stage.refresh(tokens.refresh_token))).startswith("invalid_grant")
    stage.principals[ANN_DIGEST] = ann  # as somebody's who gave up and took back: what ended stays ended
    assert stage.ledger.live() == ()


async def test_who_lets_in_hundreds_of_programs_throws_out_his_own_alone_and_it_is_said_why(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.principals[BOB_DIGEST] = Principal("bob", ("team-*",), frozenset({"read"}))
    his = msgspec.structs.replace(ALLOWED, principal="bob", principal_sha256=BOB_DIGEST)
    hers, hers_asked = await stage.tokens(), await stage.ledger.allow(permission(), ALLOWED)
    first = await stage.exchange(await stage.ledger.allow(permission(), his))
    with caplog.at_level("INFO", "memd"):
        for _ in range(GRANTS_MAX):
            stage.now += 0.01
            last = await stage.exchange(await stage.ledger.allow(permission(), his))
    assert stage.ledger.acting(hers.access_token) and stage.ledger.acting(last.access_token)
    assert len(stage.ledger.live()) == GRANTS_MAX and stage.ledger.acting(first.access_token) is None
    assert await stage.exchange(hers_asked), "nor a code on its way"
    [ended, *_] = [one for one in caplog.records if one.message == "a program may no longer use memory"]
    assert ended.principal == "bob" and "bob had the most of them: 256" in ended.reason  # type: ignore[attr-defined]


# -- the file ---------------------------------------------------------------------------------------------------------


async def test_on_a_full_disk_nothing_is_given_and_what_ended_stays_ended(stage: Stage) -> None:
    stage.files.bytes_left = 0
    with pytest.raises(DiskFull):
        await stage.ledger.key_to_register()
    assert stage.ledger.key == b""
    with pytest.raises(DiskFull):
        await stage.tokens()
    assert stage.ledger.live() == ()
    stage.files.bytes_left = None
    tokens = await stage.tokens()
    stage.files.bytes_left = 0
    with pytest.raises(DiskFull):
        await stage.refresh(tokens.refresh_token)
    assert stage.ledger.acting(tokens.access_token)
    with pytest.raises(DiskFull):
        await stage.ledger.revoke(tokens.access_token)
    assert stage.ledger.acting(tokens.access_token) is None
    stage.files.bytes_left = None
    again = await stage.tokens()
    stage.open()
    assert stage.ledger.acting(tokens.access_token) is None and stage.ledger.acting(again.access_token)


@pytest.mark.parametrize("loss", LOSSES)
async def test_tokens_that_were_given_are_known_after_a_power_cut_at_any_step(loss: Any) -> None:
    step, is_over = 0, False
    while not is_over:
        stage = Stage()
        first = await stage.tokens()
        stage.files.cut_after = stage.files.operations + step
        try:
            given = await stage.refresh(first.refresh_token)
            is_over = True
        except (PowerCutError, StoreError):
            given = first
        stage.files = stage.files.after_power_cut(loss)
        stage.open()
        [kept] = stage.ledger.live()
        assert is_over or step < 20
        if is_over:
            assert stage.ledger.acting(given.access_token) == kept
        step += 1


async def test_a_file_reads_on_in_every_later_version(stage: Stage) -> None:
    """Its members are as the first version that wrote them called them."""
    grant: dict[str, Any] = {
        "id": "5e0c9f1a",
        "client_name": "An editor",
        "client_sha256": "0" * 64,
        "principal_sha256": ANN_DIGEST,
        "principal": "ann",
        "rights": ["read"],
        "topics": ["team-*"],
        "created_at": 1,
        "access_sha256": "1" * 64,
        "access_until": 2,
        "refresh_sha256": "2" * 64,
        "refresh_until": int(stage.now) + 60,
        "spent": ["3" * 64],
    }
    replace_file(stage.files, FILE, json.dumps({"version": 1, "key": KEY.hex(), "grants": [grant]}).encode())
    stage.open()
    assert [(one.id, one.given.program, one.given.until) for one in stage.ledger.live()] == [
        ("5e0c9f1a", "An editor", int(stage.now) + 60)
    ]
    await stage.ledger.end("another one")
    await stage.tokens()
    kept = json.loads(stage.files.read(FILE))
    assert kept["key"] == KEY.hex() and kept["grants"][0] == grant


async def test_a_file_that_cannot_be_read_is_as_none(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    await stage.tokens()
    for damaged in (b"", b"{}", b"[1]", b'{"version":1,"key":"no hex"}', b"\xff"):
        replace_file(stage.files, FILE, damaged)
        stage.open()
        assert stage.ledger.live() == () and "have to ask again" in caplog.text
        assert await stage.tokens()


# -- the routes ------------------------------------------------------------------------------------------------------


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


async def test_a_person_narrows_what_a_program_gets(routes: Routes) -> None:
    client_id = await routes.client_id()
    query = asked_of(client_id, scope="read write correct")
    page = await routes.asked(query)
    text = await page.text()
    assert (
        page.status == 200 and "An editor" in text and html.escape(CALLBACK) in text and "no-store" in str(page.headers)
    )
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"] and "<script" not in text
    [kept] = re.findall(r'name="request" value="([^"]*)"', text)
    assert html.unescape(kept) == query, "it comes back with the answer, byte for byte"
    back = urlsplit(led_to(await (await routes.fill(query, topics="team-a", right=["read", "correct"])).text()))
    said = parse_qs(back.query)
    assert said["state"] == ["a+b&c t/ä"] and said["iss"] == [str(routes.client.make_url("")).rstrip("/")]
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
    assert await error_of(await post("/oauth/register", data=b"x" * 40_000)) == (413, "invalid_request")
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


@pytest.fixture
def daemon(serving: Serving) -> DaemonProcess:
    return serving({"auth": {"token": OWNER}})


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


def test_an_access_token_opens_mcp_and_nothing_else(daemon: DaemonProcess) -> None:
    tokens = tokens_of(daemon)
    assert (tokens["token_type"], tokens["expires_in"], tokens["scope"]) == ("Bearer", 3_600, "read")
    kept = (daemon.data_dir / "memd.grants").read_text()
    assert not [name for name in ("access_token", "refresh_token", "client_id") if tokens[name] in kept]
    mcp, shown = f"{daemon.own_url}/mcp", bearer(tokens["access_token"])
    assert ask(mcp, LIST, headers=shown).status == 200
    assert ask(mcp, LIST, headers=bearer(tokens["refresh_token"])).status == 401
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


def test_a_tool_beyond_the_grant_says_once_where_to_ask_and_then_why_it_fails(serving: Serving) -> None:
    ann = token_setting("ann", ANN, "read", "write")
    daemon = serving({"auth": {"token": OWNER, "tokens": [ann]}})
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
    typescript: TypeScriptClient, daemon: DaemonProcess, renews: bool
) -> None:
    given = tokens_of(daemon)
    tokens = {name: given[name] for name in ("access_token", "token_type", *(["refresh_token"] if renews else []))}
    asked = {"tokens": tokens, "client_id": given["client_id"]}
    told = typescript.run("mcp_step_up.ts", f"{daemon.own_url}/mcp", asked)
    if renews:  # it renews its token before it asks anybody, and comes back with the same rights
        assert "has no right to write" in told["told"] and told["opened"] == ""
    else:
        assert told["told"] == "UnauthorizedError"
        assert parse_qs(urlsplit(told["opened"]).query)["scope"] == ["read write"]


def test_grants_outlive_a_kill_and_end_with_the_token_of_who_gave_them(daemon: DaemonProcess) -> None:
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


def test_a_grant_is_revoked_without_a_daemon_too(daemon: DaemonProcess) -> None:
    shown = bearer(tokens_of(daemon)["access_token"])
    daemon.terminate()
    [grant] = json.loads(daemon.run("token", "list", "--json").stdout)
    assert daemon.run("token", "revoke", grant["id"]).returncode == 0
    daemon.start()
    assert ask(f"{daemon.own_url}/mcp", LIST, headers=shown).status == 401
