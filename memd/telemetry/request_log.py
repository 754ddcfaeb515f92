"""What is noted of a request while it is answered, and said when it ends: a line in the log, figures in the metrics.

Rule: noting decides nothing, waits for nothing and cannot fail. A `Turn` goes with its request (`turn_of`), so that
whoever has the one can note on the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from memd.telemetry.logging import Content
from memd.telemetry.metrics import Metrics
from memd.wire.capture import Usage

log = logging.getLogger("memd")

CLIENT_GONE = 499
INTERNAL = 500
MILLISECONDS = 1000.0


class Turn:
    """One request to a model, or one that passes through (`api` is empty)."""

    def __init__(self, api: str) -> None:
        self.api = api
        self.id = ""
        self.topic = ""
        self.mode = "full"
        self.status = "none"
        """As in `X-Memory-Status`."""
        self.outcome = "complete"
        self.http_status = INTERNAL
        self.injected = 0
        """Chunks that blocks put into the prompt."""
        self.injected_tokens = 0
        self.candidates: int | None = None
        """What was found for it; None if nothing was looked for."""
        self.usage: Usage | None = None
        self.spans_ms: dict[str, float] = {}
        """Milliseconds by `metrics.STEPS` and `PARTS_OF_RECALL`."""
        self._started = self._lap_began = time.perf_counter()

    def lap(self, step: str) -> None:
        """The step that began with the end of the one before is over."""
        now = time.perf_counter()
        self.spans_ms[step] = (now - self._lap_began) * MILLISECONDS
        self._lap_began = now

    def settle(self, turn_id: str, mode: str, status: str) -> None:
        """What the response's headers say."""
        self.id, self.mode, self.status = turn_id, mode, status

    def recalled(self, candidates: int | None, spans_ms: Mapping[str, float]) -> None:
        """What was found, and how long its parts took."""
        self.candidates = candidates
        self.spans_ms.update(spans_ms)

    def shown(self, chunks: int, tokens: int) -> None:
        """What blocks put into the prompt."""
        self.injected, self.injected_tokens = chunks, tokens

    def answering(self) -> None:
        """The upstream has begun to answer."""
        if "upstream" not in self.spans_ms:
            self.lap("upstream")

    def end(self) -> None:
        """The request is over."""
        if "upstream" in self.spans_ms:
            self.lap("relay")

    @property
    def total_ms(self) -> float:
        """Since it came."""
        return (time.perf_counter() - self._started) * MILLISECONDS


_TURN = web.RequestKey("turn", Turn)


def turn_of(request: web.BaseRequest) -> Turn:
    """What is noted of a request that is `observed`."""
    return request[_TURN]


@contextmanager
def observed(metrics: Metrics, request: web.BaseRequest, api: str) -> Iterator[Turn]:
    """Note what happens to a request while the block runs, and say it at the end."""
    turn = request[_TURN] = Turn(api)
    metrics.in_flight += 1
    try:
        yield turn
    except asyncio.CancelledError:
        turn.outcome, turn.http_status = "interrupted", CLIENT_GONE
        raise
    except Exception:
        turn.outcome, turn.http_status = "internal", INTERNAL
        raise
    finally:
        metrics.in_flight -= 1
        turn.end()
        _count(metrics, turn)
        if api and log.isEnabledFor(logging.INFO):
            log.info("answered", extra=_told(turn))
        elif not api and log.isEnabledFor(logging.DEBUG):
            fields = {"method": request.method, "path": Content(request.path), "http_status": turn.http_status}
            log.debug("passed through", extra={**fields, "outcome": turn.outcome, "total_ms": turn.total_ms})


def _count(metrics: Metrics, turn: Turn) -> None:
    if turn.outcome in ("unreachable", "broken_answer", "internal"):
        metrics.errors.add(turn.outcome)
    if not turn.api:
        metrics.passed.add()
        return
    status, _, reason = turn.status.partition(":")
    metrics.requests.add(turn.api, turn.mode, status)
    if reason:
        metrics.degraded.add(reason)
    for step, milliseconds in turn.spans_ms.items():
        metrics.steps.add(milliseconds / MILLISECONDS, step)
    if turn.candidates is not None:
        metrics.candidates.add(turn.candidates)
    metrics.injected_chunks.add(count=turn.injected)
    metrics.injected_tokens.add(count=turn.injected_tokens)
    if turn.usage is not None:
        metrics.prompt_tokens.add(count=turn.usage.prompt_tokens)
        metrics.cached_tokens.add(count=turn.usage.cached_tokens or 0)
        metrics.completion_tokens.add(count=turn.usage.completion_tokens or 0)


def _told(turn: Turn) -> dict[str, object]:
    """The fields of a turn's line; one that is None is not in it."""
    usage = turn.usage
    return {
        "turn": turn.id or None,
        "api": turn.api,
        "topic": turn.topic or None,
        "mode": turn.mode,
        "status": turn.status,
        "http_status": turn.http_status,
        "outcome": turn.outcome,
        "injected": turn.injected,
        "injected_tokens": turn.injected_tokens,
        "candidates": turn.candidates,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        **{f"{step}_ms": milliseconds for step, milliseconds in turn.spans_ms.items()},
        "total_ms": turn.total_ms,
    }
