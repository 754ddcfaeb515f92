"""A copy of what a cluster keeps, for commands that read files: made, read and removed.

Rule: it claims nothing and changes nothing in the cluster, so it works beside daemons that write. Each topic is as it
was at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from memd.errors import ObjectMissing, StoreError, StoreLocked, UnknownTopic
from memd.store.bucket.objects import Bucket
from memd.store.cluster.cached_folder import CachedFolder
from memd.store.cluster.database import Connection, Database
from memd.store.cluster.kept import KeptTopic, places, read_topic
from memd.store.cluster.object_keeper import ObjectKeeper
from memd.store.cluster.sealing import ClusterKeys
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import master_of
from memd.store.layout import LOCK_NAME, TopicLayout
from memd.wording import no_topic

_PREFIX = ".memd-reading-"
"""Begins the names of the folders of copies; no topic can have it."""
_TRIES = 3
_PAGE = 1_000


@contextmanager
def copy_of(
    database: Database,
    bucket: Bucket,
    files: LocalDisk,
    beside: Path,
    topic_id: str | None,
    tell: Callable[[int, int], None],
) -> Iterator[Path]:
    """Yield a folder with all topics, or one.

    Args:
        files: with the cluster's key, if that is encrypted.
        beside: the data directory, in which the copy is made.
        tell: called with the topics that are there, and all of them.

    Raises:
        UnknownTopic: there is no such topic.
        StoreError: the database or the bucket cannot be read, or the disk not be written (DiskFull).
    """
    names = names_in(database)
    if topic_id is not None:
        if topic_id not in names:
            TopicLayout(beside, topic_id)  # raises BadTopicId if it is not a topic name
            raise UnknownTopic(no_topic(topic_id))
        names = [topic_id]
    keys = ClusterKeys(database, master_of(files, beside))
    keys.join()
    with _own_folder(files, beside) as folder:
        for done, name in enumerate(names):
            tell(done, len(names))
            _fetch(database, bucket, keys, files, TopicLayout(folder, name))
        tell(len(names), len(names))
        yield folder


def names_in(database: Database) -> list[str]:
    """Return the topics of a cluster, sorted; also those of which only what is forbidden is left."""
    page = (
        "SELECT topic FROM memd_topic AS t WHERE topic > %s AND (log_end > 0 OR log_number > 1 OR hot_end > 0"
        " OR EXISTS (SELECT FROM memd_object AS o WHERE o.topic = t.topic)) ORDER BY topic LIMIT %s"
    )
    names: list[str] = []
    while True:
        after = names[-1] if names else ""
        rows = database.ask(lambda connection: connection.execute(page, (after, _PAGE)).fetchall())  # noqa: B023
        names += [row[0] for row in rows]
        if len(rows) < _PAGE:
            return names


def _fetch(database: Database, bucket: Bucket, keys: ClusterKeys, files: LocalDisk, layout: TopicLayout) -> None:
    objects = ObjectKeeper(bucket, keys)
    for folder in (layout.directory, layout.segments):
        files.make_directory(folder)
    for left in reversed(range(_TRIES)):
        kept = database.ask(lambda connection: _kept(connection, layout.topic_id, keys))
        try:
            if not CachedFolder(files, layout).make_equal(kept.files(layout), objects.pieces) or not left:
                break
        except ObjectMissing:  # it was replaced meanwhile
            if not left:
                raise
    files.remove(layout.cached)


def _kept(connection: Connection, topic_id: str, keys: ClusterKeys) -> KeptTopic:
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        ends = "SELECT key, log_number, log_end, hot_number, hot_end FROM memd_topic WHERE topic = %s"
        row = connection.execute(ends, (topic_id,)).fetchone()
        if row is None:
            raise UnknownTopic(no_topic(topic_id))
        return read_topic(connection, topic_id, places(row[1:]), row[0], keys.seal(row[0]))


@contextmanager
def _own_folder(files: LocalDisk, beside: Path) -> Iterator[Path]:
    """Yield an empty folder that no other command has; one that a killed command left is used again."""
    for number in count(1):
        folder = beside / f"{_PREFIX}{number}"
        files.make_directory(folder)
        try:
            lock = files.lock(folder / LOCK_NAME)
            break
        except StoreLocked:
            continue
    try:
        _empty(files, folder)
        yield folder
    finally:
        with suppress(StoreError):
            _empty(files, folder)
        lock.release()  # before its file goes, which it would make anew
        with suppress(StoreError):
            files.remove(folder / LOCK_NAME)
            files.remove_directory(folder)


def _empty(files: LocalDisk, folder: Path) -> None:
    for name in files.names(folder):
        if name != LOCK_NAME:
            remove_tree(files, folder / name)


def remove_tree(files: LocalDisk, folder: Path, *, wipes: bool = False) -> None:
    """Remove a folder with all that is in it; with `wipes`, overwritten."""
    for name in files.names(folder):
        path = folder / name
        if files.is_directory(path):
            remove_tree(files, path, wipes=wipes)
        elif wipes:
            files.wipe(path)
        else:
            files.remove(path)
    files.remove_directory(folder)
