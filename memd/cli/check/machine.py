"""Checks of this machine and of the places in the settings: installation, safety of the settings, data directory and
its users, integrity of the log, and whether backup, database and models answer.

Rule: works with and without a running daemon, and only reads, except for an unnamed file that tests writing and a small
object in the backup's bucket, which is removed again. `load_config` has validated the settings; these checks depend on
the machine, or find allowed but unwise values. Sources are only listed: indexing reads the files. The cluster's
database is only read.
"""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import msgspec
import numpy as np

from memd import __version__
from memd.assets import ranks_bytes
from memd.cli.check import CheckResult, check, failed, failed_with, ok, warning
from memd.cli.data_dir import waiting_messages
from memd.cli.running import THE_RIGHT_ONE, RunningDaemon
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.embedder import Embedder
from memd.embedding.loading import BUNDLED, load_embedder
from memd.embedding.local import FINGERPRINT
from memd.errors import MemdError, RerankError, StoreError
from memd.ingest.offline import stored_models
from memd.ingest.sources.look import Chosen, Walk
from memd.ingest.sources.watch import topic_of
from memd.proxy.connections import bound, own_port, tls_of
from memd.recall.rerank import Reranker
from memd.settings.model import AUTO_TOPIC, REMEDY_IF_SHORT, Config, SourceSettings, is_this_machine
from memd.store.audit import read_book
from memd.store.bucket.objects import IDENTITY_KEY, Bucket, read_identity
from memd.store.disk import (
    DESCRIPTORS_REMEDY,
    LocalDisk,
    Trouble,
    connections_room,
    descriptors_limit,
    disk_trouble,
    trouble_by_writing,
)
from memd.store.layout import ADDRESS_NAME, BUCKET_NAME, LOCK_NAME, TopicLayout, models_dir, topic_ids_in
from memd.store.lexical.postings import GrowingColumns, main_language
from memd.store.log.recovery import read_log_file, torn_files
from memd.store.shared.books import FileBook, TokenList
from memd.store.shared.postgres import AS_TEXT, READ_ONLY, SCHEMA_VERSION, SharedLog, remedy_of, words_of
from memd.store.tools.export import active_bytes
from memd.store.tools.verify import TopicDiskUsage, verify
from memd.wording import counted, name_for_terminal, not_english, pip_install, sized, waiting_note

SETTINGS = "settings"
OTHERS_MAY_READ = 0o044


@check(SETTINGS)
def origin(path: Path | None, places: Mapping[str, str]) -> Iterator[CheckResult]:
    """Origin of the settings: `path` is the file that was read, `places` has the place of each setting."""
    elsewhere = sorted({place for place in places.values() if path is None or not place.startswith(f"{path}, line ")})
    in_file = sum(place not in elsewhere for place in places.values())
    parts = [] if path is None else [f"{path}: {counted(in_file, 'setting')}"]
    parts += [f"{place}: {', '.join(key for key in places if places[key] == place)}" for place in elsewhere]
    yield ok("; ".join(parts) or "all at their defaults: no file, no MEMD_ variable, no flag")


@check("access")
def access(config: Config, path: Path | None, places: Mapping[str, str]) -> Iterator[CheckResult]:
    """Who can reach the memory, and whether the token is long enough and private."""
    host, token = config.listen.host, config.auth.token
    is_open = not is_this_machine(host)
    # In a cluster, as this machine last knew them: its database is not changed.
    others = (*config.auth.tokens, *TokenList(FileBook(LocalDisk(), config.data_dir)).read())
    needed = "a token (`memd token list` shows whose)" if others else "auth.token"
    if token and path is not None and places.get("auth.token", "").startswith(f"{path}, line "):
        with suppress(OSError):
            if path.stat().st_mode & OTHERS_MAY_READ:
                said = f"others on this machine may read auth.token in {path}"
                yield warning(said, f"chmod 600 {path}, or give it as MEMD_AUTH_TOKEN")
                return
    if config.auth.is_short:
        who = f"{host} can be reached by others, and" if is_open else "only this machine, but"
        yield warning(f"{who} auth.token has only {counted(len(token), 'character')}", REMEDY_IF_SHORT)
    elif is_open and config.listen.tls_cert:
        yield ok(f"{host} can be reached by others, by TLS; each request has to show {needed}")
    elif is_open:
        said = f"{host} can be reached by others; each request has to show {needed}, and nothing is encrypted"
        yield ok(said, "set listen.tls_cert, or put a TLS proxy before it, if others share the network")
    else:
        yield ok("only this machine, " + (f"with {needed}" if token or others else "without a token"))


@check("address")
def address(config: Config, daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    """Whether memd listens, or can listen, at its addresses."""
    host, port = config.listen.host, config.listen.port
    if daemon is not None:
        told = f"the running daemon's own page is at {daemon.url}/memd/; to others it tells nothing more"
        if model_url := daemon.model_url:
            told = f"the running daemon listens at {model_url}, its own page is at {daemon.url}/memd/"
            told += f" (the settings say port {port})" if port not in (0, urlsplit(model_url).port) else ""
        yield ok(told)
        return
    try:
        tls_of(config)
        listeners = bound(config)
    except MemdError:
        other = RunningDaemon(f"http://{host}:{port}", "").health().get("data_dir")
        if other is None:
            raise
        said = f"{host}:{port} is in use by a memd that holds {other}"
        yield failed(said, "stop that one, name its folder with --data-dir, or choose another listen.port")
        return
    listeners.close()
    if listeners.moved:
        said = f"memd's own page will be at a port that is not known yet: {listeners.moved.rpartition('; ')[0]}"
        yield warning(said, "stop what uses the port, or choose another with admin.port")
    elif not port:
        yield ok(f"{host}, any free port")
    else:
        yield ok(f"{host}:{port} is free" + (f", and so is {own}" if (own := own_port(config)) else ""))


LATEST = 200
"""Entries whose language is detected."""
FILES_COUNTED_MAX = 20_000
"""Limit per source; takes some seconds on a slow disk."""


@check("sources")
def source(source: SourceSettings, data_dir: Path) -> Iterator[CheckResult]:
    """A source of the settings is readable and not empty."""
    path = Path(source.path)
    shown = name_for_terminal(source.path)
    chosen = Chosen(exclude=(*source.exclude, str(data_dir)), formats=source.formats, follow_links=source.follow_links)
    walk = Walk(path.resolve(), chosen)
    try:
        found = list(islice(walk.files(), FILES_COUNTED_MAX + 1))
    except OSError as error:
        said = f"{shown} cannot be read ({error.strerror or error}); what is known of it stays"
        yield warning(said, "mount it or give this user the right to read it, or remove it from sources")
        return
    unread = [*walk.unread, *((one.below, "no right to read it") for one in found if not os.access(one.path, os.R_OK))]
    more = f"more than {FILES_COUNTED_MAX:,} files" if len(found) > FILES_COUNTED_MAX else counted(len(found), "file")
    topic = topic_of(path) if source.topic == AUTO_TOPIC else source.topic
    said = f"{shown}: {more} for topic {topic}"
    if unread:
        name, reason = unread[0]
        said += f"; {counted(len(unread), 'path')} in it cannot be read: {name_for_terminal(name)} ({reason})"
        yield warning(said, "give this user the right to read them, or leave them out with exclude")
    elif not found:
        yield warning(said, "look whether it is the right folder, and at its exclude and formats")
    else:
        yield ok(said)


DISTRIBUTION = "memd-proxy"
REINSTALL = f"install memd again: {pip_install('--force-reinstall', DISTRIBUTION)} (from a checkout: -e . in its place)"

KNOWN_COUNTS = {"hello world": 2, "antidisestablishmentarianism": 6, "2 + 2 = 4": 7, "お誕生日おめでとう": 9}
"""Token counts by OpenAI's tables of cl100k_base."""
KNOWN_TEXT = "This is an example sentence"
KNOWN_VECTOR = (0.06019, 0.06585, 0.0426, 0.07842, 0.02613, -0.00282, 0.05016, -0.01573, 0.05674, 0.03386)
"""First components of the bundled model's vector for it, computed by its graph; see memd/embedding/local.py."""
TOLERANCE = 0.001


@check("installation")
def installation() -> Iterator[CheckResult]:
    """The versions of memd and Python; `pip check` compares those of the packages."""
    yield ok(f"memd {__version__}, Python {platform.python_version()}")


@check("tokenizer")
def tokenizer() -> Iterator[CheckResult]:
    """Known texts have known counts."""
    try:
        counter = TokenCounter(cl100k_base(ranks_bytes()))
        wrong = [text for text, count in KNOWN_COUNTS.items() if counter.count(text) != count]
    except (OSError, ValueError) as error:
        yield failed(f"the bundled ranks cannot be read: {error}", REINSTALL)
        return
    is_right = f"cl100k_base counts {counted(len(KNOWN_COUNTS), 'known text')} right"
    yield failed(f"the tokens of {wrong[0]!r} are not counted right", REINSTALL) if wrong else ok(is_right)


@check("open files")
def open_files(config: Config) -> Iterator[CheckResult]:
    """The limit of open files, and whether it suffices for the daemon's connections."""
    allowed, wanted = descriptors_limit(raised=True), config.limits.connections_max
    room = connections_room(allowed)
    said = f"{allowed:,} at a time: room for {counted(min(room, wanted), 'connection')} and any number of topics"
    is_enough = room >= wanted
    yield ok(said) if is_enough else warning(f"{said}, where {wanted:,} may come", DESCRIPTORS_REMEDY)


@check("embedding model")
def embedding_model(config: Config, topics: list[TopicDiskUsage], files: LocalDisk) -> Iterator[CheckResult]:
    """A known text has its known vector, and stored chunks were embedded with this model."""
    embedder = load_embedder(
        config.embedding, models_dir=models_dir(config.data_dir), fetch=False, stored=stored_models(config, files)
    )
    if problem := _infidelity(embedder):
        yield failed(problem, REINSTALL)
        return
    yield ok(f"{embedder.name}, {embedder.dimension} dimensions, fingerprint {embedder.fingerprint}")
    if others := sum(topic.chunks_of_others(embedder.fingerprint) for topic in topics):
        said = f"{counted(others, 'stored chunk')} were embedded with another model: no search by meaning finds them"
        yield warning(said, "stop memd and run `memd reembed`, or set embedding.model back")
    if embedder.fingerprint == FINGERPRINT:
        layouts = (TopicLayout(config.data_dir, topic.topic_id) for topic in topics)
        for language in dict.fromkeys(filter(None, (_said_last_in(files, one) for one in layouts))):
            yield warning(*not_english(language))


def _said_last_in(files: LocalDisk, layout: TopicLayout) -> str | None:
    """See `main_language`, for the latest entries of a topic."""
    with suppress(StoreError):  # the check of the log reports it
        data, columns = active_bytes(files, layout), GrowingColumns()
        found = None if data is None else read_log_file(data, name=str(layout.active), dimension=None)
        columns.extend([] if found is None else found.entries[-LATEST:])
        return main_language(columns)
    return None


@check("reranker")
def reranker(config: Config) -> Iterator[CheckResult]:
    """The reranker, if configured, scores two texts."""
    if config.rerank.url:
        asking = Reranker(config.rerank)
        try:
            asking.scores(KNOWN_TEXT, [KNOWN_TEXT, "memd"])
            yield ok(asking.name)
        except RerankError as error:
            yield warning(str(error), "chunks stay in memd's own order; start it, or take rerank.url out")


def _infidelity(embedder: Embedder) -> str:
    """Compare the model's vectors with known ones; describe the difference, empty if there is none."""
    vector = embedder.embed(KNOWN_TEXT)
    if not np.isfinite(vector).all() or abs(float(np.linalg.norm(vector)) - 1) > TOLERANCE:
        return f"{embedder.name} gives no unit vector for a plain sentence"
    if embedder.name != BUNDLED:
        return ""
    if embedder.fingerprint != FINGERPRINT:
        return f"the files of the bundled model have changed: fingerprint {embedder.fingerprint}"
    difference = float(np.abs(vector[: len(KNOWN_VECTOR)] - np.asarray(KNOWN_VECTOR)).max())
    if difference > TOLERANCE:
        return f"the bundled model gives other vectors than it should (by {difference:.4f}): results will be poor"
    return ""


FREE_BYTES_LOW = 512 << 20
"""Threshold of a warning: merged indexes and a backup take hundreds of megabytes."""
READ_BYTES_MAX = 512 << 20
"""Logs up to this size are read completely, in some seconds; larger ones are left to `memd verify`."""
FINDINGS_MAX = 5
READ_ALL = "`memd verify` reads every byte of it"
OTHERS = 0o077
"""Permission bits of all other users."""
_FOUND = {
    "damaged": (
        failed,
        "put the file back from a backup (memd backup) while memd is stopped; without one the rest is served",
    ),
    "foreign": (failed, "use the memd that wrote it, or move the file away"),
    "derived": (warning, "start memd again: what is missing is rebuilt from the log, nothing is lost"),
}
"""Severity and remedy by kind of a finding of `memd verify`."""


@check("data directory")
def directory(data_dir: Path, files: LocalDisk) -> Iterator[CheckResult]:
    """It exists or can be created, is writable, and has free space."""
    try:
        existing = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
        if not files.is_directory(existing):
            yield failed(f"{existing} is a file", "name a folder with data_dir or --data-dir")
            return
        room = files.room(existing)
        trouble = disk_trouble(existing, room) or trouble_by_writing(existing, files)
        written_to = [data_dir, data_dir / LOCK_NAME]  # after a run as another user this user cannot write it
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
    """No other user of the machine may read files, which earlier versions allowed. A folder without memd's files
    becomes private when the first daemon starts in it."""
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
    """Yield a path and the paths below it that other users have any permission on."""
    with suppress(FileNotFoundError, NotADirectoryError):  # a running daemon has just removed it
        status = path.stat()
        if status.st_mode & OTHERS and (status.st_size or not stat.S_ISREG(status.st_mode)):
            yield path
        for below in sorted(path.iterdir()) if path.is_dir() else ():
            yield from _open_to_others(below)


@check("lock")
def lock(data_dir: Path, daemon: RunningDaemon | None, files: LocalDisk) -> Iterator[CheckResult]:
    """Nobody holds the directory, or a daemon that answers."""
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
    with suppress(StoreError):
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
    """No line of the audit, if there is one, is missing or changed."""
    kept = read_book(files, data_dir, lambda _: False)
    if kept is not None and kept.findings:
        more = f" and {counted(len(kept.findings) - 1, 'finding')} more" if len(kept.findings) > 1 else ""
        remedy = "`memd audit --verify` lists all; compare it with the audit in a backup, and ask who could write there"
        yield failed(f"{kept.findings[0]}{more}", remedy)
    elif kept is not None:
        yield ok(f"{counted(kept.head.n, 'line')}, none missing and none changed")


_PROBE = "memd-check/"


@check("backup")
def bucket(config: Config, env: Mapping[str, str]) -> Iterator[CheckResult]:
    """The bucket of the settings, if any, is usable and has this directory's backup."""
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


@check("daemon")
def troubles(daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    """The running daemon's health names no trouble."""
    health = {} if daemon is None else daemon.health()
    for one in msgspec.convert(health.get("troubles", []), list[Trouble]):
        yield warning(one.what, one.remedy or "see its log")


OLDEST = 14
"""The oldest version of PostgreSQL that memd is tested with."""
CLOCKS_SECONDS = 2.0
ROUND_TRIP_MS = 5.0
"""Above this a chat waits longer for the database than for memory."""
# `may_write`: it has all privileges that memd needs, including creating the tables if they are missing. `standbys`: the
# connected synchronous ones; NULL: this user may not see them.
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
    """The database of the cluster, if any; asked over a separate connection that creates no tables."""
    if config.cluster.is_on:
        with closing(SharedLog(config.cluster.database)) as kept:  # the packages exist and the URL is valid
            place = kept.place
        yield from told_of(_server(config.cluster.database, place))


def _server(database: str, place: str) -> SimpleNamespace:
    """Return a database server's report about itself: the columns of `_SETTINGS` and, in addition, `schema` (version of
    memd's tables; None: there are none yet), `is_pooled` (the server does not hold this process's connection: a pooler
    such as PgBouncer stands between), `round_trip_ms`, and `clock_ahead` (seconds by which its clock is ahead)."""
    import psycopg
    from psycopg.rows import dict_row

    try:
        with psycopg.connect(database, connect_timeout=5, prepare_threshold=None, **AS_TEXT) as connection:
            connection.execute("SET LOCAL statement_timeout = 5000")  # a pooler may hand the connection to others
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
    return SimpleNamespace(**row, **more, is_pooled=is_pooled)


@check("database")
def told_of(server: SimpleNamespace) -> Iterator[CheckResult]:
    """Yield the findings about a server, see `_server`."""
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
