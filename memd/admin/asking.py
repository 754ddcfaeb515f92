"""The client of a daemon's own routes.

Rule: one request, one connection; no proxy and no redirection is followed.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import msgspec

from memd.admin.queries import as_given
from memd.admin.routing import route_of
from memd.errors import BadQuestion, DaemonError, Forbidden, MemdError, RightMissing, UnknownTopic
from memd.principals import TOKEN_HEADER

Answer = TypeVar("Answer")
ANSWER_SECONDS_MAX = 60.0
OK, BAD_REQUEST, WANTS_TOKEN = 200, 400, 401
NO_TEXT = "a text that was given has bytes that are no UTF-8; set PYTHONUTF8=1 (or LC_ALL=C.UTF-8) and give it again"
THE_RIGHT_ONE = "give its auth.token, or one of `memd token add`, as MEMD_AUTH_TOKEN or in the settings (--config)"


class OwnRoutesClient:
    """Sends requests to the routes of the daemon at an address of this machine."""

    def __init__(self, url: str, token: str, command_token: str = "") -> None:
        """`command_token`: what a request shows where there is no token; nothing if it is empty too."""
        self.url = url
        self._token = token
        self._command_token = command_token

    @property
    def refusal(self) -> str:
        """Why a daemon that wants a token refuses this client, as said of the daemon."""
        return "does not know this token" if self._token else "wants a token"

    def get(self, path: str, **query: object) -> bytes:
        """Return the body of the answer to a GET; a query parameter that is None is left out.

        Raises:
            BadQuestion: the request is wrong.
            DaemonError: it refused, or does not answer.
        """
        given = list(as_given(query).items())
        query_string = urllib.parse.urlencode(given, errors="surrogateescape")  # as the terminal gave it
        return self._request(f"{path}?{query_string}" if given else path, None, ANSWER_SECONDS_MAX)

    def post(self, path: str, body: object, seconds: float = ANSWER_SECONDS_MAX) -> bytes:
        """Return the body of the answer to a POST, which may take so long.

        Raises:
            BadQuestion: the request is wrong.
            DaemonError: it refused, or does not answer.
        """
        return self._request(path, encoded(body), seconds)

    def ask(
        self,
        operation: Callable[..., Awaitable[Answer]],
        id_: str = "",
        body: object = None,
        seconds: float = ANSWER_SECONDS_MAX,
        **query: Any,
    ) -> Answer:
        """Return the answer of an operation; raises as `get` and `post`.

        Args:
            operation: the function that declares it.
            id_: the part of its path that varies.
        """
        route = route_of(operation)
        path = route.path.replace("{id}", urllib.parse.quote(id_, safe=""))
        told = self.get(path, **query) if body is None else self.post(path, body, seconds)
        answer: Answer = msgspec.json.decode(told, type=route.answer)
        return answer

    def _request(self, path: str, body: bytes | None, seconds: float) -> bytes:
        try:
            return self.send(path, body, seconds)
        except (OSError, http.client.HTTPException) as error:
            raise DaemonError(f"the daemon at {self.url} does not answer: {error}; see its log") from None

    def send(self, path: str, body: bytes | None, seconds: float) -> bytes:
        """Send a request, a GET if there is no body; return the body of its answer.

        Raises:
            OSError, http.client.HTTPException: there is no answer.
            BadQuestion: the request is wrong.
            DaemonError: it refused.
        """
        token = self._token or self._command_token
        headers = {TOKEN_HEADER: token} if token else {}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        parts = urllib.parse.urlsplit(self.url)
        made: http.client.HTTPConnection
        if parts.scheme == "http":
            made = http.client.HTTPConnection(parts.netloc, timeout=seconds)
        else:
            made = http.client.HTTPSConnection(parts.netloc, timeout=seconds, context=unchecked_tls())
        with closing(made) as connection:
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status == WANTS_TOKEN:
            raise RightMissing(f"the daemon at {self.url} {self.refusal}; {THE_RIGHT_ONE}")
        if answer.status != OK:
            message, kind = _error(content)
            refused: type[MemdError] = BadQuestion if answer.status == BAD_REQUEST else DaemonError
            refused = {UnknownTopic.kind: UnknownTopic, Forbidden.kind: RightMissing}.get(kind, refused)
            raise refused(message or f"the daemon at {self.url} answers {answer.status}")
        return content


def encoded(body: object) -> bytes:
    """A body as JSON; raises BadQuestion where a text in it cannot be."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise BadQuestion(NO_TEXT) from None


def _error(body: bytes) -> tuple[str, str]:
    """The message and the type of an error; empty where it is none."""
    try:
        error = msgspec.json.decode(body, type=dict[str, dict[str, Any]]).get("error", {})
    except msgspec.MsgspecError:
        return "", ""
    return str(error.get("message", "")).removeprefix("memd: "), str(error.get("type", ""))


def unchecked_tls() -> ssl.SSLContext:
    """TLS to a daemon on this machine. Its certificate has the name that others use; it proves itself otherwise."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
