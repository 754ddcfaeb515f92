"""The database of a cluster: its connections, its schema, and what its errors mean.

Rule: whoever sees a newer schema than his own touches nothing. After a lost connection nobody knows whether the last
statement was carried out, so `again` does work once more, and that work must be such that it can be done twice. A
database that is away is connected to when it is asked for the next time.

    memd_version   the version of the schema, the name of the cluster, and its key if it is encrypted (sealing.py)
    memd_topic     one row a topic: who has it and until when, and where its streams end; `revision` is another one, of
                   all that there ever were, after anything but an append, `log_revision` that of the log's last `roll`;
                   `forgotten` is the id of the last erasure of all of it, `id_floor` is above ids that were given out
    memd_log       one row a group: the bytes of the streams, as far as no object has them
    memd_object    the manifest: the only thing by which an object of the bucket counts. A file is an object from `at`
                   on, and what is last in both streams of a topic that was let go is in one
    memd_garbage   every other object that may be in the bucket, until it has been removed
    memd_book      what all daemons know: tokens, grants, erasures, one row each, in JSON
    memd_count     how often each of these books was changed
    memd_daemon    the daemons, as each tells of itself
    memd_seat      the caches that daemons have, and which ids are whose to give out
"""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeVar

from memd.errors import DiskFull, InDoubt, StoreError, StoreWriteFailed
from memd.store.cluster.refusals import NOT_PRIMARY, TO_PRIMARY, remedy_of, words_of

SCHEMA_VERSION = 1
_MIGRATIONS = (
    """
    CREATE TABLE memd_version (version int NOT NULL, cluster text NOT NULL, key text);
    INSERT INTO memd_version VALUES (0, gen_random_uuid()::text, NULL);
    CREATE SEQUENCE memd_revision;
    CREATE TABLE memd_topic (
        topic text COLLATE "C" PRIMARY KEY,
        epoch bigint NOT NULL,
        revision bigint NOT NULL DEFAULT nextval('memd_revision'),
        log_revision bigint NOT NULL DEFAULT 0,
        url text,
        lease_until timestamptz NOT NULL,
        retained bigint NOT NULL DEFAULT 0,
        owner text NOT NULL,
        since bigint NOT NULL,
        forgotten bigint NOT NULL DEFAULT 0,
        id_floor bigint NOT NULL DEFAULT 0,
        key text NOT NULL DEFAULT '',
        log_number int NOT NULL DEFAULT 1,
        log_end bigint NOT NULL DEFAULT 0,
        hot_number int NOT NULL DEFAULT 0,
        hot_end bigint NOT NULL DEFAULT 0
    );
    CREATE UNIQUE INDEX memd_topic_folded ON memd_topic (lower(topic));
    CREATE INDEX memd_topic_left ON memd_topic (lease_until) WHERE url IS NOT NULL OR lease_until = '-infinity';
    CREATE TABLE memd_log (
        topic text COLLATE "C" NOT NULL,
        stream text NOT NULL,
        number int NOT NULL,
        start bigint NOT NULL,
        epoch bigint NOT NULL,
        data bytea NOT NULL,
        PRIMARY KEY (topic, stream, number, start)
    ) PARTITION BY HASH (topic);
    ALTER TABLE memd_log ALTER COLUMN data SET STORAGE EXTERNAL;
    DO $$ BEGIN
        FOR part IN 0..15 LOOP
            EXECUTE format(
                'CREATE TABLE memd_log_%s PARTITION OF memd_log FOR VALUES WITH (MODULUS 16, REMAINDER %s)', part, part
            );
        END LOOP;
    END $$;
    CREATE TABLE memd_object (
        topic text COLLATE "C" NOT NULL,
        name text NOT NULL,
        key text NOT NULL,
        crc bigint NOT NULL,
        bytes bigint NOT NULL,
        at bigint NOT NULL,
        PRIMARY KEY (topic, name)
    );
    CREATE TABLE memd_garbage (
        topic text COLLATE "C" NOT NULL,
        key text NOT NULL,
        epoch bigint NOT NULL,
        PRIMARY KEY (topic, key)
    );
    CREATE TABLE memd_book (
        book text NOT NULL,
        name text COLLATE "C" NOT NULL,
        data text NOT NULL,
        changed bigint NOT NULL,
        PRIMARY KEY (book, name)
    );
    CREATE INDEX ON memd_book (book, changed);
    CREATE TABLE memd_daemon (
        url text COLLATE "C" PRIMARY KEY,
        boot text NOT NULL,
        version text NOT NULL,
        marks text NOT NULL,
        seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE TABLE memd_seat (
        seat text PRIMARY KEY,
        turn int NOT NULL,
        at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE TABLE memd_count (book text PRIMARY KEY, changes bigint NOT NULL);
    INSERT INTO memd_count VALUES ('tokens', 0), ('grants', 0), ('erasures', 0), ('retention', 0), ('daemons', 0);
    """,
)
"""The n-th leads from version n to the next. One that was released is never changed."""
_CUT_OFF = ("08", "57P")
"""SQLSTATEs of a connection that ended, and of a server that stops: they do not say how far it came."""
_GAVE_WAY = ("40001", "40P01")
"""SQLSTATEs of work of which nothing was done because of somebody else's at the same moment."""
_SCHEMA_LOCK = 0x6D656D64
_TRIES = 3
_INSTALL = "a store that several daemons share needs more packages: pip install 'memd-proxy[cluster]'"
CONNECT_SECONDS = 5.0
_AWAY_SECONDS = 0.1
"""Instead of that, after nobody has answered and until somebody does: a daemon with many topics has to end, too."""
_URGENT_AWAY_SECONDS = 0.5
"""The same for who renews: a daemon that stood still takes its own silence for the server's."""
_WORK_SECONDS = 12.0
"""The longest that work waits for a server that is there and says nothing."""
Result = TypeVar("Result")
Connection: TypeAlias = Any
"""psycopg.Connection, which is imported when somebody wants one."""


class Database:
    """Connections to the database. For any thread."""

    def __init__(self, url: str, *, connections_max: int = 8, connect_seconds: float = CONNECT_SECONDS) -> None:
        """Nothing is asked of it yet.

        Args:
            connect_seconds: how long a write waits for a connection.
            statement_seconds: and then for the answer.

        Raises:
            StoreError: the packages are missing, or the URL cannot be read.
        """
        try:
            import psycopg
            import psycopg_pool
        except ImportError:
            raise StoreError(_INSTALL) from None
        try:
            told = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:  # it quotes a part of the URL, which may be the password
            raise StoreError(_unusable("the URL cannot be read")) from None
        if "@" in str(told.get("host") or ""):  # that would be told as the host's name
            raise StoreError(_unusable("an @ in the user name or password has to be written as %40"))
        self.place = f"PostgreSQL at {told.get('host') or 'a socket'}, {told.get('dbname') or 'the default database'}"
        self._url = url
        self._cluster = ""
        # Nothing that a pooler between memd and the server (PgBouncer) does not pass on: neither options nor prepared
        # statements. So the limit of time is kept here, where it holds for a network that says nothing, too.
        self._settings = {
            "connect_timeout": max(2, round(connect_seconds)),
            "prepare_threshold": None,
            "autocommit": True,
        }
        self._kind = _impatient()
        self._connect_seconds = connect_seconds
        self.is_away = False
        """Whether nobody has answered the last time, so that it may pass."""
        self.at_first: Callable[[Connection], None] = lambda connection: None
        """Called with the first connection, before anybody else has one; its errors are those of `connect`."""
        self._is_closed = False
        self._ordinary = threading.BoundedSemaphore(connections_max)
        self._connecting = threading.Lock()
        self._pool = psycopg_pool.ConnectionPool(
            url,
            min_size=1,
            max_size=connections_max + 1,  # one is kept for what is urgent
            reconnect_timeout=_AWAY_SECONDS,  # then who writes next tries anew, and not the pool after minutes
            connection_class=self._kind,
            kwargs=self._settings,
            open=False,
        )

    @property
    def cluster(self) -> str:
        """Tells this database from all others; connects. Raises as `connect`."""
        self.connect()
        return self._cluster

    def connect(self) -> None:
        """Connect and bring the schema up to date, unless that was done.

        Raises:
            StoreError: the database cannot be reached, refuses memd, or has the schema of a newer memd.
        """
        if self._cluster:
            return
        if not self._connecting.acquire(blocking=not self.is_away):
            raise StoreError(_unusable(f"{self.place} does not answer", "check that it runs"))
        try:
            self._cluster = self._cluster or self._connected()
        finally:
            self._connecting.release()

    def _connected(self) -> str:
        import psycopg

        try:
            with self._kind.connect(self._url, **self._settings) as connection, connection.transaction():
                connection.until = time.monotonic() + _WORK_SECONDS
                cluster = _migrate(connection, self.place)
                self.at_first(connection)
        except psycopg.Error as error:
            remedy, is_lasting = remedy_of(error)
            self.is_away = not is_lasting
            raise StoreError(_unusable(words_of(error), remedy)) from error
        self.is_away = False
        if not self._is_closed:
            self._pool.open()
        return cluster

    @contextmanager
    def connection(self, seconds: float = _WORK_SECONDS, away_seconds: float = _AWAY_SECONDS) -> Iterator[Connection]:
        """A connection on which each statement outside of a transaction is one of its own; for so long at most."""
        self.connect()
        wait_seconds = away_seconds if self.is_away else min(seconds, self._connect_seconds)
        until = time.monotonic() + wait_seconds
        while True:
            with self._pool.connection(until - time.monotonic()) as connection:
                if not _has_ended(connection):
                    self.is_away = False
                    connection.until = time.monotonic() + seconds
                    yield connection
                    return
                self._pool.drain()  # its own check would pause for seconds after each; what ended one ended others

    def again(self, work: Callable[[Connection], Result], *, urgent_seconds: float = 0.0) -> Result:
        """Do work that writes, and once more where the connection was lost meanwhile.

        Args:
            urgent_seconds: it takes no longer, and there is a connection for it at once; 0: that is not so.

        Raises:
            InDoubt: whether it was done is not known.
            StoreWriteFailed: it was not (DiskFull if the disk of the database is full).
        """
        with ExitStack() as turn:
            if not urgent_seconds:
                if not self._ordinary.acquire(timeout=self._connect_seconds):
                    raise StoreWriteFailed(f"{self.place}: has no connection left; what could not be stored is kept")
                turn.callback(self._ordinary.release)
            away_seconds = min(urgent_seconds, _URGENT_AWAY_SECONDS) or _AWAY_SECONDS
            return self._again(work, time.monotonic() + (urgent_seconds or _WORK_SECONDS), away_seconds)

    def _again(self, work: Callable[[Connection], Result], until: float, away_seconds: float) -> Result:
        import psycopg
        import psycopg_pool

        was_lost = False
        for _ in range(_TRIES):
            try:
                with self.connection(until - time.monotonic(), away_seconds) as connection:
                    return work(connection)
            except (psycopg_pool.PoolTimeout, psycopg_pool.PoolClosed) as error:
                problem: Exception = error
                self.is_away = True
                break
            except psycopg.Error as error:
                problem = error
                if error.sqlstate in NOT_PRIMARY:
                    self._pool.drain()  # a new connection may lead to another server, which has taken over
                elif error.sqlstate is not None and not error.sqlstate.startswith((*_CUT_OFF, *_GAVE_WAY)):
                    break  # it was refused, and nothing of it was done
                elif time.monotonic() > until:
                    was_lost = self.is_away = True
                    self._pool.drain()  # who asks next does not wait for the same again
                    break
                elif error.sqlstate not in _GAVE_WAY:
                    was_lost = True
        raise self._failure(problem, was_lost=was_lost) from problem

    def _failure(self, problem: Exception, *, was_lost: bool) -> StoreWriteFailed:
        import psycopg

        told = f"{self.place}: {words_of(problem)}"
        if was_lost:
            return InDoubt(f"{told}; whether the last write is stored is looked at when the topic is opened again")
        if isinstance(problem, psycopg.errors.DiskFull):
            return DiskFull(f"{told}; free some space there, it is tried again")
        is_standby = getattr(problem, "sqlstate", None) in NOT_PRIMARY
        remedy = TO_PRIMARY if is_standby else "check the database"
        return StoreWriteFailed(f"{told}; {remedy}, what could not be stored is kept")

    def ask(self, work: Callable[[Connection], Result]) -> Result:
        """Do work that only reads. Raises StoreError where the database cannot be asked."""
        try:
            return self.again(work)
        except InDoubt as error:
            raise StoreError(f"{self.place}: cannot be asked; check that it runs") from error

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        self._pool.close()


def _impatient() -> Any:
    """Return the kind of connection that waits for answers no longer than `until`, and is closed then: there is no
    other way out of a network that says nothing, or of a server that was stopped."""
    import psycopg

    def bounded(work: Any, until: float) -> Generator[Any, Any, Any]:
        ready = None
        while True:
            try:
                wanted = work.send(ready)
            except StopIteration as ended:
                return ended.value
            ready = yield wanted
            if not ready and time.monotonic() > until:
                raise psycopg.OperationalError("it does not answer")

    class Impatient(psycopg.Connection[Any]):  # type: ignore[misc]  # the package need not be there
        until = math.inf

        def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
            """See psycopg: runs what waits for the server's answer."""
            try:
                return super().wait(bounded(gen, self.until), *arguments, **named)
            except psycopg.OperationalError:
                if time.monotonic() > self.until:
                    self.pgconn.finish()
                raise

    return Impatient


def _has_ended(connection: Connection) -> bool:
    """Whether the server has ended a connection that nobody used, without asking it, which would cost a write as much
    again: it says nothing by itself but good-bye."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        return bool(selector.select(0))


def _migrate(connection: Connection, place: str) -> str:
    """Bring the schema up to date, in one transaction; return the name of the cluster."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
    is_new = connection.execute("SELECT to_regclass('memd_version') IS NULL").fetchone()[0]
    found = 0 if is_new else connection.execute("SELECT version FROM memd_version").fetchone()[0]
    if found > SCHEMA_VERSION:
        raise StoreError(
            f"{place}: has schema {found}, and this memd knows schemas up to {SCHEMA_VERSION}: a newer memd has been "
            "here; update this one, nothing was changed"
        )
    for migration in _MIGRATIONS[found:]:
        connection.execute(migration)
    if found < SCHEMA_VERSION:
        connection.execute("UPDATE memd_version SET version = %s", (SCHEMA_VERSION,))
    return str(connection.execute("SELECT cluster FROM memd_version").fetchone()[0])


def _unusable(problem: str, remedy: str = "check store.url") -> str:
    return f"PostgreSQL cannot be used ({problem}): {remedy}"
