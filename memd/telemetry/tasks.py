"""Background tasks, in one place.

Rule: no other module calls `create_task`. The event loop keeps only a weak reference, so a bare task can be
garbage-collected while it runs, and its exception is never seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from memd.telemetry.metrics import Metrics

log = logging.getLogger("memd")


class Tasks:
    """Keeps background tasks alive, logs their failures, and ends them together."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return sum(not task.done() for task in self._running)  # finished ones are removed a moment later

    @property
    def names(self) -> set[str]:
        """The names of the running tasks."""
        return {task.get_name() for task in self._running}

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` in the background; a failure is logged under `name`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, timeout_seconds: float) -> None:
        """Wait for the running tasks, then cancel the rest."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_seconds)
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", extra={"task": task.get_name()}, exc_info=error)
            self.metrics.errors.add("background")
