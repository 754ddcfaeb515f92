"""CRC32 of many overlapping ranges of the same bytes, each for the price of a few lookups.

Rule: pure, and the same values as zlib's. The CRC of a range follows from those of the bytes up to its two ends: with
`shift(crc, n)`, the change that n further bytes make to a CRC, crc(A + B) = shift(crc(A), len(B)) ^ crc(B).
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_STEP_BYTES = 128
"""Between two places whose CRC is kept; up to so many bytes are read again for the end of a range."""
_DIGITS = 7
"""Lengths are taken apart into so many hexadecimal digits: up to 256 MiB."""


class RangeChecksums:
    """Checksums of ranges of `data`. The first one reads all of it, once."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._kept: list[int] = []

    def of(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], before: Words) -> Words:
        """Return for each range zlib.crc32 of its bytes, begun with the CRC `before` of what comes before it."""
        begun, ended = self._up_to(starts), self._up_to(starts + lengths)
        return ended ^ _shifted(begun ^ before, lengths)

    def _up_to(self, places: NDArray[np.int64]) -> Words:
        kept, data, step, crc32 = self._kept, self._data, _STEP_BYTES, zlib.crc32
        if not kept:
            crc = 0
            for start in range(0, len(data) + 1, step):
                kept.append(crc)
                crc = crc32(data[start : start + step], crc)
        crcs = [crc32(data[at - at % step : at], kept[at // step]) for at in places.tolist()]
        return np.array(crcs, dtype=np.uint32)


def crc_of_words(words: Words) -> Words:
    """Return zlib.crc32 of the four little-endian bytes of each word."""
    return ~_shifted(~words, np.full(len(words), 4))


def _shifted(crcs: Words, lengths: NDArray[np.int64]) -> Words:
    """Each CRC as it is changed by that many bytes, whatever they are."""
    for digit in range((int(lengths.max(initial=0)).bit_length() + 3) // 4):
        tables, value = _shift_tables()[digit], (lengths >> (4 * digit)) & 15
        crcs = (
            tables[value, 0, crcs & 0xFF]
            ^ tables[value, 1, (crcs >> 8) & 0xFF]
            ^ tables[value, 2, (crcs >> 16) & 0xFF]
            ^ tables[value, 3, crcs >> 24]
        )
    return crcs


@cache
def _shift_tables() -> NDArray[np.uint32]:
    """By digit, its value, the byte of a CRC and that byte's value: the CRC after so many bytes. Linear over xor."""
    tables = np.zeros((_DIGITS, 16, 4, 256), dtype=np.uint32)
    bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
    by_one = np.array([zlib.crc32(b"\0", bit) ^ zlib.crc32(b"\0") for bit in bits.tolist()], dtype=np.uint32)
    for digit in range(_DIGITS):
        images = bits
        for value in range(16):
            tables[digit, value] = _table(images)
            images = _looked_up(_table(by_one), images)
        by_one = images  # of the next digit: sixteen times as many bytes
    return tables


def _table(images: Words) -> Words:
    """The images of all values of each byte, shape (4, 256), from those of the 32 single bits."""
    table = np.zeros((4, 256), dtype=np.uint32)
    for number, image in enumerate(images):
        table[number // 8, np.arange(256) >> (number % 8) & 1 == 1] ^= image
    return table


def _looked_up(table: Words, crcs: Words) -> Words:
    changed: Words = table[0][crcs & 0xFF] ^ table[1][(crcs >> 8) & 0xFF]
    changed ^= table[2][(crcs >> 16) & 0xFF]
    changed ^= table[3][crcs >> 24]
    return changed
