"""Requests that show no token, or a wrong one: refused, told in the log, and from one address only so often.

Rule: whoever tries tokens leaves a trace and cannot fill the log: of each address the first attempt is told at once,
then once a minute how many there were. No line has a token in it. An address that tries too many is told to wait, and
until then no secret that could be guessed is looked at. A long one always is, because nobody guesses it: so whoever has
one is let in, also where a proxy gives the attempts of others the same address. A request without a token tries none.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from aiohttp import web

from memd.access import UNGUESSABLE_CHARACTERS, let_in, shown_secrets
from memd.clock import steady_now
from memd.http import TOKEN_IN_ADDRESS, error_response, token_refusal
from memd.ingest.topic import Inquiry
from memd.principals import Principal, Principals
from memd.wire.api import Api
from memd.wire.chat import CHAT

log = logging.getLogger("memd")

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


class WrongTokens:
    """Refuses requests by their token, and counts them by their address. Belongs to the event loop."""

    def __init__(
        self,
        later: Callable[[float, Callable[[str], None], str], object],
        audited: Callable[[str, int], None] = lambda address, attempts: None,
        clock: Callable[[], float] = steady_now,
    ) -> None:
        """
        Args:
            later: calls a function with an argument after so many seconds, as `loop.call_later` does.
            audited: is told of an address and its attempts, as the log is.
            clock: seconds, evenly.
        """
        self._later = later
        self._audited = audited
        self._clock = clock
        self.catch_up: Callable[[Inquiry | None], Awaitable[None]] | None = None
        """Hears of the tokens that other daemons know, as an inquiry tells; None where there are none."""
        self._untold: dict[str, int] = {}
        """By address, since its last line; an address without one has not been seen for a minute."""
        self._tried: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By address: attempts that count at a time, and the time. The one that tried longest ago comes first."""

    async def make_sure(self, request: web.BaseRequest, principals: Principals, inquiry: Inquiry | None = None) -> None:
        """In a cluster: hear of a token that another daemon knows, before a request that shows it is refused.

        Whoever tries tokens makes no more work with it than one question at a time.
        """
        if self.catch_up is not None and not principals.is_open and not self.wait_seconds(request.remote):
            await self.catch_up(inquiry)

    def refusal(
        self,
        request: web.BaseRequest,
        principals: Principals,
        api_of: Callable[[], Api] = lambda: CHAT,
    ) -> web.Response | None:
        """Let a request in that shows a token, where one is needed: None; any other gets this refusal."""
        is_known = let_in(request, principals) is not None
        if is_known and principals.is_open:
            return None
        shown, is_spent = [secret for _, secret in shown_secrets(request) if secret], self._is_spent(request.remote)
        if is_known:
            right = [secret for secret in shown if is_spent and principals.find(secret) is not None]
            if right and all(len(secret) < UNGUESSABLE_CHARACTERS for secret in right):
                return self._too_many(request.remote, api_of())
            is_in_address = any(principals.find(value) is not None for value in request.query.values())
            return error_response(400, TOKEN_IN_ADDRESS, "invalid_request_error", api_of()) if is_in_address else None
        self.note(request.remote)
        if not shown and any(name.lower() in _TOKEN_NAMES for name in request.query):
            return error_response(401, TOKEN_IN_ADDRESS, "authentication_error", api_of())
        if shown and is_spent:
            return self._too_many(request.remote, api_of())
        if shown:
            self._count(request.remote)
        return token_refusal(api_of())

    def look_up(self, remote: str | None, secret: str, principals: Principals) -> Principal | None:
        """The principal whose token a person typed in; None: nobody's, or one too many that could be guessed."""
        found, is_spent = principals.find(secret), self._is_spent(remote)
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
        return max(0.0, (self._level(_network(remote)) - (ATTEMPTS_MAX - 1)) * ATTEMPT_SECONDS)

    def _count(self, remote: str | None) -> None:
        network = _network(remote)
        self._tried[network] = self._level(network) + 1, self._clock()
        self._tried.move_to_end(network)
        if len(self._tried) > LIMITED_MAX:
            self._tried.popitem(last=False)

    def _level(self, network: str) -> float:
        level, at = self._tried.get(network, (0.0, 0.0))
        return max(0.0, level - (self._clock() - at) / ATTEMPT_SECONDS)

    def _is_spent(self, remote: str | None) -> bool:
        """Whether an address has to wait, and no secret of it that could be guessed is looked at."""
        return bool(self._tried) and self.wait_seconds(remote) > 0

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
