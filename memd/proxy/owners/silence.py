"""Daemons that say nothing any more: whoever waits for one is told when its topic can be had.

Rule: silence proves nothing, for a model may think for minutes. A topic is taken when the shelf grants it, because its
lease is over; a daemon that keeps its leases and answers nobody is given up, and its topics stay its own. Who was given
up is waited for by nobody any more until it answers again, which whoever asks for it has looked after in the
background.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from memd.errors import StoreError, TopicHeld
from memd.ingest.topics import Topics
from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")

LOOKS_A_LEASE = 2
LOOKS_MAX = 4
"""A daemon that does not answer so often in a row, not even whether it is there, cannot be reached from here."""
LOOKS_UNGRANTED_MAX = 2
"""The same where the shelf does not say either who has the topic: nobody will hear of it soon."""


class Waiting:
    """A request that another daemon was given and that has not ended."""

    def __init__(self, held: TopicHeld, patience: asyncio.Timeout) -> None:
        self.held = held
        self.answer: aiohttp.ClientResponse | None = None
        self.is_hopeless = False
        """The daemon was given up, and its topic cannot be had."""
        self.timer: asyncio.TimerHandle
        """Of the next look."""
        self._patience = patience
        self._heard = 0

    def has_heard(self) -> bool:
        """Whether anything came since this was asked last."""
        connection = None if self.answer is None else self.answer.connection
        heard, self._heard = self._heard, getattr(connection and connection.protocol, "received_bytes", 0)
        return self._heard != heard

    def cut(self) -> None:
        """Wait no longer."""
        self._patience.reschedule(asyncio.get_running_loop().time())


class SilenceWatch:
    """Watches over the requests that wait. Belongs to the event loop."""

    def __init__(
        self,
        topics: Topics,
        lease_seconds: float,
        is_there: Callable[[str, float], Coroutine[Any, Any, bool]],
        tasks: Tasks,
    ) -> None:
        """`is_there`: whether the daemon at a URL answers anything within so many seconds."""
        self._topics = topics
        self._look_seconds = lease_seconds / LOOKS_A_LEASE
        self._is_there = is_there
        self._tasks = tasks
        self._waiting: dict[str, set[Waiting]] = {}
        self._looking: set[str] = set()
        self._unheard: dict[str, int] = {}
        """By topic, looks in a row at which its daemon did not answer."""
        self._given_up: set[str] = set()
        """URLs of daemons that cannot be reached from here."""
        self._asked_again: set[str] = set()

    def give_up(self, url: str) -> None:
        """Let nobody wait for a daemon any more until it answers."""
        self._given_up.add(url)

    def is_given_up(self, url: str) -> bool:
        """Whether a daemon cannot be reached; then it is looked in the background whether it can by now."""
        if url in self._given_up and url not in self._asked_again:
            self._asked_again.add(url)
            self._tasks.spawn(self._ask_again(url), "look for a daemon")
        return url in self._given_up

    async def _ask_again(self, url: str) -> None:
        try:
            if await self._is_there(url, self._look_seconds):
                self._given_up.discard(url)
        finally:
            self._asked_again.discard(url)

    @contextmanager
    def over(self, waiting: Waiting) -> Iterator[None]:
        """Cut the patience of a request, while the block runs, when its topic can be had or its daemon is given up."""
        loop, topic_id = asyncio.get_running_loop(), waiting.held.topic_id
        beside = self._waiting.setdefault(topic_id, set())
        beside.add(waiting)

        def look() -> None:
            waiting.timer = loop.call_later(self._look_seconds, look)
            if waiting.has_heard():
                self._unheard.pop(topic_id, None)
            elif topic_id not in self._looking:
                self._looking.add(topic_id)
                self._tasks.spawn(self._look(waiting.held), "look after an owner")

        waiting.timer = loop.call_later(self._look_seconds, look)
        try:
            yield
        finally:
            waiting.timer.cancel()
            beside.discard(waiting)
            if not beside:
                self._waiting.pop(topic_id, None)
                self._unheard.pop(topic_id, None)

    async def _look(self, held: TopicHeld) -> None:
        """See whether a topic can be had by now, and at the same time whether its daemon is there."""
        asking = self._tasks.spawn(self._is_there(held.url, self._look_seconds), "look for a daemon")
        try:
            await self._topics.get(held.topic_id)
            ends, is_hopeless = True, False
        except StoreError as error:
            ends = isinstance(error, TopicHeld) and error.url != held.url
            looks_max = LOOKS_MAX if isinstance(error, TopicHeld) else LOOKS_UNGRANTED_MAX
            is_hopeless = not ends and self._has_no_hope(held, await asking, looks_max)
        finally:
            asking.cancel()
            self._looking.discard(held.topic_id)
        if not ends and not is_hopeless:
            return
        for waiting in tuple(self._waiting.get(held.topic_id, ())):
            if waiting.held.url == held.url:
                waiting.is_hopeless = is_hopeless
                waiting.cut()

    def _has_no_hope(self, held: TopicHeld, is_there: bool, looks_max: int) -> bool:
        if is_there:
            self._unheard.pop(held.topic_id, None)
            return False
        looks = self._unheard[held.topic_id] = self._unheard.get(held.topic_id, 0) + 1
        if looks >= looks_max and held.url not in self._given_up:
            fields = {"topic": held.topic_id, "url": held.url}
            log.warning("a daemon keeps its topics and cannot be reached from here", extra=fields)
            self.give_up(held.url)
        return looks >= looks_max
