"""From the setting `embedding.model` to an `Embedder`.

Rule: a kind of embedder has a module of its own, which is imported only when one is loaded: fastembed's takes half a
second, and `memd --help` or `memd export` need none.
"""

from __future__ import annotations

from pathlib import Path

from memd.embedding.embedder import Embedder
from memd.settings.model import EmbeddingSettings

BUNDLED = "bundled"
PATH = "path:"


def load_embedder(settings: EmbeddingSettings, *, fetch: bool = True) -> Embedder:
    """Load the model that the settings name: the bundled one (about 0.4 s plus the import), one in a folder of this
    disk, or any text model that fastembed knows and fetches once.

    Args:
        fetch: whether a model that is not on this machine may be fetched.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read.
    """
    if settings.model == BUNDLED:
        from memd.embedding.bundled import load_bundled

        return load_bundled(settings)
    if settings.model.startswith(PATH):
        from memd.embedding.onnx_folder import load_folder

        return load_folder(settings, Path(settings.model.removeprefix(PATH)))
    from memd.embedding.fastembed import load_fastembed

    return load_fastembed(settings, fetch=fetch)
