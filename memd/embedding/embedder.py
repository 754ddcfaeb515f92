"""The contract that each embedding model implements.

Rule: a text and a question are embedded by different methods, because many models want a prefix that says which it is;
adding it is the embedder's own business. Every method may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memd.embedding.table import cut
from memd.entries import Vector

EmbedMany = Callable[[Sequence[str]], NDArray[np.float32]]
"""The type of `Embedder.embed_many`."""


class Prior(NamedTuple):
    """The knowledge of a question before anything is found, on the common scale (see `calibration`)."""

    kind: float
    """0 as questions about the world and small talk on average, 1 as questions about what was said."""
    spread: float
    """The standard deviation of the cosines between questions and texts that have nothing to do with each other."""
    across: float | None
    """By how much lower the cosines of related texts in two languages are; None: the model does not know several."""


class Embedder(Protocol):
    """An embedding model. An implementation names this as its base class, which gives it `embed`."""

    name: str
    """The model as the settings name it."""
    dimension: int
    """Components of every vector."""
    fingerprint: str
    """32 hex digits that change whenever the vectors may (model files, prefixes): vectors of different fingerprints
    are never compared."""
    waits: bool = False
    """Whether a call may wait for more than the processor: for a server, or for the model to be loaded."""
    batch_texts: int
    """How many texts the model embeds at once. A call may have more; a caller that gives way to queries between calls
    asks for that many at a time."""

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed texts of any length, each independently of its neighbours; unit vectors, float32 `(n, dimension)`.

        For the text of an entry use `spoken`: every chunk has roles, so they would only make chunks more alike.

        Raises:
            EmbeddingError: the model failed on a text, or could not be reached.
        """

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed a question, each piece that the model can read whole; float32, q ≥ 1, C-contiguous: unit vectors
        `(q, dimension)`, or `(q, dimension + 1)`, whose last column is added to each cosine of the question, so that
        all models' are on one scale (see `calibration`).

        Raises:
            EmbeddingError: as in `embed_many`.
        """

    def embed_part(self, text: str) -> Vector:
        """Embed a part of a question, which the model reads at once: one unit vector `(dimension,)` in the space of
        the stored ones. What its cosines mean says `scale`.

        Raises:
            EmbeddingError: as in `embed_many`.
        """
        vector: Vector = self.embed_query(text)[0]
        return vector

    def cut(self, text: str, pieces_max: int) -> str:
        """The head of a text that has at most so many of the model's word pieces, cut at a character."""
        return cut(text, pieces_max)

    def scale(self, cosine: float) -> float:
        """The bundled model's cosine that means as much as this one of `embed_part` and a stored text: thresholds are
        told for that model."""
        return cosine

    def embed(self, text: str) -> Vector:
        """Embed one text; see `embed_many`."""
        vector: Vector = self.embed_many([text])[0]
        return vector

    def prepare(self) -> None:
        """Do now what the first question would wait for; may be left out.

        Raises:
            EmbeddingError: as in `embed_many`.
        """
        return

    def same_cosine(self, cosine: float) -> float:
        """The cosine from which this model takes two texts for as alike as the bundled one does from `cosine`."""
        return cosine

    def finds_across_languages(self) -> bool:
        """Whether a question finds a text in another language: then words, which do not, count less."""
        return False

    def prior(self, queries: NDArray[np.float32]) -> Prior | None:
        """Whether a question sounds as if memory could answer it; None: that is not known of this model.

        Args:
            queries: the question's vectors, as `embed_query` gives them.
        """
        return None

    def close(self) -> None:
        """End what is under way, from another thread; the embedder is not used again."""
        return  # a method without a statement would be abstract
