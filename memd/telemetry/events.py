"""What happens, told to whoever looks at it as it does: turns, what was stored, what was corrected.

Rule: telling never waits. A listener that does not keep up loses the oldest events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LISTENER_EVENTS_MAX = 256
"""Events that wait for a listener."""


class Events:
    """Hands events to its listeners; of the event loop's thread only.

    `turn`: a receipt without its block; `stored`: {topic_id, chunks}; `corrected`: {topic_id, canonical_ids}.
    """

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[tuple[str, Any]]] = set()
        self._ended = False

    def tell(self, event: str, value: Any) -> None:
        """Something that listeners may want to know."""
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait((event, value))

    @contextmanager
    def listening(self) -> Iterator[asyncio.Queue[tuple[str, Any]]]:
        """A queue of (event, value) from now on."""
        queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(LISTENER_EVENTS_MAX)
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    def end(self) -> None:
        """Let listeners go: the daemon ends."""
        self._ended = True
        self.tell("end", None)

    def have_ended(self) -> bool:
        """Whether listeners are to go."""
        return self._ended
