"""Finding records among unreadable bytes: the right ones, and with an effort that grows with the bytes alone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.store.log.format import RangeChecksums, crc_of_words, encode_record, payload_at, scan_records

PASSES_MAX = 8
"""How often every byte may be looked at; before, it was as often as there are damaged records or chance lengths."""


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each checksum and of each array that is made of a file."""
    sizes: list[int] = []

    def noted(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            sizes.append(size(*arguments, **named))
            return function(*arguments, **named)

        return called

    monkeypatch.setattr(zlib, "crc32", noted(zlib.crc32, lambda data, *_: len(data)))
    monkeypatch.setattr(np, "frombuffer", noted(np.frombuffer, lambda data, dtype, count=0, offset=0: 4 * count))
    return sizes


def test_random_bytes_are_searched_with_an_effort_that_grows_with_them(looked_at: list[int]) -> None:
    garbage = random.Random(1).randbytes(2 << 20)
    record = encode_record(b"the one that is whole")
    found = scan_records(garbage + record, 0)
    assert [span.offset for span in found.spans] == [len(garbage)] and found.gaps == [(0, len(garbage))]
    assert sum(looked_at) < PASSES_MAX * len(garbage)


@pytest.mark.parametrize("damaged_byte", [1, 2, 900], ids=["length", "length, by much", "payload"])
def test_many_damaged_records_are_passed_over_with_an_effort_that_grows_with_the_file(
    looked_at: list[int], damaged_byte: int
) -> None:
    source = random.Random(2)
    records = [bytearray(encode_record(source.randbytes(2_000))) for _ in range(1_000)]
    for record in records[1::2]:
        record[damaged_byte] ^= 0x15
    data = b"".join(records)
    found = scan_records(data, 0)
    assert len(found.spans) == 500 and len(found.gaps) == 499
    assert sum(looked_at) < 3 * PASSES_MAX * len(data)


@given(st.data())
def test_the_first_record_behind_any_bytes_is_the_one_that_trying_every_offset_finds(data: st.DataObject) -> None:
    pieces = st.binary(max_size=40) | st.binary(min_size=1, max_size=40).map(encode_record)
    some = b"".join(data.draw(st.lists(pieces, max_size=8))).replace(b"\xff\xff", b"\0\0")
    at = next((at for at in range(len(some)) if payload_at(some, at) is not None), None)
    spans = scan_records(some, 0).spans
    assert (spans[0].offset if spans else None) == at


@given(st.binary(max_size=700), st.data())
def test_the_checksum_of_a_range_is_that_of_zlib(whole: bytes, data: st.DataObject) -> None:
    checksums = RangeChecksums(whole)
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    before = zlib.crc32(data.draw(st.binary(max_size=9)))
    [crc] = checksums.of(np.array([start]), np.array([length]), np.array([before], dtype=np.uint32)).tolist()
    assert crc == zlib.crc32(whole[start : start + length], before)
    word = data.draw(st.integers(0, 2**32 - 1))
    assert crc_of_words(np.array([word], dtype=np.uint32)).tolist() == [zlib.crc32(word.to_bytes(4, "little"))]
