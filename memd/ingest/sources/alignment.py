"""Which parts of a list stand in another one, in the same order.

Rule: pure; time grows with n log n whatever the lists are. difflib's grows with the square of what repeats, which in a
table of a hundred thousand equal rows is an hour. What repeats within a stretch that changed is not matched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence


def aligned(before: Sequence[Hashable], after: Sequence[Hashable]) -> dict[int, int]:
    """Return positions in `after` with those of equal items in `before`; both ascend.

    Matched are the common beginning and end, between them the longest ascending run of items that stand once in each
    (patience diff, as Bram Cohen describes it), and equal items next to those.
    """
    start, shorter = 0, min(len(before), len(after))
    while start < shorter and before[start] == after[start]:
        start += 1
    end = 0
    while end < shorter - start and before[-1 - end] == after[-1 - end]:
        end += 1
    found = [(one, one) for one in range(start)]
    anchors = _anchors(before, after, start, end)
    limits = [*anchors[1:], (len(before) - end, len(after) - end)]
    for (i, j), (i_limit, j_limit) in zip(anchors, limits, strict=True) if anchors else ():
        i_done, j_done = found[-1] if found else (-1, -1)
        while i - 1 > i_done and j - 1 > j_done and before[i - 1] == after[j - 1]:
            i, j = i - 1, j - 1
        while i < i_limit and j < j_limit and before[i] == after[j]:
            found.append((i, j))
            i, j = i + 1, j + 1
    found += [(len(before) - one, len(after) - one) for one in range(end, 0, -1)]
    return {j: i for i, j in found}


def _anchors(before: Sequence[Hashable], after: Sequence[Hashable], start: int, end: int) -> list[tuple[int, int]]:
    """The longest run, ascending in both, of items that stand once in each between a common beginning and end."""
    left, right = before[start : len(before) - end], after[start : len(after) - end]
    in_left, in_right = Counter(left), Counter(right)
    place = {item: i for i, item in enumerate(left, start)}
    pairs = [(place[item], j) for j, item in enumerate(right, start) if in_left[item] == in_right[item] == 1]
    tops: list[int] = []  # the smallest end of a run of each length, and which pair has it
    ends: list[int] = []
    previous = [-1] * len(pairs)
    for number, (i, _) in enumerate(pairs):
        length = bisect_left(tops, i)
        previous[number] = ends[length - 1] if length else -1
        tops[length : length + 1] = [i]
        ends[length : length + 1] = [number]
    run = []
    number = ends[-1] if ends else -1
    while number >= 0:
        run.append(pairs[number])
        number = previous[number]
    return run[::-1]
