"""A sample of what `make cluster` plays: troubles in a cluster under load, judged from outside."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from daemon_process import DaemonProcess, ask, wait_until
from house import running_house
from rounds import at_the_end, play
from troubles import TROUBLES

from memd.ingest.topic import Topic
from memd.notes import Note
from memd.proxy.remember import Rememberer

pytestmark = pytest.mark.process

SAMPLE = (
    "kill -9 of the owner",
    "SIGSTOP of the owner, longer than a lease",
    "refused: owner and PostgreSQL",
    "PostgreSQL is restarted",
)


def test_whatever_happens_to_an_owner_or_the_database_nothing_is_lost_and_nothing_is_stored_twice(
    tmp_path: Path,
) -> None:
    with running_house(tmp_path, daemons=2, lease_seconds=1.0) as house:
        house.start()
        for trouble in (one for one in TROUBLES if one.name in SAMPLE):
            house.write(topics=2, writers=3)
            played = play(house, trouble)
            assert played.complaints == [], trouble.name
            assert played.facts > 0
        assert at_the_end(house) == []


async def test_what_another_one_is_writing_is_not_promised_before_it_is_written(topic: Topic) -> None:
    """Of two turns at once the first to write takes along what the other one was asked."""
    may_write = threading.Event()
    parts = [Mock() for _ in range(5)]
    rememberer = Rememberer(*parts, is_synced=False, is_shared=True)
    topic.writer.submit(may_write.wait)
    topic.buffer.take_note(b"0123456789abcdef", Note(content="The ferry is blue.", said_at=1))
    first = asyncio.ensure_future(topic.save(sync=True))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(rememberer.save_asked(topic))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    may_write.set()
    await first
    assert await second


def has_renewed(daemon: DaemonProcess) -> bool:
    return ask(f"{daemon.own_url}/memd/stats").json["cluster"]["renewed_seconds"] is not None


def test_what_is_said_while_the_database_is_away_is_not_promised(tmp_path: Path) -> None:
    with running_house(tmp_path, daemons=1, lease_seconds=9) as house:
        house.start()
        [member] = house.members
        talk = [{"role": "user", "content": "The ferry is blue."}]
        first = member.daemon.chat(talk)
        assert first.headers["X-Memory-Status"] == "none"
        talk += [{"role": "assistant", "content": first.reply}, {"role": "user", "content": "The gate is green."}]
        member.daemon.wait_stored("The ferry is blue.")
        # From then on nothing but the write itself tells that the database is away.
        wait_until(lambda: has_renewed(member.daemon), lambda: repr(member.daemon))
        member.to_database.shut()
        said = member.daemon.chat(talk)
        assert said.reply and said.headers["X-Memory-Status"] == "degraded:store"
