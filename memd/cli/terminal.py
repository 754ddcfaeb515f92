"""Output to terminals and files that cannot show every character.

Rule: no text that is stored ends a command; what an encoding lacks is replaced.
"""

from __future__ import annotations

import codecs
import io
from typing import TextIO

_LIKENESSES = str.maketrans(dict(zip("█░▸▪–—“”‘’", "#.>*--\"\"''", strict=True)) | {"…": "..."})


def show_what_it_can(stream: TextIO) -> None:
    """Let a stream show a character that its encoding lacks as one that looks like it, or as `?`."""
    codecs.register_error("likeness", _likeness)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="likeness")


def _likeness(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end].translate(_LIKENESSES)
    return "".join(one if one.isascii() else "?" for one in lacking), error.end
