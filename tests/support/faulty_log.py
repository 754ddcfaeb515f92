"""A shared log in a real PostgreSQL that fails at the calls that a test chooses.

Rule: what the seam forbids is an error here, also where PostgreSQL would let it pass.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from memd.errors import InDoubt, StoreWriteFailed
from memd.store.shared.postgres import PAGE_ROWS, News, Row, SharedLog, Stream


class FaultyLog(SharedLog):
    """See the module."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.calls = 0
        self.fails: Callable[[str], str] = lambda call: ""
        """Asked at each call: "away" (nothing is done), "doubt" (it is done, and the answer is lost), or ""."""
        self.connect()

    def ends(self, topic_ids: Collection[str]) -> dict[str, News]:
        with self._call("ends"):
            return super().ends(topic_ids)

    def since(self, topic_id: str, after: Mapping[Stream, int], limit: int = PAGE_ROWS) -> News:
        with self._call("since"):
            return super().since(topic_id, after, limit)

    def append(self, topic_id: str, after: int, row: Row, *, generation: int) -> bool:
        assert row.last > after >= 0, "ids ascend"
        assert row.data and isinstance(row.data, bytes), "a row says something, which nothing may change"
        assert row.is_base or row.stream != "kept", "kept is replaced as a whole"
        with self._call("append"):
            return super().append(topic_id, after, row, generation=generation)

    def rewrite(self, topic_id: str, generation: int, rows: Mapping[tuple[Stream, int], bytes] | None) -> int:
        with self._call("rewrite"):
            return super().rewrite(topic_id, generation, rows)

    def topics(self, after: str, limit: int) -> list[str]:
        with self._call("topics"):
            return super().topics(after, limit)

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise AssertionError(f"{name} was called on the event loop")
        self.calls += 1
        fault = self.fails(name)
        if fault == "away":
            raise StoreWriteFailed(f"{self.place}: is away")
        yield
        if fault == "doubt":
            raise InDoubt(f"{self.place}: the answer was lost")
