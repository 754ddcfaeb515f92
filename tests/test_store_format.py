"""The codec: what is written is read back, and any bytes whatever give a value or a declared error."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from drafts import DIMENSION
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from memd.entries import UTILITY_STEPS_LIMIT, Entry, Status
from memd.errors import CorruptFile, ForeignFile
from memd.store.log.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    MAGIC_JOURNAL,
    MAGIC_LOG,
    Header,
    decode_entry,
    decode_header,
    encode_entry,
    encode_header,
    encode_record,
    payload_at,
    scan_records,
    topic_tag,
)
from memd.store.log.recovery import read_log_file

HEADER = Header(magic=MAGIC_LOG, dimension=DIMENSION, segment_id=7, fingerprint="a" * 32, topic=topic_tag("talk"))
texts = st.text(max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 1 << 60) | texts | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
payload_lists = st.lists(
    st.binary(max_size=60).map(lambda data: msgspec.msgpack.encode({"type": "said", "data": data})), max_size=6
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    uuid = draw(st.binary(min_size=16, max_size=16))
    canonical_id = draw(st.integers(1, (1 << 63) - 1))
    status = draw(st.sampled_from(Status))
    vector_bytes = 4 * DIMENSION if status is Status.ACTIVE else 0
    names = texts.filter(lambda name: name not in Entry.__struct_fields__)
    return Entry(
        uuid=uuid,
        public_id=uuid.hex()[: draw(st.integers(4, 32))],
        canonical_id=canonical_id,
        vector=draw(st.binary(min_size=vector_bytes, max_size=vector_bytes)),
        content=draw(texts),
        status=status,
        origin_id=draw(st.integers(1, canonical_id)),
        utility_steps=draw(st.integers(-UTILITY_STEPS_LIMIT, UTILITY_STEPS_LIMIT)),
        created_at=draw(st.integers(0, 1 << 62)),
        roles=tuple(draw(st.lists(texts, max_size=3))),
        digests=tuple(draw(st.lists(st.binary(min_size=16, max_size=16), max_size=3))),
        kind=draw(texts),
        source=draw(st.none() | texts),
        supersedes=tuple(draw(st.lists(st.binary(min_size=16, max_size=16), max_size=2))),
        action=draw(st.none() | texts),
        reason=draw(st.none() | texts),
        group_left=draw(st.integers(0, 100)),
        author=draw(st.just(UNSET) | texts),
        action_by=draw(st.just(UNSET) | texts),
        unknown=draw(st.dictionaries(names, values, max_size=3)),
    )


@given(entries())
def test_an_entry_is_read_back_as_it_was_written_with_its_unknown_fields(entry: Entry) -> None:
    assert decode_entry(encode_entry(entry), dimension=DIMENSION) == entry


@given(st.binary(min_size=1, max_size=200))
def test_any_payload_is_an_entry_or_declared_corrupt(payload: bytes) -> None:
    try:
        decode_entry(payload, dimension=DIMENSION)
    except CorruptFile:
        pass


@given(entries(), st.data())
def test_an_entry_that_contradicts_itself_is_corrupt(entry: Entry, data: st.DataObject) -> None:
    wrong: dict[str, object] = data.draw(
        st.sampled_from(
            [
                {"uuid": b"short"},
                {"public_id": "zzzz"},
                {"public_id": entry.uuid.hex()[:3]},
                {"vector": b"1234"},
                {"origin_id": entry.canonical_id + 1},
                {"canonical_id": 0},
                {"utility_steps": UTILITY_STEPS_LIMIT + 1},
                {"group_left": -1},
            ]
        )
    )
    with pytest.raises(CorruptFile):
        decode_entry(encode_entry(msgspec.structs.replace(entry, **wrong)), dimension=DIMENSION)


def test_a_header_is_read_back_and_says_what_is_wrong_with_it() -> None:
    data = encode_header(HEADER)
    assert len(data) == HEADER_BYTES
    assert decode_header(data, magic=MAGIC_LOG, name="x") == HEADER
    with pytest.raises(ForeignFile, match="kind"):
        decode_header(data, magic=MAGIC_JOURNAL, name="x")
    for newer in (msgspec.structs.replace(HEADER, version=2), msgspec.structs.replace(HEADER, flags=2)):
        with pytest.raises(ForeignFile, match="use a newer memd"):
            decode_header(encode_header(newer), magic=MAGIC_LOG, name="x")
    with pytest.raises(ForeignFile, match="is encrypted"):
        decode_header(encode_header(msgspec.structs.replace(HEADER, flags=1)), magic=MAGIC_LOG, name="x")
    for damaged in [data[:-1], b"", *(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(HEADER_BYTES))]:
        with pytest.raises(CorruptFile, match="header"):
            decode_header(damaged, magic=MAGIC_LOG, name="x")


def test_the_bytes_are_those_of_the_documented_format() -> None:
    header = encode_header(HEADER)
    assert header[:24] == b"memd.log" + b"".join(n.to_bytes(4, "little") for n in (1, DIMENSION, 0, 7))
    assert header[24:56] == b"a" * 32
    assert header[64:76] == bytes(12)
    assert header[76:] == zlib.crc32(header[:76]).to_bytes(4, "little")
    record = encode_record(b"payload")
    length = (7).to_bytes(4, "little")
    assert record == length + zlib.crc32(length + b"payload").to_bytes(4, "little") + b"payload"


@given(payload_lists, st.binary(max_size=50))
def test_a_scan_finds_every_record_before_garbage(payloads: list[bytes], garbage: bytes) -> None:
    whole = b"".join(map(encode_record, payloads))
    found = scan_records(whole + garbage, 0)
    assert [payload_at(whole + garbage, span.offset) for span in found.spans][: len(payloads)] == payloads
    assert not found.gaps or found.gaps[0][0] >= len(whole)


@given(payload_lists.filter(len), st.data())
def test_one_flipped_bit_loses_one_record(payloads: list[bytes], data: st.DataObject) -> None:
    image = bytearray(b"".join(map(encode_record, payloads)))
    position = data.draw(st.integers(0, len(image) - 1))
    image[position] ^= 1 << data.draw(st.integers(0, 7))
    found = scan_records(bytes(image), 0)
    survivors = [payload_at(bytes(image), span.offset) for span in found.spans]
    ends = [sum(map(len, map(encode_record, payloads[: i + 1]))) for i in range(len(payloads))]
    hit = next(i for i, end in enumerate(ends) if position < end)
    assert survivors == payloads[:hit] + payloads[hit + 1 :]


def test_zeros_are_not_records() -> None:
    assert scan_records(bytes(1000), 0).spans == []
    assert payload_at(bytes(FRAME_BYTES), 0) is None


@given(st.binary(max_size=300))
def test_any_file_is_read_without_an_undeclared_error(data: bytes) -> None:
    for image in (data, encode_header(HEADER) + data):
        log_file = read_log_file(image, name="x", dimension=None)
        assert 0 <= log_file.whole_end <= len(image)
        assert log_file.entries == [] and log_file.whole_count == 0
