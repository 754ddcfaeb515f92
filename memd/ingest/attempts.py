"""When storing in a topic is tried again after it failed.

Rule: the pauses grow with each failure and end early when the embedding model, if that was the reason, works again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memd.clock import pause_before_retry
from memd.embedding.encoder import Encoder
from memd.errors import EmbeddingError, MemdError
from memd.ingest.topics import Topic
from memd.telemetry.metrics import Metrics

log = logging.getLogger("memd")

BACKOFF_SECONDS_MAX = 30.0


class Attempts:
    """The failures of all topics."""

    def __init__(self, retry_seconds: float, encoder: Encoder, metrics: Metrics, clock: Callable[[], float]) -> None:
        """`retry_seconds`: the first pause; `clock`: seconds."""
        self._retry_seconds = retry_seconds
        self._encoder = encoder
        self._metrics = metrics
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}
        self._unembedded: set[str] = set()  # topics whose last attempt failed in the embedding model

    def are_waiting(self, topic: Topic) -> bool:
        """Whether it is too early to try again; the first question that can be embedded again ends the pause, unless
        background work is paused altogether."""
        if self._encoder.priority.is_paused:
            return True
        if topic.id in self._unembedded and self._encoder.works:
            return False
        return self._clock() < self._retry_at.get(topic.id, 0.0)

    def succeeded(self, topic: Topic) -> None:
        """Note that an attempt succeeded: the next failure is the first again."""
        self._failures.pop(topic.id, None)

    def failed(self, topic: Topic, error: MemdError) -> None:
        """Note that an attempt failed, and why."""
        if isinstance(error, EmbeddingError):
            self._unembedded.add(topic.id)
        else:
            self._unembedded.discard(topic.id)
        failures = self._failures[topic.id] = self._failures.get(topic.id, 0) + 1
        pause = pause_before_retry(failures, self._retry_seconds, BACKOFF_SECONDS_MAX)
        self._retry_at[topic.id] = self._clock() + pause
        self._metrics.errors.add("store")
        fields = {"topic": topic.id, "retry_seconds": pause, "error": error}
        log.warning(f"storing failed and is tried again, {topic.risk}", extra=fields)
