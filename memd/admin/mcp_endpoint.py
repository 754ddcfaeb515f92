"""MCP's streamable HTTP at memd's own address: who may ask, and with the right of which tool.

Rule: no session and no state: each POST is answered by itself, as the specification allows (Transports, at
https://modelcontextprotocol.io/specification), so a restart is not noticed. Who may ask was decided before, and the
tools ask memd's operations in the name of that principal, as the routes do.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from memd.access import error_response, let_in_as, principal_of, read_body
from memd.admin.parts import DaemonParts
from memd.admin.routes import TOOLS, call
from memd.admin.routing import Answer, as_given, encoded, route_of
from memd.wording import pip_install

NOT_INSTALLED = f"memd: programs that speak MCP need the extra: {pip_install('memd-proxy[mcp]')}, and start memd again"
BODY_BYTES_MAX = 4 << 20
TOO_LARGE = f"memd: the body is larger than {BODY_BYTES_MAX:,} bytes"
ONLY_POST = "memd: this is for programs that speak MCP; they POST (docs/mcp.md)"
Answered = Callable[[bytes, Sequence[tuple[bytes, bytes]]], Awaitable[tuple[int, Sequence[tuple[str, str]], bytes]]]
_ANSWERED: ContextVar[web.Request] = ContextVar("memd_answered")
"""The request that is answered; the threads in which tools run see it too."""


class OwnOperations:
    """Does operations of this daemon for its tools, in the name of whoever sent the request that is answered."""

    def __init__(self, parts: DaemonParts) -> None:
        self._parts = parts
        self._loop = asyncio.get_running_loop()

    def ask(
        self, operation: Callable[..., Awaitable[Answer]], id_: str = "", body: object = None, **query: Any
    ) -> Answer:
        """See `AskedDaemon`. Called in a thread."""
        route = route_of(operation)
        named = (id_,) if "{id}" in route.path else ()
        asked = call(self._parts, _ANSWERED.get(), route, named, as_given(query), encoded(body))
        answer: Answer = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return answer


class McpEndpoint:
    """Answers requests to `/mcp`. The SDK is loaded with the first: it takes a second and 40 MB."""

    def __init__(self, parts: DaemonParts, leading_on: Callable[[web.Request, str], web.Response | None]) -> None:
        """`leading_on`: leads a program on to where it can ask for a right that a tool needs; None if it cannot."""
        self._parts = parts
        self._idle_seconds = parts.config.limits.idle_seconds
        self._leading_on = leading_on
        self._answer: Answered | None = None
        """The SDK's."""
        self._loading = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.method != "POST":
            response = error_response(405, ONLY_POST, "method_not_allowed")
            response.headers["Allow"] = "POST"
            return response
        body = await read_body(request, BODY_BYTES_MAX, self._idle_seconds)
        if body is None:
            return error_response(413, TOO_LARGE, "invalid_request_error")
        async with self._loading:
            if self._answer is None:
                try:
                    tools = await asyncio.to_thread(importlib.import_module, "memd.admin.mcp_tools")
                except ModuleNotFoundError:
                    return error_response(501, NOT_INSTALLED, "not_installed")
                self._answer = partial(tools.answered, tools.server_for(OwnOperations(self._parts)))
        operation = TOOLS.get(_called_tool(body))
        if operation is not None and (refusal := self._leading_on(request, operation.right)):
            return refusal
        let_in_as(request, msgspec.structs.replace(principal_of(request), via=f"{request.remote} by MCP"))
        token = _ANSWERED.set(request)
        try:
            status, headers, answered = await self._answer(body, request.raw_headers)
        finally:
            _ANSWERED.reset(token)
        return web.Response(status=status, headers=CIMultiDict(headers), body=answered)


class _CalledTool(msgspec.Struct, frozen=True):
    name: str = ""


class _ToolCall(msgspec.Struct, frozen=True):
    """The members of a call that tell which tool is meant (JSON-RPC)."""

    params: _CalledTool
    method: Literal["tools/call"]


def _called_tool(body: bytes) -> str:
    """Return the tool that a request calls; empty if it is no call of one."""
    try:
        return msgspec.json.decode(body, type=_ToolCall).params.name
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the SDK answers it
        return ""
