"""Writes ONNX models.

Rule: only what a graph of a few dozen kinds of nodes needs. The package `onnx`, which could do it, is 17 MB for one
file. The numbers of the fields are those of `onnx.proto`.

An ONNX file is a message of Protocol Buffers: fields, each a key (number of the field × 8 + wire type) and a value.
Wire type 0 is a varint, 2 a length and so many bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
_IR_VERSION, _OPSET = 8, 17
_FLOAT, _INT64, INT4 = 1, 7, 22
_TYPES = {"float32": _FLOAT, "uint8": 2, "int64": _INT64, "float16": 10}
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT, _ATTRIBUTE_INTS = 1, 2, 7

Attribute = int | float | Sequence[int]
NO_ATTRIBUTES: Mapping[str, Attribute] = {}


class Graph:
    """A graph in the making: each operation returns the name of its output."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []

    def constant(self, values: NDArray[np.generic], *, packed_shape: Sequence[int] = ()) -> str:
        """An array. With `packed_shape` its bytes are those of a tensor of int4 of this shape, two values a byte."""
        name = f"constant_{len(self._constants)}"
        kind = INT4 if packed_shape else _TYPES[values.dtype.name]
        dims = b"".join(_number(1, size) for size in packed_shape or values.shape)
        self._constants.append(dims + _number(2, kind) + _text(8, name) + _bytes(9, values.tobytes()))
        return name

    def add(
        self,
        operator: str,
        inputs: Sequence[str],
        of: Mapping[str, Attribute] = NO_ATTRIBUTES,
        *,
        output: str = "",
        domain: str = "",
    ) -> str:
        """A node with one output."""
        return self.add_several(operator, inputs, [output or f"node_{len(self._nodes)}"], of, domain=domain)[0]

    def add_several(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        of: Mapping[str, Attribute],
        *,
        domain: str = "",
    ) -> list[str]:
        """A node with the outputs that are named."""
        fields = [_text(1, name) for name in inputs] + [_text(2, name) for name in outputs]
        attributes = [_bytes(5, _attribute(name, value)) for name, value in of.items()]
        self._nodes.append(b"".join([*fields, _text(4, operator), *attributes, _text(7, domain)]))
        return list(outputs)

    def model(self, name: str, input_: str, output: str, width: int) -> bytes:
        """The whole file: tokens `(1, length)` in, vectors `(1, length, width)` out."""
        graph = [_bytes(1, node) for node in self._nodes]
        graph += [_text(2, name)]
        graph += [_bytes(5, constant) for constant in self._constants]
        graph += [_bytes(11, _value(input_, _INT64, [1, "length"]))]
        graph += [_bytes(12, _value(output, _FLOAT, [1, "length", width]))]
        domains = [_text(1, "") + _number(2, _OPSET), _text(1, MICROSOFT) + _number(2, 1)]
        opsets = [_bytes(8, domain) for domain in domains]
        return b"".join([_number(1, _IR_VERSION), _text(2, "memd"), _bytes(7, b"".join(graph)), *opsets])


def _value(name: str, kind: int, shape: Sequence[int | str]) -> bytes:
    """A ValueInfoProto: name, type and shape of an input or output."""
    dims = [_bytes(1, _text(2, one) if isinstance(one, str) else _number(1, one)) for one in shape]
    tensor = _number(1, kind) + _bytes(2, b"".join(dims))
    return _text(1, name) + _bytes(2, _bytes(1, tensor))


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, int):
        told = _number(3, value) + _number(20, _ATTRIBUTE_INT)
    elif isinstance(value, float):
        told = _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, _ATTRIBUTE_FLOAT)
    else:
        told = b"".join(_number(8, one) for one in value) + _number(20, _ATTRIBUTE_INTS)
    return _text(1, name) + told


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & (1 << 64) - 1)  # a negative one is a varint of ten bytes


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
