"""Text models that fastembed fetches and runs.

Rule: importing this takes half a second, for fastembed; only `loading.py` does, when such a model is loaded.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import numpy as np
from fastembed import TextEmbedding
from fastembed.text.text_embedding_base import TextEmbeddingBase
from numpy.typing import NDArray
from tokenizers import Tokenizer

from memd.embedding.pieces import PiecewiseEmbedder, fingerprint_of
from memd.embedding.prefixes import prefixes_of
from memd.errors import EmbeddingError, WrongModel
from memd.settings.model import EmbeddingSettings


def load_fastembed(settings: EmbeddingSettings, *, fetch: bool) -> PiecewiseEmbedder:
    """Load a text model that fastembed knows; see `loading.load_embedder`.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read.
    """
    model = settings.model
    known = {str(entry["model"]): entry for entry in TextEmbedding.list_supported_models()}
    name = next((name for name in known if name.lower() == model.lower()), None)
    if name is None:
        near = difflib.get_close_matches(model, ["bundled", "multilingual", *known], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise WrongModel(
            f"embedding.model {model!r} is neither 'bundled', 'multilingual', 'http', 'path:DIR' nor a model that "
            f"fastembed knows{hint}"
        )
    try:
        engine = TextEmbedding(name, threads=settings.threads, local_files_only=not fetch).model
        folder = Path(engine._model_dir)  # type: ignore[attr-defined]  # fastembed has no public name for it
        files = [known[name]["model_file"], *known[name]["additional_files"], "tokenizer.json"]
        return _embedder(settings, name, engine, fingerprint_of(folder, files))
    except EmbeddingError:
        raise
    except Exception as error:  # fetching and loading raise whatever the http client, the hub and onnxruntime raise
        raise EmbeddingError(
            f"embedding.model {model!r} could not be loaded: {error}; it is fetched once, which needs the network: "
            "try again online, or set embedding.model to 'bundled'"
        ) from error


def _embedder(settings: EmbeddingSettings, name: str, engine: TextEmbeddingBase, fingerprint: str) -> PiecewiseEmbedder:
    own = engine.tokenizer  # type: ignore[attr-defined]  # every text model has one; its base class does not say so
    # A copy, because truncation is a property of the tokenizer and fastembed's own must keep it.
    tokenizer = Tokenizer.from_str(own.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def embed_piece(piece: str) -> NDArray[np.float32]:
        return np.asarray(next(iter(engine.embed([piece], batch_size=1))), dtype=np.float32)

    words_max = own.truncation["max_length"] - own.num_special_tokens_to_add(False)
    prefixes = prefixes_of(settings, name)
    return PiecewiseEmbedder(settings.model, fingerprint, tokenizer, words_max, embed_piece, prefixes)
