"""The store: one directory and its topics, held by one daemon at a time.

Rule: a topic is read from disk when it is first asked for, never before, and can be let go again; what was acknowledged
is on disk. See topic_log.py for the log itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from memd.store.files import DiskFiles, Files, Lock
from memd.store.layout import LOCK_NAME, TopicLayout, topic_ids_in
from memd.store.log.recovery import Finding
from memd.store.opening import Model, header_of, highest_id_on_disk
from memd.store.snapshot import Hit, Snapshot
from memd.store.topic import Checked, Grounds, SharedClock, TopicLog, unchanged

__all__ = ["Finding", "Hit", "Snapshot", "Store", "TopicLog"]


def _now_us() -> int:
    return time.time_ns() // 1000


class Store:
    """A data directory, held by one daemon at a time."""

    def __init__(self, data_dir: Path, grounds: Grounds, lock: Lock) -> None:
        """Use `Store.open`."""
        self.data_dir = data_dir
        self.files = grounds.files
        self.model = grounds.model
        self._grounds = grounds
        self.known_words = grounds.known_words
        self._lock = lock
        self._topics: dict[str, TopicLog] = {}
        self._topics_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        data_dir: Path,
        *,
        dimension: int,
        fingerprint: str,
        segment_entries_max: int,
        checked: Checked = unchanged,
        files: Files | None = None,
        now_us: Callable[[], int] = _now_us,
    ) -> Store:
        """Take the directory, creating it if necessary.

        `dimension` and `fingerprint` (at most 32 ASCII characters) are those of the embedding model in use; every draft
        goes through `checked` before it is written.

        Raises:
            StoreLocked: another daemon holds it.
            StoreWriteFailed: it cannot be created or written.
        """
        files = files or DiskFiles()
        _create(files, data_dir)
        lock = files.lock(data_dir / LOCK_NAME)
        try:
            clock = SharedClock(now_us)
            for topic_id in topic_ids_in(files, data_dir):
                clock.saw(highest_id_on_disk(files, TopicLayout(data_dir, topic_id), dimension))
        except BaseException:
            lock.release()
            raise
        model = Model(dimension, fingerprint)
        grounds = Grounds(
            files=files, model=model, clock=clock, segment_entries_max=segment_entries_max, checked=checked
        )
        return cls(data_dir, grounds, lock)

    def topic(self, topic_id: str) -> TopicLog:
        """The topic's log, recovered from disk at the first call, created if there is none.

        Raises:
            BadTopicId: not a topic name.
            ForeignFile: its `active.bin` is not for this version of memd.
            StoreError: its files cannot be read, put in order or created.
        """
        layout = TopicLayout(self.data_dir, topic_id)
        with self._topics_lock:
            if topic_id not in self._topics:
                for directory in (layout.directory, layout.segments):
                    self.files.make_directory(directory)
                self._topics[topic_id] = TopicLog(self._grounds, layout)
            return self._topics[topic_id]

    @property
    def findings(self) -> list[Finding]:
        """What was noticed in the topics that are open."""
        return [finding for topic in self._topics.values() for finding in topic.findings]

    def journal_of(self, topic_id: str) -> Path:
        """Where the topic's journal belongs, whether or not the topic is open.

        Raises:
            BadTopicId: not a topic name.
        """
        return TopicLayout(self.data_dir, topic_id).hot

    def has_unsealed(self, topic_id: str) -> bool:
        """Whether the topic has a full segment without an index, to judge by the names of its files."""
        layout = TopicLayout(self.data_dir, topic_id)
        return any(self.files.size(layout.meta(number)) is None for number in layout.segment_ids(self.files))

    def has_other_model(self, topic_id: str) -> bool:
        """Whether a file of the topic says that another embedding model wrote it; reads nothing but headers."""
        layout = TopicLayout(self.data_dir, topic_id)
        paths = [*map(layout.bin, layout.segment_ids(self.files)), layout.active]
        headers = (header_of(self.files, path) for path in paths)
        return any(header is not None and not self.model.wrote(header) for header in headers)

    def let_go(self, topic_id: str) -> None:
        """Close a topic and forget it; the next `topic` reads it from disk. Snapshots of it stay good."""
        with self._topics_lock:
            topic = self._topics.pop(topic_id, None)
        if topic is not None:
            topic.close()

    def saw_canonical_id(self, canonical_id: int) -> None:
        """Keep the ids of all entries from now on above this one."""
        self._grounds.clock.saw(canonical_id)

    def topic_ids(self) -> list[str]:
        """The topics on disk, sorted."""
        return topic_ids_in(self.files, self.data_dir)

    def close(self) -> None:
        """Close all topics and let another daemon have the directory. Whatever is appended afterwards fails."""
        with self._topics_lock:
            for topic in self._topics.values():
                topic.close()
        self._lock.release()


def _create(files: Files, data_dir: Path) -> None:
    """Make the directory and whatever is missing above it durably."""
    for directory in reversed([data_dir, *data_dir.parents]):
        if not files.is_directory(directory):
            files.make_directory(directory)
        # Also where it exists: an earlier start may have ended between these two steps.
        files.sync_directory(directory.parent)
