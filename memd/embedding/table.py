"""The question table: from a text to a vector in the model's space, without the model.

Rule: one row a word piece. The sum of a text's rows, weighted by how rare the pieces are, normalised, comes near the
model's vector of that text: a cosine of 0.86 on short texts that the table was not fitted on. It costs 0.05 ms where
the model takes 4 to 75, so every question has a vector, and so has what was just said and waits for the model.

A table belongs to one model: its file names the fingerprint, and `table_of` gives none for another model. It is made
by `bench/fit_table.py`; what it was fitted on is in `memd/assets/PROVENANCE.md`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from memd.assets import model_dir, table_dir

CHARACTERS_MAX = 2_000
"""Of one text; a longer one counts by its head. The longest chunk has about as many, a part of a question 200."""
CHARACTERS_A_PIECE = 8
"""More than text has in any script, a blank included; a longer head is not looked at."""
PART_PIECES_MAX = 48
"""Word pieces of a part of a question: the model reads as many in 12 ms on one core."""
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class QuestionTable:
    """The rows of one model's word pieces. Thread-safe; the rows are mapped from the file, not read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer`: the model's own, which neither truncates nor pads.

        Raises:
            OSError: the package was installed without its data files.
        """
        folder = table_dir()
        self.fingerprint: str = json.loads((folder / "table.json").read_bytes())["fingerprint"]
        """Of the model in whose space the vectors lie."""
        self._rows: NDArray[np.int8] = np.load(folder / "rows.npy", mmap_mode="r")
        self._weights = np.load(folder / "idf.npy").astype(np.float32) * np.load(folder / "scale.npy")
        self.dimension: int = self._rows.shape[1]
        self._tokenizer = tokenizer

    def vector(self, text: str) -> NDArray[np.float32]:
        """The unit vector `(dimension,)` of a text, in which the order of words does not count; zeros where no piece is
        known."""
        ids = np.array(self._tokenizer.encode(readable(text[:CHARACTERS_MAX]), add_special_tokens=False).ids, np.int64)
        total: NDArray[np.float32] = self._weights[ids] @ self._rows[ids]
        length = float(np.sqrt(total @ total))
        return total / np.float32(length) if length > 0 else total

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """The vectors of several texts, `(n, dimension)`; see `vector`."""
        found = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            found[row] = self.vector(text)
        return found


def cut(text: str, pieces_max: int, tokenizer: Tokenizer | None = None) -> str:
    """The head of a text that has at most so many word pieces, cut at a character; without a tokenizer (of a model
    behind an address) by `CHARACTERS_A_PIECE`."""
    head = text[: pieces_max * CHARACTERS_A_PIECE]
    if tokenizer is None:
        return head
    offsets = tokenizer.encode(readable(head), add_special_tokens=False).offsets
    return head if len(offsets) <= pieces_max else head[: max(1, offsets[pieces_max][0])]


@functools.cache
def bundled_tokenizer() -> Tokenizer:
    """The bundled model's tokenizer, once in memory for the model and the table; it neither truncates nor pads."""
    return tokenizer_in(model_dir())


def tokenizer_in(folder: Path) -> Tokenizer:
    """The tokenizer of a model in a folder; it neither truncates nor pads."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def table_of(embedder_fingerprint: str) -> QuestionTable | None:
    """The table in the space of a model; None: there is none for it."""
    known = json.loads((table_dir() / "table.json").read_bytes())["fingerprint"]
    return _bundled_table() if known == embedder_fingerprint else None


@functools.cache
def _bundled_table() -> QuestionTable:
    return QuestionTable(bundled_tokenizer())


def readable(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot, by U+FFFD, one by one: offsets stay valid."""
    return _LONE_SURROGATES.sub("\ufffd", text)
