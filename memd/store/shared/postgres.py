"""The log shared by several daemons: rows in PostgreSQL, read and appended; its tables, statements, connections and
errors; and which folders may join.

Rule: a stream grows only at its end: `append` names the head that it follows, and does nothing if another row was
appended meanwhile. So it may be repeated after a lost answer: `since` shows whether the row is stored. The highest
canonical_id wins, so a log needs no owner. Only this folder uses SQL, and it interprets no rows but the bytes of a log
file. No call may be made on an event loop.

    stream  a row is
    log     a group of entries, as a log file of its own; numbered by the highest canonical_id in it
    hot     events of the hot buffer, numbered 1, 2, …; a base is the whole buffer, and replaces the rows before it
    kept    a small file beside the log that is replaced as a whole; a base each

Each call is one atomic statement, so a daemon that dies leaves nothing half done. Nothing waits for an unreachable
database: after the first call that fails so, all others fail at once, also those under way, until the watch, which asks
it all the time, gets an answer.

    memd_shared  the version of the schema, the name of the cluster, and which master key seals its rows
    memd_topic   a row for each stream of a topic: its end (`head`), its latest base, and the generation
    memd_log     the rows of the streams: `last` is the highest id in one

Rows leave a daemon sealed if its data directory is encrypted. All daemons of a cluster have the same master key, or
none; its first daemon decides. The database then reveals only names, numbers and lengths, and sealed data is bound to
its place and cannot be moved to another one:

    | nonce | ciphertext      | tag |      AES-256-GCM; bound to topic, stream and number
    | 12    | length          | 16  |
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from memd.errors import BadTopicId, CorruptFile, DiskFull, InDoubt, MemdError, StoreError, StoreWriteFailed, WrongKey
from memd.settings.model import Config
from memd.store.disk import LocalDisk, replace_file
from memd.store.encryption.disk import master_key
from memd.store.layout import BOOK_NAMES, CLUSTER_NAME, topic_ids_in
from memd.wording import pip_install

if TYPE_CHECKING:
    from memd.store.encryption.frames import MasterKey

log = logging.getLogger("memd")
Result = TypeVar("Result")
Connection: TypeAlias = Any
"""psycopg.Connection, imported at first use."""
Stream = Literal["log", "hot", "kept"]
STREAMS: tuple[Stream, ...] = ("hot", "kept", "log")
Place: TypeAlias = tuple[str, Stream, int]
"""Of a row: topic, stream, number."""
PAGE_ROWS = 256
"""Rows of one stream in one answer: 10 MB for a log with 20 chunks in each group."""
_PAGE_TOPICS = 10_000

AS_TEXT = {"client_encoding": "UTF8"}
"""For all connections: a database in SQL_ASCII, from a server in the C locale, would return text as bytes."""
SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE memd_shared (version int NOT NULL, cluster text NOT NULL, key text NOT NULL);
CREATE TABLE memd_topic (
    topic text COLLATE "C" NOT NULL, stream text COLLATE "C" NOT NULL,
    head bigint NOT NULL DEFAULT 0, base bigint NOT NULL DEFAULT 0, generation bigint NOT NULL DEFAULT 1,
    PRIMARY KEY (topic, stream)
);
CREATE UNIQUE INDEX memd_topic_folded ON memd_topic (lower(topic), stream);
CREATE TABLE memd_log (
    topic text COLLATE "C" NOT NULL, stream text COLLATE "C" NOT NULL, last bigint NOT NULL, data bytea NOT NULL,
    PRIMARY KEY (topic, stream, last)
);
ALTER TABLE memd_log ALTER COLUMN data SET STORAGE EXTERNAL;
"""
_ENDS = "SELECT topic, stream, head, generation FROM memd_topic WHERE topic = ANY(%s::text[])"
_SINCE = """
SELECT t.stream, t.head, t.base, t.generation, l.last, l.data
FROM memd_topic t JOIN unnest(%(streams)s::text[], %(after)s::bigint[]) w (stream, after) USING (stream)
LEFT JOIN LATERAL (
    SELECT last, data FROM memd_log l WHERE l.topic = t.topic AND l.stream = t.stream AND l.last > w.after
    ORDER BY last LIMIT %(limit)s
) l ON true
WHERE t.topic = %(topic)s ORDER BY t.stream, l.last
"""
_APPEND = """
WITH t AS (
    UPDATE memd_topic SET head = %(last)s, base = CASE WHEN %(base)s::bool THEN %(last)s ELSE base END
    WHERE topic = %(topic)s AND stream = %(stream)s AND head = %(after)s AND generation = %(generation)s RETURNING head
), gone AS (
    DELETE FROM memd_log USING t WHERE %(base)s::bool AND topic = %(topic)s AND stream = %(stream)s AND last < t.head
)
INSERT INTO memd_log SELECT %(topic)s, %(stream)s, head, %(data)s FROM t RETURNING last
"""
_CREATE = "INSERT INTO memd_topic (topic, stream) SELECT %s, unnest(%s::text[]) ON CONFLICT (topic, stream) DO NOTHING"
_NEXT_GENERATION = (
    "UPDATE memd_topic SET generation = generation + 1 WHERE topic = %s AND generation = %s RETURNING generation"
)
_TOPICS = """
SELECT DISTINCT topic FROM memd_topic WHERE topic > %s AND head > 0
AND EXISTS (SELECT FROM memd_log l WHERE l.topic = memd_topic.topic) ORDER BY topic LIMIT %s
"""
_SCHEMA_LOCK = 0x6D656D64
WAIT_SECONDS = 1.0
"""Longest wait of a call for a silent server; after one such wait the database counts as away."""
LONG_SECONDS = 30.0
"""The same for background work: the schema, a rewrite, a list of topics."""
_IDLE_MILLISECONDS = 5_000
_BYTES_A_SECOND = 2 << 20
"""Assumed network speed, by which a row of many megabytes may take longer."""
WATCH_SECONDS = 0.25
"""Pause between two questions of the watch, mostly the first to find out that the database is silent."""
_LOOK_SECONDS = 0.1
_CONNECTIONS_MAX = 8
_INSTALL = f"a log that several daemons share needs more packages: {pip_install('memd-proxy[cluster]')}"
_KEPT = "what could not be stored waits, and is stored when it answers"
_REMEDIES = [
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (r'database "[^"]*" does not exist|no such database', "make it (CREATE DATABASE), or correct its name"),
        (r"password authentication failed|no password supplied|SASL auth", "correct user and password"),
        (r'role "[^"]*" (does not exist|is not permitted)|no such user', "make that user, or correct its name"),
        (r"pg_hba\.conf", "let this user in from this machine, or correct who it is"),
        (r"invalid response to SSL|expected authentication request", "something else listens there: correct the port"),
        (r"not support SSL|root certificate|certificate verify|match host name", "correct sslmode and sslrootcert"),
        (r"is bad: invalid", "correct it"),
        (r"resolve host", "correct the host"),
        (r"session is read-only|is in recovery|in hot standby", "promote the standby, or start the primary"),
        (r"refused|No such file", "start the server, or correct host and port"),
        (r"timeout expired|does not answer", "check that it runs and that the network lets memd through"),
        (r"too many (clients|connections)|remaining connection slots", "raise max_connections there"),
    )
]
READ_ONLY = (
    "let the URL lead to the primary (several hosts, and target_session_attrs=read-write), or make room where it is "
    "read-only because it is full"
)
_BY_STATE = {
    "25006": READ_ONLY,
    "42501": "grant this user CREATE on the schema, and its tables",
    "53100": "free some space on its disk",
    "42P01": "the tables are gone: restore the database from a backup, or restart memd to begin a new one",
}
_ENDED = ("08", "57P")
"""SQLSTATEs of an ended connection and of a stopping server: whether the statement was executed is unknown."""


class Row(msgspec.Struct, frozen=True):
    """A row of a stream."""

    stream: Stream
    last: int
    data: bytes
    is_base: bool = False
    """Whether it replaces all rows before it."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a topic after the known ones."""

    generation: int = 0
    """Changes when rows are rewritten: then everything read before is void. 0: there is no such topic."""
    heads: Mapping[Stream, int] = {}
    """The last row of each stream."""
    rows: tuple[Row, ...] = ()
    """Ascending in each stream; only the first page of a long one."""

    def of(self, stream: Stream) -> list[Row]:
        """Return the rows of one stream."""
        return [row for row in self.rows if row.stream == stream]


class SharedLog:
    """The shared log. Thread-safe. All calls raise StoreError if it is unreachable."""

    def __init__(self, url: str, *, wait_seconds: float = WAIT_SECONDS, master: MasterKey | None = None) -> None:
        """Open no connection before `connect`, or the first call. `master`: the key that seals its rows; None for plain
        rows. Raises StoreError: the packages are missing, or the URL is invalid."""
        try:
            import psycopg
        except ImportError:
            raise StoreError(_INSTALL) from None
        try:
            told = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:  # it quotes a part of the URL, which may be the password
            raise StoreError("cluster.database cannot be read: write postgresql://USER@HOST/DATABASE") from None
        if "@" in str(told.get("host") or ""):  # the host's name would show it
            raise StoreError("cluster.database: an @ in the user name or password has to be written as %40")
        self.place = f"PostgreSQL at {told.get('host') or 'a socket'}, {told.get('dbname') or 'the default database'}"
        """Location, for messages."""
        self.cluster = ""
        """Identity of the cluster; empty before `connect`."""
        self._url, self._wait_seconds = url, wait_seconds
        self._key_id = "" if master is None else master.id
        self._key = None if master is None else master.wrapping(b"shared log")
        self._kind = _impatient()
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._connecting = threading.Lock()
        self._connector = ThreadPoolExecutor(_CONNECTIONS_MAX, "memd-connecting")
        self._trouble: StoreError | None = None
        self._away_since = 0.0
        self._is_closed = threading.Event()
        self._watch: threading.Thread | None = None

    @property
    def trouble(self) -> str:
        """Why it is unreachable now, in a sentence with the remedy; empty if it is reachable."""
        return "" if self._trouble is None else str(self._trouble)

    @property
    def trouble_seconds(self) -> float:
        """Seconds for which it has been unreachable."""
        return 0.0 if self._trouble is None else time.monotonic() - self._away_since

    def connect(self) -> None:
        """Create the tables at the first start, and check their version at each. Raises StoreError: the database
        refuses memd, has tables of another version, or is unreachable (StoreWriteFailed: that may pass)."""
        with self._connecting:
            self._check_reachable()  # others may have waited for it in vain
            if not self.cluster:
                with self._lock:
                    if self._watch is None:
                        self._watch = threading.Thread(target=self._watched, name="database watch", daemon=True)
                        self._watch.start()
                self.cluster = self._done(
                    lambda connection: _schema(connection, self.place, self._key_id), LONG_SECONDS
                )

    def ends(self, topic_ids: Collection[str]) -> dict[str, News]:
        """Return the ends of all streams of some topics, in one round trip: news without rows."""
        names = list(topic_ids)
        found = self._called(lambda connection: connection.execute(_ENDS, [names], binary=True).fetchall())
        generations, heads = dict[str, int](), {name: dict[Stream, int]() for name in names}
        for name, stream, head, generation in found:
            generations[name], heads[name][stream] = generation, head
        return {name: News(generation=generations.get(name, 0), heads=heads[name]) for name in names}

    def since(self, topic_id: str, after: Mapping[Stream, int], limit: int = PAGE_ROWS) -> News:
        """Return the first rows of some streams after the known numbers. Raises CorruptFile: a row differs from what
        was sealed."""
        names, known = list(after), list(after.values())
        told = {"topic": topic_id, "streams": names, "after": known, "limit": limit}
        found = self._called(lambda connection: connection.execute(_SINCE, told, binary=True).fetchall())
        heads: dict[Stream, int] = {}
        rows, generation = [], 0
        for stream, head, base, of_generation, last, data in found:
            heads[stream] = head
            generation = of_generation
            if last is not None:
                rows.append(
                    Row(stream, last, self._opened(bytes(data), (topic_id, stream, last)), is_base=last == base)
                )
        return News(generation=generation, heads=heads, rows=tuple(rows))

    def append(self, topic_id: str, after: int, row: Row, *, generation: int) -> bool:
        """Append a row durably, if its stream ends at `after` and the topic is of this generation; else return False.

        Args:
            row: its number is above `after`; a base replaces all rows before it, which are deleted.
            generation: 0 to create a new topic.

        Raises:
            InDoubt: the answer was lost; `since` shows whether it is stored.
            StoreWriteFailed: it is not stored (DiskFull if the database's disk is full).
        """
        assert row.last > after >= 0, "ids ascend"
        data = self._sealed(row.data, (topic_id, row.stream, row.last))
        told = {"topic": topic_id, "stream": row.stream, "after": after, "last": row.last, "data": data}
        told |= {"base": row.is_base, "generation": generation or 1}

        def appended(connection: Connection) -> bool:
            if not generation:
                connection.execute(_CREATE, (topic_id, list(STREAMS)))
            return connection.execute(_APPEND, told).fetchone() is not None

        statements = 1 if generation else 2
        seconds = statements * self._wait_seconds + len(data) / _BYTES_A_SECOND
        return self._called(appended, is_write=True, seconds=seconds)

    def rewrite(self, topic_id: str, generation: int, rows: Mapping[tuple[Stream, int], bytes] | None) -> int:
        """Replace rows by others, or remove all of a topic (None), and begin its next generation, in one step.

        Ids never go back: a removed topic keeps its heads.

        Returns:
            The generation that was begun; 0 if the topic has another one by now, and nothing was done.
        """

        def rewritten(connection: Connection) -> int:
            with _step(connection):
                found = connection.execute(_NEXT_GENERATION, (topic_id, generation)).fetchone()
                if found is None:
                    return 0
                if rows is None:
                    connection.execute("DELETE FROM memd_log WHERE topic = %s", (topic_id,))
                for (stream, last), data in (rows or {}).items():
                    change = "UPDATE memd_log SET data = %s WHERE topic = %s AND stream = %s AND last = %s"
                    sealed = self._sealed(data, (topic_id, stream, last))
                    connection.execute(change, (sealed, topic_id, stream, last))
                return int(found[0])

        return self._called(rewritten, is_write=True, seconds=LONG_SECONDS)

    def topics(self, after: str, limit: int) -> list[str]:
        """Return the names of the first topics after a name that have a row, sorted."""
        found = self._called(lambda one: one.execute(_TOPICS, (after, limit)).fetchall(), seconds=LONG_SECONDS)
        return [name for (name,) in found]

    def close(self) -> None:
        """Close it."""
        self._is_closed.set()
        self._close([])

    # -- private ------------------------------------------------------------------------------------------------

    def _sealed(self, data: bytes, place: Place) -> bytes:
        return data if self._key is None else self._key.seal(data, place[0].encode(), _bound(place))

    def _opened(self, data: bytes, place: Place) -> bytes:
        found = data if self._key is None else self._key.opened(data, place[0].encode(), _bound(place))
        if found is None:
            raise CorruptFile(
                f"{self.place}: row {place[2]} of topic {place[0]} is not as it was encrypted; something else changed "
                "it, restore the database from a backup"
            )
        return found

    def _called(self, work: Callable[[Connection], Result], *, is_write: bool = False, seconds: float = 0.0) -> Result:
        self._check_reachable()
        if not self.cluster:
            self.connect()
        return self._done(work, seconds or self._wait_seconds, is_write=is_write)

    def _check_reachable(self) -> None:
        if self._trouble is not None:
            raise type(self._trouble)(str(self._trouble))

    def _done(self, work: Callable[[Connection], Result], seconds: float, *, is_write: bool = False) -> Result:
        """Run work that can be repeated, once more on another connection if the first one had ended."""
        import psycopg

        until, was_sent, is_again = time.monotonic() + seconds, False, False
        # A long row may be why others wait.
        is_short = seconds < 1.5 * self._wait_seconds and threading.current_thread() is not self._watch

        def is_over() -> bool:
            return time.monotonic() > until or (is_short and self._trouble is not None)

        if not self._turns.acquire(timeout=seconds):
            raise StoreWriteFailed(f"{self.place}: all connections are busy; {_KEPT}")
        try:
            while True:
                with self._lock:
                    connection = self._idle.pop() if self._idle else None
                try:
                    connection = connection or self._connected(is_over)
                    connection.is_over, was_sent = is_over, True
                    result = work(connection)
                except psycopg.Error as error:
                    if connection is not None and not (connection.closed or _has_lost(error)):
                        self._returned(connection)
                        raise self._refusal(error) from error
                    self._close([connection])
                    if is_again or connection is None or is_over():
                        raise self._gone(error, in_doubt=is_write and was_sent) from error
                    is_again = True
                except BaseException:
                    self._close([connection])
                    raise
                else:
                    self._returned(connection)
                    return result
        finally:
            self._turns.release()

    def _connected(self, is_over: Callable[[], bool]) -> Connection:
        """Connect. If that takes longer than the call may wait, the next call gets the connection."""
        import psycopg

        # Only features that a pooler before the server (PgBouncer) passes on: no options or prepares.
        settings = {"connect_timeout": 2, "prepare_threshold": None, "autocommit": True, **AS_TEXT}
        made = self._connector.submit(self._kind.connect, self._url, **settings)
        while not is_over():
            if wait([made], _LOOK_SECONDS).done:
                return made.result()
        made.add_done_callback(self._made_late)
        raise psycopg.errors.ConnectionTimeout("it does not answer")

    def _made_late(self, made: Future[Connection]) -> None:
        if not made.exception():
            self._returned(made.result())

    def _returned(self, connection: Connection) -> None:
        with self._lock:
            self._idle.append(connection)
        if self._is_closed.is_set():
            self._close([])

    def _close(self, lost: Sequence[Connection | None]) -> None:
        """Close connections, and all idle ones: the same cause has ended the others."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in (*lost, *idle):
            if connection is not None:
                connection.close()

    def _refusal(self, error: Exception) -> MemdError:
        import psycopg

        told = f"{self.place}: {words_of(error)}; {remedy_of(error)}"
        if isinstance(error, psycopg.errors.UniqueViolation):
            return BadTopicId(f"{self.place}: there is a topic whose name differs only in case; choose another name")
        if isinstance(error, psycopg.errors.DiskFull):
            return DiskFull(f"{told}; {_KEPT}")
        if isinstance(error, psycopg.errors.UndefinedTable):
            self.cluster = ""
        return StoreWriteFailed(f"{told}; {_KEPT}")

    def _gone(self, error: Exception, *, in_doubt: bool) -> StoreError:
        import psycopg

        told = f"{self.place}: {words_of(error)}; {remedy_of(error)}"
        told += f"; {_KEPT}" if self.cluster else ""
        # A connection takes many round trips: the watch finds out whether the server is silent or slow.
        if not isinstance(error, psycopg.errors.ConnectionTimeout) or threading.current_thread() is self._watch:
            if self._trouble is None:
                log.error("the database of the cluster is away", extra={"error": told})
                self._away_since = time.monotonic()
            self._trouble = StoreWriteFailed(told)
        return InDoubt(told) if in_doubt else StoreWriteFailed(told)

    def _watched(self) -> None:
        """Ask all the time, so that the loss of the database and its return are noticed without a request."""
        while not self._is_closed.wait(WATCH_SECONDS):
            with suppress(StoreError):
                self._done(lambda connection: connection.execute("SELECT 1"), self._wait_seconds)
                if self._trouble is not None:
                    self._trouble = None
                    log.info("the database of the cluster answers again", extra={"place": self.place})


def _bound(place: Place) -> bytes:
    return "\0".join(map(str, place)).encode()


def _impatient() -> Any:
    """Return a class of connections that wait for answers until `is_over`, and are then closed. Nothing else ends a
    wait for a silent network, or for a stopped server."""
    import psycopg

    def bounded(work: Any, is_over: Callable[[], bool]) -> Generator[Any, Any, Any]:
        ready = None
        while True:
            try:
                wanted = work.send(ready)
            except StopIteration as ended:
                return ended.value
            ready = yield wanted
            if not ready and is_over():
                raise psycopg.OperationalError("it does not answer")

    class Impatient(psycopg.Connection[Any]):  # type: ignore[misc]  # the package may be missing
        is_over: Callable[[], bool] = staticmethod(lambda: False)

        def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
            """See psycopg: runs a generator that waits for the server's answer."""
            try:
                return super().wait(bounded(gen, self.is_over), *arguments, **named)
            except psycopg.OperationalError:
                if self.is_over():
                    self.pgconn.finish()
                raise

    return Impatient


def _has_lost(error: Exception) -> bool:
    import psycopg

    state = getattr(error, "sqlstate", None)
    if state is None:
        return isinstance(error, psycopg.OperationalError)
    return (
        str(state).startswith(_ENDED) or state == "25006"
    )  # a new connection may lead to the server that has taken over


@contextmanager
def _step(connection: Connection) -> Iterator[None]:
    """Several statements as one step. The server rolls it back if the daemon or its machine stops in between; otherwise
    others would wait for its rows."""
    with connection.transaction():
        connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = {_IDLE_MILLISECONDS}")
        yield


def _schema(connection: Connection, place: str, key_id: str) -> str:
    """Create the tables unless they exist; return the name of the cluster."""
    with _step(connection):
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
        known = "SELECT to_regclass('memd_shared') IS NOT NULL, to_regclass('memd_version') IS NOT NULL"
        is_made, is_former = connection.execute(known).fetchone()
        if not is_made and is_former:
            raise StoreError(
                f"{place}: has the tables of an earlier memd; `memd move` its topics to a folder with that version "
                "first, and then from the folder to a new database with this one"
            )
        if not is_made:
            connection.execute(_SCHEMA)
            made = "INSERT INTO memd_shared VALUES (%s, gen_random_uuid()::text, %s)"
            connection.execute(made, (SCHEMA_VERSION, key_id))
        version, cluster, key = connection.execute("SELECT version, cluster, key FROM memd_shared").fetchone()
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{place}: has schema {version}, and this memd knows schema {SCHEMA_VERSION}: another version of memd has "
            "been here; run that version here too, nothing was changed"
        )
    if key != key_id:
        sealed = f"is encrypted with the key {key}" if key else "is not encrypted"
        raise WrongKey(
            f"{place}: the cluster {sealed}, and this daemon has {f'the key {key_id}' if key_id else 'no key'}: all of "
            "its daemons need the same encryption.key_file, or none"
        )
    return str(cluster)


def words_of(error: Exception) -> str:
    """Return the message of an error, without its details, which quote the refused row."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    return primary or str(error).strip().partition("\n")[0].strip() or type(error).__name__


def remedy_of(error: Exception) -> str:
    """Return the remedy of an error, in words."""
    remedy = _BY_STATE.get(getattr(error, "sqlstate", None) or "")
    found = (told for pattern, told in _REMEDIES if pattern.search(str(error)))
    return remedy or f"{next(found, 'check that the server runs')} (cluster.database)"


def shared_log(config: Config) -> SharedLog:
    """Return the log of the settings, without a connection. Raises StoreError: it cannot be used."""
    assert config.cluster.is_on, "else there is none"
    master = master_key(config.encryption) if config.encryption.is_on else None
    return SharedLog(config.cluster.database, master=master)


def topics_in(kept: SharedLog) -> list[str]:
    """Return all topics of a shared log, without its books."""
    found = page = kept.topics("", _PAGE_TOPICS)
    while len(page) == _PAGE_TOPICS:
        found += (page := kept.topics(page[-1], _PAGE_TOPICS))
    return [name for name in found if name not in BOOK_NAMES]


def join(files: LocalDisk, data_dir: Path, kept: SharedLog) -> None:
    """Make sure that a folder is a copy of this log, or empty; an empty one becomes a copy. Raises StoreError: it is
    neither; or it is empty, and the log is unreachable."""
    path = data_dir / CLUSTER_NAME
    before = files.read(path).decode(errors="replace").strip() if files.size(path) is not None else ""
    with suppress(*([StoreWriteFailed] if before else [])):  # it may pass, and until then the copy serves
        kept.connect()
    if not before:
        if topic_ids_in(files, data_dir):
            raise StoreError(
                f"{data_dir}: has topics of its own, which are not in {kept.place}; move them there (`memd move FROM "
                "TO`), or give the daemon an empty folder (data_dir)"
            )
        replace_file(files, path, kept.cluster.encode())
    elif kept.cluster and kept.cluster != before:
        raise StoreError(
            f"{data_dir}: is a copy of another cluster than {kept.place}; give the daemon an empty folder (data_dir), "
            "or correct cluster.database"
        )
