"""OAuth's refusals, one by one: registrations, requests for permission, codes, tokens, and the file that keeps them."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import pytest
from crash_files import LOSSES, CrashFiles, PowerCutError

from memd.admin.oauth.grants import ACCESS_SECONDS, CODE_SECONDS, GRANTS_MAX, REFRESH_SECONDS, Allowed, Tokens
from memd.admin.oauth.ledger import GrantFile, Ledger
from memd.admin.oauth.protocol import (
    OAuthClient,
    Permission,
    PermissionRefused,
    TokenRequest,
    client_id_of,
    client_of,
    consent_page,
    going_back_page,
    permission_asked,
    registered,
    token_asked,
    token_to_revoke,
)
from memd.errors import DiskFull, OAuthRefused, StoreError
from memd.principals import Principal
from memd.store.disk import replace_file

ISSUER = "https://memory.example.com"
KEY = bytes(32)
CALLBACK = "http://localhost:33418/callback"
VERIFIER = "a-verifier-of-at-least-43-characters-0123456789"
CHALLENGE = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).decode().rstrip("=")
CLIENT = OAuthClient("An editor", (CALLBACK,))
CLIENT_ID = client_id_of(CLIENT, KEY)
ANN, BOB = "11" * 32, "22" * 32
ALLOWED = Allowed(principal="ann", principal_sha256=ANN, rights=("read",), topics=("team-*",))
FILE = Path("/data/memd.grants")


def query(**changed: str | None) -> str:
    asked = {
        "response_type": "code",
        "client_id": CLIENT_ID,
        "redirect_uri": CALLBACK,
        "state": "s t/ä",
        "code_challenge": CHALLENGE,
        "code_challenge_method": "S256",
        "resource": f"{ISSUER}/mcp",
        "scope": "read write offline_access",
        **changed,
    }
    return urlencode({name: value for name, value in asked.items() if value is not None})


def registration(*uris: str, **members: Any) -> bytes:
    return json.dumps({"redirect_uris": uris, "client_name": "An editor", **members}).encode()


def code_of(refused: pytest.ExceptionInfo[OAuthRefused]) -> str:
    return refused.value.code


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
def test_clients_that_there_are_can_register(uris: tuple[str, ...]) -> None:
    client = registered(registration(*uris, token_endpoint_auth_method="none", application_type="native", logo_uri=""))
    assert client.redirect_uris == uris
    assert client_of(client_id_of(client, KEY), KEY) == client
    assert all(client.takes(uri) for uri in uris)


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
def test_a_registration_that_is_none_or_would_send_an_answer_anywhere_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(OAuthRefused) as refused:
        registered(body)
    assert code_of(refused) == code


def test_a_name_cannot_hide_or_turn_around_what_stands_beside_it() -> None:
    name = "\u202eroodkcaB\u2066\x00\n<b>Claude</b>" + "x" * 200
    client = registered(registration(CALLBACK, client_name=name))
    assert client.name.isprintable() and len(client.name) == 60
    page = consent_page(msgspec.structs.replace(permission(), client=client), query(), rights=("read",))
    assert "&lt;b&gt;Claude" in page and "<b>Claude</b>" not in page and "\u202e" not in page
    assert registered(registration(CALLBACK, client_name="\u200b")).name == "A program without a name"


def test_the_port_of_a_loopback_address_is_free_and_nothing_else_of_any() -> None:
    client = OAuthClient("x", ("http://127.0.0.1:33418/a", "http://localhost/callback", "https://x.com:1/a"))
    assert client.takes("http://127.0.0.1:50000/a") and client.takes("http://localhost:1/callback")
    for uri in (
        *("http://127.0.0.1:33418/b", "http://127.0.0.1:33418/a/", "http://127.0.0.1:33418/a?x=1"),
        *("http://localhost:33418/a", "https://127.0.0.1:33418/a", "http://127.0.0.1:5@evil.com/a"),
        *("https://x.com:2/a", "https://x.com/a", "http://localhost.evil.com/callback", ""),
    ):
        assert not client.takes(uri), uri


@pytest.mark.parametrize("client_id", ["", ".", "x", "x.y", "ä.ö", CLIENT_ID[:-1], "A" * 10_000, f"W10.{'A' * 22}"])
def test_an_id_that_no_client_registered_under_is_not_known(client_id: str) -> None:
    assert client_of(client_id, KEY) is None
    assert client_of(CLIENT_ID, b"another key") is None
    assert client_of(client_id_of(CLIENT, b""), b"") is None, "before a client registered"


# -- requests for permission ------------------------------------------------------------------------------------------


def permission(**changed: str | None) -> Permission:
    return permission_asked(query(**changed), KEY, ISSUER)


def test_a_request_for_permission_is_read_and_answered() -> None:
    asked = permission()
    assert (asked.client, asked.redirect_uri, asked.scopes) == (CLIENT, CALLBACK, ("read", "write"))
    answer = urlsplit(asked.answer(ISSUER, code="c"))
    assert parse_qs(answer.query) == {"code": ["c"], "state": ["s t/ä"], "iss": [ISSUER]}
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
        ({"resource": ISSUER}, "invalid_target"),
        ({"resource": f"{ISSUER}/mcp?x=1"}, "invalid_target"),
        ({"resource": "http://[x"}, "invalid_target"),
    ],
)
def test_a_known_client_is_told_why_its_request_is_refused(changed: dict[str, str | None], code: str) -> None:
    with pytest.raises(PermissionRefused) as refused:
        permission(**changed)
    told = parse_qs(urlsplit(refused.value.back).query)
    assert (told["error"], told["iss"], told["state"]) == ([code], [ISSUER], ["s t/ä"])
    assert refused.value.back.startswith(f"{CALLBACK}?") and told["error_description"] == [str(refused.value)]


@pytest.mark.parametrize(
    "asked",
    [
        query(client_id=None),
        query(client_id="x.y"),
        query(client_id=client_id_of(CLIENT, b"another daemon's key")),
        query(redirect_uri="https://evil.com/callback"),
        query(redirect_uri=f"{CALLBACK}/more"),
        query() + "&redirect_uri=https://evil.com/",
        query(state="x" * 9_000),
        "&".join(f"a{number}=1" for number in range(100)),
        "client_id=%ff",
    ],
)
def test_who_is_not_known_gets_no_answer_anywhere(asked: str) -> None:
    with pytest.raises(OAuthRefused) as refused:
        permission_asked(asked, KEY, ISSUER)
    assert not isinstance(refused.value, PermissionRefused)


def test_a_page_puts_in_nothing_of_a_stranger_that_is_not_escaped() -> None:
    asked = permission(state='"><script>')
    for page in (
        consent_page(asked, query(state='"><script>'), rights=("read",), topics='"><script>', problem="<script>"),
        going_back_page(asked, asked.answer(ISSUER, code='"><script>'), is_allowed=True),
    ):
        assert "<script" not in page


# -- codes and tokens -------------------------------------------------------------------------------------------------


class Stage:
    """A ledger whose disk, clock and principals a test holds in its hands."""

    def __init__(self, files: CrashFiles | None = None) -> None:
        self.files = files or CrashFiles()
        self.files.make_directory(FILE.parent)
        self.files.sync_directory(FILE.parent.parent)
        self.now = 1_000_000.0
        self.principals = {ANN: Principal("ann", ("team-*",), frozenset({"read"}))}
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


async def test_a_code_becomes_tokens_that_act_for_whom_allowed_it(stage: Stage) -> None:
    tokens = await stage.tokens()
    assert (tokens.token_type, tokens.expires_in, tokens.scope) == ("Bearer", 3_600, "read")
    assert len(base64.urlsafe_b64decode(tokens.access_token + "=")) == 32
    grant = stage.ledger.acting(tokens.access_token)
    assert grant and (grant.principal, grant.rights, grant.topics) == ("ann", ("read",), ("team-*",))
    assert stage.ledger.acting(tokens.refresh_token) is None
    kept = stage.files.read(FILE).decode()
    assert tokens.access_token not in kept and tokens.refresh_token not in kept and CLIENT_ID not in kept


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


async def test_a_code_that_comes_twice_takes_its_tokens_away(stage: Stage) -> None:
    code = await stage.ledger.allow(permission(), ALLOWED)
    tokens = await stage.exchange(code)
    assert "served before" in await stage.refusal_of(stage.exchange(code))
    assert stage.ledger.acting(tokens.access_token) is None
    assert (await stage.refusal_of(stage.refresh(tokens.refresh_token))).startswith("invalid_grant")
    stage.open()
    assert stage.ledger.live() == ()


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


async def test_a_refresh_token_serves_once_and_a_second_time_ends_its_grant(stage: Stage) -> None:
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


async def test_a_refresh_token_of_another_client_does_not_serve_and_stays(stage: Stage) -> None:
    tokens = await stage.tokens()
    other = client_id_of(OAuthClient("y", (CALLBACK,)), KEY)
    assert "not known" in await stage.refusal_of(stage.refresh(tokens.refresh_token, client_id=other))
    assert await stage.refresh(tokens.refresh_token)


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ({"grant_type": "client_credentials"}, "unsupported_grant_type"),
        ({"grant_type": "password"}, "unsupported_grant_type"),
        ({}, "unsupported_grant_type"),
        ({"grant_type": "authorization_code", "code": "x"}, "invalid_request"),
        ({"grant_type": "authorization_code", "code": "x", "code_verifier": "short"}, "invalid_request"),
        ({"grant_type": "refresh_token", "resource": "https://other.example.com/mcp"}, "invalid_target"),
        ({"grant_type": "refresh_token", "client_id": "x"}, "invalid_client"),
        ({"grant_type": "refresh_token", "client_id": ""}, "invalid_client"),
    ],
)
def test_a_request_for_tokens_that_is_none_is_refused(form: dict[str, str], code: str) -> None:
    with pytest.raises(OAuthRefused) as refused:
        read(form)
    assert code_of(refused) == code


async def test_either_token_revokes_the_grant_and_a_wrong_one_nothing(stage: Stage) -> None:
    for name in ("access_token", "refresh_token"):
        tokens = await stage.tokens()
        await stage.ledger.revoke("no token")
        assert stage.ledger.acting(tokens.access_token)
        await stage.ledger.revoke(token_to_revoke(urlencode({"token": getattr(tokens, name), "token_type_hint": "x"})))
        assert stage.ledger.acting(tokens.access_token) is None and stage.ledger.live() == ()
    with pytest.raises(OAuthRefused):
        token_to_revoke("token=")


async def test_a_grant_ends_with_the_token_with_which_it_was_allowed(stage: Stage) -> None:
    tokens = await stage.tokens()
    ann = stage.principals.pop(ANN)
    assert stage.ledger.acting(tokens.access_token) is None and stage.ledger.live() == ()
    assert (await stage.refusal_of(stage.refresh(tokens.refresh_token))).startswith("invalid_grant")
    stage.principals[ANN] = ann  # as somebody's who gave up and took back: what ended stays ended
    assert stage.ledger.live() == ()


async def test_who_lets_in_hundreds_of_programs_throws_out_his_own_alone_and_it_is_said_why(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.principals[BOB] = Principal("bob", ("team-*",), frozenset({"read"}))
    his = msgspec.structs.replace(ALLOWED, principal="bob", principal_sha256=BOB)
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
        "principal_sha256": ANN,
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
