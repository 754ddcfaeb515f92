"""Chats that follow each other, replies that come piece by piece or all at once, and how fast text is stored.

Rule: as in overhead_cells.py, targets take turns, and the embedding alone takes its own when all are quiet.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
from ingest import NOWHERE, Load, after
from ingest import quiet as indexed
from overhead_clients import LONG, SLOW, Alone, Client, Figures, Samples, Talk, clients_of, quiet
from overhead_targets import PIECES, STREAM_CHUNKS, Target, cpu_seconds

from memd.embedding.loading import load_embedder
from memd.proxy.app import running
from memd.settings.model import Config, EmbeddingSettings, ListenSettings, LogSettings, UpstreamSettings
from memd.store.store import TopicLog

ROUNDS = 2
WARM_SECONDS, SECONDS = 3.0, 5.0
"""Of chats before those that count, so that what was said is being stored by then; and of those that do."""
EMBEDDINGS = 20
PIECE_ROUNDS = 3
STREAM_ROUNDS = 3
STORING_ROUNDS = 3


# -- chats that follow each other -----------------------------------------------------------------------------------


async def chats(turns: int, size: int, clients: int, targets: Sequence[Target], alone: Alone) -> dict[str, Figures]:
    """Target → figures of chats of so many turns, each stored while the next is asked; `drain_s`: until all is stored.

    `size`: bytes of instructions before each chat.
    """
    samples = {target.name: Samples() for target in targets}
    drained: dict[str, list[float]] = {target.name: [] for target in targets}
    embeddings: list[float] = []
    for _ in range(ROUNDS):
        for target in targets:
            embeddings += alone.seconds(EMBEDDINGS)
            async with clients_of(target, clients) as asking:
                await _chat_all(asking, turns, size, WARM_SECONDS if target.is_storing else 0.5, Samples())
                with samples[target.name].counting(target.pid):
                    await _chat_all(asking, turns, size, SECONDS if target.is_storing else 1.0, samples[target.name])
            drained[target.name].append(await quiet(target))
    told = {"e_ms": 1000 * float(np.median(embeddings))}
    return {name: one.figures() | told | {"drain_s": max(drained[name])} for name, one in samples.items()}


async def _chat_all(clients: Sequence[Client], turns: int, size: int, seconds: float, samples: Samples) -> None:
    deadline = time.perf_counter() + seconds

    async def chat(client: Client) -> None:
        while time.perf_counter() < deadline:
            client.begin()
            talk = Talk.of_instructions(size, f"chat {next(_CHATS)}")
            for _ in range(turns):
                samples.first_bytes.append(await client.ask(talk))

    await asyncio.gather(*(chat(client) for client in clients))


_CHATS = itertools.count()


# -- streams --------------------------------------------------------------------------------------------------------


async def pieces(targets: Sequence[Target]) -> dict[str, Figures]:
    """Target → microseconds of CPU for each piece of a reply whose pieces come one by one; for storing it, apart."""
    taken: dict[str, list[Figures]] = {target.name: [] for target in targets}
    async for target, client, talk in _in_turns(targets, PIECE_ROUNDS, "pieces"):
        taken[target.name].append(await _piece_by_piece(client, talk, target))
    return {
        name: {key: float(np.median([run[key] for run in runs])) for key in runs[0]} for name, runs in taken.items()
    }


async def _piece_by_piece(client: Client, talk: Talk, target: Target) -> Figures:
    reads = 0
    async with client.streamed(talk.next_body(stream=True, settings=SLOW)) as content:
        await content.readany()
        used = cpu_seconds(target.pid)
        async for _part in content.iter_any():
            reads += 1
        ended = cpu_seconds(target.pid)
    await quiet(target)
    storing = cpu_seconds(target.pid) - ended
    return {"cpu_us": 1e6 * (ended - used) / PIECES, "storing_us": 1e6 * storing / PIECES, "packets": reads}


async def streams(targets: Sequence[Target]) -> dict[str, Figures]:
    """Target → chunks a second of a reply as fast as it can be relayed, from its head on; the best of some."""
    rates: dict[str, list[float]] = {target.name: [] for target in targets}
    async for target, client, talk in _in_turns(targets, STREAM_ROUNDS, "stream"):
        async with client.streamed(talk.next_body(stream=True, settings=LONG)) as content:
            started = time.perf_counter()
            chunks = (await content.read()).count(b"data: {")
            rates[target.name].append(chunks / (time.perf_counter() - started))
        assert chunks >= STREAM_CHUNKS, f"{target.name}: {chunks} chunks of {STREAM_CHUNKS}"
    return {name: {"per_second": max(each)} for name, each in rates.items()}


async def _in_turns(targets: Sequence[Target], rounds: int, name: str) -> AsyncIterator[tuple[Target, Client, Talk]]:
    """Each target in turn with a chat that has begun; what came before it, a very long reply perhaps, is stored."""
    for number in range(rounds):
        for target in targets:
            async with clients_of(target, 1) as [client]:
                client.begin()
                talk = Talk.of_instructions(500, f"{name} {number}")
                await client.ask(talk)
                await quiet(target)
                yield target, client, talk


# -- storing --------------------------------------------------------------------------------------------------------


async def storing(folder: Path, seconds: float) -> Figures:
    """Tokens a second through the daemon's buffer and archiver, and where its chunks are only embedded."""
    embedder = load_embedder(EmbeddingSettings())
    stored: list[float] = []
    embedded: list[float] = []
    config = Config(
        listen=ListenSettings(port=0),
        upstream=UpstreamSettings(url=NOWHERE),
        data_dir=folder,
        log=LogSettings(level="error"),
    )
    async with running(config) as daemon:
        topic = await daemon.topics.get("written")
        work = Load(daemon, topic)
        for number in range(1 + STORING_ROUNDS):
            seen, tokens = set(_spoken(topic.log)), work.tokens
            rate = await work.until(after(seconds))
            await indexed(daemon)
            texts = [text for place, text in _spoken(topic.log).items() if place not in seen]
            started = time.perf_counter()
            for start in range(0, len(texts), embedder.batch_texts):
                embedder.embed_many(texts[start : start + embedder.batch_texts])
            if number:  # the first warms up
                stored.append(rate)
                embedded.append((work.tokens - tokens) / (time.perf_counter() - started))
    return {
        "stored_per_second": float(np.median(stored)),
        "embedded_per_second": float(np.median(embedded)),
        "stored_per_embedded": float(np.median(np.divide(stored, embedded))),
    }


def _spoken(log: TopicLog) -> dict[int, str]:
    """Of each live chunk its `canonical_id` and what was embedded of it."""
    snapshot = log.snapshot()
    places = [(segment, row) for segment, view in snapshot.views.items() for row in np.flatnonzero(~view.dead).tolist()]
    return {entry.canonical_id: entry.spoken for entry in snapshot.read_many(places).values()}
