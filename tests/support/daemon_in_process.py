"""The whole daemon on a test's event loop, with an upstream that is told what to answer, and a client of it."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from daemon_process import tool_call
from recording_upstream import RecordingUpstream, Request, Response, recording_upstream

from memd.daemon.app import Daemon, running
from memd.principals import OWNER, RIGHTS
from memd.settings import model as settings
from memd.settings.model import AuthSettings, TokenSettings
from memd.store.disk import LocalDisk

Answer = Callable[[Request], Response]
STANDING_TASKS = {"tend", "wake", "ask-upstream", "sources", "tokens", "audit", "disk", "unfinished erasures"}
"""What runs in a daemon without anybody having asked for something."""
POLL_SECONDS = 0.005


class Client:
    """An OpenAI client of the daemon, and the daemon's insides."""

    def __init__(self, daemon: Daemon, session: aiohttp.ClientSession, upstream: RecordingUpstream) -> None:
        self.daemon = daemon
        self.upstream = upstream
        self.session = session

    def post(self, *texts: str, mode: str = "full", topic: str = "default", **body: Any) -> Any:
        """A chat of user and assistant texts in turn; to be entered with `async with`."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
        url = f"{self.daemon.base_url}/t/{topic}/v1/chat/completions"
        return self.session.post(url, json={"messages": messages, **body}, headers={"X-Memory-Mode": mode})

    async def ask(self, *texts: str, **options: Any) -> tuple[int, str, dict[str, Any]]:
        """Status, `X-Memory-Status` and the answer."""
        async with self.post(*texts, **options) as answer:
            return answer.status, answer.headers.get("X-Memory-Status", ""), await answer.json()

    async def send(
        self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **members: Any
    ) -> tuple[int, str, Any]:
        """The same of a chat of any messages."""
        url = f"{self.daemon.base_url}/v1/chat/completions"
        async with self.session.post(url, json={"messages": messages, **members}, headers=headers) as answer:
            return answer.status, answer.headers.get("X-Memory-Status", ""), await answer.json()

    async def correct(self, topic: str, **correction: Any) -> None:
        """As a person does, at once."""
        url = f"{self.daemon.own_url}/memd/corrections"
        async with self.session.post(url, json={"topic_id": topic, **correction}) as answer:
            assert answer.status == 200, await answer.text()

    async def chat(self, messages: list[dict[str, Any]], **members: Any) -> str:
        """A chat of any messages, answered: the prompt that the model got."""
        status, _, answer = await self.send(messages, **members)
        assert status == 200, answer
        return self.upstream.prompts[-1]

    async def stored(self, topic_id: str = "default") -> None:
        """All that was said is in the log."""
        topic = await self.daemon.topics.get(topic_id)
        await self.settled(topic_id)
        for conversation in topic.buffer.conversations():
            assert await self.daemon.archiver.store(topic, conversation, len(conversation))

    async def displayed(self) -> list[str]:
        """What the log has, as people read it, the newest first, once everything is stored."""
        await self.stored()
        snapshot = (await self.daemon.topics.get("default")).log.snapshot()
        return [snapshot.read(place).displayed for place in reversed(list(snapshot.latest_places()))]

    async def settled(self, topic_id: str = "default") -> None:
        """Nothing of a turn is under way any more, what is finished is stored, and nobody holds the topic."""
        topic = await self.daemon.topics.get(topic_id)
        await until(lambda: not self.daemon.tasks.names - STANDING_TASKS)
        await self.daemon.archiver.tend_topic(topic)
        await until(lambda: not self.daemon.tasks.names - STANDING_TASKS)
        await until(lambda: topic.idle_seconds > 0)  # while its journal is synced, the topic is held for a moment

    async def receipt(self) -> dict[str, Any]:
        """The latest turn's."""
        [(latest, _)] = self.daemon.receipts.latest(1, OWNER)
        found = self.daemon.receipts.find(latest.turn_id, OWNER)
        assert found is not None
        return {name: getattr(found, name) for name in found.__struct_fields__}


def secret_of(name: str) -> str:
    return f"the-secret-of-{name}-which-is-long-enough"


def token(name: str, topics: str, *rights: Any) -> TokenSettings:
    digest = hashlib.sha256(secret_of(name).encode()).hexdigest()
    return TokenSettings(name=name, token_sha256=digest, topics=tuple(topics.split()), rights=rights)


TOKENS = (
    *(token(right, "team-*", right) for right in RIGHTS),
    token("ann", "team-* ann", "read", "write", "correct"),
    token("bob", "team-*", "read", "write", "correct"),
    token("chief", "team-*", *RIGHTS),
    token("reader", "team-*", "read"),
    token("scribe", "team-*", "read", "write"),
    token("house", "*", "admin"),
)


class House:
    """A daemon with tokens, and its clients."""

    def __init__(self, daemon: Daemon, session: aiohttp.ClientSession, upstream: RecordingUpstream) -> None:
        self.daemon = daemon
        self.upstream = upstream
        self.session = session

    async def ask(self, name: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """Status and answer of one of memd's own routes."""
        shown = {"X-Memory-Token": secret_of(name) if name else "", **headers}
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.daemon.own_url + path, json=body, headers=shown) as answer:
            if answer.content_type == "text/event-stream":
                return answer.status, None
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def call(self, name: str, tool: str, **arguments: Any) -> str:
        """What one of memd's tools says over MCP."""
        accepts = {"Accept": "application/json, text/event-stream"}
        status, answer = await self.ask(name, "/mcp", tool_call(tool, **arguments), **accepts)
        assert status == 200, answer
        return str(answer["result"]["content"][0]["text"])

    async def chat(self, name: str, *texts: str, path: str = "/t/team-a/v1", **more: Any) -> tuple[int, str, Any]:
        """Status, `X-Memory-Status` and the answer of a chat."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
        url, headers = f"{self.daemon.base_url}{path}/chat/completions", {"X-Memory-Token": secret_of(name)}
        headers |= more.pop("headers", {})
        async with self.session.post(url, json={"messages": messages, **more}, headers=headers) as answer:
            status = answer.headers.get("X-Memory-Status", "")
            return answer.status, status, await answer.json()

    async def settled(self) -> None:
        """What was said is stored, and nothing of a turn is under way."""
        for _ in range(2):
            await until(lambda: not self.daemon.tasks.names - STANDING_TASKS)
            for topic in self.daemon.topics.opened():
                await self.daemon.archiver.tend_topic(topic)
                for conversation in topic.buffer.conversations():
                    await self.daemon.archiver.store(topic, conversation, len(conversation))


@asynccontextmanager
async def _running(
    folder: Path,
    window: int,
    *,
    answer: Answer | None = None,
    upstream: dict[str, Any] | None = None,
    files: LocalDisk | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Daemon, aiohttp.ClientSession, Any]]:
    with recording_upstream(window=window, answer=answer) as recorded:
        config = settings.Config(
            listen=settings.ListenSettings(port=0),
            upstream=settings.UpstreamSettings(**{"url": recorded.url, **(upstream or {})}),
            data_dir=folder / "memory",
            **more,
        )
        async with running(config, files=files) as daemon, aiohttp.ClientSession() as session:
            yield daemon, session, recorded


@asynccontextmanager
async def daemon_in_process(folder: Path, *, window: int = 4096, **more: Any) -> AsyncIterator[Client]:
    """A daemon with a log in this folder, and its client.

    Args:
        more: groups of settings, `upstream` as a dictionary; `answer`: what the upstream says to whatever is asked;
            `files`: another disk than the real one.
    """
    at_once = {"buffer": settings.BufferSettings(store_after_seconds=0)}
    async with _running(folder, window, **(at_once | more)) as made:
        yield Client(*made)


@asynccontextmanager
async def house_in(folder: Path, **more: Any) -> AsyncIterator[House]:
    """A daemon with `TOKENS`."""
    async with _running(folder, 8192, auth=AuthSettings(token=secret_of("owner"), tokens=TOKENS), **more) as made:
        yield House(*made)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - it has no event to wait for
            await asyncio.sleep(POLL_SECONDS)
