"""Receipts: read where nobody waits for it, and without the texts that are erased while they are written."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from daemon_in_process import house_in

import memd.receipts
from memd.ingest.erasing import Concern
from memd.ingest.redaction import Redactor
from memd.receipts import Receipt, Receipts
from memd.settings.model import IngestSettings
from memd.store.disk import LocalDisk, Wiper
from memd.store.receipts import ReceiptRing
from memd.telemetry.events import Events


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


async def test_a_receipt_that_is_written_while_its_text_is_erased_is_kept_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, encoded = ReceiptRing(LocalDisk(), tmp_path, 64_000), msgspec.json.encode
    encoding, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def encode(receipt: object) -> bytes:
        line = encoded(receipt)
        if threading.current_thread().name.startswith("writer"):
            loop.call_soon_threadsafe(encoding.set)
            goes_on.wait(10)
        return line

    with ThreadPoolExecutor(1, thread_name_prefix="writer") as writer:
        receipts = Receipts(ring, writer, Redactor.of(IngestSettings()), Events())
        asked = Receipt(turn_id="1", at=1, topic_id="harbour", api="chat", mode="full", model="m", asked="the walrus")
        monkeypatch.setattr(msgspec.json, "encode", encode)
        with receipts.awaited("1"):
            writing = asyncio.create_task(receipts.keep(asked))
            await encoding.wait()
            erasing = receipts.blanked(tmp_path, Concern("harbour"), Wiper(LocalDisk()))
            entering = asyncio.create_task(erasing.__aenter__())
            await asyncio.wait([entering], timeout=0.2)  # it has nothing to wait for, or waits for what is written
            goes_on.set()
            await asyncio.gather(writing, entering)
            await erasing.__aexit__(None, None, None)
    assert [b"walrus" in line for line in ring.lines()] == [False]
