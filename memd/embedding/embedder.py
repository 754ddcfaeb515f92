"""The interface of embedding models.

Rule: texts and questions have different methods, because many models want a prefix that distinguishes them. The
embedder adds it: from the settings, else from the model's own files, else as published for the model's name. All
methods may be called from several threads at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memd.assets import words_of
from memd.entries import Vector
from memd.settings.model import EmbeddingSettings

EmbedMany = Callable[[Sequence[str]], NDArray[np.float32]]
"""The type of `Embedder.embed_many`."""


class Embedder(Protocol):
    """Base class of embedding models; it implements `embed`."""

    name: str
    """The model as named in the settings."""
    dimension: int
    """Components of each vector."""
    fingerprint: str
    """32 hex digits that change if the vectors may change (model files, prefixes). Vectors of different fingerprints
    are never compared."""
    waits: bool = False
    """A call may wait for more than the processor: for a server, or for loading."""
    batch_texts: int
    """Texts that the model embeds at once. Calls may have more; a caller that gives way to queries between calls passes
    that many at a time."""

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed texts of any length, each independently of the others; unit vectors, float32 `(n, dimension)`.

        For an entry use `spoken`: roles are in every chunk and would only make chunks more alike. Raises
        EmbeddingError: the model failed on a text, or could not be reached.
        """

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed a question in pieces that the model can read; unit vectors, float32 `(q, dimension)`, q ≥ 1. Raises
        EmbeddingError: as in `embed_many`."""

    def embed(self, text: str) -> Vector:
        """Embed one text; see `embed_many`."""
        vector: Vector = self.embed_many([text])[0]
        return vector

    def prepare(self) -> None:
        """Do work that the first question would wait for; optional. Raises EmbeddingError: as in `embed_many`."""
        return

    def same_cosine(self, cosine: float) -> float:
        """Return this model's cosine for two texts as similar as texts with `cosine` by the bundled one."""
        return cosine

    def cut(self, text: str, tokens: int) -> str:
        """Return the beginning of a text with at most `tokens` word pieces, cut between characters."""
        return text[: 4 * tokens]

    @property
    def scale(self) -> tuple[float, float]:
        """Slope and offset from this model's cosines to the bundled one's, for which thresholds are set."""
        return 1.0, 0.0

    @property
    def tells_apart(self) -> bool:
        """True if answers are nearest to their questions; otherwise no cosine shows that nothing is near."""
        return True

    def close(self) -> None:
        """End running calls, from another thread; the embedder is not used again."""
        return  # a method without a statement would be abstract


AUTO = "auto"


class Prefixes(NamedTuple):
    """Put in front of a question, and of a text."""

    query: str = ""
    text: str = ""

    def fingerprint(self, without: str) -> str:
        """Return the fingerprint of a model with these prefixes; `without`: that of the model alone."""
        if self == NO_PREFIXES:
            return without
        identity = "\0".join([without, *self])
        return hashlib.sha256(identity.encode()).hexdigest()[:32]


NO_PREFIXES = Prefixes()


def prefixes_of(settings: EmbeddingSettings, name: str, own: Prefixes | None = None) -> Prefixes:
    """Return the prefixes to use.

    Args:
        name: the model's, in any case, with or without its maker.
        own: from the model's files; None if they have none.
    """
    if own is None:
        known: list[dict[str, str]] = words_of("prefixes")["models"]
        found = next((one for one in known if re.search(one["name"], name.lower())), {})
        own = Prefixes(found.get("query", ""), found.get("text", ""))
    query, text = settings.query_prefix, settings.text_prefix
    return Prefixes(own.query if query == AUTO else query, own.text if text == AUTO else text)
