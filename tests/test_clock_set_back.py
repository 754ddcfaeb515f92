"""A clock that is set back while the daemon runs: what is timed goes on, and people see the times that they saw."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from clocks import at_time
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream

HOUR = 3600.0
ANSWER_SECONDS = 120.0
FREEZE_SECONDS = 0.3


class ClockedDaemon:
    """A daemon whose clock the test sets."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self._behind_seconds = 0.0
        self.set_back(0.0)

    @property
    def now(self) -> datetime:
        """What its clock shows."""
        return datetime.now(UTC) - timedelta(seconds=self._behind_seconds)

    def set_back(self, seconds: float) -> None:
        at_time(self.daemon, days_ago=seconds / 86_400)
        self._behind_seconds = seconds

    def say(self, text: str, topic_id: str) -> Any:
        message = {"role": "user", "content": text}
        return self.daemon.chat([message], memory_in={"topic_id": topic_id})

    def told(self, path: str, **query: str) -> Any:
        given = "&".join(f"{name}={value.replace(' ', '+').replace('+00:00', 'Z')}" for name, value in query.items())
        return ask(f"{self.daemon.base_url}/memd/{path}?{given}").json

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.told("log")["events"]
        return events

    def wait_in_log(self, text: str) -> None:
        wait_until(
            lambda: any(text in event["content"] for event in self.events()),
            lambda: f"{text!r} is not in the log: {self.events()}",
            ANSWER_SECONDS,
        )


@pytest.fixture
def clocked(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> Callable[[], ClockedDaemon]:
    def start() -> ClockedDaemon:
        daemon = make_daemon(upstream.url, {"injection": {"freeze_seconds": FREEZE_SECONDS}})
        made = ClockedDaemon(daemon)
        daemon.start()
        return made

    return start


def test_what_was_said_before_is_stored_and_dated_and_found_as_of_then(clocked: Callable[[], ClockedDaemon]) -> None:
    memd = clocked()
    memd.say("The roof of the hall is grey.", "one")
    memd.wait_in_log("roof")
    memd.say("The lamp in the hall is green.", "one")
    memd.set_back(HOUR)
    memd.wait_in_log("lamp")
    memd.say("The door of the hall is red.", "two")
    memd.wait_in_log("door")
    later, told = memd.now + timedelta(seconds=1), memd.events()
    assert "door" in told[0]["content"], "the newest is first"
    [door] = [event for event in told if "door" in event["content"]]
    assert abs(door["at"] / 1e6 - memd.now.timestamp()) < ANSWER_SECONDS, "the time that people saw"
    assert door["canonical_id"] > door["at"] + HOUR / 2 * 1e6
    found = memd.told("search", q="What colour is the door?", as_of=later.isoformat())
    assert any("door" in chunk["content"] for chunk in found["chunks"])
    before = memd.told("log", before=later.isoformat())["events"]
    assert [event["canonical_id"] for event in before] == [event["canonical_id"] for event in told]
    earlier = memd.told("log", before=(memd.now - timedelta(seconds=2 * HOUR)).isoformat())
    assert earlier["events"] == []


def test_the_same_request_after_the_time_of_a_retry_recalls_afresh(clocked: Callable[[], ClockedDaemon]) -> None:
    memd = clocked()
    memd.say("The lamp in the hall is green.", "one")
    memd.wait_in_log("lamp")
    question = "Which things are in the hall, and of what colour?"
    first = memd.say(question, "one").headers["X-Memory-Injected"].split(",")
    memd.set_back(HOUR)
    memd.say("The door of the hall is red.", "one")
    memd.wait_in_log("door")  # takes longer than FREEZE_SECONDS
    [door] = [event["id"] for event in memd.events() if "door" in event["content"]]
    assert first == [event["id"] for event in memd.events() if "lamp" in event["content"]]
    assert door in memd.say(question, "one").headers["X-Memory-Injected"].split(",")


def test_a_clock_that_jumps_over_400_days_and_back_costs_no_order_no_day_and_no_word(
    clocked: Callable[[], ClockedDaemon],
) -> None:
    memd = clocked()
    told = []
    for word, ahead in (("lamp", 0.0), ("door", 400 * 24 * HOUR), ("roof", 0.0), ("mast", 7 * 24 * HOUR)):
        memd.set_back(-ahead)
        memd.say(f"The {word} of the hall is green.", "one")
        memd.wait_in_log(word)
        told.append((word, f"{memd.now:%A %Y-%m-%d}"))
    memd.set_back(0.0)
    events = {event["canonical_id"]: event["content"] for event in memd.events()}
    ascending = [next(word for word, _ in told if word in events[one]) for one in sorted(events)]
    assert ascending == [word for word, _ in told], "in the order in which they were stored"
    found = memd.told("search", q="What colour are the lamp, the door, the roof and the mast of the hall?")
    days = {
        word: f"{datetime.fromtimestamp(one['said_at'] / 1e6):%A %Y-%m-%d}"
        for one in found["chunks"]
        for word, _ in told
        if word in one["content"]
    }
    assert days == dict(told), "each on the day that people saw, and none thrown out as old"


def test_after_a_leap_second_and_a_week_of_sleep_ids_ascend_and_the_block_has_the_days_that_people_saw(
    clocked: Callable[[], ClockedDaemon], upstream: RecordingUpstream
) -> None:
    memd = clocked()
    memd.say("The lamp of the hall is green.", "one")
    memd.wait_in_log("lamp")
    memd.set_back(1.0)  # as clocks show a leap second: one comes twice
    memd.say("The door of the hall is red.", "one")
    memd.wait_in_log("door")
    memd.set_back(0.0)
    before = f"{memd.now:%A %Y-%m-%d}"
    memd.say("The mast of the hall is blue.", "one")
    memd.set_back(-7 * 24 * HOUR)  # it wakes, and what waited is stored now
    memd.wait_in_log("mast")
    after = f"{memd.now:%A %Y-%m-%d}"
    events = {event["canonical_id"]: event["content"] for event in memd.events()}
    order = [next(word for word in ("lamp", "door", "mast") if word in events[one]) for one in sorted(events)]
    assert order == ["lamp", "door", "mast"]
    answer = memd.say("What colour are the lamp, the door and the mast of the hall?", "one")
    assert answer.headers["X-Memory-Status"] == "injected"
    prompt = upstream.prompts[-1]
    assert f"Today is {after}." in prompt and prompt.count(f"-- {before} --") == 1
    assert all(f"{word} of the hall is" in prompt for word in order), "nothing is thrown out as old"
