"""Whether facts are found in the traffic of agents, and not pushed out by what memory itself brought up.

Backs the claims that what programs wrap around words is not stored, and that an answer never outranks or outlives what
it repeats. Five facts are told and asked for plainly, with `<system-reminder>`s as Claude Code adds them, and with
`<environment_details>` as Cline does (after `src/core/environment/getEnvironmentDetails.ts` of Roo Code). Then one fact
is asked for forty times and never answered, and another is answered five times before it is corrected.

    python bench/traffic.py        or as a part of bench/cases.py
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
from asking import StandIn, config_of, serving
from rich.console import Console
from rich.table import Table

from memd.daemon.app import Daemon

_OPENINGS = ["", "Hi! ", "Short question. ", "Me again. ", "Sorry to bother you. "]
USELESS = [
    "I don't know.",
    "I'm sorry, I don't have any information about that in our conversation.",
    "I could not find that, could you tell me?",
    "Unfortunately I have no record of that.",
]
ASKED = [
    "On which port does the staging database listen?",
    "Which port does the staging database listen on?",
    "Do you remember the port of the staging database?",
    "What is the staging database's port?",
    "Port of the staging database, please?",
    "Could you tell me on which port our staging database listens?",
    "I forgot the port of the staging database, which one is it?",
    "Quick one: staging database, which port?",
]
SIMILAR = [f"{opening}{asked}" for asked in ASKED for opening in _OPENINGS]
BUDGET_TOKENS = 300
FACTS = {
    "Where does the spare key of the workshop hang?": "The spare key of the workshop hangs behind the blue bicycle.",
    "Which port does the staging database listen on?": "The staging database listens on port 5432.",
    "Who signs off the invoices?": "Marta signs off every invoice above two hundred euros.",
    "When are the backups made?": "Backups are made at three every night, to the NAS in the cellar.",
    "Which allergy does Jonas have?": "Jonas is allergic to hazelnuts, so no praline for him.",
}
REMINDER = (
    "<system-reminder>\nThe TodoWrite tool hasn't been used recently. Use it to track progress. Your todo list:"
    " 1. the workshop key 2. the staging database port 3. invoices 4. backups 5. allergies.\n</system-reminder>"
)
DETAILS = (
    "<environment_details>\n# VSCode Open Tabs\n{files}\n\n# Current Time\n10:{number:02}\n\n# Context Window Usage\n"
    "{number},000 / 200K tokens used\n\n# Current Mode\nACT MODE\n</environment_details>"
)
FILES = "\n".join(
    f"src/{name}{number}.py" for name in ("workshop", "staging", "invoices", "backup") for number in range(25)
)
WRAPPINGS: dict[str, Callable[[str, int], str]] = {
    "plain": lambda words, number: words,
    "claude code": lambda words, number: f"{REMINDER}\n{words}\n{REMINDER}",
    "cline": lambda words, number: f"<task>\n{words}\n</task>\n\n{DETAILS.format(files=FILES, number=number)}",
}
NEVER_ANSWERED = (
    "Bruno set up the new machine on Friday: Postgres for staging answers on 5432 there, behind the firewall."
)


class Chats(NamedTuple):
    """A client whose every request is a chat of its own."""

    daemon: Daemon
    client: aiohttp.ClientSession
    stand_in: StandIn
    numbers: itertools.count[int]

    async def ask(self, words: str, reply: str = "Noted.", mode: str = "full", **members: object) -> str:
        """Send one message, have it and the reply stored; return the block of its prompt."""
        self.stand_in.reply = reply
        headers = {"X-Memory-Mode": mode, "X-Memory-Session": str(next(self.numbers))}
        body = {"messages": [{"role": "user", "content": words}], **members}
        url = f"{self.daemon.base_url}/t/traffic/v1/chat/completions"
        async with self.client.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        topic = await self.daemon.topics.get("traffic")
        while mode == "full" and "remember" in self.daemon.tasks.names:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.002)
        for conversation in topic.buffer.conversations():
            await self.daemon.archiver.store(topic, conversation, len(conversation))
        before, opening, after = self.stand_in.last.partition("[memory]")
        return after.partition("[/memory]")[0] if opening and not before else ""


@asynccontextmanager
async def chats() -> AsyncIterator[Chats]:
    """A daemon that remembers nothing yet."""
    stand_in = StandIn()
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as folder:
        async with serving(stand_in, config_of(Path(folder), BUDGET_TOKENS)) as (daemon, client):
            yield Chats(daemon, client, stand_in, itertools.count())


async def boilerplate(wrap: Callable[[str, int], str]) -> tuple[int, int]:
    """How many of the facts are found, and the tokens of all blocks."""
    async with chats() as chat:
        for number, fact in enumerate(FACTS.values()):
            await chat.ask(wrap(fact, number))
        found = tokens = 0
        for number, (question, fact) in enumerate(FACTS.items(), len(FACTS)):
            block = await chat.ask(wrap(question, number), mode="readonly")
            found += fact in block
            tokens += chat.daemon.counter.count(block)
        return found, tokens


async def echoes() -> tuple[bool, int, int]:
    """Whether the fact is shown after forty questions without an answer; how many chunks tell the old value after a
    correction, and how many the new one."""
    async with chats() as chat:
        await chat.ask(NEVER_ANSWERED)
        for question, answer in zip(SIMILAR, itertools.cycle(USELESS), strict=False):
            await chat.ask(question, answer)
        is_shown = NEVER_ANSWERED in await chat.ask("Tell me the port of the staging database.", mode="readonly")
    async with chats() as chat:
        await chat.ask("The staging database listens on port 5432.")
        for question in SIMILAR[:5]:
            block = await chat.ask(question, "The staging database listens on port 5432.")
        wanted = next(part for part in block.split("[mem:") if "user: The staging database listens" in part)
        correction = {
            "chunk_ids": [wanted.partition("]")[0]],
            "action": "Update",
            "reason": "moved",
            "content": "The staging database listens on port 6000.",
        }
        await chat.ask(SIMILAR[5], "Noted.", memory_in={"corrections": [correction]})
        parts = (await chat.ask(SIMILAR[6], mode="readonly")).split("[mem:")
        return is_shown, sum("5432" in part for part in parts), sum("6000" in part for part in parts)


async def measured() -> dict[str, dict[str, float]]:
    """Case → what was found."""
    rows: dict[str, dict[str, float]] = {}
    for name, wrap in WRAPPINGS.items():
        found, tokens = await boilerplate(wrap)
        rows[f"boilerplate: {name}"] = {"facts found": found, "of": len(FACTS), "tokens of blocks": tokens}
    is_shown, old, new = await echoes()
    rows["echoes: forty questions"] = {"facts found": int(is_shown), "of": 1}
    rows["echoes: corrected"] = {"facts found": min(new, 1), "of": 1, "chunks with the old value": old}
    return rows


def report(rows: dict[str, dict[str, float]]) -> None:
    """Print what was found."""
    table = Table(title=f"in the traffic of agents, found within {BUDGET_TOKENS} tokens")
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    for name in ("case", *columns):
        table.add_column(name, justify="left" if name == "case" else "right")
    for case, row in rows.items():
        table.add_row(case, *(f"{row[name]:g}" if name in row else "" for name in columns))
    Console(width=130).print(table)


if __name__ == "__main__":
    report(asyncio.run(measured()))
