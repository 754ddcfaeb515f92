"""Rewriting the files of the log without the text of some chunks.

Rule: a new file is written beside the old one, synced and renamed, so that a crash leaves one or the other; the old one
is overwritten afterwards. Both have every record at the same place. Unreadable bytes stay as they are: nobody knows
whose they were.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing, suppress

import numpy as np

from memd.entries import Entry, Erased
from memd.errors import StoreError
from memd.store.claim import Claim
from memd.store.disk import LocalDisk
from memd.store.erasure.stub import without_text
from memd.store.erasure.wiping import Wiper
from memd.store.files import only_whole, write_beside
from memd.store.index.meta import own_index_file
from memd.store.index.sealed_index import SealedIndex
from memd.store.layout import TopicLayout
from memd.store.log.columns import Records, uuid_bytes, uuid_halves
from memd.store.log.format import HEADER_BYTES, Span, decode_entry, payload_at, scan_records
from memd.store.log.recovery import read_log_file
from memd.store.log.segment import GrowingSegment
from memd.store.opening import OpenedTopic, extended
from memd.store.snapshot import Snapshot


def holds(records: Records, uuids: Collection[bytes]) -> bool:
    """Whether there is an entry of one of these chunks that is not erased."""
    wanted = np.array([uuid_halves(uuid)[0] for uuid in uuids], dtype=np.uint64)
    rows = records[np.isin(records["uuid_high"], wanted) & (records["is_erased"] == 0)]
    return any(uuid_bytes(row["uuid_high"], row["uuid_low"]) in uuids for row in rows)


def was_erased(snapshot: Snapshot, uuid: bytes) -> bool:
    """Whether the text of a chunk was erased."""
    return any(snapshot.views[segment_id].rows[row]["is_erased"] for segment_id, row in snapshot.places(uuid))


def erase_in_segment(claim: Claim, segment_id: int, uuids: Collection[bytes], mark: Erased, wiper: Wiper) -> int:
    """Replace a full segment by one without the text of these chunks; return the number of entries.

    Raises:
        StoreError: it is as it was.
    """
    path = claim.layout.bin(segment_id)
    found = without_text(claim.files.read(path), uuids, mark, HEADER_BYTES)
    if found.entries:
        claim.publish({path: write_beside(claim.files, path, found.data)}, wiper=wiper)
    return found.entries


def growing_of(opened: OpenedTopic, segment_id: int) -> GrowingSegment:
    """Return a segment that was just read again."""
    segment = opened.segments[segment_id]
    assert isinstance(segment, GrowingSegment), "its index is gone"
    return segment


def indexes_without(
    files: LocalDisk, layout: TopicLayout, before: Snapshot, numbers: Collection[int]
) -> list[SealedIndex]:
    """Return the indexes that take the place of the merged ones over these segments, for the others that they cover."""
    merged = [view.index for view in before.indexes if set(view.index.segment_ids) & set(numbers)]
    others = [one for index in merged for one in index.segments if one.segment_id not in numbers]
    made = []
    for one in others:
        index = SealedIndex(files, own_index_file(layout, one), [one], dead=before.views[one.segment_id].dead)
        with suppress(StoreError):  # the first search drops it, and says so
            index.load()
        made.append(index)
    return made


class ActiveRewriting:
    """The rewriting of the file that is appended to. What is appended after it began follows in `finish`."""

    def __init__(
        self, claim: Claim, end: int, active: GrowingSegment, uuids: Collection[bytes], mark: Erased, wiper: Wiper
    ) -> None:
        """Write the new file, up to `end`, beside the old one.

        Raises:
            StoreError: nothing has changed.
        """
        self._claim, self._end, self._uuids, self._mark, self._wiper = claim, end, uuids, mark, wiper
        path = claim.layout.active
        found = without_text(claim.files.read_at(path, 0, end), uuids, mark, HEADER_BYTES)
        self.count = found.entries
        """Entries that were erased."""
        log_file = read_log_file(found.data, name=str(path), dimension=active.header.dimension)
        self._segment = extended(active.emptied(), log_file)
        # Not the name under which an append, meanwhile, begins the next file.
        self._temporary = write_beside(claim.files, path.with_name(f"{path.name}.erased"), found.data)

    def finish(self, end: int) -> GrowingSegment:
        """Add what the file has up to `end` by now, and put the new one in its place; return it as it is in memory.

        Raises:
            StoreError: the old file is still in place.
        """
        files = self._claim.files
        with only_whole(files, self._temporary):
            added = files.read_at(self._claim.layout.active, self._end, end - self._end)
            found = without_text(added, self._uuids, self._mark, 0)
            if found.data:
                with closing(files.append_to(self._temporary)) as appender:
                    appender.write(found.data)
                    appender.sync()
            self._claim.roll("log", self._temporary, self._wiper)
        self.count += found.entries
        self._segment.extend(*records_in(found.data, self._end))
        return self._segment

    def give_up(self) -> None:
        """Remove the new file; the old one stays."""
        with suppress(StoreError):
            self._claim.files.remove(self._temporary)


def records_in(data: bytes, start: int) -> tuple[Sequence[Entry], Sequence[Span]]:
    """The entries in the last bytes of a log file, which begin at `start` in it."""
    entries, spans = [], []
    for span in scan_records(data, 0).spans:
        payload = payload_at(data, span.offset)
        assert payload is not None, "scanned just now"
        entries.append(decode_entry(payload, dimension=None))
        spans.append(Span(start + span.offset, span.length))
    return entries, spans
