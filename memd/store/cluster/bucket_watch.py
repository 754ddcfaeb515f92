"""Whether the bucket of a cluster can be used, also while nobody has anything to write there.

Rule: whoever wants to know asks nothing of the bucket. What the daemon itself asks of it tells; only where it has asked
nothing for some time, a thread asks for one small object. That it cannot be written is told until it can, whoever reads
it meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from memd.clock import steady_now
from memd.errors import BucketError, StoreError
from memd.store.bucket.objects import Bucket
from memd.store.cluster.object_keeper import MARKER

log = logging.getLogger("memd")

_LOOK_SECONDS = 30.0
_RETRY_SECONDS = 5.0
_SILENT_SECONDS = 15.0
"""A request that takes longer is one to a bucket that says nothing; it fails only after minutes."""


class BucketWatch:
    """See the module."""

    def __init__(self, bucket: Bucket, cluster: Callable[[], str], now: Callable[[], float] = steady_now) -> None:
        """`cluster`: returns its name, or raises StoreError."""
        self._bucket = bucket
        self._cluster = cluster
        self._now = now
        self._asked_at: float | None = None
        self._began_at = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memd-bucket", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._began_at = self._now()
        self._thread.start()

    def stop(self) -> None:
        """End; a request that the bucket has not answered yet is not waited for."""
        self._is_over.set()

    @property
    def trouble(self) -> str | None:
        """Why the bucket cannot be used; None: it can."""
        asked_at = self._asked_at
        if asked_at is not None and self._now() - asked_at > _SILENT_SECONDS:
            return (
                f"{self._bucket.url}: says nothing; see whether store.endpoint is right and the server can be reached"
            )
        return None if self._bucket.trouble is None else str(self._bucket.trouble)

    @property
    def silent_seconds(self) -> float:
        """The time since the bucket last did what it was asked."""
        return round(self._now() - max(self._bucket.answered_at, self._began_at), 3)

    def look(self) -> None:
        """Ask something of the bucket, unless it has answered lately."""
        if self._bucket.trouble is None and self._now() - self._bucket.answered_at < _LOOK_SECONDS:
            return
        self._asked_at = self._now()
        with suppress(BucketError):
            found = self._bucket.get(MARKER)
            if self._bucket.trouble is not None and found is not None:
                with suppress(StoreError):
                    if found == self._cluster().encode():
                        self._bucket.put(MARKER, found, new=True)
        self._asked_at = None

    def _run(self) -> None:
        was_trouble = False
        while not self._is_over.is_set():
            self.look()
            trouble = self.trouble
            if trouble is not None and not was_trouble:
                log.error(
                    "the cluster's bucket cannot be used; full segments wait in the database", extra={"error": trouble}
                )
            elif trouble is None and was_trouble:
                log.info("the cluster's bucket can be used again")
            was_trouble = trouble is not None
            self._is_over.wait(_RETRY_SECONDS if was_trouble else _LOOK_SECONDS)
