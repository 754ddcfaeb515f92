"""The page at `/memd/` for browsers: files of the package, sent unchanged.

Rule: the files contain no data, so they need no token (a browser cannot send one when it opens an address); the page
gets its data from the other routes, with the token. Nothing in it may be loaded from another address.
"""

from __future__ import annotations

import functools
from pathlib import Path

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


def is_page(request: web.Request) -> bool:
    """Whether a request asks for the page or one of its files."""
    return request.method in ("GET", "HEAD") and request.path in (PREFIX.rstrip("/"), *_files())


def page(request: web.Request) -> web.StreamResponse:
    """Return the file of the page that a request asks for."""
    if request.path not in _files():
        return web.Response(status=308, headers={"Location": PREFIX})  # its files are named relative to the folder
    path = _files()[request.path]
    return web.FileResponse(path, headers={**HEADERS, "Content-Type": _TYPES[path.suffix]})


@functools.cache
def _files() -> dict[str, Path]:
    """The files, by path. Raises OSError: the package was installed without its data files."""
    found = sorted(one for one in _HERE.iterdir() if one.suffix in _TYPES)
    return {PREFIX if path.name == INDEX else PREFIX + path.name: path for path in found}
