"""From messages to durable chunks: how fast, where the time goes, and what a question notices of it.

Backs these claims: cutting into chunks, appending (with its fsync) and indexing take together less than 15 % of the
time that embedding takes; while messages are stored at full speed, the p99 of a recall is at most 3 times what it is
in peace; merging is not noticed either.

The costs are measured one after the other in one thread, with the daemon's own drafter and log, because in the daemon
indexing runs beside embedding and both would be charged for the other's time. The speed and the recalls are measured in
the whole daemon: conversations go into the hot buffer and through its archiver, questions through its recall; peace and
load take turns, so that what else the machine does meets both. Inputs are made by ingest_texts.py, seeded; segments are
small, so that some are sealed and merged in a short run.

    python bench/ingest.py [--seconds 20] [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np
from ingest_texts import KINDS, conversation, questions
from rich.console import Console
from rich.table import Table
from store import drafts
from vectors import embedded, mixed

from memd.assets import ranks_bytes
from memd.conversation.conversation import History
from memd.conversation.events import Closed
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.daemon.app import Daemon, running
from memd.embedding.embedder import Embedder
from memd.embedding.loading import load_embedder
from memd.ingest import pipeline
from memd.ingest.chunking import split
from memd.ingest.pipeline import Cutter, Drafter, unstored_runs
from memd.ingest.topics import Topic
from memd.messages import Message, chain_all
from memd.recall.retrieve import Budget
from memd.settings.model import (
    Config,
    EmbeddingSettings,
    ListenSettings,
    LogSettings,
    SegmentSettings,
    UpstreamSettings,
)
from memd.store.store import ModelId, Store, StoreShared

SEGMENT_ENTRIES = 500
"""Of the topic that is written to: one is full every few seconds."""
MERGED, MERGED_SEGMENTS, MERGED_ENTRIES = "merging", 8, 2500
ROUNDS = 5
"""Turns of peace and load."""
PAUSE_SECONDS = 0.02
"""Between two questions: ingestion stands back for each, and must not come to a halt."""
SAMPLES_MIN = 100
BUDGET = Budget(2000)
WARMING_UP = "warming up"
NOWHERE = "http://127.0.0.1:9"
"""The upstream is not asked for anything here."""

Figures = dict[str, float]
Given = ParamSpec("Given")
Result = TypeVar("Result")


# -- what it costs ------------------------------------------------------------------------------------------------


class Spent:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, name: str, work: Callable[Given, Result]) -> Callable[Given, Result]:
        """`work`, its time counted under `name`."""

        def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            started = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return run


def costs(kind: str, folder: Path, embedder: Embedder, counter: TokenCounter, seconds: float) -> Figures:
    """Where the time goes for one kind of text: seconds per million tokens of it, each step after the other."""
    spent = Spent()
    model = ModelId(embedder.dimension, embedder.fingerprint)
    store = Store(folder, StoreShared(model=model, segment_entries_max=5_000))
    log = store.topic("costs")
    drafter = Drafter(
        Cutter(Config().chunking, counter), Config().dedupe.cosine, spent.timed("embedding", embedder.embed_many)
    )
    tokens = chunks = 0
    started = time.perf_counter()
    with patch.object(pipeline, "split", spent.timed("split", split)):
        for seed in itertools.count():
            if time.perf_counter() - started > seconds:
                break
            messages = conversation(kind, seed)
            digests = chain_all(message.content_digest for message in messages)
            tokens += sum(counter.count(message.text) for message in messages)
            runs = unstored_runs(log, list(zip(digests, messages, strict=True)))
            made = spent.timed("drafts", drafter.drafts)(log, runs)
            spent.timed("append", log.append)(made)
            spent.timed("words", log.complete_words)()
            chunks += len(made)
    store.close()
    return _per_million(spent.seconds, tokens) | {
        "tokens": tokens,
        "tokens_per_chunk": tokens / chunks,
    }


def _per_million(seconds: Mapping[str, float], tokens: int) -> Figures:
    parts = {
        "embedding": seconds["embedding"],
        "chunking": seconds["split"],
        "repeats": seconds["drafts"] - seconds["split"] - seconds["embedding"],
        "append": seconds["append"],
        "words": seconds["words"],
    }
    others = sum(parts[name] for name in ("chunking", "repeats", "append", "words"))
    figures = {name: 1e6 * part / tokens for name, part in parts.items()}
    return figures | {"others_per_embedding": others / seconds["embedding"]}


# -- the daemon under load ----------------------------------------------------------------------------------------


class Load:
    """Conversations of all kinds, one after the other, through the buffer and the archiver into one topic."""

    def __init__(self, daemon: Daemon, topic: Topic) -> None:
        self._daemon = daemon
        self._topic = topic
        self._seeds = itertools.count(1_000_000)
        self.tokens = 0

    async def until(self, ended: Callable[[], bool]) -> float:
        """Store conversations until told to end; tokens a second."""
        before, started = self.tokens, time.perf_counter()
        for kind in itertools.cycle(KINDS):
            if ended():
                break
            await self._store(conversation(kind, next(self._seeds)))
        return (self.tokens - before) / (time.perf_counter() - started)

    async def _store(self, messages: list[Message]) -> None:
        digests = [message.content_digest for message in messages]
        held = self._topic.buffer.receive(
            History(messages, digests, self._daemon.counter.messages), time.time()
        ).conversation
        assert await self._daemon.archiver.store(self._topic, held, len(held)), "the disk takes it"
        self._topic.buffer.record(Closed(held.id))
        self.tokens += sum(self._daemon.counter.count(message.text) for message in messages)


class Asker:
    """Asks one question after the other, with a pause between them; keeps what they took, in milliseconds."""

    def __init__(self, daemon: Daemon, topic: Topic) -> None:
        self._daemon = daemon
        self._topic = topic
        self._questions = itertools.cycle(questions(500, seed=11))
        self._took: defaultdict[str, list[float]] = defaultdict(list)

    async def until(self, ended: Callable[[], bool], state: str) -> None:
        """Ask until told to end."""
        while not ended():
            started = time.perf_counter()
            await self._daemon.retriever.retrieve(next(self._questions), [self._topic.log], BUDGET)
            self._took[state].append(1000 * (time.perf_counter() - started))
            await asyncio.sleep(PAUSE_SECONDS)

    def states(self) -> list[str]:
        """In which something was asked, in their order."""
        return [state for state in self._took if state != WARMING_UP]

    def figures(self, state: str) -> Figures:
        """Of all recalls in one state."""
        took = self._took[state]
        p50, p99 = np.percentile(took, [50, 99]).tolist()
        return {"recalls": len(took), "p50_ms": p50, "p99_ms": p99}


def after(seconds: float) -> Callable[[], bool]:
    """True once that time has passed."""
    deadline = time.perf_counter() + seconds
    return lambda: time.perf_counter() > deadline


async def under_load(daemon: Daemon, prepared: Path, seconds: float) -> dict[str, Figures]:
    """State of the daemon → what a recall takes in it, and how many tokens a second are stored."""
    topic = await daemon.topics.get("written")
    load, asker = Load(daemon, topic), Asker(daemon, topic)
    rates: defaultdict[str, list[float]] = defaultdict(list)
    await asker.until(after(1), WARMING_UP)
    for _ in range(ROUNDS):
        rates["nobody asks"].append(await load.until(after(seconds / ROUNDS)))
        await quiet(daemon)
        await asker.until(after(seconds / ROUNDS), "idle")
        loading = after(seconds / ROUNDS)
        rate, _none = await asyncio.gather(load.until(loading), asker.until(loading, "ingesting"))
        rates["ingesting"].append(rate)
        await quiet(daemon)
    await asker.until(after(seconds / ROUNDS), "idle")
    (prepared / MERGED).rename(daemon.config.data_dir / MERGED)
    working = asyncio.ensure_future(_worked_off(daemon, await daemon.topics.get(MERGED)))
    await asker.until(working.done, MERGED)
    await working
    await asker.until(after(seconds / ROUNDS), "idle")
    rows = {state: asker.figures(state) for state in asker.states()}
    for state, measured in rates.items():
        rows.setdefault(state, {})["tokens_per_second"] = float(np.median(measured))
    return rows


async def quiet(daemon: Daemon) -> None:
    """Wait until nothing is left to be indexed."""
    while any(has_work(daemon, topic) for topic in daemon.topics.opened()):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.1)


def has_work(daemon: Daemon, topic: Topic) -> bool:
    """Whether an index of the topic is behind."""
    return bool(topic.log.wordless or topic.log.due_merge())


async def _worked_off(daemon: Daemon, topic: Topic) -> None:
    """Let a topic be merged, and wait until that is done."""
    with topic.used():
        daemon.archiver.indexer.look_after(topic)
        while topic.log.due_merge():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


def prepare(folder: Path, embedder: Embedder) -> None:
    """A topic with sealed segments that are not merged."""
    base, chosen = embedded(embedder, 1000), np.random.default_rng(3)
    model = ModelId(embedder.dimension, embedder.fingerprint)
    store = Store(folder, StoreShared(model=model, segment_entries_max=MERGED_ENTRIES))
    log = store.topic(MERGED)
    for _ in range(MERGED_SEGMENTS):
        log.append(drafts(mixed(base, MERGED_ENTRIES, chosen), chosen))
    store.close()


# -- the run ------------------------------------------------------------------------------------------------------


async def in_daemon(folder: Path, prepared: Path, seconds: float) -> dict[str, Figures]:
    """Start the daemon and measure in it."""
    config = Config(
        listen=ListenSettings(port=0),
        upstream=UpstreamSettings(url=NOWHERE),
        data_dir=folder,
        segment=SegmentSettings(max_entries=SEGMENT_ENTRIES),
        log=LogSettings(level="error"),
    )
    async with running(config) as daemon:
        return await under_load(daemon, prepared, seconds)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="memd-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(by_kind: dict[str, Figures], rows: dict[str, Figures]) -> None:
    """Print where the time goes, and what a recall takes."""
    console = Console(width=120)
    table = Table(title="seconds per million tokens, one step after the other")
    shares = ("embedding", "chunking", "repeats", "append", "words")
    for column in ("text", "tokens per chunk", *shares, "all but embedding ÷ embedding"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for kind, row in by_kind.items():
        parts = [f"{row[share.replace(' ', '_')]:.1f}" for share in shares]
        table.add_row(kind, f"{row['tokens_per_chunk']:.0f}", *parts, f"{100 * row['others_per_embedding']:.1f} %")
    console.print(table)
    table = Table(title="a recall, and tokens stored")
    for column in ("while", "recalls", "p50", "p99", "p99 ÷ idle", "tokens per second"):
        table.add_column(column, justify="left" if column == "while" else "right")
    idle = rows["idle"]["p99_ms"]
    for name, row in rows.items():
        rate = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
        asked = ["", "", "", ""]
        if "p99_ms" in row:
            few = "" if row["recalls"] >= SAMPLES_MIN else " (few)"
            times = [f"{row[column]:.2f} ms" for column in ("p50_ms", "p99_ms")]
            asked = [f"{row['recalls']:,.0f}{few}", *times, f"{row['p99_ms'] / idle:.2f}"]
        table.add_row(name, *asked, rate)
    console.print(table)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20, help="for each thing that is measured (costs: a third)")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    embedder, counter = load_embedder(EmbeddingSettings()), TokenCounter(cl100k_base(ranks_bytes()))
    by_kind: dict[str, Figures] = {}
    with _folder() as folder:
        prepare(folder / "prepared", embedder)
        for kind in KINDS:
            by_kind[kind] = costs(kind, folder / kind, embedder, counter, asked.seconds / 3)
        rows = asyncio.run(in_daemon(folder / "memory", folder / "prepared", asked.seconds))
    report(by_kind, rows)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"costs": by_kind, "recall": rows}, indent=1))


if __name__ == "__main__":
    main()
