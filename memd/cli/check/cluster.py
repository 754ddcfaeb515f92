"""Can the cluster be reached, does it keep what memd counts on, and do its daemons fit together?

Rule: the database is only read, by a connection of its own that makes no table; to the bucket one small object is
written and removed again.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import msgspec

from memd.cli.check.result import CheckResult, failed, failed_with, ok, warning
from memd.cli.running import GLANCE_SECONDS_MAX, RunningDaemon
from memd.embedding.loading import load_embedder
from memd.errors import MemdError, StoreError
from memd.settings.model import Config
from memd.store.bucket.objects import Bucket
from memd.store.cluster.daemons import DISK, DaemonRow, different, marks_of, seen
from memd.store.cluster.database import SCHEMA_VERSION, Database
from memd.store.cluster.refusals import remedy_of, words_of
from memd.store.layout import models_dir
from memd.store.log.format import ModelId
from memd.wording import counted

DATABASE, BUCKET, DAEMONS, OWN_URL = "database", "bucket", "daemons", "own address"
OLDEST = 14
"""The first version of PostgreSQL that memd is tested with."""
CLOCKS_SECONDS = 2.0
_PROBE = "memd-check/"
_SETTINGS = (
    "SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),"
    " current_setting('transaction_read_only') = 'on', current_setting('fsync') = 'on',"
    " current_setting('full_page_writes') = 'on', current_setting('synchronous_commit'),"
    " current_setting('synchronous_standby_names'), extract(epoch FROM clock_timestamp())::float8,"
    " has_schema_privilege(current_schema(), 'CREATE')"
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
    is_pooled: bool
    """Whether somebody stands between, as PgBouncer: the server does not have the connection that this process has."""


def cluster(config: Config, env: Mapping[str, str], daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    """Check the cluster of the settings, if they name one."""
    if not config.store.is_shared:
        return
    try:
        server = _server(config)
    except MemdError as error:
        yield failed_with(DATABASE, error)
    else:
        yield from told_of(server)
        if server.schema == SCHEMA_VERSION:
            yield from _daemons(config)
    try:
        yield from _bucket(Bucket.of(config.store.bucket_settings, env, "store"))
    except MemdError as error:
        yield failed_with(BUCKET, error)
    yield from _own_url(config, daemon)


def _server(config: Config) -> Server:
    """Ask the server, as no daemon does: without making its tables."""
    database = Database(config.store.url)  # the packages are there, and the URL can be read
    import psycopg

    try:
        with psycopg.connect(config.store.url, connect_timeout=5, prepare_threshold=None) as connection:
            connection.execute("SET LOCAL statement_timeout = 5000")  # a pooler may give the connection to others
            began = time.time()
            row = connection.execute(_SETTINGS).fetchone()
            middle = (began + time.time()) / 2
            is_there = connection.execute("SELECT to_regclass('memd_version') IS NOT NULL").fetchone() == (True,)
            found = connection.execute("SELECT version FROM memd_version").fetchone() if is_there else None
            standbys = connection.execute(_STANDBYS).fetchone()
            is_pooled = connection.execute("SELECT pg_backend_pid()").fetchone() != (connection.info.backend_pid,)
    except psycopg.Error as error:
        raise StoreError(f"{database.place}: {words_of(error)}; {remedy_of(error)[0]}") from None
    finally:
        database.close()
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
        schema=None if found is None else found[0],
        standbys=None if standbys is None or standbys[1] else standbys[0],
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
            "name the primary in store.url; with several hosts add ?target_session_attrs=read-write",
        )
    if server.schema is None and not server.may_create:
        yield failed(
            DATABASE, "has no tables of memd's, and this user may not make any", "grant it CREATE on its schema"
        )
    elif server.schema is not None and server.schema > SCHEMA_VERSION:
        told = f"has schema {server.schema}, and this memd knows schemas up to {SCHEMA_VERSION}"
        yield failed(DATABASE, told, "update this memd; a newer one has been there")
    else:
        schema = "has no tables yet, memd serve makes them" if server.schema is None else f"schema {server.schema}"
        yield ok(DATABASE, f"{said}, {schema}" + (", through a pooler of connections" if server.is_pooled else ""))
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


def _bucket(bucket: Bucket) -> Iterator[CheckResult]:
    key, data = f"{_PROBE}{secrets.token_hex(8)}", b"memd check"
    bucket.put(key, data, new=True)
    bucket.put(key, data, new=True)
    is_read, is_ranged = bucket.get(key) == data, bucket.read(key, 5, len(data)) == data[5:]
    bucket.delete([key])
    if bucket.get(key) is not None:
        yield failed(
            BUCKET,
            f"{bucket.url} keeps what is removed: what is erased stays there",
            "give the key the right to delete, and the bucket no object lock",
        )
    elif not (is_read and is_ranged):
        told = f"{bucket.url} shows late what was written, or gives no parts of objects"
        yield failed(BUCKET, told, "choose a server that shows an object as soon as it has taken it")
    else:
        yield ok(BUCKET, f"{bucket.url} can be read, written and emptied")
    if bucket.keeps_versions:
        yield warning(
            BUCKET,
            f"{bucket.url} keeps versions: what is erased stays in them",
            "let a lifecycle rule remove noncurrent versions after the days that you want to be able to go back",
        )


def _daemons(config: Config) -> Iterator[CheckResult]:
    """Compare the daemons that were heard of lately, and these settings."""
    database = Database(config.store.url)
    try:
        there = seen(database)
    finally:
        database.close()
    model = None
    try:
        embedder = load_embedder(config.embedding, models_dir=models_dir(config.data_dir), fetch=False)
        model = ModelId(embedder.dimension, embedder.fingerprint)
    except MemdError:
        pass  # another check says it
    own = DaemonRow(url="this machine", boot="", version="", marks=marks_of(config, model))
    every = [own, *there]
    found = dict.fromkeys(told for one in every[1:] for told in different(every[0], one))
    for said, remedy in found:
        yield failed(DAEMONS, said, remedy)
    for one in there:
        if DISK in one.marks:
            said, _, remedy = one.marks[DISK].rpartition("; ")
            yield warning(DAEMONS, f"{one.url} leaves its topics to others: {said}", remedy)
    if len({one.version for one in there}) > 1:
        versions = ", ".join(f"{one.url} is memd {one.version}" for one in there)
        yield warning(DAEMONS, versions, "bring all to the same version, one after the other")
    if not found:
        told = ", ".join(one.url for one in there) or "none"
        yield ok(DAEMONS, f"{counted(len(there), 'daemon')} at work: {told}" + ("; set alike" if there else ""))


def _own_url(config: Config, daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    url = config.store.own_url.rstrip("/") or (daemon.model_url if daemon is not None else "")
    if daemon is None:
        yield ok(OWN_URL, f"{url or 'that of listen'}: no daemon runs on this folder, so nobody was asked there")
        return
    if problem := _tls_problem(url):
        yield failed(OWN_URL, *problem)
        return
    is_there = daemon.is_at(url, config.data_dir)
    if is_there is None and daemon.is_at(url.replace("http:", "https:", 1), config.data_dir) is not None:
        yield failed(OWN_URL, f"{url} speaks TLS", "let store.own_url begin with https:")
    elif is_there is None:
        yield failed(
            OWN_URL,
            f"{url} does not answer as a memd: others pass requests on to it in vain",
            "correct store.own_url, or what stands between (a firewall, a proxy)",
        )
    elif not is_there:
        yield failed(OWN_URL, f"{url} is another daemon", "give each daemon its own store.own_url")
    else:
        yield ok(OWN_URL, f"{url} answers as this daemon")


def _tls_problem(url: str) -> tuple[str, str] | None:
    """Why other daemons cannot speak TLS to an address, if they trust whom this command trusts, and what to do."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return None
    context, host = ssl.create_default_context(), parts.hostname or ""
    try:
        with socket.create_connection((host, parts.port or 443), GLANCE_SECONDS_MAX) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return (
            f"{url} has a certificate that is not trusted here ({error.verify_message}), and others trust no more",
            "let it name the host in store.own_url, and name who signed it in SSL_CERT_FILE, of each daemon and here",
        )
    except ssl.SSLError as error:
        return (
            f"{url} does not speak TLS ({error.reason})",
            "let store.own_url begin with http:, or set listen.tls_cert and listen.tls_key",
        )
    except OSError:
        return None  # nobody is there
    return None
