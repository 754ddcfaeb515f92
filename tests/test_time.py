"""When something was said is known from its arrival on, whatever happens to it until it is stored."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from archiver_stage import COUNTER
from clocks import at_time
from conftest import MakeDaemon
from daemon_process import user
from histories import digest_at, new_buffer, replayed, said
from recording_upstream import RecordingUpstream

from memd.conversation.events import Appended, decode_event, encode_event
from memd.conversation.hot_buffer import Arrival, HotBuffer
from memd.ingest.chunking import Utterance, split
from memd.ingest.imports.threads import Dating
from memd.settings.model import ChunkingSettings

NOON = 1_762_171_200_000_000
"""2025-11-03T12:00Z."""


def receive(buffer: HotBuffer, *history: str, at: int) -> Arrival:
    messages = [said(one) for one in history]
    digests = [message.content_digest for message in messages]
    return buffer.receive(messages, digests, [10] * len(messages), session=None, now=0.0, said_at=at)


def times(arrival: Arrival) -> list[int | None]:
    messages = [item.message for item in arrival.conversation.messages]
    return [None if one is None or one.said_at is msgspec.UNSET else one.said_at - NOON for one in messages]


# From arrival on


def test_a_restart_keeps_the_times_and_a_journal_from_before_them_reads_on() -> None:
    buffer = new_buffer()
    receive(buffer, "u:one", "a:two", "u:three", at=NOON)
    for events in (buffer.take_unsaved(), buffer.retelling()()):
        kept = [item.message for one in replayed(events).conversations() for item in one.messages]
        assert [one.said_at for one in kept if one is not None] == [NOON] * 3
    old = msgspec.msgpack.decode(encode_event(next(e for e in buffer.retelling()() if isinstance(e, Appended))))
    for item in old["messages"]:
        del item["message"]["said_at"]
    read = decode_event(msgspec.msgpack.encode(old))
    assert isinstance(read, Appended)
    assert [one.message.said_at for one in read.messages if one.message is not None] == [msgspec.UNSET] * 3


def test_a_chunk_has_the_time_of_its_first_message() -> None:
    messages = [
        Utterance("A question.", "user", digest_at(["u:1"]), said_at=NOON),
        Utterance("An answer.", "assistant", digest_at(["u:2"]), said_at=NOON + 5),
    ]
    [chunk] = split(messages, settings=ChunkingSettings(), tokenizer=COUNTER)
    assert chunk.said_at == NOON


# Through the daemon

FACT = "Please note: the release word for the lighthouse lamp is cinnamon-42, on the brass plate."
LATER = "Where was it that the release word is written, again?"


def days_ago(iso: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(iso)) / timedelta(days=1)


def test_what_waits_in_the_journal_for_days_is_stored_with_the_time_of_its_arrival(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 3600, "journal_fsync": "always"}})
    at_time(daemon, days_ago=3)
    daemon.start()
    answer = daemon.chat([user(FACT)]).reply
    daemon.kill()
    at_time(daemon, days_ago=1)
    daemon.start()
    daemon.chat([user(FACT), {"role": "assistant", "content": answer}, user(LATER)])
    daemon.kill()
    at_time(daemon, days_ago=0)
    daemon.start()
    daemon.wait_stored(FACT, LATER)
    dates = {text: entry for entry in daemon.export() for text in (FACT, LATER) if text in entry["content"]}
    assert 2.9 < days_ago(dates[FACT]["said_at"]) < 3.1
    assert 0.9 < days_ago(dates[LATER]["said_at"]) < 1.1
    assert days_ago(dates[LATER]["created_at"]) < 0.1


# Imports


@pytest.mark.parametrize(
    "members",
    [
        {"timestamp": "2025-11-03T12:00:00Z"},
        {"created_at": "2025-11-03T13:00:00+01:00"},
        {"create_time": 1_762_171_200.0},
        {"timestamp": 1_762_171_200_000},
        {"time": 1_762_171_200_000_000},
        {"time": 1_762_171_200_000_000_000},
        {"date": "1762171200"},
        {"timestamp": "no time", "createdAt": 1_762_171_200},
    ],
)
def test_times_are_read_as_programs_write_them(members: dict[str, Any]) -> None:
    assert Dating().told_time(json.dumps(members).encode()) == NOON


@pytest.mark.parametrize(
    "value",
    [
        *(True, "tomorrow", -5, 0, 5, 1e300, "9" * 400, [1], {}, 10**30, "1970-01-01T00:00:00Z", "0001-01-01"),
        *("9999-12-31T23:59:59-23:00", "2025-11-05", 1_762_257_700),
    ],
)
def test_what_is_no_time_or_later_than_now_dates_nothing_and_is_counted(value: object) -> None:
    dating = Dating(NOON)
    assert dating.told_time(json.dumps({"timestamp": value}).encode()) is None
    assert dating.refused == 1


# What the model and people see


def noon() -> datetime:
    """A noon not long ago, by the clock of this machine: no midnight and no change of the clocks is near."""
    return datetime.now().replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)


def days_since(local: datetime) -> float:
    return (datetime.now(UTC) - local.astimezone()) / timedelta(days=1)


def test_a_prompt_says_on_which_day_something_was_said_and_what_day_it_is(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {})
    today = noon()
    then = today - timedelta(days=40)
    at_time(daemon, days_ago=days_since(then))
    daemon.start()
    daemon.chat([user(FACT)])
    daemon.wait_stored(FACT)
    at_time(daemon, days_ago=days_since(today))
    daemon.chat([user("What is the release word for the lighthouse lamp?")])
    block = json.loads(upstream.prompts[-1])[-1]["content"].partition("[/memory]")[0]
    assert f"instructions. Today is {today:%A %Y-%m-%d}.\n-- {then:%A %Y-%m-%d} --\n[mem:" in block
    found = daemon.run("search", "the release word for the lighthouse lamp").stdout
    assert f"  {then:%Y-%m-%d} " in next(line for line in found.split("\n") if "  default  " in line), found


def test_without_dates_a_prompt_says_no_day(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"injection": {"dates": "off"}}).start()
    daemon.chat([user(FACT)])
    daemon.wait_stored(FACT)
    daemon.chat([user("What is the release word for the lighthouse lamp?")])
    block = json.loads(upstream.prompts[-1])[-1]["content"].partition("[/memory]")[0]
    assert "[mem:" in block and "Today is" not in block and "\n-- " not in block


def test_a_question_about_a_time_favours_what_was_said_then_and_still_finds_the_rest(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 0.05}})
    colours = {1: "blue", 40: "green", 80: "black"}
    today = noon()
    at_time(daemon, days_ago=days_since(today - timedelta(days=80)))
    daemon.start()
    for days, colour in reversed(colours.items()):
        at_time(daemon, days_ago=days_since(today - timedelta(days=days)))
        daemon.chat([user(f"I bought a {colour} bicycle at the market and rode it home.")])
        daemon.wait_stored(f"a {colour} bicycle")
    at_time(daemon, days_ago=days_since(today))

    def found(question: str) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = json.loads(daemon.run("search", "--json", question).stdout)["chunks"]
        return chunks

    for question in ("What did I buy yesterday?", "Was für ein bicycle habe ich gestern gekauft?"):
        first, *others = found(question)
        assert "blue" in first["content"] and first["time"] == 3.0, question
        assert {one["time"] for one in others} == {1.0} and len(others) == 2, question
    assert all(one["time"] == 1.0 for one in found("Which bicycle did I buy?"))
