"""memd's own routes under /memd/ and its MCP endpoint: their list, and dispatch from requests to handlers.

Rule: they are served at memd's own address. The model's address, which also has the model server's pages, serves only
`/memd/health` and redirects the others. `access.py` decides who may use them. Only POST changes anything, and only with
a JSON body, which a page of another origin cannot send without permission. Queries and bodies are decoded before a
handler runs; unknown members are rejected. MCP's streamable HTTP is stateless here: each POST is answered by itself, as
the specification allows (Transports, at https://modelcontextprotocol.io/specification), so that clients do not notice a
restart. Its tools call the operations in the name of the request's sender.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict, MultiMapping

from memd import access
from memd.access import Take, TooManyBodies, WrongTokens
from memd.admin import auditing, documents, page, reads, routing, status, tokens, turns, writes
from memd.admin.auditing import ENDLESS, Streamed, audited
from memd.admin.oauth import endpoint
from memd.admin.oauth.endpoint import OAuthEndpoint
from memd.admin.parts import DaemonParts
from memd.admin.tokens import PROOF
from memd.errors import BadQuestion, Forbidden, MemdError
from memd.ingest.topic import Inquiry
from memd.principals import OWNER
from memd.telemetry.metrics import CLIENT_GONE
from memd.wording import pip_install

HEALTH = "/memd/health"
MCP = "/mcp"
NOT_INSTALLED = f"memd: programs that speak MCP need the extra: {pip_install('memd-proxy[mcp]')}, and start memd again"
MCP_BODY_BYTES_MAX = 4 << 20
TOO_LARGE = f"memd: the body is larger than {MCP_BODY_BYTES_MAX:,} bytes"
ONLY_POST = "memd: this is for programs that speak MCP; they POST (docs/mcp.md)"
McpAnswer = Callable[[bytes, Sequence[tuple[bytes, bytes]]], Awaitable[tuple[int, Sequence[tuple[str, str]], bytes]]]
_ANSWERED: ContextVar[web.Request] = ContextVar("memd_answered")
"""The request being answered, also visible in the threads of tools."""


@routing.get("/memd/openapi.json", "any")
async def openapi(parts: DaemonParts) -> dict[str, Any]:
    """This description."""
    return routing.document(ROUTES)


MODULES = (status, reads, turns, auditing, writes, documents, tokens, endpoint)
ROUTES = (*(route for module in MODULES for route in routing.routes_of(module)), routing.route_of(openapi))
TOOLS = {route.tool: route for route in ROUTES if route.tool}
"""The operations that are MCP tools, by the tools' names."""


class OwnRoutes:
    """Answers requests at memd's own address."""

    def __init__(self, parts: DaemonParts, wrong_tokens: WrongTokens, oauth: OAuthEndpoint) -> None:
        """`wrong_tokens`: rejects requests with an unknown token. `oauth`: serves MCP programs that ask for a token of
        their own."""
        self._parts = parts
        self._principals = parts.principals
        self._wrong_tokens = wrong_tokens
        self._oauth = oauth
        self._mcp: McpAnswer | None = None
        """The SDK's handler, loaded with its first request: that takes a second and 40 MB."""
        self._loading_mcp = asyncio.Lock()
        # Not the application's router, which decodes paths: all other paths must pass byte for byte.
        self._router = web.UrlDispatcher()
        self._routes: dict[web.AbstractRoute, routing.Route] = {}
        for route in ROUTES:
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                self._routes[self._router.add_route(method, route.path, self.answer)] = route

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer any request at memd's own address."""
        try:
            return await (self._oauth.answer(request) if self._oauth.serves(request) else self._answer(request))
        except TooManyBodies as error:
            return access.too_many_bodies(error)
        except TimeoutError:
            if request.transport is None or request.transport.is_closing():  # its body did not arrive
                return web.Response(status=CLIENT_GONE)  # the client has left
            raise

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        leads_on = request.path in ("", "/") and request.method in ("GET", "HEAD")
        # These have no data: a browser opening an address sends no token, and a command sends it only after the proof.
        is_open = leads_on or page.is_page(request) or request.path == PROOF
        inquiry = None
        if not is_open:
            inquiry = await self._wrong_tokens.make_sure(request, request.query.getall("topic", ()))
        acts = request.path == MCP and self._oauth.lets_in(request)
        if not (is_open or acts) and (unknown := self._wrong_tokens.refusal(request)):
            return self._oauth.leading(request, unknown)
        if refusal := self._refusal(request):
            return refusal
        if not is_open:
            access.prove(request)
        if leads_on:
            return _led(page.PREFIX)
        if page.is_page(request):
            return page.page(request)
        if request.path != MCP and not request.path.startswith(page.PREFIX):
            message = f"memd: there is no {request.path} at memd's own address; models are at {self._parts.base_url}/v1"
            return access.error_response(404, message, "not_found")
        with self._parts.bodies.holding("" if is_open else access.principal_of(request).author) as take:
            if request.path != MCP:
                return await self._answer_route(request, inquiry, take)
            answer = await self._answer_mcp(request, take)
        if answer.status == routing.FORBIDDEN:
            self._parts.auditor.note_refused(request, f"{request.method} {request.path}")
        return answer

    async def answer_at_model(self, request: web.Request, target: str) -> web.StreamResponse:
        """Answer a request at the model's address for one of memd's own paths. `target`: path and query as the client
        wrote them."""
        if target.partition("?")[0] in (HEALTH, PROOF):
            return await self.answer(request)
        return self._refusal(request) or _led(access.same_host(request, self._parts.own_url) + target)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Refuse requests from other machines and from other pages; None for all others."""
        is_open = self._principals.is_open
        if is_open and (header := access.forwarding_header(request)):
            message = f"a proxy passed this on ({header}); set auth.token before others can reach memd"
        elif is_open and not access.is_own(request, self._parts.config.listen.host):
            message = (
                "this path is only for programs on this machine that call it by its address or localhost; set "
                "auth.token before others can reach memd"
            )
        elif access.is_from_another_page(request):
            message = (
                "a web page of another address asked for this, and memd's own paths are closed to those; to see "
                "memd's page, enter its address in the browser yourself"
            )
        else:
            return None
        return access.error_response(403, f"memd: {message}", "forbidden")

    async def _answer_mcp(self, request: web.Request, take: Take) -> web.Response:
        if request.method != "POST":
            return access.error_response(405, ONLY_POST, "method_not_allowed", headers={"Allow": "POST"})
        body = await access.read_body(request, MCP_BODY_BYTES_MAX, self._parts.config.limits.idle_seconds, take)
        if body is None:
            return access.error_response(413, TOO_LARGE, "invalid_request_error")
        async with self._loading_mcp:
            if self._mcp is None:
                try:
                    tools = await asyncio.to_thread(importlib.import_module, "memd.admin.mcp_tools")
                except ModuleNotFoundError:
                    return access.error_response(501, NOT_INSTALLED, "not_installed")
                self._mcp = partial(tools.answered, tools.server_for(OwnOperations(self._parts)))
        operation = TOOLS.get(_called_tool(body))
        if operation is not None and (refusal := self._oauth.leading_on(request, operation.right)):
            return refusal
        via = f"{request.remote} by MCP"
        access.let_in_as(request, msgspec.structs.replace(access.principal_of(request), via=via))
        token = _ANSWERED.set(request)
        try:
            status, headers, answered = await self._mcp(body, request.raw_headers)
        finally:
            _ANSWERED.reset(token)
        return web.Response(status=status, headers=CIMultiDict(headers), body=answered)

    async def _answer_route(self, request: web.Request, inquiry: Inquiry | None, take: Take) -> web.StreamResponse:
        matched = await self._router.resolve(request)
        if isinstance(matched.http_exception, web.HTTPMethodNotAllowed):
            allowed = ", ".join(sorted(matched.http_exception.allowed_methods))
            message, headers = f"memd: {request.path} takes {allowed}", {"Allow": allowed}
            return access.error_response(405, message, "method_not_allowed", headers=headers)
        if matched.http_exception is not None:
            return access.error_response(404, f"memd: there is no {request.path}", "not_found")
        if request.method == "POST" and request.content_type != "application/json":
            message = "memd: send a JSON body, with Content-Type: application/json"
            return access.error_response(415, message, "unsupported_media")
        try:
            route, body = self._routes[matched.route], b""
            if route.body is not None:
                idle_seconds = self._parts.config.limits.idle_seconds
                read = await access.read_body(request, route.body_bytes_max, idle_seconds, take)
                if read is None:
                    raise BadQuestion(f"the body is larger than {route.body_bytes_max:,} bytes")
                body = read
            parts = msgspec.structs.replace(self._parts, inquiry=inquiry)
            answer = await call(parts, request, route, tuple(matched.values()), request.query, body)
        except TooManyBodies:
            raise
        except MemdError as error:
            return access.error_response(error.status, f"memd: {error}", error.kind)
        if isinstance(answer, Streamed):
            return answer.response
        if isinstance(answer, routing.WholeAnswer):
            headers = {"Content-Type": answer.content_type, "Cache-Control": "no-store"}
            return web.Response(body=answer.content, headers=headers)
        return web.json_response(body=msgspec.json.encode(answer), headers={"Cache-Control": "no-store"})


async def call(
    parts: DaemonParts,
    request: web.Request,
    route: routing.Route,
    named: tuple[str, ...],
    query: MultiMapping[str],
    body: bytes,
) -> Any:
    """Run an operation for a request's sender, if they have the right, and record it in the audit.

    Args:
        named: the variable part of the path, if any.
        body: JSON, if the operation takes a body.

    Raises:
        MemdError: it is refused, or fails.
    """
    who = OWNER if route.right == "open" else access.principal_of(request)
    if route.right != "open" and route.right != "any":
        try:
            (who.check_somewhere if route.takes_who else who.check_everywhere)(route.right)
        except Forbidden:
            parts.auditor.note_refused(request, f"{route.method} {route.path}")
            raise
    asked = routing.decode_query(query, route.query)
    given: dict[str, Any] = {"query": asked, "who": who, "headers": request.headers, "key": access.key_of(request)}
    if route.body is not None:
        try:
            given["body"] = msgspec.json.decode(body, type=route.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadQuestion(f"the body is not what this route takes: {error}") from None
    extent = routing.Extent(ids=named).and_of(given.get("body", asked).extent)
    taken = {name: value for name, value in given.items() if name in route.takes}
    taken |= {name: getattr(asked, name) for name in route.own}
    answer = partial(route.handler, parts, *named, **taken)
    if inspect.isasyncgenfunction(route.handler):
        answer = partial(_streamed, request, route.streams, answer)
    return await audited(parts.auditor, request, route, extent, answer)


async def _streamed(
    request: web.Request, content_type: str, pieces: Callable[[], AsyncGenerator[bytes, None]]
) -> Streamed:
    """Send the pieces that an operation yields, until the client leaves or its token is revoked.

    A revoked token aborts the connection of a finite answer, so that nobody takes it for complete.
    """
    lines = 0
    async with aclosing(pieces()) as yielded:
        piece = await anext(yielded, b"")  # refusals are raised before anything is sent
        response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": "no-store"})
        await response.prepare(request)
        with suppress(ConnectionError):
            while piece and request.method != "HEAD":  # HEAD gets only the headers
                if not access.is_let_in_still(request):
                    if content_type != ENDLESS and request.transport is not None:
                        request.transport.abort()
                    break
                await response.write(piece)
                lines += piece.count(b"\n")
                piece = await anext(yielded, b"")
    return Streamed(response, lines)


def _led(location: str) -> web.Response:
    """Redirect a client temporarily, because the port is a setting."""
    headers = {"Location": location, "Cache-Control": "no-store"}
    return access.error_response(307, f"memd: this is at {location}", "moved", headers=headers)


class OwnOperations:
    """Runs operations of this daemon for its tools, in the name of the current request's sender."""

    def __init__(self, parts: DaemonParts) -> None:
        self._parts = parts
        self._loop = asyncio.get_running_loop()

    def ask(
        self, operation: Callable[..., Awaitable[routing.Answer]], id_: str = "", body: object = None, **query: Any
    ) -> routing.Answer:
        """See `AskedDaemon`. Called in a thread."""
        route = routing.route_of(operation)
        named = (id_,) if "{id}" in route.path else ()
        asked = call(self._parts, _ANSWERED.get(), route, named, routing.as_given(query), routing.encoded(body))
        answer: routing.Answer = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return answer


def _called_tool(body: bytes) -> str:
    """Return the tool that a JSON-RPC request calls; empty if it calls none."""
    try:
        called = msgspec.json.decode(body)
        return str(called["params"]["name"]) if called["method"] == "tools/call" else ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError):  # the SDK answers it
        return ""
