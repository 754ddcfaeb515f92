"""Patterns that are compiled late."""

from __future__ import annotations

import re

import pytest

from memd.patterns import late_pattern


def test_a_late_pattern_is_compiled_when_it_is_first_used_and_is_then_as_any_other() -> None:
    broken, word = late_pattern("("), late_pattern("[a-z]+", re.IGNORECASE)
    with pytest.raises(re.error):
        broken.search("(")
    assert [word.findall("One, two"), word.findall("three")] == [["One", "two"], ["three"]]
    assert (word.pattern, word.groups) == ("[a-z]+", 0)
