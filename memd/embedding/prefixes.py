"""The words that a model wants in front of a question and of a text, so that it knows which is which.

Rule: what the settings say counts, else what the model's own files say, else what its makers publish for its name.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from memd.settings.model import EmbeddingSettings

AUTO = "auto"
_SENTENCE = "Represent this sentence for searching relevant passages: "
_INSTRUCTED = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_FINGERPRINT_DIGITS = 32


class Prefixes(NamedTuple):
    """Put in front of a question, and of a text."""

    query: str = ""
    text: str = ""

    def fingerprint(self, without: str) -> str:
        """The fingerprint of a model with these prefixes; `without` is that of the model alone."""
        if self == NO_PREFIXES:
            return without
        told = "\0".join([without, *self])
        return hashlib.sha256(told.encode()).hexdigest()[:_FINGERPRINT_DIGITS]


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
