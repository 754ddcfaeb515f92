"""The texts of a question that are embedded.

Rule: pure. People ask at the end, of what stands before it, or of something else: then the one vector of all is
neither's.
"""

from __future__ import annotations

from memd.store.lexical.analyzer import analyze_query

LAST_CHARACTERS_MAX = 500
LAST_TERMS_MIN = 2
"""A last paragraph of at most so many characters and at least so many words (stop words apart) is asked alone too."""


def embedded_texts(question: str) -> list[str]:
    """The texts to embed: the question, and its last paragraph alone where that says something by itself."""
    before, _, last = question.rstrip().rpartition("\n\n")
    if not before.strip() or len(last) > LAST_CHARACTERS_MAX or len(analyze_query(last)) < LAST_TERMS_MIN:
        return [question]
    return [question, last]
