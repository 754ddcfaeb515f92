"""The threads in which the topics of a cluster are opened and written.

Rule: what is done in one topic is done in its order, one after the other. A topic that waits for the database or the
bucket holds up no other one, as long as there is a thread left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

LANES_AT_ONCE = 16
"""Topics in which something is done at the same moment."""


class TopicLane(Executor):
    """Does the work of one topic, in the order in which it was given."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_running = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """See Executor."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, lambda: work(*args, **named)))
            if not self._is_running:
                self._pool.submit(self._run)
                self._is_running = True
        return future

    def _run(self) -> None:
        future, work = self._waiting[0]
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del future, work
        with self._lock:
            self._waiting.popleft()
            if self._waiting:
                self._pool.submit(self._run)  # behind the work of others
            self._is_running = bool(self._waiting)


class TopicLanes:
    """The lane of each topic."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(LANES_AT_ONCE, "memd-topic")
        self._lanes: WeakValueDictionary[str, TopicLane] = WeakValueDictionary()
        """Those that somebody has, or that have something to do."""

    def of(self, topic_id: str) -> TopicLane:
        """The lane of a topic. On the event loop."""
        return self._lanes.setdefault(topic_id, TopicLane(self._pool))

    @property
    def waiting(self) -> int:
        """How much work waits for a thread."""
        return self._pool._work_queue.qsize()  # it does not say so otherwise

    def close(self) -> None:
        """Wait until all is done."""
        self._pool.shutdown(wait=True)
