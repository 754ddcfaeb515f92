"""The clients of bench/overhead.py: their conversations, what a request takes, and the embedding beside it.

Rule: a client sends one request after the other; nothing is timed before the target has done what the requests before
left it to do.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import asyncio
import contextlib
import itertools
import json
import re
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import numpy as np
from overhead_targets import FEW_CHUNKS, FEW_TEXT, PIECE_BY_PIECE, Target, cpu_seconds
from prose import question, texts

from memd.embedding.loading import load_embedder
from memd.settings.model import EmbeddingSettings

PATH = "/v1/chat/completions"
POOL_TEXTS = 2000
QUIET_SECONDS, QUIET_SECONDS_MAX = 0.2, 60.0
QUIET_SHARE_MAX = 0.04
"""Of a core: what a daemon with nothing to do may use."""
STORE_AFTER_SECONDS = 1.6
"""What memd waits after a reply before it stores (1 s by default), and half a second until it looks."""
WARM_QUESTIONS = 5

Figures = dict[str, float]


class Talk:
    """A conversation that grows by one exchange, 0.2 KB, a request."""

    def __init__(self, name: str, messages: list[str] | None = None) -> None:
        """`messages`: as JSON, what was said before."""
        self._chosen = np.random.default_rng(zlib.crc32(name.encode()))
        self._messages = list(messages or [])

    @classmethod
    def of_history(cls, size: int, name: str) -> Talk:
        """One in which about `size` bytes were said."""
        talk = cls(name)
        held = 0
        while held < size or len(talk._messages) % 2:
            role = ("user", "assistant")[len(talk._messages) % 2]
            talk._add(role, f"{name} {held}: {_POOL[talk._chosen.integers(POOL_TEXTS)]}")
            held += len(talk._messages[-1])
        return talk

    @classmethod
    def of_instructions(cls, size: int, name: str) -> Talk:
        """One in which nothing was said yet, with `size` bytes of instructions, the same in all, before it."""
        return cls(name, [json.dumps({"role": "system", "content": " ".join(_POOL[: 1 + size // 300])[:size]})])

    def next_body(self, *, stream: bool, settings: dict[str, Any] | None = None) -> bytes:
        """The next request; `settings` in place of those that ask for a reply of FEW_CHUNKS."""
        self._add("user", question(self._chosen))
        asked = {"model": "stub", **({"max_tokens": FEW_CHUNKS} if settings is None else settings), "stream": stream}
        body = ('{"messages":[' + ",".join(self._messages) + "]," + json.dumps(asked)[1:]).encode()
        self._add("assistant", FEW_TEXT if stream else "Noted.")
        return body

    def _add(self, role: str, content: str) -> None:
        self._messages.append(json.dumps({"role": role, "content": content}))


_POOL = texts(POOL_TEXTS, np.random.default_rng(7))
LONG: dict[str, Any] = {}
"""Settings: a long reply as fast as it can be sent."""
SLOW: dict[str, Any] = {"stop": [PIECE_BY_PIECE]}
"""Settings: a reply one piece at a time."""


class Samples:
    """What the requests of one target took, in seconds."""

    def __init__(self) -> None:
        self.first_bytes: list[float] = []
        self.first_chunks: list[float] = []
        """Of streamed replies."""
        self._counted = 0
        self._seconds = self._cpu_seconds = 0.0

    @contextmanager
    def counting(self, pid: int) -> Iterator[None]:
        """Requests within count for the rate and the CPU of the process."""
        requests, used, started = len(self.first_bytes), cpu_seconds(pid), time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started
        self._cpu_seconds += cpu_seconds(pid) - used
        self._counted += len(self.first_bytes) - requests

    def figures(self) -> Figures:
        """Percentiles in milliseconds, requests a second, milliseconds of CPU a request."""
        told: Figures = {"requests": len(self.first_bytes)}
        for name, seconds in (("first_byte", self.first_bytes), ("chunk", self.first_chunks)):
            for part in (50, 95, 99) if seconds else ():
                told[f"{name}_p{part}_ms"] = 1000 * float(np.percentile(seconds, part))
        if self._counted:
            told["per_second"] = self._counted / self._seconds
            told["cpu_ms"] = 1000 * self._cpu_seconds / self._counted
        return told


class Client:
    """One that asks a target."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._url = target.url + PATH
        self._topics = (
            (f"{target.url}/t/nothing-{number}{PATH}" for number in _TOPICS) if target.is_stored_apart else None
        )

    def begin(self) -> None:
        """Before a new conversation: where each has a topic of its own, that is another now."""
        if self._topics is not None:
            self._url = next(self._topics)

    async def ask(self, talk: Talk, *, stream: bool = False) -> float:
        """One request; the seconds to its first byte, of a streamed reply to its first chunk."""
        body = talk.next_body(stream=stream)
        started = time.perf_counter()
        async with self._session.post(self._url, data=body) as answer:
            head = time.perf_counter()
            part = await answer.content.readany()
            chunk = time.perf_counter()
            assert answer.status == 200 and part, await answer.text()
            await answer.read()
        return (chunk if stream else head) - started

    async def ask_often(self, talk: Talk, count: int, seconds_max: float, *, stream: bool = False) -> list[float]:
        """Requests until `count` or, but for the first, the time is up."""
        taken: list[float] = []
        deadline = time.perf_counter() + seconds_max
        while len(taken) < count and (not taken or time.perf_counter() < deadline):
            taken.append(await self.ask(talk, stream=stream))
        return taken

    @asynccontextmanager
    async def streamed(self, body: bytes) -> AsyncIterator[aiohttp.StreamReader]:
        """The answer to a body that is sent as it is, from its head on."""
        async with self._session.post(self._url, data=body) as answer:
            assert answer.status == 200, await answer.text()
            yield answer.content


_TOPICS = itertools.count()


@asynccontextmanager
async def client_of(target: Target) -> AsyncIterator[Client]:
    """A client with connections of its own."""
    headers = {"X-Memory-Mode": target.mode, "Content-Type": "application/json"}
    async with aiohttp.ClientSession(auto_decompress=False, headers=headers) as session:
        yield Client(session, target)


async def quiet(target: Target) -> float:
    """Wait until a target has nothing left to do of what came before (storing, indexing); the seconds that took."""
    started = time.monotonic()
    deadline = started + QUIET_SECONDS_MAX
    if target.is_storing:
        await asyncio.sleep(STORE_AFTER_SECONDS)
        while await work_left(target) and time.monotonic() < deadline:  # noqa: ASYNC110 - another process
            await asyncio.sleep(QUIET_SECONDS)
    used = cpu_seconds(target.pid)
    while True:
        await asyncio.sleep(QUIET_SECONDS)
        before, used = used, cpu_seconds(target.pid)
        if used - before <= QUIET_SHARE_MAX * QUIET_SECONDS or time.monotonic() > deadline:
            return time.monotonic() - started


async def work_left(target: Target) -> float:
    """Tokens of what was said to memd that are not in its log yet, and the calls that wait for its threads."""
    async with aiohttp.ClientSession() as session, session.get(f"{target.url}/memd/metrics") as answer:
        told = re.findall(r"^memd_(?:buffer_unstored_tokens|queue_depth\S*) (\S+)$", await answer.text(), re.MULTILINE)
        assert told, "memd tells what is left"
        return sum(float(one) for one in told)


async def stored_chunks(target: Target, topics: str) -> int:
    """Chunks in memd's topics whose names begin so."""
    async with aiohttp.ClientSession() as session, session.get(f"{target.url}/memd/stats") as answer:
        held = (await answer.json())["topics"]
        return sum(int(topic["chunks"]) for name, topic in held.items() if name.startswith(topics))


class Alone:
    """The embedding of a question of the same kind, alone in a loop, with the daemon's default settings: `e`."""

    def __init__(self) -> None:
        self._embedder = load_embedder(EmbeddingSettings())
        self._chosen = np.random.default_rng(19)

    def seconds(self, count: int) -> list[float]:
        """What each of so many takes, after a few that are not timed."""
        taken = []
        for _ in range(WARM_QUESTIONS + count):
            asked = question(self._chosen)
            started = time.perf_counter()
            self._embedder.embed_query(asked)
            taken.append(time.perf_counter() - started)
        return taken[WARM_QUESTIONS:]


@asynccontextmanager
async def clients_of(target: Target, count: int) -> AsyncIterator[list[Client]]:
    """So many."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client_of(target)) for _ in range(count)]
