"""Many objects of a bucket, read at once: each takes a round trip, however small it is.

Rule: whoever asks for an object gets its pieces in his own thread, and does there all that is done with them. Not more
than READS_AT_ONCE objects and AHEAD_BYTES_MAX are read before they are asked for, and nothing after an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from memd.store.cluster.kept import KeptObject
from memd.store.cluster.object_keeper import PIECE_BYTES

READS_AT_ONCE = 16
AHEAD_BYTES_MAX = 32 << 20

ReadObject = Callable[[KeptObject], Iterator[bytes]]


@contextmanager
def read_ahead(objects: Iterable[KeptObject], read: ReadObject) -> Iterator[ReadObject]:
    """Yield a `read` for these objects, which are asked for in this order and once each.

    Raises:
        StoreError: as `read` does, where the object is asked for.
    """
    left = deque(objects)
    ahead: dict[KeptObject, tuple[Iterator[bytes], Future[bytes]]] = {}

    def has_room() -> bool:
        wanted = sum(min(one.checksum.bytes, PIECE_BYTES) for one in (*ahead, left[0]))
        return not ahead or (len(ahead) < READS_AT_ONCE and wanted <= AHEAD_BYTES_MAX)

    def begin() -> None:
        while left and has_room():
            pieces = read(one := left.popleft())
            ahead[one] = pieces, readers.submit(next, pieces, b"")

    def pieces_of(one: KeptObject) -> Iterator[bytes]:
        begin()
        pieces, first = ahead.pop(one)
        begin()
        yield first.result()
        yield from pieces

    with ThreadPoolExecutor(READS_AT_ONCE, "memd-fetch") as readers:
        try:
            yield pieces_of
        finally:
            readers.shutdown(cancel_futures=True)
