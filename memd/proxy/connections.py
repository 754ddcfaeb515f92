"""Clients' connections: how many there may be, how slow they may be, and what unreadable requests are answered.

Rule: a client's bad bytes cost it its own connection and one line in the log, never more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from memd.admin.http import error_response
from memd.proxy.cross_origin import let_page_read
from memd.proxy.upstream.connection import HEADERS_MAX
from memd.settings.model import LimitsSettings
from memd.store import descriptors
from memd.telemetry.logging import Content

log = logging.getLogger("memd")

TLS_HANDSHAKE_SECONDS_MAX = 10.0
BACKLOG = 128
"""Connections that may wait to be accepted."""


class Connection(web.RequestHandler):
    """One client's connection."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an unreadable request, or one that a handler failed on, with an error in an API's shape."""
        if not isinstance(exc, BadHttpMessage):
            super().handle_error(request, status, exc, message)  # says it in the log, with the traceback
            answer = error_response(500, "memd: something went wrong in memd itself; its log says what", "server_error")
            let_page_read(request, answer, token="")
        else:
            problem = " ".join(str(exc.message).split())[:200]
            fields = {"remote": request.remote, "kind": type(exc).__name__, "problem": Content(problem)}
            log.info("a request cannot be read", extra=fields)
            too_large = isinstance(exc, LineTooLong) or "Too many headers" in problem
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if too_large else HTTPStatus.BAD_REQUEST
            answer = error_response(status, f"memd: the request cannot be read: {problem}", "invalid_request_error")
        answer.force_close()
        return answer


class _RefusedConnection(asyncio.Protocol):
    """A connection beyond the limit; it is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def listen(
    served: Sequence[tuple[web.Server, socket.socket]], limits: LimitsSettings, tls: ssl.SSLContext | None
) -> list[asyncio.Server]:
    """Accept connections on each socket and hand their requests to its server, until the returned ones are closed.

    All together have no more than the limit of descriptors has room for: one that no descriptor is left for would be
    reset before anything could be said about it, and so would be all others, and nothing could be stored.
    """
    loop = asyncio.get_running_loop()
    allowed = descriptors.limit()
    room = descriptors.connections_max(allowed)
    connections_max = min(limits.connections_max, room)
    why = "limits.connections_max are open"
    if room < limits.connections_max:
        why = f"{room} are open, and this process may have {allowed} descriptors; {descriptors.REMEDY}"
        fields = {"connections_max": limits.connections_max}
        log.warning(
            f"only {room} connections are accepted: this process may have {allowed} descriptors; {descriptors.REMEDY}",
            extra=fields,
        )

    def connection(server: web.Server) -> asyncio.Protocol:
        if sum(len(one.connections) for one, _ in served) >= connections_max:
            log.warning(f"a connection was refused: {why}", extra={"connections_max": connections_max})
            return _RefusedConnection()
        return Connection(
            server,
            loop=loop,
            auto_decompress=False,
            keepalive_timeout=limits.idle_seconds,  # counts from the start, so it bounds a slow head as well
            max_line_size=limits.header_bytes_max,
            max_field_size=limits.header_bytes_max,
            max_headers=HEADERS_MAX,
        )

    handshake_seconds = None if tls is None else TLS_HANDSHAKE_SECONDS_MAX
    return [
        await loop.create_server(
            partial(connection, server), sock=sock, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=handshake_seconds
        )
        for server, sock in served
    ]
