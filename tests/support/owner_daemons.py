"""Daemons of one cluster for tests of how requests find their topic's daemon.

Rule: each is a process of its own; PostgreSQL and the bucket are real and shared by all tests of a file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bucket_server import S3Server, s3_server
from daemon_process import Answer, DaemonProcess, ask
from postgres_server import PostgresServer, running_postgres

LEASE_SECONDS = 1.0
_numbers = itertools.count(1)


class Ground:
    """A database server and a bucket server."""

    def __init__(self, postgres: PostgresServer, s3: S3Server) -> None:
        self.postgres, self._s3 = postgres, s3

    def settings(self, **groups: Mapping[str, Any]) -> dict[str, Any]:
        """Of each daemon of a new cluster."""
        url = self.postgres.database(f"owners_{next(_numbers)}")
        store = {"url": url, "lease_seconds": LEASE_SECONDS, **self._s3.told(), **groups.pop("store", {})}
        return {"store": store, "buffer": {"store_after_seconds": 0.0}, "log": {"level": "debug"}, **groups}


@contextmanager
def ground() -> Iterator[Ground]:
    """Both servers, until the block ends."""
    with running_postgres() as postgres, s3_server() as s3:
        yield Ground(postgres, s3)


def tell(daemon: DaemonProcess, topic: str, text: str, **headers: str) -> Answer:
    """A chat of one message in a topic."""
    return daemon.chat([{"role": "user", "content": text}], headers={"X-Memory-Topic": topic, **headers})


def owner_of(answer: Answer) -> str | None:
    """The other daemon that gave an answer."""
    assert answer.status == 200, answer.body
    return answer.headers["X-Memory-Owner"]


def figure(daemon: DaemonProcess, name: str, **headers: str) -> float:
    """The sum of a metric over its labels."""
    text = ask(f"{daemon.own_url}/memd/metrics", headers=headers).body.decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))
