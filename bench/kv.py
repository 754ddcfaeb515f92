"""What memory costs the model: prompt tokens that llama.cpp has to read, turn by turn.

Backs the claim that memory blocks are frozen and sticky: outside of compactions, a turn with memory reads little more
than what is new in it (at most 1.15 × new plus injected tokens), and the later steps of a tool loop read nothing but
what is new. The reading is llama.cpp's own `timings.prompt_n`; a real llama.cpp server runs on tiny models, one that
sees everything and one with a sliding window, whose tokens are characters, so only ratios within one run mean anything.

    python bench/kv.py [--turns 30] [--window 32768] [--json FILE] [--plot PATH_WITHOUT_SUFFIX]
    python bench/kv.py --read FILE --plot PATH_WITHOUT_SUFFIX     # the figures of an earlier run again
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]  # the tiny model and the llama.cpp server are shared with the tests

from llama_server import running_llama  # noqa: E402  # needs the path above
from tiny_model import write_scripted_model  # noqa: E402

from memd.daemon.app import running  # noqa: E402
from memd.settings.model import (  # noqa: E402
    BufferSettings,
    Config,
    EmbeddingSettings,
    InjectionSettings,
    ListenSettings,
    LogSettings,
    RetrievalSettings,
    UpstreamSettings,
)

FACTS = 120
STEPS = 6
SLIDING_WINDOW = 1024  # gemma3's own
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}

SERVERS: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "full attention": (None, ()),
    "sliding window": (SLIDING_WINDOW, ()),
    "sliding window, --swa-full": (SLIDING_WINDOW, ("swa_full=1",)),
    "sliding window, --checkpoint-min-step 256": (SLIDING_WINDOW, ("checkpoint_min_step=256",)),
    "sliding window, --ctx-checkpoints 0": (SLIDING_WINDOW, ("n_ctx_checkpoints=0",)),
}
"""Name → (the model's sliding window, llama.cpp's settings)."""
VARIANTS: dict[str, dict[str, Any] | None] = {
    "direct, full history": None,
    "memd, nothing remembered": {"min_score": 1.0},
    "memd, memory": {},
    "memd, memory, sticky off": {"sticky_tokens": 0},
}
"""Name → settings of `injection`, and of `retrieval` the least score; None: without memd."""

Message = dict[str, Any]


class Reading(msgspec.Struct, frozen=True):
    """What one request made the model read, in the model's tokens."""

    evaluated: int
    new: int
    """Of the messages that the request before did not have, its answer included, as the template puts them."""
    injected: int
    """Of the block that memory computed for this turn, as the template puts it."""
    left_out: int
    """Messages that have left the prompt."""


class Run(msgspec.Struct, frozen=True):
    """Both conversations of one variant."""

    talk: list[Reading]
    tools: list[Reading]


Measured = dict[str, dict[str, Run]]
"""Server → variant → what was read."""


def facts() -> list[str]:
    """Things to be remembered, from a fixed seed."""
    chosen = random.Random(7)
    places = ["boat house", "north gate", "paint shop", "archive", "kiln", "tool crib", "green room", "loading dock"]
    things = ["the spare key", "the fuse box", "the ledger", "the first-aid kit", "the ladder", "the pump", "the rope"]
    return [
        f"In the {chosen.choice(places)} number {n}, {chosen.choice(things)} is kept on shelf {chosen.randint(1, 40)}."
        for n in range(FACTS)
    ]


def questions(count: int) -> list[str]:
    """One question a turn, each about something that was said."""
    chosen = random.Random(11)
    return [f"Turn {n}. {chosen.choice(facts()).replace('is kept', 'was kept where,')} Tell me." for n in range(count)]


async def post(session: aiohttp.ClientSession, url: str, messages: Sequence[Message], **more: Any) -> Any:
    """One chat completion."""
    body = {"model": "tiny", "messages": list(messages), "max_tokens": 24, "cache_prompt": True, **more}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        said = await answer.json()
        assert answer.status == 200, said
        return said


class Counter:
    """Tokens by the model itself and its template."""

    def __init__(self, session: aiohttp.ClientSession, upstream: str) -> None:
        self._session = session
        self._url = f"{upstream}/v1/chat/completions/input_tokens"

    async def messages(self, messages: Sequence[Message], **more: Any) -> int:
        """Tokens of a whole prompt."""
        async with self._session.post(self._url, json={"messages": list(messages), **more}) as answer:
            assert answer.status == 200, await answer.text()
            tokens: int = (await answer.json())["input_tokens"]
            return tokens

    async def block(self, text: str) -> int:
        """What a prompt grows by with a block."""
        rest = [{"role": "user", "content": "?"}]
        if not text:
            return 0
        return await self.messages([{"role": "developer", "content": text}, *rest]) - await self.messages(rest)


async def talk(session: aiohttp.ClientSession, url: str, upstream: str, turns: int, memory: Any) -> list[Reading]:
    """A long conversation; `memory` gives (text of the turn's block, messages left out)."""
    counter = Counter(session, upstream)
    history: list[Message] = [{"role": "system", "content": "You look after a harbour."}]
    readings = []
    before = 0
    for text in questions(turns):
        history.append({"role": "user", "content": text})
        tokens = await counter.messages(history)
        said = await post(session, url, history)
        block, left_out = await memory()
        injected = await counter.block(block)
        readings.append(Reading(said["timings"]["prompt_n"], tokens - before, injected, left_out))
        history.append(said["choices"][0]["message"])
        before = tokens
    return readings


async def tool_loop(session: aiohttp.ClientSession, url: str, upstream: str, memory: Any) -> list[Reading]:
    """One turn of several steps: the assistant's call and the tool's result are new in each."""
    counter = Counter(session, upstream)
    history: list[Message] = [{"role": "user", "content": "Look up, step by step, where the kiln's ladder is kept."}]
    readings = []
    before = 0
    for step in range(STEPS):
        tokens = await counter.messages(history, tools=[TOOL])
        said = await post(session, url, history, tools=[TOOL])
        block, left_out = await memory()
        injected = 0 if step else await counter.block(block)
        readings.append(Reading(said["timings"]["prompt_n"], tokens - before, injected, left_out))
        call = {"id": f"c{step}", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "x"}'}}
        result = f"Result {step}: " + "shelf after shelf, nothing but rope. " * 6
        history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": f"c{step}", "content": result})
        before = tokens
    return readings


def settings(upstream: str, folder: Path, **injection: Any) -> Config:
    """memd in front of `upstream`."""
    return Config(
        listen=ListenSettings(port=0),
        upstream=UpstreamSettings(url=upstream),
        data_dir=folder,
        buffer=BufferSettings(),
        embedding=EmbeddingSettings(),
        retrieval=RetrievalSettings(min_score=injection.pop("min_score", 0.2)),
        injection=InjectionSettings(**injection),
        log=LogSettings(level="error"),
    )


async def with_memd(config: Config, upstream: str, turns: int, remember: bool) -> Run:
    """Both conversations through a daemon that has been told the facts before, or not."""
    async with running(config) as daemon, aiohttp.ClientSession() as session:
        if remember:
            for fact in facts():
                await post(session, daemon.base_url, [{"role": "user", "content": fact}])

        async def memory() -> tuple[str, int]:
            topic = await daemon.topics.get("default")
            conversation = topic.buffer.conversations()[-1]
            position = conversation.last_user_position()
            block = None if position is None else conversation.blocks.get(conversation.messages[position].digest)
            return "" if block is None else block.text, conversation.left_out

        return Run(
            talk=await talk(session, daemon.base_url, upstream, turns, memory),
            tools=await tool_loop(session, daemon.base_url, upstream, memory),
        )


async def direct(upstream: str, turns: int) -> Run:
    """Both conversations without memd."""

    async def nothing() -> tuple[str, int]:
        return "", 0

    async with aiohttp.ClientSession() as session:
        return Run(
            talk=await talk(session, upstream, upstream, turns, nothing),
            tools=await tool_loop(session, upstream, upstream, nothing),
        )


def measure(turns: int, window: int, servers: Sequence[str]) -> Measured:
    """Every variant on a server of its own, so that none profits from another's cache."""
    measured: Measured = {}
    for server in servers:
        sliding_window, server_settings = SERVERS[server]
        measured[server] = {}
        for variant, injection in VARIANTS.items():
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                model, log = folder / "tiny.gguf", folder / "llama.log"
                write_scripted_model(
                    model,
                    marker="[mem:",
                    reply=("No", "."),
                    reply_seen=("Yes", "!"),
                    trained_context=1 << 20,
                    sliding_window=sliding_window,
                )
                with running_llama(model, context=window, log=log, settings=server_settings) as upstream:
                    if injection is None:
                        measured[server][variant] = asyncio.run(direct(upstream, turns))
                    else:
                        config = settings(upstream, folder / "memory", **injection)
                        remember = "min_score" not in injection
                        measured[server][variant] = asyncio.run(with_memd(config, upstream, turns, remember))
    return measured


def figures(run: Run) -> dict[str, float]:
    """Sums and ratios of one variant; the first request of a conversation is all new and does not count."""
    talked, tools = run.talk[1:], run.tools[1:]
    calm = [now for before, now in zip(run.talk, talked, strict=False) if now.left_out == before.left_out]
    return {
        "read": sum(r.evaluated for r in talked),
        "new": sum(r.new for r in talked),
        "injected": sum(r.injected for r in talked),
        "calm_ratio": sum(r.evaluated for r in calm) / sum(r.new + r.injected for r in calm),
        "calm_turns": len(calm),
        "re_reading_turns": sum(r.evaluated > 1.5 * (r.new + r.injected) for r in calm),
        "tool_ratio": sum(r.evaluated for r in tools) / sum(r.new for r in tools),
    }


def report(measured: Measured) -> None:
    """Print a table for each server."""
    columns = ("read", "new", "injected", "read / (new + injected)", "turns that re-read", "tool steps 2-6")
    for server, runs in measured.items():
        table = Table(title=f"prompt tokens that llama.cpp read: {server}")
        table.add_column("variant", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for variant, run in runs.items():
            row = figures(run)
            cells = [f"{row[name]:,.0f}" for name in ("read", "new", "injected")]
            again = f"{row['re_reading_turns']} of {row['calm_turns']}"
            table.add_row(variant, *cells, f"{row['calm_ratio']:.2f}", again, f"{row['tool_ratio']:.2f} × new")
        Console(width=120).print(table)


def main() -> None:
    """Measure, print, and write the figures and the plot where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--window", type=int, default=32_768)
    parser.add_argument("--server", choices=list(SERVERS), action="append", help="default: all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="a file of --json, instead of measuring")
    parser.add_argument("--plot", type=Path, help="draw into this path with .png and .svg")
    asked = parser.parse_args()
    if asked.read is not None:
        measured = msgspec.json.decode(asked.read.read_bytes(), type=Measured)
    else:
        measured = measure(asked.turns, asked.window, asked.server or list(SERVERS))
    report(measured)
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1))
    if asked.plot is not None:
        from kv_plot import draw  # here: only the plot needs matplotlib

        draw(measured, asked.plot)


if __name__ == "__main__":
    main()
