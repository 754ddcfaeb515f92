"""Receipts are read where nobody waits for it: not on the event loop, which answers everyone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from daemon_in_process import house_in

import memd.receipts
from memd.receipts import Receipt
from memd.store.receipts import ReceiptRing


async def test_the_event_loop_decodes_no_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[int] = set()
    lines, receipt_in = ReceiptRing.lines, memd.receipts.receipt_in

    def watched_lines(ring: ReceiptRing) -> list[bytes]:
        readers.add(threading.get_ident())
        return lines(ring)

    def watched(line: bytes) -> Receipt | None:
        readers.add(threading.get_ident())
        return receipt_in(line)

    async with house_in(tmp_path) as house:
        await house.chat("chief", "The lamp is on the brass plate.")
        await house.settled()
        monkeypatch.setattr(ReceiptRing, "lines", watched_lines)
        monkeypatch.setattr(memd.receipts, "receipt_in", watched)
        _, page = await house.ask("chief", "/memd/turns")
        [turn] = page["turns"]
        _, page = await house.ask("chief", "/memd/conversations")
        conversation = f"/memd/conversations/{page['conversations'][0]['conversation']}"
        for path in ("/memd/receipts", f"/memd/turns/{turn['turn_id']}", conversation, "/memd/usage", "/memd/figures"):
            readers.clear()
            assert (await house.ask("chief", path))[0] == 200
            assert readers and threading.get_ident() not in readers, path
        readers.clear()
        assert (await house.ask("house", "/memd/audit"))[0] == 200
        assert readers and threading.get_ident() not in readers
