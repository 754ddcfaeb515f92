"""The store: one directory and its topics, held by one daemon at a time.

Rule: a topic is read from disk at its first use, never before, and can be closed again; everything acknowledged is on
disk. The log itself is in topic.py. In a cluster the directory is a copy, and only the shared log lists all topics.

The cost of a start depends on the topics used, not on those stored: it checks only topics used since each was last
known to be at rest. An unlisted topic has no work to do, and no id above the list's. The list is only an optimisation:
if it is missing, torn or does not fit the directory, all topics are checked.

    memd recent 1 HIGHEST_ID TOPICS STATE        the number of topics, and a digest of what "no work to do" depends on
    work                                         a topic opened since
    +garden                                      a topic created since

A topic is erased with its folder, which is moved aside in one step; from then on a topic of its name is another one.
Then all files in the folder are overwritten and removed. An interrupted erasure resumes.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from memd.entries import TOPIC_ID_PATTERN
from memd.errors import CorruptFile, ForeignFile, StoreError, StoreWriteFailed, WrongKey
from memd.store.claim import AppendFile, Claim
from memd.store.disk import LocalDisk, Wiper, replace_file
from memd.store.encryption.disk import check_disk
from memd.store.erasure import (
    Erasure,
    ErasureLedger,
    Erasures,
    ForbiddenText,
    Log,
    encode_forbidden,
    read_forbidden,
    returned,
    rows_again,
)
from memd.store.layout import (
    LOCK_NAME,
    RECENT_NAME,
    TopicLayout,
    TopicNames,
    check_no_cluster,
    erasures_dir,
    former_names,
    topic_ids_in,
)
from memd.store.log.columns import uuid_bytes
from memd.store.log.format import ModelId
from memd.store.log.journal import records_of
from memd.store.log.recovery import Finding
from memd.store.log.segment import read_header
from memd.store.shared.postgres import SharedLog, join, topics_in
from memd.store.shared.shared_topic import SharedTopicLog, remove_topic
from memd.store.snapshot import Snapshot
from memd.store.topic import CanonicalClock, StoreShared, TopicLog, highest_id_on_disk

__all__ = ["CanonicalClock", "Finding", "ModelId", "Snapshot", "Store", "StoreShared", "TopicLog"]


MakeErasures = Callable[[LocalDisk, Path], Erasures]

_HEADER = re.compile(r"memd recent 1 (\d{1,19}) (\d{1,9}) ([0-9a-f]{1,64})")
_SPARE_BYTES = 32 << 10
"""Bytes for topics at rest that the file may have before it is rewritten."""


class Store:
    """A data directory, held by one daemon at a time."""

    def __init__(
        self,
        data_dir: Path,
        shared: StoreShared,
        *,
        kept: SharedLog | None = None,
        erasures: MakeErasures = ErasureLedger,
    ) -> None:
        """Lock and open the directory, created if necessary; in a cluster it is a copy of `kept`. Raises StoreLocked:
        another daemon holds it; WrongKey: it is encrypted, and `shared.files` is not its encrypted disk;
        StoreWriteFailed: it cannot be created or written. (On a disk that is read-only, but has the directory, each
        write fails instead.)"""
        self.data_dir = data_dir
        self.shared = shared
        self.files = files = shared.files
        self.model = shared.model
        self.clock = clock = shared.clock
        self.kept = kept
        """The log shared with other daemons, which the directory copies; None without a cluster."""
        self._topics: dict[str, TopicLog] = {}
        self._topics_lock = threading.Lock()
        """Guards the table of open topics and the list of recent ones. Taken after an opening's lock."""
        self._opening: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        check_disk(files, data_dir)
        _create(files, data_dir)
        self._lock = files.lock(data_dir / LOCK_NAME)
        try:
            if kept is None:
                check_no_cluster(files, data_dir)
            else:
                join(files, data_dir, kept)
            self._names = TopicNames(files, data_dir)
            self.ledger = erasures(files, data_dir)
            self._recent = RecentTopics(files, data_dir, len(self._names))
            clock.observe(max(self.ledger.highest_id, self._recent.highest_id))
            for topic_id in self._names if self._recent.names is None else self._recent.names:
                clock.observe(highest_id_on_disk(files, TopicLayout(data_dir, topic_id), shared.model.dimension))
        except BaseException:
            self._lock.release()
            raise

    def topic(self, topic_id: str) -> TopicLog:
        """Return the topic's log, recovered from disk at the first call, created if there is none. Raises BadTopicId:
        not a topic name, or one that differs only in case from that of another topic; ForeignFile: its `active.bin` is
        not for this version of memd; StoreError: its files cannot be read, repaired or created."""
        with self._opening_of(topic_id):
            topic = self._topics.get(topic_id)
            if topic is None:
                topic = self._opened(topic_id)
            return topic

    def _opening_of(self, topic_id: str) -> threading.Lock:
        """Return the lock held while a topic is opened or closed. One per topic, because opening may take long."""
        with self._topics_lock:
            return self._opening.setdefault(topic_id, threading.Lock())

    def _opened(self, topic_id: str) -> TopicLog:
        layout = TopicLayout(self.data_dir, topic_id)
        with self._topics_lock:
            self._recent.add(topic_id, is_new=self._names.add(topic_id))
        claim = Claim(self.files, layout)
        try:
            if self.kept is None:
                topic = TopicLog(self.shared, claim)
            else:
                journal = self.files.read(layout.hot) if self.files.size(layout.hot) is not None else b""
                mark = records_of(journal).mark
                topic = SharedTopicLog(self.shared, claim, self.kept, 0 if mark is None else mark.generation)
        except BaseException:
            claim.release()
            raise
        topic.findings += returned(list(self.ledger), layout, _logs_of(topic))
        with self._topics_lock:
            self._topics[topic_id] = topic
        return topic

    def journal_of(self, topic_id: str) -> Path:
        """Return the path of the topic's journal, whether or not the topic is open. Raises BadTopicId: not a topic
        name."""
        return TopicLayout(self.data_dir, topic_id).hot

    def has_work(self, topic_id: str) -> bool:
        """Return whether the topic has a full segment without columns, or a file of another embedding model; judged by
        file names and headers."""
        layout = TopicLayout(self.data_dir, topic_id)
        unsealed = (self.files.size(layout.meta(number)) is None for number in layout.segment_ids(self.files))
        return any(unsealed) or self.has_other_model(topic_id)

    def has_other_model(self, topic_id: str) -> bool:
        """Return whether another embedding model wrote a file of the topic; reads only headers."""
        return bool(models_in(self.files, TopicLayout(self.data_dir, topic_id)) - {self.model})

    def close_topic(self, topic_id: str) -> None:
        """Close a topic; the next call of `topic` reads it from disk. Its snapshots stay valid."""
        with self._opening_of(topic_id):
            with self._topics_lock:
                topic = self._topics.pop(topic_id, None)
            if topic is None:
                return
            topic.close()
        if not self.has_work(topic_id):
            with self._topics_lock:
                if topic_id not in self._topics and self._recent.rest(topic_id):
                    self._write_recent()

    def before_write(self) -> None:
        """Record durably that the open topics are in use, before something is written to one of them."""
        with self._topics_lock:
            self._recent.sync()

    def to_look_at(self, state: str) -> list[str]:
        """Return the topics that may have work to do. `state`: a digest of all that this depends on, except the
        embedding model. If either has changed since, all topics are returned."""
        with self._topics_lock:
            found = self._recent.to_look_at(self._state(state))
            if found is not None:
                return [name for name in found if self._names.has(name)]
            every = topic_ids_in(self.files, self.data_dir)  # in a cluster, those with a copy here
            self._recent.expect(every)
            return every

    def note_at_rest(self, topic_ids: Iterable[str], state: str) -> None:
        """Note topics without work to do. The next start checks the others, and open ones."""
        with self._topics_lock:
            self._write_recent(set(topic_ids) - self._topics.keys(), self._state(state))

    def _write_recent(self, at_rest: Collection[str] = (), state: str | None = None) -> None:
        self._recent.write(at_rest, highest_id=self.clock.last, topics=len(self._names), state=state)

    def _state(self, state: str) -> str:
        return hashlib.blake2b(f"{self.model}{state}".encode(), digest_size=16).hexdigest()

    def repetition(self, erasure: Erasure) -> Erasure | None:
        """Return the erasure, not begun, of what a topic has again of the text of a finished one, and of nothing else;
        None if it has nothing. Opens the topic."""
        topic = self.topic(erasure.topic_id)
        rows = rows_again(erasure, _logs_of(topic))
        if not rows and not topic.holding(erasure.chunk_uuids):
            return None
        again = msgspec.structs.replace(erasure, id=self.clock.next(), at=self.clock.now_us(), done_at=None)
        if erasure.kind != "topic":
            return again
        uuids = {uuid_bytes(row["uuid_high"], row["uuid_low"]) for some in rows for row in some}
        bare = msgspec.structs.replace(again, kind="chunks", highest_id=0, names=())
        return msgspec.structs.replace(
            bare, uuids=b"".join(sorted(uuids)), chunks=len(uuids), entries=sum(map(len, rows))
        )

    def retire(self, topic_id: str) -> None:
        """Close a topic for good, after pending writes and reads; see `TopicLog.retire`. May be slow."""
        if topic := self._topics.get(topic_id):
            topic.retire()

    def put_topic_aside(self, erasure: Erasure, forbidden: ForbiddenText) -> Erasure:
        """Move the folder of a retired topic aside, so that the next call of `topic` begins another one. Return the
        erasure as now in the ledger. `forbidden`: text that the next topic of this name must never store, in addition
        to what the folder lists. Raises StoreError: the topic is as it was, closed, or aside."""
        layout, files = TopicLayout(self.data_dir, erasure.topic_id), self.files
        aside = _aside_of(layout, erasure)
        with self._opening_of(erasure.topic_id):
            with self._topics_lock:
                topic = self._topics.pop(erasure.topic_id, None)
            try:
                if not self.is_aside(erasure):  # first: a later topic of this name must not be erased
                    names = tuple(former_names(files, layout.directory))
                    erasure = msgspec.structs.replace(erasure, highest_id=self.clock.next(), names=names)
                    self.ledger.write(erasure)
                if self.kept is not None and not erasure.is_moved:
                    remove_topic(self.kept, erasure.topic_id, encode_forbidden(forbidden) if forbidden else b"")
            finally:
                if topic is not None:
                    topic.close()
            with self._topics_lock:
                if not self.is_aside(erasure) and files.is_directory(layout.directory):
                    if forbidden:  # with the folder, so that a start after an interruption finds it there
                        replace_file(files, layout.forbidden, encode_forbidden(forbidden))
                    files.rename(layout.directory, aside.directory)
                    files.sync_directory(self.data_dir)
                    files.sync_directory(aside.data_dir)
                with suppress(CorruptFile, ForeignFile, WrongKey):  # of a topic that could not be read before either
                    forbidden = read_forbidden(files, aside)
                if forbidden:
                    files.make_directory(layout.directory)
                    replace_file(files, layout.forbidden, encode_forbidden(forbidden))
                    files.sync_directory(self.data_dir)
                if not files.is_directory(layout.directory):
                    self._names.remove(erasure.topic_id)
                moved = msgspec.structs.replace(erasure, is_moved=True)
                self.ledger.write(moved)
                self._write_recent({erasure.topic_id})
                return moved

    def has_copy(self, topic_id: str) -> bool:
        """Return whether the directory has something of the topic."""
        return self.files.is_directory(TopicLayout(self.data_dir, topic_id).directory)

    def drop_copy(self, topic_id: str) -> None:
        """Close a topic that is a copy, and remove its folder, leaving no text on the disk."""
        assert self.kept is not None, "else it is the topic"
        with self._opening_of(topic_id):
            with self._topics_lock:
                topic = self._topics.pop(topic_id, None)
            if topic is not None:
                topic.close()
            Wiper(self.files).wipe_folder(TopicLayout(self.data_dir, topic_id).directory)

    def is_aside(self, erasure: Erasure) -> bool:
        """Return whether a topic's folder was moved aside: a topic of its name is another one."""
        return self.files.is_directory(_aside_of(TopicLayout(self.data_dir, erasure.topic_id), erasure).directory)

    def wipe_aside(self, erasure: Erasure, wiper: Wiper) -> None:
        """Overwrite and remove a folder moved aside; an encrypted topic's key first, because the rest is noise without
        it.

        Slow, in the background, resumable. Raises StoreError: something is left.
        """
        aside = _aside_of(TopicLayout(self.data_dir, erasure.topic_id), erasure)
        wiper.wipe(aside.key)
        wiper.wipe_folder(aside.directory)

    def topic_ids(self) -> list[str]:
        """Return all topics, sorted. It checks each of them, so it is too slow for answering requests."""
        if self.kept is not None:
            return topics_in(self.kept)
        return topic_ids_in(self.files, self.data_dir)

    def has_topic(self, topic_id: str) -> bool:
        """Return whether there is a topic of this name."""
        if self.kept is not None:
            return topic_id in self._topics or bool(self.kept.since(topic_id, {"log": 0, "hot": 0}, limit=1).rows)
        return self._names.has(topic_id)

    @property
    def topic_count(self) -> int:
        """The number of topics in the directory."""
        return len(self._names)

    def close(self) -> None:
        """Close all topics and release the directory for another daemon. Later appends fail."""
        with self._topics_lock:
            for topic in self._topics.values():
                topic.close()
            self._recent.close()
        self._lock.release()


def models_in(files: LocalDisk, layout: TopicLayout) -> set[ModelId]:
    """Return the models that wrote the log files of a topic; reads only headers, and needs no lock."""
    headers = (read_header(files, path) for path in layout.log_files(files))
    return {ModelId(one.dimension, one.fingerprint) for one in headers if one is not None}


def _logs_of(topic: TopicLog) -> list[Log]:
    return [(view.segment.header.topic, view.rows) for view in topic.snapshot().views.values()]


def _create(files: LocalDisk, data_dir: Path) -> None:
    """Create the directory and its missing parents durably.

    Existing directories are not memd's to sync, with one exception: without a lock file, an earlier start may have
    crashed between creating the directory and syncing its parent. Above its parent, a sync that fails is no error.
    """
    has_started = files.size(data_dir / LOCK_NAME) is not None
    for directory in reversed([data_dir, *data_dir.parents]):
        if not files.is_directory(directory) or (directory == data_dir and not has_started):
            files.make_directory(directory)
            files.sync_directory(directory.parent)
        elif not has_started:
            with suppress(StoreWriteFailed):
                files.sync_directory(directory.parent)


def _aside_of(layout: TopicLayout, erasure: Erasure) -> TopicLayout:
    """Return the files of a topic that is being erased."""
    return TopicLayout(erasures_dir(layout.data_dir), f"{erasure.id}.topic")


class RecentTopics:
    """The list of topics that a start has to check, while the store is open. For one thread at a time."""

    def __init__(self, files: LocalDisk, data_dir: Path, topics: int) -> None:
        """Read the list; if that fails there is none until `write`. `topics`: how many the directory has. If it has
        others than the list counted, somebody has added or removed topics, and the list is discarded."""
        self._files, self._path = files, data_dir / RECENT_NAME
        self.highest_id, self._state = 0, ""
        """Upper bound of the ids in unlisted topics."""
        self._names: dict[str, None] = {}
        """In the order of their first use."""
        self._file: AppendFile | None = None
        try:
            head, *lines, rest = files.read(self._path).decode("ascii").split("\n")
            header, names = _HEADER.fullmatch(head), [line.removeprefix("+") for line in lines]
            counted = 0 if header is None else int(header[2]) + sum(line.startswith("+") for line in lines)
            if header is None or rest or not all(map(TOPIC_ID_PATTERN.fullmatch, names)) or counted != topics:
                raise ValueError("it is torn, or of other topics")
            self.highest_id, self._state, self._names = int(header[1]), header[3], dict.fromkeys(names)
            self._go_on()
        except (StoreError, ValueError):
            self._give_up()

    @property
    def names(self) -> tuple[str, ...] | None:
        """The listed topics; None if there is no list."""
        return None if self._file is None else tuple(self._names)

    def to_look_at(self, state: str) -> tuple[str, ...] | None:
        """Return the topics that may have work to do; None for all."""
        return self.names if self._state == state else None

    def expect(self, topic_ids: Iterable[str]) -> None:
        """Note topics to check; they stay listed until each is known to be at rest."""
        self._names.update(dict.fromkeys(topic_ids))

    def add(self, topic_id: str, *, is_new: bool) -> None:
        """Note that a topic is opened."""
        if topic_id not in self._names or is_new:
            self._names[topic_id] = None
            line = f"{'+' if is_new else ''}{topic_id}\n".encode()
            self._change(lambda file: file.append(line, sync=False))

    def sync(self) -> None:
        """Make the notes durable: before a write to a topic, not at each read."""
        self._change(AppendFile.sync)

    def rest(self, topic_id: str) -> bool:
        """Note that a topic is closed with nothing left to do. Return whether the file should be rewritten."""
        self._names.pop(topic_id, None)
        return self._file is not None and self._file.end > 2 * sum(map(len, self._names)) + _SPARE_BYTES

    def write(self, at_rest: Collection[str], *, highest_id: int, topics: int, state: str | None = None) -> None:
        """Rewrite the file without the topics `at_rest`; if that fails there is no list."""
        self.close()
        self._names = {name: None for name in self._names if name not in at_rest}
        self._state = self._state if state is None else state
        lines = [f"memd recent 1 {highest_id} {topics} {self._state}", *self._names]
        try:
            replace_file(self._files, self._path, "".join(f"{line}\n" for line in lines).encode())
            self._go_on()
        except StoreError:
            self._give_up()

    def close(self) -> None:
        """Close the file; the next note opens it again."""
        if self._file is not None:
            self._file.close()

    def _change(self, act: Callable[[AppendFile], None]) -> None:
        if self._file is not None:
            try:
                act(self._file)
            except StoreError:
                self._give_up()

    def _go_on(self) -> None:
        self._file = AppendFile(self._files, self._path, self._files.size(self._path) or 0)

    def _give_up(self) -> None:
        """Remove the list: none is better than one that lacks a topic."""
        self.close()
        self._file = None
        with suppress(StoreError):
            self._files.remove(self._path)
