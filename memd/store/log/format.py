"""The codec of the log's files: bytes ⇄ header, records, entries.

Rule: pure; never opens a file, and any bytes give a value or a declared error. All numbers are little-endian. The
format is a promise (docs/format.md, tests/golden/): change it only with a new version. Nothing in this folder depends
on an index.

Header, at the start of every file (80 bytes):

    0        8         12         16       20          24               56         64         76      80
    | magic  | version | dimension | flags | segment   | fingerprint    | topic    | reserved | CRC32 |
    | 8 bytes| u32     | u32       | u32   | u32       | 32 bytes       | 8 bytes  | zeros    | u32   |

    magic        "memd.log", "memd.hot" (the journal), "memd.idx" (.meta)
    flags        0; 1 on the disk where the file is encrypted (see store/encryption/frames.py)
    segment      the number the file has or will get under segments/; 0 for the journal
    fingerprint  of the embedding model, ASCII, zero-padded
    topic        BLAKE2b-64 of the topic id, so that a file in the wrong place is noticed
    CRC32        of the 76 bytes before it

Record, repeated to the end of the file:

    0         4         8
    | length  | CRC32   | payload (length bytes)
    | u32     | u32     |

    CRC32        of length and payload; a length of zero is never valid, so zeros are not a record

The payload of a log record is a MessagePack map with the names of `memd.entries.Entry`; of a journal record, whatever
the buffer put there; of a `.meta` file (one record), see index/sealed_index.py.
"""

from __future__ import annotations

import hashlib
import operator
import re
import struct
import zlib

import msgspec
from msgspec import UNSET

from memd.entries import PUBLIC_ID_DIGITS_MIN, UTILITY_STEPS_LIMIT, Entry, Status
from memd.errors import CorruptFile, ForeignFile, StoreError

MAGIC_LOG = b"memd.log"
MAGIC_JOURNAL = b"memd.hot"
MAGIC_META = b"memd.idx"
MAGIC_ENCRYPTED = b"memd.enc"
"""Magic of an encrypted file that has no header of its own inside."""
FLAG_ENCRYPTED = 1
FORMAT_VERSION = 2
"""Version of the whole format. Each kind of file has the version of its latest change, so that an older memd reads all
it can, above all the log."""
META_VERSION = 2
_VERSIONS = {MAGIC_LOG: 1, MAGIC_JOURNAL: 1, MAGIC_META: META_VERSION}

HEADER_BYTES = 80
FRAME_BYTES = 8
PAYLOAD_BYTES_MAX = 128 << 20
"""Above any request body (100 MiB), so only damage claims more."""
FINGERPRINT_BYTES = 32

_FIRST_MEMBER = re.compile(rb"\xa4uuid\xc4\x10|\xa4type[\xa1-\xbf]")
"""The start of every payload that a scan looks for: a map opens with an entry's uuid or an event's type. These bytes
are not UTF-8, so no text contains them, and no record has another one inside."""
_MAP_HEADS = (1, 3)
"""Lengths of a map's head, before its first member: 1 for up to fifteen members, 3 for more."""
_LONG_BYTES = 1 << 16
"""A length up to this is trusted before the check; damaged lengths may all claim the rest of the file."""
_HEADER = struct.Struct("<8sIIII32s8s12x")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<II")
_FIRST = ("uuid", "public_id", "canonical_id", "vector", "content", "status", "origin_id")
"""The order of an entry's first fields in version 1; the others follow as they are defined."""
_FIELDS = tuple(name for name in dict.fromkeys([*_FIRST, *Entry.__struct_fields__]) if name != "unknown")
_OPTIONAL = tuple(field.name for field in msgspec.structs.fields(Entry) if field.default is UNSET)
_optional_values = operator.attrgetter(*_OPTIONAL)
_encoder = msgspec.msgpack.Encoder()
_entry_decoder = msgspec.msgpack.Decoder(Entry)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a file."""

    magic: bytes
    version: int = 1
    dimension: int
    flags: int = 0
    segment_id: int
    fingerprint: str
    topic: bytes


class ModelId(msgspec.Struct, frozen=True):
    """The embedding model that writes new vectors and whose vectors are searched."""

    dimension: int
    fingerprint: str

    def wrote(self, header: Header) -> bool:
        """Return whether the vectors of a file are comparable with this model's."""
        return header.dimension == self.dimension and header.fingerprint == self.fingerprint


class Span(msgspec.Struct, frozen=True):
    """The place of one intact record in a file."""

    offset: int
    length: int
    """Of the payload; the record is FRAME_BYTES longer."""

    @property
    def end(self) -> int:
        """The offset just after the record."""
        return self.offset + FRAME_BYTES + self.length


class Scan(msgspec.Struct, frozen=True):
    """The records of a file and the unreadable byte ranges between and after them."""

    spans: list[Span]
    gaps: list[tuple[int, int]]
    """(start, end) of unreadable bytes before a readable record."""
    end: int
    """The offset just after the last readable record; bytes from here on are an unreadable tail."""


def topic_tag(topic_id: str) -> bytes:
    """Return the 8 bytes that identify a topic in a header."""
    return hashlib.blake2b(topic_id.encode(), digest_size=8).digest()


def encode_header(header: Header) -> bytes:
    """Encode a header in its 80 bytes."""
    fingerprint = header.fingerprint.encode("ascii")
    assert len(fingerprint) <= FINGERPRINT_BYTES, "a fingerprint is at most 32 ASCII characters"
    data = _HEADER.pack(
        header.magic, header.version, header.dimension, header.flags, header.segment_id, fingerprint, header.topic
    )
    return data + _CRC.pack(zlib.crc32(data))


def decode_header(data: bytes, *, magic: bytes, name: str) -> Header:
    """Decode the header of a file that should begin with `magic`; errors call the file `name`. Raises CorruptFile: the
    bytes do not match their checksum, the file may never have been memd's; ForeignFile: an intact header of another
    kind of file, of a newer format or with unknown flags."""
    if len(data) < HEADER_BYTES:
        raise CorruptFile(f"{name}: shorter than a header ({len(data)} of {HEADER_BYTES} bytes)")
    header = decode_any_header(data)
    if header is None:
        raise CorruptFile(f"{name}: the header (bytes 0 to {HEADER_BYTES}) does not match its checksum")
    if header.magic != magic:
        raise ForeignFile(f"{name}: is a file of kind {header.magic!r} where {magic!r} belongs; move it away")
    if header.flags == FLAG_ENCRYPTED:
        raise ForeignFile(f"{name}: is encrypted; give the key of its data directory, and its memd.key with it")
    newest = _VERSIONS.get(magic, FORMAT_VERSION)
    if header.version > newest or header.flags:
        raise ForeignFile(
            f"{name}: is of format {header.version} (flags {header.flags}), "
            f"this memd reads up to {newest}; use a newer memd"
        )
    return header


def decode_any_header(data: bytes) -> Header | None:
    """Decode the header of a file of any kind; None if it is not intact."""
    if len(data) < HEADER_BYTES:
        return None
    fields, (crc,) = data[: _HEADER.size], _CRC.unpack_from(data, _HEADER.size)
    if zlib.crc32(fields) != crc:
        return None
    found, version, dimension, flags, segment_id, fingerprint, topic = _HEADER.unpack(fields)
    return Header(
        magic=found,
        version=version,
        dimension=dimension,
        flags=flags,
        segment_id=segment_id,
        fingerprint=fingerprint.rstrip(b"\0").decode("ascii", errors="replace"),
        topic=topic,
    )


def encode_record(payload: bytes) -> bytes:
    """Frame a payload as one record. Raises StoreError: the payload is empty or larger than PAYLOAD_BYTES_MAX."""
    if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
        raise StoreError(
            f"a record of {len(payload)} bytes cannot be stored: the limit is {PAYLOAD_BYTES_MAX}; shorten the content"
        )
    return _FRAME.pack(len(payload), _checksum(payload)) + payload


def payload_at(data: bytes, offset: int) -> bytes | None:
    """Return the payload of the record at `offset`; None if there is no intact record."""
    if offset < 0 or offset + FRAME_BYTES > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, offset)
    start = offset + FRAME_BYTES
    if not 0 < length <= min(PAYLOAD_BYTES_MAX, len(data) - start):
        return None
    payload = data[start : start + length]
    return payload if _checksum(payload) == crc else None


def payload_of(data: bytes, span: Span) -> bytes:
    """Return the payload of a record that was found intact in these bytes."""
    return data[span.offset + FRAME_BYTES : span.end]


def encode_long(payload: bytes) -> bytes:
    """Frame a payload of any length, as one record if it fits, else as several."""
    steps = range(0, len(payload), PAYLOAD_BYTES_MAX)
    return b"".join(encode_record(payload[at : at + PAYLOAD_BYTES_MAX]) for at in steps)


def long_payload(data: bytes) -> bytes | None:
    """Return the payload that `encode_long` framed, from the header to the end; None if a record is not intact."""
    pieces, at = [], HEADER_BYTES
    while at < len(data):
        if (piece := payload_at(data, at)) is None:
            return None
        pieces.append(piece)
        at += FRAME_BYTES + len(piece)
    return b"".join(pieces)


def scan_records(data: bytes, start: int = HEADER_BYTES) -> Scan:
    """Find all records from `start` on. After unreadable bytes the scan continues at the next readable record."""
    spans: list[Span] = []
    gaps: list[tuple[int, int]] = []
    at = end = start
    while at < len(data):
        if (payload := _payload_alone(data, at)) is None:
            following = _next_record(data, at + 1)
            if following is None:
                break
            gaps.append((at, following))
            at = following
            continue
        spans.append(Span(at, len(payload)))
        at = end = at + FRAME_BYTES + len(payload)
    return Scan(spans, gaps, end)


def _payload_alone(data: bytes, at: int) -> bytes | None:
    """Return the payload of the record at `at`, unless another record begins in it: each byte is checked about once."""
    length = int.from_bytes(data[at : at + 4], "little")
    inside = at + FRAME_BYTES + max(_MAP_HEADS) + 1
    if _LONG_BYTES < length <= len(data) - at and _FIRST_MEMBER.search(data, inside, at + length):
        return None
    return payload_at(data, at)


def _next_record(data: bytes, start: int) -> int | None:
    """Return the offset of the first readable record at or after `start`."""
    members = (found.start() for found in _FIRST_MEMBER.finditer(data, start + FRAME_BYTES))
    places = (member - head - FRAME_BYTES for member in members for head in _MAP_HEADS)
    return next((at for at in places if at >= start and _payload_alone(data, at) is not None), None)


def encode_entry(entry: Entry) -> bytes:
    """Encode an entry as the payload of a log record."""
    known = {name: value for name in _FIELDS if (value := getattr(entry, name)) is not UNSET}
    return _encoder.encode(known | {name: value for name, value in entry.unknown.items() if name not in _FIELDS})


def vector_key(dimension: int) -> bytes:
    """Return the bytes before the vector of an Active entry in its payload. Not UTF-8, so no text contains them."""
    vector = bytes(4 * dimension)
    return _encoder.encode("vector") + _encoder.encode(vector)[: -len(vector)]


def decode_entry(payload: bytes, *, dimension: int | None) -> Entry:
    """Decode and check the entry of a log record whose checksum matched.

    With `dimension` None the vector may have any length. Raises CorruptFile: the payload is not an entry, or an
    impossible one.
    """
    try:
        entry = _entry_decoder.decode(payload)
        known = len(_FIELDS) - _optional_values(entry).count(UNSET)  # without those of a later memd
        fields = msgspec.msgpack.decode(payload) if _count(payload) != known else {}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptFile(f"the record is not an entry: {error}") from error
    wanted_bytes = 0 if entry.status is Status.DEPRECATED else dimension and 4 * dimension
    possible = (
        len(entry.uuid) == 16
        and (len(entry.vector) == wanted_bytes or wanted_bytes is None)
        and PUBLIC_ID_DIGITS_MIN <= len(entry.public_id) <= 32
        and entry.uuid.hex().startswith(entry.public_id)
        and 0 < entry.origin_id <= entry.canonical_id < 1 << 63
        and abs(entry.utility_steps) <= UTILITY_STEPS_LIMIT
        and entry.group_left >= 0
    )
    if not possible:
        raise CorruptFile(f"the record of entry {entry.canonical_id} contradicts itself")
    unknown = {name: value for name, value in fields.items() if name not in _FIELDS}
    return msgspec.structs.replace(entry, unknown=unknown) if unknown else entry


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_CRC.pack(len(payload))))


def _count(payload: bytes) -> int:
    """Return the number of fields in the payload's map, from its first bytes; -1 for a map of 65,536 or more."""
    if payload[0] & 0xF0 == 0x80:
        return payload[0] & 0x0F
    return int.from_bytes(payload[1:3], "big") if payload[0] == 0xDE else -1
