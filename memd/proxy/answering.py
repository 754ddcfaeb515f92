"""Requests to a model: in which of them memory has a part, and how one of those is taken through its `Exchange`.

Rule: a request is refused only for what no upstream could answer (too large, an impossible topic in its path); whatever
else is odd about it is the upstream's to judge and passes untouched.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from memd.admin.access import is_from_foreign_page
from memd.admin.http import error_response, read_body
from memd.admin.receipts import Receipt
from memd.entries import DEFAULT_TOPIC_ID
from memd.errors import BadRequestBody, MemdError
from memd.proxy.exchange import Exchange, Mode, new_turn_id
from memd.proxy.relay import NO_REPLY, ModelRelay, forwarded_headers, pass_through, relay
from memd.proxy.service import Daemon
from memd.proxy.upstream.client import REFUSALS
from memd.settings.model import Limits
from memd.telemetry.request_log import Turn, turn_of
from memd.wire.capture import Reply
from memd.wire.request import Api, ModelRequest, Placement
from memd.wire.sideband import MemoryIn, memory_headers

log = logging.getLogger("memd")

MODE_HEADER = "X-Memory-Mode"
SESSION_HEADER = "X-Memory-Session"
HISTORY_HEADER = "X-Memory-History"
SESSION_CHARACTERS_MAX = 256


async def answer(
    daemon: Daemon, api: Api, request: web.Request, target: str, path_topic: str | None
) -> web.StreamResponse:
    """Answer a request that came through `api`.

    Args:
        target: path and query to forward to.
        path_topic: the topic named in the path, if any.
    """
    mode = _mode(request)
    if not daemon.config.auth.token and is_from_foreign_page(request):
        log.warning("a web page gets no memory", extra={"origin": request.headers["Origin"][:200]})
        mode = "off"
    if mode == "off" or request.headers.get("Content-Encoding", "identity") != "identity":
        status = "off" if mode == "off" else "none"
        return await passed(daemon, request, target, _headers(request, status, mode))
    limits = daemon.config.limits
    body = await read_body(request, limits.body_bytes_max, limits.idle_seconds)
    if body is None:
        return _too_large(api, limits.body_bytes_max)
    turn_of(request).lap("read")
    parsed, without_memory = _parse(daemon, api, body)
    if parsed is None or without_memory is not None:
        forwarded = body if parsed is None else api.encode(parsed)
        headers = _headers(request, without_memory or "none", mode)
        return await _forward_plain(daemon, request, target, forwarded, headers)
    named = parsed.memory_in.topic_id if parsed.memory_in is not None else None
    topic_id = turn_of(request).topic = named or path_topic or DEFAULT_TOPIC_ID
    if mode == "readonly" and await daemon.topics.existing(topic_id) is None:  # opening it would leave a trace
        return await _forward_plain(daemon, request, target, api.encode(parsed), _headers(request, "none", mode))
    exchange = await _begun(daemon, api, request, parsed, topic_id, mode)
    if exchange is None:
        headers = _headers(request, "degraded:store", mode)
        return await _forward_plain(daemon, request, target, api.encode(parsed), headers)
    return await _exchanged(daemon, api, request, target, exchange)


async def passed(
    daemon: Daemon, request: web.Request, target: str, extra: list[tuple[str, str]] | None = None
) -> web.StreamResponse:
    """Any request without memory: forwarded as it is, and answered with what comes back."""
    headers, idle_seconds = forwarded_headers(request, daemon.config), daemon.config.limits.idle_seconds
    return await pass_through(request, headers, daemon.upstream, target, idle_seconds=idle_seconds, extra=extra)


async def _exchanged(
    daemon: Daemon, api: Api, request: web.Request, target: str, exchange: Exchange
) -> web.StreamResponse:
    reply, status = NO_REPLY, None
    try:
        async with _accepted(daemon, request, target, exchange) as answer:
            status = answer.status
            relayed = ModelRelay(api, request, answer, daemon.config.limits.capture_bytes_max)
            try:
                out = exchange.memory_out() if answer.status == 200 else None
                return await relayed.run(out, exchange.headers())
            finally:
                reply = relayed.reply
                turn_of(request).usage = reply.usage
    finally:
        # Also after a cancellation: what was said is remembered, without keeping anybody waiting.
        daemon.tasks.spawn(_remember(daemon, exchange, reply, status, turn_of(request)), "remember")


async def _remember(daemon: Daemon, exchange: Exchange, reply: Reply, status: int | None, turn: Turn) -> None:
    try:
        receipt = _receipt(exchange, reply, status, turn)  # before the reply changes the conversation
        # In a task of its own, and begun first: a turn that has nothing to remember would overtake the one before it.
        kept = daemon.tasks.spawn(daemon.receipts.keep(receipt), "receipt") if receipt is not None else None
        await exchange.remember(reply)
        if kept is not None:
            await kept
    finally:
        exchange.topic.release()


def _receipt(exchange: Exchange, reply: Reply, status: int | None, turn: Turn) -> Receipt | None:
    try:
        return exchange.finished_receipt(reply, status, turn.spans_ms)
    except Exception:  # a bug here must not cost the reply
        log.exception("a turn has no receipt", extra={"topic": exchange.topic.id})
        return None


@asynccontextmanager
async def _accepted(
    daemon: Daemon, request: web.Request, target: str, exchange: Exchange
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The upstream's answer; a prompt that it refuses is offered again with memory merged, then without memory."""
    headers = forwarded_headers(request, daemon.config)
    headers["Accept-Encoding"] = "identity"  # a compressed answer could not be read
    preferred = daemon.upstream.placement
    attempts: list[Placement | None] = [preferred]
    if exchange.injected:
        attempts = [preferred, None] if preferred == "merged" else [preferred, "merged", None]
    refused_bodies: list[bytes] = []
    for placement in attempts:
        body = exchange.body(placement)
        if body in refused_bodies and placement is not None:  # an API may know one placement only
            continue
        answer = await daemon.upstream.send("POST", target, headers, body)
        refused = answer.status in REFUSALS
        if refused and placement is not attempts[-1]:
            refusal = {"turn": exchange.turn_id, "placement": placement, "http_status": answer.status}
            log.warning("the upstream refused a prompt with memory", extra=refusal)
            answer.close()
            refused_bodies.append(body)
            continue
        if placement is None and not refused:
            exchange.forget_memory()  # else it was not memory that the upstream did not like
            exchange.note(turn_of(request))
        async with answer:
            yield answer
        return


async def _begun(
    daemon: Daemon, api: Api, request: web.Request, parsed: ModelRequest, topic_id: str, mode: Mode
) -> Exchange | None:
    """The exchange after all its steps before forwarding, holding its topic; None if the topic cannot be used."""
    session = daemon.redactor.identifier(request.headers.get(SESSION_HEADER, "")[:SESSION_CHARACTERS_MAX]) or None
    sent = forwarded_headers(request, daemon.config)
    headers = CIMultiDict((name, sent[name]) for name in ("Authorization", "X-Api-Key") if name in sent)
    topic, begun, turn = None, False, turn_of(request)
    try:
        topic = await daemon.topics.get(topic_id)
        topic.hold()
        thin = request.headers.get(HISTORY_HEADER, daemon.config.conversation.history).strip().lower() == "daemon"
        exchange = Exchange(daemon, api, parsed, topic=topic, mode=mode, session=session, thin=thin, headers=headers)
        await exchange.receive()
        turn.lap("receive")
        await exchange.correct()
        turn.lap("correct")
        await exchange.make_room()
        turn.lap("room")
        await exchange.recall()
        exchange.inject()
        turn.lap("recall")
        exchange.note(turn)
        daemon.tasks.spawn(topic.save(), "journal")
        begun = True
        return exchange
    except MemdError as error:
        log.error("the request goes on without memory", extra={"topic": topic_id, "error": error})
    except Exception:  # a bug in memory must not cost the user an answer: say it loudly and go on without
        log.exception("memory failed unexpectedly, the request goes on without it", extra={"topic": topic_id})
        daemon.metrics.errors.add("memory")
    finally:
        if topic is not None and not begun:
            topic.release()
    return None


def _parse(daemon: Daemon, api: Api, body: bytes) -> tuple[ModelRequest | None, str | None]:
    """The request, and the status if memory has no part in it."""
    try:
        parsed = api.parse(body, daemon.message_cache)
    except BadRequestBody as error:
        log.debug("a body that is no request of its API is passed on", extra={"error": error})
        return None, None
    problem = parsed.memory_in_error or _excess(parsed.memory_in, daemon.config.limits)
    if problem is not None:
        log.warning("a request goes on without memory", extra={"problem": problem})
        return parsed, "bad-memory-in"
    last = next((message.text for message in reversed(parsed.messages) if message.role == "user"), "")
    if any(pattern.search(last) for pattern in daemon.ignored):
        return parsed, "none"
    return parsed, None


def _excess(memory_in: MemoryIn | None, limits: Limits) -> str | None:
    """Which bound a MemoryIn exceeds."""
    if memory_in is None:
        return None
    named = sum(max(1, len(correction.chunk_ids)) for correction in memory_in.corrections)
    if named > limits.corrections_max:
        return f"memory_in corrects {named} chunks, more than limits.corrections_max"
    related = len(memory_in.related_topic_ids)
    if related > limits.related_topics_max:
        return f"memory_in has {related} related topics, more than limits.related_topics_max"
    return None


async def _forward_plain(
    daemon: Daemon, request: web.Request, target: str, body: bytes, extra: list[tuple[str, str]]
) -> web.StreamResponse:
    answer = await daemon.upstream.send("POST", target, forwarded_headers(request, daemon.config), body)
    async with answer:
        return await relay(request, answer, extra)


def _mode(request: web.Request) -> Mode:
    named = request.headers.get(MODE_HEADER, "full").strip().lower()
    if named == "readonly":
        return "readonly"
    return "off" if named == "off" else "full"


def _headers(request: web.Request, status: str, mode: Mode) -> list[tuple[str, str]]:
    """The headers of an answer without memory."""
    turn_id = new_turn_id()
    turn_of(request).settle(turn_id, mode, status)
    return memory_headers(status=status, turn_id=turn_id, mode=mode)


def _too_large(api: Api, bytes_max: int) -> web.Response:
    message = f"memd: the request body is larger than {bytes_max} bytes; raise limits.body_bytes_max if it has to be"
    return error_response(413, message, "invalid_request_error", api)
