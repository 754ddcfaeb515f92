"""What recall finds with another value of one of its constants or settings: ten seconds a variant.

    python bench/variants.py --store DIR --data NAME=PATH … [--set relevance.MODEL_SHARE=1 …] [--json FILE]

Backs the figures in NOTES.md of rules that were kept or rejected. `--store` and `--data` as for recall.py, which has
stored them; each `--set` is a variant, several with commas between them (`settings.` are those of `retrieval`). Asks
the daemon's own retriever in this process, and each variant with the same vectors of the model, so it agrees with
recall.py, but says nothing about time.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import contextlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import msgspec
from recall import BUDGETS, DATA, FOUND, SILENCE_TALKS, Asked, Data, alone, in_threes, read_data
from retrieval import remember_embeddings

from memd.daemon.app import Daemon, running
from memd.recall.retrieve import Budget
from memd.settings.model import Config, ListenSettings, LogSettings


async def shown(daemon: Daemon, topic: str, text: str, budget: int) -> str:
    """The texts of the chunks that a question brings."""
    found = await daemon.retriever.retrieve(text, [(await daemon.topics.get(topic)).log], Budget(budget))
    return "\n".join(one.entry.content for one in found.shown)


async def share(
    daemon: Daemon, asked: Sequence[Asked], is_found: Callable[[str, str], bool], budgets: Sequence[int]
) -> list[float]:
    """Percent of the evidence within each budget, over questions."""
    told = []
    for budget in budgets:
        found = [(one, await shown(daemon, one.topic, one.text, budget)) for one in asked]
        shares = [fmean(is_found(turn, text) for turn in some) for one, text in found for some in one.evidence]
        told.append(round(100 * fmean(shares), 1))
    return told


async def figures(daemon: Daemon, data: Sequence[Data]) -> dict[str, list[float]]:
    """Each question alone, three in one message, and how often unrelated ones bring nothing."""
    told = {}
    small_talk = json.loads((DATA / "small_talk.json").read_text())
    unrelated = {
        "the 200": [one["ask"] for one in json.loads((DATA / "silence.json").read_text())],
        "small talk": [line for lines in small_talk.values() for line in lines],
    }
    for name, kind, talks in data:
        told[name] = await share(daemon, alone(talks), FOUND[kind], BUDGETS[kind])
        if kind == "turns":
            told[f"{name}, three"] = await share(daemon, list(in_threes(talks)), FOUND[kind], BUDGETS[kind][1:])
            for what, texts in unrelated.items():
                topics = [talk.topic for talk in talks[:SILENCE_TALKS]]
                silent = [not await shown(daemon, topic, text, 2000) for topic in topics for text in texts]
                told[f"{name}, silent, {what}"] = [round(100 * fmean(silent), 1)]
    return told


@contextlib.contextmanager
def changed(daemon: Daemon, variant: str) -> Iterator[None]:
    """Run with other values: `relevance.MODEL_SHARE=1,settings.min_score=0.1`."""
    with contextlib.ExitStack() as stack:
        for one in filter(None, variant.split(",")):
            name, _, value = one.partition("=")
            where, _, what = name.partition(".")
            target: Any = importlib.import_module(f"memd.recall.{where}") if where != "settings" else None
            if target is None:
                settings = msgspec.structs.replace(daemon.retriever._settings, **{what: json.loads(value)})
                stack.enter_context(mock.patch.object(daemon.retriever, "_settings", settings))
            else:
                stack.enter_context(mock.patch.object(target, what, type(getattr(target, what))(json.loads(value))))
        yield


async def measured(data_dir: Path, data: Sequence[Data], variants: Sequence[str]) -> dict[str, Any]:
    """Print and return the figures of each variant."""
    config = Config(listen=ListenSettings(port=0), data_dir=data_dir, log=LogSettings(level="error"))
    told = {}
    async with running(config) as daemon:
        for variant in variants:
            with changed(daemon, variant):
                told[variant or "as it is"] = row = await figures(daemon, data)
            print(
                f"{variant or 'as it is':40}",
                " | ".join(f"{name} {values}" for name, values in row.items()),
                flush=True,
            )
    return told


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="the --store of recall.py")
    parser.add_argument("--data", type=read_data, action="append", default=[], help="NAME=PATH; may be given again")
    parser.add_argument("--set", action="append", default=[], help="a variant; may be given again")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    remember_embeddings()
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        shutil.copytree(asked.store / "memory", Path(name) / "memory")
        told = asyncio.run(measured(Path(name) / "memory", asked.data, ["", *asked.set]))
    if asked.json is not None:
        asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
