"""What bench/overhead.py sends its requests to: a stub of an upstream, and what can stand before it.

Rule: each in a process of its own with one worker, as its documentation says for one machine; those that are not memd's
are measured where they are installed. Run as a script this is the stub, or the bare pass-through.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import yaml
from aiohttp import web
from daemons import environment

HERE = Path(__file__).resolve().parent.parent
WINDOW_TOKENS = 4_000_000
STREAM_CHUNKS = 20_000
FEW_CHUNKS = 8
REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Noted."}, "finish_reason": "stop"}]}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word%02d"}}],"id":"c","object":"chat.completion.chunk"}\n\n'
EVENTS = 20
"""That differ."""
QUIET_SECONDS, QUIET_SECONDS_MAX, QUIET_STEP_SECONDS = 2.5, 900.0, 0.25
QUIET_SHARE_MAX = 0.06
"""Of a core: what a daemon with nothing to do may use."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
SLOWLY = b'"slowly"'
"""In a request: its reply takes REPLY_SECONDS from the first byte to the last, so that what is done before the last
one can be told from what is done before the first."""
REPLY_SECONDS = 0.05
_PIECES = [b"%x\r\n%s\r\n" % (len(EVENT % number), EVENT % number) for number in range(EVENTS)]


class Target(NamedTuple):
    """What requests are sent to."""

    name: str
    url: str
    pid: int
    """Of the process whose CPU and memory count."""
    mode: str = "off"
    """For memd: `X-Memory-Mode`."""


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
            self._stream(FEW_CHUNKS if b"max_tokens" in body else STREAM_CHUNKS, takes_time=SLOWLY in body)
        else:
            self._send(b"200 OK", json.dumps(REPLY).encode())

    def _stream(self, chunks: int, *, takes_time: bool) -> None:
        self._transport.write(STREAM_HEAD)
        for number in range(chunks):  # each with a send of its own, while the socket takes them
            self._transport.write(_PIECES[number % EVENTS])
        if takes_time:
            asyncio.get_running_loop().call_later(REPLY_SECONDS, self._transport.write, STREAM_END)
        else:
            self._transport.write(STREAM_END)

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
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """A process of this script that prints its port: `stub`, or `bare` and an upstream; its URL and process id."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it was asked for"
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
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
        f" http {{ access_log off; keepalive_requests 1000000; client_max_body_size 200m; client_body_buffer_size 4m;"
        f" client_body_temp_path {folder}; proxy_temp_path {folder};"
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
def mnemonic_serving(folder: Path, upstream: str) -> Iterator[tuple[str, int]]:
    """mnemonic-proxy with its context management on, as it comes; its URL and process id."""
    port = free_port()
    command = ["mnemonic-proxy", "--upstream", upstream, "--data", str(folder / "data"), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, seconds=120)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def others() -> Iterator[tuple[str, Callable[[Path, str], AbstractContextManager[tuple[str, int]]]]]:
    """(name, how to start it) of what else is installed."""
    for name, starting in (
        ("nginx", nginx_serving),
        ("mnemonic-proxy", mnemonic_serving),
    ):
        if shutil.which(name):
            yield name, starting


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
    """What a process has used so far, to the microsecond (`/proc` tells hundredths of a second)."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


@contextlib.contextmanager
def standing_still(pids: Collection[int]) -> Iterator[None]:
    """Processes that do nothing while the block runs: what one has still to store takes no time from another."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def wait_until_quiet(pid: int, seconds: float = QUIET_SECONDS, seconds_max: float = QUIET_SECONDS_MAX) -> float:
    """Until a process has done nothing for some seconds; how long it went on before."""
    began = quiet_since = time.monotonic()
    used = cpu_seconds(pid)
    while time.monotonic() - quiet_since < seconds and time.monotonic() - began < seconds_max:
        time.sleep(QUIET_STEP_SECONDS)
        used, before = cpu_seconds(pid), used
        if used - before > QUIET_SHARE_MAX * QUIET_STEP_SECONDS:
            quiet_since = time.monotonic()
    return quiet_since - began


@contextlib.contextmanager
def memd_serving(
    folder: Path, *upstreams: str, tree: Path = HERE, settings: dict[str, dict[str, int]] | None = None
) -> Iterator[tuple[str, int]]:
    """memd on `folder`, of a source tree, before one model server or several; its URL and process id."""
    config = folder / "config.yaml"
    told = {"data_dir": str(folder / "memory"), "log": {"level": "error"}, "admin": {"port": 0}, **(settings or {})}
    config.write_text(yaml.safe_dump(told))
    before = [part for url in upstreams for part in ("--upstream", url)]
    command = [sys.executable, "-m", "memd", "serve", "--config", str(config), "--port", "0", *before]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(tree), cwd=tree)
    try:
        assert process.stdout is not None, "it was asked for"
        line = process.stdout.readline()
        yield line.split("listening on ")[1].split(" ")[0], process.pid
    finally:
        process.kill()  # what it has still to store is nobody's
        process.wait()


if __name__ == "__main__":
    asyncio.run(run_stub() if sys.argv[1] == "stub" else run_bare(sys.argv[2]))
