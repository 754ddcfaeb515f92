"""Stretches of a text, as finders of secrets give them.

Rule: a finder gives them in order, none empty, none overlapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

Span = tuple[int, int]
Find = Callable[[str], Iterator[Span]]
"""The spans of a text that are secrets."""


def apart(spans: Iterable[Span]) -> Iterator[Span]:
    """Any spans in order, those that overlap joined."""
    begin, end = -1, -1
    for start, stop in sorted(spans):
        if start < end:
            end = max(end, stop)
            continue
        if end > begin:
            yield begin, end
        begin, end = start, stop
    if end > begin:
        yield begin, end
