"""Which chunks are shown: the best by score, as far as the budget reaches, in the order in which they were said."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import pytest
from candidates import candidate, entry
from hypothesis import given
from hypothesis import strategies as st

from memd.embedding.embedder import Prior
from memd.entries import Section, Speaker
from memd.recall.filling import select
from memd.recall.ranking import Candidate, Demands, Ranked, Verdict, is_visible, rank
from memd.settings.model import RetrievalSettings

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def best(
    candidates: Sequence[Candidate],
    *,
    min_score: float = 0.2,
    top_k: int = 32,
    visible_digests: Collection[bytes] = (),
) -> list[Candidate]:
    ranked = rank(candidates, demands=Demands(min_score=min_score, top_k=top_k), visible_digests=visible_digests)
    return [one.candidate for one in ranked if one.excluded is None]


def worth_showing(candidates: Sequence[Candidate]) -> list[Ranked]:
    return [Ranked(one) for one in candidates]


def contents(candidates: Sequence[Candidate]) -> list[str]:
    return [one.entry.content for one in candidates]


def shown(candidates: Sequence[Candidate], budget: int, frame: int = 0) -> list[str]:
    """What `select` shows where a chunk costs as many tokens as its content has characters."""
    selection = select(
        worth_showing(candidates),
        budget_tokens=budget,
        frame_tokens=frame,
        cost=lambda one, _: len(one.entry.content),
    )
    return contents(selection.shown)


def test_chunks_come_best_first() -> None:
    found = [candidate("1", 0.3, "low"), candidate("2", 0.9, "high"), candidate("3", 0.5, "middle")]
    assert contents(best(found)) == ["high", "middle", "low"]


def test_of_equal_scores_the_newer_entry_comes_first() -> None:
    found = [candidate(str(at), 0.5, content, at=at) for at, content in ((9, "newer"), (3, "older"), (12, "newest"))]
    assert contents(best(found)) == ["newest", "newer", "older"]
    assert contents(best(found, top_k=1)) == ["newest"]


def test_the_minimum_score_is_enough_and_less_is_not() -> None:
    # 0.198 is what a perfect match scores at the floor of utility: invisible, as intended.
    found = [candidate("1", 0.2, "enough"), candidate("2", 1.5**-4, "floor"), candidate("3", float("nan"), "broken")]
    assert contents(best(found)) == ["enough"]


def with_parts(one: Candidate, **parts: float) -> Candidate:
    return msgspec.structs.replace(one, parts=msgspec.structs.replace(one.parts, **parts))


def test_a_weak_chunk_that_is_listed_too_breaks_no_silence() -> None:
    unsupported = candidate("1", 0.3, "unsupported")
    then = candidate("2", 0.1, "said when the question says")
    then = with_parts(then, evidence=0.1, time=3.0, multiplier=0.1)
    unsupported = with_parts(unsupported, evidence=0.1)
    demands = Demands(min_score=0.2, top_k=9, min_evidence=0.22)
    ranked = rank([unsupported, then], demands=demands, visible_digests=())
    assert {one.excluded for one in ranked} == {Verdict.UNSUPPORTED, Verdict.WEAK}


def shows(one: Candidate, question: str, prior: Prior | None, chunks: int = 200) -> bool:
    """Whether this only chunk is shown."""
    demands = Demands.of(RetrievalSettings(), question, 1, has_words=True, prior=prior, chunks=chunks)
    [ranked] = rank([one], demands=demands, visible_digests=())
    return ranked.excluded is None


ACROSS = Prior(kind=0.9, spread=0.175, across=0.15)


@pytest.mark.parametrize(
    ("question", "prior", "is_shown"),
    [
        ("Wann reisen wir nach Portugal?", ACROSS, True),
        ("Wann reisen wir nach Portugal?", ACROSS._replace(across=None), False),
        ("When do we travel to Portugal?", ACROSS, False),
        ("Wann reisen wir nach Portugal?", ACROSS._replace(kind=0.3), False),
    ],
)
def test_in_another_language_than_the_question_a_chunk_may_be_less_like_it(
    question: str, prior: Prior, is_shown: bool
) -> None:
    found = with_parts(candidate("1", 0.2, "The flight to Lisbon leaves on the ninth of May."), evidence=0.1)
    assert shows(found, question, prior) == is_shown


def test_a_question_that_does_not_sound_like_one_to_memory_needs_a_nearer_chunk() -> None:
    prior, question = Prior(0.4, 0.175, None), "What time is it in Hanoi?"
    assert not shows(with_parts(candidate("1", 0.6), evidence=0.5), question, prior)
    assert shows(with_parts(candidate("1", 0.8), evidence=0.5), question, prior)
    assert shows(with_parts(candidate("1", 0.6), evidence=0.5), question, prior._replace(kind=0.9))
    assert shows(with_parts(candidate("1", 0.6), evidence=0.5), question, None), "the model tells no kinds"


def test_the_nearest_of_many_chunks_must_be_nearer() -> None:
    found, prior = with_parts(candidate("1", 0.3), evidence=0.1), Prior(0.8, 0.175, None)
    assert [shows(found, "Who is it that sings?", prior, chunks) for chunks in (0, 12, 200)] == [True, True, False]
    assert shows(with_parts(candidate("1", 0.5), evidence=0.1), "Who is it that sings?", prior, 10**6)


def test_the_kind_of_a_question_does_not_matter_to_names_words_and_chunks_without_a_vector() -> None:
    prior, weak = Prior(0.0, 0.175, None), candidate("1", 0.3)
    assert shows(with_parts(weak, evidence=1.0), "What on earth is ERR_7421?", prior), "a rare identifier"
    assert shows(with_parts(weak, evidence=0.6, coverage=1.0), "ladder?", prior), "all words of a terse question"
    assert not shows(with_parts(weak, evidence=0.6, coverage=1.0), "Who would say a ladder?", prior)
    pending = with_parts(weak, similarity=0.0, words_alone=0.3, evidence=0.25)
    assert shows(pending, "Who would say a ladder?", prior)


def test_no_minimum_of_evidence_shows_whatever_the_kind_is() -> None:
    prior, settings = Prior(-1.0, 0.175, 0.15), RetrievalSettings(min_evidence=0)
    demands = Demands.of(settings, "What time is it?", 1, has_words=True, prior=prior, chunks=9)
    [ranked] = rank([with_parts(candidate("1", 0.3), evidence=0.1)], demands=demands, visible_digests=())
    assert ranked.excluded is None


def test_a_question_of_a_word_or_two_needs_less_evidence() -> None:
    found = with_parts(candidate("1", 0.3, "I grew up in Toulouse."), evidence=0.194)
    assert shows(found, "hometown?", None)
    assert not shows(found, "What is the hometown of them?", None)


def test_only_the_best_k_are_worth_showing() -> None:
    found = [candidate(str(number), 0.3 + number / 100, at=number) for number in range(9)]
    assert [one.entry.canonical_id for one in best(found, top_k=3)] == [8, 7, 6]


def test_what_the_prompt_says_itself_takes_no_place_among_the_best() -> None:
    found = [
        candidate("2", 0.8, "in the prompt", digests=(A, B)),
        candidate("3", 0.7, "half in the prompt", digests=(A, C)),
        candidate("4", 0.6, "elsewhere", digests=(C,)),
    ]
    assert contents(best(found, top_k=2, visible_digests={A, B})) == ["half in the prompt", "elsewhere"]


def test_a_chunk_that_a_block_shows_already_keeps_its_place_in_the_budget_and_is_not_shown_twice() -> None:
    found = [candidate("1", 0.9, "x" * 10), candidate("2", 0.8, "y" * 10), candidate("3", 0.7, "z" * 10)]
    selection = select(
        worth_showing(found),
        budget_tokens=20,
        frame_tokens=0,
        cost=lambda one, _: 10,
        shown_uuids={found[0].entry.uuid},
    )
    assert contents(selection.shown) == ["y" * 10]
    assert [one.verdict for one in selection.judged] == [Verdict.EARLIER, Verdict.INJECTED, Verdict.NO_ROOM]
    assert selection.fill_ratio == 1.5


def test_what_finds_no_room_may_be_guessed() -> None:
    found = [candidate("1", 0.9, "x" * 10), candidate("2", 0.8, "y" * 10), candidate("3", 0.7, "z" * 5)]
    asked: list[int] = []

    def cost(one: Candidate, left: int) -> int:
        asked.append(left)
        exact = len(one.entry.content)
        return exact if exact <= left else left + 1

    selection = select(worth_showing(found), budget_tokens=20, frame_tokens=2, cost=cost)
    assert (contents(selection.shown), asked) == (["x" * 10, "z" * 5], [18, 8, 8])
    assert selection.fill_ratio > 1


def test_a_chunk_is_visible_only_with_all_its_messages() -> None:
    assert is_visible(entry("1", digests=(A, B)), {A, B, C})
    assert not is_visible(entry("1", digests=(A, B)), {A})
    assert not is_visible(entry("1", digests=()), {A}), "a chunk that came from no message never is"


def test_chunks_are_read_in_the_order_in_which_they_were_said_whenever_they_were_stored() -> None:
    found = [candidate("1", 0.9, "imported", at=9, said_at=2), candidate("2", 0.5, "live", at=3, said_at=3)]
    assert shown(found, budget=100) == ["imported", "live"]


@given(
    costs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), max_size=12),
    budget=st.integers(1, 80),
    frame=st.integers(0, 5),
)
def test_the_line_of_a_day_is_paid_once_and_never_exceeds_the_budget(
    costs: list[tuple[int, int, bool]], budget: int, frame: int
) -> None:
    found = [
        candidate(f"{n:x}", 0.9 - n / 50, "x" * cost, public_id=f"{day}000") for n, (cost, day, _) in enumerate(costs)
    ]
    earlier = {one.entry.uuid for one, (_, _, is_earlier) in zip(found, costs, strict=True) if is_earlier}
    selection = select(
        worth_showing(found),
        budget_tokens=budget,
        frame_tokens=frame,
        cost=lambda one, _: len(one.entry.content),
        day=lambda one: (one.entry.public_id, 4),
        shown_uuids=earlier,
    )
    days = {one.entry.public_id for one in selection.shown}
    taken = frame + sum(len(one.entry.content) for one in selection.shown) + 4 * len(days)
    assert not selection.shown or taken <= budget
    new = [one for one in found if one.entry.uuid not in earlier]
    if len(selection.shown) < len(new):
        assert selection.fill_ratio > 1
    elif found and sum(one.verdict is Verdict.EARLIER for one in selection.judged) == 0:
        assert selection.fill_ratio <= 1


def test_chunks_are_read_in_the_order_in_which_they_were_said() -> None:
    # Praise does not make an old statement look new: the entry is new, its origin is not.
    praised = candidate("3", 0.7, "first", at=9, origin_id=1)
    found = [candidate("1", 0.9, "second", at=2), candidate("2", 0.8, "third", at=3), praised]
    assert shown(found, 100) == ["first", "second", "third"]


def test_a_chunk_that_does_not_fit_is_skipped_and_the_next_one_tried() -> None:
    found = [candidate("1", 0.9, "x" * 6, at=1), candidate("2", 0.8, "y" * 5, at=2), candidate("3", 0.7, "z" * 4, at=3)]
    assert shown(found, 10) == ["xxxxxx", "zzzz"]
    assert shown(found, 9) == ["xxxxxx"]
    assert shown(found, 5) == ["yyyyy"]


def test_the_frame_is_part_of_the_budget() -> None:
    found = [candidate("1", 0.9, "x" * 6)]
    assert shown(found, 10, frame=4) == ["xxxxxx"]
    assert shown(found, 10, frame=5) == []


@pytest.mark.parametrize("budget", [0, -5])
def test_without_a_budget_nothing_is_shown_and_nothing_is_signalled(budget: int) -> None:
    selection = select(worth_showing([candidate("1")]), budget_tokens=budget, frame_tokens=0, cost=lambda one, _: 1)
    assert selection.shown == () and selection.fill_ratio == 0.0


def test_where_nothing_was_found_the_budget_is_empty() -> None:
    selection = select([], budget_tokens=10, frame_tokens=4, cost=lambda one, _: 1)
    assert selection.shown == () and selection.fill_ratio == 0.0


def test_the_fill_ratio_counts_what_does_not_fit_as_well() -> None:
    found = [candidate(str(number)) for number in range(3)]
    assert select(
        worth_showing(found), budget_tokens=20, frame_tokens=5, cost=lambda one, _: 10
    ).fill_ratio == pytest.approx(1.75)
    assert select(worth_showing(found), budget_tokens=35, frame_tokens=5, cost=lambda one, _: 10).fill_ratio == 1.0


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 120), st.integers(0, 20))
def test_the_budget_is_never_exceeded_and_overflow_means_that_something_is_missing(
    costs: list[int], budget: int, frame: int
) -> None:
    found = [candidate(f"{number:x}", 1 - number / 100, "x" * cost, at=number) for number, cost in enumerate(costs)]
    selection = select(
        worth_showing(found), budget_tokens=budget, frame_tokens=frame, cost=lambda one, _: len(one.entry.content)
    )
    used = sum(len(one.entry.content) for one in selection.shown)
    assert not selection.shown or used + frame <= budget
    assert (selection.fill_ratio > 1) == (len(selection.shown) < len(found))
    left_over = [one for one in found if one not in selection.shown]
    assert all(len(one.entry.content) + used + frame > budget for one in left_over)


def test_a_repetition_is_seen_among_many() -> None:
    found = [candidate(f"{number:04x}", 0.9 - number / 1000, at=number) for number in range(70)]
    again = candidate("other", 0.3, at=1, vector=found[69].entry.vector)
    assert len(best([*found, again], top_k=100)) == 70


def test_what_nearly_repeats_a_better_chunk_is_not_shown_and_gives_its_place_to_the_next() -> None:
    said = candidate("1", 0.9, "said")
    again = candidate("2", 0.8, "said again", vector=said.entry.vector)
    other = candidate("3", 0.7, "something else")
    assert contents(best([again, other, said], top_k=2)) == ["said", "something else"]


def versions(*told: tuple[str, float, float]) -> list[Candidate]:
    """Chunks with one vector, each said after the one before: content, score, and how much of the question it has."""
    vector = entry("file").vector
    found = [
        candidate(f"{at:x}", score, content, at=at, vector=vector) for at, (content, score, _) in enumerate(told, 1)
    ]
    return [with_parts(one, coverage=coverage) for one, (_, _, coverage) in zip(found, told, strict=True)]


def test_of_what_is_nearly_the_same_the_best_and_the_newest_are_shown() -> None:
    found = versions(("port 1", 0.6, 0.5), ("port 2", 0.8, 0.5), ("port 3", 0.7, 0.5), ("port 4", 0.5, 0.5))
    other = candidate("other", 0.4, "something else", at=9)
    assert contents(best([*found, other])) == ["port 4", "port 2", "something else"]
    assert contents(best([*found, other], top_k=2)) == ["port 3", "port 2"], "port 4 is beyond it"
    found = versions(("port 1", 0.8, 0.5), ("port 2", 0.7, 0.5))
    assert contents(best(found, top_k=1)) == ["port 1"]


def test_of_the_same_words_in_the_same_order_the_newer_is_shown_alone() -> None:
    assert contents(best(versions(("port  is 1", 0.8, 0.5), ("port is 1", 0.7, 0.5)))) == ["port is 1"]
    of_two_topics = versions(("port  is 1", 0.8, 0.6), ("port is 1", 0.7, 0.5))
    assert contents(best(of_two_topics)) == ["port is 1"], "in each of them words weigh something else"
    assert contents(best(versions(("port is 1", 0.8, 0.5), ("is port 1", 0.7, 0.5)))) == ["is port 1", "port is 1"]
    by_others = versions(("port is 1", 0.8, 0.5))[0], versions(("", 0.1, 0.1), ("port is 1", 0.7, 0.5))[1]
    said = [
        msgspec.structs.replace(one, entry=msgspec.structs.replace(one.entry, speakers=(Speaker(0, role),)))
        for one, role in zip(by_others, ("user", "assistant"), strict=True)
    ]
    assert len(best(said)) == 2, "it matters who says it"


def test_the_row_of_a_table_that_is_asked_for_is_shown_beside_rows_that_are_like_it() -> None:
    rows = [("Oslo 12", 0.5, 0.3), ("Riga 14", 0.8, 0.3), ("Bonn 17", 0.4, 0.9), ("Kyiv 19", 0.3, 0.3)]
    assert contents(best(versions(*rows))) == ["Bonn 17", "Kyiv 19", "Riga 14"]
    rows[1] = ("Riga 14", 0.8, 0.9)
    assert contents(best(versions(*rows))) == ["Riga 14", "Kyiv 19"]


def test_where_there_is_room_for_one_version_it_is_the_one_that_is_asked_for_else_the_newest() -> None:
    found = versions(("port 1", 0.8, 0.5), ("port 2", 0.7, 0.5))
    assert shown(best(found), budget=6) == ["port 2"]
    found = versions(("port 1", 0.8, 0.9), ("port 2", 0.7, 0.5))
    assert shown(best(found), budget=6) == ["port 1"]
    assert shown(best(found), budget=12) == ["port 1", "port 2"], "in the order in which it was said"


@pytest.mark.parametrize("score", [0.5, 0.1], ids=["beyond top_k", "below min_score"])
def test_a_newest_version_that_was_looked_for_is_shown_however_it_matches(score: float) -> None:
    old, new = versions(("port 1", 0.9, 0.5), ("port 2", score, 0.5))
    other = candidate("other", 0.8, "something else")
    newest = {new.entry.uuid: old.entry.uuid}

    def ranked(new: Candidate, newest: dict[bytes, bytes]) -> list[str]:
        demands = Demands(min_score=0.2, min_share=0.2, top_k=2)
        found = rank([old, new, other], demands=demands, visible_digests=(), newest=newest)
        return contents([one.candidate for one in found if one.excluded is None])

    assert ranked(new, newest) == ["port 2", "port 1", "something else"]
    assert ranked(new, {}) == ["port 1", "something else"]
    assert ranked(with_parts(new, multiplier=0.5), newest) == ["port 1", "something else"], "it was found unhelpful"
    assert ranked(new, {new.entry.uuid: b"unknown"}) == ["port 1", "something else"]
    without_vector = msgspec.structs.replace(new, entry=msgspec.structs.replace(new.entry, vector=b""))
    assert ranked(without_vector, newest) == ["port 2", "port 1", "something else"]


def test_what_only_repeats_what_it_was_shown_is_not_the_newest() -> None:
    found = versions(("port 1", 0.9, 0.5), ("port 2", 0.8, 0.5), ("port 1, as you said", 0.7, 0.5))
    found[2] = msgspec.structs.replace(found[2], is_echo=True)
    assert contents(best(found)) == ["port 2", "port 1"]


def test_what_repeats_a_chunk_of_another_kind_or_source_is_a_witness_of_its_own() -> None:
    said = candidate("1", 0.9, "said")
    vector = said.entry.vector
    page = candidate("2", 0.8, "page", vector=vector, kind="document", source="a.md")
    copy = candidate("3", 0.7, "copy", vector=vector, kind="document", source="b.md")
    again = candidate("4", 0.6, "again", vector=vector, kind="document", source="a.md")
    assert contents(best([said, page, copy, again])) == ["said", "page", "copy"]


def test_a_copy_of_a_document_is_no_witness_but_the_same_words_below_another_heading_are() -> None:
    def page(name: str, score: float, source: str, heading: str) -> Candidate:
        part = Section(hash=source.encode(), heading=(heading,))
        return candidate(name, score, "Twenty days.", kind="document", source=source, part=part)

    found = [page("1", 0.9, "a.md", "Leave"), page("2", 0.8, "copy/a.md", "Leave"), page("3", 0.7, "b.md", "Delivery")]
    assert [one.entry.source for one in best(found)] == ["a.md", "b.md"]
    noted = [candidate(str(number), 0.9, "Twenty days.", kind="note", at=number) for number in range(2)]
    assert len(best([*found, *noted])) == 4, "a note with these words is one"


def test_what_another_block_shows_takes_nothing_of_the_room_for_this_one() -> None:
    found = [candidate(str(number), 0.9 - number / 10, "x" * 6, at=number) for number in range(4)]
    shown = {found[0].entry.uuid}
    selection = select(
        worth_showing(found),
        budget_tokens=20,
        frame_tokens=2,
        cost=lambda one, _: len(one.entry.content),
        shown_uuids=shown,
        block_tokens=8,
    )
    earlier, new, *no_room = (one.verdict for one in selection.judged)
    assert (earlier, new, set(no_room)) == (Verdict.EARLIER, Verdict.INJECTED, {Verdict.NO_ROOM})
    assert selection.fill_ratio == (2 + 3 * 6) / 8
