"""Tells the requests that a program makes for itself (a title, tags, a summary), and those of agents that another agent
called, from those of its user.

Rule: by the words of the program's own prompt alone. Most patterns begin with `\\A`; these are tried at the
beginning and nowhere else, because `re.search` would try each of them at every character of a long message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from memd.settings.programs import Programs
from memd.wire.request import ModelRequest, renamed

SEARCHED_CHARACTERS_MAX = 100_000
"""Of a longer text only its beginning is looked at."""
_INSTRUCTIONS_MAX = 32  # system prompts recur in every request of a program; a long one takes 0.3 ms to look through

SUB_AGENT = "sub-agent"
"""The name of who speaks as the user to an agent that another agent called."""

Find = Callable[[str], re.Match[str] | None]


class SideRequests:
    """Recognises them."""

    def __init__(self, programs: Programs) -> None:
        """`programs`: the patterns in force."""
        self._asks = [_finder(pattern) for pattern in programs.ignore]
        self._is_instructed = _cached_find(programs.ignore_system)
        self._is_called = _cached_find(programs.sub_agent)

    def includes(self, request: ModelRequest) -> bool:
        """Whether the request is one of them: it is passed on, and not remembered."""
        last = next((message.said for message in reversed(request.messages) if message.role == "user"), "")
        return _any_finds(self._asks, last[:SEARCHED_CHARACTERS_MAX]) or self._is_instructed(_instructions(request))

    def by_its_speaker(self, request: ModelRequest) -> ModelRequest:
        """The request; where an agent called another one, its user's messages are by name those of an agent."""
        return renamed(request, SUB_AGENT) if self._is_called(_instructions(request)) else request


def _instructions(request: ModelRequest) -> str:
    return request.instructions[:SEARCHED_CHARACTERS_MAX]


def _cached_find(patterns: Iterable[str]) -> Callable[[str], bool]:
    finders = [_finder(pattern) for pattern in patterns]
    return lru_cache(_INSTRUCTIONS_MAX)(lambda text: bool(text) and _any_finds(finders, text))


def _any_finds(finders: Sequence[Find], text: str) -> bool:
    return any(find(text) is not None for find in finders)


def _finder(pattern: str) -> Find:
    """The search for a pattern; a match where that is the same."""
    compiled = re.compile(pattern)
    return compiled.match if pattern.startswith(r"\A") and not _has_outer_choice(pattern) else compiled.search


def _has_outer_choice(pattern: str) -> bool:
    """Whether a pattern may have a `|` outside all groups: then `\\A` holds for its first branch alone."""
    depth = 0
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|[()|]", pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth <= 0:
            return True
    return False
