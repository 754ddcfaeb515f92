"""A daemon for the time of one command, for when none runs on the folder.

Rule: the same daemon as any, on a free port of this machine, in a thread; its answers are those that a user's own would
give, so commands need one way of asking only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from memd.proxy.app import running
from memd.settings.model import Config, ListenSettings


@contextmanager
def temporary(config: Config) -> Iterator[str]:
    """Its URL; it has ended when the block is left.

    Raises:
        StoreLocked: a daemon is running on the folder.
        MemdError: it cannot be started.
    """
    config = msgspec.structs.replace(config, listen=ListenSettings(host="127.0.0.1", port=0))
    logging.getLogger("memd").setLevel(logging.ERROR)  # what is degraded here is no news to a command
    state = _State()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(config, state)), name="memd-temporary")
    thread.start()
    state.ready.wait()
    try:
        if state.problem is not None:
            raise state.problem
        yield state.url
    finally:
        state.end()
        thread.join()


class _State:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.url = ""
        self.problem: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stop: asyncio.Event | None = None

    def end(self) -> None:
        """From the command's thread."""
        if self.problem is None and self.loop is not None and self.stop is not None:
            self.loop.call_soon_threadsafe(self.stop.set)


async def _serve(config: Config, state: _State) -> None:
    state.loop, state.stop = asyncio.get_running_loop(), asyncio.Event()
    try:
        async with running(config) as daemon:
            state.url = daemon.base_url
            state.ready.set()
            await state.stop.wait()
    except BaseException as error:  # raised again in the command's thread
        state.problem = error
    finally:
        state.ready.set()
