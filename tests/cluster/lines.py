"""What lies between the processes of a cluster: TCP lines that can be slow, frozen, cut, or shut.

Rule: a line has one port for all its life, and it is the other side's address that may change; whoever uses a line
cannot tell it from the server behind it, until something is done to it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

PIECE_BYTES = 1 << 16


class Lines:
    """The thread in which all lines are served."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lines", daemon=True)
        self._thread.start()
        self._lines: list[Line] = []

    def to(self, target: Path) -> Line:
        """A new line to a Unix socket, open."""
        line = Line(self, target)
        self._lines.append(line)
        return line

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the thread, and wait for its end."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def open_all(self) -> None:
        """Let everything through again."""
        for line in self._lines:
            line.open()

    def close(self) -> None:
        """End all lines and the thread."""
        for line in self._lines:
            self.run(line.end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Line:
    """One line. Its methods are for any thread but that of the lines."""

    def __init__(self, lines: Lines, target: Path) -> None:
        self.target = target
        self._lines = lines
        self._passes = asyncio.Event()
        self.delay_seconds = 0.0
        """Before each piece of what is asked is passed on."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = socket.socket()  # bound for good, so that the port is nobody else's while the line is shut
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self.open()

    def open(self) -> None:
        """Pass everything on."""
        self._lines.run(self._open())

    def freeze(self) -> None:
        """Take what is sent and pass nothing on, as a network that drops all packets does."""
        self._lines.run(self._freeze())

    def cut(self) -> None:
        """End all connections; new ones are served."""
        self._lines.run(self._cut())

    def refuse(self) -> None:
        """Refuse new connections; those that there are go on."""
        self._lines.run(self._refuse())

    def shut(self) -> None:
        """End all connections and refuse new ones."""
        self._lines.run(self._shut())

    async def end(self) -> None:
        """Serve nobody any more."""
        await self._shut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._held.close()

    async def _open(self) -> None:
        self.delay_seconds = 0.0
        self._passes.set()
        if self._server is None:
            shared = {"reuse_port": True} if hasattr(socket, "SO_REUSEPORT") else {}
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, **shared)

    async def _freeze(self) -> None:
        self._passes.clear()

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _shut(self) -> None:
        await self._refuse()
        await self._cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._connect(reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        theirs, further = await asyncio.open_unix_connection(str(self.target))
        self._writers.add(further)
        tasks = [
            asyncio.create_task(self._pass_on(reader, further, is_asked=True)),
            asyncio.create_task(self._pass_on(theirs, writer)),
        ]
        self._tasks.update(tasks)
        try:
            await asyncio.gather(*tasks)
        finally:
            self._tasks.difference_update(tasks)
            self._writers.discard(further)
            further.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_asked: bool = False
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._passes.wait()
                if is_asked and self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                writer.write(data)
                await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.close()
