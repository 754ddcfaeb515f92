"""A model's cosines on the scale of the bundled model, on which the settings and the fusion count.

Rule: computed from vectors alone. Only questions are changed, so nothing that is stored depends on it, and it may be
measured again at any time.

Unrelated texts have a cosine of 0.08 with the bundled model and of 0.75 with e5, which also adds 0.1 where both are in
Chinese. Measured on pairs of a sentence and a question, the same in each language:

    q' = q − q's share in what tells the languages apart − half of its share in the questions' mean, normalised
    value = slope (q' · text) + offset

`slope` and `offset` give pairs that belong together, and pairs that do not, the mean values that they have with the
bundled model. Without the directions of the languages a text in another language than the question's is found as well
as one in its own (Yang et al. 2021, "Self Language Bias"; figures in bench/NOTES.md); without what all questions have
in common the texts that are like any question at all no longer come first. The half was chosen on the same pairs.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RELATED, UNRELATED = 0.605, 0.083
"""The bundled model's mean cosines of the English pairs; a test measures them."""
_MEAN_SHARE = 0.5
_DIRECTIONS_ENERGY = 0.9
_KNOWN_FROM = 2 / 3
"""A language is known to a model that finds this share of its sentences by their questions."""
_ACROSS_FROM = 0.5
_LANGUAGES_MIN = 3
_SLOPE_MAX = 20.0


class Calibration(msgspec.Struct, frozen=True):
    """From a model's question to one whose products are on the common scale."""

    directions: bytes
    """Unit vectors, float32 `(n, dimension)`: all but the last are taken out of a question, of the last a share."""
    slope: float
    offset: float

    def applied(self, queries: Floats) -> Floats:
        """Questions `(q, dimension)`, unit vectors, without what tells the languages apart."""
        if self == UNMEASURED:
            return queries
        rows = np.frombuffer(self.directions, "<f4").reshape(-1, queries.shape[1])
        languages, mean = rows[:-1], rows[-1:]
        cleared = queries - (queries @ languages.T) @ languages
        cleared = cleared - np.float32(_MEAN_SHARE) * (cleared @ mean.T) @ mean
        lengths = np.linalg.norm(cleared, axis=1, keepdims=True)
        return np.ascontiguousarray(cleared / np.maximum(lengths, 1e-9), np.float32)

    def same(self, cosine: float) -> float:
        """The model's cosine of two texts that are as near to each other as those with `cosine` by the bundled one."""
        return 1 - (1 - cosine) / max(1.0, self.slope)


UNMEASURED = Calibration(b"", 1.0, 0.0)
"""Leaves cosines as they are."""


def measure(questions: Floats, texts: Floats) -> Calibration:
    """The calibration from the vectors of the pairs, both `(languages, pairs, dimension)`, English first."""
    if _found(questions[0], texts[0]) < _KNOWN_FROM:
        return UNMEASURED  # it tells nothing apart, not even in English
    known = [one for one in range(len(texts)) if one == 0 or _found(questions[one], texts[one]) >= _KNOWN_FROM]
    across = [_found(questions[one], texts[other]) for one in known for other in known if one != other]
    if len(known) < _LANGUAGES_MIN or np.mean(across) < _ACROSS_FROM:
        known, directions = known[:1], np.zeros((1, texts.shape[2]), np.float32)
    else:
        directions = np.vstack([_directions(texts[known].mean(axis=1)), _unit(questions[known].mean(axis=(0, 1)))])
    rough = Calibration(directions.astype("<f4").tobytes(), 1.0, 0.0)
    tables = np.stack([rough.applied(questions[language]) @ texts[language].T for language in known])
    own = np.eye(texts.shape[1], dtype=bool)  # the pairs that belong together
    related, unrelated = float(tables[:, own].mean()), float(tables[:, ~own].mean())
    slope = min(_SLOPE_MAX, (RELATED - UNRELATED) / max(1e-6, related - unrelated))
    return Calibration(rough.directions, slope, UNRELATED - slope * unrelated)


def _directions(centres: Floats) -> Floats:
    """The directions in which the languages' means lie apart."""
    _, sizes, found = np.linalg.svd(centres - centres.mean(axis=0), full_matrices=False)
    share = np.cumsum(sizes**2) / np.sum(sizes**2)
    return found[: int(np.searchsorted(share, _DIRECTIONS_ENERGY)) + 1]


def _unit(vector: Floats) -> Floats:
    return vector / np.linalg.norm(vector)


def _found(questions: Floats, texts: Floats) -> float:
    """The share of the questions whose own text is the nearest."""
    return float(np.mean((questions @ texts.T).argmax(axis=1) == np.arange(len(texts))))
