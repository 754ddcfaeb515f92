"""Moving topics between a folder and a cluster, both ways.

Rule: topics are copied one by one, and a topic is used on the other side only when all of it was read there again and
compared. What is removed, if that is asked for, is removed after that. While it runs the folder is locked and the topic
is claimed, so that nobody writes to either; whoever is interrupted runs it again, and it goes on.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from memd.errors import BadTopicId, CorruptFile, ForeignFile, MoveRefused, NotFound, StoreError, TopicHeld, TopicMoving
from memd.settings.encryption import EncryptionSettings
from memd.store.bucket.objects import Bucket
from memd.store.cluster.copying import (
    TopicFiles,
    check_target,
    copy_topic,
    count_records,
    differences,
    lift_mark,
    mended,
)
from memd.store.cluster.database import Database
from memd.store.cluster.moved import MovedTopic, MovedTopics, folder_state
from memd.store.cluster.postgres_claim import PostgresClaim
from memd.store.cluster.postgres_shelf import MOVER, PostgresShelf
from memd.store.cluster.reading import names_in, remove_tree
from memd.store.disk import DiskFiles, LocalDisk
from memd.store.encryption.opening import disk_for
from memd.store.layout import (
    CLUSTER_NAME,
    KEY_NAME,
    LOCK_NAME,
    MOVING_NAME,
    RECENT_NAME,
    TopicLayout,
    TopicNames,
    has_files,
    topic_folders_in,
)
from memd.store.local_shelf import LocalShelf
from memd.store.log.recovery import torn_files
from memd.store.shelf import Claim, Heads, Shelf

LEASE_SECONDS = 60.0
_OF_ONE_TOPIC = (BadTopicId, CorruptFile, ForeignFile, MoveRefused, TopicHeld, TopicMoving)
"""Errors after which the other topics are moved all the same."""


class ClusterPlace(msgspec.Struct, frozen=True):
    """Where a cluster keeps its topics."""

    database: Database
    bucket: Bucket
    encryption: EncryptionSettings = EncryptionSettings()
    """With the key that all its daemons have, where it is encrypted."""


class Folder(msgspec.Struct, frozen=True):
    """A data directory."""

    path: Path
    encryption: EncryptionSettings
    """With its key, where it is encrypted or is to be when it is made."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The order: which topics, and how."""

    is_into_cluster: bool
    topics: tuple[str, ...] = ()
    """Only these; empty: all."""
    removes: bool = False
    """Whether what was moved and compared is removed where it was."""
    is_dry: bool = False
    """Whether nothing is changed."""


class MovedOne(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for a topic."""

    topic: str
    outcome: str
    """moved, same (it was there already), before (moved by an earlier run), refused; in a dry run: new or there."""
    records: int = 0
    bytes: int = 0
    note: str = ""
    """Why it was refused, or what its owner should know."""
    is_removed: bool = False


class Progress(msgspec.Struct):
    """How far it came."""

    topics: int = 0
    of_topics: int = 0
    bytes: int = 0
    topic: str = ""


Tell = Callable[[Progress], None]


def move(
    folder: Folder, cluster: ClusterPlace, wish: Wish, tell: Tell = lambda _: None, files: LocalDisk | None = None
) -> Iterator[MovedOne]:
    """Move topics; yields what became of each.

    Args:
        files: the disk below; another one than the real only where a fault is to be injected.

    Raises:
        StoreLocked: a daemon has the folder.
        NotFound: there is no topic of a name that is asked for.
        StoreError: the database, the bucket or the disk fails: run again, it goes on.
    """
    plain = files or DiskFiles()
    path = folder.path
    if plain.size(path / CLUSTER_NAME) is not None:
        raise StoreError(f"{path}: is the cache of a cluster and has no topics of its own; name that cluster instead")
    if wish.is_into_cluster and not plain.is_directory(path):
        raise StoreError(f"{path}: there is no such folder; name the data directory to move from")
    is_encrypted = plain.size(path / KEY_NAME) is not None
    if wish.is_into_cluster and is_encrypted and not cluster.encryption.is_on:
        raise StoreError(
            f"{path}: is encrypted, and this cluster keeps plain text; give the settings of an encrypted one "
            "(encryption.key_file) or, if its text may be read there, run memd decrypt first"
        )
    with ExitStack() as until_then:
        if not wish.is_dry:
            for missing in reversed([path, *path.parents]):
                if not plain.is_directory(missing):
                    plain.make_directory(missing)
                    plain.sync_directory(missing.parent)
            disk = disk_for(path, folder.encryption, plain, creating=not wish.is_into_cluster)
            until_then.callback(plain.lock(path / LOCK_NAME).release)
            plain.make_directory(path / MOVING_NAME)
            plain.sync_directory(path)
        else:
            disk = disk_for(path, folder.encryption, plain)
        names = _chosen(wish, topic_folders_in(plain, path) if wish.is_into_cluster else names_in(cluster.database))
        if wish.is_dry:
            yield from _planned(path, disk, cluster, wish, names)
            return
        mover = _Mover(plain, disk, folder, cluster, wish, tell)
        until_then.callback(mover.close)
        tell(mover.progress)
        mover.progress.of_topics = len(names)
        for name in names:
            yield mover.topic(name)


def _chosen(wish: Wish, there: Collection[str]) -> list[str]:
    if missing := [name for name in wish.topics if name not in there]:
        raise NotFound(f"there is no topic {missing[0][:140]!r} to move; nothing was moved")
    return sorted(set(wish.topics) or there)


def _planned(path: Path, disk: LocalDisk, cluster: ClusterPlace, wish: Wish, names: list[str]) -> Iterator[MovedOne]:
    """The plan. Whether a topic that is there may be written over shows only when both are read."""
    there = set(names_in(cluster.database) if wish.is_into_cluster else topic_folders_in(disk, path))
    for name in names:
        size = 0
        if wish.is_into_cluster:
            size = TopicFiles(disk, TopicLayout(path, name)).bytes
        yield MovedOne(topic=name, outcome="there" if name in there else "new", bytes=size)


class _Mover:
    def __init__(
        self, plain: LocalDisk, disk: LocalDisk, folder: Folder, cluster: ClusterPlace, wish: Wish, tell: Tell
    ) -> None:
        """`disk`: that of the folder; `plain`: the one below."""
        self._plain_files, self._disk, self._path, self._wish, self._tell = plain, disk, folder.path, wish, tell
        self._cluster = cluster
        self._work = folder.path / MOVING_NAME
        self._local = LocalShelf(disk, folder.path)
        self._mover = f"{MOVER} of {socket.gethostname()}:{folder.path}"
        self._notes = MovedTopics(plain, folder.path)
        self._names = TopicNames(plain, folder.path)
        self._folder = folder
        self._kept = self._cached("cache")
        self.progress = Progress()

    def close(self) -> None:
        """Leave nothing but the notes."""
        self._notes.close()
        for name in ("cache", "check", "removed"):
            remove_tree(self._plain_files, self._work / name)

    def topic(self, name: str) -> MovedOne:
        """Move one topic."""
        self.progress.topic = name
        self._tell(self.progress)
        try:
            done = self._topic(name)
        except _OF_ONE_TOPIC as error:
            done = MovedOne(topic=name, outcome="refused", note=str(error))
        self.progress.topics += 1
        self._tell(self.progress)
        return done

    def _topic(self, name: str) -> MovedOne:
        layout = TopicLayout(self._path, name)
        note = self._notes.of(name, self._cluster.database.cluster)
        heads = self._kept.heads([name]).get(name)
        is_folder_as_moved = note is not None and note.folder == folder_state(self._disk, layout)
        is_cluster_as_moved = note is not None and note.heads is not None and note.heads == _at_rest(heads)
        is_into, is_there = self._wish.is_into_cluster, self._disk.is_directory(layout.directory)
        if is_folder_as_moved if is_into else (is_cluster_as_moved and is_there and not self._wish.removes):
            if is_into and heads is None and has_files(self._disk, layout.directory):
                return MovedOne(topic=name, outcome="before", note="it is not there any more; it was erased there")
            done = MovedOne(topic=name, outcome="before")
            return self._removed(name, done) if self._wish.removes else done
        if not is_into:
            self._names.add(name)  # raises where another one differs from it only in case
        with self._claimed(name) as (shelf, theirs):
            ours = self._local.claim(name)
            try:
                source, target = (ours, theirs) if is_into else (theirs, ours)
                done = self._copied(source, target, is_as_moved=is_cluster_as_moved if is_into else is_folder_as_moved)
            finally:
                ours.release()
            if self._wish.removes and not is_into:
                # Under this claim: who lost it meanwhile removes nothing.
                shelf.forget_claimed(theirs)
                done = msgspec.structs.replace(done, is_removed=True)
        self._note(name, is_removed=done.is_removed)
        return self._removed(name, done) if self._wish.removes and is_into else done

    def _copied(self, source: Claim, target: Claim, *, is_as_moved: bool) -> MovedOne:
        name, is_into = source.layout.topic_id, self._wish.is_into_cluster
        self._plain_files.sync_directory(self._path)
        findings = mended(source) if has_files(source.files, source.layout.directory) else []
        told = f"{len(findings)} findings of damage go along: see memd verify" if findings else ""
        files = TopicFiles.of(source)
        check_target(files, TopicFiles.of(target), is_as_moved=is_as_moved)
        is_marked = target.files.size(target.layout.moving) is not None
        outcome = "moved"
        if not is_marked and not differences(files, TopicFiles.of(target)):
            outcome = "same"
        else:
            copy_topic(files, target, self._mover, self._copying)
            if is_into:
                # Whoever never had it reads all of it.
                with self._claimed(name, "check") as (_, again):
                    _check_same(files, TopicFiles.of(again))
                    lift_mark(again)
            else:
                _check_same(files, TopicFiles.of(target))
                if self._kept.renew([source]):
                    raise MoveRefused(f"topic {name}: a daemon has written to it meanwhile; move it again")
                lift_mark(target)
                self._plain_files.remove(self._path / RECENT_NAME)  # the next start looks at all ids
        return MovedOne(topic=name, outcome=outcome, records=count_records(files), bytes=files.bytes, note=told)

    def _copying(self, size: int) -> None:
        self.progress.bytes += size
        self._tell(self.progress)

    def _note(self, name: str, *, is_removed: bool) -> None:
        heads = self._kept.heads([name]).get(name)
        if heads is None or heads.epoch == 0:  # else a daemon has it already, and may have written to it
            folder = None if is_removed else folder_state(self._disk, TopicLayout(self._path, name))
            self._notes.add(MovedTopic(name, self._cluster.database.cluster, heads, folder))

    def _removed(self, name: str, done: MovedOne) -> MovedOne:
        """Remove a topic from the folder."""
        layout, aside = TopicLayout(self._path, name), self._work / "removed"
        if torn := torn_files(self._plain_files, [layout.directory, layout.segments]):
            told = (
                f"{layout.directory} stays: {torn[0].name} is an interrupted write that was set aside, look at it first"
            )
            return msgspec.structs.replace(done, note=told)
        remove_tree(self._plain_files, aside)
        self._plain_files.rename(layout.directory, aside)
        self._plain_files.sync_directory(self._path)
        self._plain_files.sync_directory(self._work)
        remove_tree(self._plain_files, aside)
        return msgspec.structs.replace(done, is_removed=True)

    def _cached(self, folder: str) -> PostgresShelf:
        """The shelf of the cluster, with an empty cache."""
        path = self._work / folder
        remove_tree(self._plain_files, path)
        self._plain_files.make_directory(path)
        disk = disk_for(path, self._cluster.encryption, self._plain_files, creating=True)
        database, bucket = self._cluster.database, self._cluster.bucket
        mover = self._mover
        return PostgresShelf(database, bucket, disk, path, url=mover, lease_seconds=LEASE_SECONDS, seat=mover)

    @contextmanager
    def _claimed(self, name: str, folder: str = "cache") -> Iterator[tuple[PostgresShelf, PostgresClaim]]:
        """A claim to a topic of the cluster, which is kept as long as the block takes; its cache is empty."""
        shelf = self._cached(folder)
        claim = shelf.claim(name, gone=self._mover)
        try:
            with _renewed(shelf, claim):
                yield shelf, claim
        finally:
            claim.release()
            remove_tree(self._plain_files, self._work / folder, wipes=self._folder.encryption.is_on)


@contextmanager
def _renewed(shelf: Shelf, claim: Claim) -> Iterator[None]:
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(LEASE_SECONDS / 3):
            with suppress(StoreError):  # else the next write tells
                shelf.renew([claim])

    thread = threading.Thread(target=renew, name="memd-move-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _at_rest(heads: Heads | None) -> Heads | None:
    """The heads of a topic, whoever has it."""
    return None if heads is None else msgspec.structs.replace(heads, epoch=0)


def _check_same(source: TopicFiles, target: TopicFiles) -> None:
    if found := differences(source, target):
        raise StoreError(
            f"topic {source.layout.topic_id}: {found[0]} is not the same after it was copied, so it is not used there; "
            "run memd move again, and if that does not help, memd verify on both sides"
        )
