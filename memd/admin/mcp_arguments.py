"""Wrong arguments of a tool, as sentences after which a model calls it right.

Rule: pure. It reads pydantic's list of errors (https://docs.pydantic.dev/latest/errors/validation_errors/) and never
repeats more of a value than its beginning: arguments are the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VALUE_CHARACTERS_MAX = 40
_MEANT = {
    "missing": "is missing",
    "string_type": "is no text; give a text",
    "string_too_short": "is empty; give a text",
    "list_type": 'is no list; give a list, as ["a3f9"]',
    "too_short": "is empty; give one or more",
    "int_type": "is no whole number",
    "int_parsing": "is no whole number",
    "int_from_float": "is no whole number",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
}
"""By the type of an error, the words behind the argument's name."""
_BOUNDS = {
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "greater_than_equal": ("ge", "at least"),
}


def wrong_arguments(tool: str, errors: Iterable[Mapping[str, Any]], known: Sequence[str]) -> str:
    """Return what is wrong with the arguments of a call.

    Args:
        errors: as of pydantic's `ValidationError.errors()`.
        known: the arguments that the tool takes.
    """
    told = "; ".join(dict.fromkeys(_sentence(error) for error in errors))
    return f"{tool} was not called: {told}. It takes {', '.join(known) or 'no arguments'}."


def unknown_arguments(tool: str, unknown: Iterable[str], known: Sequence[str]) -> str:
    """Return that a tool has no arguments of these names."""
    return wrong_arguments(tool, ({"type": "unknown", "loc": (name,), "input": None} for name in unknown), known)


def _sentence(error: Mapping[str, Any]) -> str:
    kind, context = str(error["type"]), error.get("ctx") or {}
    name = str(error["loc"][0])[:VALUE_CHARACTERS_MAX] if error["loc"] else "an argument"
    shown = repr(error["input"])
    shown = shown if len(shown) <= VALUE_CHARACTERS_MAX else f"{shown[:VALUE_CHARACTERS_MAX]} …"
    if kind == "unknown":
        return f"there is no argument {name}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{name} is {shown}; give {words} {context[bound]}"
    if kind == "literal_error":
        return f"{name} is {shown}; give {context['expected']}"
    return f"{name} {_MEANT.get(kind, f'is {shown}, which it cannot be')}"
