"""What memd adds to a request: time to the first byte and the first streamed chunk, throughput, CPU, memory.

Backs these claims: with memory over 100,000 chunks and one client at most 2 ms are added to a request of 2 KB and 3.5
ms to one with a history of 200 KB (median; p99 at most 10 ms); mode `off` costs at most 1.5 times a bare aiohttp
pass-through; a fast stream is relayed at half the bare pass-through's rate or better, with the reply captured.

Against a stub upstream that answers at once, all in one run: direct, a bare aiohttp pass-through (the ceiling of this
stack), nginx, LiteLLM and mnemonic-proxy where they are on the path, memd with mode `off`, memd with memory. Each
client is a conversation that grows by one exchange, 0.2 KB, a request. "CPU" is what the target's process uses per
request, which is less noisy than its time.

    python bench/overhead.py [--chunks 0,5000,100000] [--clients 1,8,64] [--sizes 2000,200000,2000000]
        [--stores FOLDER] [--json FILE]

`--stores` names the folder that bench/store.py was told to `--keep`: a store of a million chunks takes half an hour to
build.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from overhead_targets import FEW_CHUNKS, FEW_TEXT, STREAM_CHUNKS, cpu_seconds, memd_serving, others, serving
from prose import question, texts
from rich.console import Console
from rich.table import Table
from store import drafts, settle
from vectors import embedded, mixed

from memd.embedding.loading import load_embedder
from memd.settings.model import EmbeddingSettings
from memd.store.store import Store

REQUESTS = 100
"""Of all clients together, at most; at least REQUESTS_MIN of each."""
REQUESTS_MIN = 3
WARM_UP = 10
SECONDS_MAX = 8.0
"""For the requests of a cell, and half of it to warm up: a slow target with large bodies makes fewer of them."""
QUIET_SECONDS, QUIET_SECONDS_MAX = 0.5, 60.0
QUIET_SHARE_MAX = 0.03
"""Of a core: what a daemon with nothing to do may use."""
OTHERS_CLIENTS_MAX, OTHERS_BYTES_MAX = 8, 200_000
"""Beyond this the other proxies are not measured: LiteLLM takes seconds for one of 64 requests with 2 MB each."""
PATH = "/v1/chat/completions"
POOL_TEXTS = 2000

Figures = dict[str, float]


# -- the store ------------------------------------------------------------------------------------------------------


def fill(folder: Path, chunks: int, kept: Path | None) -> None:
    """A store with that many chunks in the default topic, with its indexes; a copy of the one in `kept`, if it is."""
    embedder = load_embedder(EmbeddingSettings())
    if kept is not None and (kept / str(chunks)).is_dir():
        shutil.copytree(kept / str(chunks), folder / "memory")
        chunks = 0
    store = Store.open(
        folder / "memory", dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=5000
    )
    log = store.topic("default")
    if chunks:
        base, chosen = embedded(embedder, 2000), np.random.default_rng(1)
        for start in range(0, chunks, 5000):
            log.append(drafts(mixed(base, min(5000, chunks - start), chosen), chosen))
            settle(log)
    log.index_terms()
    store.close()


# -- the clients ----------------------------------------------------------------------------------------------------


class Talk:
    """One client's conversation: a history of about `size` bytes that grows by one exchange a request."""

    def __init__(self, size: int, name: str) -> None:
        self._name = name
        self._chosen = np.random.default_rng(sum(name.encode()))
        self._messages: list[str] = []
        held = 0
        while held < size or len(self._messages) % 2:
            role = ("user", "assistant")[len(self._messages) % 2]
            self._add(role, f"{name} {held}: {_POOL[self._chosen.integers(POOL_TEXTS)]}")
            held += len(self._messages[-1])

    def next_body(self, stream: bool, few: bool = True) -> bytes:
        """The next request; `few`: a stream of FEW_CHUNKS, not of STREAM_CHUNKS."""
        self._add("user", question(self._chosen))
        settings: dict[str, Any] = {"model": "stub", **({"max_tokens": FEW_CHUNKS} if few else {}), "stream": stream}
        body = ('{"messages":[' + ",".join(self._messages) + "]," + json.dumps(settings)[1:]).encode()
        self._add("assistant", FEW_TEXT if stream else "Noted.")
        return body

    def _add(self, role: str, content: str) -> None:
        self._messages.append(json.dumps({"role": role, "content": content}))


_POOL = texts(POOL_TEXTS, np.random.default_rng(7))


class Timed(NamedTuple):
    """One request, in seconds."""

    first_byte: float
    first_chunk: float


async def asked(session: aiohttp.ClientSession, url: str, talk: Talk, count: int, stream: bool) -> list[Timed]:
    """One client's requests, one after the other, until `count` or the time is up."""
    taken: list[Timed] = []
    deadline = time.perf_counter() + SECONDS_MAX * (0.5 if count == WARM_UP else 1)
    while len(taken) < count and (len(taken) < REQUESTS_MIN or time.perf_counter() < deadline):
        body = talk.next_body(stream)
        started = time.perf_counter()
        async with session.post(url + PATH, data=body) as answer:
            head = time.perf_counter()
            part = await answer.content.readany()
            chunk = time.perf_counter()
            assert answer.status == 200 and part, await answer.text()
            await answer.read()
        taken.append(Timed(head - started, chunk - started))
    return taken


async def measured(url: str, size: int, clients: int, mode: str, pid: int) -> Figures:
    """All clients at once, each with a conversation of its own that has begun; `pid`: whose CPU counts."""
    count = max(REQUESTS_MIN, REQUESTS // clients)
    headers = {"X-Memory-Mode": mode, "Content-Type": "application/json"}
    talks = [Talk(size, f"client {number}") for number in range(clients)]
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False, headers=headers))
            for _ in talks
        ]
        pairs = list(zip(sessions, talks, strict=True))
        await asyncio.gather(*(asked(session, url, talk, WARM_UP, stream=False) for session, talk in pairs))
        used = await quiet(pid)  # what they opened with made memd store what came before
        started = time.perf_counter()
        runs = await asyncio.gather(*(asked(session, url, talk, count, stream=False) for session, talk in pairs))
        spent = time.perf_counter() - started
        cpu = cpu_seconds(pid) - used
        streams = await asyncio.gather(*(asked(session, url, talk, count, stream=True) for session, talk in pairs))
    first = [timed.first_byte for run in runs for timed in run]
    told = _percentiles(first, "first_byte") | _percentiles(
        [one.first_chunk for run in streams for one in run], "chunk"
    )
    return told | {"per_second": len(first) / spent, "requests": len(first), "cpu_ms": 1000 * cpu / len(first)}


def _percentiles(seconds: list[float], name: str) -> Figures:
    return {f"{name}_p{part}_ms": 1000 * float(np.percentile(seconds, part)) for part in (50, 95, 99)}


async def stream_rate(url: str, mode: str, pid: int) -> float:
    """Chunks per second of a stream as fast as it can be relayed, from its head on; the best of five."""
    rates = []
    headers = {"X-Memory-Mode": mode, "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in range(5):
            talk = Talk(500, f"stream {number}")
            await asked(session, url, talk, 1, stream=False)
            await quiet(pid)  # the chat before, with its very long reply, is stored now
            async with session.post(url + PATH, data=talk.next_body(stream=True, few=False)) as answer:
                started = time.perf_counter()
                chunks = (await answer.read()).count(b"data: {")
                rates.append(chunks / (time.perf_counter() - started))
            assert chunks >= STREAM_CHUNKS, f"{chunks} chunks of {STREAM_CHUNKS}"
    return max(rates)


# -- the run --------------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


async def quiet(pid: int) -> float:
    """Wait until a process has nothing left to do of what came before (storing, indexing); its CPU seconds.

    For all targets: a machine is slower just after a pause.
    """
    deadline, used = time.monotonic() + QUIET_SECONDS_MAX, cpu_seconds(pid)
    while True:
        await asyncio.sleep(QUIET_SECONDS)
        before, used = used, cpu_seconds(pid)
        if used - before <= QUIET_SHARE_MAX * QUIET_SECONDS or time.monotonic() > deadline:
            return used


async def rows_of(target: tuple[str, int], mode: str, sizes: list[int], clients: list[int]) -> dict[str, Any]:
    """Everything measured of one target, given its URL and the process whose CPU and memory count."""
    url, pid = target
    row: dict[str, Any] = {"stream_per_second": await stream_rate(url, mode, pid)}
    for size in sizes:
        for number in clients:
            row[f"{size} B, {number} clients"] = await measured(url, size, number, mode, pid)
    return row | {"resident_bytes": resident_bytes(pid)}


async def run(chunks: list[int], sizes: list[int], clients: list[int], kept: Path | None) -> dict[str, dict[str, Any]]:
    """Target → figures."""
    rows: dict[str, dict[str, Any]] = {}
    with serving("stub") as direct:
        upstream = direct[0]
        rows["direct"] = await rows_of(direct, "off", sizes, clients)
        with serving("bare", upstream) as bare:
            rows["bare pass-through"] = await rows_of(bare, "off", sizes, clients)
        for name, starting in others():
            async with _folder() as folder:
                with starting(folder, upstream) as target:
                    fewer = [size for size in sizes if size <= OTHERS_BYTES_MAX]
                    rows[name] = await rows_of(
                        target, "off", fewer, [number for number in clients if number <= OTHERS_CLIENTS_MAX]
                    )
        for count in chunks:
            async with _folder() as folder:
                fill(folder, count, kept)
                with memd_serving(folder, upstream) as target:
                    if count == chunks[0]:
                        rows["memd, off"] = await rows_of(target, "off", sizes, clients)
                    rows[f"memd, {count:,} chunks"] = await rows_of(target, "full", sizes, clients)
    return rows


@contextlib.asynccontextmanager
async def _folder() -> AsyncIterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="memd-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(rows: dict[str, dict[str, Any]], sizes: list[int], clients: list[int]) -> None:
    """Print a table for each size and number of clients, and one for the streams."""
    console = Console(width=130)
    for size in sizes:
        for number in clients:
            table = Table(title=f"history of {size:,} bytes, {number} client{'s' if number > 1 else ''}; milliseconds")
            for column in ("target", "first byte p50, p95, p99", "added", "first chunk p50, p95, p99", "added"):
                table.add_column(column, justify="left" if column == "target" else "right")
            table.add_column("requests per second", justify="right")
            table.add_column("CPU", justify="right")
            key = f"{size} B, {number} clients"
            cells = {name: row[key] for name, row in rows.items() if key in row}
            for name, told in cells.items():
                shown = [name]
                for what in ("first_byte", "chunk"):
                    shown.append(", ".join(f"{told[f'{what}_p{part}_ms']:.2f}" for part in (50, 95, 99)))
                    shown.append(f"{told[f'{what}_p50_ms'] - cells['direct'][f'{what}_p50_ms']:.2f}")
                table.add_row(*shown, f"{told['per_second']:,.0f}", f"{told['cpu_ms']:.2f}")
            console.print(table)
    table = Table(title="a fast stream, and memory")
    for column in ("target", "chunks per second", "resident"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['stream_per_second']:,.0f}", f"{row['resident_bytes'] / 1e6:,.0f} MB")
    console.print(table)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", default="0,5000,100000", help="comma-separated numbers of chunks in the store")
    parser.add_argument("--clients", default="1,8", help="comma-separated numbers of clients at a time")
    parser.add_argument("--sizes", default="2000,200000", help="comma-separated bytes of history")
    parser.add_argument("--stores", type=Path, help="where bench/store.py kept its stores")
    parser.add_argument("--json", type=Path)
    asked_for = parser.parse_args()
    given = (asked_for.chunks, asked_for.sizes, asked_for.clients)
    chunks, sizes, clients = ([int(one) for one in text.split(",")] for text in given)
    rows = asyncio.run(run(chunks, sizes, clients, asked_for.stores))
    report(rows, sizes, clients)
    if asked_for.json is not None:
        asked_for.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
