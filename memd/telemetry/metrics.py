"""What memd counts, and what it is like now, as Prometheus reads it at `/memd/metrics`.

Rule: a label has the values that stand here and no others, so that nothing a client sends makes the list longer. What
can be looked up is not counted: it is read from the daemon when somebody asks. What is counted is added to plain
numbers, on the event loop only: 0.2 µs each, where the library's own histograms take 1 to 2 µs (prometheus_client 0.26,
Python 3.11) and a request has ten. A `Metrics` has a registry of its own: there may be several daemons in one process.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from memd import __version__
from memd.entries import Correction

if TYPE_CHECKING:
    from memd.proxy.parts import Daemon

APIS = ("chat", "responses", "messages")
MODES = ("full", "readonly", "off")
STATUSES = ("injected", "none", "off", "bad-memory-in", "degraded")
DEGRADED = ("embedding", "store", "disk-full", "template", "timeout")
STEPS = ("read", "receive", "correct", "room", "recall", "upstream", "relay")
"""What a request goes through, one after the other: together they are all of its time."""
PARTS_OF_RECALL = ("embed", "search", "inject")
ERRORS = ("unreachable", "broken_answer", "memory", "internal", "store", "index", "background")
CODES = ("1xx", "2xx", "3xx", "4xx", "5xx")
OTHER = "other"

REQUEST_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""From finding a conversation, which takes a tenth of a millisecond, to a long answer of a large model."""
BACKGROUND_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CANDIDATES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Count(Collector):
    """A number that only grows, for each combination of its labels' values."""

    def __init__(self, name: str, about: str, **labels: Sequence[str]) -> None:
        """`name` without `_total`; `labels` are the values that each may have."""
        self._name, self._about, self._labels = name, about, tuple(labels)
        # All from the start: a series that begins with its first event shows a rate that lacks this one.
        self._counts: dict[tuple[str, ...], float] = dict.fromkeys(product(*labels.values()), 0)

    def add(self, *values: str, count: float = 1) -> None:
        """Count; one value for each label, and one that is not among those allowed makes it `other`."""
        if values not in self._counts:
            values = (OTHER,) * len(self._labels)
        self._counts[values] = self._counts.get(values, 0) + count

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class Distribution(Collector):
    """How often which size was seen: a histogram, for each value of at most one label."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], **label: Sequence[str]) -> None:
        self._name, self._about, self._bounds, self._labels = name, about, bounds, tuple(label)
        values = next(iter(label.values())) if label else ("",)
        self._seen = {value: [0] * (len(bounds) + 1) for value in values}
        self._sums = dict.fromkeys(values, 0.0)

    def add(self, size: float, value: str = "") -> None:
        """Count one of this size; `value` is the label's, and one that is not among those allowed is left out."""
        if value in self._seen:
            self._seen[value][bisect_left(self._bounds, size)] += 1
            self._sums[value] += size

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for value, seen in self._seen.items():
            buckets = list(zip(names, map(float, accumulate(seen)), strict=True))
            family.add_metric([value] if self._labels else [], buckets, self._sums[value])
        yield family


class Metrics:
    """What one daemon has counted. To be added to on the event loop."""

    def __init__(self) -> None:
        self.requests = Count("memd_requests", "Requests to a model", api=APIS, mode=MODES, status=STATUSES)
        self.passed = Count("memd_passed_requests", "Other requests, which pass through untouched")
        self.responses = Count("memd_responses", "Answers by HTTP status", code=CODES)
        self.errors = Count("memd_errors", "What went wrong", kind=ERRORS)
        self.degraded = Count("memd_degraded", "Requests that went on without memory", reason=DEGRADED)
        self.steps = Distribution(
            "memd_phase_duration_seconds",
            "What a request's time went into; embed, search and inject are parts of recall",
            REQUEST_SECONDS,
            phase=(*STEPS, *PARTS_OF_RECALL),
        )
        self.candidates = Distribution("memd_recall_candidates", "Chunks that a recall found worth showing", CANDIDATES)
        self.injected_chunks = Count("memd_injected_chunks", "Chunks shown in prompts")
        self.injected_tokens = Count("memd_injected_tokens", "Tokens of memory blocks in prompts, by memd's count")
        self.corrections = Count("memd_corrections", "Chunks named in corrections", outcome=("applied", "failed"))
        self.prompt_tokens = Count("memd_upstream_prompt_tokens", "Prompt tokens, as the upstream tells them")
        self.cached_tokens = Count("memd_upstream_cached_tokens", "Those that it did not have to read again")
        self.completion_tokens = Count("memd_upstream_completion_tokens", "Tokens of its answers")
        self.compactions = Distribution(
            "memd_compaction_duration_seconds",
            "Moving the oldest turns into the log; a request waits for those of the trigger hard",
            BACKGROUND_SECONDS,
            trigger=("soft", "hard"),
        )
        self.ingestions = Distribution(
            "memd_ingestion_duration_seconds", "Chunking, embedding and appending messages", BACKGROUND_SECONDS
        )
        self.ingested_tokens = Count("memd_ingested_tokens", "Tokens of the messages that became durable in the log")
        self.ingested_chunks = Count("memd_ingested_chunks", "Chunks that were made of them")
        self.in_flight = 0
        """Requests that are being answered."""
        self.registry = CollectorRegistry()
        for part in list(vars(self).values()):
            if isinstance(part, Count | Distribution):
                self.registry.register(part)
        ProcessCollector(registry=self.registry)

    def corrected(self, corrections: Sequence[Correction], failed: int) -> None:
        """Count the chunks that one request's corrections name, of which so many could not be corrected."""
        named = sum(len(set(correction.chunk_ids)) for correction in corrections)
        self.corrections.add("applied", count=max(0, named - failed))
        self.corrections.add("failed", count=failed)

    def watch(self, daemon: Daemon) -> None:
        """Show what the daemon is like when somebody asks; to be called once."""
        self.registry.register(_Present(daemon))


async def exposed(daemon: Daemon, accept: str) -> tuple[bytes, str]:
    """Everything in the text format that an `Accept` header asks for, and its content type.

    Waits for the upstream to say whether it is there, if it was not asked lately.
    """
    await daemon.upstream.refresh(wait=True)
    encode, content_type = choose_encoder(accept)
    return encode(daemon.metrics.registry), content_type


class _Present(Collector):
    """The daemon as it is now. Read on the event loop, which owns the buffers."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def collect(self) -> Iterator[Metric]:
        yield _gauge("memd_build_info", "The version that is running", {__version__: 1.0}, "version")
        yield _gauge("memd_requests_in_flight", "Requests that are being answered", self._daemon.metrics.in_flight)
        yield from self._upstream()
        yield from self._buffers()
        yield from self._log()
        yield from self._work()

    def _upstream(self) -> Iterator[Metric]:
        facts = self._daemon.upstream.facts
        yield _gauge("memd_upstream_reachable", "Whether the model server answers: 1 or 0", facts.reachable)
        yield _gauge("memd_upstream_window_tokens", "The model's window; 0 if not known", facts.window or 0)

    def _buffers(self) -> Iterator[Metric]:
        topics = self._daemon.topics.opened()
        conversations = [conversation for topic in topics for conversation in topic.buffer.conversations()]
        visible = sum(one.tokens_between(one.left_out, len(one)) for one in conversations)
        unstored = sum(one.tokens_between(one.stored, len(one)) for one in conversations if not one.abandoned)
        yield _gauge("memd_conversations", "Live conversations in memory", len(conversations))
        yield _gauge("memd_buffer_tokens", "Tokens of their turns that are still in the prompt", visible)
        yield _gauge("memd_buffer_unstored_tokens", "Those that are not in the log yet, but in its journal", unstored)
        trouble = sum(topic.trouble is not None for topic in topics)
        yield _gauge("memd_topics_in_trouble", "Topics whose last write to disk failed", trouble)

    def _log(self) -> Iterator[Metric]:
        topics = [topic.log.stats() for topic in self._daemon.topics.opened()]
        yield _gauge("memd_topics_open", "Topics in memory", len(topics))
        yield _gauge("memd_chunks", "Chunks of open topics that can be recalled", sum(one.chunks for one in topics))
        yield _gauge("memd_entries", "Entries of the log of open topics", sum(one.entries for one in topics))
        yield _gauge("memd_segments", "Files of the log of open topics", sum(one.segments for one in topics))
        yield _gauge(
            "memd_segments_unsealed",
            "Full files of open topics that have no index yet",
            sum(one.unsealed for one in topics),
        )
        yield _gauge("memd_indexes", "Vector indexes of open topics", sum(one.indexes for one in topics))
        yield _gauge("memd_indexes_loaded", "Those indexes that are loaded", sum(one.indexes_loaded for one in topics))
        slowest = max((one.fan_out_ms or 0.0 for one in topics), default=0.0) / 1000
        yield _gauge("memd_fan_out_seconds", "Asking all indexes of a topic, in the slowest one", slowest)
        yield _gauge("memd_memory_bytes", "What is loaded of the log", sum(one.memory_bytes for one in topics))
        allowed = self._daemon.config.store.memory_bytes_max
        yield _gauge("memd_memory_bytes_max", "store.memory_bytes_max", allowed)
        told = "Parsed messages and words of chunks that are kept; bounded"
        yield _gauge("memd_cache_bytes", told, self._daemon.cache_bytes)

    def _work(self) -> Iterator[Metric]:
        daemon = self._daemon
        waiting = {
            "ingestion": _waiting(daemon.encoder.ingestion),
            "writer": _waiting(daemon.writer),
            "indexer": daemon.indexer.under_way,
        }
        yield _gauge("memd_queue_depth", "Work that waits; of the indexer also what is at hand", waiting, "queue")
        yield _gauge("memd_background_tasks", "Tasks that nobody waits for", len(daemon.tasks))
        yield _gauge("memd_tasks", "All tasks: connections, requests, work in the background", len(asyncio.all_tasks()))


def _gauge(name: str, about: str, value: float | Mapping[str, float], label: str | None = None) -> GaugeMetricFamily:
    """One number, or one for each value of a label."""
    family = GaugeMetricFamily(name, about, labels=[] if label is None else [label])
    for labelled, number in value.items() if isinstance(value, Mapping) else [("", value)]:
        family.add_metric([] if label is None else [labelled], float(number))
    return family


def _waiting(thread: ThreadPoolExecutor) -> int:
    return thread._work_queue.qsize()  # an executor does not say otherwise how much it has to do
