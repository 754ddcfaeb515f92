"""Probes the capabilities of the model server for `memd check`, with the same requests that the daemon sends.

Rule: nothing is generated and nothing is changed, on either side; each request waits `ASK_SECONDS` at most.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from multidict import CIMultiDict

from memd.proxy.upstream.client import ASK_SECONDS, REFUSALS, Upstream
from memd.proxy.upstream.windows import models_of
from memd.recall import block
from memd.settings.model import Config
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks
from memd.wire.chat import CHAT

REFUSED = frozenset({401, 403})
OK, LOADING = 200, 503
NO_SUCH_ADDRESS = frozenset({404, 405})
_MARKER = "memd looks for these words"
_CONVERSATION: tuple[dict[str, str], ...] = (
    {"role": "user", "content": "Good morning."},
    {"role": "assistant", "content": "Good morning!"},
    {"role": "user", "content": "And what is new?"},
)


Rendering = Literal["shown", "dropped", "refused", "unknown"]
"""How the chat template treats a block in front of a question; unknown: the server cannot render."""


class UpstreamProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The findings."""

    url: str
    problem: str = ""
    """The reason why it is not reachable; empty if it is."""
    is_memd: bool = False
    """The address belongs to a memd (this one or another), not to a model server."""
    is_elsewhere: bool = False
    """Something answers there, but it has no address for chats."""
    is_loading: bool = False
    wants_key: bool = False
    model: str = ""
    """Empty: unknown."""
    lacks_template: bool = False
    """It has no chat template of its own."""
    models: tuple[str, ...] = ()
    """Those that it lists; none: unknown."""
    window: int | None = None
    """Tokens; None: unknown."""
    window_source: str = ""
    """Where it comes from: an address of the server, or `upstream.window`."""
    counts_exactly: bool = False
    """Whether it counts the tokens of a prompt."""
    block: Rendering = "unknown"


def probe_upstream(config: Config) -> UpstreamProbe:
    """Probe the model server of `config`."""
    return asyncio.run(_probe(config))


async def _probe(config: Config) -> UpstreamProbe:
    tasks = Tasks(Metrics())
    upstream = Upstream(config, tasks)
    headers = upstream.with_key(None)
    try:
        health = await upstream.ask("GET", "/health", None, headers)
        if health.problem:
            return UpstreamProbe(url=upstream.url, problem=health.problem)
        own = await upstream.ask("GET", "/memd/health", None, headers)
        if isinstance(own.value, dict) and "data_dir" in own.value:
            return UpstreamProbe(url=upstream.url, is_memd=True)
        facts = await upstream.refresh(wait=True)
        models = await upstream.ask("GET", "/v1/models", None, headers)
        if not (models.status == OK and isinstance(models.value, dict)) and not await _takes_chats(upstream):
            return UpstreamProbe(url=upstream.url, is_elsewhere=True)
        model = facts.model or _first_name(models.value)
        await upstream.refresh(wait=True, model=model)
        window = upstream.windows.of(model)
        body = msgspec.json.encode({"model": model, "messages": _CONVERSATION})
        count = await upstream.count_tokens(CHAT.count_path, lambda: body, CIMultiDict())
        return UpstreamProbe(
            url=upstream.url,
            is_loading=health.status == LOADING,
            wants_key=facts.wants_key or models.status in REFUSED,
            model=model,
            lacks_template=facts.lacks_template,
            models=tuple(sorted(models_of(models.value))),
            window=window.tokens,
            window_source=window.source,
            counts_exactly=count is not None,
            block=await _render(upstream, config.injection.header, body),
        )
    finally:
        await upstream.close()
        await tasks.finish(timeout_seconds=ASK_SECONDS)


async def _takes_chats(upstream: Upstream) -> bool:
    """Whether there is an address for chats; a request without messages is refused, but not as one for no address."""
    answer = await upstream.ask("POST", f"/v1{CHAT.path}", b"{}", upstream.with_key(None))
    return answer.status not in NO_SUCH_ADDRESS and not (answer.status == 200 and answer.value is None)


async def _render(upstream: Upstream, header: str, body: bytes) -> Rendering:
    """Have the server render a conversation with a block in it, as for a model."""
    opening, closing = block.frame(header).split("\n")
    shown = "\n".join((opening, block.chunk_line("0000", _MARKER), closing))
    prompt = CHAT.encode(CHAT.parse(body), blocks={len(_CONVERSATION) - 1: shown})
    answer = await upstream.ask("POST", "/apply-template", prompt, upstream.with_key(None))
    if answer.status == 200 and isinstance(answer.value, dict):
        return "shown" if _MARKER in str(answer.value.get("prompt", "")) else "dropped"
    return "refused" if answer.status in REFUSALS else "unknown"


def _first_name(models: Any) -> str:
    """The first model of OpenAI's list."""
    listed = models.get("data") if isinstance(models, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    return str(first.get("id", "")) if isinstance(first, dict) else ""
