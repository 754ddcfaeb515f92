"""Regular expressions that are compiled when they are first used.

Rule: those that few requests need are made so. Compiled at import, they took a twentieth of a start.
"""

from __future__ import annotations

import re
from typing import Any, cast


def late_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """The pattern that `re.compile` makes, but it is compiled when it is first used."""
    return cast("re.Pattern[str]", _LatePattern(pattern, flags))


class _LatePattern:
    """Methods of the compiled pattern are looked up in it once each."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._written = pattern, flags

    def __getattr__(self, name: str) -> Any:
        found = getattr(re.compile(*self._written), name)
        setattr(self, name, found)
        return found
