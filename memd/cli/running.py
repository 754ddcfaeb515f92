"""The client of a running daemon, for commands.

Rule: the data directory has its address. Commands use it only if the server there says that it holds this very folder;
by now another program may listen there.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from memd.errors import BadQuestion, DaemonError
from memd.settings.model import Config
from memd.store.layout import ADDRESS_NAME

GLANCE_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 60.0
BAD_REQUEST = 400


class RunningDaemon:
    """Sends requests to a daemon's own routes. Get one from `find`."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token

    @classmethod
    def find(cls, data_dir: Path, token: str) -> RunningDaemon | None:
        """Return the daemon that holds `data_dir`, or None."""
        try:
            url = (data_dir / ADDRESS_NAME).read_text()
            if not url.startswith("http://"):
                return None
        except (OSError, ValueError):
            return None
        daemon = cls(url, token)
        return daemon if daemon.health().get("data_dir") == str(data_dir.resolve()) else None

    def health(self) -> dict[str, Any]:
        """Return its health: `version`, `data_dir` and more; empty if no memd answers there."""
        try:
            answer = self._send("/memd/health", None, GLANCE_SECONDS_MAX)
            return msgspec.json.decode(answer, type=dict[str, Any])
        except (OSError, ValueError, http.client.HTTPException, msgspec.MsgspecError, BadQuestion, DaemonError):
            return {}

    def get(self, path: str, **query: object) -> bytes:
        """Return the body of the answer to a GET; a query parameter that is None is left out.

        Raises:
            BadQuestion: the request is wrong.
            DaemonError: it refused, or does not answer.
        """
        given = {name: value for name, value in query.items() if value is not None}
        return self._request(f"{path}?{urllib.parse.urlencode(given, doseq=True)}" if given else path, None)

    def post(self, path: str, body: object) -> bytes:
        """Return the body of the answer to a POST.

        Raises:
            BadQuestion: the request is wrong.
            DaemonError: it refused, or does not answer.
        """
        return self._request(path, msgspec.json.encode(body))

    def _request(self, path: str, body: bytes | None) -> bytes:
        try:
            return self._send(path, body, ANSWER_SECONDS_MAX)
        except OSError as error:
            raise DaemonError(f"the daemon at {self.url} does not answer: {error}; see its log") from None

    def _send(self, path: str, body: bytes | None, seconds: float) -> bytes:
        headers = {"X-Memory-Token": self._token} if self._token else {}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)  # noqa: S310  # http, see find
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310  # the same
                content: bytes = answer.read()
        except urllib.error.HTTPError as error:
            refused = BadQuestion if error.code == BAD_REQUEST else DaemonError
            raise refused(_message(error.read()) or f"the daemon at {self.url} answers {error.code}") from None
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
