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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import yaml
from aiohttp import web

WINDOW_TOKENS = 4_000_000
STREAM_CHUNKS = 20_000
FEW_CHUNKS = 8
FEW_TEXT = "".join(f" word{number:02}" for number in range(FEW_CHUNKS))
REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Noted."}, "finish_reason": "stop"}]}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word%02d"}}],"id":"c","object":"chat.completion.chunk"}\n\n'
EVENTS_AT_ONCE = 20
"""That differ: LiteLLM takes a stream of a hundred equal chunks for a model gone mad, and ends it."""
PIECES = 2000
PIECE_SECONDS = 0.0005
"""Between two pieces of a reply that comes piece by piece: each is a packet of its own."""
PIECE_BY_PIECE = "piece by piece"
"""As what a request would stop at, this asks the stub for such a reply: all proxies pass it on."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_PIECES = [b"%x\r\n%s\r\n" % (len(EVENT % number), EVENT % number) for number in range(EVENTS_AT_ONCE)]


class Target(NamedTuple):
    """What requests are sent to."""

    name: str
    url: str
    pid: int
    """Of the process whose CPU and memory count."""
    mode: str = "off"
    """For memd: `X-Memory-Mode`."""
    is_stored_apart: bool = False
    """Whether each conversation has a topic of its own, in which nothing is stored."""

    @property
    def is_storing(self) -> bool:
        """Whether it has work to do after an answer."""
        return self.mode == "full"


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
        elif PIECE_BY_PIECE.encode() in body:
            self._transport.write(STREAM_HEAD)
            self._next_piece(0)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._stream(FEW_CHUNKS if b"max_tokens" in body else STREAM_CHUNKS)
        else:
            self._send(b"200 OK", json.dumps(REPLY).encode())

    def _stream(self, chunks: int) -> None:
        self._transport.write(STREAM_HEAD)
        while chunks:
            now = min(EVENTS_AT_ONCE, chunks)
            self._transport.write(b"".join(_PIECES[:now]))
            chunks -= now
        self._transport.write(STREAM_END)

    def _next_piece(self, number: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_PIECES[number % EVENTS_AT_ONCE] if number < PIECES else STREAM_END)
        if number < PIECES:
            asyncio.get_running_loop().call_later(PIECE_SECONDS, self._next_piece, number + 1)

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
        f" http {{ access_log off; client_max_body_size 200m; client_body_buffer_size 4m;"
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
def litellm_serving(folder: Path, upstream: str) -> Iterator[tuple[str, int]]:
    """LiteLLM's proxy in front of the stub; its URL and process id."""
    config = folder / "litellm.yaml"
    parameters = {"model": "openai/stub", "api_base": f"{upstream}/v1", "api_key": "-"}
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": "*", "litellm_params": parameters}]}))
    # It is on loopback only, for as long as it is measured.
    without_key = {**os.environ, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    with _listening(["litellm", "--config", str(config), "--host", "127.0.0.1"], without_key) as target:
        yield target


@contextlib.contextmanager
def mnemonic_serving(folder: Path, upstream: str) -> Iterator[tuple[str, int]]:
    """mnemonic-proxy with its context management on, as it comes; its URL and process id."""
    with _listening(["mnemonic-proxy", "--upstream", upstream, "--data", str(folder / "data")], None) as target:
        yield target


@contextlib.contextmanager
def _listening(command: list[str], environment: dict[str, str] | None) -> Iterator[tuple[str, int]]:
    port = free_port()
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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
        ("litellm", litellm_serving),
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
def standing_still(targets: Sequence[Target]) -> Iterator[None]:
    """Targets that store nothing while the block runs, as what they have to store takes minutes."""
    for target in targets:
        os.kill(target.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for target in targets:
            os.kill(target.pid, signal.SIGCONT)


@contextlib.contextmanager
def memd_serving(folder: Path, *upstreams: str) -> Iterator[tuple[str, int]]:
    """memd on `folder`, before one model server or several; its URL and process id."""
    config = folder / "config.yaml"
    buffer = {"soft_tokens": WINDOW_TOKENS // 4, "hard_tokens": WINDOW_TOKENS // 2}
    config.write_text(yaml.safe_dump({"data_dir": str(folder / "memory"), "buffer": buffer, "log": {"level": "error"}}))
    before = [part for url in upstreams for part in ("--upstream", url)]
    command = [sys.executable, "-m", "memd", "serve", "--config", str(config), "--port", "0", *before]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it was asked for"
        line = process.stdout.readline()
        yield line.split("listening on ")[1].split(" ")[0], process.pid
    finally:
        process.kill()  # what it has still to store is nobody's
        process.wait()


if __name__ == "__main__":
    asyncio.run(run_stub() if sys.argv[1] == "stub" else run_bare(sys.argv[2]))
