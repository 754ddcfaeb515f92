"""An hour of a daemon's life in ten minutes: nothing that was acknowledged is lost, and nothing grows.

Backs these claims: a killed process loses nothing; what was said is recalled word for word in a new chat; an Update
takes effect; memory, files, threads and tasks stay where they are however many requests come.

Sixteen agents (soak_agents.py) work at once through a daemon process of its own: histories that grow beyond a small
window, trimmed histories and clients that send only what is new, tool loops with parallel calls, streams and whole
answers, cancels before the first token and in the middle, repeated requests, edits, corrections. Meanwhile the model
server (soak_upstream.py, or a real llama.cpp behind it) is killed and says 503 for a while, and the daemon is ended by
SIGTERM and by kill -9. At the end every acknowledged fact is looked for in `memd export --live`, and after one more
start asked for in a fresh readonly chat: it has to be in the prompt that reaches the model server.

With `--faults` the daemon has 256 descriptors, one more client walks through 300 topics, and one write or sync in 500
below the data directory fails (tests/faults/inject.c; Linux).

    python bench/soak.py [--minutes 10] [--agents 16] [--faults] [--real] [--json FILE]

Everything stays on this machine's loopback and ends with this process. Exit code 1 if something was lost or grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [
    str(ROOT / "tests" / one) for one in ("support", "faults")
]  # the daemon's process and the tiny model are shared with the tests

from daemon_process import DaemonProcess  # noqa: E402  # needs the path above
from faulty_daemon import compiled, environment  # noqa: E402
from soak_agents import MANNERS, Agent, Fact, Ledger, Walker, probed, states  # noqa: E402
from soak_growth import Life, Sample, growth, lives, looked_at  # noqa: E402

WINDOW = 4096
REAL_WINDOW, REAL_SLOTS = 16_384, 4
"""The tiny model's tokens are characters."""
LOADING_SECONDS = 2.0
STORED_SECONDS_MAX = 180.0
"""By then an idle conversation has been stored (`buffer.idle_seconds`, and the work itself on two busy cores) and its
words are indexed, though attempts fail (30 s between two at most)."""
UNPROMISED_SHARE_MAX = 0.02
"""With `--faults`: of all facts that were answered, those of which memd said that it could not write them."""
PROBES_AT_ONCE = 8
FAULT_EVERY = 500
"""With `--faults`: so many writes and so many syncs for one that fails."""
DESCRIPTORS_MAX = 256
"""With `--faults`: macOS's default."""
SETTINGS = {
    "buffer": {"idle_seconds": 10},
    "conversation": {"max_open": 24},  # of a topic, with the branches of edits and cancels: reached while warming up
    "segment": {"max_entries": 300},  # so that some are sealed and merged
    "store": {"topic_idle_seconds": 4},  # and topics let go
    "shutdown": {"grace_seconds": 3},
    "log": {"level": "warning"},
}

Deed = Callable[["House"], None]


class House:
    """The processes, and what is done to them."""

    def __init__(
        self,
        folder: Path,
        behind: str | None,
        *,
        faults: bool,
        window: int = WINDOW,
        recordings: Path | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        flags = {"window": window, "behind": behind, "recordings": recordings}
        self._flags = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        self._port = _free_port()
        self._model: subprocess.Popen[bytes] | None = None
        self.daemon = DaemonProcess(folder, f"http://127.0.0.1:{self._port}", SETTINGS | (settings or {}))
        if faults:
            fails = {"FAULT_CALL": "write sync", "FAULT_EVERY": str(FAULT_EVERY), "FAULT_ERRNO": str(errno.EIO)}
            self.daemon.environment = environment(self.daemon, compiled(folder)) | fails
            self.daemon.descriptors_max = DESCRIPTORS_MAX
        self.faults_told = (os.strerror(errno.EIO),) if faults else ()
        """How the daemon calls the fault that is injected."""
        self.restarts: dict[str, int] = defaultdict(int)
        self.seen_by_model: dict[str, int] = defaultdict(int)
        self.endings: list[int] = []
        """Exit codes after SIGTERM."""

    def start(self) -> None:
        """The model server, then the daemon."""
        self.start_model(0.0)
        self.daemon.start()

    def start_model(self, loading_seconds: float) -> None:
        """Start the model server and wait until it answers, if only with 503."""
        command = [sys.executable, str(Path(__file__).with_name("soak_upstream.py")), f"--port={self._port}"]
        command += [f"--loading={loading_seconds}", *self._flags]
        self._model = subprocess.Popen(command, stdin=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.02)
        raise RuntimeError("the model server did not start")

    def count_model(self) -> None:
        """Add up what the model server has counted; it forgets when it is restarted."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/soak/counts", timeout=10) as answer:
            for name, count in json.loads(answer.read()).items():
                self.seen_by_model[name] += count

    def close(self) -> None:
        """End everything."""
        self.daemon.discard()
        if self._model is not None:
            self._model.kill()
            self._model.wait()

    # -- what happens in between ---------------------------------------------------------------------------------

    def restart_model(self) -> None:
        """Kill it, and let it load for a while."""
        self.restarts["model server"] += 1
        self.count_model()
        assert self._model is not None, "started"
        self._model.kill()
        self._model.wait()
        time.sleep(0.5)
        self.start_model(LOADING_SECONDS)

    def restart_daemon(self) -> None:
        """SIGTERM."""
        self.restarts["daemon, SIGTERM"] += 1
        self.endings.append(self.daemon.terminate())
        self.daemon.start()

    def kill_daemon(self) -> None:
        """`kill -9`."""
        self.restarts["daemon, kill -9"] += 1
        self.daemon.kill()
        self.daemon.start()


EVENTS: tuple[tuple[float, Deed], ...] = (
    (0.08, House.kill_daemon),
    (0.16, House.restart_daemon),
    (0.22, House.restart_model),
    (0.28, House.kill_daemon),
    (0.34, House.restart_daemon),
    (0.38, House.kill_daemon),
    (0.40, House.kill_daemon),
    (0.60, House.restart_model),
    (0.80, House.restart_model),
)
"""When, as a share of the run. The last life of the daemon is the longest: growth shows there."""


# -- the run ------------------------------------------------------------------------------------------------------


async def work(house: House, ledger: Ledger, agents: int, seconds: float, *, walks: bool) -> list[Sample]:
    """All agents at once, while things happen to the processes; what the daemon's process looked like."""
    ends_at = time.monotonic() + seconds
    topics = [f"shared-{number}" for number in range(3)]
    living = []
    for number in range(agents + walks):
        topic = f"alone-{number}" if number % 4 == 3 else topics[number % 3]
        agent = (Agent if number < agents else Walker)(
            number,
            topic,
            MANNERS[number % len(MANNERS)],
            ledger,
            lambda: house.daemon.base_url,
            lambda: time.monotonic() >= ends_at,
        )
        living.append(asyncio.ensure_future(agent.live()))
    samples: list[Sample] = []
    watching = asyncio.ensure_future(_watch(house, ledger, samples))
    try:
        for share, deed in EVENTS:
            await asyncio.sleep(max(0.0, ends_at - seconds * (1 - share) - time.monotonic()))
            await asyncio.to_thread(deed, house)
        await asyncio.gather(*living)
    finally:
        for task in (*living, watching):
            task.cancel()
    await asyncio.to_thread(house.count_model)
    return samples


async def _watch(house: House, ledger: Ledger, samples: list[Sample]) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            with contextlib.suppress(OSError, AssertionError, IndexError, aiohttp.ClientError, TimeoutError):
                pid = house.daemon.pid
                async with session.get(f"{house.daemon.own_url}/memd/stats") as answer:
                    stats = await answer.json()
                samples.append(looked_at(pid, stats, ledger.counts["requests"]))
            await asyncio.sleep(1)


class Findings(NamedTuple):
    """What the end of the run says; anything in `bad` makes the exit code 1."""

    figures: dict[str, Any]
    bad: list[str]


async def judged(house: House, ledger: Ledger) -> Findings:
    """Look for everything that was acknowledged."""
    facts = [fact for fact in ledger.facts.values() if fact.acknowledged]
    bad: list[str] = []
    bad += await asyncio.to_thread(_wait_until_stored, house)
    unpromised = ledger.counts["facts not promised"]
    if unpromised > UNPROMISED_SHARE_MAX * len(facts):
        bad.append(f"of {unpromised} facts memd has said that they are not written; {len(facts)} were acknowledged")
    entries = await asyncio.to_thread(house.daemon.export)
    missing = _missing(entries, facts)
    bad += [f"not in the log: {fact.key} in {fact.topic}, {fact.words}, {_traces(house, fact)}" for fact in missing]
    bad += _corrections_without_effect(entries, ledger)
    house.endings.append(await asyncio.to_thread(house.daemon.terminate))
    verified = await asyncio.to_thread(house.daemon.run, "verify")
    if verified.returncode:
        bad.append(f"memd verify: {verified.stdout}{verified.stderr}")
    await asyncio.to_thread(house.daemon.start)
    unseen = await _not_recalled(house, facts)
    bad += [f"not recalled: {fact.key} in {fact.topic}, {fact.words}" for fact in unseen]
    house.endings.append(await asyncio.to_thread(house.daemon.terminate))
    bad += [f"exit code {code} after SIGTERM" for code in house.endings if code]
    said = house.daemon.log.read_text(errors="replace").splitlines()
    bad += [f"the daemon said: {line}" for line in _complaints(said, excused=house.faults_told)]
    figures = {
        "facts acknowledged": len(facts),
        "facts found in the log": len(facts) - len(missing),
        "facts recalled in a new chat": len(facts) - len(unseen),
        "facts lost": len({fact.key for fact in (*missing, *unseen)}),
        "facts updated": sum(fact.updated for fact in facts),
        "entries in the log": len(entries),
    }
    return Findings(figures, bad)


def _complaints(said: list[str], excused: Sequence[str]) -> Iterator[str]:
    """Of the daemon's log the errors but those with the `excused` words, and of every traceback what was raised."""
    in_traceback = False
    for line in said:
        ends_traceback = in_traceback and not line.startswith((" ", "Traceback"))
        in_traceback = line.startswith("Traceback") or (in_traceback and not ends_traceback)
        if ends_traceback or (" ERROR " in line and not any(words in line for words in excused)):
            yield line


def _wait_until_stored(house: House) -> list[str]:
    """Wait until the daemon says that all is in the log and its words are indexed; complaints if that takes long."""
    deadline = time.monotonic() + STORED_SECONDS_MAX
    while True:
        with urllib.request.urlopen(f"{house.daemon.own_url}/memd/stats", timeout=30) as answer:
            stats = json.loads(answer.read())
        waiting = {"messages": stats["unstored"]}
        waiting |= {f"words of {name}": topic["unindexed"] for name, topic in stats["topics"].items()}
        waiting = {name: count for name, count in waiting.items() if count}
        if not waiting:
            return []
        if time.monotonic() > deadline:
            return [f"not stored after {STORED_SECONDS_MAX:.0f} s: {waiting}"]
        time.sleep(1)


def _missing(entries: list[dict[str, Any]], facts: list[Fact]) -> list[Fact]:
    """The facts that are in no live chunk."""
    said: defaultdict[str, str] = defaultdict(str)
    for entry in entries:
        if entry["live"]:
            said[entry["topic_id"]] += entry["content"] + "\n"
    return [fact for fact in facts if not states(said[fact.topic], fact)]


def _traces(house: House, fact: Fact) -> str:
    """Where a fact that is not in the log is all the same, for whoever looks for the reason."""
    names = []
    for path in sorted((house.daemon.data_dir / fact.topic).rglob("*")):
        with contextlib.suppress(IsADirectoryError, FileNotFoundError):  # the daemon is at work
            names += [path.name] if any(word.encode() in path.read_bytes() for word in fact.words) else []
    return f"in {', '.join(names)}" if names else "in no file"


def _corrections_without_effect(entries: list[dict[str, Any]], ledger: Ledger) -> list[str]:
    """Chunks that were replaced and still count, and praise or blame that did not add up."""
    newest = {(entry["topic_id"], entry["id"]): entry for entry in entries}  # in canonical_id order
    without = [place for place in ledger.replaced if place not in newest or newest[place]["live"]]
    bad = [f"an Update had no effect: {place}" for place in without]
    for place, steps in ledger.steps.items():
        entry = newest.get(place)
        if place in ledger.doubtful or (entry is not None and not entry["live"]):
            continue
        wanted = 1.5 ** max(-4, min(10, steps))
        if entry is None or abs(entry["utility_multiplier"] / wanted - 1) > 1e-6:
            bad.append(f"{place}: {steps} steps were acknowledged, the log has {entry and entry['utility_multiplier']}")
    return bad


async def _not_recalled(house: House, facts: list[Fact]) -> list[Fact]:
    unseen: list[Fact] = []
    waiting = list(facts)

    async def probe(session: aiohttp.ClientSession) -> None:
        while waiting:
            fact = waiting.pop()
            if not await probed(session, house.daemon.base_url, fact):
                unseen.append(fact)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(probe(session) for _ in range(PROBES_AT_ONCE)))
    return unseen


# -- beginning and end --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def real_model(folder: Path) -> Iterator[str]:
    """llama.cpp's server on the tiny model of the tests."""
    from llama_server import running_llama
    from tiny_model import write_scripted_model

    model = folder / "tiny.gguf"
    write_scripted_model(model, marker="MARK", reply=["I", " see", "."], reply_seen=["It", " was", "!"])
    log = folder / "llama.log"
    with running_llama(model, context=REAL_WINDOW * REAL_SLOTS, parallel=REAL_SLOTS, log=log) as url:
        yield url


def report(ledger: Ledger, house: House, findings: Findings, found: list[Life]) -> None:
    """Print what happened, what came of it, and what grew."""
    console = Console(width=120)
    table = Table(title="what happened", show_header=False)
    for name, count in sorted(ledger.counts.items()):
        table.add_row(name, f"{count:,}")
    for name, count in house.restarts.items():
        table.add_row(f"restarts of the {name}", f"{count:,}")
    for name, count in house.seen_by_model.items():
        table.add_row(f"model server: {name}", f"{count:,}")
    console.print(table)
    table = Table(title="what came of it", show_header=False)
    for name, value in findings.figures.items():
        table.add_row(name, f"{value:,}")
    console.print(table)
    table = Table(title="growth, once warm")
    files = "fewest files: first half, second"
    gained, counts = "gained beside what is counted", ("threads", "tasks", "open topics", "unstored")
    for column in ("life", "requests", "memory", gained, files, *counts):
        table.add_column(column, justify="right")
    for life in found:
        halves = life.fds, life.threads, life.tasks, life.topics, life.unstored
        pairs = [f"{first}, {second}" for first, second in halves]
        resident = f"{life.rss_mb[0]:.0f} → {life.rss_mb[1]:.0f} MB"
        gained = f"{life.rss_gain_mb:+.1f} MB, {1e3 * life.rss_gain_mb / max(1, life.requests):.1f} KB a request"
        table.add_row(f"{life.seconds:.0f} s", f"{life.requests:,}", resident, gained, *pairs)
    console.print(table)
    for line in findings.bad:
        console.print(line, style="red", markup=False)


def soak(folder: Path, minutes: float, agents: int, behind: str | None, output: Path | None, *, faults: bool) -> int:
    """The whole run; the exit code."""
    house, ledger = House(folder, behind, faults=faults), Ledger()
    try:
        house.start()
        samples = asyncio.run(work(house, ledger, agents, 60 * minutes, walks=faults))
        found = lives(samples)
        findings = asyncio.run(judged(house, ledger))
    finally:
        house.close()
    findings.bad.extend(growth(found))
    report(ledger, house, findings, found)
    if output is not None:
        told: dict[str, Any] = {"counts": ledger.counts, "restarts": house.restarts, "model": house.seen_by_model}
        told |= {"figures": findings.figures, "lives": [life._asdict() for life in found], "bad": findings.bad}
        output.write_text(json.dumps(told | {"samples": [list(sample) for sample in samples]}, indent=1))
    return 1 if findings.bad else 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    """Run, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--faults", action="store_true", help="calls on files fail, descriptors are few, topics many")
    parser.add_argument("--real", action="store_true", help="a real llama.cpp with a tiny model answers")
    parser.add_argument("--keep", type=Path, help="folder for the daemon's directory and log, kept (default: none)")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # so that children are ended
    with contextlib.ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memd-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        behind = stack.enter_context(real_model(folder)) if asked.real else None
        code = soak(folder, asked.minutes, asked.agents, behind, asked.json, faults=asked.faults)
    sys.stdout.flush()
    os._exit(code)  # not waiting for threads of cancelled requests


if __name__ == "__main__":
    main()
