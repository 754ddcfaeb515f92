"""The page at `/memd/` for browsers: files of the package, sent unchanged.

Rule: the files contain no data, so they need no token (a browser cannot send one when it opens an address); the page
gets its data from the other routes, with the token. Nothing in it may be loaded from another address.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

_HERE = Path(__file__).parent
PREFIX = "/memd/"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
HEADERS = {
    # What is remembered may have been written by anybody. The page puts it in as text; should it ever fail to, the
    # browser runs no script but the page's own files, and lets nothing leave for another address.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304 until memd is updated
}


class _PageFile(NamedTuple):
    body: bytes
    content_type: str
    etag: str


def is_page(request: web.Request) -> bool:
    """Whether a request asks for the page or one of its files."""
    asked = request.path == PREFIX.rstrip("/") or request.path in _files()
    return asked and request.method in ("GET", "HEAD")


def page(request: web.Request) -> web.Response:
    """Return the file of the page that a request asks for."""
    if request.path not in _files():
        return web.Response(status=308, headers={"Location": PREFIX})  # its files are named relative to the folder
    found = _files()[request.path]
    headers = {**HEADERS, "ETag": found.etag}
    if found.etag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers={**headers, "Content-Type": found.content_type})


@functools.cache
def _files() -> dict[str, _PageFile]:
    """The files, by path.

    Raises:
        OSError: the package was installed without its data files.
    """
    found = {}
    for path in (one for one in sorted(_HERE.iterdir()) if one.suffix in _TYPES):
        body, asked = path.read_bytes(), PREFIX if path.name == INDEX else PREFIX + path.name
        found[asked] = _PageFile(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found
