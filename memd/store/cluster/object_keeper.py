"""The objects of a cluster's topics, in its bucket.

Rule: an object is written once, under a key of its own, and is whole or not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from memd.errors import BucketError, NotOurBucket, StoreWriteFailed
from memd.store.bucket.objects import Bucket
from memd.store.cluster.kept import KeptObject

_MARKER = "memd.cluster"
"""The key of the object that says whose bucket it is; no topic can have this name."""
PIECE_BYTES = 8 << 20
_AWAY_SECONDS = 30.0
"""How long nothing is frozen after the bucket could not be written: each try takes as long as that."""


class ObjectKeeper:
    """See the module. For any thread."""

    def __init__(self, bucket: Bucket, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: seconds."""
        self._bucket = bucket
        self._now = now
        self._failed_at: float | None = None

    @property
    def is_away(self) -> bool:
        """Whether the bucket could not be written a moment ago."""
        return self._failed_at is not None and self._now() < self._failed_at + _AWAY_SECONDS

    def is_of(self, cluster: str, *, is_used: bool) -> bool:
        """Whether the bucket is known to be a cluster's; it is made so if it is nobody's.

        Args:
            is_used: the cluster has objects already, so that its bucket cannot be a new one.

        Returns:
            False if it cannot be asked.

        Raises:
            NotOurBucket: it is another cluster's.
        """
        if self.is_away:
            return False
        try:
            found = self._bucket.get(_MARKER)
            if found is None and not is_used:
                self._bucket.put(_MARKER, cluster.encode(), new=True)
                found = self._bucket.get(_MARKER)
        except BucketError:
            self._failed_at = self._now()
            return False
        if found is None:
            raise NotOurBucket(
                f"{self._bucket.url}: has nothing of the cluster in store.url, which keeps objects: correct "
                "store.bucket, or restore the bucket"
            )
        if found != cluster.encode():
            raise NotOurBucket(
                f"{self._bucket.url}: belongs to another cluster than the one in store.url: correct one of them; a new "
                "cluster needs a prefix of its own"
            )
        return True

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """Write an object.

        Raises:
            StoreWriteFailed: there may be one or not.
        """
        try:
            self._bucket.put(key, pieces)
        except BucketError as error:
            self._failed_at = self._now()
            raise StoreWriteFailed(str(error)) from error
        self._failed_at = None

    def pieces(self, kept: KeptObject, after: int = 0) -> Iterator[bytes]:
        """Read a file's object piece by piece, from a place in the file on. Raises StoreError."""
        end = kept.at + kept.checksum.bytes
        starts = range(kept.at + after, end, PIECE_BYTES)
        return (self._bucket.read(kept.key, at, min(at + PIECE_BYTES, end)) for at in starts)

    def delete(self, keys: Collection[str]) -> bool:
        """Remove objects; False: not all of them are gone."""
        try:
            self._bucket.delete(list(keys))
        except BucketError:
            return False
        return True
