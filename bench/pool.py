"""What several model servers cost a request, and how long one that dies is noticed by who asks next.

Backs these claims: choosing a server costs at most a third of a millisecond a request (in `off`, where memd reads the
body for nothing else; where it reads it anyway, a tenth), and after a server has died the next request of
its conversations is answered by another one without an error, in less than 0.1 s.

    python bench/pool.py [--rounds 60] [--json FILE]

A daemon before one server and a daemon before two are asked in turns, by chats that go on; the ratio of each turn is
that of its two medians. The servers answer at once (`overhead_targets.Stub`), so that the prompt's cache, which is what
a conversation's own server is for, is not in the figures: tests/test_pool.py sees it grow on two real llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import zlib
from contextlib import ExitStack
from pathlib import Path

from overhead import Connection, talk
from overhead_targets import Target, cpu_seconds, memd_serving, serving
from rich.console import Console
from rich.table import Table

MODES = ("off", "readonly")
CHATS = 8
TURNS = 12
"""Of each chat, in a round."""
WARM_ROUNDS = 2
BYTES = 2000
Figures = dict[str, float]


class Talk:
    """A conversation that grows by one exchange a request."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._messages: list[dict[str, str]] = []

    def next_body(self) -> bytes:
        """The next request."""
        said = talk(BYTES if not self._messages else 100, zlib.crc32(self._name.encode()))
        self._messages.append({"role": "user", "content": f"{self._name} {len(self._messages)}: {said}"})
        body = json.dumps({"model": "stub", "messages": self._messages}).encode()
        self._messages.append({"role": "assistant", "content": "Noted."})
        return body


def _round(client: Connection, target: Target, talks: list[Talk]) -> tuple[float, float]:
    """Milliseconds to the first byte, the median, and of processor, a request."""
    used = cpu_seconds(target.pid)
    taken = [client.first_byte_seconds(talk.next_body()) for _ in range(TURNS) for talk in talks]
    return 1000 * statistics.median(taken), 1000 * (cpu_seconds(target.pid) - used) / len(taken)


def cost(mode: str, rounds: int, one: Target, two: Target) -> Figures:
    """What a request takes before one server and before two, in turns."""
    sets: dict[str, list[tuple[float, float]]] = {one.name: [], two.name: []}
    targets = [target._replace(mode=mode) for target in (one, two)]
    clients = {target.name: Connection(target) for target in targets}
    for number in range(rounds + WARM_ROUNDS):
        for target in targets if number % 2 else reversed(targets):
            talks = [Talk(f"{mode} {number} {chat}") for chat in range(CHATS)]
            sets[target.name].append(_round(clients[target.name], target, talks))
    kept = {name: measured[WARM_ROUNDS:] for name, measured in sets.items()}
    told: Figures = {}
    for column, name in enumerate(("first_byte", "cpu")):
        alone, pooled = ([measured[column] for measured in kept[target.name]] for target in (one, two))
        told[f"{name}_one_ms"], told[f"{name}_two_ms"] = statistics.median(alone), statistics.median(pooled)
        told[f"{name}_ratio"] = statistics.median(b / a for a, b in zip(alone, pooled, strict=True))
    return told


def death(two: Target, pids: list[int]) -> Figures:
    """How long the chats wait for their next answer when one of two servers has just died."""
    client = Connection(two._replace(mode="readonly"))
    talks = [Talk(f"death {chat}") for chat in range(CHATS)]
    before = [client.first_byte_seconds(talk.next_body()) for _ in range(TURNS) for talk in talks]
    os.kill(pids[0], signal.SIGKILL)
    after = [client.first_byte_seconds(talk.next_body()) for talk in talks]  # which fails where an answer is an error
    return {"before_ms": 1000 * statistics.median(before), "first_ms": 1000 * after[0], "worst_ms": 1000 * max(after)}


def run(rounds: int) -> dict[str, Figures]:
    """Measure everything."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving("stub")) for _ in range(2)]
        urls = [url for url, _ in servers]

        def memd(name: str, *upstreams: str) -> Target:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memd-bench-")))
            return Target(name, *stack.enter_context(memd_serving(folder, *upstreams)))

        one, two = memd("one server", urls[0]), memd("two servers", *urls)
        told = {mode: cost(mode, rounds, one, two) for mode in MODES}
        return {**told, "death": death(two, [pid for _, pid in servers])}


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    told = run(asked.rounds)
    table = Table("mode", "figure", "one server, ms", "two servers, ms", "ratio of the rounds")
    for mode in MODES:
        for name, shown in (("first_byte", "first byte"), ("cpu", "processor")):
            alone, pooled, ratio = (told[mode][f"{name}_{column}"] for column in ("one_ms", "two_ms", "ratio"))
            table.add_row(mode, shown, f"{alone:.3f}", f"{pooled:.3f}", f"{ratio:.3f}")
    console = Console()
    console.print(table)
    ends = told["death"]
    console.print(
        f"a server dies: the next request {ends['first_ms']:.1f} ms, the slowest of {CHATS} chats"
        f" {ends['worst_ms']:.1f} (before: {ends['before_ms']:.1f})"
    )
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
