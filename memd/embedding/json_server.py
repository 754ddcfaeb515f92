"""A server that answers JSON with JSON: an embedding model or a reranker behind an address.

Rule: called in threads only. A request ends by its deadline; errors show what the server says, never the key.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from memd.errors import MemdError
from memd.settings.url import basic_authorization, without_credentials

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ANSWER_BYTES_MAX = 64 << 20


class JsonServer:
    """Thread-safe: each request has a connection of its own."""

    def __init__(self, url: str, api_key: str, *, what: str, error: type[MemdError]) -> None:
        """
        Args:
            what: what it serves, for messages ("embedding").
            error: what is raised when it fails.
        """
        self._url, self._api_key, self._error = url, api_key, error
        self.shown = f"the {what} server at {without_credentials(url)}"
        parts = urlsplit(url)
        self.path = parts.path.rstrip("/")
        self._host, self._port, self._is_tls = parts.hostname or "", parts.port, parts.scheme == "https"
        self._open: set[http.client.HTTPConnection] = set()

    def post(self, route: str, body: object, deadline: float) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            MemdError: of the kind that was named: it cannot be reached, or has not answered by `deadline`
                (time.monotonic).
        """
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_left(deadline))
        connection.response_class = partial(_Answer, deadline=deadline)  # type: ignore[assignment]  # called as a class is
        self._open.add(connection)
        try:
            connection.request("POST", route, json.dumps(body).encode("utf-8", "replace"), self._headers())
            response = connection.getresponse()
            answer = bytearray()
            while chunk := response.read1(65_536):
                answer += chunk
                if len(answer) > ANSWER_BYTES_MAX:
                    raise self._error(f"{self.shown} answers {route} with more than {ANSWER_BYTES_MAX} bytes")
            return response.status, bytes(answer)
        except TimeoutError as error:
            raise self._error(f"{self.shown} does not answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._error(f"{self.shown} cannot be reached: {error}; is it running?") from error
        finally:
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """End the requests that are under way."""
        for connection in tuple(self._open):
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        elif basic := basic_authorization(self._url):
            headers["Authorization"] = basic
        return headers

    def said(self, answer: bytes) -> str:
        """The server's words in an answer that refuses, without the key, which some repeat."""
        text = answer.decode("utf-8", "replace")
        try:
            error = json.loads(answer)["error"]
            text = str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        key = self._api_key
        return " ".join((text.replace(key, "***") if key else text).split())[:300] or "nothing"


class _Answer(http.client.HTTPResponse):
    """An answer that ends by a deadline however slowly it comes, byte for byte even: its headers too."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, deadline))


class _Timed(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        if time.monotonic() > self._deadline:
            raise TimeoutError
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(deadline: float) -> float:
    """Seconds until then; a socket takes no 0 for "at once"."""
    return max(0.001, deadline - time.monotonic())
