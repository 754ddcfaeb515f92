"""How much a run tries: everything in `make test`, a sample of it in the fast loop.

Rule: the sample leaves out only more of the same; a test that is worth nothing with less, and takes over a third of a
second of a core, has the marker `thorough`, with which `make quick` leaves it out.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import hypothesis
from crash_files import LOSSES, Loss

LONG_CHARACTERS = 1 << 17
SECONDS_MAX = 5
"""Of processor time for so long a text: the slowest takes 1; were it to grow with the square, minutes."""


def scaled(whole: int) -> int:
    """6/10 of `whole` in `make test`, a tenth of it in the fast loop: a size, or a number of examples."""
    return whole * min(hypothesis.settings().max_examples, 100) // 100


Case = TypeVar("Case")


def sample(cases: Sequence[Case]) -> Sequence[Case]:
    """All of them, or every tenth in the fast loop."""
    return cases[:: 100 // scaled(100)]


def in_time(change: Callable[[str], str], text: str) -> str:
    """`change(text)`; fails unless its time grows with the length of a text and not with its square."""
    started = time.thread_time()
    changed = change(text)
    assert time.thread_time() - started < SECONDS_MAX
    return changed


def long(part: str) -> str:
    """`part` again and again, as long as a text of which `SECONDS_MAX` is asked."""
    characters = scaled(LONG_CHARACTERS)
    return (part * (characters // len(part) + 1))[:characters]


def steps(first: int, end: int, loss: Loss | None = None) -> range:
    """The operations from `first` to `end` at which something goes wrong: each one, or every tenth in the fast loop.

    Where a power cut has a `loss`, every third is this one's, so that each operation meets one or two of the five and
    every loss meets operations of each kind; with the profile `fuzz` each operation meets each loss.
    """
    apart = 100 // scaled(100)
    if loss is None or (apart == 1 and hypothesis.settings().max_examples >= 100):
        return range(first, end, apart)
    apart = max(apart, 3)
    return range(first + LOSSES.index(loss) % apart, end, apart)
