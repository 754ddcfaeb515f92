"""How much a run tries: everything in `make test`, a sample of it in the fast loop.

Rule: the sample leaves out only more of the same; no behaviour goes without its test.
"""

from __future__ import annotations

import hypothesis


def scaled(whole: int) -> int:
    """`whole` in `make test`, a fifth of it in the fast loop: a size, or a number of examples."""
    return whole * min(hypothesis.settings().max_examples, 100) // 100


def steps(first: int, end: int) -> range:
    """The operations from `first` to `end` at which something goes wrong: each one, or every fifth in the fast loop."""
    return range(first, end, 100 // scaled(100))
