"""Routes each request: to memd's own paths, to an API with memory, or unchanged to the upstream.

Rule: requests without memory are forwarded byte for byte, with any method and path; only `/v1/v1` becomes `/v1`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import HttpVersion11, web

from memd import access
from memd.access import Take, TooManyBodies, WrongTokens
from memd.admin import page
from memd.admin.parts import DaemonParts
from memd.entries import DEFAULT_TOPIC_ID, TOPIC_ID_PATTERN, TOPIC_ID_RULE
from memd.errors import Forbidden
from memd.proxy import relay
from memd.proxy.reading import BAD_MODE, NO_MODE, Call, Plain, RequestReader, unpacked
from memd.proxy.turn import INQUIRY, TurnRunner
from memd.proxy.upstream.connection import is_unreadable, transfer_codings
from memd.proxy.upstream.pool import MODEL_LIST_PATHS, Unanswered, UpstreamPool
from memd.telemetry.logging import Content
from memd.telemetry.metrics import CLIENT_GONE, RequestRecord, record_of, recorded
from memd.wire.api import Api
from memd.wire.chat import CHAT
from memd.wire.content_codings import BadCoding, TooLarge, codings_of
from memd.wire.registry import api_of
from memd.wire.sideband import memory_headers

log = logging.getLogger("memd")

_ORIGIN = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
"""Scheme and host of a target in absolute form (RFC 9112 section 3.2.2)."""
_PATH_TOPIC = re.compile(r"/t/([^/?]*)(/[^?]*)?(\?.*)?")
_V1_TOO_OFTEN = re.compile(r"(?:/v1)+(?=/v1(?:[/?]|$))")
"""Surplus `/v1` of clients that add it to a base URL that already ends in it, as Anthropic's SDKs do with OpenAI's."""

NO_CODINGS = (
    "memd: of transfer codings it reads `chunked` alone, and that from HTTP/1.1 on; send the body as it is, or with"
    " Content-Encoding"
)
METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
NO_TUNNELS = (
    "memd: it opens no tunnels to other addresses (CONNECT); take it out of the proxy settings of your client and make"
    " it the base URL of its model"
)

FOREIGN_PAGE = (
    "memd: web pages of other machines may not use the user and password in upstream.url; set auth.token and let the"
    " page show it, or let it send an Authorization of its own"
)

READ_WHOLE_BYTES_MAX = 4 << 20
"""A body up to this size that passes through is read completely before it is forwarded; larger ones are streamed.
Streaming is slower (1.5 times for 2 MB from one client: bench/NOTES.md, 2026-11-22), and a streamed body cannot be sent
again if the upstream has closed a pooled connection."""
OTHER_TOPIC = (
    "name another one in the path (/t/TOPIC/v1) or in X-Memory-Topic, or send X-Memory-Mode: off to go without memory"
)


class Router(msgspec.Struct, frozen=True):
    """Decides where each request goes."""

    parts: DaemonParts
    own: Callable[[web.Request, str], Awaitable[web.StreamResponse]]
    """Answers requests under `/memd/`, or redirects them; takes the target too."""
    wrong_tokens: WrongTokens
    """Refuses requests without a known token."""
    pool: UpstreamPool
    reader: RequestReader
    turns: TurnRunner

    async def route(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        if request.method == "CONNECT":
            response = access.error_response(405, NO_TUNNELS, "method_not_allowed", headers={"Allow": METHODS})
            response.force_close()  # the bytes that follow are not HTTP
            return response
        if request.raw_path == "*":  # a check that the server is there
            return web.Response(status=204, headers={"Allow": METHODS})
        target = request.raw_path  # path and query as the client wrote them
        if not target.startswith("/"):
            target = f"/{_ORIGIN.sub('', target, count=1).removeprefix('/')}"
        if f"{_path(target)}/".startswith(page.PREFIX):
            return await self.own(request, target)
        if not self.parts.principals.is_open and relay.is_preflight(request):
            return relay.preflight_answer(request)
        answer = await self._answer(request, target)
        if isinstance(answer, web.Response):  # relayed answers are other `StreamResponse`s
            relay.let_page_read(request, answer, is_open=self.parts.principals.is_open)
        return answer

    async def _answer(self, request: web.Request, target: str) -> web.StreamResponse:
        path_topic = None
        if found := _PATH_TOPIC.fullmatch(target):
            path_topic, target = unquote(found[1]), (found[2] or "/") + (found[3] or "")
        named = api_of(_path(target))
        shape, api = named or CHAT, named if request.method == "POST" else None  # the shape of memd's own errors
        if inquiry := await self.wrong_tokens.make_sure(request, [path_topic or DEFAULT_TOPIC_ID]):
            request[INQUIRY] = inquiry
        if refusal := self.wrong_tokens.refusal(request, shape):
            return refusal
        access.prove(request)
        shows_own = self.parts.principals.is_open and self.pool.shows_credentials(request.headers)
        if shows_own and access.is_from_foreign_page(request):
            return access.error_response(403, FOREIGN_PAGE, "permission_error", shape)
        codings = transfer_codings(request.headers)
        if codings not in ("", "chunked") or (codings and request.version < HttpVersion11):
            refusal = access.error_response(501, NO_CODINGS, "invalid_request_error", shape)
            refusal.force_close()  # other programs may see another end of its body
            return refusal
        if found := _V1_TOO_OFTEN.match(target):
            target = target[found.end() :]
        if path_topic is not None and TOPIC_ID_PATTERN.fullmatch(path_topic) is None:
            message = f"memd: {path_topic[:140]!r} is not a topic name: {TOPIC_ID_RULE}"
            return access.error_response(400, message, "invalid_request_error", shape)
        call = Call(request, api, target, path_topic)
        with recorded(self.pool.metrics, request, "" if api is None else api.name) as record:
            try:
                with self.parts.bodies.holding(access.principal_of(request).author) as take:
                    response = await self._answer_model(call, take)
            except TooManyBodies as error:
                log.warning("a request was refused", extra={"error": error})
                response = _with_headers(access.too_many_bodies(error, shape), record)
            except (aiohttp.ClientError, TimeoutError) as error:
                response = self._unanswered(request, error, shape, record)
            record.http_status = response.status
            return response

    async def _answer_model(self, call: Call, take: Take) -> web.StreamResponse:
        """Pass the request through, or answer it with memory."""
        request, api, limits = call.client, call.api, self.parts.config.limits
        if api is None:
            return await self._pass_through(call, take)
        record = record_of(request)
        mode, status = self.reader.mode(request)
        record.mode, record.status = mode, status
        if mode == "off" and status != BAD_MODE and request.content_length is not None:
            return await self._pass_through(call, take, _headers(record))
        came = await access.read_body(request, limits.body_bytes_max, limits.idle_seconds, take)
        if came is None:
            return self._too_large(api, record)
        if status == BAD_MODE:
            return await self.turns.without_memory(request, self.reader.unread(call, came, NO_MODE, status))
        if mode == "off":  # read first, to send a length: some servers accept nothing else
            return await self._pass_through(call, take, _headers(record), came)
        record.end_step("read")
        call = msgspec.structs.replace(call, mode=mode)
        body, packed = came, None
        try:
            if codings := codings_of(request.headers):
                body, packed = await unpacked(came, codings, limits.body_bytes_max, take), came
            asked = await self.reader.read(call, body, packed)
        except TooLarge:
            return self._too_large(api, record)
        except BadCoding as error:
            asked = self.reader.unread(call, came, error)
        except Forbidden as error:
            self.parts.auditor.note_refused(request, f"POST {api.name}", error.topic_id)
            refusal = access.error_response(403, f"memd: {error}; {OTHER_TOPIC}", Forbidden.kind, api)
            return _with_headers(refusal, record)
        if isinstance(asked, Plain):
            return await self.turns.without_memory(request, asked)
        record.topic = asked.topic_id
        return await self.turns.answer(request, asked)

    def _too_large(self, api: Api, record: RequestRecord) -> web.StreamResponse:
        size = self.parts.config.limits.body_bytes_max
        message = f"memd: the request body is larger than {size} bytes; raise limits.body_bytes_max if it has to be"
        return _with_headers(access.error_response(413, message, "invalid_request_error", api), record)

    async def _pass_through(
        self, call: Call, take: Take, extra: list[tuple[str, str]] | None = None, body: bytes | None = None
    ) -> web.StreamResponse:
        request, target = call.client, call.target
        headers = relay.forwarded_headers(request, self.parts.principals)
        hints = partial(self.reader.hints, call)
        if relay.wants_websocket(request):
            with self.pool.assign(partial(hints, None)) as assignment:
                return await relay.tunnel(request, headers, assignment, target)
        if self.pool.has_several and request.method == "GET" and _path(target) in MODEL_LIST_PATHS:
            listed = await self.pool.listed_models(target, headers)
            if listed is not None:
                return web.Response(body=msgspec.json.encode(listed), content_type="application/json")
        parts: AsyncIterator[bytes] | bytes | None = body
        if body is None and request.can_read_body:
            parts = access.body_parts(request, self.parts.config.limits.idle_seconds)
            if request.content_length is not None and request.content_length <= READ_WHOLE_BYTES_MAX:
                take(request.content_length)
                parts = b"".join([part async for part in parts])
        with self.pool.assign(partial(hints, parts if isinstance(parts, bytes) else None)) as assignment:
            return await relay.pass_through(request, headers, assignment, target, parts, extra or [])

    def _unanswered(
        self, request: web.Request, error: Exception, api: Api, record: RequestRecord
    ) -> web.StreamResponse:
        """Return 502 with the address that did not answer, and a remedy."""
        if request.transport is None or request.transport.is_closing():
            record.outcome = "interrupted"
            return web.Response(status=CLIENT_GONE)  # nobody reads it
        record.outcome = "unreachable"
        first = self.pool.servers[0]
        url, reason = first.url, first.reason_of(error)
        fields = {"turn": record.turn or None, "url": url, "error": Content(reason) if is_unreadable(error) else reason}
        log.warning("the upstream did not answer", extra=fields)
        if isinstance(error, Unanswered):
            message = f"memd: no model server answered: {error}. Start one of them, or correct upstream.urls."
        elif is_unreadable(error):
            message = f"memd: the model server at {url} gave an answer that memd cannot pass on: {reason}"
        else:
            message = (
                f"memd: the model server at {url} did not answer ({reason}). Start it there (for llama.cpp: "
                "llama-server -m MODEL.gguf --port 8080), or set upstream.url to where it runs."
            )
        return _with_headers(access.error_response(502, message, "upstream_unreachable", api), record)


def _path(target: str) -> str:
    return target.partition("?")[0]


def _headers(record: RequestRecord) -> list[tuple[str, str]]:
    """Return memory's headers for an answer without memory."""
    return memory_headers(status=record.status, turn_id=record.turn, mode=record.mode)


def _with_headers(response: web.Response, record: RequestRecord) -> web.Response:
    """Return an answer by memd itself, with memory's headers if the request was for a model."""
    if record.api:
        response.headers.extend(_headers(record))
    return response
