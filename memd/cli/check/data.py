"""Can the data directory be used, who uses it, and is the log whole?

Rule: works with and without a running daemon, and only reads, except for a nameless file that tests writing, and one
small object in the bucket of the backup, which is removed again. The cluster's database is only read.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from memd import __version__
from memd.admin import status
from memd.cli.check import CheckResult, check, failed, failed_with, ok, warning
from memd.cli.data_dir import waiting_messages, waiting_note
from memd.cli.running import THE_RIGHT_ONE, RunningDaemon
from memd.errors import MemdError, StoreError
from memd.settings.model import Config
from memd.store.audit import read_book
from memd.store.bucket.objects import IDENTITY_KEY, Bucket, read_identity
from memd.store.disk import LocalDisk, disk_trouble, trouble_by_writing
from memd.store.layout import ADDRESS_NAME, BUCKET_NAME, LOCK_NAME, TopicLayout, topic_ids_in
from memd.store.log.recovery import torn_files
from memd.store.shared.postgres import READ_ONLY, SCHEMA_VERSION, SharedLog, remedy_of, words_of
from memd.store.tools.disk_usage import TopicDiskUsage
from memd.store.tools.verify import verify
from memd.wording import counted, sized

FREE_BYTES_LOW = 512 << 20
"""Below this is a warning: merged indexes and a backup take hundreds of megabytes."""
READ_BYTES_MAX = 512 << 20
"""Logs up to this are read through, some seconds; larger ones are left to `memd verify`."""
FINDINGS_MAX = 5
READ_ALL = "`memd verify` reads every byte of it"
OTHERS = 0o077
"""Permissions of anybody but the user."""
_FOUND = {
    "damaged": (
        failed,
        "put the file back from a backup (memd backup) while memd is stopped; without one the rest is served",
    ),
    "foreign": (failed, "use the memd that wrote it, or move the file away"),
    "derived": (warning, "start memd again: what is missing is rebuilt from the log, nothing is lost"),
}
"""By the kind of a finding of `memd verify`: how bad it is, and what to do."""


@check("data directory")
def directory(data_dir: Path, files: LocalDisk) -> Iterator[CheckResult]:
    """It exists or can be created, can be written, and has free space."""
    try:
        existing = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
        if not files.is_directory(existing):
            yield failed(f"{existing} is a file", "name a folder with data_dir or --data-dir")
            return
        room = files.room(existing)
        trouble = disk_trouble(existing, room) or trouble_by_writing(existing, files)
        written_to = [data_dir, data_dir / LOCK_NAME]  # one run as another user leaves what this user cannot write
        for layout in (TopicLayout(data_dir, topic_id) for topic_id in topic_ids_in(files, data_dir)):
            written_to += [layout.directory, layout.segments, layout.active, layout.hot]
        locked_out = next((path for path in written_to if path.exists() and not files.may_write(path)), None)
    except OSError as error:
        yield failed(f"{data_dir}: {error.strerror or error}", "check the permissions of the folders above it")
        return
    if trouble is not None:
        yield failed(trouble.what, trouble.remedy)
    elif locked_out is not None:
        remedy = "give it to the user that memd runs as (chown), perhaps memd was once started as another"
        yield failed(f"{locked_out} may not be written by this user", remedy)
    elif room.bytes is None:
        yield ok(f"{data_dir}; its file system does not tell how much is free")
    elif room.bytes < FREE_BYTES_LOW:
        yield warning(
            f"{data_dir}, only {sized(room.bytes)} free", "make room: on a full disk memd stores nothing more"
        )
    else:
        free = f"{data_dir}, {room.bytes / 1e9:,.1f} GB free"
        yield ok(free + ("" if existing == data_dir else "; `memd serve` will create it"))


@check("data directory")
def permissions(data_dir: Path) -> Iterator[CheckResult]:
    """No other user of the machine may read files, as earlier versions left them; a folder without anything of memd's
    becomes private when the first daemon begins in it."""
    try:
        is_used = data_dir.is_dir() and any(not path.name.startswith(".") for path in data_dir.iterdir())
        found = list(_open_to_others(data_dir)) if is_used else []
    except OSError as error:
        yield failed(f"{data_dir}: {error.strerror or error}", "check the permissions of the folders in it")
        return
    if found:
        more = f" and {counted(len(found) - 1, 'path')} in it" if len(found) > 1 else ""
        said = f"{found[0]}{more} may be read by other users of this machine"
        yield warning(said, f"chmod -R go= {shlex.quote(str(data_dir))}")


def _open_to_others(path: Path) -> Iterator[Path]:
    """A path and those below it with which other users may do anything."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a running daemon removed it a moment ago
        status = path.stat()
        if status.st_mode & OTHERS and (status.st_size or not stat.S_ISREG(status.st_mode)):
            yield path
        for below in sorted(path.iterdir()) if path.is_dir() else ():
            yield from _open_to_others(below)


@check("lock")
def lock(data_dir: Path, daemon: RunningDaemon | None, files: LocalDisk) -> Iterator[CheckResult]:
    """Nobody holds the directory, or a daemon that answers does."""
    path = data_dir / LOCK_NAME
    if not files.is_locked(path):
        yield ok("free: no daemon is running on this folder")
        return
    holder, at = (_told(files, one) for one in (path, data_dir / ADDRESS_NAME))
    if daemon is None:
        who = f"a daemon at {at}" if at else "a memd command or daemon"
        said = f"held by {who} ({holder or 'unknown'}), which did not answer"
        remedy = (
            "it may be at work, or another user's or container's: `memd check` there looks at it; if it hangs, stop it"
        )
        yield failed(said, remedy)
        return
    held, version = f"held by the daemon at {daemon.url} ({holder or 'unknown'}), which", daemon.health().get("version")
    if version is None:
        yield failed(f"{held} {daemon.refusal}", THE_RIGHT_ONE)
    elif version != __version__:
        remedy = "start the daemon again so that it is the installed version"
        yield warning(f"{held} is memd {version}; this is {__version__}", remedy)
    else:
        yield ok(f"{held} answers")


def _told(files: LocalDisk, path: Path) -> str:
    with contextlib.suppress(StoreError):
        return files.read(path).decode(errors="replace").strip()
    return ""


@check("log")
def log(
    data_dir: Path, topics: list[TopicDiskUsage], files: LocalDisk, *, is_cache: bool = False
) -> Iterator[CheckResult]:
    """The log is whole; a large one is only counted, and in a cluster it is elsewhere."""
    if is_cache:
        yield ok(f"in the cluster; of {counted(len(topics), 'topic')} there is something in the cache", READ_ALL)
        return
    if not topics:
        yield ok("nothing is stored yet")
        return
    seen: dict[str, str] = {}
    for topic in topics:  # today none is created that would share a folder on another file system
        other = seen.setdefault(topic.topic_id.casefold(), topic.topic_id)
        if other != topic.topic_id:
            said = f"the topics {other!r} and {topic.topic_id!r} differ only in case: on macOS or Windows they would be"
            remedy = "before you move them there, give one another name: memd export, memd add --topic"
            yield warning(f"{said} mixed", remedy)
    stored = sum(topic.log_bytes + topic.derived_bytes for topic in topics)
    chunks = sum(topic.chunks for topic in topics)
    said = f"{counted(len(topics), 'topic')}, {counted(chunks, 'chunk')}, {sized(stored)}"
    try:
        waiting = waiting_note(waiting_messages(data_dir, files))
    except StoreError as error:
        yield failed_with(error)
    else:
        said += f"; {waiting}" if waiting else ""
    if stored > READ_BYTES_MAX:
        yield ok(f"{said}; counted, not read through", READ_ALL)
        return
    report = verify(data_dir, files, is_served=files.is_locked(data_dir / LOCK_NAME))
    if report.ok:
        yield ok(f"{said}; read through and whole")
    layouts = [TopicLayout(data_dir, topic.topic_id) for topic in topics]
    if torn := torn_files(files, [folder for layout in layouts for folder in (layout.directory, layout.segments)]):
        size = counted(sum(files.size(path) or 0 for path in torn), "byte")
        said = f"{counted(len(torn), 'interrupted write')} set aside, {size}: {torn[0]}{', …' if len(torn) > 1 else ''}"
        yield ok(said, "memd reads none of them; remove them if nothing is missed")
    for finding in report.damaged[:FINDINGS_MAX]:
        marked, remedy = _FOUND[finding.kind]
        yield marked(str(finding), remedy)
    if (more := len(report.damaged) - FINDINGS_MAX) > 0:
        yield failed(f"{counted(more, 'finding')} more", "`memd verify` lists them all")


@check("audit")
def audit(data_dir: Path, files: LocalDisk) -> Iterator[CheckResult]:
    """No line of the audit is missing or was changed, if there is one."""
    kept = read_book(files, data_dir, lambda _: False)
    if kept is not None and kept.findings:
        more = f" and {counted(len(kept.findings) - 1, 'finding')} more" if len(kept.findings) > 1 else ""
        remedy = "`memd audit --verify` lists all; compare it with the audit in a backup, and ask who could write there"
        yield failed(f"{kept.findings[0]}{more}", remedy)
    elif kept is not None:
        yield ok(f"{counted(kept.head.n, 'line')}, none missing and none changed")


LAG_ROUNDS_MAX = 6
"""A daemon whose backup is so many rounds behind has a reason."""
_PROBE = "memd-check/"


@check("backup")
def bucket(config: Config, env: Mapping[str, str]) -> Iterator[CheckResult]:
    """The bucket of the settings, if any, can be used, and has the backup of this directory."""
    if not config.backup.is_on:
        return
    bucket = Bucket.of(config.backup, env)
    key, data = f"{_PROBE}{secrets.token_hex(8)}", b"memd check"
    bucket.put(key, data)
    is_read, is_listed = bucket.get(key) == data, key in [one.key for one in bucket.listed(_PROBE)]
    bucket.delete([key])
    is_gone = bucket.get(key) is None
    if not (is_read and is_listed):
        yield warning(f"{bucket.url} shows late what was written", "restore a minute after the last write")
    if not is_gone:
        said = f"{bucket.url} keeps what is removed: what is erased stays there"
        yield failed(said, "give the key the right to delete, and the bucket no object lock")
    if bucket.keeps_versions:
        said = f"{bucket.url} keeps versions: what is erased or too old stays in them"
        yield warning(said, "let a lifecycle rule of the bucket remove noncurrent versions after some days")
    if is_read and is_gone:
        yield ok(f"{bucket.url} can be read, written and emptied")
    stored, path, files = bucket.get(IDENTITY_KEY), config.data_dir / BUCKET_NAME, LocalDisk()
    own = files.read(path).decode("ascii", "replace").strip() if files.size(path) is not None else ""
    if stored is not None and read_identity(stored, bucket).directory != own:
        said = f"{bucket.url} has the backup of another data directory than {config.data_dir}"
        yield failed(said, "choose another prefix; if a disk was lost, memd restore brings its folder back")


@check("backup")
def lag(config: Config, daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    """The running daemon's backup is not far behind."""
    if not config.backup.is_on or daemon is None:
        return
    try:
        told = daemon.ask(status.stats).backup
    except MemdError:
        return  # it wants another token: that was said
    if told is None:
        yield warning(f"the daemon at {daemon.url} makes none", "start it again: it has older settings")
        return
    behind = f"{told.lag_seconds:.0f} s behind"
    if told.trouble:
        yield failed(f"{behind}: {told.trouble}", "mend that; it goes on by itself")
    elif told.lag_seconds > LAG_ROUNDS_MAX * config.backup.seconds:
        yield warning(behind, "wait, if it was begun just now; or see the log")
    else:
        yield ok(behind)


OLDEST = 14
"""The first version of PostgreSQL that memd is tested with."""
CLOCKS_SECONDS = 2.0
ROUND_TRIP_MS = 5.0
"""Above this a chat waits longer for the database than for memory."""
_SETTINGS = """SELECT
    current_setting('server_version_num')::int / 10000 AS number,
    split_part(current_setting('server_version'), ' ', 1) AS version,
    pg_is_in_recovery() AS is_standby,
    current_setting('transaction_read_only') = 'on' AS is_read_only,
    current_setting('fsync') = 'on' AS fsync,
    current_setting('full_page_writes') = 'on' AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('synchronous_standby_names') AS standby_names,
    extract(epoch FROM clock_timestamp())::float8 AS clock,
    CASE WHEN to_regclass('memd_log') IS NULL THEN has_schema_privilege(current_schema(), 'CREATE') ELSE (
        SELECT bool_and(has_table_privilege(to_regclass(name), may)) FROM unnest('{memd_topic, memd_log}'::text[]) name,
        unnest('{SELECT, INSERT, UPDATE, DELETE}'::text[]) may) END AS may_write,
    current_setting('server_encoding') AS encoding,
    to_regclass('memd_shared') IS NOT NULL AS has_tables,
    (SELECT CASE WHEN count(*) FILTER (WHERE state IS NULL) = 0
        THEN count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) END FROM pg_stat_replication) AS standbys
"""


@check("database")
def cluster(config: Config) -> Iterator[CheckResult]:
    """The database of the cluster, if the settings name one: it is asked as no daemon does, without making its
    tables."""
    if config.cluster.is_on:
        with closing(SharedLog(config.cluster.database)) as kept:  # the packages are there, and the URL can be read
            place = kept.place
        yield from told_of(_server(config.cluster.database, place))


class DatabaseServer(msgspec.Struct, frozen=True, kw_only=True):
    """A database server as it tells of itself."""

    number: int
    """Of its version."""
    version: str
    is_standby: bool
    is_read_only: bool
    may_write: bool
    """All that memd needs; where there are no tables, make them."""
    schema: int | None
    """Of memd's tables; None: there are none yet."""
    is_pooled: bool
    """Somebody stands between, as PgBouncer: the server does not have the connection that this process has."""
    round_trip_ms: float
    clock_ahead: float
    """Seconds by which its clock is ahead of this machine's."""
    synchronous_commit: str
    standby_names: str
    standbys: int | None
    """Synchronous ones that are connected; None: this user may not see."""
    encoding: str
    fsync: bool
    full_page_writes: bool


def _server(database: str, place: str) -> DatabaseServer:
    import psycopg
    from psycopg.rows import dict_row

    try:
        with psycopg.connect(database, connect_timeout=5, prepare_threshold=None) as connection:
            connection.execute("SET LOCAL statement_timeout = 5000")  # a pooler may give the connection to others
            began = time.time()
            row = connection.cursor(row_factory=dict_row).execute(_SETTINGS).fetchone()
            middle = (began + time.time()) / 2
            assert row is not None, "one row"
            found = connection.execute("SELECT version FROM memd_shared").fetchone() if row["has_tables"] else None
            asked = time.perf_counter()
            is_pooled = connection.execute("SELECT pg_backend_pid()").fetchone() != (connection.info.backend_pid,)
            round_trip_ms = (time.perf_counter() - asked) * 1e3
    except psycopg.Error as error:
        raise StoreError(f"{place}: {words_of(error)}; {remedy_of(error)}") from None
    more = {"clock_ahead": row["clock"] - middle, "schema": found and found[0], "round_trip_ms": round_trip_ms}
    return msgspec.convert({**row, **more, "is_pooled": is_pooled}, DatabaseServer)


@check("database")
def told_of(server: DatabaseServer) -> Iterator[CheckResult]:
    """What is good and bad about the server."""
    said = f"PostgreSQL {server.version}"
    if server.number < OLDEST:
        yield failed(said, f"memd needs PostgreSQL {OLDEST} or later")
    if server.is_standby or server.is_read_only:
        reads = "a standby" if server.is_standby else "read-only"
        yield failed(f"{said} is {reads}, and nothing can be written there", READ_ONLY)
    if not server.may_write and server.schema is None:
        yield failed("has no tables of memd's, and this user may not make any", "grant it CREATE on its schema")
    elif not server.may_write:
        remedy = "grant it SELECT, INSERT, UPDATE and DELETE on memd_topic and memd_log"
        yield failed("this user may not write memd's tables", remedy)
    elif server.schema not in (None, SCHEMA_VERSION):
        told = f"has schema {server.schema}, and this memd knows schema {SCHEMA_VERSION}"
        yield failed(told, "run the same version of memd everywhere")
    else:
        has = "has no tables yet, memd serve makes them" if server.schema is None else f"schema {server.schema}"
        pooled = ", through a pooler of connections" if server.is_pooled else ""
        yield ok(f"{said}, {has}, answers in {server.round_trip_ms:.1f} ms{pooled}")
    if server.encoding != "UTF8":
        yield warning(f"its encoding is {server.encoding}", "make it with ENCODING 'UTF8': names are text")
    if server.round_trip_ms > ROUND_TRIP_MS:
        told = f"answers in {server.round_trip_ms:.0f} ms, and every chat waits for one answer"
        yield warning(told, "run memd near the database, in the same zone")
    if not (server.fsync and server.full_page_writes):
        off = "full_page_writes" if server.fsync else "fsync"
        yield failed(f"{off} is off: a power cut may destroy the database", f"set {off} = on, and restart PostgreSQL")
    lost, on = "may lose what was acknowledged", "set synchronous_commit = on for this user or database"
    if server.synchronous_commit == "off":
        yield failed("synchronous_commit is off: a crash of the server loses what was acknowledged", on)
    elif not server.standby_names:
        remedy = "set synchronous_standby_names; where a managed service copies the disk instead, this is no loss"
        yield warning(f"has no synchronous standby: a failover {lost}", remedy)
    elif server.synchronous_commit == "local":
        yield warning(f"synchronous_commit is local, so no commit waits for a standby: a failover {lost}", on)
    elif server.standbys == 0:
        told = f"no synchronous standby of {server.standby_names!r} is connected: each write waits for one"
        yield warning(told, "start a standby; until then requests are answered with degraded:store")
    else:
        yield ok(f"commits wait for a synchronous standby ({server.standby_names})")
    if abs(server.clock_ahead) > CLOCKS_SECONDS:
        side = "ahead of" if server.clock_ahead > 0 else "behind"
        remedy = "let both follow NTP; nothing is lost by it, but times that are shown depend on who stored"
        yield warning(f"its clock is {abs(server.clock_ahead):.1f} s {side} this machine's", remedy)
