"""A daemon of a cluster whose disk is in trouble stands aside: daemons that have room have its topics meanwhile.

Rule: it does so only while another daemon answers whose disk has room; else it keeps what it has, and takes what it is
asked for, as a daemon alone does. So nothing goes to and fro where all disks are full, and no topic is let go twice in
some minutes, whatever the disks do. What was acknowledged is in the database and the bucket; the rest is in the
agents' histories.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Protocol

from memd.clock import steady_now
from memd.errors import TopicHeld
from memd.store.disk_trouble import DiskTrouble

log = logging.getLogger("memd")

AGAIN_SECONDS = 300.0


class Neighbours(Protocol):
    """The other daemons of a cluster."""

    def tell(self, trouble: str) -> None:
        """Tell them that this one's disk is in trouble; empty: that it has room."""

    async def with_room(self) -> list[str]:
        """The URLs of those that answer, and whose disks have room; empty also where nobody can say."""

    def holder(self, topic_id: str) -> str | None:
        """The URL of the one that has a topic; None: none has it. Called in any thread; raises StoreError."""


class StandingAside:
    """See the module."""

    def __init__(self, neighbours: Neighbours, now: Callable[[], float] = steady_now) -> None:
        self._neighbours = neighbours
        self._now = now
        self._told = ""
        self._others: list[str] = []
        self._let_go_at: dict[str, float] = {}

    @property
    def is_aside(self) -> bool:
        """Whether others have the topics now."""
        return bool(self._others)

    async def look(self, trouble: DiskTrouble | None) -> None:
        """Tell the others of the disk, and see who could have the topics while it is in trouble."""
        if (told := "" if trouble is None else str(trouble)) != self._told:
            self._neighbours.tell(told)
            self._told = told
        was_aside = self.is_aside
        self._others = [] if trouble is None else await self._neighbours.with_room()
        if self._others and not was_aside:
            log.warning("others have the topics of this daemon for now", extra={"daemons": self._others})
        elif was_aside and not self._others:
            said = "its disk has room again" if trouble is None else "no other one has room"
            log.info(f"this daemon takes topics again: {said}")

    def check(self, topic_id: str) -> None:
        """Raise TopicHeld for a topic that is not open here, if another daemon is to have it, or has it.

        Raises:
            StoreError: nobody can say who has it.
        """
        if others := self._others:
            url = self._neighbours.holder(topic_id) or others[zlib.crc32(topic_id.encode()) % len(others)]
            raise TopicHeld(topic_id, url)

    def may_let_go(self, topic_id: str) -> bool:
        """Whether a topic that is open here is to be let go."""
        return self.is_aside and self._now() - self._let_go_at.get(topic_id, float("-inf")) >= AGAIN_SECONDS

    def note_let_go(self, topic_id: str) -> None:
        """Note that it was."""
        now = self._let_go_at[topic_id] = self._now()
        self._let_go_at = {name: at for name, at in self._let_go_at.items() if now - at < AGAIN_SECONDS}
