"""Clients' connections: how many there may be, how slow they may be, and what unreadable requests are answered.

Rule: a client's bad bytes cost it its own connection and one line in the log, never more. Whoever shows no token never
keeps out those who do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from memd.admin.http import ProvableConnection, error_response
from memd.proxy.cross_origin import let_page_read
from memd.proxy.upstream.connection import HEADERS_MAX
from memd.settings.model import LimitsSettings
from memd.store import descriptors
from memd.telemetry.logging import Content

log = logging.getLogger("memd")

_CHUNK_FRAMING = 8
"""Times a chunked body's bytes that its framing may take: six for chunks of one byte."""
TLS_HANDSHAKE_SECONDS_MAX = 10.0
BACKLOG = 128
"""Connections that may wait to be accepted."""
TOLD_SECONDS = 60.0
"""A full house is told once in this time."""


class HeadersTooLarge(BadHttpMessage):
    """A request's headers exceed their bound, all together."""


class Connection(ProvableConnection):
    """One client's connection.

    aiohttp bounds a header and their number; the bytes of all together are counted here, as they arrive, and so are
    those around the chunks of a body. Between them at most what is read at once is not counted.
    """

    def __init__(self, server: web.Server, *, header_bytes_max: int, **settings: Any) -> None:
        super().__init__(server, max_line_size=header_bytes_max, max_field_size=header_bytes_max, **settings)
        self.since = time.monotonic()
        self.is_leaving = False
        """It is being closed to make room."""
        self._header_bytes_max = header_bytes_max
        self._received = 0  # bytes since the end of the last head
        self._body: StreamReader | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether a request of it is being answered or waits for that."""
        return self._request_in_progress or bool(self._messages)

    def leave(self) -> None:
        """Close it at once, to make room."""
        self.is_leaving = True
        if self.transport is not None and not self.is_proven:
            self.transport.abort()  # one that does not read what it asked for would stay for ever, and not be counted
        self.force_close()

    def data_received(self, data: bytes) -> None:
        """Parse what came, within the bounds."""
        known = self._request_count
        body = None if self._body is None or self._body.is_eof() else self._body
        super().data_received(data)
        heads = self._request_count - known
        if heads:
            self._received = 0
            self._check_heads(heads)
        elif data and not self._upgraded and self._payload_parser is None:
            self._received += len(data)
            carried = 0 if body is None else _CHUNK_FRAMING * body.total_bytes
            if self._received > self._header_bytes_max + carried:
                self._refuse()
            elif body is not None and body.is_eof():
                self._received = 0

    def _check_heads(self, count: int) -> None:
        """Look at the heads of the requests that came last; each is within the bounds of a single header."""
        for place in range(len(self._messages) - count, len(self._messages)):
            message, self._body = self._messages[place]
            if isinstance(message, RawRequestMessage):
                size = len(message.path) + sum(len(name) + len(value) + 4 for name, value in message.raw_headers)
                if size > self._header_bytes_max:
                    while len(self._messages) > place:
                        self._messages.pop()
                    self._body = None
                    self._refuse()
                    return

    def _refuse(self) -> None:
        """Answer 431 in place of the request that is coming, and read nothing more."""
        problem = f"its headers exceed {self._header_bytes_max} bytes; send fewer, or raise limits.header_bytes_max"
        body_under_way = self._body is not None and not self._body.is_eof() and self.is_at_work
        if body_under_way or self.transport is None:
            self.force_close()
            return
        error = HeadersTooLarge(problem)
        self._messages.append((_ErrInfo(status=431, exc=error, message=problem), EMPTY_PAYLOAD))
        self._upgraded = True  # the parser gets nothing more
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
            too_large = isinstance(exc, LineTooLong | HeadersTooLarge) or "Too many headers" in problem
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

    house = _House([server for server, _ in served], connections_max, why)

    def connection(server: web.Server) -> asyncio.Protocol:
        if not house.has_room():
            return _RefusedConnection()
        return Connection(
            server,
            loop=loop,
            auto_decompress=False,
            keepalive_timeout=limits.idle_seconds,  # counts from the start, so it bounds a slow head as well
            header_bytes_max=limits.header_bytes_max,
            max_headers=HEADERS_MAX,
        )

    handshake_seconds = None if tls is None else TLS_HANDSHAKE_SECONDS_MAX
    return [
        await loop.create_server(
            partial(connection, server), sock=sock, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=handshake_seconds
        )
        for server, sock in served
    ]


class _House:
    """The connections of all servers together."""

    def __init__(self, servers: Sequence[web.Server], connections_max: int, why: str) -> None:
        """`why`: the reason why there are no more, for the log."""
        self._servers = servers
        self._connections_max = connections_max
        self._why = why
        self._told_at = -math.inf

    def has_room(self) -> bool:
        """Whether one more may come. In a full house the oldest leaves that showed nothing, or does nothing."""
        everywhere = (one for server in self._servers for one in server.connections)
        present = [one for one in everywhere if isinstance(one, Connection) and not one.is_leaving]
        if len(present) < self._connections_max:
            return True
        strangers = [one for one in present if not one.is_proven]
        leaving = min(strangers or [one for one in present if not one.is_at_work], key=_since, default=None)
        if leaving is None:
            self._tell("a connection was refused")
            return False
        self._tell("a connection without a token, or an idle one, made room for another")
        leaving.leave()
        return True

    def _tell(self, what: str) -> None:
        if time.monotonic() - self._told_at >= TOLD_SECONDS:  # who opens thousands must not fill the log either
            self._told_at = time.monotonic()
            log.warning(f"{what}: {self._why}", extra={"connections_max": self._connections_max})


def _since(connection: Connection) -> float:
    return connection.since
