"""memd's own routes under /memd/.

Rule: they only look. Who may ask is decided in `access.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from memd import __version__
from memd.daemon.access import is_own
from memd.daemon.relay import error_response
from memd.daemon.service import Daemon


async def route(daemon: Daemon, request: web.Request) -> web.StreamResponse:
    """Answer one of memd's own paths."""
    if not daemon.config.auth.token and not is_own(request, daemon.config.listen.host):
        return error_response(403, "memd: this path is only for programs on this machine", "forbidden")
    answer = _ANSWERS.get(request.path)
    if answer is not None and request.method in ("GET", "HEAD"):
        return web.json_response(answer(daemon), dumps=lambda value: msgspec.json.encode(value).decode())
    return error_response(404, f"memd: there is no {request.path}", "not_found")


def _health(daemon: Daemon) -> dict[str, Any]:
    facts = daemon.upstream.facts
    return {
        "status": "ok",
        "version": __version__,
        "topics": len(daemon.topics.opened()),
        "upstream": {"url": daemon.upstream.url, "reachable": facts.reachable, "window": facts.window},
    }


def _stats(daemon: Daemon) -> dict[str, Any]:
    topics = {topic.id: topic.log.stats() for topic in daemon.topics.opened()}
    return {
        "data_dir": str(daemon.config.data_dir.resolve()),
        "memory_bytes": sum(stats.memory_bytes for stats in topics.values()),
        "memory_bytes_max": daemon.config.store.memory_bytes_max,
        "redacted": daemon.redactor.told if daemon.redactor else None,
        "topics": topics,
    }


_ANSWERS: dict[str, Callable[[Daemon], dict[str, Any]]] = {"/memd/health": _health, "/memd/stats": _stats}
