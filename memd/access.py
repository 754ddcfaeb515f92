"""Access: which principal a request comes from, which routes are this machine's alone, bodies and errors.

Rule: where there are tokens every request has to carry one; without any memd listens on this machine alone. Web pages
of other origins get neither memd's own routes nor memory in the others: a page that the user happens to visit must not
read their memory.

Whoever tries tokens leaves a trace and cannot fill the log: of each address the first attempt is told at once,
then once a minute how many there were. No line has a token in it. An address that tries too many is told to wait, and
until then no secret that could be guessed is looked at. A long one always is, because nobody guesses it: so whoever has
one is let in, also where a proxy gives the attempts of others the same address. A request without a token tries none.

A body never takes more memory than its bound, nor all of them together more than theirs, nor those of one principal all
of that, and a client that stops sending one, or sends it too slowly, loses its connection.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
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
"""Takes room for so many bytes of a body, or raises `TooManyBodies`."""
BODY_BYTES_PER_SECOND_MIN = 1_024
"""The slowest that a body may come in the long run; a modem of the nineties sends three times as much."""
HELD_SECONDS_MAX = 1_800
"""A body that is held while it comes brings, at its slowest, as much again in this time as it has brought already: of a
hundred megabytes of which ten are missing these come within four minutes, or the room is free."""
SHARE_MAX = 7 / 8
"""Of the room that others leave, what one principal may have of it."""
IDEMPOTENCY_HEADER = "Idempotency-Key"
"""Requests to memd's own routes that show the same are one, sent more than once
(draft-ietf-httpapi-idempotency-key-header)."""
JOINED_AT_ONCE_BYTES = 4 << 20
"""A body whose parts are joined on the event loop: 3 ms."""
RETRY_SECONDS = 5
"""The wait that a client is told for which there is no room."""
OWN_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
"""Headers of every answer that is memd's and not the upstream's: no page of another origin may load it as anything."""


class ProvableConnection(web.RequestHandler):
    """A client's connection that knows whether a request of it was let in; else it makes room for others."""

    is_proven = False


def prove(request: web.BaseRequest) -> None:
    """Note that a request was let in."""
    if isinstance(request.protocol, ProvableConnection):
        request.protocol.is_proven = True


def key_of(request: web.BaseRequest) -> str:
    """The key by which a request is known when it is sent again: its client's, else one of its own."""
    return request.headers.get(IDEMPOTENCY_HEADER) or secrets.token_hex(16)


def error_response(status: int, message: str, kind: str, api: Api = CHAT) -> web.Response:
    """Return an error of memd's own in the shape that clients of `api` understand."""
    return web.Response(status=status, body=api.error_body(status, message, kind), content_type="application/json")


class TooManyBodies(MemdError):
    """The request bodies that are held at the same time exceed their bound."""


class BodyRoom:
    """The room for the bodies of all requests. Belongs to the event loop.

    Each principal but the owner leaves some of it to the others, whatever these hold already.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = Counter[str]()
        """By the principal's `author`."""

    @contextmanager
    def holding(self, author: str = "") -> Iterator[Take]:
        """For one request of a principal (`Principal.author`): the function that it takes room with; all that it took
        is free again in the end."""
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
            self._held += Counter()  # keeps those who hold some


def too_many_bodies(error: TooManyBodies, api: Api = CHAT) -> web.Response:
    """The answer to a request for whose body there is no room now."""
    response = error_response(503, f"memd: {error}", "overloaded_error", api)
    response.headers["Retry-After"] = str(RETRY_SECONDS)
    return response


async def read_body(
    request: web.Request, bytes_max: int, idle_seconds: float, take: Take = lambda size: None
) -> bytes | None:
    """Return the whole request body, or None if it is larger than `bytes_max`.

    Args:
        take: takes the room for it (see `BodyRoom`); by default nothing but its own bound limits it.

    Raises:
        TimeoutError: the client sent nothing for `idle_seconds`, or too little; its connection is closed.
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
    return await asyncio.to_thread(b"".join, parts)  # which goes on beside Python


async def body_parts(
    request: web.BaseRequest, idle_seconds: float, again_seconds: float = math.inf
) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive. `again_seconds`: see `HELD_SECONDS_MAX`.

    Raises:
        TimeoutError: the client sent nothing for `idle_seconds`, or fell as far behind the slowest that it may send
            (also `BODY_BYTES_PER_SECOND_MIN`); its connection is closed. What came faster before does not count for
            what comes later.
    """
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
"""Characters; the secrets that `memd token add` makes are longer."""
_BEARER = "bearer "
# The standard's and the usual ones, then those of Cloudflare, Akamai, Fly, Envoy, Tailscale and load balancers.
_FORWARDING = re.compile(
    r"forwarded|via|x-forwarded-.*|x-real-ip|cf-(?:connecting-ip|ray|visitor)|true-client-ip|fly-client-ip"
    r"|x-envoy-external-address|tailscale-user-.*|x-(?:cluster-)?client-ip|x-original-forwarded-.*",
    re.IGNORECASE,
)
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}")
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


def own_secrets(request: web.BaseRequest, principals: Principals) -> list[tuple[str, str]]:
    """The tokens of memd's own that a request shows, each with its header; none of them may reach the upstream.

    One that was taken back neither: beside a token that is known it is no reason to refuse the request.
    """
    if principals.is_open:
        return []
    return [
        (name, secret)
        for name, secret in shown_secrets(request)
        if secret and (secret.startswith(SECRET_PREFIX) or principals.find(secret) is not None)
    ]


def without_secrets(name: str, value: str, own: Collection[str]) -> str | None:
    """The part of a header that may leave for the upstream; None: nothing.

    Nothing where one of these secrets stands in it, as in `has_secret`; of `Cookie` all cookies but that one.
    """
    if name.lower() != "cookie":
        return None if has_secret(value, own) else value
    cookies = value.split(";")
    kept = [cookie for cookie in cookies if not has_secret(cookie, own)]
    return value if len(kept) == len(cookies) else ";".join(kept).strip() or None


def has_secret(text: str, own: Collection[str]) -> bool:
    """Whether one of these secrets stands in a text, plainly, percent-encoded or in base64, and not as a part of a
    longer word; or anybody's that `memd token` made. In time that grows with the length alone: a client chooses it.
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
    """Whether a request comes from a program, or from a page of memd's own, and is addressed to this machine."""
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


TOLD_SECONDS = 60.0
ADDRESSES_MAX = 256
"""Addresses that are told apart in the log at a time; the rest are counted together."""
REST = "others"
ATTEMPTS_MAX = 30
"""Wrong tokens in a row from one address, before it has to wait for each further one."""
ATTEMPT_SECONDS = 1.0
LIMITED_MAX = 4_096
"""Addresses whose attempts are limited at a time; beyond that the one that tried longest ago begins anew."""
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
    """Refuses requests by their token, and counts them by their address. Belongs to the event loop."""

    def __init__(
        self,
        principals: Principals,
        later: Callable[[float, Callable[[str], None], str], object],
        audited: Callable[[str, int], None] = lambda address, attempts: None,
        clock: Callable[[], float] = steady_now,
    ) -> None:
        """
        Args:
            principals: whoever may use memd.
            later: calls a function with an argument after so many seconds, as `loop.call_later` does.
            audited: is told of an address and its attempts, as the log is.
            clock: seconds, evenly.
        """
        self.principals = principals
        self._later = later
        self._audited = audited
        self._clock = clock
        self.catch_up: Callable[[Iterable[str]], Awaitable[Any]] | None = None
        """Hears of the tokens that other daemons know, and returns the look at the shared log (`ingest.topic.Inquiry`),
        which is about these topics too; None where there are no other daemons."""
        self._untold: dict[str, int] = {}
        """By address, since its last line; an address without one has not been seen for a minute."""
        self._tried: Latest[str, tuple[float, float]] = Latest(LIMITED_MAX)
        """By address: attempts that count at a time, and the time. The one that tried longest ago comes first."""

    async def make_sure(self, request: web.BaseRequest, topics: Iterable[str]) -> Any:
        """In a cluster: hear of the tokens that other daemons know, before a request is let in or refused: also of the
        first one, before which all are let in. `topics`: those that it names, of which it will want to know the same.
        Returns the look, None where there was none.

        Whoever tries tokens makes no more work with it than one question at a time.
        """
        if self.catch_up is None or self.wait_seconds(request.remote):
            return None
        return await self.catch_up(topics)

    def refusal(self, request: web.BaseRequest, api: Api = CHAT) -> web.Response | None:
        """Let a request in that shows a token, where one is needed: None; any other gets this refusal."""
        principals = self.principals
        is_known = let_in(request, principals) is not None
        if is_known and principals.is_open:
            return None
        shown, is_spent = [secret for _, secret in shown_secrets(request) if secret], self._is_spent(request.remote)
        if is_known:
            right = [secret for secret in shown if is_spent and principals.find(secret) is not None]
            if right and all(len(secret) < UNGUESSABLE_CHARACTERS for secret in right):
                return self._too_many(request.remote, api)
            own = {one for _, one in own_secrets(request, principals) if len(one) >= UNGUESSABLE_CHARACTERS}
            is_in_address = has_secret(request.raw_path, own) or any(  # a short one may be any word of a path
                principals.find(value) is not None for value in request.query.values()
            )
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
        """The principal whose token a person typed in; None: nobody's, or one too many that could be guessed."""
        found, is_spent = self.principals.find(secret), self._is_spent(remote)
        if found is None:
            self.note(remote)
            if not is_spent:
                self._count(remote)
        return None if is_spent and len(secret) < UNGUESSABLE_CHARACTERS else found

    def note(self, remote: str | None) -> None:
        """Note one refused request for the log."""
        address = remote or "unknown"
        if address not in self._untold and len(self._untold) >= ADDRESSES_MAX:
            address = REST
        if address in self._untold:
            self._untold[address] += 1
        else:
            self._tell(address, 1)

    def wait_seconds(self, remote: str | None) -> float:
        """How long an address has to wait before its next attempt counts; 0: not at all."""
        if not self._tried:
            return 0.0
        return max(0.0, (self._level(_network(remote)) - (ATTEMPTS_MAX - 1)) * ATTEMPT_SECONDS)

    def _count(self, remote: str | None) -> None:
        network = _network(remote)
        self._tried[network] = self._level(network) + 1, self._clock()

    def _level(self, network: str) -> float:
        level, at = self._tried.get(network, (0.0, 0.0))
        return max(0.0, level - (self._clock() - at) / ATTEMPT_SECONDS)

    def _is_spent(self, remote: str | None) -> bool:
        """Whether an address has to wait, and no secret of it that could be guessed is looked at."""
        return self.wait_seconds(remote) > 0

    def _too_many(self, remote: str | None, api: Api) -> web.Response:
        seconds = max(1, math.ceil(self.wait_seconds(remote)))
        message = f"memd: too many wrong tokens came from this address; try again in {seconds} s"
        response = error_response(429, message, "rate_limit_error", api)
        response.headers["Retry-After"] = str(seconds)
        return response

    def _tell(self, address: str, attempts: int) -> None:
        log.warning("refused: no token that is known", extra={"remote": address, "attempts": attempts})
        self._audited(address, attempts)
        self._untold[address] = 0
        self._later(TOLD_SECONDS, self._tell_rest, address)

    def _tell_rest(self, address: str) -> None:
        if attempts := self._untold.pop(address):
            self._tell(address, attempts)


def _network(remote: str | None) -> str:
    """The address as it is limited: of IPv6 the half that a provider gives to one customer."""
    address = remote or "unknown"
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address
