"""Request bodies read within bounds, and errors in the shape that a client's API has.

Rule: a body never takes more memory than its bound, nor all of them together more than theirs, and a client that stops
sending one, or sends it too slowly, loses its connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from memd.errors import (
    BadDocument,
    BadQuestion,
    BadSource,
    BadTopicId,
    ErasedForGood,
    Forbidden,
    MemdError,
    NotFound,
    UnknownTopic,
)
from memd.telemetry.logging import Content
from memd.wire.api import Api
from memd.wire.chat import CHAT

log = logging.getLogger("memd")

Take = Callable[[int], None]
"""Takes room for so many bytes of a body, or raises `TooManyBodies`."""
BODY_BYTES_PER_SECOND_MIN = 1_024
"""The slowest that a body may come in the long run; a modem of the nineties sends three times as much."""
IDEMPOTENCY_HEADER = "Idempotency-Key"
"""Requests to memd's own routes that show the same are one, sent more than once
(draft-ietf-httpapi-idempotency-key-header)."""
JOINED_AT_ONCE_BYTES = 4 << 20
"""A body whose parts are joined on the event loop: 3 ms."""
_KEY = web.RequestKey("key", str)
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
    """The key by which a request is known when it is sent again: its client's, else one of its own, which goes with it
    where it is passed on: whoever answers after the first is gone knows it."""
    if _KEY not in request:
        request[_KEY] = request.headers.get(IDEMPOTENCY_HEADER) or secrets.token_hex(16)
    return request[_KEY]


def error_response(status: int, message: str, kind: str, api: Api = CHAT) -> web.Response:
    """Return an error of memd's own in the shape that clients of `api` understand."""
    return web.Response(status=status, body=api.error_body(status, message, kind), content_type="application/json")


def refusal_of(error: MemdError) -> tuple[int, str]:
    """The status and the kind of the answer to a request to a route of memd's own that was refused."""
    if isinstance(error, NotFound):
        return 404, UnknownTopic.kind if isinstance(error, UnknownTopic) else "not_found"
    if isinstance(error, Forbidden):
        return 403, Forbidden.kind
    if isinstance(error, ErasedForGood):
        return 409, ErasedForGood.kind
    if isinstance(error, BadQuestion | BadTopicId | BadDocument | BadSource):
        return 400, "invalid_request_error"
    return 503, "unavailable"


class TooManyBodies(MemdError):
    """The request bodies that are held at the same time exceed their bound."""


class BodyRoom:
    """The room for the bodies of all requests. Belongs to the event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0

    @contextmanager
    def holding(self) -> Iterator[Take]:
        """For one request: the function that it takes room with; all that it took is free again in the end."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._held + size > self._bytes_max:
                raise TooManyBodies(
                    f"the bodies of all requests together exceed {self._bytes_max} bytes; try again in a moment, or "
                    "raise limits.body_bytes_max"
                )
            self._held += size
            taken += size

        try:
            yield take
        finally:
            self._held -= taken


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
    async for part in body_parts(request, idle_seconds):
        size += len(part)
        if size > bytes_max:
            return None
        take(len(part))
        parts.append(part)
    if size <= JOINED_AT_ONCE_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)  # which goes on beside Python


async def body_parts(request: web.BaseRequest, idle_seconds: float) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive.

    Raises:
        TimeoutError: the client sent nothing for `idle_seconds`, or for longer than that, all its pauses together, less
            than `BODY_BYTES_PER_SECOND_MIN`; its connection is closed.
    """
    clock = asyncio.get_running_loop().time
    waited, size = 0.0, 0
    while True:
        left = idle_seconds + size / BODY_BYTES_PER_SECOND_MIN - waited
        began = clock()
        try:
            async with asyncio.timeout(min(idle_seconds, left)):
                part = await request.content.readany()
            waited += clock() - began
            size += len(part)
        except TimeoutError:
            fields = {"method": request.method, "path": Content(request.path), "seconds": idle_seconds, "bytes": size}
            log.warning("a client stopped sending its request body, or sends it too slowly", extra=fields)
            if request.transport is not None:
                request.transport.abort()
            raise
        if not part:
            return
        yield part
