"""`kill -9` at any moment of ingestion: what was there is there, and `memd verify` finds nothing damaged."""

import http.client
import random
import threading
import urllib.error
from collections.abc import Callable
from functools import partial
from typing import Any

from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import recording_upstream

KILLS = 2
CUT_BYTES_MIN = 4_000
"""More than an open conversation takes, and less than it takes with a chunk that was cut."""
SMALL_BUFFER = {
    "buffer": {"soft_tokens": 300, "hard_tokens": 600},
    "segment": {"max_entries": 20},  # so that kills also meet rotation and sealing
    "injection": {"budget_tokens": 128},
}


def test_nothing_stored_is_lost_when_the_daemon_is_killed_in_the_middle_of_ingestion(make_daemon: MakeDaemon) -> None:
    chance = random.Random(7)
    with recording_upstream() as upstream:
        daemon = make_daemon(upstream.url, SMALL_BUFFER)
        stored: list[dict[str, Any]] = []
        for life in range(KILLS):
            daemon.start()
            talker = Talker(daemon, life)
            wait_until_more(daemon, partial(log_bytes, daemon), chance.randrange(3_000, 15_000))
            stored = assert_kept(stored, daemon.export(settled=False))  # it never rests: the client talks on
            # From here any moment will do: in a request, an append, a compaction, a seal.
            wait_until_more(daemon, partial(len, upstream.requests), chance.randrange(1, 40))
            daemon.kill()
            talker.join()
            verified = daemon.run("verify")
            assert verified.returncode == 0, verified.stdout + verified.stderr
            stored = assert_kept(stored, daemon.export())
        daemon.start()
        assert assert_kept(stored, daemon.export())
        assert daemon.terminate() == 0
        assert daemon.run("verify").returncode == 0


class Talker:
    """A client that talks, a new conversation every few turns, until the daemon is gone."""

    def __init__(self, daemon: DaemonProcess, life: int) -> None:
        self._daemon = daemon
        self._chance = random.Random(1000 + life)
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def join(self) -> None:
        """Wait until it has noticed."""
        self._thread.join()

    def _talk(self) -> None:
        history: list[dict[str, str]] = []
        try:
            while True:
                if len(history) > 30:
                    history = []
                history.append({"role": "user", "content": sentence(self._chance)})
                history.append({"role": "assistant", "content": self._daemon.chat(history).reply})
        except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
            return  # killed


def assert_kept(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every entry that was exported before is there, unchanged but for whether it is live; returns the newer export."""
    now = {entry["canonical_id"]: entry for entry in after}
    for entry in before:
        assert now.get(entry["canonical_id"]) == entry
    return after


def wait_until_more(daemon: DaemonProcess, measured: Callable[[], int], more: int) -> None:
    """Return when `measured()` is at least `more` above what it is now."""
    goal = measured() + more
    wait_until(lambda: measured() >= goal, lambda: f"ingestion stands still: {daemon!r}")


def log_bytes(daemon: DaemonProcess) -> int:
    return sum(file.stat().st_size for file in daemon.data_dir.rglob("*.bin"))


def sentence(chance: random.Random) -> str:
    things = ["stove", "boat", "barometer", "staircase", "flag", "goat", "radio", "well", "window", "path", "ladder"]
    deeds = ["paint", "move", "sell", "repair", "measure", "borrow", "photograph", "insure", "clean", "hide"]
    parts = [f"{chance.choice(deeds)} the {chance.choice(things)} number {chance.randrange(10_000)}" for _ in range(9)]
    return f"Please {', then '.join(parts)}."


def test_what_waits_after_a_kill_is_cut_before_anybody_asks(serving: Serving) -> None:
    daemon = serving({"buffer": {"store_after_seconds": 3600, "idle_seconds": 3600}})

    def waiting_bytes() -> int:
        held: int = ask(f"{daemon.own_url}/memd/stats").json["buffer_bytes"]
        return held

    daemon.chat([{"role": "user", "content": "The spare key of the workshop hangs behind the blue bicycle."}])
    wait_until(lambda: waiting_bytes() > CUT_BYTES_MIN, lambda: "it is cut where it was said")
    daemon.kill()
    daemon.start()
    wait_until(lambda: waiting_bytes() > CUT_BYTES_MIN, lambda: f"it is not cut: {waiting_bytes()}")
