"""The bundled model, the digest of its files, a text's vector and the tokenizer's ranks are read or computed once in a
process, whoever asks for them how often; a pattern is compiled once.

Rule: they are the same for everybody: a text's vector does not depend on what was embedded before. A test of the
loading itself has the function that was here before, `__wrapped__`.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from memd.assets import model_dir
from memd.conversation import tokens
from memd.embedding import local
from memd.embedding.local import PiecewiseEmbedder
from memd.settings.model import EmbeddingSettings

PATTERNS_MAX = 1 << 16
"""All tests together have more than the 512 that `re` keeps, and each daemon that starts asks for a hundred."""


def load_once() -> None:
    """Call it before modules are imported that take these functions by their names."""
    re._MAXCACHE = PATTERNS_MAX  # type: ignore[attr-defined]
    tokens.cl100k_base = functools.cache(tokens.cl100k_base)
    load, read = local.load_bundled, local.fingerprint_of
    once = functools.cache(read)

    @functools.cache
    @functools.wraps(load)
    def load_bundled(settings: EmbeddingSettings) -> PiecewiseEmbedder:
        embedder = load(settings)
        embedder._embed_piece = functools.cache(embedder._embed_piece)
        return embedder

    def fingerprint_of(folder: Path, files: Sequence[str]) -> str:  # a daemon that starts reads 23 MB for it
        return once(folder, tuple(files)) if folder == model_dir() else read(folder, files)

    local.load_bundled, local.fingerprint_of = load_bundled, fingerprint_of
