"""Finding records among unreadable bytes: the right ones, and with an effort that grows with the bytes alone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from drafts import draft
from hypothesis import given
from hypothesis import strategies as st

from memd.conversation.events import BufferEvent
from memd.store.log.format import FRAME_BYTES, encode_entry, encode_record, payload_at, scan_records

PASSES_MAX = 8
"""How often every byte may be looked at; before, it was as often as there are damaged records or chance lengths."""


def payload(data: bytes) -> bytes:
    """As an event is written."""
    return msgspec.msgpack.encode({"type": "said", "data": data})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each checksum."""
    sizes: list[int] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(data: bytes, *arguments: Any) -> Any:
            sizes.append(len(data))
            return function(data, *arguments)

        return called

    monkeypatch.setattr(zlib, "crc32", noted(zlib.crc32))
    return sizes


def test_random_bytes_are_searched_with_an_effort_that_grows_with_them(checked: list[int]) -> None:
    garbage = random.Random(1).randbytes(2 << 20)
    record = encode_record(payload(b"the one that is whole"))
    found = scan_records(garbage + record, 0)
    assert [span.offset for span in found.spans] == [len(garbage)] and found.gaps == [(0, len(garbage))]
    assert sum(checked) < len(garbage)


@pytest.mark.parametrize("damaged_byte", [1, 2, 900], ids=["length", "length, by much", "payload"])
def test_many_damaged_records_are_passed_over_with_an_effort_that_grows_with_the_file(
    checked: list[int], damaged_byte: int
) -> None:
    source = random.Random(2)
    records = [bytearray(encode_record(payload(source.randbytes(2_000)))) for _ in range(1_000)]
    for record in records[1::2]:
        record[damaged_byte] ^= 0x15
    data = b"".join(records)
    found = scan_records(data, 0)
    assert len(found.spans) == 500 and len(found.gaps) == 499
    assert sum(checked) < PASSES_MAX * len(data)


@given(st.data())
def test_the_first_record_behind_any_bytes_is_the_one_that_trying_every_offset_finds(data: st.DataObject) -> None:
    pieces = st.binary(max_size=40) | st.binary(max_size=40).map(lambda some: encode_record(payload(some)))
    some = b"".join(data.draw(st.lists(pieces, max_size=8))).replace(b"\xff\xff", b"\0\0")
    at = next((at for at in range(len(some)) if payload_at(some, at) is not None), None)
    spans = scan_records(some, 0).spans
    assert (spans[0].offset if spans else None) == at


@given(st.text())
def test_no_text_looks_like_a_record_to_the_search(text: str) -> None:
    record = encode_record(payload(b"whole"))
    around = f"儤type{text}儤uuid".encode()
    assert scan_records(around + record, 0).gaps == [(0, len(around))]
    for key in (b"\xa4uuid\xc4\x10", *(b"\xa4type" + bytes([head]) for head in range(0xA1, 0xC0))):
        assert key not in text.encode()


def test_all_that_is_written_is_found_behind_damage() -> None:
    entry = draft("a chunk").as_entry(public_id="0" * 4, canonical_id=7, group_left=0)
    events = [kind.__struct_config__ for kind in get_args(BufferEvent)]
    assert events and all(one.tag_field == "type" and not one.array_like for one in events)
    record = encode_record(encode_entry(entry))
    assert [span.offset for span in scan_records(bytes(FRAME_BYTES) + record, 0).spans] == [FRAME_BYTES]
