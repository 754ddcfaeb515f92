"""Chunks that say the same as an earlier one of their batch.

Rule: words decide. Vectors alone make no two texts one: "the port is 8081" and "the port is 8082", rows of a table, and
a file that was read again after one number of it had changed are as near to each other (cosine above 0.995) as many a
text is to itself in other white space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memd.entries import ChunkState

_MARK = re.compile(r"(?<=[\w)\]}\"'”’])[.,;:!…]++(?!\S)")
"""Marks behind a word that change nothing of what is said; a question mark does."""


def words_of(text: str) -> str:
    """The words of a text in their order, as texts are compared: the same for two that differ in white space, in marks
    behind words, and in capitals that open words. Numbers, identifiers, paths, signs and questions stay what they are.
    """
    words = _MARK.sub("", text).split()
    return " ".join(word.lower() if word.isalpha() and word[1:].islower() else word for word in words)


def firsts_of(drafts: Sequence[ChunkState], vectors: NDArray[np.float32], cosine: float) -> list[int]:
    """For each of a batch's chunks the index of the first one that says the same: its own, if none before it does.

    Args:
        vectors: unit vectors, shape `(n, dimension)`.
        cosine: from which similarity on the same words count as the same text; the very same text always does.
    """
    firsts: list[int] = []
    known: dict[str, list[int]] = {}
    for index, draft in enumerate(drafts):
        text = draft.embedded_text
        like = known.setdefault(words_of(text), [])
        same = (i for i in like if drafts[i].embedded_text == text or vectors[i] @ vectors[index] >= cosine)
        first = next(same, index)
        like += [index] if first == index else []
        firsts.append(first)
    return firsts
