"""Text models that fastembed runs.

Rule: importing this takes a second, for fastembed; only `loading.py` and `bundled.py` do, when a model is loaded. One
text per model call: a model that is quantised dynamically, as the bundled one, would give a text in a batch a vector
that depends on its neighbours; alone it has one vector, bit for bit, whatever the thread or the number of threads.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from fastembed import TextEmbedding
from fastembed.text.text_embedding_base import TextEmbeddingBase
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from memd.embedding.embedder import Embedder
from memd.entries import Vector
from memd.errors import EmbeddingError

PIECES_MAX = 16
"""The most pieces of one text that are embedded, half from its head and half from its tail: a full piece costs about
20 ms on two cores, and the request of a very long message is at one of its ends, not amid the pasted text."""
_CHARACTERS_MAX = 32_768  # before the cut into pieces: to tokenise 1 MB takes 1.2 s; 16 pieces of prose have 17,000

_FINGERPRINT_DIGITS = 32
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class FastembedEmbedder(Embedder):
    """An `Embedder` over a loaded fastembed model."""

    def __init__(self, name: str, engine: TextEmbeddingBase, fingerprint: str) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.batch_texts = 1
        self._engine = engine
        own = engine.tokenizer  # type: ignore[attr-defined]  # every text model has one; its base class does not say so
        self._words_max = own.truncation["max_length"] - own.num_special_tokens_to_add(False)
        # A copy, because truncation is a property of the tokenizer and fastembed's own must keep it.
        self._tokenizer = Tokenizer.from_str(own.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.dimension = len(self._vector("memd"))

    def pieces(self, text: str) -> list[str]:
        """Cut `text` into pieces that the model reads whole, at the start of a word where possible; at least one, and
        joined they give `text`."""
        encoding = self._tokenizer.encode(_readable(text), add_special_tokens=False)
        if len(encoding) <= self._words_max:
            return [text]
        offsets = encoding.offsets
        cuts = [0, *(offsets[token][0] for token in _piece_starts(encoding, self._words_max)), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(cuts)]

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`: at most `PIECES_MAX` pieces; of a longer text only the head and tail are read."""
        pieces = self.pieces(_head_and_tail(text))
        if len(pieces) > PIECES_MAX:
            pieces = pieces[: PIECES_MAX // 2] + pieces[-PIECES_MAX // 2 :]
        return np.stack([self._vector(piece) for piece in pieces])

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`: the normalised mean of the vectors of a text's pieces."""
        found = np.empty((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors = self.embed_query(text)
            found[row] = vectors[0] if len(vectors) == 1 else _unit(vectors.mean(axis=0))
        return found

    def _vector(self, piece: str) -> Vector:
        try:
            vector = next(iter(self._engine.embed([_readable(piece)], batch_size=1)))
        except Exception as error:  # onnxruntime's errors share no class below Exception
            raise EmbeddingError(
                f"embedding model {self.name!r} failed on a text of {len(piece)} characters: {error}; "
                "if it happens again, run `memd check` and look at free memory"
            ) from error
        return _unit(np.asarray(vector, dtype=np.float32))


def load_fastembed(model: str, threads: int, *, fetch: bool) -> FastembedEmbedder:
    """Load a text model that fastembed knows; see `loading.load_embedder`.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read.
    """
    known = {str(entry["model"]): entry for entry in TextEmbedding.list_supported_models()}
    name = next((name for name in known if name.lower() == model.lower()), None)
    if name is None:
        near = difflib.get_close_matches(model, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise EmbeddingError(f"embedding.model {model!r} is neither 'bundled' nor a model that fastembed knows{hint}")
    try:
        engine = TextEmbedding(name, threads=threads, local_files_only=not fetch).model
        folder = Path(engine._model_dir)  # type: ignore[attr-defined]  # fastembed has no public name for it
        files = [known[name]["model_file"], *known[name]["additional_files"], "tokenizer.json"]
        return FastembedEmbedder(model, engine, fingerprint_of(folder, files))
    except EmbeddingError:
        raise
    except Exception as error:  # fetching and loading raise whatever the http client, the hub and onnxruntime raise
        raise EmbeddingError(
            f"embedding.model {model!r} could not be loaded: {error}; it is fetched once, which needs the network: "
            "try again online, or set embedding.model to 'bundled'"
        ) from error


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


def _readable(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot, by U+FFFD, one by one: offsets stay valid."""
    return _LONE_SURROGATES.sub("\ufffd", text)


def _unit(vector: NDArray[np.float32]) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector if norm == 0.0 else (vector / np.float32(norm)).astype(np.float32)
