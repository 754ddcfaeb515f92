"""What memory costs the model: prompt tokens that llama.cpp has to read, turn by turn.

Backs the claim that memory blocks are frozen and sticky: outside of compactions, a turn with memory reads little more
than what is new in it (at most 1.15 × new plus injected tokens), and the later steps of a tool loop read nothing but
what is new. The reading is llama.cpp's own `timings.prompt_n`; a real llama.cpp server runs on a tiny model whose
tokens are characters, so only ratios within one run mean anything.

    python bench/kv.py [--turns 30] [--window 32768] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]  # the tiny model and the llama.cpp server are shared with the tests

from llama_server import running_llama  # noqa: E402  # needs the path above
from tiny_model import write_scripted_model  # noqa: E402

from memd.config import Buffer, Config, Embedding, Injection, Listen, Log, Retrieval, Upstream  # noqa: E402
from memd.daemon.app import running  # noqa: E402

FACTS = 120
STEPS = 6
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}

Message = dict[str, Any]


class Reading:
    """What one request made the model read."""

    def __init__(self, evaluated: int, new: int, injected: int, left_out: int) -> None:
        self.evaluated = evaluated
        self.new = new
        """Tokens of the messages that the request before did not have, its answer included."""
        self.injected = injected
        """Tokens of the block that memory computed for this turn."""
        self.left_out = left_out

    def as_json(self) -> dict[str, int]:
        """All figures by name."""
        return vars(self)


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


async def count(session: aiohttp.ClientSession, upstream: str, text: str) -> int:
    """Tokens of a text by the model itself."""
    async with session.post(f"{upstream}/tokenize", json={"content": text}) as answer:
        return len((await answer.json())["tokens"])


async def talk(session: aiohttp.ClientSession, url: str, upstream: str, turns: int, memory: Any) -> list[Reading]:
    """A long conversation; `memory` gives (text of the turn's block, messages left out)."""
    history: list[Message] = [{"role": "system", "content": "You look after a harbour."}]
    readings = []
    for text in questions(turns):
        new = (await count(session, upstream, text)) + (len(history) > 1) * 30
        history.append({"role": "user", "content": text})
        said = await post(session, url, history)
        block, left_out = await memory()
        readings.append(Reading(said["timings"]["prompt_n"], new, await count(session, upstream, block), left_out))
        history.append(said["choices"][0]["message"])
    return readings


async def tool_loop(session: aiohttp.ClientSession, url: str, upstream: str) -> list[Reading]:
    """One turn of several steps: the assistant's call and the tool's result are new in each."""
    history: list[Message] = [{"role": "user", "content": "Look up, step by step, where the kiln's ladder is kept."}]
    readings = []
    new = 0
    for step in range(STEPS):
        said = await post(session, url, history, tools=[TOOL])
        readings.append(Reading(said["timings"]["prompt_n"], new, 0, 0))
        call = {"id": f"c{step}", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "x"}'}}
        result = f"Result {step}: " + "shelf after shelf, nothing but rope. " * 6
        history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": f"c{step}", "content": result})
        new = await count(session, upstream, result) + 150
    return readings


def settings(upstream: str, folder: Path, **injection: Any) -> Config:
    """memd in front of `upstream`."""
    return Config(
        listen=Listen(port=0),
        upstream=Upstream(url=upstream),
        data_dir=folder,
        buffer=Buffer(),
        embedding=Embedding(),
        retrieval=Retrieval(min_score=injection.pop("min_score", 0.2)),
        injection=Injection(**injection),
        log=Log(level="error"),
    )


async def with_memd(config: Config, upstream: str, turns: int, remember: bool) -> dict[str, list[Reading]]:
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

        return {
            "talk": await talk(session, daemon.base_url, upstream, turns, memory),
            "tools": await tool_loop(session, daemon.base_url, upstream),
        }


async def direct(upstream: str, turns: int) -> dict[str, list[Reading]]:
    """Both conversations without memd."""

    async def nothing() -> tuple[str, int]:
        return "", 0

    async with aiohttp.ClientSession() as session:
        return {
            "talk": await talk(session, upstream, upstream, turns, nothing),
            "tools": await tool_loop(session, upstream, upstream),
        }


def measure(turns: int, window: int) -> dict[str, dict[str, list[Reading]]]:
    """Every variant on a server of its own, so that none profits from another's cache."""
    variants: dict[str, dict[str, Any] | None] = {
        "direct, full history": None,
        "memd, nothing remembered": {"min_score": 1.0},
        "memd, memory": {},
        "memd, memory, sticky off": {"sticky_tokens": 0},
    }
    measured = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "tiny.gguf"
        write_scripted_model(model, marker="[mem:", reply=("No", "."), reply_seen=("Yes", "!"), trained_context=1 << 20)
        for number, (variant, injection) in enumerate(variants.items()):
            with running_llama(model, context=window, log=folder / f"llama{number}.log") as upstream:
                if injection is None:
                    measured[variant] = asyncio.run(direct(upstream, turns))
                else:
                    config = settings(upstream, folder / f"memory{number}", **injection)
                    remember = "min_score" not in injection
                    measured[variant] = asyncio.run(with_memd(config, upstream, turns, remember))
    return measured


def report(measured: dict[str, dict[str, list[Reading]]]) -> dict[str, dict[str, float]]:
    """Print the table; returns its figures."""
    table = Table(title="prompt tokens that llama.cpp read")
    columns = ("read", "new", "injected", "read / (new + injected)", "turns that re-read", "tool steps 2-6")
    table.add_column("variant", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    figures = {}
    for variant, readings in measured.items():
        talked, tools = readings["talk"][1:], readings["tools"][1:]  # the first request of each is all new
        calm = [now for before, now in zip(readings["talk"], talked, strict=False) if now.left_out == before.left_out]
        read, wanted = sum(r.evaluated for r in calm), sum(r.new + r.injected for r in calm)
        again = sum(1 for r in calm if r.evaluated > 1.5 * (r.new + r.injected))
        steps = sum(r.evaluated for r in tools) / sum(r.new for r in tools)
        figures[variant] = {
            "read": sum(r.evaluated for r in talked),
            "new": sum(r.new for r in talked),
            "injected": sum(r.injected for r in talked),
            "calm_ratio": read / wanted,
            "re_reading_turns": again,
            "tool_ratio": steps,
        }
        cells = [f"{figures[variant][name]:,.0f}" for name in ("read", "new", "injected")]
        table.add_row(variant, *cells, f"{read / wanted:.2f}", f"{again} of {len(calm)}", f"{steps:.2f} × new")
    Console(width=120).print(table)
    return figures


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--window", type=int, default=32_768)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    measured = measure(asked.turns, asked.window)
    figures = report(measured)
    if asked.json is not None:
        turns = {v: {k: [r.as_json() for r in rs] for k, rs in both.items()} for v, both in measured.items()}
        asked.json.write_text(json.dumps({"figures": figures, "turns": turns}, indent=1))


if __name__ == "__main__":
    main()
