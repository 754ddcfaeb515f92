"""What one retrieval takes of the processor beside the embedding model, and how many calls, over stores of each size.

    python bench/retrieval.py --store DIR [--chunks 200,5000,100000] [--talk FOLDER --data NAME=PATH] [--json FILE]

Backs the claim that recall cannot be felt. The daemon's own retriever is asked in this process, one question at a time,
each after another that was not measured; the model has read all of them before, so that it takes no part. Calls are
counted in a second run, in all threads. Words and vectors of the stores are made (prose.py, vectors.py); `--talk`,
where recall.py stored `--data`, is real: its second conversation, asked its own questions. `--store` keeps the stores,
and `--fill` makes them; another version is measured over a copy of them, with PYTHONPATH set to its source tree.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import functools
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from prose import question
from recall import answered, read_data

from memd.daemon.app import running
from memd.embedding.loading import load_embedder
from memd.recall.retrieve import Budget
from memd.settings.model import Config, EmbeddingSettings, ListenSettings, LogSettings

SIZES = "200,5000,100000"
QUESTIONS, ROUNDS = 40, 5
BUDGET_TOKENS = 2000
REST_SECONDS = 2.0
"""For what a daemon does at its start."""
Asking = Callable[[str], Awaitable[object]]


class Calls:
    """Counts calls in all threads that start after it, while it is told to."""

    def __init__(self) -> None:
        self.is_counting = False
        self.python = self.builtin = 0

    def __call__(self, _: FrameType, event: str, __: Any) -> None:
        """One of them, as sys.setprofile tells it."""
        if self.is_counting:
            self.python += event == "call"
            self.builtin += event == "c_call"


def remember_embeddings() -> None:
    """Have the model read each text once only, so that later it costs a lookup."""
    kind: Any = type(load_embedder(EmbeddingSettings()))
    for name in ("embed", "embed_query"):
        if hasattr(kind, name):
            read: Any = getattr(kind, name)
            known: dict[str, Any] = {}

            @functools.wraps(read)
            def looked_up(self: Any, text: str, *rest: Any, read: Any = read, known: Any = known, **more: Any) -> Any:
                if text not in known:
                    known[text] = read(self, text, *rest, **more)
                return known[text]

            setattr(kind, name, looked_up)


async def asked(
    folder: Path, name: str, questions: list[str], measure: Callable[[Asking, list[str]], Awaitable[dict[str, float]]]
) -> dict[str, float]:
    """A measurement over a topic of the store in a folder."""
    config = Config(listen=ListenSettings(port=0), data_dir=folder, log=LogSettings(level="error"))
    async with running(config) as daemon:
        topic = await daemon.topics.get(name)

        async def ask(text: str) -> object:
            return await daemon.retriever.retrieve(text, [topic.log], Budget(BUDGET_TOKENS))

        await asyncio.sleep(REST_SECONDS)
        for text in questions * 2:
            await ask(text)
        return await measure(ask, questions)


async def processor(ask: Asking, questions: list[str]) -> dict[str, float]:
    """Milliseconds of the processor, and as a caller waits: medians over questions of the least of the rounds."""
    taken: dict[str, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for text in questions:
            began, waiting = time.process_time(), time.perf_counter()
            await ask(text)
            taken.setdefault(text, []).append((time.process_time() - began, time.perf_counter() - waiting))
    least = np.array([np.array(times).min(axis=0) for times in taken.values()]) * 1000
    return dict(zip(("processor_ms", "waited_ms"), np.median(least, axis=0).round(3).tolist(), strict=True))


async def calls(ask: Asking, questions: list[str], counter: Calls) -> dict[str, float]:
    """Calls a question."""
    counter.is_counting = True
    for text in questions:
        await ask(text)
    counter.is_counting = False
    return {"python_calls": counter.python / len(questions), "builtin_calls": counter.builtin / len(questions)}


def measured(folder: Path, topic: str, questions: list[str]) -> dict[str, float]:
    """All about a topic of the store in a folder."""
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        shutil.copytree(folder, Path(name) / "memory")
        figures = asyncio.run(asked(Path(name) / "memory", topic, questions, processor))
        counter = Calls()
        threading.setprofile(counter)
        sys.setprofile(counter)
        try:
            counting = functools.partial(calls, counter=counter)
            figures |= asyncio.run(asked(Path(name) / "memory", topic, questions, counting))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return figures


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, required=True, help="a folder, in which the stores stay")
    parser.add_argument("--chunks", default=SIZES, help="comma-separated numbers of chunks")
    parser.add_argument("--talk", type=Path, help="the --store of recall.py")
    parser.add_argument("--data", type=read_data, help="NAME=PATH, with --talk")
    parser.add_argument("--fill", action="store_true", help="make the stores that are not there, and ask nothing")
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    told.store.mkdir(parents=True, exist_ok=True)
    sizes = [int(one) for one in told.chunks.split(",")]
    for size in sizes:
        if told.fill and not (told.store / str(size)).exists():
            from overhead_stores import fill

            with tempfile.TemporaryDirectory(dir=told.store) as name:
                fill(Path(name), size, None)
                (Path(name) / "memory").rename(told.store / str(size))
    if told.fill:
        return
    remember_embeddings()
    made = [question(np.random.default_rng(number)) for number in range(QUESTIONS)]
    runs = {f"{size:,} chunks": (told.store / str(size), "default", made) for size in sizes}
    if told.talk is not None:
        talk = told.data.talks[1]
        runs["a conversation"] = told.talk / "memory", talk.topic, [one.text for one in answered(talk)][:QUESTIONS]
    figures = {}
    for name, run in runs.items():
        figures[name] = measured(*run)
        print(f"{name:>16} ", "  ".join(f"{one} {value:,.2f}" for one, value in figures[name].items()), flush=True)
    if told.json is not None:
        told.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
