"""The rules of a `.gitignore`, as git reads them.

Rule: whoever wrote a folder's `.gitignore` need not be trusted: no rule takes longer than the square of a path's
length, and what git cannot read is no rule.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

BYTES_MAX = 100_000
"""Of one `.gitignore`; those of large projects have a tenth of it."""
_STAR = r"\[\^/\]\*"
_FIXED = r"(?:\[\^?\]?[^\]/]*\]|\[\^/\](?!\*)|\\.|[^/\\(\[])*"
"""Between two stars of a component: brackets, `?`, escaped and plain characters."""
_STAR_BEFORE_ANOTHER = re.compile(f"{_STAR}({_FIXED})(?={_STAR})")
_LEADING, _INNER = "^(?:.+/)?", "(?:/.+)?"
"""The expressions of `**/` and `/**/`. No component has a `/`: neither they nor a star can be a rule's own words."""


class _SteadyPattern(GitIgnoreSpecPattern):
    """A rule whose wildcards are never tried anew once what follows them, up to the next one, was found."""

    @classmethod
    def pattern_to_regex(cls, pattern: Any) -> tuple[Any, bool | None]:
        regex, include = super().pattern_to_regex(pattern)
        return regex and _steady(regex), include


def rules_of(path: str) -> GitIgnoreSpec:
    """Read a `.gitignore`.

    Raises:
        OSError: it cannot be read, or is too long for one.
    """
    with Path(path).open("rb") as file:
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise OSError(errno.EFBIG, f"its .gitignore has more than {BYTES_MAX:,} bytes", path)
    lines = content.decode("utf-8", errors="replace").splitlines()
    return GitIgnoreSpec.from_lines(filter(_is_rule, lines), _SteadyPattern)


def _is_rule(line: str) -> bool:
    """Whether git would take a line of `.gitignore` for a rule; it passes over others (`!`, `[z-a]`)."""
    try:
        _SteadyPattern(line)
    except (ValueError, re.error):
        return False
    return True


def _steady(regex: str) -> str:
    """The expression with atomic groups, as those of `fnmatch.translate`: the first place where the words between two
    wildcards stand leaves most to the rest, so no other has to be tried."""
    first, *others = _STAR_BEFORE_ANOTHER.sub(r"(?>[^/]*?\1)", regex).split(_INNER)
    if not others:
        return first
    if first.startswith(_LEADING):
        first = f"^(?>(?:[^/]+/)*?{first.removeprefix(_LEADING)}(?=/))"
    inner = "".join(f"(?>(?:/[^/]+)*?{one}(?=/))" for one in others[:-1])
    return f"{first}{inner}{_INNER}{others[-1]}"
