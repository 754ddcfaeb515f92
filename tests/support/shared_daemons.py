"""Daemons that share one log in a real PostgreSQL, each a process of its own with a folder of its own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from daemon_process import Answer, DaemonProcess, ask, wait_until
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream

from memd.store.log.recovery import read_log_file

_numbers = itertools.count(1)


class Cluster:
    """Two daemons, the database that they share, and the model that they all ask."""

    def __init__(self, daemons: Sequence[DaemonProcess], url: str, upstream: RecordingUpstream) -> None:
        self.daemons = daemons
        self.url = url
        self.upstream = upstream

    def tell(self, number: int, topic: str, messages: Sequence[Mapping[str, Any]], **more: Any) -> Answer:
        """A chat through one of the daemons."""
        headers = more.pop("headers", {})
        body = {"model": "tiny", "messages": list(messages), **more}
        return ask(f"{self.daemons[number].base_url}/t/{topic}/v1/chat/completions", body, headers=headers)

    def stored(self, topic: str) -> list[str]:
        """The content of each entry that the database has, in order: what a checker outside sees."""
        return [entry.content for entry in self.entries(topic)]

    def entries(self, topic: str) -> list[Any]:
        """All entries in the rows of a topic's log."""
        with psycopg.connect(self.url) as connection:
            rows = connection.execute(
                "SELECT data FROM memd_log WHERE topic = %s AND stream = 'log' ORDER BY last", (topic,)
            ).fetchall()
        return [entry for (data,) in rows for entry in read_log_file(bytes(data), name="a row", dimension=None).entries]

    def bytes_of(self, topic: str) -> bytes:
        """All bytes that the database has of a topic."""
        with psycopg.connect(self.url) as connection:
            rows = connection.execute("SELECT data FROM memd_log WHERE topic = %s", (topic,)).fetchall()
        return b"".join(bytes(data) for (data,) in rows)

    def wait_stored(self, topic: str, *texts: str) -> None:
        """Return when the database has all of these texts."""
        wait_until(
            lambda: all(any(text in one for one in self.stored(topic)) for text in texts),
            lambda: f"stored: {self.stored(topic)}",
        )

    def last_prompt(self) -> list[dict[str, Any]]:
        """The messages that the model was sent last."""
        messages: list[dict[str, Any]] = json.loads(self.upstream.prompts[-1])
        return messages


@contextmanager
def cluster(
    postgres: PostgresServer,
    upstream: RecordingUpstream,
    folder: Path,
    *,
    through: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Cluster]:
    """Two daemons on a new database, until the block ends. `through`: the folder of a socket that leads there."""
    direct = postgres.database(name := f"shared_{next(_numbers)}")
    told = {
        "cluster": {"database": postgres.url(name, folder=through) if through else direct},
        "buffer": {"store_after_seconds": 0.0},
        **(settings or {}),
    }
    daemons = []
    try:
        for number in range(2):
            (own := folder / f"daemon{number}").mkdir(parents=True)
            daemons.append(DaemonProcess(own, upstream.url, told).start())
        yield Cluster(daemons, direct, upstream)
    finally:
        for daemon in daemons:
            print(repr(daemon))
            daemon.discard()
