"""The bundled embedding model.

Rule: see `onnx_folder`; what is wrong with it is mended by installing memd again.
"""

from __future__ import annotations

from memd.assets import model_dir
from memd.embedding.onnx_folder import load_folder
from memd.embedding.pieces import PiecewiseEmbedder
from memd.errors import EmbeddingError
from memd.settings.model import EmbeddingSettings

FINGERPRINT = "58247efaa8d67cc0c7bb8bc9910c7088"
"""Of the files in the package."""
DIMENSION = 384


def load_bundled(settings: EmbeddingSettings) -> PiecewiseEmbedder:
    """Load the bundled model; see `loading.load_embedder`.

    Raises:
        EmbeddingError: its files are missing or damaged.
    """
    try:
        return load_folder(settings, model_dir())
    except EmbeddingError as error:
        raise EmbeddingError(f"the bundled embedding model could not be loaded: {error}; reinstall memd") from error
