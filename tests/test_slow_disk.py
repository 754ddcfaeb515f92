"""A slow disk under a running daemon: nobody waits for it, and what is told of the turns keeps their order."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from memd.daemon.app import Daemon, running
from memd.proxy.remember import JOURNAL_SECONDS_MAX
from memd.settings.model import BufferSettings, Config, ListenSettings, LogSettings, UpstreamSettings
from memd.store.disk import Appender, LocalDisk
from memd.store.layout import RECEIPTS_NAME

SYNC_SECONDS = 0.2


class SlowDisk(LocalDisk):
    """The real disk, but what is made durable takes its time."""

    def append_to(self, path: Path) -> Appender:
        return _Slow(super().append_to(path))

    def create(self, path: Path) -> Appender:
        return _Slow(super().create(path))


class _Slow:
    def __init__(self, real: Appender) -> None:
        self._real = real
        self.write, self.close = real.write, real.close

    def sync(self) -> None:
        time.sleep(SYNC_SECONDS)
        self._real.sync()


class HeldJournal(LocalDisk):
    """The real disk, but journals are written only once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def append_to(self, path: Path) -> Appender:
        return _Held(super().append_to(path), self.gate) if path.name == "hot.log" else super().append_to(path)

    def create(self, path: Path) -> Appender:
        return _Held(super().create(path), self.gate) if path.name == "hot.log" else super().create(path)


class _Held:
    def __init__(self, real: Appender, gate: threading.Event) -> None:
        self._real, self._gate = real, gate
        self.sync, self.close = real.sync, real.close

    def write(self, data: bytes) -> None:
        self._gate.wait(60)
        self._real.write(data)


@pytest.fixture
async def daemon(tmp_path: Path, llama: str) -> AsyncIterator[Daemon]:
    config = Config(
        listen=ListenSettings(port=0),
        upstream=UpstreamSettings(url=llama),
        data_dir=tmp_path / "memory",
        buffer=BufferSettings(journal_fsync="always"),
        log=LogSettings(level="error"),
    )
    async with running(config, files=SlowDisk()) as daemon:
        yield daemon


async def test_turns_are_kept_and_told_in_the_order_in_which_they_were_answered(daemon: Daemon, tmp_path: Path) -> None:
    """One that waits for the disk is not overtaken by the next, which has nothing to remember."""
    answered: list[str] = []
    async with aiohttp.ClientSession() as session, session.get(f"{daemon.own_url}/memd/events") as events:
        for turn in range(6):
            mode = ("full", "readonly")[turn % 2]
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"Is locker {turn} taken?"}]}
            url = f"{daemon.base_url}/v1/chat/completions"
            async with session.post(url, json=body, headers={"X-Memory-Mode": mode}) as answer:
                assert answer.status == 200
                answered.append(answer.headers["X-Memory-Turn"])
        told: list[str] = []
        async with asyncio.timeout(60):
            async for line in events.content:
                if line.startswith(b"data: ") and "turn_id" in (data := json.loads(line.removeprefix(b"data: "))):
                    told.append(data["turn_id"])
                    async with session.get(f"{daemon.own_url}/memd/turns/{told[-1]}") as found:
                        assert found.status == 200, "who hears of a turn can ask for it"
                if len(told) == len(answered):
                    break
    assert told == answered
    kept = [json.loads(line) for line in (tmp_path / "memory" / RECEIPTS_NAME).read_text().splitlines() if line]
    assert [receipt["turn_id"] for receipt in kept] == answered


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_answer_ends_when_the_upstream_ends_it_and_not_when_the_journal_has_the_question(
    tmp_path: Path, llama: str, stream: bool
) -> None:
    disk = HeldJournal()
    config = Config(
        listen=ListenSettings(port=0),
        upstream=UpstreamSettings(url=llama),
        data_dir=tmp_path / "memory",
        buffer=BufferSettings(store_after_seconds=0),
    )
    try:
        async with running(config, files=disk) as daemon, aiohttp.ClientSession() as session:
            body = {"messages": [{"role": "user", "content": "Is the locker taken?"}], "stream": stream}
            async with asyncio.timeout(60):
                async with session.post(f"{daemon.base_url}/v1/chat/completions", json=body) as answer:
                    assert answer.headers["X-Memory-Status"] == "none"
                    first = await answer.content.readany()
                    began = time.monotonic()
                    rest = await answer.content.read()
            assert time.monotonic() - began < JOURNAL_SECONDS_MAX / 2
            assert b"[DONE]" in first + rest or not stream
            assert not disk.gate.is_set()
            disk.gate.set()
    finally:
        disk.gate.set()
