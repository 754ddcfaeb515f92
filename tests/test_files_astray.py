"""Files of a topic that are missing, or that belong to another topic: the real daemon says it and does not guess."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, user, wait_until
from recording_upstream import recording_upstream

SMALL_SEGMENTS = {"segment": {"max_entries": 2}, "retrieval": {"min_score": 0.4}}
FACTS = (
    "The password for the boathouse door is heliotrope, and only the ferryman's wife knows it by heart.",
    "Grandmother's recipe for gooseberry jam takes eleven lemons, no more, and two days of waiting.",
    "The lighthouse keeper's cat is called Admiral Tegetthoff and is afraid of nothing but the kettle.",
)


def told(daemon: DaemonProcess, *facts: str, topic: str = "default") -> None:
    """Tell facts, each in a conversation of its own, and wait until all that is full is sealed."""
    for fact in facts:
        daemon.chat([user(fact)], memory_in={"topic_id": topic})
        daemon.wait_stored(fact)
    segments = daemon.data_dir / topic / "segments"
    wait_until(
        lambda: len([*segments.glob("seg_*.meta")]) == len([*segments.glob("seg_*.bin")]),
        lambda: f"unsealed {daemon!r}",
    )


def test_a_missing_segment_is_not_passed_over_in_silence(make_daemon: MakeDaemon) -> None:
    with recording_upstream() as upstream:
        daemon = make_daemon(upstream.url, SMALL_SEGMENTS).start()
        told(daemon, *FACTS)
        assert daemon.terminate() == 0
        aside, missing = daemon.folder / "aside.bin", daemon.data_dir / "default" / "segments" / "seg_0001.bin"
        missing.rename(aside)
        (daemon.data_dir / "default" / "hot.log").unlink()  # else what it still has is stored again
        verified = daemon.run("verify")
        assert verified.returncode == 1 and f"{missing}: is missing" in verified.stdout

        daemon.start()
        lost = [user("What is the password for the boathouse door?")]
        answer = daemon.chat(lost)
        assert answer.headers["X-Memory-Status"] == "degraded:store", "nothing found is not nothing known"
        assert f"{missing}: is missing" in daemon.log.read_text()
        assert any(
            "is missing" in one for one in ask(f"{daemon.own_url}/memd/stats").json["topics"]["default"]["damage"]
        )
        assert "is missing" in " ".join(daemon.run("stats").stdout.split())
        found = daemon.chat([user("What is the lighthouse keeper's cat called?")])
        assert found.headers["X-Memory-Status"] == "injected", "the rest is served"
        assert daemon.terminate() == 0

        aside.rename(missing)
        daemon.start()
        assert daemon.chat(lost, headers={"X-Memory-Mode": "readonly"}).headers["X-Memory-Status"] == "injected"
        assert daemon.terminate() == 0
        assert daemon.run("verify").returncode == 0


def test_the_files_of_another_topic_are_not_read_as_ones_own(make_daemon: MakeDaemon) -> None:
    with recording_upstream() as upstream:
        daemon = make_daemon(upstream.url, SMALL_SEGMENTS).start()
        told(daemon, FACTS[0], FACTS[2], topic="work")
        told(daemon, FACTS[1], topic="home")
        assert daemon.terminate() == 0
        work, home = daemon.data_dir / "work", daemon.data_dir / "home"
        (work / "hot.log").rename(home / "hot.log")
        verified = daemon.run("verify")
        assert verified.returncode == 1 and f"{home / 'hot.log'}: belongs to the topic 'work'" in verified.stdout
        assert daemon.run("stats").returncode == 0

        daemon.start()
        lost = [user("What is the password for the boathouse door?")]
        answer = daemon.chat(lost, memory_in={"topic_id": "home"})
        assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "degraded:store")
        assert "heliotrope" not in upstream.prompts[-1]
        assert "If you have renamed the topic's folder on purpose" in daemon.log.read_text()
        assert daemon.terminate() == 0

        (home / "hot.log").rename(work / "hot.log")
        work.rename(daemon.data_dir / "office")
        daemon.start()
        moved = {"memory_in": {"topic_id": "office"}}
        assert daemon.chat(lost, **moved).headers["X-Memory-Status"] == "degraded:store"
        (daemon.data_dir / "office" / "former_names").write_text("work\n")
        assert daemon.chat(lost, **moved).headers["X-Memory-Status"] == "injected", "without a restart"
        daemon.wait_stored("boathouse door?")
        assert daemon.terminate() == 0
        assert daemon.run("verify").returncode == 0
        assert daemon.run("backup", str(daemon.folder / "backup")).returncode == 0
        assert daemon.run("verify", str(daemon.folder / "backup")).returncode == 0


def test_what_is_said_after_a_log_was_replaced_under_the_daemon_stays_in_the_journal(make_daemon: MakeDaemon) -> None:
    with recording_upstream() as upstream:
        daemon = make_daemon(upstream.url, {"retrieval": {"min_score": 0.4}}).start()
        told(daemon, FACTS[0])
        log, restored = daemon.data_dir / "default" / "active.bin", daemon.folder / "restored"
        restored.write_bytes(log.read_bytes())
        restored.rename(log)
        before = log.read_bytes()

        told_then = daemon.chat([user(FACTS[1])])
        assert told_then.status == 200
        wait_until(lambda: "something else replaced it" in daemon.log.read_text(), lambda: f"not told: {daemon!r}")
        for question in ("What is in grandmother's gooseberry jam?", "And how long does it wait?"):
            asked = daemon.chat([user(question)])
            assert asked.headers["X-Memory-Status"] == "degraded:store", "each time, though the journal can be written"
        assert log.read_bytes() == before, "it is not memd's to change"
        daemon.kill()

        daemon.start()
        daemon.wait_stored(FACTS[0])
        daemon.wait_stored(FACTS[1])
        assert daemon.terminate() == 0
        assert daemon.run("verify").returncode == 0


@pytest.mark.parametrize(
    ("name", "put"), [("active.bin", os.mkfifo), ("hot.log", lambda path: path.symlink_to("/dev/zero"))]
)
def test_a_pipe_or_a_device_in_place_of_a_file_holds_up_nobody(
    make_daemon: MakeDaemon, put: Callable[[Path], None], name: str
) -> None:
    with recording_upstream() as upstream:
        daemon = make_daemon(upstream.url).start()
        told(daemon, FACTS[0], topic="odd")
        assert daemon.terminate() == 0
        odd = daemon.data_dir / "odd" / name
        odd.unlink()
        put(odd)
        verified = daemon.run("verify")
        assert verified.returncode == 1 and f"{odd}: is no file but a pipe or a device" in verified.stdout
        daemon.start()
        answer = daemon.chat([user(FACTS[1])], memory_in={"topic_id": "odd"})
        assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "degraded:store")
        assert daemon.chat([user(FACTS[2])]).headers["X-Memory-Status"] == "none"
        assert "is no file but a pipe or a device; remove it" in daemon.log.read_text()
