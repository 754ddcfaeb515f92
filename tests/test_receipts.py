"""Receipts are read where nobody waits for it: not on the event loop, which answers everyone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from memd.ingest.redaction.redactor import NO_REDACTION
from memd.principals import OWNER
from memd.receipts import Receipt, Receipts
from memd.store.disk import LocalDisk
from memd.store.receipts import ReceiptRing
from memd.telemetry.events import Events


class WatchedLines(list[bytes]):
    """Lines that know in which threads they were read."""

    def __init__(self, lines: list[bytes], readers: set[int]) -> None:
        super().__init__(lines)
        self._readers = readers

    def __iter__(self) -> Iterator[bytes]:
        self._readers.add(threading.get_ident())
        return super().__iter__()


class WatchedRing(ReceiptRing):
    """A ring whose lines are watched."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(LocalDisk(), data_dir, 1 << 20)
        self.readers: set[int] = set()

    def lines(self) -> list[bytes]:
        return WatchedLines(super().lines(), self.readers)


async def test_the_event_loop_decodes_no_receipts(tmp_path: Path) -> None:
    ring = WatchedRing(tmp_path)
    one = Receipt(turn_id="7", at=1, topic_id="work", api="chat", mode="full", model="tiny")
    ring.append(msgspec.json.encode(one))
    with ThreadPoolExecutor(1) as writer:
        receipts = Receipts(ring, writer, NO_REDACTION, Events())
        assert receipts.find("7", OWNER) == one
        assert receipts.latest(1, OWNER, topic_id="work") == [(one, [])]
        assert receipts.latest(1, OWNER, with_steps=False) == [(one, [])]
        receipts.close()
    assert ring.readers and threading.get_ident() not in ring.readers
