"""A sample of what `make cluster` plays: troubles in a cluster under load, judged from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import DaemonProcess, ask, wait_until
from house import running_house
from rounds import at_the_end, play
from troubles import TROUBLES

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
