"""The troubles of a daemon, in one list: what is wrong, since when, and what to do.

Rule: whoever may not read everything hears that the cluster's database cannot be used, and not where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from memd.errors import DiskFull, ReadOnlyDisk
from memd.ingest.topics import Topic
from memd.store.bucket.tending import BackupHealth
from memd.store.disk_trouble import DiskTrouble, Trouble


class ClusterHealth(msgspec.Struct, frozen=True):
    """This daemon's part in a cluster, as it is now."""

    place: str
    """Of the database."""
    trouble: str
    """Why it cannot be asked; empty: it can."""
    trouble_seconds: float
    """For how long."""


TOPICS_MAX = 10
"""More topics in trouble are not named: it is the same for most."""


def troubles_of(
    disk: DiskTrouble | None, topics: Sequence[Topic], cluster: ClusterHealth | None, *, sees_all: bool
) -> list[Trouble]:
    """Return the troubles by which what is said now is at risk, or memory is missing.

    Args:
        topics: those that may be told of.
        sees_all: the place of the database may be told.
    """
    found = [] if disk is None else [Trouble(disk.what, disk.since, disk.remedy)]
    told = [(topic, error) for topic in topics if (error := topic.write_trouble) is not None]
    if disk is not None:  # it is the same one
        told = [(topic, error) for topic, error in told if not isinstance(error, DiskFull | ReadOnlyDisk)]
    found += [_told(str(error), topic.trouble_since) for topic, error in told[:TOPICS_MAX]]
    if cluster is not None and cluster.trouble:
        found = [one for one in found if "PostgreSQL" not in one.what]  # it is the same one
        text = cluster.trouble if sees_all else "the database cannot be used; ask who runs this memd"
        found.append(_told(text, _ago(cluster.trouble_seconds)))
    return found


def backup_trouble(backup: BackupHealth | None) -> list[Trouble]:
    """Return the trouble of the backup to a bucket, if it has one."""
    return [] if backup is None or not backup.trouble else [_told(backup.trouble, _ago(backup.lag_seconds))]


def _told(text: str, since: int) -> Trouble:
    said, _, remedy = text.rpartition("; ")
    return Trouble(said or remedy, since, remedy if said else "")


def _ago(seconds: float, now: Callable[[], float] = time.time) -> int:
    return int((now() - seconds) * 1e6)
