"""The parts of a running daemon, and how they are put together.

Rule: this is the composition root: each part gets those that it needs, in its constructor. Nothing takes a `Daemon`
whole but what shows a running one to somebody: its start-up lines, its gauges, the demo, tests and benches.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

import msgspec

from memd import __version__
from memd.access import WrongTokens
from memd.admin.auditing import Auditor, note_turn, own_erasure
from memd.admin.mcp_endpoint import McpEndpoint
from memd.admin.oauth.endpoint import OAuthEndpoint
from memd.admin.oauth.ledger import GrantFile, Ledger, SharedGrants
from memd.admin.parts import DaemonParts
from memd.admin.routes import OwnRoutes
from memd.admin.status import UpstreamHealth
from memd.admin.token_watch import TokenWatch
from memd.conversation.compaction import injection_budget
from memd.conversation.tokens import TokenCounter
from memd.daemon.routing import Router
from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.ingest.archiver import Archiver
from memd.ingest.erasing import BY, Eraser, Retention
from memd.ingest.indexer import Indexer
from memd.ingest.pipeline import Cutter
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.sources.documents import DocumentTaker
from memd.ingest.sources.watch import SourceWatch
from memd.ingest.topic import Topic
from memd.ingest.topics import Topics
from memd.proxy.addresses import Addresses
from memd.proxy.correct import Corrector
from memd.proxy.memory import Memory
from memd.proxy.reading import RequestReader
from memd.proxy.receive import Receiver
from memd.proxy.remember import Promise, Rememberer
from memd.proxy.room import RoomMaker
from memd.proxy.turn import Steps, TurnRunner
from memd.proxy.upstream.client import Upstream
from memd.proxy.upstream.pool import UpstreamPool
from memd.recall.neutralising import neutralised
from memd.recall.rerank import Reranker
from memd.recall.retrieve import Budget, Retriever
from memd.receipts import Receipts
from memd.settings.model import Config
from memd.settings.programs import programs_of
from memd.speech import Speech
from memd.store.bucket.writing import BucketTender
from memd.store.disk import KINDS
from memd.store.layout import GRANTS_NAME
from memd.store.log.segment import ENTRIES_READ
from memd.store.receipts import ReceiptRing
from memd.store.shared.books import SharedBook
from memd.store.store import Store
from memd.store.topic import TopicStats
from memd.telemetry.events import Events
from memd.telemetry.metrics import Gauge, Metrics, encode, gauge
from memd.telemetry.tasks import Tasks


class Daemon(DaemonParts, frozen=True, kw_only=True):
    """A daemon that listens."""

    upstream: UpstreamPool
    indexer: Indexer
    reader: RequestReader
    metrics: Metrics
    writer: ThreadPoolExecutor


async def make_parts(
    stack: AsyncExitStack,
    config: Config,
    store: Store,
    embedder: Embedder,
    counter: TokenCounter,
    redactor: Redactor,
    addresses: Addresses,
    watch: TokenWatch,
    auditor: Auditor,
    backup: BucketTender | None,
    *,
    is_awaited: bool = False,
) -> Daemon:
    """Make the parts, each with those that it needs; `stack` closes them in reverse. `is_awaited`: see `Priority`."""
    stack.push_async_callback((upstream := UpstreamPool(config, tasks := Tasks(metrics := Metrics()), metrics)).close)
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-write")
    note, ring = partial(note_turn, auditor), _receipt_ring(config, store, redactor)
    stack.callback((receipts := Receipts(ring, writer, redactor, events := Events(), note)).close)
    stack.callback(writer.shutdown, wait=True)
    stack.callback((encoder := Encoder(embedder, is_awaited=is_awaited)).close)
    stack.callback((indexer := Indexer(tasks, encoder.priority, config.retrieval, metrics)).close)
    stack.callback((retriever := _retriever(config, encoder, counter)).close)
    stack.push_async_callback((topics := Topics(store, config, writer, redactor, counter)).close)
    stack.callback((archiver := Archiver(config, encoder, counter, tasks, indexer, redactor, metrics, events)).close)
    stack.callback((taker := DocumentTaker(archiver, encoder, Cutter(config.chunking, counter, redactor))).close)
    programs = programs_of(config.ingest)
    speech = Speech(programs.strip, programs.message, programs.reply, programs.result)
    uses = topics, taker, encoder.priority, tasks, events
    stack.push_async_callback((sources := SourceWatch(config, *uses)).close)
    reader = RequestReader(config, watch.principals, redactor, speech)
    eraser = Eraser(store, topics, indexer, events, partial(receipts.blanked, config.data_dir))
    daemon = Daemon(
        retention=Retention(config.retention, eraser, partial(own_erasure, auditor, BY)),
        config=config,
        base_url=addresses.model,
        own_url=addresses.own,
        local_url=addresses.local,
        token_watch=watch,
        ledger=_ledger(config, store, watch),
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
        indexer=indexer,
        receipts=receipts,
        auditor=auditor,
        reader=reader,
        speech=speech,
        events=events,
        metrics=metrics,
        tasks=tasks,
        writer=writer,
        backup=backup,
        cache_bytes=lambda: reader.cache_bytes + counter.cache_bytes + ENTRIES_READ.bytes_held + neutralised.bytes_held,
        upstreams=lambda: list(map(_health, upstream.servers)),
        budget=partial(_budget, upstream, counter, config.injection.budget_tokens),
        exposition=lambda accept: _exposition(daemon, accept),
    )
    return daemon


def _health(server: Upstream) -> UpstreamHealth:
    facts, reason = server.facts, server.health.reason
    return UpstreamHealth(server.url, server.is_up, facts.window, facts.model, server.in_flight, reason)


async def _budget(upstream: UpstreamPool, counter: TokenCounter, tokens: int) -> Budget:
    facts, drift = await upstream.refresh(wait=False), counter.drift
    model = facts.model if drift.is_known(facts.model) else drift.latest_model
    return Budget(injection_budget(tokens, facts.window), drift.factor(model))


async def _exposition(daemon: Daemon, accept: str) -> tuple[bytes, str]:
    """The metrics; first asks the upstream whether it is there, unless that was asked lately."""
    await daemon.upstream.refresh(wait=True)
    await asyncio.to_thread(importlib.import_module, "prometheus_client")  # the first time, 30 ms
    return encode(daemon.metrics, _gauges(daemon), accept)


def _retriever(config: Config, encoder: Encoder, counter: TokenCounter) -> Retriever:
    dates = config.injection.dates == "day"
    retriever = Retriever(encoder, config.retrieval, dates=dates, count=counter.count_again)
    retriever.reranker = Reranker(config.rerank) if config.rerank.url else None
    return retriever


def router_of(daemon: Daemon, own_routes: OwnRoutes, wrong_tokens: WrongTokens) -> Router:
    """Build the steps of a turn and the router."""
    config, counter, archiver, metrics = daemon.config, daemon.counter, daemon.archiver, daemon.metrics
    retry_seconds = config.injection.freeze_seconds
    promise: Promise = "synced" if config.buffer.journal_fsync == "always" else "soon"
    global_topics = config.retrieval.global_topics
    steps = Steps(
        Receiver(daemon.topics, daemon.upstream, counter, daemon.speech, retry_seconds, global_topics),
        Corrector(daemon.topics, daemon.encoder, archiver, daemon.tasks, metrics, retry_seconds),
        RoomMaker(config.buffer, config.injection, counter, archiver),
        Memory(config.injection, config.retrieval.timeout_ms / 1000, daemon.retriever, counter, daemon.redactor),
        Rememberer(
            counter,
            archiver,
            daemon.receipts,
            daemon.speech,
            daemon.tasks,
            promise if daemon.store.kept is None else "shared",
        ),
    )
    capture_bytes_max, priority = config.limits.capture_bytes_max, daemon.encoder.priority
    turns = TurnRunner(steps, daemon.topics, daemon.upstream, capture_bytes_max, priority, daemon.tasks)
    return Router(daemon, own_routes.answer_at_model, wrong_tokens, daemon.upstream, daemon.reader, turns)


def _gauges(daemon: Daemon) -> Iterator[Gauge]:
    """The daemon's parts at the moment when somebody asks. Read on the event loop, which owns the buffers."""
    yield Gauge("memd_build_info", "The version that is running", {__version__: 1.0}, "version")
    yield gauge("memd_requests_in_flight", "Requests that are being answered", daemon.metrics.in_flight)
    facts, servers = daemon.upstream.facts, daemon.upstream.servers
    yield gauge("memd_upstream_reachable", "Whether the model server answers: 1 or 0", facts.reachable)
    yield gauge("memd_upstream_window_tokens", "The model's window; 0 if not known", facts.window or 0)
    up = {server.url: float(server.is_up) for server in servers}
    yield Gauge("memd_upstream_up", "Whether requests go to a model server: 1 or 0", up, "server")
    in_flight = {server.url: float(server.in_flight) for server in servers}
    about = "Requests that a model server has been given and that have not ended"
    yield Gauge("memd_upstream_in_flight", about, in_flight, "server")
    topics = daemon.topics.opened()
    yield from _buffer_gauges(topics)
    yield from _log_gauges([topic.log.stats() for topic in topics])
    yield gauge("memd_memory_bytes_max", "store.memory_bytes_max", daemon.config.store.memory_bytes_max)
    about = "Memory of caches of parsed messages, token counts, chunks and their words; bounded"
    yield gauge("memd_cache_bytes", about, daemon.cache_bytes())
    executors = {"ingestion": daemon.encoder.ingestion, "writer": daemon.writer}
    waiting = {name: one._work_queue.qsize() for name, one in executors.items()}  # they do not say so otherwise
    waiting["indexer"] = daemon.indexer.under_way
    yield Gauge("memd_queue_depth", "Work that waits; of the indexer also what is under way", waiting, "queue")
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
    yield Gauge("memd_disk_trouble", about, kinds, "kind")
    yield gauge("memd_tasks", "All tasks: connections, requests, work in the background", len(asyncio.all_tasks()))


def _buffer_gauges(topics: Sequence[Topic]) -> Iterator[Gauge]:
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


def _log_gauges(logs: Sequence[TopicStats]) -> Iterator[Gauge]:
    yield gauge("memd_topics_open", "Topics in memory", len(logs))
    yield gauge("memd_chunks", "Chunks of open topics that can be recalled", sum(one.chunks for one in logs))
    yield gauge("memd_entries", "Entries in the logs of open topics", sum(one.entries for one in logs))
    yield gauge("memd_segments", "Segments in the logs of open topics", sum(one.segments for one in logs))
    unsealed = sum(one.unsealed for one in logs)
    yield gauge("memd_segments_unsealed", "Full segments of open topics that have no index yet", unsealed)
    yield gauge("memd_indexes", "Vector indexes of open topics", sum(one.indexes for one in logs))
    yield gauge("memd_indexes_loaded", "Those indexes that are loaded", sum(one.indexes_loaded for one in logs))
    slowest = max((one.fan_out_ms or 0.0 for one in logs), default=0.0) / 1000
    yield gauge("memd_fan_out_seconds", "Time to search all indexes of a topic, in the slowest topic", slowest)
    yield gauge("memd_memory_bytes", "Memory that logs and indexes take", sum(one.memory_bytes for one in logs))


def _ledger(config: Config, store: Store, watch: TokenWatch) -> Ledger:
    """The grants of OAuth, which all daemons of a cluster have."""
    shared = None if store.kept is None else SharedGrants(SharedBook(store.kept, "grants"))
    ledger = Ledger(GrantFile(store.files, config.data_dir / GRANTS_NAME), watch.principals.known, shared=shared)
    if shared is not None:
        watch.also(GRANTS_NAME, ledger.catch_up, lambda: ledger.seen)
    return ledger


def own_routes_of(daemon: Daemon, wrong_tokens: WrongTokens) -> OwnRoutes:
    """Build what answers at memd's own address."""
    idle_seconds = daemon.config.limits.idle_seconds
    oauth = OAuthEndpoint(daemon.ledger, wrong_tokens, idle_seconds, daemon.auditor.record_token)
    return OwnRoutes(daemon, wrong_tokens, oauth, McpEndpoint(daemon, oauth.leading_on).answer)


def _receipt_ring(config: Config, store: Store, redactor: Redactor) -> ReceiptRing | None:
    """Where receipts are kept; None where they are off."""
    if not config.receipts.enabled:
        return None
    redaction = hashlib.blake2b(msgspec.json.encode(config.ingest)).hexdigest() if redactor else ""
    return ReceiptRing(store.files, config.data_dir, config.receipts.bytes_max, redaction)
