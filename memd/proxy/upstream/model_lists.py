"""The lists of models of several servers as one list.

Rule: pure. A model that several have stands there once, as the first server describes it; a list's other members are
the first server's, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PATHS = frozenset({"/v1/models", "/models", "/api/v0/models", "/api/tags", "/api/ps"})
"""Where servers list their models: OpenAI's API, llama-server's short form of it, LM Studio's, Ollama's two."""
_FIELDS = ("data", "models")
_NAMES = ("id", "model", "name")


def merged(answers: Iterable[Any]) -> dict[str, Any] | None:
    """Put the answers of the servers together, in order; None if none is a list."""
    whole: dict[str, Any] | None = None
    for answer in answers:
        if not isinstance(answer, dict) or not any(isinstance(answer.get(field), list) for field in _FIELDS):
            continue
        if whole is None:
            whole = dict(answer)
            continue
        for field in _FIELDS:
            listed, more = whole.get(field), answer.get(field)
            if isinstance(listed, list) and isinstance(more, list):
                known = set(map(_name, listed))
                whole[field] = [*listed, *(card for card in more if _name(card) not in known)]
    return whole


def _name(card: Any) -> str | None:
    """The name of a model; None if it has none."""
    names = (card.get(field) for field in _NAMES) if isinstance(card, dict) else ()
    return next((name for name in names if isinstance(name, str)), None)
