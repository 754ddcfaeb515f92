"""The gauges at `/memd/metrics`: the state of the daemon's parts at the moment when somebody asks.

Rule: read on the event loop, which owns the buffers; reads and changes nothing.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from memd import __version__
from memd.ingest.topics import Topics
from memd.proxy.upstream.pool import UpstreamPool
from memd.store.bucket.writing import BucketTender
from memd.store.disk_trouble import KINDS
from memd.telemetry.metrics import Gauge, Metrics, encode, gauge
from memd.telemetry.tasks import Tasks


class Gauges:
    """Reads the gauges of one daemon."""

    def __init__(
        self,
        metrics: Metrics,
        upstream: UpstreamPool,
        topics: Topics,
        tasks: Tasks,
        *,
        queues: Mapping[str, Callable[[], int]],
        embedding_backlog: Callable[[], int],
        cache_bytes: Callable[[], int],
        memory_bytes_max: int,
        backup: BucketTender | None,
        shared_trouble: Callable[[], str | None],
    ) -> None:
        """`queues`: by name, how much work waits in each; `shared_trouble`: of a cluster's."""
        self._metrics = metrics
        self._upstream = upstream
        self._topics = topics
        self._tasks = tasks
        self._queues = queues
        self._embedding_backlog = embedding_backlog
        self._cache_bytes = cache_bytes
        self._memory_bytes_max = memory_bytes_max
        self._backup = backup
        self._shared_trouble = shared_trouble

    def read(self) -> Iterator[Gauge]:
        """Yield them as they are now."""
        yield Gauge("memd_build_info", "The version that is running", {__version__: 1.0}, "version")
        yield gauge("memd_requests_in_flight", "Requests that are being answered", self._metrics.in_flight)
        facts = self._upstream.facts
        yield gauge("memd_upstream_reachable", "Whether the model server answers: 1 or 0", facts.reachable)
        yield gauge("memd_upstream_window_tokens", "The model's window; 0 if not known", facts.window or 0)
        servers = self._upstream.servers
        up = {server.url: float(server.is_up) for server in servers}
        yield Gauge("memd_upstream_up", "Whether requests go to a model server: 1 or 0", up, "server")
        in_flight = {server.url: float(server.in_flight) for server in servers}
        about = "Requests that a model server has been given and that have not ended"
        yield Gauge("memd_upstream_in_flight", about, in_flight, "server")
        yield from self._buffer_gauges()
        yield from self._log_gauges()
        waiting = {name: queued() for name, queued in self._queues.items()}
        yield Gauge("memd_queue_depth", "Work that waits; of the indexer also what is under way", waiting, "queue")
        yield gauge("memd_background_tasks", "Tasks that nobody waits for", len(self._tasks))
        about = "Chunks that wait for the embedding model, of those that are being stored; words find them meanwhile"
        yield gauge("memd_embedding_backlog", about, self._embedding_backlog())
        lag_seconds = 0.0 if self._backup is None else self._backup.lag_seconds
        yield gauge("memd_backup_lag_seconds", "Age of what the bucket lacks; 0 without a backup", lag_seconds)
        about = "Whether the database of a cluster cannot be asked now: 1 or 0"
        yield gauge("memd_shared_log_away", about, bool(self._shared_trouble()))
        trouble = self._topics.disk.trouble
        kind = None if trouble is None else trouble.kind
        about = "Whether the disk of data_dir cannot take what is to be written now: 1 or 0"
        yield Gauge("memd_disk_trouble", about, {one: float(one == kind) for one in KINDS}, "kind")
        yield gauge("memd_tasks", "All tasks: connections, requests, work in the background", len(asyncio.all_tasks()))

    def _buffer_gauges(self) -> Iterator[Gauge]:
        topics = self._topics.opened()
        conversations = [conversation for topic in topics for conversation in topic.buffer.conversations()]
        buffer_bytes = sum(topic.buffer_bytes for topic in topics)
        visible = sum(one.visible_tokens() for one in conversations)
        unstored = sum(one.tokens_between(one.stored, one.wanted_end) for one in conversations)
        yield gauge("memd_conversations", "Live conversations in memory", len(conversations))
        yield gauge("memd_buffer_tokens", "Tokens of their turns that are still in the prompt", visible)
        yield gauge("memd_buffer_unstored_tokens", "Those that are not in the log yet, but in its journal", unstored)
        about = "Memory of open conversations beside texts of messages, and of chunks not in the log yet"
        yield gauge("memd_buffer_bytes", about, buffer_bytes)
        trouble = sum(topic.write_trouble is not None for topic in topics)
        yield gauge("memd_topics_in_trouble", "Topics whose last write to disk failed", trouble)

    def _log_gauges(self) -> Iterator[Gauge]:
        logs = [topic.log.stats() for topic in self._topics.opened()]
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
        yield gauge("memd_memory_bytes_max", "store.memory_bytes_max", self._memory_bytes_max)
        about = "Memory of caches of parsed messages, token counts, chunks and their words; bounded"
        yield gauge("memd_cache_bytes", about, self._cache_bytes())


def queued_in(executor: ThreadPoolExecutor) -> Callable[[], int]:
    """How many calls wait in an executor, when asked."""
    return lambda: executor._work_queue.qsize()  # it does not say so otherwise


async def exposition(metrics: Metrics, gauges: Gauges, upstream: UpstreamPool, accept: str) -> tuple[bytes, str]:
    """See `telemetry.metrics.encode`; first asks the upstream whether it is there, unless that was asked lately."""
    await upstream.refresh(wait=True)
    await asyncio.to_thread(importlib.import_module, "prometheus_client")  # the first time, 30 ms
    return encode(metrics, gauges.read(), accept)
