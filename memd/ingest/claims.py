"""The claims that a daemon of a cluster has to its open topics: renewed all together, in a thread of their own.

Rule: a topic that is open here may be another daemon's by now if its lease could not be renewed in time, because the
database or this process stood still: whoever wants to answer from it asks for a renewal first, and once more when it
was read. Only a database that is asked then, and does not answer, leaves that open; then what is here goes on being
read, and nothing of it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection

import msgspec

from memd.clock import steady_now
from memd.errors import CacheGone, StoreError
from memd.store.shelf import Claim

log = logging.getLogger("memd")

ROUNDS_PER_LEASE = 3
ROUNDS_ASKED = 2
"""So many in a row show that the database does not answer: one may meet connections that have ended meanwhile."""
_END = None
_LATE = StoreError("claims to topics were not renewed in time: the cluster's database does not answer")


class ClusterHealth(msgspec.Struct, frozen=True):
    """This daemon's part in a cluster, as it is now."""

    place: str
    """Of the database and the bucket."""
    own_url: str
    """At which other daemons reach this one."""
    renewed_seconds: float
    """The time since the claims to the open topics were last renewed."""
    topics: int
    """That this daemon has."""
    trouble: str | None
    """Why the claims cannot be renewed; None: they can."""
    bucket_trouble: str | None
    """Why the bucket cannot be used; None: it can."""
    bucket_seconds: float
    """The time since it last did what it was asked."""


class ClaimTender:
    """Renews the claims of a daemon until it is stopped."""

    def __init__(
        self,
        renew: Callable[[], Collection[Claim]],
        lease_seconds: float,
        wait_seconds: float,
        clock: Callable[[], float] = steady_now,
    ) -> None:
        """
        Args:
            renew: see `Store.renew`; called in the thread.
            wait_seconds: the longest that a request waits for a renewal.
        """
        self._renew = renew
        self._lease_seconds = lease_seconds
        self.wait_seconds = wait_seconds
        self._clock = clock
        self._renewed_at = self._unanswered_at = float("-inf")
        self._trouble: StoreError | None = None
        self._asked: queue.SimpleQueue[asyncio.Future[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="memd-claims", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended: asyncio.Future[CacheGone] | None = None
        """From the start on: why the daemon cannot go on, and nothing is renewed any more."""
        self._on_round: Callable[[Collection[Claim], bool], None] = lambda lost, is_renewed: None

    def start(self, on_round: Callable[[Collection[Claim], bool], None]) -> None:
        """Begin, on the event loop.

        Args:
            on_round: called there after each round with those that are lost, and whether the others are renewed.
        """
        self._loop, self._on_round = asyncio.get_running_loop(), on_round
        self.ended = self._loop.create_future()
        self._renewed_at = self._clock()  # there are none yet
        self._thread.start()

    def note(self, trouble: StoreError | None) -> None:
        """Know, before the start, why the database cannot be used; that has been said."""
        self._trouble = trouble

    def stop(self, seconds_max: float) -> None:
        """End the thread; not on the event loop."""
        self._asked.put(_END)
        if self._thread.is_alive():
            self._thread.join(seconds_max)

    def is_current(self, claim: Claim) -> bool:
        """Whether a claim is not over, and its lease cannot be."""
        return not claim.is_over and self._clock() - claim.renewed_at < self._lease_seconds

    @property
    def trouble(self) -> StoreError | None:
        """Why it is not known whether topics that are open here are another daemon's by now; None if it is."""
        return self._trouble

    @property
    def age_seconds(self) -> float:
        """Seconds since the claims were last renewed."""
        return self._clock() - self._renewed_at

    def health(
        self, place: str, own_url: str, topics: int, bucket_trouble: str | None, bucket_seconds: float
    ) -> ClusterHealth:
        """See ClusterHealth."""
        trouble, seconds = None if self._trouble is None else str(self._trouble), round(self.age_seconds, 3)
        return ClusterHealth(place, own_url, seconds, topics, trouble, bucket_trouble, bucket_seconds)

    async def renewed(self, claim: Claim) -> bool:
        """Make sure that a claim is not over, waiting no longer than a request should; False if it is, or if nobody can
        say.

        That nobody can is known from a round that began after somebody had asked: one that was under way while this
        process stood still fails, and says nothing of the database.
        """
        pause = self._lease_seconds / ROUNDS_PER_LEASE
        if self.is_current(claim) or self._clock() - self._unanswered_at <= pause:
            return self.is_current(claim)
        try:
            async with asyncio.timeout(self.wait_seconds):
                for _ in range(ROUNDS_ASKED):
                    await self.hurry()
                    if self._trouble is None:
                        return self.is_current(claim)
        except TimeoutError:
            self._trouble = self._trouble or _LATE
        self._unanswered_at = self._clock()
        return False

    def hurry(self) -> asyncio.Future[None]:
        """Begin the next round now; returns what is done when it has ended."""
        future = asyncio.get_running_loop().create_future()
        self._asked.put(future)
        return future

    def _run(self) -> None:
        assert self._loop is not None, "it was started"
        while True:
            asked = []
            with contextlib.suppress(queue.Empty):
                asked.append(self._asked.get(timeout=self._lease_seconds / ROUNDS_PER_LEASE))
                while True:
                    asked.append(self._asked.get_nowait())
            if _END in asked:
                return
            try:
                lost, renewed_at = self._round()
            except CacheGone as error:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._end, error, asked)
                return
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell, lost, renewed_at, asked)

    def _round(self) -> tuple[Collection[Claim], float | None]:
        """Renew the claims; return those that are lost, and when the others were good, if that is known."""
        began = self._clock()
        try:
            lost = self._renew()
        except CacheGone:
            raise
        except StoreError as error:
            self._failed(error)
            return (), None
        except Exception as error:  # a bug must not end the renewals in silence
            log.exception("renewing claims met a bug; it is tried again")
            self._failed(StoreError(f"a bug: {type(error).__name__}; the log has its traceback"))
            return (), None
        if self._trouble is not None:
            log.info("the cluster's database answers again")
            self._trouble = None
        return lost, began

    def _failed(self, error: StoreError) -> None:
        if self._trouble is None:
            log.error(
                "claims to topics cannot be renewed; requests go on, and it is tried again", extra={"error": error}
            )
        self._trouble = error

    def _end(self, error: CacheGone, asked: Collection[asyncio.Future[None] | None]) -> None:
        log.error("this daemon ends", extra={"error": error})
        self._trouble = error
        assert self.ended is not None, "it was started"
        self.ended.set_result(error)
        for future in asked:
            if future is not None and not future.done():
                future.set_result(None)

    def _tell(
        self, lost: Collection[Claim], renewed_at: float | None, asked: Collection[asyncio.Future[None] | None]
    ) -> None:
        self._on_round(lost, renewed_at is not None)
        if renewed_at is not None:
            self._renewed_at = renewed_at
        for future in asked:
            if future is not None and not future.done():
                future.set_result(None)
