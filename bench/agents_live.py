"""Agents as their registries have them, live: in front of a scripted model, directly and through memd.

Backs these claims: an agent that fails at its window directly is refused nothing through memd, every prompt is valid,
the model reads hardly more than in an unlimited window, and what was said once is in the prompt that asks for it.

Each agent is told four facts, given a task of `--steps` calls with results of 1,600 characters, asked for the facts,
and asked again in a new chat. The model calls the agent's tool that reads files. Nothing is installed: name
interpreters that have the agents (`pip install langgraph langchain-openai pydantic-ai-slim[openai] openai-agents`;
`npm install ai @ai-sdk/openai-compatible zod`) and commands (of the npm packages opencode-ai, @qwen-code/qwen-code,
@mariozechner/pi-coding-agent).

    python bench/agents_live.py --python VENV/bin/python --node FOLDER --command opencode=PATH [--only LangGraph]
        [--window 8192] [--steps 40] [--json FILE]

Exit code 1 if an agent fails through memd, a prompt is refused or invalid, or a fact is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]  # the daemon's process and the model server are shared with the tests

from agents_recorded import processor_seconds, read_by_prefix, settled  # noqa: E402  # needs the path above
from agents_replay import stored  # noqa: E402
from daemon_process import DaemonProcess, ask  # noqa: E402
from recording_upstream import Request, Response, recording_upstream  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from strict_llama import Prompt, StrictLlama  # noqa: E402

Json = dict[str, Any]
FACTS = ("heron-42", "Matilda Okonkwo", "9417", "every second Tuesday")
TELL = (
    "Some things first. The staging database is called heron-42. The person who signs off releases is Matilda Okonkwo."
    " The metrics exporter listens on port 9417. The backup drill is every second Tuesday. Just note it."
)
WORK = "Work through all modules of this repository one by one and say when you are done."
QUESTION = (
    "what is the staging database called, who signs off releases, which port has the metrics exporter, and when is the"
    " backup drill?"
)
DONE = "All of it is done and noted."
ASK, ASK_ANEW = f"Before you go: {QUESTION}", f"In this new chat: {QUESTION}"
UNLIMITED = 1_000_000
RESULT_CHARACTERS = 1_600
AGENT_SECONDS_MAX = 600.0

SCRIPTS: dict[str, dict[str, str]] = tomllib.loads((ROOT / "bench" / "data" / "agents_live.toml").read_text())


class Agent(NamedTuple):
    """A way to hold a chat with an agent: what is said in it, one after the other."""

    name: str
    commands: Callable[[str, Path, Sequence[str]], list[list[str]]]
    """The commands of a chat, given the base URL, a folder of its own and what is said."""


def scripted(name: str, text: str, program: str, script: Path) -> Agent:
    """An agent that is a script of a few lines with its library; it finds a library beside it."""

    def commands(url: str, _: Path, said: Sequence[str]) -> list[list[str]]:
        script.write_text(text)
        return [[program, str(script), url, *said]]

    return Agent(name, commands)


def _opencode(path: str, url: str, home: Path, said: Sequence[str]) -> list[list[str]]:
    model = {"name": "tiny", "tool_call": True, "limit": {"context": UNLIMITED, "output": 4096}}
    options = {"baseURL": url, "apiKey": "x"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": {"tiny": model}}
    settings = {"provider": {"local": provider}, "model": "local/tiny", "autoupdate": False, "share": "disabled"}
    (home / "opencode.json").write_text(json.dumps(settings))
    return [[path, "run", *(["--continue"] if number else []), one] for number, one in enumerate(said)]


def _pi(path: str, url: str, home: Path, said: Sequence[str]) -> list[list[str]]:
    costs = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    model = {"id": "tiny", "name": "tiny", "reasoning": False, "input": ["text"], "cost": costs}
    model |= {"contextWindow": UNLIMITED, "maxTokens": 4096}
    provider = {"baseUrl": url, "api": "openai-completions", "apiKey": "x", "models": [model]}
    (home / ".pi" / "agent").mkdir(parents=True, exist_ok=True)
    (home / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
    begin = [path, "--provider", "local", "--model", "tiny", "-p"]
    return [[*begin, *(["--continue"] if number else []), one] for number, one in enumerate(said)]


def _qwen(path: str, url: str, _: Path, said: Sequence[str]) -> list[list[str]]:
    begin = [path, "--auth-type", "openai", "--openai-api-key", "x", "--openai-base-url", url, "-m", "tiny", "-y"]
    return [[*begin, *(["--continue"] if number else []), "-p", one] for number, one in enumerate(said)]


COMMANDS = {"opencode": _opencode, "pi": _pi, "qwen": _qwen}


@dataclass
class Model(StrictLlama):
    """Calls the agent's tool that reads files while it works, and says that all is done otherwise."""

    steps: int = 40
    files: Path = Path()
    asked: dict[str, Prompt] = field(default_factory=dict)
    """The first prompt of each question."""

    def __call__(self, request: Request) -> Response:
        """Any request."""
        if not request.target.partition("?")[0].endswith("/chat/completions"):
            return super().__call__(request)
        body = json.loads(request.body)
        users = [at for at, one in enumerate(body["messages"]) if one["role"] == "user"]
        said = json.dumps(body["messages"][users[-1]]["content"]) if users else ""
        step = sum(WORK in prompt.text and bool(prompt.reply.get("tool_calls")) for prompt in self.prompts)
        reader = next((one["function"] for one in body.get("tools") or () if "read" in one["function"]["name"]), None)
        self.replies = {"": {"role": "assistant", "content": DONE}}
        if WORK in said and reader is not None and step < self.steps:
            wanted = reader["parameters"].get("required") or list(reader["parameters"]["properties"])
            file = str(self.files / f"module_{step}.txt")
            called = {"name": reader["name"], "arguments": json.dumps(dict.fromkeys(wanted[:1], file))}
            calls = [{"id": f"call_{step}", "type": "function", "function": called}]
            self.replies = {"": {"role": "assistant", "content": None, "tool_calls": calls}}
        response = super().__call__(request)
        for question in (ASK, ASK_ANEW):
            if question in said and body.get("tools"):
                self.asked.setdefault(question, self.prompts[-1])
        return response


@dataclass
class Outcome:
    """What came of an agent."""

    agent: str
    requests: int
    fails_directly: bool
    exit_codes: list[int]
    refused: int
    invalid: int
    read: float
    """Of what it reads in an unlimited window."""
    memory_ms: list[float]
    """From the request to the first byte, without the model."""
    processor_ms: float
    """A request, storing included."""
    facts: dict[str, int]
    lost: int
    """Files and facts of which memory has nothing."""
    twice: float
    """The share of what is stored that was not said so often."""
    said: str

    @property
    def is_good(self) -> bool:
        """Whether it is as promised."""
        bad = (*self.exit_codes, self.refused, self.invalid, self.lost, self.twice)
        return not any(bad) and set(self.facts.values()) == {len(FACTS)}


def run(agent: Agent, url: str, folder: Path, said: Sequence[str]) -> tuple[int, str]:
    """Hold one chat; its exit code and the end of what it said."""
    home = folder / re.sub(r"\W", "-", agent.name)
    home.mkdir(exist_ok=True)
    own = {"HOME": str(home), "OPENAI_API_KEY": "x", "XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home)}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    for command in agent.commands(f"{url}/v1", home, said):
        ended = subprocess.run(
            command, cwd=home, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=AGENT_SECONDS_MAX,
        )  # fmt: skip
        if ended.returncode:
            return ended.returncode, (ended.stderr or ended.stdout)[-400:]
    return 0, ""


def play(agent: Agent, window: int, steps: int, folder: Path) -> Outcome:
    """Hold the chats in an unlimited window, directly, and through memd."""
    models = [Model(size, steps=steps, files=folder) for size in (UNLIMITED, window, window)]
    codes: list[int] = []
    said = ""
    directly = []
    for model in models[:2]:
        with recording_upstream() as upstream:
            upstream.answer, upstream.answers_all = model, True
            directly.append(run(agent, upstream.url, folder, (TELL, WORK, ASK)))
    with tempfile.TemporaryDirectory(prefix="memd-live-") as name, recording_upstream() as upstream:
        upstream.answer, upstream.answers_all = models[2], True
        daemon = DaemonProcess(Path(name), upstream.url, {"log": {"level": "warning"}}).start()
        try:
            begun = processor_seconds(daemon)
            for chat in ((TELL, WORK, ASK), (ASK_ANEW,)):
                code, told = run(agent, daemon.base_url.removesuffix("/v1"), folder, chat)
                codes.append(code)
                said = said or told
                settled(daemon)
            spent = processor_seconds(daemon) - begun
            turns = ask(f"{daemon.own_url}/memd/turns?limit=100").json["turns"]
            logged = [str(one["content"]) for one in daemon.export() if one["live"]]
        finally:
            daemon.discard()
    files = [(folder / f"module_{step}.txt").read_text() for step in range(steps)]
    marks = [*FACTS, *(text.partition("\n")[0] for text in files)]
    read = [read_by_prefix(["".join(one.parts) for one in model.prompts if one.reply]) for model in models]
    through = models[2].prompts
    return Outcome(
        agent=agent.name,
        requests=len(through),
        fails_directly=bool(directly[1][0]) or any(one.is_beyond for one in models[1].prompts),
        exit_codes=codes,
        refused=sum(not one.reply for one in through),
        invalid=sum(bool(one.problems) for one in through),
        read=read[2] / max(1.0, read[0]),
        memory_ms=sorted(turn["timings_ms"]["memory"] for turn in turns if "memory" in turn["timings_ms"]),
        processor_ms=1000 * spent / max(1, len(through)),
        facts={q[:11]: _found(models[2].asked.get(q)) for q in (ASK, ASK_ANEW)},
        lost=sum(not any(one in text for text in logged) for one in marks),
        twice=stored(logged, [TELL, WORK, ASK, ASK_ANEW, *files, *[DONE] * 4], [])[1],
        said=said or directly[0][1],
    )


def _found(prompt: Prompt | None) -> int:
    return 0 if prompt is None else sum(fact in prompt.text for fact in FACTS)


def report(console: Console, outcomes: Sequence[Outcome]) -> None:
    """The table, and what agents that failed said."""
    table = Table(title="agents through memd, live, scripted model")
    columns = ("requests", "fails directly", "exit", "refused", "invalid", "read ÷ unlimited", "memory p50 / p95 ms")
    for column in ("agent", *columns, "processor ms", "facts, same chat", "new chat", "lost", "twice %"):
        table.add_column(column, justify="left" if column == "agent" else "right")
    for one in outcomes:
        p50, p95 = ([*one.memory_ms, 0.0][int(len(one.memory_ms) * share)] for share in (0.5, 0.95))
        facts = [f"{found} of {len(FACTS)}" for found in one.facts.values()]
        codes = "/".join(map(str, one.exit_codes))
        counts = (str(one.requests), "yes" if one.fails_directly else "no", codes, str(one.refused), str(one.invalid))
        figures = (f"{one.read:.2f}", f"{p50:.1f} / {p95:.0f}", f"{one.processor_ms:.0f}")
        kept = (str(one.lost), f"{100 * one.twice:.2f}")
        table.add_row(one.agent, *counts, *figures, *facts, *kept, style=None if one.is_good else "red")
    console.print(table)
    for one in outcomes:
        if one.said:
            console.print(f"{one.agent}: {one.said}", markup=False, highlight=False)


def main() -> None:
    """Play, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", type=Path, help="an interpreter that has the agents written in Python")
    parser.add_argument("--node", type=Path, help="a folder with node_modules of the agents written in JavaScript")
    parser.add_argument("--command", action="append", default=[], metavar="NAME=PATH", help=", ".join(COMMANDS))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--window", type=int, default=8_192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="memd-live-") as name:
        folder = Path(name)
        code = "\n".join(path.read_text() for path in sorted(Path(argparse.__file__).parent.glob("[a-c]*.py")))
        for step in range(asked.steps):
            start = step * 4_000 % (len(code) - RESULT_CHARACTERS)
            (folder / f"module_{step}.txt").write_text(f"# module {step}\n{code[start : start + RESULT_CHARACTERS]}")
        agents = []
        if asked.python is not None:
            agents += [scripted(*one, str(asked.python), folder / "agent.py") for one in SCRIPTS["python"].items()]
        if asked.node is not None:
            agents += [scripted(*one, "node", asked.node / "agent.mjs") for one in SCRIPTS["node"].items()]
        for command, _, path in (one.partition("=") for one in asked.command):
            agents.append(Agent(command, partial(COMMANDS[command], path)))
        for agent in agents:
            if not asked.only or agent.name in asked.only:
                outcomes.append(play(agent, asked.window, asked.steps, folder))
                print(f"{agent.name}: {outcomes[-1].requests} requests", file=sys.stderr, flush=True)
    report(Console(width=180), outcomes)
    if asked.json is not None:
        asked.json.write_text(json.dumps([vars(one) for one in outcomes], indent=1))
    sys.exit(0 if all(one.is_good for one in outcomes) else 1)


if __name__ == "__main__":
    main()
