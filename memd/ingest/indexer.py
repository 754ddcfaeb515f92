"""Seals full segments that could not be sealed when they were filled, and merges indexes, in the background.

Rule: it runs in its own low-priority thread, and pauses while a request is being answered. Failed work is retried;
meanwhile searches find everything, only slower.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from memd.clock import Retries
from memd.embedding.priority import GivenUp, Priority, yield_to_others
from memd.errors import StoreError
from memd.ingest.topics import Topic
from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")

RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 60.0
"""Back-off after a first failure and its maximum; it doubles with each further failure in a row."""


class Jobs:
    """Named background jobs. While one runs, it is not started again, and its topic stays open."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.names: set[str] = set()
        """Names of the running jobs."""

    def begin(self, name: str, topic: Topic, work: Callable[[], Awaitable[None]]) -> None:
        """Start a job, unless it is running."""
        if name in self.names:
            return
        self.names.add(name)
        ending = ExitStack()
        ending.callback(self.names.discard, name)
        ending.enter_context(topic.held())

        async def done() -> None:
            with ending:
                await work()

        self._tasks.spawn(done(), name)


class Indexer:
    """Seals segments, and merges one group of indexes at a time."""

    def __init__(self, tasks: Tasks, priority: Priority) -> None:
        self._jobs = Jobs(tasks)
        self._mergers_turn = priority.for_background()
        self._merger = background_thread("memd-merge")
        self._retries = Retries(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._metrics = tasks.metrics

    @property
    def under_way(self) -> int:
        """Number of jobs that run, are queued or wait for a retry."""
        return len(self._jobs.names | self._retries.waiting)

    def look_after(self, topic: Topic) -> None:
        """Start the work that the topic's indexes need, unless it is running, or it is too early for a retry."""
        works = {"seal": (self._seal, topic.log.unsealed()), "merge": (self._merge, topic.log.due_merge())}
        for kind, (work, is_due) in works.items():
            name = f"{kind} {topic.id}"
            if is_due and not self._retries.is_early(name):
                self._jobs.begin(name, topic, partial(self._tried, name, partial(work, topic)))

    def stop(self) -> None:
        """Stop a running merge at its next step, without waiting; it starts anew next time."""
        self._mergers_turn.end()

    def close(self) -> None:
        """End the thread. A running merge starts anew next time."""
        self.stop()
        self._merger.shutdown(wait=True, cancel_futures=True)

    async def _tried(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
            self._retries.succeeded(name)
        except StoreError as error:
            self._metrics.errors.add("index")
            fields = {"work": name, "retry_seconds": self._retries.failed(name), "error": error}
            log.error("work on an index failed and is tried again, nothing is lost", extra=fields)
        except GivenUp:
            pass

    async def _seal(self, topic: Topic) -> None:
        await asyncio.get_running_loop().run_in_executor(self._merger, topic.log.seal_full)

    async def _merge(self, topic: Topic) -> None:
        while segment_ids := topic.log.due_merge():
            log.info("merging indexes", extra={"topic": topic.id, "segments": len(segment_ids)})
            give_way = self._mergers_turn.give_way
            await asyncio.get_running_loop().run_in_executor(self._merger, topic.log.merge, segment_ids, give_way)


def background_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor with one thread of low priority."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=yield_to_others)
