"""The daemon: what is started in which order, the routes, and how it all ends.

Rule: everything that runs is created in `running` and closed there in reverse, so an error or a signal at any point
leaves no thread, no child process and no lock behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from memd import __version__
from memd.admin import page
from memd.admin.access import TOKEN_HEADER, shows_token
from memd.admin.http import error_response
from memd.admin.reads import LogRoutes, SearchRoutes
from memd.admin.routes import OwnRoutes
from memd.admin.status import LiveRoutes, StatusRoutes, TopicRoutes
from memd.admin.topics import NamedTopics
from memd.admin.turns import TurnRoutes
from memd.admin.writes import BackupRoutes, CorrectionRoutes
from memd.assets import ranks_bytes
from memd.conversation.compaction import injection_budget
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.encoder import Encoder
from memd.embedding.fastembed import Embedder, load_embedder
from memd.entries import TOPIC_ID_PATTERN, TOPIC_ID_RULE
from memd.errors import MemdError, StoreError
from memd.ingest.redaction.redactor import Redactor, last_look
from memd.proxy import malloc
from memd.proxy.answering import answer, passed
from memd.proxy.connections import served
from memd.proxy.relay import Relayed
from memd.proxy.service import Daemon
from memd.proxy.upstream.client import Upstream
from memd.proxy.upstream.llama_child import LlamaChild
from memd.recall.retrieve import Budget
from memd.settings.model import Config
from memd.store.disk import LocalDisk
from memd.store.files import Files, replace_file
from memd.store.layout import ADDRESS_NAME
from memd.store.store import Store
from memd.telemetry.logging import begin
from memd.telemetry.metrics import Metrics, exposed
from memd.telemetry.request_log import CLIENT_GONE, Turn, observed
from memd.telemetry.tasks import Tasks
from memd.wire.anthropic.api import ANTHROPIC
from memd.wire.chat.api import CHAT
from memd.wire.request import Api
from memd.wire.responses.api import RESPONSES

log = logging.getLogger("memd")

_PATH_TOPIC = re.compile(r"/t/([^/?]*)(/[^?]*)?(\?.*)?")
OWN_PREFIX = "/memd/"
APIS: tuple[Api, ...] = (CHAT, RESPONSES, ANTHROPIC)
"""In which memory has a part. No path of one ends like another's."""


# -- routes -------------------------------------------------------------------------------------------------------


async def route(daemon: Daemon, own: OwnRoutes, request: web.Request) -> web.StreamResponse:
    """Every request: memd's own paths, those in which memory has a part, and the rest, which passes through."""
    target = request.raw_path if request.raw_path.startswith("/") else str(request.rel_url)
    is_page = page.is_page(request)  # there is no data in it, and a browser that opens an address can show no token
    if not is_page and not shows_token(request, daemon.config.auth.token):
        message = f"memd: show its auth.token, as `Authorization: Bearer TOKEN` or in the header {TOKEN_HEADER}"
        return error_response(401, message, "authentication_error", api_of("POST", target.partition("?")[0]) or CHAT)
    if is_page or target.startswith(OWN_PREFIX):
        return await own.answer(request)
    path_topic = None
    if found := _PATH_TOPIC.fullmatch(target):
        path_topic, rest, query = unquote(found[1]), found[2] or "/", found[3] or ""
        if TOPIC_ID_PATTERN.fullmatch(path_topic) is None:
            return error_response(
                400,
                f"memd: {path_topic[:140]!r} is not a topic name: {TOPIC_ID_RULE}",
                "invalid_request_error",
                api_of(request.method, rest) or CHAT,
            )
        target = rest + query
    api = api_of(request.method, target.partition("?")[0])
    with observed(daemon.metrics, request, "" if api is None else api.name) as turn:
        response = await _forwarded(daemon, api, request, target, path_topic, turn)
        turn.http_status = response.status
        return response


async def _forwarded(
    daemon: Daemon, api: Api | None, request: web.Request, target: str, path_topic: str | None, turn: Turn
) -> web.StreamResponse:
    try:
        if api is not None:
            return await answer(daemon, api, request, target, path_topic)
        return await passed(daemon, request, target)
    except (aiohttp.ClientError, TimeoutError) as error:
        if request.transport is None or request.transport.is_closing():
            turn.outcome = "interrupted"
            return web.Response(status=CLIENT_GONE)  # nobody reads it
        turn.outcome = "unreachable"
        log.warning("the upstream did not answer", extra={"url": daemon.upstream.url, "error": error})
        return unreachable(daemon, error, api or CHAT)


def api_of(method: str, path: str) -> Api | None:
    """The API that a request came through, if it is one in which memory has a part."""
    return next((api for api in APIS if method == "POST" and path.endswith(api.path)), None)


def unreachable(daemon: Daemon, error: BaseException, api: Api) -> web.Response:
    """502: which address, and what to do."""
    message = (
        f"memd: the model server at {daemon.upstream.url} did not answer ({type(error).__name__}: {error}). Start it "
        "there (for llama.cpp: llama-server -m MODEL.gguf --port 8080), or set upstream.url to where it runs."
    )
    return error_response(502, message, "upstream_unreachable", api)


# -- life ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(config: Config, model: Path | None = None, files: LocalDisk | None = None) -> AsyncIterator[Daemon]:
    """The whole daemon, listening; it ends when the block is left.

    Args:
        model: a GGUF file to serve with a llama.cpp of our own, instead of `upstream.url`.
        files: the disk; another one than the real only where a fault is to be injected.

    Raises:
        MemdError: the port, the data directory, the model or the embedding model cannot be used.
    """
    async with AsyncExitStack() as stack:
        listener = bound(config)
        stack.callback(listener.close)
        loop = asyncio.get_running_loop()
        embedding = loop.run_in_executor(None, load_embedder, config.embedding.model, config.embedding.threads)
        encoding = loop.run_in_executor(None, lambda: cl100k_base(ranks_bytes()))
        if model is not None:
            child = await stack.enter_async_context(LlamaChild.started(model))
            upstream_settings = msgspec.structs.replace(config.upstream, url=child.url)
            config = msgspec.structs.replace(config, upstream=upstream_settings)
        embedder, counter = await embedding, TokenCounter(await encoding)
        redactor = Redactor.of(config.ingest)
        store = await loop.run_in_executor(None, lambda: _opened(config, embedder, redactor, files))
        stack.callback(store.close)
        metrics = Metrics()
        tasks = Tasks(metrics)
        upstream = Upstream(config, tasks)
        stack.push_async_callback(upstream.close)
        daemon = Daemon(config, store, Encoder(embedder), counter, upstream, tasks, redactor, metrics)
        stack.push_async_callback(daemon.close)
        await upstream.refresh(wait=True)
        async with _listening(daemon, listener):
            yield daemon


@asynccontextmanager
async def _listening(daemon: Daemon, listener: socket.socket) -> AsyncIterator[None]:
    """The daemon at work: it tends its topics and answers; in the end, replies in flight have their time of grace."""
    config, tasks, loop = daemon.config, daemon.tasks, asyncio.get_running_loop()
    tending = [
        tasks.spawn(_wake(daemon), "wake"),
        tasks.spawn(daemon.archiver.tend(daemon.topics), "tend"),
    ]
    runner = _runner(daemon)
    await runner.setup()
    assert runner.server is not None, "it was set up"
    server = await served(runner.server, listener, config.limits)
    daemon.base_url = f"http://{_shown_host(config.listen.host)}:{listener.getsockname()[1]}"
    files, address = daemon.store.files, config.data_dir / ADDRESS_NAME
    try:
        await loop.run_in_executor(None, _say_where, files, address, daemon.base_url)
        yield
    finally:
        with contextlib.suppress(StoreError):  # who reads a stale one finds nobody there
            await loop.run_in_executor(None, files.remove, address)
        server.close()
        daemon.events.end()
        await runner.cleanup()
        for task in tending:
            task.cancel()
        await tasks.finish(timeout_seconds=config.shutdown.grace_seconds)


def _say_where(files: Files, address: Path, url: str) -> None:
    try:
        replace_file(files, address, url.encode())
    except StoreError as error:
        log.warning("commands cannot find this daemon by its folder", extra={"error": error})


async def _wake(daemon: Daemon) -> None:
    with contextlib.suppress(StoreError):  # has been said; whoever asks for the topic hears it again
        used_last = await daemon.topics.wake()
        if used_last is not None:
            await daemon.retriever.load(used_last.log)


def serve(config: Config, model: Path | None = None) -> int:
    """Run the daemon until SIGTERM or Ctrl-C; the exit code.

    Raises:
        MemdError: it could not be started.
    """
    begin(config.log, Redactor.of(config.ingest).text)
    malloc.keep_small()
    malloc.starting()
    uvloop.run(_serve(config, model))
    return 0


async def _serve(config: Config, model: Path | None) -> None:
    started = time.perf_counter()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    starting = True

    def interrupt() -> None:
        stop.set()
        if starting:
            main.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        async with running(config, model) as daemon:
            starting = False
            malloc.started()
            _announce(daemon, time.perf_counter() - started)
            await stop.wait()
            log.info("ending, once replies in flight are through", extra={"seconds_max": config.shutdown.grace_seconds})
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def _announce(daemon: Daemon, seconds: float) -> None:
    """Say where memd listens: to people on stdout; a log for programs is all that there is, so it is said there."""
    config, facts = daemon.config, daemon.upstream.facts
    topics = len(daemon.store.topic_ids())
    if config.log.format == "json":
        where = {"url": daemon.base_url, "data_dir": config.data_dir, "topics": topics}
        upstream = {"upstream": daemon.upstream.url, "reachable": facts.reachable, "window": facts.window}
        log.info("listening", extra={"version": __version__, **where, **upstream, "ready_seconds": seconds})
        return
    lines = [
        f"memd {__version__}: listening on {daemon.base_url} (ready in {seconds:.1f} s)",
        f"  point your client at   {daemon.base_url}/v1",
        f"  memory in              {config.data_dir}  ({topics} topics)",
    ]
    if daemon.redactor:
        lines.append(f"  redacted before stored {', '.join(daemon.redactor.names)}")
    if facts.reachable:
        window = f"window {facts.window:,} tokens" if facts.window else "window unknown"
        lines.append(f"  upstream               {daemon.upstream.url}  ({facts.model or 'model unknown'}, {window})")
    else:
        lines.append(f"  upstream               {daemon.upstream.url}  NOT REACHABLE yet: requests get 502 until it is")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def bound(config: Config) -> socket.socket:
    """A socket at the address that the settings name; it does not listen yet.

    Raises:
        MemdError: the address cannot be used.
    """
    host, port = config.listen.host, config.listen.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as on_error:
            on_error.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setblocking(False)
            on_error.pop_all()
        return listener
    except OSError as error:
        raise MemdError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; stop what uses the port, or choose another "
            "with --port (or listen.port)"
        ) from None


def _opened(config: Config, embedder: Embedder, redactor: Redactor, files: LocalDisk | None) -> Store:
    return Store.open(
        config.data_dir,
        dimension=embedder.dimension,
        fingerprint=embedder.fingerprint,
        segment_entries_max=config.segment.max_entries,
        draft_filter=last_look(redactor),
        files=files,
    )


def _own_routes(daemon: Daemon) -> OwnRoutes:
    config, topics, files = daemon.config, daemon.topics, daemon.store.files
    named = NamedTopics(topics, daemon.store.topic_ids)

    async def budget() -> Budget:
        """What a prompt to the present upstream model would get."""
        facts, drift = await daemon.upstream.refresh(wait=False), daemon.counter.drift
        model = facts.model if drift.is_known(facts.model) else drift.latest_model
        return Budget(injection_budget(config.injection.budget_tokens, facts.window), drift.factor(model))

    return OwnRoutes(
        config,
        (
            StatusRoutes(config, topics, daemon.upstream, daemon.redactor, lambda: daemon.cache_bytes),
            TopicRoutes(config.data_dir, topics, files),
            SearchRoutes(named, daemon.retriever, budget),
            LogRoutes(named, daemon.receipts, config.data_dir, files),
            TurnRoutes(daemon.receipts, named, daemon.retriever, daemon.counter),
            LiveRoutes(daemon.events, partial(exposed, daemon)),
            CorrectionRoutes(named, daemon.encoder, daemon.archiver),
            BackupRoutes(config.data_dir, files),
        ),
    )


def _runner(daemon: Daemon) -> web.AppRunner:
    own = _own_routes(daemon)

    async def handle(request: web.Request) -> web.StreamResponse:
        code = "5xx"
        try:
            response = await route(daemon, own, request)
            code = f"{response.status // 100}xx"
            return response
        finally:
            daemon.metrics.responses.add(code)

    async def prepare(_: web.Request, response: web.StreamResponse) -> None:
        if isinstance(response, Relayed):
            response.take_back_additions()

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    application.on_response_prepare.append(prepare)
    return web.AppRunner(
        application,
        handle_signals=False,
        handler_cancellation=True,
        shutdown_timeout=daemon.config.shutdown.grace_seconds,
    )


def _shown_host(host: str) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else host  # noqa: S104  # compared, not bound
    return f"[{shown}]" if ":" in shown else shown
