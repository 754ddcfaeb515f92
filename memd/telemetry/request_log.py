"""One line in the log and figures in the metrics for every request, written when it ends.

Rule: noting something decides nothing, waits for nothing and cannot fail. A `RequestRecord` belongs to its request
(`record_of`), so whoever has the request can note in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from memd.telemetry.logging import Content
from memd.telemetry.metrics import Metrics
from memd.wire.reply import Usage

log = logging.getLogger("memd")

CLIENT_GONE = 499
INTERNAL = 500
MILLISECONDS = 1000.0
ASKED_CHARACTERS = 200
"""Of a question that are told; a terminal shows what fits."""


class RequestRecord:
    """The facts of one request to a model, or of one that passes through (`api` is empty)."""

    def __init__(self, api: str) -> None:
        self.api = api
        self.id = uuid.uuid4().hex[:16] if api else ""
        """Of the turn, as in `X-Memory-Turn`."""
        self.topic = ""
        self.mode = "full"
        self.status = "none"
        """As in `X-Memory-Status`."""
        self.outcome = "complete"
        self.http_status = INTERNAL
        self.server = ""
        """The model server that answered, where there are several."""
        self.injected = 0
        """Chunks in the prompt's memory blocks."""
        self.injected_tokens = 0
        self.left_out = 0
        """Messages of the conversation that are not in the prompt."""
        self.replaced = 0
        """Results that a line in the prompt stands for."""
        self.asked = ""
        """The question of the owner; empty where others asked."""
        self.is_kept = False
        """Whether it is remembered."""
        self.candidates: int | None = None
        """Chunks that recall found; None if there was no recall."""
        self.usage: Usage | None = None
        self.spans_ms: dict[str, float] = {}
        """Milliseconds by `metrics.STEPS` and `PARTS_OF_RECALL`."""
        self._started = self._step_started = time.perf_counter()

    def end_step(self, step: str) -> None:
        """Note the time since the last step ended as that of `step`."""
        now = time.perf_counter()
        self.spans_ms[step] = (now - self._step_started) * MILLISECONDS
        self._step_started = now

    def note_status(self, mode: str, status: str) -> None:
        """Note the status that the response's headers have."""
        self.mode, self.status = mode, status

    def note_answer_start(self) -> None:
        """Note that the upstream has begun to answer; every call but the first does nothing."""
        if "upstream" not in self.spans_ms:
            self.end_step("upstream")

    def finish(self) -> None:
        """End the last step."""
        if "upstream" in self.spans_ms:
            self.end_step("relay")

    @property
    def total_ms(self) -> float:
        """Milliseconds since the request came."""
        return (time.perf_counter() - self._started) * MILLISECONDS


_RECORD = web.RequestKey("record", RequestRecord)


def record_of(request: web.BaseRequest) -> RequestRecord:
    """The record of a request that is being `recorded`."""
    return request[_RECORD]


@contextmanager
def recorded(metrics: Metrics, request: web.BaseRequest, api: str) -> Iterator[RequestRecord]:
    """Keep a record of a request while the block runs; count and log it at the end."""
    record = request[_RECORD] = RequestRecord(api)
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
        record.finish()
        _count(metrics, record)
        _log(request, record)


def _log(request: web.BaseRequest, record: RequestRecord) -> None:
    if record.api and log.isEnabledFor(logging.INFO):
        log.info("answered", extra=_log_fields(record))
    elif not record.api and log.isEnabledFor(logging.DEBUG):
        fields = {"method": request.method, "path": Content(request.path), "http_status": record.http_status}
        log.debug("passed through", extra={**fields, "outcome": record.outcome, "total_ms": record.total_ms})


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
    """The fields of the log line; one that is None is left out of it."""
    usage = record.usage
    return {
        "turn": record.id or None,
        "api": record.api,
        "topic": record.topic or None,
        "mode": record.mode,
        "status": record.status,
        "http_status": record.http_status,
        "server": record.server or None,
        "outcome": record.outcome,
        "asked": Content(record.asked[:ASKED_CHARACTERS]) if record.asked else None,
        "stored": record.is_kept if record.api else None,
        "injected": record.injected,
        "injected_tokens": record.injected_tokens,
        "left_out": record.left_out,
        "replaced": record.replaced,
        "candidates": record.candidates,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        **{f"{step}_ms": milliseconds for step, milliseconds in record.spans_ms.items()},
        "total_ms": record.total_ms,
    }
