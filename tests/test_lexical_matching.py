"""Counting terms in many texts at once gives what counting them one by one gives."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from memd.store.lexical.matching import JoinedTexts

# Alike for seven, eight and nine bytes; of one letter; of letters with several bytes; and one that no text can have.
NAMES = ("a", "ab", "abcdefg", "abcdefgh", "abcdefghi", "abcdefghij", "é", "éa", "日", "日本", "src/a.py", "\0de", "1")
TERMS = st.lists(st.sampled_from(NAMES), max_size=30)


@given(
    st.lists(TERMS, max_size=5),
    st.lists(st.lists(st.sampled_from(NAMES), unique=True, max_size=3), max_size=6),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_a_term_is_counted_in_each_text_as_often_as_it_has_it_however_they_were_joined(
    chunks: list[list[str]], wanted: list[list[str]], cuts: list[int]
) -> None:
    texts = [f" {'  '.join(names)} " for names in chunks]
    counts = [[sum(names.count(name) for name in group) for names in chunks] for group in wanted]
    ends = [0, *sorted(cuts), len(texts)]
    parts = [JoinedTexts.of(texts[begin:end]) for begin, end in itertools.pairwise(ends)]
    found = JoinedTexts.joined(parts).frequencies(wanted)
    assert found.tolist() == JoinedTexts.of(texts).frequencies(wanted).tolist() == counts
    assert found.shape == (len(wanted), len(chunks))
