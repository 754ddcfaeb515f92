"""Access: the principal of a request, routes reserved to this machine, request bodies and errors.

Rule: if there are tokens, every request must carry one; without tokens memd listens only on this machine. Web pages of
other origins get neither memd's own routes nor memory on the others: a page that the user happens to visit must not
read their memory.

Wrong tokens are logged without filling the log: per address the first attempt at once, then a count once a minute. No
log line contains a token. An address with too many attempts must wait, and meanwhile guessable secrets are not checked.
Long secrets always are, because nobody can guess them; so their owners get in even if a proxy gives other people's
attempts the same address. A request without a token is no attempt.

No body takes more memory than its bound, nor all bodies together more than theirs, nor those of one principal all of
that. A client that stops sending its body, or sends it too slowly, loses its connection.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from aiohttp import web

from memd.caching import Latest
from memd.clock import steady_now
from memd.errors import MemdError
from memd.principals import OWNER, SECRET_PREFIX, TOKEN_HEADER, Principal, Principals
from memd.settings.model import is_this_machine
from memd.telemetry.logging import Content
from memd.wire.api import Api
from memd.wire.chat import CHAT

Take = Callable[[int], None]
"""Reserves so many bytes for a body, or raises `TooManyBodies`."""
BODY_BYTES_PER_SECOND_MIN = 1_024
"""Minimum rate of a body; a modem of the nineties is three times as fast."""
HELD_SECONDS_MAX = 1_800
"""A body held in memory must also keep a rate at which its size so far would double in this time. If ten of a hundred
megabytes are missing, they must arrive within four minutes, or the room becomes free."""
SHARE_MAX = 7 / 8
"""Share that one principal may take of the room not used by others."""
IDEMPOTENCY_HEADER = "Idempotency-Key"
"""Requests to memd's own routes with the same value count as one request sent repeatedly
(draft-ietf-httpapi-idempotency-key-header)."""
JOINED_AT_ONCE_BYTES = 4 << 20
"""Bodies up to this size are joined on the event loop, which takes 3 ms."""
OWN_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
"""Headers of all answers by memd itself: no page of another origin may load them as anything."""


class ProvableConnection(web.RequestHandler):
    """A client's connection. While none of its requests was let in, it may be closed to make room for others."""

    is_proven = False


def prove(request: web.BaseRequest) -> None:
    """Note that a request was let in."""
    if isinstance(request.protocol, ProvableConnection):
        request.protocol.is_proven = True


def key_of(request: web.BaseRequest) -> str:
    """Return the key that identifies retries of a request: the client's, or else a random one."""
    return request.headers.get(IDEMPOTENCY_HEADER) or secrets.token_hex(16)


def error_response(
    status: int, message: str, kind: str, api: Api = CHAT, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an error by memd itself in the shape that clients of `api` understand."""
    body = api.error_body(status, message, kind)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


class TooManyBodies(MemdError):
    """The request bodies held at the same time exceed their bound."""

    kind = "overloaded_error"


class BodyRoom:
    """Memory shared by the bodies of all requests. Belongs to the event loop.

    Each principal but the owner leaves some of it to the others, whatever these hold already.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = Counter[str]()
        """Bytes by the principal's `author`."""

    @contextmanager
    def holding(self, author: str = "") -> Iterator[Take]:
        """Yield a function that reserves bytes for one request of a principal (`Principal.author`); all of them are
        released in the end."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            left = self._bytes_max - self._held.total() + self._held[author]
            if self._held[author] + size > (left * SHARE_MAX if author else left):
                raise TooManyBodies(
                    f"the bodies of all requests together exceed {self._bytes_max} bytes, or those of one token its "
                    "share; try again in a moment, or raise limits.body_bytes_max"
                )
            self._held[author] += size
            taken += size

        try:
            yield take
        finally:
            self._held[author] -= taken
            self._held += Counter()  # drops entries of 0


def too_many_bodies(error: TooManyBodies, api: Api = CHAT) -> web.Response:
    """Return the answer to a request whose body has no room now."""
    return error_response(error.status, f"memd: {error}", error.kind, api, {"Retry-After": "5"})


async def read_body(
    request: web.Request, bytes_max: int, idle_seconds: float, take: Take = lambda size: None
) -> bytes | None:
    """Return the whole request body, or None if it is larger than `bytes_max`.

    Args:
        take: reserves the bytes (see `BodyRoom`); by default only `bytes_max` limits the body.

    Raises:
        TimeoutError: the client sent nothing, or too little, for `idle_seconds`; its connection is closed.
        TooManyBodies: there is no room for it.
    """
    if request.content_length is not None and request.content_length > bytes_max:
        return None
    parts: list[bytes] = []
    size = 0
    async for part in body_parts(request, idle_seconds, HELD_SECONDS_MAX):
        size += len(part)
        if size > bytes_max:
            return None
        take(len(part))
        parts.append(part)
    if size <= JOINED_AT_ONCE_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)  # releases the GIL


async def body_parts(
    request: web.BaseRequest, idle_seconds: float, again_seconds: float = math.inf
) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive. `again_seconds`: see `HELD_SECONDS_MAX`. Raises TimeoutError:
    the client sent nothing for `idle_seconds`, or fell so far behind its minimum rate (see also
    `BODY_BYTES_PER_SECOND_MIN`); its connection is closed. Sending faster earlier earns no credit."""
    clock = asyncio.get_running_loop().time
    behind, size = 0.0, 0
    while not request.content.is_eof():
        began = clock()
        try:
            async with asyncio.timeout(idle_seconds - behind):
                part = await request.content.readany()
            slowest = max(BODY_BYTES_PER_SECOND_MIN, size / again_seconds)
            behind = max(0.0, behind + clock() - began - len(part) / slowest)
            size += len(part)
        except TimeoutError:
            fields = {"method": request.method, "path": Content(request.path), "seconds": idle_seconds, "bytes": size}
            log.warning("a client stopped sending its request body, or sends it too slowly", extra=fields)
            if request.transport is not None:
                request.transport.abort()
            raise
        if part:
            yield part
    if rest := request.content.read_nowait():
        yield rest


log = logging.getLogger("memd")

UNGUESSABLE_CHARACTERS = 32
"""Secrets from this length on cannot be guessed; those of `memd token add` are longer."""
_BEARER = "bearer "
# The standard's and the usual ones, then those of Cloudflare, Akamai, Fly, Envoy, Tailscale and load balancers.
_FORWARDING = re.compile(
    r"forwarded|via|x-forwarded-.*|x-real-ip|cf-(?:connecting-ip|ray|visitor)|true-client-ip|fly-client-ip"
    r"|x-envoy-external-address|tailscale-user-.*|x-(?:cluster-)?client-ip|x-original-forwarded-.*",
    re.IGNORECASE,
)
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}")
_TOKEN_WORD = re.compile(rf"[\w-]{{{UNGUESSABLE_CHARACTERS},}}")
"""A possible token in a path, where a short one may be any word."""
_HOST = re.compile(r"[a-z0-9.:_-]{1,253}")
"""Hosts allowed in an address, as `urlsplit` returns them."""


_PRINCIPAL = web.RequestKey("principal", Principal)
_PRINCIPALS = web.RequestKey("principals", Principals)


def let_in(request: web.BaseRequest, principals: Principals) -> Principal | None:
    """Find the principal whose token the request carries, and note it on the request; None if no token is known.

    With several tokens the first known one counts, in the order of the headers that clients can set.
    """
    found = _found(request, principals)
    if found is not None:
        let_in_as(request, found)
        request[_PRINCIPALS] = principals
    return found


def is_let_in_still(request: web.BaseRequest) -> bool:
    """Return whether the token of an admitted request still has the same rights; if not, its stream ends."""
    return _found(request, request[_PRINCIPALS]) == principal_of(request)


def _found(request: web.BaseRequest, principals: Principals) -> Principal | None:
    if principals.is_open:
        return OWNER
    shown = (principals.find(secret) for _, secret in shown_secrets(request))
    return next((one for one in shown if one is not None), None)


def let_in_as(request: web.BaseRequest, principal: Principal) -> None:
    """Note on a request which principal it comes from."""
    request[_PRINCIPAL] = principal


def principal_of(request: web.BaseRequest) -> Principal:
    """Return the principal of an admitted request."""
    return request[_PRINCIPAL]


def own_secrets(request: web.BaseRequest, principals: Principals) -> list[tuple[str, str]]:
    """Return memd's own tokens in a request, each with its header; none of them may reach the upstream.

    That includes revoked ones: beside a valid token, one of these is no reason to refuse the request.
    """
    if principals.is_open:
        return []
    return [
        (name, secret)
        for name, secret in shown_secrets(request)
        if secret and (secret.startswith(SECRET_PREFIX) or principals.find(secret) is not None)
    ]


def without_secrets(name: str, value: str, own: Collection[str]) -> str | None:
    """Return the part of a header that may go to the upstream, or None.

    A header that contains one of these secrets (see `has_secret`) is dropped; `Cookie` loses only the cookies with one.
    """
    if name.lower() != "cookie":
        return None if has_secret(value, own) else value
    cookies = value.split(";")
    kept = [cookie for cookie in cookies if not has_secret(cookie, own)]
    return value if len(kept) == len(cookies) else ";".join(kept).strip() or None


def has_secret(text: str, own: Collection[str]) -> bool:
    """Return whether a text contains one of these secrets, or any token made by `memd token`, as a whole word: plain,
    percent-encoded or in base64. Takes linear time, because clients choose the length.
    """
    if not own:
        return False
    ones = "|".join(map(re.escape, own))
    secret = re.compile(rf"(?<![\w-])(?:{ones}|{SECRET_PREFIX}[\w-]{{{UNGUESSABLE_CHARACTERS},}})(?![\w-])")
    return any(secret.search(form) for form in (text, unquote(text), *map(_from_base64, _BASE64.findall(text))))


def _from_base64(word: str) -> str:
    with contextlib.suppress(ValueError):
        return base64.urlsafe_b64decode(word.replace("+", "-").replace("/", "_") + "==").decode(errors="replace")
    return ""


def is_own(request: web.BaseRequest, listen_host: str) -> bool:
    """Return whether a request is addressed to this machine and comes from a program or from memd's own pages."""
    origin = request.headers.get("Origin")
    try:
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
        if origin is not None and urlsplit(origin).netloc != request.headers.get("Host"):
            return False
        if host not in ("localhost", listen_host):
            ipaddress.ip_address(host)  # a rebound DNS name is a name, never an address
    except ValueError:  # one of them is no address
        return False
    return True


def forwarding_header(request: web.BaseRequest) -> str | None:
    """Return the name of a header that marks a request as forwarded by a proxy, or None.

    Such a request seems to come from this machine, wherever it began.
    """
    return next((name for name in request.headers if _FORWARDING.fullmatch(name)), None)


def same_host(request: web.BaseRequest, url: str) -> str:
    """Return `url` with the host that the client uses for this machine, which memd may not know."""
    try:
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
    except ValueError:  # it is no address
        return url
    parts = urlsplit(url)
    if not _HOST.fullmatch(host):
        return url
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def is_from_another_page(request: web.BaseRequest) -> bool:
    """Return whether a browser reports that a page of another origin caused the request.

    Such a page cannot read the answer, but it can measure its time, and so learn what is remembered. Programs do not
    send the header, and a browser sends `none` for an address that its user entered.
    """
    return request.headers.get("Sec-Fetch-Site", "none").lower() not in ("same-origin", "none")


def is_from_foreign_page(request: web.BaseRequest) -> bool:
    """Return whether a browser sent the request for a web page that is not from this machine.

    Model servers answer such pages, and with memory the answers would quote the user's conversations. Programs built on
    a browser, such as editors, have origins with other schemes.
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
    """Yield all values that may be tokens, each with its header."""
    for name in (TOKEN_HEADER, "Authorization", "X-Api-Key"):
        for value in request.headers.getall(name, []):
            yield name, value[len(_BEARER) :].strip() if value.lower().startswith(_BEARER) else value


TOLD_SECONDS = 60.0
ADDRESSES_MAX = 256
"""Limit on addresses counted separately in the log; the rest are counted together."""
REST = "others"
ATTEMPTS_MAX = 30
"""Wrong tokens in a row from one address before it must wait for each further one."""
ATTEMPT_SECONDS = 1.0
LIMITED_MAX = 4_096
"""Limit on addresses with counted attempts; beyond it the oldest is forgotten."""
_TOKEN_NAMES = frozenset(
    {"token", "access_token", "auth_token", "auth", "authorization", "bearer", "api_key", "apikey"}
)
TOKEN_IN_ADDRESS = (
    "memd: a token does not belong in an address, which logs, histories and proxies keep; show it as `Authorization: "
    f"Bearer TOKEN` or in the header {TOKEN_HEADER}, and replace this one if it is in use"
)
SHOW_ONE = (
    f"show auth.token, or one of `memd token add`, as `Authorization: Bearer TOKEN` or in the header {TOKEN_HEADER}"
)


class WrongTokens:
    """Refuses requests by their tokens and counts refusals per address. Belongs to the event loop."""

    def __init__(
        self,
        principals: Principals,
        later: Callable[[float, Callable[[str], None], str], object],
        audited: Callable[[str, int], None] = lambda address, attempts: None,
        clock: Callable[[], float] = steady_now,
    ) -> None:
        """
        Args:
            principals: all that may use memd.
            later: calls a function with an argument after a delay in seconds, like `loop.call_later`.
            audited: called with an address and its number of attempts whenever these are logged.
            clock: monotonic seconds.
        """
        self.principals = principals
        self._later = later
        self._audited = audited
        self._clock = clock
        self.catch_up: Callable[[Iterable[str]], Awaitable[Any]] | None = None
        """Fetches tokens that other daemons know. Returns the look at the shared log (`ingest.topic.Inquiry`), which
        includes these topics. None outside a cluster."""
        self._untold: dict[str, int] = {}
        """Refused requests per address since its last log line; dropped after a minute without one."""
        self._tried: Latest[str, float] = Latest(LIMITED_MAX)
        """Per address, until when its attempts count: each for `ATTEMPT_SECONDS`, one after the other."""

    async def make_sure(self, request: web.BaseRequest, topics: Iterable[str]) -> Any:
        """In a cluster, fetch the tokens that other daemons know before a request is let in or refused. That includes
        the first token, before which everybody is let in.

        An address that must wait causes no fetch. Returns the look at the shared log, which includes `topics`, or None.
        """
        if self.catch_up is None or self.wait_seconds(request.remote):
            return None
        return await self.catch_up(topics)

    def refusal(self, request: web.BaseRequest, api: Api = CHAT) -> web.Response | None:
        """Return None if the request may pass: its token is known, or none is needed. Otherwise return the refusal."""
        principals = self.principals
        is_known = let_in(request, principals) is not None
        if is_known and principals.is_open:
            return None
        shown = [secret for _, secret in shown_secrets(request) if secret]
        is_spent = self.wait_seconds(request.remote) > 0  # until then guessable secrets are not checked
        if is_known:
            right = [secret for secret in shown if is_spent and principals.find(secret) is not None]
            if right and all(len(secret) < UNGUESSABLE_CHARACTERS for secret in right):
                return self._too_many(request.remote, api)
            words = _TOKEN_WORD.findall(unquote(request.raw_path))
            is_in_address = any(principals.find(one) is not None for one in (*words, *request.query.values()))
            return error_response(400, TOKEN_IN_ADDRESS, "invalid_request_error", api) if is_in_address else None
        self.note(request.remote)
        if not shown and any(name.lower() in _TOKEN_NAMES for name in request.query):
            return error_response(401, TOKEN_IN_ADDRESS, "authentication_error", api)
        if shown and is_spent:
            return self._too_many(request.remote, api)
        if shown:
            self._count(request.remote)
        wrong = "this token is none that memd knows, or was taken back" if shown else "no token was shown"
        return error_response(401, f"memd: {wrong}; {SHOW_ONE}", "authentication_error", api)

    def look_up(self, remote: str | None, secret: str) -> Principal | None:
        """Return the principal of a typed-in token; None if unknown, or if guessable while the address must wait."""
        found, is_spent = self.principals.find(secret), self.wait_seconds(remote) > 0
        if found is None:
            self.note(remote)
            if not is_spent:
                self._count(remote)
        return None if is_spent and len(secret) < UNGUESSABLE_CHARACTERS else found

    def note(self, remote: str | None) -> None:
        """Count one refused request for the log."""
        address = remote or "unknown"
        if address not in self._untold and len(self._untold) >= ADDRESSES_MAX:
            address = REST
        if address in self._untold:
            self._untold[address] += 1
        else:
            self._tell(address, 1)

    def wait_seconds(self, remote: str | None) -> float:
        """Return how long an address must wait until its next attempt counts; 0 if it need not."""
        if not self._tried:
            return 0.0
        counted_until = self._tried.get(_network(remote), 0.0)
        return max(0.0, counted_until - self._clock() - (ATTEMPTS_MAX - 1) * ATTEMPT_SECONDS)

    def _count(self, remote: str | None) -> None:
        network, now = _network(remote), self._clock()
        self._tried[network] = max(self._tried.get(network, 0.0), now) + ATTEMPT_SECONDS

    def _too_many(self, remote: str | None, api: Api) -> web.Response:
        seconds = max(1, math.ceil(self.wait_seconds(remote)))
        message = f"memd: too many wrong tokens came from this address; try again in {seconds} s"
        return error_response(429, message, "rate_limit_error", api, {"Retry-After": str(seconds)})

    def _tell(self, address: str, attempts: int) -> None:
        log.warning("refused: no token that is known", extra={"remote": address, "attempts": attempts})
        self._audited(address, attempts)
        self._untold[address] = 0
        self._later(TOLD_SECONDS, self._tell_rest, address)

    def _tell_rest(self, address: str) -> None:
        if attempts := self._untold.pop(address):
            self._tell(address, attempts)


def _network(remote: str | None) -> str:
    """Return the unit in which an address is limited: for IPv6 the /64 that a provider gives to one customer."""
    address = remote or "unknown"
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address
