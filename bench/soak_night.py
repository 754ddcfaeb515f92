"""A night of mixed traffic through one daemon that is never restarted: memory, files and threads stay where they are.

Backs this claim: what a daemon takes is flat in the second half of a long run, whatever is done to it at once. Agents
with long histories and one that walks through 300 topics (soak_agents.py), recordings of real agents played again and
again in topics of their own, a page that is open on all its tabs, files of a source that come, change and go, and
exports that are imported by the command.

    nice -n 19 python bench/soak_night.py [--minutes 60] [--every 5] [--agents 4] [--pace 1] [--recordings FOLDER]

`--pace 10` does everything ten times as seldom: on a machine where others work, what is said must be stored as fast as
it is said, or the run measures the backlog. Prints a line of figures every so many minutes, and at the end the
judgement of soak_growth.py over the second half. Exit code 1 if something grew. Ends by itself; everything stays on
this machine's loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import soak_agents
from agents_recorded import load_recording
from soak import House
from soak_agents import MANNERS, Agent, Ledger, Walker
from soak_growth import Sample, growth, lives, looked_at
from soak_upstream import RECORDED_HEADER
from vectors import sentences

WINDOW = 16_384
PAGE_SECONDS, FILES_SECONDS, IMPORT_SECONDS, RECORDED_SECONDS, EVENTS_SECONDS = 5.0, 10.0, 60.0, 1.0, 30.0
TABS = (
    "stats",
    "health",
    "topics",
    "turns",
    "usage",
    "figures",
    "index",
    "sources",
    "documents",
    "conversations",
    "days",
)
TABS_OF_A_TOPIC = (
    "log",
    "buffer",
    "transcript",
    "chunks",
    "search?q=what+was+said+about+the+harbour",
    "digest",
    "entities",
)
FILES = 60
LATE_SECONDS_MAX = 60.0
"""Whoever has not ended by then, as on a machine that has no time for it, is left."""
WARM_UP = 1 / 2
JUDGED = ("rss_mb", "counted_mb", "fds", "threads", "tasks", "background", "topics", "unstored", "requests")


class Company:
    """Whoever uses the daemon beside the agents; each of its coroutines lasts until the time is over."""

    def __init__(self, house: House, folder: Path, ledger: Ledger, pace: float, ended: Callable[[], bool]) -> None:
        self._house, self._folder, self._pace, self._ended = house, folder, pace, ended
        self.counts = ledger.counts
        self._chance = random.Random(1)

    async def _again(self, seconds: float, deed: Callable[[], Awaitable[None]], name: str) -> None:
        """Do it, rest, and do it again."""
        while not self._ended():
            try:
                await deed()
                self.counts[name] += 1
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                self.counts[f"{name} failed: {type(error).__name__}"] += 1
            await asyncio.sleep(seconds * self._pace)

    async def page(self) -> None:
        """Every tab of the page, and its stream of events."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

            def own_url() -> str:
                return f"{self._house.daemon.own_url}/memd"

            async def look() -> None:
                topic = f"shared-{self._chance.randrange(3)}"
                paths = [*TABS, *(f"{tab}{'&' if '?' in tab else '?'}topic={topic}" for tab in TABS_OF_A_TOPIC)]
                for path in paths:
                    began = time.monotonic()
                    async with session.get(f"{own_url()}/{path}") as answer:
                        await answer.read()
                        tab = f"slowest {path.partition('?')[0]}, ms"
                        self.counts[tab] = max(self.counts[tab], round(1e3 * (time.monotonic() - began)))
                        if answer.status not in (200, 404):
                            self.counts[f"page: {path.partition('?')[0]} {answer.status}"] += 1

            async def events() -> None:
                with contextlib.suppress(TimeoutError):
                    async with (
                        asyncio.timeout(EVENTS_SECONDS),
                        session.get(f"{self._house.daemon.own_url}/memd/events") as answer,
                    ):
                        async for _ in answer.content:
                            self.counts["lines of events"] += 1

            await asyncio.gather(self._again(PAGE_SECONDS, look, "page"), self._again(0.1, events, "event streams"))

    async def files(self, folder: Path) -> None:
        """A file of the source comes, changes or goes."""

        async def change() -> None:
            file = folder / f"note-{self._chance.randrange(FILES)}.md"
            if file.exists() and self._chance.random() < 0.3:
                file.unlink()
            else:
                lines = sentences(self._chance.randrange(5, 60), self._chance.randrange(1 << 30))
                file.write_text(f"# {lines[0]}\n\n" + "\n\n".join(lines))

        await self._again(FILES_SECONDS, change, "files changed")

    async def imports(self) -> None:
        """An export of a chat, a new one each time, with the command."""

        async def bring() -> None:
            number = self.counts["imports"]
            file = self._folder / "export.json"
            said = sentences(40, 7_000_000 + number)
            messages = [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(said)]
            file.write_text(json.dumps(messages))
            done = await asyncio.to_thread(self._house.daemon.run, "import", str(file), "--topic", "imported")
            if done.returncode:
                self.counts[f"import said {done.stderr.strip()[-200:]}"] += 1

        await self._again(IMPORT_SECONDS, bring, "imports")

    async def recordings(self, folder: Path) -> None:
        """Each recorded agent's requests in their order, in a topic of its own each time."""
        agents = [path.stem for path in await asyncio.to_thread(lambda: sorted(folder.glob("*.jsonl")))]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            for played in range(10**6):
                agent = agents[played % len(agents)]
                requests = await asyncio.to_thread(load_recording, folder / f"{agent}.jsonl")
                for number, one in enumerate(requests):
                    if self._ended():
                        return
                    path = f"/t/recorded-{played}{one.path}"
                    headers = {RECORDED_HEADER: f"{agent} {number}"}
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                        async with session.post(
                            f"{self._house.daemon.base_url}{path}", json=one.body, headers=headers
                        ) as answer:
                            await answer.read()
                            self.counts[f"recorded {agent}: {answer.status}"] += 1
                            self.counts["requests"] += 1
                    await asyncio.sleep(RECORDED_SECONDS * self._pace)
                self.counts["recordings played"] += 1


async def night(house: House, folder: Path, ledger: Ledger, asked: argparse.Namespace, samples: list[Sample]) -> None:
    """All at once, a sample each second, a line of figures every so many minutes."""
    ends_at: float = time.monotonic() + 60 * asked.minutes

    def ended() -> bool:
        return time.monotonic() >= ends_at

    company = Company(house, folder, ledger, asked.pace, ended)
    working = [company.page(), company.files(folder / "notes"), company.imports()]
    working += [] if asked.recordings is None else [company.recordings(asked.recordings)]
    for number in range(asked.agents + 1):
        kind = Walker if number == asked.agents else Agent
        manner, topic = MANNERS[number % len(MANNERS)], f"shared-{number % 3}"
        working.append(kind(number, topic, manner, ledger, lambda: house.daemon.base_url, ended).live())
    tasks = [asyncio.ensure_future(one) for one in working]
    watching = asyncio.ensure_future(_watch(house, ledger, samples, 60 * asked.every))
    _, late = await asyncio.wait(tasks, timeout=60 * asked.minutes + LATE_SECONDS_MAX)
    ledger.counts["late"] = len(late)
    for task in (*late, watching):
        task.cancel()


async def _watch(house: House, ledger: Ledger, samples: list[Sample], every: float) -> None:
    print("  ".join(("minute", *JUDGED)), flush=True)
    started = told = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        while True:
            with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
                async with session.get(f"{house.daemon.own_url}/memd/stats") as answer:
                    samples.append(looked_at(house.daemon.pid, await answer.json(), ledger.counts["requests"]))
            if samples and time.monotonic() - told >= every:
                told = time.monotonic()
                shown = (f"{getattr(samples[-1], name):{len(name)}.0f}" for name in JUDGED)
                print("  ".join((f"{(told - started) / 60:6.0f}", *shown)), flush=True)
            await asyncio.sleep(1)


def main() -> None:
    """Run, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=5)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--pace", type=float, default=1.0, help="all pauses are so many times as long")
    parser.add_argument("--recordings", type=Path, help="a folder of agents_recorded.py's recordings")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # so that children are ended
    soak_agents.THINK_SECONDS *= asked.pace
    ledger, samples = Ledger(), list[Sample]()
    with tempfile.TemporaryDirectory(prefix="memd-night-") as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        more: dict[str, Any] = {"sources": [{"path": str(folder / "notes"), "topic": "notes"}]}
        house = House(folder, None, faults=False, window=WINDOW, recordings=asked.recordings, settings=more)
        try:
            house.start()
            asyncio.run(night(house, folder, ledger, asked, samples))
            house.count_model()
            code = house.daemon.terminate()
            said = house.daemon.log.read_text(errors="replace")
        finally:
            house.close()
    found = lives(samples, WARM_UP)
    bad = growth(found) + [f"exit code {code}"] * bool(code) + ["a traceback"] * ("Traceback" in said)
    for kind, count in sorted(ledger.counts.items()):
        print(f"{kind}: {count:,}")
    for life in found:
        print(f"the second half: {life}")
    print(*(bad or ["flat"]), sep="\n", flush=True)
    if asked.json is not None:
        told = {
            "counts": ledger.counts,
            "lives": [life._asdict() for life in found],
            "bad": bad,
            "said": said[-20_000:],
        }
        asked.json.write_text(json.dumps(told | {"samples": [list(sample) for sample in samples]}))
    os._exit(1 if bad else 0)


if __name__ == "__main__":
    main()
