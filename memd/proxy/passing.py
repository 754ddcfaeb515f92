"""The body of an answer on its way to the client, part by part.

Rule: what came is passed on before anything else is done with it. A reply comes in thousands of pieces, each a packet,
and a task that wakes for each costs more than all else that is done for it: while nobody has to wait for anything, a
piece is written within the call that read it (bench/NOTES.md, 2026-11-23).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from memd.errors import UpstreamError
from memd.proxy.upstream.connection import UpstreamConnection
from memd.telemetry.request_log import RequestRecord


class BrokenAnswer(UpstreamError):
    """The upstream died in the middle of an answer."""


async def parts_of(answer: aiohttp.ClientResponse, record: RequestRecord, read: bytes = b"") -> AsyncIterator[bytes]:
    """Yield an answer's body as it arrives, after what has been `read` of it already.

    Raises:
        BrokenAnswer: the connection ended before the body did.
    """
    if read:
        record.note_answer_start()
        yield read
    while True:
        try:
            part = await answer.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BrokenAnswer(type(error).__name__) from error  # its message quotes the bytes that could not be parsed
        record.note_answer_start()
        if not part:
            return
        yield part


async def no_pause() -> None:
    """Wait for nothing."""


class Passing:
    """Passes the body of one answer on until it ends."""

    def __init__(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        answer: aiohttp.ClientResponse,
        *,
        look: Callable[[bytes], bytes] = bytes,
        is_due: Callable[[], bool] = bool,
        pause: Callable[[], Awaitable[None]] = no_pause,
    ) -> None:
        """
        Args:
            response: prepared.
            look: is given each part and returns the bytes to send in its place.
            is_due: whether to `pause` before the bytes that `look` returned last are sent.
        """
        self._client: Any = request.protocol
        self._response = response
        self._answer = answer
        self._look, self._is_due, self._pause = look, is_due, pause
        self._left = b""
        self._needed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, parts: AsyncIterator[bytes]) -> None:
        """Pass on `parts`, which read the answer.

        Raises:
            BrokenAnswer: as they do.
        """
        if not self._answer.content.total_bytes and not self._answer.content.is_eof():
            await self._response.write(b"")  # the head goes alone, as it came
        async for part in parts:
            passed = self._look(part)
            while True:
                if self._is_due():
                    await self._pause()
                await self._response.write(passed)
                if not passed:
                    break
                passed = await self._pass_directly()

    async def _pass_directly(self) -> bytes:
        """Pass on what comes while this waits; returns what `look` returned last, if it has not been sent."""
        connection, content = self._answer.connection, self._answer.content
        upstream = None if connection is None else connection.protocol
        is_chunked = self._response.headers.get("Transfer-Encoding") == "chunked"
        if not is_chunked or not isinstance(upstream, UpstreamConnection) or content.is_eof() or content.exception():
            return b""
        self._left, self._needed = b"", asyncio.get_running_loop().create_future()
        upstream.on_received = self._received
        self._received()  # what came meanwhile
        try:
            await self._needed
        finally:
            if upstream.on_received == self._received:  # not if another request has the connection by now
                upstream.on_received = None
        return self._left

    def _received(self) -> None:
        """Pass on what came, unless the task is needed for it."""
        content = self._answer.content
        while not self._needed.done():
            transport = self._client.transport
            is_stopped = self._client.writing_paused or transport is None or transport.is_closing()
            if is_stopped or content.is_eof() or content.exception() is not None:
                self._needed.set_result(None)
                return
            if not (part := content.read_nowait()):
                return
            passed = self._look(part)
            if self._is_due():
                self._left = passed
                self._needed.set_result(None)
            elif passed:
                transport.write(b"%x\r\n%b\r\n" % (len(passed), passed))
