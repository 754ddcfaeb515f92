"""Rewriting the files of the log without the text of some chunks.

Rule: a new file is written beside the old one, synced and renamed, so that a crash leaves one or the other; the old one
is overwritten afterwards. Both have every record at the same place. Unreadable bytes stay as they are: nobody knows
whose they were.

The record that stands in place of one whose text was erased (a stub) is exactly as long as that was, so that everything
behind it keeps its place and whoever reads the file meanwhile finds what he looks for. It keeps the entry's identity
and its times, and says when and by whom it was erased; who wrote it goes with the text, as a name may be what had to
go. To a memd that does not know of erasures it is a Deprecated entry.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from contextlib import closing, suppress

import msgspec
import numpy as np
from msgspec import UNSET

from memd.entries import Entry, Erased, Status
from memd.errors import CorruptFile, StoreError
from memd.store.claim import Claim
from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.files import only_whole, write_beside
from memd.store.index.meta import own_index_file
from memd.store.index.sealed_index import SealedIndex
from memd.store.layout import TopicLayout
from memd.store.log.columns import Records, uuid_bytes, uuid_halves
from memd.store.log.format import (
    HEADER_BYTES,
    Span,
    decode_entry,
    encode_entry,
    encode_record,
    payload_at,
    scan_records,
)
from memd.store.log.recovery import read_log_file
from memd.store.log.segment import GrowingSegment
from memd.store.opening import OpenedTopic, extended
from memd.store.snapshot import Snapshot

_encoder = msgspec.msgpack.Encoder()
_BIN32 = struct.Struct(">BI")
"""The head of a MessagePack bin of any length: 0xc6 and its length, big-endian."""
_FIXSTR_MAX = 31


class ErasedBytes(msgspec.Struct, frozen=True):
    """The bytes of a log file, or of the end of one, without the text of some chunks."""

    data: bytes
    entries: int
    """How many were erased."""


def without_text(data: bytes, uuids: Collection[bytes], mark: Erased, start: int) -> ErasedBytes:
    """Return the bytes of a log file in which every record of these chunks is a stub. Unreadable bytes stay.

    Args:
        start: where its first record begins.
    """
    changed, count = bytearray(data), 0
    for span in scan_records(data, start).spans:
        payload = payload_at(data, span.offset)
        assert payload is not None, "scanned just now"
        try:
            entry = decode_entry(payload, dimension=None)
        except CorruptFile:
            continue  # no entry, so nobody's
        if entry.uuid in uuids and entry.erased is UNSET:
            changed[span.offset : span.end] = encode_record(stub_payload(entry, mark, len(payload)))
            count += 1
    return ErasedBytes(bytes(changed), count)


def is_erasure_of(after: bytes, before: bytes) -> bool:
    """Whether the bytes of a log file are earlier ones in which nothing has changed but that text was erased."""
    if len(after) != len(before):
        return False
    rest = bytearray(before)
    for span in scan_records(before).spans:
        if after[span.offset : span.end] == before[span.offset : span.end]:
            continue
        payloads = payload_at(after, span.offset), payload_at(before, span.offset)
        if payloads[0] is None or payloads[1] is None:
            return False
        try:
            new, old = (decode_entry(payload, dimension=None) for payload in payloads if payload is not None)
        except CorruptFile:
            return False
        if new.content or new.vector or (new.uuid, new.canonical_id) != (old.uuid, old.canonical_id):
            return False
        rest[span.offset : span.end] = after[span.offset : span.end]
    return bytes(rest) == after


def stub_payload(entry: Entry, mark: Erased, length: int) -> bytes:
    """Return the payload of `length` bytes, those of the entry's own, that keeps its identity alone."""
    bare = msgspec.structs.replace(
        entry,
        vector=b"",
        content="",
        status=Status.DEPRECATED,
        roles=(),
        digests=(),
        completes=UNSET,
        source=None,
        action=None,
        reason=None,
        speakers=UNSET,
        shown=UNSET,
        asked_by=UNSET,
        author=UNSET,
        action_by=UNSET,
        line_tokens=UNSET,
        terms=UNSET,
        part=UNSET,
        tags=UNSET,
        unknown={},
        kind=entry.kind if entry.kind in ("turn", "note", "document") else "",
    )
    base = encode_entry(bare)
    for one in (mark, msgspec.structs.replace(mark, by="")):
        told = _told(one)
        if (room := length - len(base) - len(told) - _BIN32.size) >= 0:
            assert base[0] == 0xDE, "a map of more than fifteen fields"
            fields = int.from_bytes(base[1:3], "big") + 1
            return b"\xde" + fields.to_bytes(2, "big") + base[3:] + told + _BIN32.pack(0xC6, room) + bytes(room)
    return _filled(bare, length)


def _told(mark: Erased) -> bytes:
    """The field `erased` up to the head of its `pad`, which is the last member."""
    value = _encoder.encode(msgspec.structs.replace(mark, pad=b"\0"))
    return _encoder.encode("erased") + value[: -len(b"\xc4\x01\0")]


def _filled(bare: Entry, length: int) -> bytes:
    """The stub of an entry that had next to nothing beside its identity: blanks take the place of its reason."""
    payload = encode_entry(bare)
    missing = length - len(payload)
    assert missing >= 0, "it has less than the entry had"
    head = _encoder.encode("reason")
    blanks = b" " * missing
    if missing <= _FIXSTR_MAX:
        text = bytes([0xA0 | missing]) + blanks
    else:
        text = b"\xdb" + (missing - 4).to_bytes(4, "big") + blanks[4:]
    return payload.replace(head + b"\xc0", head + text, 1)


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
