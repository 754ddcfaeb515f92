"""Tells the requests that a program makes for itself (a title, tags, a summary) from those of its user.

Rule: by the words of the program's own prompt alone. Most patterns begin with `\\A`; these are tried at the
beginning and nowhere else, because `re.search` would try each of them at every character of a long message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from memd.wire.request import ModelRequest

SEARCHED_CHARACTERS_MAX = 100_000
"""Of a longer text only its beginning is looked at."""
_INSTRUCTIONS_MAX = 32  # system prompts recur in every request of a program; a long one takes 0.3 ms to look through

Find = Callable[[str], re.Match[str] | None]


class SideRequests:
    """Recognises them."""

    def __init__(self, ignored: Iterable[str], ignored_system: Iterable[str]) -> None:
        """
        Args:
            ignored: `ingest.ignore`, regular expressions for the last user message.
            ignored_system: `ingest.ignore_system`, for the system prompt.
        """
        self._asks = [_finder(pattern) for pattern in ignored]
        instructs = [_finder(pattern) for pattern in ignored_system]
        self._is_instructed = lru_cache(_INSTRUCTIONS_MAX)(lambda text: _any_finds(instructs, text))

    def includes(self, request: ModelRequest) -> bool:
        """Whether the request is one of them: it is passed on, and not remembered."""
        last = next((message.said for message in reversed(request.messages) if message.role == "user"), "")
        if _any_finds(self._asks, last[:SEARCHED_CHARACTERS_MAX]):
            return True
        return bool(request.instructions) and self._is_instructed(request.instructions[:SEARCHED_CHARACTERS_MAX])


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
