"""The contract that each embedding model implements.

Rule: a text and a question are embedded by different methods, because many models want a prefix that says which it is;
adding it is the embedder's own business: what the settings say counts, else what the model's own files say, else what
its makers publish for its name. Every method may be called from several threads at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memd.entries import Vector
from memd.settings.model import EmbeddingSettings

EmbedMany = Callable[[Sequence[str]], NDArray[np.float32]]
"""The type of `Embedder.embed_many`."""


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
        """Embed a question, each piece that the model can read whole; unit vectors, float32 `(q, dimension)`, q ≥ 1.
        Raises EmbeddingError: as in `embed_many`."""

    def embed(self, text: str) -> Vector:
        """Embed one text; see `embed_many`."""
        vector: Vector = self.embed_many([text])[0]
        return vector

    def prepare(self) -> None:
        """Do now what the first question would wait for; may be left out. Raises EmbeddingError: as in `embed_many`."""
        return

    def same_cosine(self, cosine: float) -> float:
        """The cosine from which this model takes two texts for as alike as the bundled one does from `cosine`."""
        return cosine

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text that has at most so many word pieces, cut at a character."""
        return text[: 4 * tokens]

    @property
    def scale(self) -> tuple[float, float]:
        """Slope and offset from this model's cosines to those of the bundled one, which thresholds are set for."""
        return 1.0, 0.0

    @property
    def tells_apart(self) -> bool:
        """Whether a question is nearest to what answers it: else no cosine says that nothing is near."""
        return True

    def close(self) -> None:
        """End what is under way, from another thread; the embedder is not used again."""
        return  # a method without a statement would be abstract


AUTO = "auto"
_SENTENCE = "Represent this sentence for searching relevant passages: "
_INSTRUCTED = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "


class Prefixes(NamedTuple):
    """Put in front of a question, and of a text."""

    query: str = ""
    text: str = ""

    def fingerprint(self, without: str) -> str:
        """The fingerprint of a model with these prefixes; `without` is that of the model alone."""
        if self == NO_PREFIXES:
            return without
        identity = "\0".join([without, *self])
        return hashlib.sha256(identity.encode()).hexdigest()[:32]


NO_PREFIXES = Prefixes()

_KNOWN = (
    (r"e5-.*instruct|e5-mistral|qwen3-embedding", Prefixes(_INSTRUCTED)),
    (r"\be5-", Prefixes("query: ", "passage: ")),
    (r"\bbge-\w+-en", Prefixes(_SENTENCE)),
    (r"\bbge-\w+-zh", Prefixes("为这个句子生成表示以用于检索相关文章：")),
    (r"arctic-embed.*v2", Prefixes("query: ")),
    (r"arctic-embed|mxbai-embed", Prefixes(_SENTENCE)),
    (r"nomic-embed-text", Prefixes("search_query: ", "search_document: ")),
    (r"embeddinggemma", Prefixes("task: search result | query: ", "title: none | text: ")),
)
"""By a part of the name, as the model cards give them; the first that matches counts."""


def prefixes_of(settings: EmbeddingSettings, name: str, own: Prefixes | None = None) -> Prefixes:
    """Return the prefixes to use.

    Args:
        name: the model's; in lower or upper case, with or without its maker.
        own: what the model's files say; None: they say nothing.
    """
    published = next((found for pattern, found in _KNOWN if re.search(pattern, name.lower())), NO_PREFIXES)
    model = published if own is None else own
    query, text = settings.query_prefix, settings.text_prefix
    return Prefixes(model.query if query == AUTO else query, model.text if text == AUTO else text)
