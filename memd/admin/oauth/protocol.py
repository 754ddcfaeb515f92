"""OAuth 2.1 between a client and memd: registrations, metadata, requests for permission and for tokens, and the pages
for a person.

Rule: pure. A request is either fully read or refused with a standard error code and a sentence with the reason. Nothing
is guessed, a repeated parameter is refused, and an unknown one ignored (RFC 6749 section 3.1). There are only public
clients, codes with PKCE by S256, and one resource: what MCP requires
(https://modelcontextprotocol.io/specification/2026-07-28/basic/authorization) and no more.

A client's id is its own registration, sealed by memd, so that registrations need no storage. Answers go only to
registered addresses. Pages are complete and without scripts. Every value is untrusted until escaped. No page repeats a
token, or tells whether one is right unless it was submitted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Mapping
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from memd.assets import words_of
from memd.errors import OAuthRefused
from memd.principals import Right
from memd.settings.model import is_this_machine

NAME_CHARACTERS_MAX = 60
REDIRECT_URIS_MAX = 10
REDIRECT_CHARACTERS_MAX = 512
ID_CHARACTERS_MAX = 8_192
_SEAL_BYTES = 16
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?\[\]@!$&'()*+,;=%-]+")
"""Characters of RFC 3986 without `#`, because a redirect URI has no fragment (RFC 6749 section 3.1.2)."""
_HOST = re.compile(r"[a-z0-9.-]+|[0-9a-f:.]+")
_LOOPBACK_PORT = re.compile(r"(http://(?:localhost|127\.0\.0\.1|\[::1\])):\d{1,5}(?=[/?]|$)")
NO_PROGRAMS = {
    *("about", "blob", "chrome", "data", "file", "filesystem", "ftp", "intent", "jar", "javascript", "mailto"),
    *("resource", "sms", "tel", "vbscript", "view-source", "ws", "wss"),
    *("ldap", "mhtml", "res", "search", "search-ms", "shell"),  # Windows' own, known from attacks, and all of `ms-`
}
"""Schemes that a browser runs, opens itself, or hands to a program that cannot have asked. Any other scheme belongs to
a program (RFC 8252 section 7.1), as `cursor` does."""


class OAuthClient(msgspec.Struct, frozen=True, array_like=True):
    """A registered program."""

    name: str
    """The program's own name for itself, unverified."""
    redirect_uris: tuple[str, ...]

    def takes(self, uri: str) -> bool:
        """Return whether answers may be sent to `uri`."""
        return uri in self.redirect_uris or _without_port(uri) in map(_without_port, self.redirect_uris)


class _Registration(msgspec.Struct, frozen=True):
    """The relevant members of a registration (RFC 7591 section 2); others are ignored, as it requires."""

    redirect_uris: list[str]
    client_name: str = ""
    grant_types: tuple[str, ...] = ("authorization_code",)
    response_types: tuple[str, ...] = ("code",)


def registration(body: bytes, key: bytes) -> Mapping[str, Any]:
    """Return the answer to a registration (RFC 7591 section 3.2.1). `key`: seals the client's id. Raises OAuthRefused:
    it is not acceptable."""
    try:
        asked = msgspec.json.decode(body, type=_Registration)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OAuthRefused("invalid_client_metadata", f"the registration cannot be read: {error}") from None
    if "authorization_code" not in asked.grant_types or "code" not in asked.response_types:
        raise OAuthRefused("invalid_client_metadata", "there is only the grant `authorization_code`, with codes")
    if not 1 <= len(asked.redirect_uris) <= REDIRECT_URIS_MAX:
        raise OAuthRefused("invalid_redirect_uri", f"give 1 to {REDIRECT_URIS_MAX} redirect_uris")
    for uri in asked.redirect_uris:
        if problem := _problem_of(uri):
            raise OAuthRefused("invalid_redirect_uri", f"{uri[:80]!r} {problem}")
    # Without characters that hide or reverse words on a page.
    name = " ".join("".join(one if one.isprintable() else " " for one in asked.client_name).split())
    client = OAuthClient(name[:NAME_CHARACTERS_MAX] or "A program without a name", tuple(asked.redirect_uris))
    return {
        "client_id": client_id_of(client, key),
        "client_name": client.name,
        "redirect_uris": client.redirect_uris,
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "token_endpoint_auth_method": "none",
    }


def client_id_of(client: OAuthClient, key: bytes) -> str:
    """Return a client's id: its registration and the seal, in base64url."""
    said = msgspec.json.encode(client)
    return f"{_base64(said)}.{_seal(said, key)}"


def client_of(client_id: str, key: bytes) -> OAuthClient | None:
    """Return the client with this id, sealed by this key; None for other ids, and if there is no key."""
    said, _, seal = client_id.partition(".")
    if not key or len(client_id) > ID_CHARACTERS_MAX:
        return None
    try:
        encoded = base64.urlsafe_b64decode(said + "=" * (-len(said) % 4))
        is_sealed = hmac.compare_digest(seal.encode(), _seal(encoded, key).encode())
        return msgspec.json.decode(encoded, type=OAuthClient) if is_sealed else None
    except ValueError:  # not base64, not ASCII, or not a client
        return None


def _problem_of(uri: str) -> str:
    """Return the reason why no answer may be sent to `uri`; empty if it may."""
    if len(uri) > REDIRECT_CHARACTERS_MAX or not _URI.fullmatch(uri):
        return f"is no address of at most {REDIRECT_CHARACTERS_MAX} characters, without a fragment"
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return "is no address"
    scheme = parts.scheme.lower()
    if scheme not in ("http", "https"):
        is_none = scheme in NO_PROGRAMS or scheme.startswith("ms-")
        return f"is not sent to: {scheme} belongs to no program" if is_none else ""
    if "@" in parts.netloc or not _HOST.fullmatch(host):
        return "names no plain host"
    if scheme == "http" and not is_this_machine(host):
        return "is not encrypted: use https, or http at a loopback address"
    return ""


def _without_port(uri: str) -> str:
    return _LOOPBACK_PORT.sub(r"\1", uri, count=1)


def _seal(said: bytes, key: bytes) -> str:
    return _base64(hmac.new(key, b"memd: a client of OAuth\n" + said, hashlib.sha256).digest()[:_SEAL_BYTES])


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


RESOURCE = "/mcp"
AUTHORIZE, TOKEN, REGISTER, REVOKE = "/oauth/authorize", "/oauth/token", "/oauth/register", "/oauth/revoke"
_RESOURCE_METADATA = "/.well-known/oauth-protected-resource"
_ABOUT_RESOURCE = (_RESOURCE_METADATA + RESOURCE, _RESOURCE_METADATA)
_ABOUT_SERVER = ("/.well-known/oauth-authorization-server", "/.well-known/openid-configuration")
PATHS = {AUTHORIZE, TOKEN, REGISTER, REVOKE, *_ABOUT_RESOURCE, *_ABOUT_SERVER}
SCOPES: dict[Right, str] = {
    "read": "search and read what is remembered",
    "write": "remember notes",
    "correct": "mark what is remembered as wrong, helpful or unhelpful",
}
"""The rights that a client can get, each described for a person. `admin` is not available over MCP."""
PARAMETER_CHARACTERS_MAX = 8_192
_CHALLENGE = re.compile(r"[A-Za-z0-9_-]{43}")
"""SHA-256 in base64url (RFC 7636 section 4.2)."""
_VERIFIER = re.compile(r"[A-Za-z0-9._~-]{43,128}")
_SERVER = re.compile("^[^/]*//[^/]*")
"""The part of a URL in which case does not count."""


class Permission(msgspec.Struct, frozen=True):
    """A valid request for permission, to be answered by a person (RFC 6749 section 4.1.1)."""

    client_id: str
    client: OAuthClient
    redirect_uri: str
    state: str | None
    challenge: str
    scopes: tuple[Right, ...]
    """The requested rights; all available ones if the request names none that memd has."""

    def answer(self, issuer: str, **members: str) -> str:
        """Return the URL that delivers the answer to the client (RFC 6749 section 4.1.2, RFC 9207)."""
        return _answered(self.redirect_uri, self.state, issuer, **members)

    def is_shown_by(self, verifier: str) -> bool:
        """Return whether a verifier belongs to the challenge (RFC 7636 section 4.6)."""
        return hmac.compare_digest(_base64(hashlib.sha256(verifier.encode()).digest()), self.challenge)


class TokenRequest(msgspec.Struct, frozen=True):
    """A request for tokens by a code or a refresh token (RFC 6749 sections 4.1.3 and 6)."""

    client_id: str
    secret: str
    """The code or the refresh token."""
    verifier: str | None
    """PKCE verifier for a code; None for a refresh token."""
    redirect_uri: str | None


def metadata(path: str, issuer: str) -> Mapping[str, Any]:
    """Return the metadata at a path: the resource's, otherwise the server's.

    RFC 9728 and RFC 8414; a client that finds no OAuth metadata looks at OpenID's path for the same document.
    """
    if path in _ABOUT_RESOURCE:
        return {
            "resource": issuer + RESOURCE,
            "authorization_servers": [issuer],
            "scopes_supported": list(SCOPES),
            "bearer_methods_supported": ["header"],
            "resource_name": "memd",
        }
    return {
        "issuer": issuer,
        "authorization_endpoint": issuer + AUTHORIZE,
        "token_endpoint": issuer + TOKEN,
        "registration_endpoint": issuer + REGISTER,
        "revocation_endpoint": issuer + REVOKE,
        "scopes_supported": list(SCOPES),
        "response_types_supported": ["code"],
        "response_modes_supported": ["query"],
        "grant_types_supported": ["authorization_code", "refresh_token"],
        "token_endpoint_auth_methods_supported": ["none"],
        "revocation_endpoint_auth_methods_supported": ["none"],
        "code_challenge_methods_supported": ["S256"],
        "authorization_response_iss_parameter_supported": True,
    }


def challenge_of(issuer: str, error: str = "", scopes: Iterable[Right] = SCOPES) -> str:
    """Return the header `WWW-Authenticate` that leads a client here (RFC 9728 section 5.1). `error`: the problem with
    its token (RFC 6750 section 3.1); empty if it sent none. `scopes`: those to ask for."""
    told = f'error="{error}", ' if error else ""
    return f'Bearer {told}resource_metadata="{issuer}{_RESOURCE_METADATA}{RESOURCE}", scope="{" ".join(scopes)}"'


def permission_asked(query: str, key: bytes, issuer: str) -> Permission:
    """Read the query of a request for permission. `key`: seals client ids. Raises OAuthRefused: it is invalid. Its
    `back` leads to the client, unless that is unknown, so that only the person may be told."""
    asked = _parameters(query)
    client_id = asked.get("client_id", "")
    client = client_of(client_id, key)
    if client is None:
        raise OAuthRefused("invalid_client", NO_CLIENT)
    redirect_uri = asked.get("redirect_uri") or (client.redirect_uris[0] if len(client.redirect_uris) == 1 else "")
    if not client.takes(redirect_uri):
        raise OAuthRefused("invalid_request", "redirect_uri is none of those with which the program registered")
    state = asked.get("state")
    try:
        if asked.get("response_type") != "code":
            raise OAuthRefused("unsupported_response_type", "response_type has to be `code`")
        if asked.get("code_challenge_method") != "S256" or not _CHALLENGE.fullmatch(asked.get("code_challenge", "")):
            raise OAuthRefused("invalid_request", "a code_challenge is needed, with code_challenge_method S256")
        _check_resource(asked, issuer)
    except OAuthRefused as error:
        error.back = _answered(redirect_uri, state, issuer, error=error.code, error_description=str(error))
        raise
    named = asked.get("scope", "").split()
    scopes = tuple(right for right in SCOPES if right in named) or tuple(SCOPES)
    return Permission(client_id, client, redirect_uri, state, asked["code_challenge"], scopes)


def token_asked(body: str, key: bytes, issuer: str) -> TokenRequest:
    """Read the body of a request for tokens. Raises OAuthRefused: it is invalid."""
    asked = _parameters(body)
    client_id = asked.get("client_id", "")
    if client_of(client_id, key) is None:
        raise OAuthRefused("invalid_client", NO_CLIENT)
    _check_resource(asked, issuer)
    kind = asked.get("grant_type")
    if kind == "authorization_code":
        verifier = asked.get("code_verifier", "")
        if not _VERIFIER.fullmatch(verifier):
            raise OAuthRefused("invalid_request", "code_verifier has to have 43 to 128 characters (RFC 7636)")
        return TokenRequest(client_id, asked.get("code", ""), verifier, asked.get("redirect_uri"))
    if kind == "refresh_token":
        return TokenRequest(client_id, asked.get("refresh_token", ""), None, None)
    raise OAuthRefused("unsupported_grant_type", "grant_type has to be `authorization_code` or `refresh_token`")


def token_to_revoke(body: str) -> str:
    """Read the body of a revocation (RFC 7009), ignoring its hint. Raises OAuthRefused: it names no token."""
    if token := _parameters(body).get("token"):
        return token
    raise OAuthRefused("invalid_request", "token is missing")


NO_CLIENT = "the program is not registered here; let it register again: in most, remove this server and add it again"


def _parameters(encoded: str) -> dict[str, str]:
    """Read the parameters of a query or form; one without a value counts as absent (RFC 6749 section 3.1)."""
    read: dict[str, str] = {}
    try:
        pairs = parse_qsl(encoded, max_num_fields=64, errors="strict")
    except ValueError:
        raise OAuthRefused("invalid_request", "the parameters cannot be read: they are no UTF-8, or too many") from None
    for name, value in pairs:
        if name in read:
            raise OAuthRefused("invalid_request", f"{name[:40]} is given twice")
        if len(value) > PARAMETER_CHARACTERS_MAX:
            raise OAuthRefused("invalid_request", f"{name[:40]} is longer than {PARAMETER_CHARACTERS_MAX} characters")
        read[name] = value
    return read


def _check_resource(asked: Mapping[str, str], issuer: str) -> None:
    """Check that a request naming a resource (RFC 8707) wants tokens for this memory."""
    named = asked.get("resource", issuer + RESOURCE)
    if _SERVER.sub(lambda server: server[0].lower(), named).rstrip("/") != issuer + RESOURCE:
        raise OAuthRefused("invalid_target", f"there are tokens for {issuer}{RESOURCE} alone, not for {named[:200]!r}")


def _answered(redirect_uri: str, state: str | None, issuer: str, **members: str) -> str:
    told = {**members, **({} if state is None else {"state": state}), "iss": issuer}
    return f"{redirect_uri}{'&' if '?' in redirect_uri else '?'}{urlencode(told)}"


PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_WORDS: dict[str, str] = words_of("consent")


def consent_page(
    permission: Permission, query: str, *, rights: Collection[str], topics: str = "", problem: str = ""
) -> str:
    """Return the page that asks a person for permission.

    Args:
        query: of the request for permission; sent back with the answer.
        rights: those preselected.
        topics: as the person typed them.
        problem: the reason why the previous answer was not accepted.
    """
    uri, name = permission.redirect_uri, escape(permission.client.name)
    scheme, host = urlsplit(uri).scheme, urlsplit(uri).hostname or ""
    where = "a program on this computer" if is_this_machine(host) else host
    if scheme not in ("http", "https"):
        where = f"the program that opens {scheme}: addresses"
    ticks = (
        _WORDS["right"].format(right=right, words=words, checked=" checked" if right in rights else "")
        for right, words in SCOPES.items()
        if right in permission.scopes
    )
    body = _WORDS["form"].format(
        name=name,
        host=escape(where),
        uri=escape(uri),
        warning=_WORDS["loopback"].format(name=name) if is_this_machine(host) else "",
        problem=f'<p class="problem" role="alert">{escape(problem)}</p>\n' if problem else "",
        action=AUTHORIZE,
        query=escape(query),
        rights="".join(ticks).rstrip(),
        topics=escape(topics),
    )
    return _page("May this program use your memory?", body)


def going_back_page(permission: Permission, url: str, *, is_allowed: bool) -> str:
    """Return the page that leads the browser back to the program with the answer.

    It is a page because browsers apply the page's `form-action` to redirections after a form, even to the program's
    own, and because an address that opens a program would leave the form on the screen.
    """
    title = "Allowed" if is_allowed else "Refused"
    name = escape(permission.client.name)
    body = f'<p>{name} is told so now. If nothing happens: <a href="{escape(url)}">back to {name}</a>.</p>'
    return _page(title, f"{body}\n<p>You can close this page then.</p>", refresh=url)


def refusing_page(error: OAuthRefused) -> str:
    """Return the page with the reason for a refusal. The program learns of it if the person goes back: nobody has
    checked its address."""
    link = f'\n<p><a href="{escape(error.back)}">Back to the program</a></p>' if error.back else ""
    return _page("This request cannot be answered", f'<p class="problem">{escape(f"{error}.")}</p>{link}')


def _page(title: str, body: str, refresh: str = "") -> str:
    leading = f'<meta http-equiv="refresh" content="0;url={escape(refresh)}">\n' if refresh else ""
    return _WORDS["page"].format(title=escape(title), body=body, refresh=leading)
