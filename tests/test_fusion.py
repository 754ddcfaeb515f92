"""What a score is made of: meaning, words and neighbours in cosine units, times what corrections made of the chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.recall.fusion import Evidence, Parts, fuse

MIN_SCORE = 0.2

evidences = st.lists(
    st.builds(
        Evidence,
        cosine=st.floats(-1, 1),
        multiplier=st.sampled_from([0.2, 1.0, 1.5, 57.7]),
        lexical=st.floats(0, 50),
        coverage=st.floats(0, 1),
        is_exact=st.booleans(),
        neighbours=st.just(()),
    ),
    max_size=20,
)


def linked(evidence: list[Evidence]) -> list[Evidence]:
    """Each beside the one before and the one after."""
    last = len(evidence) - 1
    return [
        Evidence(
            one.cosine,
            one.multiplier,
            one.lexical,
            one.coverage,
            one.is_exact,
            tuple(other for other in (i - 1, i + 1) if 0 <= other <= last),
        )
        for i, one in enumerate(evidence)
    ]


def scores(evidence: list[Evidence], lexical_weight: float = 0.5, neighbour_weight: float = 0.0) -> list[float]:
    parts = fuse(evidence, lexical_weight=lexical_weight, neighbour_weight=neighbour_weight)
    return [part.score for part in parts]


@given(evidences)
def test_without_words_and_neighbours_it_is_exactly_the_cosine_times_the_multiplier(evidence: list[Evidence]) -> None:
    assert scores(linked(evidence), 0.0, 0.0) == [max(0.0, one.cosine or 0.0) * one.multiplier for one in evidence]


@given(evidences)
def test_where_nobody_has_a_word_of_the_question_it_is_the_cosine_too(evidence: list[Evidence]) -> None:
    wordless = [Evidence(one.cosine, one.multiplier) for one in evidence]
    assert scores(wordless, 0.5) == scores(wordless, 0.0)


@given(evidences, st.floats(0, 1), st.floats(0, 1))
def test_no_chunk_is_carried_beyond_the_best_cosine_unless_it_has_the_question_word_by_word(
    evidence: list[Evidence], lexical_weight: float, neighbour_weight: float
) -> None:
    parts = fuse(linked(evidence), lexical_weight=lexical_weight, neighbour_weight=neighbour_weight)
    highest = max((max(0.0, one.cosine or 0.0) for one in evidence), default=0.0)
    coverage = max((one.coverage for one in evidence), default=0.0)
    for part in parts:
        assert -1e-9 <= part.cosine + part.lexical + part.neighbours <= max(highest, coverage / 2) + 1e-9


@given(evidences)
def test_the_order_of_the_evidence_does_not_matter(evidence: list[Evidence]) -> None:
    assert scores(evidence[::-1]) == scores(evidence)[::-1]


def test_both_sides_count_half_each() -> None:
    both, meaning, words = Evidence(0.6, lexical=10, coverage=0.5), Evidence(0.6), Evidence(0.0, lexical=10)
    assert scores([both, meaning, words]) == pytest.approx([0.6, 0.3, 0.3])


def test_a_rare_identifier_wins_even_where_its_cosine_is_low() -> None:
    named = Evidence(0.02, lexical=9.0, coverage=0.6, is_exact=True)
    about = Evidence(0.7, lexical=4.0, coverage=0.3)
    first, second = scores([named, about])
    assert first > second > MIN_SCORE
    assert scores([named])[0] > MIN_SCORE, "also where nothing else is near"


def test_words_do_not_lift_noise() -> None:
    # A question about nothing that is stored: some chunks share a common word with it, none means anything near.
    noise = [Evidence(0.15, lexical=2.0, coverage=0.2), Evidence(0.12), Evidence(0.08, lexical=1.5, coverage=0.15)]
    assert max(scores(linked(noise), 0.5, 0.2)) < MIN_SCORE


def test_chance_words_hardly_push_meaning_aside() -> None:
    meaning, chance = Evidence(0.5), Evidence(0.05, lexical=1.0, coverage=0.05)
    first, second = scores([meaning, chance])
    assert first > 0.4 and second < MIN_SCORE


def test_what_stands_beside_a_good_chunk_gains_and_the_best_stays_what_it_was() -> None:
    evidence = [Evidence(0.6, neighbours=(1,)), Evidence(0.3, neighbours=(0,)), Evidence(0.3)]
    first, beside, alone = scores(evidence, neighbour_weight=0.2)
    assert first == pytest.approx(0.6)
    assert beside == pytest.approx((0.3 + 0.12) * 0.6 / 0.66)
    assert alone == pytest.approx(0.3 * 0.6 / 0.66)


def test_the_multiplier_acts_on_the_fused_value_and_not_on_neighbours() -> None:
    plain = [Evidence(0.4, lexical=3, coverage=1, neighbours=(1,)), Evidence(0.3, neighbours=(0,))]
    praised = [Evidence(0.4, 1.5, 3, 1, neighbours=(1,)), plain[1]]
    before, after = scores(plain, neighbour_weight=0.2), scores(praised, neighbour_weight=0.2)
    assert after == pytest.approx([before[0] * 1.5, before[1]])


def test_a_chunk_is_as_strong_as_its_meaning_alone_makes_it() -> None:
    evidence = [Evidence(0.5, lexical=9, coverage=1), Evidence(0.3), Evidence(0.3, 0.5), Evidence(0.1)]
    parts = fuse(evidence, lexical_weight=0.5, neighbour_weight=0.0)
    assert [one.score < MIN_SCORE for one in parts] == [False, True, True, True]
    assert [one.strength for one in parts] == pytest.approx([parts[0].score, 0.3, 0.15, 0.1])


def test_nothing_is_fused_to_nothing() -> None:
    assert fuse([], lexical_weight=0.5, neighbour_weight=0.2) == []
    assert fuse([Evidence(-0.5)], lexical_weight=0.5, neighbour_weight=0.2) == [
        Parts(-0.5, 0.0, 0.0, 0.0, 1.0, evidence=0.0)
    ]
