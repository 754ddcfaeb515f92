"""Connections to the upstream: where a proxy needs aiohttp's client to behave differently.

Rule: all uses of aiohttp's internals are here and in `relay.py`, and tests/test_answers.py covers each. Timeouts that
judge other programs do not count time in which this event loop was blocked (`time_of_others`). State of one request
(was its connection reused, did a byte arrive) is in its `Attempt`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawResponseMessage
from multidict import CIMultiDict, MultiMapping
from yarl import URL

HEADERS_MAX = 1000
"""Limit on header lines of one request or answer; a browser sends about twenty."""
HEADER_BYTES_MAX = 64 * 1024
"""Limit on their bytes together."""
REASON_CHARACTERS_MAX = 300
WAIT_STEPS = 8
"""A timeout is counted in so many steps; a step that ends late by a quarter shows that the event loop was blocked."""
HALVED_MAX = 4
"""Limit on halvings of the last step."""
HELD_TIMES_MAX = 30
"""Limit for an event loop that is always blocked: so many times the timeout."""
TRUST_IT = "name the file of its certificate, or of who signed it, in the environment variable SSL_CERT_FILE"

Interim = Callable[[int, str, tuple[tuple[bytes, bytes], ...]], None]
"""Called with status, reason and raw headers of an interim answer (1xx)."""


class Attempt(msgspec.Struct):
    """One request on one connection."""

    on_interim: Interim | None
    wants_new: bool
    """Use a new connection only."""
    may_switch: bool
    """It asks for another protocol."""
    is_reused: bool = False
    received_bytes: int = 0

    @property
    def may_be_repeated(self) -> bool:
        """True if the upstream closed the idle connection, so that it cannot have read the request."""
        return self.is_reused and self.received_bytes == 0


attempt_of_task: ContextVar[Attempt] = ContextVar("attempt_of_task")
"""This task's present attempt; aiohttp offers no other way to pass it to the connection."""


class UpstreamConnection(ResponseHandler):
    """One connection, used for one request after another."""

    on_received: Callable[[], None] | None = None
    """Called when more of a body has arrived, or when it ended or broke off."""
    _attempt: Attempt | None = None
    _is_in_head = False

    @property
    def received_bytes(self) -> int:
        """Bytes received for the present request."""
        return 0 if self._attempt is None else self._attempt.received_bytes

    def set_response_params(self, **params: Any) -> None:
        """Begin a request (aiohttp's name for it)."""
        attempt = attempt_of_task.get()
        attempt.is_reused = self._attempt is not None
        self._attempt = attempt
        self._is_in_head = True
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; a head is limited in size, even one of many short lines."""
        if self._attempt is not None:
            self._attempt.received_bytes += len(data)
        super().data_received(data)
        attempt = self._attempt
        if data:
            self._tell()
        if not self._is_in_head or attempt is None or self.exception() is not None:
            return
        if attempt.received_bytes > HEADER_BYTES_MAX:
            self._fail(LineTooLong(b"the head", HEADER_BYTES_MAX))

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume paused reading. aiohttp calls this for every part of a body; if not paused, nothing needs parsing."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Take a parsed head. Interim ones are reported here, because aiohttp drops them."""
        message = data[0]
        attempt = self._attempt
        if problem := _problem_of(message, may_switch=attempt is not None and attempt.may_switch):
            self._fail(BadHttpMessage(problem))
            return
        if 100 < message.code < 200 and message.code != 101:
            if attempt is not None and attempt.on_interim is not None:
                attempt.on_interim(message.code, message.reason or "", message.raw_headers)
        elif message.code != 100:
            self._is_in_head = False
            if attempt is not None:
                attempt.on_interim = None
        super().feed_data(data, size)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Note the end. A reset does not complete a body; aiohttp would assume so if nothing else marks its end."""
        if exc is not None and self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(aiohttp.ClientPayloadError("the connection broke"))
        super().connection_lost(exc)
        self._tell()

    def _tell(self) -> None:
        if self.on_received is not None:
            self.on_received()

    def _fail(self, error: HttpProcessingError) -> None:
        """Mark the answer as unreadable and stop reading."""
        self.set_exception(error)
        if self.transport is not None:
            self.transport.close()

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """Fail, and with it a body that cannot be parsed further; aiohttp would wait for its rest for ever."""
        payload = self._payload
        super().set_exception(exc, *([] if exc_cause is None else [exc_cause]))
        if payload is not None and isinstance(exc, HttpProcessingError) and not payload.is_eof():
            payload.set_exception(aiohttp.ClientPayloadError("the body cannot be read any further"))
        self._tell()


@asynccontextmanager
async def time_of_others(seconds: float) -> AsyncIterator[None]:
    """Limit the block's wait for others, like `asyncio.timeout`, but count only time in which they could be heard.

    An event loop that was blocked sees a due timer before it reads bytes that arrived meanwhile. So each step counts
    once, however late its end is noticed. If the last step ends late, another one of half its length follows: a loop
    that is often blocked is free for less than a step in between.
    """
    loop, step, left = asyncio.get_running_loop(), seconds / WAIT_STEPS, WAIT_STEPS
    late, shortest, end = step / 4, step / 2**HALVED_MAX, loop.time() + seconds * HELD_TIMES_MAX
    counting: asyncio.TimerHandle

    def count(due: float) -> None:
        nonlocal left, counting, step
        now = loop.time()
        left -= 1
        if not left and due + late < now < end:
            left, step = 1, max(step / 2, shortest)
        if left:
            counting = loop.call_at(now + step, count, now + step)
        else:
            patience.reschedule(now)

    counting = loop.call_later(step, count, loop.time() + step)
    try:
        async with asyncio.timeout(None) as patience:
            yield
    finally:
        counting.cancel()


CONNECT_SECONDS = 10.0
"""Limit on connecting; answering has none."""


class UpstreamConnector(aiohttp.TCPConnector):
    """The pool of connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory: Any = functools.partial(UpstreamConnection, loop=self._loop)

    async def _wrap_create_connection(self, *args: Any, **options: Any) -> Any:
        """Connect to one address; this limit replaces aiohttp's `sock_connect`."""
        async with time_of_others(CONNECT_SECONDS):
            return await super()._wrap_create_connection(*args, **options)

    async def _get(self, key: Any, traces: Any) -> Any:
        if attempt_of_task.get().wants_new:
            return None
        while (connection := await super()._get(key, traces)) is not None:
            if connection.protocol is not None and not connection.protocol.should_close:
                return connection
            connection.close()  # unexpected bytes arrived, which would be taken for the next answer
        return None


def transfer_codings(headers: MultiMapping[str]) -> str:
    """Return the transfer codings of a message, in lower case; empty if there are none."""
    return ", ".join(headers.getall("Transfer-Encoding", [])).strip().lower()


def _problem_of(message: RawResponseMessage, *, may_switch: bool) -> str:
    """Return why a head cannot be passed on although aiohttp could read it; empty if it can."""
    if message.code < 100:
        return f"its status is {message.code}"
    if message.code == 101 and not may_switch:
        return "it switches to another protocol, which nobody asked it for"
    if any(name[-1:] in b" \t" for name, _ in message.raw_headers if name):
        return "there is a space between a header's name and its colon"
    if (codings := transfer_codings(message.headers)) not in ("", "chunked", "identity"):
        return f"its Transfer-Encoding is {codings!r}, not chunked"
    return ""


KEEPALIVE_SECONDS = 3.0
"""Idle connections are closed after this; llama-server closes its own after 5 s."""


WRITTEN_AT_ONCE_BYTES = 2 << 20
"""Bodies up to this size are written in one piece, which takes 2 ms."""


class UpstreamSession:
    """Requests to one server, sent without additions or changes; its answers may have headers of the same size."""

    def __init__(self, base: str, authorization: str | None, on_lost: Callable[[], None]) -> None:
        """`authorization`: sent with each request that has none. `on_lost`: called when a connection is lost."""
        self._base = urlsplit(base)
        self.authorization = authorization
        self._on_lost = on_lost
        self._connector = UpstreamConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=1 << 18,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
        )
        self._session._retry_connection = False  # it would repeat a GET on a fresh connection too

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def received_bytes(self) -> int:
        """Return the bytes received on connections in use; if the number changed, something arrived."""
        return sum(one.received_bytes for one in self._connector._acquired if isinstance(one, UpstreamConnection))

    async def send(
        self,
        method: str,
        path_and_query: str,
        headers: CIMultiDict[str],
        body: bytes | AsyncIterable[bytes] | None,
        on_interim: Interim | None = None,
    ) -> aiohttp.ClientResponse:
        """Send one request. The caller reads the answer's body and closes it. Raises aiohttp.ClientError, TimeoutError:
        no answer came.

        The server may have closed a pooled connection meanwhile. So a request on a reused connection that breaks before
        any byte of an answer is sent once more, on a new one, if its body can be sent again.
        """
        # The target unchanged: all of it counts as path, because an empty query would be lost.
        base, wants_new, large = self._base, False, b""
        if self.authorization is not None and "Authorization" not in headers:
            headers = CIMultiDict(headers, Authorization=self.authorization)
        url = URL.build(scheme=base.scheme, authority=base.netloc, path=base.path + path_and_query, encoded=True)
        if isinstance(body, bytes) and len(body) > WRITTEN_AT_ONCE_BYTES:
            headers, large = headers.copy(), body
            headers["Content-Length"] = str(len(body))
        while True:
            attempt = Attempt(on_interim, wants_new, may_switch="Upgrade" in headers)
            attempt_of_task.set(attempt)
            try:
                data = _pieces_of(large) if large else body
                return await self._session.request(method, url, headers=headers, data=data, allow_redirects=False)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                self._on_lost()
                if wants_new or not attempt.may_be_repeated or isinstance(body, AsyncIterable):
                    raise
                wants_new = True

    def reason_of(self, error: BaseException) -> str:
        """Return why there is no answer, in words for people, on one line; the upstream's own bytes are escaped."""
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            refused = error.certificate_error
            problem = getattr(refused, "verify_message", "") or refused
            reason = f"its certificate is not trusted ({problem}); {_trust_it()}"
        elif isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno or 0
            is_system_s = number > 0 and not isinstance(error.os_error, ssl.SSLError)  # OpenSSL has its own numbers
            reason = os.strerror(number) if is_system_s else str(error.os_error.strerror or error.os_error)
        elif isinstance(error, aiohttp.ClientResponseError):
            reason = f"its answer is no HTTP that could be read: {error.message}"
            if "Got more than" in error.message:
                reason = f"the headers of its answer are larger than {HEADER_BYTES_MAX:,} bytes"
            elif "Too many headers" in error.message:
                reason = f"its answer has more than {HEADERS_MAX} header lines"
        elif isinstance(error, aiohttp.ServerDisconnectedError):
            is_begun = not isinstance(error.message, str)
            reason = "it closed the connection" + (" in the middle of the answer's head" if is_begun else "")
        else:
            reason = str(error) or type(error).__name__
        line = " ".join(reason.split())
        return line if len(line) <= REASON_CHARACTERS_MAX else line[:REASON_CHARACTERS_MAX] + "…"


async def _pieces_of(body: bytes) -> AsyncIterator[bytes]:
    """Yield a large body in pieces. aiohttp would copy it behind the head at once and block the event loop."""
    for start in range(0, len(body), WRITTEN_AT_ONCE_BYTES):
        yield body[start : start + WRITTEN_AT_ONCE_BYTES]


def is_unreadable(error: BaseException) -> bool:
    """Return whether an answer came that is not HTTP or exceeds its bounds."""
    return isinstance(error, aiohttp.ClientResponseError)


def _trust_it() -> str:
    """Return the remedy; OpenSSL itself does not report a missing file."""
    named = os.environ.get("SSL_CERT_FILE")
    return f"{TRUST_IT}: {named} is not there" if named and not Path(named).exists() else TRUST_IT
