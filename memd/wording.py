"""Numbers and what they count, as people write them.

Rule: only for what people read; nothing is parsed back from it.
"""

from __future__ import annotations

from collections.abc import Mapping

_PLURALS = {"entry": "entries"}


def counted(number: int, noun: str) -> str:
    """`1 topic`, `2 topics`, `1,000 entries`."""
    return f"{number:,} {noun if number == 1 else _PLURALS.get(noun, noun + 's')}"


def tallied(counts: Mapping[str, int]) -> str:
    """`api_key 2, password 1`."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())
