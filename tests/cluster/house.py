"""A whole cluster on one machine: PostgreSQL, a model server that costs nothing, and daemons, each a process.

Rule: between each daemon and PostgreSQL lies a relay, which can be frozen or cut; clients reach the daemons directly.
Everything ends with the block, and nothing of it stays.
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import writers
from clocks import at_time
from cut_connections import Relay
from daemon_process import DaemonProcess, wait_until
from judge import Prefixes, Verdict, judged, prefixes, read_topics
from ledger import Ledger
from postgres_server import PostgresServer, running_postgres
from recording_upstream import RecordingUpstream, recording_upstream
from writers import NEVER, Door, Writer

from memd.store.shared.postgres import SharedLog

SETTLED_PATIENCES = 5
"""For so many times a client's patience the judge waits for what is acknowledged."""
DATABASE = "memd"
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
    """A daemon of the cluster, with the relay that leads from it to PostgreSQL."""

    def __init__(self, number: int, daemon: DaemonProcess, to_database: Relay) -> None:
        self.number = number
        self.daemon = daemon
        self.to_database = to_database
        self.well_since = NEVER
        """Since when nothing is done to the process (`time.monotonic`)."""

    @property
    def is_well(self) -> bool:
        return self.well_since < NEVER

    @property
    def is_running(self) -> bool:
        return not self.daemon.has_ended

    def start(self) -> None:
        self.daemon.start()
        self.well_since = time.monotonic()

    def kill(self) -> None:
        self.well_since = NEVER
        self.daemon.kill()

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.well_since = NEVER
        return self.daemon.terminate()

    def stop(self) -> None:
        """SIGSTOP."""
        self.well_since = NEVER
        self.daemon.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.daemon.send_signal(signal.SIGCONT)
        self.well_since = time.monotonic()


class House:
    """All processes. Use `running_house`."""

    def __init__(
        self, folder: Path, servers: ExitStack, upstream: RecordingUpstream, *, daemons: int, seed: int
    ) -> None:
        self.folder = folder
        self._servers = servers
        self.postgres = postgres = servers.enter_context(running_postgres())
        self._standby: PostgresServer | None = None
        self.upstream = upstream
        self.ledger = Ledger()
        self._chance = random.Random(seed)
        postgres.database(DATABASE)
        self.members = [self._member(number) for number in range(daemons)]
        self.writers: list[Writer] = []
        self._judgements = 0

    def _member(self, number: int) -> Member:
        folder = self.folder / f"daemon{number}"
        folder.mkdir()
        relay = self._servers.enter_context(closing(Relay(self.postgres.socket)))
        database = self.postgres.url(DATABASE, folder=str(relay.folder))
        daemon = DaemonProcess(folder, self.upstream.url, {**SETTINGS, "cluster": {"database": database}})
        return Member(number, daemon, relay)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, shifts: Mapping[int, float] | None = None) -> None:
        """Start all daemons that do not run. `shifts`: seconds by which the clock of one is ahead."""
        for member in self.members:
            if not member.is_running:
                if shifts and member.number in shifts:
                    at_time(member.daemon, days_ago=-shifts[member.number] / DAY_SECONDS)
                member.start()

    def add_standby(self) -> None:
        """Let each commit wait for a new standby."""
        self._standby = self._servers.enter_context(running_postgres(of=self.postgres))
        self._commits_wait_for("*")
        waiting = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        with psycopg.connect(self.postgres.url(), autocommit=True) as connection:
            wait_until(lambda: connection.execute(waiting).fetchone() == (1,), lambda: "no synchronous standby", 30)

    def fail_over(self) -> None:
        """Kill the primary; the standby takes its place, with no standby of its own."""
        assert self._standby is not None, "there is one"
        self.postgres.kill()
        self.postgres, self._standby = self._standby, None
        with psycopg.connect(self.postgres.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")
        self._commits_wait_for("")
        for member in self.members:
            member.to_database.target = self.postgres.socket

    def _commits_wait_for(self, names: str) -> None:
        with psycopg.connect(self.postgres.url(), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
            connection.execute("SELECT pg_reload_conf()")

    def open_all(self) -> None:
        """Let everything through again."""
        for member in self.members:
            member.to_database.open()

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
            Door(member.number, member.daemon.base_url, member.daemon.own_url, member.well_since)
            for member in self.members
            if member.daemon.base_url
        ]

    def write(self, topics: int, agents: int) -> None:
        """Let agents begin to talk, who share the topics."""
        begun = len(self.ledger.facts)
        self.writers = [
            Writer(f"w{begun}x{number}", f"topic-{number % topics}", self.ledger, self.doors)
            for number in range(agents)
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

    def one(self) -> Member:
        """Any daemon."""
        return self._chance.choice(self.members)

    def wait_kept(self, after: float, topics: set[str], by: set[int], patiences: float = 8.0) -> dict[str, float]:
        """Wait until something about each topic is acknowledged by one of these daemons; topic → seconds it took."""

        def taken() -> dict[str, float]:
            first = {topic: self.ledger.first_kept(topic, after, by=by) for topic in topics}
            return {topic: when - after for topic, when in first.items() if when is not None}

        wait_until(
            lambda: taken().keys() == topics,
            lambda: f"nobody of {by} serves {topics - taken().keys()}: {self!r}",
            patiences * writers.PATIENCE_SECONDS,
        )
        return taken()

    def wait_whole(self, patiences: float = 8.0) -> float:
        """Wait until each daemon acknowledges something about each topic; the seconds."""
        began = time.monotonic()
        for member in self.members:
            self.wait_kept(began, self.topics, {member.number}, patiences)
        return time.monotonic() - began

    def verdict(self) -> Verdict:
        """Judge, once everything that was acknowledged is in the log, or too much time has passed."""
        last: list[Verdict] = []

        def is_settled() -> bool:
            last.append(self.judge())
            return not last[-1].missing

        try:
            wait_until(
                is_settled, lambda: "acknowledged and not in the log", SETTLED_PATIENCES * writers.PATIENCE_SECONDS
            )
        except AssertionError:
            pass
        return last[-1]

    def judge(self) -> Verdict:
        """Compare what the database has with what was promised."""
        self._judgements += 1
        folder = self.folder / f"judge{self._judgements}"
        folder.mkdir()
        with closing(SharedLog(self.postgres.url(DATABASE), wait_seconds=30)) as kept:
            try:
                return judged(lambda to: read_topics(kept, to), self.ledger, folder)
            finally:
                shutil.rmtree(folder)

    def prefixes(self) -> Prefixes:
        """Compare the prompts that the model was sent."""
        return prefixes((json.loads(one.body)["messages"] for one in self.upstream.chats), self.ledger)

    def __repr__(self) -> str:
        said = "\n".join(f"--- daemon {one.number}: {one.daemon!r}" for one in self.members)
        return f"{dict(self.ledger.counts)}\n{self.ledger.refused[-10:]}\n{said}"


@contextmanager
def running_house(folder: Path, *, daemons: int = 2, seed: int = 1) -> Iterator[House]:
    """A cluster whose daemons do not run yet."""
    with ExitStack() as stack:
        upstream = stack.enter_context(recording_upstream())
        house = House(folder, stack, upstream, daemons=daemons, seed=seed)
        stack.callback(house.close)
        yield house
