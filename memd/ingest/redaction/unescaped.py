r"""A text as its reader sees it: `\n` in a string of JSON is a line's end, `\u00fc` is ü.

Rule: finders that look at whole words look at this text, and their spans are given in the places of the original one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from memd.ingest.redaction.spans import Find, Span

_ESCAPE = re.compile(
    r"\\{1,15}+(?:u(?P<high>d[89ab][0-9a-f]{2})\\{1,15}+u(?P<low>d[c-f][0-9a-f]{2})|u(?P<code>[0-9a-f]{4})|[nrtbf])",
    re.IGNORECASE,
)


def in_unescaped(find: Find) -> Find:
    """A finder that looks at a text's unescaped form."""

    def found(text: str) -> Iterator[Span]:
        escapes = list(_ESCAPE.finditer(text)) if "\\" in text else []
        if not escapes:
            yield from find(text)
            return
        parts, position = [], 0
        for escape in escapes:
            parts += [text[position : escape.start()], _character(escape)]
            position = escape.end()
        # Behind each escape, which is one character now, the original place is further on by what was left out.
        places = [
            escape.start() - left_out
            for escape, left_out in zip(escapes, _before(map(_left_out, escapes)), strict=True)
        ]
        shifts = [0, *accumulate(map(_left_out, escapes))]
        for start, end in find("".join([*parts, text[position:]])):
            yield start + shifts[bisect_left(places, start)], end + shifts[bisect_left(places, end)]

    return found


def _left_out(escape: re.Match[str]) -> int:
    return escape.end() - escape.start() - 1


def _before(counts: Iterable[int]) -> Iterator[int]:
    """The sum of the counts before each one."""
    total = 0
    for count in counts:
        yield total
        total += count


def _character(escape: re.Match[str]) -> str:
    if escape["high"]:
        return chr(0x10000 + ((int(escape["high"], 16) - 0xD800) << 10) + int(escape["low"], 16) - 0xDC00)
    return chr(int(escape["code"], 16)) if escape["code"] else " "
