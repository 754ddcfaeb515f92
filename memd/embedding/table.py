"""The question table: a vector of a short text without the model, in the model's space.

Rule: one row a word piece, fitted so that the sum of a text's rows, weighed by how rare the pieces are and normalised,
comes near the model's vector of the text (cosine 0.86 on texts left out); 0.05 ms for twelve words, where the model
takes 4. It is of one model, whose fingerprint it names, and of no other. How it is made: bench/fit_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from memd.assets import model_dir, question_table_dir
from memd.embedding.local import readable, tokenizer_in

CHARACTERS_MAX = 4_000
"""Of a longer text the beginning is looked at: no chunk and no part of a question is longer."""


class QuestionTable:
    """The table of the bundled model. Any thread may use it."""

    def __init__(self, fingerprint: str, tokenizer: Tokenizer) -> None:
        folder = question_table_dir()
        self.fingerprint = fingerprint
        self._rows = np.load(folder / "rows.npy", mmap_mode="r")
        """int8 (pieces, dimension), mapped: only the rows of pieces that occur are ever read."""
        self._weights = np.load(folder / "scale.npy") * np.load(folder / "idf.npy").astype(np.float32)
        self._tokenizer = tokenizer
        self.dimension: int = self._rows.shape[1]

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """The unit vectors of texts, (n, dimension); zeros for one that has no known piece."""
        beginnings = [readable(text[:CHARACTERS_MAX]) for text in texts]
        found = np.zeros((len(texts), self.dimension), np.float32)
        # Of the tokenizer's calls this one leaves the interpreter to other threads.
        for row, encoding in enumerate(self._tokenizer.encode_batch_fast(beginnings, add_special_tokens=False)):
            ids = np.array(encoding.ids, np.intp)
            found[row] = self._weights[ids] @ self._rows[ids].astype(np.float32)
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)
        return found


@lru_cache(maxsize=8)
def table_of(fingerprint: str) -> QuestionTable | None:
    """The table of the model with this fingerprint; None if it has none."""
    if (question_table_dir() / "fingerprint").read_text().strip() != fingerprint:
        return None
    return QuestionTable(fingerprint, tokenizer_in(model_dir()))
