"""The objects of a cluster's topics, in its bucket.

Rule: an object is written once, under a key of its own, and is whole or not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from memd.errors import BucketError, NotOurBucket, StoreWriteFailed
from memd.store.bucket.objects import Bucket
from memd.store.cluster.kept import KeptObject
from memd.store.cluster.sealing import ClusterKeys

MARKER = "memd.cluster"
"""The key of the object that says whose bucket it is; no topic can have this name."""
PIECE_BYTES = 8 << 20
_AWAY_SECONDS = 30.0
"""How long nothing is frozen after the bucket could not be written: each try takes as long as that."""


class ObjectKeeper:
    """See the module. For any thread."""

    def __init__(self, bucket: Bucket, keys: ClusterKeys, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: seconds."""
        self._bucket = bucket
        self._keys = keys
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
            found = self._bucket.get(MARKER)
            if found is None and not is_used:
                self._bucket.put(MARKER, cluster.encode(), new=True)
                found = self._bucket.get(MARKER)
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

    def size(self, kept: KeptObject) -> int:
        """Return the bytes that a file takes in its object."""
        pieces = -(-kept.checksum.bytes // PIECE_BYTES)
        return kept.checksum.bytes + pieces * self._keys.seal(kept.sealed_by).overhead

    def put(self, files: Sequence[tuple[KeptObject, Iterable[bytes]]]) -> None:
        """Write an object of files, one behind the other as they say, each given in pieces of PIECE_BYTES.

        Raises:
            StoreWriteFailed: there may be one or not.
        """
        try:
            self._bucket.put(files[0][0].key, chain.from_iterable(self._sealed(*one) for one in files))
        except BucketError as error:
            self._failed_at = self._now()
            raise StoreWriteFailed(str(error)) from error
        self._failed_at = None

    def pieces(self, kept: KeptObject, after: int = 0) -> Iterator[bytes]:
        """Read a file out of its object piece by piece, from a place in the file on. Raises StoreError."""
        seal, size = self._keys.seal(kept.sealed_by), kept.checksum.bytes
        if not seal.overhead:
            end = kept.at + size
            starts = range(kept.at + after, end, PIECE_BYTES)
            yield from (self._bucket.read(kept.key, at, min(at + PIECE_BYTES, end)) for at in starts)
            return
        for index in range(after // PIECE_BYTES, -(-size // PIECE_BYTES)):
            length = min(PIECE_BYTES, size - index * PIECE_BYTES)
            at = kept.at + index * (PIECE_BYTES + seal.overhead)
            data = self._bucket.read(kept.key, at, at + length + seal.overhead)
            yield seal.opened(data, f"{kept.key} {kept.at} {index}")[max(0, after - index * PIECE_BYTES) :]

    def _sealed(self, kept: KeptObject, pieces: Iterable[bytes]) -> Iterator[bytes]:
        seal = self._keys.seal(kept.sealed_by)
        return (seal.sealed(piece, f"{kept.key} {kept.at} {index}") for index, piece in enumerate(pieces))

    def delete(self, keys: Collection[str]) -> bool:
        """Remove objects; False: not all of them are gone."""
        try:
            self._bucket.delete(list(keys))
        except BucketError:
            return False
        return True
