"""From the setting `embedding.model` to an `Embedder`.

Rule: a kind of embedder has a module of its own, which is imported only when one is loaded: fastembed's takes half a
second, and `memd --help` or `memd export` need none.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import msgspec

from memd.embedding.embedder import Embedder
from memd.settings.model import EmbeddingSettings

BUNDLED = "bundled"
PATH = "path:"
HTTP = "http"
QUESTION_SECONDS = 10.0
"""The longest that one question waits for a server, where nothing else bounds it."""


def load_embedder(
    settings: EmbeddingSettings,
    *,
    fetch: bool = True,
    stored: Collection[tuple[int, str]] = (),
    question_seconds: float = QUESTION_SECONDS,
) -> Embedder:
    """Load the model that the settings name: the bundled one (about 0.4 s plus the import), one in a folder of this
    disk, one behind an address, or any text model that fastembed knows and fetches once.

    Args:
        fetch: whether a model that is not on this machine may be fetched.
        stored: dimension and fingerprint of the models that wrote the log; a server whose model is one of them is not
            asked yet, so that it may be down.
        question_seconds: how long a server may take for one question.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read, or the server does not answer.
    """
    if settings.idle_unload_seconds and (settings.model == BUNDLED or settings.model.startswith(PATH)):
        return _resident(settings, stored)
    if settings.model == BUNDLED:
        from memd.embedding.bundled import load_bundled

        return load_bundled(settings)
    if settings.model.startswith(PATH):
        from memd.embedding.onnx_folder import load_folder

        return load_folder(settings, Path(settings.model.removeprefix(PATH)))
    if settings.model == HTTP:
        from memd.embedding.http import HttpEmbedder

        return HttpEmbedder(settings, question_seconds, stored)
    from memd.embedding.fastembed import load_fastembed

    return load_fastembed(settings, fetch=fetch)


def _resident(settings: EmbeddingSettings, stored: Collection[tuple[int, str]]) -> Embedder:
    from memd.assets import model_dir
    from memd.embedding.onnx_folder import fingerprint_in
    from memd.embedding.resident import ResidentEmbedder

    folder = model_dir() if settings.model == BUNDLED else Path(settings.model.removeprefix(PATH))
    fingerprint = fingerprint_in(settings, folder)
    dimension = next((dimension for dimension, known in stored if known == fingerprint), 0)
    loaded = partial(load_embedder, msgspec.structs.replace(settings, idle_unload_seconds=0.0))
    dimension = dimension or loaded().dimension  # the log says it from the first chunk on
    return ResidentEmbedder(settings.model, dimension, fingerprint, loaded, settings.idle_unload_seconds)
