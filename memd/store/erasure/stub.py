"""The record that stands in the log in place of one whose text was erased.

Rule: pure. It is exactly as long as the record was, so that everything behind it keeps its place and whoever reads the
file meanwhile finds what he looks for. It keeps the entry's identity and its times, and says when and by whom it was
erased; who wrote it goes with the text, as a name may be what had to go. To a memd that does not know of erasures it
is a Deprecated entry.
"""

from __future__ import annotations

import struct
from collections.abc import Collection

import msgspec
from msgspec import UNSET

from memd.entries import Entry, Erased, Status
from memd.errors import CorruptFile
from memd.store.log.format import decode_entry, encode_entry, encode_record, payload_at, scan_records

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
