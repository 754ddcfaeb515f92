"""The page at `/memd/` for browsers: files of the package, served unchanged.

Rule: the files contain no data and so need no token, which a browser cannot send when it opens an address. The page
gets its data from the other routes, with the token. It may load nothing from another address.
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
    # Stored text is untrusted. The page inserts it as text. Should that ever fail, the browser still runs only the
    # page's own scripts and sends nothing to another address.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time, and answered with 304 until memd is updated
}


def is_page(request: web.Request) -> bool:
    """Return whether a request asks for the page or one of its files."""
    return request.method in ("GET", "HEAD") and request.path in (PREFIX.rstrip("/"), *_files())


def page(request: web.Request) -> web.StreamResponse:
    """Return the requested file of the page."""
    if request.path not in _files():
        return web.Response(status=308, headers={"Location": PREFIX})  # file names are relative to the folder
    path = _files()[request.path]
    return web.FileResponse(path, headers={**HEADERS, "Content-Type": _TYPES[path.suffix]})


@functools.cache
def _files() -> dict[str, Path]:
    """Return the files by path. Raises OSError: the package was installed without its data files."""
    found = sorted(one for one in _HERE.iterdir() if one.suffix in _TYPES)
    return {PREFIX if path.name == INDEX else PREFIX + path.name: path for path in found}
