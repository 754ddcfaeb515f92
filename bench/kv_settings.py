"""What llama.cpp's settings make of the cache when two conversations take turns, with memd and without.

Backs docs/clients.md. Everything is as in `bench/kv.py`, whose parts are used; only ratios within a run mean anything.

    python bench/kv_settings.py [--turns 15] [--window 32768]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import aiohttp
from kv import SLIDING_WINDOW, Counter, Message, facts, post, questions, settings
from llama_server import running_llama
from rich.console import Console
from rich.table import Table
from tiny_model import write_scripted_model

from memd.daemon.app import running

CONVERSATIONS = ("At the harbour. ", "In the workshop. ")
SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "-np 2": (2, ()),
    "-np 2 --cache-ram 0": (2, ("cache_ram_mib=0",)),
    "-np 1": (1, ()),
    "-np 1 --cache-ram 0": (1, ("cache_ram_mib=0",)),
    "-np 1 --cache-ram 0 --cache-reuse 256": (1, ("cache_ram_mib=0", "n_cache_reuse=256")),
    "-np 2 --cache-reuse 256": (2, ("n_cache_reuse=256",)),
    "-np 2 --context-shift": (2, ("ctx_shift=1",)),
}
"""Name → (slots, llama.cpp's settings)."""


async def read(session: aiohttp.ClientSession, url: str, upstream: str, turns: int) -> tuple[int, int]:
    """Both conversations by turns: (tokens read, tokens new in the clients' messages), the first turns not counted.

    What memory puts in is in what was read and not in what was new.
    """
    counter = Counter(session, upstream)
    histories: list[list[Message]] = [[] for _ in CONVERSATIONS]
    before = [0] * len(CONVERSATIONS)
    evaluated = new = 0
    for turn, question in enumerate(questions(turns)):
        for number, opening in enumerate(CONVERSATIONS):
            histories[number].append({"role": "user", "content": opening + question})
            tokens = await counter.messages(histories[number])
            said = await post(session, url, histories[number])
            histories[number].append(said["choices"][0]["message"])
            if turn:
                evaluated += said["timings"]["prompt_n"]
                new += tokens - before[number]
            before[number] = tokens
    return evaluated, new


async def measure(upstream: str, folder: Path, turns: int) -> list[tuple[int, int]]:
    """Without memd, then with memory."""
    async with aiohttp.ClientSession() as session:
        direct = await read(session, upstream, upstream, turns)
    config = settings(upstream, folder)
    async with running(config) as daemon, aiohttp.ClientSession() as session:
        for fact in facts():
            await post(session, daemon.base_url, [{"role": "user", "content": fact}])
        return [direct, await read(session, daemon.base_url, upstream, turns)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--window", type=int, default=32_768, help="of one slot")
    asked = parser.parse_args()
    for model_name, sliding_window in (("full attention", None), ("sliding window", SLIDING_WINDOW)):
        table = Table(title=f"tokens read in two conversations by turns: {model_name}")
        for column in ("llama-server", "without memd", "× new", "memd with memory"):
            table.add_column(column, justify="left" if column == "llama-server" else "right")
        for name, (slots, server) in SETTINGS.items():
            with tempfile.TemporaryDirectory() as directory:
                folder = Path(directory)
                model, log = folder / "tiny.gguf", folder / "llama.log"
                write_scripted_model(
                    model,
                    marker="[mem:",
                    reply=("No", "."),
                    reply_seen=("Yes", "!"),
                    trained_context=1 << 20,
                    sliding_window=sliding_window,
                )
                context = asked.window * slots
                with running_llama(model, context=context, log=log, parallel=slots, settings=server) as upstream:
                    direct, remembered = asyncio.run(measure(upstream, folder / "memory", asked.turns))
            table.add_row(name, f"{direct[0]:,}", f"{direct[0] / direct[1]:.2f}", f"{remembered[0]:,}")
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
