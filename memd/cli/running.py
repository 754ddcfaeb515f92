"""The client of a running daemon, for commands.

Rule: nobody but the daemon that holds the data directory is told anything. Its lock is looked at first; then whoever
listens at the address in `memd.url`, which has to be one of this machine's, proves that it has the directory
(admin/proof.py); only then is it shown the token. No proxy and no redirection is followed on the way.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hmac import compare_digest
from pathlib import Path
from typing import Any

import msgspec

from memd.admin.asking import OwnRoutesClient
from memd.admin.proof import PROOF, Proof, command_token, new_secret, proof_of
from memd.cli.acting import command_name
from memd.errors import BadQuestion, DaemonError, StoreLocked
from memd.settings.model import Config
from memd.store.disk import DiskFiles
from memd.store.layout import ADDRESS_NAME, LOCK_NAME, SECRET_NAME

GLANCE_SECONDS_MAX = 5.0
START_SECONDS_MAX = 5.0
"""How long a command waits for a daemon that holds the folder and does not answer yet, or not any more."""
START_GLANCES_SECONDS = 0.1


class RunningDaemon(OwnRoutesClient):
    """The daemon that holds a data directory. Get one from `find`."""

    def __init__(self, url: str, token: str, command_token: str = "") -> None:
        """`command_token`: shown where there is no other; see `proof.command_token`."""
        super().__init__(url, token)
        self._command_token = command_token

    def shown_token(self) -> str:
        """Return the token that a request shows; empty: none."""
        return self._token or self._command_token

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
        return cls(url, token, command_token(secret))

    def _proves(self, secret: str) -> bool:
        """Whether the server proves that it has the secret of the data directory."""
        challenge = new_secret()
        return compare_digest(self._proof(challenge).encode(), proof_of(secret, self.url, challenge).encode())

    def _proof(self, challenge: str) -> str:
        """The answer to a challenge; empty if no memd answers there."""
        try:
            answer = self.send(f"{PROOF}?challenge={challenge}", None, GLANCE_SECONDS_MAX)
            return msgspec.json.decode(answer, type=Proof).proof
        except (OSError, ValueError, http.client.HTTPException, msgspec.MsgspecError, BadQuestion, DaemonError):
            return ""

    def health(self) -> dict[str, Any]:
        """Return its health: `version`, `data_dir` and more; empty if no memd answers there."""
        try:
            answer = self.send("/memd/health", None, GLANCE_SECONDS_MAX)
            return msgspec.json.decode(answer, type=dict[str, Any])
        except (OSError, ValueError, http.client.HTTPException, msgspec.MsgspecError, BadQuestion, DaemonError):
            return {}

    @property
    def model_url(self) -> str:
        """Where programs on this machine find the model that this daemon passes requests on to."""
        own = urllib.parse.urlsplit(self.url)
        port = urllib.parse.urlsplit(str(self.health().get("model_url", self.url))).port
        return f"{own.scheme}://{own.netloc.rpartition(':')[0]}:{port}"


@contextmanager
def daemon_for(config: Config) -> Iterator[RunningDaemon]:
    """Yield the daemon that holds `config.data_dir`, or else one that runs while the block does.

    One that is being started, or ended, is waited for.

    Raises:
        StoreLocked: a daemon holds the folder and does not answer.
        MemdError: none can be started.
    """
    with ExitStack() as until_then:
        yield _daemon_for(config, until_then)


def _daemon_for(config: Config, until_then: ExitStack) -> RunningDaemon:
    until = time.monotonic() + START_SECONDS_MAX
    while True:
        is_late, is_held = time.monotonic() > until, DiskFiles().is_locked(config.data_dir / LOCK_NAME)
        is_starting = is_held and not _has_listener(config.data_dir)
        daemon = None if is_starting else RunningDaemon.find(config.data_dir, config.auth.token)
        if daemon is not None:
            return daemon
        if is_late or not is_starting:
            from memd.cli.embedded import embedded_daemon  # importing the daemon takes a second

            try:
                url, own_token = until_then.enter_context(embedded_daemon(config, command_name()))
                return RunningDaemon(url, config.auth.token, own_token)
            except StoreLocked:
                if is_late or is_held:
                    raise
        time.sleep(START_GLANCES_SECONDS)


def _has_listener(data_dir: Path) -> bool:
    """Whether somebody listens at the address of a daemon; nobody does where one starts, or was killed."""
    try:
        address = urllib.parse.urlsplit((data_dir / ADDRESS_NAME).read_text())
        socket.create_connection((address.hostname or "", address.port or 0), GLANCE_SECONDS_MAX).close()
    except (OSError, ValueError):
        return False
    return True


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
