"""What became of the corrections of the latest requests, for clients that send a request again.

Rule: the corrections of one request are applied once, to their end, whoever leaves meanwhile; the same request again
has the same outcome. Of requests from before a restart nothing is known here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable

from memd.errors import MemdError
from memd.telemetry.tasks import Tasks

REQUESTS_MAX = 1024

Failed = tuple[str, ...]
"""The ids that could not be corrected."""


class Outcomes:
    """By request; of the event loop's thread only."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._of: OrderedDict[Hashable, asyncio.Task[Failed | MemdError] | None] = OrderedDict()

    def expect(self, request: Hashable) -> None:
        """A request with corrections has arrived for the first time: nothing of it is applied yet."""
        self._of[request] = None
        self._of.move_to_end(request)
        if len(self._of) > REQUESTS_MAX:
            self._of.popitem(last=False)

    def expects(self, request: Hashable) -> bool:
        """Whether the request is one of the latest."""
        return request in self._of

    async def of(self, request: Hashable, apply: Callable[[], Coroutine[None, None, Failed]]) -> Failed:
        """What `apply` gave when it was first called for the request, or gives now.

        Raises:
            MemdError: nothing was applied; the same request again tries anew.
        """
        task = self._of.get(request)
        if task is None:
            task = self._of[request] = self._tasks.spawn(_told(apply()), "correct")
        outcome = await asyncio.shield(task)
        if isinstance(outcome, MemdError):
            self.expect(request)
            raise outcome
        return outcome


async def _told(applied: Coroutine[None, None, Failed]) -> Failed | MemdError:
    try:
        return await applied
    except MemdError as error:
        return error  # who waits for it tells of it
