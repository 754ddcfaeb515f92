"""What is done to a cluster while agents talk through it, and how it is undone.

Rule: a trouble says from whom its topics have to be taken over (`takes_from`), if from anybody: the others then serve
them before it is undone. Whoever was in trouble serves again afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from house import House, Member

Deed = Callable[[House, Member], None]


class Trouble(NamedTuple):
    """One kind."""

    name: str
    begin: Deed
    """Gets the daemon that has most topics."""
    undo: Deed
    is_taken_over: bool = False
    """Whether the other daemons have to serve its topics meanwhile."""
    lasts_leases: float = 1.0
    """For how long at least, in leases."""


def nothing(house: House, owner: Member) -> None:
    """Leave it as it is."""


def restart_postgres(house: House, owner: Member) -> None:
    """Cut everybody off."""
    house.postgres.stop()
    house.postgres.start()


def kill_postgres(house: House, owner: Member) -> None:
    """kill -9 of it, and a start that recovers."""
    house.postgres.kill()
    house.postgres.start()


def freeze_all_databases(house: House, owner: Member) -> None:
    """The network of PostgreSQL."""
    for member in house.members:
        member.to_database.freeze()


def fail_bucket(house: House, owner: Member) -> None:
    """503 to everything."""
    for member in house.members:
        member.to_bucket.fail()


def shut_bucket(house: House, owner: Member) -> None:
    """Nobody listens there."""
    for member in house.members:
        member.to_bucket.shut()


def open_all(house: House, owner: Member) -> None:
    """Every network is as it was."""
    house.lines.open_all()


def kill_all(house: House, owner: Member) -> None:
    """The power of all daemons."""
    for member in house.members:
        member.kill()


def kill_and_let_come_back(house: House, owner: Member) -> None:
    """At once, before its lease is over."""
    owner.kill()
    owner.start()


def stop_for_long(house: House, owner: Member) -> None:
    """SIGSTOP, with its connections frozen too, so that nothing of it is known to be gone."""
    owner.stop()


def start_missing(house: House, owner: Member) -> None:
    """Start who does not run."""
    house.start()


def upgrade_all(house: House, owner: Member) -> None:
    """One daemon after the other: SIGTERM, and a start."""
    for member in house.members:
        assert member.end() == 0, repr(house)
        member.start()


def cut_database(house: House, owner: Member) -> None:
    """All its connections end, again and again."""
    for _ in range(5):
        owner.to_database.cut()
        time.sleep(house.lease_seconds / 10)


TROUBLES = (
    Trouble("kill -9 of the owner", lambda _, owner: owner.kill(), start_missing, is_taken_over=True),
    Trouble("SIGSTOP of the owner, longer than a lease", stop_for_long, lambda _, owner: owner.go_on(), True, 1.5),
    Trouble("SIGSTOP of the owner, shorter than a lease", stop_for_long, lambda _, owner: owner.go_on(), False, 0.4),
    Trouble("the owner's port is closed", lambda _, owner: owner.door.shut(), open_all, is_taken_over=True),
    Trouble("frozen: owner and PostgreSQL", lambda _, owner: owner.to_database.freeze(), open_all, True, 1.5),
    Trouble("frozen: owner and bucket", lambda _, owner: owner.to_bucket.freeze(), open_all),
    Trouble("frozen: the other daemons and the owner", lambda _, owner: owner.door.freeze(), open_all, False, 1.5),
    Trouble("refused: owner and PostgreSQL", lambda _, owner: owner.to_database.shut(), open_all, True, 1.5),
    Trouble("cut: owner and PostgreSQL, five times", cut_database, nothing),
    Trouble("PostgreSQL is restarted", restart_postgres, nothing),
    Trouble("kill -9 of PostgreSQL", kill_postgres, nothing),
    Trouble("frozen: all and PostgreSQL", freeze_all_databases, open_all, False, 1.5),
    Trouble("the bucket fails", fail_bucket, open_all, False, 1.5),
    Trouble("the bucket is away", shut_bucket, open_all, False, 1.5),
    Trouble("kill -9 of all daemons", kill_all, start_missing),
    Trouble("kill -9 of the owner, back at once", kill_and_let_come_back, nothing),
    Trouble("SIGTERM of the owner", lambda _, owner: _ended(owner), start_missing, is_taken_over=True),
    Trouble("an upgrade, one after the other", upgrade_all, nothing),
)


def _ended(owner: Member) -> None:
    assert owner.end() == 0, repr(owner.daemon)
