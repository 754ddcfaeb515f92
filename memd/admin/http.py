"""Request bodies read within bounds, and errors in the shape that a client's API has.

Rule: a body never takes more memory than its bound, and a client that stops sending one loses its connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from memd.admin.access import TOKEN_HEADER
from memd.telemetry.logging import Content
from memd.wire.api import Api
from memd.wire.chat.api import CHAT

log = logging.getLogger("memd")

OWN_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
"""Headers of every answer that is memd's and not the upstream's: no page of another origin may load it as anything."""


def error_response(status: int, message: str, kind: str, api: Api = CHAT) -> web.Response:
    """Return an error of memd's own in the shape that clients of `api` understand."""
    return web.Response(status=status, body=api.error_body(status, message, kind), content_type="application/json")


def token_refusal(api: Api = CHAT) -> web.Response:
    """Return the answer to a request that does not show `auth.token`."""
    message = f"memd: show its auth.token, as `Authorization: Bearer TOKEN` or in the header {TOKEN_HEADER}"
    return error_response(401, message, "authentication_error", api)


async def read_body(request: web.Request, bytes_max: int, idle_seconds: float) -> bytes | None:
    """Return the whole request body, or None if it is larger than `bytes_max`.

    Raises:
        TimeoutError: the client sent nothing for `idle_seconds`; its connection is closed.
    """
    if request.content_length is not None and request.content_length > bytes_max:
        return None
    parts: list[bytes] = []
    size = 0
    async for part in body_parts(request, idle_seconds):
        size += len(part)
        if size > bytes_max:
            return None
        parts.append(part)
    return b"".join(parts)


async def body_parts(request: web.BaseRequest, idle_seconds: float) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive.

    Raises:
        TimeoutError: the client sent nothing for `idle_seconds`; its connection is closed.
    """
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                part = await request.content.readany()
        except TimeoutError:
            fields = {"method": request.method, "path": Content(request.path), "seconds": idle_seconds}
            log.warning("a client stopped sending its request body", extra=fields)
            if request.transport is not None:
                request.transport.abort()
            raise
        if not part:
            return
        yield part
