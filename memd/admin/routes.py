"""memd's own routes under /memd/: what it knows, what it did, and its correction by people.

Rule: who may ask is decided in `access.py`. A handler returns what is to be sent as JSON, or raises what is wrong with
the question; only POST changes anything, and only with a JSON body, which no page from elsewhere can send unasked.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from memd.admin import page
from memd.admin import reads as looks
from memd.admin import writes as changes
from memd.admin.access import is_own
from memd.admin.openapi import document
from memd.errors import BadQuestion, BadTopicId, MemdError, NotFound
from memd.proxy.relay import error_response
from memd.proxy.service import Daemon

Handler = Callable[[Daemon, web.Request, str], Awaitable[Any]]
"""The last argument is what the path's group matched."""


async def _openapi(daemon: Daemon, request: web.Request, _: str) -> Any:
    """This description."""
    return document(ROUTES)


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", r"/memd/health", looks.health),
    ("GET", r"/memd/stats", looks.stats),
    ("GET", r"/memd/topics", looks.topics),
    ("GET", r"/memd/search", looks.search),
    ("GET", r"/memd/log", looks.log_page),
    ("GET", r"/memd/chunks", looks.chunks),
    ("GET", r"/memd/chunks/([^/]+)", looks.chunk),
    ("GET", r"/memd/buffer", looks.buffer),
    ("GET", r"/memd/turns", looks.turns),
    ("GET", r"/memd/turns/([^/]+)", looks.turn),
    ("GET", r"/memd/turns/([^/]+)/replay", looks.replay),
    ("GET", r"/memd/events", looks.events),
    ("GET", r"/memd/export", looks.export),
    ("GET", r"/memd/openapi\.json", _openapi),
    ("GET", r"/memd/metrics", looks.metrics),
    ("POST", r"/memd/corrections", changes.correct),
    ("POST", r"/memd/undo", changes.undo),
    ("POST", r"/memd/backup", changes.backup),
)


async def route(daemon: Daemon, request: web.Request) -> web.StreamResponse:
    """Answer one of memd's own paths."""
    if not daemon.config.auth.token and not is_own(request, daemon.config.listen.host):
        return error_response(403, "memd: this path is only for programs on this machine", "forbidden")
    if page.is_page(request):
        return page.page(request)
    matched = [
        (method, handler, found)
        for method, pattern, handler in ROUTES
        if (found := re.fullmatch(pattern, request.path)) is not None
    ]
    if not matched:
        return error_response(404, f"memd: there is no {request.path}", "not_found")
    [(method, handler, found)] = matched
    if request.method != method and (method, request.method) != ("GET", "HEAD"):
        response = error_response(405, f"memd: {request.path} takes {method}", "method_not_allowed")
        response.headers["Allow"] = method
        return response
    if method == "POST" and request.content_type != "application/json":
        return error_response(415, "memd: send a JSON body, with Content-Type: application/json", "unsupported_media")
    return await _answered(daemon, request, handler, found[1] if found.re.groups else "")


async def _answered(daemon: Daemon, request: web.Request, handler: Handler, named: str) -> web.StreamResponse:
    try:
        told = await handler(daemon, request, named)
    except NotFound as error:
        return error_response(404, f"memd: {error}", "not_found")
    except (BadQuestion, BadTopicId) as error:
        return error_response(400, f"memd: {error}", "invalid_request_error")
    except MemdError as error:
        return error_response(503, f"memd: {error}", "unavailable")
    if isinstance(told, web.StreamResponse):
        return told
    return web.json_response(body=msgspec.json.encode(told), headers={"Cache-Control": "no-store"})
