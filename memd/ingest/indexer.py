"""Builds the indexes of full segments and merges them, in the background.

Rule: it runs at low priority, in threads of its own, and gives way while a request is being answered. Work that fails
is tried again later; meanwhile searches find everything, only slower.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from memd.clock import pause_before_retry
from memd.embedding.priority import GivenUp, Priority, yield_to_others
from memd.errors import StoreError
from memd.ingest.topics import Topic
from memd.settings.model import RetrievalSettings
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")

RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 60.0
"""The pause after a first failure; it is doubled after each further one in a row."""


class Indexer:
    """Seals one segment and merges one group of indexes at a time."""

    def __init__(
        self,
        tasks: Tasks,
        priority: Priority,
        settings: RetrievalSettings,
        metrics: Metrics,
    ) -> None:
        self._tasks = tasks
        self._mergers_turn = priority.for_background()
        self._recall_budget_ms = settings.recall_budget_ms
        self._sealer = background_thread("memd-seal")
        self._merger = background_thread("memd-merge")
        self._under_way: set[str] = set()
        self._failures: dict[str, int] = {}  # in a row, of each work whose last attempt failed
        self._metrics = metrics

    @property
    def under_way(self) -> int:
        """The number of tasks that run, wait for their thread or wait for their next attempt."""
        return len(self._under_way)

    def look_after(self, topic: Topic) -> None:
        """Start the work that the topic's indexes need, unless it is running."""
        for segment_id in topic.log.unsealed():
            name = f"seal {topic.id}/{segment_id}"
            self._start(name, topic, lambda number=segment_id: self._seal(topic, number))  # type: ignore[misc]  # mypy cannot infer the default's type
        if topic.log.due_merge(self._recall_budget_ms) is not None:
            self._start(f"merge {topic.id}", topic, lambda: self._merge(topic))

    def close(self) -> None:
        """End the threads. A running seal is finished; a running merge or update of words starts anew next time."""
        self._mergers_turn.end()
        self._merger.shutdown(wait=True, cancel_futures=True)
        self._sealer.shutdown(wait=True, cancel_futures=True)

    def _start(self, name: str, topic: Topic, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._under_way:
            self._under_way.add(name)
            use = ExitStack()
            use.enter_context(topic.used())
            self._tasks.spawn(self._run(name, use, work()), name)

    async def _run(self, name: str, use: ExitStack, work: Coroutine[Any, Any, None]) -> None:
        try:
            try:
                with use:
                    await work
                self._failures.pop(name, None)
            except StoreError as error:
                self._note_failure(name, error)
            except GivenUp:
                return
            if name in self._failures:  # nothing is held meanwhile: neither the topic nor what the error's frames name
                await asyncio.sleep(self._pause_seconds(name))
        finally:
            self._under_way.discard(name)

    def _note_failure(self, name: str, error: StoreError) -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        self._metrics.errors.add("index")
        fields = {"work": name, "retry_seconds": self._pause_seconds(name), "error": error}
        log.error("work on an index failed and is tried again, nothing is lost", extra=fields)

    def _pause_seconds(self, name: str) -> float:
        return pause_before_retry(self._failures[name], RETRY_SECONDS, RETRY_SECONDS_MAX)

    async def _seal(self, topic: Topic, segment_id: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._sealer, topic.log.seal, segment_id)
        self.look_after(topic)

    async def _merge(self, topic: Topic) -> None:
        while segment_ids := topic.log.due_merge(self._recall_budget_ms):
            log.info("merging indexes", extra={"topic": topic.id, "segments": len(segment_ids)})
            give_way = self._mergers_turn.give_way
            await asyncio.get_running_loop().run_in_executor(self._merger, topic.log.merge, segment_ids, give_way)


def background_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor with one thread of low priority."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=yield_to_others)
