"""Embeds texts of any length with a model that reads a piece of 256 or so words at a time.

Rule: one piece per model call: a model that is quantised dynamically, as the bundled one, would give a text in a batch
a vector that depends on its neighbours; alone it has one vector, bit for bit, whatever the thread or the number of
threads.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from memd.embedding.embedder import Embedder
from memd.embedding.prefixes import NO_PREFIXES, Prefixes
from memd.entries import Vector
from memd.errors import EmbeddingError

PIECES_MAX = 16
"""The most pieces of one text that are embedded, half from its head and half from its tail: a full piece costs about
20 ms on two cores, and the request of a very long message is at one of its ends, not amid the pasted text."""
_CHARACTERS_MAX = 32_768  # before the cut into pieces: to tokenise 1 MB takes 1.2 s; 16 pieces of prose have 17,000

_FINGERPRINT_DIGITS = 32
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class PiecewiseEmbedder(Embedder):
    """An `Embedder` over a loaded model."""

    def __init__(
        self,
        name: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        words_max: int,
        embed_piece: Callable[[str], NDArray[np.float32]],
        prefixes: Prefixes = NO_PREFIXES,
    ) -> None:
        """Make the first call of the model.

        Args:
            fingerprint: of the model without prefixes.
            tokenizer: the model's own, which neither truncates nor pads.
            words_max: word pieces that the model reads, without its special tokens.
            embed_piece: runs the model on a piece, which has no lone surrogates; float32 `(dimension,)`.
            prefixes: put in front of each piece.
        """
        self.name = name
        self.fingerprint = prefixes.fingerprint(fingerprint)
        self.batch_texts = 1
        self._tokenizer = tokenizer
        self._prefixes = prefixes
        longest = max(len(tokenizer.encode(prefix, add_special_tokens=False)) for prefix in prefixes)
        self._words_max = max(1, words_max - longest)
        self._embed_piece = embed_piece
        self.dimension = len(self._vector("memd"))

    def pieces(self, text: str) -> list[str]:
        """Cut `text` into pieces that the model reads whole, at the start of a word where possible; at least one, and
        joined they give `text`."""
        if text.isascii() and len(text) < self._words_max:
            return [text]  # most questions: a token has a character at least, and one more may open the text
        encoding = self._tokenizer.encode(readable(text), add_special_tokens=False)
        if len(encoding) <= self._words_max:
            return [text]
        offsets = encoding.offsets
        cuts = [0, *(offsets[token][0] for token in _piece_starts(encoding, self._words_max)), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(cuts)]

    def cut(self, text: str, tokens: int) -> str:
        """See `Embedder.cut`."""
        return cut(text, tokens, self._tokenizer)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`: at most `PIECES_MAX` pieces; of a longer text only the head and tail are read."""
        return self._embed_pieces(text, self._prefixes.query)

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`: the normalised mean of the vectors of a text's pieces."""
        found = np.empty((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors = self._embed_pieces(text, self._prefixes.text)
            found[row] = vectors[0] if len(vectors) == 1 else _unit(vectors.mean(axis=0))
        return found

    def _embed_pieces(self, text: str, prefix: str) -> NDArray[np.float32]:
        pieces = self.pieces(_head_and_tail(text))
        if len(pieces) > PIECES_MAX:
            pieces = pieces[: PIECES_MAX // 2] + pieces[-PIECES_MAX // 2 :]
        return np.stack([self._vector(prefix + piece) for piece in pieces])

    def _vector(self, piece: str) -> Vector:
        try:
            vector = self._embed_piece(readable(piece))
        except Exception as error:  # onnxruntime's errors share no class below Exception
            raise EmbeddingError(
                f"embedding model {self.name!r} failed on a text of {len(piece)} characters: {error}; "
                "if it happens again, run `memd check` and look at free memory"
            ) from error
        return _unit(np.asarray(vector, dtype=np.float32))


@lru_cache(maxsize=4)
def tokenizer_in(folder: Path) -> Tokenizer:
    """The tokenizer of the model in a folder, which neither truncates nor pads; loaded once, as it takes 15 MB."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def cut(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """The beginning of a text that has at most so many word pieces, cut at a character."""
    if len(text) <= tokens:
        return text
    offsets = tokenizer.encode(readable(text), add_special_tokens=False).offsets
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def fingerprint_of(folder: Path, files: Sequence[str]) -> str:
    """Compute a fingerprint of the content of a model's files; see `Embedder.fingerprint`."""
    digest = hashlib.sha256()
    for file in files:
        with (folder / file).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def _piece_starts(encoding: Encoding, words_max: int) -> Iterable[int]:
    """Yield the token at which each piece but the first begins; no piece is longer than `words_max` tokens."""
    words = encoding.word_ids
    start = 0
    while start + words_max < len(words):
        end = start + words_max
        while end > start and words[end] == words[end - 1]:
            end -= 1
        start = end if end > start else start + words_max  # a model without words, or a word longer than a piece
        yield start


def _head_and_tail(text: str) -> str:
    if len(text) <= _CHARACTERS_MAX:
        return text
    half = _CHARACTERS_MAX // 2
    return text[:half] + text[-half:]


def readable(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot, by U+FFFD, one by one: offsets stay valid."""
    return _LONE_SURROGATES.sub("\ufffd", text)


def _unit(vector: NDArray[np.float32]) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector if norm == 0.0 else (vector / np.float32(norm)).astype(np.float32)
