"""Whether what was said once is found by name, by meaning, in other languages and after a correction, and whether memd
is silent where it knows nothing.

Backs the claims that an exact identifier wins, that a correction takes effect, and that nothing is injected for a
question that nothing stored is about. Reads `bench/data/cases.json`, which is ours: `sessions` of messages,
`corrections` (of the chunk that has a text), and `questions` with the texts that they want to see, those that they must
`never` see, and what was said `before` them in the same chat.

    python bench/cases.py [--json FILE] [--misses]

The cases of `traffic.py` (boilerplate, echoes) are run too.
Everything goes through the real daemon over HTTP; the block is read out of the prompt that memd forwards.
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
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import traffic
from asking import StandIn, config_of, serving, tell
from quality_data import Talk
from rich.console import Console
from rich.table import Table

from memd.daemon.app import Daemon

DATA = Path(__file__).parent / "data" / "cases.json"
TOPIC = "cases"
BUDGET_TOKENS = 300
ABSTAIN = "nothing"
"""The kind of questions that nothing stored is about."""


class Chat(NamedTuple):
    """A client of a daemon in front of a stand-in."""

    daemon: Daemon
    client: aiohttp.ClientSession
    stand_in: StandIn

    async def block(self, messages: list[dict[str, str]], mode: str = "readonly", **members: Any) -> str:
        """The memory block in the prompt of one request; empty without one."""
        url = f"{self.daemon.base_url}/t/{TOPIC}/v1/chat/completions"
        async with self.client.post(
            url, json={"messages": messages, **members}, headers={"X-Memory-Mode": mode}
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        before, opening, after = self.stand_in.last.partition("[memory]")
        return after.partition("[/memory]")[0] if opening and not before else ""

    async def correct(self, wanted: dict[str, str]) -> None:
        """Have a chunk shown and say what is wrong with it."""
        block = await self.block([{"role": "user", "content": wanted["chunk"]}], "full")
        shown = [chunk for chunk in re.split(r"(?m)^(?=\[mem:)", block) if wanted["chunk"] in chunk]
        assert shown, f"{wanted['chunk']!r} is not shown"
        correction = {"chunk_ids": [shown[0][5:].partition("]")[0]]} | wanted
        del correction["chunk"]
        await self.block([{"role": "user", "content": "Noted."}], "full", memory_in={"corrections": [correction]})


async def answers(folder: Path, questions: list[dict[str, Any]]) -> list[str]:
    """What is shown for each question."""
    stand_in = StandIn()
    async with serving(stand_in, config_of(folder, BUDGET_TOKENS)) as (daemon, client):
        chat = Chat(daemon, client, stand_in)
        return [
            await chat.block([*question.get("before", []), {"role": "user", "content": question["ask"]}])
            for question in questions
        ]


def is_right(question: dict[str, Any], block: str) -> bool:
    """Whether all that is wanted is shown and nothing that must not be; for what nobody said: whether nothing is."""
    if question["kind"] == ABSTAIN:
        return not block
    return all(text in block for text in question["wants"]) and not any(
        text in block for text in question.get("never", [])
    )


async def run(data: dict[str, Any], misses: bool) -> dict[str, list[bool]]:
    """Kind → whether each answer is right."""
    folder = Path(tempfile.mkdtemp(prefix="memd-bench-"))
    right: dict[str, list[bool]] = defaultdict(list)
    try:
        await tell([Talk(TOPIC, data["sessions"], [])], config_of(folder, BUDGET_TOKENS))
        stand_in = StandIn()
        async with serving(stand_in, config_of(folder, BUDGET_TOKENS)) as (daemon, client):
            for correction in data["corrections"]:
                await Chat(daemon, client, stand_in).correct(correction)
        blocks = await answers(folder, data["questions"])
        for question, block in zip(data["questions"], blocks, strict=True):
            right[question["kind"]].append(is_right(question, block))
            if misses and not right[question["kind"]][-1]:
                print(f"{question['ask']!r}: {block[:300]!r}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return right


def report(rows: dict[str, list[bool]]) -> None:
    """Print what was found."""
    table = Table(title="right in per cent: all that is wanted shown; for what nobody said, nothing at all")
    for kind, values in rows.items():
        table.add_column(f"{'abstained' if kind == ABSTAIN else kind}\n({len(values)})", justify="right")
    table.add_row(*(f"{100 * sum(values) / len(values):.0f}" for values in rows.values()))
    Console(width=130).print(table)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--misses", action="store_true", help="print what is not right")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = asyncio.run(run(json.loads(DATA.read_text()), arguments.misses))
    report(rows)
    found = asyncio.run(traffic.measured())
    traffic.report(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cases": rows, "traffic": found}, indent=1))


if __name__ == "__main__":
    main()
