"""Whose turn it is to store: what a request waits for goes before what is done in the background.

Rule: one at a time. Work in the background is in steps of a second or two, and there may be dozens of them in a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType


class StoringLock:
    """A lock, in the order of arrival: `async with lock` in the background, `async with lock.first()` for a request."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._hurried = 0
        self._is_calm = asyncio.Event()
        self._is_calm.set()

    async def __aenter__(self) -> None:
        while True:
            await self._is_calm.wait()
            await self._lock.acquire()
            if not self._hurried:
                return
            self._lock.release()  # somebody in a hurry has come meanwhile

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @asynccontextmanager
    async def first(self) -> AsyncIterator[None]:
        """Hold it before all that wait in the background."""
        self._hurried += 1
        self._is_calm.clear()
        try:
            async with self._lock:
                yield
        finally:
            self._hurried -= 1
            if not self._hurried:
                self._is_calm.set()
