"""The client of the other daemons: it sends them what a client of this one asked.

Rule: nothing of a request is changed but its hop: target, body and headers go as they came, with the mark and in the
client's name. An answer that does not prove that a daemon of the cluster gives it is none. To daemons that speak TLS it
speaks TLS, and trusts whom the machine trusts (SSL_CERT_FILE).
"""

from __future__ import annotations

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from memd.admin.access import acting_headers, source_of
from memd.admin.http import IDEMPOTENCY_HEADER, key_of
from memd.principals import Principals
from memd.proxy.header_bytes import decoded
from memd.proxy.owners.hop import ALONE_HEADER, CHALLENGE_HEADER, FROM_HEADER, HOP_HEADER, HopMarks
from memd.proxy.relay import named_in_connection, target_of
from memd.proxy.upstream.client import NOT_FORWARDED
from memd.proxy.upstream.connection import Interim, exact_url, exchange, new_session, time_of_others
from memd.proxy.upstream.pool import NO_ANSWER
from memd.settings.model import Config

ASK_SECONDS = 2.0
"""Whoever shows what all daemons have waits so long for each."""
OK, NOT_FOUND = 200, 404
_OF_HOPS = {name.lower() for name in (HOP_HEADER, FROM_HEADER, ALONE_HEADER, CHALLENGE_HEADER)}
_OF_PAGES = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "sec-fetch-user")
"""Headers that say which page asks one of memd's own routes: that was judged here, by this daemon's address."""


class StrangerAnswered(aiohttp.ClientError):
    """Whoever answers at an address is no daemon of this cluster, or no longer knows that it is one."""

    def __init__(self) -> None:
        super().__init__("who answers there does not belong to this cluster")


class DaemonClient:
    """Sends requests to other daemons. Create it inside a running event loop and close it there."""

    def __init__(self, config: Config, marks: HopMarks, principals: Principals) -> None:
        self.header_bytes_max = config.limits.header_bytes_max
        self._marks = marks
        self._principals = principals
        self._session = new_session(
            keepalive_seconds=config.upstream.keepalive_seconds,
            connect_timeout_seconds=config.upstream.connect_timeout_seconds,
            header_bytes_max=self.header_bytes_max,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def send(
        self,
        request: web.Request,
        url: str,
        body: bytes,
        on_interim: Interim | None = None,
        *,
        target: str = "",
        alone: bool = False,
    ) -> aiohttp.ClientResponse:
        """Send a request to the daemon at a URL; see `exchange`.

        Args:
            target: another one than that of the request.
            alone: it is to answer of itself alone.

        Raises:
            StrangerAnswered: the answer is not that of a daemon of this cluster.
        """
        target, headers = target or target_of(request), self._headers(request, alone=alone)
        return await self._exchange(request.method, url, target, headers, source_of(request), body, on_interim)

    async def _exchange(
        self,
        method: str,
        url: str,
        target: str,
        headers: CIMultiDict[str],
        source: str = "",
        body: bytes = b"",
        on_interim: Interim | None = None,
    ) -> aiohttp.ClientResponse:
        proof = self._marks.put_on(headers, source)
        answer = await exchange(
            self._session,
            method,
            exact_url(url, target),
            headers,
            body or None,
            header_bytes_max=self.header_bytes_max,
            on_interim=on_interim,
        )
        if not self._marks.is_proven(answer.headers, proof):
            answer.close()
            raise StrangerAnswered
        return answer

    async def body_of(self, request: web.Request, url: str, target: str = "") -> bytes | None:
        """The body of a daemon's answer to a GET, of itself alone; empty if it has none, None if it refuses or says
        nothing."""
        try:
            async with (
                time_of_others(ASK_SECONDS),
                await self.send(request, url, b"", target=target, alone=True) as answer,
            ):
                body = await answer.read()
        except NO_ANSWER:
            return None
        return body if answer.status == OK else b"" if answer.status == NOT_FOUND else None

    async def is_there(self, url: str, seconds: float) -> bool:
        """Whether a daemon of the cluster answers anything within so many seconds."""
        try:
            async with time_of_others(seconds):
                (await self._exchange("OPTIONS", url, "/", CIMultiDict())).close()
                return True
        except NO_ANSWER:
            return False

    def _headers(self, request: web.Request, *, alone: bool) -> CIMultiDict[str]:
        dropped = NOT_FORWARDED | named_in_connection(request.headers) | _OF_HOPS
        is_own = request.path.startswith("/memd/")
        if is_own:
            dropped |= set(_OF_PAGES)
        given = decoded(request.raw_headers)
        headers = CIMultiDict((name, value) for name, value in given if name.lower() not in dropped)
        headers.update(acting_headers(request, self._principals))
        if is_own and request.method == "POST":
            headers[IDEMPOTENCY_HEADER] = key_of(request)
        if alone:
            headers[ALONE_HEADER] = "1"
        return headers
