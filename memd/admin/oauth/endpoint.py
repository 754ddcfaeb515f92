"""The routes of OAuth at memd's own address: JSON for clients, pages for people.

Rule: they exist only if a token is needed, and only where nobody else can read the traffic: over TLS, including a
proxy's, or on this machine. They need no token themselves; a person's token counts when typed in.

Implemented here rather than with a library: MCP needs only a small part of OAuth (one kind of client, one flow, opaque
tokens). Authlib's server is synchronous and made for Flask and Django. The handlers of the `mcp` package (2.3, tried)
accept 16 of the 21 redirect addresses that the tests reject, no other port of a loopback address, the last value of a
repeated parameter, and any `resource`. They store an id for everyone who registers, answer people with JSON, and need
0.9 s and 60 MB to load.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs, urlsplit

import msgspec
from aiohttp import web

from memd import access
from memd.access import WrongTokens
from memd.admin.oauth import protocol
from memd.admin.oauth.ledger import Allowed, GivenGrant, Ledger
from memd.admin.parts import DaemonParts
from memd.admin.routing import Body, get, post
from memd.caching import Latest
from memd.errors import NotFound, OAuthRefused, StoreError
from memd.principals import Principal, Right, digest_of
from memd.settings.model import is_this_machine

BODY_BYTES_MAX = 32_768
BY_POST = (protocol.TOKEN, protocol.REGISTER, protocol.REVOKE)
TOPICS_MAX = 64
UNAUTHORIZED = 401
INSUFFICIENT = "insufficient_scope"
LED_ON_MAX = 4_096
_LEFT_OUT = web.RequestKey("left_out", frozenset)
"""Pairs of a grant's id and a right that the grant lacks and its principal's token has."""
_HOST = re.compile(r"(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::\d{1,5})?", re.IGNORECASE)
_PATTERN = re.compile(r"[*A-Za-z0-9][*A-Za-z0-9._-]{0,127}")
NO_TLS = "OAuth needs TLS beyond this machine (docs/reverse-proxy.md); with a token in a header it works without"


Recorded = Callable[[web.BaseRequest, str, str], Awaitable[None]]


class OAuthEndpoint:
    """Answers the requests of OAuth, and finds the principal of an access token."""

    def __init__(self, ledger: Ledger, wrong_tokens: WrongTokens, idle_seconds: float, recorded: Recorded) -> None:
        """`recorded`: writes into the audit that a program gained or lost access, before the answer is sent.
        `idle_seconds`: timeout for the next part of a client's body."""
        self._ledger = ledger
        self._wrong_tokens, self._principals = wrong_tokens, wrong_tokens.principals
        self._idle_seconds = idle_seconds
        self._recorded = recorded
        self._led_on = Latest[tuple[str, Right], None](LED_ON_MAX)

    def serves(self, request: web.BaseRequest) -> bool:
        """Return whether the request is for one of these routes, which exist only if a token is needed."""
        return not self._principals.is_open and request.path in protocol.PATHS

    def lets_in(self, request: web.BaseRequest) -> bool:
        """Return whether a request to `/mcp` has an access token, and if so attribute it to the token's principal,
        limited to the rights and topics of the grant."""
        for _, token in access.shown_secrets(request):
            grant = None if self._principals.is_open else self._ledger.acting(token)
            whole = None if grant is None else self._principals.known(grant.principal_sha256)
            if grant is not None and whole is not None:
                access.let_in_as(request, acting := whole.narrowed(grant.rights, grant.topics))
                left_out = whole.rights.intersection(protocol.SCOPES) - acting.rights
                request[_LEFT_OUT] = frozenset((grant.id, right) for right in left_out)
                return True
        return False

    def leading_on(self, request: web.Request, right: str) -> web.Response | None:
        """Refuse a tool call for which the program's grant lacks the right, and say where to ask the person for it.

        None if that would not help: the program has the right or no access token, or the person's own token lacks it.
        Also None the second time: the person said no, or the program never asks (the official TypeScript client only
        renews its token and retries), and then its model should get the tool's own refusal. The header also names the
        scopes granted before, because clients of earlier MCP versions ask only for named ones.
        """
        issuer, has = issuer_of(request), access.principal_of(request).rights
        asked = next((one for one in request.get(_LEFT_OUT, ()) if one[1] == right), None)
        if asked is None or asked in self._led_on or not issuer:
            return None
        self._led_on[asked] = None
        allowed = f"this program was allowed {' and '.join(one for one in protocol.SCOPES if one in has) or 'nothing'}"
        message = f"memd: {allowed}, and this tool needs {right}; it can ask you in your browser"
        scopes = [one for one in protocol.SCOPES if one in has or one == right]
        headers = {"WWW-Authenticate": protocol.challenge_of(issuer, INSUFFICIENT, scopes)}
        return access.error_response(403, message, INSUFFICIENT, headers=headers)

    def leading(self, request: web.BaseRequest, refusal: web.Response) -> web.Response:
        """Add to a refusal where an MCP client can ask for a token, if it can get one."""
        issuer = issuer_of(request)
        if request.path == protocol.RESOURCE and refusal.status == UNAUTHORIZED and issuer:
            error = "invalid_token" if "Authorization" in request.headers else ""
            refusal.headers["WWW-Authenticate"] = protocol.challenge_of(issuer, error)
        return refusal

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request."""
        path, issuer = request.path, issuer_of(request)
        methods = ("GET", "POST") if path == protocol.AUTHORIZE else ("POST",) if path in BY_POST else ("GET", "HEAD")
        if not issuer:
            return _refusal(OAuthRefused("invalid_request", NO_TLS))
        fetched = request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")
        is_opened = request.method == "GET" and path == protocol.AUTHORIZE and fetched == ("navigate", "document")
        if access.is_from_another_page(request) and not is_opened:  # a client's page may make the browser open memd's
            return _refusal(OAuthRefused("access_denied", "pages of other addresses may not ask"), 403)
        if request.method not in methods:
            wrong = OAuthRefused("invalid_request", f"{path} takes {' and '.join(methods)}")
            return _refusal(wrong, 405, Allow=", ".join(methods))
        if request.method != "POST" and path != protocol.AUTHORIZE:
            return _json(protocol.metadata(path, issuer))
        body = await access.read_body(request, BODY_BYTES_MAX, self._idle_seconds)
        if body is None:
            return _refusal(OAuthRefused("invalid_request", f"the body exceeds {BODY_BYTES_MAX:,} bytes"), 413)
        form = body.decode("ascii", "replace")
        try:
            if path == protocol.AUTHORIZE:
                return await self._ask_person(request, form, issuer)
            if path == protocol.REGISTER:
                return _json(protocol.registration(body, await self._ledger.key_to_register()), 201)
            if path == protocol.TOKEN:
                return _json(await self._ledger.tokens_for(protocol.token_asked(form, self._ledger.key, issuer)))
            token = protocol.token_to_revoke(form)
            grant = self._ledger.acting(token)
            await self._ledger.revoke(token)
            if grant is not None:
                await self._recorded(request, grant.principal, "a program is let in no more")
            return _json({})
        except OAuthRefused as error:
            return _page(protocol.refusing_page(error), 400) if path == protocol.AUTHORIZE else _refusal(error)
        except StoreError as error:
            return _refusal(OAuthRefused("server_error", f"what was asked for cannot be kept: {error}"), 503)

    async def _ask_person(self, request: web.Request, form: str, issuer: str) -> web.Response:
        """Show the consent page to a person, or take their answer."""
        try:
            filled = parse_qs(form, keep_blank_values=True, max_num_fields=16)
        except ValueError:
            raise OAuthRefused("invalid_request", "the form has too many fields") from None
        query = request.raw_path.partition("?")[2] if request.method == "GET" else filled.get("request", [""])[0]
        permission = protocol.permission_asked(query, self._ledger.key, issuer)
        if request.method == "GET":
            return _page(protocol.consent_page(permission, query, rights=permission.scopes))
        if filled.get("answer") != ["allow"]:
            url = permission.answer(issuer, error="access_denied", error_description="the person refused")
            return _page(protocol.going_back_page(permission, url, is_allowed=False))
        topics = filled.get("topics", [""])[0]
        rights = tuple(right for right in permission.scopes if right in filled.get("right", []))
        token = filled.get("token", [""])[0].strip()
        if self._wrong_tokens.catch_up is not None:
            await self._wrong_tokens.catch_up(())
        whole = self._wrong_tokens.look_up(request.remote, token)
        if problem := _problem_with(whole, rights, topics.split()):
            asked_again = protocol.consent_page(permission, query, rights=rights, topics=topics, problem=problem)
            return _page(asked_again, 403 if whole is None else 422)
        assert whole is not None
        allowed = Allowed(
            principal=whole.name,
            principal_sha256=digest_of(token).hex(),
            rights=tuple(right for right in rights if right in whole.rights),
            topics=tuple(topics.split()),
        )
        extent = f"to {', '.join(allowed.rights)} in {', '.join(allowed.topics or whole.topics)}"
        await self._recorded(request, whole.name, f"a program is let in {extent}")
        url = permission.answer(issuer, code=await self._ledger.allow(permission, allowed))
        return _page(protocol.going_back_page(permission, url, is_allowed=True))


class GivenGrants(msgspec.Struct, frozen=True):
    """The programs that may use memory, oldest first."""

    grants: tuple[GivenGrant, ...]


class GrantEnd(Body, frozen=True, kw_only=True):
    """The body of `POST /memd/grants/end`."""

    id: str
    """Id of the grant, as `memd token list` shows it."""


class GrantEnded(msgspec.Struct, frozen=True):
    """The grant has ended; its tokens are void."""

    id: str


@get("/memd/grants", "admin")
async def grants(parts: DaemonParts) -> GivenGrants:
    """The programs that may use memory over OAuth, in whose name, and what each may do."""
    return GivenGrants(tuple(one.given for one in parts.ledger.live()))


@post("/memd/grants/end", "admin", act="token")
async def end_grant(parts: DaemonParts, body: GrantEnd) -> GrantEnded:
    """End a program's grant; the program has to ask again."""
    if not await parts.ledger.end(body.id):
        raise NotFound(f"there is no grant {body.id[:80]!r}; `memd token list` shows them")
    return GrantEnded(body.id)


def issuer_of(request: web.BaseRequest) -> str:
    """Return the scheme and host by which the client calls memd; empty if others could read the traffic.

    A proxy sets `X-Forwarded-Proto` if it uses TLS. A client that forges the header misleads only itself.
    """
    host = request.headers.get("Host", "").lower()
    scheme = request.headers.get("X-Forwarded-Proto", request.scheme).partition(",")[0].strip().lower()
    if not _HOST.fullmatch(host) or scheme not in ("http", "https"):
        return ""
    name = urlsplit(f"//{host}").hostname or ""
    return f"{scheme}://{host}" if scheme == "https" or is_this_machine(name) else ""


def _problem_with(whole: Principal | None, rights: tuple[str, ...], topics: list[str]) -> str:
    """Return the reason why a person's answer is not accepted; empty if it is."""
    if whole is None:
        return "This is no token of this memd. Nothing was allowed."
    if not rights:
        return "Choose at least one thing that the program may do, or refuse."
    if not whole.rights.intersection(rights):
        return f"This token has none of these rights; it has {', '.join(sorted(whole.rights))}."
    if len(topics) > TOPICS_MAX:
        return f"These are more than {TOPICS_MAX} names of topics; leave the field empty, or use *."
    if wrong := next((one for one in topics if not _PATTERN.fullmatch(one)), None):
        return f"{wrong[:80]} is no name of a topic: letters, digits, “.”, “_” and “-”, and * for any characters."
    if outside := next((one for one in topics if not whole.narrowed(protocol.SCOPES, (one,)).topics), None):
        return f"This token has no topic like {outside[:80]}; it has {', '.join(whole.topics)}."
    return ""


def _json(document: object, status: int = 200, **headers: str) -> web.Response:
    body = msgspec.json.encode(document)
    kept = {"Cache-Control": "no-store", **headers}
    return web.Response(status=status, body=body, content_type="application/json", headers=kept)


def _refusal(error: OAuthRefused, status: int = 0, **headers: str) -> web.Response:
    status = status or (UNAUTHORIZED if error.code == "invalid_client" else 400)  # at 401 clients register anew
    return _json({"error": error.code, "error_description": f"memd: {error}"}, status, **headers)


def _page(text: str, status: int = 200) -> web.Response:
    return web.Response(status=status, text=text, content_type="text/html", headers=protocol.PAGE_HEADERS)
