"""Erasures in a cluster: what another daemon has erased leaves this one's copies, and what it could not finish is done.

Rule: the daemon that is asked erases; one that is gone has left its erasure in the book, and another one goes on. A
daemon that was away follows when it starts, before it listens.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, runtime_checkable

from memd.errors import StoreError
from memd.ingest.erasing.eraser import Eraser
from memd.store.erasure.ledger import Erasure

log = logging.getLogger("memd")

LOOK_SECONDS = 1.0
ABANDONED_US = 60_000_000
"""An erasure of another daemon that has not ended for so long is finished by another one."""


@runtime_checkable
class HeardErasures(Protocol):
    """The book. Counterpart: memd/store/shared/books.py."""

    def catch_up(self) -> list[Erasure]:
        """Hear of what other daemons erased; return those that are done, and not followed here yet."""

    def note_followed(self) -> None:
        """Note that nothing of what was heard of is left in this daemon's copies."""

    @property
    def pending(self) -> list[Erasure]:
        """Those that are not done."""


class ErasureFollower:
    """Looks once a second."""

    def __init__(self, erasures: HeardErasures, eraser: Eraser, *, is_told: bool = False) -> None:
        """`is_told`: it has been said that the database cannot be asked."""
        self._erasures = erasures
        self._eraser = eraser
        self._is_troubled = is_told
        self._resume_at = 0

    async def tend(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Follow what is new, and finish what is left; what fails is told once, and tried again."""
        try:
            if done := await asyncio.to_thread(self._erasures.catch_up):
                for erasure in done:
                    await self._eraser.follow(erasure)
                await asyncio.to_thread(self._erasures.note_followed)
            now = self._eraser.store.now_us()
            if now >= self._resume_at and any(now - one.at > ABANDONED_US for one in self._erasures.pending):
                self._resume_at = now + ABANDONED_US
                await self._eraser.resume(before=now - ABANDONED_US)
            self._is_troubled = False
        except StoreError as error:
            if not self._is_troubled:  # its words change from one second to the next
                log.warning("erasures of other daemons are followed later", extra={"error": error})
            self._is_troubled = True
