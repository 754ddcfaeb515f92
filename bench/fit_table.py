"""Fit the question table (`memd.embedding.table`) to a model: one row a word piece.

Run with `python bench/fit_table.py TEXTS OUT`. TEXTS has one short text a line; OUT is a folder, which gets what
`memd/assets/table` has. 200,000 texts take 20 minutes, 16 of them the model's. Needs scipy, which memd does not.

The row of a piece begins as the model's vector of that piece alone. Ridge regression then moves the rows so that the
sum of a text's rows, weighted by how rare the pieces are, comes near the model's vector of the text; it is solved by
conjugate gradients, all columns at once. A fiftieth of the texts is left out and tells how near it comes: 0.86.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import scipy.sparse  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnxruntime import InferenceSession

from memd.assets import model_dir
from memd.embedding.bundled import FINGERPRINT
from memd.embedding.table import bundled_tokenizer

PIECES_MAX = 48
"""Of a text: as many as of a part of a question."""
RIDGE = 1.5e-3
STEPS = 40
HELD_OUT = 0.02


def main() -> None:
    """Write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("texts", type=Path)
    options.add_argument("out", type=Path)
    told = options.parse_args()
    lines = told.texts.read_text().splitlines()
    rows, idf = fit([line.strip() for line in lines if line.strip()])
    scale = np.abs(rows).max(axis=1) / 127
    told.out.mkdir(parents=True, exist_ok=True)
    np.save(told.out / "rows.npy", np.round(rows / np.maximum(scale, 1e-9)[:, None]).astype(np.int8))
    np.save(told.out / "scale.npy", scale.astype(np.float32))
    np.save(told.out / "idf.npy", idf.astype(np.float16))
    (told.out / "table.json").write_text(json.dumps({"fingerprint": FINGERPRINT}) + "\n")


def fit(texts: list[str]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The rows `(pieces, dimension)` and the weights `(pieces,)` of the bundled model's word pieces."""
    tokenizer = bundled_tokenizer()
    size = tokenizer.get_vocab_size()
    alone = _embedded([[piece] for piece in range(size)])
    pieces = [tokenizer.encode(text, add_special_tokens=False).ids[:PIECES_MAX] for text in texts]
    wanted = _embedded(pieces)

    seen = Counter(piece for ids in pieces for piece in set(ids))
    idf = np.log((len(texts) + 1) / (np.array([seen[piece] for piece in range(size)]) + 1)).astype(np.float32)
    matrix = _weighted(pieces, idf)
    is_held_out = np.random.default_rng(0).random(len(texts)) < HELD_OUT
    fitted, target = matrix[~is_held_out], wanted[~is_held_out]
    normal = (fitted.T @ fitted + RIDGE * scipy.sparse.identity(size, dtype=np.float32)).tocsr()
    rows = alone + _solved(normal, fitted.T @ (target - fitted @ alone))

    found = matrix[is_held_out] @ rows
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    print("cosine to the model on texts left out:", float((found * wanted[is_held_out]).sum(axis=1).mean()))
    return rows, idf


def _embedded(pieces: list[list[int]]) -> NDArray[np.float32]:
    """The model's vectors of word pieces, one text a call, as memd embeds (PROVENANCE.md)."""
    session = InferenceSession(model_dir() / "model.onnx", providers=["CPUExecutionProvider"])
    first, last = (bundled_tokenizer().token_to_id(name) for name in ("[CLS]", "[SEP]"))
    found = []
    for ids in pieces:
        tokens = np.array([[first, *ids, last]], np.int64)
        inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        mean = session.run(None, inputs)[0][0].mean(axis=0)
        found.append(mean / np.linalg.norm(mean))
    return np.array(found, np.float32)


def _weighted(pieces: list[list[int]], idf: NDArray[np.float32]) -> scipy.sparse.csr_matrix:
    """The share of each piece in each text, `(texts, pieces)`."""
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for row, ids in enumerate(pieces):
        weights = {piece: float(idf[piece]) * times for piece, times in Counter(ids).items()}
        total = max(sum(weights.values()), 1e-9)
        rows += [row] * len(weights)
        columns += weights
        values += [weight / total for weight in weights.values()]
    return scipy.sparse.csr_matrix((np.array(values, np.float32), (rows, columns)), shape=(len(pieces), len(idf)))


def _solved(normal: scipy.sparse.csr_matrix, right: NDArray[np.float32]) -> NDArray[np.float32]:
    """Conjugate gradients with the diagonal as preconditioner, for every column of `right`."""
    inverse = (1 / normal.diagonal())[:, None]
    found = np.zeros_like(right)
    rest = right.copy()
    scaled = inverse * rest
    step = scaled.copy()
    size = (rest * scaled).sum(axis=0)
    for _ in range(STEPS):
        moved = normal @ step
        length = size / np.maximum((step * moved).sum(axis=0), 1e-20)
        found += length * step
        rest -= length * moved
        scaled = inverse * rest
        size, before = (rest * scaled).sum(axis=0), size
        step = scaled + size / np.maximum(before, 1e-20) * step
    return found


if __name__ == "__main__":
    main()
