"""The log of one topic: opened after any crash, appended to, merged, and searched through snapshots.

Rule: when `append` returns, the entries are durable; a failed append changes nothing. One thread appends; merging may
run in another; readers take a snapshot and wait for neither. Opening is idempotent: it only rebuilds derived files,
removes temporary ones and moves a torn tail of `active.bin` aside. Of sealed segments only the columns are read. A full
segment is sealed again if its columns are missing, damaged or in an older memd's format.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from memd.entries import PUBLIC_ID_DIGITS_MIN, Draft, Entry, Erased, Status
from memd.errors import CorruptFile, Fenced, ForeignFile, ShortLogFile, StoreError, StoreWriteFailed
from memd.store.claim import Claim
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, Wiper
from memd.store.erasure import ForbiddenText, encode_forbidden, holds, named_in, read_forbidden, without_text
from memd.store.index.sealed_index import (
    RATIO,
    SealedIndex,
    columns_from_log,
    has_meta,
    merged_files,
    publish_words,
    read_segment_meta,
    read_words,
    seal,
    with_merged,
    write_merged,
)
from memd.store.layout import TopicLayout, check_topic
from memd.store.lexical.postings import ChunkTerms, SealedColumns, encoded_terms
from memd.store.log import recovery
from memd.store.log.columns import Rows, digest_word
from memd.store.log.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    Header,
    ModelId,
    Span,
    decode_entry,
    encode_entry,
    encode_record,
    payload_of,
    scan_records,
)
from memd.store.log.journal import Journal
from memd.store.log.recovery import Finding, ahead_of_log, torn_files
from memd.store.log.segment import (
    ENTRIES_READ,
    NOTHING_UNSTORED,
    GrowingSegment,
    SealedSegment,
    SegmentView,
    UnstoredText,
    create_active,
    new_header,
    read_header,
)
from memd.store.snapshot import Snapshot, after_append, after_indexing, first_snapshot, live_copy, uuid_index_of
from memd.wording import unsearched

DraftFilter = Callable[[Draft], Draft]
"""Maps a draft to the draft to write: itself, or another one of the same chunk."""
WithoutText = Callable[[bytes], tuple[bytes, int, int]]
"""`without_text` for the chunks of one erasure."""


class StoreShared(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and services shared by all topics of a store."""

    model: ModelId
    """The embedding model in use; its fingerprint has at most 32 ASCII characters."""
    segment_entries_max: int
    files: LocalDisk = msgspec.field(default_factory=LocalDisk)
    clock: CanonicalClock = msgspec.field(default_factory=lambda: CanonicalClock())
    draft_filter: DraftFilter = lambda draft: draft
    """Applied to every draft of every topic; nothing enters the log without it."""
    line_tokens: Callable[[Entry], int | UnsetType] = lambda entry: UNSET
    """Counts `Entry.line_tokens`; recall estimates what is not counted."""


class TopicStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one topic."""

    chunks: int
    """Number of live chunks."""
    entries: int
    damage: tuple[str, ...]
    """Sentences about files found missing or damaged when the topic was opened or loaded."""
    segments: int
    unsealed: int
    """Number of full segments whose columns are not written."""
    seal_trouble: str = ""
    """Why the columns could not be written, and what to do; empty if nothing failed."""
    indexes: int
    """Number of indexes searched; below the number of sealed segments if some are merged."""
    indexes_loaded: int
    unindexed: int
    """Entries without columns of words, which only meaning finds; see `TopicLog.wordless`."""
    memory_bytes: int
    fan_out_ms: float | None


_TAIL_BYTES = 64 << 10
"""Bytes read from the end of a log file to find its last entry; holds about twenty entries."""
_PASSES = 2
"""Passes of an erasure. A correction during the first one may append to the file begun for it."""


class TopicLog:
    """The log of one topic. `append`, `seal` and `merge` for one thread each, all else for any.

    Locks, in the order in which a thread takes them, after those of `Store` and before those of its indexes:

    - `_merging` while a merged index is built, so that one merge runs at a time; - `_sealing` while a segment is sealed
    or a damaged index is dropped: both replace segments; - `_state` while the next snapshot is made. An append holds it
    through its fsync, otherwise it is held briefly.
    """

    def __init__(self, shared: StoreShared, claim: Claim) -> None:
        """Use `Store.topic`."""
        layout = claim.layout
        self.claim = claim
        """The right to write the topic. Only this class writes the log's stream."""
        self.topic_id = layout.topic_id
        self.hot_path = layout.hot
        self._shared = shared
        self._files = shared.files
        self._layout = layout
        self._merging = threading.Lock()
        self._sealing = threading.Lock()
        self.forbidding = threading.Lock()
        """Held while `forbidden` is replaced; taken before all other locks."""
        self._state = threading.Lock()
        self._closed = False
        opened = OpenedTopic(claim, shared.model).read()
        self.findings = opened.findings
        """Found while opening and loading, oldest first: torn tails that were moved, damage, lost indexes."""
        self.is_incomplete = bool(opened.missing)
        """Whether a file of the log was missing when the topic was opened, so that a failed lookup proves little."""
        self.troubles: dict[Literal["seal", "load"], StoreError] = {}
        """Why full segments could not be sealed, or indexes not be loaded, at the last attempt."""
        self._active = opened.active
        self._snapshot = first_snapshot(self.topic_id, opened.segments, opened.indexes)
        self.forbidden = read_forbidden(self._files, layout)
        """Text that must never be stored again; replaced, never mutated."""
        self._reserved: dict[bytes, str] = {}
        self._order: list[bytes] = []
        """The uuids with reserved ids, ascending."""
        self.unstored: Callable[[], UnstoredText] = lambda: NOTHING_UNSTORED
        """Returns the text not in the log yet, for each search. Set by the owner of the buffer; called on the event
        loop."""
        for segment in opened.segments.values():
            shared.clock.observe(int(segment.rows["canonical_id"].max(initial=0)))
        if count := sum(len(rows) for _, rows in self.unsearched()):
            self.findings.append(Finding("foreign", str(layout.directory), unsearched(count)))

    def has_lost_entries(self, journal: Journal) -> bool:
        """Return whether the log had more entries when the journal was written; if so, add that to the findings."""
        lost = ahead_of_log(self.hot_path, journal.extent, self._snapshot.count_upto)
        self.findings += [*journal.findings, *lost]
        return bool(lost)

    @property
    def head(self) -> int:
        """An id that all later entries are above, and no earlier one."""
        return self._shared.clock.last

    def append(self, drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        """Store all drafts or none, as one group with one fsync; on return they are durable and in the next snapshot.
        `made_at`: `head` before the drafts were made; None for the present one.

        A draft of a chunk that this topic has keeps the chunk's public id. A draft from another topic keeps the given
        id unless a chunk here has it already. Raises StoreWriteFailed: nothing was stored (DiskFull if the disk is
        full); StoreError: a draft is too large, or the store is closed; MemdError: the draft filter raised it.
        """
        if not drafts:
            return []
        drafts = [self._shared.draft_filter(draft) for draft in drafts]
        for draft in drafts:
            encoded_terms(draft.indexed_text)  # slow, so not with the lock; it is cached for `_entry`
        with self._state:
            if self._closed:
                raise Fenced(f"topic {self.topic_id}: the store is closed; open it again to append")
            self._check_made(drafts, self.head if made_at is None else made_at)
            active = self._open_active(self._shared.model)
            fresh = {one.uuid: self._reserved[one.uuid] for one in drafts if one.uuid in self._reserved}
            reserved = list(fresh)
            if gone := [one for one in drafts if one.uuid not in fresh and self._snapshot.was_erased(one.uuid)]:
                raise StoreError(f"chunk {gone[0].uuid.hex()[:8]} was erased: nothing can be stored of it any more")
            public_ids = self._assigned(drafts, fresh, self._order.copy())
            entries = [self._entry(draft, public_ids[i], len(drafts) - 1 - i) for i, draft in enumerate(drafts)]
            payloads = [encode_entry(entry) for entry in entries]
            start = self._write(entries, b"".join(map(encode_record, payloads)))
            self._unreserve(reserved)
            spans = []
            for payload in payloads:
                spans.append(Span(start, len(payload)))
                start += FRAME_BYTES + len(payload)
            self._snapshot = after_append(self._snapshot, active, entries, spans, fresh)
            if active.count >= self._shared.segment_entries_max:
                self._rotate(active)
        self._seal_soon()
        return entries

    def _check_made(self, drafts: Sequence[Draft], made_at: int) -> None:
        """Raise MadeAnew if others have stored entries that the drafts should take into account."""

    def _write(self, entries: Sequence[Entry], data: bytes) -> int:
        """Append the records of new entries durably to the active segment's file; return their offset."""
        return self.claim.append("log", data)

    def reserve(self, drafts: Sequence[Draft]) -> list[Entry]:
        """Reserve the public ids of new chunks, and return the entries as they look until they are appended.

        A draft may name an id, which it gets unless another chunk has it.
        """
        with self._state:
            public_ids = self._assigned(drafts, self._reserved, self._order)
            return [
                draft.as_entry(public_id=public_id, canonical_id=self._shared.clock.next(), group_left=0)
                for draft, public_id in zip(drafts, public_ids, strict=True)
            ]

    @property
    def reserved_count(self) -> int:
        """The number of reserved ids."""
        return len(self._reserved)

    def reserve_only(self, uuids: Set[bytes]) -> None:
        """Release the ids reserved for all chunks but these; the others will not be appended."""
        with self._state:
            self._unreserve([uuid for uuid in self._reserved if uuid not in uuids])

    def snapshot(self) -> Snapshot:
        """Return the topic as it is now."""
        return self._snapshot

    def has_digest(self, digest: bytes) -> bool:
        """Return whether the message with this digest is stored, or must never be stored again."""
        return self.forbidden.has_digest(digest) or self._snapshot.has_digest(digest_word(digest))

    def is_taken_out(self, digest: bytes) -> bool:
        """Return whether corrections have removed the text of the message with this digest, as far as is known."""
        return self._snapshot.is_taken_out(digest_word(digest))

    def has_live_copy(self, draft: Draft) -> bool:
        """Return whether a live chunk of the draft's kind has exactly its text, said by the same roles; for a note or
        document also from its source. Text that must never be stored again counts as a copy."""
        return self.forbidden.has_text(draft.content) or live_copy(self._snapshot, draft) is not None

    def unsearched(self) -> list[tuple[SegmentView, Rows]]:
        """Return the live rows embedded by another model, which no search finds; oldest segment first."""
        views = [v for v in self._snapshot.views.values() if not self._shared.model.wrote(v.segment.header)]
        return [(view, np.flatnonzero(~view.dead)) for view in views]

    def unsealed(self) -> list[int]:
        """Return the full segments whose columns could not be written, oldest first."""
        return [segment.segment_id for segment in self._full()]

    def _full(self) -> list[GrowingSegment]:
        growing, active = self._snapshot.growing, self._active  # in this order: an append may begin another one
        return [segment for segment, _ in growing if segment is not active]

    def seal_full(self) -> None:
        """Seal all full segments, about 50 ms each. Raises StoreError: a file cannot be read or written; unsealed
        segments stay searchable."""
        with self._sealing:
            self._seal()

    def _seal_soon(self) -> None:
        """Seal what an append has filled, unless another thread is replacing segments; `seal_full` tries again."""
        if self._full() and self._sealing.acquire(blocking=False):
            with ExitStack() as ending, suppress(StoreError):
                ending.callback(self._sealing.release)
                self._seal()

    def _seal(self) -> None:
        """From the next snapshot on, read the contents of full segments from disk. Needs `_sealing`."""
        with self._noting("seal"):
            for full in self._full():
                sealed, indexes = seal(self.claim, full)
                self._use(indexes, {full.segment_id: sealed})

    def _use(self, indexes: Sequence[SealedIndex], segments: dict[int, GrowingSegment | SealedSegment]) -> None:
        """From the next snapshot on, use these indexes, and these segments in place of those of the same number."""
        every = {number: view.segment for number, view in self._snapshot.views.items()} | segments
        uuid_index = uuid_index_of(every.values())  # slow, so not with the lock
        with self._state:
            self._snapshot = after_indexing(self._snapshot, indexes, segments, uuid_index)

    @contextmanager
    def _noting(self, work: Literal["seal", "load"]) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self.troubles[work] = error
            raise
        self.troubles.pop(work, None)

    def load(self) -> None:
        """Load all indexes, so that the next search need not wait for that. Slow the first time.

        A damaged merged index is replaced by the indexes of its segments. Raises StoreError: neither an index nor the
        log under it can be read.
        """
        with self._noting("load"):
            while missing := [view for view in self._snapshot.indexes if not view.index.is_loaded]:
                for view in missing:
                    index = view.index
                    self._words_of(index)
                    try:
                        problems = index.load(view.dead)
                    except StoreError as error:
                        if len(index.segments) == 1:
                            raise
                        self._drop_merged(index, error)
                        break
                    if problems:
                        more = f" (and {len(problems) - 1:,} more)" if problems[1:] else ""
                        self.findings.append(Finding("damaged", str(index.path), f"{problems[0]}{more}"))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that embeds new chunks."""
        return self._shared.model.fingerprint

    @property
    def wordless(self) -> int:
        """Number of entries without columns of words: from an older version's log, or because files are damaged."""
        return sum(len(view.index) for view in self._snapshot.indexes if view.index.columns is None)

    def complete_words(self) -> None:
        """Build the missing columns of words. Very slow for an older version's log; everything else continues
        meanwhile. Raises StoreError: a file cannot be read or written; everything else still works."""
        for index in [view.index for view in self._snapshot.indexes]:
            if index.columns is None:
                self._join_words(index, lambda segment: columns_from_log(segment, self.counted))

    def _words_of(self, index: SealedIndex) -> SealedColumns | None:
        """Return the columns of an index: from memory, from its file, or joined from its segments' and written back if
        the file was missing. None if a segment has none."""
        if index.columns is None:
            index.columns = read_words(self._files, self._layout, index.segments)
            path = self._layout.words(index.segment_ids[0], index.segment_ids[-1])
            if index.columns is None and self._files.size(path) is not None:
                self.findings.append(Finding("derived", str(path), "it cannot be used, and is made anew"))
            if index.columns is None and len(index.segments) > 1:
                with suppress(StoreWriteFailed):
                    self._join_words(index, lambda segment: None)
        return index.columns

    def _join_words(self, index: SealedIndex, made: Callable[[SealedSegment], SealedColumns | None]) -> None:
        """Set the columns of an index, and write them: those in its segments' files, or `made` where one has none."""
        parts = [read_words(self._files, self._layout, [one]) or made(one) for one in index.segments]
        whole = [one for one in parts if one is not None]
        with self._sealing:  # an erasure may have replaced the segments and made these words obsolete
            if len(whole) == len(parts) and any(view.index is index for view in self._snapshot.indexes):
                publish_words(self.claim, index, whole)

    def counted(self, entry: Entry) -> Entry:
        """Return an Active entry with its words and tokens, as far as it lacks them."""
        terms = encoded_terms(entry.indexed_text) if ChunkTerms.of_record(entry) is None else entry.terms
        tokens = self._shared.line_tokens(entry) if entry.line_tokens is UNSET else entry.line_tokens
        return msgspec.structs.replace(entry, terms=terms, line_tokens=tokens)

    @property
    def is_loaded(self) -> bool:
        """Return whether a search can begin without loading an index."""
        return all(view.index.is_loaded for view in self._snapshot.indexes)

    def due_merge(self) -> tuple[int, ...]:
        """Return the segments whose indexes should be merged now: from the oldest index on whose segments are fewer
        than RATIO times those of all newer indexes."""
        covered = [view.index.segment_ids for view in self._snapshot.indexes]
        for at, ids in enumerate(covered):
            newer = tuple(itertools.chain.from_iterable(covered[at + 1 :]))
            if len(ids) < RATIO * len(newer) and not self._closed:  # else a caller's loop never ends
                return ids + newer
        return ()

    def merge(self, segment_ids: Sequence[int], give_way: Callable[[], None] = lambda: None) -> None:
        """Build and write one index over these segments, and search it from the next snapshot on. Very slow.

        Appends, seals and searches continue meanwhile; `give_way` is called between batches and may wait until no query
        needs the processor. Does nothing if one of the segments has no index. Raises StoreError: a file could not be
        read or written; the old indexes stay in use.
        """
        with self._merging:
            before = self._snapshot
            segments = [before.views[number].segment for number in segment_ids if number in before.views]
            sealed = [segment for segment in segments if isinstance(segment, SealedSegment)]
            replaced = [v.index for v in before.indexes if set(v.index.segment_ids) <= set(segment_ids)]
            if self._closed or len(sealed) < 2 or sum(len(index.segment_ids) for index in replaced) != len(segment_ids):
                return
            index = write_merged(
                self.claim,
                sealed,
                np.concatenate([before.views[number].dead for number in segment_ids]),
                built_at=self._shared.clock.now_us(),
                give_way=give_way,
            )
            words = [one for one in map(self._words_of, replaced) if one is not None]
            if len(words) == len(replaced):
                publish_words(self.claim, index, words)
            with self._state:
                if any(self._snapshot.views[part.segment_id].segment is not part for part in sealed):
                    return  # an index was dropped meanwhile
                self._snapshot = after_indexing(self._snapshot, [index], {})
            self.claim.remove(merged_files(self._layout, replaced))

    def forbid(self, forbidden: ForbiddenText) -> None:
        """Never store this text again. Needs `forbidding`. Raises StoreWriteFailed: nothing changed."""
        self.claim.write(self._layout.forbidden, encode_forbidden(forbidden))
        self.forbidden = forbidden

    def erase(
        self,
        uuids: Collection[bytes],
        mark: Erased,
        wiper: Wiper,
        naming: Collection[bytes] = (),
        calls: Collection[bytes] = (),
    ) -> int:
        """Erase the text and vectors of all entries of these chunks, also in the indexes; return the number of entries.
        `naming`: the chunks that name an erased call, by their `call_digest`s; they lose the name.

        Slow and resumable. Appends and searches continue meanwhile; appends go to another file while the active one is
        rewritten. Raises StoreError: a file could not be read or written; earlier steps of the erasure remain done.
        """
        without = partial(without_text, uuids=uuids, mark=mark, calls=calls)
        self._erase_elsewhere({*uuids, *naming}, without)
        count = 0
        with self._merging, self._sealing:
            self._wipe_leftovers(wiper)
            for _ in range(_PASSES):
                places = [place for uuid in naming for place in self._snapshot.places(uuid)]
                found = self._snapshot.read_many(places).items()
                named = {number for (number, _), entry in found if named_in(entry, calls)}
                if numbers := sorted(named.union(self.holding(uuids))):
                    count += self._rewrite(numbers, without, wiper)
        ENTRIES_READ.clear()
        self._seal_soon()
        return count

    def holding(self, uuids: Collection[bytes]) -> list[int]:
        """Return the segments that have text of these chunks, by the columns or by the file. They differ if a user
        restores a log file from before an erasure."""
        views = self._snapshot.views.items()
        return [number for number, view in views if holds(view.rows, uuids, view.segment.read)]

    def retire(self) -> None:
        """Close the topic for good, after pending writes and reads: its folder is about to be removed."""
        with self._merging, self._sealing, self._state:
            self._closed = True

    def _wipe_leftovers(self, wiper: Wiper) -> None:
        """Wipe temporary files and the remains of interrupted writes. No reader uses either."""
        # Another thread may be writing these now; the second has a header and no text.
        written = {one.name + TEMPORARY_SUFFIX for one in (self._layout.hot, self._layout.active)}
        for folder in (self._layout.directory, self._layout.segments):
            left = [name for name in self._files.names(folder) if name.endswith(TEMPORARY_SUFFIX)]
            for path in (*(folder / name for name in left if name not in written), *torn_files(self._files, [folder])):
                wiper.wipe(path)

    def _erase_elsewhere(self, uuids: Collection[bytes], without: WithoutText) -> None:
        """Erase in the rows that other daemons share, which contain these chunks."""

    def _rewrite(self, numbers: Collection[int], without: WithoutText, wiper: Wiper) -> int:
        """Erase in the files of these segments, and make their indexes anew; return the number of new stubs."""
        with self._state:
            active = self._active
            if active is not None and active.segment_id in numbers:  # appends go to another file
                self._rotate(active)
                if self._active is active:
                    raise StoreWriteFailed(f"{self._layout.active}: cannot be renamed; erase again, and it goes on")
            merged = [one.index for one in self._snapshot.indexes if len(one.index.segments) > 1]
            # They are mapped: a search of one that is overwritten finds nothing.
            self._search_singly([one for one in merged if not set(numbers).isdisjoint(one.segment_ids)])
        self.claim.remove(self._layout.indexes_over(self._files, numbers), wiper)
        count, now = 0, OpenedTopic(self.claim, self._shared.model)
        for number in numbers:
            path = self._layout.bin(number)
            data, erased, unnamed = without(self._files.read(path))
            if erased or unnamed:
                self.claim.write(path, data, wiper)
            count += erased
            now.read_log(number)
        for index in now.indexes:
            if index.columns is None:
                publish_words(self.claim, index, [columns_from_log(index.segments[0], self.counted)])
        self._use(now.indexes, now.segments)
        return count

    def _search_singly(self, merged: Sequence[SealedIndex]) -> None:
        """Search the segments of merged indexes separately."""
        own = [SealedIndex(self._files, self._layout, [one]) for index in merged for one in index.segments]
        for index in own:
            index.columns = read_words(self._files, self._layout, index.segments)
        self._snapshot = after_indexing(self._snapshot, own, {})

    def stats(self) -> TopicStats:
        """Return the topic's current figures; reads nothing from disk."""
        snapshot = self._snapshot
        indexes = [view.index for view in snapshot.indexes]
        segments = [view.segment for view in snapshot.views.values()]
        return TopicStats(
            chunks=snapshot.live_count,
            entries=snapshot.extent.entries,
            damage=tuple(str(finding) for finding in self.findings if finding.kind == "damaged"),
            segments=len(segments),
            unsealed=len(self.unsealed()),
            seal_trouble=str(self.troubles.get("seal", "")),
            indexes=len(indexes),
            unindexed=self.wordless,
            indexes_loaded=sum(index.is_loaded for index in indexes),
            memory_bytes=sum(part.memory_bytes for part in (*segments, *indexes)) + snapshot.uuid_index.memory_bytes,
            fan_out_ms=snapshot.fan_out_ms,
        )

    def close(self) -> None:
        """Close the topic; later appends fail."""
        with self._state:
            self._closed = True
            self.claim.release()

    def _entry(self, draft: Draft, public_id: str, group_left: int) -> Entry:
        expected_bytes = 4 * self._shared.model.dimension if draft.status is Status.ACTIVE else 0
        assert len(draft.uuid) == 16 and len(draft.vector) == expected_bytes, "a uuid and a vector of their sizes"
        canonical_id, now_us = self._shared.clock.next_and_now()
        entry = draft.as_entry(public_id=public_id, canonical_id=canonical_id, group_left=group_left, now_us=now_us)
        return self.counted(entry) if entry.status is Status.ACTIVE else entry

    def _unreserve(self, uuids: Iterable[bytes]) -> None:
        """Release the reserved ids of chunks that the topic has now."""
        for uuid in uuids:
            if self._reserved.pop(uuid, None) is not None:
                del self._order[bisect_left(self._order, uuid)]

    def _assigned(self, drafts: Sequence[Draft], new: dict[bytes, str], others: list[bytes]) -> list[str]:
        """Return the public id of each draft: a prefix of its uuid's hex digits. It never changes, and no other chunk
        begins with it when it is assigned. An adopted chunk keeps the id it was shown under, unless that is taken. Ids
        of new chunks are added to `new`, and their uuids to `others`: the uuids of all pending chunks, ascending,
        perhaps tens of thousands."""
        ids, found = ChainMap({}, new, self._reserved), list[str]()
        for draft, near in zip(drafts, self._snapshot.nearest([draft.uuid for draft in drafts]), strict=True):
            uuid, shown = draft.uuid, draft.public_id
            if uuid in near and uuid not in new:
                ids[uuid] = self._reserved.get(uuid) or uuid.hex()[: self._snapshot.public_digits(uuid)]
            elif uuid not in ids:
                assert shown is None or uuid.hex().startswith(shown), "a public id is a prefix of the uuid"
                at = bisect_left(others, uuid)
                is_reserved = shown is not None and any(shown in one.values() for one in (new, self._reserved))
                if shown is None or is_reserved or any(self._snapshot.named(shown).values()):
                    shown = _unique_prefix(uuid, [*others[max(0, at - 1) : at + 1], *near])
                ids[uuid] = new[uuid] = shown
                others.insert(at, uuid)
            found.append(ids[uuid])
        return found

    def _open_active(self, model: ModelId) -> GrowingSegment:
        """Return the active segment; after a rotation a new one, for this model."""
        if self._active is None:
            number = max(self._layout.next_segment_id(self._files), *(one + 1 for one in self._snapshot.views), 1)
            is_searched = model == self._shared.model
            self._active = create_active(self.claim, model, number, searchable=is_searched)
        return self._active

    def _rotate(self, active: GrowingSegment) -> None:
        try:
            self.claim.rotate(active.segment_id)
        except StoreWriteFailed:
            # The entries are durable anyway. If the file still has its old name, the next append tries again.
            if self._files.size(self._layout.active) is not None:
                return
        active.rotated_to(self._layout.bin(active.segment_id))
        self._active = None

    def _drop_merged(self, index: SealedIndex, error: StoreError) -> None:
        """Search the segments of a damaged index separately."""
        with self._sealing, self._state:
            if all(view.index is not index for view in self._snapshot.indexes):
                return  # another thread dropped it, or a merge replaced it
            self.findings.append(Finding("derived", str(index.path), f"it is rebuilt: {error}"))
            self.claim.remove(merged_files(self._layout, [index]))
            self._search_singly([index])


class OpenedTopic:
    """A topic as read from disk."""

    def __init__(self, claim: Claim, model: ModelId) -> None:
        """Nothing is read yet."""
        self.segments: dict[int, GrowingSegment | SealedSegment] = {}
        """By number, ascending; the active one included."""
        self.indexes: list[SealedIndex] = []
        """The indexes to search; together they cover each searchable sealed segment once."""
        self.active: GrowingSegment | None = None
        """None until the first append."""
        self.findings: list[Finding] = []
        self.missing: list[Path] = []
        """Full segments that are absent, of a newer format, or another topic's."""
        self._claim, self._model = claim, model
        self._files, self._layout = claim.files, claim.layout

    def read(self) -> OpenedTopic:
        """Read all files, and repair what a crash left. Raises ForeignFile: `active.bin` has a newer format, is not
        memd's or is another topic's; StoreError: a file cannot be read, or a torn tail cannot be moved."""
        files, layout = self._files, self._layout
        recovery.remove_temporaries(files, layout.directory)
        recovery.remove_temporaries(files, layout.segments)
        with suppress(StoreError):  # files of an older memd, which stored vectors and words separately
            self._claim.remove(layout.segments / one for one in files.names(layout.segments) if one.endswith(".hnsw"))
            if files.is_directory(layout.lexical):
                Wiper(files).wipe_folder(layout.lexical)
        header = read_header(files, layout.active)
        self.missing += map(layout.bin, layout.missing_segment_ids(files, header.segment_id if header else None))
        self.findings += map(recovery.missing_segment, self.missing)
        for segment_id in layout.segment_ids(files):
            self._read_full(segment_id)
        if files.size(layout.active) is not None:
            self._read_active()
        self.indexes = with_merged(self._claim, self.indexes)
        return self

    def _read_full(self, segment_id: int) -> None:
        """Read a full segment from its derived files, or from its log if they are missing or damaged."""
        files, layout, lost, found = self._files, self._layout, list[tuple[int, int]](), None
        path = layout.bin(segment_id)
        try:
            if has_meta(files, layout, segment_id):
                found = read_segment_meta(files, layout, segment_id)
        except ShortLogFile as error:
            self._add_finding("damaged", path, str(error))
            lost = [error.gap]
        except StoreError as error:
            self._add_finding("derived", path, f"its index is rebuilt from the log: {error}")
        if found is None:
            self.read_log(segment_id, lost)
            return
        header, meta = found
        if self._is_own(header, path):
            self.segments[segment_id] = segment = SealedSegment(files, layout, header, meta)
            if self._model.wrote(header):
                self.indexes.append(SealedIndex(files, layout, [segment]))
            for start, end in meta.gaps:
                self._add_finding("damaged", path, f"bytes {start} to {end} cannot be read; see `memd verify`")

    def read_log(self, segment_id: int, lost: Sequence[tuple[int, int]] = ()) -> None:
        """Read a full segment from its log, and seal it if its columns can be written; `lost` is missing at its end."""
        path = self._layout.bin(segment_id)
        try:
            data = self._files.read(path)
            log_file = recovery.read_log_file(data, name=str(path), dimension=self._model.dimension)
        except ForeignFile as error:
            self._leave_out(path, error)
            return
        if not self._is_own(log_file.header, path):
            return
        self.findings += recovery.find_damage(log_file, is_last=False)
        header = log_file.header or new_header(self._layout, self._model, segment_id)
        if header.segment_id != segment_id:
            self._add_finding("damaged", path, f"its header says that it is segment {header.segment_id}")
        header = msgspec.structs.replace(header, segment_id=segment_id)
        segment = GrowingSegment(self._files, [path], header, searchable=self._model.wrote(header))
        self._fill(segment, log_file, len(log_file.entries))
        if log_file.has_tail and log_file.read_end < log_file.size:
            segment.gaps.append((log_file.read_end, log_file.size))
        segment.gaps += lost
        with suppress(StoreWriteFailed):
            self.segments[segment_id], indexes = seal(self._claim, segment)
            self.indexes += indexes

    def _read_active(self) -> None:
        files, layout, model = self._files, self._layout, self._model
        path, data = layout.active, files.read(layout.active)
        log_file = recovery.read_log_file(data, name=str(path), dimension=model.dimension)
        header = log_file.header
        check_topic(files, layout.directory, header, path)
        if len(data) < HEADER_BYTES or not data.strip(b"\0"):
            self.findings.append(recovery.set_aside(files, path, data))
            return
        if header is None and not log_file.entries:
            raise CorruptFile(
                f"{path}: nothing in it can be read; if it is not memd's, move it away, else restore it from a backup"
            )
        segment_id = max(header.segment_id if header else 0, layout.next_segment_id(files))
        torn = []
        if log_file.has_tail and header is not None:
            torn = [recovery.cut_torn_tail(files, path, data, log_file.whole_end)]
        oldest = next((entry for entry in log_file.entries if entry.content), None)
        is_old = oldest is not None and ChunkTerms.of_record(oldest) is None
        is_old = is_old and files.may_write(layout.segments)  # on a read-only disk it is searched by meaning alone
        if header is None or is_old or (log_file.whole_count and not model.wrote(header)):
            # Nothing is appended after a damaged header, one of another model, or entries of a memd that had no words.
            self._claim.rotate(segment_id)
            self.read_log(segment_id)
            self.findings += torn
            return
        self.findings += [*recovery.find_damage(log_file, is_last=True), *torn]
        if not model.wrote(header):
            return  # empty: the next append replaces it with a file of this model
        header = msgspec.structs.replace(header, segment_id=segment_id)
        self.active = GrowingSegment(files, [path, layout.bin(segment_id)], header, searchable=True)
        self._fill(self.active, log_file, log_file.whole_count)
        self._claim.resume("log", log_file.whole_end)

    def _fill(self, segment: GrowingSegment, log_file: recovery.LogFile, count: int) -> None:
        """Add the first `count` entries of a file to an empty segment. Messages of an append with a gap do not count as
        stored."""
        is_complete = recovery.in_complete_appends(log_file)[:count]
        segment.extend(
            [
                entry if complete else msgspec.structs.replace(entry, digests=())
                for entry, complete in zip(log_file.entries[:count], is_complete, strict=True)
            ],
            log_file.spans[:count],
        )
        self.segments[segment.segment_id] = segment
        segment.gaps = list(log_file.gaps)

    def _is_own(self, header: Header | None, path: Path) -> bool:
        """Return whether a full segment is this topic's; else leave it out."""
        try:
            check_topic(self._files, self._layout.directory, header, path)
        except ForeignFile as error:
            self._leave_out(path, error)
            return False
        return True

    def _leave_out(self, path: Path, error: ForeignFile) -> None:
        self._add_finding("foreign", path, f"it is left out: {error}")
        self.missing.append(path)

    def _add_finding(self, kind: recovery.Kind, path: Path, message: str) -> None:
        self.findings.append(Finding(kind, str(path), message))


def highest_id_on_disk(files: LocalDisk, layout: TopicLayout, dimension: int) -> int:
    """Return the highest canonical_id of a topic, reading as little as possible. Unreadable files count as empty."""
    highest = _highest_in(files, layout.active, dimension)
    for segment_id in reversed(layout.segment_ids(files)):
        with suppress(StoreError):
            return max(highest, read_segment_meta(files, layout, segment_id)[1].canonical_id_range[1])
        highest = max(highest, _highest_in(files, layout.bin(segment_id), dimension))
    return highest


def _highest_in(files: LocalDisk, path: Path, dimension: int) -> int:
    """Return the highest id in a log file: that of its last entry, if its end is intact; 0 if it cannot be read."""
    with suppress(StoreError):
        if (size := files.size(path) or 0) >= 2 * _TAIL_BYTES:
            tail = files.read_at(path, size - _TAIL_BYTES, _TAIL_BYTES)
            scanned = scan_records(tail, start=0)
            if scanned.end == len(tail) and len(scanned.gaps) <= 1 and len(scanned.spans) > 1:
                return decode_entry(payload_of(tail, scanned.spans[-1]), dimension=None).canonical_id
        log_file = recovery.read_log_file(files.read(path), name=str(path), dimension=dimension)
        return max((entry.canonical_id for entry in log_file.entries), default=0)
    return 0


class CanonicalClock:
    """A store's source of canonical ids: strictly increasing, and microseconds since the epoch unless the machine's
    clock goes back. They fit a JavaScript number until the year 2255. Thread-safe."""

    def __init__(self, now_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self.now_us = now_us
        self.last = 0
        """The highest id so far."""
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return the id of the next entry of any topic."""
        return self.next_and_now()[0]

    def next_and_now(self) -> tuple[int, int]:
        """Return the next id, and the time in microseconds."""
        with self._lock:
            now = self.now_us()
            self.last = max(self.last + 1, now)
            return self.last, now

    def observe(self, canonical_id: int) -> None:
        """Keep later ids above this one."""
        with self._lock:
            self.last = max(self.last, canonical_id)


def _unique_prefix(uuid: bytes, others: Iterable[bytes]) -> str:
    """Return the shortest prefix of a new uuid, at least PUBLIC_ID_DIGITS_MIN digits, that no other uuid begins with.

    `others` must include the uuids just before and after it in hex order.
    """
    # Two uuids share the leading hex digits before the highest bit in which they differ.
    differing = min((int.from_bytes(uuid) ^ int.from_bytes(other) for other in others), default=1 << 128)
    shared = 32 - (differing.bit_length() + 3) // 4
    return uuid.hex()[: max(PUBLIC_ID_DIGITS_MIN, shared + 1)]
