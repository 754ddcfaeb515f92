"""Bytes between client and upstream: requests are forwarded, answers streamed back, and replies captured on the side.

Rule: bytes that memd need not change pass unchanged, before any other work on them. If the client leaves, the upstream
request ends at once (the handler is cancelled). If the upstream breaks off in mid-answer, the client's stream ends
abnormally, never with a clean end.

Header values are decoded only for inspection; bytes that are not UTF-8 are preserved (surrogateescape). aiohttp writes
headers as UTF-8 and drops other bytes, so `keep_header_bytes` replaces its writer, for both sides. The upstream's
answers keep the upstream's CORS headers (https://fetch.spec.whatwg.org/#http-cors-protocol). memd adds its own only to
its own answers on clients' routes, never below /memd/; without tokens, only for pages of this machine.

A reply arrives in thousands of packets, and waking a task for each costs more than all other work on it. So a piece is
written within the call that read it, as long as nothing has to wait (bench/NOTES.md, 2026-11-23).

A refusal may come with status 200, so the beginning of an answer is read before the client gets any of it; these bytes
are then passed on first. For a prompt that is too long, LM Studio streams `event: error` (bug tracker, issue 2322).
SGLang (issue 12081) and text-generation-inference (server.rs, `into_openai_event`) stream `data: {"error": …}`.
OpenRouter puts an `error` into either kind of body if a provider fails (docs, "Errors"). A stream is held back for at
most `WAIT_SECONDS`; an answer that breaks off meanwhile is handled by the code that reads on.

WebSockets (RFC 6455) are tunnelled, on any path. Once the upstream has agreed to the upgrade, bytes pass both ways
unread, in order and with back-pressure, until one side closes or the client's token is revoked; then the other side is
closed too. Memory has no part in them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import aiohttp
import msgspec
from aiohttp import HttpVersion11, StreamReader, http_writer, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict, MultiMapping

from memd.access import is_from_foreign_page, is_let_in_still, own_secrets, without_secrets
from memd.errors import UpstreamError
from memd.principals import Principals
from memd.proxy.upstream.client import HOP_BY_HOP, NOT_FORWARDED, REFUSALS
from memd.proxy.upstream.connection import Interim, UpstreamConnection
from memd.proxy.upstream.pool import Assignment
from memd.proxy.upstream.windows import BODY_BYTES_MAX
from memd.telemetry.metrics import RequestRecord, record_of
from memd.wire.api import Api
from memd.wire.content_codings import BadCoding, TooLarge, codings_of, unpacked_parts
from memd.wire.lenient_json import MEMBERS, decode_or_none
from memd.wire.reply import Reply, ReplyStream, SseParser
from memd.wire.sideband import MemoryOut, splice_memory_out_json

log = logging.getLogger("memd")


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def keep_header_bytes() -> None:
    """Make this process write headers with their original bytes."""
    http_writer._serialize_headers = serialized


def serialized(status_line: str, headers: CIMultiDict[str]) -> bytes:
    """Encode a head. Raises ValueError: it contains a control character, which could end a header early."""
    lines = [status_line, *[f"{name}: {value}" for name, value in headers.items()]]
    if _CONTROL.search("".join(lines)):
        raise ValueError("a control character in a header")
    return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape")


def decoded(raw_headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Decode headers; names keep their spelling."""
    return [(name.decode("latin-1"), value.decode(errors="surrogateescape")) for name, value in raw_headers]


def printable(text: str) -> str:
    """Return text for an answer's head, with spaces in place of control characters (RFC 9110 section 5.5)."""
    return _CONTROL.sub(" ", text)


_ASKED_METHOD, _ASKED_HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"
PREFLIGHT_SECONDS = 600
"""Time for which a browser may cache the answer to a preflight."""


def is_preflight(request: web.BaseRequest) -> bool:
    """Return whether a browser asks if a page may send a request; such a request never carries a token."""
    return request.method == "OPTIONS" and "Origin" in request.headers and _ASKED_METHOD in request.headers


def preflight_answer(request: web.BaseRequest) -> web.Response:
    """Allow the announced request; that request itself needs the token."""
    allowed = {
        "Access-Control-Allow-Origin": request.headers["Origin"],
        "Access-Control-Allow-Methods": request.headers[_ASKED_METHOD],
        "Access-Control-Allow-Headers": request.headers.get(_ASKED_HEADERS, ""),
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        "Vary": f"Origin, {_ASKED_METHOD}, {_ASKED_HEADERS}",
    }
    return web.Response(status=204, headers={name: value for name, value in allowed.items() if value})


def let_page_read(request: web.BaseRequest, response: web.StreamResponse, *, is_open: bool) -> None:
    """Let the page that sent a request read memd's own answer, if it may use memd at all."""
    if "Origin" in request.headers and (not is_open or not is_from_foreign_page(request)):
        response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
        response.headers.add("Vary", "Origin")
        let_page_read_own_headers(response.headers)


def let_page_read_own_headers(headers: CIMultiDict[str]) -> None:
    """If a page may read an answer, expose memd's headers too; a browser hides headers that are not named."""
    own = [name for name in dict.fromkeys(headers) if name.lower().startswith("x-memory-")]
    if own and "Access-Control-Allow-Origin" in headers:
        headers.add("Access-Control-Expose-Headers", ", ".join(own))


class BrokenAnswer(UpstreamError):
    """The upstream broke off in the middle of an answer."""


async def parts_of(answer: aiohttp.ClientResponse, record: RequestRecord, read: bytes = b"") -> AsyncIterator[bytes]:
    """Yield an answer's body as it arrives, beginning with the part already `read`. Raises BrokenAnswer: the connection
    ended before the body did."""
    if read:
        record.note_answer_start()
        yield read
    while True:
        try:
            part = await answer.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BrokenAnswer(type(error).__name__) from error  # its message quotes the bytes that could not be parsed
        record.note_answer_start()
        if not part:
            return
        yield part


class Passing(msgspec.Struct, eq=False):
    """Passes the body of one answer on until it ends."""

    client: Any
    """The protocol of the client's connection."""
    response: web.StreamResponse
    """Already prepared."""
    answer: aiohttp.ClientResponse
    look: Callable[[bytes], bytes] = bytes
    """Gets each part and returns the bytes to send instead."""
    is_due: Callable[[], bool] = bool
    """Returns whether to `pause` before sending the bytes that `look` returned last."""
    pause: Callable[[], Awaitable[None]] | None = None
    left: bytes = b""
    needed: asyncio.Future[None] = msgspec.field(default_factory=asyncio.Future)

    async def run(self, parts: AsyncIterator[bytes]) -> None:
        """Pass on `parts`, which read the answer, to their end. Raises BrokenAnswer: as they do."""
        if not self.answer.content.total_bytes and not self.answer.content.is_eof():
            await self.response.write(b"")  # the head is sent alone, as it came
        async for part in parts:
            passed = self.look(part)
            while True:
                if self.pause is not None and self.is_due():
                    await self.pause()
                await self.response.write(passed)
                if not passed:
                    break
                passed = await self._pass_directly()

    async def _pass_directly(self) -> bytes:
        """Pass on parts from within the connection's callback; return the last bytes of `look` if still unsent."""
        connection, content = self.answer.connection, self.answer.content
        upstream = None if connection is None else connection.protocol
        is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        if not is_chunked or not isinstance(upstream, UpstreamConnection) or content.is_eof() or content.exception():
            return b""
        self.left, self.needed = b"", asyncio.get_running_loop().create_future()
        upstream.on_received = self._received
        self._received()  # for parts that arrived meanwhile
        try:
            await self.needed
        finally:
            if upstream.on_received == self._received:  # unless another request has the connection by now
                upstream.on_received = None
        return self.left

    def _received(self) -> None:
        """Pass on the parts that have arrived, until the task is needed."""
        content = self.answer.content
        while not self.needed.done():
            transport = self.client.transport
            is_stopped = self.client.writing_paused or transport is None or transport.is_closing()
            if is_stopped or content.is_eof() or content.exception() is not None:
                self.needed.set_result(None)
                return
            if not (part := content.read_nowait()):
                return
            passed = self.look(part)
            if self.is_due():
                self.left = passed
                self.needed.set_result(None)
            elif passed:
                transport.write(b"%x\r\n%b\r\n" % (len(passed), passed))


NO_REPLY = Reply(message=None)
BROKEN = "broken_answer"
"""The outcome of a request whose upstream broke off in mid-answer."""
OWN_REQUEST_HEADERS = ("x-memory-mode", "x-memory-topic", "x-memory-session", "x-memory-history", "x-memory-token")
STREAM_TYPES = ("text/event-stream", "application/x-ndjson")
_ADDED_HEADERS = ("Content-Type", "Date", "Server")
"""Headers that aiohttp adds to a response that lacks them."""


def forwarded_headers(request: web.BaseRequest, principals: Principals) -> CIMultiDict[str]:
    """Return the client's headers without memd's own, secrets, and hop-by-hop ones (also those named in
    `Connection`)."""
    own = own_secrets(request, principals)
    secrets = {secret for _, secret in own}
    dropped = NOT_FORWARDED.union(
        named_in_connection(request.headers), OWN_REQUEST_HEADERS, (name.lower() for name, _ in own)
    )
    spelled: dict[str, str] = {}  # the client library drops all but the last of two that differ in case
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in decoded(request.raw_headers):
        if name.lower() not in dropped and (kept := without_secrets(name, value, secrets)) is not None:
            headers.add(spelled.setdefault(name.lower(), name), kept)
    return headers


async def pass_through(
    request: web.Request,
    headers: CIMultiDict[str],
    assignment: Assignment,
    target: str,
    body: AsyncIterator[bytes] | bytes | None,
    extra: list[tuple[str, str]],
) -> web.StreamResponse:
    """Forward a request unchanged and relay the answer."""
    if not isinstance(body, bytes | None) and request.content_length is not None:
        headers["Content-Length"] = str(request.content_length)
    answer = await assignment.send(request.method, target, headers, body, interim_to(request))
    record_of(request).server = assignment.shown
    async with answer:
        return await relay(request, answer, extra)


async def relay(
    request: web.Request, answer: aiohttp.ClientResponse, extra: list[tuple[str, str]]
) -> web.StreamResponse:
    """Stream an answer back unread."""
    streams = bool(extra) and media_type_of(answer) in STREAM_TYPES
    response = prepared(answer, [*extra, *(_unbuffered(answer) if streams else ())], body_changes=False)
    await response.prepare(request)
    passing = Passing(request.protocol, response, answer)
    return await _pass_on(passing, request, response, parts_of(answer, record_of(request)))


async def _pass_on(
    passing: Passing, request: web.Request, response: web.StreamResponse, parts: AsyncIterator[bytes]
) -> web.StreamResponse:
    """Send the rest of the body of a response that has begun."""
    try:
        await passing.run(parts)
    except BrokenAnswer as error:
        break_off(request, error)
        return response
    await response.write_eof()
    return response


def interim_to(request: web.BaseRequest) -> Interim:
    """Return a function that passes on the upstream's 1xx answers, except `100 Continue`, which memd itself sends."""

    def pass_on(status: int, reason: str, raw_headers: tuple[tuple[bytes, bytes], ...]) -> None:
        if request.version < HttpVersion11 or request.transport is None or request.transport.is_closing():
            return
        headers = CIMultiDict((name, printable(value)) for name, value in decoded(raw_headers))
        request.transport.write(serialized(f"HTTP/1.1 {status} {printable(reason)}", headers))

    return pass_on


def media_type_of(answer: aiohttp.ClientResponse) -> str:
    """Return the media type, in lower case and without parameters (RFC 9110 section 8.3.1); empty if there is none."""
    return answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()


class ModelRelay(msgspec.Struct, eq=False):
    """Streams a model's answer back, adds `memory_out`, and captures the reply; `reply` is valid at any time."""

    api: Api
    request: web.Request
    answer: aiohttp.ClientResponse
    bytes_max: int
    """Limit on the bytes of an answer held in memory."""
    wants_stream: bool = False
    read: bytes = b""
    """The beginning of its body, if already read."""
    keep: Callable[[Reply], Awaitable[None]] | None = None
    stream: ReplyStream | None = None
    whole: Reply | None = None
    is_broken: bool = False

    @property
    def reply(self) -> Reply:
        """The reply received so far; marked interrupted unless the upstream finished it."""
        if self.stream is not None:
            return self.stream.reply(interrupted=self.is_broken or not self.stream.finished)
        return self.whole or NO_REPLY

    async def run(
        self,
        out: MemoryOut | None,
        extra: list[tuple[str, str]],
        keep: Callable[[Reply], Awaitable[None]] | None = None,
    ) -> web.StreamResponse:
        """Relay the answer until it ends, the client leaves (cancellation) or the upstream breaks off. `keep` is
        awaited with the whole reply before the client gets its end."""
        self.keep = keep
        if self._streams():
            return await self._run_stream(out, extra)
        return await self._run_json(out, extra)

    def _streams(self) -> bool:
        """Return whether the answer is a stream: by its media type, or because one was asked for and it is not JSON."""
        media_type = media_type_of(self.answer)
        is_json = media_type == "application/json" or media_type.endswith("+json")
        return media_type == self.api.stream_type or (self.wants_stream and not is_json)

    def _parts(self) -> AsyncIterator[bytes]:
        return parts_of(self.answer, record_of(self.request), self.read)

    async def _run_stream(self, out: MemoryOut | None, extra: list[tuple[str, str]]) -> web.StreamResponse:
        stream = self.stream = self.api.new_stream(
            self.bytes_max,
            out,
            codings=codings_of(self.answer.headers),  # some servers compress although `identity` was requested
            reads_late=self.keep is None,
        )
        response = prepared(self.answer, [*extra, *_unbuffered(self.answer)], body_changes=out is not None)
        await response.prepare(self.request)
        passing = Passing(self.request.protocol, response, self.answer, stream.feed)
        if self.keep is not None:
            passing.is_due, passing.pause = lambda: self.keep is not None and stream.finished, self._keep_reply
        try:
            await passing.run(self._parts())
        except BrokenAnswer as error:
            self.is_broken = True
            await _write_held(response, stream)
            break_off(self.request, error)
            return response
        await self._keep_reply()
        await _write_held(response, stream)
        await response.write_eof()
        return response

    async def read_on(self) -> None:
        """Parse the parts of a stream that have passed unread, in steps that let other tasks run."""
        if self.stream is None:
            return
        while self.stream.read():  # noqa: ASYNC110 - other tasks run in between
            await asyncio.sleep(0)
        if self.stream.problem is not None:
            self._tell_unread(self.stream.problem)

    def _tell_unread(self, error: Exception) -> None:
        fields = {"turn": record_of(self.request).turn or None, "problem": error}
        log.warning("an answer is not remembered: memd cannot read it", extra=fields)

    async def _keep_reply(self) -> None:
        keep, self.keep = self.keep, None
        if keep is not None:
            await keep(self.reply)

    async def _unpacked(self, body: bytes) -> bytes | None:
        """Return the body of a whole answer without its content codings; None if it cannot be read."""
        if not (codings := codings_of(self.answer.headers)):
            return body
        try:
            return b"".join(await asyncio.to_thread(list, unpacked_parts(body, codings, self.bytes_max)))
        except (BadCoding, TooLarge) as error:
            self._tell_unread(error)
            return None

    async def _run_json(self, out: MemoryOut | None, extra: list[tuple[str, str]]) -> web.StreamResponse:
        parts, read = self._parts(), bytearray()
        try:
            while len(read) <= self.bytes_max and (part := await anext(parts, b"")):
                read += part
        except BrokenAnswer as error:
            response = await self._begun(read, prepared(self.answer, extra, body_changes=True))
            break_off(self.request, error)
            return response
        if len(read) > self.bytes_max:  # not held completely, so nothing can be added or remembered
            log.warning("an answer is too large to be remembered", extra={"turn": record_of(self.request).turn or None})
            response = await self._begun(read, prepared(self.answer, extra, body_changes=False))
            passing = Passing(self.request.protocol, response, self.answer)
            return await _pass_on(passing, self.request, response, parts)
        body, as_came = bytes(read), True
        if self.answer.status == 200 and (plain := await self._unpacked(body)) is not None:
            self.whole = self.api.parse_reply(plain)
            await self._keep_reply()
            if out is not None:
                body, as_came = splice_memory_out_json(plain, out), False
        response = prepared(self.answer, extra, body_changes=True, unpacked=not as_came)
        response.content_length = len(body)
        await self._begun(body, response)
        await response.write_eof()
        return response

    async def _begun(self, body: bytes | bytearray, response: web.StreamResponse) -> web.StreamResponse:
        """Send the head of a response and the body, or its beginning."""
        await response.prepare(self.request)
        await response.write(body)
        return response


def prepared(
    answer: aiohttp.ClientResponse, extra: list[tuple[str, str]], *, body_changes: bool, unpacked: bool = False
) -> web.StreamResponse:
    """Return a response with the upstream's status and headers, ready to send; `unpacked`: drop the content coding."""
    told = {name.lower() for name, _ in extra if name.startswith("X-Memory-")}  # memd's values win
    length = (*(("content-length",) if body_changes else ()), *(("content-encoding",) if unpacked else ()))
    dropped = HOP_BY_HOP.union(named_in_connection(answer.headers), told, length)
    kept = ((name, value) for name, value in decoded(answer.raw_headers) if name.lower() not in dropped)
    headers = CIMultiDict((name, printable(value)) for name, value in kept)
    headers.extend(extra)
    let_page_read_own_headers(headers)
    return Relayed(status=answer.status, reason=printable(answer.reason or ""), headers=headers)


def _unbuffered(answer: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """Return the header that tells nginx not to buffer a stream, unless the upstream has set it."""
    return [] if "X-Accel-Buffering" in answer.headers else [("X-Accel-Buffering", "no")]


class Relayed(web.StreamResponse):
    """A relayed answer: its headers are the upstream's and memd's, none of aiohttp's. They are sent with the first
    write, which may be empty."""

    _send_headers_immediately = False

    def __init__(self, *, status: int, reason: str | None, headers: CIMultiDict[str]) -> None:
        super().__init__(status=status, reason=reason, headers=headers)
        self._absent = [name for name in _ADDED_HEADERS if name not in headers]

    def remove_added_headers(self) -> None:
        """Remove the headers that aiohttp added when it prepared the response."""
        for name in self._absent:
            self.headers.popall(name, None)


def named_in_connection(headers: MultiMapping[str]) -> set[str]:
    """Return the headers (lower case) named in `Connection`; these are for the next hop only (RFC 9110 7.6.1)."""
    values = headers.getall("Connection", [])
    return {name.strip().lower() for value in values for name in value.split(",")}


async def _write_held(response: web.StreamResponse, stream: ReplyStream) -> None:
    if held := stream.flush():
        await response.write(held)


def break_off(request: web.BaseRequest, error: BrokenAnswer) -> None:
    """Abort the client's connection, so that a partial answer is not taken for the whole."""
    record = record_of(request)
    record.outcome = BROKEN
    log.warning("the upstream broke off in mid-answer", extra={"turn": record.turn or None, "error": error})
    if request.transport is not None:
        request.transport.abort()


WAIT_SECONDS = 5.0
"""Limit on holding back a stream's head until its first event. Servers refuse a prompt within a second or two (LM
Studio: 2 s for 31,000 tokens), and the head alone is useless to the client."""


async def read_beginning(answer: aiohttp.ClientResponse) -> tuple[bytes, bytes]:
    """Read the first event of a stream, a JSON body or a refusal. Returns the bytes read, and the text of an error sent
    instead of a reply (else empty). Errors larger than `BODY_BYTES_MAX` are not recognized."""
    media_type, codings = media_type_of(answer), codings_of(answer.headers)
    is_refusal, streams = answer.status in REFUSALS, media_type == "text/event-stream"
    is_told = not streams if is_refusal else not codings and (streams or media_type == "application/json")
    if not is_told or not (is_refusal or answer.status == 200):
        return b"", b""
    parser, event, read = SseParser(BODY_BYTES_MAX), None, b""
    until = time.monotonic() + WAIT_SECONDS
    try:
        while event is None and len(read) <= BODY_BYTES_MAX:
            reading = answer.content.readany()
            seconds = max(0.0, until - time.monotonic()) if streams else None
            part = await asyncio.wait_for(reading, seconds)
            if not part:
                break
            read += part
            event = next((one for one in parser.feed(part) if one.data), None) if streams else None
    except (aiohttp.ClientError, TimeoutError):
        pass  # the code that reads on gets the error again, or the rest
    if is_refusal:
        try:
            return read, b"".join(unpacked_parts(read, codings, BODY_BYTES_MAX))
        except (BadCoding, TooLarge):
            return read, b""
    data = read if not streams else b"" if event is None else event.data
    return read, data if _is_error(data) else b""


def _is_error(data: bytes) -> bool:
    members = None if b"error" not in data or len(data) > BODY_BYTES_MAX else decode_or_none(MEMBERS, data)
    return members is not None and bool(members.get("error"))


# -- WebSockets -----------------------------------------------------------------------------------------------

BUFFER_BYTES = 1 << 16
"""Buffer size per direction; a full buffer pauses the sender."""
SWITCHED = 101
LOOK_SECONDS = 2.0
"""Interval at which the client's token is checked again."""


def wants_websocket(request: web.BaseRequest) -> bool:
    """Return whether a client asks for WebSocket. (Other upgrades are ignored, as every server may.)"""
    return (
        "upgrade" in named_in_connection(request.headers)
        and request.headers.get("Upgrade", "").strip().lower() == "websocket"
    )


async def tunnel(
    request: web.Request, headers: CIMultiDict[str], assignment: Assignment, target: str
) -> web.StreamResponse:
    """Offer the upgrade to the upstream. If it agrees, pass bytes both ways; otherwise relay its answer."""
    upgrade = CIMultiDict(headers, Connection="Upgrade", Upgrade="websocket")
    answer = await assignment.send("GET", target, upgrade, None)
    try:
        if answer.status != SWITCHED or answer.connection is None or answer.connection.protocol is None:
            return await relay(request, answer, [])
        protocol = answer.connection.protocol
        response = _Switched(answer)
        await response.prepare(request)
        from_upstream: Any = _Intake(protocol)  # Any: aiohttp's types allow only its own WebSocket parser
        from_client: Any = _Intake(request.protocol)
        protocol.set_parser(from_upstream, None)
        request.protocol.set_parser(from_client)
        to_upstream = StreamWriter(protocol, asyncio.get_running_loop())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(from_client.stream, to_upstream.write))
                group.create_task(_pump(from_upstream.stream, response.write))
                group.create_task(_watch(request))
        except* (_TunnelEnded, ConnectionError, aiohttp.ClientError):
            pass
        return response
    finally:
        answer.close()


class _TunnelEnded(Exception):
    """One side has closed its connection, or the client's token was revoked."""


async def _pump(stream: StreamReader, write: Callable[[bytes], Awaitable[None]]) -> None:
    while data := await stream.readany():
        await write(data)
    raise _TunnelEnded


async def _watch(request: web.BaseRequest) -> None:
    while is_let_in_still(request):  # noqa: ASYNC110  # a revoked token raises no event
        await asyncio.sleep(LOOK_SECONDS)
    raise _TunnelEnded


class _Intake:
    """Receives the bytes of an upgraded connection; aiohttp calls it the connection's parser."""

    def __init__(self, protocol: BaseProtocol) -> None:
        self.stream = StreamReader(protocol, BUFFER_BYTES, loop=asyncio.get_running_loop())

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take some bytes; returns that there is no error and nothing left over."""
        self.stream.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        """Note that the connection has ended."""
        self.stream.feed_eof()


class _Switched(Relayed):
    """The upstream's agreement; the bytes after it have no HTTP framing."""

    _length_check = False
    _send_headers_immediately = True

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        kept = ((name, value) for name, value in decoded(answer.raw_headers) if name.lower() not in HOP_BY_HOP)
        headers = CIMultiDict((name, printable(value)) for name, value in kept)
        headers.update(Upgrade="websocket", Connection="Upgrade")
        super().__init__(status=SWITCHED, reason=printable(answer.reason or ""), headers=headers)
        self.force_close()
