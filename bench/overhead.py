"""What memd adds to a request: time to the first byte and the first streamed chunk, throughput, CPU, memory.

Backs the goals that it prints at its end with what it measured of them (overhead_goals.py). With memory a first byte
takes at most 1.6 embeddings of the question more over 5,000 chunks and 2.2 over 100,000 and 1,000,000, whether the
conversation goes on, is new, or is one of many that are stored meanwhile; half an embedding where nothing is stored.
Mode `off` costs at most 1.3 times a bare aiohttp pass-through, and a piece of a stream 20 µs of the processor.

Against a stub upstream that answers at once, all in one run: direct, a bare aiohttp pass-through (the ceiling of this
stack), nginx, LiteLLM and mnemonic-proxy where they are on the path, memd with mode `off`, with memory in topics in
which nothing is stored, and over stores. All run at the same time and take turns, round by round, and so does the
embedding of such a question alone in this process, `e`: figures in `e` mean the same on any machine. The parts:

    cells    growing conversations (0.2 KB a request) of each size, so many clients at a time; with memory where the
             histories of all clients together are short enough to wait until they are stored
    chats    2 KB of instructions; each request a new conversation, and chats of 25 turns: each is stored while the next
             are asked
    pieces   processor time of a reply of 2,000 pieces, each a packet, storing apart
    streams  a reply as fast as it can be relayed
    storing  tokens a second through the daemon's buffer and archiver, beside embedding the same chunks alone
    load     requests with memory in all the other cells, up to 64 clients with 2 MB each, and the resident memory

"CPU" is what the target's process uses per request, which is less noisy than its time.

    python bench/overhead.py [--chunks 5000,100000] [--clients 1,8,64] [--sizes 2000,200000,2000000]
        [--parts cells,chats] [--stores FOLDER] [--json FILE]

`--stores` names the folder that bench/store.py was told to `--keep`: a store of a million chunks takes half an hour to
build, and is asked too where it is there.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import overhead_cells as cells
import overhead_chats as chats
from overhead_clients import Alone, Figures
from overhead_goals import (
    BARE,
    DIRECT,
    MANY_CHUNKS,
    MANY_STEADY_CHATS,
    MNEMONIC,
    NEW_CHATS,
    NOTHING_STORED,
    OFF,
    STEADY_CHATS,
    Goal,
    added_e,
    added_ms,
    goals,
    over,
)
from overhead_stores import fill
from overhead_targets import Target, memd_serving, others, resident_bytes, serving, standing_still
from rich.console import Console
from rich.table import Table

CHUNKS = (5000, 100_000)
CHUNKS_IF_KEPT = 1_000_000
PARTS = ("cells", "chats", "pieces", "streams", "storing", "load")
CHATS = {NEW_CHATS: (1, 1), STEADY_CHATS: (25, 1), MANY_STEADY_CHATS: (25, 8)}
"""Turns, and clients."""
CHAT_BYTES = 2000
STORED_BYTES_MAX = 200_000
"""Of the histories of a cell: the time to store these is waited for."""
NOTHING_BYTES_MAX = 20_000
"""The same where nothing is stored: each round begins anew."""
OTHERS_CLIENTS_MAX, OTHERS_BYTES_MAX = 8, 200_000
"""Beyond this the other proxies are not measured: LiteLLM takes seconds for one of 64 requests with 2 MB each."""
STORING_SECONDS = 5.0
PIECE_COLUMNS = {"µs a piece": ("cpu_us", 1.0), "storing it": ("storing_us", 1.0), "packets": ("packets", 1.0)}
LOAD_COLUMNS = {
    "requests": ("requests", 1.0),
    "first byte p50, ms": ("first_byte_p50_ms", 1.0),
    "p99": ("first_byte_p99_ms", 1.0),
}
"""Heading → which figure, and what it is divided by."""


# -- the targets ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def all_targets(chunks: Sequence[int], kept: Path | None) -> Iterator[list[Target]]:
    """Everything that is measured, running."""
    with ExitStack() as stack:

        def folder() -> Path:
            temporary = tempfile.TemporaryDirectory(prefix="memd-bench-", ignore_cleanup_errors=True)
            return Path(stack.enter_context(temporary))

        direct = stack.enter_context(serving("stub"))
        upstream = direct[0]
        targets = [Target(name, *stack.enter_context(starting(folder(), upstream))) for name, starting in others()]
        targets.append(Target(DIRECT, *direct))
        targets.append(Target(BARE, *stack.enter_context(serving("bare", upstream))))
        targets.append(Target(OFF, *stack.enter_context(memd_serving(folder(), upstream))))
        empty = stack.enter_context(memd_serving(folder(), upstream))
        targets.append(Target(NOTHING_STORED, *empty, "full", is_stored_apart=True))
        for count in chunks:
            filled = folder()
            fill(filled, count, kept)
            targets.append(Target(over(count), *stack.enter_context(memd_serving(filled, upstream)), "full"))
        yield targets


def targets_of(cell: cells.Cell, targets: Sequence[Target]) -> list[Target]:
    """Those that are measured in a cell."""
    histories = cell.size * cell.clients

    def is_measured(target: Target) -> bool:
        if target.is_storing:
            return histories <= (NOTHING_BYTES_MAX if target.is_stored_apart else STORED_BYTES_MAX)
        is_other = target.name not in (DIRECT, BARE, OFF)
        return not is_other or (cell.clients <= OTHERS_CLIENTS_MAX and cell.size <= OTHERS_BYTES_MAX)

    return [target for target in targets if is_measured(target)]


# -- the run --------------------------------------------------------------------------------------------------------


async def run(
    parts: Sequence[str], all_cells: list[cells.Cell], targets: Sequence[Target], console: Console
) -> dict[str, Any]:
    """Part → what was measured, by target where there are several; each table is printed as soon as it is there."""
    alone = Alone()
    named = {target.name: target for target in targets}
    memories = [target for target in targets if target.is_storing and not target.is_stored_apart]
    told: dict[str, Any] = {part: {} for part in PARTS}
    resident: dict[str, Figures] = {target.name: {"at the start": resident_bytes(target.pid)} for target in targets}
    for cell in all_cells if "cells" in parts else []:
        told["cells"][cell.name] = await cells.measure(cell, targets_of(cell, targets), alone)
        console.print(requests_table(f"a history of {cell.name}", told["cells"][cell.name]))
    for kind, (turns, clients) in CHATS.items() if "chats" in parts else ():
        told["chats"][kind] = await chats.chats(turns, CHAT_BYTES, clients, [named[DIRECT], *memories], alone)
        console.print(requests_table(kind, told["chats"][kind]))
    if "pieces" in parts:
        slow = [target for target in targets if target.name in (BARE, MNEMONIC, OFF)]
        told["pieces"] = await chats.pieces([*slow, *memories[-1:]])
        console.print(rows_table("a reply piece by piece: processor", told["pieces"], PIECE_COLUMNS))
    if "streams" in parts:
        fast = [target for target in targets if not target.is_storing]
        told["streams"] = await chats.streams([*fast, *memories[-1:]])
        console.print(rows_table("a fast stream", told["streams"], {"chunks a second": ("per_second", 1.0)}))
    if "storing" in parts:
        with tempfile.TemporaryDirectory(prefix="memd-bench-") as folder:
            told["storing"] = await chats.storing(Path(folder), STORING_SECONDS)
        rates = (told["storing"][f"{what}_per_second"] for what in ("stored", "embedded"))
        console.print("tokens a second: stored {:,.0f}, embedded alone {:,.0f}".format(*rates))
    for target in targets:
        resident[target.name]["before the load"] = resident_bytes(target.pid)
    if "load" in parts:  # the last, as memd stores for minutes what comes with it
        loaded = [target for target in targets if target.name in (NOTHING_STORED, over(MANY_CHUNKS))]
        for cell in all_cells:
            rows = [target for target in loaded if target not in targets_of(cell, targets)]
            measured = told["load"][cell.name] = {}
            for target in rows:
                with standing_still([other for other in targets if other.is_storing and other is not target]):
                    measured[target.name] = await cells.load(cell, target)
            if rows:
                title = f"load: {cell.name}, while histories are stored"
                console.print(rows_table(title, measured, LOAD_COLUMNS))
        for target in loaded:
            resident[target.name]["after the load"] = resident_bytes(target.pid)
    stages = ("at the start", "before the load", "after the load")
    console.print(rows_table("resident, MB", resident, {stage: (stage, 1e6) for stage in stages}))
    return told | {"resident": resident}


# -- the report -----------------------------------------------------------------------------------------------------


def table_of(title: str, *columns: str) -> Table:
    """An empty table whose first column is text."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def requests_table(title: str, rows: dict[str, Figures]) -> Table:
    """First bytes and chunks, what is added to the direct ones, in embeddings too."""
    e_ms = next(iter(rows.values()))["e_ms"]
    columns = (
        "target",
        "first byte p50, p95, p99",
        "added",
        "in e",
        "first chunk p50, p95",
        "added",
        "a second",
        "CPU",
    )
    table = table_of(f"{title}; milliseconds, e = {e_ms:.2f}", *columns)
    for name, row in rows.items():
        first = ", ".join(f"{row[f'first_byte_p{part}_ms']:.2f}" for part in (50, 95, 99))
        chunk = ", ".join(f"{row[f'chunk_p{part}_ms']:.2f}" for part in (50, 95) if f"chunk_p{part}_ms" in row)
        added = (added_ms(rows, name), added_e(rows, name), added_ms(rows, name, what="chunk"))
        first_added, in_e, chunk_added = ("" if one is None else f"{one:.2f}" for one in added)
        rates = (f"{row['per_second']:,.0f}", f"{row['cpu_ms']:.2f}")
        table.add_row(name, first, first_added, in_e, chunk, chunk_added, *rates)
    return table


def rows_table(title: str, rows: dict[str, Figures], columns: dict[str, tuple[str, float]]) -> Table:
    """Figures by target; `columns`: heading → which figure, and what it is divided by."""
    table = table_of(title, "target", *columns)
    for name, row in rows.items():
        table.add_row(name, *(f"{row[key] / unit:,.0f}" if key in row else "" for key, unit in columns.values()))
    return table


def goals_table(judged: Sequence[Goal]) -> Table:
    """What was wanted, and what was measured of it."""
    table = Table(title="goals")
    for column in ("what", "goal", "measured", "", "note"):
        table.add_column(column, justify="right" if column in ("goal", "measured") else "left")
    for goal in judged:
        bound = f"{'≥' if goal.is_at_least else '≤'} {goal.bound:g} {goal.unit}".strip()
        measured = "" if goal.measured is None else f"{goal.measured:,.2f} {goal.unit}".strip()
        table.add_row(goal.what, bound, measured, goal.verdict, goal.note)
    return table


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", help="comma-separated numbers of chunks in the stores")
    parser.add_argument("--clients", default="1,8,64", help="comma-separated numbers of clients at a time")
    parser.add_argument("--sizes", default="2000,200000,2000000", help="comma-separated bytes of history")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of these")
    parser.add_argument("--stores", type=Path, help="where bench/store.py kept its stores")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends what it started
    console = Console(width=130)
    kept: Path | None = asked.stores
    sizes, clients = ([int(one) for one in text.split(",")] for text in (asked.sizes, asked.clients))
    is_kept = kept is not None and (kept / str(CHUNKS_IF_KEPT)).is_dir()
    chunks = [*CHUNKS, *([CHUNKS_IF_KEPT] if is_kept else [])]
    if asked.chunks is not None:
        chunks = [int(one) for one in asked.chunks.split(",")]
    all_cells = [cells.Cell(size, number) for size in sizes for number in clients]
    with all_targets(chunks, kept) as targets:
        told = asyncio.run(run(asked.parts.split(","), all_cells, targets, console))
    judged = goals(told, chunks)
    console.print(goals_table(judged))
    if asked.json is not None:
        told["goals"] = [{**goal._asdict(), "verdict": goal.verdict} for goal in judged]
        asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
