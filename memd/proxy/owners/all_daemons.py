"""Questions to all daemons of a cluster, about what each knows of itself alone.

Rule: whoever is asked so answers of itself alone, and who does not answer in time is named, never waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
from aiohttp import web

from memd.errors import StoreError
from memd.proxy.owners.daemon_client import OK, DaemonClient
from memd.proxy.owners.hop import ALONE_HEADER, HopMarks
from memd.proxy.upstream.pool import NO_ANSWER
from memd.telemetry.events import Publish
from memd.telemetry.tasks import Tasks
from memd.wire.lenient_json import UNREADABLE
from memd.wire.sse import SseParser

LOOK_SECONDS = 5.0
"""Whoever follows events looks so often which other daemons there are."""
EVENT_BYTES_MAX = 1 << 20


class AllDaemons:
    """The daemons of a cluster, as this one asks them."""

    def __init__(self, client: DaemonClient, marks: HopMarks, tasks: Tasks, others: Callable[[], list[str]]) -> None:
        """`others`: the URLs of the other daemons; called in a thread."""
        self.client = client
        self.marks = marks
        self._tasks = tasks
        self._ask_for_others = others
        self._others: list[str] = []

    def is_asked_alone(self, request: web.Request) -> bool:
        """Whether another daemon asks, which asks the others too."""
        return self.marks.is_hop(request) and ALONE_HEADER in request.headers

    def is_given_up(self, url: str) -> bool:
        """Whether a daemon cannot be reached from here, as far as is known; it is looked for in the background."""
        return False

    async def others(self) -> list[str]:
        """The addresses of the others that were heard of lately; if nobody can say, as they were."""
        with suppress(StoreError):
            self._others = await self.present()
        return self._others

    async def present(self) -> list[str]:
        """The addresses of the others that were heard of lately and did not say that they end. Raises StoreError."""
        return await asyncio.to_thread(self._ask_for_others)

    async def ask_others(self, request: web.Request, target: str = "") -> tuple[list[bytes], list[str]]:
        """Ask all of them the same as this one was asked, which is a GET, or in the same name for another target.

        Returns:
            The bodies of their answers, and the addresses of those that gave none.
        """
        known = await self.others()
        urls = [url for url in known if not self.is_given_up(url)]
        bodies = await asyncio.gather(*(self.client.body_of(request, url, target) for url in urls))
        silent = [url for url in known if url not in urls]
        silent += [url for url, body in zip(urls, bodies, strict=True) if body is None]
        return [body for body in bodies if body], silent

    @asynccontextmanager
    async def followed(self, request: web.Request, publish: Publish) -> AsyncIterator[None]:
        """Publish the events of the other daemons, which `request` asks for, while the block runs."""
        if self.is_asked_alone(request):
            yield
            return
        following = self._tasks.spawn(self._follow_all(request, publish), "follow other daemons")
        try:
            yield
        finally:
            following.cancel()

    async def _follow_all(self, request: web.Request, publish: Publish) -> None:
        async with asyncio.TaskGroup() as group:
            followed: dict[str, asyncio.Task[None]] = {}
            while True:
                for url in await self.others():
                    if url not in followed or followed[url].done():
                        followed[url] = group.create_task(self._follow(request, url, publish))
                await asyncio.sleep(LOOK_SECONDS)

    async def _follow(self, request: web.Request, url: str, publish: Publish) -> None:
        parser = SseParser(EVENT_BYTES_MAX)
        with suppress(*NO_ANSWER):
            async with await self.client.send(request, url, b"", alone=True) as answer:
                while answer.status == OK and (part := await answer.content.readany()):
                    for event in (event for item in parser.feed(part) for event in item.events() if event.data):
                        with suppress(*UNREADABLE):
                            publish(event.name.decode(), msgspec.json.decode(event.data))
