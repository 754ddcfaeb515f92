"""The daemon: what is started in which order, the routes, and how it all ends; and its process.

Rule: everything that runs is created in `running` and closed there in reverse, so an error or a signal at any point
leaves no thread, no child process and no lock behind.

The first signal lets the daemon finish, a second Ctrl-C ends it at once; nothing is lost by that but replies in flight,
for what was said is in the journal, as after `kill -9`. malloc keeps little that is freed and is tuned only where that
works (glibc), never against the environment: whoever sets `MALLOC_…` variables has reasons. The garbage collector scans
little.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import platform
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import uvloop
from aiohttp import HttpVersion11, web

from memd import __version__
from memd.access import WrongTokens
from memd.admin.auditing import Auditor
from memd.admin.token_watch import AuthSource, TokenWatch
from memd.assets import ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.daemon.parts import Daemon, make_parts, own_routes_of, router_of
from memd.embedding.embedder import Embedder
from memd.embedding.loading import QUESTION_SECONDS, give_back_memory, load_embedder
from memd.errors import ConfigError, EmbeddingError, StoreError
from memd.http import OWN_HEADERS
from memd.ingest.erasing import ErasureFollower
from memd.ingest.offline import stored_models
from memd.ingest.redaction.redactor import Redactor, last_look
from memd.ingest.topic import Inquiry
from memd.ingest.topics import Topics
from memd.proxy.addresses import IN_CIRCLES, Listeners, addresses_of, bound, leading_back, tls_of
from memd.proxy.connections import listen
from memd.proxy.headers import keep_header_bytes
from memd.proxy.relay import Relayed
from memd.proxy.upstream.client import ASK_SECONDS, NO_TEMPLATE, Upstream, window_unknown
from memd.proxy.upstream.llama_child import LlamaChild
from memd.recall.block import line_of
from memd.recall.retrieve import Retriever
from memd.settings.model import REMEDY_IF_SHORT, Config
from memd.store.audit import AuditBook
from memd.store.bucket.writing import BucketTender, NotingDisk
from memd.store.disk import LocalDisk, replace_file
from memd.store.encryption.opening import disk_of
from memd.store.erasure import ErasureLedger
from memd.store.layout import ADDRESS_NAME, SECRET_NAME, models_dir
from memd.store.shared.books import SharedBook, SharedErasures, SharedTimes, SharedTokens
from memd.store.shared.postgres import shared_log
from memd.store.shared.seam import SharedLog
from memd.store.store import MakeErasures, ModelId, Store, StoreShared
from memd.store.syscalls import raise_descriptors_limit
from memd.store.token_list import TokenList
from memd.telemetry.logging import configure_logging
from memd.telemetry.metrics import Metrics
from memd.wording import counted

log = logging.getLogger("memd")

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

ARENAS_MAX = 2
"""By default glibc has eight arenas per core. Blocks allocated in one thread of the daemon are freed in others, and
each arena keeps holes; bench/NOTES.md has the growth with and without this limit."""
KEPT_BYTES_MAX = 1 << 20
"""A larger block goes back to the system when it is freed. glibc starts with this threshold and raises it up to 32 MB
once a large block was freed; setting it stops that. A request of 200 KB is copied a dozen times:
with 128 KB here each request took 800 page faults and 2 ms of the kernel's time (bench/NOTES.md, 2026-11-25)."""


def keep_small() -> None:
    """Bound malloc's arenas and the freed memory that it keeps. Call it before other threads start."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUN")) for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_ARENA_MAX, ARENAS_MAX)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES_MAX)


def collect_little() -> None:
    """Switch the garbage collector on, for objects that are allocated from now on.

    A pass over the 120,000 objects of the libraries takes 45 to 70 ms, in which a request waits; one over later objects
    takes 1.5 ms: what is held by the thousand (entries, messages, terms) has no cycles and says `gc=False`, else it
    took as long again (bench/NOTES.md, 2026-11-22 and 2026-11-23).
    """
    give_back_memory()
    gc.freeze()
    gc.enable()


AT_ONCE = (
    "memd: ended at once by a second Ctrl-C. Replies in flight were cut off; what was said before is kept, and the next"
    " start goes on from there.\n"
)
INTERRUPTED = 128 + signal.SIGINT
"""The exit code of shells for a program that Ctrl-C ended."""


class Signals:
    """Receives SIGINT and SIGTERM from now until the process ends; create it in the main thread, in the event loop.

    They are Python's own handlers and not the loop's, which go with the loop: Ctrl-C in the moment after it would be a
    traceback.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """`stop`: called in the loop, once."""
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._receive(number))

    def _receive(self, number: int) -> None:
        if not self._came:
            self._came = True
            if not self._loop.is_closed():  # else it ends already
                self._loop.call_soon_threadsafe(self._stop)
        elif number == signal.SIGINT:
            sys.stderr.flush()
            os.write(2, AT_ONCE.encode())
            os._exit(INTERRUPTED)


QUESTION_SHARE = 0.4
"""Of a recall's time: the longest that an embedding server has for a question. A message may have two, and then there
is time for the search by words."""
SAY_WHERE_SECONDS = 5.0
"""The interval at which the file with the address is tried again, where the disk was full."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def running(
    config: Config,
    model: Path | None = None,
    files: LocalDisk | None = None,
    command: str = "",
    auth_source: AuthSource | None = None,
) -> AsyncIterator[Daemon]:
    """The whole daemon, listening; it ends when the block is left.

    Args:
        model: a GGUF file to serve with a llama.cpp of our own, instead of `upstream.url`.
        files: the disk; another one than the real only where a fault is to be injected.
        command: on whose behalf it runs, where it is none for clients.
        auth_source: where the settings `auth` are read again while it runs.

    Raises:
        MemdError: the port, the data directory, the model or the embedding model cannot be used.
    """
    if model is None and (address := leading_back(config)):
        raise ConfigError(f"upstream.url is {address}, {IN_CIRCLES}; give the model server's address")
    async with AsyncExitStack() as stack:
        tls, listeners, loop = tls_of(config), bound(config), asyncio.get_running_loop()
        stack.callback(listeners.close)
        if listeners.moved:
            log.warning("memd's own address is not the usual one", extra={"problem": listeners.moved})
        backup, disk = _disk(config, files, command)
        embedding = loop.run_in_executor(None, _embedder, config, disk, command)
        encoding = loop.run_in_executor(None, lambda: cl100k_base(ranks_bytes()))
        if model is not None:
            child = await stack.enter_async_context(LlamaChild.started(model))
            upstream = msgspec.structs.replace(config.upstream, url=child.url, urls=())
            config = msgspec.structs.replace(config, upstream=upstream)
        embedder, counter = await embedding, TokenCounter(await encoding)
        redactor = Redactor.of(config.ingest)
        kept = shared_log(config) if config.cluster.is_on else None  # which other daemons have too
        if kept is not None:
            stack.callback(kept.close)
        store = await loop.run_in_executor(None, lambda: _opened(config, embedder, redactor, counter, disk, kept))
        stack.callback(store.close)
        if backup is not None:
            stack.push_async_callback(asyncio.to_thread, backup.stop, config.shutdown.grace_seconds)
            backup.start()
        watch = await _rights(config, auth_source, kept)
        book = AuditBook(store.files, config.data_dir, config.audit.keep_months)
        auditor = Auditor(book, watch.principals, config.audit.record, command)
        rest = addresses_of(config, listeners), watch, auditor, backup
        daemon = await make_parts(stack, config, store, embedder, counter, redactor, *rest, is_awaited=bool(command))
        await daemon.upstream.refresh(wait=True)
        async with _listening(daemon, listeners, tls):
            yield daemon


@asynccontextmanager
async def _listening(daemon: Daemon, listeners: Listeners, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """The daemon at work: it tends its topics and answers; in the end, replies in flight have their time of grace."""
    config, tasks, loop = daemon.config, daemon.tasks, asyncio.get_running_loop()
    tending = [
        tasks.spawn(_wake(daemon.topics, daemon.retriever), "wake"),
        tasks.spawn(daemon.archiver.tend(daemon.topics), "tend"),
        tasks.spawn(daemon.auditor.tend(), "audit"),
        tasks.spawn(daemon.retention.eraser.resume(), "unfinished erasures"),
        tasks.spawn(daemon.retention.tend(), "retention"),
        tasks.spawn(daemon.topics.tend_disk(), "disk"),
    ]
    daemon.token_watch.watch(tasks, daemon.auditor.note_tokens)
    daemon.auditor.note_start(config, daemon.principals.names)
    wrong_tokens = WrongTokens(daemon.principals, loop.call_later, daemon.auditor.note_wrong_tokens)
    own_routes = own_routes_of(daemon, wrong_tokens)
    tending += await _share_rights(daemon, wrong_tokens)
    router = router_of(daemon, own_routes, wrong_tokens)
    grace_seconds = config.shutdown.grace_seconds
    runners = [_runner(answer, daemon.metrics, grace_seconds) for answer in (router.route, own_routes.answer)]
    for runner in runners:
        await runner.setup()
    built = [runner.server for runner in runners if runner.server is not None]
    served = list(zip(built, (listeners.model, listeners.own), strict=True))
    house = await listen(served, config.limits, tls)
    tending.append(tasks.spawn(daemon.sources.tend(), "sources"))  # it may ask this daemon's routes
    files, data_dir = daemon.store.files, config.data_dir
    told = {data_dir / SECRET_NAME: daemon.token_watch.secret, data_dir / ADDRESS_NAME: daemon.local_url}
    telling = None
    try:
        if not await loop.run_in_executor(None, _say_where, files, told):
            telling = tasks.spawn(_say_where_later(files, told), "telling the address")
        yield
    finally:
        if telling is not None:
            telling.cancel()
        with contextlib.suppress(StoreError):  # who reads a stale one finds nobody there
            for path in told:
                await loop.run_in_executor(None, files.remove, path)
        house.close()
        daemon.sources.stop()
        daemon.indexer.stop()
        daemon.upstream.stop()
        daemon.token_watch.stop()
        daemon.events.end()
        await asyncio.gather(*(runner.cleanup() for runner in runners))
        for task in tending:
            task.cancel()
        await tasks.finish(timeout_seconds=config.shutdown.grace_seconds)
        await daemon.auditor.end()


def _say_where(files: LocalDisk, told: Mapping[Path, str], *, again: bool = False) -> bool:
    """Write where the daemon listens into its folder; whether that worked."""
    try:
        for path, text in told.items():
            replace_file(files, path, text.encode())
    except StoreError as error:
        if not again:
            log.warning("commands cannot find this daemon by its folder yet", extra={"error": error})
        return False
    return True


async def _say_where_later(files: LocalDisk, told: Mapping[Path, str]) -> None:
    """Try again, until the disk has room or can be written again."""
    while True:
        await asyncio.sleep(SAY_WHERE_SECONDS)
        if await asyncio.to_thread(_say_where, files, told, again=True):
            log.info("commands find this daemon by its folder")
            return


async def _wake(topics: Topics, retriever: Retriever) -> None:
    with contextlib.suppress(StoreError):  # has been said; whoever asks for the topic hears it again
        used_last = await topics.wake()
        if used_last is not None:
            await retriever.load(used_last.log)


def serve(config: Config, model: Path | None = None, auth_source: AuthSource | None = None) -> int:
    """Run the daemon until SIGTERM or Ctrl-C; the exit code.

    Raises:
        MemdError: it could not be started.
    """
    configure_logging(config.log, Redactor.of(config.ingest).text)
    raise_descriptors_limit()
    keep_small()
    gc.disable()  # during the start: nearly everything that is allocated then stays
    uvloop.run(_serve(config, model, auth_source))
    return 0


async def _serve(config: Config, model: Path | None, auth_source: AuthSource | None) -> None:
    started = time.perf_counter()
    stop = asyncio.Event()
    main = asyncio.current_task()
    assert main is not None
    starting = True

    def interrupt() -> None:
        stop.set()
        if starting:
            main.cancel()

    Signals(interrupt)
    try:
        async with running(config, model, auth_source=auth_source) as daemon:
            starting = False
            collect_little()
            _announce(daemon, time.perf_counter() - started)
            if config.auth.is_short:
                log.warning(f"auth.token has only {counted(len(config.auth.token), 'character')}: {REMEDY_IF_SHORT}")
            await stop.wait()
            grace = {"seconds_max": config.shutdown.grace_seconds}
            log.info("stopping after replies in flight; a second Ctrl-C ends memd at once", extra=grace)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


def _announce(daemon: Daemon, seconds: float) -> None:
    """Say where memd listens: to people on stdout; a log for programs is all that there is, so it is said there."""
    config, facts = daemon.config, daemon.upstream.facts
    topics = daemon.store.topic_count
    if config.log.format == "json":
        where = {"url": daemon.base_url, "own_url": daemon.own_url, "data_dir": config.data_dir, "topics": topics}
        urls = ", ".join(server.url for server in daemon.upstream.servers)
        upstream = {"upstream": urls, "reachable": facts.reachable, "window": facts.window}
        log.info("listening", extra={"version": __version__, **where, **upstream, "ready_seconds": seconds})
        if facts.reachable and not facts.window:
            log.warning(window_unknown(facts))
        if facts.lacks_template:
            log.warning(NO_TEMPLATE)
        return
    lines = [
        f"memd {__version__}: listening on {daemon.base_url} (ready in {seconds:.1f} s)",
        f"  point your client at   {daemon.base_url}/v1",
        f"  look into memory at    {daemon.own_url}/memd/",
        f"  memory in              {config.data_dir}  ({counted(topics, 'topic')})",
    ]
    if (kept := daemon.store.kept) is not None:
        away = "  NOT REACHABLE yet: what is said waits in the copy" if kept.trouble else ""
        lines[-1] = f"  memory in              {kept.place}, a copy in {config.data_dir}{away}"
    if daemon.redactor:
        lines.append(f"  redacted before stored {', '.join(daemon.redactor.names)}")
    for server in daemon.upstream.servers:
        lines += _upstream_lines(server, is_one_of_several=daemon.upstream.has_several)
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _upstream_lines(server: Upstream, *, is_one_of_several: bool) -> list[str]:
    facts = server.facts
    if server.is_up:
        window = f"window {facts.window:,} tokens" if facts.window else "window unknown yet"
        line = f"  upstream               {server.url}  ({facts.model or 'the model that a request names'}, {window})"
        notes = [] if facts.window else [window_unknown(facts)]
        notes += [NO_TEMPLATE] if facts.lacks_template else []
        return [line, *(f"                         {note}" for note in notes)]
    if facts.is_slow:
        told = f"did not answer within {ASK_SECONDS:g} s: it is asked again in the background"
    else:
        effect = "left out until it is" if is_one_of_several else "requests get 502 until it is"
        told = f"NOT REACHABLE yet: {effect}"
    return [f"  upstream               {server.url}  {told}"]


def _disk(config: Config, files: LocalDisk | None, command: str) -> tuple[BucketTender | None, LocalDisk]:
    """The backup to a bucket, if the settings want one, and the disk of the data directory."""
    backs_up = config.backup.is_on and files is None and not command  # what a command changes, the next daemon finds
    plain = NotingDisk(config.data_dir) if backs_up else files or LocalDisk()
    return BucketTender.of(config, plain, os.environ), disk_of(config, plain, creating=True)


def _embedder(config: Config, files: LocalDisk, command: str) -> Embedder:
    """The embedding model. For a command's one question it is loaded, however long that takes."""
    seconds = QUESTION_SECONDS if command else QUESTION_SHARE * config.retrieval.timeout_ms / 1000
    beside, stored = models_dir(config.data_dir), stored_models(config, files)
    given = partial(load_embedder, config.embedding, models_dir=beside, stored=stored, question_seconds=seconds)
    embedder = given(when_needed=True)
    try:
        embedder.prepare()
    except EmbeddingError as error:  # a server that is down now; later questions see to it
        log.warning("the embedding model cannot be used yet", extra={"error": error})
    return embedder


async def _rights(config: Config, source: AuthSource | None, kept: SharedLog | None) -> TokenWatch:
    """The tokens, which all daemons of a cluster have."""
    listed = TokenList(LocalDisk(), config.data_dir)
    if kept is not None:
        listed = SharedTokens(SharedBook(kept, "tokens"), TokenList(LocalDisk(), config.data_dir))
    watch = TokenWatch(config.auth, listed, source)
    await asyncio.get_running_loop().run_in_executor(None, watch.load)
    return watch


async def _share_rights(daemon: Daemon, wrong_tokens: WrongTokens) -> list[asyncio.Task[None]]:
    """In a cluster: know what the other daemons know, and follow what they erase."""
    erasures, kept = daemon.store.ledger, daemon.store.kept
    if kept is None or not isinstance(erasures, SharedErasures):
        return []

    async def hear(inquiry: Inquiry | None) -> None:
        await daemon.token_watch.hear(daemon.topics.ask((), inquiry))

    wrong_tokens.catch_up = hear
    daemon.retention.looked_at = SharedTimes(SharedBook(kept, "retention"))
    follower = ErasureFollower(erasures, daemon.retention.eraser)
    await follower.look()
    return [daemon.tasks.spawn(follower.tend(), "erasures of others")]


def _opened(
    config: Config,
    embedder: Embedder,
    redactor: Redactor,
    counter: TokenCounter,
    files: LocalDisk,
    kept: SharedLog | None,
) -> Store:
    count = lru_cache(maxsize=256)(counter.count)  # what is pending is counted for questions, and then for the log
    erasures: MakeErasures = ErasureLedger if kept is None else partial(SharedErasures, kept)
    return Store(
        config.data_dir,
        StoreShared(
            model=ModelId(embedder.dimension, embedder.fingerprint),
            segment_entries_max=config.segment.max_entries,
            draft_filter=last_look(redactor),
            line_tokens=lambda entry: count(line_of(entry)),
            files=files,
        ),
        kept=kept,
        erasures=erasures,
    )


def _runner(answer: Answer, metrics: Metrics, grace_seconds: float) -> web.AppRunner:
    @web.middleware  # a route of aiohttp's takes no target without a slash: `http://host`, `*`, that of CONNECT
    async def handle(request: web.Request, handler: Answer) -> web.StreamResponse:
        code = "5xx"
        try:
            response = await answer(request)
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
    application = web.Application(middlewares=[handle])
    application.on_response_prepare.append(prepare)
    application.router.add_route("*", "/{path:.*}", answer)  # else aiohttp makes an error of 404 for each request first
    return web.AppRunner(application, handle_signals=False, handler_cancellation=True, shutdown_timeout=grace_seconds)
