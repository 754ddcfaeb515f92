"""The daemon's two addresses and the connections to them. The model's address is for clients; memd's own has the page
and all of `/memd/`. This module limits the number and slowness of connections, and answers unreadable requests.

Rule: both addresses are on one host and never on one port. For a browser the port is part of the origin, and a page
from the model server must not be able to act as memd's own.

Malformed bytes cost a client its own connection and one line in the log, never more. Clients without a token never keep
out those with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import ssl
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from memd.access import ProvableConnection, error_response
from memd.errors import AddressUnusable, MemdError
from memd.proxy.relay import let_page_read
from memd.proxy.upstream.connection import HEADER_BYTES_MAX, HEADERS_MAX
from memd.settings.model import WILDCARDS, Config, LimitsSettings, is_this_machine
from memd.store.disk import DESCRIPTORS_REMEDY, connections_room, descriptors_limit
from memd.telemetry.logging import Content

log = logging.getLogger("memd")

PORT_MAX = 65_535
EVERYWHERE = dict(zip(WILDCARDS, ("127.0.0.1", "127.0.0.1", "::1"), strict=True))
"""Hosts that mean every address of this machine, each with the one that local programs use to reach it."""
IN_CIRCLES = "where memd itself listens: requests would go round in circles"


class Listeners(NamedTuple):
    """Bound sockets at both addresses, not yet listening."""

    model: socket.socket
    own: socket.socket
    moved: str = ""
    """Why memd's own address is not the usual one; empty if it is."""

    def close(self) -> None:
        """Close both sockets."""
        self.model.close()
        self.own.close()


class Addresses(NamedTuple):
    """The URLs of both addresses, without a path."""

    model: str
    own: str
    local: str
    """memd's own, as an IP address of this machine."""


def bound(config: Config) -> Listeners:
    """Bind the addresses in the settings. Raises AddressUnusable: one of them cannot be used."""
    host, setting = config.listen.host, "--admin-port (or admin.port)"
    with contextlib.ExitStack() as on_error:
        model = _bound(host, config.listen.port, "--port (or listen.port)")
        on_error.callback(model.close)
        try:
            listeners = Listeners(model, _bound(host, own_port(config), setting))
        except AddressUnusable as error:
            if config.admin.port != "auto":
                raise
            listeners = Listeners(model, _bound(host, 0, setting), str(error))
        on_error.pop_all()
    return listeners


def addresses_of(config: Config, listeners: Listeners) -> Addresses:
    """Return the URLs at which local programs reach the listeners."""
    host = config.listen.host
    ports = [listener.getsockname()[1] for listener in (listeners.model, listeners.own)]
    scheme = "https" if config.listen.tls_cert else "http"
    model, own = (f"{scheme}://{reached(host)}:{port}" for port in ports)
    return Addresses(model, own, f"{scheme}://{reached(listeners.own.getsockname()[0])}:{ports[1]}")


def tls_of(config: Config) -> ssl.SSLContext | None:
    """Load the TLS certificate for both addresses; None if they use plain HTTP. Raises MemdError: it cannot be used."""
    cert, key = config.listen.tls_cert, config.listen.tls_key
    if not cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    for path in (cert, key):
        if not Path(path).is_file():
            raise MemdError(f"{path}: there is no such file; correct listen.tls_cert and listen.tls_key")
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # otherwise OpenSSL asks for a passphrase, and waits
    except (ssl.SSLError, OSError) as error:
        raise MemdError(
            f"{cert} and {key} cannot be used for TLS ({error.strerror or error}); give PEM files of a certificate and "
            "of its own key without a passphrase, which this user may read"
        ) from None
    return context


def own_port(config: Config) -> int:
    """Return the port of memd's own address according to the settings; 0: any free one."""
    if config.admin.port != "auto":
        return config.admin.port
    return config.listen.port + 1 if 0 < config.listen.port < PORT_MAX else 0


def leading_back(config: Config) -> str | None:
    """Return the address of a model server that is memd's own listener, or None. Requests to it would loop for ever."""
    listens = config.listen.host
    for one in config.upstream.each():
        url = urlsplit(one.url)
        host, port = url.hostname or "", url.port or {"http": 80, "https": 443}[url.scheme]
        # `localhost` may mean either loopback address, and a wildcard listener listens on both.
        may_be_it = not {host, listens}.isdisjoint({"localhost", *EVERYWHERE}) and port == config.listen.port
        is_it = may_be_it and is_this_machine(host) and (listens in EVERYWHERE or is_this_machine(listens))
        if is_it or (host, port) == (listens, config.listen.port):
            return one.address
    return None


def _bound(host: str, port: int, setting: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: f"stop what uses the port, or choose another with {setting}",
            errno.EACCES: f"choose a port that every user may take, one from 1024, with {setting}",
        }
        remedy = remedies.get(error.errno or 0, "give an address of this machine with --host (or listen.host)")
        raise AddressUnusable(f"cannot listen on {host}:{port}: {error.strerror or error}; {remedy}") from None


def reached(host: str) -> str:
    """Return the host for URLs by which local programs reach memd's listener."""
    named = EVERYWHERE.get(host, host)
    return f"[{named}]" if ":" in named else named


# -- connections ---------------------------------------------------------------------------------------------

_CHUNK_FRAMING = 8
"""Allowed framing bytes per body byte in a chunked body; chunks of one byte need six."""
TLS_HANDSHAKE_SECONDS_MAX = 10.0
"""Counted from accept."""
BACKLOG = 128
TOO_LARGE = "its first line, a header or all of them are too long; send less"
SPEAKS_TLS = "a client speaks TLS, and memd does not: let its base URL begin with http://, or set listen.tls_cert"
_TLS_SEEN = "HTTPS traffic"
"""Part of aiohttp's message for the first bytes of TLS."""
TOLD_SECONDS = 60.0
"""Minimum time between two log lines about the connection limit."""


class HeadersTooLarge(BadHttpMessage):
    """A request's headers together exceed their bound."""


class Connection(ProvableConnection):
    """One client's connection, from accept on. aiohttp bounds the size of each header and their number. This class also
    bounds the bytes of all headers together, as they arrive, and those of a body's chunk framing. Bytes that arrive in
    the same read as the end of a head or body are not counted."""

    def __init__(self, server: web.Server, house: House, **settings: Any) -> None:
        super().__init__(server, max_line_size=HEADER_BYTES_MAX, max_field_size=HEADER_BYTES_MAX, **settings)
        self.since = time.monotonic()
        self._house = house
        self._accepted: asyncio.Transport | None = None  # below TLS, where there is TLS
        self._received = 0  # bytes since the end of the last head
        self._body: StreamReader | None = None

    @property
    def is_at_work(self) -> bool:
        """True if one of its requests is being answered or waits for it."""
        return self._request_in_progress or bool(self._messages)

    def arrive(self, accepted: asyncio.Transport) -> bool:
        """Register the connection before anything is read; if there is no room, close it and return False."""
        self._accepted = accepted
        if self._house.take_in(self):
            return True
        accepted.abort()
        return False

    def leave(self) -> None:
        """Close it at once to make room."""
        if self._accepted is not None and not self.is_proven:
            self._accepted.abort()  # a client that never reads its answer would stay open for ever, uncounted
        self.force_close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start handling requests."""
        if self._accepted is not None or self.arrive(cast(asyncio.Transport, transport)):
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Unregister the connection."""
        self._house.let_go(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, within the bounds."""
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
            if self._received > HEADER_BYTES_MAX + carried:
                self._refuse()
            elif body is not None and body.is_eof():
                self._received = 0

    def _check_heads(self, count: int) -> None:
        """Check the total size of the latest requests' heads; each header is within its bound already."""
        for place in range(len(self._messages) - count, len(self._messages)):
            message, self._body = self._messages[place]
            if isinstance(message, RawRequestMessage):
                size = len(message.path) + sum([len(name) + len(value) + 4 for name, value in message.raw_headers])
                if size > HEADER_BYTES_MAX:
                    while len(self._messages) > place:
                        self._messages.pop()
                    self._body = None
                    self._refuse()
                    return

    def _refuse(self) -> None:
        """Answer 431 instead of the incoming request, and read nothing more."""
        problem = f"its headers exceed {HEADER_BYTES_MAX:,} bytes; send fewer"
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
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer an unreadable request, or one whose handler failed, with an error in an API's shape."""
        if not isinstance(exc, BadHttpMessage):
            super().handle_error(request, status, exc, message)  # logs it with the traceback
            answer = error_response(500, "memd: something went wrong in memd itself; its log says what", "server_error")
            let_page_read(request, answer, is_open=True)
        else:
            problem = " ".join(str(exc.message).split())[:200]
            fields = {"remote": request.remote, "kind": type(exc).__name__, "problem": Content(problem)}
            log.info(SPEAKS_TLS if _TLS_SEEN in problem else "a request cannot be read", extra=fields)
            too_large = isinstance(exc, LineTooLong | HeadersTooLarge) or "Too many headers" in problem
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if too_large else HTTPStatus.BAD_REQUEST
            told = TOO_LARGE if too_large else problem
            answer = error_response(status, f"memd: the request cannot be read: {told}", "invalid_request_error")
        answer.force_close()
        return answer


class _Handshake(asyncio.Protocol):
    """A connection that begins with TLS and hands over after the handshake. `create_server` could do the handshake, but
    reports a connection only after it, so that before it could be neither counted nor closed."""

    def __init__(self, connection: Connection, tls: ssl.SSLContext, seconds_max: float) -> None:
        self._connection = connection
        self._tls = tls
        self._seconds_max = seconds_max
        self._starting: Coroutine[Any, Any, asyncio.Transport | None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = cast(asyncio.Transport, transport)
        if not self._connection.arrive(accepted):
            return
        self._starting = asyncio.get_running_loop().start_tls(
            accepted, self._connection, self._tls, server_side=True, ssl_handshake_timeout=self._seconds_max
        )
        # Not as a task: it might start after the first bytes were read, and lose them.
        self._starting.send(None).add_done_callback(partial(self._go_on, accepted))

    def _go_on(self, accepted: asyncio.Transport, _: asyncio.Future[Any]) -> None:
        """Hand the connection over before its first bytes, or close it."""
        assert self._starting is not None
        transport = None
        try:
            self._starting.send(None)
        except StopIteration as ended:
            transport = ended.value
        except OSError:  # includes TLS errors: not TLS, no common cipher, too slow, disconnected
            pass
        finally:
            if transport is None or transport.is_closing():
                accepted.abort()
                self._connection.connection_lost(None)
            else:
                self._connection.connection_made(transport)


async def listen(
    served: Sequence[tuple[web.Server, socket.socket]], limits: LimitsSettings, tls: ssl.SSLContext | None
) -> House:
    """Accept connections on each socket for its server until the returned object is closed. The number of connections
    stays within the descriptor limit: without a free descriptor, a connection would be reset before it could be
    answered, and nothing could be stored."""
    loop = asyncio.get_running_loop()
    allowed = descriptors_limit()
    room = connections_room(allowed)
    connections_max = min(limits.connections_max, room)
    why = f"{connections_max} are open"
    if room < limits.connections_max:
        why = f"{room} are open, and this process may have {allowed} descriptors; {DESCRIPTORS_REMEDY}"
        fields = {"connections_max": limits.connections_max}
        log.warning(
            f"only {room} connections are accepted: this process may have {allowed} descriptors; {DESCRIPTORS_REMEDY}",
            extra=fields,
        )

    house = House(connections_max, why)

    def connection(server: web.Server) -> asyncio.Protocol:
        connection = Connection(
            server,
            house,
            loop=loop,
            auto_decompress=False,
            keepalive_timeout=limits.idle_seconds,  # counted from the start, so it also bounds a slow head
            max_headers=HEADERS_MAX,
        )
        handshake_seconds = min(TLS_HANDSHAKE_SECONDS_MAX, limits.idle_seconds)
        return connection if tls is None else _Handshake(connection, tls, handshake_seconds)

    for server, sock in served:
        house.doors.append(await loop.create_server(partial(connection, server), sock=sock, backlog=BACKLOG))
    return house


class House:
    """The connections of all servers together."""

    def __init__(self, connections_max: int, why: str) -> None:
        """`why`: the reason for the limit, for the log."""
        self.doors: list[asyncio.Server] = []
        self._present: set[Connection] = set()
        self._connections_max = connections_max
        self._why = why
        self._told_at = -math.inf

    def take_in(self, connection: Connection) -> bool:
        """Register a connection if there is room. At the limit, close the oldest one that never showed a token, else
        the oldest idle one; False if there is none."""
        if len(self._present) >= self._connections_max:
            strangers = [one for one in self._present if not one.is_proven]
            leaving = min(
                strangers or [one for one in self._present if not one.is_at_work],
                key=lambda one: one.since,
                default=None,
            )
            if leaving is None:
                self._tell("a connection was refused")
                return False
            self._tell("a connection without a token, or an idle one, made room for another")
            self.let_go(leaving)
            leaving.leave()
        self._present.add(connection)
        return True

    def let_go(self, connection: Connection) -> None:
        """Unregister a connection, if registered."""
        self._present.discard(connection)

    def close(self) -> None:
        """Stop accepting. Open connections stay; those still in their TLS handshake are closed."""
        for door in self.doors:
            door.close()
        for connection in [one for one in self._present if one.transport is None]:
            connection.leave()

    def _tell(self, what: str) -> None:
        if time.monotonic() - self._told_at >= TOLD_SECONDS:  # a client that opens thousands must not fill the log
            self._told_at = time.monotonic()
            log.warning(f"{what}: {self._why}", extra={"connections_max": self._connections_max})
