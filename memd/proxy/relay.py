"""Bytes between client and upstream: requests are forwarded, answers streamed back, and replies captured on the side.

Rule: bytes that memd need not change pass unchanged, before anything else is done with them. A client that leaves ends
the upstream request at once (the handler is cancelled); an upstream that dies in mid-answer ends the client's stream
abnormally, never with a clean end.

Header values are text only while they are looked at; bytes that are no UTF-8 stay as they are (surrogateescape).
aiohttp writes headers as UTF-8 and drops what is none, so `keep_header_bytes` gives it another writer, for both sides.
An answer of the upstream has the upstream's own CORS headers (https://fetch.spec.whatwg.org/#http-cors-protocol). memd
adds them only to what it answers itself on the routes of clients, never to what is under /memd/; where no token
protects, only for pages of this machine.

A reply comes in thousands of pieces, each a packet, and a task that wakes for each costs more than all else that is
done for it: while nobody has to wait for anything, a piece is written within the call that read it (bench/NOTES.md,
2026-11-23).

A refusal may come with status 200, so the beginning of an answer is read before anything of it goes to the client; no
byte is lost, what was read is passed on first. LM Studio answers a stream that is too long with `event: error` (bug
tracker, issue 2322), SGLang with `data: {"error": …}` (issue 12081), text-generation-inference with the same
(server.rs, `into_openai_event`), and OpenRouter with an `error` in either kind of body once a provider was asked (docs,
"Errors"). A stream is not held back for longer than `WAIT_SECONDS`, and an answer that breaks off is left to whoever
reads on.

WebSockets (RFC 6455) are tunnelled, on any path: once the upstream has agreed to the upgrade, bytes pass both ways
unread, in the order and at the pace in which the other side takes them, until one side ends its connection, or the
token of the client is taken back; then the other's ends too. Memory has no part in them.
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
from memd.wire.lenient_json import UNREADABLE
from memd.wire.reply import Reply, ReplyStream, SseParser
from memd.wire.sideband import MemoryOut, splice_memory_out_json

log = logging.getLogger("memd")


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def keep_header_bytes() -> None:
    """Let this process write headers with the bytes that they were read with."""
    http_writer._serialize_headers = serialized


def serialized(status_line: str, headers: CIMultiDict[str]) -> bytes:
    """A head as bytes. Raises ValueError: there is a control character in it, with which a header could end early."""
    lines = [status_line, *[f"{name}: {value}" for name, value in headers.items()]]
    if _CONTROL.search("".join(lines)):
        raise ValueError("a control character in a header")
    return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape")


def decoded(raw_headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Headers as text, with their names spelled as on the wire."""
    return [(name.decode("latin-1"), value.decode(errors="surrogateescape")) for name, value in raw_headers]


def printable(text: str) -> str:
    """Text of an answer's head with spaces for control characters (RFC 9110 section 5.5)."""
    return _CONTROL.sub(" ", text)


_ASKED_METHOD, _ASKED_HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"
PREFLIGHT_SECONDS = 600
"""How long a browser may remember the answer to a preflight."""


def is_preflight(request: web.BaseRequest) -> bool:
    """Whether a browser asks if a page may send a request; it never shows a token with that."""
    return request.method == "OPTIONS" and "Origin" in request.headers and _ASKED_METHOD in request.headers


def preflight_answer(request: web.BaseRequest) -> web.Response:
    """Allow what is asked for: the request itself needs the token."""
    allowed = {
        "Access-Control-Allow-Origin": request.headers["Origin"],
        "Access-Control-Allow-Methods": request.headers[_ASKED_METHOD],
        "Access-Control-Allow-Headers": request.headers.get(_ASKED_HEADERS, ""),
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        "Vary": f"Origin, {_ASKED_METHOD}, {_ASKED_HEADERS}",
    }
    return web.Response(status=204, headers={name: value for name, value in allowed.items() if value})


def let_page_read(request: web.BaseRequest, response: web.StreamResponse, *, is_open: bool) -> None:
    """Let the page that sent a request read memd's own answer, if it may know of memd at all."""
    if "Origin" in request.headers and (not is_open or not is_from_foreign_page(request)):
        response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
        response.headers.add("Vary", "Origin")
        let_page_read_own_headers(response.headers)


def let_page_read_own_headers(headers: CIMultiDict[str]) -> None:
    """Where a page may read an answer, let it read memd's own headers too: a browser hides what nobody names."""
    own = [name for name in dict.fromkeys(headers) if name.lower().startswith("x-memory-")]
    if own and "Access-Control-Allow-Origin" in headers:
        headers.add("Access-Control-Expose-Headers", ", ".join(own))


class BrokenAnswer(UpstreamError):
    """The upstream died in the middle of an answer."""


async def parts_of(answer: aiohttp.ClientResponse, record: RequestRecord, read: bytes = b"") -> AsyncIterator[bytes]:
    """Yield an answer's body as it arrives, after what has been `read` of it already. Raises BrokenAnswer: the
    connection ended before the body did."""
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
    """The protocol of its connection."""
    response: web.StreamResponse
    """Prepared."""
    answer: aiohttp.ClientResponse
    look: Callable[[bytes], bytes] = bytes
    """Is given each part and returns the bytes to send in its place."""
    is_due: Callable[[], bool] = bool
    """Whether to `pause` before the bytes that `look` returned last are sent."""
    pause: Callable[[], Awaitable[None]] | None = None
    left: bytes = b""
    needed: asyncio.Future[None] = msgspec.field(default_factory=asyncio.Future)

    async def run(self, parts: AsyncIterator[bytes]) -> None:
        """Pass on `parts`, which read the answer, to their end. Raises BrokenAnswer: as they do."""
        if not self.answer.content.total_bytes and not self.answer.content.is_eof():
            await self.response.write(b"")  # the head goes alone, as it came
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
        """Pass on what comes while this waits; returns what `look` returned last, if it has not been sent."""
        connection, content = self.answer.connection, self.answer.content
        upstream = None if connection is None else connection.protocol
        is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        if not is_chunked or not isinstance(upstream, UpstreamConnection) or content.is_eof() or content.exception():
            return b""
        self.left, self.needed = b"", asyncio.get_running_loop().create_future()
        upstream.on_received = self._received
        self._received()  # what came meanwhile
        try:
            await self.needed
        finally:
            if upstream.on_received == self._received:  # not if another request has the connection by now
                upstream.on_received = None
        return self.left

    def _received(self) -> None:
        """Pass on what came, unless the task is needed for it."""
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
"""The outcome of a request whose upstream died in mid-answer."""
OWN_REQUEST_HEADERS = ("x-memory-mode", "x-memory-topic", "x-memory-session", "x-memory-history", "x-memory-token")
STREAM_TYPES = ("text/event-stream", "application/x-ndjson")
_ADDED_HEADERS = ("Content-Type", "Date", "Server")
"""Headers that aiohttp adds to a response that lacks them."""


def forwarded_headers(request: web.BaseRequest, principals: Principals) -> CIMultiDict[str]:
    """The client's headers, without hop-by-hop ones (those that `Connection` names too), memd's own and its secrets."""
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
    """Send the (rest of the) body of a response that has begun."""
    try:
        await passing.run(parts)
    except BrokenAnswer as error:
        break_off(request, error)
        return response
    await response.write_eof()
    return response


def interim_to(request: web.BaseRequest) -> Interim:
    """Pass on what the upstream says before its answer (1xx), but `100 Continue`: memd itself has told that."""

    def pass_on(status: int, reason: str, raw_headers: tuple[tuple[bytes, bytes], ...]) -> None:
        if request.version < HttpVersion11 or request.transport is None or request.transport.is_closing():
            return
        headers = CIMultiDict((name, printable(value)) for name, value in decoded(raw_headers))
        request.transport.write(serialized(f"HTTP/1.1 {status} {printable(reason)}", headers))

    return pass_on


def media_type_of(answer: aiohttp.ClientResponse) -> str:
    """The media type, in lower case and without parameters (RFC 9110 section 8.3.1); empty if there is none."""
    return answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()


class ModelRelay(msgspec.Struct, eq=False):
    """Streams a model's answer back, adds `memory_out`, and captures the reply; `reply` may be asked at any time."""

    api: Api
    request: web.Request
    answer: aiohttp.ClientResponse
    bytes_max: int
    """The most that is held of an answer."""
    wants_stream: bool = False
    read: bytes = b""
    """The beginning of its body, if that has been read."""
    keep: Callable[[Reply], Awaitable[None]] | None = None
    stream: ReplyStream | None = None
    whole: Reply | None = None
    is_broken: bool = False

    @property
    def reply(self) -> Reply:
        """The reply as far as it came; marked interrupted unless the upstream finished it."""
        if self.stream is not None:
            return self.stream.reply(interrupted=self.is_broken or not self.stream.finished)
        return self.whole or NO_REPLY

    async def run(
        self,
        out: MemoryOut | None,
        extra: list[tuple[str, str]],
        keep: Callable[[Reply], Awaitable[None]] | None = None,
    ) -> web.StreamResponse:
        """Relay the answer until it ends, the client leaves (cancellation) or the upstream breaks off. `keep`: awaited
        with the whole reply before the end of it goes to the client."""
        self.keep = keep
        if self._streams():
            return await self._run_stream(out, extra)
        return await self._run_json(out, extra)

    def _streams(self) -> bool:
        """Whether the answer is a stream: it says so, or one was asked for and it is nothing else that is known."""
        media_type = media_type_of(self.answer)
        is_json = media_type == "application/json" or media_type.endswith("+json")
        return media_type == self.api.stream_type or (self.wants_stream and not is_json)

    def _parts(self) -> AsyncIterator[bytes]:
        return parts_of(self.answer, record_of(self.request), self.read)

    async def _run_stream(self, out: MemoryOut | None, extra: list[tuple[str, str]]) -> web.StreamResponse:
        stream = self.stream = self.api.new_stream(
            self.bytes_max,
            out,
            codings=codings_of(self.answer.headers),  # although `identity` was asked for
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
        """Read what has passed of a stream, in steps that hold up nobody."""
        if self.stream is None:
            return
        while self.stream.read():  # noqa: ASYNC110 - in between others go on
            await asyncio.sleep(0)
        if self.stream.problem is not None:
            self._tell_unread(self.stream.problem)

    def _tell_unread(self, error: Exception) -> None:
        fields = {"turn": record_of(self.request).id or None, "problem": error}
        log.warning("an answer is not remembered: memd cannot read it", extra=fields)

    async def _keep_reply(self) -> None:
        keep, self.keep = self.keep, None
        if keep is not None:
            await keep(self.reply)

    async def _unpacked(self, body: bytes) -> bytes | None:
        """The body of a whole answer without its content codings; None if it cannot be read."""
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
        if len(read) > self.bytes_max:  # not held whole, so nothing can be added to it or remembered of it
            log.warning("an answer is too large to be remembered", extra={"turn": record_of(self.request).id or None})
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
        """Send the head of a response and (the beginning of) its body."""
        await response.prepare(self.request)
        await response.write(body)
        return response


def prepared(
    answer: aiohttp.ClientResponse, extra: list[tuple[str, str]], *, body_changes: bool, unpacked: bool = False
) -> web.StreamResponse:
    """A response with the upstream's status and headers, ready to be sent; `unpacked`: in no content coding."""
    told = {name.lower() for name, _ in extra if name.startswith("X-Memory-")}  # here and not by the upstream
    length = (*(("content-length",) if body_changes else ()), *(("content-encoding",) if unpacked else ()))
    dropped = HOP_BY_HOP.union(named_in_connection(answer.headers), told, length)
    kept = ((name, value) for name, value in decoded(answer.raw_headers) if name.lower() not in dropped)
    headers = CIMultiDict((name, printable(value)) for name, value in kept)
    headers.extend(extra)
    let_page_read_own_headers(headers)
    return Relayed(status=answer.status, reason=printable(answer.reason or ""), headers=headers)


def _unbuffered(answer: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    """The header by which a stream tells nginx not to hold it back; an upstream that has it knows better."""
    return [] if "X-Accel-Buffering" in answer.headers else [("X-Accel-Buffering", "no")]


class Relayed(web.StreamResponse):
    """A relayed answer: its headers are the upstream's and memd's, none of aiohttp's. They are sent with the first
    bytes that are written, which may be none."""

    _send_headers_immediately = False

    def __init__(self, *, status: int, reason: str | None, headers: CIMultiDict[str]) -> None:
        super().__init__(status=status, reason=reason, headers=headers)
        self._absent = [name for name in _ADDED_HEADERS if name not in headers]

    def remove_added_headers(self) -> None:
        """Remove the headers that aiohttp added when it prepared the response."""
        for name in self._absent:
            self.headers.popall(name, None)


def named_in_connection(headers: MultiMapping[str]) -> set[str]:
    """The headers (lower case) that `Connection` names: they are for the next hop alone (RFC 9110 section 7.6.1)."""
    values = headers.getall("Connection", [])
    return {name.strip().lower() for value in values for name in value.split(",")}


async def _write_held(response: web.StreamResponse, stream: ReplyStream) -> None:
    if held := stream.flush():
        await response.write(held)


def break_off(request: web.BaseRequest, error: BrokenAnswer) -> None:
    """Abort the client's connection, so that it cannot take a part for the whole answer."""
    record = record_of(request)
    record.outcome = BROKEN
    log.warning("the upstream broke off in mid-answer", extra={"turn": record.id or None, "error": error})
    if request.transport is not None:
        request.transport.abort()


WAIT_SECONDS = 5.0
"""The head of a stream waits so long for its first event; a server that refuses a prompt does it within a second or two
(LM Studio: 2 s for 31,000 tokens), and the client can do nothing with the head alone."""


async def read_beginning(answer: aiohttp.ClientResponse) -> tuple[bytes, bytes]:
    """Read the first event of a stream, a JSON body or a refusal, as it comes; with the text of an error that came in
    place of a reply, empty if there is none. More than `BODY_BYTES_MAX` is no error."""
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
        pass  # it goes on, or whoever reads on is told again
    if is_refusal:
        try:
            return read, b"".join(unpacked_parts(read, codings, BODY_BYTES_MAX))
        except (BadCoding, TooLarge):
            return read, b""
    data = read if not streams else b"" if event is None else event.data
    return read, data if _is_error(data) else b""


def _is_error(data: bytes) -> bool:
    if b"error" not in data or len(data) > BODY_BYTES_MAX:
        return False
    try:
        said: Any = msgspec.json.decode(data)
    except UNREADABLE:
        return False
    return isinstance(said, dict) and bool(said.get("error"))


# -- WebSockets -----------------------------------------------------------------------------------------------

BUFFER_BYTES = 1 << 16
"""Of each direction, before its sender has to wait."""
SWITCHED = 101
LOOK_SECONDS = 2.0
"""Between two looks whether the client's token is good still."""


def wants_websocket(request: web.BaseRequest) -> bool:
    """Whether a client asks to go on with WebSocket frames. (Other upgrades are ignored, as every server may.)"""
    return (
        "upgrade" in named_in_connection(request.headers)
        and request.headers.get("Upgrade", "").strip().lower() == "websocket"
    )


async def tunnel(
    request: web.Request, headers: CIMultiDict[str], assignment: Assignment, target: str
) -> web.StreamResponse:
    """Offer the upgrade to the upstream; pass bytes if it agrees, else its answer."""
    upgrade = CIMultiDict(headers, Connection="Upgrade", Upgrade="websocket")
    answer = await assignment.send("GET", target, upgrade, None)
    try:
        if answer.status != SWITCHED or answer.connection is None or answer.connection.protocol is None:
            return await relay(request, answer, [])
        protocol = answer.connection.protocol
        response = _Switched(answer)
        await response.prepare(request)
        from_upstream: Any = _Intake(protocol)  # any: aiohttp's types know its own parser of WebSockets alone
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
    """One side has ended its connection, or the client may go on no longer."""


async def _pump(stream: StreamReader, write: Callable[[bytes], Awaitable[None]]) -> None:
    while data := await stream.readany():
        await write(data)
    raise _TunnelEnded


async def _watch(request: web.BaseRequest) -> None:
    while is_let_in_still(request):  # noqa: ASYNC110  # nobody tells of a token that is taken back
        await asyncio.sleep(LOOK_SECONDS)
    raise _TunnelEnded


class _Intake:
    """Takes what comes on an upgraded connection; aiohttp calls it the connection's parser."""

    def __init__(self, protocol: BaseProtocol) -> None:
        self.stream = StreamReader(protocol, BUFFER_BYTES, loop=asyncio.get_running_loop())

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take some bytes; the answer is that there is no error and nothing left over."""
        self.stream.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        """The connection has ended."""
        self.stream.feed_eof()


class _Switched(Relayed):
    """The upstream's agreement; what follows has no framing of HTTP's."""

    _length_check = False
    _send_headers_immediately = True

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        kept = ((name, value) for name, value in decoded(answer.raw_headers) if name.lower() not in HOP_BY_HOP)
        headers = CIMultiDict((name, printable(value)) for name, value in kept)
        headers.update(Upgrade="websocket", Connection="Upgrade")
        super().__init__(status=SWITCHED, reason=printable(answer.reason or ""), headers=headers)
        self.force_close()
