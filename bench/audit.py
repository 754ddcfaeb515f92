"""The cost of the audit: of a request to one of memd's own routes, of a line on disk, of reading and checking a chain.

    python bench/audit.py [--acts N]

A search with 32 chunks is answered by a handler that does nothing, with the audit on and off; the difference is what a
client waits for. The rest is work of a thread. Requests to a model cost nothing: they are told from their receipts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
from aiohttp.test_utils import make_mocked_request

from memd.access import let_in
from memd.admin.auditing import Auditor, audited
from memd.admin.routes import ROUTES
from memd.admin.routing import ALL_TOPICS, Extent
from memd.principals import Principals
from memd.store.audit import AuditBook, read_book
from memd.store.disk import LocalDisk

CHUNKS = 32
ROUNDS = 2_000
ASKED = Extent((ALL_TOPICS,))


class Chunk(msgspec.Struct):
    """As much of a found chunk as the audit looks at."""

    uuid: str
    topic_id: str = "work"


class Found(msgspec.Struct):
    """As much of an answer."""

    chunks: tuple[Chunk, ...]


async def request_us(folder: Path, record: str, acts: int) -> tuple[float, float]:
    """Microseconds of one request, the median; of one act in the thread that writes, all together."""
    principals = Principals()
    auditor = Auditor(AuditBook(LocalDisk(), folder), principals, record)
    request: Any = make_mocked_request("GET", "/memd/search?q=x")
    let_in(request, principals)
    [route] = [one for one in ROUTES if one.path == "/memd/search"]
    answer = Found(tuple(Chunk(f"{number:032x}") for number in range(CHUNKS)))

    async def answered() -> Found:
        return answer

    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await audited(auditor, request, route, ASKED, answered)
        times.append((time.perf_counter() - began) * 1e6)
    began = time.perf_counter()
    await auditor.flush()
    written = (time.perf_counter() - began) / ROUNDS * 1e6
    for _ in range(acts // ROUNDS - 1):
        for _ in range(ROUNDS):
            await audited(auditor, request, route, ASKED, answered)
        await auditor.flush()
    return statistics.median(times), written


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acts", type=int, default=100_000, help="lines of the chain that is read (100,000)")
    acts = parser.parse_args().acts
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        without, _ = asyncio.run(request_us(folder, "never", ROUNDS))
        on, written = asyncio.run(request_us(folder, "always", acts))
        size = sum(path.stat().st_size for path in (folder / "memd.audit").iterdir())
        began = time.perf_counter()
        kept = read_book(LocalDisk(), folder, lambda _: False)
        seconds = time.perf_counter() - began
    assert kept is not None and kept.findings == (), kept
    print(f"a search with {CHUNKS} chunks: {on - without:.0f} us more with the audit ({without:.1f} us without)")
    print(f"its line, in a batch of {ROUNDS:,}, in a thread: {written:.0f} us with one fsync for all")
    print(f"reading and checking {kept.head.n:,} lines, {size / 1e6:.0f} MB: {seconds:.2f} s")


if __name__ == "__main__":
    main()
