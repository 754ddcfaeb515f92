"""Retention: erases by itself what is older than its owner wants to keep.

Rule: nothing without a setting, and nothing in doubt. The clock of a machine can be wrong: where a run would take more
than half of a topic, and some of it should have gone long ago, it waits until a person has confirmed it once. A topic
is looked at once a day, so that its files are rewritten once a day at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec

from memd.errors import StoreError
from memd.ingest.erasing import Eraser, ErasureDone, PlannedErasure, plan_by_age, visible_digests
from memd.store.shared.books import SharedTimes

log = logging.getLogger("memd")

FIRST_SECONDS, EVERY_SECONDS = 300.0, 3_600.0
DAY_US = 86_400_000_000
LATE_US = 2 * DAY_US
"""A chunk that should have gone longer ago than this was not waiting for its day: retention is new here, memd did not
run, or the clock is wrong."""
SHARE_MAX = 0.5
BY = "memd/retention"
"""Who did it, for the ledger and the audit, where nobody has asked for it."""
Noted = Callable[[str, int], AbstractAsyncContextManager[None]]
"""Takes a topic and a number of chunks, and lets the audit have the lines around their erasure."""


def days_kept(retention: Mapping[str, int], topic_id: str) -> int:
    """For how many days the topic's text is kept; 0: for ever.

    A topic's own name goes before patterns, and of those (`team-*`) the longest that fits.
    """
    fitting = [
        name for name in retention if name == topic_id or (name.endswith("*") and topic_id.startswith(name[:-1]))
    ]
    best = max(fitting, key=lambda name: (name == topic_id, len(name)), default=None)
    return 0 if best is None else retention[best]


class DuePart(msgspec.Struct, frozen=True):
    """All that is too old in one topic."""

    plan: PlannedErasure
    uuids: frozenset[bytes]
    is_doubtful: bool
    """Whether a person has to confirm it."""


class Retention:
    """Looks at the topics, and has the eraser do it."""

    def __init__(self, retention: Mapping[str, int], eraser: Eraser, noted: Noted) -> None:
        """`noted`: for what nobody has asked for; the route notes the rest."""
        self.eraser = eraser
        self._noted = noted
        self._retention = retention
        self._store, self._topics = eraser.store, eraser.topics
        self.looked_at: dict[str, int] | SharedTimes = {}
        """By topic: the time up to which nothing is left to do, or nothing without a person. In a cluster all daemons
        have the same, so that a topic which nobody has open is opened by one of them a day."""

    async def plans(self) -> list[PlannedErasure]:
        """Return what is too old now, in each topic that has something."""
        found = []
        for topic_id in await asyncio.to_thread(self._store.topic_ids) if self._retention else ():
            before = self._before(topic_id)
            if before is not None and (due := await self._due(topic_id, before)) is not None:
                found.append(due.plan)
        return found

    async def run(self, by: str, *, confirmed: bool) -> list[ErasureDone]:
        """Erase what is too old; a topic that fails does not stop the others.

        Args:
            by: who wants it.
            confirmed: also what is doubtful.

        Raises:
            StoreError: it is not finished, in one topic at least.
        """
        done, problems = [], list[StoreError]()
        for topic_id in await asyncio.to_thread(self._store.topic_ids):
            before = self._before(topic_id)
            if before is None:
                continue
            try:
                if confirmed or await asyncio.to_thread(self.looked_at.get, topic_id, 0) < before:
                    done += await self._erase(topic_id, before, by, confirmed=confirmed)
                    await asyncio.to_thread(self.looked_at.__setitem__, topic_id, before)
            except StoreError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        return done

    async def _erase(self, topic_id: str, before: int, by: str, *, confirmed: bool) -> list[ErasureDone]:
        due = await self._due(topic_id, before)
        if due is None:
            return []
        if due.is_doubtful and not confirmed:
            fields = {"topic": topic_id, "chunks": due.plan.chunks, "oldest": due.plan.oldest}
            log.warning(
                "retention would erase more than half of a topic, long overdue: look at the clock and at "
                "`memd erase --retention --dry-run`, then run `memd erase --retention`",
                extra=fields,
            )
            return []
        async with self._noted(topic_id, due.plan.chunks) if by == BY else nullcontext():
            return [await self.eraser.erase_chunks(topic_id, due.uuids, by, kind="age")]

    async def tend(self) -> None:
        """Look once an hour, when nothing is being answered, until cancelled."""
        pause = FIRST_SECONDS
        while self._retention:
            await asyncio.sleep(pause)
            pause = EVERY_SECONDS
            await self.look()

    async def look(self) -> None:
        """Erase what is too old and not doubtful; what fails is logged, and done the next time."""
        try:
            done = await self.run(BY, confirmed=False)
            chunks = sum(one.chunks for one in done)
            log.info("retention looked at the topics", extra={"topics": len(done), "chunks": chunks})
        except StoreError as error:
            log.error("retention is tried again in an hour", extra={"error": error})

    def _before(self, topic_id: str) -> int | None:
        """The time before which all is too old, a midnight in UTC; None: nothing ever is."""
        days = days_kept(self._retention, topic_id)
        return None if not days else (self._store.now_us() // DAY_US - days) * DAY_US

    async def _due(self, topic_id: str, before: int) -> DuePart | None:
        topic = await self._topics.existing(topic_id)
        if topic is None:
            return None
        with topic.held():
            snapshot = topic.log.snapshot()
            visible = visible_digests(topic.buffer)
            plan, uuids = await asyncio.to_thread(plan_by_age, snapshot, before, visible)
            if not uuids:
                return None
            live = sum(any(snapshot.is_live(place) for place in snapshot.places(uuid)) for uuid in uuids)
        is_late = plan.oldest is not None and plan.oldest < before - LATE_US
        return DuePart(plan, frozenset(uuids), is_late and live > SHARE_MAX * snapshot.live_count)
