"""A whole cluster on one machine: PostgreSQL, a bucket, a model server that costs nothing, and daemons, each a process.

Rule: between any two of them lies a line (lines.py), so that each can be cut off from each other one; clients alone
reach the daemons directly. Everything ends with the block, and nothing of it stays.
"""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from bucket_server import S3Server, s3_server
from clocks import at_time
from daemon_process import DaemonProcess, wait_until
from judge import Verdict, claimed_topics, judged, read_topics
from ledger import Ledger
from lines import Line, Lines
from postgres_server import PostgresServer, running_postgres
from recording_upstream import RecordingUpstream, recording_upstream
from writers import Door, Writer

from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Database
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.disk import DiskFiles

SETTLED_SECONDS_MAX = 60.0
DAY_SECONDS = 86_400
SETTINGS: dict[str, dict[str, Any]] = {
    "buffer": {
        "store_after_seconds": 0.3,
        "idle_seconds": 10,  # the judge waits a minute for what is in a journal alone, as a turn without an end is
        "soft_tokens": 900,
        "hard_tokens": 1800,
    },
    "compaction": {"retry_seconds": 0.5},
    "dedupe": {"cosine": 1.0},  # facts differ in a number alone
    "segment": {"max_entries": 25},  # so that rounds meet rotation, sealing and publishing
    "shutdown": {"grace_seconds": 10},
    "log": {"level": "info"},
}


class Member:
    """A daemon of the cluster, with the lines that lead from it and to it."""

    def __init__(self, number: int, daemon: DaemonProcess, database: Line, bucket: Line, door: Line) -> None:
        self.number = number
        self.daemon = daemon
        self.to_database = database
        self.to_bucket = bucket
        self.door = door
        """At which the other daemons reach it."""
        self.is_running = False
        self.is_well = False
        """Whether nothing is done to the process."""

    def start(self) -> None:
        self.daemon.start()
        parts = urlsplit(self.daemon.base_url)
        assert parts.hostname is not None and parts.port is not None
        self.door.target = (parts.hostname, parts.port)
        self.door.open()
        self.is_running = self.is_well = True

    def kill(self) -> None:
        self.is_running = self.is_well = False
        self.daemon.kill()
        self.door.shut()  # whom nobody listens for is refused

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.is_well = False
        self.daemon.send_signal(signal.SIGTERM)
        wait_until(lambda: self.daemon.has_ended or not self._listens(), lambda: repr(self.daemon))
        self.door.refuse()  # as its own port does from now on
        code = self.daemon.wait()
        self.door.shut()
        self.is_running = False
        return code

    def _listens(self) -> bool:
        assert isinstance(self.door.target, tuple), "it was started"
        with socket.socket() as probe:
            return probe.connect_ex(self.door.target) == 0

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_well = False
        self.daemon.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.daemon.send_signal(signal.SIGCONT)
        self.is_well = True


class House:
    """All processes. Use `running_house`."""

    def __init__(
        self,
        folder: Path,
        postgres: PostgresServer,
        s3: S3Server,
        upstream: RecordingUpstream,
        lines: Lines,
        *,
        daemons: int,
        lease_seconds: float,
    ) -> None:
        self.folder = folder
        self.postgres = postgres
        self.upstream = upstream
        self.lines = lines
        self.lease_seconds = lease_seconds
        self.ledger = Ledger()
        self._bucket = s3.settings()
        self._s3 = s3
        self._database_url = postgres.database("memd")
        self.members = [self._member(number) for number in range(daemons)]
        self.writers: list[Writer] = []
        self._judgements = 0

    def _member(self, number: int) -> Member:
        folder = self.folder / f"daemon{number}"
        folder.mkdir()
        bucket = urlsplit(self._s3.url)
        assert bucket.hostname is not None and bucket.port is not None
        to_database, door = self.lines.to(self.postgres.socket), self.lines.to()
        to_bucket = self.lines.to((bucket.hostname, bucket.port))
        store = {
            "url": f"postgresql://memd@127.0.0.1:{to_database.port}/memd?sslmode=disable",
            "bucket": self._bucket.bucket,
            "endpoint": to_bucket.url,
            "region": "us-east-1",
            "access_key": "any",
            "secret_key": "any",
            "own_url": door.url,
            "lease_seconds": self.lease_seconds,
        }
        daemon = DaemonProcess(folder, self.upstream.url, SETTINGS | {"store": store})
        return Member(number, daemon, to_database, to_bucket, door)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, shifts: Mapping[int, float] | None = None) -> None:
        """Start all daemons that do not run. `shifts`: seconds by which the clock of one is ahead."""
        for member in self.members:
            if not member.is_running:
                if shifts and member.number in shifts:
                    at_time(member.daemon, days_ago=-shifts[member.number] / DAY_SECONDS)
                member.start()

    def close(self) -> None:
        """End the daemons, however."""
        self.end_writers()
        for member in self.members:
            if member.is_running:
                member.daemon.send_signal(signal.SIGCONT)
            member.daemon.discard()

    def doors(self) -> list[Door]:
        """The daemons as clients see them."""
        return [
            Door(member.number, member.daemon.base_url, member.daemon.own_url, member.is_well)
            for member in self.members
            if member.daemon.base_url
        ]

    def write(self, topics: int, writers: int, *, think_seconds: float = 0.15, corrects: bool = True) -> None:
        """Let agents begin to talk, who share the topics."""
        begun = len(self.ledger.facts)
        self.writers = [
            Writer(
                f"w{begun}x{number}",
                f"topic-{number % topics}",
                self.ledger,
                self.doors,
                think_seconds=think_seconds,
                corrects=corrects,
            )
            for number in range(writers)
        ]
        for writer in self.writers:
            writer.start()

    def end_writers(self) -> None:
        """Wait for the agents' last answers."""
        for writer in self.writers:
            writer.end()
        for writer in self.writers:
            writer.join()
        self.writers = []

    # -- what is so -----------------------------------------------------------------------------------------------

    @property
    def topics(self) -> set[str]:
        """Those that somebody talks about."""
        return {writer._topic for writer in self.writers}

    def owners(self) -> dict[str, int]:
        """Topic → the daemon that has it, by the database."""
        doors = {member.door.url: member.number for member in self.members}
        with psycopg.connect(self._database_url) as connection:
            rows = connection.execute("SELECT topic, url FROM memd_topic WHERE url IS NOT NULL").fetchall()
        return {topic: doors[url] for topic, url in rows if url in doors}

    def owner(self) -> Member:
        """The daemon that has most of the topics which somebody talks about."""

        def busiest() -> list[int]:
            had = [number for topic, number in self.owners().items() if topic in self.topics]
            return sorted(set(had), key=had.count)

        wait_until(lambda: bool(busiest()), lambda: f"somebody has a topic: {self!r}")
        return self.members[busiest()[-1]]

    def wait_kept(self, after: float, topics: set[str], by: set[int], seconds: float = 90.0) -> dict[str, float]:
        """Wait until something about each topic is acknowledged by one of these daemons; topic → seconds it took."""

        def taken() -> dict[str, float]:
            first = {topic: self.ledger.first_kept(topic, after, by=by) for topic in topics}
            return {topic: when - after for topic, when in first.items() if when is not None}

        wait_until(
            lambda: taken().keys() == topics,
            lambda: f"nobody of {by} serves {topics - taken().keys()}: {self!r}",
            seconds,
        )
        return taken()

    def taken_over(self, after: float, topics: set[str], by: set[int]) -> dict[str, float]:
        """Wait until each topic is served by one of these daemons; topic → seconds it took.

        Those who ask are at one of them: an agent may be waiting for the very daemon that says nothing.
        """
        begun, doors = len(self.ledger.facts), [door for door in self.doors() if door.number in by]
        asking = [
            Writer(f"p{begun}x{number}", topic, self.ledger, lambda: doors, think_seconds=0.02, corrects=False)
            for number, topic in enumerate(sorted(topics))
        ]
        for one in asking:
            one.start()
        try:
            return self.wait_kept(after, topics, by)
        finally:
            for one in asking:
                one.end()
            for one in asking:
                one.join()

    def wait_whole(self, seconds: float = 90.0) -> float:
        """Wait until each daemon acknowledges something about each topic; the seconds."""
        began = time.monotonic()
        for member in self.members:
            self.wait_kept(began, self.topics, {member.number}, seconds)
        return time.monotonic() - began

    def verdict(self) -> Verdict:
        """Judge, once everything that was acknowledged is in the log, or too much time has passed."""
        last: list[Verdict] = []

        def is_settled() -> bool:
            last.append(self.judge())
            return not last[-1].missing or bool(last[-1].wrong)

        try:
            wait_until(is_settled, lambda: "acknowledged and not in the log", SETTLED_SECONDS_MAX)
        except AssertionError:
            pass
        return last[-1]

    def judge(self) -> Verdict:
        """Compare the database and the bucket with what was promised."""
        with self._shelf() as (shelf, folder):
            return judged(lambda to: read_topics(shelf, to), self.ledger, folder / "read")

    def judge_claimed(self) -> Verdict:
        """The same for what somebody gets who knows nothing and claims each topic; no daemon has any."""
        with self._shelf() as (shelf, folder):
            return judged(lambda _: claimed_topics(shelf, folder), self.ledger, folder)

    @contextmanager
    def _shelf(self) -> Iterator[tuple[PostgresShelf, Path]]:
        """The shelf of somebody who is no daemon, and its empty folder."""
        self._judgements += 1
        folder = self.folder / f"judge{self._judgements}"
        folder.mkdir()
        database = Database(self._database_url)
        try:
            bucket = Bucket.of(self._bucket, {})
            yield PostgresShelf(database, bucket, DiskFiles(), folder, url="http://judge", lease_seconds=60), folder
        finally:
            database.close()
            shutil.rmtree(folder)

    def __repr__(self) -> str:
        said = "\n".join(f"--- daemon {one.number} (door {one.door.url}): {one.daemon!r}" for one in self.members)
        return f"{dict(self.ledger.counts)}\nowners {self.owners()}\n{self.ledger.refused[-10:]}\n{said}"


@contextmanager
def running_house(folder: Path, *, daemons: int = 2, lease_seconds: float = 2.0) -> Iterator[House]:
    """A cluster whose daemons do not run yet."""
    with ExitStack() as stack:
        postgres = stack.enter_context(running_postgres())
        s3 = stack.enter_context(s3_server())
        upstream = stack.enter_context(recording_upstream())
        lines = Lines()
        stack.callback(lines.close)
        house = House(folder, postgres, s3, upstream, lines, daemons=daemons, lease_seconds=lease_seconds)
        stack.callback(house.close)
        yield house
