"""WebSockets between a client and the upstream (RFC 6455), on any path: a tunnel of bytes.

Rule: once the upstream has agreed to the upgrade, bytes pass both ways unread, in the order and at the pace in which
the other side takes them, until one side ends its connection, or the token of the client is taken back; then the
other's ends too. Memory has no part in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from memd.access import is_let_in_still
from memd.proxy.headers import decoded, printable
from memd.proxy.relay import Relayed, named_in_connection, relay
from memd.proxy.upstream.client import HOP_BY_HOP
from memd.proxy.upstream.pool import Assignment

BUFFER_BYTES = 1 << 16
"""Of each direction, before its sender has to wait."""
SWITCHED = 101
LOOK_SECONDS = 2.0
"""Between two looks whether the client's token is good still."""


def wants_websocket(request: web.BaseRequest) -> bool:
    """Whether a client asks to go on with WebSocket frames. (Other upgrades are ignored, as every server may.)"""
    return (
        "upgrade" in named_in_connection(request.headers)
        and request.headers.get("Upgrade", "").strip().lower() == "websocket"
    )


async def tunnel(
    request: web.Request, headers: CIMultiDict[str], assignment: Assignment, target: str
) -> web.StreamResponse:
    """Offer the upgrade to the upstream; pass bytes if it agrees, else its answer."""
    upgrade = CIMultiDict(headers, Connection="Upgrade", Upgrade="websocket")
    answer = await assignment.send("GET", target, upgrade, None)
    try:
        if answer.status != SWITCHED or answer.connection is None or answer.connection.protocol is None:
            return await relay(request, answer, [])
        protocol = answer.connection.protocol
        response = _Switched(answer)
        await response.prepare(request)
        from_upstream: Any = _Intake(protocol)  # any: aiohttp's types know its own parser of WebSockets alone
        from_client: Any = _Intake(request.protocol)
        protocol.set_parser(from_upstream, None)
        request.protocol.set_parser(from_client)
        to_upstream = StreamWriter(protocol, asyncio.get_running_loop())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass(from_client.stream, to_upstream.write))
                group.create_task(_pass(from_upstream.stream, response.write))
                group.create_task(_watch(request))
        except* (_Ended, ConnectionError, aiohttp.ClientError):
            pass
        return response
    finally:
        answer.close()


class _Ended(Exception):
    """One side has ended its connection, or the client may go on no longer."""


async def _pass(stream: StreamReader, write: Callable[[bytes], Awaitable[None]]) -> None:
    while data := await stream.readany():
        await write(data)
    raise _Ended


async def _watch(request: web.BaseRequest) -> None:
    while is_let_in_still(request):  # noqa: ASYNC110  # nobody tells of a token that is taken back
        await asyncio.sleep(LOOK_SECONDS)
    raise _Ended


class _Intake:
    """Takes what comes on an upgraded connection; aiohttp calls it the connection's parser."""

    def __init__(self, protocol: BaseProtocol) -> None:
        self.stream = StreamReader(protocol, BUFFER_BYTES, loop=asyncio.get_running_loop())

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take some bytes; the answer is that there is no error and nothing left over."""
        self.stream.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        """The connection has ended."""
        self.stream.feed_eof()


class _Switched(Relayed):
    """The upstream's agreement; what follows has no framing of HTTP's."""

    _length_check = False
    _send_headers_immediately = True

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        kept = ((name, value) for name, value in decoded(answer.raw_headers) if name.lower() not in HOP_BY_HOP)
        headers = CIMultiDict((name, printable(value)) for name, value in kept)
        headers.update(Upgrade="websocket", Connection="Upgrade")
        super().__init__(status=SWITCHED, reason=printable(answer.reason or ""), headers=headers)
        self.force_close()
