"""Whether a text has words of an erased one in it.

Rule: pure. Four words in a row, wherever they stand, are the erased text's; of a shorter text all of it is needed.
Single words are everybody's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

RUN = 4
_WORDS = re.compile(r"\w+")


class Overlap:
    """The runs of words of some texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs: set[int] = set()
        self._short: set[tuple[str, ...]] = set()
        for text in texts:
            words = _words(text)
            if len(words) >= RUN:
                self._runs.update(_runs(words))
            elif words:
                self._short.add(tuple(words))

    def meets(self, text: str) -> bool:
        """Whether `text` has one of the runs, or one of the short texts."""
        words = _words(text)
        if any(run in self._runs for run in _runs(words)):
            return True
        return any(
            tuple(words[at : at + len(short)]) == short
            for short in self._short
            for at in range(len(words) - len(short) + 1)
        )


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


def _runs(words: list[str]) -> Iterable[int]:
    return (hash(tuple(words[at : at + RUN])) for at in range(len(words) - RUN + 1))
