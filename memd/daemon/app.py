"""The daemon: how its parts are put together, in which order they start, and how everything ends.

Rule: everything that runs is created in `running` and closed there in reverse order, so an error or a signal at any
point leaves no thread, child process or lock behind. Each part gets only the parts it needs, in its constructor. A
whole `Daemon` goes only to code that shows a running one: its start-up lines, its gauges, the demo, tests.

The first signal lets the daemon finish, a second Ctrl-C ends it at once. That loses only replies in flight, because the
journal has everything that was said, as after `kill -9`. malloc is tuned to keep little freed memory, but only for
glibc, and never if the environment has `MALLOC_…` variables. The garbage collector scans little.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import hashlib
import importlib
import logging
import os
import platform
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import HttpVersion11, web
from aiohttp.web_urldispatcher import _default_expect_handler

from memd import __version__
from memd.access import OWN_HEADERS, BodyRoom, WrongTokens
from memd.admin.auditing import Auditor, note_turn, own_erasure
from memd.admin.oauth.endpoint import OAuthEndpoint
from memd.admin.oauth.ledger import GrantFile, Ledger, SharedGrants
from memd.admin.parts import DaemonParts
from memd.admin.routes import OwnRoutes
from memd.admin.status import UpstreamHealth
from memd.admin.tokens import TokenWatch
from memd.assets import ranks_bytes
from memd.conversation.compaction import injection_budget
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.daemon.routing import Router
from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.embedding.loading import QUESTION_SECONDS, give_back_memory, load_embedder
from memd.errors import ConfigError, EmbeddingError, StoreError
from memd.ingest.archiver import Archiver
from memd.ingest.erasing import BY, Eraser, Retention
from memd.ingest.offline import stored_models
from memd.ingest.pipeline import Cutter
from memd.ingest.redaction import Redactor, last_look
from memd.ingest.sources.documents import DocumentTaker
from memd.ingest.sources.watch import SourceWatch
from memd.ingest.topic import Inquiry, Topic
from memd.ingest.topics import Topics
from memd.messages import Speech
from memd.proxy.connections import IN_CIRCLES, Listeners, addresses_of, bound, leading_back, listen, tls_of
from memd.proxy.memory import Corrector, Memory, RoomMaker
from memd.proxy.prompt import Receiver
from memd.proxy.reading import RequestReader
from memd.proxy.relay import Relayed, keep_header_bytes
from memd.proxy.remember import Rememberer
from memd.proxy.turn import TurnRunner
from memd.proxy.upstream.client import ASK_SECONDS, NO_TEMPLATE, Upstream, window_unknown
from memd.proxy.upstream.llama_child import llama_child
from memd.proxy.upstream.pool import UpstreamPool
from memd.recall.block import line_of
from memd.recall.rerank import Reranker
from memd.recall.retrieve import Budget, Retriever
from memd.recall.times import spans
from memd.recall.untrusted import neutralised
from memd.receipts import ReceiptRing, Receipts
from memd.settings.loading import SettingsSource, programs_of
from memd.settings.model import REMEDY_IF_SHORT, Config
from memd.store.audit import AuditBook
from memd.store.bucket.writing import BucketTender, NotingDisk
from memd.store.disk import KINDS, LocalDisk, raise_descriptors_limit, replace_file
from memd.store.encryption.disk import disk_of
from memd.store.erasure import ErasureLedger
from memd.store.layout import ADDRESS_NAME, GRANTS_NAME, SECRET_NAME, TOKENS_NAME, models_dir
from memd.store.log.segment import ENTRIES_READ
from memd.store.shared.books import FileBook, SharedBook, SharedErasures, SharedTimes, TokenList
from memd.store.shared.postgres import shared_log
from memd.store.store import MakeErasures, ModelId, Store, StoreShared
from memd.store.topic import TopicStats
from memd.telemetry.events import Events
from memd.telemetry.logging import configure_logging
from memd.telemetry.metrics import Metrics, encode, gauge
from memd.telemetry.tasks import Tasks
from memd.wording import counted

log = logging.getLogger("memd")

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

ARENAS_MAX = 2
"""glibc's default is eight arenas per core. Blocks allocated in one thread of the daemon are freed in others, and each
arena keeps holes; bench/NOTES.md has the growth with and without this limit."""
KEPT_BYTES_MAX = 1 << 20
"""Larger blocks return to the system when freed. glibc starts with 128 KB and raises the threshold up to 32 MB once a
large block was freed; setting it stops that. A request of 200 KB is copied a dozen times: with a threshold of 128 KB
each took 800 page faults and 2 ms of kernel time (bench/NOTES.md, 2026-11-25)."""


def keep_small() -> None:
    """Limit malloc's arenas and the freed memory it keeps. Call it before other threads start."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUN")) for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_ARENA_MAX, ARENAS_MAX)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES_MAX)


def collect_little() -> None:
    """Enable the garbage collector for objects allocated from now on.

    A pass over the libraries' 120,000 objects takes 45 to 70 ms, in which requests wait; a pass over later objects
    takes 1.5 ms. Objects held by the thousand (entries, messages, terms) have no cycles and are declared `gc=False`;
    without that it took as long again (bench/NOTES.md, 2026-11-22 and 2026-11-23).
    """
    give_back_memory()
    gc.freeze()
    gc.enable()


AT_ONCE = (
    "memd: ended at once by a second Ctrl-C. Replies in flight were cut off; what was said before is kept, and the next"
    " start goes on from there.\n"
)
INTERRUPTED = 128 + signal.SIGINT
"""Shells' exit code for a program that Ctrl-C ended."""


def receive_signals(stop: Callable[[], None]) -> None:
    """Receive SIGINT and SIGTERM until the process ends, and call `stop` in the running loop, once. For the main
    thread. Python's own handlers, because the loop's end with it: Ctrl-C just after that would print a traceback."""
    loop, came = asyncio.get_running_loop(), list[int]()

    def receive(number: int, _: object) -> None:
        came.append(number)
        if len(came) == 1 and not loop.is_closed():  # otherwise the process is ending already
            loop.call_soon_threadsafe(stop)
        elif len(came) > 1 and number == signal.SIGINT:
            sys.stderr.flush()
            os.write(2, AT_ONCE.encode())
            os._exit(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, receive)


QUESTION_SHARE = 0.4
"""Share of a recall's time that an embedding server has for a question. A message may have two questions, and then
there is time left for the search by words."""
SAY_WHERE_SECONDS = 5.0
"""Interval for retrying to write the file with the address, after the disk was full."""
SAID_SECONDS = 1.0
"""Limit on a start's wait for that file."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Daemon(DaemonParts, frozen=True, kw_only=True):
    """A daemon that listens."""

    upstream: UpstreamPool
    reader: RequestReader
    metrics: Metrics
    writer: ThreadPoolExecutor


@asynccontextmanager
async def running(
    config: Config,
    model: Path | None = None,
    files: LocalDisk | None = None,
    command: str = "",
    source: SettingsSource | None = None,
) -> AsyncIterator[Daemon]:
    """Run the whole daemon while the block runs.

    Args:
        model: a GGUF file to serve with our own llama.cpp, instead of `upstream.url`.
        files: the disk; not the real one only to inject faults.
        command: the command it runs for; empty for a daemon with clients.
        source: reads the settings again while the daemon runs.

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
        backs_up = config.backup.is_on and files is None and not command  # the next daemon backs up a command's changes
        plain = NotingDisk(config.data_dir) if backs_up else files or LocalDisk()
        backup, disk = BucketTender.of(config, plain, os.environ), disk_of(config, plain, creating=True)
        embedding = loop.run_in_executor(None, _embedder, config, disk, command)
        encoding = loop.run_in_executor(None, lambda: cl100k_base(ranks_bytes()))
        if model is not None:
            url = await stack.enter_async_context(llama_child(model))
            served = msgspec.structs.replace(config.upstream, url=url, urls=())
            config = msgspec.structs.replace(config, upstream=served)
        embedder, counter = await embedding, TokenCounter(await encoding)
        redactor = Redactor.of(config.ingest)
        cutter = Cutter(config.chunking, counter, redactor)
        kept = shared_log(config) if config.cluster.is_on else None  # shared with other daemons
        if kept is not None:
            stack.callback(kept.close)
        used = StoreShared(
            model=ModelId(embedder.dimension, embedder.fingerprint),
            segment_entries_max=config.segment.max_entries,
            draft_filter=last_look(redactor),
            line_tokens=lambda entry: counter.count_again(line_of(entry)),  # while pending, and when stored
            files=disk,
        )
        erasures: MakeErasures = ErasureLedger if kept is None else partial(SharedErasures, kept)
        opened = partial(Store, config.data_dir, used, kept=kept, erasures=erasures)
        store = await loop.run_in_executor(None, opened)
        stack.callback(store.close)
        if backup is not None:
            stack.push_async_callback(asyncio.to_thread, backup.stop, config.shutdown.grace_seconds)
            backup.start()

        copy, grants = FileBook(LocalDisk(), config.data_dir), None
        listed = TokenList(copy)
        if kept is not None:
            listed = TokenList(SharedBook(kept, TOKENS_NAME), copy)
            grants = SharedGrants(SharedBook(kept, GRANTS_NAME))
        watch = TokenWatch(config.auth, listed, source)
        await loop.run_in_executor(None, watch.load)
        grant_file = GrantFile(store.files, config.data_dir / GRANTS_NAME)
        ledger = Ledger(grant_file, watch.principals.known, shared=grants)
        if grants is not None:
            watch.also(GRANTS_NAME, ledger.catch_up, lambda: ledger.seen)
        book = AuditBook(store.files, config.data_dir, config.audit.keep_months)
        auditor = Auditor(book, watch.principals, config.audit.record, command)

        upstream = UpstreamPool(config, tasks := Tasks(metrics := Metrics()), metrics)
        stack.push_async_callback(upstream.close)
        writer, events = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-write"), Events()
        ring = _receipt_ring(config, store, redactor)
        stack.callback((receipts := Receipts(ring, writer, redactor, events, partial(note_turn, auditor))).close)
        stack.callback(writer.shutdown, wait=True)
        stack.callback((encoder := Encoder(embedder, is_awaited=bool(command))).close)
        retriever = Retriever(encoder, config.retrieval, count=counter.count_again)
        retriever.reranker = Reranker(config.rerank) if config.rerank.url else None
        stack.callback(retriever.close)
        stack.push_async_callback((topics := Topics(store, config, writer, cutter)).close)
        stack.callback((archiver := Archiver(config, encoder, cutter, tasks, events)).close)
        stack.callback((taker := DocumentTaker(archiver, encoder, cutter)).close)
        uses = topics, taker, encoder.priority, tasks, events
        stack.push_async_callback((sources := SourceWatch(config, *uses)).close)

        programs = programs_of(config.ingest)
        speech = Speech(programs.strip, programs.message, programs.reply, programs.result)
        reader = RequestReader(config, watch.principals, redactor, speech, counter)
        eraser = Eraser(store, topics, archiver.indexer, events, partial(receipts.blanked, config.data_dir))
        addresses = addresses_of(config, listeners)
        daemon = Daemon(
            retention=Retention(config.retention, eraser, partial(own_erasure, auditor, BY)),
            config=config,
            base_url=addresses.model,
            own_url=addresses.own,
            local_url=addresses.local,
            token_watch=watch,
            ledger=ledger,
            store=store,
            topics=topics,
            redactor=redactor,
            encoder=encoder,
            counter=counter,
            retriever=retriever,
            upstream=upstream,
            archiver=archiver,
            taker=taker,
            sources=sources,
            receipts=receipts,
            auditor=auditor,
            reader=reader,
            speech=speech,
            events=events,
            metrics=metrics,
            tasks=tasks,
            bodies=BodyRoom(max(config.limits.bodies_bytes_max, config.limits.body_bytes_max)),
            writer=writer,
            backup=backup,
            cache_bytes=lambda: sum(
                (reader.cache_bytes, counter.cache_bytes, ENTRIES_READ.bytes_held, neutralised.bytes_held)
            ),
            upstreams=lambda: [
                UpstreamHealth(one.url, one.is_up, one.facts.window, one.facts.model, one.in_flight, one.health.reason)
                for one in upstream.servers
            ],
            budget=partial(_budget, upstream, counter, config.injection.budget_tokens),
            exposition=lambda accept: _exposition(daemon, accept),
        )
        await upstream.refresh(wait=True)
        async with _listening(daemon, listeners, tls):
            yield daemon


@asynccontextmanager
async def _listening(daemon: Daemon, listeners: Listeners, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Run background work and answer requests; in the end, replies in flight get the grace time."""
    config, tasks, loop = daemon.config, daemon.tasks, asyncio.get_running_loop()
    tending = [
        tasks.spawn(_wake(daemon.topics, daemon.retriever, daemon.encoder.embedder), "wake"),
        tasks.spawn(daemon.archiver.tend(daemon.topics), "tend"),
        tasks.spawn(daemon.auditor.tend(), "audit"),
        tasks.spawn(daemon.retention.tend(), "retention"),
        tasks.spawn(daemon.topics.tend_disk(), "disk"),
        tasks.spawn(daemon.token_watch.tend(tasks, daemon.auditor.note_tokens), "tokens"),
    ]
    daemon.auditor.note_start(config, daemon.principals.names)
    wrong_tokens = WrongTokens(daemon.principals, loop.call_later, daemon.auditor.note_wrong_tokens)
    oauth = OAuthEndpoint(daemon.ledger, wrong_tokens, config.limits.idle_seconds, daemon.auditor.record_token)
    own_routes = OwnRoutes(daemon, wrong_tokens, oauth)
    tending += await _share_rights(daemon, wrong_tokens)
    tending.append(tasks.spawn(daemon.retention.eraser.tend(), "unfinished erasures"))
    router = _router(daemon, own_routes, wrong_tokens)
    keep_header_bytes()
    servers = [_server(answer, daemon.metrics) for answer in (router.route, own_routes.answer)]
    served = list(zip(servers, (listeners.model, listeners.own), strict=True))
    house = await listen(served, config.limits, tls)
    tending.append(tasks.spawn(daemon.sources.tend(), "sources"))  # a source may request this daemon's routes
    files, data_dir = daemon.store.files, config.data_dir
    told = {data_dir / SECRET_NAME: daemon.token_watch.secret, data_dir / ADDRESS_NAME: daemon.local_url}
    telling = tasks.spawn(_say_where(files, told), "telling the address")
    try:
        await asyncio.wait([telling], timeout=SAID_SECONDS)
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(StoreError):  # a reader of a stale file finds nobody there
            for path in told:
                await loop.run_in_executor(None, files.remove, path)
        house.close()
        daemon.sources.stop()
        daemon.archiver.indexer.stop()
        daemon.upstream.stop()
        daemon.events.end()
        await asyncio.sleep(0)  # so that requests that have arrived are answered
        for server in servers:
            server.pre_shutdown()
        await asyncio.gather(*(server.shutdown(config.shutdown.grace_seconds) for server in servers))
        for task in tending:
            task.cancel()
        await tasks.finish(timeout_seconds=config.shutdown.grace_seconds)
        await daemon.auditor.end()


async def _say_where(files: LocalDisk, told: Mapping[Path, str]) -> None:
    """Write the daemon's address into its data directory; retry while the disk is full."""
    has_failed = False
    while True:
        try:
            for path, text in told.items():
                await asyncio.to_thread(replace_file, files, path, text.encode())
            break
        except StoreError as error:
            if not has_failed:
                log.warning("commands cannot find this daemon by its folder yet", extra={"error": error})
            has_failed = True
            await asyncio.sleep(SAY_WHERE_SECONDS)
    if has_failed:
        log.info("commands find this daemon by its folder")


async def _wake(topics: Topics, retriever: Retriever, embedder: Embedder) -> None:
    with contextlib.suppress(StoreError):  # logged already; a request for the topic gets the error again
        used_last = await topics.wake()
        if used_last is not None:
            await retriever.load(used_last.log)
    # Loads and compiles at first use, so that the first question does not wait for it (25 ms).
    await asyncio.to_thread(embedder.cut, "", 0)
    await asyncio.to_thread(spans, "", 0)


def serve(config: Config, model: Path | None = None, source: SettingsSource | None = None) -> int:
    """Run the daemon until SIGTERM or Ctrl-C. Returns the exit code; 1 if some words could not be written. Raises
    MemdError: it could not be started."""
    configure_logging(config.log, Redactor.of(config.ingest).text)
    raise_descriptors_limit()
    keep_small()
    gc.disable()  # during the start, because nearly all objects allocated then stay
    return uvloop.run(_serve(config, model, source))


async def _serve(config: Config, model: Path | None, source: SettingsSource | None) -> int:
    started = time.perf_counter()
    stop = asyncio.Event()
    main = asyncio.current_task()
    assert main is not None
    starting = True

    def interrupt() -> None:
        stop.set()
        if starting:
            main.cancel()

    receive_signals(interrupt)
    try:
        async with running(config, model, source=source) as daemon:
            starting = False
            collect_little()
            _announce(daemon, time.perf_counter() - started)
            if config.auth.is_short:
                log.warning(f"auth.token has only {counted(len(config.auth.token), 'character')}: {REMEDY_IF_SHORT}")
            await stop.wait()
            grace = {"seconds_max": config.shutdown.grace_seconds}
            log.info("stopping after replies in flight; a second Ctrl-C ends memd at once", extra=grace)
        return int(daemon.topics.has_lost)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        return 0


def _announce(daemon: Daemon, seconds: float) -> None:
    """Report where memd listens: to people on stdout, to programs (`log.format: json`) in the log."""
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


def _embedder(config: Config, files: LocalDisk, command: str) -> Embedder:
    """Return the embedding model. A command waits for it to load, however long that takes."""
    seconds = QUESTION_SECONDS if command else QUESTION_SHARE * config.retrieval.timeout_ms / 1000
    beside, stored = models_dir(config.data_dir), stored_models(config, files)
    given = partial(load_embedder, config.embedding, models_dir=beside, stored=stored, question_seconds=seconds)
    embedder = given(when_needed=True)
    try:
        embedder.prepare()
    except EmbeddingError as error:  # a server that is down now; later questions retry
        log.warning("the embedding model cannot be used yet", extra={"error": error})
    return embedder


async def _share_rights(daemon: Daemon, wrong_tokens: WrongTokens) -> list[asyncio.Task[None]]:
    """In a cluster, share tokens and retention times with the other daemons, and follow their erasures."""
    if (kept := daemon.store.kept) is None:
        return []

    async def hear(topics: Iterable[str]) -> Inquiry:
        inquiry = daemon.topics.ask(topics)
        assert inquiry is not None, "of a cluster"
        await daemon.token_watch.hear(inquiry)
        return inquiry

    wrong_tokens.catch_up = hear
    daemon.retention.looked_at = SharedTimes(kept)
    await daemon.retention.eraser.follow()
    return [daemon.tasks.spawn(daemon.retention.eraser.tend_others(), "erasures of others")]


def _server(answer: Answer, metrics: Metrics) -> web.Server:
    async def handle(request: Any) -> web.StreamResponse:
        if "Expect" in request.headers:
            await _default_expect_handler(request)
        code = "5xx"
        try:
            response = await answer(request)
            code = f"{response.status // 100}xx"
            return response
        finally:
            metrics.responses.add(code)

    made = partial(_Request, loop=asyncio.get_running_loop())
    return web.Server(handle, request_factory=made, handler_cancellation=True)


class _Request(web.Request):
    """A client's request; aiohttp calls it for final changes to the head of its answer."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        if isinstance(response, Relayed):
            response.remove_added_headers()
        else:
            response.headers.update(OWN_HEADERS)
        if self.version < HttpVersion11 and response.content_length is None:
            response.force_close()  # otherwise such a client cannot know where the body ends


async def _budget(upstream: UpstreamPool, counter: TokenCounter, tokens: int) -> Budget:
    facts, drift = await upstream.refresh(wait=False), counter.drift
    model = facts.model if drift.is_known(facts.model) else drift.latest_model
    return Budget(injection_budget(tokens, facts.window), drift.factor(model))


async def _exposition(daemon: Daemon, accept: str) -> tuple[bytes, str]:
    """Return the metrics, after a probe of the upstream unless there was one lately."""
    await daemon.upstream.refresh(wait=True)
    await asyncio.to_thread(importlib.import_module, "prometheus_client")  # 30 ms the first time
    return encode(daemon.metrics, _gauges(daemon), accept)


def _router(daemon: Daemon, own_routes: OwnRoutes, wrong_tokens: WrongTokens) -> Router:
    config, counter, archiver, tasks = daemon.config, daemon.counter, daemon.archiver, daemon.tasks
    retry_seconds, is_shared = config.injection.freeze_seconds, daemon.store.kept is not None
    is_synced = is_shared or config.buffer.journal_fsync == "always"
    global_topics = config.retrieval.global_topics
    turns = TurnRunner(
        Receiver(daemon.topics, daemon.upstream, counter, daemon.speech, retry_seconds, global_topics),
        Corrector(daemon.topics, daemon.encoder, archiver, tasks),
        RoomMaker(config.buffer, config.injection, counter, archiver),
        Memory(config.injection, config.retrieval.timeout_ms / 1000, daemon.retriever, counter, daemon.redactor),
        Rememberer(counter, archiver, daemon.receipts, daemon.speech, tasks, is_synced, is_shared),
        daemon.topics,
        daemon.upstream,
        config.limits.capture_bytes_max,
        daemon.encoder.priority,
        tasks,
    )
    return Router(daemon, own_routes.answer_at_model, wrong_tokens, daemon.upstream, daemon.reader, turns)


def _gauges(daemon: Daemon) -> Iterator[Any]:
    """Yield the present state of the daemon's parts. Runs on the event loop, which owns the buffers."""
    yield gauge("memd_build_info", "The version that is running", {__version__: 1.0}, "version")
    yield gauge("memd_requests_in_flight", "Requests that are being answered", daemon.metrics.in_flight)
    facts, servers = daemon.upstream.facts, daemon.upstream.servers
    yield gauge("memd_upstream_reachable", "Whether the model server answers: 1 or 0", facts.reachable)
    yield gauge("memd_upstream_window_tokens", "The model's window; 0 if not known", facts.window or 0)
    up = {server.url: float(server.is_up) for server in servers}
    yield gauge("memd_upstream_up", "Whether requests go to a model server: 1 or 0", up, "server")
    in_flight = {server.url: float(server.in_flight) for server in servers}
    about = "Requests that a model server has been given and that have not ended"
    yield gauge("memd_upstream_in_flight", about, in_flight, "server")
    topics = daemon.topics.opened()
    yield from _topic_gauges(topics, [topic.log.stats() for topic in topics])
    yield gauge("memd_memory_bytes_max", "store.memory_bytes_max", daemon.config.store.memory_bytes_max)
    about = "Memory of caches of parsed messages, token counts, chunks and their words; bounded"
    yield gauge("memd_cache_bytes", about, daemon.cache_bytes())
    executors = {"ingestion": daemon.encoder.ingestion, "writer": daemon.writer}
    waiting = {name: one._work_queue.qsize() for name, one in executors.items()}  # there is no public way
    waiting["indexer"] = daemon.archiver.indexer.under_way
    yield gauge("memd_queue_depth", "Work that waits; of the indexer also what is under way", waiting, "queue")
    yield gauge("memd_background_tasks", "Tasks that nobody waits for", len(daemon.tasks))
    about = "Chunks that wait for the embedding model, of those that are being stored; words find them meanwhile"
    yield gauge("memd_embedding_backlog", about, daemon.encoder.backlog)
    lag_seconds = 0.0 if daemon.backup is None else daemon.backup.lag_seconds
    yield gauge("memd_backup_lag_seconds", "Age of what the bucket lacks; 0 without a backup", lag_seconds)
    is_away = daemon.store.kept is not None and bool(daemon.store.kept.trouble)
    yield gauge("memd_shared_log_away", "Whether the database of a cluster cannot be asked now: 1 or 0", is_away)
    trouble = daemon.topics.disk.trouble
    kinds: dict[str, float] = {one: trouble is not None and one == trouble.kind for one in KINDS}
    about = "Whether the disk of data_dir cannot take what is to be written now: 1 or 0"
    yield gauge("memd_disk_trouble", about, kinds, "kind")
    yield gauge("memd_tasks", "All tasks: connections, requests, work in the background", len(asyncio.all_tasks()))


def _topic_gauges(topics: Sequence[Topic], logs: Sequence[TopicStats]) -> Iterator[Any]:
    conversations = [conversation for topic in topics for conversation in topic.buffer.conversations()]
    visible = sum(one.visible_tokens() for one in conversations)
    unstored = sum(one.tokens_between(one.stored, one.wanted_end) for one in conversations)
    yield gauge("memd_conversations", "Live conversations in memory", len(conversations))
    yield gauge("memd_buffer_tokens", "Tokens of their turns that are still in the prompt", visible)
    yield gauge("memd_buffer_unstored_tokens", "Those that are not in the log yet, but in its journal", unstored)
    about = "Memory of open conversations beside texts of messages, and of chunks not in the log yet"
    yield gauge("memd_buffer_bytes", about, sum(topic.buffer_bytes for topic in topics))
    trouble = sum(topic.write_trouble is not None for topic in topics)
    yield gauge("memd_topics_in_trouble", "Topics whose last write to disk failed", trouble)
    yield gauge("memd_topics_open", "Topics in memory", len(logs))
    yield gauge("memd_chunks", "Chunks of open topics that can be recalled", sum(one.chunks for one in logs))
    yield gauge("memd_entries", "Entries in the logs of open topics", sum(one.entries for one in logs))
    yield gauge("memd_segments", "Segments in the logs of open topics", sum(one.segments for one in logs))
    unsealed = sum(one.unsealed for one in logs)
    yield gauge("memd_segments_unsealed", "Full segments of open topics whose columns could not be written", unsealed)
    yield gauge("memd_indexes", "Vector indexes of open topics", sum(one.indexes for one in logs))
    yield gauge("memd_indexes_loaded", "Those indexes that are loaded", sum(one.indexes_loaded for one in logs))
    slowest = max((one.fan_out_ms or 0.0 for one in logs), default=0.0) / 1000
    yield gauge("memd_fan_out_seconds", "Time to search all indexes of a topic, in the slowest topic", slowest)
    yield gauge("memd_memory_bytes", "Memory that logs and indexes take", sum(one.memory_bytes for one in logs))


def _receipt_ring(config: Config, store: Store, redactor: Redactor) -> ReceiptRing | None:
    """Return the store of receipts; None if they are off."""
    if not config.receipts.enabled:
        return None
    redaction = hashlib.blake2b(msgspec.json.encode(config.ingest)).hexdigest() if redactor else ""
    return ReceiptRing(store.files, config.data_dir, config.receipts.bytes_max, redaction)
