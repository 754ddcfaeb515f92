"""Access: which principal a request comes from, and the routes that only programs on this machine may use.

Rule: where there are tokens every request has to carry one; without any memd listens on this machine alone. Web pages
of other origins get neither memd's own routes nor memory in the others: a page that the user happens to visit must not
read their memory.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from aiohttp import web

from memd.principals import OWNER, SECRET_PREFIX, TOKEN_HEADER, Principal, Principals
from memd.settings.url import is_this_machine

UNGUESSABLE_CHARACTERS = 32
"""Characters; the secrets that `memd token add` makes are longer."""
_BEARER = "bearer "
# The standard's and the usual ones, then those of Cloudflare, Akamai, Fly, Envoy, Tailscale and load balancers.
_FORWARDING = re.compile(
    r"forwarded|via|x-forwarded-.*|x-real-ip|cf-(?:connecting-ip|ray|visitor)|true-client-ip|fly-client-ip"
    r"|x-envoy-external-address|tailscale-user-.*|x-(?:cluster-)?client-ip|x-original-forwarded-.*",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\s,;]+")
_NAME_END = re.compile(r"[=:.]")
_HOST = re.compile(r"[a-z0-9.:_-]{1,253}")
"""A host that may stand in an address, as `urlsplit` gives it."""


_PRINCIPAL = web.RequestKey("principal", Principal)
_PRINCIPALS = web.RequestKey("principals", Principals)


def let_in(request: web.BaseRequest, principals: Principals) -> Principal | None:
    """Find the principal whose token the request carries and note it; None: it carries none that is known.

    Of several tokens the first counts, in the order of the headers that clients can set.
    """
    found = _found(request, principals)
    if found is not None:
        let_in_as(request, found)
        request[_PRINCIPALS] = principals
    return found


def is_let_in_still(request: web.BaseRequest) -> bool:
    """Whether the token of a request that was let in by it may do what it could then: a stream ends when it may not."""
    return _found(request, request[_PRINCIPALS]) == principal_of(request)


def _found(request: web.BaseRequest, principals: Principals) -> Principal | None:
    if principals.is_open:
        return OWNER
    shown = (principals.find(secret) for _, secret in shown_secrets(request))
    return next((one for one in shown if one is not None), None)


def let_in_as(request: web.BaseRequest, principal: Principal) -> None:
    """Note from which principal a request comes."""
    request[_PRINCIPAL] = principal


def principal_of(request: web.BaseRequest) -> Principal:
    """The principal of a request that was let in."""
    return request[_PRINCIPAL]


def source_of(request: web.BaseRequest) -> str:
    """The address that a request came from."""
    return request.remote or ""


def headers_with_token(request: web.BaseRequest, principals: Principals) -> set[str]:
    """Return the headers (lower case) that carry a token of memd's own, which must not reach the upstream.

    One that was taken back neither: beside a token that is known it is no reason to refuse the request.
    """
    if principals.is_open:
        return set()
    return {
        name.lower()
        for name, secret in shown_secrets(request)
        if secret.startswith(SECRET_PREFIX) or principals.find(secret) is not None
    }


def without_secrets(name: str, value: str, principals: Principals) -> str | None:
    """The part of a header that may leave for the upstream; None: nothing.

    Nothing where a secret stands in it that memd accepts; of `Cookie` all cookies but that one.
    """
    if principals.is_open:
        return value
    if name.lower() != "cookie":
        return None if _has_secret(value, principals) else value
    cookies = value.split(";")
    kept = [cookie for cookie in cookies if not _has_secret(cookie, principals)]
    return value if len(kept) == len(cookies) else ";".join(kept).strip() or None


def _has_secret(text: str, principals: Principals) -> bool:
    return any(principals.accepts(one) for one in _possible_secrets(text) if one)


def _possible_secrets(text: str) -> Iterator[str]:
    """All that may be a secret in a header: the whole, all behind a scheme, each word, and all behind a name in it.

    Who shows one decides how: memd knows but the digests of those that it accepts, and cannot look for one in a text.
    """
    text = text.strip()
    scheme, _, shown = text.partition(" ")
    yield text
    yield shown.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            user, _, password = base64.b64decode(shown.strip()).decode(errors="surrogateescape").partition(":")
            yield from (user, password)
    for word in _WORD.findall(text):
        for begin in (0, *(found.end() for found in _NAME_END.finditer(word))):
            yield word[begin:].strip('"')
            if "%" in word:
                yield unquote(word[begin:].strip('"'))


def is_own(request: web.BaseRequest, listen_host: str) -> bool:
    """Whether a request comes from a program, or from a page of memd's own, and is addressed to this machine."""
    origin = request.headers.get("Origin")
    try:
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
        if origin is not None and urlsplit(origin).netloc != request.headers.get("Host"):
            return False
    except ValueError:  # one of them is no address
        return False
    if host in ("localhost", listen_host):
        return True
    try:
        ipaddress.ip_address(host)  # a rebound DNS name is a name, never an address
    except ValueError:
        return False
    return True


def forwarding_header(request: web.BaseRequest) -> str | None:
    """Return the name of a header by which a proxy says that it passes on somebody else's request; None: there is none.

    To memd such a request comes from this machine, wherever it began.
    """
    return next((name for name in request.headers if _FORWARDING.fullmatch(name)), None)


def same_host(request: web.BaseRequest, url: str) -> str:
    """Return `url` with the host by which the client calls this machine, which may not be the one that memd knows."""
    try:
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
    except ValueError:  # it is no address
        return url
    parts = urlsplit(url)
    if not _HOST.fullmatch(host):
        return url
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def is_from_another_page(request: web.BaseRequest) -> bool:
    """Whether a browser says that a page of another origin caused the request.

    Such a page cannot read the answer, but it can measure how long the answer takes, and so what is remembered.
    Programs do not send the header, and a browser sends `none` for an address that its user entered.
    """
    return request.headers.get("Sec-Fetch-Site", "none").lower() not in ("same-origin", "none")


def is_from_foreign_page(request: web.BaseRequest) -> bool:
    """Whether a browser sent the request for a web page that does not come from this machine.

    Model servers answer such pages, and with memory the answers would quote the user's conversations. (Programs that
    are built on a browser, as editors are, have origins of other schemes.)
    """
    origin = request.headers.get("Origin")
    if origin is None:
        return False
    try:
        page = urlsplit(origin)
        host = page.hostname or ""
    except ValueError:
        return True
    return origin == "null" or (page.scheme in ("http", "https") and not is_this_machine(host))


def shown_secrets(request: web.BaseRequest) -> Iterator[tuple[str, str]]:
    """Yield what may be a token, each with its header."""
    for name in (TOKEN_HEADER, "Authorization", "X-Api-Key"):
        for value in request.headers.getall(name, []):
            yield name, value[len(_BEARER) :].strip() if value.lower().startswith(_BEARER) else value
