"""Connections to the upstream: what aiohttp's client has to do differently for a proxy.

Rule: all that reaches into aiohttp is here and in `header_bytes.py`, and tests/test_odd_answers.py holds each of it.
What happened to one request (was its connection a reused one, did a byte come back) is in its `Attempt`.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

HEADERS_MAX = 1000
"""Header lines of one request or answer; a browser sends about twenty."""
REASON_CHARACTERS_MAX = 300
TRUST_IT = "name the file of its certificate, or of who signed it, in the environment variable SSL_CERT_FILE"

Interim = Callable[[int, str, tuple[tuple[bytes, bytes], ...]], None]
"""Called with status, reason and raw headers of an answer that comes before the real one (1xx)."""


class Attempt:
    """One request on one connection."""

    def __init__(self, *, header_bytes_max: int, wants_new: bool, on_interim: Interim | None) -> None:
        """`wants_new`: take no connection that was used before."""
        self.header_bytes_max = header_bytes_max
        self.wants_new = wants_new
        self.on_interim = on_interim
        self.is_reused = False
        self.received_bytes = 0

    @property
    def may_be_repeated(self) -> bool:
        """Whether the upstream had closed the idle connection, so that it cannot have read the request."""
        return self.is_reused and self.received_bytes == 0


attempt_of_task: ContextVar[Attempt] = ContextVar("attempt_of_task")
"""The attempt that this task makes now: aiohttp has no other way to give it to the connection."""


class UpstreamConnection(ResponseHandler):
    """One connection, used for one request after another."""

    _attempt: Attempt | None = None
    _is_in_head = False

    def set_response_params(self, **params: Any) -> None:
        """Begin a request (aiohttp's name for it)."""
        attempt = attempt_of_task.get()
        attempt.is_reused = self._attempt is not None
        self._attempt = attempt
        self._is_in_head = True
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head ends somewhere, also one of many short lines."""
        if self._attempt is not None:
            self._attempt.received_bytes += len(data)
        super().data_received(data)
        attempt = self._attempt
        if not self._is_in_head or attempt is None or self.exception() is not None:
            return
        if attempt.received_bytes > attempt.header_bytes_max:
            self.set_exception(LineTooLong(b"the head", attempt.header_bytes_max))
            if self.transport is not None:
                self.transport.close()

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Take a parsed head: aiohttp drops those before the real one."""
        message = data[0]
        attempt = self._attempt
        if 100 < message.code < 200 and message.code != 101:
            if attempt is not None and attempt.on_interim is not None:
                attempt.on_interim(message.code, message.reason or "", message.raw_headers)
        elif message.code != 100:
            self._is_in_head = False
            if attempt is not None:
                attempt.on_interim = None
        super().feed_data(data, size)

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """Fail; a body that cannot be parsed any further fails too, where aiohttp would wait for the rest for ever."""
        payload = self._payload
        super().set_exception(exc, *([] if exc_cause is None else [exc_cause]))
        if payload is not None and isinstance(exc, HttpProcessingError) and not payload.is_eof():
            payload.set_exception(aiohttp.ClientPayloadError("the body cannot be read any further"))


class UpstreamConnector(aiohttp.TCPConnector):
    """The pool of connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory: Any = functools.partial(UpstreamConnection, loop=self._loop)

    async def _get(self, key: Any, traces: Any) -> Any:
        return None if attempt_of_task.get().wants_new else await super()._get(key, traces)


def new_session(
    *, keepalive_seconds: float, connect_timeout_seconds: float, header_bytes_max: int
) -> aiohttp.ClientSession:
    """A session that adds and changes nothing, repeats nothing, and lets answers have headers as large as requests."""
    session = aiohttp.ClientSession(
        connector=UpstreamConnector(limit=0, keepalive_timeout=keepalive_seconds),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=1 << 18,
        max_line_size=header_bytes_max,
        max_field_size=header_bytes_max,
        max_headers=HEADERS_MAX,
    )
    session._retry_connection = False  # it would repeat a GET on a fresh connection too
    return session


def is_unreadable(error: BaseException) -> bool:
    """Whether an answer came, but none that is HTTP or within its bounds."""
    return isinstance(error, aiohttp.ClientResponseError)


def reason_of(error: BaseException, header_bytes_max: int) -> str:
    """Why there is no answer, in words for people, on one line; the upstream's own bytes in it are escaped."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = f"its certificate is not trusted ({_certificate_problem(error.certificate_error)}); {TRUST_IT}"
    elif isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        is_system_s = number > 0 and not isinstance(error.os_error, ssl.SSLError)  # OpenSSL has numbers of its own
        reason = os.strerror(number) if is_system_s else str(error.os_error.strerror or error.os_error)
    elif isinstance(error, aiohttp.ClientResponseError):
        reason = _unreadable(error.message, header_bytes_max)
    elif isinstance(error, aiohttp.ServerDisconnectedError):
        is_begun = not isinstance(error.message, str)
        reason = "it closed the connection" + (" in the middle of the answer's head" if is_begun else "")
    else:
        reason = str(error) or type(error).__name__
    line = " ".join(reason.split())
    return line if len(line) <= REASON_CHARACTERS_MAX else line[:REASON_CHARACTERS_MAX] + "…"


def _certificate_problem(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or error)


def _unreadable(message: str, header_bytes_max: int) -> str:
    if "Got more than" in message:
        return f"the headers of its answer are larger than limits.header_bytes_max ({header_bytes_max} bytes)"
    if "Too many headers" in message:
        return f"its answer has more than {HEADERS_MAX} header lines"
    return f"its answer is no HTTP that could be read: {message}"
