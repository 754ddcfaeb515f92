"""Can the database of the cluster be reached, and does it keep what memd counts on?

Rule: the database is only read, by a connection of its own that makes no table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import msgspec

from memd.cli.check.result import CheckResult, failed, failed_with, ok, warning
from memd.errors import MemdError, StoreError
from memd.settings.model import Config
from memd.store.shared.postgres import SCHEMA_VERSION, PostgresLog, remedy_of, words_of

DATABASE = "database"
OLDEST = 14
"""The first version of PostgreSQL that memd is tested with."""
CLOCKS_SECONDS = 2.0
ROUND_TRIP_MS = 5.0
"""Above this a chat waits longer for the database than for memory."""
_SETTINGS = (
    "SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),"
    " current_setting('transaction_read_only') = 'on', current_setting('fsync') = 'on',"
    " current_setting('full_page_writes') = 'on', current_setting('synchronous_commit'),"
    " current_setting('synchronous_standby_names'), extract(epoch FROM clock_timestamp())::float8,"
    " has_schema_privilege(current_schema(), 'CREATE'), current_setting('server_encoding')"
)
_STANDBYS = (
    "SELECT count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')), count(*) FILTER (WHERE state IS NULL)"
    " FROM pg_stat_replication"
)


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The database server, as it tells of itself."""

    number: int
    version: str
    is_standby: bool
    is_read_only: bool
    has_fsync: bool
    has_full_pages: bool
    synchronous_commit: str
    standby_names: str
    clock_ahead: float
    """Seconds by which its clock is ahead of this machine's."""
    may_create: bool
    schema: int | None
    """Of memd's tables; None: there are none yet."""
    standbys: int | None
    """Synchronous ones that are connected; None: this user may not see."""
    encoding: str
    round_trip_ms: float
    is_pooled: bool
    """Whether somebody stands between, as PgBouncer: the server does not have the connection that this process has."""


def cluster(config: Config) -> Iterator[CheckResult]:
    """Check the cluster of the settings, if they name one."""
    if config.cluster.is_on:
        try:
            yield from told_of(_server(config))
        except MemdError as error:
            yield failed_with(DATABASE, error)


def _server(config: Config) -> Server:
    """Ask the server, as no daemon does: without making its tables."""
    with closing(PostgresLog(config.cluster.database)) as kept:  # the packages are there, and the URL can be read
        place = kept.place
    import psycopg

    try:
        with psycopg.connect(config.cluster.database, connect_timeout=5, prepare_threshold=None) as connection:
            connection.execute("SET LOCAL statement_timeout = 5000")  # a pooler may give the connection to others
            began = time.time()
            row = connection.execute(_SETTINGS).fetchone()
            middle = (began + time.time()) / 2
            is_there = connection.execute("SELECT to_regclass('memd_shared') IS NOT NULL").fetchone() == (True,)
            found = connection.execute("SELECT version FROM memd_shared").fetchone() if is_there else None
            standbys = connection.execute(_STANDBYS).fetchone()
            asked = time.perf_counter()
            is_pooled = connection.execute("SELECT pg_backend_pid()").fetchone() != (connection.info.backend_pid,)
            round_trip_ms = (time.perf_counter() - asked) * 1e3
    except psycopg.Error as error:
        raise StoreError(f"{place}: {words_of(error)}; {remedy_of(error)}") from None
    assert row is not None, "one row"
    return Server(
        number=row[0] // 10_000,
        version=str(row[1]).split()[0],
        is_standby=row[2],
        is_read_only=row[3],
        has_fsync=row[4],
        has_full_pages=row[5],
        synchronous_commit=row[6],
        standby_names=row[7],
        clock_ahead=row[8] - middle,
        may_create=row[9],
        encoding=row[10],
        schema=None if found is None else found[0],
        standbys=None if standbys is None or standbys[1] else standbys[0],
        round_trip_ms=round_trip_ms,
        is_pooled=is_pooled,
    )


def told_of(server: Server) -> Iterator[CheckResult]:
    """Say what is good and bad about the server."""
    said = f"PostgreSQL {server.version}"
    if server.number < OLDEST:
        yield failed(DATABASE, said, f"memd needs PostgreSQL {OLDEST} or later")
    if server.is_standby or server.is_read_only:
        yield failed(
            DATABASE,
            f"{said} is {'a standby' if server.is_standby else 'read-only'}, and nothing can be written there",
            "name the primary in cluster.database; with several hosts add ?target_session_attrs=read-write",
        )
    if server.schema is None and not server.may_create:
        yield failed(
            DATABASE, "has no tables of memd's, and this user may not make any", "grant it CREATE on its schema"
        )
    elif server.schema not in (None, SCHEMA_VERSION):
        told = f"has schema {server.schema}, and this memd knows schema {SCHEMA_VERSION}"
        yield failed(DATABASE, told, "run the same version of memd everywhere")
    else:
        schema = "has no tables yet, memd serve makes them" if server.schema is None else f"schema {server.schema}"
        pooled = ", through a pooler of connections" if server.is_pooled else ""
        yield ok(DATABASE, f"{said}, {schema}, answers in {server.round_trip_ms:.1f} ms{pooled}")
    if server.encoding != "UTF8":
        yield warning(DATABASE, f"its encoding is {server.encoding}", "make it with ENCODING 'UTF8': names are text")
    if server.round_trip_ms > ROUND_TRIP_MS:
        told = f"answers in {server.round_trip_ms:.0f} ms, and every chat waits for one answer"
        yield warning(DATABASE, told, "run memd near the database, in the same zone")
    yield from _durable(server)
    if abs(server.clock_ahead) > CLOCKS_SECONDS:
        side = "ahead of" if server.clock_ahead > 0 else "behind"
        yield warning(
            DATABASE,
            f"its clock is {abs(server.clock_ahead):.1f} s {side} this machine's",
            "let both follow NTP; nothing is lost by it, but times that are shown depend on who stored",
        )


def _durable(server: Server) -> Iterator[CheckResult]:
    """Whether a commit survives what it has to."""
    if not (server.has_fsync and server.has_full_pages):
        off = "fsync" if not server.has_fsync else "full_page_writes"
        yield failed(
            DATABASE, f"{off} is off: a power cut may destroy the database", f"set {off} = on, and restart PostgreSQL"
        )
    if server.synchronous_commit == "off":
        yield failed(
            DATABASE,
            "synchronous_commit is off: a crash of the server loses what was acknowledged",
            "set synchronous_commit = on for this user or database",
        )
    elif not server.standby_names:
        yield warning(
            DATABASE,
            "has no synchronous standby: a failover may lose what was acknowledged",
            "set synchronous_standby_names; where a managed service copies the disk instead, this is no loss",
        )
    elif server.synchronous_commit == "local":
        yield warning(
            DATABASE,
            "synchronous_commit is local, so no commit waits for a standby: a failover may lose what was acknowledged",
            "set synchronous_commit = on for this user or database",
        )
    elif server.standbys == 0:
        yield warning(
            DATABASE,
            f"no synchronous standby of {server.standby_names!r} is connected: each write waits for one",
            "start a standby; until then requests are answered with degraded:store",
        )
    else:
        yield ok(DATABASE, f"commits wait for a synchronous standby ({server.standby_names})")
