"""Counters, histograms and gauges for Prometheus at `/memd/metrics`, and the log line of each request.

Rule: labels have only the values listed here or in the registry of APIs, so no client can create new series. Only
events are counted; states are read on demand (`daemon/app.py`). Counting adds to plain numbers, on the event loop only.
That takes 0.2 µs each; the library's own histograms take 1 to 2 µs (prometheus_client 0.26, Python 3.11), and a request
has ten. Recording never decides, waits or fails. A `RequestRecord` belongs to its request (`record_of`), so any code
that has the request can use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import msgspec
from aiohttp import web

from memd.entries import Correction
from memd.telemetry.logging import Content
from memd.wire import registry
from memd.wire.reply import Usage

MODES = ("full", "readonly", "off")
STATUSES = ("injected", "none", "off", "token-required", "bad-memory-in", "bad-topic", "bad-mode", "degraded")
DEGRADED = ("embedding", "store", "disk-full", "template", "timeout", "unreadable")
STEPS = ("read", "receive", "correct", "room", "recall", "upstream", "relay")
"""Steps of a request in order; together they take its whole time."""
PARTS_OF_RECALL = ("embed", "search", "inject")
ERRORS = ("unreachable", "broken_answer", "memory", "internal", "store", "index", "background")
CODES = ("1xx", "2xx", "3xx", "4xx", "5xx")
OTHER = "other"

REQUEST_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""From matching a conversation, a tenth of a millisecond, to a long answer of a large model."""
BACKGROUND_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CANDIDATES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Count:
    """A counter for each combination of label values."""

    def __init__(self, name: str, about: str, **labels: Sequence[str]) -> None:
        """`name` without `_total`; `labels`: the allowed values of each."""
        self.name, self.about, self.labels = name, about, tuple(labels)
        # All series exist from the start: the rate of one that begins with its first event would lack that event.
        self.counts: dict[tuple[str, ...], float] = dict.fromkeys(product(*labels.values()), 0)

    def add(self, *values: str, count: float = 1) -> None:
        """Add to a counter, given one value per label; if a value is not allowed, all become `other`."""
        if values not in self.counts:
            values = (OTHER,) * len(self.labels)
        self.counts[values] = self.counts.get(values, 0) + count

    def family(self) -> Any:
        """Return it in the library's type."""
        from prometheus_client.metrics_core import CounterMetricFamily

        family = CounterMetricFamily(self.name, self.about, labels=self.labels)
        for values, number in self.counts.items():
            family.add_metric(values, number)
        return family


class Distribution:
    """Histograms, one per value of at most one label."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], **label: Sequence[str]) -> None:
        self.name, self.about, self.bounds, self.labels = name, about, bounds, tuple(label)
        values = next(iter(label.values())) if label else ("",)
        self.seen = {value: [0] * (len(bounds) + 1) for value in values}
        self.sums = dict.fromkeys(values, 0.0)

    def add(self, size: float, value: str = "") -> None:
        """Add one observation; `value` is the label's, ignored if not allowed."""
        if value in self.seen:
            self.seen[value][bisect_left(self.bounds, size)] += 1
            self.sums[value] += size

    def family(self) -> Any:
        """Return it in the library's type."""
        from prometheus_client.metrics_core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        family = HistogramMetricFamily(self.name, self.about, labels=self.labels)
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        for value, seen in self.seen.items():
            buckets = list(zip(names, map(float, accumulate(seen)), strict=True))
            family.add_metric([value] if self.labels else [], buckets, self.sums[value])
        return family


class Metrics:
    """The counters and histograms of one daemon; used on the event loop."""

    def __init__(self) -> None:
        apis = [api.name for api in registry.APIS]
        self.requests = Count("memd_requests", "Requests to a model", api=apis, mode=MODES, status=STATUSES)
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
        self.count_upstreams([])
        self.upstream_moves = Count("memd_upstream_moves", "Requests whose conversation went to another model server")
        self.compactions = Distribution(
            "memd_compaction_duration_seconds",
            "Moving the oldest turns into the log; a request waits for those of the trigger hard",
            BACKGROUND_SECONDS,
            trigger=("soft", "hard"),
        )
        self.ingestions = Distribution(
            "memd_ingestion_duration_seconds", "Chunking, embedding and appending text", BACKGROUND_SECONDS
        )
        self.ingested_tokens = Count("memd_ingested_tokens", "Tokens of the text that became durable in the log")
        self.ingested_chunks = Count("memd_ingested_chunks", "Chunks that were made of them")
        self.in_flight = 0

    def count_upstreams(self, urls: Sequence[str]) -> None:
        """Create the counters for requests to each of these model servers."""
        about = "What was sent to a model server, again after another one too"
        self.upstream_requests = Count("memd_upstream_requests", about, server=urls)
        about = "Those that it did not answer, broke off, or could not take"
        self.upstream_failures = Count("memd_upstream_failures", about, server=urls)

    def count_corrections(self, corrections: Sequence[Correction], failed: int) -> None:
        """Count the chunks named in one request's corrections, of which `failed` could not be corrected."""
        named = sum(len(set(correction.chunk_ids)) for correction in corrections)
        self.corrections.add("applied", count=max(0, named - failed))
        self.corrections.add("failed", count=failed)


def gauge(name: str, about: str, number: float | Mapping[str, float], label: str = "") -> Any:
    """Return a state in the library's type: one number, or one per label value."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, about, labels=[label] if label else [])
    for value, one in number.items() if isinstance(number, Mapping) else [("", number)]:
        family.add_metric([value] if label else [], float(one))
    return family


def encode(metrics: Metrics, gauges: Iterable[Any], accept: str) -> tuple[bytes, str]:
    """Return all metrics in the text format that an `Accept` header asks for, and its content type.

    The first call imports prometheus_client, which takes a twelfth of the time of all imports.
    """
    from prometheus_client import ProcessCollector
    from prometheus_client.exposition import choose_encoder

    counted = [part.family() for part in vars(metrics).values() if isinstance(part, Count | Distribution)]
    families = [*counted, *gauges, *ProcessCollector(registry=None).collect()]
    encoder, content_type = choose_encoder(accept)
    registry: Any = SimpleNamespace(collect=lambda: families)  # not the library's: a process may have several daemons
    return encoder(registry), content_type


log = logging.getLogger("memd")

CLIENT_GONE = 499
INTERNAL = 500
MILLISECONDS = 1000.0
ASKED_CHARACTERS = 200
"""Limit on the logged part of a question; a terminal shows what fits."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """The facts of one request to a model, or of one that passes through (`api` is empty), as its log line has them."""

    turn: str = ""
    """Its id, as in `X-Memory-Turn`."""
    api: str
    topic: str = ""
    mode: str = "full"
    status: str = "none"
    """As in `X-Memory-Status`."""
    http_status: int = INTERNAL
    server: str = ""
    """The model server that answered; empty if there is only one."""
    outcome: str = "complete"
    asked: str = ""
    """The owner's question; empty for other principals."""
    stored: bool = False
    """Whether the messages are kept: in the log or in its journal."""
    injected: int = 0
    """Chunks in the prompt's memory blocks."""
    injected_tokens: int = 0
    left_out: int = 0
    """Messages of the conversation that are not in the prompt."""
    replaced: int = 0
    """Results that are shortened to a line in the prompt."""
    candidates: int | None = None
    """Chunks that recall found; None without recall."""
    usage: Usage | None = None
    spans_ms: dict[str, float] = {}
    """Milliseconds by `metrics.STEPS` and `PARTS_OF_RECALL`."""
    began: float = msgspec.field(default_factory=time.perf_counter)
    step_began: float = msgspec.field(default_factory=time.perf_counter)

    def end_step(self, step: str) -> None:
        """Record the time since the last step ended for `step`."""
        now = time.perf_counter()
        self.spans_ms[step] = (now - self.step_began) * MILLISECONDS
        self.step_began = now

    def note_answer_start(self) -> None:
        """Record that the upstream has begun to answer; further calls do nothing."""
        if "upstream" not in self.spans_ms:
            self.end_step("upstream")


_RECORD = web.RequestKey("record", RequestRecord)


def record_of(request: web.BaseRequest) -> RequestRecord:
    """Return the record of a request that is being `recorded`."""
    return request[_RECORD]


@contextmanager
def recorded(metrics: Metrics, request: web.BaseRequest, api: str) -> Iterator[RequestRecord]:
    """Keep a record of a request while the block runs; count and log it at the end."""
    record = request[_RECORD] = RequestRecord(api=api, turn=uuid.uuid4().hex[:16] if api else "")
    metrics.in_flight += 1
    try:
        yield record
    except asyncio.CancelledError:
        record.outcome, record.http_status = "interrupted", CLIENT_GONE
        raise
    except Exception:
        record.outcome, record.http_status = "internal", INTERNAL
        raise
    finally:
        metrics.in_flight -= 1
        if "upstream" in record.spans_ms:
            record.end_step("relay")
        _count(metrics, record)
        total_ms = (time.perf_counter() - record.began) * MILLISECONDS
        if record.api and log.isEnabledFor(logging.INFO):
            log.info("answered", extra={**_log_fields(record), "total_ms": total_ms})
        elif not record.api and log.isEnabledFor(logging.DEBUG):
            fields = {"method": request.method, "path": Content(request.path), "http_status": record.http_status}
            log.debug("passed through", extra={**fields, "outcome": record.outcome, "total_ms": total_ms})


def _count(metrics: Metrics, record: RequestRecord) -> None:
    if record.outcome in ("unreachable", "broken_answer", "internal"):
        metrics.errors.add(record.outcome)
    if not record.api:
        metrics.passed.add()
        return
    status, _, reason = record.status.partition(":")
    metrics.requests.add(record.api, record.mode, status)
    if reason:
        metrics.degraded.add(reason)
    for step, milliseconds in record.spans_ms.items():
        metrics.steps.add(milliseconds / MILLISECONDS, step)
    if record.candidates is not None:
        metrics.candidates.add(record.candidates)
    metrics.injected_chunks.add(count=record.injected)
    metrics.injected_tokens.add(count=record.injected_tokens)
    if record.usage is not None:
        metrics.prompt_tokens.add(count=record.usage.prompt_tokens)
        metrics.cached_tokens.add(count=record.usage.cached_tokens or 0)
        metrics.completion_tokens.add(count=record.usage.completion_tokens or 0)


def _log_fields(record: RequestRecord) -> dict[str, object]:
    """Return the fields of the log line; those that are None are omitted."""
    fields = {name: None if value == "" else value for name, value in msgspec.structs.asdict(record).items()}
    for name in ("usage", "spans_ms", "began", "step_began"):
        del fields[name]
    fields["asked"] = Content(record.asked[:ASKED_CHARACTERS]) if record.asked else None
    told = {} if record.usage is None else msgspec.structs.asdict(record.usage)
    return fields | told | {f"{step}_ms": milliseconds for step, milliseconds in record.spans_ms.items()}
