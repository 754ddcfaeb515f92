"""The objects of a cluster's topics, in its bucket.

Rule: an object is written once, under a key of its own, and is whole or not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from memd.errors import BucketError, StoreWriteFailed
from memd.store.bucket.objects import Bucket
from memd.store.cluster.kept import KeptObject

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
