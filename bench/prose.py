"""Text whose words are as common as those of real text: what an index of words is asked to search.

A log in which all chunks say the same, or in which every word is rare, measures nothing: a question's common words are
in nearly every chunk and its telling ones in a few. So words are drawn by Zipf's law: the function words of English
first, in their order, then made-up ones.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

VOCABULARY_WORDS = 30_000
CHUNK_WORDS = 80
"""About 450 bytes."""
QUESTION_WORDS = (900, 4000)
"""The ranks of the words that a question is about: neither in every chunk nor in one alone."""
_ZIPF_EXPONENT, _ZIPF_OFFSET = 1.0, 2.7  # Mandelbrot's form, as fitted to English
_COMMON = """the of and to a in that it is was i for on you he be with as by at have are this not but had his they
from she which or we an there her were one do been all their has would will what if can when so my no more who out up
them said then could some about time into than me its only two may other like these now over first also new after any
our just where most made did many back how much before should through well because down"""
_ONSETS, _VOWELS = "b d f g k l m n p r s t v z ch st", "a e i o u ar"


@functools.cache
def vocabulary() -> NDArray[np.str_]:
    """VOCABULARY_WORDS words, the most common first."""
    chosen = np.random.default_rng(3)
    syllables = [one + other for one in _ONSETS.split() for other in _VOWELS.split()]
    made = dict.fromkeys(_COMMON.split())
    while len(made) < VOCABULARY_WORDS:
        made["".join(chosen.choice(syllables, chosen.integers(2, 5)))] = None
    return np.array(list(made))


@functools.cache
def _cumulated() -> NDArray[np.float64]:
    shares = 1 / (np.arange(VOCABULARY_WORDS) + 1 + _ZIPF_OFFSET) ** _ZIPF_EXPONENT
    return np.asarray(np.cumsum(shares / shares.sum()))


def texts(count: int, chosen: np.random.Generator) -> list[str]:
    """That many texts of CHUNK_WORDS words."""
    ranks = np.searchsorted(_cumulated(), chosen.random((count, CHUNK_WORDS)))
    words = vocabulary()
    return [" ".join(words[row]) for row in np.minimum(ranks, VOCABULARY_WORDS - 1)]


def question(chosen: np.random.Generator) -> str:
    """What somebody asks about three of the less common words."""
    one, two, three = vocabulary()[chosen.integers(*QUESTION_WORDS, 3)]
    return f"Which of the {one} was to go first, and what was it that we decided about the {two} and its {three}?"
