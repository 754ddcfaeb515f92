"""How long a start takes: from the start of the process to the first byte of an answer.

Backs this claim: from importing memd to the first byte served under 1 s, with what is on disk in the page cache. Each
start is a fresh `memd serve` on a store with one sealed segment, in front of the stub of overhead_targets.py, and it is
asked from the first moment on until it listens. Beside it what the interpreter and the imports alone take.

And this one: a start does not depend on how many topics there are, and a related topic that is not open takes at most
5 ms. With `--topics` the store has so many beside the default one; the first start over them looks at each, and is told
apart.

    python bench/start.py [--rounds 10] [--topics 100000] [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from overhead_stores import add_topics, fill
from overhead_targets import free_port, serving
from rich.console import Console
from rich.table import Table

from memd.store.layout import RECENT_NAME

CHUNKS = 5000
RELATED, WORDS = 100, ("boats", "ships")
SECONDS_MAX = 60.0
WAKE_SECONDS_MAX = 600.0
QUESTION = {"model": "stub", "messages": [{"role": "user", "content": "Which of the boats was to go first?"}]}


def command_seconds(*arguments: str) -> float:
    """What a Python process takes from its start to its end."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True)
    return time.perf_counter() - started


def related_ms(port: int, related: str, word: str) -> float:
    """From a question that no other is like, with a related topic, to the first byte of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_MAX)
    messages = [{"role": "user", "content": f"Which of the {word} of {related} was to go first?"}]
    metadata = {"memory_in": json.dumps({"related_topic_ids": [related]})}
    body = json.dumps({**QUESTION, "messages": messages, "metadata": metadata})
    started = time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", body, {"Content-Type": "application/json", "X-Memory-Mode": "readonly"}
    )
    answer = connection.getresponse()
    taken = time.perf_counter() - started
    assert answer.status == 200 and answer.getheader("X-Memory-Status") in ("injected", "none"), answer.read()
    connection.close()
    return 1e3 * taken


def first_byte_seconds(folder: Path, upstream: str, mode: str, then: Callable[[int], None] = lambda _: None) -> float:
    """From the start of `memd serve` to the first byte of its first answer; `then` has the port for more."""
    port = free_port()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"data_dir": str(folder / "memory"), "log": {"level": "error"}}))
    command = [sys.executable, "-m", "memd", "serve", "--config", str(config), "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--upstream", upstream], stdout=subprocess.DEVNULL)
    try:
        while time.perf_counter() - started < SECONDS_MAX:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_MAX)
            try:
                headers = {"Content-Type": "application/json", "X-Memory-Mode": mode}
                connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION), headers)
                answer = connection.getresponse()  # returns with the first bytes
                taken = time.perf_counter() - started
                assert answer.status == 200, answer.read()
                then(port)
                return taken
            except ConnectionRefusedError:
                time.sleep(0.005)
            finally:
                connection.close()
        raise SystemExit(f"memd did not answer within {SECONDS_MAX:.0f} seconds")
    finally:
        process.terminate()
        process.wait()


def beside_topics(folder: Path, upstream: str, topics: int) -> None:
    """Make the topics, start over them once, and say what a related topic takes that is not open."""
    add_topics(folder, topics)
    first_and_again = []

    def looked_at(_: int) -> None:
        until = time.perf_counter() + WAKE_SECONDS_MAX
        while not (folder / "memory" / RECENT_NAME).exists() and time.perf_counter() < until:
            time.sleep(0.1)

    started = time.perf_counter()
    seconds = first_byte_seconds(folder, upstream, "readonly", looked_at)
    print(
        f"{topics:,} topics, the first start: {seconds:.2f} s; all are looked at: {time.perf_counter() - started:.0f} s"
    )

    def related(port: int) -> None:
        chosen = np.random.default_rng(3).permutation(topics)[:RELATED].tolist()
        first_and_again.extend([[related_ms(port, f"topic-{one}", word) for word in WORDS] for one in chosen])

    first_byte_seconds(folder, upstream, "readonly", related)
    first, again = np.median(np.asarray(first_and_again), axis=0)
    print(f"a request with a related topic: {first:.1f} ms where it is not open, {again:.1f} ms where it is")


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--topics", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name, serving("stub") as (upstream, _):
        folder = Path(name)
        fill(folder, CHUNKS, None)
        works: dict[str, Callable[[], float]] = {
            "python alone": lambda: command_seconds("-c", "pass"),
            "import memd.daemon.app": lambda: command_seconds("-c", "import memd.daemon.app"),
            "memd serve to the first byte, mode off": lambda: first_byte_seconds(folder, upstream, "off"),
            f"the same with memory over {CHUNKS:,} chunks": lambda: first_byte_seconds(folder, upstream, "readonly"),
        }
        if asked.topics:
            beside_topics(folder, upstream, asked.topics)
        taken: dict[str, list[float]] = {name: [] for name in works}
        for number in range(asked.rounds + 1):
            for what, work in works.items():
                seconds = work()
                if number:  # the first round warms the page cache
                    taken[what].append(seconds)
    table = Table(title=f"{asked.rounds} starts, seconds")
    for column in ("what", "median", "slowest"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, times in taken.items():
        table.add_row(what, f"{np.median(times):.2f}", f"{max(times):.2f}")
    Console(width=120).print(table)
    if asked.json is not None:
        asked.json.write_text(json.dumps(taken, indent=1))


if __name__ == "__main__":
    main()
