"""Web pages of other origins as clients (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol).

Rule: an answer of the upstream has the upstream's own CORS headers. memd adds them only to what it answers itself on
the routes of clients, never to what is under /memd/; where no token protects, only for pages of this machine.
"""

from __future__ import annotations

from aiohttp import web
from multidict import CIMultiDict

from memd.admin.access import is_from_foreign_page

_METHOD, _HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"
PREFLIGHT_SECONDS = 600
"""How long a browser may remember the answer to a preflight."""


def is_preflight(request: web.BaseRequest) -> bool:
    """Whether a browser asks if a page may send a request; it never shows a token with that."""
    return request.method == "OPTIONS" and "Origin" in request.headers and _METHOD in request.headers


def preflight_answer(request: web.BaseRequest) -> web.Response:
    """Allow what is asked for: the request itself needs the token."""
    allowed = {
        "Access-Control-Allow-Origin": request.headers["Origin"],
        "Access-Control-Allow-Methods": request.headers[_METHOD],
        "Access-Control-Allow-Headers": request.headers.get(_HEADERS, ""),
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        "Vary": f"Origin, {_METHOD}, {_HEADERS}",
    }
    return web.Response(status=204, headers={name: value for name, value in allowed.items() if value})


def let_page_read(request: web.BaseRequest, response: web.StreamResponse, *, is_open: bool) -> None:
    """Let the page that sent a request read memd's own answer, if it may know of memd at all."""
    if "Origin" in request.headers and (not is_open or not is_from_foreign_page(request)):
        response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
        response.headers.add("Vary", "Origin")
        let_page_read_own_headers(response.headers)


def let_page_read_own_headers(headers: CIMultiDict[str]) -> None:
    """Where a page may read an answer, let it read memd's own headers too: a browser hides what nobody names."""
    own = [name for name in dict.fromkeys(headers) if name.lower().startswith("x-memory-")]
    if own and "Access-Control-Allow-Origin" in headers:
        headers.add("Access-Control-Expose-Headers", ", ".join(own))
