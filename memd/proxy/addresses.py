"""The two addresses of a daemon: the model's, which clients use, and memd's own, with the page and all of `/memd/`.

Rule: both are on one host and never on one port. To a browser the port is a part of the origin: a page that the model
server sends must not be able to act as memd's own.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from memd.errors import AddressUnusable, MemdError
from memd.settings.model import WILDCARDS, Config, is_this_machine

PORT_MAX = 65_535
EVERYWHERE = dict(zip(WILDCARDS, ("127.0.0.1", "127.0.0.1", "::1"), strict=True))
"""The hosts that mean every address of this machine, each with the one by which programs on it get there."""
IN_CIRCLES = "where memd itself listens: requests would go round in circles"


class Listeners(NamedTuple):
    """Sockets at both addresses; they do not listen yet."""

    model: socket.socket
    own: socket.socket
    moved: str = ""
    """Why memd's own address is another one than usual; empty if it is not."""

    def close(self) -> None:
        """Give both addresses back."""
        self.model.close()
        self.own.close()


class Addresses(NamedTuple):
    """The URLs of both addresses, without a path."""

    model: str
    own: str
    local: str
    """memd's own, by an IP address of this machine."""


def bound(config: Config) -> Listeners:
    """Take the addresses that the settings name.

    Raises:
        AddressUnusable: one of them cannot be used.
    """
    host, setting = config.listen.host, "--admin-port (or admin.port)"
    with contextlib.ExitStack() as on_error:
        model = _bound(host, config.listen.port, "--port (or listen.port)")
        on_error.callback(model.close)
        try:
            listeners = Listeners(model, _bound(host, own_port(config), setting))
        except AddressUnusable as error:
            if config.admin.port != "auto":
                raise
            listeners = Listeners(model, _bound(host, 0, setting), str(error))
        on_error.pop_all()
    return listeners


def addresses_of(config: Config, listeners: Listeners) -> Addresses:
    """Return the URLs at which programs on this machine reach the listeners."""
    host = config.listen.host
    ports = [listener.getsockname()[1] for listener in (listeners.model, listeners.own)]
    scheme = "https" if config.listen.tls_cert else "http"
    model, own = (f"{scheme}://{reached(host)}:{port}" for port in ports)
    return Addresses(model, own, f"{scheme}://{reached(listeners.own.getsockname()[0])}:{ports[1]}")


def tls_of(config: Config) -> ssl.SSLContext | None:
    """Read the certificate with which both addresses speak TLS; None: they speak plain HTTP.

    Raises:
        MemdError: it cannot be used.
    """
    cert, key = config.listen.tls_cert, config.listen.tls_key
    if not cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    for path in (cert, key):
        if not Path(path).is_file():
            raise MemdError(f"{path}: there is no such file; correct listen.tls_cert and listen.tls_key")
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # else OpenSSL asks for a passphrase, and waits
    except (ssl.SSLError, OSError) as error:
        raise MemdError(
            f"{cert} and {key} cannot be used for TLS ({error.strerror or error}); give PEM files of a certificate and "
            "of its own key without a passphrase, which this user may read"
        ) from None
    return context


def own_port(config: Config) -> int:
    """Return the port of memd's own address as the settings name it; 0: any free one."""
    if config.admin.port != "auto":
        return config.admin.port
    return config.listen.port + 1 if 0 < config.listen.port < PORT_MAX else 0


def leading_back(config: Config) -> str | None:
    """The address of a model server that is where clients reach memd: a request would go round for ever."""
    return next((one.address for one in config.upstream.each() if _leads_back(one.url, config)), None)


def _leads_back(upstream: str, config: Config) -> bool:
    url = urlsplit(upstream)
    host, listens = url.hostname or "", config.listen.host
    if (url.port or {"http": 80, "https": 443}[url.scheme]) != config.listen.port:
        return False
    if host == listens:
        return True
    # `localhost` may mean either loopback address, and whoever listens everywhere listens there too.
    named = {host, listens} & {"localhost", *EVERYWHERE}
    return bool(named) and is_this_machine(host) and (listens in EVERYWHERE or is_this_machine(listens))


def _bound(host: str, port: int, setting: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: f"stop what uses the port, or choose another with {setting}",
            errno.EACCES: f"choose a port that every user may take, one from 1024, with {setting}",
        }
        remedy = remedies.get(error.errno or 0, "give an address of this machine with --host (or listen.host)")
        raise AddressUnusable(f"cannot listen on {host}:{port}: {error.strerror or error}; {remedy}") from None


def reached(host: str) -> str:
    """How a program on this machine calls the host that memd listens on, as it stands in a URL."""
    named = EVERYWHERE.get(host, host)
    return f"[{named}]" if ":" in named else named
