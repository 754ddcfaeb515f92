"""How often chunks have the terms of a query: counted in all texts at once.

Rule: exact, and pure. A term is told by its first bytes, which are compared for all terms of all texts in one operation
of arrays; the few that pass are compared whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_HEAD_BYTES = 8
"""Of a term and the space behind it: compared as one number."""
_SPACE = 0x20


class JoinedTexts:
    """The terms of many texts as one, in which each is looked for at once."""

    def __init__(
        self, data: bytes, starts: NDArray[np.intp], heads: NDArray[np.uint64], ends: NDArray[np.intp]
    ) -> None:
        """Use `of` or `joined`.

        Args:
            data: the texts, with zeros behind the last of them and perhaps between others.
            starts, heads: where each term begins, and its first bytes, shape (terms,).
            ends: of each text, shape (texts,).
        """
        self._data, self._starts, self._heads, self._ends = data, starts, heads, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> JoinedTexts:
        """Join texts: terms, each between two spaces of its own (see `ChunkTerms`)."""
        text = "".join(texts)
        data = text.encode() + bytes(_HEAD_BYTES)
        sizes = [len(one) for one in texts] if text.isascii() else [len(one.encode()) for one in texts]
        is_space = np.frombuffer(data, np.uint8) == _SPACE
        starts = np.flatnonzero(is_space[:-_HEAD_BYTES] > is_space[1 : 1 - _HEAD_BYTES]) + 1
        heads = np.ndarray((len(data) - _HEAD_BYTES + 1,), "<u8", data, 0, (1,))[starts]
        return cls(data, starts, heads, np.cumsum(sizes, dtype=np.intp))

    @classmethod
    def joined(cls, parts: Sequence[JoinedTexts]) -> JoinedTexts:
        """Join what is joined already, at least one, which takes a tenth of the time."""
        firsts = list(itertools.accumulate((len(one._data) for one in parts), initial=0))
        shifted = list(zip(parts, firsts, strict=False))
        return cls(
            b"".join(one._data for one in parts),
            np.concatenate([one._starts + first for one, first in shifted]),
            np.concatenate([one._heads for one in parts]),
            np.concatenate([one._ends + first for one, first in shifted]),
        )

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes."""
        return len(self._data) + self._starts.nbytes + self._heads.nbytes + self._ends.nbytes

    def frequencies(self, wanted: Sequence[Sequence[str]]) -> NDArray[np.float64]:
        """How often each text has one of some terms, shape (wanted, texts).

        Args:
            wanted: groups of terms; no term twice in a group.
        """
        count = len(self._ends)
        found = np.zeros((len(wanted), count))
        for row, group in enumerate(wanted) if count else ():
            for term in group:
                at = self._starts[_having(self._heads, self._starts, self._data, f"{term} ".encode())]
                if len(at):
                    found[row] += np.bincount(self._ends.searchsorted(at, "right"), minlength=count)
        return found


def _having(heads: NDArray[np.uint64], starts: NDArray[np.intp], data: bytes, term: bytes) -> NDArray[np.intp]:
    """Where a term is, which a space ends; `heads`: what is at `starts`."""
    head = np.uint64(int.from_bytes(term[:_HEAD_BYTES], "little"))
    if len(term) <= _HEAD_BYTES:
        return np.flatnonzero(heads & np.uint64((1 << 8 * len(term)) - 1) == head)
    alike = np.flatnonzero(heads == head)
    return alike[[data.startswith(term, start) for start in starts[alike].tolist()]]
