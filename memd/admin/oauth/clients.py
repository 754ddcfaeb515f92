"""Clients of OAuth: what they say of themselves when they register, and the addresses to which memd sends answers.

Rule: pure. A client's id is its registration itself, sealed with a key of this daemon, so that registering stores
nothing, survives a restart and cannot be flooded; whoever cannot reach memd cannot make one. Addresses are compared as
they are written, but for the port of a loopback address (RFC 8252 section 7.3), which a program takes when it starts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from urllib.parse import urlsplit

import msgspec

from memd.errors import OAuthRefused
from memd.settings.url import is_this_machine

NAME_CHARACTERS_MAX = 60
REDIRECT_URIS_MAX = 10
REDIRECT_CHARACTERS_MAX = 512
ID_CHARACTERS_MAX = 8_192
_SEAL_BYTES = 16
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?\[\]@!$&'()*+,;=%-]+")
"""The characters of RFC 3986 without `#`: a redirect URI has no fragment (RFC 6749 section 3.1.2)."""
_HOST = re.compile(r"[a-z0-9.-]+|[0-9a-f:.]+")
_LOOPBACK_PORT = re.compile(r"(http://(?:localhost|127\.0\.0\.1|\[::1\])):\d{1,5}(?=[/?]|$)")
NO_PROGRAMS = {
    *("about", "blob", "chrome", "data", "file", "filesystem", "ftp", "intent", "jar", "javascript", "mailto"),
    *("resource", "sms", "tel", "vbscript", "view-source", "ws", "wss"),
    *("ldap", "mhtml", "res", "search", "search-ms", "shell"),  # Windows' own, known from attacks, and all of `ms-`
}
"""Schemes that a browser runs, opens itself or hands to no program that could have asked. Any other one belongs to a
program (RFC 8252 section 7.1), as `cursor` does."""


class OAuthClient(msgspec.Struct, frozen=True, array_like=True):
    """A program that registered."""

    name: str
    """As it calls itself: nobody has checked that."""
    redirect_uris: tuple[str, ...]

    def takes(self, uri: str) -> bool:
        """Whether answers may be sent to `uri`."""
        return uri in self.redirect_uris or _without_port(uri) in map(_without_port, self.redirect_uris)


class Registration(msgspec.Struct):
    """The members of a registration (RFC 7591 section 2) that matter here; others are passed over, as it asks."""

    redirect_uris: list[str]
    client_name: str = ""
    grant_types: tuple[str, ...] = ("authorization_code",)
    response_types: tuple[str, ...] = ("code",)


def registered(body: bytes) -> OAuthClient:
    """Return the client that a registration describes.

    Raises:
        OAuthRefused: it cannot be one.
    """
    try:
        asked = msgspec.json.decode(body, type=Registration)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OAuthRefused("invalid_client_metadata", f"the registration cannot be read: {error}") from None
    if "authorization_code" not in asked.grant_types or "code" not in asked.response_types:
        raise OAuthRefused("invalid_client_metadata", "there is only the grant `authorization_code`, with codes")
    if not 1 <= len(asked.redirect_uris) <= REDIRECT_URIS_MAX:
        raise OAuthRefused("invalid_redirect_uri", f"give 1 to {REDIRECT_URIS_MAX} redirect_uris")
    for uri in asked.redirect_uris:
        if problem := _problem_of(uri):
            raise OAuthRefused("invalid_redirect_uri", f"{uri[:80]!r} {problem}")
    return OAuthClient(_shown_name(asked.client_name), tuple(asked.redirect_uris))


def client_id_of(client: OAuthClient, key: bytes) -> str:
    """Return the id of a client: its registration and the seal, in base64url."""
    said = msgspec.json.encode(client)
    return f"{_base64(said)}.{_base64(_seal(said, key))}"


def client_of(client_id: str, key: bytes) -> OAuthClient | None:
    """Return the client that registered under an id at a daemon with this key; None if none did, as without a key."""
    said, _, seal = client_id.partition(".")
    if not key or len(client_id) > ID_CHARACTERS_MAX:
        return None
    try:
        encoded = base64.urlsafe_b64decode(said + "=" * (-len(said) % 4))
        if not hmac.compare_digest(seal.encode(), _base64(_seal(encoded, key)).encode()):
            return None
        return msgspec.json.decode(encoded, type=OAuthClient)
    except ValueError:  # no base64, no ASCII, or no client
        return None


def told_host(uri: str) -> str:
    """Return where an answer goes, in words for a person: a host, or a program of this machine."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return f"the program that opens {parts.scheme}: addresses"
    return "a program on this computer" if is_this_machine(parts.hostname or "") else parts.hostname or ""


def _problem_of(uri: str) -> str:
    """Say why no answer may be sent to `uri`; empty if it may."""
    if len(uri) > REDIRECT_CHARACTERS_MAX or not _URI.fullmatch(uri):
        return f"is no address of at most {REDIRECT_CHARACTERS_MAX} characters, without a fragment"
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return "is no address"
    scheme = parts.scheme.lower()
    if scheme not in ("http", "https"):
        is_none = scheme in NO_PROGRAMS or scheme.startswith("ms-")
        return f"is not sent to: {scheme} belongs to no program" if is_none else ""
    if "@" in parts.netloc or not _HOST.fullmatch(host):
        return "names no plain host"
    if scheme == "http" and not is_this_machine(host):
        return "is not encrypted: use https, or http at a loopback address"
    return ""


def _without_port(uri: str) -> str:
    return _LOOPBACK_PORT.sub(r"\1", uri, count=1)


def _shown_name(name: str) -> str:
    """The name without what could hide or turn around words on a page."""
    plain = " ".join("".join(one if one.isprintable() else " " for one in name).split())
    return plain[:NAME_CHARACTERS_MAX] or "A program without a name"


def _seal(said: bytes, key: bytes) -> bytes:
    return hmac.new(key, b"memd: a client of OAuth\n" + said, hashlib.sha256).digest()[:_SEAL_BYTES]


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
