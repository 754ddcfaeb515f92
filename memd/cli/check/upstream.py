"""Does the model server answer, does it report its window, and does memory reach the model's chat template?

Rule: a server that reports nothing can still be used: what is missing is a warning where memd has a substitute. It is
probed with the same requests that the daemon sends, nothing is generated, and each waits `ASK_SECONDS` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from multidict import CIMultiDict

from memd.cli.check.live import KEY_VARIABLE
from memd.cli.check.result import CheckResult, failed, ok, warning
from memd.cli.running import RunningDaemon
from memd.proxy.addresses import IN_CIRCLES, leading_back
from memd.proxy.upstream.client import ASK_SECONDS, LOADING, NO_TEMPLATE, WANTS_KEY, Upstream
from memd.proxy.upstream.windows import models_of
from memd.recall import block
from memd.settings.model import Config
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks
from memd.wire.api import Placement
from memd.wire.chat import CHAT
from memd.wording import counted

UPSTREAM, WINDOW, COUNTS, PLACEMENT = "upstream", "model", "exact counts", "placement"
START_IT = (
    "start it there (for llama.cpp: llama-server -m MODEL.gguf --port 8080), or correct its address in the settings "
    "(upstream.url, or upstream.urls where there are several)"
)
SERVER_ITSELF = "set upstream.url to the model server itself"
FROM_DAEMON = "as the running daemon knows"
SET_WINDOW = "set upstream.window to what the model can take, for example upstream.window: 32768"
NO_SUCH_ADDRESS = frozenset({404, 405})
_MARKER = "memd looks for these words"
_CONVERSATION: tuple[dict[str, str], ...] = (
    {"role": "user", "content": "Good morning."},
    {"role": "assistant", "content": "Good morning!"},
    {"role": "user", "content": "And what is new?"},
)
Rendering = Literal["shown", "dropped", "refused", "unknown"]
"""How the chat template treats a block in its placement; unknown: the server cannot render."""


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
    placement: Placement = "merged"
    block: Rendering = "unknown"


async def probed(config: Config) -> UpstreamProbe:
    """Probe the model server of `config`."""
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
        if not (models.status == 200 and isinstance(models.value, dict)) and not await _takes_chats(upstream):
            return UpstreamProbe(url=upstream.url, is_elsewhere=True)
        model = facts.model or _first_name(models.value)
        await upstream.refresh(wait=True, model=model)
        window = upstream.windows.of(model)
        body = msgspec.json.encode({"model": model, "messages": _CONVERSATION})
        count = await upstream.count_tokens(CHAT.count_path, lambda: body, CIMultiDict())
        return UpstreamProbe(
            url=upstream.url,
            is_loading=health.status == LOADING,
            wants_key=facts.wants_key or models.status in WANTS_KEY,
            model=model,
            lacks_template=facts.lacks_template,
            models=tuple(sorted(models_of(models.value))),
            window=window.tokens,
            window_source=window.source,
            counts_exactly=count is not None,
            placement=upstream.placement,
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
    blocks = {len(_CONVERSATION) - 1: shown}
    asked = CHAT.encode(CHAT.parse(body), blocks=blocks, placement=upstream.placement)
    prompt = await upstream.rendered(asked, upstream.with_key(None))
    if not prompt:
        return "unknown" if prompt is None else "refused"
    return "shown" if _MARKER in prompt else "dropped"


def _first_name(models: Any) -> str:
    """The first model of OpenAI's list."""
    listed = models.get("data") if isinstance(models, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    return str(first.get("id", "")) if isinstance(first, dict) else ""


def as_served(config: Config, daemon: RunningDaemon) -> Config:
    """Return the settings with the running daemon's model servers: it may have been started with `--upstream`."""
    urls = tuple(served_windows(daemon))
    if not urls or urls == tuple(one.address for one in config.upstream.each()):
        return config
    several = urls if len(urls) > 1 else ()
    return msgspec.structs.replace(config, upstream=msgspec.structs.replace(config.upstream, url=urls[0], urls=several))


def served_windows(daemon: RunningDaemon) -> dict[str, int | None]:
    """The windows that a running daemon knows, by model server: a client's key or a refusal may have told them."""
    told = daemon.health().get("upstreams")
    known = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    return {str(one.get("url")): one["window"] if isinstance(one.get("window"), int) else None for one in known}


def upstream(config: Config, daemon: RunningDaemon | None) -> tuple[UpstreamProbe, list[CheckResult]]:
    """Check everything that needs no generation; of several model servers each, and what they have in common.

    Args:
        daemon: the running one, if these are its model servers.

    Returns:
        The probe of the first one that can be used, and the results.
    """
    served = {} if daemon is None else served_windows(daemon)
    each = [msgspec.structs.replace(config, upstream=one) for one in config.upstream.each()]
    checked = [_server(one, daemon, served.get(one.upstream.address)) for one in each]
    if len(checked) == 1:
        return checked[0]
    well = [probe for probe, told in checked if all(one.mark != "failed" for one in told)]
    results = [line for probe, told in checked for line in _of_several(probe, told, others_serve=bool(well))]
    return (well[0] if well else checked[0][0]), [*results, *_in_common(well)]


def _of_several(probe: UpstreamProbe, told: list[CheckResult], *, others_serve: bool) -> Iterator[CheckResult]:
    """The results of one of several servers, each with its address; one line where all is well."""
    if all(one.mark == "ok" for one in told):
        window = f", window {counted(probe.window, 'token')}" if probe.window else ""
        yield ok(UPSTREAM, f"{probe.url} answers: {probe.model or 'a model that the server does not name'}{window}")
    for one in told:
        if one.mark == "ok":
            continue
        said = one.said if probe.url in one.said else f"{probe.url}: {one.said}"
        mark = "warning" if others_serve and one.check == UPSTREAM and not probe.is_memd else one.mark
        yield msgspec.structs.replace(one, said=said, mark=mark)


def _in_common(probes: list[UpstreamProbe]) -> Iterator[CheckResult]:
    """Say that servers list different models: where their names alone differ, half of the servers stand idle."""
    lists = {probe.url: probe.models for probe in probes if probe.models}
    if len({frozenset(models) for models in lists.values()}) > 1:
        said = "; ".join(f"{url} lists {', '.join(models[:5])}" for url, models in lists.items())
        hint = "a model is asked of the servers that list it: give llama-servers with the same one the same --alias"
        yield ok(WINDOW, said, hint)


def _server(
    config: Config, daemon: RunningDaemon | None, served: int | None
) -> tuple[UpstreamProbe, list[CheckResult]]:
    """Check one model server. `served`: the window that the running daemon knows."""
    probe = asyncio.run(probed(config))
    if probe.window is None and served is not None:
        probe = msgspec.structs.replace(probe, window=served, window_source=FROM_DAEMON)
    problem, _, remedy = probe.problem.partition("; ")
    if probe.is_memd:
        said = f"{probe.url} is not a model server but memd: requests would go round in circles"
        result = failed(UPSTREAM, said, SERVER_ITSELF)
    elif daemon is None and leading_back(config):
        result = failed(UPSTREAM, f"{probe.url} is {IN_CIRCLES}", SERVER_ITSELF)
    elif problem:
        result = failed(UPSTREAM, f"{probe.url} does not answer: {problem}", remedy or START_IT)
    elif probe.is_elsewhere:
        said = f"{probe.url} answers, but not as a model server: it has no /v1/chat/completions below that address"
        result = failed(UPSTREAM, said, "correct upstream.url: it is what stands before /v1 in the server's address")
    elif probe.is_loading:
        result = warning(UPSTREAM, f"{probe.url} is still loading its model", "ask again when it is ready")
    else:
        result = ok(UPSTREAM, f"{probe.url} answers")
    if result.mark != "ok":
        return probe, [result]
    return probe, [
        result,
        _window(config, probe),
        *([warning(WINDOW, *NO_TEMPLATE.split("; "))] if probe.lacks_template else ()),
        *_counts(probe),
        _placement(config, probe),
    ]


def _window(config: Config, probe: UpstreamProbe) -> CheckResult:
    name = probe.model or "a model that the server does not name"
    if probe.window is not None:
        source = f" ({probe.window_source})" if probe.window_source in ("upstream.window", FROM_DAEMON) else ""
        return ok(WINDOW, f"{name}, window {counted(probe.window, 'token')}{source}")
    by_hand = f"({KEY_VARIABLE}), or set upstream.window"
    said, remedy = "the server does not tell its window: nothing leaves the prompt until it is known", SET_WINDOW
    if probe.wants_key and config.upstream.api_key:
        said = "the server refuses the key in upstream.api_key: until a client shows one, nothing leaves the prompt"
        remedy = f"correct it {by_hand}"
    elif probe.wants_key and config.upstream.authorization is not None:
        said = "the server refuses the user and password in upstream.url, and so each client without a key"
        remedy = "correct them there, between // and @, percent-encoded"
    elif probe.wants_key:
        said = "the server wants a key before it tells its window: until a client shows one, nothing leaves the prompt"
        remedy = f"set upstream.api_key {by_hand}"
    return warning(WINDOW, f"{name}; {said}", remedy)


def _counts(probe: UpstreamProbe) -> Iterator[CheckResult]:
    if probe.counts_exactly:
        yield ok(COUNTS, "the server counts tokens exactly, and is asked where a prompt comes near the window")
    elif probe.block != "unknown":  # llama-server, which alone can be asked what a template makes of a prompt
        said = "the server does not count a prompt's tokens: they are estimated, and corrected by each answer's usage"
        yield warning(COUNTS, said, "take a newer llama-server, one with /v1/chat/completions/input_tokens")
    else:
        yield ok(COUNTS, "tokens are estimated, and corrected by each answer's usage")


def _placement(config: Config, probe: UpstreamProbe) -> CheckResult:
    chosen = "memory stands in front of the user's message (injection.role)"
    if probe.placement == "separate":
        chosen = "memory is a developer message of its own (injection.role: separate)"
    if probe.block == "unknown":
        return ok(PLACEMENT, f"{chosen}; this server does not say what its chat template does with it")
    if probe.block != "shown":
        said = f"the model's chat template has {probe.block} a plain conversation"
        return failed(PLACEMENT, said, "give llama-server the right template (--jinja, --chat-template-file)")
    if config.injection.role == "separate" and probe.placement == "merged":
        said = "the model's chat template does not show a developer message in its place: memory is merged"
        return warning(PLACEMENT, f"{said} into the user's message", "set injection.role to auto")
    return ok(PLACEMENT, f"{chosen}, and the model's chat template shows it")
