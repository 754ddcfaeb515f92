"""The log of one topic: appended to, sealed and merged, searched through snapshots.

Rule: an entry is acknowledged when `append` returns, and then it is durable. A failed append changes nothing. One
thread appends; sealing and merging may run in others; readers take a snapshot and never wait for any of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from memd.entries import CanonicalClock, Draft, Entry, Status
from memd.errors import StoreError, StoreWriteFailed
from memd.store.files import Files
from memd.store.index.merging import due_merge, own_index_file, remove_merged, write_merged
from memd.store.index.public_ids import KnownUuids
from memd.store.index.sealed_index import SealedIndex
from memd.store.index.sealing import write_sealed
from memd.store.index.vectors import Rows
from memd.store.layout import TopicLayout
from memd.store.lexical.bm25 import KnownWords, Question
from memd.store.lexical.index import LexicalIndex
from memd.store.log.append_file import Tail
from memd.store.log.format import FRAME_BYTES, HEADER_BYTES, Span, encode_entry, encode_record
from memd.store.log.recovery import Finding
from memd.store.log.segment import Growing, Sealed, digest_word, text_hash
from memd.store.opening import Model, create_active, open_topic, reread_segment, rotate
from memd.store.snapshot import Snapshot, View
from memd.store.transitions import (
    IndexFile,
    after_append,
    after_merge,
    after_seal,
    directory_of,
    first_snapshot,
    gone_labels,
)

_WAIT_SECONDS = 0.2
"""For another thread that is opening the lexical index."""


class SharedClock:
    """The one clock of a store, for all threads."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self.now_us = now_us
        self._clock = CanonicalClock(now_us)
        self._lock = threading.Lock()

    def next(self) -> int:
        """The id of the next entry of any topic; strictly increasing."""
        with self._lock:
            return self._clock.next()

    def saw(self, canonical_id: int) -> None:
        """Keep later ids above this one."""
        with self._lock:
            self._clock.saw(canonical_id)


Checked = Callable[[Draft], Draft]
"""What becomes of a draft before it is written: itself, or another one of the same chunk."""


def unchanged(draft: Draft) -> Draft:
    """The `Checked` that lets everything pass."""
    return draft


class Grounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the topics of a store have in common."""

    files: Files
    model: Model
    clock: SharedClock
    segment_entries_max: int
    checked: Checked = unchanged
    """Every draft of every topic goes through it: there is no other way into the log."""
    known_words: KnownWords = msgspec.field(default_factory=KnownWords)


class TopicStats(msgspec.Struct, frozen=True, kw_only=True):
    """A topic in figures."""

    chunks: int
    """Live ones."""
    entries: int
    segments: int
    unsealed: int
    indexes: int
    """How many are searched; fewer than segments where some are merged."""
    indexes_loaded: int
    memory_bytes: int
    fan_out_ms: float | None
    scanned_per_second: float | None


class TopicLog:
    """The log of one topic. `append`, `seal` and `merge` for one thread each, all else for any."""

    def __init__(self, grounds: Grounds, layout: TopicLayout) -> None:
        """Use `Store.topic`."""
        self.topic_id = layout.topic_id
        self.hot_path = layout.hot
        """Where the topic's journal belongs."""
        self._grounds = grounds
        self._files = grounds.files
        self._layout = layout
        self._lock = threading.Lock()  # whatever makes the next snapshot
        self._load_lock = threading.Lock()
        self._seal_lock = threading.Lock()
        self._merge_lock = threading.Lock()
        self._words = LexicalIndex(self._files, layout.lexical, grounds.known_words)
        self._closed = False
        opened = open_topic(self._files, layout, grounds.model)
        self.findings = opened.findings
        """What was noticed while opening and loading, oldest first: torn tails set aside, damage, lost indexes."""
        self._gaps = opened.gaps
        self._active = opened.active
        self._tail = Tail(self._files, layout.active, opened.active_end) if opened.active else None
        self._snapshot = first_snapshot(self._files, self.topic_id, opened.segments, opened.index_files)
        self._uuids = self._known_uuids()
        for segment in opened.segments.values():
            grounds.clock.saw(int(segment.rows["canonical_id"].max(initial=0)))
        if count := sum(len(rows) for _, rows in self.unsearched()):
            self.findings.append(
                Finding(
                    "foreign",
                    str(layout.directory),
                    f"{count} chunks were embedded with another model: they are kept but no search finds them; stop "
                    "memd and run `memd reembed`, or set embedding.model back",
                )
            )

    def append(self, drafts: Sequence[Draft]) -> list[Entry]:
        """Store all drafts or none, as one group with one fsync; on return they are durable and in the next snapshot.

        A draft of a chunk that this topic knows keeps the chunk's public id. One that comes from another topic keeps
        the given id unless a chunk here has it already.

        Raises:
            StoreWriteFailed: nothing was stored (DiskFull if the disk is full).
            StoreError: a draft is too large, or the store is closed.
            MemdError: what `Grounds.checked` raises; nothing was stored.
        """
        if not drafts:
            return []
        drafts = [self._grounds.checked(draft) for draft in drafts]
        with self._lock:
            if self._closed:
                raise StoreError(f"topic {self.topic_id}: the store is closed; open it again to append")
            active, tail = self._ready()
            fresh: dict[bytes, str] = {}
            try:
                public_ids = self._public_ids(drafts, fresh)
                entries = [self._entry(draft, public_ids[i], len(drafts) - 1 - i) for i, draft in enumerate(drafts)]
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
            self._snapshot = after_append(self._snapshot, active, entries, spans, fresh)
            if active.count >= self._grounds.segment_entries_max:
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

    def unsearched(self) -> list[tuple[View, Rows]]:
        """The live rows that were embedded with another model, so that no search finds them; oldest segment first."""
        views = [v for v in self._snapshot.views.values() if not self._grounds.model.wrote(v.segment.header)]
        return [(view, np.flatnonzero(~view.gone)) for view in views]

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
            growing = self._snapshot.views[segment_id].segment
            assert isinstance(growing, Growing), "an unsealed segment"
            gaps = self._gaps.get(segment_id, [])
            sealed, index = write_sealed(
                self._files, self._layout, growing, gaps, sealed_at=self._grounds.clock.now_us()
            )
            segments = {number: view.segment for number, view in self._snapshot.views.items()} | {segment_id: sealed}
            directory = directory_of(segments.values())
            searched = None
            if growing.searchable:
                file = own_index_file(self._layout, sealed)
                gone = self._snapshot.views[segment_id].gone
                searched = SealedIndex(self._files, file.path, [sealed], file.vouched, gone=gone)
                searched.use(index, growing.matrix)
            with self._lock:
                self._snapshot = after_seal(self._snapshot, sealed, directory, searched)
                self._uuids = self._known_uuids()

    def load(self) -> None:
        """Bring all indexes into memory, so that the next search need not. Slow the first time.

        A damaged merged index is given up for those of its segments; a damaged one of a segment, for a scan until the
        segment is sealed again.

        Raises:
            StoreError: neither an index nor the log under it can be read.
        """
        with self._load_lock:
            while missing := [view.index for view in self._snapshot.indexes if not view.index.is_loaded]:
                for index in missing:
                    try:
                        problems = index.load()
                    except StoreError as error:
                        self.findings.append(Finding("derived", str(index.path), f"it is built anew: {error}"))
                        self._give_up(index)
                        break
                    self.findings += [Finding("damaged", str(index.path), str(problem)) for problem in problems]

    @property
    def has_unindexed_words(self) -> bool:
        """Whether `index_words` has something to do."""
        return self._words.behind(self._snapshot) > 0

    def index_words(self, stand_back: Callable[[], None] = lambda: None) -> None:
        """Bring the lexical index up to date. Very slow where it has to be built anew; appends go on meanwhile.

        Raises:
            StoreError: it cannot be written; all else works.
        """
        self._words.update(self._snapshot, stand_back)

    def ask(self, text: str) -> Question:
        """A question to the words of the topic, those just appended included unless the index lags behind by much.

        Raises:
            StoreError: it cannot be read or written; all else works.
        """
        snapshot = self._snapshot
        self._words.open(snapshot, wait_seconds=_WAIT_SECONDS)
        return self._words.ask(text, snapshot)

    @property
    def is_loaded(self) -> bool:
        """Whether a search can begin at once."""
        return all(view.index.is_loaded for view in self._snapshot.indexes)

    def due_merge(self, budget_ms: float) -> tuple[int, ...] | None:
        """The segments whose indexes should be merged now; `budget_ms` is what asking all indexes may take."""
        indexes = self._snapshot.indexes
        fan_out_ms = self._snapshot.times.fan_out_ms
        over_budget = fan_out_ms is not None and fan_out_ms > budget_ms
        due = due_merge([len(view.index.segment_ids) for view in indexes], over_budget=over_budget)
        if due is None:
            return None
        return tuple(number for position in due for number in indexes[position].index.segment_ids)

    def merge(self, segment_ids: Sequence[int], stand_back: Callable[[], None] = lambda: None) -> None:
        """Build and write one index over these segments, and search it from the next snapshot on. Very slow.

        Appends, seals and searches go on meanwhile; `stand_back` is called again and again, and may wait until nobody
        else needs the processor. Does nothing if one of the segments has no index.

        Raises:
            StoreError: a file could not be read or written; the old indexes stay in use.
        """
        with self._merge_lock:
            before = self._snapshot
            segments = [before.views[number].segment for number in segment_ids if number in before.views]
            sealed = [segment for segment in segments if isinstance(segment, Sealed)]
            replaced = [v.index for v in before.indexes if set(v.index.segment_ids) <= set(segment_ids)]
            if len(sealed) < 2 or sum(len(index.segment_ids) for index in replaced) != len(segment_ids):
                return
            index = write_merged(
                self._files,
                self._layout,
                sealed,
                gone_labels(before.views, segment_ids),
                built_at=self._grounds.clock.now_us(),
                stand_back=stand_back,
            )
            with self._lock:
                if any(self._snapshot.views[part.segment_id].segment is not part for part in sealed):
                    return  # given up meanwhile
                self._snapshot = after_merge(self._snapshot, index)
            self._snapshot.times.fan_out_ms = None  # of the indexes before
            for old in replaced:
                if len(old.segment_ids) > 1:
                    remove_merged(self._files, self._layout, old.segment_ids)

    def stats(self) -> TopicStats:
        """The topic in figures, as it is now."""
        snapshot = self._snapshot
        indexes = [view.index for view in snapshot.indexes]
        segments = [view.segment for view in snapshot.views.values()]
        return TopicStats(
            chunks=snapshot.live_count,
            entries=sum(len(view.rows) for view in snapshot.views.values()),
            segments=len(segments),
            unsealed=len(self.unsealed()),
            indexes=len(indexes),
            indexes_loaded=sum(index.is_loaded for index in indexes),
            memory_bytes=sum(part.memory_bytes for part in (*segments, *indexes)) + snapshot.directory.memory_bytes,
            fan_out_ms=snapshot.times.fan_out_ms,
            scanned_per_second=snapshot.times.scanned_per_second,
        )

    def close(self) -> None:
        """Close the file; whatever is appended afterwards fails."""
        with self._lock:
            self._closed = True
            if self._tail is not None:
                self._tail.close()
        self._words.close()

    def _entry(self, draft: Draft, public_id: str, group_left: int) -> Entry:
        """What the draft becomes."""
        expected_bytes = 4 * self._grounds.model.dimension if draft.status is Status.ACTIVE else 0
        assert len(draft.uuid) == 16 and len(draft.vector) == expected_bytes, "a uuid and a vector of their sizes"
        canonical_id = self._grounds.clock.next()
        return Entry(
            uuid=draft.uuid,
            public_id=public_id,
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

    def _public_ids(self, drafts: Sequence[Draft], fresh: dict[bytes, str]) -> list[str]:
        """The public id of each; `fresh` gathers those of chunks that the topic does not know yet."""
        beside = self._uuids.beside([draft.uuid for draft in drafts])
        return [self._public_id(draft, near, fresh) for draft, near in zip(drafts, beside, strict=True)]

    def _public_id(self, draft: Draft, beside: Sequence[bytes], fresh: dict[bytes, str]) -> str:
        known = fresh.get(draft.uuid)
        if known is None and self._uuids.knows(draft.uuid, beside):
            known = self._public_id_of(draft.uuid)
        if known is not None:
            return known
        given = draft.public_id
        assert given is None or draft.uuid.hex().startswith(given), "a public id is a prefix of the uuid"
        others = self._uuids.others_with_prefix(draft.uuid, given) if given else []
        taken = {fresh.get(other) or self._public_id_of(other) for other in others}
        public_id = given if given and given not in taken else self._uuids.unique_prefix(draft.uuid, beside)
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
            self._active = create_active(self._files, self._layout, self._grounds.model, max(numbers, default=0) + 1)
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

    def _give_up(self, index: SealedIndex) -> None:
        """Search without a damaged index: its segments by their own, or a single segment by scan."""
        with self._seal_lock, self._lock:
            segments = {number: view.segment for number, view in self._snapshot.views.items()}
            files = [_file_of(view.index) for view in self._snapshot.indexes if view.index is not index]
            if len(index.segment_ids) > 1:
                remove_merged(self._files, self._layout, index.segment_ids)
                files += [own_index_file(self._layout, segment) for segment in index.segments]
            else:
                opened = reread_segment(self._files, self._layout, self._grounds.model, index.segment_ids[0])
                segments |= opened.segments
                self._gaps |= opened.gaps
                self.findings += opened.findings
            # Rows may have got lost with the damage, so that other entries count now: all is worked out anew.
            self._snapshot = first_snapshot(self._files, self.topic_id, segments, files)
            self._uuids = self._known_uuids()

    def _known_uuids(self) -> KnownUuids:
        growing = [view.segment for view in self._snapshot.views.values() if isinstance(view.segment, Growing)]
        return KnownUuids(self._snapshot.directory, (uuid for segment in growing for uuid in segment.uuids))


def _file_of(index: SealedIndex) -> IndexFile:
    return IndexFile(path=index.path, segment_ids=index.segment_ids, vouched=index.vouched, left_out=index.left_out)
