"""A daemon inside the process of one command, for a folder on which none is running.

Rule: it is an ordinary daemon, in a thread, on a free port of this machine. It gives the same answers as a running one,
so commands need only one way to ask.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from memd.admin.proof import command_token
from memd.ingest.redaction.redactor import Redactor
from memd.proxy.app import running
from memd.settings.model import AdminSettings, Config, ListenSettings
from memd.telemetry.logging import configure_logging


@contextmanager
def embedded_daemon(config: Config, command: str) -> Iterator[tuple[str, str]]:
    """Run a daemon for a command while the block runs, and yield the URL of its own routes and the token of commands.

    Raises:
        StoreLocked: a daemon is running on the folder.
        MemdError: it cannot be started.
    """
    ingest = msgspec.structs.replace(config.ingest, reindex_seconds=0)  # a command looks at sources if it is for that
    listen = ListenSettings(host="127.0.0.1", port=0)
    config = msgspec.structs.replace(config, listen=listen, admin=AdminSettings(), ingest=ingest)
    # Warnings about the folder do not belong into a command's output.
    configure_logging(msgspec.structs.replace(config.log, level="error"), Redactor.of(config.ingest).text)
    state = _State()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(config, command, state)), name="memd-embedded")
    thread.start()
    state.ready.wait()
    try:
        if state.problem is not None:
            raise state.problem
        yield state.url, state.token
    finally:
        state.end()
        thread.join()


class _State:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.url = ""
        self.token = ""
        self.problem: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stop: asyncio.Event | None = None

    def end(self) -> None:
        """End the daemon; called in the command's thread."""
        if self.problem is None and self.loop is not None and self.stop is not None:
            self.loop.call_soon_threadsafe(self.stop.set)


async def _serve(config: Config, command: str, state: _State) -> None:
    state.loop, state.stop = asyncio.get_running_loop(), asyncio.Event()
    try:
        async with running(config, command=command) as daemon:
            state.url, state.token = daemon.own_url, command_token(daemon.token_watch.secret)
            state.ready.set()
            await state.stop.wait()
    except BaseException as error:  # raised again in the command's thread
        state.problem = error
    finally:
        state.ready.set()
