"""Documents: how fast they are read, what a change costs, what is found in them, and what they take from conversations.

    python bench/sources.py [--only speed,memory,unchanged,change,recall,alike]

`speed`: megabytes and pages a second by format, in the process that reads, and chunks embedded a second. `memory`: the
resident size of both processes while 1,000 files are read, above that before. `unchanged`: `memd add` of 10,000 files
(`--files`) again. `change`: one line of a file of 500 chunks. `recall`: 155 questions of our own over Markdown, PDF,
DOCX and XLSX (`data/documents.json`) beside memd's own pages, answered in a block of 2,000 tokens. `alike`: the same
facts as turns and as documents in one topic, then the other way round.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import hashlib
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import sources_files
from asking import StandIn, ask, config_of, serving, tell
from quality_data import Talk
from rich.console import Console
from rich.table import Table
from sources_files import Asked

from memd.daemon.app import Daemon
from memd.ingest.readers.files import FileReader
from memd.ingest.readers.text import GivenDocument, GivenSection

TOPIC = "default"
MEMORY_FILES, SPEED_PARAGRAPHS = 1_000, 2_000
GOALS = {"recall %": ">= 92", "unchanged s": "<= 2", "chunks embedded": "<= 3", "above idle MB": "<= 150"}
Rows = dict[str, dict[str, Any]]


# -- reading ----------------------------------------------------------------------------------------------------------


def speed(folder: Path) -> Rows:
    """Format → megabytes and pages a second; the process is started before."""
    rows: Rows = {}
    with FileReader() as reader:
        (folder / "first.csv").write_text("a,b\nc,d\n")
        reader.sections(folder / "first.csv")
        for name, (path, pages) in sources_files.large(folder, list(sources_files.prose(SPEED_PARAGRAPHS))).items():
            reader.sections(path)
            began = time.perf_counter()
            sections = reader.sections(path)
            seconds = time.perf_counter() - began
            text = sum(len(one.text) for one in sections)
            rows[name] = {
                "file MB": path.stat().st_size / 1e6,
                "MB/s": path.stat().st_size / 1e6 / seconds,
                "text MB/s": text / 1e6 / seconds,
                "pages/s": pages / seconds if pages else None,
            }
    return rows


async def embedding(folder: Path) -> Rows:
    """Chunks embedded a second: the part of adding that is not reading."""
    async with serving(StandIn(), config_of(folder / "memory", 2000)) as (daemon, _):
        texts = list(sources_files.prose(300))
        began = time.perf_counter()
        chunks = (await take(daemon, "prose", [GivenSection(text=one) for one in texts])).written
        return {"taken with embedding": {"chunks/s": chunks / (time.perf_counter() - began)}}


class Resident:
    """The largest resident size of some processes together, looked at a hundred times a second."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.before = self.now()
        self.largest = self.before

    def now(self) -> int:
        """In bytes."""
        total = 0
        for pid in self._pids():
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            except OSError:  # it has ended
                continue
        return total

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.largest = max(self.largest, self.now())

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def memory(folder: Path) -> Rows:
    """Resident size while many files are read, above that before the first of them; of both processes."""
    sources_files.many(folder / "many", MEMORY_FILES, list(sources_files.prose(100)))
    with FileReader() as reader, Resident(lambda: [os.getpid(), *reader.pids]) as resident:
        began = time.perf_counter()
        for path in sorted((folder / "many").iterdir()):
            reader.sections(path)
        seconds = time.perf_counter() - began
    above = (resident.largest - resident.before) / 1e6
    return {f"{MEMORY_FILES:,} files": {"above idle MB": above, "files/s": MEMORY_FILES / seconds}}


# -- changes ----------------------------------------------------------------------------------------------------------


async def added(memory_folder: Path, path: Path) -> tuple[str, float]:
    """Run `memd add` beside the daemon; what it says, and its seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "memd", "add", "--data-dir", str(memory_folder), str(path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode(), time.perf_counter() - began


def written(said: str) -> int:
    """The chunks that `memd add` says it has written."""
    found = re.search(r"([\d,]+) chunks? written", said)
    assert found is not None, said
    return int(found[1].replace(",", ""))


async def unchanged(folder: Path, files: int) -> Rows:
    """`memd add` of a folder that it knows."""
    many = folder / "notes"
    many.mkdir()
    for number in range(files):
        (many / f"{number}.md").write_text(f"# Note {number}\n\nShelf {number % 97} has box {number}.\n")
    async with serving(StandIn(), config_of(folder / "memory", 2000)):
        _, first = await added(folder / "memory", many)
        before = processor_seconds()
        said, seconds = await added(folder / "memory", many)
        spent = processor_seconds() - before
        (folder / "none").mkdir()
        (folder / "none" / "a.md").write_text("# a")
        _, nothing = await added(folder / "memory", folder / "none")
    assert written(said) == 0
    row = {"first s": first, "unchanged s": seconds, "processor s": spent, "of one file s": nothing}
    return {f"{files:,} files": row}


def processor_seconds() -> float:
    """What this process, the daemon, and the commands that have ended took."""
    commands = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + commands.ru_utime + commands.ru_stime


async def change(folder: Path) -> Rows:
    """One line changed, and one put in, in files of some 500 chunks."""
    paragraphs = list(sources_files.prose(500))
    files = {
        "md": "\n\n".join(f"# {at}\n\n{one}" for at, one in enumerate(paragraphs)),
        "txt": "\n\n".join(paragraphs),
        "csv": "name,what\n" + "\n".join(f'{at},"{" ".join(one.split())[:400]}"' for at, one in enumerate(paragraphs)),
    }
    rows: Rows = {}
    async with serving(StandIn(), config_of(folder / "memory", 2000)):
        for name, text in files.items():
            path = folder / f"changing.{name}"
            path.write_text(text)
            whole = written((await added(folder / "memory", path))[0])
            lines = text.split("\n")
            middle = next(at for at in range(len(lines) // 2, len(lines)) if len(lines[at]) > 30)
            lines[middle] = lines[middle].replace(" ", " really ", 1)
            path.write_text("\n".join(lines))
            said, seconds = await added(folder / "memory", path)
            lines.insert(middle, lines[middle].replace(" really ", " still "))
            path.write_text("\n".join(lines))
            inserted, _ = await added(folder / "memory", path)
            row = {"chunks": whole, "chunks embedded": written(said), "s": seconds, "put in": written(inserted)}
            rows[f"one line of {name}"] = row
    return rows


# -- finding ----------------------------------------------------------------------------------------------------------


async def take(daemon: Daemon, name: str, sections: Sequence[GivenSection]) -> Any:
    """Have the daemon take a document."""
    digest = hashlib.sha256(repr(sections).encode()).hexdigest()
    topic = await daemon.topics.get(TOPIC)
    return await daemon.taker.take(topic, GivenDocument(source=name, hash=digest, sections=tuple(sections)))


async def block_of(daemon: Daemon, client: aiohttp.ClientSession, stand_in: StandIn, question: str) -> str:
    """The memory block of a question, on one line."""
    await ask(daemon, client, [{"role": "user", "content": question}], TOPIC, "readonly")
    block = stand_in.last.partition("[/memory]")[0] if stand_in.last.startswith("[memory]") else ""
    return " ".join(block.split())


async def recall(folder: Path, *, misses: bool) -> Rows:
    """By format, the share of questions whose answer is shown."""
    asked = sources_files.write_all(folder / "documents")
    right: dict[str, list[bool]] = defaultdict(list)
    stand_in = StandIn()
    async with serving(stand_in, config_of(folder / "memory", 2000)) as (daemon, client):
        chunks = 0
        with FileReader() as reader:
            for path in sorted((folder / "documents").rglob("*.*")):
                name = path.relative_to(folder).as_posix()
                chunks += (await take(daemon, name, reader.sections(path))).written
        for question in asked:
            block = await block_of(daemon, client, stand_in, question.text)
            found = is_answered(question, block)
            for kind in (question.format[1:], "all"):
                right[kind].append(found)
            if misses and not found:
                print(f"{question.format} {question.text!r} wants {question.wants}")
    return {
        name: {"recall %": 100 * sum(values) / len(values), "questions": len(values), "chunks": chunks}
        for name, values in right.items()
    }


def is_answered(question: Asked, block: str) -> bool:
    """Whether all that is wanted is shown; of a row, in one row."""
    if len(question.wants) == 1:
        return " ".join(question.wants[0].split()) in block
    row, cell = question.wants
    return any(row in one and cell in one for one in re.split(rf"(?={re.escape(row.partition(':')[0])}:)", block))


async def alike(folder: Path) -> Rows:
    """The same facts as turns and as documents: each half once the one and once the other, in one topic."""
    told = [Asked(*one) for one in {asked: None for asked in sources_files.write_all(folder / "written") if asked.fact}]
    facts = list(dict.fromkeys(one.fact for one in told))
    rows: Rows = {}
    for budget in (100, 300):
        right: dict[str, list[bool]] = {"as turns": [], "as documents": []}
        for side in (0, 1):
            as_turn = set(facts[side::2])
            config = config_of(folder / f"alike-{side}-{budget}", budget)
            session = [message for fact in facts if fact in as_turn for message in _said(fact)]
            await tell([Talk(TOPIC, [session], [])], config)
            stand_in = StandIn()
            async with serving(stand_in, config) as (daemon, client):
                for number, fact in enumerate(fact for fact in facts if fact not in as_turn):
                    await take(daemon, f"{number}.txt", [GivenSection(text=fact)])
                for question in told:
                    block = await block_of(daemon, client, stand_in, question.text)
                    kind = "as turns" if question.fact in as_turn else "as documents"
                    right[kind].append(is_answered(question, block))
        for kind, values in right.items():
            row = rows.setdefault(kind, {"questions": len(values)})
            row[f"in {budget} tokens %"] = 100 * sum(values) / len(values)
    return rows


def _said(fact: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": fact}, {"role": "assistant", "content": "Noted."}]


# -- the table --------------------------------------------------------------------------------------------------------


async def run(asked: argparse.Namespace) -> dict[str, Rows]:
    """Everything that was asked for."""

    async def fast(folder: Path) -> Rows:
        return speed(folder) | await embedding(folder)

    async def small(folder: Path) -> Rows:
        return memory(folder)

    parts: dict[str, Callable[[Path], Any]] = {
        "speed": fast,
        "memory": small,
        "unchanged": lambda folder: unchanged(folder, asked.files),
        "change": change,
        "recall": lambda folder: recall(folder, misses=asked.misses),
        "alike": alike,
    }
    told: dict[str, Rows] = {}
    for name in asked.only.split(",") if asked.only else parts:
        folder = Path(tempfile.mkdtemp(prefix="memd-bench-"))
        try:
            told[name] = await parts[name](folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        report(name, told[name])
    return told


def report(name: str, rows: Rows) -> None:
    """Print one part."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = Table(title=name)
    table.add_column("")
    for column in columns:
        goal = f" ({GOALS[column]})" if column in GOALS else ""
        table.add_column(column + goal, justify="right")
    for row, cells in rows.items():
        shown = (cells.get(column) for column in columns)
        table.add_row(row, *("" if one is None else f"{one:,.0f}" if one >= 100 else f"{one:.3g}" for one in shown))
    Console(width=130).print(table)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="comma-separated parts")
    parser.add_argument("--files", type=int, default=10_000, help="for `unchanged`")
    parser.add_argument("--misses", action="store_true", help="print the questions whose answer is not shown")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    told = asyncio.run(run(asked))
    if asked.json is not None:
        asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
