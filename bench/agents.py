"""The promise in the traffic of real agents: sessions never hit the wall, nothing is lost, nothing is stored twice.

Backs these claims: no request that could fit is refused for its length, however long a tool loop runs, and every prompt
stays valid for the strictest template; what was said is in the log or in the prompt, once; what a turn needs later is
in its prompt; memory takes 20 ms of a request whatever leaves; the model reads hardly more than what is new.

Shapes of seven agents (agents_shapes.py) say what two real runs say, stretched to 40 and 200 steps (agents_runs.py),
through a daemon process in front of a model server that refuses whatever the strictest refuses (tests/support/
strict_llama.py), and one loop in front of the real llama.cpp. The second table has a line or more for each of the
sixteen failures from which this came (agents_leaving.py, agents_keeping.py, agents_rewriting.py,
agents_real.py).

    python bench/agents.py --runs FOLDER [--quick] [--only 7 | --only opencode] [--window N] [--pause 0] [--json FILE]

A step of an agent takes half a second or more, in which what was said is cut and embedded; so the sessions pause before
each request. Takes about half an hour, `--quick` five minutes. Exit code 1 if something is not as promised.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]  # the daemon's process and the model servers are shared with the tests

import agents_keeping  # noqa: E402  # needs the path above
import agents_leaving  # noqa: E402
import agents_real  # noqa: E402
import agents_rewriting  # noqa: E402
from agents_leaving import Finding, Stage  # noqa: E402
from agents_replay import Played, dumped, house, play  # noqa: E402
from agents_runs import chatted, load_run, scripted  # noqa: E402
from agents_shapes import SHAPES, Shape  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

Json = dict[str, Any]

GRID: tuple[tuple[int, int], ...] = ((40, 4_096), (40, 8_192), (40, 32_768))
LONG: tuple[tuple[str, int, int], ...] = (
    ("opencode", 200, 32_768),
    ("LangGraph", 200, 8_192),
    ("Claude Code", 200, 131_072),
)
QUICK: tuple[tuple[int, int], ...] = ((12, 8_192),)
_MODULES = (agents_leaving, agents_keeping, agents_rewriting, agents_real)
SCENARIOS = {number: [one.SCENARIOS[number] for one in _MODULES if number in one.SCENARIOS] for number in range(1, 17)}


class Bound(NamedTuple):
    """A column of the first table: a figure of each session, and what it has to be."""

    title: str
    figure: Callable[[Played], float]
    most: Callable[[Played], float]
    is_least: bool = False

    def is_good(self, played: Played) -> bool:
        """Whether a session keeps to it."""
        seen, bound = self.figure(played), self.most(played)
        return seen >= bound if self.is_least else seen <= bound


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0


def _rewrites(played: Played) -> bool:
    return next(shape.rewrites for shape in SHAPES if shape.name == played.shape)


BOUNDS: tuple[Bound, ...] = (
    Bound("refused", lambda one: one.refused, lambda _: 0),
    Bound("beyond", lambda one: one.beyond, lambda _: 0),
    Bound("invalid", lambda one: one.invalid, lambda _: 0),
    Bound("lost", lambda one: one.lost, lambda _: 0),
    Bound("twice %", lambda one: round(100 * one.stored_twice, 2), lambda one: 1.0 if _rewrites(one) else 0.0),
    Bound("needed %", lambda one: 100 * one.needed_shown / max(1, one.needed), lambda _: 90, is_least=True),
    Bound("room p99 ms", lambda one: _p99(one.room_ms), lambda _: 20),
    Bound("read ÷ new", lambda one: one.read / max(1, one.fair), lambda one: 1.2 if one.window > 8192 else 1.5),
    Bound("journal ÷ said", lambda one: one.journal_bytes / max(1, one.said_bytes), lambda _: 3),
)


def sessions(
    runs: Path, *, is_quick: bool, shapes: Sequence[Shape], pause: float, windows: Sequence[int] = ()
) -> Iterator[Played]:
    """Every session of the first table; `windows`: of the short ones these alone."""
    tools, text = load_run(runs / "tool_calls.json"), load_run(runs / "text_actions.json")
    sizes = [size for size in (QUICK if is_quick else GRID) if not windows or size[1] in windows]
    plan = [(shape, *size) for size in sizes for shape in shapes]
    if not is_quick and not windows:
        plan += [(shape, steps, window) for name, steps, window in LONG for shape in shapes if shape.name == name]
    for shape, steps, window in plan:
        chats = shape.manner == "chat"
        script = chatted(text, steps, window + steps) if chats else scripted(tools, steps, window + steps)
        with house(window) as home:
            yield play(shape, script, window, steps, home, pause)


def report_sessions(console: Console, played: Sequence[Played]) -> int:
    """The first table; how many figures are not as promised."""
    table = Table(title="sessions of agents through memd, strict model server")
    for column in ("agent", "window", "steps", "requests", "too long", "facts"):
        table.add_column(column, justify="left" if column == "agent" else "right")
    for bound in BOUNDS:
        table.add_column(bound.title, justify="right")
    bad = 0
    for one in played:
        cells = []
        for bound in BOUNDS:
            good = bound.is_good(one)
            bad += not good
            text = f"{bound.figure(one):,.4g}"
            cells.append(text if good else f"[red]{text} ✗[/]")
        table.add_row(
            one.shape, f"{one.window:,}", str(one.steps), str(one.requests), str(one.too_long), str(one.facts), *cells
        )
    console.print(table)
    for one in played:
        for line in one.complaints:
            console.print(line, markup=False, highlight=False)
    return bad


def report_findings(console: Console, found: Sequence[Finding]) -> int:
    """The second table; how many lines are not as promised."""
    table = Table(title="the sixteen")
    for column in ("", "what", "seen", "goal"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for one in found:
        seen = one.seen if one.is_good else f"[red]{one.seen} ✗[/]"
        table.add_row(str(one.number), one.what, seen, one.goal)
    console.print(table)
    return sum(not one.is_good for one in found)


def findings(staged: Stage, numbers: Sequence[int]) -> Iterator[Finding]:
    """The lines of these numbers; a scenario that fails is a line too."""
    for number in numbers:
        started = time.monotonic()
        for scenario in SCENARIOS[number]:
            try:
                yield from scenario(staged)
            except Exception as error:  # one scenario must not cost the others their figures
                yield Finding(number, f"the scenario failed: {error!r:.300}", "-", "-", False)
        print(f"number {number}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Replay, judge, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of tool_calls.json and text_actions.json")
    parser.add_argument("--quick", action="store_true", help="short sessions at one window, and smaller scenarios")
    parser.add_argument("--only", action="append", help="numbers of scenarios, names of agents, sessions or numbers")
    parser.add_argument("--window", type=int, action="append", default=[], help="short sessions at this window alone")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each request of a session")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    only = set(asked.only or ())
    staged = agents_leaving.stage(asked.runs, is_quick=asked.quick)
    numbers = [number for number in SCENARIOS if not only or {"numbers", str(number)} & only]
    console = Console(width=170)
    played: list[Played] = []
    names = {shape.name for shape in SHAPES}
    if not only or only & {"sessions", *names}:
        plan = SHAPES if not only & names else tuple(shape for shape in SHAPES if shape.name in only)
        for one in sessions(asked.runs, is_quick=asked.quick, shapes=plan, pause=asked.pause, windows=asked.window):
            print(f"{one.shape}, {one.window:,}, {one.steps} steps: {one.seconds:.0f} s", file=sys.stderr, flush=True)
            played.append(one)
    found = sorted(findings(staged, numbers), key=lambda one: one.number)
    bad = report_sessions(console, played) + report_findings(console, found)
    if asked.json is not None:
        told = {"sessions": [dumped(one) for one in played], "findings": [one._asdict() for one in found]}
        asked.json.write_text(json.dumps(told, indent=1))
    console.print(f"{bad} figures are not as promised" if bad else "everything is as promised")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
