"""What the daemon takes of memory: idle after its start, and while an hour of talk goes through it.

    python bench/resident.py [--memd FOLDER] [--requests 8000] [--topics 20] [--json FILE]

Backs the claims that it takes at most 120 MB idle and at most 220 MB after an hour of talk, and does not grow. The
hour is compressed: so many requests (chats of twenty turns of 200 to 2,000 characters in each of the topics, one of
ten with 8 KB of pasted code), eight at a time, each answered by a stub at once; resident memory is looked at after
each tenth of them, and at the end when all is stored, and once more when the topics have been let go.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from overhead import pasted, talk
from overhead_targets import HERE, memd_serving, resident_bytes, serving, wait_until_quiet

TENTHS = 10
TURNS, CLIENTS = 20, 8
IDLE_SECONDS = 10.0


def chat(address: str, topic: int, number: int) -> int:
    """A chat of so many turns; the requests that it took."""
    connection = http.client.HTTPConnection(address, timeout=600)
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        seed = number * TURNS + turn
        said = pasted(8000, seed) + "\n\nWhat is wrong here?" if seed % 10 == 0 else talk(200 + seed * 37 % 1800, seed)
        messages.append({"role": "user", "content": said})
        body = json.dumps({"model": "stub", "messages": messages})
        connection.request("POST", f"/t/topic-{topic}/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
        messages.append({"role": "assistant", "content": "Noted."})
    connection.close()
    return TURNS


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--memd", type=Path, default=HERE, help="the source tree of the version that is measured")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--topics", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    told: dict[str, float] = {}

    def look(name: str) -> None:
        told[name] = round(resident_bytes(pid) / 1e6, 1)
        print(f"{name:32} {told[name]:7.1f} MB", flush=True)

    with tempfile.TemporaryDirectory(prefix="memd-bench-") as name, serving("stub") as (upstream, _):
        settings = {"store": {"topic_idle_seconds": 60}}
        with memd_serving(Path(name), upstream, tree=asked.memd.resolve(), settings=settings) as (url, pid):
            time.sleep(IDLE_SECONDS)
            look("idle")
            chats, began = range(asked.requests // TURNS), time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as clients:
                address = url.removeprefix("http://")
                for tenth in range(TENTHS):
                    some = chats[tenth * len(chats) // TENTHS : (tenth + 1) * len(chats) // TENTHS]
                    list(clients.map(lambda number: chat(address, number % asked.topics, number), some))
                    look(f"{some.stop * TURNS:,} requests")
            print(f"{len(chats) * TURNS / (time.perf_counter() - began):.0f} requests a second")
            print(f"stored {wait_until_quiet(pid):.0f} seconds after the last")
            look("all stored")
            time.sleep(settings["store"]["topic_idle_seconds"] + IDLE_SECONDS)
            look("topics let go")
    if asked.json is not None:
        asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
