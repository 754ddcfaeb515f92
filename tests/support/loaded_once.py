"""The bundled model and the tokenizer's ranks are read once in a process, whoever asks for them how often.

Rule: both are the same for everybody: a text's vector does not depend on what was embedded before. A test of the
loading itself has the function that was here before, `__wrapped__`.
"""

from __future__ import annotations

import functools

from memd.conversation import tokens
from memd.embedding import local


def load_once() -> None:
    """Call it before modules are imported that take these functions by their names."""
    tokens.cl100k_base = functools.cache(tokens.cl100k_base)
    local.load_bundled = functools.cache(local.load_bundled)
