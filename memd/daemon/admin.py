"""memd's own routes under /memd/.

Rule: who may ask is decided in `access.py`; a handler returns what is to be sent as JSON, or raises what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from memd import __version__
from memd.chunks import checked_topic_id
from memd.daemon import page, searching
from memd.daemon.access import is_own
from memd.daemon.relay import error_response
from memd.daemon.service import Daemon
from memd.errors import BadQuestion, BadTopicId, MemdError

QUESTION_CHARACTERS_MAX = 100_000


async def route(daemon: Daemon, request: web.Request) -> web.StreamResponse:
    """Answer one of memd's own paths."""
    if not daemon.config.auth.token and not is_own(request, daemon.config.listen.host):
        return error_response(403, "memd: this path is only for programs on this machine", "forbidden")
    if page.is_page(request):
        return page.page(request)
    answer = _ANSWERS.get(request.path)
    if answer is None or request.method not in ("GET", "HEAD"):
        return error_response(404, f"memd: there is no {request.path}", "not_found")
    try:
        told = await answer(daemon, request)
    except (BadQuestion, BadTopicId) as error:
        return error_response(400, f"memd: {error}", "invalid_request_error")
    except (MemdError, TimeoutError) as error:
        return error_response(503, f"memd: {error or 'it took too long'}", "unavailable")
    return web.json_response(body=msgspec.json.encode(told))


async def _health(daemon: Daemon, request: web.Request) -> dict[str, Any]:
    facts = daemon.upstream.facts
    return {
        "status": "ok",
        "version": __version__,
        "data_dir": str(daemon.config.data_dir.resolve()),
        "topics": len(daemon.topics.opened()),
        "upstream": {"url": daemon.upstream.url, "reachable": facts.reachable, "window": facts.window},
    }


async def _stats(daemon: Daemon, request: web.Request) -> dict[str, Any]:
    topics = {topic.id: topic.log.stats() for topic in daemon.topics.opened()}
    return {
        "data_dir": str(daemon.config.data_dir.resolve()),
        "memory_bytes": sum(stats.memory_bytes for stats in topics.values()),
        "memory_bytes_max": daemon.config.store.memory_bytes_max,
        "topics": topics,
    }


async def _search(daemon: Daemon, request: web.Request) -> searching.SearchAnswer:
    question = request.query.get("q", "")
    if not question.strip() or len(question) > QUESTION_CHARACTERS_MAX:
        raise BadQuestion(f"q is the question: 1 to {QUESTION_CHARACTERS_MAX:,} characters")
    as_of = searching.moment(request.query["as_of"]) if "as_of" in request.query else None
    named = [checked_topic_id(topic_id) for topic_id in request.query.getall("topic", [])]
    async with contextlib.AsyncExitStack() as held:
        logs = []
        for topic_id in named or await asyncio.get_running_loop().run_in_executor(None, daemon.store.topic_ids):
            topic = await daemon.topics.existing(topic_id)
            if topic is None:
                raise searching.no_topic(topic_id)
            held.enter_context(topic.held())
            logs.append(topic.log)
        return await searching.search(daemon.recall, daemon.counter, daemon.config, question, logs, as_of=as_of)


_ANSWERS: dict[str, Callable[[Daemon, web.Request], Awaitable[Any]]] = {
    "/memd/health": _health,
    "/memd/stats": _stats,
    "/memd/search": _search,
}
