"""A model's cosines on the scale of the bundled model, on which the settings and the fusion count.

Rule: computed from vectors alone. Only questions are changed, so nothing that is stored depends on it, and it may be
measured again at any time.

Unrelated texts have a cosine of 0.08 with the bundled model and of 0.75 with e5, which also adds 0.1 where both are in
Chinese. Measured on pairs of a sentence and a question, the same in each language:

    q' = slope (q − q's share in what tells the languages apart − half of its share in the questions' mean)
    value = q' · text + offset

`slope` and `offset` give pairs that belong together, and pairs that do not, the mean values that they have with the
bundled model. Without the directions of the languages a text in another language than the question's is found as well
as one in its own (Yang et al. 2021, "Self Language Bias"; figures in bench/NOTES.md); without what all questions have
in common the texts that are like any question at all no longer come first. The half was chosen on the same pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from memd.embedding.embedder import Prior

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
_SHRINKAGE = 10.0
"""Of the covariance within the kinds, in its mean variance: there are fewer questions than dimensions."""


class Kinds(NamedTuple):
    """The vectors of two kinds of questions in one language, both `(n, dimension)`."""

    memory: Floats
    """About what somebody said or stored."""
    world: Floats
    """All others, requests and small talk."""


class Calibration(msgspec.Struct, frozen=True):
    """From a model's question to one whose products are on the common scale."""

    directions: bytes
    """Unit vectors, float32 `(n, dimension)`: all but the last are taken out of a question, of the last a share."""
    slope: float
    offset: float
    length: float = 1.0
    """Of questions without the directions, on average."""
    kind: bytes = b""
    """The direction of questions to memory, float32 `(dimension,)`; empty: not measured."""
    kind_offset: float = 0.0
    spread: float = 0.0
    """See `Prior`."""
    across: float | None = None
    """See `Prior`."""

    def applied(self, queries: Floats) -> Floats:
        """Questions `(q, dimension)` as `(q, dimension + 1)`: the last column is added to each of their cosines."""
        if self == UNMEASURED:
            return queries
        rows = np.frombuffer(self.directions, "<f4").reshape(-1, queries.shape[1])
        languages, mean = rows[:-1], rows[-1:]
        cleared = queries - (queries @ languages.T) @ languages
        cleared = cleared - np.float32(_MEAN_SHARE) * (cleared @ mean.T) @ mean
        added = np.full((len(queries), 1), self.offset, np.float32)
        return np.ascontiguousarray(np.hstack([cleared * np.float32(self.slope), added]), np.float32)

    def scale(self, cosine: float) -> float:
        """The common scale's value of a cosine to a question of length 1 without the directions."""
        return self.slope * self.length * cosine + self.offset

    def prior(self, queries: Floats) -> Prior | None:
        """The knowledge of a question before anything is found.

        Args:
            queries: as `applied` gives them; of several the one that is most like a question to memory counts.
        """
        if not self.kind:
            return None
        kinds = _directed(queries) @ np.frombuffer(self.kind, "<f4") + self.kind_offset
        return Prior(float(kinds.max()), self.spread, self.across)

    @property
    def is_multilingual(self) -> bool:
        """Whether the model found sentences by questions in other languages."""
        return any(self.directions)

    def same(self, cosine: float) -> float:
        """The model's cosine of two texts that are as near to each other as those with `cosine` by the bundled one."""
        return 1 - (1 - cosine) / max(1.0, self.slope)


UNMEASURED = Calibration(b"", 1.0, 0.0)
"""Leaves cosines as they are."""


def measure(questions: Floats, texts: Floats, kinds: Mapping[int, Kinds] | None = None) -> Calibration:
    """The calibration from the vectors of the pairs, both `(languages, pairs, dimension)`, English first.

    `kinds`: by the language's position; without it nothing is known of a question beforehand.
    """
    if _found(questions[0], texts[0]) < _KNOWN_FROM:
        return UNMEASURED  # it tells nothing apart, not even in English
    known = [one for one in range(len(texts)) if one == 0 or _found(questions[one], texts[one]) >= _KNOWN_FROM]
    across = [_found(questions[one], texts[other]) for one in known for other in known if one != other]
    if len(known) < _LANGUAGES_MIN or np.mean(across) < _ACROSS_FROM:
        known, directions = known[:1], np.zeros((1, texts.shape[2]), np.float32)
    else:
        directions = np.vstack([_directions(texts[known].mean(axis=1)), _unit(questions[known].mean(axis=(0, 1)))])
    rough = Calibration(directions.astype("<f4").tobytes(), 1.0, 0.0)
    asked = np.stack([rough.applied(questions[one])[:, :-1] for one in known])
    tables = np.stack([one @ texts[language].T for one, language in zip(asked, known, strict=True)])
    own = np.eye(texts.shape[1], dtype=bool)  # the pairs that belong together
    related, unrelated = float(tables[:, own].mean()), float(tables[:, ~own].mean())
    slope = min(_SLOPE_MAX, (RELATED - UNRELATED) / max(1e-6, related - unrelated))
    length = float(np.linalg.norm(asked, axis=2).mean())
    found = Calibration(rough.directions, slope, UNRELATED - slope * unrelated, length)
    if not kinds:
        return found
    if len(known) > 1:
        others = np.einsum("apd,bpd->abp", asked, texts[known])[~np.eye(len(known), dtype=bool)]
        found = msgspec.structs.replace(found, across=slope * (related - float(others.mean())))
    return _with_kind(found, questions, texts[known], {one: kinds[one] for one in known if one in kinds})


def _with_kind(found: Calibration, questions: Floats, texts: Floats, kinds: Mapping[int, Kinds]) -> Calibration:
    """The calibration that also tells the kinds of questions apart."""
    memory = found.applied(
        np.concatenate([part for one, kind in kinds.items() for part in (kind.memory, questions[one])])
    )
    world = found.applied(np.concatenate([kind.world for kind in kinds.values()]))
    values = world[:, :-1] @ texts.reshape(-1, texts.shape[2]).T
    memory, world = _directed(memory), _directed(world)
    within = np.concatenate([memory - memory.mean(axis=0), world - world.mean(axis=0)]).astype(np.float64)
    apart = (memory.mean(axis=0) - world.mean(axis=0)).astype(np.float64)
    count, dimension = within.shape
    ridge = _SHRINKAGE * float(np.sum(within**2)) / dimension * np.eye(count)
    direction = apart - within.T @ np.linalg.solve(within @ within.T + ridge, within @ apart)  # Woodbury's identity
    low, high = float(world.mean(axis=0) @ direction), float(memory.mean(axis=0) @ direction)
    kind = (direction / max(1e-9, high - low)).astype("<f4").tobytes()
    spread = float(values.std())
    return msgspec.structs.replace(found, kind=kind, kind_offset=-low / max(1e-9, high - low), spread=spread)


def _directed(queries: Floats) -> Floats:
    """Questions as `Calibration.applied` gives them without their last column, as unit vectors."""
    bare = queries[:, :-1]
    lengths = np.linalg.norm(bare, axis=1, keepdims=True)
    return np.asarray(bare / np.maximum(lengths, 1e-9), dtype=np.float32)


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
