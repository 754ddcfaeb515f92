"""Live events for subscribers: turns, stored chunks, corrections.

Rule: publishing never waits. A slow subscriber loses its oldest events. If there are too many subscribers, the
principal with the most loses its oldest one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memd.entries import ChunkState
from memd.principals import surplus

QUEUED_EVENTS_MAX = 256
"""Limit on events queued for one subscriber."""
SUBSCRIBERS_MAX = 256
"""Limit for all people together: each takes a connection, and some time per event."""


def authors_member(entries: Iterable[ChunkState]) -> dict[str, list[str]]:
    """Return an event's member with the principals who wrote these entries; empty if it was only the owner."""
    names = sorted({entry.written_by for entry in entries} - {""})
    return {"authors": names} if names else {}


class Events:
    """Distributes events to subscribers; used on the event loop only.

    `turn`: a receipt without its block; `stored`: {topic_id, chunks}; `corrected`: {topic_id, canonical_ids}; `source`:
    {path, topic_id} after a scan. `stored` and `corrected` have `authors` if others than the owner wrote.
    """

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[tuple[str, Any]], str] = {}
        self._ended = False

    @property
    def has_listeners(self) -> bool:
        """True if anybody is subscribed."""
        return bool(self._queues)

    def publish(self, event: str, value: Any) -> None:
        """Queue an event for every subscriber."""
        for queue in self._queues:
            put(queue, event, value)

    @contextmanager
    def subscription(self, author: str = "") -> Iterator[asyncio.Queue[tuple[str, Any]]]:
        """Subscribe while the block runs; the queue has (event, value).

        A subscriber that must leave gets the event `end`, with a reason if it makes room for others. `author`: the
        principal who subscribes.
        """
        queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(QUEUED_EVENTS_MAX)
        self._queues[queue] = author
        if self._ended:
            put(queue, "end", None)
        queues = list(self._queues)
        for leaving in surplus(((author, 1) for author in self._queues.values()), SUBSCRIBERS_MAX):
            left = queues[leaving.place]
            del self._queues[left]
            put(left, "end", {"reason": leaving.why(SUBSCRIBERS_MAX, "streams of events")})
        try:
            yield queue
        finally:
            self._queues.pop(queue, None)

    def end(self) -> None:
        """End all subscriptions, because the daemon ends."""
        self._ended = True
        self.publish("end", None)


def put(queue: asyncio.Queue[tuple[str, Any]], event: str, value: Any) -> None:
    """Queue an event for one subscriber."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait((event, value))
