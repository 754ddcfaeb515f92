"""What a score is made of: meaning, words and neighbours in cosine units, times what corrections made of the chunk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.recall.fusion import Evidence, Parts, fuse

MIN_SCORE = 0.2


class Chunk(NamedTuple):
    """What there is of one chunk."""

    cosine: float
    multiplier: float = 1.0
    lexical: float = 0.0
    coverage: float = 0.0
    is_exact: bool = False
    neighbours: tuple[int, ...] = ()


def columns(chunks: list[Chunk]) -> Evidence:
    pairs = [(row, other) for row, chunk in enumerate(chunks) for other in chunk.neighbours]
    return Evidence(
        cosine=np.array([chunk.cosine for chunk in chunks], np.float64),
        multiplier=np.array([chunk.multiplier for chunk in chunks], np.float64),
        lexical=np.array([chunk.lexical for chunk in chunks], np.float64),
        coverage=np.array([chunk.coverage for chunk in chunks], np.float64),
        is_exact=np.array([chunk.is_exact for chunk in chunks], np.bool_),
        beside=np.array(pairs, np.intp).reshape(-1, 2),
    )


evidences = st.lists(
    st.builds(
        Chunk,
        cosine=st.floats(-1, 1),
        multiplier=st.sampled_from([0.2, 1.0, 1.5, 57.7]),
        lexical=st.floats(0, 50),
        coverage=st.floats(0, 1),
        is_exact=st.booleans(),
        neighbours=st.just(()),
    ),
    max_size=20,
)


def linked(evidence: list[Chunk]) -> list[Chunk]:
    """Each beside the one before and the one after."""
    last = len(evidence) - 1
    return [
        Chunk(
            one.cosine,
            one.multiplier,
            one.lexical,
            one.coverage,
            one.is_exact,
            tuple(other for other in (i - 1, i + 1) if 0 <= other <= last),
        )
        for i, one in enumerate(evidence)
    ]


def scores(evidence: list[Chunk], lexical_weight: float = 0.5, neighbour_weight: float = 0.0) -> list[float]:
    parts = fuse(columns(evidence), lexical_weight=lexical_weight, neighbour_weight=neighbour_weight)
    return [part.score for part in parts]


@given(evidences)
def test_without_words_and_neighbours_it_is_exactly_the_cosine_times_the_multiplier(evidence: list[Chunk]) -> None:
    assert scores(linked(evidence), 0.0, 0.0) == [max(0.0, one.cosine) * one.multiplier for one in evidence]


@given(evidences)
def test_where_nobody_has_a_word_of_the_question_it_is_the_cosine_too(evidence: list[Chunk]) -> None:
    wordless = [Chunk(one.cosine, one.multiplier) for one in evidence]
    assert scores(wordless, 0.5) == scores(wordless, 0.0)


@given(evidences, st.floats(0, 1), st.floats(0, 1))
def test_no_chunk_is_carried_beyond_the_best_cosine_unless_it_has_the_question_word_by_word(
    evidence: list[Chunk], lexical_weight: float, neighbour_weight: float
) -> None:
    parts = fuse(columns(linked(evidence)), lexical_weight=lexical_weight, neighbour_weight=neighbour_weight)
    highest = max((max(0.0, one.cosine) for one in evidence), default=0.0)
    coverage = max((one.coverage for one in evidence), default=0.0)
    for part in parts:
        assert -1e-9 <= part.cosine + part.lexical + part.neighbours <= max(highest, coverage / 2) + 1e-9


@given(evidences)
def test_the_order_of_the_evidence_does_not_matter(evidence: list[Chunk]) -> None:
    assert scores(evidence[::-1]) == scores(evidence)[::-1]


def test_both_sides_count_half_each() -> None:
    both, meaning, words = Chunk(0.6, lexical=10, coverage=0.5), Chunk(0.6), Chunk(0.0, lexical=10)
    assert scores([both, meaning, words]) == pytest.approx([0.6, 0.3, 0.3])


def test_a_rare_identifier_wins_even_where_its_cosine_is_low() -> None:
    named = Chunk(0.02, lexical=9.0, coverage=0.6, is_exact=True)
    about = Chunk(0.7, lexical=4.0, coverage=0.3)
    first, second = scores([named, about])
    assert first > second > MIN_SCORE
    assert scores([named])[0] > MIN_SCORE, "also where nothing else is near"


def test_words_do_not_lift_noise() -> None:
    # A question about nothing that is stored: some chunks share a common word with it, none means anything near.
    noise = [Chunk(0.15, lexical=2.0, coverage=0.2), Chunk(0.12), Chunk(0.08, lexical=1.5, coverage=0.15)]
    assert max(scores(linked(noise), 0.5, 0.2)) < MIN_SCORE


def test_chance_words_hardly_push_meaning_aside() -> None:
    meaning, chance = Chunk(0.5), Chunk(0.05, lexical=1.0, coverage=0.05)
    first, second = scores([meaning, chance])
    assert first > 0.4 and second < MIN_SCORE


def test_words_count_less_beside_a_model_that_finds_across_languages() -> None:
    evidence = [Chunk(0.6), Chunk(0.4, lexical=9.0, coverage=0.8)]
    assert order(evidence) == [1, 0] and order(evidence, crosses_languages=True) == [1, 0]
    few = [Chunk(0.6), Chunk(0.4, lexical=9.0, coverage=0.25)]
    assert order(few) == [1, 0], "a quarter of the question is no chance"
    assert order(few, crosses_languages=True) == [0, 1], "but the meaning knows better"


def order(evidence: list[Chunk], *, crosses_languages: bool = False) -> list[int]:
    parts = fuse(columns(evidence), lexical_weight=0.6, neighbour_weight=0.0, crosses_languages=crosses_languages)
    return sorted(range(len(parts)), key=lambda place: -parts[place].score)


def test_what_stands_beside_a_good_chunk_gains_and_the_best_stays_what_it_was() -> None:
    evidence = [Chunk(0.6, neighbours=(1,)), Chunk(0.3, neighbours=(0,)), Chunk(0.3)]
    first, beside, alone = scores(evidence, neighbour_weight=0.2)
    assert first == pytest.approx(0.6)
    assert beside == pytest.approx((0.3 + 0.12) * 0.6 / 0.66)
    assert alone == pytest.approx(0.3 * 0.6 / 0.66)


def test_the_multiplier_acts_on_the_fused_value_and_not_on_neighbours() -> None:
    plain = [Chunk(0.4, lexical=3, coverage=1, neighbours=(1,)), Chunk(0.3, neighbours=(0,))]
    praised = [Chunk(0.4, 1.5, 3, 1, neighbours=(1,)), plain[1]]
    before, after = scores(plain, neighbour_weight=0.2), scores(praised, neighbour_weight=0.2)
    assert after == pytest.approx([before[0] * 1.5, before[1]])


def test_a_chunk_is_as_strong_as_its_meaning_alone_makes_it() -> None:
    evidence = [Chunk(0.5, lexical=9, coverage=1), Chunk(0.3), Chunk(0.3, 0.5), Chunk(0.1)]
    parts = fuse(columns(evidence), lexical_weight=0.5, neighbour_weight=0.0)
    assert [one.score < MIN_SCORE for one in parts] == [False, True, True, True]
    assert [one.strength for one in parts] == pytest.approx([parts[0].score, 0.3, 0.15, 0.1])


def test_nothing_is_fused_to_nothing() -> None:
    assert fuse(columns([]), lexical_weight=0.5, neighbour_weight=0.2) == []
    assert fuse(columns([Chunk(-0.5)]), lexical_weight=0.5, neighbour_weight=0.2) == [
        Parts(-0.5, 0.0, 0.0, 0.0, 1.0, evidence=0.0)
    ]
