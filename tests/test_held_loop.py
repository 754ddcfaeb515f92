"""An event loop that other work holds longer than a limit: who has answered in the meantime has answered in time."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from multidict import CIMultiDict
from raw_wire import RawUpstream, raw_upstream

from memd.proxy.upstream import connection
from memd.proxy.upstream.client import Upstream
from memd.proxy.upstream.connection import time_of_others
from memd.settings import model
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

LIMIT = 0.05

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on a loop of its own, of either kind."""

    def run_it(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(coroutine)

    return run_it


@pytest.fixture(scope="module")
def mute() -> Iterator[RawUpstream]:
    """A server that reads requests and answers none."""
    with raw_upstream() as upstream:
        upstream.script = lambda peer: peer.close() if peer.wait_until_closed() else None
        yield upstream


@contextmanager
def held(seconds: float = LIMIT / 2) -> Iterator[None]:
    """Hold the loop so long in each of its rounds, as 64 large requests do, while the block runs."""
    loop = asyncio.get_running_loop()
    handle: asyncio.Handle

    def hold() -> None:
        nonlocal handle
        time.sleep(seconds)
        handle = loop.call_soon(hold)

    handle = loop.call_soon(hold)
    try:
        yield
    finally:
        handle.cancel()


@pytest.fixture(autouse=True)
def _little_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", LIMIT)


def _config(url: str) -> model.Config:
    return model.Config(upstream=model.UpstreamSettings(url=url))


async def connects(url: str) -> bool:
    """As a client's request that is passed on; only connecting has a limit."""
    async with _upstream(url) as upstream:
        asked = await upstream.send("GET", "/", CIMultiDict(), None)
        asked.close()
        return bool(asked.status == 200)


async def is_healthy(url: str) -> bool:
    """As a model server is asked that others are waiting for."""
    async with _upstream(url) as upstream:
        return (await upstream.ask("GET", "/health", None, CIMultiDict(), LIMIT)).status == 200


async def tells(url: str) -> bool:
    """As a model server is asked for its models."""
    async with _upstream(url) as upstream:
        return bool((await upstream.ask("GET", "/v1/models", None, CIMultiDict(), LIMIT)).json == {})


@asynccontextmanager
async def _upstream(url: str) -> AsyncIterator[Upstream]:
    upstream = Upstream(_config(url), Tasks(Metrics()))
    try:
        yield upstream
    finally:
        await upstream.close()


Question = Callable[[str], Coroutine[Any, Any, bool]]


@pytest.mark.parametrize("question", [connects, is_healthy, tells])
def test_who_has_answered_while_the_loop_was_held_is_heard(run: Run, raw: RawUpstream, question: Question) -> None:
    async def ask() -> bool:
        with held():
            return await question(raw.url)

    assert run(ask())


@pytest.mark.parametrize("question", [is_healthy, tells])
def test_who_does_not_answer_is_not_waited_for(run: Run, mute: RawUpstream, question: Question) -> None:
    assert not run(question(mute.url))


@pytest.mark.parametrize("seconds", [0.0, LIMIT / 4], ids=["free", "held"])
def test_a_limit_ends_however_the_loop_is_held(run: Run, seconds: float) -> None:
    async def wait() -> float:
        began = time.monotonic()
        with pytest.raises(TimeoutError), held(seconds):
            async with time_of_others(LIMIT):
                await asyncio.Event().wait()
        return time.monotonic() - began

    assert run(wait()) > LIMIT / 2


# What memd trusts its event loop with


def test_a_connection_that_was_given_up_closes_no_file_that_was_opened_since(tmp_path: Path) -> None:
    """As when a client leaves while memd connects to the model server: aiohttp hands the loop a connected socket."""

    async def given_up(connection: socket.socket) -> None:
        connecting = asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=connection)
        task = asyncio.ensure_future(connecting)
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)  # the loop has closed the descriptor: the next file gets its number

    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        uvloop.run(given_up(connection))
    files = [os.open(tmp_path / str(number), os.O_WRONLY | os.O_CREAT) for number in range(20)]
    connection.close()  # as Python does with the last reference, whenever that goes
    for file in files:
        assert os.write(file, b"said") == 4
        os.close(file)
