"""Addresses of HTTP servers, as they stand in the settings.

Rule: decided by the text alone. No resolver is asked: its answer may change a moment later.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from urllib.parse import unquote_to_bytes, urlsplit

WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104  # compared, not bound
"""The hosts that mean every address of this machine."""
_ROUTE = re.compile(r"(?:(?<![:/])/+v1)*(?:/chat/completions)?/*$")
"""The end that an address has too much where it was copied from another program's settings."""


def without_credentials(url: str) -> str:
    """An address without user and password, also one that is none."""
    return re.sub(r"(?<=//).*@", "", url)


def basic_authorization(url: str) -> str | None:
    """The value of the header for the user and password in an address (RFC 7617); None if it has none."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    return f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}" if at else None


def base_of(url: str) -> str:
    """An address of a model server as memd uses it, without `/`, `/v1` or `/v1/chat/completions` at its end."""
    return _ROUTE.sub("", url)


def place_of(url: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port and path of an address without problems: equal ones lead to one server."""
    parts = urlsplit(base_of(url))
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme), parts.path


def is_this_machine(host: str) -> bool:
    """Whether a host, as it stands in an address, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def url_problem(url: str) -> str | None:
    """Say why this is not the address of a server; None if it is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # A `/` or `#` in a password has probably ended the host too early, and the error quotes it.
        return "a user and password have to be percent-encoded" if "@" in url else str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "not the address of an HTTP server"
    if parts.query or parts.fragment or "@" in parts.path or " " in url:
        return "more than an address (a user and password have to be percent-encoded)"
    return None
