"""What waits to be stored: how much of it there is when turns come faster, what it takes, whether all of it is freed.

Backs these claims: a busy daemon falls behind with meaning and never with durability; what a topic took is given back
when it is let go.

    python bench/waiting.py [--seconds 120] [--clients 8] [--rounds 13]

First as many turns of 2 KB as the clients can send: what waits, and what the process takes, every ten seconds, and
again when all is stored. Then rounds of turns in a process of this script, each in topics that are let go at its end,
under tracemalloc: a leak is what every further round adds once all caches with a bound are emptied.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests")]

from daemon_in_process import daemon_in_process  # noqa: E402  # needs the path above
from daemon_process import DaemonProcess, ask  # noqa: E402
from recording_upstream import recording_upstream  # noqa: E402
from vectors import sentences  # noqa: E402

from memd.caching import ByteCache, Latest  # noqa: E402

TURN_CHARACTERS = 2_000
TURNS_A_CHAT = 6
STORED_SECONDS_MAX = 600.0
TURNS_A_ROUND = 24
LEAK_KB_A_TURN = 0.5


def said(number: int) -> str:
    """A turn that nobody else says."""
    text = " ".join(sentences(40, 9_000_000 + number))
    return f"{number}: {text}"[:TURN_CHARACTERS]


def flood(folder: Path, seconds: float, clients: int) -> None:
    """Print what waits while clients talk as fast as they can, and when all is stored."""
    with recording_upstream(window=16_384) as upstream:
        daemon = DaemonProcess(folder, upstream.url, {"log": {"level": "warning"}}).start()
        ends_at, sent = time.monotonic() + seconds, [0] * clients
        threads = [threading.Thread(target=_talk, args=(daemon, place, ends_at, sent)) for place in range(clients)]
        for thread in threads:
            thread.start()
        print("seconds  sent  waiting  anonymous MB  buffers MB  caches MB  log MB")
        started = time.monotonic()
        while time.monotonic() < ends_at:
            time.sleep(10)
            _tell(daemon, time.monotonic() - started, sum(sent))
        for thread in threads:
            thread.join()
        while _tell(daemon, time.monotonic() - started, sum(sent)) and time.monotonic() - ends_at < STORED_SECONDS_MAX:
            time.sleep(10)
        daemon.terminate()


def _talk(daemon: DaemonProcess, place: int, ends_at: float, sent: list[int]) -> None:
    history: list[dict[str, str]] = []
    while time.monotonic() < ends_at:
        history = [] if len(history) >= 2 * TURNS_A_CHAT else history
        history.append({"role": "user", "content": said(place * 1_000_000 + sent[place])})
        history.append({"role": "assistant", "content": daemon.chat(history).reply})
        sent[place] += 1


def _tell(daemon: DaemonProcess, seconds: float, sent: int) -> int:
    stats = ask(f"{daemon.own_url}/memd/stats").json
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) / 1e3
    taken = (stats[name] / 1e6 for name in ("buffer_bytes", "cache_bytes", "memory_bytes"))
    figures = "  ".join(f"{one:9.1f}" for one in taken)
    print(f"{seconds:7.0f}  {sent:4}  {stats['unstored']:7}  {anonymous:12.1f}  {figures}", flush=True)
    return int(stats["unstored"])


async def traced(folder: Path, rounds: int) -> list[float]:
    """Megabytes that Python holds behind each round, all its topics let go and all that has a bound emptied."""
    held: list[float] = []
    async with daemon_in_process(folder, window=16_384) as client:
        for number in range(rounds):
            if number == 1:
                tracemalloc.start()
            for turn in range(TURNS_A_ROUND):
                await client.ask(said(number * 1_000 + turn), topic=f"round-{number}-{turn % 3}")
            while any(topic.buffer.has_unstored for topic in client.daemon.topics.opened()):  # noqa: ASYNC110
                await asyncio.sleep(0.2)  # the daemon stores it by itself
            for topic in client.daemon.topics.opened():
                topic._used_at -= 1e6  # as if it had been idle for long
            await client.daemon.topics.let_idle_go()
            client.upstream.requests.clear()
            empty_what_has_a_bound()
            gc.collect()
            if tracemalloc.is_tracing():
                held.append(tracemalloc.get_traced_memory()[0] / 1e6)
                print(f"round {number}: {held[-1]:.2f} MB held, {len(client.daemon.topics.opened())} open", flush=True)
    return held


def empty_what_has_a_bound() -> None:
    """Empty all caches of the process that drop what is old: how full they are says nothing of a leak."""
    for one in gc.get_objects():
        if isinstance(one, ByteCache | Latest):
            one.clear()
        elif isinstance(one, functools._lru_cache_wrapper) and one.cache_parameters()["maxsize"] is not None:
            one.cache_clear()


def main() -> None:
    """Run both, print, and say whether it is a leak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=13)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memd-waiting-") as folder:
        if asked.seconds:
            flood(Path(folder), asked.seconds, asked.clients)
        held = asyncio.run(traced(Path(folder) / "traced", asked.rounds))
    # The least of some rounds: sockets and Python's free lists come and go. The first third of them warms up.
    third = len(held) // 3
    added = 1e3 * (min(held[-third:]) - min(held[-2 * third : -third])) / (third * TURNS_A_ROUND)
    print(
        f"{added:.2f} KB a turn from the second third to the last: {'a leak' if added > LEAK_KB_A_TURN else 'no leak'}"
    )
    sys.exit(added > LEAK_KB_A_TURN)


if __name__ == "__main__":
    main()
