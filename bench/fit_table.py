"""Makes the question table: one row a word piece, whose weighted sum comes near the bundled model's vector of a text.

    python bench/fit_table.py TEXTS.txt FOLDER [--json FILE]

TEXTS.txt has one short text a line. The table in the package was fitted on 30,000 sentences of Debian's `fortunes`,
140,000 glosses and examples of WordNet and 40,000 sentences of docstrings of Python packages; none of them is of an
evaluation set. It starts with the model's vector of each word piece alone; then ridge regression towards the model's
vectors of the texts, by conjugate gradients over all columns at once. 200,000 texts take 20 minutes, 4 of them the fit.

Backs the claim in memd/assets/PROVENANCE.md: the cosine to the model on texts that were left out. Needs scipy.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import scipy.sparse as sp
from numpy.typing import NDArray

from memd.assets import model_dir
from memd.embedding.local import FINGERPRINT, tokenizer_in

CLS, SEP = 101, 102
RIDGE, ROUNDS = 1.5e-3, 40
PIECES_MAX, BATCH = 48, 64
LEFT_OUT = 0.02
Floats = NDArray[np.float32]


def embedder() -> Callable[[Sequence[list[int]]], Floats]:
    """The model's vectors of lists of word pieces, (n, dimension)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model_dir() / "model.onnx", options)

    def embed(lists: Sequence[list[int]]) -> Floats:
        found = np.zeros((len(lists), 384), np.float32)
        order = sorted(range(len(lists)), key=lambda place: len(lists[place]))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            ids = np.zeros((len(rows), max(len(lists[row]) for row in rows)), np.int64)
            mask = np.zeros_like(ids)
            for place, row in enumerate(rows):
                ids[place, : len(lists[row])] = lists[row]
                mask[place, : len(lists[row])] = 1
            inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            hidden = session.run(None, inputs)[0]
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
            found[rows] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return found

    return embed


def fitted(texts: Sequence[str]) -> tuple[Floats, Floats, float]:
    """The rows, how rare each piece is, and the mean cosine to the model on texts left out."""
    pieces, embed = tokenizer_in(model_dir()), embedder()
    size = pieces.get_vocab_size()
    alone = embed([[CLS, piece, SEP] for piece in range(size)])
    lists = [pieces.encode(text).ids[:PIECES_MAX] for text in texts]
    wanted = embed(lists)
    seen = np.zeros(size)
    for ids in lists:
        seen[list(set(ids))] += 1
    rarity = np.log((len(lists) + 1) / (seen + 1)).astype(np.float32)
    x = _weights(lists, rarity, size)
    is_left_out = np.random.default_rng(0).random(len(lists)) < LEFT_OUT
    train = ~is_left_out
    a = (x[train].T @ x[train] + RIDGE * sp.identity(size, dtype=np.float32)).tocsr()
    rows = alone + _solved(a, x[train].T @ (wanted[train] - x[train] @ alone))
    found = x[is_left_out] @ rows
    cosine = (found / np.linalg.norm(found, axis=1, keepdims=True) * wanted[is_left_out]).sum(1).mean()
    return rows, rarity, float(cosine)


def _weights(lists: Sequence[list[int]], rarity: Floats, size: int) -> sp.csr_matrix:
    """The share of each piece in each text."""
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for row, ids in enumerate(lists):
        counts = collections.Counter(piece for piece in ids if piece not in (CLS, SEP))
        weights = np.array([rarity[piece] * count for piece, count in counts.items()])
        rows += [row] * len(counts)
        columns += counts
        values += (weights / max(float(weights.sum()), 1e-9)).tolist()
    return sp.csr_matrix((np.array(values, np.float32), (rows, columns)), shape=(len(lists), size))


def _solved(a: sp.csr_matrix, b: Floats) -> Floats:
    """Conjugate gradients with the diagonal as preconditioner."""
    scale = (1 / a.diagonal())[:, None]
    found = np.zeros_like(b)
    rest = b - a @ found
    step = z = scale * rest
    rz = (rest * z).sum(0)
    for _ in range(ROUNDS):
        along = a @ step
        alpha = rz / np.maximum((step * along).sum(0), 1e-20)
        found += alpha * step
        rest -= alpha * along
        z = scale * rest
        new = (rest * z).sum(0)
        step, rz = z + new / np.maximum(rz, 1e-20) * step, new
    return found


def main() -> None:
    """Fit, write, and print what it reaches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = [line for line in map(str.strip, options.texts.read_text().splitlines()) if line]
    rows, rarity, cosine = fitted(texts)
    scale = np.maximum(np.abs(rows).max(1) / 127, 1e-9)
    options.folder.mkdir(parents=True, exist_ok=True)
    np.save(options.folder / "rows.npy", np.round(rows / scale[:, None]).astype(np.int8))
    np.save(options.folder / "scale.npy", scale.astype(np.float32))
    np.save(options.folder / "idf.npy", rarity.astype(np.float16))
    (options.folder / "fingerprint").write_text(f"{FINGERPRINT}\n")
    print(f"{len(texts):,} texts, {len(rows):,} word pieces; cosine to the model on texts left out: {cosine:.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"texts": len(texts), "cosine": cosine}))


if __name__ == "__main__":
    main()
