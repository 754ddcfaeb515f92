"""A daemon in this process before a model server that keeps the prompts: what the benches of what is found ask.

Rule: everything goes over HTTP, but storing, which is not waited for but done at once. Who only asks takes daemons.py.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from quality_data import Talk

from memd.daemon.app import Daemon, running
from memd.settings.model import (
    BufferSettings,
    Config,
    InjectionSettings,
    ListenSettings,
    LogSettings,
    UpstreamSettings,
)

WINDOW_TOKENS = 1_000_000


class StandIn:
    """An upstream that says what it is told to say and keeps the last prompt."""

    def __init__(self) -> None:
        self.reply = ""
        self.last = ""

    async def handle(self, request: web.Request) -> web.Response:
        """Any request."""
        if request.path == "/props":
            return web.json_response({"default_generation_settings": {"n_ctx": WINDOW_TOKENS}, "model_alias": "stub"})
        if not request.path.endswith("/chat/completions"):
            return web.json_response({}, status=404)
        self.last = (await request.json())["messages"][-1]["content"]
        message = {"role": "assistant", "content": self.reply}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@asynccontextmanager
async def serving(stand_in: StandIn, config: Config) -> AsyncIterator[tuple[Daemon, aiohttp.ClientSession]]:
    """The daemon in front of the stand-in, and a client."""
    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/{path:.*}", stand_in.handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = UpstreamSettings(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        async with (
            running(msgspec.structs.replace(config, upstream=upstream)) as daemon,
            aiohttp.ClientSession() as client,
        ):
            yield daemon, client
    finally:
        await runner.cleanup()


async def ask(daemon: Daemon, client: aiohttp.ClientSession, messages: list[Any], topic: str, mode: str) -> None:
    """One chat request."""
    url = f"{daemon.base_url}/t/{topic}/v1/chat/completions"
    async with client.post(url, json={"messages": messages}, headers={"X-Memory-Mode": mode}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def tell(talks: list[Talk], config: Config) -> None:
    """Every turn of every session, in order; on return all of it is in the log."""
    stand_in = StandIn()
    async with serving(stand_in, config) as (daemon, client):
        for talk in talks:
            for session in talk.sessions:
                for end in range(1, len(session) + 1):
                    if session[end - 1]["role"] == "user" and (end == len(session) or session[end]["role"] != "user"):
                        stand_in.reply = session[end]["content"] if end < len(session) else "Yes."
                        await ask(daemon, client, session[:end], talk.topic, "full")
            topic = await daemon.topics.get(talk.topic)
            for conversation in topic.buffer.conversations():
                assert await daemon.archiver.store(topic, conversation, len(conversation)), "stored"


def config_of(folder: Path, budget: int) -> Config:
    """The daemon's settings for one run: as they come, but for the budget."""
    return Config(
        listen=ListenSettings(port=0),
        data_dir=folder,
        buffer=BufferSettings(soft_tokens=WINDOW_TOKENS // 4, hard_tokens=WINDOW_TOKENS // 2),
        injection=InjectionSettings(budget_tokens=budget),
        log=LogSettings(level="error"),
    )
