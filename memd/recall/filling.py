"""Fills the budget of a block with the best of what is worth showing.

Rule: decided from values alone. Nothing is cut to fit; a chunk that does not fit is skipped and the next one tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from memd.recall.ranking import Candidate, Ranked, Verdict


class Judged(msgspec.Struct, frozen=True, gc=False):
    """A candidate with the final verdict on it."""

    candidate: Candidate
    verdict: Verdict
    tokens: int
    """The tokens of its line in a block, in the model's tokens; estimated where the verdict is NO_ROOM."""


class Selection(msgspec.Struct, frozen=True):
    """The chunks to show, and how full the budget would be with all that are worth showing."""

    judged: tuple[Judged, ...]
    """All candidates, best first."""
    shown: tuple[Candidate, ...]
    """In the order in which the model reads them: in which it was said."""
    fill_ratio: float
    """Tokens of all candidates worth showing over what they may take: above 1 exactly if one is not shown."""


def select(
    ranked: Sequence[Ranked],
    *,
    budget_tokens: int,
    frame_tokens: int,
    cost: Callable[[Candidate, int], int],
    day: Callable[[Candidate], tuple[str, int]] = lambda _: ("", 0),
    shown_uuids: Collection[bytes] = (),
    block_tokens: int | None = None,
) -> Selection:
    """Fill the budget with the best candidates.

    A chunk that an earlier turn's block still shows takes its place in the budget but is not shown twice: the answer
    to the question is then in the prompt, and worse chunks must not be added in its stead.

    Args:
        ranked: best first, as `rank` gives them.
        budget_tokens: the most that chunks for this question may take, those shown already included.
        frame_tokens: the tokens of the block's own first and last line.
        cost: returns the tokens of a chunk's line, given how many are left; it may estimate a line that takes more
            than those, as long as the estimate is also above them.
        day: returns the line before all chunks of the day of a candidate, and its tokens.
        shown_uuids: chunks that other blocks of this prompt show.
        block_tokens: the most that the block itself may take, where the prompt has less room than the budget.
    """
    block_tokens = budget_tokens if block_tokens is None else min(budget_tokens, block_tokens)
    filling = _Filling(budget_tokens - frame_tokens, block_tokens - frame_tokens, cost, day)
    judged = [filling.judged(one, is_earlier=one.candidate.entry.uuid in shown_uuids) for one in ranked]
    shown = [one.candidate for one in judged if one.verdict is Verdict.INJECTED]
    shown.sort(key=lambda one: (one.entry.said, one.entry.origin_id, one.entry.uuid))
    wanted = frame_tokens if any(one.excluded is None for one in ranked) else 0
    fill_ratio = 0.0
    if block_tokens > 0:
        fill_ratio = max((wanted + filling.wanted) / budget_tokens, (wanted + filling.wanted_new) / block_tokens)
    return Selection(tuple(judged), tuple(shown), fill_ratio)


class _Filling:
    """A budget while it is filled, in tokens, the block's first and last line already paid.

    A day's line is paid by the first chunk of the day: of those shown, and among all that are wanted.
    """

    def __init__(
        self, left: int, room: int, cost: Callable[[Candidate, int], int], day: Callable[[Candidate], tuple[str, int]]
    ) -> None:
        self.wanted = self.wanted_new = 0
        """Tokens of all that are worth showing, and of those among them that no earlier block shows."""
        self._left, self._room = left, room
        self._cost, self._day = cost, day
        self._wanted_days: set[str] = set()
        self._shown_days: set[str] = set()

    def judged(self, one: Ranked, *, is_earlier: bool) -> Judged:
        """The verdict on the next candidate; takes its tokens out of the budget if it is shown."""
        candidate, verdict = one.candidate, one.excluded
        line, line_tokens = ("", 0) if is_earlier else self._day(candidate)
        new_line = 0 if line in self._shown_days else line_tokens
        free = (self._left if is_earlier else min(self._left, self._room)) - new_line
        tokens = self._cost(candidate, free)
        if verdict is None:
            in_all = tokens + (0 if line in self._wanted_days else line_tokens)
            self._wanted_days.add(line)
            self.wanted += in_all
            self.wanted_new += 0 if is_earlier else in_all
            taken = tokens + new_line if tokens <= free else 0
            self._left -= taken
            self._room -= 0 if is_earlier else taken
            verdict = Verdict.EARLIER if is_earlier else Verdict.INJECTED if taken else Verdict.NO_ROOM
        if verdict is Verdict.INJECTED:
            self._shown_days.add(line)
        return Judged(candidate, verdict, tokens)
