"""The backup of a running daemon: a round every so many seconds, in a thread of its own.

Rule: nothing waits for it. A bucket that fails is tried again, ever more seldom up to once a minute; the log tells of
it once, and of its end once. The lag is the age of the last moment up to which everything is in the bucket.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from memd.errors import NotOurBucket, StoreError
from memd.settings.model import Config
from memd.store.bucket.noting_disk import NotingDisk
from memd.store.bucket.objects import Bucket
from memd.store.bucket.writing import BucketWriter
from memd.store.disk import LocalDisk

log = logging.getLogger("memd")

RETRY_SECONDS_MAX = 60.0


class BackupHealth(msgspec.Struct, frozen=True):
    """The backup as it is now."""

    bucket: str
    lag_seconds: float
    """The cost of a lost disk: the age of the last moment up to which all is in the bucket."""
    trouble: str | None
    """The last error, until it works again."""
    topics_left: int
    """Topics that were there at the start, and are not compared with the bucket yet."""
    requests: int
    bytes_sent: int
    """Since the start, as `requests`."""


class BucketTender:
    """Keeps a backup up to date until it is stopped."""

    def __init__(self, writer: BucketWriter, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._seconds = seconds
        self._clock = clock
        self._whole_at = clock()
        self._trouble: str | None = None
        self._failures = 0
        self._is_over = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memd-backup", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, seconds_max: float) -> None:
        """Write the last changes, and end; what a slow bucket has not taken by then, the next start sends."""
        self._stop.set()
        self._thread.join(seconds_max)
        if self._thread.is_alive():
            log.warning("the last changes are not in the bucket yet: the next start sends them")

    @property
    def lag_seconds(self) -> float:
        """See BackupHealth."""
        return max(0.0, self._clock() - self._whole_at)

    @property
    def health(self) -> BackupHealth:
        """The backup as it is now."""
        bucket = self._writer.bucket
        left, sent = self._writer.to_compare, (bucket.requests, bucket.bytes_sent)
        return BackupHealth(bucket.url, round(self.lag_seconds, 3), self._trouble, left, *sent)

    @classmethod
    def of(cls, config: Config, disk: LocalDisk, env: Mapping[str, str]) -> BucketTender | None:
        """Return the backup that the settings ask for, not begun; None: there is none.

        `disk`: the one of the data directory, below its encryption.

        Raises:
            BucketError: obstore is not installed, or the settings contradict each other.
        """
        if not isinstance(disk, NotingDisk):
            return None
        settings = config.backup
        bucket = Bucket.of(settings, env)
        writer = BucketWriter(
            bucket, disk, config.data_dir, settings.keep_days, lambda: time.time_ns() // 1000, secrets.token_bytes
        )
        return cls(writer, settings.seconds)

    def _run(self) -> None:
        while not self._is_over:
            is_last = self._stop.is_set()
            wait = self.step()
            if is_last:
                return
            self._stop.wait(wait)

    def step(self) -> float:
        """Do what is due now; return the seconds until there is more to do."""
        began = self._clock()
        try:
            if not self._writer.is_begun:
                self._writer.begin()
            left = self._writer.to_compare
            if self._writer.round():
                self._whole_at = began
            if left and self._writer.to_compare:
                return 0.0
        except StoreError as error:
            return self._failed(error)
        except Exception as error:  # a bug must not end the backup in silence
            log.exception("the backup met a bug; it is tried again")
            return self._failed(StoreError(f"a bug: {type(error).__name__}; the log has its traceback"))
        self._worked()
        try:
            self._writer.tidy()
        except NotOurBucket as error:
            return self._failed(error)
        except StoreError as error:
            log.warning("the backup could not be tidied up; it is tried again", extra={"error": error})
            return min(RETRY_SECONDS_MAX, 6 * self._seconds)
        return max(0.0, self._seconds - (self._clock() - began))

    def _failed(self, error: StoreError) -> float:
        self._failures += 1
        if str(error) != self._trouble:
            log.error("the backup to the bucket fails; requests go on, and it is tried again", extra={"error": error})
        self._trouble = str(error)
        self._is_over = isinstance(error, NotOurBucket) and self._writer.is_begun
        return float(min(RETRY_SECONDS_MAX, self._seconds * 2 ** min(self._failures, 10)))

    def _worked(self) -> None:
        if self._trouble is not None:
            log.info("the backup to the bucket works again", extra={"lag_seconds": round(self.lag_seconds, 1)})
        self._trouble, self._failures = None, 0
