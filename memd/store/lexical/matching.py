"""How often chunks have the terms of a query: counted in all texts at once.

Rule: exact, and pure. A term is told by its first bytes, which are compared for all terms of all texts in one operation
of arrays; the few that pass are compared whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_HEAD_BYTES = 8
"""Of a term and the space behind it: compared as one number."""
_SPACE = 0x20


class JoinedTexts:
    """The terms of many texts as one, in which each is looked for at once."""

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts`: terms, each between two spaces of its own (see `ChunkTerms`)."""
        self._count = len(texts)
        self.text = "".join(texts)
        self._data = data = self.text.encode() + bytes(_HEAD_BYTES)
        sizes = [len(one) for one in texts] if self.text.isascii() else [len(one.encode()) for one in texts]
        is_space = np.frombuffer(data, np.uint8) == _SPACE
        self._starts = np.flatnonzero(is_space[:-_HEAD_BYTES] > is_space[1 : 1 - _HEAD_BYTES]) + 1
        self._heads = np.ndarray((len(data) - _HEAD_BYTES + 1,), "<u8", data, 0, (1,))[self._starts]
        self._ends = np.cumsum(sizes)

    def frequencies(self, wanted: Sequence[Sequence[str]]) -> NDArray[np.float64]:
        """How often each text has one of some terms, shape (wanted, texts).

        Args:
            wanted: groups of terms; no term twice in a group.
        """
        found = np.zeros((len(wanted), self._count))
        for row, group in enumerate(wanted) if self._count else ():
            for term in group:
                at = self._starts[_having(self._heads, self._starts, self._data, f"{term} ".encode())]
                if len(at):
                    found[row] += np.bincount(self._ends.searchsorted(at, "right"), minlength=self._count)
        return found


def _having(heads: NDArray[np.uint64], starts: NDArray[np.intp], data: bytes, term: bytes) -> NDArray[np.intp]:
    """Where a term is, which a space ends; `heads`: what is at `starts`."""
    head = np.uint64(int.from_bytes(term[:_HEAD_BYTES], "little"))
    if len(term) <= _HEAD_BYTES:
        return np.flatnonzero(heads & np.uint64((1 << 8 * len(term)) - 1) == head)
    alike = np.flatnonzero(heads == head)
    return alike[[data.startswith(term, start) for start in starts[alike].tolist()]]
