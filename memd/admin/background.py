"""The routes that pause and resume background work, for measurements.

Rule: a pause loses nothing: what was said is in the journal and is found, by its words. It ends when somebody resumes,
or with the daemon.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from memd.admin.routing import get, post
from memd.embedding.priority import Priority


class BackgroundBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /memd/background`."""

    paused: bool


class BackgroundState(msgspec.Struct, frozen=True):
    """Whether background work may begin."""

    paused: bool


class BackgroundRoutes:
    """Storing, building and merging indexes, looking at sources."""

    def __init__(self, priority: Priority, resumed: Callable[[], None]) -> None:
        """`resumed`: begins what does not begin by itself within a second."""
        self._priority = priority
        self._resumed = resumed

    @get("/memd/background", "admin")
    async def background(self) -> BackgroundState:
        """Whether background work is paused."""
        return BackgroundState(self._priority.is_paused)

    @post("/memd/background", "admin")
    async def set_background(self, body: BackgroundBody) -> BackgroundState:
        """Pause or resume background work; what is under way goes on to its end."""
        was_paused, self._priority.is_paused = self._priority.is_paused, body.paused
        if was_paused and not body.paused:
            self._resumed()
        return BackgroundState(body.paused)
