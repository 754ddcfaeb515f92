"""The store: one directory, its topics, and for each topic the append-only log that is the only truth.

Rule: an entry is acknowledged when `append` returns, and then it is durable. A failed append changes nothing. One
thread appends; sealing may run in another; readers take a snapshot and never wait for either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from memd.chunks import CanonicalClock, Draft, Entry, Status
from memd.errors import StoreError, StoreWriteFailed
from memd.store.files import DiskFiles, Files, Lock
from memd.store.format import FRAME_BYTES, HEADER_BYTES, Span, encode_entry, encode_record
from memd.store.layout import LOCK_NAME, TopicLayout, topic_ids_in
from memd.store.opening import Model, create_active, highest_id_on_disk, open_topic, rotate
from memd.store.public_ids import KnownUuids
from memd.store.recovery import Finding
from memd.store.sealing import write_sealed
from memd.store.segment import Growing, Sealed, digest_word, text_hash
from memd.store.snapshot import Hit, Snapshot, View
from memd.store.superseded import Bits, Directory, superseded
from memd.store.tail import Tail
from memd.store.vectors import VectorIndex

__all__ = ["Finding", "Hit", "Snapshot", "Store", "TopicLog"]


def _now_us() -> int:
    return time.time_ns() // 1000


class Store:
    """A data directory, held by one daemon at a time."""

    def __init__(
        self,
        files: Files,
        data_dir: Path,
        model: Model,
        segment_entries_max: int,
        now_us: Callable[[], int],
        lock: Lock,
    ) -> None:
        """Use `Store.open`."""
        self.files = files
        self.data_dir = data_dir
        self.findings: list[Finding] = []
        """What was noticed while opening, oldest first: torn tails set aside, damage, indexes to be rebuilt."""
        self.model = model
        self.segment_entries_max = segment_entries_max
        self.now_us = now_us
        self._lock = lock
        self._clock = CanonicalClock(now_us)
        self._clock_lock = threading.Lock()
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
        files: Files | None = None,
        now_us: Callable[[], int] = _now_us,
    ) -> Store:
        """Take the directory, creating it if necessary.

        `dimension` and `fingerprint` (at most 32 ASCII characters) are those of the embedding model in use.

        Raises:
            StoreLocked: another daemon holds it.
            StoreWriteFailed: it cannot be created or written.
        """
        files = files or DiskFiles()
        _create(files, data_dir)
        lock = files.lock(data_dir / LOCK_NAME)
        try:
            store = cls(files, data_dir, Model(dimension, fingerprint), segment_entries_max, now_us, lock)
            for topic_id in store.topic_ids():
                store._clock.saw(highest_id_on_disk(files, TopicLayout(data_dir, topic_id), dimension))
        except BaseException:
            lock.release()
            raise
        return store

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
                self._topics[topic_id] = TopicLog(self, layout)
            return self._topics[topic_id]

    def topic_ids(self) -> list[str]:
        """The topics on disk, sorted."""
        return topic_ids_in(self.files, self.data_dir)

    def close(self) -> None:
        """Close all topics and let another daemon have the directory. Whatever is appended afterwards fails."""
        with self._topics_lock:
            for topic in self._topics.values():
                topic.close()
        self._lock.release()

    def next_canonical_id(self) -> int:
        """The id of the next entry of any topic; strictly increasing."""
        with self._clock_lock:
            return self._clock.next()

    def saw_canonical_id(self, canonical_id: int) -> None:
        """Keep later ids above this one."""
        with self._clock_lock:
            self._clock.saw(canonical_id)


class TopicLog:
    """The log of one topic. `append` for one thread, `seal` for another, all else for any."""

    def __init__(self, store: Store, layout: TopicLayout) -> None:
        """Use `Store.topic`."""
        self.topic_id = layout.topic_id
        self.hot_path = layout.hot
        """Where the topic's journal belongs."""
        self._store = store
        self._files = store.files
        self._layout = layout
        self._lock = threading.Lock()  # appending, and the moment a sealed segment takes the place of a growing one
        self._seal_lock = threading.Lock()
        self._closed = False
        opened = open_topic(self._files, layout, store.model)
        self._gaps = opened.gaps
        self._active = opened.active
        self._tail = Tail(self._files, layout.active, opened.active_end) if opened.active else None
        self._snapshot = Snapshot(self.topic_id, {}, Directory())
        store.findings += opened.findings
        self._take_over(opened.segments, opened.indexes)

    def append(self, drafts: Sequence[Draft]) -> list[Entry]:
        """Store all drafts or none, as one group with one fsync; on return they are durable and in the next snapshot.

        A draft of a chunk that this topic knows keeps the chunk's public id. One that comes from another topic keeps
        the given id unless a chunk here has it already.

        Raises:
            StoreWriteFailed: nothing was stored (DiskFull if the disk is full).
            StoreError: a draft is too large, or the store is closed.
        """
        if not drafts:
            return []
        with self._lock:
            if self._closed:
                raise StoreError(f"topic {self.topic_id}: the store is closed; open it again to append")
            active, tail = self._ready()
            fresh: dict[bytes, str] = {}
            try:
                entries = [self._entry(draft, len(drafts) - 1 - i, fresh) for i, draft in enumerate(drafts)]
                payloads = [encode_entry(entry) for entry in entries]
                start = tail.end
                tail.append(b"".join(map(encode_record, payloads)), sync=True)
            except StoreError:
                self._uuids.discard(fresh)
                raise
            spans = []
            for payload in payloads:
                spans.append(Span(start, len(payload)))
                start += FRAME_BYTES + len(payload)
            self._publish(active, entries, spans)
            if active.count >= self._store.segment_entries_max:
                self._rotate(active, tail)
            return entries

    def snapshot(self) -> Snapshot:
        """The topic as it is now."""
        return self._snapshot

    def has_digest(self, digest: bytes) -> bool:
        """Whether the message with this digest is stored, wholly or partly."""
        return self._snapshot.has_digest(digest_word(digest))

    def has_live_text(self, text: str) -> bool:
        """Whether a live chunk has exactly this content. An entry that cannot be read counts as none."""
        snapshot = self._snapshot
        for segment_id, row in snapshot.live_places_of_text(text_hash(text)):
            view = snapshot.views[segment_id]
            try:
                if view.segment.read(view.rows[row]).content == text:
                    return True
            except StoreError:
                continue
        return False

    def unsealed(self) -> list[int]:
        """The full segments that have no index yet, oldest first."""
        active = self._active
        views = self._snapshot.views.items()
        return [number for number, view in views if isinstance(view.segment, Growing) and view.segment is not active]

    def seal(self, segment_id: int) -> None:
        """Build and write the index of a full segment, and search it from the next snapshot on. Slow.

        Appends and searches go on meanwhile. Does nothing if the segment is sealed or still appended to.

        Raises:
            StoreError: a file could not be read or written; the segment stays unsealed and is searched by scan.
        """
        with self._seal_lock:
            if segment_id not in self.unsealed():
                return
            view = self._snapshot.views[segment_id]
            assert isinstance(view.segment, Growing)
            gaps = self._gaps.get(segment_id, [])
            sealed, index = write_sealed(self._files, self._layout, view.segment, gaps, sealed_at=self._store.now_us())
            if view.segment.searchable:
                sealed.attach(index, view.gone, view.segment.matrix)
            segments = [v.segment for v in self._snapshot.views.values() if isinstance(v.segment, Sealed)]
            directory = _directory_of(sorted([*segments, sealed], key=lambda segment: segment.segment_id))
            with self._lock:
                views = dict(self._snapshot.views)
                views[segment_id] = _view(sealed, views[segment_id].gone)
                self._show(views, directory)

    def close(self) -> None:
        """Close the file; whatever is appended afterwards fails."""
        with self._lock:
            self._closed = True
            if self._tail is not None:
                self._tail.close()

    def _entry(self, draft: Draft, group_left: int, fresh: dict[bytes, str]) -> Entry:
        """What the draft becomes; `fresh` gathers the public ids of chunks that the topic does not know yet."""
        expected_bytes = 4 * self._store.model.dimension if draft.status is Status.ACTIVE else 0
        assert len(draft.uuid) == 16 and len(draft.vector) == expected_bytes, "a uuid and a vector of their sizes"
        canonical_id = self._store.next_canonical_id()
        return Entry(
            uuid=draft.uuid,
            public_id=self._public_id(draft, fresh),
            canonical_id=canonical_id,
            vector=draft.vector,
            content=draft.content,
            status=draft.status,
            origin_id=canonical_id if draft.origin_id is None else draft.origin_id,
            utility_steps=draft.utility_steps,
            created_at=draft.created_at,
            roles=draft.roles,
            digests=draft.digests,
            kind=draft.kind,
            source=draft.source,
            supersedes=draft.supersedes,
            action=draft.action,
            reason=draft.reason,
            group_left=group_left,
            unknown=draft.unknown,
        )

    def _public_id(self, draft: Draft, fresh: dict[bytes, str]) -> str:
        known = fresh.get(draft.uuid) or self._public_id_of(draft.uuid)
        if known is not None:
            return known
        given = draft.public_id
        assert given is None or draft.uuid.hex().startswith(given), "a public id is a prefix of the uuid"
        others = self._uuids.others_with_prefix(draft.uuid, given) if given else []
        taken = {fresh.get(other) or self._public_id_of(other) for other in others}
        public_id = given if given and given not in taken else self._uuids.unique_prefix(draft.uuid)
        fresh[draft.uuid] = public_id
        self._uuids.add(draft.uuid)
        return public_id

    def _public_id_of(self, uuid: bytes) -> str | None:
        place = next(self._snapshot.places(uuid), None)
        if place is None:
            return None
        return uuid.hex()[: int(self._snapshot.views[place[0]].rows[place[1]]["public_digits"])]

    def _ready(self) -> tuple[Growing, Tail]:
        """The active segment; a new one after a rotation."""
        if self._active is None or self._tail is None:
            numbers = [*self._snapshot.views, *self._layout.segment_ids(self._files)]
            self._active = create_active(self._files, self._layout, self._store.model, max(numbers, default=0) + 1)
            self._tail = Tail(self._files, self._layout.active, HEADER_BYTES)
        return self._active, self._tail

    def _rotate(self, active: Growing, tail: Tail) -> None:
        tail.close()
        try:
            rotate(self._files, self._layout, active.segment_id)
        except StoreWriteFailed:
            # What was appended is durable all the same. Unless the new name is there, the next append tries again.
            if self._files.size(self._layout.active) is not None:
                return
        active.rotated_to(self._layout.bin(active.segment_id))
        self._active = self._tail = None

    def _publish(self, active: Growing, entries: Sequence[Entry], spans: Sequence[Span]) -> None:
        """Make the next snapshot: with the new rows, and without the older entries of their chunks."""
        views = dict(self._snapshot.views)
        before = len(views[active.segment_id].gone) if active.segment_id in views else 0
        gone = np.zeros(before + len(entries), dtype=np.bool_)
        if before:
            gone[:before] = views[active.segment_id].gone
        overridden: dict[int, list[int]] = {}
        for entry, span in zip(entries, spans, strict=True):
            row = active.add(entry, span)
            gone[row] = entry.status is Status.DEPRECATED
            gone[list(active.rows_of(entry.uuid)[:-1])] = True
            for segment_id, older in self._snapshot.places(entry.uuid):
                overridden.setdefault(segment_id, []).append(older)
        overridden.pop(active.segment_id, None)
        for segment_id, rows in overridden.items():
            bits = views[segment_id].gone.copy()
            bits[rows] = True
            views[segment_id] = _view(views[segment_id].segment, bits)
        views[active.segment_id] = _view(active, gone)
        self._show(views, self._snapshot.directory)

    def _take_over(self, segments: dict[int, Growing | Sealed], indexes: dict[int, VectorIndex]) -> None:
        """Make the first snapshot: what is superseded is worked out over all columns at once."""
        rows = [segment.rows for segment in segments.values()]
        bits = superseded(np.concatenate(rows)) if rows else np.empty(0, dtype=np.bool_)
        views: dict[int, View] = {}
        for segment_id, segment in segments.items():
            gone, bits = bits[: len(segment.rows)], bits[len(segment.rows) :]
            if isinstance(segment, Sealed) and segment_id in indexes:
                for problem in segment.attach(indexes[segment_id], gone):
                    self._store.findings.append(Finding("damaged", str(self._layout.bin(segment_id)), str(problem)))
            views[segment_id] = _view(segment, gone)
            self._store.saw_canonical_id(int(segment.rows["canonical_id"].max(initial=0)))
        self._show(views, _directory_of([segment for segment in segments.values() if isinstance(segment, Sealed)]))

    def _show(self, views: dict[int, View], directory: Directory) -> None:
        if directory is not self._snapshot.directory or not self._snapshot.views:
            growing = [view.segment for view in views.values() if isinstance(view.segment, Growing)]
            self._uuids = KnownUuids(directory, (uuid for segment in growing for uuid in segment.uuids))
        self._snapshot = Snapshot(self.topic_id, dict(sorted(views.items())), directory)


def _create(files: Files, data_dir: Path) -> None:
    """Make the directory and whatever is missing above it durably."""
    for directory in reversed([data_dir, *data_dir.parents]):
        if not files.is_directory(directory):
            files.make_directory(directory)
        # Also where it exists: an earlier start may have ended between these two steps.
        files.sync_directory(directory.parent)


def _view(segment: Growing | Sealed, gone: Bits) -> View:
    """The segment as it is now; an index does not find what is gone from here on."""
    if isinstance(segment, Growing):
        rows, matrix = segment.rows, segment.matrix if segment.searchable else None
        return View(segment=segment, rows=rows[: len(gone)], gone=gone, matrix=matrix, marked=None)
    if segment.index is not None:
        segment.index.mark(np.flatnonzero(gone))
    marked = segment.index.marked if segment.index is not None else None
    return View(segment=segment, rows=segment.rows, gone=gone, matrix=None, marked=marked)


def _directory_of(segments: Sequence[Sealed]) -> Directory:
    return Directory([(segment.segment_id, segment.rows, segment.digests) for segment in segments])
