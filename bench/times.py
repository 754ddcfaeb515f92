"""Whether a question that speaks of a time finds what was said then.

Backs the claim that for nine of ten such questions the right day stands in the block, and under it the right answer.
Reads `bench/data/times.json`, which is ours: for each of eight languages a year of dinners that only their days tell
apart, facts, small talk, and 60 questions, each with the day that it means and, if that is no dinner, a word of the
answer. Each language is a topic of its own; questions are asked through `Retriever`, as those of prompts are.

    python bench/times.py [--weights 0,0.5,1] [--model bundled] [--budget 2000] [--misses] [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.embedding.loading import load_embedder
from memd.entries import Draft, Speaker
from memd.recall.retrieve import Budget, Retriever
from memd.settings.model import Config, EmbeddingSettings, RetrievalSettings
from memd.store.store import ModelId, Store, StoreShared, TopicLog
from memd.wording import day_of

DATA = Path(__file__).parent / "data" / "times.json"
DINNERS_EVERY_DAYS = 4
DINNERS_FROM = date(2025, 11, 24)
GUESTS = range(2, 9)


class Question(NamedTuple):
    """A question, the day on which its answer was said, and a part of the answer."""

    language: str
    text: str
    day: date
    answer: str
    is_elsewhen: bool = False
    """Whether it names another day than that."""


def stamp(when: str) -> int:
    """Microseconds since the epoch."""
    return int(datetime.fromisoformat(when).timestamp()) * 1_000_000


def year_of(language: str, told: dict[str, Any], now: datetime) -> tuple[list[tuple[int, str]], list[Question]]:
    """What was said when, oldest first, and the questions about it."""
    pattern, mains, sides = told["series"]
    dinners = (pattern.format(count, main, side) for count, main, side in product(GUESTS, mains, sides))
    targets = sorted({date.fromisoformat(day) for _, day, *answer in told["questions"] if not answer})
    every = range(0, (now.date() - DINNERS_FROM).days, DINNERS_EVERY_DAYS)
    days = [DINNERS_FROM + timedelta(days=step) for step in every]
    eaten = dict(
        zip([*targets, *(day for day in days if day not in targets)], islice(dinners, 0, None, 3), strict=False)
    )
    said = [(stamp(f"{day}T20:00"), text) for day, text in eaten.items()]
    said += [(stamp(when), text) for when, text in told["facts"]]
    said += [(stamp(when), text) for _, when, text in told["elsewhen"]]
    for number, text in enumerate(told["filler"]):
        said.append((stamp(f"{DINNERS_FROM + timedelta(days=37 * number + 5)}T09:00"), text))
    questions = [
        Question(language, text, date.fromisoformat(day), *(answer or [eaten.get(date.fromisoformat(day), "")]))
        for text, day, *answer in told["questions"]
    ]
    for asked, when, text in told["elsewhen"]:
        questions.append(Question(language, asked, datetime.fromisoformat(when).date(), text, is_elsewhen=True))
    return sorted(said), questions


def drafts(embedder: Embedder, language: str, said: list[tuple[int, str]]) -> Iterator[Draft]:
    """A chunk for each text."""
    vectors = embedder.embed_many([text for _, text in said])
    for (at, text), vector in zip(said, vectors, strict=True):
        yield Draft(
            uuid=blake2b(f"{language} {at} {text}".encode(), digest_size=16).digest(),
            content=text,
            vector=np.asarray(vector, dtype="<f4").tobytes(),
            created_at=at,
            said_at=at,
            roles=("user",),
            speakers=(Speaker(0, "user"),),
        )


def retriever_of(encoder: Encoder, weight: float, now: datetime) -> Retriever:
    """One with the default settings, but for the weight of times."""
    return Retriever(
        encoder,
        RetrievalSettings(time_weight=weight),
        count=lambda text: len(text) // 4,
        now_us=lambda: int(now.timestamp()) * 1_000_000,
    )


async def asked(
    encoder: Encoder,
    weight: float,
    now: datetime,
    topics: dict[str, TopicLog],
    questions: list[Question],
    budget_tokens: int,
) -> list[dict[str, Any]]:
    """For each question whether its day and its answer are in the block, and what it cost."""
    retriever, rows = retriever_of(encoder, weight, now), []
    for one in questions:
        started = time.perf_counter()
        found = await retriever.retrieve(one.text, [topics[one.language]], Budget(budget_tokens))
        ranked = [one.entry for one in found.candidates]
        places = [
            n for n, entry in enumerate(ranked, 1) if day_of(entry.said) == one.day and one.answer in entry.content
        ]
        then = [shown.entry for shown in found.shown if day_of(shown.entry.said) == one.day]
        rows.append(
            {
                "question": one.text,
                "language": one.language,
                "elsewhen": one.is_elsewhen,
                "day": bool(then),
                "answer": any(one.answer in entry.content for entry in then),
                "first": places[:1] == [1],
                "tokens": found.raw_tokens,
                "chunks": len(found.shown),
                "ms": 1000 * (time.perf_counter() - started),
            }
        )
    retriever.close()
    return rows


def report(by_weight: dict[str, list[dict[str, Any]]], *, misses: bool) -> None:
    """Print what was found."""
    table = Table(title="60 questions of time in eight languages: in the block, in per cent")
    languages = list(dict.fromkeys(row["language"] for row in next(iter(by_weight.values()))))
    for column in ("time_weight", "day", "answer", "first", *languages, "elsewhen", "first", "chunks", "tokens", "ms"):
        table.add_column(column, justify="right")
    for weight, all_rows in by_weight.items():
        rows, others = ([row for row in all_rows if row["elsewhen"] == wanted] for wanted in (False, True))
        means = {
            name: float(np.mean([row[name] for row in rows])) for name in ("day", "answer", "first", "chunks", "tokens")
        }
        own = [np.mean([row["answer"] for row in rows if row["language"] == one]) for one in languages]
        table.add_row(
            weight,
            *(f"{100 * share:.0f}" for share in (means["day"], means["answer"], means["first"], *own)),
            *(f"{100 * float(np.mean([row[name] for row in others])):.0f}" for name in ("answer", "first")),
            f"{means['chunks']:.1f}",
            f"{means['tokens']:.0f}",
            f"{np.median([row['ms'] for row in rows]):.1f}",
        )
    Console(width=130).print(table)
    for weight, rows in by_weight.items() if misses else ():
        print(f"\n{weight}:", *(row["question"] for row in rows if not row["answer"]), sep="\n  ")


async def main() -> None:
    """Tell a year in each language, and ask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--weights", default="0,0.5,1", help="values of retrieval.time_weight")
    parser.add_argument("--model", default="bundled", help="embedding.model")
    parser.add_argument("--budget", type=int, default=Config().injection.budget_tokens, help="injection.budget_tokens")
    parser.add_argument("--misses", action="store_true", help="print the questions without their answer")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    told = json.loads(DATA.read_text())
    now = datetime.fromisoformat(told["now"])
    embedder = load_embedder(EmbeddingSettings(model=given.model))
    encoder = Encoder(embedder)
    questions: list[Question] = []
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as folder:
        store = Store(
            Path(folder),
            StoreShared(
                model=ModelId(embedder.dimension, embedder.fingerprint),
                segment_entries_max=Config().segment.max_entries,
            ),
        )
        for language, year in told["languages"].items():
            said, about = year_of(language, year, now)
            store.topic(language).append(list(drafts(embedder, language, said)))
            store.topic(language).complete_words()
            questions += about
        topics = {language: store.topic(language) for language in told["languages"]}
        weights = given.weights.split(",")
        rows = {one: await asked(encoder, float(one), now, topics, questions, given.budget) for one in weights}
        store.close()
    encoder.close()
    report(rows, misses=given.misses)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    asyncio.run(main())
