"""The daemon: what is started in which order, the routes, and how it all ends.

Rule: everything that runs is created in `running` and closed there in reverse, so an error or a signal at any point
leaves no thread, no child process and no lock behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import uvloop
from aiohttp import HttpVersion11, web

from memd import __version__
from memd.admin.http import OWN_HEADERS
from memd.assets import ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.embedder import Embedder
from memd.embedding.loading import load_embedder
from memd.errors import MemdError, StoreError
from memd.ingest.redaction.redactor import Redactor, last_look
from memd.ingest.topics import Topics
from memd.proxy import malloc
from memd.proxy.connections import listen
from memd.proxy.header_bytes import keep_header_bytes
from memd.proxy.parts import Daemon, make_parts, router_of
from memd.proxy.relay import Relayed
from memd.proxy.routing import Router
from memd.proxy.upstream.client import ASK_SECONDS, window_unknown
from memd.proxy.upstream.llama_child import LlamaChild
from memd.recall.retrieve import Retriever
from memd.settings.model import Config
from memd.store import descriptors
from memd.store.disk import LocalDisk
from memd.store.files import Files, replace_file
from memd.store.layout import ADDRESS_NAME
from memd.store.store import Store
from memd.telemetry.logging import configure_logging
from memd.telemetry.metrics import Metrics
from memd.wording import counted

log = logging.getLogger("memd")


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
        daemon = await make_parts(stack, config, store, embedder, counter, redactor, _url(config, listener))
        await daemon.upstream.refresh(wait=True)
        async with _listening(daemon, router_of(daemon), listener):
            yield daemon


@asynccontextmanager
async def _listening(daemon: Daemon, router: Router, listener: socket.socket) -> AsyncIterator[None]:
    """The daemon at work: it tends its topics and answers; in the end, replies in flight have their time of grace."""
    config, tasks, loop = daemon.config, daemon.tasks, asyncio.get_running_loop()
    tending = [
        tasks.spawn(_wake(daemon.topics, daemon.retriever), "wake"),
        tasks.spawn(daemon.archiver.tend(daemon.topics), "tend"),
    ]
    runner = _runner(router, daemon.metrics, config.shutdown.grace_seconds)
    await runner.setup()
    assert runner.server is not None, "it was set up"
    server = await listen(runner.server, listener, config.limits)
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


async def _wake(topics: Topics, retriever: Retriever) -> None:
    with contextlib.suppress(StoreError):  # has been said; whoever asks for the topic hears it again
        used_last = await topics.wake()
        if used_last is not None:
            await retriever.load(used_last.log)


def serve(config: Config, model: Path | None = None) -> int:
    """Run the daemon until SIGTERM or Ctrl-C; the exit code.

    Raises:
        MemdError: it could not be started.
    """
    configure_logging(config.log, Redactor.of(config.ingest).text)
    descriptors.raise_limit()
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
            log.info("stopping after replies in flight", extra={"seconds_max": config.shutdown.grace_seconds})
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
        if facts.reachable and not facts.window:
            log.warning(window_unknown(facts))
        return
    lines = [
        f"memd {__version__}: listening on {daemon.base_url} (ready in {seconds:.1f} s)",
        f"  point your client at   {daemon.base_url}/v1",
        f"  memory in              {config.data_dir}  ({counted(topics, 'topic')})",
    ]
    if daemon.redactor:
        lines.append(f"  redacted before stored {', '.join(daemon.redactor.names)}")
    if facts.reachable:
        window = f"window {facts.window:,} tokens" if facts.window else "window unknown yet"
        lines.append(f"  upstream               {daemon.upstream.url}  ({facts.model or 'model unknown'}, {window})")
        if not facts.window:
            lines.append(f"                         {window_unknown(facts)}")
    elif facts.is_slow:
        told = f"did not answer within {ASK_SECONDS:g} s: it is asked again in the background"
        lines.append(f"  upstream               {daemon.upstream.url}  {told}")
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


def _runner(router: Router, metrics: Metrics, grace_seconds: float) -> web.AppRunner:
    async def handle(request: web.Request) -> web.StreamResponse:
        code = "5xx"
        try:
            response = await router.route(request)
            code = f"{response.status // 100}xx"
            return response
        finally:
            metrics.responses.add(code)

    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        if isinstance(response, Relayed):
            response.remove_added_headers()
        else:
            response.headers.update(OWN_HEADERS)
        if request.version < HttpVersion11 and response.content_length is None:
            response.force_close()  # nothing else tells such a client where the body ends

    keep_header_bytes()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    application.on_response_prepare.append(prepare)
    return web.AppRunner(application, handle_signals=False, handler_cancellation=True, shutdown_timeout=grace_seconds)


def _url(config: Config, listener: socket.socket) -> str:
    return f"http://{_shown_host(config.listen.host)}:{listener.getsockname()[1]}"


def _shown_host(host: str) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else host  # noqa: S104  # compared, not bound
    return f"[{shown}]" if ":" in shown else shown
