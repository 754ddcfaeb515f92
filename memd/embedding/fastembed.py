"""Turns text into unit vectors, with fastembed behind it.

Rule: one text per model call. The bundled model is quantised dynamically, so in a batch a text's vector would depend
on its neighbours; alone it has one vector, bit for bit, whatever the thread or the number of threads. Everything here
may be called from several threads at once. The bundled model touches neither the network nor any file outside
`memd/assets`.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from memd.assets import model_dir
from memd.entries import Vector
from memd.errors import EmbeddingError

if TYPE_CHECKING:  # importing fastembed takes a second: `load_embedder` pays, not `memd --help` or `memd export`
    from fastembed.text.text_embedding_base import TextEmbeddingBase
    from tokenizers import Encoding

BUNDLED = "bundled"

PIECES_MAX = 16
"""Pieces of one text that are embedded, half from its head and half from its tail: a full piece costs about 20 ms on
two cores, and in a very long message the request is at one end of it, not in the middle of what was pasted."""
_CHARACTERS_MAX = 32_768  # read before the cut into pieces: tokenising 1 MB takes 1.2 s; 16 pieces of prose have 17,000

_FINGERPRINT_DIGITS = 32
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class Embedder(Protocol):
    """What the rest of memd knows of an embedding model."""

    @property
    def name(self) -> str:
        """The model as configured: `bundled` or a fastembed model name."""

    @property
    def dimension(self) -> int:
        """Components of every vector."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change whenever the model's files do; vectors of different fingerprints do not compare."""

    def pieces(self, text: str) -> list[str]:
        """`text` cut into stretches that the model reads whole; at least one, and joined they give `text`."""

    def embed_pieces(self, text: str) -> NDArray[np.float32]:
        """One unit vector per piece: float32 `(q, dimension)`, 1 ≤ q ≤ PIECES_MAX, C-contiguous."""

    def embed(self, text: str) -> Vector:
        """The unit vector of a chunk of any length: the normalised mean of its pieces' vectors.

        For the text of an entry use `spoken`: every chunk has roles, so they would only make chunks more alike.
        """


class FastembedEmbedder:
    """An `Embedder` over a loaded fastembed model. Build it with `load_embedder`."""

    def __init__(self, name: str, engine: TextEmbeddingBase, fingerprint: str) -> None:
        from tokenizers import Tokenizer

        self.name = name
        self.fingerprint = fingerprint
        self._engine = engine
        own = engine.tokenizer  # type: ignore[attr-defined]  # every text model has one; its base class does not say so
        self._words_max = own.truncation["max_length"] - own.num_special_tokens_to_add(False)
        # A copy, because truncation is a property of the tokenizer and fastembed's own must keep it.
        self._tokenizer = Tokenizer.from_str(own.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.dimension = len(self._vector("memd"))

    def pieces(self, text: str) -> list[str]:
        """See `Embedder.pieces`. Cut at the model's token limit, at a word's start where there is one."""
        encoding = self._tokenizer.encode(_readable(text), add_special_tokens=False)
        if len(encoding) <= self._words_max:
            return [text]
        offsets = encoding.offsets
        cuts = [0, *(offsets[token][0] for token in _piece_starts(encoding, self._words_max)), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(cuts)]

    def embed_pieces(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_pieces`. Of a longer text only the head and the tail are read.

        Raises:
            EmbeddingError: the model failed on this text.
        """
        pieces = self.pieces(_head_and_tail(text))
        if len(pieces) > PIECES_MAX:
            pieces = pieces[: PIECES_MAX // 2] + pieces[-PIECES_MAX // 2 :]
        return np.stack([self._vector(piece) for piece in pieces])

    def embed(self, text: str) -> Vector:
        """See `Embedder.embed`.

        Raises:
            EmbeddingError: the model failed on this text.
        """
        vectors = self.embed_pieces(text)
        return vectors[0] if len(vectors) == 1 else _unit(vectors.mean(axis=0))

    def _vector(self, piece: str) -> Vector:
        try:
            vector = next(iter(self._engine.embed([_readable(piece)], batch_size=1)))
        except Exception as error:  # onnxruntime's errors share no class below Exception
            raise EmbeddingError(
                f"embedding model {self.name!r} failed on a text of {len(piece)} characters: {error}; "
                "if it happens again, run `memd check` and look at free memory"
            ) from error
        return _unit(np.asarray(vector, dtype=np.float32))


def load_embedder(model: str, threads: int, *, fetch: bool = True) -> Embedder:
    """Load the bundled model (about 0.4 s plus the import) or any text model that fastembed knows and fetches once.

    Args:
        model: `bundled` or a name from fastembed's list, in any case.
        threads: threads of one model call.
        fetch: whether a model that is not on this machine may be fetched.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read.
    """
    from fastembed import TextEmbedding

    if model == BUNDLED:
        return _load_bundled(threads)
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
        return FastembedEmbedder(model, engine, _fingerprint(folder, files))
    except EmbeddingError:
        raise
    except Exception as error:  # fetching and loading raise whatever the http client, the hub and onnxruntime raise
        raise EmbeddingError(
            f"embedding.model {model!r} could not be loaded: {error}; it is fetched once, which needs the network: "
            "try again online, or set embedding.model to 'bundled'"
        ) from error


def _load_bundled(threads: int) -> Embedder:
    from memd.embedding.bundled import BundledModel

    folder = model_dir()
    try:
        fingerprint = _fingerprint(folder, ["model.onnx", "tokenizer.json"])
        return FastembedEmbedder(BUNDLED, BundledModel(threads), fingerprint)
    except Exception as error:  # as in load_embedder
        raise EmbeddingError(
            f"the bundled embedding model in {folder} could not be loaded: {error}; reinstall memd"
        ) from error


def _piece_starts(encoding: Encoding, words_max: int) -> Iterable[int]:
    """The tokens at which a new piece begins, the first piece's aside; no piece is longer than `words_max` tokens."""
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
    """Lone surrogates (JSON may carry them, UTF-8 cannot) as U+FFFD, one for one, so that offsets stay true."""
    return _LONE_SURROGATES.sub("\ufffd", text)


def _unit(vector: NDArray[np.float32]) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector if norm == 0.0 else (vector / np.float32(norm)).astype(np.float32)


def _fingerprint(folder: Path, files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with (folder / file).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]
