"""What is done to a cluster while agents talk through it, and how it is undone.

Rule: a trouble begins with one of the daemons, or with PostgreSQL; whoever was in trouble serves again afterwards.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from house import House, Member

Deed = Callable[[House, Member], None]


class Trouble(NamedTuple):
    """One kind."""

    name: str
    begin: Deed
    undo: Deed
    lasts_seconds: float = 3.0
    """For so long at least."""


def nothing(house: House, one: Member) -> None:
    """Leave it as it is."""


def restart_postgres(house: House, one: Member) -> None:
    """Cut everybody off."""
    house.postgres.stop()
    house.postgres.start()


def kill_postgres(house: House, one: Member) -> None:
    """kill -9 of it, and a start that recovers."""
    house.postgres.kill()
    house.postgres.start()


def freeze_all(house: House, one: Member) -> None:
    """The network of PostgreSQL."""
    for member in house.members:
        member.to_database.freeze()


def open_all(house: House, one: Member) -> None:
    """Every network is as it was."""
    house.open_all()


def slow_all(house: House, one: Member) -> None:
    """Half a second before each statement."""
    for member in house.members:
        member.to_database.delay_seconds = 0.5


def fail_over(house: House, one: Member) -> None:
    """To a synchronous standby, after it has been one for a moment."""
    house.add_standby()
    time.sleep(2.0)
    house.fail_over()


def kill_all(house: House, one: Member) -> None:
    """The power of all daemons."""
    for member in house.members:
        member.kill()


def kill_and_let_come_back(house: House, one: Member) -> None:
    """At once."""
    one.kill()
    one.start()


def start_missing(house: House, one: Member) -> None:
    """Start who does not run."""
    house.start()


def upgrade_all(house: House, one: Member) -> None:
    """One daemon after the other: SIGTERM, and a start."""
    for member in house.members:
        assert member.end() == 0, repr(house)
        member.start()


def cut_database(house: House, one: Member) -> None:
    """All its connections end, again and again."""
    for _ in range(5):
        one.to_database.cut()
        time.sleep(0.2)


def end(house: House, one: Member) -> None:
    """SIGTERM."""
    assert one.end() == 0, repr(one.daemon)


TROUBLES = (
    Trouble("nothing, to compare with", nothing, nothing),
    Trouble("kill -9 of a daemon", lambda _, one: one.kill(), start_missing, lasts_seconds=8.0),
    Trouble("kill -9 of a daemon, back at once", kill_and_let_come_back, nothing),
    Trouble("kill -9 of all daemons", kill_all, start_missing),
    Trouble("SIGTERM of a daemon", end, start_missing),
    Trouble("SIGSTOP of a daemon", lambda _, one: one.stop(), lambda _, one: one.go_on()),
    Trouble("frozen: a daemon and PostgreSQL", lambda _, one: one.to_database.freeze(), open_all),
    Trouble("refused: a daemon and PostgreSQL", lambda _, one: one.to_database.shut(), open_all),
    Trouble("cut: a daemon and PostgreSQL, five times", cut_database, nothing),
    Trouble("PostgreSQL is restarted", restart_postgres, nothing),
    Trouble("kill -9 of PostgreSQL", kill_postgres, nothing),
    Trouble("PostgreSQL fails over to a standby", fail_over, nothing),
    Trouble("slow: all and PostgreSQL", slow_all, open_all),
    Trouble("frozen: all and PostgreSQL", freeze_all, open_all),
    Trouble("an upgrade, one after the other", upgrade_all, nothing),
)
