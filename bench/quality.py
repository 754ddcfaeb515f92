"""How often what a question needs is in the prompt: recall of evidence within a token budget.

Backs the claim that fusing meaning and words finds more than either. Reads LoCoMo's, LongMemEval's
and BEAM's files (see quality_data.py):

    python bench/quality.py --data PATH [--only 0,2] [--variants default] [--chunks 30,80] [--plot FILE] [--json FILE]
    python bench/quality.py --data PATH --grid

Each session goes turn by turn through the real daemon over HTTP, each text opened by its speaker's name; who opens the
session is the user, the other's turns are the model's replies. All sessions of a conversation are one topic.
Each question is then asked in a fresh read-only chat; the block is read out of the prompt that memd forwards. A turn
counts as found when at least half of its text, by whole sentences, stands in the block; a session when any sentence of
it does. `@k` looks at the best k chunks instead of a budget. `silent`: no block, where what is asked was never said;
each conversation is also asked all of `bench/data/silence.json` and `small_talk.json`.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import json
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from quality_data import NOTHING_TO_FIND, Question, Talk, read
from rich.console import Console
from rich.table import Table

from memd.proxy.app import running
from memd.proxy.parts import Daemon
from memd.recall.retrieve import Budget
from memd.settings.model import (
    BufferSettings,
    ChunkingSettings,
    Config,
    InjectionSettings,
    ListenSettings,
    LogSettings,
    RetrievalSettings,
    UpstreamSettings,
)

WINDOW_TOKENS = 1_000_000
BUDGETS = (500, 1000, 2000, 4000)
RANKS = (5, 10, 25, 50)
SILENCE = Path(__file__).parent / "data" / "silence.json"
"""Small talk and questions about nothing that any of the conversations has, in twelve languages; ours."""
SMALL_TALK = SILENCE.with_name("small_talk.json")
"""The like, the same in each of eight languages; ours."""
ByBudget = dict[str, dict[str, dict[str, float]]]
"""Budget → conversation → measure → mean."""
WHOLE_BUDGET = {"min_share": 0.0, "min_evidence": 0.0}
VARIANTS: dict[str, dict[str, float]] = {
    "cosine only": {"lexical_weight": 0.0, "neighbour_weight": 0.0} | WHOLE_BUDGET,
    "lexical only": {"lexical_weight": 1.0, "neighbour_weight": 0.0, "feedback_weight": 0.0} | WHOLE_BUDGET,
    "fused": {"neighbour_weight": 0.0, "feedback_weight": 0.0} | WHOLE_BUDGET,
    "fused + neighbours": {"feedback_weight": 0.0} | WHOLE_BUDGET,
    "… + feedback": WHOLE_BUDGET,
    "default": {"top_k": 32},
}
SENTENCE_CHARACTERS_MIN = 30
_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]*")


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


def found(turn: str, shown: str) -> bool:
    """Whether at least half of a turn, by whole sentences, is shown."""
    sentences = [sentence.strip() for sentence in _SENTENCE.findall(turn) if sentence.strip()]
    total = sum(map(len, sentences))
    return sum(len(sentence) for sentence in sentences if sentence in shown) * 2 >= total > 0


def mentions(session: list[dict[str, str]], shown: str) -> bool:
    """Whether a sentence of a session, of a length that is its own, is shown."""
    sentences = (sentence.strip() for turn in session for sentence in _SENTENCE.findall(turn["content"]))
    return any(sentence in shown for sentence in sentences if len(sentence) >= SENTENCE_CHARACTERS_MIN)


class Answers(NamedTuple):
    """What was shown for each question."""

    blocks: list[str]
    ranked: list[list[str]]
    tokens: list[int]
    milliseconds: list[float]


async def answers(talk: Talk, config: Config) -> Answers:
    """Ask everything about one conversation."""
    stand_in = StandIn()
    told = Answers([], [], [], [])
    async with serving(stand_in, config) as (daemon, client):
        topic = await daemon.topics.get(talk.topic)
        for question in talk.questions:
            started = time.perf_counter()
            await ask(daemon, client, [{"role": "user", "content": question.text}], talk.topic, "readonly")
            told.milliseconds.append(1000 * (time.perf_counter() - started))
            block = stand_in.last.partition("[/memory]")[0] if stand_in.last.startswith("[memory]") else ""
            told.blocks.append(block)
            told.tokens.append(daemon.counter.count(block))
            budget = Budget(daemon.config.injection.budget_tokens)
            retrieved = await daemon.retriever.retrieve(question.text, [topic.log], budget)
            told.ranked.append([one.entry.content for one in retrieved.candidates])
    return told


def scores(talk: Talk, told: Answers) -> dict[str, list[float]]:
    """Per measure the value of each question that has something to find."""
    kept: dict[str, list[float]] = defaultdict(list)
    for position, question in enumerate(talk.questions):
        block = told.blocks[position]
        hits = [found(turn, block) for turn in question.evidence]
        if question.category == NOTHING_TO_FIND:
            kept["never said"].append(float(any(hits)))
            kept["silent"].append(float(not block))
            continue
        if question.sessions:
            kept["sessions"].append(float(np.mean([mentions(talk.sessions[one], block) for one in question.sessions])))
        kept["recall"].append(float(np.mean(hits)))
        kept["any"].append(float(any(hits)))
        kept["all"].append(float(all(hits)))
        kept[f"category {question.category}"].append(float(np.mean(hits)))
        kept["tokens"].append(told.tokens[position])
        kept["ms"].append(told.milliseconds[position])
        for rank in RANKS:
            shown = "\n".join(told.ranked[position][:rank])
            kept[f"@{rank}"].append(float(np.mean([found(turn, shown) for turn in question.evidence])))
    return kept


def config_of(folder: Path, variant: dict[str, float], budget: int, chunk_tokens: int = 50) -> Config:
    """The daemon's settings for one run. More chunks than by default are looked at, for the largest budget."""
    return Config(
        listen=ListenSettings(port=0),
        data_dir=folder,
        buffer=BufferSettings(soft_tokens=WINDOW_TOKENS // 4, hard_tokens=WINDOW_TOKENS // 2),
        chunking=ChunkingSettings(min_tokens=chunk_tokens),
        injection=InjectionSettings(budget_tokens=budget),
        retrieval=RetrievalSettings(**{"top_k": 128, **variant}),  # type: ignore[arg-type]  # numbers, as msgspec has them
        log=LogSettings(level="error"),
    )


@asynccontextmanager
async def told(talks: list[Talk], chunk_tokens: int = 50) -> AsyncIterator[Path]:
    """A data directory in which all is stored."""
    folder = Path(tempfile.mkdtemp(prefix="memd-bench-"))
    try:
        await tell(talks, config_of(folder, {}, 2000, chunk_tokens))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def measured(talks: list[Talk], folder: Path, variant: dict[str, float], budgets: Iterable[int]) -> ByBudget:
    """Ask everything within each budget."""
    by_budget: ByBudget = {}
    for budget in budgets:
        by_budget[str(budget)] = {}
        for talk in talks:
            kept = scores(talk, await answers(talk, config_of(folder, variant, budget)))
            means = {measure: float(np.mean(values)) for measure, values in kept.items()}
            by_budget[str(budget)][talk.topic] = means | {f"# {one}": len(values) for one, values in kept.items()}
    return by_budget


async def silence(talks: list[Talk], folder: Path) -> dict[str, float]:
    """By kind of small talk, and of questions about nothing stored, the share that brings nothing, over all talks."""
    asked = [one | {"kinds": (one["kind"], "all")} for one in json.loads(SILENCE.read_text())]
    for language, lines in json.loads(SMALL_TALK.read_text()).items():
        asked += [{"ask": line, "kinds": ("eight languages", language)} for line in lines]
    quiet: dict[str, list[bool]] = defaultdict(list)
    for talk in talks:
        questions = [Question(one["ask"], NOTHING_TO_FIND, ()) for one in asked]
        told = await answers(talk._replace(questions=questions), config_of(folder, VARIANTS["default"], 2000))
        for one, block in zip(asked, told.blocks, strict=True):
            for kind in one["kinds"]:
                quiet[kind].append(not block)
    return {kind: float(np.mean(values)) for kind, values in quiet.items()}


async def variants(
    talks: list[Talk], names: list[str], chunk_sizes: list[int]
) -> tuple[dict[str, ByBudget], dict[str, float]]:
    """Each variant, and the default with chunks of other sizes; and how often the default is silent."""
    rows = {}
    async with told(talks) as folder:
        for name in names:
            rows[name] = await measured(talks, folder, VARIANTS[name], BUDGETS)
        quiet = await silence(talks, folder)
    for size in chunk_sizes:
        async with told(talks, size) as folder:
            rows[f"chunks from {size}"] = await measured(talks, folder, {}, BUDGETS)
    return rows, quiet


async def grid(talks: list[Talk]) -> dict[str, ByBudget]:
    """Both weights around their defaults, within 2,000 tokens."""
    rows = {}
    async with told(talks) as folder:
        for lexical in (0.4, 0.5, 0.6):
            for neighbour in (0.1, 0.2, 0.3):
                variant = {"lexical_weight": lexical, "neighbour_weight": neighbour}
                rows[f"{lexical}, {neighbour}"] = await measured(talks, folder, variant, [2000])
    return rows


def left_out(rows: dict[str, ByBudget]) -> list[tuple[str, str, float]]:
    """For each conversation the weights that are best on all others, and what they find in this one."""
    found_by = {name: {topic: row["recall"] for topic, row in by["2000"].items()} for name, by in rows.items()}
    topics = list(next(iter(found_by.values())))
    chosen = []
    for topic in topics:
        best = max(found_by, key=lambda name: sum(found_by[name][other] for other in topics if other != topic))
        chosen.append((topic, best, found_by[best][topic]))
    return chosen


def overall(by_talk: dict[str, dict[str, float]], measure: str) -> float:
    """The mean over all questions of all conversations that have the measure; NaN without any."""
    told = [(row[measure], row[f"# {measure}"]) for row in by_talk.values() if measure in row]
    if not told:
        return float("nan")
    means, counts = zip(*told, strict=True)
    return float(np.average(means, weights=counts))


def report(rows: dict[str, ByBudget]) -> None:
    """Print what was found."""
    console = Console(width=150)
    table = Table(title="evidence found within a budget of tokens, in per cent (2,000: worst conversation in brackets)")
    measures = [*(f"@{rank}" for rank in RANKS), "any", "all", "sessions", "never said", "silent", "tokens", "ms"]
    for column in ("variant", *map(str, BUDGETS), *measures):
        table.add_column(column, justify="left" if column == "variant" else "right")
    by_category = Table(title="the same within 2,000 tokens, by category of question")
    categories = sorted({measure for by in rows.values() for row in by["2000"].values() for measure in row})
    categories = [measure for measure in categories if measure.startswith("category")]
    for column in ("variant", *categories):
        by_category.add_column(column, justify="left" if column == "variant" else "right")
    for name, by_budget in rows.items():
        cells = [f"{100 * overall(by_budget[str(budget)], 'recall'):.1f}" for budget in BUDGETS]
        at_2000 = by_budget["2000"]
        cells[BUDGETS.index(2000)] += f" ({100 * min(row.get('recall', 1.0) for row in at_2000.values()):.0f})"
        for measure in measures:
            value = overall(at_2000, measure)
            cells.append(f"{value:,.1f}" if measure in ("tokens", "ms") else f"{100 * value:.1f}")
        table.add_row(name, *cells)
        by_category.add_row(name, *(f"{100 * overall(at_2000, category):.1f}" for category in categories))
    console.print(table, by_category)


def report_grid(rows: dict[str, ByBudget]) -> None:
    """Print the weights, and what is left of their choice where one conversation has no say in it."""
    topics = list(next(iter(rows.values()))["2000"])
    table = Table(title="lexical_weight, neighbour_weight: evidence found within 2,000 tokens, in per cent")
    for column in ("weights", "all", *topics):
        table.add_column(column, justify="right")
    for name, by_budget in rows.items():
        row = by_budget["2000"]
        table.add_row(name, *(f"{100 * v:.1f}" for v in (overall(row, "recall"), *(row[t]["recall"] for t in topics))))
    console = Console(width=150)
    console.print(table)
    for topic, best, value in left_out(rows):
        console.print(f"{topic} left out: the others choose {best}, which finds {100 * value:.1f} in it")


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="a file of LoCoMo or LongMemEval, a folder of BEAM")
    parser.add_argument("--only", help="comma-separated numbers of conversations, from 0")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names; default: all")
    parser.add_argument("--chunks", default="", help="comma-separated values of chunking.min_tokens to try besides")
    parser.add_argument("--grid", action="store_true", help="instead: weights, each conversation left out once")
    parser.add_argument("--plot", type=Path, help="draw recall against budget into this .png and .svg")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    only = None if asked.only is None else {int(one) for one in asked.only.split(",")}
    talks = read(asked.data, only)
    if asked.grid:
        rows = asyncio.run(grid(talks))
        report_grid(rows)
    else:
        sizes = [int(size) for size in asked.chunks.split(",") if size]
        rows, quiet = asyncio.run(variants(talks, [name for name in asked.variants.split(",") if name], sizes))
        report(rows)
        print("nothing shown:", ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in quiet.items()))
    if asked.plot is not None:
        from quality_plot import draw

        draw(
            {name: [overall(by[str(budget)], "recall") for budget in BUDGETS] for name, by in rows.items()}, asked.plot
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
