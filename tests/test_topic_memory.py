"""Topics come into memory when they are asked for and leave it when nobody does; nobody notices but by the figures."""

from __future__ import annotations

import json

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, user, wait_until
from recording_upstream import RecordingUpstream

FACT = "Please note: the release word for the lighthouse lamp is cinnamon-42, written on the brass plate."
QUESTION = "What is the release word for the lighthouse lamp?"
CHUNKS = range(250)


def loaded(daemon: DaemonProcess) -> set[str]:
    """The topics that the daemon has in memory."""
    return set(ask(f"{daemon.own_url}/memd/stats").json["topics"])


@pytest.fixture
def told(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    """A daemon that lets topics go at once, and has been told something in the topic "lamp"."""
    store, buffer = {"topic_idle_seconds": 0.05}, {"store_after_seconds": 0.2}
    settings = {"store": store, "buffer": buffer, "segment": {"max_entries": 4}}
    daemon = make_daemon(upstream.url, settings).start()
    daemon.chat([user(FACT)], memory_in={"topic_id": "lamp"})
    for number in range(9):
        daemon.chat(
            [user(f"Number {number}: the ferry to island {number} is due at {number} o'clock.")],
            memory_in={"topic_id": "lamp"},
        )
    return daemon


def test_an_idle_topic_is_stored_let_go_and_comes_back_as_it_was(
    told: DaemonProcess, upstream: RecordingUpstream
) -> None:
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    answer = told.chat([user(QUESTION)], memory_in={"topic_id": "lamp"})
    assert answer.headers["X-Memory-Status"] == "injected"
    assert "cinnamon-42" in upstream.prompts[-1]
    assert loaded(told) <= {"lamp"}
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    contents = [entry["content"] for entry in told.export()]
    assert len(contents) == len(set(contents))
    assert told.run("verify").returncode == 0


def test_a_conversation_goes_on_after_its_topic_was_let_go(told: DaemonProcess, upstream: RecordingUpstream) -> None:
    history = [user("We begin a long talk about the weather on the island of Sark.")]
    history.append({"role": "assistant", "content": told.chat(history, memory_in={"topic_id": "lamp"}).reply})
    first = told.chat([*history, user(QUESTION)], memory_in={"topic_id": "lamp"})
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    again = [*history, user(QUESTION), {"role": "assistant", "content": first.reply}, user("And the ferry?")]
    told.chat(again, memory_in={"topic_id": "lamp"})
    before, after = (json.loads(prompt) for prompt in upstream.prompts[-2:])
    assert after[: len(before)] == before, "the block of the turn before is where it was"


def test_a_start_opens_what_has_work_left_and_what_was_used_last(told: DaemonProcess) -> None:
    told.chat([user("A remark in the cellar.")], memory_in={"topic_id": "cellar"})
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    told.configure({"buffer": {"store_after_seconds": 3600}})  # from now on nothing is stored or let go soon
    told.restart()
    wait_until(lambda: loaded(told) == {"cellar"}, lambda: f"in memory: {loaded(told)}")
    told.chat([user("A remark that stays in the buffer.")], memory_in={"topic_id": "attic"})
    told.chat([user("Later, something else.")], memory_in={"topic_id": "lamp"})
    told.restart()
    wait_until(lambda: loaded(told) == {"attic", "lamp"}, lambda: f"in memory: {loaded(told)}")

    def indexes() -> tuple[int, int]:
        lamp = ask(f"{told.own_url}/memd/stats").json["topics"]["lamp"]
        return lamp["indexes_loaded"], lamp["indexes"]  # of two segments, in one index where they are merged

    wait_until(lambda: indexes()[0] == indexes()[1] > 0, lambda: f"{indexes()} indexes are loaded")


def test_above_the_ceiling_the_topic_used_least_recently_goes_first(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    settings = {
        "store": {"memory_bytes_max": 1 << 20},  # one topic of 250 chunks fits, two do not
        "buffer": {"store_after_seconds": 0.05},
        "chunking": {"min_tokens": 1, "max_tokens": 20},
    }
    daemon = make_daemon(upstream.url, settings).start()
    for topic_id in ("one", "two"):
        items = (f"Item {number} of {topic_id} is on shelf {number % 17}, box {number * 7 % 31}." for number in CHUNKS)
        daemon.chat([user(" ".join(items))], memory_in={"topic_id": topic_id})
        wait_until(lambda topic_id=topic_id: topic_id in loaded(daemon), lambda: "not loaded")  # type: ignore[misc]
    wait_until(lambda: loaded(daemon) == {"two"}, lambda: f"{ask(daemon.own_url + '/memd/stats').json}")


def test_stats_show_the_files_without_a_daemon_and_its_figures_with_one(told: DaemonProcess) -> None:
    wait_until(lambda: loaded(told) == set(), lambda: "still in memory")
    figures = json.loads(told.run("stats", "--json").stdout)
    [lamp] = figures["topics"]
    assert lamp["topic_id"] == "lamp" and lamp["chunks"] == lamp["entries"] == len(told.export())
    assert figures["daemon"]["memory_bytes_max"] == 4 << 30
    told.chat([user(QUESTION)], memory_in={"topic_id": "lamp"})
    told.kill()
    shown = told.run("stats")
    assert shown.returncode == 0
    assert "lamp" in shown.stdout and "No daemon holds this folder" in shown.stdout
    assert json.loads(told.run("stats", "--json").stdout)["daemon"] is None
