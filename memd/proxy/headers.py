"""Headers: what one side sent is what the other side gets, and what web pages of other origins may read (CORS,
https://fetch.spec.whatwg.org/#http-cors-protocol).

Rule: header values are text only while they are looked at; bytes that are no UTF-8 stay as they are (surrogateescape).
aiohttp writes headers as UTF-8 and drops what is none, so `keep_header_bytes` gives it another writer, for both sides.

An answer of the upstream has the upstream's own CORS headers. memd adds them only to what it answers itself on the
routes of clients, never to what is under /memd/; where no token protects, only for pages of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from aiohttp import http_writer, web
from multidict import CIMultiDict

from memd.access import is_from_foreign_page

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def keep_header_bytes() -> None:
    """Let this process write headers with the bytes that they were read with."""
    http_writer._serialize_headers = serialized


def serialized(status_line: str, headers: CIMultiDict[str]) -> bytes:
    """A head as bytes. Raises ValueError: there is a control character in it, with which a header could end early."""
    lines = [status_line, *(f"{name}: {value}" for name, value in headers.items())]
    if any(map(_CONTROL.search, lines)):
        raise ValueError("a control character in a header")
    return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape")


def decoded(raw_headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """Headers as text, with their names spelled as on the wire."""
    return ((name.decode("latin-1"), value.decode(errors="surrogateescape")) for name, value in raw_headers)


def printable(text: str) -> str:
    """Text of an answer's head with spaces for control characters (RFC 9110 section 5.5)."""
    return _CONTROL.sub(" ", text)


_ASKED_METHOD, _ASKED_HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"
PREFLIGHT_SECONDS = 600
"""How long a browser may remember the answer to a preflight."""


def is_preflight(request: web.BaseRequest) -> bool:
    """Whether a browser asks if a page may send a request; it never shows a token with that."""
    return request.method == "OPTIONS" and "Origin" in request.headers and _ASKED_METHOD in request.headers


def preflight_answer(request: web.BaseRequest) -> web.Response:
    """Allow what is asked for: the request itself needs the token."""
    allowed = {
        "Access-Control-Allow-Origin": request.headers["Origin"],
        "Access-Control-Allow-Methods": request.headers[_ASKED_METHOD],
        "Access-Control-Allow-Headers": request.headers.get(_ASKED_HEADERS, ""),
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        "Vary": f"Origin, {_ASKED_METHOD}, {_ASKED_HEADERS}",
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
