"""What memd adds to a request: time to the first byte, requests per second, the rate of a fast stream.

Backs these claims: with memory over 100,000 chunks and one client at most 2 ms are added to a request of 2 KB and 3.5
ms to one with a history of 200 KB (median; p99 at most 10 ms); mode `off` costs at most 1.5 times a bare aiohttp
pass-through; a fast stream is relayed at half the bare pass-through's rate or better, with the reply captured.

Against a stub upstream that answers at once, all in one run: direct, a bare aiohttp pass-through (the ceiling of this
stack), nginx and LiteLLM where they are installed, memd with mode `off`, memd with memory. Each client is a
conversation that grows by one exchange a request. "CPU" is what the target's process uses per request, which is less
noisy than its time.

    python bench/overhead.py [--chunks 0,5000,100000] [--clients 1,8] [--sizes 2000,200000] [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import yaml
from aiohttp import web
from rich.console import Console
from rich.table import Table
from store import drafts, settle
from vectors import embedded, mixed

from memd.embedding import load_embedder
from memd.store.log import Store

WINDOW_TOKENS = 4_000_000
REQUESTS = 200
"""For each client, at most; fewer with large bodies."""
BYTES_PER_RUN = 400 << 20
STREAM_CHUNKS = 20_000
WARM_UP = 20
QUIET_SECONDS, QUIET_SECONDS_MAX = 0.5, 60.0
QUIET_SHARE_MAX = 0.03
"""Of a core: what a daemon with nothing to do may use."""
REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Noted."}, "finish_reason": "stop"}]}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}],"id":"c","object":"chat.completion.chunk"}\n\n'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PATH = "/v1/chat/completions"

Figures = dict[str, float]


# -- what stands behind and beside memd -------------------------------------------------------------------------------


class Stub(asyncio.Protocol):
    """An upstream that costs next to nothing: it looks at a request's first line and length only."""

    def __init__(self) -> None:
        self._held = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._held[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._held) < end + 4 + length:
                return
            body = bytes(self._held[end + 4 : end + 4 + length][-400:])
            del self._held[: end + 4 + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /props"):
            told = {"default_generation_settings": {"n_ctx": WINDOW_TOKENS}, "model_alias": "stub"}
            self._send(b"200 OK", json.dumps(told).encode())
        elif b"input_tokens" in head.split(b"\r\n", 1)[0]:
            self._send(b"404 Not Found", b"{}")
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(STREAM_HEAD)
            piece = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
            for _ in range(STREAM_CHUNKS // 20):
                self._transport.write(piece * 20)
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            self._send(b"200 OK", json.dumps(REPLY).encode())

    def _send(self, status: bytes, body: bytes) -> None:
        lines = [b"HTTP/1.1 " + status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), b"", body]
        self._transport.write(b"\r\n".join(lines))


async def run_stub() -> None:
    """Serve until killed; the port is printed."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def run_bare(upstream: str) -> None:
    """The ceiling of this stack: aiohttp in, aiohttp out, nothing between."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            async with session.request(request.method, upstream + request.path, data=body) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response

        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """A process of this script that prints its port; its URL."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it was asked for"
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def nginx_serving(folder: Path, upstream: str) -> Iterator[tuple[str, int]]:
    """nginx with one worker and a pool of connections; its URL and the worker's process id."""
    port = free_port()
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; events {{}}"
        f" http {{ access_log off; client_max_body_size 200m; client_body_temp_path {folder}; proxy_temp_path {folder};"
        f" fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};"
        f" upstream model {{ server {upstream.removeprefix('http://')}; keepalive 64; }}"
        f" server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://model; proxy_http_version 1.1;"
        ' proxy_set_header Connection ""; proxy_buffering off; } } }\n'
    )
    process = subprocess.Popen(["nginx", "-c", str(conf), "-p", str(folder)], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        [worker] = [int(child) for child in children_of(process.pid)]
        yield f"http://127.0.0.1:{port}", worker
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def litellm_serving(folder: Path, upstream: str) -> Iterator[tuple[str, int]]:
    """LiteLLM's proxy in front of the stub; its URL and process id."""
    port = free_port()
    config = folder / "litellm.yaml"
    parameters = {"model": "openai/stub", "api_base": f"{upstream}/v1", "api_key": "-"}
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": "*", "litellm_params": parameters}]}))
    process = subprocess.Popen(
        ["litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port, seconds=120)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(port: int, seconds: float = 10) -> None:
    """Until somebody listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port} after {seconds} seconds")


def children_of(pid: int) -> list[str]:
    """The processes that a process has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def memd_serving(folder: Path, upstream: str) -> Iterator[tuple[str, int]]:
    """memd on `folder`; its URL and process id."""
    config = folder / "config.yaml"
    buffer = {"soft_tokens": WINDOW_TOKENS // 4, "hard_tokens": WINDOW_TOKENS // 2}
    config.write_text(yaml.safe_dump({"data_dir": str(folder / "memory"), "buffer": buffer, "log": {"level": "error"}}))
    command = [sys.executable, "-m", "memd", "serve", "--config", str(config), "--port", "0", "--upstream", upstream]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it was asked for"
        line = process.stdout.readline()
        yield line.split("listening on ")[1].split(" ")[0], process.pid
    finally:
        process.terminate()
        process.wait()


def fill(folder: Path, chunks: int) -> None:
    """A store with that many chunks in the default topic."""
    embedder = load_embedder("bundled", 1)
    store = Store.open(
        folder / "memory", dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=5000
    )
    base, chosen = embedded(embedder, 2000), np.random.default_rng(1)
    log = store.topic("default")
    for start in range(0, chunks, 5000):
        log.append(drafts(mixed(base, min(5000, chunks - start), chosen), chosen))
        settle(log)
    log.index_words()
    store.close()


# -- the clients ------------------------------------------------------------------------------------------------------


class Talk:
    """One client's conversation: a history of about `size` bytes that grows by one exchange a request."""

    def __init__(self, size: int, name: str) -> None:
        self._name = name
        self._turns = 0
        self._messages: list[str] = []
        held = 0
        while held < size:
            role = ("user", "assistant")[len(self._messages) % 2]
            self._add(role, f"{name} {held}: " + "the harbour and its boats, " * 15)
            held += len(self._messages[-1])

    def next_body(self, stream: bool) -> bytes:
        """The next request."""
        if self._turns or len(self._messages) % 2:
            self._add("assistant", "Noted.")
        self._turns += 1
        self._add("user", f"{self._name} asks {self._turns}: which of the boats was to go first, and what was decided?")
        return ('{"messages":[' + ",".join(self._messages) + f'],"stream":{str(stream).lower()}}}').encode()

    def _add(self, role: str, content: str) -> None:
        self._messages.append(json.dumps({"role": role, "content": content}))


class Timed(NamedTuple):
    """One request, in seconds."""

    first_byte: float
    whole: float


async def asked(session: aiohttp.ClientSession, url: str, talk: Talk, count: int) -> list[Timed]:
    """One client's requests, one after the other."""
    taken = []
    for _ in range(count):
        body = talk.next_body(stream=False)
        started = time.perf_counter()
        async with session.post(url + PATH, data=body) as answer:
            first = time.perf_counter()
            await answer.read()
            assert answer.status == 200, await answer.text()
        taken.append(Timed(first - started, time.perf_counter() - started))
    return taken


async def measured(url: str, size: int, clients: int, mode: str, pid: int | None) -> Figures:
    """All clients at once, each with a conversation of its own that has begun; `pid`: whose CPU counts."""
    count = max(20, min(REQUESTS // clients, BYTES_PER_RUN // (size * clients)))
    headers = {"X-Memory-Mode": mode, "Content-Type": "application/json"}
    talks = [Talk(size, f"client {number}") for number in range(clients)]
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False, headers=headers))
            for _ in talks
        ]
        pairs = list(zip(sessions, talks, strict=True))
        await asyncio.gather(*(asked(session, url, talk, WARM_UP) for session, talk in pairs))
        used = await quiet(pid)  # what they opened with made memd store what came before
        started = time.perf_counter()
        runs = await asyncio.gather(*(asked(session, url, talk, count) for session, talk in pairs))
        spent = time.perf_counter() - started
    first = [1000 * timed.first_byte for run in runs for timed in run]
    p50, p95, p99 = np.percentile(first, [50, 95, 99]).tolist()
    told = {"p50_ms": p50, "p95_ms": p95, "p99_ms": p99, "per_second": len(first) / spent, "requests": len(first)}
    return told | ({"cpu_ms": 1000 * (cpu_seconds(pid) - used) / len(first)} if pid else {})


async def stream_rate(url: str, mode: str, pid: int | None) -> float:
    """Chunks per second of a stream as fast as it can be relayed, from its head on; the best of five."""
    rates = []
    headers = {"X-Memory-Mode": mode, "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in range(5):
            talk = Talk(500, f"stream {number}")
            await asked(session, url, talk, 1)
            await quiet(pid)  # the chat before, with its very long reply, is stored now
            async with session.post(url + PATH, data=talk.next_body(stream=True)) as answer:
                started = time.perf_counter()
                size = len(await answer.read())
                rates.append(STREAM_CHUNKS / (time.perf_counter() - started))
            assert size >= STREAM_CHUNKS * len(EVENT), "the whole stream"
    return max(rates)


# -- the run ----------------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


async def quiet(pid: int | None) -> float:
    """Wait until a process has nothing left to do of what came before (storing, indexing); its CPU seconds.

    For all targets: a machine is slower just after a pause.
    """
    deadline, used = time.monotonic() + QUIET_SECONDS_MAX, cpu_seconds(pid) if pid else 0.0
    while True:
        await asyncio.sleep(QUIET_SECONDS)
        if pid is None:
            return used
        before, used = used, cpu_seconds(pid)
        if used - before <= QUIET_SHARE_MAX * QUIET_SECONDS or time.monotonic() > deadline:
            return used


async def rows_of(url: str, mode: str, sizes: list[int], clients: list[int], pid: int | None = None) -> dict[str, Any]:
    """Everything measured of one target; `pid`: the process whose CPU counts."""
    row: dict[str, Any] = {"stream_per_second": await stream_rate(url, mode, pid)}
    for size in sizes:
        for number in clients:
            row[f"{size} B, {number} clients"] = await measured(url, size, number, mode, pid)
    return row


async def run(chunks: list[int], sizes: list[int], clients: list[int]) -> dict[str, dict[str, Any]]:
    """Target → figures."""
    rows: dict[str, dict[str, Any]] = {}
    with serving("--stub") as upstream:
        rows["direct"] = await rows_of(upstream, "off", sizes, clients)
        with serving("--bare", upstream) as bare:
            rows["bare pass-through"] = await rows_of(bare, "off", sizes, clients)
        for name, others in (("nginx", nginx_serving), ("litellm", litellm_serving)):
            if shutil.which(name):
                async with _folder() as folder:
                    with others(folder, upstream) as (url, pid):
                        rows[name] = await rows_of(url, "off", sizes, clients, pid)
        for count in chunks:
            async with _folder() as folder:
                fill(folder, count)
                with memd_serving(folder, upstream) as (url, pid):
                    if count == chunks[0]:
                        rows["memd, off"] = await rows_of(url, "off", sizes, clients, pid)
                    name = f"memd, {count:,} chunks"
                    rows[name] = await rows_of(url, "full", sizes, clients, pid)
                    rows[name]["resident_bytes"] = resident_bytes(pid)
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
    console = Console(width=120)
    for size in sizes:
        for number in clients:
            key = f"{size} B, {number} clients"
            table = Table(title=f"history of {size:,} bytes, {number} client{'s' if number > 1 else ''}")
            for column in ("target", "first byte p50", "p95", "p99", "added p50", "requests per second", "CPU"):
                table.add_column(column, justify="left" if column == "target" else "right")
            direct = rows["direct"][key]["p50_ms"]
            for name, row in rows.items():
                told = row[key]
                times = [f"{told[column]:.2f} ms" for column in ("p50_ms", "p95_ms", "p99_ms")]
                cpu = f"{told['cpu_ms']:.2f} ms" if "cpu_ms" in told else ""
                table.add_row(name, *times, f"{told['p50_ms'] - direct:.2f} ms", f"{told['per_second']:,.0f}", cpu)
            console.print(table)
    table = Table(title="a fast stream, and memory")
    for column in ("target", "chunks per second", "resident"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for name, row in rows.items():
        resident = f"{row['resident_bytes'] / 1e6:,.0f} MB" if "resident_bytes" in row else ""
        table.add_row(name, f"{row['stream_per_second']:,.0f}", resident)
    console.print(table)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", default="0,5000,100000", help="comma-separated numbers of chunks in the store")
    parser.add_argument("--clients", default="1,8", help="comma-separated numbers of clients at a time")
    parser.add_argument("--sizes", default="2000,200000", help="comma-separated bytes of history")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.stub:
        asyncio.run(run_stub())
    elif asked.bare:
        asyncio.run(run_bare(asked.bare))
    else:
        given = (asked.chunks, asked.sizes, asked.clients)
        chunks, sizes, clients = ([int(one) for one in text.split(",")] for text in given)
        rows = asyncio.run(run(chunks, sizes, clients))
        report(rows, sizes, clients)
        if asked.json is not None:
            asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
