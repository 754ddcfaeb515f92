"""What memd adds to a request: the first byte in five shapes of real use, requests and relayed chunks a second.

    python bench/overhead.py [--memd NAME=FOLDER …] [--chunks 5000] [--stores FOLDER] [--parts shapes,…] [--json FILE]

Backs the claim that memory cannot be felt. In one run, taking turns round by round before a stub that answers at once:
the stub itself, a bare aiohttp pass-through, nginx and mnemonic-proxy where they are on the PATH, and memd, of one
source tree or of several (`--memd before=../before`), with mode `off` and with memory over that many chunks. While one
is measured the others stand still. `--stores` keeps the stores (see retrieval.py --fill). The parts:

    shapes    milliseconds added to the first byte, each request a new conversation: one sentence; 2 KB of talk; a
              question under 8 KB of pasted code; a tool loop whose last result has 50 KB; a history of 200 KB
    rate      requests of one sentence over 32 connections, and the processor of one, stored and not stored
    relay     chunks a second of one stream from its first byte on, and the processor of one
    backlog   10,000 requests of 200 characters: seconds, and how long it is stored after them
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import selectors
import shutil
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from overhead_targets import (
    HERE,
    STREAM_CHUNKS,
    Target,
    cpu_seconds,
    memd_serving,
    others,
    resident_bytes,
    serving,
    standing_still,
    wait_until_quiet,
)
from rich.console import Console
from rich.table import Table

PARTS = ("shapes", "rate", "relay", "backlog")
SHAPES = {"sentence": 15, "2 KB": 15, "8 KB of code": 10, "50 KB result": 10, "200 KB history": 10}
"""Rounds of each."""
REQUESTS = 10
"""Of a round."""
CONNECTIONS, RATE_ROUNDS, RATE_SECONDS = 32, 5, 2.0
RELAY_ROUNDS = 5
BACKLOG_REQUESTS, BACKLOG_CHARACTERS = 10_000, 200
ANSWER_SECONDS_MAX = 120.0
CODE = "\n\n".join(Path(module.__file__ or "").read_text() for module in (argparse, shutil, tempfile, selectors))
_WORDS = """the deployment script our parser login page build server cache layer garden shed invoice tool payment queue
database index weather model train to Lisbon release branch cold start pull request night shift fails when there is was
rewritten because of needs depends on was replaced by talks to ignores retries prefers forgot logs"""
WORDS = _WORDS.split()
Row = dict[str, float]


# -- requests ---------------------------------------------------------------------------------------------------------

_numbers = itertools.count(1)


def talk(characters: int, seed: int) -> str:
    """Words, others for each seed."""
    told = (
        WORDS[(seed * 7919 + number * 104_729 + number * number * seed) % len(WORDS)] for number in itertools.count()
    )
    return " ".join(itertools.islice(told, 1 + characters // 5))[:characters]


HISTORY = [{"role": ("user", "assistant")[number % 2], "content": talk(1000, number + 7)} for number in range(200)]


def body(shape: str, *, stream: bool = False) -> bytes:
    """A request of a shape, a new conversation."""
    number = next(_numbers)
    first, second = WORDS[number % len(WORDS)], WORDS[number // 7 % len(WORDS)]
    question = f"Question {number}: what did we decide about the {first} and the {second}?"
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if shape == "2 KB":
        messages = [{"role": "user", "content": f"{question} {talk(1900, number)}"}]
    elif shape == "8 KB of code":
        messages = [{"role": "user", "content": f"{pasted(8000, number)}\n\n{question}"}]
    elif shape == "50 KB result":
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "read", "arguments": f'{{"path": "{number}.py"}}'},
        }
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": pasted(50_000, number)},
        ]
    elif shape == "200 KB history":
        messages = [*HISTORY, {"role": "user", "content": f"{question} {talk(150, number)}"}]
    elif shape == "200 characters":
        messages = [{"role": "user", "content": f"Note {number}: {talk(BACKLOG_CHARACTERS - 12, number)}"}]
    asked: dict[str, Any] = {"model": "stub", "stream": stream}
    return json.dumps({"messages": [{"role": "system", "content": "You are helpful."}, *messages], **asked}).encode()


def pasted(characters: int, number: int) -> str:
    """Code, at each number from another place on."""
    at = number * 7919 % (len(CODE) - characters)
    return f"# {number}\n{CODE[at : at + characters]}"


class Connection:
    """One HTTP connection to a target."""

    def __init__(self, target: Target, mode: str = "") -> None:
        host, _, port = target.url.removeprefix("http://").partition(":")
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"X-Memory-Mode: {mode or target.mode}\r\nContent-Length: "
        )
        self._address = host, int(port)
        self.held = bytearray()
        self.open()

    def open(self) -> None:
        """Connect."""
        self.socket = socket.create_connection(self._address, timeout=ANSWER_SECONDS_MAX)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, content: bytes) -> None:
        """Begin a request."""
        self.held.clear()
        self.socket.sendall(f"{self._head}{len(content)}\r\n\r\n".encode() + content)

    def take(self) -> bool:
        """Wait for some of the answer; whether it is whole."""
        part = self.socket.recv(1 << 18)
        if not part:
            head = bytes(self.held.partition(b"\r\n\r\n")[0]).lower()
            if not head or b"content-length:" in head or b"transfer-encoding:" in head:
                raise SystemExit(f"a connection ended in the middle of an answer: {bytes(self.held[:300])!r}")
            self.open()  # its end is the answer's
            return True
        self.held += part
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether all of an answer is there."""
        end = self.held.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.held[:end]).lower()
        assert b" 200 " in head[:15], bytes(self.held[:500])
        if b"content-length:" not in head:
            return self.held.endswith(b"0\r\n\r\n")
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        return len(self.held) >= end + 4 + length

    def first_byte_seconds(self, content: bytes) -> float:
        """One request, to its end; how long its first byte took."""
        began = time.perf_counter()
        self.send(content)
        is_whole = self.take()
        taken = time.perf_counter() - began
        while not is_whole:
            is_whole = self.take()
        return taken


def at_once(
    target: Target, mode: str, contents: Iterator[bytes], seconds: float, most: int = 1 << 40
) -> tuple[int, float]:
    """Requests over all connections, each as soon as the one before is answered: how many, in how many seconds."""
    connections = [Connection(target, mode) for _ in range(CONNECTIONS)]
    done = sent = 0
    with selectors.DefaultSelector() as waiting:
        began = time.perf_counter()
        for connection in connections:
            waiting.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(next(contents))
            sent += 1
        while done < sent:
            for key, _ in waiting.select():
                if not key.data.take():
                    continue
                done += 1
                if sent < most and time.perf_counter() - began < seconds:
                    key.data.send(next(contents))
                    sent += 1
        taken = time.perf_counter() - began
    for connection in connections:
        connection.socket.close()
    return done, taken


# -- measurements -----------------------------------------------------------------------------------------------------


def rounds(targets: Sequence[Target], number: int, measure: Callable[[Target], Any]) -> dict[str, list[Any]]:
    """What was measured of each target in each round, every second in the other order; the others stand still."""
    told: dict[str, list[Any]] = {target.name: [] for target in targets}
    for at in range(number):
        for target in targets[:: -1 if at % 2 else 1]:
            stub = targets[0].pid
            with standing_still({other.pid for other in targets} - {target.pid, stub}):
                told[target.name].append(measure(target))
    return told


def shape_rows(targets: Sequence[Target], shape: str) -> dict[str, Row]:
    """Milliseconds to the first byte, and what is added to the stub's own."""
    connections = {target.name: Connection(target) for target in targets}

    def measure(target: Target) -> list[float]:
        return [1000 * connections[target.name].first_byte_seconds(body(shape)) for _ in range(REQUESTS)]

    for target in targets:
        measure(target)
    told = rounds(targets, SHAPES[shape], measure)
    direct = [statistics.median(one) for one in told[targets[0].name]]
    rows = {}
    for name, of_rounds in told.items():
        times = sorted(itertools.chain(*of_rounds))
        added = statistics.median(statistics.median(one) - own for one, own in zip(of_rounds, direct, strict=True))
        p99 = times[int(0.99 * len(times))] - statistics.median(direct)
        rows[name] = {"p50 ms": statistics.median(times), "added p50 ms": added, "added p99 ms": p99}
    for connection in connections.values():
        connection.socket.close()
    return rows


def rate_rows(targets: Sequence[Target]) -> dict[str, Row]:
    """Requests a second, and milliseconds of the processor for each."""

    def measure(target: Target, mode: str = "") -> tuple[float, float]:
        used = cpu_seconds(target.pid)
        done, seconds = at_once(target, mode, iter(lambda: body("sentence"), b""), RATE_SECONDS)
        return done / seconds, 1000 * (cpu_seconds(target.pid) - used) / done

    rows = {}
    for name, of_rounds in rounds(targets, RATE_ROUNDS, measure).items():
        rate, cpu = (statistics.median(one) for one in zip(*of_rounds, strict=True))
        rows[name] = {"a second": rate, "processor ms": cpu}
    full = [target for target in targets if target.mode == "full"]
    for target in full:  # what was said above is stored first: it is not what these requests cost
        wait_until_quiet(target.pid)
    told = rounds([targets[0], *full], RATE_ROUNDS, lambda target: measure(target, "readonly"))
    for target in full:
        rate, cpu = (statistics.median(one) for one in zip(*told[target.name], strict=True))
        rows[target.name] |= {"a second, not stored": rate, "processor ms, not stored": cpu}
    return rows


def relay_rows(targets: Sequence[Target]) -> dict[str, Row]:
    """Chunks a second, from the first byte on, of a stream that comes as fast as it can, and microseconds of the
    processor for each, with what its request took before."""

    def measure(target: Target) -> tuple[float, float]:
        connection, used = Connection(target), cpu_seconds(target.pid)
        began = time.perf_counter()
        first = connection.first_byte_seconds(body("sentence", stream=True))
        seconds, used = time.perf_counter() - began - first, cpu_seconds(target.pid) - used
        if target.mode == "full":  # the next round is not to wait until this reply is stored
            wait_until_quiet(target.pid)
        assert (chunks := bytes(connection.held).count(b'"delta"')) >= STREAM_CHUNKS - 100, f"{chunks} chunks"
        connection.socket.close()
        return STREAM_CHUNKS / seconds, 1e6 * used / STREAM_CHUNKS

    rows = {}
    for name, of_rounds in rounds(targets, RELAY_ROUNDS, measure).items():
        rate, cpu = (statistics.median(one) for one in zip(*of_rounds, strict=True))
        rows[name] = {"chunks a second": rate, "processor µs": cpu}
    return rows


def backlog_rows(targets: Sequence[Target]) -> dict[str, Row]:
    """Seconds of many requests, and until all of it was stored."""
    rows = {}
    for target in targets:
        if target.mode == "full":
            with standing_still({other.pid for other in targets} - {target.pid, targets[0].pid}):
                contents = iter(lambda: body("200 characters"), b"")
                _, seconds = at_once(target, "full", contents, 1e9, BACKLOG_REQUESTS)
                later = wait_until_quiet(target.pid)
            rows[target.name] = {
                "seconds": seconds,
                "stored after, seconds": later,
                "MB": resident_bytes(target.pid) / 1e6,
            }
    return rows


# -- the run ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def all_targets(trees: dict[str, Path], chunks: Sequence[int], kept: Path | None) -> Iterator[list[Target]]:
    """Everything that is measured, running; the stub first."""
    with ExitStack() as stack:

        def folder() -> Path:
            temporary = tempfile.TemporaryDirectory(prefix="memd-bench-", ignore_cleanup_errors=True)
            return Path(stack.enter_context(temporary))

        direct = stack.enter_context(serving("stub"))
        targets = [Target("direct", *direct), Target("bare", *stack.enter_context(serving("bare", direct[0])))]
        targets += [Target(name, *stack.enter_context(starting(folder(), direct[0]))) for name, starting in others()]
        for name, tree in trees.items():
            off = stack.enter_context(memd_serving(folder(), direct[0], tree=tree))
            targets.append(Target(f"{name}, off", *off))
            for count in chunks:
                filled = folder()
                if kept is not None and (kept / str(count)).is_dir():
                    shutil.copytree(kept / str(count), filled / "memory")
                elif count:
                    from overhead_stores import fill

                    fill(filled, count, None)
                over = stack.enter_context(memd_serving(filled, direct[0], tree=tree))
                targets.append(Target(f"{name}, {count:,} chunks", *over, "full"))
        yield targets


def show(title: str, rows: dict[str, Row], console: Console) -> None:
    """Print a table."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = Table(title=title)
    for number, column in enumerate(("", *columns)):
        table.add_column(column, justify="right" if number else "left")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:,.2f}" if column in row else "" for column in columns))
    console.print(table)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--memd", action="append", default=[], help="NAME=FOLDER of a source tree; may be given again")
    parser.add_argument("--chunks", default="5000", help="comma-separated numbers of chunks in the stores; 0: none")
    parser.add_argument("--stores", type=Path, help="a folder of stores that retrieval.py --fill made")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of these")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of these")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends what it started
    trees = {name: Path(folder).resolve() for name, _, folder in (one.partition("=") for one in asked.memd)}
    chunks = [int(one) for one in asked.chunks.split(",")]
    parts, console, told = asked.parts.split(","), Console(width=130), {}
    with all_targets(trees or {"memd": HERE}, chunks, asked.stores) as targets:
        told["resident at the start"] = {target.name: {"MB": resident_bytes(target.pid) / 1e6} for target in targets}
        show("resident at the start", told["resident at the start"], console)
        works: dict[str, Callable[[], dict[str, Row]]] = {}
        for shape in asked.shapes.split(",") if "shapes" in parts else ():
            works[f"first byte, {shape}"] = lambda shape=shape: shape_rows(targets, shape)  # type: ignore[misc]
        works |= {
            name: lambda rows=rows: rows(targets)  # type: ignore[misc]
            for name, rows in (("relay", relay_rows), ("rate", rate_rows), ("backlog", backlog_rows))
            if name in parts
        }
        for title, work in works.items():
            told[title] = work()
            show(title, told[title], console)
            for target in targets[1:]:
                wait_until_quiet(target.pid)
            if asked.json is not None:
                asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
