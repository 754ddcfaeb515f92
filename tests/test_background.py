"""Background work is paused and resumed, and nothing is lost meanwhile."""

from __future__ import annotations

from conftest import MakeDaemon
from daemon_process import ask, wait_until
from recording_upstream import RecordingUpstream


def test_what_is_said_in_a_pause_is_found_and_is_stored_when_work_goes_on(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"idle_seconds": 0.1, "store_after_seconds": 0.1}})
    refused = daemon.run("background", "pause")
    assert refused.returncode != 0
    daemon.start()
    assert daemon.run("background", "pause").returncode == 0
    assert ask(f"{daemon.own_url}/memd/background").json == {"paused": True}
    fact = "The release word for the lighthouse lamp is cinnamon-42, on the brass plate."
    daemon.chat([{"role": "user", "content": fact}])
    tended = 0

    def stats() -> int:
        nonlocal tended
        tended += "not in the log yet" in daemon.run("log").stdout
        return tended

    wait_until(lambda: stats() >= 3, lambda: daemon.run("log").stdout)
    assert "cinnamon-42" in daemon.run("search", "What is the release word for the lamp?").stdout
    assert daemon.run("background", "resume").returncode == 0
    wait_until(lambda: "cinnamon-42" in str(daemon.export()), lambda: daemon.run("log").stdout)
