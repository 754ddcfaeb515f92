"""The title that a document says it has.

Rule: pure. Programs put the name of a file there, or their own: such a title is none.
"""

from __future__ import annotations

import re

_NO_TITLE = re.compile(
    r"(?:microsoft|libreoffice|openoffice)\b.*|(?:untitled|unbenannt|document|presentation|slide|word document|"
    r"powerpoint presentation|pptx presentation|\(?anonymous\)?)[ \d]*|.*\.[a-z]{2,5}",
    re.IGNORECASE,
)


def title_of(said: str | None) -> str:
    """Return the title on one line; empty if there is none."""
    title = " ".join((said or "").split())
    return "" if _NO_TITLE.fullmatch(title) else title
