"""Vectors that lie as a real log's do: sentence embeddings of the bundled model, and mixtures of them.

Uniform noise would flatter nobody: in 384 dimensions it has no neighbours worth finding. Embedding a million sentences
would take an hour; so a few thousand are embedded, and every further vector is a random mixture of two of them with a
little noise, of length 1.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder

Floats = NDArray[np.float32]

NOISE = 0.02
_SUBJECTS = """the deployment script, our parser, the login page, Maria, the build server, the cache layer, my sister,
the garden shed, the invoice tool, a unit test, the payment queue, the database index, Tom, the weather model,
the CSS grid, the train to Lisbon, the release branch, a cold start, the tokenizer, the pull request, the night shift"""
_VERBS = """fails when there is, was rewritten because of, needs, depends on, was replaced by, talks to, ignores,
retries, prefers, forgot, logs, blocks, renames, measures, repairs, waits for, disagrees with, is tested against"""
_OBJECTS = """a timeout of zero, a second worker, the old schema, user names with spaces, the blue bicycle, ERR_7421,
UTF-8 file names, the nightly backup, a Postgres replica, the summer holiday, token counts, the red paint, a mutex,
version 2.3.1, the API key, dark mode, the left valve, an empty list, the third chapter, a leaking pipe"""


def sentences(count: int, seed: int = 5) -> list[str]:
    """That many different sentences, the same for the same seed."""
    chosen = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        words = [chosen.choice(" ".join(kind.split()).split(", ")) for kind in (_SUBJECTS, _VERBS, _OBJECTS)]
        made[f"{' '.join(words)}, says note {chosen.randint(1, 400)} of {chosen.choice(['Monday', 'Friday'])}"] = None
    return list(made)


def embedded(embedder: Embedder, count: int) -> Floats:
    """The embeddings of that many sentences, shape (count, dimension); a millisecond each."""
    return np.stack([embedder.embed(sentence) for sentence in sentences(count)])


def mixed(base: Floats, count: int, chosen: np.random.Generator) -> Floats:
    """That many unit vectors between those of `base`, shape (count, dimension)."""
    one, other = chosen.integers(0, len(base), (2, count))
    weight = chosen.random((count, 1), dtype=np.float32)
    noise = NOISE * chosen.normal(size=(count, base.shape[1])).astype(np.float32)
    vectors = weight * base[one] + (1 - weight) * base[other] + noise
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)
