"""From the setting `embedding.model` to an `Embedder`.

Rule: a kind of embedder has a module of its own, which is imported only when one is loaded: fastembed's takes half a
second, and `memd --help` or `memd export` need none.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from pathlib import Path

from memd.assets import model_dir
from memd.embedding.embedder import Embedder
from memd.errors import EmbeddingError
from memd.settings.model import EmbeddingSettings

BUNDLED = "bundled"
MULTILINGUAL = "multilingual"
PATH = "path:"
HTTP = "http"
QUESTION_SECONDS = 10.0
"""The longest that one question waits for a server, or for a model that is loaded again, where nothing else bounds
it."""


def load_embedder(
    settings: EmbeddingSettings,
    *,
    models_dir: Path | None = None,
    fetch: bool = True,
    stored: Collection[tuple[int, str]] = (),
    question_seconds: float = QUESTION_SECONDS,
    when_needed: bool = False,
) -> Embedder:
    """Load the model that the settings name: the bundled one (about 0.4 s plus the import), the multilingual one or one
    in a folder of this disk, one behind an address, or any text model that fastembed knows and fetches once.

    Args:
        models_dir: where the models are that were added, and where is kept what is measured of models; None: nowhere.
        fetch: whether a model that is not on this machine may be fetched.
        stored: dimension and fingerprint of the models that wrote the log; a server whose model is one of them is not
            asked yet, so that it may be down.
        question_seconds: how long a server, or loading, may take for one question.
        when_needed: the bundled model is loaded when something is embedded first: a daemon starts without it, and
            needs 50 MB less until then.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read, or the server does not answer.
    """
    if settings.model == HTTP:
        from memd.embedding.http import HttpEmbedder

        embedder: Embedder = HttpEmbedder(settings, question_seconds, stored)
    elif settings.idle_unload_seconds or (when_needed and settings.model == BUNDLED):
        embedder = _resident(settings, models_dir, fetch, stored, question_seconds)
    else:
        embedder = _local(settings, models_dir, fetch)
    from memd.embedding.bundled import FINGERPRINT
    from memd.embedding.calibrated import CalibratedEmbedder

    if embedder.fingerprint == FINGERPRINT:
        return embedder  # the scale is this model's

    return CalibratedEmbedder(embedder, models_dir, is_server=settings.model == HTTP)


def _local(settings: EmbeddingSettings, models_dir: Path | None, fetch: bool) -> Embedder:
    if settings.model == BUNDLED:
        from memd.embedding.bundled import load_bundled

        return load_bundled(settings)
    if (folder := _folder(settings, models_dir)) is not None:
        from memd.embedding.onnx_folder import load_folder

        return load_folder(settings, folder)
    from memd.embedding.fastembed import load_fastembed

    return load_fastembed(settings, fetch=fetch)


def _folder(settings: EmbeddingSettings, models_dir: Path | None) -> Path | None:
    """The folder of the model; None: one of fastembed's."""
    if settings.model == BUNDLED:
        return model_dir()
    if settings.model.startswith(PATH):
        return Path(settings.model.removeprefix(PATH))
    if settings.model != MULTILINGUAL:
        return None
    if models_dir is None:
        raise EmbeddingError("embedding.model multilingual is in a data directory; here there is none")
    from memd.embedding.multilingual.adding import checked_folder

    return checked_folder(models_dir)


def _resident(
    settings: EmbeddingSettings,
    models_dir: Path | None,
    fetch: bool,
    stored: Collection[tuple[int, str]],
    question_seconds: float,
) -> Embedder:
    from memd.embedding.bundled import DIMENSION
    from memd.embedding.onnx_folder import fingerprint_in
    from memd.embedding.resident import ResidentEmbedder

    load = partial(_local, settings, models_dir, fetch)
    folder = _folder(settings, models_dir)
    fingerprint = None if folder is None else fingerprint_in(settings, folder)
    # The log says it from the first chunk on; of fastembed's models only fastembed knows the files.
    dimension = next((dimension for dimension, known in stored if known == fingerprint), 0)
    if settings.model == BUNDLED:
        dimension = DIMENSION
    loaded: Embedder | None = None
    if fingerprint is None or not dimension:
        loaded = load()
        fingerprint, dimension = loaded.fingerprint, loaded.dimension
    idle = settings.idle_unload_seconds or math.inf
    made = partial(ResidentEmbedder, settings.model, dimension, fingerprint, load, folder)
    return made(idle_seconds=idle, question_seconds=question_seconds, loaded=loaded)
