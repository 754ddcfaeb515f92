"""The client of a running daemon, for commands.

Rule: nobody but the daemon that holds the data directory is told anything. Its lock is looked at first; then whoever
listens at the address in `memd.url`, which has to be one of this machine's, proves that it has the directory
(admin/proof.py); only then is it shown the token. No proxy and no redirection is followed on the way.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hmac import compare_digest
from pathlib import Path
from typing import Any

import msgspec

from memd.admin.access import TOKEN_HEADER
from memd.admin.proof import PROOF, Proof, new_secret, proof_of
from memd.errors import BadQuestion, DaemonError
from memd.settings.model import Config
from memd.store.disk import DiskFiles
from memd.store.layout import ADDRESS_NAME, LOCK_NAME, SECRET_NAME

GLANCE_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 60.0
OK, BAD_REQUEST, WANTS_TOKEN = 200, 400, 401
THE_RIGHT_ONE = "give the one that it was started with, as MEMD_AUTH_TOKEN or in the settings (--config)"


class RunningDaemon:
    """Sends requests to a daemon's own routes. Get one from `find`."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token

    @classmethod
    def find(cls, data_dir: Path, token: str) -> RunningDaemon | None:
        """Return the daemon that holds `data_dir`, or None."""
        if not DiskFiles().is_locked(data_dir / LOCK_NAME):
            return None  # left behind by one that was killed, or by whoever made the folder
        try:
            url, secret = ((data_dir / name).read_text() for name in (ADDRESS_NAME, SECRET_NAME))
        except (OSError, ValueError):
            return None
        if not _is_on_this_machine(url) or not cls(url, "")._proves(secret):
            return None
        return cls(url, token)

    def _proves(self, secret: str) -> bool:
        """Whether the server proves that it has the secret of the data directory."""
        challenge = new_secret()
        try:
            answer = self._send(f"{PROOF}?challenge={challenge}", None, GLANCE_SECONDS_MAX)
            proof = msgspec.json.decode(answer, type=Proof).proof
        except (OSError, ValueError, http.client.HTTPException, msgspec.MsgspecError, BadQuestion, DaemonError):
            return False
        return compare_digest(proof.encode(), proof_of(secret, self.url, challenge).encode())

    def health(self) -> dict[str, Any]:
        """Return its health: `version`, `data_dir` and more; empty if no memd answers there."""
        try:
            answer = self._send("/memd/health", None, GLANCE_SECONDS_MAX)
            return msgspec.json.decode(answer, type=dict[str, Any])
        except (OSError, ValueError, http.client.HTTPException, msgspec.MsgspecError, BadQuestion, DaemonError):
            return {}

    @property
    def model_url(self) -> str:
        """Where programs on this machine find the model that this daemon passes requests on to."""
        own = urllib.parse.urlsplit(self.url)
        port = urllib.parse.urlsplit(str(self.health().get("model_url", self.url))).port
        return f"{own.scheme}://{own.netloc.rpartition(':')[0]}:{port}"

    def get(self, path: str, **query: object) -> bytes:
        """Return the body of the answer to a GET; a query parameter that is None is left out.

        Raises:
            BadQuestion: the request is wrong.
            DaemonError: it refused, or does not answer.
        """
        given = {name: value for name, value in query.items() if value is not None}
        return self._request(f"{path}?{urllib.parse.urlencode(given, doseq=True)}" if given else path, None)

    def post(self, path: str, body: object, seconds: float = ANSWER_SECONDS_MAX) -> bytes:
        """Return the body of the answer to a POST, which may take so long.

        Raises:
            BadQuestion: the request is wrong.
            DaemonError: it refused, or does not answer.
        """
        return self._request(path, msgspec.json.encode(body), seconds)

    def _request(self, path: str, body: bytes | None, seconds: float = ANSWER_SECONDS_MAX) -> bytes:
        try:
            return self._send(path, body, seconds)
        except (OSError, http.client.HTTPException) as error:
            raise DaemonError(f"the daemon at {self.url} does not answer: {error}; see its log") from None

    def _send(self, path: str, body: bytes | None, seconds: float) -> bytes:
        headers = {TOKEN_HEADER: self._token} if self._token else {}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        parts = urllib.parse.urlsplit(self.url)
        with closing(_connection(parts, seconds)) as connection:
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status == WANTS_TOKEN:
            wants = "does not take this auth.token" if self._token else "wants its auth.token"
            raise DaemonError(f"the daemon at {self.url} {wants}; {THE_RIGHT_ONE}")
        if answer.status != OK:
            refused = BadQuestion if answer.status == BAD_REQUEST else DaemonError
            raise refused(_message(content) or f"the daemon at {self.url} answers {answer.status}")
        return content


@contextmanager
def daemon_for(config: Config) -> Iterator[RunningDaemon]:
    """Yield the daemon that holds `config.data_dir`, or else one that runs while the block does.

    Raises:
        StoreLocked: a daemon holds the folder and does not answer.
        MemdError: none can be started.
    """
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    if daemon is not None:
        yield daemon
        return
    from memd.cli.embedded import embedded_daemon  # importing the daemon takes a second

    with embedded_daemon(config) as url:
        yield RunningDaemon(url, config.auth.token)


def _message(body: bytes) -> str:
    try:
        decoded = msgspec.json.decode(body, type=dict[str, dict[str, Any]])
    except msgspec.MsgspecError:
        return ""
    return str(decoded.get("error", {}).get("message", "")).removeprefix("memd: ")


def _is_on_this_machine(url: str) -> bool:
    """Whether a URL has an IP address of this machine: what is sent there never leaves it."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = ipaddress.ip_address(parts.hostname or "")
        if parts.scheme not in ("http", "https") or parts.port is None:
            return False
        with socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET) as probe:
            probe.bind((str(host), 0))
    except (ValueError, OSError):
        return False
    return True


def _connection(parts: urllib.parse.SplitResult, seconds: float) -> http.client.HTTPConnection:
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.netloc, timeout=seconds)
    return http.client.HTTPSConnection(parts.netloc, timeout=seconds, context=unchecked_tls())


def unchecked_tls() -> ssl.SSLContext:
    """TLS to a daemon on this machine. Its certificate has the name that others use; it proves itself otherwise."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
