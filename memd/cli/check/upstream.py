"""Does the model server answer, does it report its window, and does memory reach the model's chat template?

Rule: a server that reports nothing is usable: a gap for which memd has a substitute is a warning. Probes are the
requests that the daemon sends; they generate nothing and wait at most `ASK_SECONDS` each.

`--live` holds short conversations with a separate daemon in a temporary folder that is removed; a running daemon only
forwards a request (`X-Memory-Mode: off`). It uses only `ROOM_TOKENS` of a large window, enough to see that old results
leave and that the model's chat template accepts the remaining prompt. The loop ends after `LOOP_SECONDS_MAX` however
slow the model is.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
from msgspec.structs import replace
from multidict import CIMultiDict

from memd.admin import reads
from memd.cli.check import CheckResult, check, failed, ok, warning
from memd.cli.running import THE_RIGHT_ONE, RunningDaemon, unchecked_tls
from memd.daemon.app import running
from memd.errors import MemdError
from memd.principals import TOKEN_HEADER
from memd.proxy.connections import IN_CIRCLES, leading_back
from memd.proxy.upstream.client import ASK_SECONDS, LOADING, NO_TEMPLATE, WANTS_KEY, Upstream
from memd.proxy.upstream.windows import models_of
from memd.recall import block
from memd.settings.loading import variable_of
from memd.settings.model import Config, ListenSettings
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks
from memd.wire.chat import CHAT
from memd.wording import counted, with_remedy

KEY_VARIABLE = variable_of("upstream.api_key")
START_IT = (
    "start it there (for llama.cpp: llama-server -m MODEL.gguf --port 8080), or correct its address in the settings "
    "(upstream.url, or upstream.urls where there are several)"
)
SERVER_ITSELF = "set upstream.url to the model server itself"
UNNAMED = "a model that the server does not name"
NO_SUCH_ADDRESS = frozenset({404, 405})
_MARKER = "memd looks for these words"
_CONVERSATION: tuple[dict[str, str], ...] = (
    {"role": "user", "content": "Good morning."},
    {"role": "assistant", "content": "Good morning!"},
    {"role": "user", "content": "And what is new?"},
)


class AskedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A model server's answers."""

    url: str
    told: list[CheckResult]
    is_memd: bool = False
    """True if the address is a memd's (this one or another), not a model server's."""
    model: str = ""
    """Empty: unknown."""
    models: frozenset[str] = frozenset()
    """Models that it lists; empty: unknown."""
    window: int | None = None
    """Tokens; None: unknown."""


async def asked(config: Config, *, is_served: bool = False, served: int | None = None) -> AskedServer:
    """Ask the model server of `config`. `is_served`: it is the running daemon's; `served`: the window that the daemon
    knows."""
    tasks = Tasks(Metrics())
    upstream = Upstream(config, tasks)
    url, headers = upstream.url, upstream.with_key(None)

    def unusable(told: CheckResult, *, is_memd: bool = False) -> AskedServer:
        return AskedServer(url=url, told=[told], is_memd=is_memd)

    try:
        if not is_served and leading_back(config):
            return unusable(failed(f"{url} is {IN_CIRCLES}", SERVER_ITSELF))
        health = await upstream.ask("GET", "/health", None, headers)
        if health.problem:
            problem, remedy = with_remedy(health.problem)
            return unusable(failed(f"{url} does not answer: {problem}", remedy or START_IT))
        own = await upstream.ask("GET", "/memd/health", None, headers)
        if isinstance(own.value, dict) and "data_dir" in own.value:
            said = f"{url} is not a model server but memd: requests would go round in circles"
            return unusable(failed(said, SERVER_ITSELF), is_memd=True)
        await upstream.refresh(wait=True)
        facts = upstream.facts
        models = await upstream.ask("GET", "/v1/models", None, headers)
        if not (models.status == 200 and isinstance(models.value, dict)):
            # A request without messages is refused, but not with the status of an unknown address.
            chat = await upstream.ask("POST", f"/v1{CHAT.path}", b"{}", headers)
            if chat.status in NO_SUCH_ADDRESS or (chat.status == 200 and chat.value is None):
                said = f"{url} answers, but not as a model server: it has no /v1/chat/completions below that address"
                remedy = "correct upstream.url: it is what stands before /v1 in the server's address"
                return unusable(failed(said, remedy))
        if health.status == LOADING:
            return unusable(warning(f"{url} is still loading its model", "ask again when it is ready"))
        listed = models.value.get("data") if isinstance(models.value, dict) else None
        first = listed[0] if isinstance(listed, list) and listed else None
        model = facts.model or (str(first.get("id", "")) if isinstance(first, dict) else "")
        await upstream.refresh(wait=True, model=model)
        known = upstream.windows.of(model)
        source = f" ({known.source})" if known.source == "upstream.window" else ""
        window, source = (served, " (as the running daemon knows)") if known.tokens is None else (known.tokens, source)
        wants_key = facts.wants_key or models.status in WANTS_KEY
        body = msgspec.json.encode({"model": model, "messages": _CONVERSATION})
        counts = await upstream.count_tokens(CHAT.count_path, lambda: body, CIMultiDict()) is not None
        opening, closing = block.frame(block.WORDS).split("\n")
        shown = "\n".join((opening, block.chunk_line("0000", _MARKER), closing))
        body = CHAT.encode(CHAT.parse(body), blocks={len(_CONVERSATION) - 1: shown})  # as sent to a model
        prompt = await upstream.rendered(body, headers)
        told = [ok(f"{url} answers"), *_window(config, model or UNNAMED, window, source, wants_key=wants_key)]
        told += [warning(*with_remedy(NO_TEMPLATE), "model")] if facts.lacks_template else []
        told += [*_counts(counts, prompt), *_placement(prompt)]
        return AskedServer(url=url, told=told, model=model, models=frozenset(models_of(models.value)), window=window)
    finally:
        await upstream.close()
        await tasks.finish(timeout_seconds=ASK_SECONDS)


@check("model")
def _window(config: Config, name: str, window: int | None, source: str, *, wants_key: bool) -> Iterator[CheckResult]:
    if window is not None:
        yield ok(f"{name}, window {counted(window, 'token')}{source}")
        return
    by_hand = f"({KEY_VARIABLE}), or set upstream.window"
    said = "the server does not tell its window: nothing leaves the prompt until it is known"
    remedy = "set upstream.window to what the model can take, for example upstream.window: 32768"
    if wants_key and config.upstream.api_key:
        said = "the server refuses the key in upstream.api_key: until a client shows one, nothing leaves the prompt"
        remedy = f"correct it {by_hand}"
    elif wants_key and config.upstream.authorization is not None:
        said = "the server refuses the user and password in upstream.url, and so each client without a key"
        remedy = "correct them there, between // and @, percent-encoded"
    elif wants_key:
        said = "the server wants a key before it tells its window: until a client shows one, nothing leaves the prompt"
        remedy = f"set upstream.api_key {by_hand}"
    yield warning(f"{name}; {said}", remedy)


@check("exact counts")
def _counts(counts_exactly: bool, prompt: str | None) -> Iterator[CheckResult]:
    """`prompt`: rendered by the server; only a llama-server can be asked for the template's output."""
    if counts_exactly:
        yield ok("the server counts tokens exactly, and is asked where a prompt comes near the window")
    elif prompt is None:
        yield ok("tokens are estimated, and corrected by each answer's usage")
    else:
        said = "the server does not count a prompt's tokens: they are estimated, and corrected by each answer's usage"
        yield warning(said, "take a newer llama-server, one with /v1/chat/completions/input_tokens")


@check("placement")
def _placement(prompt: str | None) -> Iterator[CheckResult]:
    place = "memory stands in front of the user's message"
    if prompt is None:
        yield ok(f"{place}; this server does not say what its chat template does with it")
    elif _MARKER in prompt:
        yield ok(f"{place}, and the model's chat template shows it")
    else:
        said = f"the model's chat template has {'dropped' if prompt else 'refused'} a plain conversation"
        yield failed(said, "give llama-server the right template (--jinja, --chat-template-file)")


def as_served(config: Config, daemon: RunningDaemon) -> Config:
    """Return the settings with the running daemon's model servers, which `--upstream` may have named."""
    urls = tuple(served_windows(daemon))
    if not urls or urls == tuple(one.address for one in config.upstream.each()):
        return config
    several = urls if len(urls) > 1 else ()
    return replace(config, upstream=replace(config.upstream, url=urls[0], urls=several))


def served_windows(daemon: RunningDaemon) -> dict[str, int | None]:
    """Return the windows that a running daemon knows, by model server, perhaps from a client's key or a refusal."""
    told = daemon.health().get("upstreams")
    known = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    return {str(one.get("url")): one["window"] if isinstance(one.get("window"), int) else None for one in known}


@check("upstream")
def upstream(config: Config, daemon: RunningDaemon | None, *, is_served: bool, is_live: bool) -> Iterator[CheckResult]:
    """Check everything that needs no generation, for each model server and for what they have in common; then `live`,
    if `is_live`. `is_served`: check the servers of the running daemon, not those of the settings."""
    config = as_served(config, daemon) if daemon is not None and is_served else config
    windows = served_windows(daemon) if daemon is not None and is_served else {}
    servers = [
        asyncio.run(asked(replace(config, upstream=one), is_served=is_served, served=windows.get(one.address)))
        for one in config.upstream.each()
    ]
    well = [one for one in servers if all(told.mark != "failed" for told in one.told)]
    found = servers[0].told
    if len(servers) > 1:
        found = [line for one in servers for line in _of_several(one, others_serve=bool(well))]
    lists = {one.url: one.models for one in well if one.models}
    if len(set(lists.values())) > 1:  # otherwise half of the servers stay idle
        said = "; ".join(f"{url} lists {', '.join(sorted(models)[:5])}" for url, models in lists.items())
        hint = "a model is asked of the servers that list it: give llama-servers with the same one the same --alias"
        found.append(ok(said, hint, "model"))
    yield from found
    if is_live and any(one.mark == "failed" for one in found):
        yield failed("not tried", "mend the upstream first", "live")
    elif is_live:
        yield from live(config, well[0].model or "any", well[0].window, daemon)


def _of_several(server: AskedServer, *, others_serve: bool) -> Iterator[CheckResult]:
    """Return the results of one of several servers, with its address; one line if all is well."""
    if all(one.mark == "ok" for one in server.told):
        window = f", window {counted(server.window, 'token')}" if server.window else ""
        yield ok(f"{server.url} answers: {server.model or UNNAMED}{window}")
    for one in server.told:
        if one.mark != "ok":
            said = one.said if server.url in one.said else f"{server.url}: {one.said}"
            mark = "warning" if others_serve and not one.check and not server.is_memd else one.mark
            yield replace(one, said=said, mark=mark)


TOLD = "Please remember: the code of the boathouse gate is heron-4519."
ASKED = "What is the code of the boathouse gate?"
EXPECTED = "4519"
REPLY_TOKENS, STEP_REPLY_TOKENS = 48, 32
ANSWER_SECONDS_MAX = 180.0
"""Time of a large model on a CPU for its first prompt."""
ROOM_TOKENS = 4_096
"""A smaller window is used whole."""
LOOP_SECONDS_MAX = 120.0
STEPS_MAX = 40
STEPS_A_WINDOW = 6
"""Results that fill the window."""
LENGTH = 1.6
"""Length of the loop, in windows."""
CHARACTERS_PER_TOKEN = 3.0
"""Assumed for a model that does not report counts."""
LOOP_ASKED = "Read the log of each pump, one after the other, and tell me at the end which of them needs oil."
_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read the log of a pump.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


class LiveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request."""

    problem: str = ""
    """Reason if there is no answer, otherwise empty."""
    status: int = 0
    memory_status: str = ""
    text: str = ""
    """The reply, or the text of the error."""
    message: dict[str, Any] = {}
    """The model's message as received; empty if there is none."""
    prompt_tokens: int = 0
    """The server's count; 0: not reported."""


_Ask = Callable[[object, float], Awaitable[LiveAnswer]]


@check("live")
def live(config: Config, model: str, window: int | None, daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    """Hold conversations by the settings, without touching their places; of a running daemon check only what leaves no
    trace. `model`: name in requests. `window`: in tokens, None if unknown."""
    if daemon is not None:
        _tell("asking the running daemon")
        yield asyncio.run(_forwarded(config, model, daemon))
    room = min(window or ROOM_TOKENS, ROOM_TOKENS)
    try:
        with tempfile.TemporaryDirectory(prefix="memd-check-") as folder:
            scratch = _scratch_settings(config, Path(folder), None if room == window else room)
            yield from asyncio.run(_conversations(scratch, model, room, is_window=room == window))
    except (MemdError, OSError) as error:
        yield _no_answer(str(error))


def _tell(what: str) -> None:
    """Print the current step, because the results come only at the end."""
    click.echo(f"live: {what} …", err=True)


def _scratch_settings(config: Config, folder: Path, room: int | None) -> Config:
    """Return settings of a private daemon with its memory only in `folder`; `room` replaces the window."""
    own = Config(listen=ListenSettings(port=0), data_dir=folder / "memory")
    elsewhere = ("listen", "admin", "auth", "data_dir", "sources", "cluster", "backup", "conversation")
    config = replace(config, **{name: getattr(own, name) for name in elsewhere})
    if room is None:
        return config
    hard = room // 2  # the reply and the block take their share of the window
    buffer = replace(config.buffer, hard_tokens=hard, soft_tokens=hard * 7 // 8)
    injection = replace(config.injection, budget_tokens=room // 8, sticky_tokens=0)
    return replace(config, buffer=buffer, injection=injection)


def _key_headers(config: Config) -> dict[str, str]:
    """Return the header with the model server's key, as a client sends it; empty unless the settings have it."""
    key = config.upstream.api_key
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _forwarded(config: Config, model: str, daemon: RunningDaemon) -> CheckResult:
    """Have a running daemon forward a question to the model without memory, and answer a search."""
    token = {TOKEN_HEADER: config.auth.token} if config.auth.token else {}
    headers = {"X-Memory-Mode": "off", **token, **_key_headers(config)}
    if not (url := daemon.model_url):
        return failed(f"the daemon at {daemon.url} {daemon.refusal}", THE_RIGHT_ONE)
    connector = aiohttp.TCPConnector(ssl=unchecked_tls())
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        answer = await _asked(session, url, _opening(model, ASKED))
    if problem := _problem(config, answer):
        return problem
    try:
        daemon.ask(reads.search, q=ASKED)
    except MemdError as error:
        said = f"the daemon at {url} answers, but not its memory: {error}"
        return failed(said, "its log on stderr says why")
    return ok(f"the daemon at {url} passes a chat request on, and its memory answers a search")


async def _conversations(config: Config, model: str, room: int, *, is_window: bool) -> list[CheckResult]:
    """Tell a separate daemon a fact, ask for it in a new conversation, and hold a tool loop."""
    async with running(config) as daemon, aiohttp.ClientSession(headers=_key_headers(config)) as session:
        ask = partial(_asked, session, daemon.base_url)
        _tell("telling the model a fact, and asking for it in a new conversation")
        for text in (TOLD, ASKED):
            answer = await ask(_opening(model, text), ANSWER_SECONDS_MAX)
            if problem := _problem(config, answer):
                return [problem]
        _tell("holding a tool loop that is longer than the window")
        return [_recalled(answer), await _loop(ask, model, room, is_window=is_window)]


def _opening(model: str, text: str) -> object:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": REPLY_TOKENS}


async def _asked(
    session: aiohttp.ClientSession, base_url: str, body: object, seconds: float = ANSWER_SECONDS_MAX
) -> LiveAnswer:
    """Send a chat request; wait up to `seconds` for the whole answer."""
    try:
        async with asyncio.timeout(seconds), session.post(f"{base_url}/v1/chat/completions", json=body) as answer:
            told = await answer.read()
    except TimeoutError:
        return LiveAnswer(problem=f"no answer came within {seconds:.0f} s")
    except aiohttp.ClientError as error:
        return LiveAnswer(problem=str(error) or type(error).__name__)
    known: dict[str, Any] = {"status": answer.status, "memory_status": answer.headers.get("X-Memory-Status", "")}
    try:
        whole: Any = msgspec.json.decode(told)
        if answer.status != 200:
            return LiveAnswer(text=str(whole["error"]["message"]), **known)
        message, usage = dict(whole["choices"][0]["message"]), whole.get("usage") or {}
        tokens = int(usage.get("prompt_tokens") or 0)
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError):
        return LiveAnswer(text="" if answer.status == 200 else told[:200].decode(errors="replace"), **known)
    return LiveAnswer(text=str(message.get("content") or ""), message=message, prompt_tokens=tokens, **known)


def _no_answer(problem: str) -> CheckResult:
    return failed(f"no answer: {problem}", "look at the model server's log, and run memd check without --live")


def _problem(config: Config, answer: LiveAnswer) -> CheckResult | None:
    """Return the result for an unanswered request; None if it was answered."""
    if answer.problem:
        return _no_answer(answer.problem)
    if answer.status in WANTS_KEY:
        told = f"({answer.status}: {answer.text})"
        if config.upstream.api_key:
            said = f"the model server refuses the key in upstream.api_key {told}"
            return warning(said, f"correct it ({KEY_VARIABLE}); clients send their own")
        said = f"the model server wants a key {told}, which memd check has not"
        return warning(said, f"clients send it; for this check set upstream.api_key ({KEY_VARIABLE})")
    if answer.status != 200:
        remedy = NO_TEMPLATE if "chat template" in answer.text.lower() else "look at the model server's log"
        return failed(f"the model server answered {answer.status}: {answer.text}", remedy)
    return None


def _recalled(answer: LiveAnswer) -> CheckResult:
    if answer.memory_status != "injected":
        said = f"what was told is not remembered in a new conversation (X-Memory-Status: {answer.memory_status})"
        remedy = "if retrieval, injection or ingest settings were changed, set them back; see docs/settings.md"
        return failed(said, remedy)
    said = "told once, asked in a new conversation: the model was shown it"
    if EXPECTED in str(answer.message):  # also if the answer is only in its reasoning
        return ok(f"{said} and answered with it; nothing of it was kept")
    remedy = "memory reaches it, and it does not read it: take a larger model, or one that is called instruct or chat"
    return warning(f"{said} but does not use it in its answer ({answer.text[:80]!r})", remedy)


async def _loop(ask: _Ask, model: str, room: int, *, is_window: bool) -> CheckResult:
    """Ask, answer the model's call or a substitute for it, and repeat until the loop is long enough; report how far it
    came. `room`: limit of its prompts, in tokens. `is_window`: that is the model's whole window."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": LOOP_ASKED}]
    until, per_token, answer = time.monotonic() + LOOP_SECONDS_MAX, CHARACTERS_PER_TOKEN, LiveAnswer()
    steps = sent = most = 0  # answered steps; the last one's tokens (estimated), and the maximum (counted)
    while steps < STEPS_MAX and sent <= room * LENGTH and time.monotonic() < until:
        body = {"model": model, "messages": messages, "tools": [_TOOL], "max_tokens": STEP_REPLY_TOKENS}
        answer = await ask(body, until - time.monotonic())
        if answer.problem or answer.status != 200:
            break
        characters = len(json.dumps(messages))
        if steps == 0 and answer.prompt_tokens:
            per_token = (characters + len(json.dumps(_TOOL))) / answer.prompt_tokens
        steps, sent, most = steps + 1, int(characters / per_token), max(most, answer.prompt_tokens)
        messages += _step(answer, steps, int(room / STEPS_A_WINDOW * per_token))
    size = f"{counted(steps, 'step')}, {counted(sent, 'token')}"
    held = f"{f'window {room:,}' if is_window else f'taking {room:,} tokens of the window'}; {size}"
    not_held = f"a tool loop longer than the window was not held ({held}): "
    refused = "" if answer.status in (0, 200) else f"{answer.status}: {answer.text}"
    if refused and steps == 0:
        said = f"the model server takes no tools ({refused})"
        return warning(said, "for agents take a model whose template knows tools (llama-server: --jinja)")
    if refused:
        remedy = "if it was too long set upstream.window to what the model can take; else its template is to blame"
        return failed(not_held + refused, remedy)
    if most > room:
        remedy = "tell it to memd's authors, with the model and its template"
        return failed(f"{not_held}a prompt had {most:,} tokens", remedy)
    if sent > room:
        return ok(f"a tool loop longer than the window was held ({held}); nothing of it was kept")
    if answer.problem and time.monotonic() < until:
        return failed(f"no answer in a tool loop: {answer.problem}", "look at the model server's log")
    said = f"a tool loop was held as long as there was time ({held}): the model is slow"
    return warning(said, "ask again when the model server has nothing else to do")


def _step(answer: LiveAnswer, number: int, length: int) -> Iterator[dict[str, Any]]:
    """Yield the model's message and the results of its calls, `length` characters each."""
    calls = answer.message.get("tool_calls") or []
    if calls and all(map(_is_whole, calls)):
        yield answer.message
    else:  # it did not call, or its call was cut off: the loop continues as if it had called
        function = {"name": "read", "arguments": json.dumps({"path": f"pump-{number}.log"})}
        calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        yield {"role": "assistant", "content": answer.text, "tool_calls": calls}
    lines = (f"{hour:02}:00 pump {number}: {20 + hour * number % 17} degrees" for hour in range(length // 20 + 1))
    log = "\n".join([f"The oil mark of pump {number} is {number * 37 % 100}.", *lines])
    yield from ({"role": "tool", "tool_call_id": call["id"], "content": log[:length]} for call in calls)


def _is_whole(call: Any) -> bool:
    """Return whether a call is complete and can be sent back."""
    try:
        return bool(call["id"]) and isinstance(json.loads(call["function"]["arguments"]), dict)
    except (ValueError, LookupError, TypeError):
        return False
